//! Primitives whose result overwrites an operand.

use std::marker::PhantomData;

use pulp::{Arch, Simd, WithSimd};

use crate::backend::cpu::interpreter::TileIn;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::{Function, function};
use crate::expr::Binary;

/// The operations whose results may be written past the cache, or over an operand.
pub(crate) fn is_cheap(op: Binary) -> bool {
    matches!(op, Binary::Add | Binary::Sub | Binary::Mul | Binary::Max | Binary::Min)
}

/// `$each!(method)` of one that [`is_cheap`].
macro_rules! for_cheap {
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
pub(crate) use for_cheap;

/// A result that is an operand too, the `LEFT` one or the right one.
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

/// [`binary`](crate::backend::cpu::interpreter::binary) of what is in `dst`, the left operand or the right one, and another.
pub(crate) fn update<C: Number>(arch: Arch, op: Binary, left: bool, other: TileIn<'_, C>, dst: &mut [C]) {
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
    for_cheap!(op, each)
}
