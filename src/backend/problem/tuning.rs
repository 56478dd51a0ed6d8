//! Tuning parameters of a device's kernels, and the workloads that they are measured with.

use std::io;
use std::path::PathBuf;

use crate::DType;
pub use crate::device::level::Level;

/// A parameter of a device's kernels.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Parameter {
    /// Its name in the file of tuned parameters.
    pub name: &'static str,
    /// One line about its meaning.
    pub doc: &'static str,
    /// The values that it may have.
    pub choices: &'static [usize],
    /// Its value on a device that was not tuned.
    pub default: usize,
    /// Its value on this device.
    pub value: usize,
}

/// The value that was measured to be fastest for a parameter or a kernel's group size, for one class of sizes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// A parameter's name, or `group_` and a number for the work-group size of one kernel.
    pub name: String,
    /// The sizes of the class, each as its logarithm to base two, rounded down; zeros follow.
    pub sizes: Vec<u32>,
    /// The chosen value.
    pub value: usize,
}

/// An operation whose kernel has the parameter that is measured.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Workload {
    /// Addition of two tensors of so many elements.
    Sum(usize),
    /// The same with an offset that is not aligned to vectors.
    Shifted(usize),
    /// A copy of a transposed matrix of so many rows and columns.
    Transposed(usize, usize, DType),
    /// `[m, k]` times `[k, n]`, the matrices transposed in memory or not.
    Product([usize; 3], [bool; 2], DType),
    /// A convolution of `[n, c, side, side]` into `o` channels, given `[n, c, o, side]` and the side of the kernel.
    Convolution([usize; 4], usize),
    /// Maximum pooling of `[n, c, side, side]` with windows of 2 x 2.
    Pooling([usize; 3]),
    /// Addition of tensors `[n, c, side, side]`.
    Added([usize; 3]),
    /// Attention of `[heads, queries, width]` with as many keys.
    Attention([usize; 3]),
    /// A depthwise convolution of `[n, c, side, side]`, with the side of the kernel.
    Depthwise([usize; 3], usize),
    /// A sort of so many lines of so many elements.
    Sorted([usize; 2], DType),
}

/// The parameters of a device, each named by its index in [`parameters`](Self::parameters).
pub(crate) trait Tuning {
    /// All parameters with their current values.
    fn parameters(&self) -> Vec<Parameter>;
    /// Sets a parameter for this process.
    fn set(&self, parameter: usize, value: usize);
    /// The workload that a parameter's choices are timed with.
    fn workload(&self, parameter: usize) -> Workload;
    /// Workloads with sizes around the multiples of a parameter's current value, for tests.
    fn edges(&self, parameter: usize) -> Vec<Workload>;
    /// How much the device tunes during ordinary work.
    fn level(&self) -> Level;
    /// Sets that level for this process.
    fn set_level(&self, level: Level);
    /// The choices that were made for kernels and classes of sizes.
    fn choices(&self) -> Vec<Choice>;
    /// Says whether this process uses these choices, and gives the setting before.
    fn use_choices(&self, on: bool) -> bool;
    /// Forgets the choices in this process.
    fn forget_choices(&self);
    /// The number of choices that are still being measured.
    fn on_trial(&self) -> usize;
    /// Workloads of many sizes, whose kernels have the parameters.
    fn ordinary(&self) -> Vec<Workload>;
    /// Saves all values for other processes and gives the file, unless there is no cache of programs.
    fn save(&self) -> io::Result<Option<PathBuf>>;
}
