//! The end of the process.
//!
//! A driver tears itself down when the process exits. One that compiles and runs kernels in threads of the process, as
//! PoCL does, crashes where any of that is still under way. So before it gets there, builds and calls are waited for, queues
//! finished, and the driver called no more: what other threads still ask of it fails as on a lost device.
//!
//! Exit handlers run in the reverse of the order in which they were registered, and destructors of a library's static
//! objects are among them. A driver registers those as it is loaded and while it compiles: LLVM has some in functions that
//! are reached by the first kernel that needs them. If one of them runs before ours, the driver crashes as it goes on. So
//!
//! * the main thread, whose end is that of the process, waits before any exit handler runs, in a destructor of the thread
//!   ([`main_thread_ends`]), until nothing is under way, and registers ours behind all others;
//! * for the sake of other threads, which may call `exit` as well, ours is registered again whenever the driver may have
//!   registered more, and every tenth of a millisecond while it is loaded or compiles ([`registering`]). If `exit` comes in
//!   between, the driver goes on with objects that are destroyed. Should it crash by that, the process ends with the status
//!   that `exit` was given ([`glibc::end_if_the_driver_crashes`]).

use std::sync::atomic::{
    AtomicBool, AtomicU32, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use std::sync::{PoisonError, RwLock, mpsc};
use std::time::{Duration, Instant};
use std::{process, thread};

use super::discovery;
use super::errors::ClError;

/// The driver may not be called any more.
static OVER: AtomicBool = AtomicBool::new(false);
/// The main thread has ended: nothing is to be begun that the driver's exit handlers could meet.
static ENDING: AtomicBool = AtomicBool::new(false);
/// Calls of the driver under way in [`call`].
static CALLS: AtomicU32 = AtomicU32::new(0);
/// Held for reading while a driver is loaded, a device opened, or a program built.
static UNDER_WAY: RwLock<()> = RwLock::new(());
/// While the driver is loaded, a device opened, or a program built.
static REGISTERING: AtomicU32 = AtomicU32::new(0);
/// A program was built since the handler was last registered: its first launch may compile once more.
static BUILT: AtomicBool = AtomicBool::new(false);
/// The process that registered the handler, 0 before. A forked child has to leave the driver alone, as the driver's threads
/// do not exist there.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// How often the handler is registered while the driver is loaded or compiles. Each registration takes a few bytes for
/// good: after [`OFTEN`] of them it is done less often.
const INTERVAL: Duration = Duration::from_micros(100);
const OFTEN: u32 = 2000;
/// How long a thread that begins to register is waited for.
const START: Duration = Duration::from_millis(100);
/// For how long nothing begins once the main thread has ended. The process is gone by then, unless it lives on without
/// its main thread.
const STANDSTILL: Duration = Duration::from_secs(2);
/// How long the end of the process waits for calls: they are short, or of a device that never answers.
const LAST_CALLS: Duration = Duration::from_secs(1);

/// An error once the driver may not be called any more.
pub(super) fn check() -> Result<(), ClError> {
    if OVER.load(SeqCst) { Err(ClError { lost: true, ..ClError::new("exit", -36) }) } else { Ok(()) }
}

/// Calls the driver outside the queues' lock, which the end of the process takes: it waits for this.
pub(super) fn call<T>(f: impl FnOnce() -> Result<T, ClError>) -> Result<T, ClError> {
    struct UnderWay;
    impl Drop for UnderWay {
        fn drop(&mut self) {
            CALLS.fetch_sub(1, SeqCst);
        }
    }
    CALLS.fetch_add(1, SeqCst);
    let _under_way = UnderWay;
    f() // which looks whether it is over: after it was counted
}

/// Delays the end of the process until what it returns is dropped. A thread that has it must not ask for another.
pub(super) fn under_way() -> impl Sized {
    loop {
        let guard = UNDER_WAY.read().unwrap_or_else(PoisonError::into_inner);
        if !ENDING.load(Acquire) {
            return guard;
        }
        drop(guard);
        thread::sleep(STANDSTILL);
        ENDING.store(false, Release);
    }
}

/// Has the handler registered again and again as long as this lives, and after a build until a launch is waited for.
pub(super) fn registering() -> impl Sized {
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

/// Starts the thread that registers the handler again and again, unless it runs, and waits until it is at work: a thread
/// that begins needs the dynamic linker's lock, which is held while a driver is loaded. Without it the process ends well
/// almost always.
fn keep_registering() {
    static RUNNING: AtomicBool = AtomicBool::new(false);
    static TIMES: AtomicU32 = AtomicU32::new(0);
    let needed = || !OVER.load(Relaxed) && may_register();
    let (begun, begins) = mpsc::channel();
    let run = move || {
        _ = begun.send(());
        while needed() && !RUNNING.swap(true, SeqCst) {
            while needed() {
                register();
                thread::sleep(INTERVAL * (1 + TIMES.fetch_add(1, Relaxed) / OFTEN));
            }
            RUNNING.store(false, SeqCst);
        }
    };
    if !RUNNING.load(SeqCst) {
        let _ = thread::Builder::new().name("claystone exit".into()).spawn(run);
        // No longer than this, for whoever opens a device while it has the dynamic linker's lock itself.
        _ = begins.recv_timeout(START);
    }
}

/// A program was built.
pub(super) fn built() {
    register();
    BUILT.store(true, SeqCst);
}

/// Something that was submitted is done.
pub(super) fn waited() {
    if BUILT.load(Relaxed) && BUILT.swap(false, SeqCst) {
        register();
    }
}

/// Has [`at_exit`] called before what was registered so far.
fn register() {
    PROCESS.store(process::id(), Relaxed);
    #[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
    glibc::register();
    #[cfg(not(all(target_os = "linux", target_env = "gnu", not(miri))))]
    // SAFETY: the handler is a function of the type that C wants, and does not unwind. Without memory for it, which is
    // all that can fail, the process ends as it would have.
    unsafe {
        libc::atexit(at_exit)
    };
}

/// The driver is at something that may register exit handlers, after ours.
fn may_register() -> bool {
    REGISTERING.load(SeqCst) > 0 || BUILT.load(SeqCst)
}

extern "C" fn at_exit() {
    static BEGUN: AtomicBool = AtomicBool::new(false);
    if PROCESS.load(Relaxed) != process::id() || BEGUN.swap(true, AcqRel) {
        return;
    }
    let under_way = UNDER_WAY.write().unwrap_or_else(PoisonError::into_inner);
    let devices: Vec<_> = discovery::known().filter_map(|entry| entry.opened.get()).collect();
    // All locks, so that nothing is submitted between the last finish and the end.
    let queues: Vec<_> = devices.iter().map(|device| device.finish_for_good()).collect();
    OVER.store(true, SeqCst);
    drop((queues, under_way));
    let begun = Instant::now();
    while CALLS.load(SeqCst) > 0 && begun.elapsed() < LAST_CALLS {
        thread::sleep(INTERVAL);
    }
}

/// Called as the main thread ends, before the process's exit handlers.
#[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
fn main_thread_ends() {
    if ![0, process::id()].contains(&PROCESS.load(Relaxed)) {
        return;
    }
    let under_way = UNDER_WAY.write().unwrap_or_else(PoisonError::into_inner);
    ENDING.store(true, Release);
    drop(under_way);
    if BUILT.load(Relaxed) {
        // Their launches compile; a failure is told to whoever asks for the results.
        discovery::known().filter_map(|entry| entry.opened.get()).for_each(|device| _ = device.drain());
    }
    register();
}

/// What other C libraries do not have: there are the handlers alone.
#[cfg(all(target_os = "linux", target_env = "gnu", not(miri)))]
mod glibc {
    use std::ffi::{c_int, c_void};
    use std::sync::Once;
    use std::sync::atomic::{AtomicBool, AtomicI32, Ordering::SeqCst};
    use std::{process, ptr, thread};

    unsafe extern "C" {
        /// Registers a destructor of the calling thread, which C++ compilers do for objects of threads.
        fn __cxa_thread_atexit_impl(
            destructor: extern "C" fn(*mut c_void),
            object: *mut c_void,
            library: *const c_void,
        ) -> c_int;
        /// Stands for the executable or the library that this is linked into, which stays loaded.
        static __dso_handle: u8;
        /// `atexit` for functions that are told the status, with an argument of their own.
        fn on_exit(handler: extern "C" fn(c_int, *mut c_void), argument: *mut c_void) -> c_int;
        /// Has functions called before a fork, and after it in the parent and in the child.
        fn pthread_atfork(prepare: extern "C" fn(), parent: extern "C" fn(), child: extern "C" fn()) -> c_int;
    }

    /// Called when this is loaded: by the main thread before `main`, or by whichever loads the library.
    #[used]
    #[unsafe(link_section = ".init_array")]
    static LOADED: extern "C" fn() = loaded;

    extern "C" fn loaded() {
        // SAFETY: both only return a number.
        let is_main = unsafe { libc::getpid() == libc::gettid() };
        if is_main {
            // Destructors of the thread that calls `exit` come before exit handlers.
            // SAFETY: the destructor is a function of the type that C wants, does not unwind, and ignores the object; the
            // handle is only named.
            unsafe { __cxa_thread_atexit_impl(ends, ptr::null_mut(), (&raw const __dso_handle).cast()) };
        }
    }

    extern "C" fn ends(_: *mut c_void) {
        super::main_thread_ends();
    }

    /// Held while the handler is registered, and while a process is forked. `on_exit` takes the C library's lock of exit
    /// handlers: a child that was forked meanwhile would have it held by a thread that it does not have, and wait for it as
    /// soon as it registers a handler itself, as C++ does for static objects.
    static REGISTERS: AtomicBool = AtomicBool::new(false);

    extern "C" fn hold() {
        while REGISTERS.swap(true, SeqCst) {
            thread::yield_now();
        }
    }

    extern "C" fn let_go() {
        REGISTERS.store(false, SeqCst);
    }

    pub(super) fn register() {
        static FORKS: Once = Once::new();
        // SAFETY: the handlers are functions of the type that C wants, and do not unwind. Without memory for them, which is
        // all that can fail, a fork does not wait.
        FORKS.call_once(|| _ = unsafe { pthread_atfork(hold, let_go, let_go) });
        hold();
        // SAFETY: the handler is a function of the type that C wants, does not unwind, and ignores its argument. Without
        // memory for it, which is all that can fail, the process ends as it would have.
        unsafe { on_exit(at_exit, ptr::null_mut()) };
        let_go();
    }

    extern "C" fn at_exit(status: c_int, _: *mut c_void) {
        if super::may_register() && super::PROCESS.load(SeqCst) == process::id() {
            end_if_the_driver_crashes(status);
        }
        super::at_exit();
    }

    /// The status that `exit` was given.
    static STATUS: AtomicI32 = AtomicI32::new(0);

    /// From now on the signals of a crash end the process at once, as `exit` was told to. What is lost are exit handlers
    /// that were registered before the driver was loaded, which a crash would keep from being called as well.
    fn end_if_the_driver_crashes(status: c_int) {
        STATUS.store(status, SeqCst);
        for signal in [libc::SIGABRT, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGSEGV] {
            // SAFETY: the handler is a function of the type that C wants, and calls nothing that signals may interrupt.
            unsafe { libc::signal(signal, crashed as extern "C" fn(c_int) as libc::sighandler_t) };
        }
    }

    extern "C" fn crashed(_: c_int) {
        // SAFETY: it does not return.
        unsafe { libc::_exit(STATUS.load(SeqCst)) };
    }
}
