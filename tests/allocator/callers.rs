//! Memory histories without call stacks: each block records the source line that called the crate.

use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use claystone::autograd::{CustomOp, OpContext};
use claystone::nn::{Activation, LayerNorm, Linear, Lstm, Module, RnnOptions, Sequential, func};
use claystone::ops::{self, Attention};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::storage::{BlockState, ContextLevel, Frame, HistoryOptions, Recording, Snapshot, TraceAction};
use claystone::{BatchNormOptions, ConvOptions, DType, Device, MaxPoolOptions, PadMode, Result, Tensor, autocast};

use crate::common::{devices, each_device, in_own_process, iota};

fn start_recording(device: Device, stacks: bool) {
    let options = HistoryOptions::default().stacks(stacks).context(ContextLevel::Alloc).clear_history(true);
    device.record_memory_history(options).unwrap();
}

fn stop_recording(device: Device) {
    device.record_memory_history(HistoryOptions::default().enabled(Recording::Off)).unwrap();
}

/// Returns the innermost frame of each allocation since recording began.
fn allocation_frames(device: Device) -> Vec<Option<Frame>> {
    let snapshot = device.memory_snapshot().unwrap();
    let entries = snapshot.device_traces.last().unwrap().iter();
    let made = entries.filter(|entry| matches!(entry.action, TraceAction::Alloc | TraceAction::SegmentAlloc));
    made.map(|entry| entry.frames.first().cloned()).collect()
}

/// Checks that each expression, on a line of its own, allocates, and that all its blocks record that line.
macro_rules! each_of_its_line {
    ($device:expr; $($expression:expr;)+) => {
        let mut line = line!();
        $(line += 1;
        for stacks in [false, true] {
            start_recording($device, stacks);
            let result = $expression;
            let of = format!("{}: {}, stacks: {stacks}", $device, stringify!($expression));
            let frames = allocation_frames($device);
            assert!(result.is_ok(), "{of}: {:?}", result.err());
            assert!(!frames.is_empty(), "{of}: nothing was allocated");
            let here = |f: &Frame| f.filename.ends_with("tests/allocator/callers.rs") && f.line == line;
            assert!(frames.iter().all(|f| f.as_ref().is_some_and(here)), "{of}: not of line {line}: {frames:?}");
            assert!(stacks || frames.iter().flatten().all(|f| f.name.is_empty()), "{of}: {frames:?}");
        })+
    };
}

#[test]
fn new_tensors_have_the_callers_line() {
    if !in_own_process("callers::new_tensors_have_the_callers_line") {
        return;
    }
    each_device(|d| {
        let (t, half) = (iota(&[4, 6], d), (DType::F16, d));
        let array = ndarray::Array2::<f32>::ones((2, 3));
        let other = if d == Device::Cpu { devices().pop().unwrap() } else { Device::Cpu };
        let there = iota(&[4, 6], other);
        each_of_its_line! { d;
            Tensor::empty(&[4, 6], d);
            Tensor::zeros(&[4, 6], half);
            Tensor::ones(&[4, 6], d);
            Tensor::full(&[4, 6], 2.5, half);
            Tensor::eye([3, 4], d);
            Tensor::arange(0, 10, 1, d);
            Tensor::linspace(0.0, 1.0, 5, d);
            Tensor::rand(&[4, 6], d);
            Tensor::randn(&[4, 6], half);
            Tensor::randint(0, 9, &[4, 6], (DType::I64, d));
            Tensor::randperm(20, d);
            t.zeros_like();
            t.full_like(3);
            t.rand_like();
            Tensor::from_slice(&[1f32, 2.0], 2, d);
            Tensor::from_bytes(&[0; 16], 4, d);
            Tensor::from_ndarray_view(&array, d);
            t.try_clone();
            Ok::<_, String>(t.clone());
            t.t().unwrap().contiguous();
            t.t().unwrap().reshape(24);
            t.t().unwrap().flatten(0, -1);
            t.to_dtype(DType::BF16);
            t.to(DType::F64, d);
        }
        if other != d {
            each_of_its_line! { d;
                there.to_device(d);
            }
        }
        if d != Device::Cpu {
            each_of_its_line! { d;
                Tensor::from_vec(vec![1f32; 6], [2, 3], d);
                Tensor::from_ndarray(array.clone(), d);
            }
        }
        stop_recording(d);
    });
}

