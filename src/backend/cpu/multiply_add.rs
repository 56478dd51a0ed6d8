//! A product and the sum it is part of, in one pass: half the loads and stores of two. Each is rounded on its own.

use std::marker::PhantomData;

use pulp::{Arch, Simd, WithSimd};

use crate::backend::cpu::in_place::update;
use crate::backend::cpu::interpreter::{TileIn, binary, run};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::{Function, function};
use crate::expr::Binary;

/// How `a * b` and `c` become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sum {
    /// `a * b + c`.
    Plus,
    /// `a * b - c`.
    Less,
    /// `c - a * b`.
    Rest,
}

/// Of a result that is `c`, or `a` where that is `FIRST`.
struct Update<'a, C, I, F, const FIRST: bool> {
    dst: &'a mut [C],
    others: I,
    function: PhantomData<F>,
}

impl<C: Number, I: Iterator<Item = (C, C)>, F: Function<(C, C, C), C>, const FIRST: bool> WithSimd
    for Update<'_, C, I, F, FIRST>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (d, (x, y)) in self.dst.iter_mut().zip(self.others) {
            *d = if FIRST { F::call((*d, x, y)) } else { F::call((x, y, *d)) };
        }
    }
}

/// Fills `dst`, which is [`TileIn::Output`] where it is an operand, once; or gives the one value that all elements have.
pub(crate) fn multiply_add<C: Number>(arch: Arch, sum: Sum, [a, b, c]: [TileIn<'_, C>; 3], dst: &mut [C]) -> Option<C> {
    use TileIn::{Output, Scalar, Slice};
    // A product is the same either way round: a number comes second, and a result that is changed first.
    let (a, b) = match (a, b) {
        (Scalar(_), Slice(_) | Output(_)) | (Slice(_), Output(_)) => (b, a),
        _ => (a, b),
    };
    macro_rules! each {
        ($x:ident, $y:ident, $z:ident => $e:expr) => {{
            function!(F, ($x, $y, $z): (C, C, C) => $e);
            let function = PhantomData::<F>;
            match (a, b, c) {
                (Slice(a), Slice(b), Slice(c)) => {
                    let args = a.iter().zip(b).zip(c).map(|((x, y), z)| (*x, *y, *z));
                    run::<C, _, F>(arch, dst, args);
                }
                (Slice(a), Scalar(y), Slice(c)) => {
                    run::<C, _, F>(arch, dst, a.iter().zip(c).map(|(x, z)| (*x, y, *z)));
                }
                (Slice(a), Scalar(y), Scalar(z)) => {
                    run::<C, _, F>(arch, dst, a.iter().map(|x| (*x, y, z)));
                }
                (Slice(a), Slice(b), Output(_)) => {
                    let others = a.iter().zip(b).map(|(x, y)| (*x, *y));
                    arch.dispatch(Update::<_, _, _, false> { dst, others, function });
                }
                (Slice(a), Scalar(y), Output(_)) => {
                    arch.dispatch(Update::<_, _, _, false> { dst, others: a.iter().map(|x| (*x, y)), function });
                }
                (Output(_), Scalar(y), Slice(c)) => {
                    arch.dispatch(Update::<_, _, _, true> { dst, others: c.iter().map(|z| (y, *z)), function });
                }
                _ => return in_two(arch, sum, [a, b, c], dst),
            }
            None
        }};
    }
    match sum {
        Sum::Plus => each!(x, y, z => x.mul(y).add(z)),
        Sum::Less => each!(x, y, z => x.mul(y).sub(z)),
        Sum::Rest => each!(x, y, z => z.sub(x.mul(y))),
    }
}

/// The product, and then the sum. Of a product of numbers the sum alone.
fn in_two<C: Number>(arch: Arch, sum: Sum, [a, b, c]: [TileIn<'_, C>; 3], dst: &mut [C]) -> Option<C> {
    let (op, left) = match sum {
        Sum::Plus => (Binary::Add, true),
        Sum::Less => (Binary::Sub, true),
        Sum::Rest => (Binary::Sub, false),
    };
    if let (TileIn::Scalar(x), TileIn::Scalar(y)) = (a, b) {
        let product = TileIn::Scalar(x.mul(y));
        return if left { binary(arch, op, product, c, dst) } else { binary(arch, op, c, product, dst) };
    }
    binary(arch, Binary::Mul, a, b, dst);
    update(arch, op, left, c, dst);
    None
}
