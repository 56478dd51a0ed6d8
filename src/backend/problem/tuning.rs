//! Tuning parameters of a device's kernels, and the workloads that measure them.

use std::io;
use std::path::PathBuf;

use crate::DType;
pub use crate::device::opencl::tuning::level::Level;

/// A tuning parameter of a device's kernels.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Parameter {
    /// The parameter's name in the file of tuned parameters.
    pub name: &'static str,
    /// One line that explains the parameter.
    pub doc: &'static str,
    /// The allowed values.
    pub choices: &'static [usize],
    /// The value on a device that was not tuned.
    pub default: usize,
    /// The value on this device.
    pub value: usize,
}

/// The fastest measured value of a parameter or of a kernel's work-group size, for one class of sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// A parameter's name, or `group_` and a number for the work-group size of one kernel.
    pub name: String,
    /// The sizes of the class, each as its base-2 logarithm rounded down, padded with zeros.
    pub sizes: Vec<u32>,
    /// The fastest value.
    pub value: usize,
}

/// An operation whose kernel uses the parameter that is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Workload {
    /// Adds two tensors with this many elements.
    Add(usize),
    /// Like `Add`, with an offset that is not aligned to vectors.
    AddUnaligned(usize),
    /// Copies a transposed matrix with this many rows and columns.
    CopyTransposed(usize, usize, DType),
    /// Multiplies `[m, k]` by `[k, n]`; the flags say which matrices are transposed in memory.
    MatMul([usize; 3], [bool; 2], DType),
    /// Convolves `[n, c, side, side]` into `o` channels: `[n, c, o, side]`, then the side of the kernel.
    Convolution([usize; 4], usize),
    /// Max-pools `[n, c, side, side]` with windows of 2 x 2.
    Pooling([usize; 3]),
    /// Adds two tensors `[n, c, side, side]`.
    AddImages([usize; 3]),
    /// Computes attention of `[heads, queries, width]`, with one key a query.
    Attention([usize; 3]),
    /// Computes a depthwise convolution of `[n, c, side, side]`; the last number is the side of the kernel.
    Depthwise([usize; 3], usize),
    /// Sorts lines: `[lines, elements a line]`.
    Sort([usize; 2], DType),
}

/// The tuning parameters of a device. A parameter is named by its index in [`parameters`](Self::parameters).
pub(crate) trait Tuning {
    /// All parameters with their current values.
    fn parameters(&self) -> Vec<Parameter>;
    /// Sets a parameter for this process.
    fn set(&self, parameter: usize, value: usize);
    /// The workload that times the choices of a parameter.
    fn workload(&self, parameter: usize) -> Workload;
    /// Workloads for tests, with sizes around the multiples of a parameter's current value.
    fn edge_workloads(&self, parameter: usize) -> Vec<Workload>;
    /// How much the device tunes during ordinary work.
    fn level(&self) -> Level;
    /// Sets the tuning level for this process.
    fn set_level(&self, level: Level);
    /// The choices made for kernels and classes of sizes.
    fn choices(&self) -> Vec<Choice>;
    /// Enables or disables the stored choices in this process and returns the previous setting.
    fn use_choices(&self, on: bool) -> bool;
    /// Discards all choices in this process.
    fn forget_choices(&self);
    /// The number of choices that are still under trial.
    fn on_trial(&self) -> usize;
    /// Workloads of usual sizes, for tuning ahead of time.
    fn usual_workloads(&self) -> Vec<Workload>;
    /// Saves all values for other processes and returns the file; None if there is no program cache.
    fn save(&self) -> io::Result<Option<PathBuf>>;
}
