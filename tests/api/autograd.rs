//! Autograd features besides a single backward: retained graphs, gradients of single tensors, higher derivatives, hooks.

use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use claystone::autograd::{
    BackwardOptions, CustomOp, GradOptions, OpContext, checkpoint, checkpoint_sequential, detect_anomaly, enable_grad,
    grad, grad_with_options, gradgradcheck, inference_mode, set_grad_enabled,
};
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, Result, Tensor, is_grad_enabled, manual_seed, no_grad};

use crate::common::{each_device, in_own_process, vec};

const KEEP: BackwardOptions = BackwardOptions { gradient: None, retain_graph: true, create_graph: false };
const RECORD: GradOptions =
    GradOptions { grad_outputs: &[], retain_graph: false, create_graph: true, allow_unused: false };

fn leaf(values: &[f32], device: Device) -> Tensor {
    Tensor::from_slice(values, values.len(), device).unwrap().requires_grad_(true).unwrap()
}

#[test]
fn retained_graphs_give_the_same_gradients_again() {
    each_device(|d| {
        let (x, w) = (leaf(&[1.0, -2.0, 3.0, 0.5], d), leaf(&[0.5, 1.0, -1.0, 2.0], d));
        let (a, b) = (x.reshape([2, 2]).unwrap(), w.reshape([2, 2]).unwrap());
        let y = a.matmul(&b).unwrap().tanh().unwrap().softmax(1).unwrap().mul(&a).unwrap();
        let loss = y.linear(&b, None).unwrap().mean((), false).unwrap();
        loss.backward_with_options(KEEP).unwrap();
        let once: Vec<Vec<f32>> = [&x, &w].map(|t| vec(&t.grad().unwrap())).to_vec();
        [&x, &w].iter().for_each(|t| t.zero_grad());
        loss.backward_with_options(KEEP).unwrap();
        for (t, once) in [&x, &w].iter().zip(&once) {
            assert_eq!(&vec(&t.grad().unwrap()), once);
        }
        loss.backward().unwrap();
        for (t, once) in [&x, &w].iter().zip(&once) {
            assert_eq!(vec(&t.grad().unwrap()), once.iter().map(|g| 2.0 * g).collect::<Vec<_>>(), "added up");
        }
        assert!(loss.backward().unwrap_err().to_string().contains("retain_graph"));
    });
}

#[test]
fn retained_graphs_keep_their_saved_tensors() {
    let x = leaf(&[1.0; 4], Device::Cpu);
    let y = x.exp().unwrap();
    let seen = y.detach();
    let loss = y.mul(&y).unwrap().sum((), false).unwrap();
    drop(y);
    loss.backward_with_options(KEEP).unwrap();
    seen.add_scalar_(1).unwrap();
    assert!(loss.backward().unwrap_err().to_string().contains("changed in place"), "the graph still reads it");
}

