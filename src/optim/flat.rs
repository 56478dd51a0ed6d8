//! Parameters and gradients in flat buffers.

use std::ops::Range;

use smallvec::SmallVec;

use crate::autograd::Collected;
use crate::{DType, Device, Error, Result, Tensor, no_grad};

/// Parameters rehomed as views of one buffer, gradients of another.
pub(super) struct Flat {
    /// In the parameters' dtype; what the model's views look at.
    params: Tensor,
    grads: Tensor,
    /// f32 copies of half-precision parameters, which the steps accumulate into.
    master: Option<Tensor>,
    /// The version of `params` that `master` goes with.
    version: u64,
    /// The parameters, in order, with where the buffers have each.
    views: Vec<(Tensor, Range<usize>)>,
}

/// The consecutive parameters that one launch updates.
#[derive(PartialEq)]
pub(super) struct Run {
    /// Which parameters these are.
    pub(super) parameters: Range<usize>,
    /// Where the flat buffers have them.
    elements: Range<usize>,
}

/// What a launch reads and writes of the flat buffers.
pub(super) struct Parts {
    /// The master weights where there are any.
    pub(super) weights: Tensor,
    pub(super) grads: Tensor,
    /// The half-precision copy of the weights to write too.
    pub(super) rounded: Option<Tensor>,
}

impl Run {
    /// What a flat buffer holds for its parameters.
    pub(super) fn of(&self, flat: &Tensor) -> Result<Tensor> {
        flat.narrow(0, self.elements.start, self.elements.len())
    }
}

impl Flat {
    /// Moves `parameters` (leaves that require a gradient, of one float dtype, on one device) into a flat buffer.
    pub(super) fn new(op: &'static str, parameters: Vec<&mut Tensor>) -> Result<Flat> {
        let Some(first) = parameters.first() else {
            return Err(Error::invalid(op, "there are no parameters"));
        };
        let (dtype, device) = (first.dtype(), first.device());
        for p in &parameters {
            if !p.requires_grad() || !p.is_leaf() {
                let reason = format!("a parameter of shape {} is no leaf that requires a gradient", p.shape());
                return Err(Error::Autograd { op, reason });
            }
            if p.dtype() != dtype {
                return Err(Error::DTypeMismatch { op, lhs: dtype, rhs: p.dtype() });
            }
            if p.device() != device {
                return Err(Error::DeviceMismatch { op, lhs: device, rhs: p.device() });
            }
        }
        for (i, p) in parameters.iter().enumerate().filter(|(_, p)| p.numel() > 0) {
            if parameters[..i].iter().any(|q| q.shares_storage(p) && q.offset() == p.offset()) {
                let reason = format!(
                    "a parameter of shape {} is given twice, and would be two afterwards: use one tensor in both places",
                    p.shape()
                );
                return Err(Error::invalid(op, reason));
            }
        }
        let total = parameters.iter().fold(0usize, |sum, p| sum.saturating_add(p.numel()));
        let params = Tensor::zeros(total, (dtype, device))?;
        let grads = Tensor::zeros(total, (dtype, device))?;
        // Everything that can fail comes first: on an error the model keeps the parameters it had.
        let mut views = Vec::with_capacity(parameters.len());
        let mut start = 0;
        for p in &parameters {
            let place = |flat: &Tensor| flat.narrow(0, start, p.numel())?.view(p.shape());
            let view = place(&params)?;
            no_grad(|| view.copy_(p))?;
            let view = view.requires_grad_(true)?;
            view.set_grad_slot(place(&grads)?);
            views.push((view, start..start + p.numel()));
            start += p.numel();
        }
        let master = if dtype.size() < 4 { Some(params.to_dtype(DType::F32)?) } else { None };
        for (p, (view, _)) in parameters.into_iter().zip(&views) {
            *p = view.shallow_clone();
        }
        let version = params.storage().version();
        Ok(Flat { params, grads, master, version, views })
    }

    /// How many parameters there are.
    pub(super) fn count(&self) -> usize {
        self.views.len()
    }

    /// The parameters, in order.
    pub(super) fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        self.views.iter().map(|(p, _)| p)
    }

    /// A flat buffer for the optimiser's state, in the dtype steps are computed in, full of `start`.
    pub(super) fn state(&self, start: f64) -> Result<Tensor> {
        let dtype = self.master.as_ref().map_or(self.params.dtype(), Tensor::dtype);
        Tensor::full(self.params.numel(), start, (dtype, self.device()))
    }

    /// The f32 weights, where the parameters are half-precision.
    pub(super) fn master(&self) -> Option<&Tensor> {
        self.master.as_ref()
    }

    /// What a flat buffer holds for the i-th parameter, in its shape.
    pub(super) fn part(&self, flat: &Tensor, i: usize) -> Result<Tensor> {
        let (p, elements) = &self.views[i];
        flat.detach().narrow(0, elements.start, elements.len())?.view(p.shape())
    }

    pub(super) fn device(&self) -> Device {
        self.params.device()
    }

    pub(super) fn zero_grad(&self) {
        self.views.iter().for_each(|(p, _)| p.zero_grad());
    }

    /// The longest stretches of parameters that have a gradient and go together, each with the one before it: one for
    /// all, unless some were not reached by backward. What was written to the parameters since the last step counts.
    pub(super) fn runs(&self, together: impl Fn(usize, usize) -> bool) -> Result<SmallVec<[Run; 1]>> {
        if let Some(master) = self.master.as_ref().filter(|_| self.params.storage().version() != self.version) {
            master.copy_(&self.params.to_dtype(DType::F32)?)?;
        }
        let mut runs: SmallVec<[Run; 1]> = SmallVec::new();
        for (i, (p, elements)) in self.views.iter().enumerate() {
            match p.collected() {
                Collected::Nothing => continue,
                Collected::InSlot => {}
                Collected::Elsewhere(grad) => _ = self.part(&self.grads, i)?.copy_(&grad)?,
            }
            match runs.last_mut() {
                Some(run) if run.parameters.end == i && together(i - 1, i) => {
                    run.parameters.end = i + 1;
                    run.elements.end = elements.end;
                }
                _ => runs.push(Run { parameters: i..i + 1, elements: elements.clone() }),
            }
        }
        Ok(runs)
    }

    /// What a run's launch reads and writes, besides the optimiser's state.
    pub(super) fn parts(&self, run: &Run) -> Result<Parts> {
        let params = run.of(&self.params)?;
        let (weights, rounded) = match &self.master {
            Some(master) => (run.of(master)?, Some(params)),
            None => (params, None),
        };
        Ok(Parts { weights, grads: run.of(&self.grads)?, rounded })
    }

    /// The runs were updated, rounded copies and all.
    pub(super) fn updated(&mut self) {
        self.version = self.params.storage().version();
    }
}

/// Checks that a hyperparameter lies in `range`, by the name users gave it.
pub(super) fn check(op: &'static str, name: &str, value: f64, range: std::ops::Range<f64>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{name} is {value}, it must be at least {} and below {}", range.start, range.end)))
}
