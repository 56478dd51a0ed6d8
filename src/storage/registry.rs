//! One allocator a device for the whole process: made on first use, never taken down.

use std::any::Any;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use super::allocator::Allocator;
use super::caching::{CachingAllocator, MemPool, MemPoolOptions};
use super::config::{Backend, Config};
use super::direct::DirectAllocator;
use super::driver::opencl::OpenCl;
use super::driver::{Driver, driver};
use super::guard::GuardAllocator;
use super::history::device_number;
use super::pool::PoolAllocator;
use crate::{Device, Error, Result, profiler};

/// A device's allocator.
pub(super) struct Current {
    pub(super) allocator: Arc<dyn Allocator>,
    /// Whether it is one of ours, whose blocks are what was asked for.
    pub(super) is_own: bool,
    /// The open device; `None` for the CPU.
    pub(super) opened: Option<OpenCl>,
    /// The byte that new storages are filled with, if any.
    pub(super) fill: Option<u8>,
}

impl Current {
    fn new(device: Device, allocator: Arc<dyn Allocator>, is_own: bool) -> Result<Current> {
        let opened = match device {
            Device::Cpu => None,
            Device::OpenCL(index) => Some(OpenCl::open(index)?),
        };
        Ok(Current { allocator, is_own, opened, fill: Config::of_process()?.fill_byte() })
    }
}

/// Those of the first devices, found without a lock: every allocation asks.
static CURRENT: [AtomicPtr<Current>; 16] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 16];

/// Those of all devices that were used. They live as long as the process: blocks keep plain references to them.
static TABLE: RwLock<Vec<(Device, &'static Current)>> = RwLock::new(Vec::new());

/// Where a device's allocator is in [`CURRENT`].
fn place(device: Device) -> Option<&'static AtomicPtr<Current>> {
    CURRENT.get(device_number(device) as usize)
}

/// Puts an allocator into the table; where the device has one already, only if it is to `replace` that.
fn insert(device: Device, made: Current, replace: bool) -> &'static Current {
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    let known = table.iter().position(|(of, _)| *of == device);
    if let Some(at) = known.filter(|_| !replace) {
        return table[at].1;
    }
    let current: &'static Current = Box::leak(Box::new(made));
    match known {
        Some(at) => table[at].1 = current,
        None => table.push((device, current)),
    }
    if let Some(place) = place(device) {
        place.store(std::ptr::from_ref(current).cast_mut(), Ordering::Release);
    }
    current
}

/// The allocator that a configuration's `backend` names, over any driver's memory; behind a [`GuardAllocator`] with
/// `guard_bytes`.
///
/// ```
/// use std::sync::Arc;
/// use claystone::storage::{Sim, SimOptions, build_allocator};
/// let pool = build_allocator(Arc::new(Sim::new(SimOptions::default())), "backend:pool".parse()?)?;
/// assert_eq!(format!("{pool:?}"), "the pool allocator of opencl:99");
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] where the configuration contradicts itself.
pub fn build_allocator(driver: Arc<dyn Driver>, config: Config) -> Result<Arc<dyn Allocator>> {
    let (guarded, below) = (config.guard_bytes, Arc::clone(&driver));
    let allocator: Arc<dyn Allocator> = match config.backend {
        Backend::Caching => Arc::new(CachingAllocator::new(driver, config)?),
        Backend::Pool => Arc::new(PoolAllocator::new(driver, config)?),
        Backend::Direct => Arc::new(DirectAllocator::new(driver, config)?),
    };
    Ok(if guarded { Arc::new(GuardAllocator::new(allocator, below)) } else { allocator })
}

/// The allocator of a device: what tensors made on it get their memory from.
///
/// # Errors
/// [`Error::NoDevice`] where the device is not there.
pub fn allocator(device: Device) -> Result<Arc<dyn Allocator>> {
    of(device).map(Arc::clone)
}

impl MemPool {
    /// A new pool of a device's allocator, or of the one inside, where it is wrapped.
    ///
    /// # Errors
    /// [`Error::NoDevice`] where the device is not there, [`Error::Invalid`] where its allocator is not a caching one.
    pub fn of_device(device: Device, options: MemPoolOptions) -> Result<MemPool> {
        let mut allocator = of(device)?;
        loop {
            if let Ok(caching) = (Arc::clone(allocator) as Arc<dyn Any + Send + Sync>).downcast::<CachingAllocator>() {
                return Ok(MemPool::new(&caching, options));
            }
            let other =
                || Error::invalid("MemPool::of_device", format!("the allocator of {device} is not a caching one"));
            allocator = allocator.inner().ok_or_else(other)?;
        }
    }
}

/// Makes `allocator` the one that hands out `device`'s memory from now on. What earlier ones handed out goes back to them.
/// The allocator stays alive as long as the process. It may be one over a [`Driver`] of your own: with one whose memory is
/// the host's ([`Memory::of_host`](super::Memory::of_host)), tensors of [`Device::Cpu`] are in that memory from then on.
///
/// # Errors
/// [`Error::Invalid`] where it is another device's.
pub fn set_allocator(device: Device, allocator: Arc<dyn Allocator>) -> Result<()> {
    if allocator.device() != device {
        let reason = format!("{allocator:?} hands out memory of {}, not of {device}", allocator.device());
        return Err(Error::invalid("set_allocator", reason));
    }
    driver(device)?;
    insert(device, Current::new(device, allocator, false)?, true);
    Ok(())
}

/// Puts `new` in the place of `old`, if that still is a device's allocator.
pub(super) fn replace(device: Device, old: &dyn Allocator, new: &Arc<dyn Allocator>) -> Result<()> {
    let is_old = |now: &Arc<dyn Allocator>| std::ptr::addr_eq(Arc::as_ptr(now), old);
    if of(device).is_ok_and(is_old) { set_allocator(device, Arc::clone(new)) } else { Ok(()) }
}

/// The allocator of a device, without counting a reference.
pub(super) fn of(device: Device) -> Result<&'static Arc<dyn Allocator>> {
    current(device).map(|current| &current.allocator)
}

/// [`of`], and what is known of it.
#[inline]
pub(super) fn current(device: Device) -> Result<&'static Current> {
    let known = place(device).map_or(std::ptr::null_mut(), |place| place.load(Ordering::Acquire));
    // SAFETY: null, or of a reference that `insert` has put into the table, to what lives as long as the process.
    match unsafe { known.as_ref() } {
        Some(current) => Ok(current),
        None => find(device),
    }
}

#[cold]
fn find(device: Device) -> Result<&'static Current> {
    let table = TABLE.read().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, current)) = table.iter().find(|(of, _)| *of == device) {
        return Ok(current);
    }
    drop(table);
    profiler::begin();
    let made = build_allocator(driver(device)?, Config::of_process()?.clone())?;
    let current = Current::new(device, made, true)?;
    profiler::first_use(device);
    Ok(insert(device, current, false))
}
