//! The interface between Rust and the driver: macros that call its functions, and one owning type for each kind of handle.
//!
//! opencl3's wrappers request an event for every command, and panic if a release fails, which happens after a device fault
//! and while the process ends. The handles here release themselves and ignore the driver's answer.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use opencl_sys::{
    self as cl, CL_COMPLETE, cl_context, cl_device_id, cl_event, cl_kernel, cl_mem, cl_mem_flags, cl_program,
};

use super::errors::ClError;
use super::exit;
use super::functions::{self, Functions};
use crate::device::profiler;

/// Returns the loaded library; error -2000 if no library was loaded, and an error once the process ends.
pub(super) fn library() -> Result<&'static Functions, ClError> {
    exit::check()?;
    functions::load().as_ref().map_err(|_| ClError::new("dlopen", -2000))
}

/// Calls a function that returns its status: `call!(clFinish(queue))` gives `Result<(), ClError>`. Functions of extensions are in
/// their own tables: `call!(in table, clFinalizeCommandBufferKHR(buffer))`.
macro_rules! call {
    ($name:ident($($arg:expr),* $(,)?)) => {
        $crate::device::opencl::driver::library()
            .and_then(|library| $crate::device::opencl::driver::call!(@ library, $name($($arg),*)))
    };
    (in $table:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $crate::device::opencl::driver::library()
            .and_then(|_| $crate::device::opencl::driver::call!(@ $table, $name($($arg),*)))
    };
    (@ $table:expr, $name:ident($($arg:expr),*)) => {
        match $table.$name {
            // SAFETY: the handles are live, since the types that own them release them on drop; pointers refer to memory that
            // outlives the call, or the command if it goes on after the call.
            Some(function) => match unsafe { function($($arg),*) } {
                0 => Ok(()),
                code => Err($crate::device::opencl::errors::ClError::new(stringify!($name), code)),
            },
            None => Err($crate::device::opencl::errors::ClError::new(stringify!($name), -2001)),
        }
    };
}

/// Calls a function that returns a handle, and its status through the last pointer: `create!(clCreateKernel(p, name))`. Takes a
/// table like `call!`.
macro_rules! create {
    ($name:ident($($arg:expr),* $(,)?)) => {
        $crate::device::opencl::driver::library()
            .and_then(|library| $crate::device::opencl::driver::create!(@ library, $name($($arg),*)))
    };
    (in $table:expr, $name:ident($($arg:expr),* $(,)?)) => {
        $crate::device::opencl::driver::library()
            .and_then(|_| $crate::device::opencl::driver::create!(@ $table, $name($($arg),*)))
    };
    (@ $table:expr, $name:ident($($arg:expr),*)) => {
        match $table.$name {
            Some(function) => {
                let mut code = 0;
                // SAFETY: as in `call!`.
                let handle = unsafe { function($($arg,)* &mut code) };
                match code {
                    0 if !handle.is_null() => Ok(handle),
                    0 => Err($crate::device::opencl::errors::ClError::new(stringify!($name), -30)),
                    code => Err($crate::device::opencl::errors::ClError::new(stringify!($name), code)),
                }
            }
            None => Err($crate::device::opencl::errors::ClError::new(stringify!($name), -2001)),
        }
    };
}

/// Makes the driver call [`call!`] outside the queues' lock, counted by [`exit::call`].
macro_rules! call_unlocked {
    ($($call:tt)*) => { $crate::device::opencl::exit::call(|| $crate::device::opencl::driver::call!($($call)*)) };
}

/// Returns all bytes of a query's answer: `info!(clGetDeviceInfo(id, what))`.
macro_rules! info {
    ($name:ident($($arg:expr),*)) => {{
        let mut size = 0;
        $crate::device::opencl::driver::call!($name($($arg,)* 0, std::ptr::null_mut(), &mut size)).and_then(|()| {
            let mut bytes = vec![0u8; size];
            let to = bytes.as_mut_ptr().cast();
            $crate::device::opencl::driver::call!($name($($arg,)* size, to, std::ptr::null_mut())).map(|()| bytes)
        })
    }};
}

/// Returns a query's answer, a single value: `value!(clGetKernelInfo(kernel, what) as u32)`.
macro_rules! value {
    ($name:ident($($arg:expr),*) as $type:ty) => {{
        let mut value = <$type>::default();
        let (to, size) = (std::ptr::from_mut(&mut value).cast(), size_of::<$type>());
        $crate::device::opencl::driver::call!($name($($arg,)* size, to, std::ptr::null_mut())).map(|()| value)
    }};
}

