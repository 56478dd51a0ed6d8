//! Snapshots taken during training: they are consistent, and all readers read the same contents.

use std::path::Path;
use std::process::Command;

use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::storage::{
    BlockState, HistoryOptions, Recording, SegmentInfo, Setting, Snapshot, Stage, TraceAction, annotate, with_context,
};
use claystone::{DType, Device, Result, Tensor, manual_seed};

use crate::common::{each_device, in_own_process};

/// Trains a small network for some steps, and takes a snapshot in the last step between forward and backward.
fn snapshot_in_training(device: Device, steps: usize) -> Result<Snapshot> {
    manual_seed(1);
    let options = (DType::F32, device);
    let mut net = Sequential::new()
        .push(Linear::new(64, 128, options)?.with_activation(Activation::Relu))
        .push(Linear::new(128, 10, options)?);
    let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.1, ..Default::default() })?;
    let x = Tensor::rand(&[32, 64], options)?;
    let y = Tensor::randint(0, 10, &[32], (DType::I64, device))?;
    let mut snapshot = None;
    for step in 1..=steps {
        sgd.zero_grad();
        let loss = annotate("forward", || with_context("forward", || net.forward(&x)?.cross_entropy(&y)))?;
        if step == steps {
            snapshot = Some(device.memory_snapshot()?);
        }
        annotate("backward", || with_context("backward", || loss.backward()))?;
        sgd.step()?;
    }
    Ok(snapshot.expect("at least one step"))
}

/// Returns the file as loaded by Python's pickle and printed as JSON. `None` without Python.
fn load_with_python(file: &Path) -> Option<String> {
    let script = "import json, pickle, sys; print(json.dumps(pickle.load(open(sys.argv[1], 'rb'))))";
    let output = Command::new("python3").args(["-c", script]).arg(file).output().ok()?; // without Python, this fails
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "Python does not read the pickle: {error}");
    Some(String::from_utf8(output.stdout).expect("JSON is UTF-8"))
}

fn check(snapshot: &Snapshot, device: Device, name: &str) -> Result<()> {
    snapshot.check()?;
    let pickle = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}.pickle"));
    let json = pickle.with_extension("json");
    snapshot.save(&pickle)?;
    snapshot.save(&json)?;
    assert_eq!(&Snapshot::load(&pickle)?, snapshot, "{device}: the pickle");
    assert_eq!(&Snapshot::load(&json)?, snapshot, "{device}: the JSON");
    if let Some(text) = load_with_python(&pickle) {
        let value = |text: &str| serde_json::from_str::<serde_json::Value>(text).expect("JSON");
        assert_eq!(value(&text), value(&snapshot.to_json()?), "{device}: Python reads something else");
    }
    Ok(())
}

#[test]
fn snapshots_during_training_are_consistent() -> Result<()> {
    if !in_own_process("snapshot::snapshots_during_training_are_consistent") {
        return Ok(());
    }
    each_device(|device| {
        device.record_memory_history(HistoryOptions::default()).unwrap();
        let snapshot = snapshot_in_training(device, 3).unwrap();
        let name = format!("training-{device}").replace(':', "-");
        check(&snapshot, device, &name).unwrap();

        let number = snapshot.device_traces.len() - 1;
        let trace = &snapshot.device_traces[number];
        let count =
            |action, context: &str| trace.iter().filter(|e| e.action == action && e.compile_context == context).count();
        assert!(count(TraceAction::Alloc, "forward") >= 3 * 2, "{device}: two layers, three times");
        // Two steps ran a backward pass, and each allocated the hidden layer's gradient. The snapshot was taken before the last
        // backward pass.
        assert_eq!(count(TraceAction::Alloc, "backward"), 2, "{device}");
        assert!(count(TraceAction::FreeCompleted, "backward") > 0, "{device}: backward frees activations");
        assert_eq!(count(TraceAction::Snapshot, ""), 1, "{device}");
        assert!(count(TraceAction::SegmentAlloc, "") + count(TraceAction::SegmentAlloc, "forward") > 0, "{device}");

        // Activations that backward reads are live, and record the call stack of their creation.
        let blocks = snapshot.segments.iter().flat_map(|s| &s.blocks);
        let kept =
            blocks.filter(|b| b.state == BlockState::ActiveAllocated && b.frames.iter().any(|f| f.name == "forward"));
        assert!(kept.map(|b| b.requested_size).sum::<u64>() >= 32 * 128 * 4, "{device}: the hidden layer is live");
        assert!(snapshot.segments.iter().all(|s| s.device as usize == number));

        let spans = |name: &str, stage| {
            snapshot.external_annotations.iter().filter(|a| a.name == name && a.stage == stage).count()
        };
        assert!(spans("forward", Stage::Start) >= 3 && spans("backward", Stage::End) >= 2, "{device}");
        assert_eq!(snapshot.allocator_settings["trace_alloc_max_entries"], Setting::Int(100_000));
        let free = snapshot.fragmentation().all;
        let reserved = snapshot.segments.iter().map(|s| s.total_size).sum::<u64>();
        let active = snapshot.segments.iter().map(SegmentInfo::active_size).sum::<u64>();
        assert_eq!((free.reserved, free.total_free), (reserved, reserved - active), "{device}");

        // With only 40 entries, most events are overwritten. The remaining events must be consistent with the blocks.
        device.record_memory_history(HistoryOptions::default().max_entries(40).clear_history(true)).unwrap();
        let snapshot = snapshot_in_training(device, 20).unwrap();
        check(&snapshot, device, &format!("{name}-overflow")).unwrap();
        assert_eq!(snapshot.device_traces[number].len(), 40, "{device}");
        let Setting::Int(lost) = snapshot.allocator_settings["trace_alloc_overflowed"] else { panic!("{device}") };
        assert!(lost > 100, "{device}: {lost} events lost");

        device.record_memory_history(HistoryOptions::default().enabled(Recording::Off)).unwrap();
        let after = device.memory_snapshot().unwrap();
        assert!(after.device_traces[number].is_empty() && after.check().is_ok(), "{device}");
    });
    Ok(())
}
