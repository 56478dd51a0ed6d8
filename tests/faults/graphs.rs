//! Graphs whose commands are stored in the driver, as command buffers or recordings. If the driver refuses a replay, the host must execute
//! the commands exactly once. Driver objects must be released after use.

use std::time::Duration;

use claystone::device::ReplayMode;
use claystone::{Device, Error, Graph, Tensor};

use crate::driver::{DEVICE, assert_partial, capture_additions, on_device};
use crate::stand_in::{self, ALWAYS, Faults, Kind};

/// Runs `test` in a child process whose driver stores commands as `kept` says. Returns `None` in the parent.
fn install(test: &str, kept: &str) -> Option<Faults> {
    let here = Faults::here();
    if here.is_none() {
        let mode = if kept == "recordings" { "recordable_queue" } else { "" };
        let variables = [("STAND_IN_GRAPHS", kept), ("CLAYSTONE_GRAPH_REPLAY", mode)];
        let ended = stand_in::run(test, Kind::Real, &variables, Duration::from_secs(300));
        let passed = ended.status.is_some_and(|status| status.success()) && ended.text.contains("1 passed");
        assert!(passed, "{:?}: {}", ended.status, ended.text);
    }
    here
}

fn first_element(t: &Tensor) -> f32 {
    t.to_vec::<f32>().unwrap()[0]
}

#[test]
fn the_host_replays_what_the_driver_refuses_to_keep() {
    let Some(faults) = install("graphs::the_host_replays_what_the_driver_refuses_to_keep", "buffers") else { return };
    for (call, code) in [
        ("clCreateCommandBufferKHR", -6),
        ("clCreateCommandBufferKHR", -1140),
        ("clCommandNDRangeKernelKHR", -59),
        ("clFinalizeCommandBufferKHR", -5),
    ] {
        let t = on_device(&[0.0; 8]);
        let graph = capture_additions(&t, 3);
        assert_eq!(graph.replay_mode(), ReplayMode::CommandBuffer);
        faults.fail(call, 1, 1, code);
        graph.replay().unwrap();
        graph.replay().unwrap();
        assert_eq!((first_element(&t), graph.replay_mode()), (6.0, ReplayMode::Host), "{call}");
    }
    assert_eq!((faults.live_recordings(), faults.calls("clEnqueueCommandBufferKHR")), (0, 0));
    // A new graph is stored in the driver again. If the driver refuses its first or a later enqueue, the host replays it from then on.
    for code in [-59, -1138, -1140] {
        let t = on_device(&[0.0; 8]);
        let graph = capture_additions(&t, 3);
        graph.replay().unwrap();
        assert_eq!(graph.replay_mode(), ReplayMode::CommandBuffer);
        faults.fail("clEnqueueCommandBufferKHR", 1, 1, code);
        let calls = faults.calls("clEnqueueCommandBufferKHR");
        (0..3).for_each(|_| graph.replay().unwrap());
        assert_eq!((first_element(&t), graph.replay_mode()), (12.0, ReplayMode::Host), "{code}");
        assert_eq!(faults.calls("clEnqueueCommandBufferKHR"), calls + 1);
    }
    assert_eq!(faults.live_recordings(), 0);
}

/// A failed replay must be a partial error, because the driver may have executed some of the commands.
#[test]
fn failed_replays_are_partial_errors() {
    let Some(faults) = install("graphs::failed_replays_are_partial_errors", "buffers") else { return };
    let t = on_device(&[0.0; 8]);
    let graph = capture_additions(&t, 600); // fills three command buffers
    graph.replay().unwrap();
    assert_eq!((first_element(&t), faults.live_recordings()), (600.0, 3));
    for nth in [1, 3] {
        t.fill_(0).unwrap();
        faults.fail("clEnqueueCommandBufferKHR", nth, 1, -6);
        assert_partial(graph.replay(), "Graph::replay");
        assert_eq!(first_element(&t), 256.0 * (nth - 1) as f32);
    }
    // With a long queue, replays wait for earlier replays. If an earlier replay failed, the caller's next wait must report it.
    faults.fail_command("clEnqueueCommandBufferKHR", 1, ALWAYS, -14);
    (0..4).for_each(|_| graph.replay().unwrap());
    let error = DEVICE.synchronize().unwrap_err();
    assert!(matches!(error, Error::OpenCl { .. }), "{error}");
    faults.clear();
    t.fill_(0).unwrap();
    graph.replay().unwrap();
    assert_eq!(first_element(&t), 600.0);
    let events = faults.live_events();
    drop(graph);
    assert_eq!(faults.live_recordings(), 0);
    (0..3).for_each(|_| capture_additions(&t, 600).replay().unwrap());
    DEVICE.synchronize().unwrap();
    assert_eq!((faults.live_recordings(), faults.live_events() <= events + 1), (0, true));
}

