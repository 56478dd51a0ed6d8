//! Failing driver calls. Host memory that the device still uses must be kept. A kernel's fault must be reported to the thread that
//! launched the kernel. If an operation has changed its target, its error must not claim that the operation did not run.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{Device, Error, Graph, Result, Stream, Tensor};

use crate::stand_in::{ALWAYS, Faults, Kind};

pub(crate) const DEVICE: Device = Device::OpenCL(0);
/// All driver functions that report whether commands have finished.
const WAIT_CALLS: [&str; 6] =
    ["clFinish", "clFlush", "clWaitForEvents", "clGetEventInfo", "clEnqueueMarkerWithWaitList", "clEnqueueMarker"];
/// A number of elements so small that their transfer uses neither maps nor pinned staging slices.
pub(crate) const SMALL_ELEMENTS: usize = 1000;
/// A number of f32 elements (2 MiB) that a discrete GPU transfers through pinned staging slices.
pub(crate) const STAGED_ELEMENTS: usize = 512 << 10;

pub(crate) fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

/// Captures a graph that adds one to `t` in `times` launches. It uses index additions, because pointwise additions would be fused.
pub(crate) fn capture_additions(t: &Tensor, times: usize) -> Graph {
    let n = t.numel();
    let ones = on_device(&vec![1.0; n]);
    let all = Tensor::from_slice(&(0..n as i64).collect::<Vec<_>>(), n, DEVICE).unwrap();
    Graph::capture(DEVICE, || (0..times).try_for_each(|_| t.index_add_(0, &all, &ones).map(drop))).unwrap().0
}

pub(crate) fn on_device(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, values.len(), DEVICE).unwrap()
}

/// Waits longer than the delays of commands in these tests.
pub(crate) fn wait_for_delayed_commands() {
    thread::sleep(Duration::from_millis(600));
}

/// Makes every function fail that can report the end of commands, and delays reads and writes of host memory.
pub(crate) fn fail_all_waits(faults: &Faults) {
    ["clEnqueueReadBuffer", "clEnqueueWriteBuffer"].iter().for_each(|name| faults.delay(name, 300_000));
    WAIT_CALLS.iter().for_each(|name| faults.fail(name, 1, ALWAYS, -6));
}

#[track_caller]
pub(crate) fn assert_device_lost<T: std::fmt::Debug>(result: Result<T>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    assert!(error.to_string().contains("never released"), "{error}");
}