#[test]
fn grad_returns_gradients_without_accumulating_them() {
    each_device(|d| {
        let (x, w) = (leaf(&[1.0, 2.0], d), leaf(&[3.0, 4.0], d));
        let h = x.mul(&w).unwrap();
        let y = h.mul(&h).unwrap().sum((), false).unwrap();
        let keep = GradOptions { retain_graph: true, ..Default::default() };
        // Gradients of a leaf, of an intermediate result, and of the output itself.
        let all = grad_with_options(&[&y], &[&w, &h, &y], keep).unwrap();
        let all: Vec<Vec<f32>> = all.into_iter().map(|g| vec(&g.unwrap())).collect();
        assert_eq!(all, [vec![6.0, 32.0], vec![6.0, 16.0], vec![1.0]]);
        // With several outputs that depend on `x`, the outputs' gradients add up.
        let z = h.sum((), false).unwrap();
        let both = grad_with_options(&[&y, &z], &[&x], keep).unwrap().remove(0).unwrap();
        assert_eq!(vec(&both), [2.0 * 9.0 + 3.0, 2.0 * 2.0 * 16.0 + 4.0]);
        let given = Tensor::from_slice(&[1f32, 10.0], 2, d).unwrap();
        let options = GradOptions { grad_outputs: &[&given], ..keep };
        assert_eq!(vec(grad_with_options(&[&h], &[&x], options).unwrap()[0].as_ref().unwrap()), [3.0, 40.0]);
        assert!(x.grad().is_none() && w.grad().is_none());
        // With `retain_graph`, earlier calls kept the graph, so another gradient can be computed.
        grad(&[&y], &[&h]).unwrap();
        let unused = leaf(&[1.0], d);
        let message = |r: Result<Vec<Tensor>>| r.unwrap_err().to_string();
        let y = x.sum((), false).unwrap();
        assert!(message(grad(&[&y], &[&unused])).contains("input 0"));
        let y = x.sum((), false).unwrap();
        let options = GradOptions { allow_unused: true, ..Default::default() };
        let gradients = grad_with_options(&[&y], &[&unused, &x], options).unwrap();
        assert!(gradients[0].is_none() && gradients[1].is_some());
        assert!(message(grad(&[&x.sum((), false).unwrap()], &[&x.detach()])).contains("requires no gradient"));
        assert!(message(grad(&[&x.exp().unwrap()], &[&x])).contains("one element"));
        assert!(message(grad(&[&x.detach().sum((), false).unwrap()], &[&x])).contains("requires_grad_"));
    });
}

type Function = fn(&[Tensor]) -> Result<Tensor>;

