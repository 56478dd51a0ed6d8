//! Runs the random operations with a driver whose type the crate does not know.

use super::super::*;
use super::{COLLECTING, SETUP, Setup, check_random_operations};
use crate::Device;
use crate::storage::{At, Driver, Marker, Memory, Progress};

/// A driver that forwards every call to a simulated device, but has memory and markers of its own types.
#[derive(Debug)]
pub(super) struct Unknown(pub(super) Sim);

fn inside(memory: &Memory) -> &Memory {
    memory.get().expect("memory of this driver")
}

fn at<'a>((memory, offset): At<'a>) -> At<'a> {
    (inside(memory), offset)
}

fn marker(marker: &Marker) -> &Marker {
    marker.get().expect("a marker of this driver")
}

// SAFETY: the simulated device upholds the driver's contract.
unsafe impl Driver for Unknown {
    fn device(&self) -> Device {
        self.0.device()
    }

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn largest_segment(&self) -> usize {
        self.0.largest_segment()
    }

    fn alignment(&self) -> usize {
        self.0.alignment()
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        self.0.create(bytes).map(Memory::new)
    }

    fn page(&self) -> usize {
        self.0.page()
    }

    fn reserve(&self, bytes: usize) -> Option<Memory> {
        self.0.reserve(bytes).map(Memory::new)
    }

    fn extend(&self, memory: &Memory, from: usize, to: usize) -> Result<(), Failure> {
        self.0.extend(inside(memory), from, to)
    }

    unsafe fn shrink(&self, memory: &Memory, from: usize, to: usize) {
        // SAFETY: the caller upholds the contract of the method.
        unsafe { Driver::shrink(&self.0, inside(memory), from, to) }
    }

    fn synchronize(&self) -> Result<()> {
        self.0.synchronize()
    }

    fn record(&self, stream: StreamId) -> Result<Marker> {
        self.0.record(stream).map(Marker::new)
    }

    fn is_done(&self, event: &Marker) -> Result<bool> {
        self.0.is_done(marker(event))
    }

    fn is_idle(&self, stream: StreamId) -> Result<bool> {
        self.0.is_idle(stream)
    }

    fn progress(&self, stream: StreamId) -> Progress {
        self.0.progress(stream)
    }

    fn wait(&self, event: &Marker) -> Result<()> {
        self.0.wait(marker(event))
    }

    fn stream_waits(&self, stream: StreamId, event: &Marker) -> Result<()> {
        self.0.stream_waits(stream, marker(event))
    }

    unsafe fn copy(&self, stream: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        // SAFETY: the caller upholds the contract of the method.
        unsafe { Driver::copy(&self.0, stream, at(from), at(to), bytes) }
    }

    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        // SAFETY: the caller upholds the contract of the method.
        unsafe { Driver::read(&self.0, at(from), to) }
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        // SAFETY: the caller upholds the contract of the method.
        unsafe { Driver::write(&self.0, from, at(to)) }
    }
}

const UNKNOWN: Setup = Setup { unknown: true, ..SETUP };

#[test]
fn with_defaults() {
    check_random_operations(UNKNOWN);
}

#[test]
fn with_segments_that_grow_in_place() {
    check_random_operations(Setup { config: "expandable_segments:True", page: 512, ..UNKNOWN });
}

#[test]
fn with_garbage_collection() {
    check_random_operations(Setup { unknown: true, ..COLLECTING });
}
