//! Elementwise launches: formulas over any number of broadcast, strided tensors, with any number of outputs in one launch.
//!
//! [`apply`] creates the output tensors, and [`apply_into`] writes to existing tensors of any strides, in place too. Neither is
//! recorded by autograd. [`apply_row`] and [`Tensor::map`] record their results and differentiate the formula symbolically.

pub(crate) mod copy;
mod launch;
pub(crate) mod map;
pub(crate) mod pointwise;

use std::slice;
use std::sync::LazyLock;

use launch::allocate_broadcast_result;
pub(crate) use launch::{allocate_result, apply, apply_into, apply_one, broadcast_shape, fill_result};

use crate::autograd::InPlace;
use crate::expr::philox::Seed;
use crate::expr::rows::rows;
use crate::expr::table::{Accepts, Output, Row};
use crate::expr::{Expr, Leaf, table, with_leaves};
use crate::ops::dispatch::autocast::autocast_row_to_f32;
use crate::ops::dispatch::prelude::*;
use crate::ops::dispatch::promote;
use crate::ops::dispatch::registry::registered_name;
use crate::{autocast_dtype, get_default_dtype};

/// True in the common case that all operands have this dtype and none of them is a mask.
fn all_have_dtype(dtype: DType, row: &Row, inputs: &[&Tensor]) -> bool {
    row.masks.is_empty() && inputs.iter().all(|t| t.dtype == dtype)
}

/// Returns the dtype to which the operands are promoted. Masks are ignored.
fn common_dtype(row: &Row, inputs: &[&Tensor], scalars: &[Scalar]) -> Result<DType> {
    let op = row.name;
    // In rows with a mask, scalars are converted to the dtype of the tensors. In all other rows, scalars influence the promoted dtype.
    let numbers = if row.masks.is_empty() { scalars } else { &[] };
    let common = if numbers.is_empty() && all_have_dtype(inputs[0].dtype, row, inputs) {
        inputs[0].dtype
    } else {
        let operands = inputs.iter().enumerate().filter(|(i, _)| !row.masks.contains(i));
        promote::promoted_dtype(operands.map(|(_, t)| (t.dtype, t.rank() == 0)), numbers).unwrap_or(inputs[0].dtype)
    };
    match row.accepts {
        Accepts::Float if !common.is_float() => return Ok(get_default_dtype()),
        Accepts::Integer if common.is_float() => {
            return Err(Error::UnsupportedDType { op, dtype: common, expected: "integers or bool" });
        }
        _ => {}
    }
    Ok(common)
}

/// Converts operands before the launch if the launch would otherwise compute in the wrong type. Returns `None` if no operand changes.
///
/// A launch reads each operand in its own dtype, and computes in the widest of the operands' types.
fn convert_operands(row: &Row, inputs: &[&Tensor], common: DType) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    let is_mask = |i: usize| row.masks.contains(&i);
    let integers = || inputs.iter().enumerate().all(|(i, t)| is_mask(i) || !t.dtype.is_float());
    let wanted = |i: usize| match inputs[i].dtype {
        // A float mask would make the launch compute integers in floats, and round large integers.
        float if is_mask(i) && float.is_float() && !common.is_float() => DType::Bool,
        mask if is_mask(i) => mask,
        // A 0-d tensor must not make the launch compute in a wider type than its result.
        wide if wide.compute() > common.compute() => common,
        // If integers are compared with a fraction, all operands are integers and the result is bool, so the launch would compute in
        // integers.
        _ if row.output == Output::Bool && common.is_float() && integers() => common,
        dtype => dtype,
    };
    if (0..inputs.len()).all(|i| wanted(i) == inputs[i].dtype) {
        return Ok(None);
    }
    (0..inputs.len()).map(|i| inputs[i].to_dtype(wanted(i))).collect::<Result<_>>().map(Some)
}

