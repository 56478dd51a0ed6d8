//! Parameters of a device's kernels, and what they are measured with.

use std::io;
use std::path::PathBuf;

use crate::DType;
pub use crate::device::level::Level;

/// A parameter of a device's kernels.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Parameter {
    /// As it is called in the file.
    pub name: &'static str,
    /// What it is.
    pub doc: &'static str,
    /// What it may be.
    pub choices: &'static [usize],
    /// What it is where nobody has measured.
    pub default: usize,
    /// What it is on this device.
    pub value: usize,
}

/// What was found to suit a kernel, or a parameter of kernels, at sizes that are near each other.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Choice {
    /// A parameter's name, or `group_` and a number for the work-items a group of one kernel.
    pub name: String,
    /// The sizes of the class, each as the logarithm to base two of the power of two below it; zeros follow.
    pub sizes: Vec<u32>,
    /// What was chosen.
    pub value: usize,
}

/// What a parameter is measured with: something whose kernel has it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Workload {
    /// A sum of so many elements.
    Sum(usize),
    /// The same, of elements that do not begin where a vector does.
    Shifted(usize),
    /// A matrix of so many rows and columns, transposed.
    Transposed(usize, usize, DType),
    /// `[m, k]` times `[k, n]`, the matrices transposed in memory or not.
    Product([usize; 3], [bool; 2], DType),
    /// A convolution of so many images of so many channels into so many others, and of this side, by windows of this side.
    Convolution([usize; 4], usize),
    /// The greatest elements of windows of two by two of `[n, c, side, side]`.
    Pooling([usize; 3]),
    /// A sum of `[n, c, side, side]`.
    Added([usize; 3]),
    /// Attention of `[heads, queries, width]` to as many keys.
    Attention([usize; 3]),
    /// A convolution of `[n, c, side, side]`, each channel by itself, by windows of this side.
    Depthwise([usize; 3], usize),
    /// So many lines of so many elements, sorted.
    Sorted([usize; 2], DType),
}

/// The parameters of a device, each named by its index in [`parameters`](Self::parameters).
pub(crate) trait Tuning {
    /// All of them, as they are now.
    fn parameters(&self) -> Vec<Parameter>;
    /// Changes one, for this process.
    fn set(&self, parameter: usize, value: usize);
    /// What its choices are timed with.
    fn workload(&self, parameter: usize) -> Workload;
    /// Sizes around the edges that it makes with its present value.
    fn edges(&self, parameter: usize) -> Vec<Workload>;
    /// How much is tried in ordinary work.
    fn level(&self) -> Level;
    /// Changes that, for this process.
    fn set_level(&self, level: Level);
    /// What was chosen for kernels and classes of sizes.
    fn choices(&self) -> Vec<Choice>;
    /// Whether that is used from now on, in this process; gives whether it was.
    fn use_choices(&self, on: bool) -> bool;
    /// Forgets it, in this process.
    fn forget_choices(&self);
    /// How many choices are begun and not made.
    fn on_trial(&self) -> usize;
    /// Ordinary work of many sizes, whose kernels have the parameters.
    fn ordinary(&self) -> Vec<Workload>;
    /// Keeps all values for other processes; gives the file, unless there is no cache of programs.
    fn save(&self) -> io::Result<Option<PathBuf>>;
}
