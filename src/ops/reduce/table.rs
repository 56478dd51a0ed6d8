//! The table of reductions: the fields of a row, and the code that is generated from it.
//!
//! A row (see `reductions.rs`) states how elements are combined, a formula before and a formula after the combination, and the gradient.
//! From the row follow the method of `Tensor`, the code of both backends, the catalogue entry, the documentation and the tests.

use std::fmt;
use std::sync::OnceLock;

use crate::Compute;
use crate::backend::problem::reduction::{Combination, Element, Rescaled, Rule};
use crate::expr::program::Program;
use crate::layout::dims::ReduceDims;
use crate::ops::dispatch::operation::{Dtypes, ResultDType};
use crate::ops::dispatch::prelude::*;
use crate::ops::reduce::reductions::reductions;

impl Rule {
    pub(crate) fn accumulator(&self, dtype: DType) -> Compute {
        if self.counts { Compute::I64 } else { dtype.compute() }
    }

    /// Returns the rules of the two stages of a reduction: the first computes partial results, and the second reduces the partial
    /// results. For rescaled rules, partial results stay in range, because each is a part of the mean, or a norm.
    pub(crate) fn stages(&self) -> (Rule, Rule) {
        let sum = |finish| Rule { element: Element::Identity, finish, rescaled: None, ..self.clone() };
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

/// The formula of a gradient, from the element, the result, the result's gradient and the number of elements.
type Derivative = fn(&Expr, &Expr, &Expr, &Expr) -> Expr;

/// The rule for the gradient of a reduction.
pub(crate) enum Gradient {
    None,
    Formula(Derivative),
    /// The gradient is divided evenly among the elements that equal the result.
    EvenAmongTies,
    /// The gradient of an element is the product of all other elements.
    ProductOfOthers,
}

/// One reduction of the table.
#[non_exhaustive]
pub struct ReductionRow {
    /// The method's name.
    pub name: &'static str,
    /// The documentation of the method.
    pub doc: &'static str,
    /// The dtypes that the reduction accepts.
    pub takes: Dtypes,
    /// The dtype of the result.
    pub gives: ResultDType,
    /// The range from which tests draw values.
    pub domain: (f64, f64),
    /// The operation in f64, written without [`Expr`]: reduces the given elements to one result.
    pub reference: fn(&[f64]) -> f64,
    pub(crate) value_of_no_elements: Option<f64>,
    pub(crate) gradient: Gradient,
    combination: Combination,
    element: fn(&Expr) -> Expr,
    finish: fn(&Expr, &Expr) -> Expr,
    compiled: OnceLock<CompiledRow>,
}

/// The data computed from a row on first use.
struct CompiledRow {
    rule: Rule,
    derivative: Option<Expr>,
    can_exceed_elements: bool,
}

impl ReductionRow {
    fn compiled(&self) -> &CompiledRow {
        self.compiled.get_or_init(|| {
            let (x, y, g, n) = (Expr::input(0), Expr::input(1), Expr::input(2), Expr::scalar(0));
            let element = match (self.element)(&x) {
                e if e == x => Element::Identity,
                e if e == x.ne(0.0) => Element::NonZero,
                e => Element::Formula(e.with_fixed_program()),
            };
            let finish = Some((self.finish)(&x, &n)).filter(|e| *e != x).map(|e| e.with_fixed_program());
            let counts = matches!(self.gives, ResultDType::I64 | ResultDType::Bool) && !self.combination.is_arg();
            let rescaled = match (&element, &finish) {
                (Element::Formula(e), Some(finish)) if *e == x.square() && *finish == x.sqrt() => Some(Rescaled::Norm),
                (Element::Identity, Some(finish)) if *finish == &x / &n => Some(Rescaled::Mean),
                _ => None,
            };
            let derivative = match self.gradient {
                Gradient::Formula(derivative) => Some(derivative(&x, &y, &g, &n)),
                _ => None,
            };
            let sums = matches!(self.combination, Combination::Add | Combination::Mul) && !counts;
            let can_exceed_elements =
                sums && finish.as_ref().is_none_or(|e| Program::shared(std::slice::from_ref(e)).scalars() == 0);
            CompiledRow {
                rule: Rule { combination: self.combination, element, finish, rescaled, counts },
                derivative,
                can_exceed_elements,
            }
        })
    }

    pub(crate) fn rule(&self) -> &Rule {
        &self.compiled().rule
    }

    /// Returns the formula of the gradient if the row has one, else `None`. Inputs are the element, the result and the result's gradient;
    /// scalar 0 is the number of elements.
    pub(crate) fn derivative(&self) -> Option<&Expr> {
        self.compiled().derivative.as_ref()
    }

    /// True if the result may be much larger than the elements, as for sums and products but not for means. Autocast computes such
    /// reductions in f32.
    pub(crate) fn can_exceed_elements(&self) -> bool {
        self.compiled().can_exceed_elements
    }

    /// True if the reduction of no elements has a result.
    pub fn allows_no_elements(&self) -> bool {
        self.value_of_no_elements.is_some()
    }

    /// Returns the dtype of the result for elements of `dtype`.
    pub(crate) fn output(&self, dtype: DType) -> Result<DType> {
        if self.takes.contains(dtype) {
            return Ok(self.gives.resolve(dtype));
        }
        Err(Error::UnsupportedDType { op: self.name, dtype, expected: "floats: convert with .to_dtype()" })
    }
}

impl fmt::Debug for ReductionRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.doc.trim())
    }
}

