//! The table of reductions: the contents of a row, and what is generated from it.
//!
//! A row (they are in `reductions.rs`) has the combination of elements, a formula before and one after it, and the gradient. The
//! method of `Tensor`, both devices' code, the entry in the catalogue, its documentation and the generated tests follow from it.

use std::fmt;
use std::sync::OnceLock;

use crate::backend::problem::reduction::{Combination, Element, Rescaled, Rule};
use crate::expr::program::Program;
use crate::layout::dims::ReduceDims;
use crate::ops::dispatch::operation::{Dtypes, Gives};
use crate::ops::dispatch::prelude::*;
use crate::ops::reduce::gradient::apply_reduction;
use crate::ops::reduce::reductions::reductions;
use crate::{Compute, DType, Expr, Result, Tensor};

impl Rule {
    pub(crate) fn accumulator(&self, dtype: DType) -> Compute {
        if self.counts { Compute::I64 } else { dtype.compute() }
    }

    /// The rules that give partial results and that reduce those. Partial results of rules that are rescaled are in range: parts of
    /// the mean, and norms.
    pub(crate) fn stages(&self) -> (Rule, Rule) {
        let sum = |finish| Rule { element: Element::Itself, finish, rescaled: None, ..self.clone() };
        match self.rescaled {
            None => (Rule { finish: None, ..self.clone() }, sum(self.finish.clone())),
            Some(Rescaled::Mean) => (self.clone(), sum(None)),
            Some(Rescaled::Norm) => (self.clone(), Rule { finish: Some(Expr::input(0).sqrt()), ..self.clone() }),
            Some(Rescaled::Variance) => {
                let finish = self.finish.as_ref().map(Expr::sqrt);
                (Rule { finish, rescaled: Some(Rescaled::Norm), ..self.clone() }, Rule { finish: None, ..self.clone() })
            }
        }
    }
}

/// A gradient's formula: of the element, the result, the result's gradient and the number of elements.
type Derivative = fn(&Expr, &Expr, &Expr, &Expr) -> Expr;

/// How the gradient comes back.
pub(crate) enum Gradient {
    None,
    Each(Derivative),
    /// In equal parts to the elements that the result equals.
    Shared,
    /// To each the product of the others.
    Others,
}

/// One reduction.
#[non_exhaustive]
pub struct ReductionRow {
    /// The method's name.
    pub name: &'static str,
    /// What it computes.
    pub doc: &'static str,
    /// The dtypes it takes.
    pub takes: Dtypes,
    /// The dtype it gives.
    pub gives: Gives,
    /// The range to test on.
    pub domain: (f64, f64),
    /// The operation in f64 on the elements of one result, written without [`Expr`].
    pub reference: fn(&[f64]) -> f64,
    pub(crate) of_nothing: Option<f64>,
    pub(crate) gradient: Gradient,
    combination: Combination,
    element: fn(&Expr) -> Expr,
    finish: fn(&Expr, &Expr) -> Expr,
    compiled: OnceLock<Compiled>,
}

/// What is made of a row once.
struct Compiled {
    rule: Rule,
    derivative: Option<Expr>,
    grows: bool,
}

impl ReductionRow {
    fn compiled(&self) -> &Compiled {
        self.compiled.get_or_init(|| {
            let (x, y, g, n) = (Expr::input(0), Expr::input(1), Expr::input(2), Expr::scalar(0));
            let element = match (self.element)(&x) {
                e if e == x => Element::Itself,
                e if e == x.ne(0.0) => Element::NonZero,
                e => Element::Of(e.fixed()),
            };
            let finish = Some((self.finish)(&x, &n)).filter(|e| *e != x).map(|e| e.fixed());
            let counts = matches!(self.gives, Gives::I64 | Gives::Bool) && !self.combination.is_arg();
            let rescaled = match (&element, &finish) {
                (Element::Of(e), Some(finish)) if *e == x.square() && *finish == x.sqrt() => Some(Rescaled::Norm),
                (Element::Itself, Some(finish)) if *finish == &x / &n => Some(Rescaled::Mean),
                _ => None,
            };
            let derivative = match self.gradient {
                Gradient::Each(derivative) => Some(derivative(&x, &y, &g, &n)),
                _ => None,
            };
            let sums = matches!(self.combination, Combination::Add | Combination::Mul) && !counts;
            let grows = sums && finish.as_ref().is_none_or(|e| Program::of(std::slice::from_ref(e)).scalars() == 0);
            Compiled {
                rule: Rule { combination: self.combination, element, finish, rescaled, counts },
                derivative,
                grows,
            }
        })
    }

