//! Keeps the graph of a call, so that a caller with its own graph, such as PyTorch's autograd, can request gradients later.

use crate::autograd::{GradOptions, enable_grad, grad_with_options};
use crate::{Result, Tensor};

/// The results of a computation, together with the graph from which their gradients are computed.
///
/// ```
/// use claystone::{Device, Tensor, ops::Recorded};
/// let x = Tensor::full(2, 3.0, Device::Cpu)?;
/// let square = Recorded::new(&[Some(&x)], &[true], |x| Ok(vec![x[0].unwrap().square()?]))?;
/// assert!(!square.results()[0].requires_grad());
/// let grad = Tensor::ones(2, Device::Cpu)?;
/// let found = square.gradients(&[Some(&grad)])?;
/// assert_eq!(found[0].as_ref().unwrap().to_vec::<f32>()?, [6.0, 6.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct Recorded {
    leaves: Vec<Option<Tensor>>,
    results: Vec<Tensor>,
}

impl Recorded {
    /// Calls `run` with detached leaves that share the tensors' memory. `wanted[i]` says whether the gradient of tensor `i` will be requested.
    ///
    /// # Errors
    /// Returns the errors of `run`, and [`Error::Autograd`](crate::Error::Autograd) if a gradient of an integer tensor is wanted.
    pub fn new(
        tensors: &[Option<&Tensor>],
        wanted: &[bool],
        run: impl FnOnce(&[Option<&Tensor>]) -> Result<Vec<Tensor>>,
    ) -> Result<Recorded> {
        let leaf = |(i, tensor): (usize, &Option<&Tensor>)| {
            let wanted = wanted.get(i).copied().unwrap_or(false);
            tensor.map(|tensor| tensor.detach().requires_grad_(wanted)).transpose()
        };
        let leaves = tensors.iter().enumerate().map(leaf).collect::<Result<Vec<Option<Tensor>>>>()?;
        let inputs: Vec<Option<&Tensor>> = leaves.iter().map(Option::as_ref).collect();
        let results = enable_grad(|| run(&inputs))?;
        Ok(Recorded { leaves, results })
    }

    /// Returns the results, detached from the graph.
    pub fn results(&self) -> Vec<Tensor> {
        self.results.iter().map(Tensor::detach).collect()
    }

    /// Computes the gradients of the tensors passed to [`new`](Recorded::new) from the gradients of the first results. Can be called any
    /// number of times.
    ///
    /// An entry is `None` if the gradient was not wanted or no gradient flows to the tensor. No gradient shares storage with another
    /// tensor. Fails as [`grad`](crate::autograd::grad) does, and with [`Error::Invalid`](crate::Error::Invalid) for more gradients than
    /// results.
    pub fn gradients(&self, grad_outputs: &[Option<&Tensor>]) -> Result<Vec<Option<Tensor>>> {
        self.backward_pass("Recorded::gradients", grad_outputs, true)
    }

    /// Computes [`gradients`](Recorded::gradients), and frees the graph unless `retain_graph` is set.
    pub(crate) fn backward_pass(
        &self,
        op: &'static str,
        grad_outputs: &[Option<&Tensor>],
        retain_graph: bool,
    ) -> Result<Vec<Option<Tensor>>> {
        invalid!(op if grad_outputs.len() > self.results.len(),
            "{} gradients are given for {} results", grad_outputs.len(), self.results.len());
        // Results that depend on no wanted tensor have no graph.
        let pairs = self.results.iter().zip(grad_outputs).filter(|(result, _)| result.requires_grad());
        let (outputs, grad_outputs): (Vec<&Tensor>, Vec<&Tensor>) =
            pairs.filter_map(|(result, gradient)| gradient.map(|gradient| (result, gradient))).unzip();
        let mut gradients: Vec<Option<Tensor>> = self.leaves.iter().map(|_| None).collect();
        if outputs.is_empty() {
            return Ok(gradients);
        }
        let wanted = |t: &&Tensor| t.requires_grad();
        let sources: Vec<&Tensor> = self.leaves.iter().flatten().filter(wanted).collect();
        let options =
            GradOptions { grad_outputs: &grad_outputs, allow_unused: true, retain_graph, ..Default::default() };
        let mut found = grad_with_options(&outputs, &sources, options)?.into_iter();
        for i in 0..gradients.len() {
            if self.leaves[i].as_ref().filter(wanted).is_none() {
                continue;
            }
            let Some(gradient) = found.next().flatten() else { continue };
            let others = grad_outputs.iter().chain(&sources).copied().chain(gradients.iter().flatten());
            let shared = others.into_iter().any(|t| t.shares_storage(&gradient));
            gradients[i] =
                Some(if shared { gradient.empty_like()?.copy_(&gradient)?.shallow_clone() } else { gradient });
        }
        Ok(gradients)
    }
}