impl Row {
    /// Applies this row to `inputs`, one tensor for each operand, and to `scalars`, as the method of the same name does. Fails as
    /// the method does, and with [`Error::Invalid`] for a wrong number of inputs or scalars.
    ///
    /// ```
    /// use claystone::{Device, Tensor, ops::ROWS};
    /// let relu = ROWS.iter().find(|row| row.name == "relu").unwrap();
    /// let x = Tensor::from_slice(&[-1f32, 2.0], 2, Device::Cpu)?;
    /// assert_eq!(relu.apply(&[&x], &[])?.to_vec::<f32>()?, [0.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn apply(&'static self, inputs: &[&Tensor], scalars: &[Scalar]) -> Result<Tensor> {
        self.check_counts(inputs.len(), scalars.len())?;
        apply_row(self, inputs, scalars)
    }

    pub(crate) fn apply_(&'static self, inputs: &[&Tensor], scalars: &[Scalar]) -> Result<()> {
        self.check_counts(inputs.len(), scalars.len())?;
        apply_row_(self, inputs, scalars)
    }

    /// Computes [`Row::apply`] directly into `out`, outside the graph. Returns false, without writing, if a copy would be needed because
    /// the result has another shape, dtype or device, or because autocast is on.
    pub(crate) fn apply_into(&'static self, inputs: &[&Tensor], scalars: &[Scalar], out: &Tensor) -> Result<bool> {
        self.check_counts(inputs.len(), scalars.len())?;
        let common = common_dtype(self, inputs, scalars)?;
        let mut held = SmallVec::new();
        let scalars = self.scalars_in(scalars, common, &mut held)?;
        let dtype = if self.output == Output::Bool { DType::Bool } else { common };
        let device = same_device(self.name, inputs)?;
        let fits = (dtype, device) == (out.dtype, out.device()) && broadcast_shape(self.name, inputs)? == *out.shape();
        if !fits || autocast_dtype().is_some() {
            return Ok(false);
        }
        apply_row_into(self, inputs, scalars, common, out).map(|()| true)
    }

    /// Returns the cheapest formulas for these scalars: some powers become products and roots, as in PyTorch's `pow`. Powers computed by
    /// roots treat -0 and -inf as `sqrt` does.
    fn specialise<'a>(&'static self, scalars: &'a [Scalar], common: DType) -> RowFormulas<'a> {
        use table::rows::{pow_scalar, reciprocal, rsqrt, sqrt, square};
        let of_row =
            |row: &'static Row, scalars| RowFormulas { expr: row.expr(), derivatives: row.derivatives(), scalars };
        let power = |[expr, derivative]: &'static [Expr; 2]| RowFormulas {
            expr,
            derivatives: slice::from_ref(derivative),
            scalars: &[],
        };
        if !std::ptr::eq(self, &pow_scalar) {
            return of_row(self, scalars);
        }
        match scalars[0].to_f64() {
            2.0 => of_row(&square, &[]),
            3.0 => power(&POWERS[0]),
            0.5 if common.is_float() => of_row(&sqrt, &[]),
            -0.5 if common.is_float() => of_row(&rsqrt, &[]),
            -1.0 if common.is_float() => of_row(&reciprocal, &[]),
            -2.0 if common.is_float() => power(&POWERS[1]),
            _ => of_row(self, scalars),
        }
    }

    /// Builds the row's formula over these operands and scalar arguments. Fails with [`Error::Invalid`] for a wrong number of operands or
    /// scalars.
    ///
    /// ```
    /// use claystone::ops::{Expr, ROWS};
    /// let relu = ROWS.iter().find(|row| row.name == "relu").unwrap();
    /// let formula = relu.formula(&[Expr::input(0) + Expr::input(1)], &[])?;
    /// assert_eq!(formula, (Expr::input(0) + Expr::input(1)).relu());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn formula(&self, operands: &[Expr], scalars: &[Expr]) -> Result<Expr> {
        self.check_counts(operands.len(), scalars.len())?;
        Ok(self.build(operands, scalars))
    }

    /// Builds the derivative of the row's formula with respect to operand `i`, over these operands and scalar arguments. Fails as
    /// [`Row::formula`] does, and for an operand that the row does not have.
    pub fn derivative_formula(&self, i: usize, operands: &[Expr], scalars: &[Expr]) -> Result<Expr> {
        self.check_counts(operands.len(), scalars.len())?;
        let Some(derivative) = self.derivatives().get(i) else {
            return Err(Error::invalid(self.name, format!("it has no operand {i}")));
        };
        let built = with_leaves(slice::from_ref(derivative), |leaf| match leaf {
            Leaf::Input(i) => Some(operands[i].clone()),
            Leaf::Scalar(i) => Some(scalars[i].clone()),
            _ => None,
        });
        Ok(built.into_iter().next().expect("one formula"))
    }

    fn check_counts(&self, inputs: usize, scalars: usize) -> Result<()> {
        if (inputs, scalars) == (self.arity, self.samples.len()) {
            return Ok(());
        }
        let reason = format!("it takes {} tensors and {} scalars", self.arity, self.samples.len());
        Err(Error::invalid(self.name, reason))
    }
}

