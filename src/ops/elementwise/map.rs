//! Elementwise operations with formulas that the user provides: [`Tensor::map`] and its variants.

use std::slice;
use std::sync::Arc;

use crate::backend::problem::map::compute_type;
use crate::expr::program::Program;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply_tracked;
use crate::ops::elementwise::launch::launch_program_into;
use crate::{Compute, is_grad_enabled};

/// Builds the formula with `f`, and checks that it matches the inputs.
fn build_formula(op: &'static str, inputs: &[&Tensor], f: impl FnOnce(&[Expr]) -> Expr) -> Result<Expr> {
    let Some(first) = inputs.first() else { return Err(Error::invalid(op, "it needs at least one input")) };
    same_dtype(op, inputs)?;
    let leaves: Vec<Expr> = (0..inputs.len()).map(Expr::input).collect();
    let expr = f(&leaves);
    let program = Program::shared(slice::from_ref(&expr));
    invalid!(op if program.inputs() > inputs.len() || program.caller_scalars() > 0 || program.seeds() > 0,
        "the expression reads more than the {} inputs it was given: build it from the arguments of the closure", inputs.len());
    unsupported!(op if program.needs_float() && !first.dtype.is_float(), first.dtype, "floats for this expression");
    drop(program);
    Ok(expr)
}

/// Checks that formulas may be computed into `outputs`.
fn check_outputs(op: &'static str, inputs: &[&Tensor], outputs: &[&Tensor]) -> Result<()> {
    let Some(first) = outputs.first() else { return Err(Error::invalid(op, "it needs at least one output")) };
    for (i, out) in outputs.iter().enumerate() {
        autograd::check_unrecorded(op, out, inputs)?;
        mismatch!(op if out.shape() != first.shape(), first, out, "all outputs have one shape");
        same_device(op, &[first, out])?;
        invalid!(op if outputs[..i].iter().any(|o| o.shares_storage(out)),
            "two outputs are views of the same storage: write them one by one");
    }
    Ok(())
}

/// Builds formulas with `f`, which may read only the given numbers of inputs and scalars, and compiles them.
fn compile(
    op: &'static str,
    inputs: usize,
    scalars: usize,
    f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
) -> Result<(Vec<Expr>, Arc<Program>)> {
    let leaves: Vec<Expr> = (0..inputs).map(Expr::input).collect();
    let numbers: Vec<Expr> = (0..scalars).map(Expr::scalar).collect();
    let exprs = f(&leaves, &numbers);
    invalid!(op if exprs.is_empty(), "it needs at least one formula");
    let program = Program::shared(&exprs).into_owned();
    invalid!(op if program.inputs() > inputs || program.caller_scalars() > scalars || program.seeds() > 0,
        "a formula reads more than the {inputs} inputs and {scalars} scalars given");
    Ok((exprs, program))
}

/// Formulas and the program compiled from them.
struct CompiledFormulas {
    op: &'static str,
    exprs: Vec<Expr>,
    program: Arc<Program>,
    /// Whether scalars must be integers.
    needs_integers: bool,
}

impl CompiledFormulas {
    /// Checks the outputs, and builds one formula for each output with `f`. The formulas may read only the given inputs and scalars.
    fn new(
        op: &'static str,
        inputs: &[&Tensor],
        scalars: usize,
        outputs: &[&Tensor],
        f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
    ) -> Result<CompiledFormulas> {
        check_outputs(op, inputs, outputs)?;
        let (exprs, program) = compile(op, inputs.len(), scalars, f)?;
        invalid!(op if exprs.len() != outputs.len(), "{} formulas for {} outputs", exprs.len(), outputs.len());
        let needs_integers = compute_type(&program, inputs, outputs) == Compute::I64;
        Ok(CompiledFormulas { op, exprs, program, needs_integers })
    }

    /// Returns an error if the formulas compute in integers and a scalar is not an integer.
    fn check_scalars(&self, scalars: &[Scalar]) -> Result<()> {
        if !self.needs_integers {
            return Ok(());
        }
        scalars.iter().try_for_each(|s| s.check_factor(self.op, DType::I64))
    }

