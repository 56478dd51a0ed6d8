//! Graph replays give the same bits in every mode: enqueued by the host, or as command buffers.

use claystone::device::{ReplayMode, count_launches};
use claystone::profiler::{Category, profile};
use claystone::{DType, Device, Error, Graph, Result, Stream, Tensor, with_stream};

use crate::common::{opencl, vec};

const MODES: [ReplayMode; 2] = [ReplayMode::Host, ReplayMode::CommandBuffer];

/// Sets the replay mode. If the device does not support the mode, checks the error message and returns false.
fn select_mode(graph: &mut Graph, mode: ReplayMode) -> bool {
    let usual = graph.replay_mode();
    let Err(error) = graph.set_replay_mode(mode) else { return true };
    assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains(&mode.to_string()), "{error}");
    assert_eq!(graph.replay_mode(), usual, "as it was");
    assert_eq!(mode, ReplayMode::CommandBuffer, "the host always can");
    let known = graph.device().capabilities().unwrap().extensions;
    assert!(known.iter().all(|name| name != "cl_khr_command_buffer"), "{} has command buffers", graph.device());
    false
}

fn bits(t: &Tensor) -> Vec<u32> {
    vec(t).into_iter().map(f32::to_bits).collect()
}

fn ramp(n: usize, device: Device) -> Tensor {
    let values: Vec<f32> = (0..n).map(|i| ((i * 37 + 11) % 101) as f32 / 101.0 - 0.5).collect();
    Tensor::from_slice(&values, n, device).unwrap()
}

/// Runs kernels of several kinds, fills and copies, including some on empty tensors. Each depends on the previous commands.
fn work(x: &Tensor, total: &Tensor) -> Result<Tensor> {
    let square = x.reshape([50, 20])?;
    let product = square.t()?.contiguous()?.matmul(&square)?; // [20, 20]
    let zeros = Tensor::zeros(&[40_000], x.device())?;
    zeros.narrow(0, 3, 400)?.copy_(&product.reshape(400)?)?;
    let copy = zeros.clone();
    copy.narrow(0, 0, 0)?.fill_(9)?;
    copy.narrow(0, 0, 2)?.fill_(7)?;
    total.add_(&copy.narrow(0, 0, 1000)?)?;
    x.mul_scalar_(0.5)?.add_scalar_(0.25)?;
    total.to_dtype(DType::F16)?.softmax(0)?.to_dtype(DType::F32)
}

#[test]
fn results_have_the_same_bits_in_every_mode() {
    for device in opencl() {
        let run = |mode| {
            let (x, total) = (ramp(1000, device), Tensor::zeros(1000, device).unwrap());
            let (mut graph, y) = Graph::capture(device, || work(&x, &total)).unwrap();
            let capture = |by: f64| Graph::capture(device, || total.mul_scalar_(by)?.sum((), false)).unwrap();
            let [(mut second, sum), (mut third, last)] = [capture(0.5), capture(0.75)];
            if ![&mut graph, &mut second, &mut third].into_iter().all(|graph| select_mode(graph, mode)) {
                return None;
            }
            let mut seen = Vec::new();
            let (_, launches) = count_launches(|| {
                for round in 0..40 {
                    graph.replay().unwrap();
                    second.replay().unwrap();
                    third.replay().unwrap();
                    if round % 13 == 0 {
                        seen.push([&x, &total, &y, &sum, &last].map(bits));
                    }
                    total.add_scalar_(0.125).unwrap(); // an eager operation between replays
                }
            });
            // Replays without waiting, so that the queue holds the same commands many times.
            (0..500).for_each(|_| graph.replay().unwrap());
            seen.push([&x, &total, &y, &sum, &last].map(bits));
            assert_eq!([graph.replay_mode(), second.replay_mode(), third.replay_mode()], [mode; 3]);
            Some((seen, launches))
        };
        let [host, buffers] = MODES.map(run);
        assert!(host.is_some());
        assert!(buffers.is_none() || buffers == host, "on {device}");
    }
}

#[test]
fn graphs_can_change_modes_and_be_dropped_while_running() {
    for device in opencl() {
        let x = Tensor::zeros(3000, device).unwrap();
        let (mut graph, ()) = Graph::capture(device, || x.add_scalar_(1).map(drop)).unwrap();
        let mut replays = 0;
        for mode in MODES.into_iter().chain(MODES) {
            if select_mode(&mut graph, mode) {
                (0..100).for_each(|_| graph.replay().unwrap());
                replays += 100;
            }
        }
        drop(graph); // the last replays may still be running
        assert_eq!(vec(&x), vec![replays as f32; 3000], "on {device}");
    }
}

