//! The rows. Each is
//!
//! ```text
//! /// What it computes.
//! name "PyTorch's name": dtypes it takes -> dtype it gives,
//!     how elements come together  the formula of each before => the formula of the result and of their number after,
//!     nothing what it is over no elements, gradient its rule, is the same in f64, on the range to test on;
//! ```
//!
//! Formulas are [`Expr`](crate::ops::Expr)s; the gradient `Each` is one too, of an element, the result, the result's gradient and
//! the number of elements. What is computed for `I64` or `Bool` is accumulated in i64, the rest in the type that the dtype
//! computes in.

/// Calls a macro with all rows.
macro_rules! reductions {
    ($callback:ident) => {
        $callback! {
            /// The sum over `dims`. Floats keep their dtype, integers and bool give i64; nothing sums to 0. A sum of ten
            /// million f32 is good to about 1e-6. `keepdim` leaves the reduced dims in place with size 1.
            ///
            /// ```
            /// use claystone::{Device, Tensor};
            /// let t = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], Device::Cpu)?;
            /// assert_eq!(t.sum(0, false)?.to_vec::<f32>()?, [4.0, 6.0]);
            /// # Ok::<(), claystone::Error>(())
            /// ```
            sum "sum": All -> Sum,
                Add |x| x.clone() => |s, _| s.clone(),
                nothing Some(0.0), gradient Each(|_, _, g, _| g.clone()), is |v| v.iter().sum(), on -3.0..3.0;
            /// The mean over `dims`, of floats; NaN of nothing.
            mean "mean": Floats -> Same,
                Add |x| x.clone() => |s, n| s / n,
                nothing Some(f64::NAN), gradient Each(|_, _, g, n| g * (1.0 / n)),
                is |v| v.iter().sum::<f64>() / v.len() as f64, on -3.0..3.0;
            /// The product over `dims`; of nothing it is 1. Dtypes as [`sum`](Tensor::sum). Differentiable where elements
            /// are zero too.
            prod "prod": All -> Sum,
                Mul |x| x.clone() => |p, _| p.clone(),
                nothing Some(1.0), gradient Others, is |v| v.iter().product(), on 0.5..1.5;
            /// The greatest element over `dims`; NaN if there is one. Keeps the dtype. Elements that tie share the gradient
            /// evenly.
            max "amax": All -> Same,
                Max |x| x.clone() => |m, _| m.clone(),
                nothing None, gradient Shared, is |v| v.iter().copied().fold(f64::NEG_INFINITY, f64::max), on -3.0..3.0;
            /// The least element over `dims`; as [`max`](Tensor::max) otherwise.
            min "amin": All -> Same,
                Min |x| x.clone() => |m, _| m.clone(),
                nothing None, gradient Shared, is |v| v.iter().copied().fold(f64::INFINITY, f64::min), on -3.0..3.0;
            /// [`max`](Tensor::max) by its other name.
            amax "amax": All -> Same,
                Max |x| x.clone() => |m, _| m.clone(),
                nothing None, gradient Shared, is |v| v.iter().copied().fold(f64::NEG_INFINITY, f64::max), on -3.0..3.0;
            /// [`min`](Tensor::min) by its other name.
            amin "amin": All -> Same,
                Min |x| x.clone() => |m, _| m.clone(),
                nothing None, gradient Shared, is |v| v.iter().copied().fold(f64::INFINITY, f64::min), on -3.0..3.0;
            /// Whether any element over `dims` is not zero (NaN is not), as bool; false of nothing.
            any "any": All -> Bool,
                Max |x| x.ne(0.0) => |m, _| m.clone(),
                nothing Some(0.0), gradient None, is |v| f64::from(v.iter().any(|&x| x != 0.0)), on -1.0..2.0;
            /// Whether every element over `dims` is not zero, as bool; true of nothing.
            all "all": All -> Bool,
                Min |x| x.ne(0.0) => |m, _| m.clone(),
                nothing Some(1.0), gradient None, is |v| f64::from(v.iter().all(|&x| x != 0.0)), on -1.0..2.0;
            /// How many elements over `dims` are not zero, as i64.
            count_nonzero "count_nonzero": All -> I64,
                Add |x| x.ne(0.0) => |s, _| s.clone(),
                nothing Some(0.0), gradient None, is |v| v.iter().filter(|&&x| x != 0.0).count() as f64, on -1.0..2.0;
            /// Where the greatest element over `dims` is, as i64: its index along one dim, its row-major position among
            /// several. The first among equals; the first NaN if there is one.
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
            /// Where the least element over `dims` is; as [`argmax`](Tensor::argmax) otherwise.
            argmin "argmin": All -> I64,
                ArgMin |x| x.clone() => |i, _| i.clone(),
                nothing None, gradient None,
                is |v| (0..v.len()).fold(0, |best, i| if v[i] < v[best] { i } else { best }) as f64, on -3.0..3.0;
            /// The sum over `dims` of what is not NaN. Dtypes as [`sum`](Tensor::sum).
            nansum "nansum": All -> Sum,
                Add |x| x.is_nan().select(0.0, x) => |s, _| s.clone(),
                nothing Some(0.0), gradient Each(|x, _, g, _| x.is_nan().select(0.0, g)),
                is |v| v.iter().filter(|x| !x.is_nan()).sum(), on -3.0..3.0;
            /// The Euclidean norm over `dims`, of floats; of nothing it is 0, and so is the gradient where the norm is 0.
            norm "linalg.vector_norm": Floats -> Same,
                Add |x| x.square() => |s, _| s.sqrt(),
                nothing Some(0.0), gradient Each(|x, y, g, _| y.eq(0.0).select(0.0, x / y * g)),
                is |v| v.iter().map(|x| x * x).sum::<f64>().sqrt(), on -3.0..3.0;
        }
    };
}

pub(crate) use reductions;