/// Generates a static for each row, the list of rows, the catalogue entries and the methods of `Tensor`.
macro_rules! define_reductions {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident $torch:literal: $takes:ident -> $gives:ident,
            $combination:ident $element:expr => $finish:expr,
            nothing $nothing:expr, gradient $gradient:ident $(($derivative:expr))?, is $reference:expr,
            on $low:literal..$high:literal;
    )*) => {
        #[allow(non_upper_case_globals)]
        pub(crate) mod rows {
            use std::sync::OnceLock;
            use super::{Combination, Dtypes, ResultDType, Gradient, ReductionRow};
            $(
                pub(crate) static $name: ReductionRow = ReductionRow {
                    name: stringify!($name),
                    doc: concat!($($doc, "\n"),+),
                    takes: Dtypes::$takes,
                    gives: ResultDType::$gives,
                    domain: ($low, $high),
                    reference: $reference,
                    value_of_no_elements: $nothing,
                    gradient: Gradient::$gradient $(($derivative))?,
                    combination: Combination::$combination,
                    element: $element,
                    finish: $finish,
                    compiled: OnceLock::new(),
                };
            )*
        }

        /// All reductions, in the order of the documentation.
        pub static REDUCTIONS: &[&ReductionRow] = &[$(&rows::$name),*];

        operations! { $($name(input: x, dim: dims, keepdim: bool = false) $torch: Reduction, $takes -> $gives, $gradient;)* }

        /// Reductions over any dims: one method for each row of [`REDUCTIONS`](crate::ops::REDUCTIONS).
        ///
        /// # Errors
        /// All methods fail with [`Error::DimOutOfRange`] for a dim out of range; [`Error::Invalid`] for a dim that is given twice, and
        /// for an empty reduced dim if the reduction of no elements has no result; [`Error::UnsupportedDType`] for integers and bool if
        /// the method takes floats.
        impl Tensor { $(
            $(#[doc = $doc])+
            #[doc = concat!("\n\nPyTorch: `", $torch, "`.")]
            #[track_caller]
            pub fn $name(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
                let dims = dims.into();
                return_replacement!(stringify!($name), [self], &dims, keepdim);
                rows::$name.apply_recorded(self, &dims, keepdim)
            }
        )* }
    };
}

reductions!(define_reductions);