/// Compares second derivatives with central differences of the first derivatives.
#[test]
fn second_derivatives_match_finite_differences() {
    let cases: &[(&str, Function, &[&[usize]])] = &[
        ("broadcast", |x| x[0].mul(&x[1])?.div(&x[1].exp()?)?.sum((), false), &[&[2, 3], &[3]]),
        ("scalars", |x| x[0].pow_scalar(3)?.mul_scalar(2)?.sum((), false), &[&[3]]),
        ("activations", |x| x[0].sigmoid()?.mul(&x[0].tanh()?)?.add(&x[0].gelu()?)?.sum((), false), &[&[4]]),
        ("map", |x| Tensor::map(&[&x[0], &x[1]], |e| (&e[0] * &e[1]).sin())?.sum((), false), &[&[3], &[2, 1]]),
        ("matmul", |x| x[0].matmul(&x[1])?.square()?.sum((), false), &[&[2, 3], &[3, 2]]),
        ("vectors", |x| x[0].matmul(&x[1])?.exp(), &[&[3], &[3]]),
        ("row", |x| x[0].matmul(&x[1])?.square()?.sum((), false), &[&[3], &[3, 2]]),
        ("column", |x| x[0].matmul(&x[1])?.square()?.sum((), false), &[&[2, 3], &[3]]),
        ("batches", |x| x[0].matmul(&x[1])?.square()?.sum((), false), &[&[2, 1, 2, 3], &[2, 3, 2]]),
        ("linear", |x| x[0].linear(&x[1], Some(&x[2]))?.square()?.sum((), false), &[&[2, 3], &[2, 3], &[2]]),
        (
            "linear_map",
            |x| x[0].linear_map(&x[1], Some(&x[2]), |z| z.tanh())?.square()?.sum((), false),
            &[&[2, 2, 3], &[2, 3], &[2]],
        ),
        ("linear of a vector", |x| x[0].linear_map(&x[1], None, |z| z.exp())?.sum((), false), &[&[3], &[2, 3]]),
        ("sum", |x| x[0].sum(1, true)?.mul(&x[0])?.sum((), false)?.square(), &[&[2, 3]]),
        ("mean", |x| x[0].mean([0, 2], false)?.exp()?.mean((), false), &[&[2, 2, 3]]),
        ("var", |x| x[0].var(1, 1, false)?.square()?.sum((), false), &[&[2, 3]]),
        ("softmax", |x| x[0].softmax(1)?.mul(&x[1])?.square()?.sum((), false), &[&[2, 3], &[2, 3]]),
        ("log_softmax", |x| x[0].log_softmax(0)?.mul(&x[1])?.square()?.sum((), false), &[&[3, 2], &[3, 2]]),
        ("logsumexp", |x| x[0].logsumexp(1, false)?.square()?.sum((), false), &[&[2, 3]]),
        ("logsumexp kept", |x| x[0].logsumexp(-1, true)?.mul(&x[0])?.sum((), false), &[&[2, 3]]),
        (
            "views",
            |x| {
                let part = x[0].transpose(0, 1)?.narrow(0, 1, 2)?.reshape([4])?;
                let flipped = x[0].i((.., 0))?.flip(0)?.expand([2, 2])?.flatten(0, 1)?;
                part.mul(&flipped)?.square()?.sum((), false)
            },
            &[&[2, 3]],
        ),
        ("pieces", |x| Tensor::cat(&[&x[0], &x[1].exp()?, &x[0]], 0)?.square()?.sum((), false), &[&[2], &[3]]),
        ("stack", |x| Tensor::stack(&[&x[0], &x[0].square()?], 1)?.prod_of_rows()?.sum((), false), &[&[3]]),
        ("copies", |x| x[0].t()?.contiguous()?.try_clone()?.square()?.mul(&x[0].t()?)?.sum((), false), &[&[2, 2]]),
    ];
    for (name, f, shapes) in cases {
        let values = |(i, shape): (usize, &&[usize])| {
            let n: usize = shape.iter().product();
            let values: Vec<f64> = (0..n).map(|k| 0.9 - ((5 * k + 3 * i) % 7) as f64 * 0.29).collect();
            Tensor::from_slice(&values, *shape, Device::Cpu).unwrap()
        };
        let inputs: Vec<Tensor> = shapes.iter().enumerate().map(values).collect();
        gradgradcheck(f, &inputs, 1e-6).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

trait Rows {
    fn prod_of_rows(&self) -> Result<Tensor>;
}

impl Rows for Tensor {
    /// Returns the elementwise product of columns 0 and 1.
    fn prod_of_rows(&self) -> Result<Tensor> {
        self.select(1, 0)?.mul(&self.select(1, 1)?)
    }
}

#[test]
fn derivatives_of_any_order_are_exact() {
    each_device(|d| {
        let x = leaf(&[0.7], d);
        let mut y = x.sin().unwrap();
        for order in 1..=4 {
            y = grad_with_options(&[&y], &[&x], RECORD).unwrap().remove(0).unwrap();
            let want = [0.7f32.cos(), -0.7f32.sin(), -0.7f32.cos(), 0.7f32.sin()][order - 1];
            assert!((vec(&y)[0] - want).abs() < 1e-6, "derivative {order} on {d}");
        }
    });
}

/// Trains with a WGAN critic's loss with a gradient penalty, and compares the gradient of the weights with finite differences.
#[test]
fn gradient_penalties_can_be_trained() {
    each_device(|d| {
        manual_seed(3);
        let options = (DType::F64, d);
        let mut net = Sequential::new()
            .push(Linear::new(3, 4, options).unwrap().with_activation(Activation::Tanh))
            .push(Linear::new(4, 1, options).unwrap());
        let real = Tensor::from_slice(&[0.3, -0.8, 0.5, 1.1, 0.2, -0.4], [2, 3], d).unwrap();
        let loss = |net: &Sequential| -> Result<Tensor> {
            enable_grad(|| {
                let x = real.detach().requires_grad_(true)?;
                let score = net.forward(&x)?;
                let slope = grad_with_options(&[&score.sum((), false)?], &[&x], RECORD)?.remove(0).unwrap();
                let norms = slope.square()?.sum(1, false)?.sqrt()?;
                norms.sub_scalar(1)?.square()?.mean((), false)?.sub(&score.mean((), false)?)
            })
        };
        loss(&net).unwrap().backward().unwrap();
        for p in 0..net.parameters().len() {
            let parameters = net.parameters();
            // For the last bias, which shifts every score equally, only the scores contribute to the gradient and the penalty does
            // not.
            let got = parameters[p].grad().unwrap().to_vec::<f64>().unwrap();
            let values = parameters[p].to_vec::<f64>().unwrap();
            let shape = parameters[p].shape().clone();
            for k in 0..values.len() {
                let at = |x: f64| {
                    let mut moved = values.clone();
                    moved[k] = x;
                    let moved = Tensor::from_slice(&moved, &shape, d).unwrap();
                    no_grad(|| parameters[p].copy_(&moved).map(drop)).unwrap();
                    loss(&net).unwrap().item::<f64>().unwrap()
                };
                let h = 1e-5;
                let want = (at(values[k] + h) - at(values[k] - h)) / (2.0 * h);
                at(values[k]);
                assert!((got[k] - want).abs() < 1e-7, "parameter {p}, {k}: {} instead of {want} on {d}", got[k]);
            }
        }
        // The loss also decreases with an optimizer, which moves the parameters into flat buffers.
        let before = loss(&net).unwrap().item::<f64>().unwrap();
        let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.05, ..Default::default() }).unwrap();
        for _ in 0..10 {
            sgd.zero_grad();
            loss(&net).unwrap().backward().unwrap();
            sgd.step().unwrap();
        }
        assert!(loss(&net).unwrap().item::<f64>().unwrap() < before);
    });
}

