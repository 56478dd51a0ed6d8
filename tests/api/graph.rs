//! Graphs: on every OpenCL device, replays compute the same values as the captured calls.

use claystone::device::count_launches;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::storage::{MemPool, MemPoolOptions, MemoryMode, with_memory_mode};
use claystone::{Device, Error, Graph, Result, Stream, Tensor, no_grad, with_stream};

use crate::common;
use crate::common::{opencl, vec};

fn ramp(n: usize, shape: &[usize], scale: f32, device: Device) -> Tensor {
    let values: Vec<f32> = (0..n).map(|i| ((i * 37 + 11) % 101) as f32 / 101.0 * scale - scale / 2.0).collect();
    Tensor::from_slice(&values, shape, device).unwrap()
}

/// The training of a multilayer perceptron with fixed initial weights.
struct Training {
    net: Sequential,
    sgd: Sgd,
    x: Tensor,
    y: Tensor,
}

impl Training {
    fn new(device: Device) -> Training {
        let layer = |inputs: usize, outputs: usize| {
            let layer = Linear::new(inputs, outputs, device).unwrap();
            no_grad(|| {
                layer.weight().copy_(&ramp(inputs * outputs, &[outputs, inputs], 0.4, device)).unwrap();
                layer.bias().unwrap().copy_(&ramp(outputs, &[outputs], 0.1, device)).unwrap();
            });
            layer
        };
        let mut net = Sequential::new().push(layer(40, 24).with_activation(Activation::Relu)).push(layer(24, 10));
        let config = SgdConfig { lr: 0.1, momentum: 0.9, ..Default::default() };
        let sgd = Sgd::new(net.parameters_mut(), config).unwrap();
        let labels: Vec<i64> = (0..32).map(|i| i * 7 % 10).collect();
        let y = Tensor::from_slice(&labels, 32, device).unwrap();
        Training { net, sgd, x: ramp(32 * 40, &[32, 40], 2.0, device), y }
    }

    fn step(&mut self) -> Result<Tensor> {
        self.sgd.zero_grad();
        let loss = self.net.forward(&self.x)?.cross_entropy(&self.y)?;
        loss.backward()?;
        self.sgd.step()?;
        Ok(loss)
    }

    fn weights(&self) -> Vec<Vec<f32>> {
        self.net.parameters().into_iter().map(vec).collect()
    }
}

#[test]
fn replays_match_eager_training_steps() {
    // Graphs capture kernels that read buffers. Eager steps use buffers here too, because kernels that read images would round
    // differently.
    with_memory_mode(MemoryMode::Buffer, train_both);
}

fn train_both() {
    for device in opencl() {
        let (mut eager, mut replayed) = (Training::new(device), Training::new(device));
        let before = replayed.weights();
        let ((graph, loss), launches) = count_launches(|| Graph::capture(device, || replayed.step()).unwrap());
        assert_eq!(launches, 0, "a capture launches nothing on {device}");
        assert_eq!(replayed.weights(), before, "nor changes anything");
        for step in 0..20 {
            // Both use a new batch in each step.
            let x = ramp(32 * 40, &[32, 40], 1.0 + step as f32 / 10.0, device);
            eager.x.copy_(&x).unwrap();
            replayed.x.copy_(&x).unwrap();
            let (want, launches) = count_launches(|| eager.step().unwrap());
            let ((), again) = count_launches(|| graph.replay().unwrap());
            assert_eq!(launches + 1, again, "and one that brings the step's numbers");
            assert_eq!(vec(&loss), vec(&want), "step {step} on {device}");
        }
        assert_eq!(replayed.weights(), eager.weights(), "on {device}");
        assert!(graph.commands() >= 6 && graph.reserved_bytes() > 0);
        // Eager steps can continue with the graph's tensors after the replays.
        assert_eq!(vec(&replayed.step().unwrap()), vec(&eager.step().unwrap()));
    }
}

