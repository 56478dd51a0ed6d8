//! The names that most files of this backend use.

pub(super) use std::sync::Arc;

pub(super) use smallvec::SmallVec;

pub(super) use crate::backend::opencl::geometry::*;
pub(super) use crate::backend::opencl::kernels::*;
pub(super) use crate::backend::opencl::launch_cache::{self, Key, OpKind};
pub(super) use crate::backend::opencl::launch_plan::{Argument, KernelLaunch, LaunchPlan};
pub(super) use crate::backend::problem::*;
pub(super) use crate::device::DeviceKind;
pub(super) use crate::device::opencl::{Arg, ClDevice, ClKernel, SizeClass, TuningParameter};
pub(super) use crate::expr::Expr;
pub(super) use crate::expr::program::Program;
pub(super) use crate::layout::collapse::StridedDims;
pub(super) use crate::tensor::{Dims, Layout};
pub(super) use crate::{Compute, DType, Error, MemoryFormat, Result, Scalar, Shape, Tensor};
