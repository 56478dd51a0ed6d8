//! The rows of the table of reductions. A row is
//!
//! ```text
//! /// The documentation of the method.
//! name "PyTorch's name": dtypes it takes -> dtype it gives,
//!     combination  formula of each element => formula of the combined value and the number of elements,
//!     nothing the result for no elements, gradient its rule, is the same in f64, on the range of test values;
//! ```
//!
//! Formulas are [`Expr`](crate::ops::Expr)s. The gradient `Formula` is a formula of an element, the result, the result's gradient and the
//! number of elements. Rows that give `I64` or `Bool` accumulate in i64, and all other rows in the type in which the dtype is computed.

/// Calls a macro with all rows.
macro_rules! reductions {
    ($callback:ident) => {
        $callback! {
            /// The sum over `dims`. Floats keep their dtype; integers and bool give i64. The sum of no elements is 0. A sum of ten million f32 is
            /// accurate to about 1e-6. `keepdim` keeps the reduced dims with size 1.
            ///
            /// ```
            /// use claystone::{Device, Tensor};
            /// let t = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], Device::Cpu)?;
            /// assert_eq!(t.sum(0, false)?.to_vec::<f32>()?, [4.0, 6.0]);
            /// # Ok::<(), claystone::Error>(())
            /// ```
            sum "sum": All -> Sum,
                Add |x| x.clone() => |s, _| s.clone(),
                nothing Some(0.0), gradient Formula(|_, _, g, _| g.clone()), is |v| v.iter().sum(), on -3.0..3.0;
            /// The mean over `dims`. Floats. The mean of no elements is NaN.
            mean "mean": Floats -> Same,
                Add |x| x.clone() => |s, n| s / n,
                nothing Some(f64::NAN), gradient Formula(|_, _, g, n| g * (1.0 / n)),
                is |v| v.iter().sum::<f64>() / v.len() as f64, on -3.0..3.0;
            /// The product over `dims`. The product of no elements is 1. Dtypes as for [`sum`](Tensor::sum). Differentiable, also where
            /// elements are zero.
            prod "prod": All -> Sum,
                Mul |x| x.clone() => |p, _| p.clone(),
                nothing Some(1.0), gradient ProductOfOthers, is |v| v.iter().product(), on 0.5..1.5;
            /// The maximum over `dims`; NaN if any element is NaN. Keeps the dtype. Elements that equal the maximum share the gradient
            /// evenly.
            max "amax": All -> Same,
                Max |x| x.clone() => |m, _| m.clone(),
                nothing None, gradient EvenAmongTies, is |v| v.iter().copied().fold(f64::NEG_INFINITY, f64::max), on -3.0..3.0;
            /// The minimum over `dims`; NaN if any element is NaN. See [`max`](Tensor::max).
            min "amin": All -> Same,
                Min |x| x.clone() => |m, _| m.clone(),
                nothing None, gradient EvenAmongTies, is |v| v.iter().copied().fold(f64::INFINITY, f64::min), on -3.0..3.0;
            /// Returns true if any element over `dims` is not zero, as bool. NaN is not zero. False for no elements.
            any "any": All -> Bool,
                Max |x| x.ne(0.0) => |m, _| m.clone(),
                nothing Some(0.0), gradient None, is |v| f64::from(v.iter().any(|&x| x != 0.0)), on -1.0..2.0;
            /// Returns true if every element over `dims` is not zero, as bool. True for no elements.
            all "all": All -> Bool,
                Min |x| x.ne(0.0) => |m, _| m.clone(),
                nothing Some(1.0), gradient None, is |v| f64::from(v.iter().all(|&x| x != 0.0)), on -1.0..2.0;
            /// The number of nonzero elements over `dims`, as i64.
            count_nonzero "count_nonzero": All -> I64,
                Add |x| x.ne(0.0) => |s, _| s.clone(),
                nothing Some(0.0), gradient None, is |v| v.iter().filter(|&&x| x != 0.0).count() as f64, on -1.0..2.0;
            /// The index of the maximum over `dims`, as i64: its index along a single dim, or its row-major position among several dims. The
            /// first of equal elements, or the first NaN if there is one.
            ///
            /// ```
            /// use claystone::{Device, Tensor};
            /// let t = Tensor::from_slice(&[1f32, 5.0, 2.0, 7.0, 0.0, 7.0], [2, 3], Device::Cpu)?;
            /// assert_eq!(t.argmax(1, false)?.to_vec::<i64>()?, [1, 0]);
            /// assert_eq!(t.argmax((), false)?.item::<i64>()?, 3);
            /// # Ok::<(), claystone::Error>(())
            /// ```
            argmax "argmax": All -> I64,
                ArgMax |x| x.clone() => |i, _| i.clone(),
                nothing None, gradient None,
                is |v| (0..v.len()).fold(0, |best, i| if v[i] > v[best] { i } else { best }) as f64, on -3.0..3.0;
            /// The index of the minimum over `dims`, as i64. See [`argmax`](Tensor::argmax).
            argmin "argmin": All -> I64,
                ArgMin |x| x.clone() => |i, _| i.clone(),
                nothing None, gradient None,
                is |v| (0..v.len()).fold(0, |best, i| if v[i] < v[best] { i } else { best }) as f64, on -3.0..3.0;
            /// The sum over `dims` of the elements that are not NaN. Dtypes as for [`sum`](Tensor::sum).
            nansum "nansum": All -> Sum,
                Add |x| x.is_nan().select(0.0, x) => |s, _| s.clone(),
                nothing Some(0.0), gradient Formula(|x, _, g, _| x.is_nan().select(0.0, g)),
                is |v| v.iter().filter(|x| !x.is_nan()).sum(), on -3.0..3.0;
            /// The Euclidean norm over `dims`. Floats. The norm of no elements is 0. The gradient of a norm of 0 is 0.
            norm "linalg.vector_norm": Floats -> Same,
                Add |x| x.square() => |s, _| s.sqrt(),
                nothing Some(0.0), gradient Formula(|x, y, g, _| y.eq(0.0).select(0.0, x / y * g)),
                is |v| v.iter().map(|x| x * x).sum::<f64>().sqrt(), on -3.0..3.0;
        }
    };
}

pub(crate) use reductions;
