//! The end of the process.
//!
//! A driver that compiles and runs kernels in threads of the process, such as PoCL, crashes if its teardown interrupts these
//! threads. So an exit handler waits for builds and calls, finishes the queues, and stops all calls of the driver: later calls fail
//! as on a lost device. Handlers run in reverse order of their registration, and a driver registers its own handler when it is
//! loaded and when it compiles, in a build or a launch. So this handler is registered again after each load, build and first
//! launch, and when a thread meanwhile ends or calls `exit`: destructors of the thread run before the handlers. PoCL may still
//! crash if a thread that has used no device calls `exit`, or is the main thread and ends, while PoCL is loaded or compiles its
//! first kernels.

use std::any::Any;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Mutex, RwLock};
use std::time::{Duration, Instant};
use std::{process, thread};

use super::errors::ClError;
use crate::sync::{OnDrop, lock, read, write};

/// Waits for all commands of a device. No thread can submit commands until the result is dropped.
type CloseDevice = dyn Fn() -> Box<dyn Any> + Send;

struct State {
    /// True once the driver must not be called any more.
    is_closed: AtomicBool,
    /// The number of driver calls in progress in [`call`].
    calls: AtomicU32,
    /// Read-locked while a driver is loaded, a device opened, or a program built.
    work: RwLock<()>,
    /// True if a program was built since the last wait for a launch, which may compile the program again.
    may_compile: AtomicBool,
    /// The process that registered the handler. A forked child must not call the driver, because it lacks the driver's threads.
    process: AtomicU32,
    devices: Mutex<Vec<Box<CloseDevice>>>,
}

static STATE: State = State {
    is_closed: AtomicBool::new(false),
    calls: AtomicU32::new(0),
    work: RwLock::new(()),
    may_compile: AtomicBool::new(false),
    process: AtomicU32::new(0),
    devices: Mutex::new(Vec::new()),
};

/// Registers the handler again if this thread ends or calls `exit` while a driver may compile, so that this handler runs first.
pub(super) fn watch_thread() {
    struct ThreadEnd;
    impl Drop for ThreadEnd {
        fn drop(&mut self) {
            if STATE.may_compile.load(SeqCst) || STATE.work.try_write().is_err() {
                register();
            }
        }
    }
    thread_local!(static THREAD_END: ThreadEnd = const { ThreadEnd });
    _ = THREAD_END.try_with(|_| ());
}

/// Returns an error once the driver must not be called any more.
pub(super) fn check() -> Result<(), ClError> {
    if STATE.is_closed.load(SeqCst) { Err(ClError { lost: true, ..ClError::new("exit", -36) }) } else { Ok(()) }
}

/// Calls the driver outside the queues' lock. The exit handler waits for the lock, and until no such call is in progress.
pub(super) fn call<T>(f: impl FnOnce() -> Result<T, ClError>) -> Result<T, ClError> {
    STATE.calls.fetch_add(1, SeqCst);
    let _done = OnDrop(|| _ = STATE.calls.fetch_sub(1, SeqCst));
    f() // checks whether the process has ended, so it must run after the count
}

/// Delays the end of the process while `f` loads a driver, opens a device, or builds a program.
pub(super) fn delay_exit<T>(f: impl FnOnce() -> T) -> T {
    let _work = read(&STATE.work);
    register();
    let result = f();
    register();
    STATE.may_compile.store(true, SeqCst);
    result
}

/// Registers the handler again after the first wait for launches that follows a build.
pub(super) fn note_wait() {
    if STATE.may_compile.load(Relaxed) && STATE.may_compile.swap(false, SeqCst) {
        register();
    }
}

/// Calls `close` when the process ends.
pub(super) fn close_at_exit(close: Box<CloseDevice>) {
    lock(&STATE.devices).push(close);
}

/// Registers [`at_exit`] to run before all handlers registered so far.
fn register() {
    STATE.process.store(process::id(), SeqCst);
    // SAFETY: the handler has the type that `atexit` expects, and does not unwind. Without memory the process ends without it.
    unsafe { libc::atexit(at_exit) };
}

/// Runs when the process exits: waits for the devices and closes the driver.
extern "C" fn at_exit() {
    if STATE.process.load(SeqCst) != process::id() || STATE.is_closed.load(SeqCst) {
        return;
    }
    let work = write(&STATE.work);
    let devices: Vec<_> = lock(&STATE.devices).iter().map(|close| close()).collect();
    STATE.is_closed.store(true, SeqCst);
    drop((devices, work));
    let begun = Instant::now();
    // Calls are short, unless the device never answers.
    while STATE.calls.load(SeqCst) > 0 && begun.elapsed() < Duration::from_secs(1) {
        thread::sleep(Duration::from_micros(100));
    }
}
