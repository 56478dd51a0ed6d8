//! A tensor storage layer for machine learning on OpenCL.
//!
//! A [`Tensor`] is a view of a [`storage::Storage`], which is device memory from a caching allocator. Views share their
//! storage; `clone` copies the elements on the device. Host and device exchange data through ndarray, including f16 and
//! bf16. The same code runs on every OpenCL 1.2 device, and on the CPU if there is no OpenCL device.
//!
//! ```
//! use claystone::{Device, Tensor};
//! # fn main() -> claystone::Result<()> {
//! let device = Device::best(); // the first GPU, else any OpenCL device, else the CPU
//! let x = Tensor::rand(&[3, 4], device)?;
//! let row = x.i(1)?; // a view: no copy
//! row.fill_(2.0)?; // seen through x
//! let copy = x.clone(); // memory of its own, one copy on the device
//! assert!(row.shares_storage(&x) && !copy.shares_storage(&x));
//!
//! let w = Tensor::randn(&[4, 2], device)?.requires_grad_(true)?;
//! x.matmul(&w)?.tanh()?.mean((), false)?.backward()?;
//! println!("{}", w.grad().expect("w took part"));
//! println!("{}", device.memory_stats()?); // what the allocator holds
//! # Ok(())
//! # }
//! ```
//!
//! # The modules
//!
//! - [`tensor`]: shapes, strides and offsets over a storage. Creation, views, conversion and display.
//! - [`ops`]: operations, by name and as methods of [`Tensor`]. [`expr`]: formulas for elementwise operations.
//! - [`autograd`]: gradients. [`nn`] and [`optim`]: layers, losses and optimisers.
//! - [`quantized`]: weights of two to eight bits, and products with them.
//! - [`data`]: data sets, and worker threads that load batches. [`distributed`]: training on several devices and machines.
//! - [`storage`]: device memory. Three allocators and their configuration, memory plans, history and snapshots, transfers.
//! - [`device`]: OpenCL devices and the CPU. Device discovery, streams and events, the program cache.
//! - [`io`]: npy, npz, safetensors and GGUF files. [`file`](mod@file): atomic replacement of files.
//! - [`tune`]: measures which kernel parameters are fastest on a device.
//! - [`profiler`]: times of operations, kernels and copies, as a trace and as a table.
//!
//! `docs/architecture.md` describes the private modules.
//!
//! Methods return [`Result`]. An error message is one sentence with the operation, the shapes or dtypes, and the
//! remedy. The operators `+ - * /` on tensors panic with the same sentence.
#![warn(missing_docs)]
#![deny(unsafe_code)] // except in device, storage and backend/cpu/kernels, which allow unsafe code

#[macro_use]
mod error;
#[macro_use]
mod options;

pub mod autograd;
mod backend;
pub mod data;
#[allow(unsafe_code)]
pub mod device;
pub mod distributed;
mod dtype;
pub mod expr;
pub mod file;
mod graph;
mod images;
pub mod io;
mod layout;
pub mod nn;
pub mod ops;
pub mod optim;
pub mod profiler;
#[allow(unsafe_code)]
pub mod storage;
mod sync;
pub mod tensor;
pub mod tune;

pub use autograd::{enable_grad, is_grad_enabled, no_grad, set_grad_enabled};
pub use backend::opencl::user_kernel::{Kernel, KernelCall, KernelScalar};
pub use device::{Device, Stream, with_stream};
pub(crate) use dtype::{Compute, elements};
pub use dtype::{DType, Element, Scalar};
pub use error::{Error, Result};
pub use graph::{Graph, GraphCapture};
pub use layout::memory_format::MemoryFormat;
pub use layout::shape::{NewShape, Shape};
pub use ops::{
    Assigned, AvgPoolOptions, BatchNormOptions, ConvOptions, ConvTransposeOptions, CrossEntropy, DimList, Expr,
    Generator, Interpolation, LossReduction, MaxPoolOptions, PadMode, Padding, Precision, ReduceDims, Seed, autocast,
    autocast_dtype, can_cast, get_default_dtype, get_float32_matmul_precision, manual_seed, promote_types, result_type,
    set_default_dtype, set_float32_matmul_precision, with_generator, with_precision,
};
pub use tensor::{HostArray, Index, Indices, Tensor, TensorOptions};

/// Weights of two to eight bits: their formats, and products with them.
pub mod quantized {
    pub use crate::dtype::quant::{Group, GroupOffset, QuantFormat};
    pub use crate::ops::quantized::QuantizedTensor;
}

/// Helpers from other modules for `nn`, `optim`, `io` and `distributed`, and code to which [`parts!`] expands. Not part of the
/// public interface.
#[doc(hidden)]
pub mod internal {
    pub use crate::backend::problem::recurrence::{CellKind, KeptStates, Pass, Recurrence};
    pub use crate::error::{Excerpt, for_each_part, in_steps};
    pub use crate::io::state::join_names;
    pub use crate::nn::part::field_name;
    pub use crate::ops::dispatch::checks::{same_device, same_dtype};
    pub use crate::ops::nn::recurrence::recurrence;
    pub use crate::sync::lock;
}

/// Compiles and runs the code snippets of the documentation pages as documentation tests.
macro_rules! doctest_pages {
    ($($name:ident $page:literal)*) => { $(
        #[cfg(doctest)]
        #[doc = include_str!($page)]
        struct $name;
    )* };
}

doctest_pages! {
    Readme "../README.md"
    Guide "../docs/guide/README.md"
    GuideTensors "../docs/guide/tensors.md"
    GuideOperations "../docs/guide/operations.md"
    GuideGradients "../docs/guide/gradients.md"
    GuideTraining "../docs/guide/training.md"
    GuideImagesAndSequences "../docs/guide/images-and-sequences.md"
    GuideDataAndFiles "../docs/guide/data-and-files.md"
    GuideStreamsAndGraphs "../docs/guide/streams-and-graphs.md"
    GuideDistributed "../docs/guide/distributed.md"
    GuideMemory "../docs/guide/memory.md"
    GuideWhenItDoesNotFit "../docs/guide/when-it-does-not-fit.md"
    GuideProfiling "../docs/guide/profiling.md"
    GuideTuning "../docs/guide/tuning.md"
    GuideInterop "../docs/guide/interop.md"
    GuideExtending "../docs/guide/extending.md"
    GuideExamples "../docs/guide/examples.md"
    GuideReportingBugs "../docs/guide/reporting-bugs.md"
    AllocatorPage "../docs/allocator.md"
}
