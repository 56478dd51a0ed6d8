//! Cross-entropy of logits and labels.

use crate::{DType, Result, Tensor};

/// How the losses of the rows are reduced (PyTorch's `reduction`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum LossReduction {
    /// The mean over rows that are not ignored.
    #[default]
    Mean,
    /// The sum over all rows.
    Sum,
    /// The sum divided by the batch size (the first dim). For [`Tensor::kl_div`] this is the mathematical mean (PyTorch's `batchmean`).
    BatchMean,
    /// No reduction: one loss for each row.
    None,
}

/// How [`Tensor::cross_entropy_with`] computes its loss.
///
/// ```
/// use claystone::{CrossEntropy, Device, LossReduction, Tensor};
/// let options = CrossEntropy { reduction: LossReduction::Sum, ..CrossEntropy::default() };
/// let labels = Tensor::from_slice(&[1i64, -100], 2, Device::Cpu)?;
/// let loss = Tensor::zeros(&[2, 4], Device::Cpu)?.cross_entropy_with(&labels, options)?;
/// assert!((loss.item::<f32>()? - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct CrossEntropy<'a> {
    /// How the losses of the rows are reduced.
    pub reduction: LossReduction,
    /// Rows with this label have loss and gradient 0 and do not count in the mean. The default is -100, as in PyTorch.
    pub ignore_index: i64,
    /// The fraction of the probability that is taken from each label and spread evenly over all classes, in `0..=1`.
    pub label_smoothing: f64,
    /// A weight for each class: `[C]`, in the dtype of the logits. `None` weights all classes equally.
    pub weight: Option<&'a Tensor>,
}

impl Default for CrossEntropy<'_> {
    fn default() -> Self {
        CrossEntropy { reduction: LossReduction::Mean, ignore_index: -100, label_smoothing: 0.0, weight: None }
    }
}

/// Cross-entropy of logits `[N, C]` and class labels `[N]`, without class weights or smoothing.
pub(crate) struct LabelEntropy<'a> {
    pub(crate) logits: &'a Tensor,
    pub(crate) labels: &'a Tensor,
    pub(crate) options: CrossEntropy<'a>,
    /// The dtype of the losses.
    pub(crate) dtype: DType,
    /// Receives the gradient of the logits; `None` if no gradient is needed.
    pub(crate) grad: Option<&'a Tensor>,
    /// Counts the labels that are not ignored, in a launch on the device.
    pub(crate) count: &'a dyn Fn() -> Result<Tensor>,
}
