//! One setting for how exact operations are: [`with_precision`].

use crate::backend::problem::precision::with_matmul_precision;
use crate::{DType, autocast};

/// How exact operations are, and how fast: the modes of MNN's backends. See [`with_precision`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Products take and give BF16, half the memory of f32: [`autocast`] with [`DType::BF16`]. As BF16 has the range of f32,
    /// training needs no [`GradScaler`](crate::optim::GradScaler). What stays in f32 is as with [`Normal`](Self::Normal).
    Low,
    /// Tensors keep their dtypes. Products of f32 are exact to 16 bits where that is faster, on tensor cores:
    /// [`set_float32_matmul_precision`](crate::set_float32_matmul_precision) with `"high"`.
    Normal,
    /// Everything as exact as its dtype: no autocast, and `"highest"`. The default where nothing else is set.
    #[default]
    High,
}

/// Runs `f` with this precision on this thread, in place of what [`autocast`] and
/// [`set_float32_matmul_precision`](crate::set_float32_matmul_precision) have set. Scopes nest; `backward` works in the dtypes
/// of forward, with the products' precision where it is called.
///
/// ```
/// use claystone::{DType, Device, Precision, Tensor, with_precision};
/// let x = Tensor::ones(&[2, 3], Device::Cpu)?;
/// let product = |precision| with_precision(precision, || x.matmul(&x.t()?));
/// assert_eq!(product(Precision::Low)?.dtype(), DType::BF16);
/// assert_eq!(product(Precision::Normal)?.dtype(), DType::F32);
/// assert_eq!(product(Precision::High)?.to_vec::<f32>()?, [3.0; 4]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn with_precision<R>(precision: Precision, f: impl FnOnce() -> R) -> R {
    let (highest, dtype) = match precision {
        Precision::Low => (false, Some(DType::BF16)),
        Precision::Normal => (false, None),
        Precision::High => (true, None),
    };
    with_matmul_precision(highest, || autocast(dtype, f))
}