/// The formula of a row and its derivatives, for given scalars.
struct RowFormulas<'a> {
    expr: &'static Expr,
    derivatives: &'static [Expr],
    scalars: &'a [Scalar],
}

/// The formula and the derivative of each power whose exponent has no row of its own: `x^3` and `x^-2`.
static POWERS: LazyLock<[[Expr; 2]; 2]> = LazyLock::new(|| {
    let x = &Expr::input(0);
    let powers = [[x.square() * x, 3.0 * x.square()], [x.square().recip(), -2.0 / (x.square() * x)]];
    powers.map(|[expr, derivative]| [expr.with_fixed_program(), derivative])
});

/// Applies a row of the elementwise table to tensors, and records the result if an input is tracked. All generated methods call this
/// function.
#[track_caller]
pub(crate) fn apply_row(row: &'static Row, inputs: &[&Tensor], scalars: &[Scalar]) -> Result<Tensor> {
    let _caller = Caller::enter();
    same_device(row.name, inputs)?;
    // Autocast is checked before the call, because a function that returns tensors moves them even if it returns `None`.
    if autocast_dtype().is_some()
        && let Some(wide) = autocast_row_to_f32(row.name, inputs)?
    {
        return apply_row(row, &wide.iter().collect::<SmallVec<[&Tensor; 3]>>(), scalars);
    }
    let common = common_dtype(row, inputs, scalars)?;
    let mut held = SmallVec::new();
    let scalars = row.scalars_in(scalars, common, &mut held)?;
    let arguments = || scalars.iter().map(|&s| s.into()).collect();
    return_replacement!(row.name, inputs; arguments);
    if !all_have_dtype(common, row, inputs)
        && let Some(converted) = convert_operands(row, inputs, common)?
    {
        return apply_row(row, &converted.iter().collect::<SmallVec<[&Tensor; 3]>>(), scalars);
    }
    let dtype = if row.output == Output::Bool { DType::Bool } else { common };
    let computed = row.specialise(scalars, common);
    let params = Params::from_scalars(computed.scalars);
    if let Some(derivative) = derivative_of_result(row)
        && dtype.is_float()
        && autograd::is_tracked(inputs)
    {
        let out = apply_one(row.name, inputs, params, computed.expr, dtype)?;
        autograd::note_recipe(&out, inputs, || formula_recipe(row.name, params, computed.expr, dtype));
        return Ok(record_derivative_of_result(row.name, out, inputs[0], derivative));
    }
    apply_tracked(row.name, inputs, params, computed.expr, dtype, &|i| computed.derivatives[i].clone())
}

/// Returns the derivative of a row as a formula of its result, if that is as accurate as a formula of the operand; else `None`. Autograd
/// then saves the result instead of the operand, which may change or be freed.
pub(crate) fn derivative_of_result(row: &'static Row) -> Option<Expr> {
    use table::rows::{exp, relu};
    match row {
        row if std::ptr::eq(row, &relu) => Some(relu.derivatives()[0].clone()), // the result is positive exactly where the operand is
        row if std::ptr::eq(row, &exp) => Some(Expr::input(0)),
        _ => None,
    }
}

