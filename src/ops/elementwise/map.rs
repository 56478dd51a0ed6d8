//! Formulas of the user's, on tensors: [`Tensor::map`] and its kin.

use std::slice;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::problem::map::{Params, compute_type};
use crate::expr::program::Program;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply_tracked;
use crate::ops::elementwise::launch::run_into;
use crate::{Compute, DType, Expr, Result, Scalar, Tensor, autograd, is_grad_enabled};

/// The formula that `f` makes of the inputs, where it goes with them.
fn checked(op: &'static str, inputs: &[&Tensor], f: impl FnOnce(&[Expr]) -> Expr) -> Result<Expr> {
    let Some(first) = inputs.first() else { return Err(Error::invalid(op, "it needs at least one input")) };
    same_dtype(op, inputs)?;
    let leaves: Vec<Expr> = (0..inputs.len()).map(Expr::input).collect();
    let expr = f(&leaves);
    let program = Program::of(slice::from_ref(&expr));
    if program.inputs() > inputs.len() || program.given() > 0 || program.seeds() > 0 {
        let reason = format!(
            "the expression reads more than the {} inputs it was given: build it from the arguments of the closure",
            inputs.len()
        );
        return Err(Error::invalid(op, reason));
    }
    unsupported!(op if program.needs_float() && !first.dtype.is_float(), first.dtype, "floats for this expression");
    drop(program);
    Ok(expr)
}

/// The formulas that `f` makes of so many inputs and numbers, one for each of so many results.
fn formulas(
    op: &'static str,
    (inputs, scalars): (usize, usize),
    outputs: usize,
    f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
) -> Result<Made> {
    let leaves: Vec<Expr> = (0..inputs).map(Expr::input).collect();
    let numbers: Vec<Expr> = (0..scalars).map(Expr::scalar).collect();
    let exprs = f(&leaves, &numbers);
    invalid!(op if exprs.len() != outputs, "{} formulas for {outputs} outputs", exprs.len());
    let program = Program::of(&exprs).into_owned();
    invalid!(op if program.inputs() > inputs || program.given() > scalars || program.seeds() > 0,
        "a formula reads more than the inputs and scalars given");
    Ok(Made { exprs, program })
}

/// Formulas and their program.
struct Made {
    exprs: Vec<Expr>,
    program: Arc<Program>,
}

impl Made {
    #[inline]
    fn launch(&self, op: &'static str, inputs: &[&Tensor], scalars: &[Scalar], outputs: &[&Tensor]) -> Result<()> {
        self.program.with_arguments(&self.exprs, scalars, |scalars| {
            run_into(op, inputs, Params::of(scalars), &self.program, outputs)
        })
    }
}

impl Tensor {
    /// An elementwise operation of your own: `f` gets one [`Expr`] for each input and builds the formula; the result is
    /// computed in one launch, on any device, broadcast and strided as any other operation, and is differentiable.
    ///
    /// The result has the dtype of the first input. Numbers in the formula may change from call to call, as a learning rate does:
    /// they are arguments of one kernel, but for those that [`Expr::constant`] names.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_slice(&[3f32, 5.0], 2, Device::Cpu)?;
    /// let b = Tensor::from_slice(&[4f32, 12.0], 2, Device::Cpu)?;
    /// let hypotenuse = Tensor::map(&[&a, &b], |e| (&e[0] * &e[0] + &e[1] * &e[1]).sqrt())?;
    /// assert_eq!(hypotenuse.to_vec::<f32>()?, [5.0, 13.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Inputs on different devices, of different dtypes or with shapes that do not broadcast; no input at all; an
    /// expression over an input that is not there.
    #[track_caller]
    pub fn map(inputs: &[&Tensor], f: impl FnOnce(&[Expr]) -> Expr) -> Result<Tensor> {
        let _caller = Caller::enter();
        let expr = checked("map", inputs, f)?;
        apply_tracked("map", inputs, Params::default(), &expr, inputs[0].dtype, &|i| expr.diff(i))
    }

    /// [`Tensor::map`] with derivatives of your own: `derivatives` gives one formula for each input. For gradients that are
    /// not the formula's, or that it computes badly.
    ///
    /// ```
    /// use claystone::{Device, Tensor, ops::Expr};
    /// let x = Tensor::from_slice(&[0.4f32, 1.6], 2, Device::Cpu)?.requires_grad_(true)?;
    /// // Rounds, and passes the gradient on as it is.
    /// let y = Tensor::map_with(&[&x], |e| e[0].round(), |_| vec![Expr::constant(1.0)])?;
    /// y.sum((), false)?.backward()?;
    /// assert_eq!((y.to_vec::<f32>()?, x.grad().unwrap().to_vec::<f32>()?), (vec![0.0, 2.0], vec![1.0, 1.0]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::map`], for the derivatives too; another number of derivatives than of inputs.
    #[track_caller]
    pub fn map_with(
        inputs: &[&Tensor],
        f: impl FnOnce(&[Expr]) -> Expr,
        derivatives: impl FnOnce(&[Expr]) -> Vec<Expr>,
    ) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "map_with";
        let expr = checked(op, inputs, f)?;
        let leaves: Vec<Expr> = (0..inputs.len()).map(Expr::input).collect();
        let given = derivatives(&leaves);
        invalid!(op if given.len() != inputs.len(), "{} derivatives for {} inputs", given.len(), inputs.len());
        for derivative in &given {
            checked(op, inputs, |_| derivative.clone())?;
        }
        apply_tracked(op, inputs, Params::default(), &expr, inputs[0].dtype, &|i| given[i].clone())
    }

    /// The in-place form of [`Tensor::map`], with several results and run-time scalars: `f` gets an [`Expr`] for each
    /// input and for each scalar and gives one formula for each output. All are computed in one launch, so an output may
    /// also be an input: an optimiser's step is one call. Inputs may differ in dtype; they meet in the widest,
    /// and where all are integers in the outputs'.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::ones(&[3], Device::Cpu)?;
    /// let v = Tensor::full(&[3], 0.5, Device::Cpu)?;
    /// Tensor::map_into(&[&x, &v], &[0.1.into()], &[&x, &v], |e, s| {
    ///     let v = &e[1] - &s[0] * &e[0];
    ///     vec![&e[0] + &v, v]
    /// })?;
    /// assert!((v.to_vec::<f32>()?[0] - 0.4).abs() < 1e-6 && (x.to_vec::<f32>()?[0] - 1.4).abs() < 1e-6);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Shapes that do not broadcast to the outputs', outputs of different shapes or that are one another's views,
    /// different devices, tracked tensors (outside [`crate::no_grad`]), a wrong number of formulas, a fraction as a scalar
    /// where all tensors are integers.
    pub fn map_into(
        inputs: &[&Tensor],
        scalars: &[Scalar],
        outputs: &[&Tensor],
        f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
    ) -> Result<()> {
        let op = "map_into";
        let (made, whole) = checked_into(op, inputs, scalars.len(), outputs, f)?;
        check_scalars(op, whole, scalars)?;
        made.launch(op, inputs, scalars, outputs)
    }
}

