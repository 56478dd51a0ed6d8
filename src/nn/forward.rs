//! Modules of several inputs, and of a state.

use super::{AveragedModel, Gru, GruCell, Lstm, LstmCell, Module, MultiheadAttention, Rnn, RnnCell};
use crate::{Result, Tensor};

/// A module as a function of other inputs than one tensor: of a tuple of tensors, or of an input and a state, which it gives back
/// beside its output. Such a module leaves [`Module::forward`] out, and is still saved, trained and nested by its parts.
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
/// assert_eq!(error, "TwoTowers: it is no function of one tensor: use Forward::call, or a method of its own");
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Forward<Inputs>: Module {
    /// What it gives.
    type Output;

    /// The result for these inputs; recorded where parameters or inputs require gradients.
    ///
    /// # Errors
    /// Those of the operations inside: shapes, dtypes and devices that do not go together, memory.
    fn call(&self, inputs: Inputs) -> Result<Self::Output>;
}

/// Queries, keys and values, without masks: [`MultiheadAttention::attend`] takes these too.
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

macro_rules! recurrent {
    ($($name:ident: $state:ty => $output:ty;)*) => { $(
        /// The input and the state to start from, or zeros.
        impl Forward<(&Tensor, Option<&$state>)> for $name {
            type Output = $output;

            #[track_caller]
            fn call(&self, (x, state): (&Tensor, Option<&$state>)) -> Result<$output> {
                self.run(x, state)
            }
        }
    )* };
}

recurrent! {
    Rnn: Tensor => (Tensor, Tensor);
    Lstm: (Tensor, Tensor) => (Tensor, (Tensor, Tensor));
    Gru: Tensor => (Tensor, Tensor);
    RnnCell: Tensor => Tensor;
    LstmCell: (Tensor, Tensor) => (Tensor, Tensor);
    GruCell: Tensor => Tensor;
}