/// If a command buffer must not be enqueued again while it is pending, the host executes the replays in the meantime.
#[test]
fn pending_command_buffers_are_not_enqueued_again() {
    let Some(faults) = install("graphs::pending_command_buffers_are_not_enqueued_again", "sequential") else {
        return;
    };
    let t = on_device(&[0.0; 8]);
    let graph = capture_additions(&t, 3);
    let launches = || faults.calls("clEnqueueNDRangeKernel");
    let before = launches();
    graph.replay().unwrap();
    assert_eq!((launches(), faults.calls("clEnqueueCommandBufferKHR")), (before, 1));
    DEVICE.synchronize().unwrap();
    faults.delay("clEnqueueCommandBufferKHR", 1_000_000);
    graph.replay().unwrap();
    faults.clear();
    (0..10).for_each(|_| graph.replay().unwrap());
    assert_eq!(launches(), before + 30, "meanwhile");
    assert_eq!((first_element(&t), graph.replay_mode()), (36.0, ReplayMode::CommandBuffer));
    for i in 0..50 {
        graph.replay().unwrap();
        assert_eq!(first_element(&t), (39 + 3 * i) as f32);
    }
    assert_eq!(graph.replay_mode(), ReplayMode::CommandBuffer);
    assert_eq!(faults.errors("clEnqueueCommandBufferKHR"), 0);
    drop(graph);
    assert_eq!(faults.live_recordings(), 0);
}

/// Recordable queues are emulated by the stand-in library, because no device with recordable queues was available.
#[test]
fn recordable_queues_replay_kernels_only() {
    let Some(faults) = install("graphs::recordable_queues_replay_kernels_only", "recordings") else { return };
    let t = on_device(&[0.0; 8]);
    let mut graph = capture_additions(&t, 600);
    assert_eq!(graph.replay_mode(), ReplayMode::RecordableQueue);
    let launches = faults.calls("clEnqueueNDRangeKernel");
    (0..5).for_each(|_| graph.replay().unwrap());
    assert_eq!((first_element(&t), faults.calls("clEnqueueRecordingQCOM")), (3000.0, 15));
    assert_eq!(faults.calls("clEnqueueNDRangeKernel"), launches + 600, "recorded once");
    assert_eq!(faults.live_recordings(), 3);
    graph.set_replay_mode(ReplayMode::Host).unwrap();
    graph.replay().unwrap();
    assert_eq!((first_element(&t), faults.live_recordings()), (3600.0, 0));
    graph.set_replay_mode(ReplayMode::RecordableQueue).unwrap();
    faults.fail("clEnqueueRecordingQCOM", 2, 1, -6);
    assert_partial(graph.replay(), "Graph::replay");
    assert_eq!(first_element(&t), 3856.0);
    // Recordable queues do not accept copies. The host executes the copies, and setting the replay mode reports this.
    let copy = |to: &Tensor| Graph::capture(DEVICE, || to.copy_(&t).map(drop)).unwrap().0;
    let to = Tensor::zeros(8, Device::OpenCL(0)).unwrap();
    let mut transfer = copy(&to);
    transfer.replay().unwrap();
    assert_eq!((first_element(&to), transfer.replay_mode()), (3856.0, ReplayMode::Host));
    let error = transfer.set_replay_mode(ReplayMode::RecordableQueue).unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }) && error.to_string().contains("1 copies"), "{error}");
    drop((graph, transfer));
    assert_eq!(faults.live_recordings(), 0);
}
