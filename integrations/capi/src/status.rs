//! The status that functions return, the last error of each thread, and the guard around every function.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use claystone::Error;

/// The outcome of a call.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneStatus {
    /// The call succeeded.
    Ok = 0,
    /// An argument is invalid: a shape, dtype, device, name, tag or null pointer.
    Invalid = 1,
    /// A dimension or an index is out of range.
    Index = 2,
    /// The device is out of memory, even after its cached memory was freed.
    OutOfMemory = 3,
    /// There is no such device.
    NoDevice = 4,
    /// A call of the OpenCL driver failed, or a kernel does not compile.
    Driver = 5,
    /// The device has faulted; nothing can run on it in this process any more.
    DeviceLost = 6,
    /// An in-place operation was only partly done: the contents of its destination are invalid and must be written again.
    Partial = 7,
    /// A gradient cannot be computed.
    Autograd = 8,
    /// claystone panicked, which is a bug. The destinations of the call may hold anything.
    Panic = 9,
    /// Any other failure.
    Failed = 10,
    /// A kernel of this or an earlier operation found an index out of range or a division by zero. Each such error is reported once.
    Kernel = 11,
}

/// The reason why a call failed.
pub(crate) enum Fault {
    /// C passed an invalid argument.
    Argument(String),
    /// An error of claystone.
    Claystone(Error),
    /// An error that a kernel reported, possibly a kernel of an earlier operation.
    Kernel(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault::Claystone(error)
    }
}

impl Fault {
    fn status(&self) -> ClaystoneStatus {
        let error = match self {
            Fault::Argument(_) => return ClaystoneStatus::Invalid,
            Fault::Kernel(_) => return ClaystoneStatus::Kernel,
            Fault::Claystone(error) => error,
        };
        match error {
            Error::ShapeMismatch { .. }
            | Error::DTypeMismatch { .. }
            | Error::UnsupportedDType { .. }
            | Error::DeviceMismatch { .. }
            | Error::DivisionByZero { .. }
            | Error::Invalid { .. } => ClaystoneStatus::Invalid,
            Error::DimOutOfRange { .. } | Error::IndexOutOfRange { .. } => ClaystoneStatus::Index,
            Error::OutOfMemory { .. } => ClaystoneStatus::OutOfMemory,
            Error::NoDevice { .. } => ClaystoneStatus::NoDevice,
            Error::OpenCl { .. } | Error::Build { .. } => ClaystoneStatus::Driver,
            Error::DeviceLost { .. } => ClaystoneStatus::DeviceLost,
            Error::Partial { .. } => ClaystoneStatus::Partial,
            Error::Autograd { .. } => ClaystoneStatus::Autograd,
            _ => ClaystoneStatus::Failed,
        }
    }
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Stores a message as this thread's last error. Does nothing while the thread's local storage is being destroyed.
fn set_last_error(sentence: String) {
    let text = CString::new(sentence.replace('\0', "\\0")).unwrap_or_default();
    _ = LAST_ERROR.try_with(|last| last.replace(text));
}

/// Returns the error message for a panic in the function `name`.
fn panic_message(name: &str, panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    format!("{name} panicked, which is a bug in claystone: {}", text.unwrap_or("no message"))
}

/// Runs the body of the function `name` and turns errors and panics into a status and the thread's last error.
pub(crate) fn guard(name: &str, body: impl FnOnce() -> Result<(), Fault>) -> ClaystoneStatus {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ClaystoneStatus::Ok,
        Ok(Err(fault)) => {
            let status = fault.status();
            set_last_error(match fault {
                Fault::Argument(reason) => format!("{name}: {reason}"),
                Fault::Claystone(error) | Fault::Kernel(error) => error.to_string(),
            });
            status
        }
        Err(panic) => {
            set_last_error(panic_message(name, &*panic));
            // Leak the panic's payload, because dropping it might panic again.
            std::mem::forget(panic);
            ClaystoneStatus::Panic
        }
    }
}

/// The message of this thread's latest failed call; empty if none failed. claystone owns the string, which stays valid until the next
/// failed call of the thread; do not free it. Successful calls do not change it.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