#[test]
fn graphs_contain_views_fills_copies_and_in_place_changes() {
    let work = |x: &Tensor, sums: &Tensor| -> Result<(Tensor, Tensor)> {
        let turned = x.t()?.contiguous()?; // [5, 6]
        let part = x.narrow(0, 1, 3)?.slice(1, 0, 5, 2)?; // rows 1..4, columns 0, 2, 4
        let copy = part.clone();
        copy.add_scalar_(1)?;
        let zeros = Tensor::zeros(&[40_000], x.device())?;
        zeros.narrow(0, 2, 9)?.copy_(&part.reshape(9)?)?;
        let whole = Tensor::full(&[6, 5], 3.0, x.device())?;
        sums.add_(&whole.add(&turned.t()?)?)?;
        x.i((0, ..))?.mul_scalar_(2)?;
        Ok((copy, zeros.add(&zeros.clone())?))
    };
    for device in opencl() {
        let make = |device| (ramp(30, &[6, 5], 8.0, device), Tensor::zeros(&[6, 5], device).unwrap());
        let ((x, sums), (want_x, want_sums)) = (make(device), make(Device::Cpu));
        let (graph, (copy, doubled)) = Graph::capture(device, || work(&x, &sums)).unwrap();
        for _ in 0..3 {
            graph.replay().unwrap();
            let (want_copy, want_doubled) = work(&want_x, &want_sums).unwrap();
            let pairs = [(&x, &want_x), (&sums, &want_sums), (&copy, &want_copy), (&doubled, &want_doubled)];
            for (i, (got, want)) in pairs.into_iter().enumerate() {
                assert_eq!(vec(got), vec(want), "tensor {i} on {device}");
            }
        }
    }
}

#[test]
fn graphs_keep_their_memory() {
    for device in opencl() {
        let x = ramp(5000, &[5000], 2.0, device);
        let values = vec(&x);
        let (graph, y) = Graph::capture(device, || x.exp()?.add_scalar(1)?.mul(&x)?.log1p()).unwrap();
        // The graph needs the memory of the input and of the temporaries, although they were dropped, so new tensors must not get
        // this memory.
        drop(x);
        let others: Vec<Tensor> = (0..20).map(|i| Tensor::full(&[5000], i, device).unwrap()).collect();
        graph.replay().unwrap();
        graph.replay().unwrap();
        let want = values.iter().map(|&x| f64::from(x)).map(|x| ((x.exp() + 1.0) * x).ln_1p());
        for (got, want) in vec(&y).into_iter().zip(want) {
            assert!(f64::from(got).is_nan() && want.is_nan() || (f64::from(got) - want).abs() < 1e-5, "{got}, {want}");
        }
        for (i, t) in others.iter().enumerate() {
            assert_eq!(vec(t), [i as f32; 5000]);
        }
        // After the graph is dropped, its memory can be reused, but the result that the user holds is kept.
        let before = vec(&y);
        drop(graph);
        drop(others);
        let _others: Vec<Tensor> = (0..20).map(|i| Tensor::full(&[5000], i, device).unwrap()).collect();
        let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&vec(&y)), bits(&before));
    }
}

#[test]
fn graphs_replay_on_another_stream() {
    for device in opencl() {
        let stream = Stream::new(device).unwrap();
        let x = ramp(100, &[100], 2.0, device);
        device.synchronize().unwrap();
        let capture = |by: f64| with_stream(&stream, || Graph::capture(device, || x.mul_scalar(by)?.add_scalar(by)));
        let ((double, a), (triple, b)) = (capture(2.0).unwrap(), capture(3.0).unwrap());
        assert_eq!(double.stream(), &stream);
        let threads = [&double, &triple];
        std::thread::scope(|scope| {
            for graph in threads {
                scope.spawn(|| (0..50).for_each(|_| graph.replay().unwrap()));
            }
        });
        stream.synchronize().unwrap();
        let times = |by: f32| vec(&x).iter().map(|x| x * by + by).collect::<Vec<_>>();
        assert_eq!((vec(&a), vec(&b)), (times(2.0), times(3.0)), "on {device}");
    }
}

