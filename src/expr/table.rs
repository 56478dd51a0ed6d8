//! The table of elementwise operations: the contents of a row, and everything derived from a row.
//!
//! A row in `rows.rs` is a name, a formula, a closed form of the formula in f64, and a domain to test it on. Everything else follows: the
//! methods of `Tensor`, including the in-place form, the CPU's loop, the OpenCL kernel, the gradient, the generated tests and the line in
//! the documentation. To add an operation, add a row.

use std::fmt;
use std::sync::OnceLock;

use smallvec::SmallVec;

use crate::expr::Expr;
use crate::expr::rows::rows;
use crate::{DType, Result, Scalar};

/// The dtype of a row's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Output {
    /// The operands' common dtype, or the default dtype if [`Accepts::Float`] converted integers.
    Same,
    /// `Bool`.
    Bool,
}

/// The dtypes that a row accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Accepts {
    /// Every dtype, without conversion.
    Any,
    /// Floats. Integers and `Bool` are converted to the default dtype first, as in PyTorch.
    Float,
    /// Integers and `Bool`. Floats are an error.
    Integer,
}

/// How a scalar argument is checked and rounded when the operands have a given dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// An element of the result.
    Element,
    /// A lower bound; elements below the bound are replaced by it.
    Lower,
    /// An upper bound; elements above the bound are replaced by it.
    Upper,
    /// A factor.
    Factor,
    /// A number with which elements are compared, rounded to the elements' dtype.
    Compared,
}

impl Role {
    /// Checks the argument against `dtype` and returns the number that the row computes with.
    fn apply(self, op: &'static str, number: Scalar, dtype: DType) -> Result<Scalar> {
        let x = number.to_f64();
        match self {
            Role::Element => return number.stored(op, dtype),
            Role::Factor => number.check_factor(op, dtype)?,
            // A bound that excludes no number of the dtype has no effect, and is not an error.
            Role::Lower if x > 0.0 => number.check_within(op, dtype)?,
            Role::Upper if x < 0.0 => number.check_within(op, dtype)?,
            Role::Compared if matches!(dtype, DType::F16 | DType::BF16) && dtype.rounded(x).is_finite() => {
                return Ok(dtype.rounded(x).into());
            }
            _ => {}
        }
        Ok(number)
    }
}

/// Builds an expression from the operands and the scalar arguments.
type Formula<T> = fn(&[Expr], &[Expr]) -> T;

/// One elementwise operation.
#[non_exhaustive]
pub struct Row {
    /// The method's name.
    pub name: &'static str,
    /// A description of the result, and the name of PyTorch's operation.
    pub doc: &'static str,
    /// The name of the in-place method, if there is one.
    pub in_place: Option<&'static str>,
    /// The number of tensor operands.
    pub arity: usize,
    /// PyTorch's names of the operands.
    pub operands: &'static [&'static str],
    /// The operands that are masks: of any dtype, and ignored when the result's dtype is derived.
    pub masks: &'static [usize],
    /// A value for each scalar argument, with which tests call the operation.
    pub samples: &'static [f64],
    /// The names of the scalar arguments, and the defaults for calls by name that omit them.
    pub scalars: &'static [(&'static str, Option<f64>)],
    /// The accepted dtypes.
    pub accepts: Accepts,
    /// The result's dtype.
    pub output: Output,
    /// For each operand, the range in which tests draw its elements; for [`Accepts::Integer`], integers in this range. Within the range
    /// the formula is finite, and smooth except for kinks and jumps at single points.
    pub domain: &'static [(f64, f64)],
    /// The operation on one element, in f64 and without [`Expr`]. The arguments are one element of each operand, and the scalar
    /// arguments.
    pub reference: fn(&[f64], &[f64]) -> f64,
    formula: Formula<Expr>,
    derivative: Option<Formula<Vec<Expr>>>,
    roles: &'static [(&'static str, Role)],
    derived: OnceLock<Derived>,
}

/// The expressions of a row, built on first use.
struct Derived {
    expr: Expr,
    derivatives: Vec<Expr>,
}

