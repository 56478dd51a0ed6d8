//! The tensor storage layer for machine learning on OpenCL.
//!
//! [`Tensor`]s are views of [`storage::Storage`] in device memory that an allocator hands out; `clone` copies on the
//! device, views share, and host and device exchange data through ndarray, f16 and bf16 included. The same code runs on
//! every OpenCL 1.2 device and, where there is none, on the CPU.
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
//! - [`tensor`]: shapes, strides and an offset over a storage. Creation, views, conversion, display.
//! - [`ops`]: the operations, by name and as methods of [`Tensor`]. [`expr`]: formulas of elementwise operations.
//! - [`autograd`]: gradients. [`nn`] and [`optim`]: layers, losses and optimisers made of the above.
//! - [`data`]: data sets, and batches of them made by worker threads. [`distributed`]: training on several devices and machines.
//! - [`storage`]: who owns the bytes. Three allocators and their configuration, plans, history and snapshots, transfers.
//! - [`device`]: where work runs. Discovery, streams and events, the program cache.
//! - [`io`]: npy, npz and safetensors files. [`file`](mod@file): files that are replaced as a whole. [`tune`]: measuring which parameters of kernels suit a device.
//!
//! - [`profiler`]: where the time goes, as a trace and as a table.
//!
//! `docs/architecture.md` describes the private layers between them.
//!
//! Methods return [`Result`]: one sentence with the operation, the shapes or dtypes and what to do. The operators
//! `+ - * /` on tensors panic with the same sentence.
#![warn(missing_docs)]

pub mod autograd;
mod backend;
pub mod data;
pub mod device;
pub mod distributed;
mod dtype;
mod error;
pub mod expr;
pub mod file;
mod graph;
pub mod io;
mod layout;
pub mod nn;
pub mod ops;
pub mod optim;
pub mod profiler;
pub mod storage;
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

/// The guide's snippets run as doctests.
#[cfg(doctest)]
#[doc = include_str!("../docs/guide.md")]
struct Guide;

/// The example of the allocator's page runs as a doctest.
#[cfg(doctest)]
#[doc = include_str!("../docs/allocator.md")]
struct AllocatorPage;
