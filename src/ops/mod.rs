//! The operations on tensors, one folder for each family. `catalogue` lists every operation once.
//!
//! An elementwise operation is a row of one table. From its formula, an [`Expr`], follow the CPU loop, the OpenCL kernel, the gradient,
//! the tests and the documentation. Every other operation checks its operands and then describes the work to the device's backend as a
//! problem. `dispatch` holds the steps that all operations have in common.

pub(crate) mod catalogue;
pub(crate) mod dispatch;
pub(crate) mod elementwise;
pub(crate) mod index;
pub(crate) mod linalg;
pub(crate) mod native;
pub(crate) mod nn;
pub(crate) mod quantized;
pub(crate) mod random;
pub(crate) mod reduce;
pub(crate) mod shape;
pub(crate) mod sort;

use crate::{Result, Tensor, autograd};

pub use crate::autograd::{autocast, autocast_dtype};
pub use crate::backend::problem::cached::{CacheRows, CacheType};
pub use crate::backend::problem::cross_entropy::{CrossEntropy, LossReduction};
pub use crate::backend::problem::interpolation::Interpolation;
pub use crate::backend::problem::precision::{get_float32_matmul_precision, set_float32_matmul_precision};
pub use crate::dtype::{can_cast, get_default_dtype, promote_types, set_default_dtype};
pub use crate::expr::Expr;
pub use crate::expr::philox::Seed;
pub use crate::expr::table::{Accepts, Output, ROWS, Row};
pub use crate::layout::dims::{DimList, ReduceDims};
pub use crate::ops::dispatch::arguments::{Argument, ParameterKind};
pub use crate::ops::dispatch::operation::{Dtypes, Kind, Operation, ResultDType};
pub use crate::ops::dispatch::parameters::{Parameter, Signature, Value};
pub use crate::ops::dispatch::precision::{Precision, with_precision};
pub use crate::ops::dispatch::promote::result_type;
pub use crate::ops::dispatch::registry::{Backend, Implementation, Registration};
pub use crate::ops::elementwise::map::{MapInto, PreparedMap};
pub use crate::ops::index::assign::Assigned;
pub(crate) use crate::ops::index::gather::check_index;
pub use crate::ops::index::scatter_reduction::ScatterReduce;
pub use crate::ops::linalg::einsum::TensordotDims;
pub use crate::ops::native::each::{TensorSet, foreach_into, map_each};
pub use crate::ops::native::recorded::Recorded;
pub use crate::ops::nn::attention::Attention;
pub use crate::ops::nn::cached::{cache_store, cached_attention};
pub use crate::ops::nn::conv::{ConvOptions, ConvTransposeOptions};
pub use crate::ops::nn::norm::BatchNormOptions;
pub use crate::ops::nn::padding::Padding;
pub use crate::ops::nn::pool::{AvgPoolOptions, MaxPoolOptions};
pub use crate::ops::nn::window::{fold, unfold};
pub use crate::ops::shape::pad::PadMode;
pub use catalogue::{call, call_into, call_named, gradients, operations, operations_markdown, register, signature};
pub(crate) use elementwise::apply_formula;
pub use random::{Generator, manual_seed, with_generator};
pub use reduce::table::{REDUCTIONS, ReductionRow};

/// Attaches an autograd node to `out` if any input is tracked.
///
/// `back(i, grad)` computes the gradient of input `i` from the gradient of the result, and is called only for inputs that need
/// a gradient. `back` must use recorded operations, so that gradients can be differentiated again.
pub(crate) fn record_gradients(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    back: impl Fn(usize, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !autograd::is_tracked(inputs) {
        return out;
    }
    let count = inputs.len();
    autograd::record_differentiable(op, out, inputs, move |ctx| {
        let grad = ctx.grad()?;
        (0..count).map(|i| ctx.needs_gradient(i).then(|| back(i, &grad)).transpose()).collect()
    })
}

/// Attaches an autograd node like [`record_gradients`], but `back` also receives the result, as its last argument.
pub(crate) fn record_gradients_with_result(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    back: impl Fn(usize, &Tensor, &Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !autograd::is_tracked(inputs) {
        return out;
    }
    let (count, saved) = (inputs.len(), autograd::Saved::new(&out));
    autograd::record_differentiable(op, out, inputs, move |ctx| {
        let (grad, result) = (ctx.grad()?, ctx.unpack_result(&saved)?);
        (0..count).map(|i| ctx.needs_gradient(i).then(|| back(i, &grad, &result)).transpose()).collect()
    })
}