    #[inline]
    fn launch(&self, inputs: &[&Tensor], scalars: &[Scalar], outputs: &[&Tensor]) -> Result<()> {
        self.program.with_arguments(&self.exprs, scalars, |scalars| {
            launch_program_into(self.op, inputs, Params::from_scalars(scalars), &self.program, outputs)
        })
    }
}

impl Tensor {
    /// Applies your own elementwise operation. `f` receives one [`Expr`] for each input and returns the formula of the result.
    ///
    /// The result has the dtype of the first input and is differentiable. Inputs are broadcast and may have any strides; one launch
    /// computes the result on any device. Numbers in the formula, such as a learning rate, may change from call to call without compiling
    /// another kernel, because they are kernel arguments. Only numbers from [`Expr::constant`] are compiled in. Fails if there is no
    /// input, and for a formula that reads an input that was not given.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_slice(&[3f32, 5.0], 2, Device::Cpu)?;
    /// let b = Tensor::from_slice(&[4f32, 12.0], 2, Device::Cpu)?;
    /// let hypotenuse = Tensor::map(&[&a, &b], |e| (&e[0] * &e[0] + &e[1] * &e[1]).sqrt())?;
    /// assert_eq!(hypotenuse.to_vec::<f32>()?, [5.0, 13.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn map(inputs: &[&Tensor], f: impl FnOnce(&[Expr]) -> Expr) -> Result<Tensor> {
        let _caller = Caller::enter();
        let expr = build_formula("map", inputs, f)?;
        apply_tracked("map", inputs, Params::default(), &expr, inputs[0].dtype, &|i| expr.diff(i))
    }

    /// Applies a formula like [`Tensor::map`], with custom derivatives: `derivatives` returns one formula for each input. Use this method
    /// if the gradient is not the derivative of the formula, or if that derivative is inaccurate. Fails as [`Tensor::map`] does, also for
    /// invalid derivatives, and for a wrong number of derivatives.
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
    #[track_caller]
    pub fn map_with(
        inputs: &[&Tensor],
        f: impl FnOnce(&[Expr]) -> Expr,
        derivatives: impl FnOnce(&[Expr]) -> Vec<Expr>,
    ) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "map_with";
        let expr = build_formula(op, inputs, f)?;
        let leaves: Vec<Expr> = (0..inputs.len()).map(Expr::input).collect();
        let given = derivatives(&leaves);
        invalid!(op if given.len() != inputs.len(), "{} derivatives for {} inputs", given.len(), inputs.len());
        for derivative in &given {
            build_formula(op, inputs, |_| derivative.clone())?;
        }
        apply_tracked(op, inputs, Params::default(), &expr, inputs[0].dtype, &|i| given[i].clone())
    }

    /// Computes formulas like [`Tensor::map`], in place, with several results and run-time scalars.
    ///
    /// `f` receives one [`Expr`] for each input and each scalar, and returns one formula for each output. One launch computes all
    /// outputs, so an output may also be an input, and one call can compute the step of an optimiser. Inputs of different dtypes are
    /// promoted to the widest dtype; if all are integers, the formulas compute in the dtype of the outputs.
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
    /// Fails for shapes that do not broadcast to the shape of the outputs; for outputs of different shapes or that share storage; for
    /// different devices; for tracked tensors outside [`crate::no_grad`]; for a wrong number of formulas; and for a fraction as a scalar
    /// if all tensors are integers.
    pub fn map_into(
        inputs: &[&Tensor],
        scalars: &[Scalar],
        outputs: &[&Tensor],
        f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
    ) -> Result<()> {
        let formulas = CompiledFormulas::new("map_into", inputs, scalars.len(), outputs, f)?;
        formulas.check_scalars(scalars)?;
        formulas.launch(inputs, scalars, outputs)
    }
}

/// A [`Tensor::map_into`] that is prepared once and launched many times, with the same tensors and other scalars. Every optimiser in
/// [`optim`](crate::optim) computes its step with a `MapInto`.
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
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
    scalars: usize,
    formulas: CompiledFormulas,
}

