//! Transfer of batches to a device.

use crate::device::Event;
use crate::{Device, Result, Stream, Tensor, with_stream};

/// A batch whose tensors can be copied to a device. Implementations for your own types call `map_tensors` on each field.
pub trait Transfer: Sized {
    /// Replaces each tensor by the result of `f`. Returns the errors of `f`.
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Self>;
}

impl Transfer for Tensor {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Tensor> {
        f(self)
    }
}

impl<T: Transfer> Transfer for Vec<T> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Vec<T>> {
        self.into_iter().map(|t| t.map_tensors(f)).collect()
    }
}

impl<T: Transfer> Transfer for Option<T> {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<Option<T>> {
        self.map(|t| t.map_tensors(f)).transpose()
    }
}

impl<A: Transfer, B: Transfer> Transfer for (A, B) {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<(A, B)> {
        Ok((self.0.map_tensors(f)?, self.1.map_tensors(f)?))
    }
}

impl<A: Transfer, B: Transfer, C: Transfer> Transfer for (A, B, C) {
    fn map_tensors(self, f: &mut dyn FnMut(Tensor) -> Result<Tensor>) -> Result<(A, B, C)> {
        Ok((self.0.map_tensors(f)?, self.1.map_tensors(f)?, self.2.map_tensors(f)?))
    }
}

/// Copies a batch to the stream's device through pinned memory. The returned event completes when the copy is done.
pub(super) fn send<B: Transfer>(batch: B, stream: &Stream) -> Result<(B, Event)> {
    let device = stream.device();
    let there = with_stream(stream, || {
        batch.map_tensors(&mut |t| if t.device() == device { Ok(t) } else { t.pin_memory(device)?.to_device(device) })
    })?;
    Ok((there, stream.record_event()?))
}

/// Makes the calling thread's stream wait for a batch, and marks the batch's memory as used by that stream. The host does not wait.
pub(super) fn receive<B: Transfer>(batch: B, sent: &Event, device: Device) -> Result<B> {
    let stream = Stream::current(device)?;
    stream.wait_event(sent)?;
    batch.map_tensors(&mut |t| {
        t.record_stream(&stream)?;
        Ok(t)
    })
}