/// A log subscriber that lists the devices and uses a device at every message. It does not count messages that this use causes.
struct UsesDevice(&'static AtomicUsize);

impl tracing::Subscriber for UsesDevice {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_event()
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        thread_local!(static BUSY: Cell<bool> = const { Cell::new(false) });
        if !BUSY.replace(true) {
            self.0.fetch_add(1, Relaxed);
            let sum = Tensor::ones(100, Device::best()).and_then(|ones| ones.exp()?.sum((), false)?.item::<f32>());
            assert!(sum.unwrap() > 271.0);
            BUSY.set(false);
        }
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// The subscriber is active from the first use of a device on: during discovery, opening and kernel compilation. It must not deadlock.
#[test]
fn log_subscribers_may_use_the_device() {
    let Some(faults) = Faults::install("driver::log_subscribers_may_use_the_device", Kind::Real) else {
        return;
    };
    static MESSAGES: AtomicUsize = AtomicUsize::new(0);
    tracing::subscriber::set_global_default(UsesDevice(&MESSAGES)).unwrap();
    let tried_again = ["clGetDeviceInfo", "clCreateContext"]; // discovery retries these calls and logs their failures
    tried_again.iter().for_each(|name| faults.fail(name, 1, 1, -6));
    assert_eq!(Device::best(), DEVICE);
    assert!(MESSAGES.load(Relaxed) > 0);
    assert_eq!(on_device(&[1.0, 2.0]).softmax(0).unwrap().to_vec::<f32>().unwrap().len(), 2);
    assert_eq!(tried_again.map(|name| faults.injected(name)), [1, 1]);
    // The driver calls back about a fault inside the failing call, while the crate holds the locks of its queues.
    let (x, before) = (on_device(&[1.0, 2.0]), MESSAGES.load(Relaxed));
    faults.fail("clEnqueueNDRangeKernel", 1, 1, -5);
    x.exp().unwrap_err();
    assert!(MESSAGES.load(Relaxed) > before, "the driver's message is logged");
}

/// Checks that a failed wait does not count as a failed command if other calls show that the command succeeded.
fn check_failed_waits_do_not_fail_commands(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (t, here) = (on_device(&ramp(SMALL_ELEMENTS)), Tensor::zeros(SMALL_ELEMENTS, Device::Cpu).unwrap());
    faults.delay("clEnqueueReadBuffer", 5_000);
    for name in WAIT_CALLS {
        for (times, code) in [(1, -6), (2, -5), (2, -36), (5, -6), (ALWAYS, -14)] {
            faults.fail(name, 1, times, code);
            if (name, times) == ("clGetEventInfo", ALWAYS) {
                // The read has finished, but no call reports whether it failed, so the result must be an error.
                let error = t.to_vec::<f32>().unwrap_err();
                assert!(matches!(error, Error::OpenCl { call: "clGetEventInfo", .. }), "{error}");
                faults.clear();
                faults.delay("clEnqueueReadBuffer", 5_000);
            }
            assert_eq!(t.to_vec::<f32>().unwrap(), ramp(SMALL_ELEMENTS), "{times} times {code} of {name}");
            here.zero_().unwrap();
            here.copy_(&t).unwrap();
            assert_eq!(here.to_vec::<f32>().unwrap(), ramp(SMALL_ELEMENTS), "{times} times {code} of {name}");
            faults.fail(name, 1, 0, code);
        }
    }
    assert!(faults.injected("any") > 0 && DEVICE.is_available());
}

#[test]
fn failed_waits_do_not_fail_commands_on_processors() {
    check_failed_waits_do_not_fail_commands("driver::failed_waits_do_not_fail_commands_on_processors", Kind::Real);
}

#[test]
fn failed_waits_do_not_fail_commands_on_discrete_gpus() {
    check_failed_waits_do_not_fail_commands(
        "driver::failed_waits_do_not_fail_commands_on_discrete_gpus",
        Kind::DiscreteGpu,
    );
}

/// Checks that a kernel's fault is reported once, to the thread that launched the kernel, even if other driver calls fail meanwhile.
fn check_kernel_faults_are_reported_once(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let x = on_device(&[1.0, 2.0, 3.0]);
    let index = |at: i64| Tensor::from_slice(&[at], 1, DEVICE).unwrap();
    let (bad, good) = (index(99), index(1));
    let assert_reports_fault = |result: Result<Vec<f32>>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { index: 99, .. }), "{error}");
    };
    // These calls are the read of the data, the read of the fault words, and the write that clears the fault words.
    for (name, nth) in [("clEnqueueReadBuffer", 1), ("clEnqueueReadBuffer", 2), ("clEnqueueWriteBuffer", 1)] {
        let y = x.index_select(0, &bad).unwrap();
        faults.fail(name, nth, 1, -4);
        if name == "clEnqueueReadBuffer" {
            let error = y.to_vec::<f32>().unwrap_err();
            assert!(matches!(error, Error::OpenCl { call: "clEnqueueReadBuffer", .. }), "{error}");
        }
        assert_reports_fault(y.to_vec::<f32>());
        for _ in 0..2 {
            let z = x.index_select(0, &good).unwrap();
            assert_eq!(z.to_vec::<f32>().unwrap(), [2.0], "after a failed {name}");
        }
        faults.clear();
    }
    // The read of the fault words may fail after it was accepted, without an error. On a processor this read is the first read.
    let nth = if kind == Kind::DiscreteGpu { 2 } else { 1 };
    let y = x.index_select(0, &bad).unwrap();
    faults.drop_command("clEnqueueReadBuffer", nth, 1);
    let error = y.to_vec::<f32>().unwrap_err();
    assert!(matches!(error, Error::OpenCl { call: "clEnqueueReadBuffer", .. }), "{error}");
    assert_eq!(faults.injected("clEnqueueReadBuffer"), 3);
    assert_reports_fault(y.to_vec::<f32>());
    assert_eq!(x.index_select(0, &good).unwrap().to_vec::<f32>().unwrap(), [2.0]);
    // The write that clears the fault words may fail several times. Kernels must not use the words before they are cleared.
    let y = x.index_select(0, &bad).unwrap();
    faults.fail("clEnqueueWriteBuffer", 1, 2, -4);
    assert_reports_fault(y.to_vec::<f32>());
    assert!(x.index_select(0, &good).is_err());
    assert_eq!(x.index_select(0, &good).unwrap().to_vec::<f32>().unwrap(), [2.0]);
}