#[test]
fn hessian_vector_products_match_finite_differences() {
    each_device(|d| {
        let values = [0.4, -0.3, 0.8, 0.1, -0.9, 0.6];
        let v = Tensor::from_slice(&[0.2, 1.0, -0.5, 0.3, 0.9, -1.2], [2, 3], d).unwrap();
        let targets = Tensor::from_slice(&[0.1, 0.7, 0.2, 0.5, 0.2, 0.3], [2, 3], d).unwrap();
        let loss = |w: &Tensor| -> Result<Tensor> {
            let inputs = w.matmul(&w.t()?)?.matmul(w)?;
            inputs.log_softmax(1)?.mul(&targets)?.sum((), false)?.neg()
        };
        let at = |values: &[f64]| Tensor::from_slice(values, [2, 3], d).unwrap().requires_grad_(true).unwrap();
        let gradient = |values: &[f64]| {
            let w = at(values);
            grad(&[&loss(&w).unwrap()], &[&w]).unwrap()[0].to_vec::<f64>().unwrap()
        };
        let w = at(&values);
        let first = grad_with_options(&[&loss(&w).unwrap()], &[&w], RECORD).unwrap().remove(0).unwrap();
        let product = grad(&[&first.mul(&v).unwrap().sum((), false).unwrap()], &[&w]).unwrap().remove(0);
        let (h, v) = (1e-5, v.to_vec::<f64>().unwrap());
        let moved = |sign: f64| -> Vec<f64> { values.iter().zip(&v).map(|(x, v)| x + sign * h * v).collect() };
        let (up, down) = (gradient(&moved(1.0)), gradient(&moved(-1.0)));
        for (k, got) in product.to_vec::<f64>().unwrap().iter().enumerate() {
            let want = (up[k] - down[k]) / (2.0 * h);
            assert!((got - want).abs() < 1e-7, "{k}: {got} instead of {want} on {d}");
        }
    });
}

/// An operation whose backward is not declared as differentiable.
struct Opaque;

impl CustomOp for Opaque {
    fn name(&self) -> &'static str {
        "opaque"
    }

    fn forward(&self, _: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        inputs[0].sum((), false)
    }

    fn backward(&self, _: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        Ok(vec![Some(grad.expand(2)?)])
    }
}

#[test]
fn non_differentiable_backward_is_an_error() {
    let x = leaf(&[1.0, 2.0], Device::Cpu);
    let loss = Tensor::apply_op(Opaque, &[&x]).unwrap();
    let error = grad_with_options(&[&loss], &[&x], RECORD).unwrap_err().to_string();
    assert!(error.starts_with("opaque: ") && error.contains("create_graph"), "{error}");
    assert_eq!(vec(&grad(&[&loss], &[&x]).unwrap()[0]), [1.0, 1.0]);
}