impl Row {
    fn derived(&self) -> &Derived {
        self.derived.get_or_init(|| {
            let inputs: Vec<Expr> = (0..self.arity).map(Expr::input).collect();
            let scalars: Vec<Expr> = (0..self.samples.len()).map(Expr::scalar).collect();
            let expr = (self.formula)(&inputs, &scalars).with_fixed_program();
            let derivatives = match self.derivative {
                Some(of) => of(&inputs, &scalars),
                None => (0..self.arity).map(|i| expr.diff(i)).collect(),
            };
            Derived { expr, derivatives }
        })
    }

    /// Returns the row's formula.
    pub fn expr(&self) -> &Expr {
        &self.derived().expr
    }

    /// Builds the formula over these operands and scalar arguments.
    pub(crate) fn build(&self, operands: &[Expr], scalars: &[Expr]) -> Expr {
        (self.formula)(operands, scalars)
    }

    /// Returns the scalar arguments that the row computes with in `dtype`. Arguments that had to be checked or rounded are stored in
    /// `buffer`.
    pub(crate) fn scalars_in<'a>(
        &self,
        scalars: &'a [Scalar],
        dtype: DType,
        buffer: &'a mut SmallVec<[Scalar; 3]>,
    ) -> Result<&'a [Scalar]> {
        if self.roles.is_empty() {
            return Ok(scalars);
        }
        buffer.extend_from_slice(scalars);
        for (number, (name, _)) in buffer.iter_mut().zip(self.scalars) {
            if let Some((_, role)) = self.roles.iter().find(|(of, _)| of == name) {
                *number = role.apply(self.name, *number, dtype)?;
            }
        }
        Ok(buffer)
    }

    /// Returns the derivative with respect to each operand, which is the constant 0 if there is none. A row states its own derivative if
    /// the symbolic derivative would lose digits, or be undefined where the true derivative is defined.
    pub fn derivatives(&self) -> &[Expr] {
        &self.derived().derivatives
    }
}

impl fmt::Debug for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.doc.trim())
    }
}

/// Defines a static for each row, and the list of all rows. `rows!` calls this macro with every row.
macro_rules! define {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident ($($x:ident),+ $(; $($s:ident $($called:literal)? = $sample:literal $(or $default:literal)?),+)?) $(+ $inplace:ident)?: $accepts:ident -> $output:ident
        { $formula:expr } { $reference:expr } on [$($low:literal..$high:literal),+]
        $(masks [$($mask:literal),+])? $(derivative [$($derivative:expr),+])? $(numbers [$($number:ident $role:ident),+])?;
    )*) => {
        /// All rows, each under its name.
        #[allow(non_upper_case_globals, unused_variables)]
        pub(crate) mod rows {
            use std::sync::OnceLock;
            use crate::expr::table::{Accepts, Expr, Output, Role, Row};
            $(
                pub(crate) static $name: Row = Row {
                    name: stringify!($name),
                    doc: concat!($($doc),+),
                    in_place: [$(Some(stringify!($inplace)),)? None][0],
                    arity: [$(stringify!($x)),+].len(),
                    operands: &[$(operand!($x)),+],
                    masks: &[$($($mask),+)?],
                    samples: &[$($($sample),+)?],
                    scalars: &[$($(([$($called,)? stringify!($s)][0], [$(Some($default),)? None][0])),+)?],
                    accepts: Accepts::$accepts,
                    output: Output::$output,
                    domain: &[$(($low, $high)),+],
                    reference: |inputs, scalars| {
                        let [$($x),+] = *inputs else { return f64::NAN };
                        $(let [$($s),+] = *scalars else { return f64::NAN };)?
                        $reference
                    },
                    formula: |inputs, scalars| {
                        let [$($x),+] = inputs else { unreachable!("one expression for each operand") };
                        $(let [$($s),+] = scalars else { unreachable!("one expression for each scalar") };)?
                        $formula
                    },
                    derivative: derivative!([$($x),+] [$($($s),+)?] $([$($derivative),+])?),
                    roles: &[$($((stringify!($number), Role::$role)),+)?],
                    derived: OnceLock::new(),
                };
            )*
        }

        /// Every elementwise operation, in the order of the documentation.
        pub static ROWS: &[&Row] = &[$(&rows::$name),*];
    };
}

