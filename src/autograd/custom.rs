//! Operations that users define with a forward and a backward function.

use std::sync::Arc;

use smallvec::SmallVec;

use super::record::{is_tracked, record, record_differentiable};
use super::{Context, Gradients, Saved, no_grad};
use crate::{Result, Tensor};

/// An operation with its own backward function (PyTorch's `torch.autograd.Function`). Both functions may compose other
/// operations, compute on the host, or run a [`Kernel`](crate::Kernel). [`Tensor::apply_op`] runs the operation.
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
    /// Returns the operation's name, for error messages.
    fn name(&self) -> &'static str;

    /// Computes the result. Operations inside this function are not recorded. Save the tensors that backward needs in
    /// `ctx`. [`Tensor::apply_op`] returns the errors to its caller.
    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor>;

    /// Computes the gradient of each input from `grad`, the gradient of the result. None for an input without a
    /// gradient. Runs once per pass. The backward pass returns the errors to its caller.
    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>>;

    /// True if `backward` applies only recorded operations, to the gradient, saved inputs and saved results. Gradients of
    /// gradients can then be computed. If false, `create_graph` fails at this operation.
    fn differentiable_twice(&self) -> bool {
        false
    }
}

/// Data that [`CustomOp::forward`] passes to [`CustomOp::backward`].
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
    /// Saves tensors for backward, after any tensors saved before (PyTorch's `save_for_backward`). They can be inputs, the
    /// result, or any other tensors. If a saved tensor is changed in place before backward, backward fails.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        self.saved.extend(tensors.iter().map(|t| (Saved::without_hooks(t), false)));
    }

    /// Returns the saved tensors in the order in which they were saved (PyTorch's `saved_tensors`). Fails with
    /// [`crate::Error::Autograd`] if a tensor was changed in place since it was saved.
    pub fn saved_tensors(&self) -> Result<Vec<Tensor>> {
        let get = |(saved, is_result): &(Saved, bool)| match &self.result {
            Some(result) if *is_result => Ok(result.shallow_clone()),
            _ => saved.unpack(self.name),
        };
        self.saved.iter().map(get).collect()
    }

    /// In backward, returns a part of an optimiser's gradient buffer, with the shape, dtype and device of input `i`. To avoid
    /// a copy, compute the gradient there, for instance with [`ops::call_into`](crate::ops::call_into), and return it.
    /// Returns None if there is no such buffer, in forward, and in a backward pass with `create_graph`.
    pub fn grad_slot(&self, i: usize) -> Option<Tensor> {
        self.slots.get(i)?.as_ref().map(Tensor::shallow_clone)
    }

    /// True if the gradient of input `i` is needed (PyTorch's `needs_input_grad`).
    pub fn needs_input_grad(&self, i: usize) -> bool {
        self.needs.get(i).copied().unwrap_or(false)
    }
}

impl Tensor {
    /// Runs an operation that implements [`CustomOp`]. Fails as [`CustomOp::forward`] does.
    pub fn apply_op(custom: impl CustomOp, inputs: &[&Tensor]) -> Result<Tensor> {
        let name = custom.name();
        let tracked = is_tracked(inputs);
        let needs = inputs.iter().map(|t| tracked && t.requires_grad()).collect();
        let mut kept = OpContext { name, needs, ..Default::default() };
        let out = no_grad(|| custom.forward(&mut kept, inputs))?;
        if !tracked || !out.dtype.is_float() {
            return Ok(out.detach());
        }
        // The result is copied if forward returned an input or a view of one: otherwise the input's own node would be lost.
        let out = if inputs.iter().any(|t| t.shares_storage(&out)) { out.deep_copy(true)? } else { out.detach() };
        for (saved, is_result) in &mut kept.saved {
            *is_result = saved.is_same_tensor(&out);
            saved.pack();
        }
        let twice = custom.differentiable_twice();
        let shapes: Vec<_> = inputs.iter().map(|t| (t.shape().clone(), t.dtype, t.device())).collect();
        let (custom, kept) = (Arc::new(custom), Arc::new(kept));
        let backward = move |ctx: &mut Context| -> Result<Gradients> {
            let result = kept.saved.iter().find(|(_, is_result)| *is_result && ctx.create_graph());
            let again = OpContext {
                saved: kept.saved.iter().map(|(saved, is_result)| (saved.another_handle(), *is_result)).collect(),
                needs: (0..ctx.num_inputs()).map(|i| ctx.needs_gradient(i)).collect(),
                slots: (0..ctx.num_inputs()).map(|i| ctx.slot(i)).collect(),
                name,
                result: result.map(|(saved, _)| ctx.unpack_result(saved)).transpose()?,
            };
            let gradients: Gradients = custom.backward(&again, &ctx.grad()?)?.into_iter().collect();
            no_gradient!(name if gradients.len() != shapes.len(),
                "its backward gave {} gradients for {} inputs", gradients.len(), shapes.len());
            for (i, (gradient, (shape, dtype, device))) in gradients.iter().zip(&shapes).enumerate() {
                let other = |g: &&Tensor| (g.shape(), g.dtype, g.device()) != (shape, *dtype, *device);
                no_gradient!(name if let Some(g) = gradient.as_ref().filter(other),
                    "its backward gave input {i}, of shape {shape} and {dtype} on {device}, a gradient of shape {} and {} on {}",
                    g.shape(), g.dtype, g.device());
            }
            Ok(gradients)
        };
        Ok(if twice { record_differentiable(name, out, inputs, backward) } else { record(name, out, inputs, backward) })
    }
}