impl MapInto {
    /// Builds one formula for each of `outputs` with `f`, from `inputs` and the given number of scalars. `op` names the operation in
    /// errors. Fails as [`Tensor::map_into`] does.
    pub fn new(
        op: &'static str,
        inputs: Vec<Tensor>,
        scalars: usize,
        outputs: Vec<Tensor>,
        f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
    ) -> Result<MapInto> {
        let (x, out): (Vec<&Tensor>, Vec<&Tensor>) = (inputs.iter().collect(), outputs.iter().collect());
        let formulas = CompiledFormulas::new(op, &x, scalars, &out, f)?;
        Ok(MapInto { inputs, outputs, scalars, formulas })
    }

    /// Computes the outputs in one launch. Fails with [`Error::Invalid`] for a wrong number of scalars, and for a fraction if all tensors
    /// are integers. Also fails for tracked tensors outside [`crate::no_grad`].
    pub fn launch(&self, scalars: &[Scalar]) -> Result<()> {
        let op = self.formulas.op;
        invalid!(op if scalars.len() != self.scalars,
            "{} scalars are given, and the formulas read {}", scalars.len(), self.scalars);
        self.formulas.check_scalars(scalars)?;
        // `collect` would be a function call, which is measurable in an optimiser step.
        let (mut inputs, mut outputs): (SmallVec<[&Tensor; 5]>, SmallVec<[&Tensor; 5]>) = Default::default();
        self.inputs.iter().for_each(|t| inputs.push(t));
        self.outputs.iter().for_each(|t| outputs.push(t));
        if is_grad_enabled() {
            outputs.iter().try_for_each(|out| autograd::check_unrecorded(op, out, &inputs))?;
        }
        self.formulas.launch(&inputs, scalars, &outputs)
    }
}

/// The formulas of a [`Tensor::map_into`], prepared once and computed over any tensors: a fused kernel for a compiler.
///
/// ```
/// use claystone::{Device, Tensor, ops::PreparedMap};
/// let scaled_sum = PreparedMap::new("scaled_sum", 2, 1, |x, s| vec![(&x[0] + &x[1]) * &s[0]])?;
/// let (a, b) = (Tensor::ones([2, 3], Device::Cpu)?, Tensor::ones(3, Device::Cpu)?);
/// let out = Tensor::empty([2, 3], Device::Cpu)?;
/// scaled_sum.launch(&[&a, &b], &[0.5.into()], &[&out])?;
/// assert_eq!(out.to_vec::<f32>()?, [1.0; 6]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct PreparedMap {
    op: &'static str,
    inputs: usize,
    scalars: usize,
    exprs: Vec<Expr>,
    program: Arc<Program>,
}

impl PreparedMap {
    /// Builds formulas with `f`, from the given numbers of inputs and scalars. `op` names the operation in errors. Fails with
    /// [`Error::Invalid`] if `f` returns no formula, or one that reads more than the inputs and scalars.
    pub fn new(
        op: &'static str,
        inputs: usize,
        scalars: usize,
        f: impl FnOnce(&[Expr], &[Expr]) -> Vec<Expr>,
    ) -> Result<PreparedMap> {
        let (exprs, program) = compile(op, inputs, scalars, f)?;
        Ok(PreparedMap { op, inputs, scalars, exprs, program })
    }

    /// Computes the formulas in one launch. Inputs broadcast to the shape of the outputs and may have any strides. Not recorded by
    /// autograd. The formulas compute in the type that [`Tensor::map_into`] describes.
    ///
    /// # Errors
    /// The errors of [`Tensor::map_into`], and [`Error::Invalid`] for a wrong number of inputs, scalars or outputs.
    pub fn launch(&self, inputs: &[&Tensor], scalars: &[Scalar], outputs: &[&Tensor]) -> Result<()> {
        let op = self.op;
        let counts = (inputs.len(), scalars.len(), outputs.len());
        invalid!(op if counts != (self.inputs, self.scalars, self.exprs.len()),
            "it takes {} inputs, {} scalars and {} outputs", self.inputs, self.scalars, self.exprs.len());
        check_outputs(op, inputs, outputs)?;
        if !scalars.is_empty() && compute_type(&self.program, inputs, outputs) == Compute::I64 {
            scalars.iter().try_for_each(|s| s.check_factor(op, DType::I64))?;
        }
        self.program.with_arguments(&self.exprs, scalars, |scalars| {
            launch_program_into(op, inputs, Params::from_scalars(scalars), &self.program, outputs)
        })
    }
}

#[cfg(test)]
mod tests;