#[test]
fn kernel_faults_are_reported_once_on_processors() {
    check_kernel_faults_are_reported_once("driver::kernel_faults_are_reported_once_on_processors", Kind::Real);
}

#[test]
fn kernel_faults_are_reported_once_on_discrete_gpus() {
    check_kernel_faults_are_reported_once(
        "driver::kernel_faults_are_reported_once_on_discrete_gpus",
        Kind::DiscreteGpu,
    );
}

/// Checks that a transfer that is accepted and fails later is an error, even if the wait succeeds as with NVIDIA's driver.
fn check_late_transfer_failures_are_errors(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (t, new) = (on_device(&ramp(SMALL_ELEMENTS)), vec![-1.0; SMALL_ELEMENTS]);
    let host = Tensor::from_slice(&new, SMALL_ELEMENTS, Device::Cpu).unwrap();
    type Transfer<'a> = &'a dyn Fn() -> Result<Vec<f32>>;
    let transfers: [(&str, Transfer<'_>); 4] = [
        ("clEnqueueReadBuffer", &|| t.to_vec()),
        ("clEnqueueReadBuffer", &|| t.to_device(Device::Cpu)?.to_vec()),
        ("clEnqueueCopyBuffer", &|| t.try_clone()?.to_vec()),
        ("clEnqueueWriteBuffer", &|| Tensor::from_slice(&ramp(SMALL_ELEMENTS), SMALL_ELEMENTS, DEVICE)?.to_vec()),
    ];
    faults.make_waits_succeed();
    for (name, transfer) in transfers {
        assert_eq!(transfer().unwrap(), ramp(SMALL_ELEMENTS));
        let before = faults.injected(name);
        faults.fail_command(name, 1, 1, -4);
        let error = transfer().unwrap_err();
        assert!(matches!(error, Error::OpenCl { .. }), "{name}: {error}");
        assert_eq!(faults.injected(name), before + 1, "the command was asked for an event");
        assert_eq!(transfer().unwrap(), ramp(SMALL_ELEMENTS), "after a {name} that failed");
    }
    faults.fail_command("clEnqueueWriteBuffer", 1, 1, -4);
    t.copy_(&host).unwrap_err();
    assert_eq!(t.to_vec::<f32>().unwrap(), ramp(SMALL_ELEMENTS));
    t.copy_(&host).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), new);
    let events = faults.live_events();
    (0..100).for_each(|_| assert_eq!(t.to_vec::<f32>().unwrap(), new));
    assert!(faults.live_events() <= events, "each is released at once");
}

#[test]
fn late_transfer_failures_are_errors_on_processors() {
    check_late_transfer_failures_are_errors("driver::late_transfer_failures_are_errors_on_processors", Kind::Real);
}

#[test]
fn late_transfer_failures_are_errors_on_discrete_gpus() {
    check_late_transfer_failures_are_errors(
        "driver::late_transfer_failures_are_errors_on_discrete_gpus",
        Kind::DiscreteGpu,
    );
}

