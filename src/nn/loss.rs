//! Losses that are a formula and a mean.

use crate::{Error, Result, Tensor, ops::Expr};

impl Tensor {
    /// The mean of `(self - target)^2` over all elements, a scalar (PyTorch's `mse_loss`). Two launches. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let y = Tensor::from_slice(&[1f32, 2.0], 2, Device::Cpu)?;
    /// let t = Tensor::from_slice(&[0f32, 4.0], 2, Device::Cpu)?;
    /// assert_eq!(y.mse_loss(&t)?.item::<f32>()?, 2.5);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] for different shapes (nothing is broadcast), and mismatching dtypes or devices.
    pub fn mse_loss(&self, target: &Tensor) -> Result<Tensor> {
        self.mean_of("mse_loss", target, |d| d * d)
    }

    /// The mean of `|self - target|` over all elements, a scalar (PyTorch's `l1_loss`). Two launches. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    pub fn l1_loss(&self, target: &Tensor) -> Result<Tensor> {
        self.mean_of("l1_loss", target, |d| d.abs())
    }

    fn mean_of(&self, op: &'static str, target: &Tensor, f: impl FnOnce(&Expr) -> Expr) -> Result<Tensor> {
        if self.shape() != target.shape() {
            let hint = "prediction and target have one shape";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: target.shape().clone(), hint });
        }
        let losses = Tensor::map(&[self, target], |e| f(&(&e[0] - &e[1])));
        losses.and_then(|l| l.mean((), false)).map_err(|e| e.of(op))
    }
}
