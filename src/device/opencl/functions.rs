//! The functions of libOpenCL.
//!
//! The crate cl3 has such a table as well, but with the type `fn` instead of `unsafe extern "C" fn`. A call through the wrong
//! function type is undefined behaviour. This table has the types of OpenCL's headers.

use std::ffi::{CStr, c_void};
use std::sync::OnceLock;
use std::{env, mem, ptr};

use dlopen2::raw::Library;
use opencl_sys::cl_function_types::*;
use opencl_sys::cl_platform_id;

use super::driver::library;
use super::errors::ClError;
use crate::device::system::{OS, opencl_libraries};

macro_rules! functions {
    ($($name:ident: $of:ident,)*) => {
        /// The functions that this crate calls. Libraries of earlier versions of OpenCL lack some of them.
        #[allow(non_snake_case, reason = "OpenCL's names")]
        pub(super) struct Functions {
            $(pub(super) $name: $of,)*
            /// The library, which must stay loaded while its functions are called.
            library: Library,
        }

        impl Functions {
            fn load(path: &str) -> Result<Functions, dlopen2::Error> {
                let library = Library::open(path)?;
                // SAFETY: an OpenCL library exports functions of these types under these names.
                Ok(Functions { $($name: unsafe { library.symbol(stringify!($name)) }.ok(),)* library })
            }
        }
    };
}

functions! {
    clBuildProgram: clBuildProgram_t,
    clCreateBuffer: clCreateBuffer_t,
    clCreateBufferWithProperties: clCreateBufferWithProperties_t,
    clCreateCommandQueue: clCreateCommandQueue_t,
    clCreateCommandQueueWithProperties: clCreateCommandQueueWithProperties_t,
    clCreateContext: clCreateContext_t,
    clCreateImage: clCreateImage_t,
    clCreateKernel: clCreateKernel_t,
    clCreateProgramWithBinary: clCreateProgramWithBinary_t,
    clCreateProgramWithSource: clCreateProgramWithSource_t,
    clEnqueueBarrierWithWaitList: clEnqueueBarrierWithWaitList_t,
    clEnqueueCopyBuffer: clEnqueueCopyBuffer_t,
    clEnqueueFillBuffer: clEnqueueFillBuffer_t,
    clEnqueueMapBuffer: clEnqueueMapBuffer_t,
    clEnqueueMarker: clEnqueueMarker_t,
    clEnqueueMarkerWithWaitList: clEnqueueMarkerWithWaitList_t,
    clEnqueueMigrateMemObjects: clEnqueueMigrateMemObjects_t,
    clEnqueueNDRangeKernel: clEnqueueNDRangeKernel_t,
    clEnqueueReadBuffer: clEnqueueReadBuffer_t,
    clEnqueueUnmapMemObject: clEnqueueUnmapMemObject_t,
    clEnqueueWaitForEvents: clEnqueueWaitForEvents_t,
    clEnqueueWriteBuffer: clEnqueueWriteBuffer_t,
    clFinish: clFinish_t,
    clFlush: clFlush_t,
    clGetCommandQueueInfo: clGetCommandQueueInfo_t,
    clGetContextInfo: clGetContextInfo_t,
    clGetDeviceIDs: clGetDeviceIDs_t,
    clGetDeviceInfo: clGetDeviceInfo_t,
    clGetEventInfo: clGetEventInfo_t,
    clGetEventProfilingInfo: clGetEventProfilingInfo_t,
    clGetExtensionFunctionAddressForPlatform: clGetExtensionFunctionAddressForPlatform_t,
    clGetKernelArgInfo: clGetKernelArgInfo_t,
    clGetKernelInfo: clGetKernelInfo_t,
    clGetKernelWorkGroupInfo: clGetKernelWorkGroupInfo_t,
    clGetMemObjectInfo: clGetMemObjectInfo_t,
    clGetPlatformIDs: clGetPlatformIDs_t,
    clGetPlatformInfo: clGetPlatformInfo_t,
    clGetProgramBuildInfo: clGetProgramBuildInfo_t,
    clGetProgramInfo: clGetProgramInfo_t,
    clReleaseCommandQueue: clReleaseCommandQueue_t,
    clReleaseContext: clReleaseContext_t,
    clReleaseEvent: clReleaseEvent_t,
    clReleaseKernel: clReleaseKernel_t,
    clReleaseMemObject: clReleaseMemObject_t,
    clReleaseProgram: clReleaseProgram_t,
    clRetainCommandQueue: clRetainCommandQueue_t,
    clRetainContext: clRetainContext_t,
    clRetainEvent: clRetainEvent_t,
    clRetainMemObject: clRetainMemObject_t,
    clSetKernelArg: clSetKernelArg_t,
    clWaitForEvents: clWaitForEvents_t,
}

/// Loads the library at the first call: the first path in `OPENCL_DYLIB_PATH` (separated by semicolons) that loads, else the first of
/// the [system's libraries](opencl_libraries). Returns the error of the system's first library.
pub(super) fn load() -> &'static Result<Functions, dlopen2::Error> {
    static LOADED: OnceLock<Result<Functions, dlopen2::Error>> = OnceLock::new();
    LOADED.get_or_init(|| {
        let paths = env::var("OPENCL_DYLIB_PATH").unwrap_or_default();
        let mut chosen = paths.split(';').filter(|path| !path.is_empty());
        let [first, others @ ..] = opencl_libraries(OS) else { unreachable!("every system has a name for it") };
        // On some devices Mali's OpenGL library exports OpenCL's functions.
        let has_opencl = |path| Functions::load(path).ok().filter(|functions| functions.clGetPlatformIDs.is_some());
        chosen
            .find_map(has_opencl)
            .map_or_else(|| Functions::load(first), Ok)
            .or_else(|error| others.iter().copied().find_map(has_opencl).ok_or(error))
    })
}

/// Returns an extension's function from the platform, or else from the library's exports; `None` if both lack the function.
///
/// # Safety
/// `T` is an `Option` of a function, and the function of this name has this type.
pub(super) unsafe fn extension_function<T: Copy>(platform: cl_platform_id, name: &CStr) -> Result<T, ClError> {
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    let library = library()?;
    let of_platform = library.clGetExtensionFunctionAddressForPlatform.map(|get| {
        // SAFETY: the platform is one of the library's, and the name ends with a zero.
        unsafe { get(platform, name.as_ptr()) }
    });
    let address = of_platform.filter(|address| !address.is_null()).or_else(|| {
        // SAFETY: only the address is read.
        unsafe { library.library.symbol_cstr::<*mut c_void>(name) }.ok()
    });
    // SAFETY: the caller guarantees the function's type; a null address is `None`.
    Ok(unsafe { mem::transmute_copy(&address.unwrap_or(ptr::null_mut())) })
}