/// Returns PyTorch's name of an operand: `input` for the tensor on which the method is called.
macro_rules! operand {
    (x) => {
        "input"
    };
    ($x:ident) => {
        stringify!($x)
    };
}

macro_rules! derivative {
    ([$($x:ident),+] [$($s:ident),*]) => { None };
    ([$($x:ident),+] [$($s:ident),*] [$($d:expr),+]) => {
        Some(|inputs, scalars| {
            let [$($x),+] = inputs else { unreachable!("one expression for each operand") };
            let [$($s),*] = scalars else { unreachable!("one expression for each scalar") };
            vec![$($d),+]
        })
    };
}

rows!(define);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::interpreter::{Scratch, TILE, Tile, TileIn};
    use crate::backend::cpu::scalar::Number;
    use crate::expr::philox::{Seed, Uniform};
    use crate::expr::program::Program;

    /// Returns `TILE` points of the row's domain, one column for each operand. All coordinates are exact in f32.
    fn points(row: &Row) -> Vec<Vec<f64>> {
        let column = |(k, &(low, high)): (usize, &(f64, f64))| {
            let mut u = vec![0.0; TILE];
            Seed { key: 7, stream: k as u64 }.fill::<Uniform, _>(0, &mut u, f64::from);
            let whole = |x: f64| if row.accepts == Accepts::Integer { x.floor() } else { x };
            u.iter().map(|u| whole(f64::from((low + u * (high - low)) as f32))).collect()
        };
        row.domain.iter().enumerate().map(column).collect()
    }

    fn run<C: Number>(row: &Row, expr: &Expr, columns: &[Vec<f64>]) -> Vec<f64> {
        let columns: Vec<Vec<C>> = columns.iter().map(|c| c.iter().map(|&x| C::from_f64(x)).collect()).collect();
        let inputs: Vec<_> = columns.iter().map(|c| TileIn::Slice(c)).collect();
        let scalars: Vec<crate::Scalar> = row.samples.iter().map(|&s| s.into()).collect();
        let tile = Tile { inputs: &inputs, scalars: &scalars, seeds: &[], first: 0, len: TILE };
        let mut out = vec![C::from_f64(0.0); TILE];
        Program::new(std::slice::from_ref(expr)).eval_tile(&tile, &mut Scratch::new(), &mut [&mut out]);
        out.iter().map(|x| x.to_f64()).collect()
    }

    fn at(columns: &[Vec<f64>], i: usize) -> Vec<f64> {
        columns.iter().map(|c| c[i]).collect()
    }

    #[test]
    fn values_match_the_reference() {
        for row in ROWS {
            let columns = points(row);
            if row.accepts == Accepts::Integer {
                let got = run::<i64>(row, row.expr(), &columns);
                let right = |i: usize| (row.reference)(&at(&columns, i), row.samples);
                (0..TILE).for_each(|i| assert_eq!(got[i], right(i), "{} {:?}", row.name, at(&columns, i)));
                continue;
            }
            let (wide, narrow) = (run::<f64>(row, row.expr(), &columns), run::<f32>(row, row.expr(), &columns));
            for i in 0..TILE {
                let x = at(&columns, i);
                let right = (row.reference)(&x, row.samples);
                assert!(
                    (wide[i] - right).abs() <= 1e-13 * right.abs().max(1.0),
                    "{} {x:?}: {} {right}",
                    row.name,
                    wide[i]
                );
                // Scalars are rounded to f32, so a jump of the formula may be at another point than in f64.
                let is_close = (narrow[i] - right).abs() <= 2e-6 * right.abs().max(1.0);
                assert!(is_close, "{} {x:?} in f32: {} {right}", row.name, narrow[i]);
            }
        }
    }

    #[test]
    fn derivatives_match_finite_differences() {
        for row in ROWS.iter().filter(|row| row.accepts != Accepts::Integer) {
            let columns = points(row);
            assert_eq!(row.derivatives().len(), row.arity, "{}", row.name);
            for (k, derivative) in row.derivatives().iter().enumerate() {
                let got = run::<f64>(row, derivative, &columns);
                let mut skipped = 0;
                for (i, &got) in got.iter().enumerate() {
                    let slope = |h: f64| {
                        let mut x = at(&columns, i);
                        let middle = x[k];
                        x[k] = middle + h;
                        let up = (row.reference)(&x, row.samples);
                        x[k] = middle - h;
                        (up - (row.reference)(&x, row.samples)) / (2.0 * h)
                    };
                    // If the slopes for two step widths disagree, a kink or a jump is close, and the point is skipped.
                    let (right, other) = (slope(1e-5), slope(3e-6));
                    let tolerance = 1e-7 * right.abs().max(1.0);
                    if (right - other).abs() > tolerance {
                        skipped += 1;
                        continue;
                    }
                    let x = at(&columns, i);
                    assert!((got - right).abs() <= tolerance, "d {} / d {k} at {x:?}: {got} {right}", row.name);
                }
                assert!(skipped <= 3, "{}: {skipped} kinks", row.name);
            }
        }
    }

    #[test]
    fn rows_declare_their_operands_and_dtypes() {
        for (i, row) in ROWS.iter().enumerate() {
            assert!(ROWS[..i].iter().all(|other| other.name != row.name), "{} twice", row.name);
            assert_eq!(row.expr().arity(), row.arity, "{}", row.name);
            assert_eq!(row.domain.len(), row.arity, "{}", row.name);
            let program = Program::new(std::slice::from_ref(row.expr()));
            assert!(!program.needs_float() || row.accepts == Accepts::Float, "{} takes integers", row.name);
            assert_eq!(program.uses_bits(), row.accepts == Accepts::Integer, "{}", row.name);
            let flat = row.derivatives().iter().all(|d| d.as_const() == Some(0.0));
            assert!(flat || row.accepts != Accepts::Integer, "{} has a gradient", row.name);
            assert!(flat || row.output == Output::Same, "{} has a gradient", row.name);
            assert!(row.masks.iter().all(|&m| row.derivatives()[m].as_const() == Some(0.0)), "{}", row.name);
        }
    }

    #[test]
    fn gradients_at_kinks_match_pytorch() {
        let slope = |row: &'static Row, x: f64| {
            run::<f64>(row, &row.derivatives()[0], &[vec![x; TILE], vec![x; TILE]][..row.arity])[0]
        };
        for row in [&rows::relu, &rows::abs, &rows::relu6, &rows::sign] {
            assert_eq!(slope(row, 0.0), 0.0, "{}", row.name);
        }
        assert_eq!((slope(&rows::maximum, 2.0), slope(&rows::minimum, 2.0)), (0.5, 0.5));
        assert_eq!((slope(&rows::clamp, -1.0), slope(&rows::clamp, 1.5)), (1.0, 1.0));
        assert_eq!((slope(&rows::hardtanh, -1.0), slope(&rows::hardtanh, 1.5)), (0.0, 0.0));
        assert_eq!(slope(&rows::sqrt, 0.0), f64::INFINITY);
        assert_eq!((slope(&rows::sigmoid, 0.0), slope(&rows::logsigmoid, 0.0)), (0.25, 0.5));
        for row in [&rows::sigmoid, &rows::silu, &rows::softplus, &rows::mish, &rows::gelu, &rows::elu, &rows::tanh] {
            for x in [-1e4, -90.0, 0.0, 90.0, 1e4] {
                let f32_slope = run::<f32>(row, &row.derivatives()[0], &[vec![x; TILE]])[0];
                assert!(f32_slope.is_finite() && slope(row, x).is_finite(), "{} at {x}: {f32_slope}", row.name);
            }
        }
        let by_exponent =
            |base: f64| run::<f64>(&rows::pow, &rows::pow.derivatives()[1], &[vec![base; TILE], vec![2.0; TILE]])[0];
        assert_eq!(by_exponent(0.0), 0.0);
    }
}