/// Records `out`, the result of a row applied to `input`. `derivative` is a formula of `out`.
fn record_derivative_of_result(op: &'static str, out: Tensor, input: &Tensor, derivative: Expr) -> Tensor {
    let (saved, dtype) = (Saved::new(&out), input.dtype);
    autograd::record_differentiable(op, out, &[input], move |ctx| {
        let (result, grad) = (ctx.unpack_result(&saved)?, ctx.grad()?);
        let (operands, product) = ([&result, &grad], Expr::input(1) * &derivative);
        let gradient = match ctx.slot(0) {
            Some(slot) => {
                apply_into(op, &operands, Params::default(), &[product], &[&slot])?;
                slot
            }
            None => apply_tracked(op, &operands, Params::default(), &product, dtype, &|i| product.diff(i))?,
        };
        Ok(SmallVec::from_iter([Some(gradient)]))
    })
}

/// Applies a row in place: the result replaces the row's first input.
#[track_caller]
pub(crate) fn apply_row_(row: &'static Row, inputs: &[&Tensor], scalars: &[Scalar]) -> Result<()> {
    let _caller = Caller::enter();
    same_device(row.name, inputs)?;
    let (target, others) = (inputs[0], &inputs[1..]);
    let common = common_dtype(row, inputs, scalars)?;
    let mut held = SmallVec::new();
    let scalars = row.scalars_in(scalars, common, &mut held)?;
    if row.output == Output::Same {
        promote::check_in_place_dtype(row.name, common, target)?;
    }
    if let Some(change) = autograd::begin_in_place(row.name, target, others)? {
        return apply_row_recorded(row, change, inputs, scalars, common);
    }
    apply_row_into(row, inputs, scalars, common, target)
}

/// Writes the result of a row to `target`, outside the graph.
#[inline]
fn apply_row_into(
    row: &'static Row,
    inputs: &[&Tensor],
    scalars: &[Scalar],
    common: DType,
    target: &Tensor,
) -> Result<()> {
    let arguments = || scalars.iter().map(|&s| s.into()).collect();
    if let Some(out) = call_replacement(row.name, inputs, arguments)? {
        return target.copy_(&out[0]).map(|_| ());
    }
    let computed = row.specialise(scalars, common);
    let params = Params::from_scalars(computed.scalars);
    let expr = slice::from_ref(computed.expr);
    if !all_have_dtype(common, row, inputs)
        && let Some(inputs) = convert_operands(row, inputs, common)?
    {
        return apply_into(row.name, &inputs.iter().collect::<SmallVec<[&Tensor; 3]>>(), params, expr, &[target]);
    }
    apply_into(row.name, inputs, params, expr, &[target])
}

/// Applies a row in place like [`apply_row_`], with tracked inputs. Elements that the derivatives read are copied before they change.
#[cold]
fn apply_row_recorded(
    row: &'static Row,
    change: InPlace,
    inputs: &[&Tensor],
    scalars: &[Scalar],
    common: DType,
) -> Result<()> {
    let target = inputs[0];
    let fits = common == target.dtype && convert_operands(row, inputs, common)?.is_none();
    if !fits || registered_name(row.name, target.device().into()).is_some() {
        let copy = change.copy()?;
        let inputs: SmallVec<[&Tensor; 3]> = std::iter::once(&copy).chain(inputs[1..].iter().copied()).collect();
        return target.copy_(&apply_row(row, &inputs, scalars)?).map(|_| ());
    }
    let computed = row.specialise(scalars, common);
    let derivative = |i: usize| match row.output {
        Output::Bool => Expr::constant(0.0),
        _ => computed.derivatives[i].clone(),
    };
    let read = |i: usize| (0..inputs.len()).any(|j| inputs[j].requires_grad() && derivative(j).uses_input(i));
    let of_result = derivative_of_result(row);
    let before = |(i, t): (usize, &&Tensor)| match t.shares_storage(target) && read(i) && of_result.is_none() {
        true => Ok(Tensor { made_by: t.node(), ..t.deep_copy(false)? }),
        false => Ok(t.shallow_clone()),
    };
    let kept = inputs.iter().enumerate().map(before).collect::<Result<SmallVec<[Tensor; 3]>>>()?;
    let params = Params::from_scalars(computed.scalars);
    apply_into(row.name, inputs, params, slice::from_ref(computed.expr), &[target])?;
    let kept: SmallVec<[&Tensor; 3]> = kept.iter().collect();
    change.finish(|out| match of_result {
        Some(derivative) => record_derivative_of_result(row.name, out, target, derivative),
        None => record_formula(row.name, out, &kept, params, &derivative),
    });
    Ok(())
}

