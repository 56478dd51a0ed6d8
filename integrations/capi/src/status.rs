//! What functions return, the last error of each thread, and the guard around every function.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use claystone::Error;

/// How a call ended.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneStatus {
    /// As it should.
    Ok = 0,
    /// An argument makes no sense: shapes, dtypes, devices, names, tags, null.
    Invalid = 1,
    /// A dimension or an index is out of range.
    Index = 2,
    /// The device, after giving back everything cached, has no room.
    OutOfMemory = 3,
    /// The device is not there.
    NoDevice = 4,
    /// A call of the OpenCL driver failed, or a kernel does not compile.
    Driver = 5,
    /// The device has faulted; nothing can run on it in this process any more.
    DeviceLost = 6,
    /// An operation in place was done in part: what it writes to has to be set anew.
    Partial = 7,
    /// A gradient cannot be computed.
    Autograd = 8,
    /// claystone panicked: a bug. What the call was to write to may hold anything.
    Panic = 9,
    /// Something else.
    Failed = 10,
    /// An index out of range or a division by zero that a kernel found, of this operation or of an earlier one. It is told this once.
    Kernel = 11,
}

/// Why a call failed.
pub(crate) enum Fault {
    /// What C handed over is no argument.
    Argument(String),
    /// claystone's error.
    Claystone(Error),
    /// What a kernel found wrong, maybe one of an earlier operation.
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
    static LAST: RefCell<CString> = RefCell::default();
}

/// Keeps a sentence as this thread's last error. A thread that is ending keeps none.
fn remember(sentence: String) {
    let text = CString::new(sentence.replace('\0', "\\0")).unwrap_or_default();
    _ = LAST.try_with(|last| last.replace(text));
}

/// What a panic was about.
fn sentence(name: &str, panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    format!("{name} panicked, which is a bug in claystone: {}", text.unwrap_or("no message"))
}

/// Runs the body of the function `name`. Neither errors nor panics leave it, but as a status and the thread's last error.
pub(crate) fn guard(name: &str, body: impl FnOnce() -> Result<(), Fault>) -> ClaystoneStatus {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ClaystoneStatus::Ok,
        Ok(Err(fault)) => {
            let status = fault.status();
            remember(match fault {
                Fault::Argument(reason) => format!("{name}: {reason}"),
                Fault::Claystone(error) | Fault::Kernel(error) => error.to_string(),
            });
            status
        }
        Err(panic) => {
            remember(sentence(name, &*panic));
            // Dropping what was thrown might panic again.
            std::mem::forget(panic);
            ClaystoneStatus::Panic
        }
    }
}

/// The sentence of the latest call of this thread that failed; empty where none did. It is claystone's: valid until the next
/// failing call of the thread, and nobody's to free. Successful calls leave it as it is.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}
