//! Streams and events.

use claystone::device::{Event, Priority, set_stream};
use claystone::{Device, Stream};

use crate::device::{device, number};
use crate::pointers::{borrow, handle, optional, output, release};
use crate::status::{ClaystoneStatus, Fault, guard};

/// A handle on a line of work of one device: what is submitted to it runs in order.
pub struct ClaystoneStream(pub(crate) Stream);

/// A handle on a point in a stream's work.
pub struct ClaystoneEvent(Event);

/// A handle on the stream that `make` gives for a device.
///
/// # Safety
/// `stream` is null or good for writing.
unsafe fn write_stream(
    make: fn(Device) -> claystone::Result<Stream>,
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    let stream = unsafe { output(stream, "stream")? };
    stream.write(handle(ClaystoneStream(make(device(device_number)?)?)));
    Ok(())
}

/// Makes a stream of its own. When its last handle is released, what was submitted still runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_new(
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> ClaystoneStatus {
    // SAFETY: the caller's promise.
    guard("claystone_stream_new", || unsafe { write_stream(Stream::new, device_number, stream) })
}

/// `claystone_stream_new` with a hint for the driver: below 0 the stream's work is more urgent than that of others, above 0 less.
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
    // SAFETY: the caller's promise.
    guard("claystone_stream_with_priority", || unsafe { write_stream(make, device_number, stream) })
}

/// A handle on the stream every device has, which all threads use unless another one is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_default(
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> ClaystoneStatus {
    // SAFETY: the caller's promise.
    guard("claystone_stream_default", || unsafe { write_stream(Stream::default_stream, device_number, stream) })
}

/// A handle on the stream that this thread's work on a device goes to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_current(
    device_number: i32,
    stream: *mut *mut ClaystoneStream,
) -> ClaystoneStatus {
    // SAFETY: the caller's promise.
    guard("claystone_stream_current", || unsafe { write_stream(Stream::current, device_number, stream) })
}

/// Makes a stream the one that this thread's work on its device goes to from now on; the thread keeps it until another is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_set_current(stream: *const ClaystoneStream) -> ClaystoneStatus {
    guard("claystone_stream_set_current", || {
        // SAFETY: a handle that lives, says the caller.
        let stream = unsafe { borrow(stream, "stream")? };
        set_stream(&stream.0);
        Ok(())
    })
}

/// Gives a handle on a stream back; null is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_release(stream: *mut ClaystoneStream) {
    // SAFETY: a handle that was not released, says the caller.
    unsafe { release("claystone_stream_release", stream) }
}

/// The number of a stream's device, and which of its streams it is: 0 is the default one. Numbers of streams that are gone are
/// given again. Either pointer may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_id(
    stream: *const ClaystoneStream,
    device_number: *mut i32,
    id: *mut i64,
) -> ClaystoneStatus {
    guard("claystone_stream_id", || {
        // SAFETY: a handle that lives, and pointers that are null or good for writing, says the caller.
        let (stream, device_number, id) = unsafe { (borrow(stream, "stream")?, optional(device_number), optional(id)) };
        device_number.map(|output| output.write(number(stream.0.device())));
        id.map(|output| output.write(stream.0.id().index() as i64));
        Ok(())
    })
}

/// Waits until everything submitted to a stream so far is done. Reports what its kernels found wrong.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_synchronize(stream: *const ClaystoneStream) -> ClaystoneStatus {
    guard("claystone_stream_synchronize", || {
        // SAFETY: a handle that lives, says the caller.
        let stream = unsafe { borrow(stream, "stream")? };
        Ok(stream.0.synchronize()?)
    })
}

/// Whether everything submitted to a stream is done. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_query(stream: *const ClaystoneStream, done: *mut bool) -> ClaystoneStatus {
    guard("claystone_stream_query", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
        let (stream, done) = unsafe { (borrow(stream, "stream")?, output(done, "done")?) };
        done.write(stream.0.is_idle()?);
        Ok(())
    })
}