#[test]
fn hooks_can_change_gradients_and_be_removed() {
    each_device(|d| {
        let x = leaf(&[1.0, 2.0], d);
        let seen: Arc<Mutex<Vec<Vec<f32>>>> = Arc::default();
        let sight = seen.clone();
        let handle = x
            .register_hook(move |g| {
                sight.lock().unwrap().push(vec(g));
                Ok(None)
            })
            .unwrap();
        let y = x.mul_scalar(2).unwrap();
        let double = y.register_hook(|g| g.mul_scalar(2).map(Some)).unwrap();
        let again = y.register_hook(|g| g.add_scalar(1).map(Some)).unwrap();
        // If a tensor is used twice, the tensor's hook is called once, with the sum of both gradients.
        let loss = y.add(&x).unwrap().add(&y).unwrap().sum((), false).unwrap();
        loss.backward_with_options(KEEP).unwrap();
        assert_eq!(*seen.lock().unwrap(), [[11.0, 11.0]], "2 * (2 * 2 + 1) + 1 on {d}");
        assert_eq!(vec(&x.grad().unwrap()), [11.0, 11.0]);
        double.remove();
        x.zero_grad();
        loss.backward_with_options(KEEP).unwrap();
        assert_eq!(vec(&x.grad().unwrap()), [7.0, 7.0]);
        again.remove();
        handle.remove();
        x.zero_grad();
        loss.backward().unwrap();
        assert_eq!((seen.lock().unwrap().len(), vec(&x.grad().unwrap())), (2, vec![5.0, 5.0]));
        let wrong = x.mul_scalar(1).unwrap();
        wrong.register_hook(|g| g.sum((), false).map(Some)).unwrap();
        let error = wrong.sum((), false).unwrap().backward().unwrap_err().to_string();
        assert!(error.contains("a hook gave"), "{error}");
        assert!(x.detach().register_hook(|_| Ok(None)).is_err());
    });
}

/// If there is a hook between two layers, the second layer's backward kernel must not include the derivative of the first layer's
/// activation, because the hook needs the gradient before this derivative.
#[test]
fn hooks_and_retained_gradients_disable_fusion() {
    each_device(|d| {
        let (x, w) = (leaf(&[0.5, -1.0, 2.0, 1.0], d).reshape([2, 2]).unwrap(), leaf(&[1.0, -1.0, 0.5, 2.0], d));
        let w = w.reshape([2, 2]).unwrap();
        let forward = || -> Result<(Tensor, Tensor)> {
            let hidden = x.linear_map(&w, None, |z| z.tanh())?;
            let loss = hidden.linear(&w, None)?.sum((), false)?;
            Ok((hidden, loss))
        };
        let (hidden, loss) = forward().unwrap();
        let [plain, of_x] = grad(&[&loss], &[&hidden, &x]).unwrap().try_into().unwrap();
        let want: Vec<f32> = vec(&Tensor::ones(&[2, 2], d).unwrap().matmul(&w.detach()).unwrap());
        assert_eq!(vec(&plain), want);
        let (hidden, loss) = forward().unwrap();
        hidden.retain_grad().unwrap();
        assert!(hidden.retains_grad() && hidden.grad().is_none());
        let [again] = grad(&[&loss], &[&x]).unwrap().try_into().unwrap();
        assert_eq!((vec(&hidden.grad().unwrap()), vec(&again)), (want, vec(&of_x)));
        hidden.zero_grad();
        assert!(hidden.grad().is_none());
        let (_, loss) = forward().unwrap();
        let fused = grad(&[&loss], &[&x]).unwrap().remove(0);
        for (a, b) in vec(&fused).iter().zip(vec(&of_x)) {
            assert!((a - b).abs() <= 1e-6 * b.abs().max(1.0));
        }
    });
}

