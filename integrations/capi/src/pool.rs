//! Private pools of device memory.

use std::cell::RefCell;
use std::mem::ManuallyDrop;

use claystone::storage::{EnteredPool, MemPool, MemPoolOptions};

use crate::device::device;
use crate::pointers::{borrow, handle, output, release};
use crate::status::{ClaystoneStatus, Fault, guard};

/// A handle on a private pool of a device's caching allocator: memory that serves only allocations inside the pool. When all handles and
/// all graphs of the pool are released, its memory joins the device's other memory; live blocks stay valid.
pub struct ClaystonePool(pub(crate) MemPool);

/// The memory of a pool.
#[repr(C)]
#[derive(Debug)]
pub struct ClaystonePoolStats {
    /// The number of segments held from the driver.
    pub segments: u64,
    /// The bytes of the segments.
    pub reserved_bytes: u64,
    /// The number of live blocks.
    pub allocations: u64,
    /// The bytes of live blocks, with requests rounded up.
    pub allocated_bytes: u64,
    /// The bytes of blocks that are live or that unfinished work uses.
    pub active_bytes: u64,
}

thread_local! {
    /// The pools that this thread has begun to use. Never dropped at the thread's end, when other thread-local values may be gone.
    static ENTERED: RefCell<Vec<ManuallyDrop<(u32, EnteredPool)>>> = const { RefCell::new(Vec::new()) };
}

/// Makes an empty pool. With `use_on_oom`, allocations outside the pool take its free blocks before they fail. With `no_split`, each
/// allocation gets a segment of its own, which is reused whole.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pool_new(
    number: i32,
    use_on_oom: bool,
    no_split: bool,
    pool: *mut *mut ClaystonePool,
) -> ClaystoneStatus {
    guard("claystone_pool_new", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let pool = unsafe { output(pool, "pool")? };
        let options = MemPoolOptions::default().use_on_oom(use_on_oom).no_split(no_split);
        pool.write(handle(ClaystonePool(MemPool::of_device(device(number)?, options)?)));
        Ok(())
    })
}

/// Releases a handle on a pool; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pool_release(pool: *mut ClaystonePool) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_pool_release", pool) }
}

/// Gets the pool's number: unique among the live pools of the process, never 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pool_id(pool: *const ClaystonePool, id: *mut u32) -> ClaystoneStatus {
    guard("claystone_pool_id", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (pool, id) = unsafe { (borrow(pool, "pool")?, output(id, "id")?) };
        id.write(pool.0.id());
        Ok(())
    })
}

/// Gets the pool's current memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pool_stats(
    pool: *const ClaystonePool,
    stats: *mut ClaystonePoolStats,
) -> ClaystoneStatus {
    guard("claystone_pool_stats", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (pool, output) = unsafe { (borrow(pool, "pool")?, output(stats, "stats")?) };
        let stats = pool.0.stats();
        output.write(ClaystonePoolStats {
            segments: stats.segments,
            reserved_bytes: stats.reserved_bytes,
            allocations: stats.allocations,
            allocated_bytes: stats.allocated_bytes,
            active_bytes: stats.active_bytes,
        });
        Ok(())
    })
}

/// Returns the pool's unused segments to the driver. Waits for work that still uses freed blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pool_empty_cache(pool: *const ClaystonePool) -> ClaystoneStatus {
    guard("claystone_pool_empty_cache", || {
        // SAFETY: the caller promises a live handle.
        Ok(unsafe { borrow(pool, "pool")? }.0.empty_cache()?)
    })
}

/// Takes this thread's allocations on the pool's device from the pool until `claystone_pool_end`. Calls nest: the innermost pool of a
/// device is used.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pool_begin(pool: *const ClaystonePool) -> ClaystoneStatus {
    guard("claystone_pool_begin", || {
        // SAFETY: the caller promises a live handle.
        let pool = unsafe { borrow(pool, "pool")? };
        ENTERED.with_borrow_mut(|entered| entered.push(ManuallyDrop::new((pool.0.id(), pool.0.enter()))));
        Ok(())
    })
}

/// Ends the latest `claystone_pool_begin` of this thread with the pool. Pools may end in any order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pool_end(pool: *const ClaystonePool) -> ClaystoneStatus {
    guard("claystone_pool_end", || {
        // SAFETY: the caller promises a live handle.
        let id = unsafe { borrow(pool, "pool")? }.0.id();
        let ended = ENTERED
            .with_borrow_mut(|entered| entered.iter().rposition(|inside| inside.0 == id).map(|at| entered.remove(at)));
        let ended = ended.ok_or_else(|| Fault::Argument(format!("this thread does not allocate from pool {id}")))?;
        drop(ManuallyDrop::into_inner(ended));
        Ok(())
    })
}
