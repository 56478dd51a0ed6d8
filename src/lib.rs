//! claystone: the tensor storage layer for machine learning on OpenCL.
#![warn(missing_docs)]
#![allow(dead_code, missing_docs)] // while the rooms are being built

mod dtype;
mod error;

pub mod autograd;
pub mod device;
pub mod ops;
pub mod storage;
pub mod tensor;

pub use autograd::{is_grad_enabled, no_grad};
pub use device::Device;
pub(crate) use dtype::Compute;
pub use dtype::{DType, Element, Scalar};
pub use error::{Error, Result};
pub use ops::{CrossEntropy, LossReduction, ReduceDims, manual_seed};
pub use tensor::{Shape, Tensor};
