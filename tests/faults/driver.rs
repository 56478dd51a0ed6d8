//! What a failed call of the driver may not do: have host memory released that the device still uses, tell a kernel's
//! fault to somebody else, or tell of an operation that it did not happen although it did.

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{Device, Error, Graph, Result, Stream, Tensor};

use crate::stand_in::{ALWAYS, Faults, Kind};

pub(crate) const DEVICE: Device = Device::OpenCL(0);
/// Everything that tells whether commands are over.
const WAITS: [&str; 6] =
    ["clFinish", "clFlush", "clWaitForEvents", "clGetEventInfo", "clEnqueueMarkerWithWaitList", "clEnqueueMarker"];
/// Elements of a transfer that goes neither through maps nor through pinned slices.
pub(crate) const SMALL: usize = 1000;
/// Elements of 2 MiB, which go to and from a discrete GPU through pinned slices.
pub(crate) const STAGED: usize = 512 << 10;

pub(crate) fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| i as f32).collect()
}

/// A graph that adds one to t as often as is said, each time by a launch: formulas would be joined.
pub(crate) fn adding(t: &Tensor, times: usize) -> Graph {
    let n = t.numel();
    let ones = on_device(&vec![1.0; n]);
    let all = Tensor::from_slice(&(0..n as i64).collect::<Vec<_>>(), n, DEVICE).unwrap();
    Graph::capture(DEVICE, || (0..times).try_for_each(|_| t.index_add_(0, &all, &ones).map(drop))).unwrap().0
}

pub(crate) fn on_device(values: &[f32]) -> Tensor {
    Tensor::from_slice(values, values.len(), DEVICE).unwrap()
}

/// Waits as long as any command is held back in these tests, and longer.
pub(crate) fn outwait() {
    thread::sleep(Duration::from_millis(600));
}

/// Has nothing tell any more whether commands are over, and reads and writes touch the host's memory late.
pub(crate) fn nothing_is_known(faults: &Faults) {
    ["clEnqueueReadBuffer", "clEnqueueWriteBuffer"].iter().for_each(|name| faults.delay(name, 300_000));
    WAITS.iter().for_each(|name| faults.fail(name, 1, ALWAYS, -6));
}

#[track_caller]
pub(crate) fn is_lost_and_says_why<T: std::fmt::Debug>(result: Result<T>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    assert!(error.to_string().contains("never released"), "{error}");
}