/// Holds back what is submitted to a stream from now on until what was submitted to another so far is done. The host waits only
/// where they are of different devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_wait_stream(
    stream: *const ClaystoneStream,
    other: *const ClaystoneStream,
) -> ClaystoneStatus {
    guard("claystone_stream_wait_stream", || {
        // SAFETY: handles that live, says the caller.
        let (stream, other) = unsafe { (borrow(stream, "stream")?, borrow(other, "other")?) };
        Ok(stream.0.wait_stream(&other.0)?)
    })
}

/// A handle on the event that `record` gives for a stream.
///
/// # Safety
/// Both are null, or a handle that lives and a pointer that is good for writing.
unsafe fn write_event(
    record: fn(&Stream) -> claystone::Result<Event>,
    stream: *const ClaystoneStream,
    event: *mut *mut ClaystoneEvent,
) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    let (stream, event) = unsafe { (borrow(stream, "stream")?, output(event, "event")?) };
    event.write(handle(ClaystoneEvent(record(&stream.0)?)));
    Ok(())
}

/// Makes an event that is done when everything submitted to a stream so far is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_record_event(
    stream: *const ClaystoneStream,
    event: *mut *mut ClaystoneEvent,
) -> ClaystoneStatus {
    // SAFETY: the caller's promise.
    guard("claystone_stream_record_event", || unsafe { write_event(Stream::record_event, stream, event) })
}

/// `claystone_stream_record_event` with an event that knows when it was done, for `claystone_event_elapsed_time`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_record_timed_event(
    stream: *const ClaystoneStream,
    event: *mut *mut ClaystoneEvent,
) -> ClaystoneStatus {
    // SAFETY: the caller's promise.
    guard("claystone_stream_record_timed_event", || unsafe { write_event(Stream::record_timed_event, stream, event) })
}

/// Holds back what is submitted to a stream from now on until an event is done. The host waits only where it is another device's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_stream_wait_event(
    stream: *const ClaystoneStream,
    event: *const ClaystoneEvent,
) -> ClaystoneStatus {
    guard("claystone_stream_wait_event", || {
        // SAFETY: handles that live, says the caller.
        let (stream, event) = unsafe { (borrow(stream, "stream")?, borrow(event, "event")?) };
        Ok(stream.0.wait_event(&event.0)?)
    })
}

/// Whether everything before an event is done. Does not wait.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_query(event: *const ClaystoneEvent, done: *mut bool) -> ClaystoneStatus {
    guard("claystone_event_query", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
        let (event, done) = unsafe { (borrow(event, "event")?, output(done, "done")?) };
        done.write(event.0.is_done()?);
        Ok(())
    })
}

/// Waits until everything before an event is done.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_synchronize(event: *const ClaystoneEvent) -> ClaystoneStatus {
    guard("claystone_event_synchronize", || {
        // SAFETY: a handle that lives, says the caller.
        let event = unsafe { borrow(event, "event")? };
        Ok(event.0.synchronize()?)
    })
}

/// The milliseconds from when one event was done to when another of the same device was, by the device's clock; below 0 where that
/// was earlier. Both are those of `claystone_stream_record_timed_event`, and are waited for.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_elapsed_time(
    start: *const ClaystoneEvent,
    end: *const ClaystoneEvent,
    milliseconds: *mut f64,
) -> ClaystoneStatus {
    guard("claystone_event_elapsed_time", || {
        // SAFETY: handles that live, and a pointer that is good for writing, says the caller.
        let (start, end, milliseconds) =
            unsafe { (borrow(start, "start")?, borrow(end, "end")?, output(milliseconds, "milliseconds")?) };
        milliseconds.write(start.0.elapsed_time(&end.0)?);
        Ok(())
    })
}

/// Gives a handle on an event back; null is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_event_release(event: *mut ClaystoneEvent) {
    // SAFETY: a handle that was not released, says the caller.
    unsafe { release("claystone_event_release", event) }
}
