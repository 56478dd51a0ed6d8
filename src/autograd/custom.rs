//! Users' own operations: a forward and a backward function in any code.

use std::sync::Arc;

use smallvec::SmallVec;

use super::record::{is_tracked, record, record_differentiable};
use super::{Context, Gradients, Saved, no_grad};
use crate::{Error, Result, Tensor};

/// An operation with its own backward function (PyTorch's `torch.autograd.Function`): a composition of other
/// operations, host code, or a [`Kernel`](crate::Kernel). [`Tensor::apply_op`] runs it.
///
/// ```
/// use claystone::autograd::{CustomOp, OpContext};
/// use claystone::{Device, Result, Tensor};
///
/// /// Rounds, and lets the gradient through as if it did not.
/// struct StraightThrough;
///
/// impl CustomOp for StraightThrough {
///     fn name(&self) -> &'static str {
///         "straight_through"
///     }
///
///     fn forward(&self, _: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
///         inputs[0].round()
///     }
///
///     fn backward(&self, _: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
///         Ok(vec![Some(grad.shallow_clone())])
///     }
/// }
///
/// let x = Tensor::from_slice(&[0.2f32, 1.7], 2, Device::Cpu)?.requires_grad_(true)?;
/// let y = Tensor::apply_op(StraightThrough, &[&x])?;
/// assert_eq!(y.to_vec::<f32>()?, [0.0, 2.0]);
/// y.sum((), false)?.backward()?;
/// assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [1.0, 1.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait CustomOp: Send + Sync + 'static {
    /// Returns the operation's name for messages.
    fn name(&self) -> &'static str;

    /// Computes the result. Operations inside are not recorded. Store in `ctx` the tensors that backward needs.
    ///
    /// # Errors
    /// Any errors, which [`Tensor::apply_op`] returns.
    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor>;

    /// Computes each input's gradient, or None if there is none, from the gradient of the result. Called once in every backward pass.
    ///
    /// # Errors
    /// Any errors, which the backward pass returns.
    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>>;

    /// True if `backward` uses only recorded operations, on the gradient and on saved inputs and results, so that
    /// gradients of gradients can be computed. Otherwise `create_graph` fails at this operation.
    fn differentiable_twice(&self) -> bool {
        false
    }
}

/// Data passed from forward to backward.
#[derive(Default)]
pub struct OpContext {
    /// Saved tensors, and whether each is the operation's result.
    saved: Vec<(Saved, bool)>,
    needs: SmallVec<[bool; 3]>,
    slots: Gradients,
    name: &'static str,
    /// The operation's result with its node, in a backward pass that creates a graph.
    result: Option<Tensor>,
}

impl OpContext {
    /// Saves tensors for backward, after those saved before (PyTorch's `save_for_backward`). They may be inputs, the
    /// result, or any other tensors. Changing a saved tensor in place before backward is an error there.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        self.saved.extend(tensors.iter().map(|t| (Saved::new(t), false)));
    }

    /// Returns the saved tensors in order (PyTorch's `saved_tensors`).
    ///
    /// # Errors
    /// [`Error::Autograd`] if a tensor was changed in place since it was saved.
    pub fn saved_tensors(&self) -> Result<Vec<Tensor>> {
        let get = |(saved, is_result): &(Saved, bool)| match &self.result {
            Some(result) if *is_result => Ok(result.shallow_clone()),
            _ => saved.unpack(self.name),
        };
        self.saved.iter().map(get).collect()
    }

    /// In backward, returns memory of the shape, dtype and device of input `i`, which is a part of an optimiser's
    /// buffer. Compute the gradient there, for instance with [`ops::call_into`](crate::ops::call_into), and return it,
    /// to save a copy. None if there is no such memory, in forward, and if a graph is created.
    pub fn grad_slot(&self, i: usize) -> Option<Tensor> {
        self.slots.get(i)?.as_ref().map(Tensor::shallow_clone)
    }

    /// True if the gradient of input `i` is wanted (PyTorch's `needs_input_grad`).
    pub fn needs_input_grad(&self, i: usize) -> bool {
        self.needs.get(i).copied().unwrap_or(false)
    }
}

impl Tensor {
    /// Runs your own operation: see [`CustomOp`].
    ///
    /// # Errors
    /// Errors of its forward function.
    pub fn apply_op(custom: impl CustomOp, inputs: &[&Tensor]) -> Result<Tensor> {
        let name = custom.name();
        let tracked = is_tracked(inputs);
        let needs = inputs.iter().map(|t| tracked && t.requires_grad()).collect();
        let mut kept = OpContext { name, needs, ..Default::default() };
        let out = no_grad(|| custom.forward(&mut kept, inputs))?;
        if !tracked || !out.dtype.is_float() {
            return Ok(out.detach());
        }
        // An input that forward returns, or a view of one, would lose its own node.
        let out = match inputs.iter().any(|t| t.shares_storage(&out)) {
            true => out.deep_copy(true)?,
            false => out.detach(),
        };
        for (saved, is_result) in &mut kept.saved {
            *is_result = saved.is_same_tensor(&out);
        }
        let twice = custom.differentiable_twice();
        let shapes: Vec<_> = inputs.iter().map(|t| (t.shape().clone(), t.dtype, t.device())).collect();
        let (custom, kept) = (Arc::new(custom), Arc::new(kept));
        let result = kept.saved.iter().any(|(_, is_result)| *is_result).then(|| Saved::new(&out));
        let backward = move |ctx: &mut Context| -> Result<Gradients> {
            let again = OpContext {
                saved: kept.saved.iter().map(|(saved, is_result)| (saved.another_handle(), *is_result)).collect(),
                needs: (0..ctx.num_inputs()).map(|i| ctx.needs_gradient(i)).collect(),
                slots: (0..ctx.num_inputs()).map(|i| ctx.slot(i)).collect(),
                name,
                result: result.as_ref().filter(|_| ctx.create_graph()).map(|r| ctx.unpack_result(r)).transpose()?,
            };
            let gradients: Gradients = custom.backward(&again, &ctx.grad()?)?.into_iter().collect();
            if gradients.len() != shapes.len() {
                let reason = format!("its backward gave {} gradients for {} inputs", gradients.len(), shapes.len());
                return Err(Error::Autograd { op: name, reason });
            }
            for (i, (gradient, (shape, dtype, device))) in gradients.iter().zip(&shapes).enumerate() {
                let other = |g: &&Tensor| (g.shape(), g.dtype, g.device()) != (shape, *dtype, *device);
                if let Some(g) = gradient.as_ref().filter(other) {
                    let reason = format!(
                        "its backward gave input {i}, of shape {shape} and {dtype} on {device}, a gradient of shape {} and {} on {}",
                        g.shape(),
                        g.dtype,
                        g.device()
                    );
                    return Err(Error::Autograd { op: name, reason });
                }
            }
            Ok(gradients)
        };
        Ok(match twice {
            true => record_differentiable(name, out, inputs, backward),
            false => record(name, out, inputs, backward),
        })
    }
}
