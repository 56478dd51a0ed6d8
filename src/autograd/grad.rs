//! The functions that start a backward pass: [`Tensor::backward`], its variants, and [`grad`].

use std::sync::Arc;

use super::context::{Engine, Gradient, WantedNodes};
use super::node::Node;
use crate::storage::Caller;
use crate::{Result, Tensor};

/// Options of [`Tensor::backward_with_options`].
#[derive(Clone, Copy, Default)]
pub struct BackwardOptions<'a> {
    /// The gradient of the final value with respect to the tensor, in the tensor's shape, dtype and device. `None` means a
    /// gradient of 1, and requires a tensor of one element.
    pub gradient: Option<&'a Tensor>,
    /// Whether to keep the graph, with the tensors it saved, for another backward pass. If false, backward frees saved tensors as it runs.
    pub retain_graph: bool,
    /// Whether to record the backward pass itself, so that gradients of gradients can be computed. This also keeps the
    /// graph. [`Tensor::grad`] of a leaf and the graph then keep each other alive: call [`Tensor::zero_grad`] to free them,
    /// or use [`grad_with_options`], which stores no gradients in leaves.
    pub create_graph: bool,
}

/// Options of [`grad_with_options`].
#[derive(Clone, Copy, Default)]
pub struct GradOptions<'a> {
    /// The gradient of the final value with respect to each output. If empty, all gradients are 1, and each output must have one element.
    pub grad_outputs: &'a [&'a Tensor],
    /// See [`BackwardOptions::retain_graph`].
    pub retain_graph: bool,
    /// See [`BackwardOptions::create_graph`].
    pub create_graph: bool,
    /// Whether to return None for an input that no output depends on. If false, such an input is an error.
    pub allow_unused: bool,
}

/// Returns the gradients of the sum of `outputs` with respect to `inputs` (PyTorch's `torch.autograd.grad`). Each output has one element.
/// Inputs are leaves or results of operations. [`Tensor::grad`] of leaves does not change. The graph between outputs and inputs is
/// consumed. Fails as [`Tensor::backward`] does, and with [`crate::Error::Autograd`] for an input that requires no gradient or that no
/// output depends on.
///
/// ```
/// use claystone::{Device, Tensor, autograd};
/// let x = Tensor::full(2, 3.0, Device::Cpu)?.requires_grad_(true)?;
/// let y = x.mul(&x)?.sum((), false)?;
/// assert_eq!(autograd::grad(&[&y], &[&x])?[0].to_vec::<f32>()?, [6.0, 6.0]);
/// assert!(x.grad().is_none());
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn grad(outputs: &[&Tensor], inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let gradients = grad_with_options(outputs, inputs, GradOptions::default())?;
    Ok(gradients.into_iter().flatten().collect())
}

/// Returns gradients as [`grad`] does, for outputs of any shape, with options to keep the graph and to differentiate the gradients. Fails
/// as [`grad`] does, if `grad_outputs` does not match `outputs`, and with `create_graph` if an operation's backward is not made of
/// differentiable operations.
///
/// ```
/// use claystone::{Device, Tensor, autograd::{GradOptions, grad, grad_with_options}};
/// let x = Tensor::full((), 2.0, Device::Cpu)?.requires_grad_(true)?;
/// let y = x.mul(&x)?.mul(&x)?;
/// let options = GradOptions { create_graph: true, ..Default::default() };
/// let first = grad_with_options(&[&y], &[&x], options)?.remove(0).unwrap();
/// assert_eq!(first.item::<f32>()?, 12.0); // 3x²
/// assert_eq!(grad(&[&first], &[&x])?[0].item::<f32>()?, 12.0); // 6x
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn grad_with_options(outputs: &[&Tensor], inputs: &[&Tensor], options: GradOptions) -> Result<Vec<Option<Tensor>>> {
    let _caller = Caller::enter();
    let op = "grad";
    let GradOptions { grad_outputs, retain_graph, create_graph, allow_unused } = options;
    invalid!(op if !grad_outputs.is_empty() && grad_outputs.len() != outputs.len(),
        "{} gradients are given for {} outputs", grad_outputs.len(), outputs.len());
    let mut seeds = Vec::with_capacity(outputs.len());
    for (i, output) in outputs.iter().enumerate() {
        // As in PyTorch, constants are allowed among the outputs if at least one output requires a gradient.
        let gradient = seed_gradient(op, output, grad_outputs.get(i).copied(), create_graph)?;
        seeds.extend(output.node().map(|node| (node, gradient)));
    }
    no_gradient!(op if seeds.is_empty(), "{NOT_TRACKED}");
    no_gradient!(op if let Some(i) = inputs.iter().position(|t| !t.requires_grad()),
        "input {i} requires no gradient: call requires_grad_(true) on it before it is used");
    let nodes: Vec<Option<Arc<Node>>> = inputs.iter().map(|t| t.node()).collect();
    let wanted = WantedNodes::new(seeds.iter().map(|(node, _)| node), nodes.iter().flatten());
    let retain_graph = retain_graph || create_graph;
    let engine = Engine { retain_graph, create_graph, wanted: Some(wanted), ..Default::default() };
    let returned = engine.run_pass(seeds)?;
    let take = |(i, node): (usize, &Option<Arc<Node>>)| {
        let gradient = node.as_ref().and_then(|node| returned.get(&node.seq)).map(Tensor::shallow_clone);
        no_gradient!(op if gradient.is_none() && !allow_unused,
            "no output depends on input {i}: leave it out, or set allow_unused");
        Ok(gradient)
    };
    nodes.iter().enumerate().map(take).collect()
}