/// Checks that threads which end without reading their fault words leak no memory, and that the kernels' faults are still reported.
fn check_ended_threads_do_not_leak_memory(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let x = on_device(&[1.0, 2.0, 3.0]);
    let index = |at: i64| Tensor::from_slice(&[at], 1, DEVICE).unwrap();
    let (bad, good) = (index(99), index(1));
    let select =
        |index: &Tensor| drop(thread::scope(|s| s.spawn(|| x.index_select(0, index).unwrap()).join().unwrap()));
    select(&bad);
    (0..30).for_each(|_| select(&good));
    let buffers = faults.live_buffers();
    (0..50).for_each(|_| select(&good));
    assert!(faults.live_buffers() <= buffers + 1, "{} buffers, then {}", buffers, faults.live_buffers());
    let error = DEVICE.synchronize().unwrap_err();
    assert!(matches!(error, Error::IndexOutOfRange { index: 99, .. }), "{error}");
    DEVICE.synchronize().unwrap();
}

#[test]
fn ended_threads_do_not_leak_memory_on_processors() {
    check_ended_threads_do_not_leak_memory("driver::ended_threads_do_not_leak_memory_on_processors", Kind::Real);
}

#[test]
fn ended_threads_do_not_leak_memory_on_discrete_gpus() {
    check_ended_threads_do_not_leak_memory(
        "driver::ended_threads_do_not_leak_memory_on_discrete_gpus",
        Kind::DiscreteGpu,
    );
}

/// Checks that an operation succeeds if only the flush after its launch fails.
fn check_failed_flushes_do_not_fail_operations(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (t, one) = (on_device(&[0.0; 8]), on_device(&[1.0]));
    let mut sum = 0.0;
    for times in [1, 3, ALWAYS] {
        faults.fail("clFlush", 1, times, -5);
        for _ in 0..50 {
            t.add_(&one).expect("it is on the queue");
            sum += 1.0;
        }
        assert_eq!(t.to_vec::<f32>().unwrap(), [sum; 8]);
    }
    assert!(faults.injected("clFlush") > 4 && DEVICE.is_available());
}

#[test]
fn failed_flushes_do_not_fail_operations_on_processors() {
    check_failed_flushes_do_not_fail_operations(
        "driver::failed_flushes_do_not_fail_operations_on_processors",
        Kind::Real,
    );
}

#[test]
fn failed_flushes_do_not_fail_operations_on_discrete_gpus() {
    check_failed_flushes_do_not_fail_operations(
        "driver::failed_flushes_do_not_fail_operations_on_discrete_gpus",
        Kind::DiscreteGpu,
    );
}

/// If the status of a launch's event cannot be read, the next wait must report the launch as failed.
#[test]
fn launches_with_unknown_status_are_reported_by_the_next_wait() {
    let test = "driver::launches_with_unknown_status_are_reported_by_the_next_wait";
    let Some(faults) = Faults::install(test, Kind::Real) else { return };
    let (t, one) = (on_device(&[0.0; 8]), on_device(&[1.0]));
    ["clWaitForEvents", "clGetEventInfo"].iter().for_each(|name| faults.fail(name, 1, ALWAYS, -6));
    for _ in 0..2100 {
        t.add_(&one).unwrap();
    }
    faults.clear();
    let error = t.to_vec::<f32>().unwrap_err();
    assert!(error.to_string().contains("an earlier clEnqueueNDRangeKernel"), "{error}");
    assert_eq!(t.to_vec::<f32>().unwrap(), [2100.0; 8]);
}

/// A graph must check the event of every launch that has an event, not only of the last launch.
#[test]
fn failed_graph_launches_are_reported_by_the_next_wait() {
    let Some(faults) = Faults::install("driver::failed_graph_launches_are_reported_by_the_next_wait", Kind::Real)
    else {
        return;
    };
    let t = on_device(&[0.0; 8]);
    let graph = capture_additions(&t, 4200);
    assert_eq!(t.to_vec::<f32>().unwrap(), [0.0; 8]);
    faults.fail_command("clEnqueueNDRangeKernel", 1, 1100, -4);
    graph.replay().unwrap();
    assert_eq!(faults.injected("clEnqueueNDRangeKernel"), 1);
    let error = t.to_vec::<f32>().unwrap_err();
    assert!(error.to_string().contains("an earlier clEnqueueNDRangeKernel"), "{error}");
    assert_eq!(t.to_vec::<f32>().unwrap(), [4199.0; 8]);
}

