//! Adopted devices, whose context and queue belong to other code; the queue is the default stream.

use std::ptr;

use opencl_sys::{self as cl, cl_command_queue, cl_context, cl_device_id};

use super::ClDevice;
use super::description::decode_number;
use super::discovery::{self, Entry};
use super::driver::{call, info, value};
use super::errors::ClError;
use super::exit;
use crate::{Device, Error, Result};

const OP: &str = "Device::adopt";

/// Returns the device with this context and this queue as the default stream; the first call adds the device.
pub(crate) fn adopt(context: cl_context, id: cl_device_id, queue: cl_command_queue) -> Result<Device> {
    let handles = [context.addr(), id.addr(), queue.addr()];
    for (handle, name) in handles.iter().zip(["context", "device", "queue"]) {
        invalid!(OP if *handle == 0, "the {name} is null");
    }
    discovery::adopt(handles, |device| {
        let to_error = |e: ClError| Error::OpenCl { device, call: e.call, code: e.name(), detail: String::new() };
        check_handles(context, id, queue).map_err(to_error)?.map_err(|reason| Error::invalid(OP, reason))?;
        let platform = value!(clGetDeviceInfo(id, cl::CL_DEVICE_PLATFORM) as usize).map_err(to_error)?;
        let entry =
            Entry::for_adopted(id, ptr::with_exposed_provenance_mut(platform)).map_err(|cannot| match cannot {
                Ok(why) => Error::invalid(OP, format!("the device {why}")),
                Err(e) => to_error(e),
            })?;
        let entry: &'static Entry = Box::leak(Box::new(entry));
        let found = entry.found(device)?;
        call!(clRetainContext(context)).map_err(to_error)?;
        let open =
            || ClDevice::in_context(device, found, context, Some(queue)).map(|opened| entry.store_opened(opened));
        exit::delay_exit(open).map_err(to_error)?;
        Ok(entry)
    })
}

/// Checks that the three handles belong together; the inner error says why not.
fn check_handles(
    context: cl_context,
    id: cl_device_id,
    queue: cl_command_queue,
) -> Result<Result<(), &'static str>, ClError> {
    let devices = info!(clGetContextInfo(context, cl::CL_CONTEXT_DEVICES))?;
    let of_queue = |what| value!(clGetCommandQueueInfo(queue, what) as usize);
    let properties = value!(clGetCommandQueueInfo(queue, cl::CL_QUEUE_PROPERTIES) as u64)?;
    Ok(if !devices.chunks_exact(size_of::<usize>()).any(|device| decode_number(device) == id.addr() as u64) {
        Err("the context does not have the device")
    } else if of_queue(cl::CL_QUEUE_CONTEXT)? != context.addr() {
        Err("the queue is of another context")
    } else if of_queue(cl::CL_QUEUE_DEVICE)? != id.addr() {
        Err("the queue is of another device")
    } else if properties & cl::CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE != 0 {
        Err("the queue runs commands out of order: create one without CL_QUEUE_OUT_OF_ORDER_EXEC_MODE_ENABLE")
    } else {
        Ok(())
    })
}
