//! The process-wide table of allocators, one per device, created on first use and never destroyed.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::allocator::Allocator;
use super::caching::{CachingAllocator, MemPool, MemPoolOptions};
use super::config::{Backend, Config};
use super::direct::DirectAllocator;
use super::driver::opencl::OpenCl;
use super::driver::{Driver, driver};
use super::dry;
use super::guard::GuardAllocator;
use super::history::device_number;
use super::{per_device, pool::PoolAllocator, snapshot_on_oom};
use crate::{Device, Error, Result, profiler};

/// A device's current allocator.
pub(super) struct DeviceEntry {
    pub(super) allocator: Arc<dyn Allocator>,
    /// True if the crate made the allocator, whose blocks need no check.
    pub(super) is_built_in: bool,
    /// The open device; `None` for the CPU.
    pub(super) opened: Option<OpenCl>,
    /// The byte that new storages are filled with, if any.
    pub(super) fill: Option<u8>,
}

impl DeviceEntry {
    fn new(device: Device, allocator: Arc<dyn Allocator>, is_built_in: bool) -> Result<DeviceEntry> {
        let opened = match device {
            Device::Cpu => None,
            Device::OpenCL(index) => Some(OpenCl::open(index)?),
        };
        Ok(DeviceEntry { allocator, is_built_in, opened, fill: Config::from_env_once()?.fill_byte() })
    }
}

/// Lock-free table of the first 16 devices' allocators, because every allocation looks one up. Allocators live as long as the process,
/// because blocks keep `'static` references to allocators.
static FIRST_DEVICES: [AtomicPtr<DeviceEntry>; 16] = [const { AtomicPtr::new(std::ptr::null_mut()) }; 16];

/// Returns the device's slot in [`FIRST_DEVICES`].
fn lock_free_slot(device: Device) -> Option<&'static AtomicPtr<DeviceEntry>> {
    FIRST_DEVICES.get(device_number(device) as usize)
}

/// Inserts an allocator into the table. If the device already has an allocator, it is kept unless `replace` is true.
fn insert(device: Device, made: DeviceEntry, replace: bool) -> &'static DeviceEntry {
    per_device::insert(device, made, replace, |current| {
        if let Some(slot) = lock_free_slot(device) {
            slot.store(std::ptr::from_ref(current).cast_mut(), Ordering::Release);
        }
    })
}

/// Builds the allocator named by the configuration's `backend` over a driver's memory, inside a [`GuardAllocator`] if `guard_bytes` is set.
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
/// [`Error::Invalid`] if the configuration contradicts itself.
pub fn build_allocator(driver: Arc<dyn Driver>, config: Config) -> Result<Arc<dyn Allocator>> {
    let (guarded, below) = (config.guard_bytes, Arc::clone(&driver));
    let allocator: Arc<dyn Allocator> = match config.backend {
        Backend::Caching => Arc::new(CachingAllocator::new(driver, config)?),
        Backend::Pool => Arc::new(PoolAllocator::new(driver, config)?),
        Backend::Direct => Arc::new(DirectAllocator::new(driver, config)?),
    };
    Ok(if guarded { Arc::new(GuardAllocator::new(allocator, below)) } else { allocator })
}

/// Returns a device's allocator, which hands out the memory of tensors made on the device.
///
/// # Errors
/// [`Error::NoDevice`] if the device does not exist.
pub fn allocator(device: Device) -> Result<Arc<dyn Allocator>> {
    device_allocator(device).map(Arc::clone)
}

impl MemPool {
    /// Creates a pool in a device's caching allocator, which may be wrapped in other allocators.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device does not exist, [`Error::Invalid`] if its allocator is not a caching allocator.
    pub fn of_device(device: Device, options: MemPoolOptions) -> Result<MemPool> {
        let mut allocator = device_allocator(device)?;
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

/// Makes `allocator` hand out `device`'s memory from now on. Blocks of earlier allocators are returned to those
/// allocators. The allocator stays alive as long as the process.
///
/// `allocator` may use a [`Driver`] of your own. If its memory is host memory
/// ([`Memory::of_host`](super::Memory::of_host)), tensors of [`Device::Cpu`] are in that memory from then on.
///
/// # Errors
/// [`Error::Invalid`] if the allocator belongs to another device.
pub fn set_allocator(device: Device, allocator: Arc<dyn Allocator>) -> Result<()> {
    if allocator.device() != device {
        let reason = format!("{allocator:?} hands out memory of {}, not of {device}", allocator.device());
        return Err(Error::invalid("set_allocator", reason));
    }
    driver(device)?;
    insert(device, DeviceEntry::new(device, allocator, false)?, true);
    Ok(())
}

/// Replaces `old` by `new`, if `old` still is the device's allocator.
pub(super) fn replace_allocator(device: Device, old: &dyn Allocator, new: &Arc<dyn Allocator>) -> Result<()> {
    let is_old = |now: &Arc<dyn Allocator>| std::ptr::addr_eq(Arc::as_ptr(now), old);
    if device_allocator(device).is_ok_and(is_old) { set_allocator(device, Arc::clone(new)) } else { Ok(()) }
}

pub(super) fn device_allocator(device: Device) -> Result<&'static Arc<dyn Allocator>> {
    device_entry(device).map(|current| &current.allocator)
}

/// Like [`device_allocator`], with the properties of the allocator.
#[inline]
pub(super) fn device_entry(device: Device) -> Result<&'static DeviceEntry> {
    let known = lock_free_slot(device).map_or(std::ptr::null_mut(), |slot| slot.load(Ordering::Acquire));
    // SAFETY: null, or the address of a reference that `insert` put into the table, which lives as long as the process.
    match unsafe { known.as_ref() } {
        Some(current) => Ok(current),
        None => find_or_create(device),
    }
}

/// The slow path of [`device_entry`], for devices without a slot in [`FIRST_DEVICES`] and for the first use of a device.
#[cold]
fn find_or_create(device: Device) -> Result<&'static DeviceEntry> {
    if let Some(current) = per_device::get(device) {
        return Ok(current);
    }
    profiler::begin_from_environment();
    let made = match dry::of_process()? {
        Some(run) => run.allocator(device)?,
        None => build_allocator(driver(device)?, Config::from_env_once()?.clone())?,
    };
    let entry = DeviceEntry::new(device, Arc::clone(&made), true)?;
    profiler::measure_at_first_use(device);
    let current = insert(device, entry, false);
    if Arc::ptr_eq(&current.allocator, &made) {
        snapshot_on_oom::register_from_environment(&current.allocator); // no other thread was faster
    }
    Ok(current)
}
