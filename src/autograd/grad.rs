//! Starting a backward pass: [`Tensor::backward`] in its forms, and [`grad`].

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::backward::Engine;
use super::context::Gradient;
use super::node::Node;
use crate::storage::Caller;
use crate::{Error, Result, Tensor};

/// The nodes whose gradients a backward pass returns.
pub(super) struct Wanted {
    nodes: HashSet<u64>,
    /// All nodes from which one of them is reached, themselves included.
    towards: HashSet<u64>,
}

impl Wanted {
    /// `nodes`, reached from `roots`.
    pub(super) fn new<'a>(
        roots: impl Iterator<Item = &'a Arc<Node>>,
        nodes: impl Iterator<Item = &'a Arc<Node>>,
    ) -> Wanted {
        let nodes: HashSet<u64> = nodes.map(|node| node.seq).collect();
        let oldest = nodes.iter().copied().min().unwrap_or(u64::MAX);
        let mut below: HashMap<u64, &Arc<Node>> = HashMap::new();
        let mut open: Vec<&Arc<Node>> = roots.collect();
        while let Some(node) = open.pop() {
            if node.seq >= oldest && below.insert(node.seq, node).is_none() {
                open.extend(node.inputs.iter().flatten());
            }
        }
        // An operation is younger than its inputs.
        let mut order: Vec<u64> = below.keys().copied().collect();
        order.sort_unstable();
        let mut towards = HashSet::new();
        for seq in order {
            let through = || below[&seq].inputs.iter().flatten().any(|input| towards.contains(&input.seq));
            if nodes.contains(&seq) || through() {
                towards.insert(seq);
            }
        }
        Wanted { nodes, towards }
    }

    pub(super) fn captures(&self, seq: u64) -> bool {
        self.nodes.contains(&seq)
    }

    pub(super) fn leads_to_wanted(&self, seq: u64) -> bool {
        self.towards.contains(&seq)
    }
}

/// What [`Tensor::backward_with_options`] starts from, keeps and records.
#[derive(Clone, Copy, Default)]
pub struct BackwardOptions<'a> {
    /// The gradient of the final value with respect to the tensor, of its shape, dtype and device; without one the
    /// tensor has one element and this is 1.
    pub gradient: Option<&'a Tensor>,
    /// Keeps the graph, and all that it saved, for another backward. Without it memory is freed on the way.
    pub retain_graph: bool,
    /// Records the backward pass itself, so that gradients have gradients; keeps the graph too. The leaves' [`Tensor::grad`] then
    /// hold on to the graph and it to the leaves: [`Tensor::zero_grad`] them, or use [`grad_with_options`].
    pub create_graph: bool,
}

/// What [`grad_with_options`] starts from, keeps and records.
#[derive(Clone, Copy, Default)]
pub struct GradOptions<'a> {
    /// For each output the gradient of the final value with respect to it; empty where all outputs have one element, for 1.
    pub grad_outputs: &'a [&'a Tensor],
    /// As in [`BackwardOptions`].
    pub retain_graph: bool,
    /// As in [`BackwardOptions`].
    pub create_graph: bool,
    /// Gives None for an input that no output depends on, instead of an error.
    pub allow_unused: bool,
}

/// The gradients of the sum of `outputs`, tensors of one element, with respect to `inputs` (PyTorch's
/// `torch.autograd.grad`): leaves or results of operations. No leaf's [`Tensor::grad`] changes. The graph between is consumed.
///
/// ```
/// use claystone::{Device, Tensor, autograd};
/// let x = Tensor::full(2, 3.0, Device::Cpu)?.requires_grad_(true)?;
/// let y = x.mul(&x)?.sum((), false)?;
/// assert_eq!(autograd::grad(&[&y], &[&x])?[0].to_vec::<f32>()?, [6.0, 6.0]);
/// assert!(x.grad().is_none());
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// As [`Tensor::backward`]; [`Error::Autograd`] for an input that requires no gradient or that no output depends on.
#[track_caller]
pub fn grad(outputs: &[&Tensor], inputs: &[&Tensor]) -> Result<Vec<Tensor>> {
    let gradients = grad_with_options(outputs, inputs, GradOptions::default())?;
    Ok(gradients.into_iter().flatten().collect())
}