/// Lets types with OpenCL handles be used by all threads.
macro_rules! send_and_sync {
    ($($type:ty),*) => { $(
        // SAFETY: OpenCL objects belong to the process, not to a thread, and OpenCL's functions are thread-safe, with the one
        // exception of clSetKernelArg on one kernel, which is called only under the queue lock of the kernel's device, or before
        // other threads have the kernel. Mapped addresses are used only by the owner, whose users synchronise their accesses.
        unsafe impl Send for $type {}
        // SAFETY: as above.
        unsafe impl Sync for $type {}
    )* };
}
pub(super) use {call, call_unlocked, create, info, send_and_sync, value};

/// A buffer in device memory. Released on drop; the driver frees the memory after the last command that uses it.
#[derive(Debug)]
pub(crate) struct ClBuffer {
    mem: cl_mem,
    bytes: usize,
}

/// A buffer and a byte offset.
pub(crate) type ClAt<'a> = (&'a ClBuffer, usize);

impl ClBuffer {
    pub(super) fn new(mem: cl_mem, bytes: usize) -> ClBuffer {
        ClBuffer { mem, bytes }
    }

    /// Creates a buffer in a context, without checks of the device.
    pub(super) fn create(context: cl_context, flags: cl_mem_flags, bytes: usize) -> Result<ClBuffer, ClError> {
        let mem = exit::call(|| create!(clCreateBuffer(context, flags, bytes, std::ptr::null_mut())))?;
        Ok(ClBuffer::new(mem, bytes))
    }

    /// Returns a second handle, which keeps the memory alive as well.
    pub(super) fn retain(&self) -> Result<ClBuffer, ClError> {
        call!(clRetainMemObject(self.mem)).map(|()| ClBuffer::new(self.mem, self.bytes))
    }

    /// Makes the buffer stand for simulated memory of any size.
    pub(super) fn into_dry(mut self) -> ClBuffer {
        self.bytes = usize::MAX;
        self
    }

    pub(super) fn is_dry(&self) -> bool {
        self.bytes == usize::MAX
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn mem(&self) -> cl_mem {
        self.mem
    }
}

impl Drop for ClBuffer {
    fn drop(&mut self) {
        let _recorded = profiler::segment_span("clReleaseMemObject", None, self.bytes);
        let _ = call_unlocked!(clReleaseMemObject(self.mem));
    }
}

/// An image of two dimensions. Released like a buffer.
#[derive(Debug)]
pub(crate) struct ClImage(pub(crate) ClBuffer);

impl ClImage {
    pub(crate) fn mem(&self) -> cl_mem {
        self.0.mem()
    }
}

/// A kernel object. Its arguments are set only under the queues' lock of its device, so threads can share it.
#[derive(Debug)]
pub(crate) struct ClKernel {
    pub(super) raw: cl_kernel,
    /// Dropped after the kernel has been released, because the kernel belongs to the program.
    pub(super) program: Arc<Program>,
    name: &'static str,
    /// For each argument, the bits of the number to which it was last set, else [`NOT_SET`]. Changed under the queues' lock.
    numbers: Box<[AtomicU64]>,
    max_work_group: usize,
    /// True if the kernel was compiled for one group size.
    pub(super) has_fixed_group: bool,
    /// A number that is the same in every process.
    pub(super) id: u64,
}

/// Marks an argument without a known number. A number with these bits is set at every launch.
const NOT_SET: u64 = u64::MAX;

fn unset(args: usize) -> Box<[AtomicU64]> {
    (0..args).map(|_| AtomicU64::new(NOT_SET)).collect()
}

impl ClKernel {
    /// Creates the kernel `entry` of a program, and queries its number of arguments and group sizes on the device.
    pub(super) fn create(
        device: cl_device_id,
        program: Arc<Program>,
        name: &'static str,
        entry: &str,
        id: u64,
    ) -> Result<ClKernel, ClError> {
        let entry = CString::new(entry).map_err(|_| ClError::new("clCreateKernel", -46))?;
        let raw = create!(clCreateKernel(program.0, entry.as_ptr()))?;
        // Owned from here on, so that the kernel is released if a query fails.
        let mut kernel =
            ClKernel { raw, program, name, numbers: Box::default(), max_work_group: 0, has_fixed_group: false, id };
        kernel.numbers = unset(value!(clGetKernelInfo(raw, cl::CL_KERNEL_NUM_ARGS) as u32)? as usize);
        let group = value!(clGetKernelWorkGroupInfo(raw, device, cl::CL_KERNEL_WORK_GROUP_SIZE) as usize)?;
        // A kernel compiled for one group size can run that size: NVIDIA's driver reports 256 for larger sizes too.
        let made_for =
            value!(clGetKernelWorkGroupInfo(raw, device, cl::CL_KERNEL_COMPILE_WORK_GROUP_SIZE) as [usize; 3])?;
        let made_for = made_for.iter().product();
        (kernel.max_work_group, kernel.has_fixed_group) = (group.max(made_for), made_for > 0);
        Ok(kernel)
    }