/// One launch in a thousand has an event. If that launch fails, the next wait must report the failure, even if a later launch has
/// already waited for the event because the queue was long.
#[test]
fn earlier_failed_launches_are_reported_by_the_next_wait() {
    let Some(faults) = Faults::install("driver::earlier_failed_launches_are_reported_by_the_next_wait", Kind::Real)
    else {
        return;
    };
    let (t, one) = (on_device(&[0.0; 8]), on_device(&[1.0]));
    let read = |t: &Tensor| t.to_vec::<f32>().map(drop);
    let waits: [fn(&Tensor) -> Result<()>; 3] =
        [read, |_| DEVICE.synchronize(), |_| Stream::current(DEVICE)?.synchronize()];
    let mut sum = 0;
    for (i, (launches, wait)) in [1500, 2500].into_iter().flat_map(|n| waits.map(|wait| (n, wait))).enumerate() {
        faults.fail_command("clEnqueueNDRangeKernel", 1, 1500, -4);
        for _ in 0..launches {
            t.add_(&one).expect("an earlier launch's failure is not this one's");
        }
        sum += launches - 1;
        assert_eq!(faults.injected("clEnqueueNDRangeKernel"), 1 + i as u64);
        let error = wait(&t).unwrap_err();
        assert!(error.to_string().contains("an earlier clEnqueueNDRangeKernel"), "{error}");
        assert_eq!(t.to_vec::<f32>().unwrap(), [sum as f32; 8], "all but the one that failed");
    }
}

/// If the driver refuses to unmap a buffer, the unmap is repeated before the next use of any buffer. Until it succeeds, uses are errors.
#[test]
fn buffers_are_not_used_while_mapped() {
    let Some(faults) = Faults::install("driver::buffers_are_not_used_while_mapped", Kind::Real) else { return };
    let n = 1_050_000; // more than 4 MiB, which a CPU device transfers by mapping
    let (values, one) = (ramp(n), on_device(&[1.0]));
    let (t, host) = (on_device(&values), Tensor::full(n, -1, Device::Cpu).unwrap());
    let (maps, launches) = (faults.live_mappings(), || faults.calls("clEnqueueNDRangeKernel"));
    assert_eq!(t.to_vec::<f32>().unwrap(), values);
    one.add_(&one).unwrap();
    DEVICE.synchronize().unwrap();
    for late in [false, true] {
        let refuse = |times| match late {
            true => faults.fail_command("clEnqueueUnmapMemObject", 1, times, -4),
            false => faults.fail("clEnqueueUnmapMemObject", 1, times, -4),
        };
        refuse(2);
        assert_eq!(t.to_vec::<f32>().unwrap(), values, "tried again at once");
        assert_eq!(faults.live_mappings(), maps);
        refuse(ALWAYS);
        assert_eq!(t.to_vec::<f32>().unwrap(), values, "it was read");
        assert_eq!(faults.live_mappings(), maps + 1);
        let before = launches();
        assert_not_partial(one.add_(&one));
        assert!(matches!(one.to_vec::<f32>().unwrap_err(), Error::OpenCl { call: "clEnqueueUnmapMemObject", .. }));
        assert_eq!(launches(), before, "no kernel while a buffer is mapped");
        DEVICE.synchronize().unwrap(); // synchronize still waits for the commands
        faults.clear();
        one.add_(&one).unwrap();
        assert_eq!((launches(), faults.live_mappings()), (before + 1, maps));
        assert_eq!(one.to_vec::<f32>().unwrap(), [if late { 8.0 } else { 4.0 }]);
    }
    // After the unmap, a read and a clone must see the written values.
    faults.fail("clEnqueueUnmapMemObject", 1, 5, -4);
    t.copy_(&host).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), vec![-1.0; n]);
    t.zero_().unwrap();
    faults.fail("clEnqueueUnmapMemObject", 1, 5, -4);
    t.copy_(&host).unwrap();
    let copy = t.try_clone().unwrap();
    assert_eq!(copy.to_vec::<f32>().unwrap(), vec![-1.0; n]);
    // The buffer must be kept, although its tensor was dropped: it is still mapped.
    faults.fail("clEnqueueUnmapMemObject", 1, ALWAYS, -4);
    let large = t.to_vec::<f32>().unwrap();
    drop((t, copy));
    let _ = DEVICE.empty_cache();
    faults.clear();
    assert_eq!(on_device(&large).to_vec::<f32>().unwrap(), large);
    assert_eq!(faults.live_mappings(), maps);
    assert!(DEVICE.is_available());
}

