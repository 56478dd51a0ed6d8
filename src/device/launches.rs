//! Counts what a thread launches.

use std::cell::Cell;

thread_local! {
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// Counts one for [`count_launches`]: every kernel launch, and every operation on the CPU.
pub(crate) fn count_launch() {
    LAUNCHES.set(LAUNCHES.get() + 1);
}

/// Runs `f` and counts what this thread launched inside it: kernels on OpenCL devices, and operations on the CPU, which
/// count as one each. Copies, fills, reads and writes are not launches. What an optimisation saved is best asserted.
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
