//! Hints to the driver about the work of queues: `cl_khr_priority_hints` and `cl_khr_throttle_hints`.

use opencl_sys as cl;

use crate::Device;
use crate::device::hints::{Priority, StreamHints, Throttle};
use crate::device::log;

/// Returns the hints that the device supports. Replaces each other hint by its default, and logs this.
pub(super) fn supported(device: Device, wanted: StreamHints) -> StreamHints {
    let none = StreamHints::default();
    if wanted == none {
        return none;
    }
    let known = device.capabilities().ok();
    // The function that takes hints came with OpenCL 2.0, so older platforms support no hints.
    let known = known.filter(|known| known.version.as_ref().is_some_and(|version| !version.starts_with("OpenCL 1.")));
    let has = |extension: &str| known.as_ref().is_some_and(|known| known.extensions.iter().any(|has| has == extension));
    let supported = StreamHints {
        priority: if has("cl_khr_priority_hints") { wanted.priority } else { none.priority },
        throttle: if has("cl_khr_throttle_hints") { wanted.throttle } else { none.throttle },
    };
    if supported != wanted {
        log_ignored(device, wanted, supported);
    }
    supported
}

pub(super) fn log_ignored(device: Device, wanted: StreamHints, taken: StreamHints) {
    log::emit(move || tracing::trace!(%device, ?wanted, ?taken, "hints of a stream are ignored"));
}

/// Returns the properties of a queue with these hints for `clCreateCommandQueueWithProperties`. `None` without hints: OpenCL 1.2's
/// `clCreateCommandQueue` then suffices.
pub(super) fn properties(hints: StreamHints, properties: cl::cl_command_queue_properties) -> Option<Vec<u64>> {
    if hints == StreamHints::default() {
        return None;
    }
    let priority = match hints.priority {
        Priority::High => cl::CL_QUEUE_PRIORITY_HIGH_KHR,
        Priority::Normal => 0,
        Priority::Low => cl::CL_QUEUE_PRIORITY_LOW_KHR,
    };
    let throttle = match hints.throttle {
        Throttle::High => cl::CL_QUEUE_THROTTLE_HIGH_KHR,
        Throttle::Normal => 0,
        Throttle::Low => cl::CL_QUEUE_THROTTLE_LOW_KHR,
    };
    let all = [
        (u64::from(cl::CL_QUEUE_PROPERTIES), properties),
        (cl::CL_QUEUE_PRIORITY_KHR, priority.into()),
        (cl::CL_QUEUE_THROTTLE_KHR, throttle.into()),
    ];
    let told = all.into_iter().filter(|&(_, value)| value != 0).flat_map(|(name, value)| [name, value]);
    Some(told.chain([0]).collect())
}
