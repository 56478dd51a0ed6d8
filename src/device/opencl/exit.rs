//! The end of the process.
//!
//! A driver tears itself down when the process exits. One that compiles and runs kernels in threads of the process, as
//! PoCL does, crashes where any of that is still under way. So before it gets there, builds are waited for, queues
//! finished, and the driver called no more: what other threads still ask of it fails as on a lost device.
//!
//! Exit handlers run in the reverse of the order in which they were registered. Ours is therefore registered once the
//! driver is loaded, and again whenever the driver, which registers more of its own as it compiles, may have done so.
//! Only its very first compilation, when under way at the exit, is not waited for in time.

use std::process;
use std::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{PoisonError, RwLock, RwLockReadGuard};

use super::discovery;
use super::errors::ClError;

/// The driver may not be called any more.
static OVER: AtomicBool = AtomicBool::new(false);
/// Held for reading by builds.
static BUILDS: RwLock<()> = RwLock::new(());
/// A program was built since the handler was last registered: its first launch may compile once more.
static BUILT: AtomicBool = AtomicBool::new(false);
/// The process that registered the handler: in a fork of it the driver's threads are missing.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// An error once the driver may not be called any more.
pub(super) fn check() -> Result<(), ClError> {
    if OVER.load(Acquire) { Err(ClError { lost: true, ..ClError::new("exit", -36) }) } else { Ok(()) }
}

/// Holds up the end of the process.
pub(super) fn building() -> RwLockReadGuard<'static, ()> {
    BUILDS.read().unwrap_or_else(PoisonError::into_inner)
}

/// A program was built.
pub(super) fn built() {
    register();
    BUILT.store(true, Relaxed);
}

/// Something that was submitted is done.
pub(super) fn waited() {
    if BUILT.load(Relaxed) && BUILT.swap(false, Relaxed) {
        register();
    }
}

/// Has [`at_exit`] called before what was registered so far.
pub(super) fn register() {
    PROCESS.store(process::id(), Relaxed);
    // SAFETY: the handler is a function of the type that C wants, and does not unwind. Without memory for it, which is
    // all that can fail, the process ends as it would have.
    unsafe { libc::atexit(at_exit) };
}

extern "C" fn at_exit() {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    if PROCESS.load(Relaxed) != process::id() || BEGUN.swap(true, AcqRel) {
        return;
    }
    let builds = BUILDS.write().unwrap_or_else(PoisonError::into_inner);
    let devices: Vec<_> = discovery::discovery().devices.iter().filter_map(|found| found.opened.get()).collect();
    // All locks, so that nothing is submitted between the last finish and the end.
    let queues: Vec<_> = devices.iter().map(|device| device.finish_for_good()).collect();
    OVER.store(true, Release);
    drop((queues, builds));
}
