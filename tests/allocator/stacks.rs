//! Call stacks in memory histories identify the source line of a leak.

use std::path::Path;
use std::thread;

use claystone::storage::{
    BlockState, ContextLevel, Frame, HistoryOptions, LiveMemory, Recording, Snapshot, TraceAction, with_context,
};
use claystone::{DType, Device, Result, Tensor};

use crate::common::{devices, each_device, in_own_process};

/// Size of the leaked tensor in bytes, more than any other tensor of these tests.
const LEAK_BYTES: usize = 3 << 20;

#[inline(never)]
fn leak(device: Device) -> (Tensor, u32) {
    (Tensor::zeros(&[LEAK_BYTES], (DType::U8, device)).unwrap(), line!())
}

#[inline(never)]
fn work(device: Device) -> Result<()> {
    let x = Tensor::rand(&[64, 64], device)?.requires_grad_(true)?;
    x.matmul(&x)?.relu()?.sum((), false)?.backward()
}

#[inline(never)]
fn step(device: Device) -> (Tensor, u32) {
    work(device).unwrap();
    with_context("leaks here", || leak(device))
}

fn record(device: Device, options: HistoryOptions) {
    device.record_memory_history(options).unwrap();
}

fn largest(snapshot: &Snapshot) -> LiveMemory {
    snapshot.live_memory().remove(0)
}

fn is_function_in_this_file(frame: &Frame, function: &str) -> bool {
    frame.filename.ends_with("tests/allocator/stacks.rs") && frame.name.ends_with(function)
}

fn frames(snapshot: &Snapshot) -> impl Iterator<Item = &Frame> {
    let blocks = snapshot.segments.iter().flat_map(|s| s.blocks.iter().map(|b| &b.frames).chain([&s.frames]));
    blocks.chain(snapshot.device_traces.iter().flatten().map(|entry| &entry.frames)).flat_map(|frames| frames.iter())
}

#[test]
fn stacks_identify_the_line_of_a_leak() {
    if !in_own_process("stacks::stacks_identify_the_line_of_a_leak") {
        return;
    }
    each_device(|device| {
        record(device, HistoryOptions::default());
        work(device).unwrap();
        let (leaked, line) = step(device);
        for _ in 0..3 {
            work(device).unwrap();
        }
        let snapshot = device.memory_snapshot().unwrap();
        let name = format!("leak-{device}").replace(':', "-");
        let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        for file in ["pickle", "json"].map(|ending| file.with_extension(ending)) {
            snapshot.save(&file).unwrap();
            let snapshot = Snapshot::load(&file).unwrap();
            snapshot.check().unwrap();
            let LiveMemory { frames, bytes, blocks } = largest(&snapshot);
            assert_eq!((bytes, blocks), (LEAK_BYTES as u64, 1), "{device}");
            assert!(is_function_in_this_file(&frames[0], "leak"), "{device}: {frames:?}");
            assert_eq!(frames[0].line, line, "{device}");
            let step = frames.iter().position(|frame| is_function_in_this_file(frame, "step")).unwrap();
            let test =
                frames.iter().position(|frame| frame.name.contains("stacks_identify_the_line_of_a_leak")).unwrap();
            assert!(step < test, "{device}: the callers, the innermost first");
            assert_eq!(frames.last().map(|frame| frame.name.as_str()), Some("leaks here"), "{device}");
            let text = snapshot.to_string();
            assert!(text.contains(&format!("3.00 MiB        1  {}", frames[0])), "{device}: {text}");
            assert!(text.contains(&format!("stacks.rs:{line})")), "{device}: {text}");
        }
        // The allocation event has the same call stack as the block. Free events have a call stack too.
        let number = snapshot.device_traces.len() - 1;
        let trace = &snapshot.device_traces[number];
        let leaks =
            trace.iter().filter(|entry| entry.frames.first().is_some_and(|f| is_function_in_this_file(f, "leak")));
        let leaks: Vec<_> = leaks.filter(|entry| entry.action == TraceAction::Alloc).collect();
        assert_eq!(leaks.len(), 1, "{device}");
        assert_eq!((leaks[0].size, leaks[0].compile_context.as_str()), (LEAK_BYTES as u64, "leaks here"), "{device}");
        let freed = |entry: &&claystone::storage::TraceEntry| entry.action == TraceAction::FreeRequested;
        let here = |entry: &claystone::storage::TraceEntry| {
            entry.frames.first().is_some_and(|f| is_function_in_this_file(f, "work"))
        };
        assert!(trace.iter().filter(freed).any(here), "{device}");
        // Stacks contain only frames of this program and user annotations, and no frames of the crate.
        let inner = frames(&snapshot).find(|frame| !frame.filename.contains("tests/") && frame.name != "leaks here");
        assert_eq!(inner, None, "{device}");
        record(device, HistoryOptions::default().enabled(Recording::Off));
        drop(leaked);
    });
}