/// The formulas of [`Tensor::map_into`], where all it is given goes together; with whether scalars have to be whole
/// numbers.
fn checked_into(
    op: &'static str,
    inputs: &[&Tensor],
    scalars: usize,
    outputs: &[&Tensor],
    f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
) -> Result<(Made, bool)> {
    let Some(first) = outputs.first() else { return Err(Error::invalid(op, "it needs at least one output")) };
    for (i, out) in outputs.iter().enumerate() {
        autograd::check_unrecorded(op, out, inputs)?;
        mismatch!(op if out.shape() != first.shape(), first, out, "all outputs have one shape");
        same_device(op, &[first, out])?;
        invalid!(op if outputs[..i].iter().any(|o| o.shares_storage(out)),
            "two outputs are views of the same storage: write them one by one");
    }
    let made = formulas(op, (inputs.len(), scalars), outputs.len(), f)?;
    let whole = compute_type(&made.program, inputs, outputs) == Compute::I64;
    Ok((made, whole))
}

/// An error for a scalar that integers are computed with and that is none.
fn check_scalars(op: &'static str, whole: bool, scalars: &[Scalar]) -> Result<()> {
    if whole { scalars.iter().try_for_each(|s| s.check_factor(op, DType::I64)) } else { Ok(()) }
}

/// [`Tensor::map_into`] of tensors that stay, to be launched again and again with other scalars: all but the launch is done
/// once. The step of every optimiser of [`optim`](crate::optim) is one.
///
/// ```
/// use claystone::{Device, Tensor, ops::MapInto};
/// let (x, v) = (Tensor::ones(3, Device::Cpu)?, Tensor::zeros(3, Device::Cpu)?);
/// let handles = || vec![x.shallow_clone(), v.shallow_clone()];
/// let step = MapInto::new("oscillate", handles(), 1, handles(), |e, s| {
///     let v = &e[1] - &s[0] * &e[0];
///     vec![&e[0] + &v, v]
/// })?;
/// for rate in [0.5f64, 0.25] {
///     step.launch(&[rate.into()])?;
/// }
/// assert_eq!(v.to_vec::<f32>()?, [-0.625; 3]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct MapInto {
    op: &'static str,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    scalars: usize,
    formulas: Made,
    /// Whether scalars have to be whole numbers.
    whole: bool,
}

impl MapInto {
    /// The formulas that `f` makes of `inputs` and of as many scalars as `scalars` says, one for each of `outputs`. `op` is
    /// what errors call it.
    ///
    /// # Errors
    /// As [`Tensor::map_into`].
    pub fn new(
        op: &'static str,
        inputs: Vec<Tensor>,
        scalars: usize,
        outputs: Vec<Tensor>,
        f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
    ) -> Result<MapInto> {
        let (x, out): (Vec<&Tensor>, Vec<&Tensor>) = (inputs.iter().collect(), outputs.iter().collect());
        let (formulas, whole) = checked_into(op, &x, scalars, &out, f)?;
        Ok(MapInto { op, inputs, outputs, scalars, formulas, whole })
    }

    /// Computes the outputs, in one launch.
    ///
    /// # Errors
    /// [`Error::Invalid`] for another number of scalars, and for a fraction where all tensors are integers; tracked tensors
    /// outside [`crate::no_grad`]; device failures.
    pub fn launch(&self, scalars: &[Scalar]) -> Result<()> {
        if scalars.len() != self.scalars {
            let reason = format!("{} scalars are given where there are {}", scalars.len(), self.scalars);
            return Err(Error::invalid(self.op, reason));
        }
        check_scalars(self.op, self.whole, scalars)?;
        // Pushed one by one: `collect` is a call, and a step is made of such.
        let (mut inputs, mut outputs): (SmallVec<[&Tensor; 5]>, SmallVec<[&Tensor; 5]>) = Default::default();
        self.inputs.iter().for_each(|t| inputs.push(t));
        self.outputs.iter().for_each(|t| outputs.push(t));
        if is_grad_enabled() {
            outputs.iter().try_for_each(|out| autograd::check_unrecorded(self.op, out, &inputs))?;
        }
        self.formulas.launch(self.op, &inputs, scalars, &outputs)
    }
}

#[cfg(test)]
mod tests;