#[test]
fn recording_can_be_switched_on_and_off() {
    let x = leaf(&[1.0], Device::Cpu);
    let tracked = || x.exp().unwrap().requires_grad();
    assert!(!no_grad(tracked) && no_grad(|| enable_grad(tracked)) && !inference_mode(tracked) && tracked());
    assert!(set_grad_enabled(false));
    assert!(!tracked() && !is_grad_enabled() && enable_grad(tracked) && !is_grad_enabled());
    assert!(!set_grad_enabled(true) && tracked());
    let mut y = x.exp().unwrap();
    assert!(!y.detach_().requires_grad() && y.is_leaf());
}

#[test]
fn anomaly_detection_names_the_operation() {
    each_device(|d| {
        let x = leaf(&[0.0, 4.0], d);
        let loss = || x.sqrt().unwrap().mul(&x).unwrap().mul_scalar(2).unwrap().sum((), false).unwrap();
        let error = detect_anomaly(|| loss().backward()).unwrap_err().to_string();
        assert!(error.starts_with("sqrt: "), "{error} on {d}");
        x.zero_grad();
        loss().backward().unwrap();
        assert!(vec(&x.grad().unwrap())[0].is_nan());
    });
}

/// With `create_graph`, the gradients of leaves refer to the graph and the graph to its leaves. Dropping the gradients frees the
/// graph.
#[test]
fn graphs_of_gradients_are_freed() {
    static ALIVE: AtomicUsize = AtomicUsize::new(0);
    struct Token;
    impl Drop for Token {
        fn drop(&mut self) {
            ALIVE.fetch_sub(1, Relaxed);
        }
    }
    ALIVE.store(1, Relaxed);
    let token = Token;
    let x = leaf(&[2.0], Device::Cpu);
    let y = x.mul(&x).unwrap();
    y.register_hook(move |_| {
        let _held = &token;
        Ok(None)
    })
    .unwrap();
    let z = y.mul(&x).unwrap();
    z.backward_with_options(BackwardOptions { create_graph: true, ..Default::default() }).unwrap();
    let first = x.grad().unwrap();
    assert_eq!(vec(&first), [12.0]);
    x.zero_grad();
    first.backward().unwrap();
    assert_eq!(vec(&x.grad().unwrap()), [12.0]);
    drop((y, z, first));
    x.zero_grad();
    assert_eq!(ALIVE.load(Relaxed), 0, "nothing holds the graph");
}

/// Layers with dropout compute the same numbers with and without checkpoints, because recomputation draws the same random numbers.
#[test]
fn checkpoints_compute_and_draw_the_same_numbers() {
    // Runs in its own process, because other tests draw from the process-wide random generator.
    if !in_own_process("autograd::checkpoints_compute_and_draw_the_same_numbers") {
        return;
    }
    each_device(|d| {
        let (x, w, b) = (leaf(&[1.0, -2.0, 3.0, 0.5], d), leaf(&[0.5, 1.0, -1.0, 2.0], d), leaf(&[0.1, 0.2], d));
        let calls = Arc::new(AtomicUsize::new(0));
        let layer = {
            let (w, b, calls) = (w.shallow_clone(), b.shallow_clone(), calls.clone());
            move |x: &[Tensor]| -> Result<Tensor> {
                calls.fetch_add(1, Relaxed);
                let x = x[0].reshape([2, 2])?.linear(&w.reshape([2, 2])?, Some(&b))?.tanh()?.dropout(0.4)?;
                x.mul(&Tensor::rand(&[2, 2], &x)?)?.dropout(0.2)
            }
        };
        let run = |checkpointed: bool| -> (f32, Vec<Vec<f32>>) {
            manual_seed(5);
            [&x, &w, &b].iter().for_each(|t| t.zero_grad());
            let h = x.mul_scalar(2).unwrap();
            let y = match checkpointed {
                true => checkpoint(layer.clone(), &[&h]),
                false => layer(&[h.shallow_clone()]),
            };
            let after = Tensor::rand(&[2, 2], d).unwrap();
            let loss = y.unwrap().mul(&after).unwrap().sum((), false).unwrap();
            loss.backward().unwrap();
            (vec(&loss)[0], [&x, &w, &b].map(|t| vec(&t.grad().unwrap())).to_vec())
        };
        let plain = run(false);
        assert_eq!(calls.swap(0, Relaxed), 1);
        assert_eq!(run(true), plain, "on {d}");
        assert_eq!(calls.load(Relaxed), 2, "once more in backward");
        // Random numbers drawn after the checkpoint continue the same sequence.
        manual_seed(5);
        let outer = {
            let layer = layer.clone();
            move |x: &[Tensor]| checkpoint(layer.clone(), &[&x[0]])?.add_scalar(0)
        };
        [&x, &w, &b].iter().for_each(|t| t.zero_grad());
        let y = checkpoint(outer, &[&x.mul_scalar(2).unwrap()]).unwrap();
        let loss = y.mul(&Tensor::rand(&[2, 2], d).unwrap()).unwrap().sum((), false).unwrap();
        let [of_w] = grad(&[&loss], &[&w]).unwrap().try_into().unwrap();
        assert_eq!(vec(&of_w), plain.1[1], "one inside another, on {d}");
        assert!(x.grad().is_none() && b.grad().is_none());
    });
}