#[test]
fn operations_have_the_callers_line() {
    if !in_own_process("callers::operations_have_the_callers_line") {
        return;
    }
    each_device(|d| {
        let (a, b) = (iota(&[4, 6], d), iota(&[4, 6], d));
        let (square, row) = (iota(&[6, 6], d), iota(&[6], d));
        let (index, labels) =
            (Tensor::arange(0, 4, 1, (DType::I64, d)).unwrap(), Tensor::zeros(4, (DType::I64, d)).unwrap());
        let (image, kernel) = (Tensor::ones(&[2, 3, 8, 8], d).unwrap(), Tensor::ones(&[4, 3, 3, 3], d).unwrap());
        let (turned, tracked) =
            (Tensor::ones(&[3, 4, 2, 2], d).unwrap(), iota(&[4, 6], d).requires_grad_(true).unwrap());
        let heads = Tensor::ones(&[1, 2, 5, 8], d).unwrap();
        each_of_its_line! { d;
            Ok::<_, String>(&a + &b);
            Ok::<_, String>(&a * 2.0);
            Ok::<_, String>(1.0 - &a);
            Ok::<_, String>(-&a);
            a.add(&b);
            a.add(&row.to_dtype(DType::F16).unwrap());
            a.subtract(&b);
            a.exp();
            a.gt_scalar(1);
            a.clamp(0.0, 1.0);
            tracked.relu();
            Tensor::map(&[&a, &b], |e| &e[0] * &e[1]);
            a.sum((), false);
            a.mean(0, true);
            a.argmax(1, false);
            a.var((), 1, false);
            a.cumsum(0);
            a.matmul(&square);
            a.linear(&square, Some(&row));
            a.linear_map(&square, None, |e| e.relu());
            Tensor::einsum("ij,jk->ik", &[&a, &square]);
            a.addmm(&a, &square, 1, 1);
            image.conv2d(&kernel, None, ConvOptions { padding: 1.into(), ..Default::default() });
            image.conv_transpose2d(&turned, None, Default::default());
            image.max_pool2d([2, 2], MaxPoolOptions::default());
            image.adaptive_avg_pool2d([1, 1]);
            a.layer_norm(&[6], Some(&row), Some(&row), 1e-5);
            image.batch_norm(BatchNormOptions { training: true, ..Default::default() });
            heads.scaled_dot_product_attention(&heads, &heads, Attention::default());
            a.softmax(-1);
            tracked.log_softmax(0);
            a.cross_entropy(&labels);
            a.mse_loss(&b);
            a.dropout(0.5);
            Tensor::cat(&[&a, &b], 0);
            Tensor::stack(&[&a, &b], -1);
            Tensor::hstack(&[&a, &b]);
            a.repeat(&[2, 1]);
            a.pad(&[1, 1], PadMode::Reflect);
            a.tril(0);
            a.roll(&[1], &[0]);
            a.index_select(0, &index);
            a.embedding(&index);
            a.gather(0, &Tensor::zeros(&[2, 6], (DType::I64, d)).unwrap());
            a.scatter_add(0, &Tensor::zeros(&[2, 6], (DType::I64, d)).unwrap(), &b);
            a.index(&[Some(&index)]);
            a.nonzero();
            a.sort(0, false);
            a.topk(2, 1, true);
            a.unique();
            ops::call("add", &[&a, &b], &[]);
            ops::call_named("add", &[&a, &b], &[]);
            autocast(DType::BF16, || a.matmul(&square));
            tracked.exp().unwrap().sum((), false).unwrap().backward();
        }
        stop_recording(d);
    });
}

