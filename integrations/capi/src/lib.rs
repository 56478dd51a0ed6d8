//! The C API of [claystone](https://docs.rs/claystone). cbindgen generates `include/claystone.h` from this crate; C programs and
//! bindings of other languages include that header.
//!
//! There is one file per subject: [`device`] and [`stream`], [`storage`] and [`tensor`], [`call`] for operations by name and their
//! gradients, [`formula`] for fused elementwise programs, [`multi`] and [`steps`] for operations on lists of tensors, [`recurrent`] for LSTM, GRU and RNN layers, [`hooks`] on the tensors they save, [`profiler`], [`memory`] for
//! statistics and snapshots, [`allocator`] for allocators that a program plugs in, [`pool`] for private pools, [`graph`] for capture and replay, [`dry_run`] for estimates of the memory that a program needs, [`random`] for generators. [`status`] has the parts that every function uses: the statuses, the last
//! error of each thread, and the guard that stops panics before they reach C.
//!
//! # Safety
//!
//! claystone itself uses `unsafe` only in `src/device` and `src/storage`. A C API needs more of it: C passes raw pointers, and only
//! the C program knows whether they are valid. That `unsafe` stays in this crate, and each block names the promises below that it
//! relies on. C programs promise for every function:
//!
//! - A handle is null, or was returned by this API and has not been released more often than it was returned and retained.
//! - A pointer to a result is null, or valid for writing one value of its type.
//! - An array is valid for reading (for results: writing) as many entries as the count passed with it, or the count is 0.
//! - A string is null or ends with a zero byte.
//! - No other thread changes or releases an argument while the call runs.
//!
//! The API checks for null where a value is required, and checks counts, tags, dtypes, sizes and strides; violations are errors.
//!
//! Panics are caught before they reach C if the crate is compiled with `panic = "unwind"`, the default; with `abort` they end the
//! process.
#![warn(missing_docs)]

pub mod allocator;
pub mod call;
pub mod device;
pub mod dry_run;
pub mod formula;
pub mod graph;
pub mod hooks;
pub mod memory;
pub mod multi;
mod pointers;
pub mod pool;
pub mod profiler;
pub mod random;
pub mod recurrent;
pub mod status;
pub mod steps;
pub mod storage;
pub mod stream;
pub mod tensor;