#[track_caller]
pub fn assert_partial<T: std::fmt::Debug>(result: Result<T>, name: &str) {
    let error = result.unwrap_err();
    let Error::Partial { op, source } = &error else { panic!("{error}") };
    assert!(*op == name && matches!(**source, Error::OpenCl { .. }), "{error}");
    assert!(error.to_string().contains("partly done"), "{error}");
}

#[track_caller]
fn assert_not_partial<T: std::fmt::Debug>(result: Result<T>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::OpenCl { .. }), "{error}");
}

#[test]
fn failures_midway_are_partial_errors() {
    let Some(faults) = Faults::install("driver::failures_midway_are_partial_errors", Kind::Real) else { return };
    let t = on_device(&[0.0; 8]);
    let graph = capture_additions(&t, 3);
    faults.fail("clEnqueueNDRangeKernel", 1, 1, -4);
    assert_not_partial(graph.replay());
    assert_eq!(t.to_vec::<f32>().unwrap(), [0.0; 8], "nothing of it");
    faults.fail("clEnqueueNDRangeKernel", 3, 1, -4);
    assert_partial(graph.replay(), "Graph::replay");
    assert_eq!(t.to_vec::<f32>().unwrap(), [2.0; 8], "a part of it");
    t.zero_().unwrap();
    graph.replay().unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), [3.0; 8]);

    // A copy onto an overlapping range is split into pieces, so it can fail in part.
    let values = ramp(3 * SMALL_ELEMENTS);
    let t = on_device(&values);
    let (from, to) =
        (t.narrow(0, 0, 2 * SMALL_ELEMENTS).unwrap(), t.narrow(0, SMALL_ELEMENTS, 2 * SMALL_ELEMENTS).unwrap());
    faults.fail("clEnqueueCopyBuffer", 1, 1, -4);
    assert_not_partial(to.copy_(&from));
    assert_eq!(t.to_vec::<f32>().unwrap(), values, "nothing of it");
    faults.fail("clEnqueueCopyBuffer", 2, 1, -4);
    assert_partial(to.copy_(&from), "copy_");
    assert_ne!(t.to_vec::<f32>().unwrap(), values, "a part of it");

    // An optimizer step for two groups is two launches, so it can fail in part.
    let leaf = || on_device(&[1.0; 4]).requires_grad_(true).unwrap();
    let (mut a, mut b) = (leaf(), leaf());
    let config = SgdConfig { lr: 0.5, ..SgdConfig::default() };
    let mut sgd = Sgd::new(vec![&mut a], config).unwrap().with_group(vec![&mut b], config).unwrap();
    a.mul(&b).unwrap().sum((), false).unwrap().backward().unwrap();
    faults.fail("clEnqueueNDRangeKernel", 1, 1, -4);
    assert_not_partial(sgd.step());
    assert_eq!([&a, &b].map(|p| p.to_vec::<f32>().unwrap()), [[1.0; 4], [1.0; 4]]);
    faults.fail("clEnqueueNDRangeKernel", 2, 1, -4);
    assert_partial(sgd.step(), "Sgd");
    assert_eq!([&a, &b].map(|p| p.to_vec::<f32>().unwrap()), [[0.5; 4], [1.0; 4]]);
}