/// The graph has more commands than the queue may hold at once, so the driver must record the commands in several batches.
#[test]
fn long_graphs_are_replayed_in_order() {
    for device in opencl() {
        for mode in MODES {
            let (x, ones) = (Tensor::zeros(8, device).unwrap(), Tensor::ones(8, device).unwrap());
            let all = Tensor::arange(0, 8, 1, device).unwrap().to_dtype(DType::I64).unwrap();
            let steps = || {
                for i in 0..1500 {
                    if i % 100 == 0 {
                        x.fill_(f64::from(i))?
                    } else {
                        x.index_add_(0, &all, &ones)? // not a formula, because the graph would fuse formulas
                    };
                }
                Ok(())
            };
            let (mut graph, ()) = Graph::capture(device, steps).unwrap();
            if select_mode(&mut graph, mode) {
                let ((), launches) = count_launches(|| (0..3).for_each(|_| graph.replay().unwrap()));
                assert!(launches >= 3 * 1485, "{launches}");
                assert_eq!(vec(&x), [1499.0; 8], "{mode} on {device}");
                assert_eq!(graph.replay_mode(), mode);
            }
        }
    }
}

#[test]
fn streams_and_threads_can_replay_in_every_mode() {
    for device in opencl() {
        for mode in MODES {
            let streams = [(); 3].map(|()| Stream::new(device).unwrap());
            let x = ramp(500, device);
            device.synchronize().unwrap();
            let graphs: Vec<(Graph, Tensor)> = streams
                .iter()
                .zip([2.0, 3.0, 4.0])
                .map(|(stream, by)| {
                    let total = with_stream(stream, || Tensor::zeros(500, device)).unwrap();
                    let step = || {
                        x.mul_scalar(by)?
                            .add_(&total)?
                            .add_scalar(0)?
                            .sub(&total)
                            .and_then(|y| total.add_(&y).map(drop))
                    };
                    let (mut graph, ()) = with_stream(stream, || Graph::capture(device, step)).unwrap();
                    select_mode(&mut graph, mode);
                    (graph, total)
                })
                .collect();
            std::thread::scope(|scope| {
                for (graph, _) in graphs.iter().chain(&graphs) {
                    scope.spawn(|| (0..50).for_each(|_| graph.replay().unwrap()));
                }
            });
            streams.iter().for_each(|stream| stream.synchronize().unwrap());
            for ((_, total), by) in graphs.iter().zip([2.0f32, 3.0, 4.0]) {
                let want = Tensor::zeros(500, device).unwrap();
                for _ in 0..100 {
                    let y = x.mul_scalar(by).unwrap().add_(&want).unwrap().add_scalar(0).unwrap().sub(&want).unwrap();
                    want.add_(&y).unwrap();
                }
                assert_eq!(bits(total), bits(&want), "{mode} on {device}");
            }
        }
    }
}

#[test]
fn kernel_errors_are_reported_in_every_mode() {
    for device in opencl() {
        for mode in MODES {
            let logits = ramp(6, device).reshape([2, 3]).unwrap();
            let labels = Tensor::from_slice(&[0i64, 2], 2, device).unwrap();
            let (mut graph, loss) = Graph::capture(device, || logits.cross_entropy(&labels)).unwrap();
            if !select_mode(&mut graph, mode) {
                continue;
            }
            for _ in 0..3 {
                labels.fill_(1).unwrap();
                graph.replay().unwrap();
                let right = loss.item::<f32>().unwrap();
                assert!(right > 0.0);
                labels.fill_(7).unwrap();
                (0..4).for_each(|_| graph.replay().unwrap());
                let error = loss.item::<f32>().unwrap_err();
                assert!(
                    matches!(error, Error::IndexOutOfRange { index: 7, size: 3, .. }),
                    "{error}, {mode} on {device}"
                );
            }
        }
    }
}

/// While the profiler runs, every kernel of a replay is a separate command with its own time. Afterwards, replays work as before.
#[test]
fn profiles_attribute_the_kernels_of_replays() {
    for device in opencl() {
        for mode in MODES {
            let (x, ones) = (Tensor::zeros(100, device).unwrap(), Tensor::ones(100, device).unwrap());
            let all = Tensor::arange(0, 100, 1, device).unwrap().to_dtype(DType::I64).unwrap();
            // The steps are not formulas, because the graph would fuse formulas.
            let step = || x.index_add_(0, &all, &ones).map(drop);
            let (mut graph, ()) = Graph::capture(device, || (0..5).try_for_each(|_| step())).unwrap();
            if !select_mode(&mut graph, mode) {
                continue;
            }
            graph.replay().unwrap();
            let ((), profile) = profile(|| (0..2).for_each(|_| graph.replay().unwrap())).unwrap();
            let kernels = profile
                .events()
                .iter()
                .filter(|event| event.category == Category::Kernel && event.device == Some(device));
            assert!(kernels.count() >= 10, "{mode} on {device}");
            graph.replay().unwrap();
            assert_eq!((vec(&x), graph.replay_mode()), (vec![20.0; 100], mode), "on {device}");
        }
    }
}

#[test]
fn modes_can_be_parsed() {
    for mode in [ReplayMode::Host, ReplayMode::CommandBuffer, ReplayMode::RecordableQueue] {
        assert_eq!(mode.to_string().parse(), Ok(mode));
    }
    let told = "buffers".parse::<ReplayMode>().unwrap_err();
    assert!(told.contains("'buffers'") && told.contains("command_buffer"), "{told}");
}