#[test]
fn unsupported_captures_are_errors_and_change_nothing() {
    if !common::in_own_process("graph::unsupported_captures_are_errors_and_change_nothing") {
        return; // other tests would change the allocator's statistics
    }
    for device in opencl() {
        let x = ramp(12, &[3, 4], 2.0, device);
        let values = vec(&x);
        let other = Stream::new(device).unwrap();
        let (inside, made) = Graph::capture(device, || x.neg()).unwrap();
        device.synchronize().unwrap();
        let live = || device.memory_stats().unwrap().allocated_bytes.current;
        let before = live();
        type Case<'a> = (&'a str, Box<dyn FnMut() -> Result<()> + 'a>);
        let cases: [Case; 10] = [
            ("read", Box::new(|| x.add_scalar(1)?.to_vec::<f32>().map(drop))),
            ("read", Box::new(|| x.sum((), false)?.item::<f32>().map(drop))),
            ("write", Box::new(|| Tensor::from_slice(&[1f32], 1, device).map(drop))),
            ("synchronize", Box::new(|| device.synchronize())),
            ("synchronize", Box::new(|| Stream::current(device)?.synchronize())),
            ("randperm", Box::new(|| Tensor::randperm(3, device).map(drop))),
            ("another stream", Box::new(|| with_stream(&other, || x.exp().map(drop)))),
            ("record_event", Box::new(|| Stream::current(device)?.record_event().map(drop))),
            ("already", Box::new(|| Graph::capture(device, || x.exp()).map(drop))),
            ("another graph", Box::new(|| inside.replay())),
        ];
        for (word, mut case) in cases {
            let captured = Graph::capture(device, || {
                x.add_scalar_(1)?; // if the failed capture ran this, the check of `x` below would fail
                case()
            });
            let error = captured.expect_err(word);
            assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(word), "{error}");
            assert!(!Graph::is_capturing(device));
            assert_eq!(vec(&x), values, "{word} on {device}");
            assert_eq!(live(), before, "{word} on {device}");
        }
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            Graph::capture(device, || -> Result<()> { panic!("inside") })
        }));
        assert!(panicked.is_err() && !Graph::is_capturing(device));
        assert_eq!(vec(&x.add_scalar(1).unwrap())[0], values[0] + 1.0, "work goes on");
        drop((inside, made));
    }
    let error = Graph::capture(Device::Cpu, || Ok(())).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("call the closure"), "{error}");
}

/// Autograd's check for in-place changes sees what a replay writes. A failed capture changes nothing.
#[test]
fn replays_count_as_changes() {
    for device in opencl() {
        let (x, w) = (ramp(4, &[4], 2.0, device), ramp(4, &[4], 1.0, device).requires_grad_(true).unwrap());
        let saved = |x: &Tensor| w.mul(x).unwrap().sum((), false).unwrap();
        let (graph, ()) = Graph::capture(device, || x.add_scalar_(1).map(drop)).unwrap();
        let loss = saved(&x);
        let failed = Graph::capture(device, || x.add_scalar_(1)?.to_vec::<f32>());
        assert!(failed.is_err());
        loss.backward().unwrap();
        let loss = saved(&x);
        graph.replay().unwrap();
        assert!(matches!(loss.backward(), Err(Error::Autograd { .. })), "on {device}");
    }
}

/// Replays also count as changes of results that the graph allocated. A backward pass of captured results uses the values of the
/// last replay.
#[test]
fn replays_count_as_changes_of_their_results() {
    for device in opencl() {
        let (x, w) = (Tensor::ones(4, device).unwrap(), ramp(4, &[4], 1.0, device).requires_grad_(true).unwrap());
        let (graph, y) = Graph::capture(device, || x.add_scalar(1)).unwrap();
        graph.replay().unwrap();
        let loss = w.mul(&y).unwrap().sum((), false).unwrap();
        let again = w.mul(&y).unwrap().sum((), false).unwrap();
        again.backward().unwrap();
        assert_eq!(vec(&w.grad().unwrap()), [2.0; 4]);
        graph.replay().unwrap();
        assert!(matches!(loss.backward(), Err(Error::Autograd { .. })), "on {device}");

        let (graph, loss) = Graph::capture(device, || w.mul(&x.exp()?)?.sum((), false)).unwrap();
        x.fill_(0).unwrap();
        graph.replay().unwrap();
        x.fill_(0.5f64.ln()).unwrap();
        graph.replay().unwrap();
        w.zero_grad();
        loss.backward().unwrap();
        assert!(vec(&w.grad().unwrap()).iter().all(|g| (g - 0.5).abs() < 1e-6), "on {device}");
    }
}