#[test]
fn context_levels_select_events_with_stacks() {
    if !in_own_process("stacks::context_levels_select_events_with_stacks") {
        return;
    }
    let here = |frames: &[Frame]| frames.first().is_some_and(|frame| is_function_in_this_file(frame, "leak"));
    for device in devices() {
        for (context, stacks, expected) in [
            (ContextLevel::Never, true, [false; 3]),
            (ContextLevel::State, true, [true, false, false]),
            (ContextLevel::Alloc, true, [true, true, false]),
            (ContextLevel::All, true, [true, true, true]),
            (ContextLevel::All, false, [false; 3]),
        ] {
            record(device, HistoryOptions::default().context(context).stacks(stacks).clear_history(true));
            let (leaked, _) = leak(device);
            drop(step(device));
            let snapshot = device.memory_snapshot().unwrap();
            let mut blocks = snapshot.segments.iter().flat_map(|s| &s.blocks);
            let entries: Vec<_> = snapshot.device_traces.iter().flatten().collect();
            let of = |action| entries.iter().filter(move |entry| entry.action == action);
            let found = [
                blocks.any(|block| block.state == BlockState::ActiveAllocated && here(&block.frames)),
                of(TraceAction::Alloc).any(|entry| here(&entry.frames)),
                of(TraceAction::FreeCompleted).any(|entry| !entry.frames.is_empty()),
            ];
            assert_eq!(found, expected, "{device}: {context:?}, stacks: {stacks}");
            drop(leaked);
        }
        record(device, HistoryOptions::default().enabled(Recording::Off));
    }
}

/// Closures that operations call, and other threads, record their own call stacks.
#[test]
fn callbacks_and_threads_have_their_own_stacks() {
    use claystone::autograd::{CustomOp, OpContext};
    struct Twice;
    impl CustomOp for Twice {
        fn name(&self) -> &'static str {
            "twice"
        }
        fn forward(&self, _: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
            inputs[0].add(inputs[0])
        }
        fn backward(&self, _: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
            Ok(vec![Some(grad.add(grad)?)])
        }
    }
    if !in_own_process("stacks::callbacks_and_threads_have_their_own_stacks") {
        return;
    }
    each_device(|device| {
        record(device, HistoryOptions::default());
        let x = Tensor::ones(&[1000], device).unwrap().requires_grad_(true).unwrap();
        let y = Tensor::apply_op(Twice, &[&x]).unwrap();
        y.sum((), false).unwrap().backward().unwrap();
        let spawned = line!() + 1;
        let threads: Vec<_> = (0..4).map(|_| thread::spawn(move || step(device))).collect();
        let leaked: Vec<_> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
        let snapshot = device.memory_snapshot().unwrap();
        let LiveMemory { frames, bytes, blocks } = largest(&snapshot);
        assert_eq!((bytes, blocks, frames[0].line), (4 * LEAK_BYTES as u64, 4, leaked[0].1), "{device}");
        let closure = |f: &Frame| f.filename.ends_with("stacks.rs") && f.line == spawned;
        assert!(frames.iter().any(closure), "{device}: the thread's closure");
        for method in ["forward", "backward"] {
            let inside = |frames: &[Frame]| {
                frames.first().is_some_and(|f| is_function_in_this_file(f, method))
                    && frames.iter().skip(1).any(|f| f.name.contains("callbacks_and_threads"))
            };
            let mut entries = snapshot.device_traces.iter().flatten();
            assert!(entries.any(|entry| inside(&entry.frames)), "{device}: {method}");
        }
        record(device, HistoryOptions::default().enabled(Recording::Off));
    });
}
