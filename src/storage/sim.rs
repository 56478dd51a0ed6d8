//! A simulated device: lazy, with a capacity, failures on demand and a record of every call.

use std::sync::{Arc, Mutex, PoisonError};

use super::driver::{Driver, Failure};
use crate::Device;

/// A call of the allocator, with the size of the segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Call {
    Create(usize),
    Commit(usize),
    Release(usize),
    Synchronize,
}

/// A device without bytes.
#[derive(Debug, Clone)]
pub(super) struct Sim {
    capacity: u64,
    largest: usize,
    state: Arc<Mutex<SimState>>,
}

#[derive(Debug, Default)]
struct SimState {
    committed: u64,
    others: u64,
    calls: Vec<Call>,
    create_failures: Vec<Failure>,
    commit_failures: Vec<Failure>,
    at_synchronize: Vec<Hook>,
}

/// Something that happens while the allocator waits for the device.
struct Hook(Box<dyn FnOnce() + Send>);

impl std::fmt::Debug for Hook {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Hook")
    }
}

impl Sim {
    pub(super) fn new(capacity: u64, largest: usize) -> Sim {
        Sim { capacity, largest, state: Arc::default() }
    }

    pub(super) fn calls(&self) -> Vec<Call> {
        self.with(|s| s.calls.clone())
    }

    /// Bytes committed now.
    pub(super) fn committed(&self) -> u64 {
        self.with(|s| s.committed)
    }

    /// Bytes that other processes hold: `capacity` does not tell.
    pub(super) fn set_others(&self, bytes: u64) {
        self.with(|s| s.others = bytes);
    }

    pub(super) fn fail_next_create(&self, failure: Failure) {
        self.with(|s| s.create_failures.push(failure));
    }

    pub(super) fn fail_next_commit(&self, failure: Failure) {
        self.with(|s| s.commit_failures.push(failure));
    }

    pub(super) fn at_synchronize(&self, hook: impl FnOnce() + Send + 'static) {
        self.with(|s| s.at_synchronize.push(Hook(Box::new(hook))));
    }

    fn with<R>(&self, f: impl FnOnce(&mut SimState) -> R) -> R {
        f(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A segment of the simulated device.
#[derive(Debug)]
pub(super) struct SimMemory {
    size: usize,
    committed: Mutex<bool>,
    sim: Sim,
}

impl Drop for SimMemory {
    fn drop(&mut self) {
        let committed = *self.committed.lock().unwrap_or_else(PoisonError::into_inner);
        self.sim.with(|s| {
            s.committed -= if committed { self.size as u64 } else { 0 };
            s.calls.push(Call::Release(self.size));
        });
    }
}

impl Driver for Sim {
    type Memory = SimMemory;

    fn device(&self) -> Device {
        Device::OpenCL(99)
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn largest_segment(&self) -> usize {
        self.largest
    }

    fn create(&self, bytes: usize) -> Result<SimMemory, Failure> {
        self.with(|s| {
            s.calls.push(Call::Create(bytes));
            if let Some(failure) = s.create_failures.pop() {
                return Err(failure);
            }
            if bytes > self.largest {
                return Err(Failure::TooBig);
            }
            Ok(SimMemory { size: bytes, committed: Mutex::new(false), sim: self.clone() })
        })
    }

    fn commit(&self, memory: &SimMemory) -> Result<(), Failure> {
        self.with(|s| {
            s.calls.push(Call::Commit(memory.size));
            if let Some(failure) = s.commit_failures.pop() {
                return Err(failure);
            }
            if s.committed + s.others + memory.size as u64 > self.capacity {
                return Err(Failure::OutOfMemory);
            }
            s.committed += memory.size as u64;
            *memory.committed.lock().unwrap_or_else(PoisonError::into_inner) = true;
            Ok(())
        })
    }

    fn synchronize(&self) -> crate::Result<()> {
        let hooks = self.with(|s| {
            s.calls.push(Call::Synchronize);
            std::mem::take(&mut s.at_synchronize)
        });
        hooks.into_iter().for_each(|hook| hook.0()); // without the lock: a hook may use the allocator
        Ok(())
    }
}
