//! Hints for drivers about the work of queues: `cl_khr_priority_hints` and `cl_khr_throttle_hints`.

use opencl_sys::{
    CL_QUEUE_PRIORITY_HIGH_KHR, CL_QUEUE_PRIORITY_KHR, CL_QUEUE_PRIORITY_LOW_KHR, CL_QUEUE_THROTTLE_HIGH_KHR,
    CL_QUEUE_THROTTLE_KHR, CL_QUEUE_THROTTLE_LOW_KHR,
};
use opencl3::command_queue::CL_QUEUE_PROPERTIES;
use opencl3::types::cl_command_queue_properties;

use crate::Device;
use crate::device::hints::{Priority, StreamHints, Throttle};
use crate::device::log;

/// The hints that a device takes, as OpenCL has them; 0 for what it is not told.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Hints {
    priority: u32,
    throttle: u32,
}

impl Hints {
    /// Those of the hints that the device takes.
    pub(super) fn of(device: Device, hints: StreamHints) -> Hints {
        let wanted = Hints {
            priority: match hints.priority {
                Priority::High => CL_QUEUE_PRIORITY_HIGH_KHR,
                Priority::Normal => 0,
                Priority::Low => CL_QUEUE_PRIORITY_LOW_KHR,
            },
            throttle: match hints.throttle {
                Throttle::High => CL_QUEUE_THROTTLE_HIGH_KHR,
                Throttle::Normal => 0,
                Throttle::Low => CL_QUEUE_THROTTLE_LOW_KHR,
            },
        };
        if wanted.is_none() {
            return wanted;
        }
        let extensions = device.capabilities().map(|known| known.extensions).unwrap_or_default();
        let taken = |hint: u32, extension: &'static str| {
            if hint == 0 || extensions.iter().any(|has| has == extension) {
                return hint;
            }
            log::emit(
                move || tracing::trace!(%device, extension, "a stream's hint is ignored: the driver does not take it"),
            );
            0
        };
        Hints {
            priority: taken(wanted.priority, "cl_khr_priority_hints"),
            throttle: taken(wanted.throttle, "cl_khr_throttle_hints"),
        }
    }

    fn is_none(self) -> bool {
        self.priority == 0 && self.throttle == 0
    }

    /// The properties of a queue with these hints, as `clCreateCommandQueueWithProperties` takes them; nothing without hints,
    /// for the function that drivers of OpenCL 1.2 have as well.
    pub(super) fn properties(self, properties: cl_command_queue_properties) -> Option<Vec<u64>> {
        if self.is_none() {
            return None;
        }
        let all = [
            (u64::from(CL_QUEUE_PROPERTIES), properties),
            (CL_QUEUE_PRIORITY_KHR, self.priority.into()),
            (CL_QUEUE_THROTTLE_KHR, self.throttle.into()),
        ];
        let told = all.into_iter().filter(|&(_, value)| value != 0).flat_map(|(name, value)| [name, value]);
        Some(told.chain([0]).collect())
    }
}
