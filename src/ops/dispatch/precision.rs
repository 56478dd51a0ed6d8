//! One setting that trades accuracy for speed: [`with_precision`].

use crate::backend::problem::precision::with_matmul_precision;
use crate::{DType, autocast};

/// A trade-off between accuracy and speed; the modes are the same as in MNN's backends. See [`with_precision`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Matrix products take and return BF16, which needs half the memory of f32, as in [`autocast`] with [`DType::BF16`]. BF16 has the
    /// range of f32, so training needs no [`GradScaler`](crate::optim::GradScaler). Products that stay in f32 behave as in
    /// [`Normal`](Self::Normal).
    Low,
    /// Tensors keep their dtypes. If tensor cores make it faster, f32 products are computed with 16 bits of precision. Equals
    /// [`set_float32_matmul_precision`](crate::set_float32_matmul_precision) with `"high"`.
    Normal,
    /// Every operation is as accurate as its dtype allows: without autocast, and with matmul precision `"highest"`. The default.
    #[default]
    High,
}

/// Runs `f` with the given precision on the current thread. The precision overrides [`autocast`] and
/// [`set_float32_matmul_precision`](crate::set_float32_matmul_precision). Scopes nest. `backward` computes in the dtypes of the forward
/// pass, with the matmul precision that is set where `backward` is called.
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