/// At every message it asks for the devices and uses one, and counts those messages that it was not the cause of.
struct Using(&'static AtomicUsize);

impl tracing::Subscriber for Using {
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

/// From the first use on: while devices are looked for, opened, and kernels compiled.
#[test]
fn a_subscriber_may_use_the_device_at_every_message() {
    let Some(faults) = Faults::install("driver::a_subscriber_may_use_the_device_at_every_message", Kind::Real) else {
        return;
    };
    static MESSAGES: AtomicUsize = AtomicUsize::new(0);
    tracing::subscriber::set_global_default(Using(&MESSAGES)).unwrap();
    let tried_again = ["clGetDeviceInfo", "clCreateContext"]; // and told
    tried_again.iter().for_each(|name| faults.fail(name, 1, 1, -6));
    assert_eq!(Device::best(), DEVICE);
    assert!(MESSAGES.load(Relaxed) > 0);
    assert_eq!(on_device(&[1.0, 2.0]).softmax(0).unwrap().to_vec::<f32>().unwrap().len(), 2);
    assert_eq!(tried_again.map(|name| faults.injected(name)), [1, 1]);
    // The driver tells of a fault inside the call that fails, under the queues' lock.
    let (x, before) = (on_device(&[1.0, 2.0]), MESSAGES.load(Relaxed));
    faults.fail("clEnqueueNDRangeKernel", 1, 1, -5);
    x.exp().unwrap_err();
    assert!(MESSAGES.load(Relaxed) > before, "the driver's message is logged");
}

/// A call that fails says nothing of the command: others tell that it is done, and it was.
fn failed_waits_are_no_failed_commands(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (t, here) = (on_device(&ramp(SMALL)), Tensor::zeros(SMALL, Device::Cpu).unwrap());
    faults.delay("clEnqueueReadBuffer", 5_000);
    for name in WAITS {
        for (times, code) in [(1, -6), (2, -5), (2, -36), (5, -6), (ALWAYS, -14)] {
            faults.fail(name, 1, times, code);
            if (name, times) == ("clGetEventInfo", ALWAYS) {
                // It is over, and nothing tells whether it failed.
                let error = t.to_vec::<f32>().unwrap_err();
                assert!(matches!(error, Error::OpenCl { call: "clGetEventInfo", .. }), "{error}");
                faults.clear();
                faults.delay("clEnqueueReadBuffer", 5_000);
            }
            assert_eq!(t.to_vec::<f32>().unwrap(), ramp(SMALL), "{times} times {code} of {name}");
            here.zero_().unwrap();
            here.copy_(&t).unwrap();
            assert_eq!(here.to_vec::<f32>().unwrap(), ramp(SMALL), "{times} times {code} of {name}");
            faults.fail(name, 1, 0, code);
        }
    }
    assert!(faults.injected("any") > 0 && DEVICE.is_available());
}

#[test]
fn failed_waits_are_no_failed_commands_on_a_processor() {
    failed_waits_are_no_failed_commands("driver::failed_waits_are_no_failed_commands_on_a_processor", Kind::Real);
}

#[test]
fn failed_waits_are_no_failed_commands_on_a_discrete_gpu() {
    failed_waits_are_no_failed_commands(
        "driver::failed_waits_are_no_failed_commands_on_a_discrete_gpu",
        Kind::DiscreteGpu,
    );
}

/// A kernel's fault is told once, by the operation of the thread that made it, whatever the driver refuses meanwhile.
fn faults_are_told_once(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let x = on_device(&[1.0, 2.0, 3.0]);
    let index = |at: i64| Tensor::from_slice(&[at], 1, DEVICE).unwrap();
    let (bad, good) = (index(99), index(1));
    let told = |result: Result<Vec<f32>>| {
        let error = result.unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { index: 99, .. }), "{error}");
    };
    // The read of the data, the read of what kernels found, and the write that clears it.
    for (name, nth) in [("clEnqueueReadBuffer", 1), ("clEnqueueReadBuffer", 2), ("clEnqueueWriteBuffer", 1)] {
        let y = x.index_select(0, &bad).unwrap();
        faults.fail(name, nth, 1, -4);
        if name == "clEnqueueReadBuffer" {
            let error = y.to_vec::<f32>().unwrap_err();
            assert!(matches!(error, Error::OpenCl { call: "clEnqueueReadBuffer", .. }), "{error}");
        }
        told(y.to_vec::<f32>());
        for _ in 0..2 {
            let z = x.index_select(0, &good).unwrap();
            assert_eq!(z.to_vec::<f32>().unwrap(), [2.0], "after a failed {name}");
        }
        faults.clear();
    }
    // The read of what kernels found may fail after it was accepted, unnoticed: on a processor it comes first.
    let nth = if kind == Kind::DiscreteGpu { 2 } else { 1 };
    let y = x.index_select(0, &bad).unwrap();
    faults.drop_command("clEnqueueReadBuffer", nth, 1);
    let error = y.to_vec::<f32>().unwrap_err();
    assert!(matches!(error, Error::OpenCl { call: "clEnqueueReadBuffer", .. }), "{error}");
    assert_eq!(faults.injected("clEnqueueReadBuffer"), 3);
    told(y.to_vec::<f32>());
    assert_eq!(x.index_select(0, &good).unwrap().to_vec::<f32>().unwrap(), [2.0]);
    // The write that clears them may fail several times: no kernel gets the words before.
    let y = x.index_select(0, &bad).unwrap();
    faults.fail("clEnqueueWriteBuffer", 1, 2, -4);
    told(y.to_vec::<f32>());
    assert!(x.index_select(0, &good).is_err());
    assert_eq!(x.index_select(0, &good).unwrap().to_vec::<f32>().unwrap(), [2.0]);
}

#[test]
fn faults_are_told_once_on_a_processor() {
    faults_are_told_once("driver::faults_are_told_once_on_a_processor", Kind::Real);
}

#[test]
fn faults_are_told_once_on_a_discrete_gpu() {
    faults_are_told_once("driver::faults_are_told_once_on_a_discrete_gpu", Kind::DiscreteGpu);
}