    pub(crate) fn rule(&self) -> &Rule {
        &self.compiled().rule
    }

    /// The gradient's formula, where it has one: of element, result and gradient, and of the number as scalar 0.
    pub(crate) fn derivative(&self) -> Option<&Expr> {
        self.compiled().derivative.as_ref()
    }

    /// Whether the result may be far greater than the elements: that of sums and products, not of means. Autocast widens
    /// halves there.
    pub(crate) fn grows(&self) -> bool {
        self.compiled().grows
    }

    /// Whether it can be empty: whether it gives something of nothing.
    pub fn takes_nothing(&self) -> bool {
        self.of_nothing.is_some()
    }

    /// The dtype of the result.
    pub(crate) fn output(&self, dtype: DType) -> Result<DType> {
        if self.takes.contain(dtype) {
            return Ok(self.gives.of(dtype));
        }
        Err(Error::UnsupportedDType { op: self.name, dtype, expected: "floats: convert with .to_dtype()" })
    }
}

impl fmt::Debug for ReductionRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.doc.trim())
    }
}

/// Makes the static of each row, the list of them, their entries in the catalogue and the methods of `Tensor`.
macro_rules! define {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident $torch:literal: $takes:ident -> $gives:ident,
            $combination:ident $element:expr => $finish:expr,
            nothing $nothing:expr, gradient $gradient:ident $(($derivative:expr))?, is $reference:expr,
            on $low:literal..$high:literal;
    )*) => {
        /// Every row by its name.
        #[allow(non_upper_case_globals)]
        pub(crate) mod rows {
            use std::sync::OnceLock;
            use super::{Combination, Dtypes, Gives, Gradient, ReductionRow};
            $(
                pub(crate) static $name: ReductionRow = ReductionRow {
                    name: stringify!($name),
                    doc: concat!($($doc, "\n"),+),
                    takes: Dtypes::$takes,
                    gives: Gives::$gives,
                    domain: ($low, $high),
                    reference: $reference,
                    of_nothing: $nothing,
                    gradient: Gradient::$gradient $(($derivative))?,
                    combination: Combination::$combination,
                    element: $element,
                    finish: $finish,
                    compiled: OnceLock::new(),
                };
            )*
        }

        /// Every reduction, in the order of the documentation.
        pub static REDUCTIONS: &[&ReductionRow] = &[$(&rows::$name),*];

        operations! { $($name(input: x, dim: dims, keepdim: bool = false) $torch: Reduction, $takes -> $gives, $gradient;)* }

        /// Reductions over any dims: one method for each row of [`REDUCTIONS`](crate::ops::REDUCTIONS).
        ///
        /// # Errors
        /// Each of them: [`Error::DimOutOfRange`]; [`Error::Invalid`] for a dim given twice, and where a reduced dim is empty
        /// and there is no result of nothing; [`Error::UnsupportedDType`] for integers and bool where it is of floats;
        /// [`Error::OutOfMemory`].
        impl Tensor { $(
            $(#[doc = $doc])+
            #[doc = concat!("\n\nPyTorch: `", $torch, "`.")]
            #[track_caller]
            pub fn $name(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
                let dims = dims.into();
                replaced!(stringify!($name), [self], &dims, keepdim);
                apply_reduction(&rows::$name, self, &dims, keepdim)
            }
        )* }
    };
}

reductions!(define);
