//! Binary primitives that overwrite an operand with the result.

use std::marker::PhantomData;

use pulp::{Arch, Simd, WithSimd};

use crate::backend::cpu::interpreter::TileIn;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::{Function, function};
use crate::expr::Binary;

/// True for the primitives that can store results past the cache, or over an operand.
pub(crate) fn is_cheap(op: Binary) -> bool {
    matches!(op, Binary::Add | Binary::Sub | Binary::Mul | Binary::Max | Binary::Min)
}

/// Expands `$each!(method)` for a primitive that [`is_cheap`].
macro_rules! dispatch_cheap {
    ($op:expr, $each:ident) => {
        match $op {
            Binary::Add => $each!(add),
            Binary::Sub => $each!(sub),
            Binary::Mul => $each!(mul),
            Binary::Max => $each!(max),
            Binary::Min => $each!(min),
            _ => unreachable!("the caller has asked `is_cheap`"),
        }
    };
}
pub(crate) use dispatch_cheap;

/// A loop that overwrites an operand: the left one if `LEFT`, else the right one.
struct Update<'a, C, I, F, const LEFT: bool> {
    dst: &'a mut [C],
    other: I,
    function: PhantomData<F>,
}

impl<C: Number, I: Iterator<Item = C>, F: Function<(C, C), C>, const LEFT: bool> WithSimd
    for Update<'_, C, I, F, LEFT>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (d, x) in self.dst.iter_mut().zip(self.other) {
            *d = if LEFT { F::call((*d, x)) } else { F::call((x, *d)) };
        }
    }
}

/// [`binary`](crate::backend::cpu::interpreter::binary) with `dst` as one operand: the left one if `left`, else the right one.
pub(crate) fn binary_in_place<C: Number>(arch: Arch, op: Binary, left: bool, other: TileIn<'_, C>, dst: &mut [C]) {
    macro_rules! each {
        ($method:ident) => {{
            function!(F, (x, y): (C, C) => x.$method(y));
            let function = PhantomData::<F>;
            let same = |x| std::iter::repeat_n(x, dst.len());
            match (other, left) {
                (TileIn::Slice(s), true) => {
                    arch.dispatch(Update::<_, _, _, true> { dst, other: s.iter().copied(), function })
                }
                (TileIn::Slice(s), false) => {
                    arch.dispatch(Update::<_, _, _, false> { dst, other: s.iter().copied(), function })
                }
                (TileIn::Scalar(x), true) => arch.dispatch(Update::<_, _, _, true> { other: same(x), dst, function }),
                (TileIn::Scalar(x), false) => arch.dispatch(Update::<_, _, _, false> { other: same(x), dst, function }),
                _ => unreachable!("the other one is no row, nor a result"),
            }
        }};
    }
    dispatch_cheap!(op, each)
}