    /// Creates another kernel object of the same function, with its own arguments.
    pub(super) fn duplicate(&self) -> Result<ClKernel, ClError> {
        let name = info!(clGetKernelInfo(self.raw, cl::CL_KERNEL_FUNCTION_NAME))?;
        let entry = name.split(|&b| b == 0).next().and_then(|n| CString::new(n).ok()).unwrap_or_default();
        let raw = create!(clCreateKernel(self.program.0, entry.as_ptr()))?;
        Ok(ClKernel { raw, program: Arc::clone(&self.program), numbers: unset(self.numbers.len()), ..*self })
    }

    /// True if this argument was last set to a number with these bits.
    pub(super) fn has_number(&self, index: u32, bits: u64) -> bool {
        bits != NOT_SET && self.numbers.get(index as usize).is_some_and(|number| number.load(Relaxed) == bits)
    }

    /// Records that this argument was set to a number with these bits.
    pub(super) fn store_number(&self, index: u32, bits: u64) {
        if let Some(number) = self.numbers.get(index as usize) {
            number.store(bits, Relaxed);
        }
    }

    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn arg_count(&self) -> usize {
        self.numbers.len()
    }

    /// Returns the kernel's maximum work-group size on its device, in work-items.
    pub(crate) fn max_work_group(&self) -> usize {
        self.max_work_group
    }
}

impl Drop for ClKernel {
    fn drop(&mut self) {
        let _ = call_unlocked!(clReleaseKernel(self.raw));
    }
}

#[derive(Debug)]
pub(super) struct Program(pub cl_program);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = call_unlocked!(clReleaseProgram(self.0));
    }
}

/// The number of consecutive failures after which a command's status counts as unknown.
pub(super) const ATTEMPTS: u32 = 3;

/// Calls `f` until it succeeds, at most [`ATTEMPTS`] times, without pauses.
pub(super) fn retry_now<T>(f: impl Fn() -> Result<T, ClError>) -> Result<T, ClError> {
    (1..ATTEMPTS).fold(f(), |done, _| done.or_else(|_| f()))
}

/// The event of a command, to wait for.
#[derive(Debug)]
pub(crate) struct ClEvent(pub(super) cl_event);

impl ClEvent {
    /// Blocks until the command is over; the command must have been flushed. The error is the command's own failure, or
    /// [`unfinished`](ClError::unfinished) if the driver does not report the command's status.
    pub(super) fn wait(&self) -> Result<(), ClError> {
        let Err(failed) = call_unlocked!(clWaitForEvents(1, &self.0)) else { return Ok(()) };
        if failed.is_fatal() {
            return Err(ClError { unfinished: true, ..failed }); // the command may never end
        }
        // The wait failed, not the command: the command goes on, and may still use the host's memory.
        let mut refused = 0;
        while refused < ATTEMPTS {
            match self.status() {
                Ok(CL_COMPLETE) => return Ok(()),
                Ok(code @ ..0) => return Err(ClError::new(failed.call, code)),
                Ok(_) => refused = 0,
                Err(_) => refused += 1,
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Err(ClError { unfinished: true, ..failed })
    }

    /// Waits like [`wait`](Self::wait), then queries the command's outcome: NVIDIA's wait also succeeds for failed commands.
    pub(super) fn wait_for_success(&self) -> Result<(), ClError> {
        self.wait().and_then(|()| self.outcome())
    }

    /// Returns an error if the command failed, or an [`unfinished`](ClError::unfinished) error if the driver does not report the
    /// status. Call after a wait.
    pub(super) fn outcome(&self) -> Result<(), ClError> {
        let code = self.failure().map_err(|e| ClError { unfinished: true, ..e })?;
        code.map_or(Ok(()), |code| Err(ClError::new("clWaitForEvents", code)))
    }

    /// Returns the code of a failed command, `None` if the command has not failed.
    pub(super) fn failure(&self) -> Result<Option<i32>, ClError> {
        Ok(Some(retry_now(|| self.status())?).filter(|&status| status < 0))
    }

    /// True if the command is done; an error if it failed.
    pub(super) fn query(&self) -> Result<bool, ClError> {
        match self.status()? {
            code @ ..0 => Err(ClError::new("clGetEventInfo", code)),
            status => Ok(status == CL_COMPLETE),
        }
    }

    /// True if the command is over: done or failed. An error if the driver does not report the status.
    pub(crate) fn is_over(&self) -> Result<bool, ClError> {
        self.status().map(|status| status <= CL_COMPLETE)
    }

    /// Returns the command's status, or its error code if it failed.
    fn status(&self) -> Result<i32, ClError> {
        exit::call(|| value!(clGetEventInfo(self.0, cl::CL_EVENT_COMMAND_EXECUTION_STATUS) as i32))
    }
}

impl Drop for ClEvent {
    fn drop(&mut self) {
        let _ = call_unlocked!(clReleaseEvent(self.0));
    }
}

send_and_sync!(ClBuffer, ClKernel, Program, ClEvent);
