//! What a kernel says about its parameters: for kernels that are not this crate's.

use std::ffi::c_void;
use std::ptr;

use opencl3::kernel::{
    CL_KERNEL_ARG_ADDRESS_CONSTANT, CL_KERNEL_ARG_ADDRESS_GLOBAL, CL_KERNEL_ARG_ADDRESS_LOCAL,
    CL_KERNEL_ARG_ADDRESS_QUALIFIER, CL_KERNEL_ARG_NAME, CL_KERNEL_ARG_TYPE_CONST, CL_KERNEL_ARG_TYPE_NAME,
    CL_KERNEL_ARG_TYPE_QUALIFIER, CL_KERNEL_COMPILE_WORK_GROUP_SIZE,
};

use super::ClDevice;
use super::driver::{ClKernel, call};
use super::errors::ClError;

/// Where a parameter points.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Space {
    Global,
    Constant,
    Local,
    /// Nowhere: it is a value.
    Private,
}

/// A kernel's parameter.
#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    /// As the source has it: `float4*`, `uint`.
    pub(crate) type_name: String,
    pub(crate) space: Space,
    /// Whether what it points at is const.
    pub(crate) constant: bool,
}

impl ClDevice {
    /// The kernel's parameters, where the driver tells: the program was built with `-cl-kernel-arg-info`, and drivers may
    /// not keep the answer with a binary.
    pub(crate) fn parameters(&self, kernel: &ClKernel) -> Option<Vec<Parameter>> {
        (0..kernel.arg_count() as u32).map(|i| parameter(kernel, i).ok()).collect()
    }

    /// The group size that the kernel was written for; zeros where that is any.
    pub(crate) fn required_group(&self, kernel: &ClKernel) -> [usize; 3] {
        let mut group = [0usize; 3];
        let (to, size) = (group.as_mut_ptr().cast::<c_void>(), size_of_val(&group));
        let what = CL_KERNEL_COMPILE_WORK_GROUP_SIZE;
        let told = call!(clGetKernelWorkGroupInfo(kernel.raw(), self.id(), what, size, to, ptr::null_mut()));
        if told.is_ok() { group } else { [0; 3] }
    }
}

fn parameter(kernel: &ClKernel, i: u32) -> Result<Parameter, ClError> {
    let space = match number::<u32>(kernel, i, CL_KERNEL_ARG_ADDRESS_QUALIFIER)? {
        CL_KERNEL_ARG_ADDRESS_GLOBAL => Space::Global,
        CL_KERNEL_ARG_ADDRESS_CONSTANT => Space::Constant,
        CL_KERNEL_ARG_ADDRESS_LOCAL => Space::Local,
        _ => Space::Private,
    };
    let constant = number::<u64>(kernel, i, CL_KERNEL_ARG_TYPE_QUALIFIER)? & u64::from(CL_KERNEL_ARG_TYPE_CONST) != 0;
    let (name, type_name) = (text(kernel, i, CL_KERNEL_ARG_NAME)?, text(kernel, i, CL_KERNEL_ARG_TYPE_NAME)?);
    Ok(Parameter { name, type_name, space, constant })
}

fn number<T: Default>(kernel: &ClKernel, i: u32, what: u32) -> Result<T, ClError> {
    let mut value = T::default();
    let to = ptr::from_mut(&mut value).cast::<c_void>();
    call!(clGetKernelArgInfo(kernel.raw(), i, what, size_of::<T>(), to, ptr::null_mut()))?;
    Ok(value)
}

fn text(kernel: &ClKernel, i: u32, what: u32) -> Result<String, ClError> {
    let mut n = 0;
    call!(clGetKernelArgInfo(kernel.raw(), i, what, 0, ptr::null_mut(), &mut n))?;
    let mut bytes = vec![0u8; n];
    call!(clGetKernelArgInfo(kernel.raw(), i, what, n, bytes.as_mut_ptr().cast(), ptr::null_mut()))?;
    Ok(String::from_utf8_lossy(&bytes).trim_end_matches('\0').to_owned())
}
