//! Streams and events.

use claystone::device::{Event, Priority, set_stream};
use claystone::{Device, Stream};

use crate::device::{device, number};
use crate::pointers::{borrow, handle, optional, output, release};
use crate::status::{ClaystoneStatus, Fault, guard};

/// A handle on a stream of one device: work submitted to a stream runs in order.
pub struct ClaystoneStream(pub(crate) Stream);

/// A handle on an event: a point in a stream's work.
pub struct ClaystoneEvent(Event);

/// Writes a handle on the stream that `make` returns for a device.
///
/// # Safety
/// `stream` is null or valid for writing.
unsafe fn write_stream(
    make: fn(Device) -> claystone::Result<Stream>,
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> Result<(), Fault> {
    // SAFETY: the caller upholds this function's contract.
    let stream = unsafe { output(stream, "stream")? };
    stream.write(handle(ClaystoneStream(make(device(device_number)?)?)));
    Ok(())
}

/// Makes a new stream. Work already submitted still runs after the last handle is released.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_new(
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> ClaystoneStatus {
    // SAFETY: the caller upholds this function's contract.
    guard("claystone_stream_new", || unsafe { write_stream(Stream::new, device_number, stream) })
}

/// Like `claystone_stream_new`, with a hint for the driver: a priority below 0 is more urgent than that of other streams, above 0 less.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_with_priority(
    device_number: i32,
    priority: i32,
    stream: *mut *mut ClaystoneStream,
) -> ClaystoneStatus {
    let make: fn(Device) -> claystone::Result<Stream> = match priority {
        ..0 => |device| Stream::with_priority(device, Priority::High),
        0 => Stream::new,
        1.. => |device| Stream::with_priority(device, Priority::Low),
    };
    // SAFETY: the caller upholds this function's contract.
    guard("claystone_stream_with_priority", || unsafe { write_stream(make, device_number, stream) })
}

/// Gets a handle on a device's default stream, which every thread uses until it sets another one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_default(
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> ClaystoneStatus {
    // SAFETY: the caller upholds this function's contract.
    guard("claystone_stream_default", || unsafe { write_stream(Stream::default_stream, device_number, stream) })
}

/// Gets a handle on the stream that this thread currently submits a device's work to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_current(
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> ClaystoneStatus {
    // SAFETY: the caller upholds this function's contract.
    guard("claystone_stream_current", || unsafe { write_stream(Stream::current, device_number, stream) })
}

/// Makes a stream this thread's current stream of its device. The thread keeps the stream alive until it sets another one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_set_current(stream: *const ClaystoneStream) -> ClaystoneStatus {
    guard("claystone_stream_set_current", || {
        // SAFETY: the caller promises a live handle.
        let stream = unsafe { borrow(stream, "stream")? };
        set_stream(&stream.0);
        Ok(())
    })
}

/// Releases a handle on a stream; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_release(stream: *mut ClaystoneStream) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_stream_release", stream) }
}

/// Gets the device number of a stream and the stream's number on that device: 0 is the default stream. Numbers of destroyed streams are
/// reused. Either pointer may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_id(
    stream: *const ClaystoneStream,
    device_number: *mut i32,
    id: *mut i64,
) -> ClaystoneStatus {
    guard("claystone_stream_id", || {
        // SAFETY: the caller promises a live handle, and pointers that are null or valid for writing.
        let (stream, device_number, id) = unsafe { (borrow(stream, "stream")?, optional(device_number), optional(id)) };
        device_number.map(|output| output.write(number(stream.0.device())));
        id.map(|output| output.write(stream.0.id().index() as i64));
        Ok(())
    })
}

/// Waits until all work submitted to a stream so far is complete. Returns errors that its kernels reported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_synchronize(stream: *const ClaystoneStream) -> ClaystoneStatus {
    guard("claystone_stream_synchronize", || {
        // SAFETY: the caller promises a live handle.
        let stream = unsafe { borrow(stream, "stream")? };
        Ok(stream.0.synchronize()?)
    })
}

