//! The C API of [claystone](https://docs.rs/claystone): `include/claystone.h` is made of this crate, and is what C programs and
//! bindings of other languages include.
//!
//! A file a subject: [`device`] and [`stream`], [`storage`] and [`tensor`], [`call`] for operations by name and their gradients,
//! [`multi`] for many tensors at once, [`recurrent`] for layers of LSTM and its like, [`profiler`] for what ran when, [`memory`] for statistics and snapshots, [`random`] for generators. [`status`] has what every function shares: statuses, the
//! last error of a thread, and the guard that keeps panics on this side.
//!
//! # Safety
//!
//! claystone's rule, `unsafe` in `src/device` and `src/storage` only, is about the library. A C API cannot do without: what C hands
//! over are pointers, and only their users know whether they are good. It stays in this crate, where each block says which of
//! the promises below it stands on. C programs promise, for every function:
//!
//! - A handle is null, or one that this API gave and that was not released more often than it was given and retained.
//! - A pointer to a result is null, or good for writing one value of its type.
//! - An array is good for reading (or, where results go, writing) as many entries as the count beside it says, or the count is 0.
//! - A text is null or ends with a zero byte.
//! - What a call was given is not changed or released by another thread while it runs.
//!
//! Null where there has to be something, counts, tags, dtypes, sizes and strides are checked, and are errors.
//!
//! Panics are caught at the border where the crate is compiled with `panic = "unwind"`, which is the default; with `abort` they end the
//! process.
#![warn(missing_docs)]

pub mod call;
pub mod device;
pub mod memory;
pub mod multi;
mod pointers;
pub mod profiler;
pub mod random;
pub mod recurrent;
pub mod status;
pub mod storage;
pub mod stream;
pub mod tensor;