#[test]
fn kernel_errors_of_replays_are_reported() {
    for device in opencl() {
        let logits = ramp(6, &[2, 3], 1.0, device);
        let labels = Tensor::from_slice(&[0i64, 2], 2, device).unwrap();
        let (graph, loss) = Graph::capture(device, || logits.cross_entropy(&labels)).unwrap();
        graph.replay().unwrap();
        assert!(vec(&loss)[0] > 0.0);
        labels.fill_(7).unwrap();
        graph.replay().unwrap();
        let error = loss.item::<f32>().unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { index: 7, size: 3, .. }), "{error} on {device}");
        labels.fill_(1).unwrap();
        graph.replay().unwrap();
        assert!(loss.item::<f32>().unwrap() > 0.0);
    }
}

/// Runs several operations on x, which need temporary tensors.
fn between(x: &Tensor, by: f64) -> Result<Tensor> {
    x.add_scalar(by)?.relu()?.mul_scalar(by)?.sum(1, false)
}

#[test]
fn graphs_can_share_a_memory_pool() {
    for device in opencl() {
        let x = ramp(512 * 700, &[512, 700], 3.0, device);
        let (first, a) = Graph::capture(device, || between(&x, 2.0)).unwrap();
        let one = first.reserved_bytes();
        let pool = first.pool().clone();
        let (second, b) = Graph::capture_in(&pool, || between(&x, 3.0)).unwrap();
        // The third graph reads `a`, a result of the first graph. Its memory is kept for replays, although the user drops `a`.
        let (third, c) = Graph::capture_in(&pool, || a.add(&b)?.mul_scalar(2.0)).unwrap();
        assert_eq!(third.pool().id(), first.pool().id());
        assert!(second.reserved_bytes() < one + one / 4, "what the first dropped serves the second");
        drop((a, b));
        let (fourth, d) = Graph::capture_in(&pool, || between(&x, 4.0)).unwrap();
        for scale in [1.0, 2.0] {
            x.copy_(&ramp(512 * 700, &[512, 700], scale, device)).unwrap();
            let want = between(&x, 2.0).unwrap().add(&between(&x, 3.0).unwrap()).unwrap().mul_scalar(2.0).unwrap();
            let last = between(&x, 4.0).unwrap();
            [&first, &second, &third, &fourth].into_iter().for_each(|graph| graph.replay().unwrap());
            assert_eq!((vec(&c), vec(&d)), (vec(&want), vec(&last)), "{device}");
        }
        // The pool exists as long as a graph uses it.
        drop((first, second, pool));
        [&third, &fourth].into_iter().for_each(|graph| graph.replay().unwrap());
        let last = between(&x, 4.0).unwrap();
        assert_eq!(vec(&d), vec(&last));
    }
}

#[test]
fn invalid_pool_sharing_is_an_error() {
    for device in opencl() {
        let x = Tensor::ones(1000, device).unwrap();
        let (graph, _) = Graph::capture(device, || x.exp()).unwrap();
        let side = Stream::new(device).unwrap();
        let message = with_stream(&side, || Graph::capture_in(graph.pool(), || x.exp()));
        assert!(message.as_ref().is_err_and(|e| e.to_string().contains("memory of stream 0")), "{message:?}");
        let lends = MemPool::of_device(device, MemPoolOptions::default().use_on_oom(true)).unwrap();
        let message = Graph::capture_in(&lends, || x.exp());
        assert!(message.as_ref().is_err_and(|e| e.to_string().contains("use_on_oom")), "{message:?}");
        // Capturing into the pool is an error while another capture into it is running. After that capture, the pool can be used
        // again.
        let pool = graph.pool();
        Graph::capture_in(pool, || {
            let message =
                std::thread::scope(|scope| scope.spawn(|| Graph::capture_in(pool, || x.exp())).join().unwrap());
            assert!(message.as_ref().is_err_and(|e| e.to_string().contains("one graph at a time")), "{message:?}");
            x.exp()
        })
        .unwrap();
        assert!(Graph::capture_in(pool, || x.exp()).is_ok());
    }
}