/// [`grad`] of outputs of any shape, as often as one likes, and differentiable itself.
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
///
/// # Errors
/// As [`grad`]; where `grad_outputs` do not match `outputs`; with `create_graph` where the backward of an operation on
/// the way is not made of differentiable operations.
#[track_caller]
pub fn grad_with_options(outputs: &[&Tensor], inputs: &[&Tensor], options: GradOptions) -> Result<Vec<Option<Tensor>>> {
    let _caller = Caller::enter();
    let op = "grad";
    let GradOptions { grad_outputs, retain_graph, create_graph, allow_unused } = options;
    if !grad_outputs.is_empty() && grad_outputs.len() != outputs.len() {
        let reason = format!("{} gradients are given for {} outputs", grad_outputs.len(), outputs.len());
        return Err(Error::invalid(op, reason));
    }
    let mut seeds = Vec::with_capacity(outputs.len());
    for (i, output) in outputs.iter().enumerate() {
        // As in PyTorch an output may be a constant as long as another one is not.
        let gradient = seed(op, output, grad_outputs.get(i).copied(), create_graph)?;
        seeds.extend(output.node().map(|node| (node, gradient)));
    }
    if seeds.is_empty() {
        return Err(untracked(op));
    }
    if let Some(i) = inputs.iter().position(|t| !t.requires_grad()) {
        let reason = format!("input {i} requires no gradient: call requires_grad_(true) on it before it is used");
        return Err(Error::Autograd { op, reason });
    }
    let nodes: Vec<Option<Arc<Node>>> = inputs.iter().map(|t| t.node()).collect();
    let wanted = Wanted::new(seeds.iter().map(|(node, _)| node), nodes.iter().flatten());
    let retain_graph = retain_graph || create_graph;
    let engine = Engine { retain_graph, create_graph, wanted: Some(wanted), ..Default::default() };
    let captured = engine.run(seeds)?;
    let take = |(i, node): (usize, &Option<Arc<Node>>)| {
        let gradient = node.as_ref().and_then(|node| captured.get(&node.seq)).map(Tensor::shallow_clone);
        if gradient.is_none() && !allow_unused {
            let reason = format!("no output depends on input {i}: leave it out, or set allow_unused");
            return Err(Error::Autograd { op, reason });
        }
        Ok(gradient)
    };
    nodes.iter().enumerate().map(take).collect()
}

/// The gradient that a backward pass starts with at `output`.
fn seed(op: &'static str, output: &Tensor, gradient: Option<&Tensor>, create_graph: bool) -> Result<Gradient> {
    let Some(gradient) = gradient else {
        if output.numel() != 1 {
            let reason = format!(
                "only a tensor of one element has a gradient of 1 to start from, this one has shape {}: reduce it with sum() or mean(), or give a gradient, as backward_with() takes it",
                output.shape()
            );
            return Err(Error::invalid(op, reason));
        }
        return Ok(Gradient::one(output));
    };
    output.check_like(op, gradient, "the gradient has the shape of the tensor")?;
    Ok(if create_graph { gradient.shallow_clone() } else { gradient.detach() }.into())
}

fn untracked(op: &'static str) -> Error {
    let reason = "no tensor it was made from requires a gradient: call requires_grad_(true) on the leaves";
    Error::Autograd { op, reason: reason.into() }
}

impl Tensor {
    /// Computes the gradient of this one-element tensor with respect to every leaf it was made from and adds it to
    /// their [`Tensor::grad`]. The graph is consumed: a second call is an error.
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
    /// [`Error::Autograd`] where nothing requires a gradient, the graph was already consumed, or a saved tensor was
    /// changed in place; [`Error::Invalid`] for more than one element (see [`Tensor::backward_with`]); [`Error::Partial`]
    /// where the device fails after some leaves have collected their gradients: call `zero_grad` before another try.
    #[track_caller]
    pub fn backward(&self) -> Result<()> {
        self.run_backward("backward", BackwardOptions::default())
    }

    /// [`Tensor::backward`] from any shape, given the gradient of the final value with respect to this tensor
    /// (PyTorch's `backward(gradient)`): same shape, dtype and device.
    ///
    /// # Errors
    /// As [`Tensor::backward`], and where `gradient` does not match.
    #[track_caller]
    pub fn backward_with(&self, gradient: &Tensor) -> Result<()> {
        self.run_backward("backward_with", BackwardOptions { gradient: Some(gradient), ..Default::default() })
    }

    /// [`Tensor::backward`] with all that PyTorch's takes: a gradient to start from, the graph kept, the backward pass recorded.
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
    ///
    /// # Errors
    /// As [`Tensor::backward_with`]; with `create_graph` where the backward of an operation on the way is not made of
    /// differentiable operations.
    #[track_caller]
    pub fn backward_with_options(&self, options: BackwardOptions) -> Result<()> {
        self.run_backward("backward_with_options", options)
    }

    #[track_caller]
    fn run_backward(&self, op: &'static str, options: BackwardOptions) -> Result<()> {
        let _caller = Caller::enter();
        let BackwardOptions { gradient, retain_graph, create_graph } = options;
        let gradient = seed(op, self, gradient, create_graph)?;
        let Some(root) = self.node() else { return Err(untracked(op)) };
        let engine = Engine { retain_graph: retain_graph || create_graph, create_graph, ..Default::default() };
        engine.run(vec![(root, gradient)]).map(drop)
    }
}
