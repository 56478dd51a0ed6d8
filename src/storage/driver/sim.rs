//! A simulated device: lazy, with a capacity, failures on demand and a record of every call.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use super::{At, Driver, Failure, Marker, MarkerKind, Memory, MemoryKind};
use crate::device::StreamId;
use crate::{Device, Result};

/// A call of an allocator, with the size of the segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Call {
    Create(usize),
    Commit(usize),
    Release(usize),
    Copy(usize),
    Synchronize,
}

/// What a simulated device is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimOptions {
    /// Bytes it has.
    pub capacity: u64,
    /// The largest segment it makes, in bytes.
    pub largest_segment: usize,
    /// Blocks begin at multiples of this many bytes, a power of two.
    pub alignment: usize,
    /// Whether to keep every call for [`Sim::calls`].
    pub record_calls: bool,
}

impl Default for SimOptions {
    /// A device that is never full.
    fn default() -> SimOptions {
        SimOptions { capacity: 1 << 50, largest_segment: 1 << 49, alignment: 512, record_calls: false }
    }
}

/// A device without bytes: memory is counted, nothing else. Cloning makes another handle on it.
#[derive(Clone)]
pub struct Sim {
    options: SimOptions,
    state: Arc<Mutex<SimState>>,
}

#[derive(Default)]
struct SimState {
    committed: u64,
    others: u64,
    count: u64,
    calls: Vec<Call>,
    create_failures: Vec<Failure>,
    commit_failures: Vec<Failure>,
    at_synchronize: Vec<Box<dyn FnOnce() + Send>>,
}

#[derive(Clone)]
pub(crate) struct SimMarker;

impl fmt::Debug for Sim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Sim").field(&self.options).finish()
    }
}

impl Sim {
    /// A device like this.
    pub fn new(options: SimOptions) -> Sim {
        Sim { options, state: Arc::default() }
    }

    /// How often the driver was called: segments made, committed and released, copies, waits.
    pub fn call_count(&self) -> u64 {
        self.with(|s| s.count)
    }

    /// Every call so far, if they are recorded.
    pub fn calls(&self) -> Vec<Call> {
        self.with(|s| s.calls.clone())
    }

    /// Bytes committed now.
    pub fn committed(&self) -> u64 {
        self.with(|s| s.committed)
    }

    /// Bytes that other processes hold: `capacity` does not tell.
    pub fn set_others(&self, bytes: u64) {
        self.with(|s| s.others = bytes);
    }

    /// The next creation fails so.
    pub fn fail_next_create(&self, failure: Failure) {
        self.with(|s| s.create_failures.push(failure));
    }

    /// The next commit fails so.
    pub fn fail_next_commit(&self, failure: Failure) {
        self.with(|s| s.commit_failures.push(failure));
    }

    /// What happens while the allocator next waits for the device.
    pub fn at_synchronize(&self, hook: impl FnOnce() + Send + 'static) {
        self.with(|s| s.at_synchronize.push(Box::new(hook)));
    }

    fn with<R>(&self, f: impl FnOnce(&mut SimState) -> R) -> R {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn called(&self, s: &mut SimState, call: Call) {
        s.count += 1;
        if self.options.record_calls {
            s.calls.push(call);
        }
    }
}

/// A segment of the simulated device.
pub(crate) struct SimMemory {
    size: usize,
    committed: Mutex<bool>,
    sim: Sim,
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        let committed = *self.committed.lock().unwrap_or_else(PoisonError::into_inner);
        self.sim.with(|s| {
            s.committed -= if committed { self.size as u64 } else { 0 };
            self.sim.called(s, Call::Release(self.size));
        });
    }
}

impl Driver for Sim {
    fn device(&self) -> Device {
        Device::OpenCL(99)
    }

    fn capacity(&self) -> u64 {
        self.options.capacity
    }

    fn largest_segment(&self) -> usize {
        self.options.largest_segment
    }

    fn alignment(&self) -> usize {
        self.options.alignment
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        self.with(|s| {
            self.called(s, Call::Create(bytes));
            if let Some(failure) = s.create_failures.pop() {
                return Err(failure);
            }
            if bytes > self.options.largest_segment {
                return Err(Failure::TooBig);
            }
            let memory = SimMemory { size: bytes, committed: Mutex::new(false), sim: self.clone() };
            Ok(Memory(MemoryKind::Sim(memory)))
        })
    }

    fn commit(&self, memory: &Memory) -> Result<(), Failure> {
        let MemoryKind::Sim(memory) = &memory.0 else { return Ok(()) };
        self.with(|s| {
            self.called(s, Call::Commit(memory.size));
            if let Some(failure) = s.commit_failures.pop() {
                return Err(failure);
            }
            if s.committed + s.others + memory.size as u64 > self.options.capacity {
                return Err(Failure::DeviceMemory);
            }
            s.committed += memory.size as u64;
            *memory.committed.lock().unwrap_or_else(PoisonError::into_inner) = true;
            Ok(())
        })
    }

    fn synchronize(&self) -> Result<()> {
        let hooks = self.with(|s| {
            self.called(s, Call::Synchronize);
            std::mem::take(&mut s.at_synchronize)
        });
        hooks.into_iter().for_each(|hook| hook()); // without the lock: a hook may use the allocator
        Ok(())
    }

    fn record(&self, _: StreamId) -> Result<Marker> {
        Ok(Marker(MarkerKind::Sim(SimMarker)))
    }

    fn is_done(&self, _: &Marker) -> bool {
        true
    }

    fn wait(&self, _: &Marker) -> Result<()> {
        Ok(())
    }

    fn stream_waits(&self, _: StreamId, _: &Marker) -> Result<()> {
        Ok(())
    }

    fn copy(&self, _: StreamId, _: At<'_>, _: At<'_>, bytes: usize) -> Result<()> {
        self.with(|s| self.called(s, Call::Copy(bytes)));
        Ok(())
    }

    fn read(&self, _: At<'_>, _: &mut [u8]) -> Result<()> {
        Ok(())
    }

    fn write(&self, _: &[u8], _: At<'_>) -> Result<()> {
        Ok(())
    }
}
