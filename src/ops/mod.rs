//! What is computed: operations by family, and `catalogue`, which lists each of them once.
//!
//! An elementwise operation is a formula, an [`Expr`], in one row of a table. The CPU loop, the OpenCL kernel, the gradient, the
//! tests and the documentation follow from that row. The other operations check their operands here and describe the work as a
//! problem for the device's backend. `dispatch` has what every operation passes through.

pub(crate) mod catalogue;
pub(crate) mod dispatch;
pub(crate) mod elementwise;
pub(crate) mod index;
pub(crate) mod linalg;
pub(crate) mod nn;
pub(crate) mod random;
pub(crate) mod reduce;
pub(crate) mod shape;
pub(crate) mod sort;

use crate::{Result, Tensor, autograd};

pub use crate::autograd::{autocast, autocast_dtype};
pub use crate::backend::problem::cross_entropy::{CrossEntropy, LossReduction};
pub use crate::backend::problem::interpolation::Interpolation;
pub use crate::backend::problem::precision::{get_float32_matmul_precision, set_float32_matmul_precision};
pub use crate::dtype::{can_cast, get_default_dtype, promote_types, set_default_dtype};
pub use crate::expr::Expr;
pub use crate::expr::philox::Seed;
pub use crate::expr::table::{Accepts, Output, ROWS, Row};
pub use crate::layout::dims::{DimList, ReduceDims};
pub use crate::ops::dispatch::arguments::{Argument, ParameterKind};
pub(crate) use crate::ops::dispatch::checks::{same_device, same_dtype};
pub use crate::ops::dispatch::operation::{Dtypes, Gives, Kind, Operation};
pub use crate::ops::dispatch::parameters::{Parameter, Signature, Value};
pub use crate::ops::dispatch::precision::{Precision, with_precision};
pub use crate::ops::dispatch::promote::result_type;
pub use crate::ops::dispatch::recorded::Recorded;
pub use crate::ops::dispatch::registry::{Backend, Implementation, Registration};
pub use crate::ops::elementwise::each::{TensorSet, foreach_into, map_each};
pub use crate::ops::elementwise::map::MapInto;
pub use crate::ops::index::assign::Assigned;
pub use crate::ops::index::gather::ScatterReduce;
pub(crate) use crate::ops::index::gather::check_index;
pub use crate::ops::linalg::einsum::TensordotDims;
pub use crate::ops::nn::attention::Attention;
pub use crate::ops::nn::conv::{ConvOptions, ConvTransposeOptions};
pub use crate::ops::nn::norm::BatchNormOptions;
pub use crate::ops::nn::padding::Padding;
pub use crate::ops::nn::pool::{AvgPoolOptions, MaxPoolOptions};
pub use crate::ops::nn::window::{fold, unfold};
pub use crate::ops::shape::pad::PadMode;
pub use catalogue::{call, call_into, call_named, gradients, operations, operations_markdown, register, signature};
pub(crate) use elementwise::formula;
pub use random::{Generator, manual_seed, with_generator};
pub use reduce::table::{REDUCTIONS, ReductionRow};

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