#[test]
fn layers_and_optimizers_have_the_callers_line() {
    if !in_own_process("callers::layers_and_optimizers_have_the_callers_line") {
        return;
    }
    each_device(|d| {
        let x = iota(&[4, 6], d);
        let line_of_func = line!() + 1;
        let act = func(|x| x.exp());
        let net = Sequential::new()
            .push(Linear::new(6, 6, d).unwrap().with_activation(Activation::Relu))
            .push(LayerNorm::new(&[6], d).unwrap());
        let lstm = Lstm::new(6, 3, RnnOptions::default(), d).unwrap();
        let mut leaf = iota(&[4, 6], d).requires_grad_(true).unwrap();
        let momentum = SgdConfig { momentum: 0.9, ..SgdConfig::default() };
        each_of_its_line! { d;
            Linear::new(6, 6, d);
            LayerNorm::new(&[6], d);
            Lstm::new(6, 3, RnnOptions::default(), d);
            net.forward(&x);
            lstm.run(&x, None);
            lstm.forward(&x);
            Sgd::new(vec![&mut leaf], momentum);
        }
        let mut sgd = Sgd::new(vec![&mut leaf], momentum).unwrap();
        leaf.exp().unwrap().sum((), false).unwrap().backward().unwrap();
        start_recording(d, false);
        let step = (line!(), sgd.step()).0;
        let lines = |frames: Vec<Option<Frame>>| frames.iter().map(|f| f.as_ref().map(|f| f.line)).collect::<Vec<_>>();
        assert!(lines(allocation_frames(d)).iter().all(|&line| line == Some(step)), "{d}");
        // Allocations in a closure that a layer calls record the closure's own line, as they do in a call stack.
        start_recording(d, false);
        act.forward(&x).unwrap();
        assert_eq!(lines(allocation_frames(d)), [Some(line_of_func)], "{d}");
        stop_recording(d);
    });
}

/// Allocations of a backward pass record the line that started the pass. Allocations of a user-defined backward record their own
/// lines.
#[test]
fn backward_allocations_have_the_callers_line() {
    struct Twice;
    static INSIDE: AtomicU32 = AtomicU32::new(0);
    impl CustomOp for Twice {
        fn name(&self) -> &'static str {
            "twice"
        }
        fn forward(&self, _: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
            inputs[0].add(inputs[0])
        }
        fn backward(&self, _: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
            INSIDE.store(line!() + 1, Ordering::Relaxed);
            Ok(vec![Some(grad.add(grad)?)])
        }
    }
    if !in_own_process("callers::backward_allocations_have_the_callers_line") {
        return;
    }
    each_device(|d| {
        let x = iota(&[1000], d).requires_grad_(true).unwrap();
        let y = Tensor::apply_op(Twice, &[&x.exp().unwrap()]).unwrap().exp().unwrap().sum((), false).unwrap();
        start_recording(d, false);
        let line = (line!(), y.backward().unwrap()).0;
        let lines: Vec<_> = allocation_frames(d).into_iter().map(|frame| frame.expect("of a line").line).collect();
        let inside = INSIDE.load(Ordering::Relaxed);
        assert!(lines.contains(&inside), "{d}: {lines:?} has no {inside}");
        assert_eq!((lines.first(), lines.last()), (Some(&line), Some(&line)), "{d}: {lines:?}");
        assert!(lines.iter().all(|l| [line, inside].contains(l)), "{d}: {lines:?}");
        stop_recording(d);
    });
}

#[test]
fn the_command_prints_live_memory_by_source_line() {
    if !in_own_process("callers::the_command_prints_live_memory_by_source_line") {
        return;
    }
    each_device(|d| {
        let before = Tensor::zeros(&[5 << 20], (DType::U8, d)).unwrap();
        start_recording(d, false);
        let (leaked, line) = ([0; 3].map(|_| Tensor::zeros(&[1 << 20], (DType::U8, d)).unwrap()), line!());
        let snapshot = d.memory_snapshot().unwrap();
        snapshot.check().unwrap();
        let live = snapshot.live_blocks().into_iter().find(|block| block.bytes == 1 << 20).unwrap();
        assert_eq!((&live.frames[0].name[..], live.frames[0].line), ("", line), "{d}");
        let in_use =
            snapshot.segments.iter().flat_map(|s| &s.blocks).filter(|b| b.state == BlockState::ActiveAllocated);
        assert!(in_use.count() >= 4, "{d}");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("lines-{d}.pickle").replace(':', "-"));
        snapshot.save(&file).unwrap();
        let text = Snapshot::load(&file).unwrap().to_string();
        let expected = format!("   3.00 MiB        3  {}:{line}\n", file!());
        let (_, table) = text.split_once("in use, by source line:\n").unwrap_or_else(|| panic!("{d}: {text}"));
        assert!(table.contains(&expected), "{d}: {text}");
        drop((leaked, before));
        stop_recording(d);
    });
}
