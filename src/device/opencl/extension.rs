//! Lookup of extension functions by name.

use std::ffi::{CStr, c_void};
use std::{mem, ptr};

use opencl3::types::cl_platform_id;

use super::driver::library;
use super::errors::ClError;

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
    let address = of_platform.filter(|address| !address.is_null()).or_else(|| library.exported(name));
    // SAFETY: the caller guarantees the function's type; a null address is `None`.
    Ok(unsafe { mem::transmute_copy(&address.unwrap_or(ptr::null_mut())) })
}
