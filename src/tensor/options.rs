//! The dtype and device of a new tensor.

use crate::layout::shape::impl_from;
use crate::{DType, Device, Tensor, get_default_dtype};

/// The dtype and device of a new tensor. Methods that create tensors take `impl Into<TensorOptions>`: a device, a pair of a dtype and a
/// device, or a tensor whose dtype and device are used. The default dtype is f32, unless [`set_default_dtype`](crate::set_default_dtype)
/// sets another dtype.
///
/// ```
/// use claystone::{DType, Device, Tensor, TensorOptions};
/// let a = Tensor::zeros(&[2], Device::Cpu)?;
/// assert_eq!(a.dtype(), DType::F32);
/// let b = Tensor::ones(&[2], (DType::F16, Device::Cpu))?;
/// assert_eq!(TensorOptions::from(&b), TensorOptions { dtype: DType::F16, device: Device::Cpu });
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TensorOptions {
    /// The element type.
    pub dtype: DType,
    /// The device that holds the elements.
    pub device: Device,
}

impl_from! { TensorOptions:
    [] Device, device => TensorOptions { dtype: get_default_dtype(), device };
    [] (DType, Device), (dtype, device) => TensorOptions { dtype, device };
    [] &Tensor, tensor => TensorOptions { dtype: tensor.dtype(), device: tensor.device() };
}
