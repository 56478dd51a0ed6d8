//! Operations of the user's: a forward and a backward of any code.

use std::sync::Arc;

use smallvec::SmallVec;

use super::record::{is_tracked, record, record_twice};
use super::{Context, Gradients, Saved, no_grad};
use crate::{Error, Result, Tensor};

/// An operation with its own backward (PyTorch's `torch.autograd.Function`): a closure over other operations, host code,
/// or a [`Kernel`](crate::Kernel). [`Tensor::apply_op`] runs it.
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
    /// What messages call it.
    fn name(&self) -> &'static str;

    /// The result. Nothing inside is recorded. What backward will need goes into `ctx`.
    ///
    /// # Errors
    /// Whatever goes wrong; the caller of [`Tensor::apply_op`] gets it.
    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor>;

    /// For each input its gradient, from the gradient of the result; None where none flows. Called once in every
    /// backward.
    ///
    /// # Errors
    /// Whatever goes wrong; the caller of backward gets it.
    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>>;

    /// Whether backward is made of recorded operations only, on the gradient and on saved inputs and results, so that
    /// gradients of gradients can be computed. Without it `create_graph` stops here with an error.
    fn differentiable_twice(&self) -> bool {
        false
    }
}

/// What forward leaves for backward.
#[derive(Default)]
pub struct OpContext {
    saved: Vec<(Saved, bool)>,
    needs: SmallVec<[bool; 3]>,
    slots: Gradients,
    name: &'static str,
    /// In a backward that creates a graph the operation's result is saved with its place in it.
    result: Option<Tensor>,
}

impl OpContext {
    /// Keeps tensors for backward, after those kept already (PyTorch's `save_for_backward`): inputs, the result, or
    /// anything else. One that is changed in place before backward is an error there.
    pub fn save_for_backward(&mut self, tensors: &[&Tensor]) {
        self.saved.extend(tensors.iter().map(|t| (Saved::new(t), false)));
    }

    /// What was kept, in that order (PyTorch's `saved_tensors`).
    ///
    /// # Errors
    /// [`Error::Autograd`] where one was changed in place since.
    pub fn saved_tensors(&self) -> Result<Vec<Tensor>> {
        let get = |(saved, is_result): &(Saved, bool)| match &self.result {
            Some(result) if *is_result => Ok(result.shallow_clone()),
            _ => saved.unpack(self.name),
        };
        self.saved.iter().map(get).collect()
    }

    /// In backward: memory of the shape, dtype and device of input `i`, in which its gradient is best computed, and returned:
    /// a part of an optimiser's buffer, for which the gradient is copied otherwise. [`ops::call_into`](crate::ops::call_into)
    /// computes into it. None where there is none, in forward, and where a graph is created.
    pub fn grad_slot(&self, i: usize) -> Option<Tensor> {
        self.slots.get(i)?.as_ref().map(Tensor::shallow_clone)
    }

    /// Whether the gradient of input `i` is wanted (PyTorch's `needs_input_grad`).
    pub fn needs_input_grad(&self, i: usize) -> bool {
        self.needs.get(i).copied().unwrap_or(false)
    }
}

impl Tensor {
    /// An operation of your own: see [`CustomOp`].
    ///
    /// # Errors
    /// Those of its forward.
    pub fn apply_op(custom: impl CustomOp, inputs: &[&Tensor]) -> Result<Tensor> {
        let name = custom.name();
        let tracked = is_tracked(inputs);
        let needs = inputs.iter().map(|t| tracked && t.requires_grad()).collect();
        let mut kept = OpContext { name, needs, ..Default::default() };
        let out = no_grad(|| custom.forward(&mut kept, inputs))?;
        if !tracked || !out.dtype.is_float() {
            return Ok(out.detach());
        }
        // An input handed through, or a view of one, would lose its own place in the graph.
        let out = match inputs.iter().any(|t| t.shares_storage(&out)) {
            true => out.copied(true)?,
            false => out.detach(),
        };
        for (saved, is_result) in &mut kept.saved {
            *is_result = saved.is(&out);
        }
        let twice = custom.differentiable_twice();
        let shapes: Vec<_> = inputs.iter().map(|t| (t.shape().clone(), t.dtype, t.device())).collect();
        let (custom, kept) = (Arc::new(custom), Arc::new(kept));
        let result = kept.saved.iter().any(|(_, is_result)| *is_result).then(|| Saved::new(&out));
        let backward = move |ctx: &mut Context| -> Result<Gradients> {
            let again = OpContext {
                saved: kept.saved.iter().map(|(saved, is_result)| (saved.share(), *is_result)).collect(),
                needs: (0..ctx.inputs()).map(|i| ctx.needs(i)).collect(),
                slots: (0..ctx.inputs()).map(|i| ctx.slot(i)).collect(),
                name,
                result: result.as_ref().filter(|_| ctx.create_graph()).map(|r| ctx.result(r)).transpose()?,
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
            true => record_twice(name, out, inputs, backward),
            false => record(name, out, inputs, backward),
        })
    }
}
