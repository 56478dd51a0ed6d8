//! The end of the process.
//!
//! A driver tears itself down when the process exits. A driver that compiles and runs kernels in threads of the process,
//! such as PoCL, crashes if that work is still in progress. So before the driver's teardown, this module waits for builds
//! and calls, finishes the queues, and stops all calls of the driver: later calls fail as on a lost device.
//!
//! Exit handlers run in reverse order of their registration, and so do the destructors of a library's static objects. A driver
//! registers such destructors when it is loaded and while it compiles: some of LLVM's are in functions that run with the first
//! kernel that needs them. If such a destructor runs before this module's handler, a working driver crashes. Therefore:
//!
//! * The main thread, whose end is that of the process, waits before any exit handler runs, in a destructor of the thread
//!   ([`main_thread_ends`]), until no work is in progress. Then it registers the handler again, after all others.
//! * Other threads may call `exit` as well. For them the handler is registered again whenever the driver may have registered
//!   destructors, and every 0.1 ms while the driver is loaded or compiles ([`keep_handler_last`]). If `exit` runs between two
//!   registrations, the driver continues with destroyed objects and may crash; the process then still ends with the status
//!   given to `exit` ([`glibc::end_if_the_driver_crashes`]).

use std::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use std::sync::{PoisonError, RwLock, mpsc};
use std::time::{Duration, Instant};
use std::{process, thread};

use super::discovery;
use super::errors::ClError;

/// True once the driver must not be called any more.
static DRIVER_CLOSED: AtomicBool = AtomicBool::new(false);
/// True once the main thread has ended. New work must then wait, because the driver's exit handlers would interrupt it.
static MAIN_THREAD_ENDED: AtomicBool = AtomicBool::new(false);
/// The number of driver calls in progress in [`call`].
static CALLS_IN_PROGRESS: AtomicU32 = AtomicU32::new(0);
/// Read-locked while a driver is loaded, a device opened, or a program built.
static WORK_IN_PROGRESS: RwLock<()> = RwLock::new(());
/// The number of threads that load a driver, open a device, or build a program.
static REGISTERING: AtomicU32 = AtomicU32::new(0);
/// True if a program was built since the last registration of the handler: the program's first launch may compile again.
static BUILT_SINCE_REGISTRATION: AtomicBool = AtomicBool::new(false);
/// The id of the process that registered the handler, or 0. A forked child must not call the driver, because it lacks the
/// driver's threads.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// The interval of registrations while the driver is loaded or compiles. Each registration leaks a few bytes, so the interval
/// grows with every [`REGISTRATIONS_PER_SLOWDOWN`] registrations.
const INTERVAL: Duration = Duration::from_micros(100);
/// The number of registrations after which the interval has doubled.
const REGISTRATIONS_PER_SLOWDOWN: u32 = 2000;
/// The maximum wait for the start of the thread that registers the handler.
const START_TIMEOUT: Duration = Duration::from_millis(100);
/// The time without new work after the main thread has ended. By then the process has ended, unless it runs on without a main thread.
const STANDSTILL: Duration = Duration::from_secs(2);
/// The maximum wait for driver calls at the end of the process. Calls are short, unless the device never answers.
const LAST_CALLS_TIMEOUT: Duration = Duration::from_secs(1);

/// Returns an error once the driver must not be called any more.
pub(super) fn check() -> Result<(), ClError> {
    if DRIVER_CLOSED.load(SeqCst) { Err(ClError { lost: true, ..ClError::new("exit", -36) }) } else { Ok(()) }
}

/// Calls the driver outside the queues' lock. The exit handler takes the lock to wait for other calls, and counts these separately.
pub(super) fn call<T>(f: impl FnOnce() -> Result<T, ClError>) -> Result<T, ClError> {
    struct UnderWay;
    impl Drop for UnderWay {
        fn drop(&mut self) {
            CALLS_IN_PROGRESS.fetch_sub(1, SeqCst);
        }
    }
    CALLS_IN_PROGRESS.fetch_add(1, SeqCst);
    let _under_way = UnderWay;
    f() // checks whether the process has ended, so it must run after the count
}

