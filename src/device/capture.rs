//! Which device a thread captures a graph of, whose work is then recorded instead of submitted.

use std::cell::Cell;

use super::Device;
use crate::{Error, Result};

thread_local! {
    static CAPTURING: Cell<Option<Device>> = const { Cell::new(None) };
}

/// Whether this thread captures a graph of the device.
#[inline]
pub(crate) fn is_capturing(device: Device) -> bool {
    CAPTURING.get() == Some(device)
}

/// Has this thread capture what it submits to the device.
///
/// # Errors
/// [`Error::Invalid`] where it captures a graph already.
pub(super) fn begin(device: Device) -> Result<()> {
    if CAPTURING.get().is_some() {
        return Err(Error::invalid("Graph::capture", "this thread is capturing a graph already"));
    }
    CAPTURING.set(Some(device));
    Ok(())
}

/// Ends what [`begin`] began.
pub(super) fn end() {
    CAPTURING.set(None);
}

/// An error for what cannot be part of a graph.
///
/// # Errors
/// [`Error::Invalid`] while this thread captures one of the device.
#[inline]
pub(crate) fn refuse(device: Device, op: &'static str, why: &str) -> Result<()> {
    match is_capturing(device) {
        true => Err(Error::invalid(op, format!("not while a graph is captured: {why}"))),
        false => Ok(()),
    }
}
