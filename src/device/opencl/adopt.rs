//! Adopted devices, whose context and queue belong to other code; the queue is the default stream.

use std::ptr;
use std::sync::Mutex;

use opencl3::command_queue::{
    CL_QUEUE_CONTEXT, CL_QUEUE_DEVICE, CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE, CL_QUEUE_PROPERTIES,
};
use opencl3::context::context::CL_CONTEXT_DEVICES;
use opencl3::device::CL_DEVICE_PLATFORM;
use opencl3::types::{cl_command_queue, cl_context, cl_device_id};

use super::ClDevice;
use super::discovery::{self, Entry, decode_number};
use super::driver::{info, value};
use super::errors::ClError;
use super::exit;
use crate::device::{lock, log};
use crate::{Device, Error, Result};

const OP: &str = "Device::adopt";

/// The addresses of context, device and queue of each adopted device. Locked during an adoption.
static HANDLES: Mutex<Vec<[usize; 3]>> = Mutex::new(Vec::new());

/// Returns the device with this context and this queue as the default stream; the first call adds the device.
///
/// # Errors
/// [`Error::Invalid`] for handles that do not belong together, an out-of-order queue, a device that cannot run kernels,
/// and too many devices; the driver's errors.
pub(crate) fn adopt(context: cl_context, id: cl_device_id, queue: cl_command_queue) -> Result<Device> {
    let handles = [context.addr(), id.addr(), queue.addr()];
    for (handle, name) in handles.iter().zip(["context", "device", "queue"]) {
        if *handle == 0 {
            return Err(Error::invalid(OP, format!("the {name} is null")));
        }
    }
    let own = discovery::count_without_adopted()?;
    let _messages = log::defer(); // a subscriber may use devices as well
    let mut known = lock(&HANDLES);
    if let Some(at) = known.iter().position(|known| *known == handles) {
        return Ok(Device::OpenCL(own + at));
    }
    if known.len() == discovery::MAX_ADOPTED {
        return Err(Error::invalid(OP, format!("a process adopts at most {} queues", known.len())));
    }
    let (_under_way, _opening) = (exit::delay_exit(), exit::keep_handler_last());
    let device = Device::OpenCL(own + known.len());
    let to_error = |e: ClError| Error::OpenCl { device, call: e.call, code: e.name(), detail: String::new() };
    check_handles(context, id, queue).map_err(to_error)?.map_err(|reason| Error::invalid(OP, reason))?;
    let platform = value!(clGetDeviceInfo(id, CL_DEVICE_PLATFORM) as usize).map_err(to_error)?;
    let entry = Entry::for_adopted(id, ptr::with_exposed_provenance_mut(platform)).map_err(|cannot| match cannot {
        Ok(why) => Error::invalid(OP, format!("the device {why}")),
        Err(e) => to_error(e),
    })?;
    let entry: &'static Entry = Box::leak(Box::new(entry));
    let opened = ClDevice::adopt(device, entry.found(device)?, context, queue).map_err(to_error)?;
    let opened: &'static ClDevice = Box::leak(Box::new(opened));
    _ = entry.opened.set(opened);
    discovery::add_adopted(entry);
    known.push(handles);
    opened.profile_if_on();
    Ok(device)
}

/// Checks that the three handles belong together; the inner error says why not.
fn check_handles(
    context: cl_context,
    id: cl_device_id,
    queue: cl_command_queue,
) -> Result<Result<(), &'static str>, ClError> {
    let devices = info!(clGetContextInfo(context, CL_CONTEXT_DEVICES))?;
    let of_queue = |what| value!(clGetCommandQueueInfo(queue, what) as usize);
    let properties = value!(clGetCommandQueueInfo(queue, CL_QUEUE_PROPERTIES) as u64)?;
    Ok(if !devices.chunks_exact(size_of::<usize>()).any(|device| decode_number(device) == id.addr() as u64) {
        Err("the context does not have the device")
    } else if of_queue(CL_QUEUE_CONTEXT)? != context.addr() {
        Err("the queue is of another context")
    } else if of_queue(CL_QUEUE_DEVICE)? != id.addr() {
        Err("the queue is of another device")
    } else if properties & CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE != 0 {
        Err("the queue runs commands out of order: create one without CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE")
    } else {
        Ok(())
    })
}
