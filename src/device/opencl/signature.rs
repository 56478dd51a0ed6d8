//! The parameters that a user's kernel declares.

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

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddressSpace {
    Global,
    Constant,
    Local,
    /// A value rather than a pointer.
    Private,
}

#[derive(Debug)]
pub(crate) struct Parameter {
    pub(crate) name: String,
    /// The type as written in the source: `float4*`, `uint`.
    pub(crate) type_name: String,
    pub(crate) space: AddressSpace,
    /// True if the parameter points to const data.
    pub(crate) constant: bool,
}

impl ClDevice {
    /// Returns the kernel's parameters, if the driver reports them: the program must be built with `-cl-kernel-arg-info`, and a
    /// driver may lose the parameters of programs built from binaries.
    pub(crate) fn parameters(&self, kernel: &ClKernel) -> Option<Vec<Parameter>> {
        (0..kernel.arg_count() as u32).map(|i| parameter(kernel, i).ok()).collect()
    }

    /// Returns the kernel's required group size; zeros if any size is allowed.
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
        CL_KERNEL_ARG_ADDRESS_GLOBAL => AddressSpace::Global,
        CL_KERNEL_ARG_ADDRESS_CONSTANT => AddressSpace::Constant,
        CL_KERNEL_ARG_ADDRESS_LOCAL => AddressSpace::Local,
        _ => AddressSpace::Private,
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
