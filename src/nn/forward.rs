//! Modules with several inputs, or with a recurrent state.

use super::{AveragedModel, Gru, GruCell, Lstm, LstmCell, Module, MultiheadAttention, Rnn, RnnCell};
use crate::{Result, Tensor};

/// A module whose inputs are not a single tensor, such as a tuple of tensors, or an input with a recurrent state (returned with the
/// output). Such a module does not implement [`Module::forward`], but is saved, trained and nested like other modules.
///
/// ```
/// use claystone::nn::{Forward, Linear, Module};
/// use claystone::{Device, Result, Tensor};
///
/// /// How well pictures and texts go together.
/// struct TwoTowers {
///     image: Linear,
///     text: Linear,
/// }
///
/// impl Module for TwoTowers {
///     claystone::parts!(image, text);
/// }
///
/// impl Forward<(&Tensor, &Tensor)> for TwoTowers {
///     type Output = Tensor;
///     fn call(&self, (images, texts): (&Tensor, &Tensor)) -> Result<Tensor> {
///         self.image.forward(images)?.matmul(&self.text.forward(texts)?.t()?)
///     }
/// }
///
/// let (image, text) = (Linear::new(6, 4, Device::Cpu)?, Linear::new(3, 4, Device::Cpu)?);
/// let net = TwoTowers { image, text };
/// let (images, texts) = (Tensor::zeros([5, 6], Device::Cpu)?, Tensor::zeros([2, 3], Device::Cpu)?);
/// assert_eq!(net.call((&images, &texts))?.shape().dims(), [5, 2]);
/// assert_eq!(net.parameters().len(), 4);
/// let error = net.forward(&images).unwrap_err().to_string();
/// assert_eq!(error, "TwoTowers: the module is not a function of one tensor: use Forward::call, or the module's own method");
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Forward<Inputs>: Module {
    /// The type of the result.
    type Output;

    /// Computes the result. The operations are recorded if parameters or inputs require gradients. Fails as the
    /// operations inside do: for incompatible shapes, dtypes or devices, or too little memory.
    fn call(&self, inputs: Inputs) -> Result<Self::Output>;
}

/// Takes queries, keys and values, without masks. Call [`MultiheadAttention::attend`] to pass masks.
impl Forward<(&Tensor, &Tensor, &Tensor)> for MultiheadAttention {
    type Output = Tensor;

    #[track_caller]
    fn call(&self, (query, key, value): (&Tensor, &Tensor, &Tensor)) -> Result<Tensor> {
        Ok(self.attend(query, key, value, Default::default())?.0)
    }
}

impl<Inputs, M: Forward<Inputs>> Forward<Inputs> for AveragedModel<M> {
    type Output = M::Output;

    #[track_caller]
    fn call(&self, inputs: Inputs) -> Result<M::Output> {
        self.module().call(inputs)
    }
}

macro_rules! impl_recurrent_forward {
    ($($name:ident: $state:ty => $output:ty;)*) => { $(
        /// Takes the input and the initial state. A state of `None` is all zeros.
        impl Forward<(&Tensor, Option<&$state>)> for $name {
            type Output = $output;

            #[track_caller]
            fn call(&self, (x, state): (&Tensor, Option<&$state>)) -> Result<$output> {
                self.run(x, state)
            }
        }
    )* };
}

impl_recurrent_forward! {
    Rnn: Tensor => (Tensor, Tensor);
    Lstm: (Tensor, Tensor) => (Tensor, (Tensor, Tensor));
    Gru: Tensor => (Tensor, Tensor);
    RnnCell: Tensor => Tensor;
    LstmCell: (Tensor, Tensor) => (Tensor, Tensor);
    GruCell: Tensor => Tensor;
}