/// Delays the end of the process until the result is dropped. A thread must not hold two results.
pub(super) fn delay_exit() -> impl Sized {
    loop {
        let guard = WORK_IN_PROGRESS.read().unwrap_or_else(PoisonError::into_inner);
        if !MAIN_THREAD_ENDED.load(Acquire) {
            return guard;
        }
        drop(guard);
        thread::sleep(STANDSTILL);
        MAIN_THREAD_ENDED.store(false, Release);
    }
}

/// Registers the handler repeatedly while the result lives, and after a build until a launch has been waited for.
pub(super) fn keep_handler_last() -> impl Sized {
    struct Registering;
    impl Drop for Registering {
        fn drop(&mut self) {
            register();
            REGISTERING.fetch_sub(1, SeqCst);
        }
    }
    REGISTERING.fetch_add(1, SeqCst);
    register();
    keep_registering();
    Registering
}

/// Starts the thread that registers the handler repeatedly, unless it runs, and waits until the thread works: a starting thread
/// needs the dynamic linker's lock, which is held while a driver is loaded. Without the thread, exits almost always succeed too.
fn keep_registering() {
    static RUNNING: AtomicBool = AtomicBool::new(false);
    static TIMES: AtomicU32 = AtomicU32::new(0);
    let needed = || !DRIVER_CLOSED.load(Relaxed) && driver_may_register();
    let (begun, begins) = mpsc::channel();
    let run = move || {
        _ = begun.send(());
        while needed() && !RUNNING.swap(true, SeqCst) {
            while needed() {
                register();
                thread::sleep(INTERVAL * (1 + TIMES.fetch_add(1, Relaxed) / REGISTRATIONS_PER_SLOWDOWN));
            }
            RUNNING.store(false, SeqCst);
        }
    };
    if !RUNNING.load(SeqCst) {
        let _ = thread::Builder::new().name("claystone exit".into()).spawn(run);
        // The wait is bounded, for callers that hold the dynamic linker's lock while opening a device.
        _ = begins.recv_timeout(START_TIMEOUT);
    }
}

pub(super) fn note_build() {
    register();
    BUILT_SINCE_REGISTRATION.store(true, SeqCst);
}

pub(super) fn note_wait() {
    if BUILT_SINCE_REGISTRATION.load(Relaxed) && BUILT_SINCE_REGISTRATION.swap(false, SeqCst) {
        register();
    }
}

/// Registers [`at_exit`] to run before all handlers registered so far.
fn register() {
    PROCESS.store(process::id(), Relaxed);
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    glibc::register();
    #[cfg(not(all(target_os = "linux", target_env = "gnu", not(miri))))]
    // SAFETY: the handler has the type that `atexit` expects, and does not unwind. The only failure is lack of memory; then the
    // process ends without the handler.
    unsafe {
        libc::atexit(at_exit)
    };
}

/// True while the driver may register exit handlers after this module's.
fn driver_may_register() -> bool {
    REGISTERING.load(SeqCst) > 0 || BUILT_SINCE_REGISTRATION.load(SeqCst)
}

/// The exit handler: waits for builds and calls, finishes all queues, and makes later driver calls fail.
extern "C" fn at_exit() {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    if PROCESS.load(Relaxed) != process::id() || BEGUN.swap(true, AcqRel) {
        return;
    }
    let under_way = WORK_IN_PROGRESS.write().unwrap_or_else(PoisonError::into_inner);
    let devices: Vec<_> = discovery::known_entries().filter_map(|entry| entry.opened.get()).collect();
    // Holds all locks, so that nothing is submitted between the last finish and the end.
    let queues: Vec<_> = devices.iter().map(|device| device.close()).collect();
    DRIVER_CLOSED.store(true, SeqCst);
    drop((queues, under_way));
    let begun = Instant::now();
    while CALLS_IN_PROGRESS.load(SeqCst) > 0 && begun.elapsed() < LAST_CALLS_TIMEOUT {
        thread::sleep(INTERVAL);
    }
}

/// Runs when the main thread ends, before the process's exit handlers.
#[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
fn main_thread_ends() {
    if ![0, process::id()].contains(&PROCESS.load(Relaxed)) {
        return;
    }
    let under_way = WORK_IN_PROGRESS.write().unwrap_or_else(PoisonError::into_inner);
    MAIN_THREAD_ENDED.store(true, Release);
    drop(under_way);
    if BUILT_SINCE_REGISTRATION.load(Relaxed) {
        // First launches compile. Failures are reported to the threads that wait for the results.
        discovery::known_entries().filter_map(|entry| entry.opened.get()).for_each(|device| _ = device.drain());
    }
    register();
}

