//! The steps that all operations have in common: registry, arguments, checks, dtype promotion and autocast.
//!
//! A method usually begins with `return_replacement!`, `cast_first!` and its checks, and has an entry in the `operations!` list of its
//! family. Methods are `#[track_caller]`, so that the allocation history names the line that called the method.

pub(crate) mod args;
pub(crate) mod arguments;
pub(crate) mod autocast;
pub(crate) mod checks;
pub(crate) mod operation;
pub(crate) mod parameters;
pub(crate) mod precision;
pub(crate) mod promote;
pub(crate) mod registry;
pub(crate) mod results;

/// Imports for the files that define methods of `Tensor`.
pub(crate) mod prelude {
    pub(crate) use smallvec::SmallVec;

    pub(crate) use super::args::Args;
    pub(crate) use super::arguments::Argument;
    pub(crate) use super::autocast::{autocast_inputs, autocast_to_f32};
    pub(crate) use super::checks::{
        WithOp, cast_first, fail, mismatch, same_device, same_dtype, shape_mismatch, unsupported,
    };
    pub(crate) use super::operation::operations;
    pub(crate) use super::registry::{call_replacement, return_replacement};
    pub(crate) use crate::autograd::{self, Gradients, Saved};
    pub(crate) use crate::backend::{self, problem::map::Params};
    pub(crate) use crate::ops::{apply_formula, record_gradients, record_gradients_with_result};
    pub(crate) use crate::storage::Caller; // the documentation of most methods links to `Caller`
    pub(crate) use crate::tensor::{Dims, Layout};
    pub(crate) use crate::{DType, Device, Error, Expr, Result, Scalar, Shape, Tensor, no_grad};
}
