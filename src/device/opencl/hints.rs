//! Hints for drivers about the work of queues: `cl_khr_priority_hints` and `cl_khr_throttle_hints`.

use opencl_sys::{
    CL_QUEUE_PRIORITY_HIGH_KHR, CL_QUEUE_PRIORITY_KHR, CL_QUEUE_PRIORITY_LOW_KHR, CL_QUEUE_THROTTLE_HIGH_KHR,
    CL_QUEUE_THROTTLE_KHR, CL_QUEUE_THROTTLE_LOW_KHR,
};
use opencl3::command_queue::CL_QUEUE_PROPERTIES;
use opencl3::types::{cl_command_queue, cl_command_queue_properties, cl_context, cl_device_id};

use super::driver::create;
use super::errors::ClError;
use super::exit;
use crate::Device;
use crate::device::log;
use crate::device::stream::{Priority, StreamHints, Throttle};

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

    /// A new queue of a device.
    pub(super) fn create(
        self,
        context: cl_context,
        id: cl_device_id,
        properties: cl_command_queue_properties,
    ) -> Result<cl_command_queue, ClError> {
        if self.is_none() {
            return exit::call(|| create!(clCreateCommandQueue(context, id, properties)));
        }
        let all = [
            (u64::from(CL_QUEUE_PROPERTIES), properties),
            (CL_QUEUE_PRIORITY_KHR, self.priority.into()),
            (CL_QUEUE_THROTTLE_KHR, self.throttle.into()),
        ];
        let told = all.into_iter().filter(|&(_, value)| value != 0).flat_map(|(name, value)| [name, value]);
        let told: Vec<u64> = told.chain([0]).collect();
        exit::call(|| create!(clCreateCommandQueueWithProperties(context, id, told.as_ptr())))
    }
}