/// Gets whether all work submitted to a stream is complete. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_query(stream: *const ClaystoneStream, done: *mut bool) -> ClaystoneStatus {
    guard("claystone_stream_query", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (stream, done) = unsafe { (borrow(stream, "stream")?, output(done, "done")?) };
        done.write(stream.0.is_idle()?);
        Ok(())
    })
}

/// Makes work submitted to `stream` from now on wait for the work submitted to `other` so far. The host waits only if the streams are
/// on different devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_wait_stream(
    stream: *const ClaystoneStream,
    other: *const ClaystoneStream,
) -> ClaystoneStatus {
    guard("claystone_stream_wait_stream", || {
        // SAFETY: the caller promises live handles.
        let (stream, other) = unsafe { (borrow(stream, "stream")?, borrow(other, "other")?) };
        Ok(stream.0.wait_stream(&other.0)?)
    })
}

/// Writes a handle on the event that `record` returns for a stream.
///
/// # Safety
/// Each pointer is null, or a live handle and a pointer valid for writing.
unsafe fn write_event(
    record: fn(&Stream) -> claystone::Result<Event>,
    stream: *const ClaystoneStream,
    event: *mut *mut ClaystoneEvent,
) -> Result<(), Fault> {
    // SAFETY: the caller upholds this function's contract.
    let (stream, event) = unsafe { (borrow(stream, "stream")?, output(event, "event")?) };
    event.write(handle(ClaystoneEvent(record(&stream.0)?)));
    Ok(())
}

/// Records an event that is complete when all work submitted to a stream so far is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_record_event(
    stream: *const ClaystoneStream,
    event: *mut *mut ClaystoneEvent,
) -> ClaystoneStatus {
    // SAFETY: the caller upholds this function's contract.
    guard("claystone_stream_record_event", || unsafe { write_event(Stream::record_event, stream, event) })
}

/// Like `claystone_stream_record_event`, but the event also stores its completion time for `claystone_event_elapsed_time`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_record_timed_event(
    stream: *const ClaystoneStream,
    event: *mut *mut ClaystoneEvent,
) -> ClaystoneStatus {
    // SAFETY: the caller upholds this function's contract.
    guard("claystone_stream_record_timed_event", || unsafe { write_event(Stream::record_timed_event, stream, event) })
}

/// Makes work submitted to `stream` from now on wait for an event. The host waits only if the event is on another device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_wait_event(
    stream: *const ClaystoneStream,
    event: *const ClaystoneEvent,
) -> ClaystoneStatus {
    guard("claystone_stream_wait_event", || {
        // SAFETY: the caller promises live handles.
        let (stream, event) = unsafe { (borrow(stream, "stream")?, borrow(event, "event")?) };
        Ok(stream.0.wait_event(&event.0)?)
    })
}

/// Gets whether all work before an event is complete. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_query(event: *const ClaystoneEvent, done: *mut bool) -> ClaystoneStatus {
    guard("claystone_event_query", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (event, done) = unsafe { (borrow(event, "event")?, output(done, "done")?) };
        done.write(event.0.is_done()?);
        Ok(())
    })
}

/// Waits until all work before an event is complete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_synchronize(event: *const ClaystoneEvent) -> ClaystoneStatus {
    guard("claystone_event_synchronize", || {
        // SAFETY: the caller promises a live handle.
        let event = unsafe { borrow(event, "event")? };
        Ok(event.0.synchronize()?)
    })
}

/// The milliseconds between the completion of two events of one device, by the device's clock; negative if `end` completed first. Waits
/// for both events, which `claystone_stream_record_timed_event` must have recorded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_elapsed_time(
    start: *const ClaystoneEvent,
    end: *const ClaystoneEvent,
    milliseconds: *mut f64,
) -> ClaystoneStatus {
    guard("claystone_event_elapsed_time", || {
        // SAFETY: the caller promises live handles, and a pointer that is valid for writing.
        let (start, end, milliseconds) =
            unsafe { (borrow(start, "start")?, borrow(end, "end")?, output(milliseconds, "milliseconds")?) };
        milliseconds.write(start.0.elapsed_time(&end.0)?);
        Ok(())
    })
}

/// Releases a handle on an event; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_release(event: *mut ClaystoneEvent) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_event_release", event) }
}
