//! A tensor storage layer for machine learning on OpenCL.
//!
//! A [`Tensor`] is a view of a [`storage::Storage`], which is device memory from a caching allocator. Views share the
//! storage; `clone` copies the elements on the device. Host and device exchange data through ndarray, f16 and bf16
//! included. The same code runs on every OpenCL 1.2 device, and on the CPU where there is no OpenCL device.
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
//! - [`tensor`]: shapes, strides and offsets over a storage. Creation, views, conversion, display.
//! - [`ops`]: the operations, by name and as methods of [`Tensor`]. [`expr`]: formulas of elementwise operations.
//! - [`autograd`]: gradients. [`nn`] and [`optim`]: layers, losses and optimisers.
//! - [`data`]: data sets, and worker threads that make batches. [`distributed`]: training on several devices and machines.
//! - [`storage`]: device memory. Three allocators and their configuration, plans, history and snapshots, transfers.
//! - [`device`]: OpenCL devices and the CPU. Discovery, streams and events, the program cache.
//! - [`io`]: npy, npz and safetensors files. [`file`](mod@file): atomic replacement of files.
//! - [`tune`]: measures which kernel parameters suit a device.
//! - [`profiler`]: times of operations, kernels and copies, as a trace and as a table.
//!
//! `docs/architecture.md` describes the private layers between them.
//!
//! Methods return [`Result`]. The message of an error is one sentence: the operation, the shapes or dtypes and the
//! remedy. The operators `+ - * /` on tensors panic with the same sentence.
#![warn(missing_docs)]
#![deny(unsafe_code)] // except in the two rooms below that allow it

pub mod autograd;
mod backend;
pub mod data;
#[allow(unsafe_code)]
pub mod device;
pub mod distributed;
mod dtype;
mod error;
pub mod expr;
pub mod file;
mod graph;
mod images;
pub mod io;
mod layout;
pub mod nn;
pub mod ops;
pub mod optim;
mod options;
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
pub use error::{Error, Excerpt, Result, for_each_part, in_steps};
pub use graph::Graph;
pub use layout::memory_format::MemoryFormat;
pub use layout::shape::{NewShape, Shape};
pub use ops::{
    Assigned, AvgPoolOptions, BatchNormOptions, ConvOptions, ConvTransposeOptions, CrossEntropy, DimList, Expr,
    Generator, Interpolation, LossReduction, MaxPoolOptions, PadMode, Padding, Precision, ReduceDims, Seed, autocast,
    autocast_dtype, can_cast, get_default_dtype, get_float32_matmul_precision, manual_seed, promote_types, result_type,
    set_default_dtype, set_float32_matmul_precision, with_generator, with_precision,
};
pub use tensor::{HostArray, Index, Indices, Tensor, TensorOptions};

/// The README's example runs as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The snippets of each chapter of the guide run as doctests.
#[cfg(doctest)]
#[doc = include_str!("../docs/guide/README.md")]
struct Guide;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/tensors.md")]
struct GuideTensors;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/operations.md")]
struct GuideOperations;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/gradients.md")]
struct GuideGradients;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/training.md")]
struct GuideTraining;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/images-and-sequences.md")]
struct GuideImagesAndSequences;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/data-and-files.md")]
struct GuideDataAndFiles;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/streams-and-graphs.md")]
struct GuideStreamsAndGraphs;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/distributed.md")]
struct GuideDistributed;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/memory.md")]
struct GuideMemory;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/profiling.md")]
struct GuideProfiling;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/tuning.md")]
struct GuideTuning;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/interop.md")]
struct GuideInterop;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/extending.md")]
struct GuideExtending;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/examples.md")]
struct GuideExamples;

#[cfg(doctest)]
#[doc = include_str!("../docs/guide/reporting-bugs.md")]
struct GuideReportingBugs;

/// The example of the allocator's page runs as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../docs/allocator.md")]
struct AllocatorPage;