/// A transfer that was accepted and failed later is an error, although the wait succeeds, as NVIDIA's does.
fn transfers_that_fail_late_are_told(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (t, new) = (on_device(&ramp(SMALL)), vec![-1.0; SMALL]);
    let host = Tensor::from_slice(&new, SMALL, Device::Cpu).unwrap();
    type Transfer<'a> = &'a dyn Fn() -> Result<Vec<f32>>;
    let transfers: [(&str, Transfer<'_>); 4] = [
        ("clEnqueueReadBuffer", &|| t.to_vec()),
        ("clEnqueueReadBuffer", &|| t.to_device(Device::Cpu)?.to_vec()),
        ("clEnqueueCopyBuffer", &|| t.try_clone()?.to_vec()),
        ("clEnqueueWriteBuffer", &|| Tensor::from_slice(&ramp(SMALL), SMALL, DEVICE)?.to_vec()),
    ];
    faults.waits_succeed();
    for (name, transfer) in transfers {
        assert_eq!(transfer().unwrap(), ramp(SMALL));
        let before = faults.injected(name);
        faults.fail_command(name, 1, 1, -4);
        let error = transfer().unwrap_err();
        assert!(matches!(error, Error::OpenCl { .. }), "{name}: {error}");
        assert_eq!(faults.injected(name), before + 1, "the command was asked for an event");
        assert_eq!(transfer().unwrap(), ramp(SMALL), "after a {name} that failed");
    }
    faults.fail_command("clEnqueueWriteBuffer", 1, 1, -4);
    t.copy_(&host).unwrap_err();
    assert_eq!(t.to_vec::<f32>().unwrap(), ramp(SMALL));
    t.copy_(&host).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), new);
    let events = faults.live_events();
    (0..100).for_each(|_| assert_eq!(t.to_vec::<f32>().unwrap(), new));
    assert!(faults.live_events() <= events, "each is released at once");
}

#[test]
fn transfers_that_fail_late_are_told_on_a_processor() {
    transfers_that_fail_late_are_told("driver::transfers_that_fail_late_are_told_on_a_processor", Kind::Real);
}

#[test]
fn transfers_that_fail_late_are_told_on_a_discrete_gpu() {
    transfers_that_fail_late_are_told("driver::transfers_that_fail_late_are_told_on_a_discrete_gpu", Kind::DiscreteGpu);
}

