//! Stream hints (priority and throttle) must reach exactly those drivers that support them.

use std::time::Duration;

use claystone::device::{Priority, StreamHints, Throttle};
use claystone::profiler::profile;
use claystone::{Device, Stream, Tensor, with_stream};

use crate::stand_in::{self, Faults, Kind};

const DEVICE: Device = Device::OpenCL(0);
const HINTS: [&str; 4] = ["priority 1", "priority 4", "throttle 1", "throttle 4"]; // OpenCL's values for high and low

/// Computes on a stream and checks the result.
fn check_computation(stream: &Stream) {
    let made = with_stream(stream, || Tensor::ones(4, DEVICE)?.add_scalar(1.0)?.to_vec::<f32>());
    assert_eq!(made.unwrap(), [2.0; 4], "{:?}", stream.hints());
}

#[test]
fn hints_reach_drivers_that_support_them() {
    const TEST: &str = "hints::hints_reach_drivers_that_support_them";
    let Some(faults) = Faults::here() else {
        let ended = stand_in::run(TEST, Kind::Real, &[("STAND_IN_HINTS", "1")], Duration::from_secs(300));
        assert!(ended.status.is_some_and(|status| status.success()), "{}", ended.text);
        return;
    };
    let queues = |faults: &Faults| HINTS.map(|hint| faults.calls(hint));
    check_computation(&Stream::new(DEVICE).unwrap());
    assert_eq!(queues(&faults), [0; 4]);
    let high = Stream::with_priority(DEVICE, Priority::High).unwrap();
    check_computation(&high);
    assert_eq!(queues(&faults), [1, 0, 0, 0]);
    let idle = StreamHints { priority: Priority::Low, throttle: Throttle::Low };
    let low = Stream::with_hints(DEVICE, idle).unwrap();
    check_computation(&low);
    assert_eq!((low.hints(), queues(&faults)), (idle, [1, 1, 0, 1]));
    check_computation(
        &Stream::with_hints(DEVICE, StreamHints { throttle: Throttle::High, ..StreamHints::default() }).unwrap(),
    );
    assert_eq!(queues(&faults), [1, 1, 1, 1]);
    // A queue may be reused only by a stream with the same hints.
    let id = high.id();
    drop(high);
    assert_ne!(Stream::new(DEVICE).unwrap().id(), id);
    assert_eq!(Stream::with_priority(DEVICE, Priority::High).unwrap().id(), id);
    assert_eq!(queues(&faults), [1, 1, 1, 1]);
    // If a driver refuses the hints, streams are created without hints.
    faults.fail("clCreateCommandQueueWithProperties", 1, 1, -35);
    let refused =
        Stream::with_hints(DEVICE, StreamHints { throttle: Throttle::Low, ..StreamHints::default() }).unwrap();
    check_computation(&refused);
    assert_eq!(queues(&faults), [1, 1, 1, 1]);
    // Queues with profiling must have the hints too.
    let (_, profile) = profile(|| check_computation(&low)).unwrap();
    assert!(!profile.events().is_empty());
    assert_eq!(queues(&faults), [2, 2, 2, 2]);
}

#[test]
fn drivers_without_hints_receive_none() {
    let Some(faults) = Faults::install("hints::drivers_without_hints_receive_none", Kind::Real) else { return };
    let hints = StreamHints { priority: Priority::High, throttle: Throttle::Low };
    check_computation(&Stream::with_hints(DEVICE, hints).unwrap());
    assert_eq!(faults.calls("clCreateCommandQueueWithProperties"), 0);
    assert_eq!(HINTS.map(|hint| faults.calls(hint)), [0; 4]);
}
