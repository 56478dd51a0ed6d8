//! The launch counter of the current thread.

use std::cell::Cell;

thread_local! {
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// Adds 1 to the counter of [`count_launches`]: at every kernel launch, and at every operation on the CPU.
pub(crate) fn count_launch() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// Runs `f` and returns its result with the number of launches by this thread while `f` ran: kernels on OpenCL devices, and
/// operations on the CPU. Copies, fills, reads and writes are not counted. For tests of fusion.
///
/// ```
/// let (sum, launches) = claystone::device::count_launches(|| 1 + 1);
/// assert_eq!((sum, launches), (2, 0));
/// ```
pub fn count_launches<R>(f: impl FnOnce() -> R) -> (R, u64) {
    let before = LAUNCHES.get();
    let result = f();
    (result, LAUNCHES.get() - before)
}