/// Threads that end without asking what their kernels found leave no more memory behind the more there are; what one found
/// is told all the same.
fn ended_threads_leave_little_behind(test: &str, kind: Kind) {
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
fn ended_threads_leave_little_behind_on_a_processor() {
    ended_threads_leave_little_behind("driver::ended_threads_leave_little_behind_on_a_processor", Kind::Real);
}

#[test]
fn ended_threads_leave_little_behind_on_a_discrete_gpu() {
    ended_threads_leave_little_behind("driver::ended_threads_leave_little_behind_on_a_discrete_gpu", Kind::DiscreteGpu);
}

/// A flush that fails after a launch does not undo the launch.
fn failed_flushes_are_tried_again(test: &str, kind: Kind) {
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
fn failed_flushes_are_tried_again_on_a_processor() {
    failed_flushes_are_tried_again("driver::failed_flushes_are_tried_again_on_a_processor", Kind::Real);
}

#[test]
fn failed_flushes_are_tried_again_on_a_discrete_gpu() {
    failed_flushes_are_tried_again("driver::failed_flushes_are_tried_again_on_a_discrete_gpu", Kind::DiscreteGpu);
}

/// Where the driver does not tell how a launch ended, it may have failed.
#[test]
fn a_launch_that_nobody_can_tell_of_is_told_by_the_wait() {
    let test = "driver::a_launch_that_nobody_can_tell_of_is_told_by_the_wait";
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

/// In a graph of thousands every launch that has an event is asked.
#[test]
fn a_graphs_launch_that_failed_is_told_by_the_wait() {
    let Some(faults) = Faults::install("driver::a_graphs_launch_that_failed_is_told_by_the_wait", Kind::Real) else {
        return;
    };
    let t = on_device(&[0.0; 8]);
    let graph = adding(&t, 4200);
    assert_eq!(t.to_vec::<f32>().unwrap(), [0.0; 8]);
    faults.fail_command("clEnqueueNDRangeKernel", 1, 1100, -4);
    graph.replay().unwrap();
    assert_eq!(faults.injected("clEnqueueNDRangeKernel"), 1);
    let error = t.to_vec::<f32>().unwrap_err();
    assert!(error.to_string().contains("an earlier clEnqueueNDRangeKernel"), "{error}");
    assert_eq!(t.to_vec::<f32>().unwrap(), [4199.0; 8]);
}

/// One launch in a thousand has an event. If that one fails the next wait reports it, whether or not a later launch has
/// waited for it because the queue was long.
#[test]
fn an_earlier_launch_that_failed_is_told_by_the_wait() {
    let Some(faults) = Faults::install("driver::an_earlier_launch_that_failed_is_told_by_the_wait", Kind::Real) else {
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

/// What the driver refuses to unmap is unmapped before anything else uses a buffer, and until then nothing does.
#[test]
fn a_buffer_that_stays_mapped_is_not_used() {
    let Some(faults) = Faults::install("driver::a_buffer_that_stays_mapped_is_not_used", Kind::Real) else { return };
    let n = 1_050_000; // above 4 MiB a processor maps
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
        is_whole(one.add_(&one));
        assert!(matches!(one.to_vec::<f32>().unwrap_err(), Error::OpenCl { call: "clEnqueueUnmapMemObject", .. }));
        assert_eq!(launches(), before, "no kernel while a buffer is mapped");
        DEVICE.synchronize().unwrap(); // waits for what is there all the same
        faults.clear();
        one.add_(&one).unwrap();
        assert_eq!((launches(), faults.live_mappings()), (before + 1, maps));
        assert_eq!(one.to_vec::<f32>().unwrap(), [if late { 8.0 } else { 4.0 }]);
    }
    // What was written is there once it is unmapped: for a read, and for a clone.
    faults.fail("clEnqueueUnmapMemObject", 1, 5, -4);
    t.copy_(&host).unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), vec![-1.0; n]);
    t.zero_().unwrap();
    faults.fail("clEnqueueUnmapMemObject", 1, 5, -4);
    t.copy_(&host).unwrap();
    let copy = t.try_clone().unwrap();
    assert_eq!(copy.to_vec::<f32>().unwrap(), vec![-1.0; n]);
    // The buffer is kept though its tensor is gone.
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
pub fn is_partial<T: std::fmt::Debug>(result: Result<T>, name: &str) {
    let error = result.unwrap_err();
    let Error::Partial { op, source } = &error else { panic!("{error}") };
    assert!(*op == name && matches!(**source, Error::OpenCl { .. }), "{error}");
    assert!(error.to_string().contains("done in part"), "{error}");
}

#[track_caller]
fn is_whole<T: std::fmt::Debug>(result: Result<T>) {
    let error = result.unwrap_err();
    assert!(matches!(error, Error::OpenCl { .. }), "{error}");
}

#[test]
fn what_fails_midway_says_so() {
    let Some(faults) = Faults::install("driver::what_fails_midway_says_so", Kind::Real) else { return };
    let t = on_device(&[0.0; 8]);
    let graph = adding(&t, 3);
    faults.fail("clEnqueueNDRangeKernel", 1, 1, -4);
    is_whole(graph.replay());
    assert_eq!(t.to_vec::<f32>().unwrap(), [0.0; 8], "nothing of it");
    faults.fail("clEnqueueNDRangeKernel", 3, 1, -4);
    is_partial(graph.replay(), "Graph::replay");
    assert_eq!(t.to_vec::<f32>().unwrap(), [2.0; 8], "a part of it");
    t.zero_().unwrap();
    graph.replay().unwrap();
    assert_eq!(t.to_vec::<f32>().unwrap(), [3.0; 8]);

    // A copy to where it overlaps goes in pieces.
    let values = ramp(3 * SMALL);
    let t = on_device(&values);
    let (from, to) = (t.narrow(0, 0, 2 * SMALL).unwrap(), t.narrow(0, SMALL, 2 * SMALL).unwrap());
    faults.fail("clEnqueueCopyBuffer", 1, 1, -4);
    is_whole(to.copy_(&from));
    assert_eq!(t.to_vec::<f32>().unwrap(), values, "nothing of it");
    faults.fail("clEnqueueCopyBuffer", 2, 1, -4);
    is_partial(to.copy_(&from), "copy_");
    assert_ne!(t.to_vec::<f32>().unwrap(), values, "a part of it");

    // A step of two groups is two launches.
    let leaf = || on_device(&[1.0; 4]).requires_grad_(true).unwrap();
    let (mut a, mut b) = (leaf(), leaf());
    let config = SgdConfig { lr: 0.5, ..SgdConfig::default() };
    let mut sgd = Sgd::new(vec![&mut a], config).unwrap().with_group(vec![&mut b], config).unwrap();
    a.mul(&b).unwrap().sum((), false).unwrap().backward().unwrap();
    faults.fail("clEnqueueNDRangeKernel", 1, 1, -4);
    is_whole(sgd.step());
    assert_eq!([&a, &b].map(|p| p.to_vec::<f32>().unwrap()), [[1.0; 4], [1.0; 4]]);
    faults.fail("clEnqueueNDRangeKernel", 2, 1, -4);
    is_partial(sgd.step(), "Sgd");
    assert_eq!([&a, &b].map(|p| p.to_vec::<f32>().unwrap()), [[0.5; 4], [1.0; 4]]);
}
