//! A product and the sum that uses it, in one pass with half the loads and stores. Both are rounded separately, as in two passes.

use std::marker::PhantomData;

use pulp::{Arch, Simd, WithSimd};

use crate::backend::cpu::in_place::binary_in_place;
use crate::backend::cpu::interpreter::{TileIn, binary, run_loop};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::{Function, function};
use crate::expr::Binary;

/// The combination of the product `a * b` with `c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProductSum {
    Add,
    Sub,
    /// `c - a * b`.
    SubFrom,
}

/// A loop that overwrites an operand: `a` if `FIRST`, else `c`.
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

/// Fills `dst`, or returns one value for all elements instead. At most one operand is [`TileIn::Output`], the old contents of `dst`.
pub(crate) fn multiply_add<C: Number>(
    arch: Arch,
    sum: ProductSum,
    [a, b, c]: [TileIn<'_, C>; 3],
    dst: &mut [C],
) -> Option<C> {
    use TileIn::{Output, Scalar, Slice};
    // The factors commute: a number goes second, and an overwritten operand first.
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
                    run_loop::<C, _, F>(arch, dst, args);
                }
                (Slice(a), Scalar(y), Slice(c)) => {
                    run_loop::<C, _, F>(arch, dst, a.iter().zip(c).map(|(x, z)| (*x, y, *z)));
                }
                (Slice(a), Scalar(y), Scalar(z)) => {
                    run_loop::<C, _, F>(arch, dst, a.iter().map(|x| (*x, y, z)));
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
                _ => return multiply_then_add(arch, sum, [a, b, c], dst),
            }
            None
        }};
    }
    match sum {
        ProductSum::Add => each!(x, y, z => x.mul(y).add(z)),
        ProductSum::Sub => each!(x, y, z => x.mul(y).sub(z)),
        ProductSum::SubFrom => each!(x, y, z => z.sub(x.mul(y))),
    }
}

/// Computes the product and then the sum in two passes; only the sum if both factors are numbers.
fn multiply_then_add<C: Number>(
    arch: Arch,
    sum: ProductSum,
    [a, b, c]: [TileIn<'_, C>; 3],
    dst: &mut [C],
) -> Option<C> {
    let (op, left) = match sum {
        ProductSum::Add => (Binary::Add, true),
        ProductSum::Sub => (Binary::Sub, true),
        ProductSum::SubFrom => (Binary::Sub, false),
    };
    if let (TileIn::Scalar(x), TileIn::Scalar(y)) = (a, b) {
        let product = TileIn::Scalar(x.mul(y));
        return if left { binary(arch, op, product, c, dst) } else { binary(arch, op, c, product, dst) };
    }
    binary(arch, Binary::Mul, a, b, dst);
    binary_in_place(arch, op, left, c, dst);
    None
}