/// Generates two methods of `Tensor` for each row: one that returns a new tensor, and the in-place form.
macro_rules! methods {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident $args:tt $(+ $inplace:ident)?: $accepts:ident -> $output:ident
        $formula:tt $reference:tt on $domain:tt
        $(masks $masks:tt)? $(derivative $derivative:tt)? $(numbers $numbers:tt)?;
    )*) => {
        /// Elementwise operations, one for each row of [`ROWS`](crate::ops::ROWS). Operands broadcast as in NumPy and may have any
        /// strides.
        ///
        /// # Errors
        /// All methods fail for shapes that do not broadcast, operands on different devices, an integer divided by zero, and lack of
        /// memory. In-place methods also fail if the result has another shape or dtype, or if elements of the tensor overlap. Outside
        /// [`no_grad`](crate::no_grad), in-place methods fail for a leaf that requires a gradient and for a view of such a leaf.
        impl crate::tensor::Tensor { $(
            methods!(@method [$($doc),+] $name [crate::tensor::Tensor] self apply_row [] $name $args);
            $(methods!(
                @method [concat!("The in-place form of [`", stringify!($name), "`](Self::", stringify!($name), ").")]
                $inplace [&crate::tensor::Tensor] self apply_row_ [.map(|()| self)] $name $args
            );)?
        )* }
    };
    (@method [$($doc:expr),+] $method:ident [$out:ty] $this:ident $apply:ident [$($then:tt)*] $row:ident
        ($x:ident $(, $other:ident)* $(; $($s:ident $($called:literal)? = $sample:literal $(or $default:literal)?),+)?)) => {
        $(#[doc = $doc])+
        #[track_caller]
        pub fn $method(
            &$this,
            $($other: &crate::tensor::Tensor,)*
            $($($s: impl Into<crate::Scalar>,)+)?
        ) -> crate::Result<$out> {
            $apply(&crate::expr::table::rows::$row, &[$this $(, $other)*], &[$($($s.into()),+)?]) $($then)*
        }
    };
}

rows!(methods);

/// Computes one formula and records it if an input is tracked. The backward pass computes the gradients of all inputs in one launch.
pub(crate) fn apply_tracked(
    op: &'static str,
    inputs: &[&Tensor],
    params: Params,
    expr: &Expr,
    dtype: DType,
    derivative: &dyn Fn(usize) -> Expr,
) -> Result<Tensor> {
    if !dtype.is_float() || !autograd::is_tracked(inputs) {
        return apply_one(op, inputs, params, expr, dtype);
    }
    let out = match autograd::is_gradients_only() {
        true => allocate_broadcast_result(op, inputs, dtype, inputs[0].device())?,
        false => apply_one(op, inputs, params, expr, dtype)?,
    };
    let out = record_formula(op, out, inputs, params, derivative);
    autograd::note_recipe(&out, inputs, || formula_recipe(op, params, expr, dtype)); // after the inputs are saved
    Ok(out)
}

/// Returns a closure that computes the formula again.
fn formula_recipe(
    op: &'static str,
    params: Params,
    expr: &Expr,
    dtype: DType,
) -> impl Fn(&[&Tensor]) -> Result<Tensor> + Send + Sync + 'static {
    let (scalars, seeds): (SmallVec<[Scalar; 2]>, SmallVec<[Seed; 1]>) = (params.scalars.into(), params.seeds.into());
    let (base, expr) = (params.base.map(Tensor::shallow_clone), expr.clone());
    move |x| apply_one(op, x, Params { scalars: &scalars, seeds: &seeds, base: base.as_ref() }, &expr, dtype)
}

