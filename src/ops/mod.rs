//! What is computed.
//!
//! An elementwise operation is a formula, an [`Expr`]: one row of a table. From it come the loop over tiles on the CPU,
//! the OpenCL kernel, the gradient, the tests and the documentation. `elementwise` launches formulas over broadcast and
//! strided tensors; `copy` and `random` are formulas too. The other files are one kernel family each, beside its template
//! in `kernels/`.

use crate::autograd;
use crate::{DType, Device, Error, Result, Tensor};

pub(crate) mod arguments;
mod attention;
pub(crate) mod autocast;
pub(crate) mod catalogue;
mod collapse;
mod conv;
pub(crate) mod convert;
mod copy;
mod count;
mod cpu_copy;
mod cpu_deal;
mod cpu_flat;
mod cpu_half;
pub(crate) mod cpu_join;
mod cpu_map;
mod cpu_transpose;
mod derivative;
mod distance;
mod distributions;
pub(crate) mod draws;
mod einsum;
mod elementwise;
pub mod expr;
mod fold;
mod formulas;
mod gather;
mod gemm;
mod gemm_cpu;
mod gemm_epilogue;
mod gemm_mma;
mod gemm_opencl;
mod gemm_panel;
mod gemm_thin;
mod idioms;
mod interpolate;
mod kernels;
pub(crate) mod lane;
mod linalg;
mod lines;
mod map;
mod masks;
mod matmul;
mod memo;
mod multiply_add;
mod norm;
mod opencl_map;
mod order;
pub(crate) mod philox;
mod pointwise;
mod pool;
mod precision;
mod prepared;
mod primitives;
pub(crate) mod program;
pub(crate) mod promote;
mod random;
pub(crate) mod reduce;
mod reductions;
pub(crate) mod registry;
mod row;
mod rows;
mod scan;
pub(crate) mod sequence;
mod sort;
pub(crate) mod source;
mod special;
mod stream;
pub mod table;
pub(crate) mod tiles;
pub(crate) mod triangle;
mod update;
mod window;

pub use arguments::Argument;
pub use attention::Attention;
pub use autocast::{autocast, autocast_dtype};
pub use catalogue::{Dtypes, Gives, Kind, Operation, operations, operations_markdown};
pub use conv::{ConvOptions, ConvTransposeOptions, Padding};
pub use einsum::TensordotDims;
pub(crate) use elementwise::{Params, apply_into, formula};
pub use expr::Expr;
pub use gather::ScatterReduce;
pub(crate) use gather::check_index;
pub use interpolate::Interpolation;
pub(crate) use map::formulas;
pub use norm::BatchNormOptions;
pub use philox::Seed;
pub use pool::{AvgPoolOptions, MaxPoolOptions};
pub use table::{Accepts, Output, ROWS, Row};
pub(crate) use window::{fold, unfold};

pub use precision::{get_float32_matmul_precision, set_float32_matmul_precision};
pub use promote::{can_cast, get_default_dtype, promote_types, result_type, set_default_dtype};
pub use random::{Generator, manual_seed, with_generator};
pub use reduce::ReduceDims;
pub use reduce::table::{REDUCTIONS, ReductionRow};
pub use registry::{Backend, Implementation, Registration, call, register};
pub use row::{CrossEntropy, LossReduction};

#[cfg(test)]
mod device_tests;

/// The one device of all inputs.
pub(crate) fn same_device(op: &'static str, inputs: &[&Tensor]) -> Result<Device> {
    let device = inputs[0].device();
    match inputs.iter().find(|t| t.device() != device) {
        Some(t) => Err(Error::DeviceMismatch { op, lhs: device, rhs: t.device() }),
        None => Ok(device),
    }
}

/// The one dtype of all inputs.
pub(crate) fn same_dtype(op: &'static str, inputs: &[&Tensor]) -> Result<DType> {
    let dtype = inputs[0].dtype;
    match inputs.iter().find(|t| t.dtype != dtype) {
        Some(t) => Err(Error::DTypeMismatch { op, lhs: dtype, rhs: t.dtype }),
        None => Ok(dtype),
    }
}

/// `out` with a node where an input is tracked: `back` gives the gradient of input `i` for that of the result, of the inputs
/// whose gradients are wanted. It is made of recorded operations.
pub(crate) fn recorded(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    back: impl Fn(usize, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !autograd::is_tracked(inputs) {
        return out;
    }
    let count = inputs.len();
    autograd::record_twice(op, out, inputs, move |ctx| {
        let grad = ctx.grad()?;
        (0..count).map(|i| ctx.needs(i).then(|| back(i, &grad)).transpose()).collect()
    })
}

/// [`recorded`] for a `back` that is given the result as well, after its gradient.
pub(crate) fn recorded_with_result(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    back: impl Fn(usize, &Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !autograd::is_tracked(inputs) {
        return out;
    }
    let (count, saved) = (inputs.len(), autograd::Saved::new(&out));
    autograd::record_twice(op, out, inputs, move |ctx| {
        let (grad, result) = (ctx.grad()?, ctx.result(&saved)?);
        (0..count).map(|i| ctx.needs(i).then(|| back(i, &grad, &result)).transpose()).collect()
    })
}

/// Two results of a replacement as a method gives them.
pub(crate) fn pair(made: Vec<Tensor>) -> Result<(Tensor, Tensor)> {
    match <[Tensor; 2]>::try_from(made) {
        Ok([a, b]) => Ok((a, b)),
        Err(made) => Err(Error::invalid("register", format!("{} results of an operation that has two", made.len()))),
    }
}