/// Returns the gradient of `output` from which a backward pass starts.
fn seed_gradient(op: &'static str, output: &Tensor, gradient: Option<&Tensor>, create_graph: bool) -> Result<Gradient> {
    let Some(gradient) = gradient else {
        invalid!(op if output.numel() != 1,
            "backward without a gradient needs a tensor of one element, and this one has shape {}: reduce it with sum() or \
             mean(), or pass a gradient to backward_with()", output.shape());
        return Ok(Gradient::ones(output));
    };
    output.check_like(op, gradient, "the gradient has the shape of the tensor")?;
    Ok(if create_graph { gradient.shallow_clone() } else { gradient.detach() }.into())
}

/// The error message for a tensor that does not depend on any leaf that requires a gradient.
const NOT_TRACKED: &str = "no tensor it was made from requires a gradient: call requires_grad_(true) on the leaves";

impl Tensor {
    /// Computes the gradient of this one-element tensor with respect to every leaf that it depends on, and adds the gradient
    /// to the leaf's [`Tensor::grad`]. The graph is consumed: a second call is an error.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 2.0, 3.0], 3, Device::Cpu)?.requires_grad_(true)?;
    /// x.mul(&x)?.sum((), false)?.backward()?;
    /// assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [2.0, 4.0, 6.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Autograd`] if the tensor requires no gradient, the graph was already consumed, or a saved tensor was
    /// changed in place. [`crate::Error::Invalid`] if the tensor has more than one element (see [`Tensor::backward_with`]).
    /// [`crate::Error::Partial`] if the device fails after some leaves have accumulated their gradients: call `zero_grad`
    /// before another attempt.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.run_backward("backward", BackwardOptions::default())
    }

    /// Like [`Tensor::backward`], for a tensor of any shape (PyTorch's `backward(gradient)`). `gradient` is the gradient of the final value
    /// with respect to this tensor. It has this tensor's shape, dtype and device. Fails as [`Tensor::backward`] does, and if `gradient` has
    /// another shape, dtype or device.
    #[track_caller]
    pub fn backward_with(&self, gradient: &Tensor) -> Result<()> {
        self.run_backward("backward_with", BackwardOptions { gradient: Some(gradient), ..Default::default() })
    }

    /// Like [`Tensor::backward`], with all of PyTorch's options: an initial gradient, whether to keep the graph, whether to record the
    /// pass. Fails as [`Tensor::backward_with`] does, and with `create_graph` if an operation's backward is not made of differentiable
    /// operations.
    ///
    /// ```
    /// use claystone::{Device, Tensor, autograd::BackwardOptions};
    /// let x = Tensor::full((), 3.0, Device::Cpu)?.requires_grad_(true)?;
    /// let y = x.mul(&x)?;
    /// y.backward_with_options(BackwardOptions { retain_graph: true, ..Default::default() })?;
    /// y.backward()?;
    /// assert_eq!(x.grad().unwrap().item::<f32>()?, 12.0); // twice 6
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn backward_with_options(&self, options: BackwardOptions) -> Result<()> {
        self.run_backward("backward_with_options", options)
    }

    #[track_caller]
    fn run_backward(&self, op: &'static str, options: BackwardOptions) -> Result<()> {
        let _caller = Caller::enter();
        let BackwardOptions { gradient, retain_graph, create_graph } = options;
        let gradient = seed_gradient(op, self, gradient, create_graph)?;
        let Some(root) = self.node() else { no_gradient!(op, "{NOT_TRACKED}") };
        let engine = Engine { retain_graph: retain_graph || create_graph, create_graph, ..Default::default() };
        engine.run_pass(vec![(root, gradient)]).map(drop)
    }
}