/// Records `out` as a formula of `inputs`. Never inlined, so that untracked results are not moved an extra time.
#[inline(never)]
pub(crate) fn record_formula(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    params: Params,
    derivative: &dyn Fn(usize) -> Expr,
) -> Tensor {
    let derivatives: SmallVec<[Option<Expr>; 3]> =
        inputs.iter().enumerate().map(|(i, t)| t.requires_grad().then(|| derivative(i))).collect();
    // Only inputs that a derivative reads are saved.
    let used = |i: usize| derivatives.iter().flatten().any(|d| d.uses_input(i));
    let saved: SmallVec<[Option<Saved>; 3]> =
        inputs.iter().enumerate().map(|(i, t)| used(i).then(|| Saved::new(t))).collect();
    let layouts: SmallVec<[(Shape, DType); 3]> = inputs.iter().map(|t| (t.shape().clone(), t.dtype)).collect();
    let scalars: SmallVec<[Scalar; 2]> = SmallVec::from_slice(params.scalars);
    let seeds: SmallVec<[Seed; 1]> = SmallVec::from_slice(params.seeds);
    let base = params.base.map(Tensor::shallow_clone);
    autograd::record_differentiable(op, out, inputs, move |ctx| {
        let grad = ctx.grad()?;
        let saved =
            saved.iter().map(|s| s.as_ref().map(|s| s.get(op)).transpose()).collect::<Result<SmallVec<[_; 3]>>>()?;
        // The gradient is the last operand. It is also passed as a placeholder for inputs that no derivative reads.
        let operands: SmallVec<[&Tensor; 4]> =
            saved.iter().map(|s| s.unwrap_or(&grad)).chain(std::iter::once(&grad)).collect();
        let upstream = Expr::input(layouts.len());
        let params = Params { scalars: &scalars, seeds: &seeds, base: base.as_ref() };
        let mut exprs: SmallVec<[Expr; 2]> = SmallVec::new();
        let mut targets: SmallVec<[(usize, Tensor); 2]> = SmallVec::new();
        let mut gradients: autograd::Gradients = SmallVec::from_elem(None, 0);
        gradients.resize_with(layouts.len(), || None);
        for (i, derivative) in derivatives.iter().enumerate() {
            let Some(derivative) = derivative.as_ref().filter(|_| ctx.needs_gradient(i)) else { continue };
            let (shape, dtype) = &layouts[i];
            match derivative.as_const() {
                Some(0.0) => {}
                Some(1.0) if *dtype == grad.dtype => gradients[i] = Some(grad.sum_to(shape)?),
                // For higher orders, the gradient is computed by a recorded operation that has derivatives of its own.
                _ if ctx.create_graph() => {
                    let product = &upstream * derivative;
                    let gradient = apply_tracked(op, &operands, params, &product, *dtype, &|j| product.diff(j))?;
                    gradients[i] = Some(gradient.sum_to(shape)?);
                }
                _ => {
                    // One launch writes each storage only once: of two gradients in one flat buffer, only the first is written directly
                    // to the buffer.
                    let slot = if shape == grad.shape() { ctx.slot(i) } else { None };
                    let slot = slot.filter(|s| targets.iter().all(|(_, t): &(usize, Tensor)| !t.shares_storage(s)));
                    let target = match slot {
                        Some(slot) => slot,
                        None => allocate_broadcast_result(op, &operands, *dtype, grad.device())?,
                    };
                    exprs.push(&upstream * derivative);
                    targets.push((i, target));
                }
            }
        }
        if !exprs.is_empty() {
            let outs: SmallVec<[&Tensor; 2]> = targets.iter().map(|(_, t)| t).collect();
            apply_into(op, &operands, params, &exprs, &outs)?;
        }
        for (i, target) in targets {
            gradients[i] = Some(target.sum_to(&layouts[i].0)?);
        }
        Ok(gradients)
    })
}

/// Computes a formula over broadcast tensors of any dtypes, given its derivative by each input, and records it if an input is tracked.
pub(crate) fn apply_formula(
    op: &'static str,
    inputs: &[&Tensor],
    dtype: DType,
    expr: &Expr,
    derivative: impl Fn(usize) -> Expr,
) -> Result<Tensor> {
    apply_tracked(op, inputs, Params::default(), expr, dtype, &derivative)
}
