//! Convolutional layers.

use super::{Module, init};
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{ConvOptions, ConvTransposeOptions, Result, Tensor};

macro_rules! conv_layers {
    ($($(#[$doc:meta])* $name:ident, $dims:literal, $options:ident, $method:ident, $transposed:literal;)*) => { $(
        $(#[$doc])*
        pub struct $name {
            weight: Tensor,
            bias: Option<Tensor>,
            options: $options<$dims>,
        }

        impl $name {
            /// Creates a layer with a bias, from `inputs` to `outputs` channels. Weight and bias are drawn uniformly from ±1/√n, where n is
            /// the number of elements of a filter, as in PyTorch. Fails with [`crate::Error::Invalid`] if the number of groups does not
            /// divide both channel counts.
            #[track_caller]
            pub fn new(
                inputs: usize,
                outputs: usize,
                kernel: [usize; $dims],
                options: $options<$dims>,
                tensors: impl Into<TensorOptions>,
            ) -> Result<$name> {
                let _caller = Caller::enter();
                let (groups, tensors) = (options.groups, tensors.into());
                let op = concat!(stringify!($name), "::new");
                invalid!(op if groups == 0 || inputs % groups != 0 || outputs % groups != 0,
                    "{groups} groups do not divide {inputs} and {outputs} channels evenly");
                let first = if $transposed { [inputs, outputs / groups] } else { [outputs, inputs / groups] };
                let shape: Vec<usize> = first.into_iter().chain(kernel).collect();
                let fan = crate::Shape::from(&shape[1..]).numel();
                let weight = init::default_parameter(&shape, fan, tensors)?;
                Ok($name { weight, bias: Some(init::default_parameter(&[outputs], fan, tensors)?), options })
            }

            /// Removes the bias.
            pub fn without_bias(self) -> $name {
                $name { bias: None, ..self }
            }

            /// Returns the weight, in the shape given for the layer.
            pub fn weight(&self) -> &Tensor {
                &self.weight
            }

            /// Returns the bias, `[outputs]`; `None` without a bias.
            pub fn bias(&self) -> Option<&Tensor> {
                self.bias.as_ref()
            }
        }

        impl Module for $name {
            crate::parts!(weight, bias);

            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                x.$method(&self.weight, self.bias.as_ref(), self.options)
            }
        }
    )* };
}

conv_layers! {
    /// Applies [`Tensor::conv1d`] with a weight `[outputs, inputs / groups, kernel]` (PyTorch's `nn.Conv1d`).
    Conv1d, 1, ConvOptions, conv1d, false;
    /// Applies [`Tensor::conv2d`] with a weight `[outputs, inputs / groups, rows, columns]` (PyTorch's `nn.Conv2d`).
    ///
    /// ```
    /// use claystone::{ConvOptions, Device, Tensor, nn::{Conv2d, Module}};
    /// let options = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
    /// let conv = Conv2d::new(3, 8, [3, 3], options, Device::Cpu)?;
    /// assert_eq!(conv.forward(&Tensor::ones(&[2, 3, 5, 5], Device::Cpu)?)?.shape().dims(), [2, 8, 5, 5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    Conv2d, 2, ConvOptions, conv2d, false;
    /// Applies [`Tensor::conv3d`] with a weight `[outputs, inputs / groups, slices, rows, columns]` (PyTorch's `nn.Conv3d`).
    ///
    /// ```
    /// use claystone::{ConvOptions, Device, Tensor, nn::{Conv3d, Module}};
    /// let conv = Conv3d::new(2, 4, [3, 3, 3], ConvOptions { padding: 1.into(), ..ConvOptions::default() }, Device::Cpu)?;
    /// assert_eq!(conv.forward(&Tensor::ones(&[1, 2, 4, 5, 6], Device::Cpu)?)?.shape().dims(), [1, 4, 4, 5, 6]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    Conv3d, 3, ConvOptions, conv3d, false;
    /// Applies [`Tensor::conv_transpose1d`] with a weight `[inputs, outputs / groups, kernel]` (PyTorch's `nn.ConvTranspose1d`).
    ConvTranspose1d, 1, ConvTransposeOptions, conv_transpose1d, true;
    /// Applies [`Tensor::conv_transpose2d`] with a weight `[inputs, outputs / groups, rows, columns]` (PyTorch's `nn.ConvTranspose2d`).
    ConvTranspose2d, 2, ConvTransposeOptions, conv_transpose2d, true;
    /// Applies [`Tensor::conv_transpose3d`] with a weight `[inputs, outputs / groups, slices, rows, columns]` (PyTorch's `nn.ConvTranspose3d`).
    ConvTranspose3d, 3, ConvTransposeOptions, conv_transpose3d, true;
}
