//! One allocator a device for the whole process: made on first use, never taken down.

use std::any::Any;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock};

use super::allocator::Allocator;
use super::caching::CachingAllocator;
use super::config::{Backend, Config};
use super::direct::DirectAllocator;
use super::driver::host::Host;
use super::driver::opencl::OpenCl;
use super::driver::{Driver, DynDriver};
use super::guard::GuardAllocator;
use super::pool::PoolAllocator;
use crate::device::opencl::{self, ClDevice};
use crate::{Device, Error, Result};

/// What is known of a device. Both live as long as the process: blocks keep plain references to their allocator.
#[derive(Clone, Copy, Default)]
struct Entry {
    driver: Option<&'static DynDriver>,
    allocator: Option<&'static Current>,
}

/// A device's allocator.
pub(super) struct Current {
    pub(super) allocator: Arc<dyn Allocator>,
    /// Whether it is one of ours, whose blocks are what was asked for.
    pub(super) is_own: bool,
    /// The open device; `None` for the CPU.
    pub(super) opened: Option<&'static ClDevice>,
    /// The byte that new storages are filled with, if any.
    pub(super) fill: Option<u8>,
}

impl Current {
    fn new(device: Device, allocator: Arc<dyn Allocator>, is_own: bool) -> Result<Current> {
        let opened = match device {
            Device::Cpu => None,
            Device::OpenCL(index) => Some(opencl::open(index)?),
        };
        Ok(Current { allocator, is_own, opened, fill: config()?.fill_byte() })
    }
}

/// Those of the first devices, found without a lock: every allocation asks.
static CURRENT: [AtomicPtr<Current>; 16] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 16];

/// The CPU first, then the OpenCL devices by index.
static TABLE: RwLock<Vec<Entry>> = RwLock::new(Vec::new());

fn index(device: Device) -> usize {
    match device {
        Device::Cpu => 0,
        Device::OpenCL(index) => index.saturating_add(1), // no table is that long
    }
}

/// The number of a device in snapshots.
pub(super) fn number(device: Device) -> u32 {
    u32::try_from(index(device)).unwrap_or(u32::MAX)
}

fn entry(device: Device) -> Entry {
    TABLE.read().unwrap_or_else(PoisonError::into_inner).get(index(device)).copied().unwrap_or_default()
}

fn change<R>(device: Device, f: impl FnOnce(&mut Entry) -> R) -> R {
    let mut table = TABLE.write().unwrap_or_else(PoisonError::into_inner);
    if table.len() <= index(device) {
        table.resize(index(device) + 1, Entry::default());
    }
    let entry = &mut table[index(device)];
    let result = f(entry);
    if let (Some(current), Some(place)) = (entry.allocator, CURRENT.get(index(device))) {
        place.store(std::ptr::from_ref(current).cast_mut(), Ordering::Release);
    }
    result
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// What the environment says, read when the first device is used.
pub(super) fn config() -> Result<&'static Config> {
    static CONFIG: OnceLock<Result<Config>> = OnceLock::new();
    CONFIG.get_or_init(Config::from_env).as_ref().map_err(Error::clone)
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

/// The driver of a device's memory: what allocators of a user's own are built on. Opens the device.
///
/// # Errors
/// [`Error::NoDevice`] where the device is not there.
pub fn driver(device: Device) -> Result<Arc<dyn Driver>> {
    if let Some(driver) = entry(device).driver {
        return Ok(Arc::clone(driver));
    }
    let driver: DynDriver = match device {
        Device::Cpu => Arc::new(Host::new(config()?)),
        // Fails for an index that is none, before the table grows to hold it.
        Device::OpenCL(index) => Arc::new(OpenCl::new(opencl::open(index)?)),
    };
    Ok(change(device, |entry| Arc::clone(entry.driver.get_or_insert_with(|| leak(driver)))))
}

/// The allocator of a device: what tensors made on it get their memory from.
///
/// # Errors
/// [`Error::NoDevice`] where the device is not there.
pub fn allocator(device: Device) -> Result<Arc<dyn Allocator>> {
    of(device).map(Arc::clone)
}

/// The caching allocator of a device, which others may be wrapped around; `op` asks for it.
pub(super) fn caching(device: Device, op: &'static str) -> Result<Arc<CachingAllocator>> {
    let mut allocator = of(device)?;
    loop {
        // Wrappers are looked into.
        if let Ok(caching) = (Arc::clone(allocator) as Arc<dyn Any + Send + Sync>).downcast() {
            return Ok(caching);
        }
        let other = || Error::invalid(op, format!("the allocator of {device} is not a caching one"));
        allocator = allocator.inner().ok_or_else(other)?;
    }
}

/// Makes `allocator` the one that hands out `device`'s memory from now on. What earlier ones handed out goes back to them.
/// The allocator stays alive as long as the process.
///
/// # Errors
/// [`Error::Invalid`] where it is another device's.
pub fn set_allocator(device: Device, allocator: Arc<dyn Allocator>) -> Result<()> {
    if allocator.device() != device {
        let reason = format!("{allocator:?} hands out memory of {}, not of {device}", allocator.device());
        return Err(Error::invalid("set_allocator", reason));
    }
    driver(device)?;
    let current = leak(Current::new(device, allocator, false)?);
    change(device, |entry| entry.allocator = Some(current));
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
    let known = CURRENT.get(index(device)).map_or(std::ptr::null_mut(), |place| place.load(Ordering::Acquire));
    // SAFETY: null, or of a reference that `change` has found in the table, to what lives as long as the process.
    match unsafe { known.as_ref() } {
        Some(current) => Ok(current),
        None => find(device),
    }
}

#[cold]
fn find(device: Device) -> Result<&'static Current> {
    if let Some(current) = entry(device).allocator {
        return Ok(current);
    }
    let driver = driver(device)?;
    let made = build_allocator(driver, config()?.clone())?;
    let made = Current::new(device, made, true)?;
    Ok(change(device, |entry| *entry.allocator.get_or_insert_with(|| leak(made))))
}