/// The parts that need glibc: other C libraries get only the exit handler.
#[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
mod glibc {
    use std::ffi::{c_int, c_void};
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
    use std::{process, ptr, thread};

    unsafe extern "C" {
        /// Registers a destructor of the calling thread, as C++ compilers do for thread-local objects.
        fn __cxa_thread_atexit_impl(
            destructor: extern "C" fn(*mut c_void),
            object: *mut c_void,
            library: *const c_void,
        ) -> c_int;
        /// Identifies the executable or library that contains this code, which stays loaded.
        static __dso_handle: u8;
        /// Registers an exit handler like `atexit`, called with the exit status and an argument.
        fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
        /// Registers functions called before a fork, and after the fork in the parent and in the child.
        fn pthread_atfork(prepare: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn()) -> c_int;
    }

    /// Runs when this code is loaded: in the main thread before `main`, or in the thread that loads the library.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static LOADED: extern "C" fn() = loaded;

    /// Registers the destructor of the main thread.
    extern "C" fn loaded() {
        // SAFETY: both functions only return a number.
        let is_main = unsafe { libc::getpid() == libc::gettid() };
        if is_main {
            // Destructors of the thread that calls `exit` run before exit handlers.
            // SAFETY: the destructor has the type that C expects, does not unwind, and ignores the object; only the handle's address
            // is taken.
            unsafe { __cxa_thread_atexit_impl(ends, ptr::null_mut(), (&raw const __dso_handle).cast()) };
        }
    }

    extern "C" fn ends(_: *mut c_void) {
        super::main_thread_ends();
    }

    /// A spin lock, taken to register the handler and to fork. `on_exit` takes the C library's lock of exit handlers. A child forked
    /// meanwhile would inherit the lock without its owner, and deadlock when it registers a handler, as C++ does for static objects.
    static REGISTRATION_LOCK: AtomicBool = AtomicBool::new(false);

    extern "C" fn lock_registration() {
        while REGISTRATION_LOCK.swap(true, SeqCst) {
            thread::yield_now();
        }
    }

    extern "C" fn unlock_registration() {
        REGISTRATION_LOCK.store(false, SeqCst);
    }

    /// Registers the exit handler with the C library; waits for forks in progress.
    pub(super) fn register() {
        static FORKS: Once = Once::new();
        // SAFETY: the handlers have the type that C expects, and do not unwind. The only failure is lack of memory; then a fork
        // does not wait.
        FORKS.call_once(|| _ = unsafe { pthread_atfork(lock_registration, unlock_registration, unlock_registration) });
        lock_registration();
        // SAFETY: the handler has the type that C expects, does not unwind, and ignores its argument. The only failure is lack of
        // memory; then the process ends without the handler.
        unsafe { on_exit(at_exit, ptr::null_mut()) };
        unlock_registration();
    }

    /// The exit handler: guards against a crash of the driver, then closes the driver.
    extern "C" fn at_exit(status: c_int, _: *mut c_void) {
        if super::driver_may_register() && super::PROCESS.load(SeqCst) == process::id() {
            end_if_the_driver_crashes(status);
        }
        super::at_exit();
    }

    static STATUS: AtomicI32 = AtomicI32::new(0);

    /// Makes crash signals end the process at once, with the status given to `exit`. Exit handlers registered before the driver was
    /// loaded then do not run; a crash would skip them as well.
    fn end_if_the_driver_crashes(status: c_int) {
        STATUS.store(status, SeqCst);
        for signal in [libc::SIGABRT, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGSEGV] {
            // SAFETY: the handler has the type that C expects, and calls only functions that are safe in signal handlers.
            unsafe { libc::signal(signal, crashed as extern "C" fn(c_int) as libc::sighandler_t) };
        }
    }

    extern "C" fn crashed(_: c_int) {
        // SAFETY: `_exit` is safe in a signal handler, and does not return.
        unsafe { libc::_exit(STATUS.load(SeqCst)) };
    }
}