#[test]
fn checkpoints_support_second_derivatives_and_hooks() {
    let x = Tensor::from_slice(&[0.3, -0.6], 2, Device::Cpu).unwrap();
    let f = |x: &[Tensor]| checkpoint(|x| x[0].mul(&x[1])?.tanh(), &[&x[0], &x[0].exp()?])?.mul(&x[0])?.sum((), false);
    gradgradcheck(f, &[x], 1e-6).unwrap();
    let w = leaf(&[1.0, 2.0], Device::Cpu);
    let fired = Arc::new(AtomicUsize::new(0));
    let count = fired.clone();
    w.register_hook(move |_| {
        count.fetch_add(1, Relaxed);
        Ok(None)
    })
    .unwrap();
    let held = w.shallow_clone();
    checkpoint(move |_| held.square(), &[]).unwrap().sum((), false).unwrap().backward().unwrap();
    assert_eq!((fired.load(Relaxed), vec(&w.grad().unwrap())), (1, vec![2.0, 4.0]));
    // If no input requires a gradient, a checkpoint records nothing, and an input that is returned unchanged stays the same tensor.
    assert!(!checkpoint(|x| x[0].exp(), &[&w.detach()]).unwrap().requires_grad());
    assert!(checkpoint(|x| Ok(x[0].shallow_clone()), &[&w]).unwrap().is_leaf());
    let x = w.mul_scalar(1).unwrap();
    let y = checkpoint(|x| x[0].exp(), &[&x]).unwrap();
    no_grad(|| x.zero_().map(drop)).unwrap();
    assert!(y.sum((), false).unwrap().backward().unwrap_err().to_string().contains("changed in place"));
}

#[test]
fn checkpoints_reduce_peak_memory() {
    if !in_own_process("autograd::checkpoints_reduce_peak_memory") {
        return;
    }
    let peak = |checkpointed: bool| {
        let x = Tensor::ones(1 << 16, Device::Cpu).unwrap().requires_grad_(true).unwrap();
        Device::Cpu.reset_peak_stats().unwrap();
        let before = Device::Cpu.memory_stats().unwrap().allocated_bytes.current;
        let layer = |x: &Tensor| (0..8).try_fold(x.shallow_clone(), |x, _| x.mul_scalar(0.5)?.exp());
        let y = match checkpointed {
            true => checkpoint_sequential([layer; 4], &x).unwrap(),
            false => (0..4).try_fold(x.shallow_clone(), |x, _| layer(&x)).unwrap(),
        };
        y.sum((), false).unwrap().backward().unwrap();
        (Device::Cpu.memory_stats().unwrap().allocated_bytes.peak - before, vec(&x.grad().unwrap()))
    };
    let (plain, checkpointed) = (peak(false), peak(true));
    assert_eq!(plain.1, checkpointed.1);
    assert!(2 * checkpointed.0 < plain.0, "{} bytes instead of {}", checkpointed.0, plain.0);
}
