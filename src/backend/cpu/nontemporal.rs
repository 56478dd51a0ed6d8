//! Binary primitives that store their results past the cache. Cheap formulas are limited by memory bandwidth, and a buffer before the store
//! would cost a quarter of the time.

use std::marker::PhantomData;

use pulp::{Arch, Simd, WithSimd};

use crate::backend::cpu::in_place::dispatch_cheap;
use crate::backend::cpu::interpreter::TileIn;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::{Function, function};
use crate::device::cpu::streaming::{LINE, Streaming};
use crate::expr::Binary;

/// An operand that is read one element or one cache line at a time.
trait ElementSource<C> {
    fn next_element(&mut self) -> Option<C>;
    fn next_line(&mut self) -> Option<[C; LINE]>;
}

/// A slice as long as the result.
struct SliceSource<'a, C>(&'a [C]);
/// One value, repeated.
struct ScalarSource<C>([C; LINE]);
/// A repeating row, and the rest of its current repetition.
struct RowSource<'a, C>(&'a [C], &'a [C]);

impl<C: Number> ElementSource<C> for SliceSource<'_, C> {
    #[inline(always)]
    fn next_element(&mut self) -> Option<C> {
        let (one, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*one)
    }

    #[inline(always)]
    fn next_line(&mut self) -> Option<[C; LINE]> {
        let (line, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*line)
    }
}

impl<C: Number> ElementSource<C> for ScalarSource<C> {
    #[inline(always)]
    fn next_element(&mut self) -> Option<C> {
        Some(self.0[0])
    }

    #[inline(always)]
    fn next_line(&mut self) -> Option<[C; LINE]> {
        Some(self.0)
    }
}

impl<C: Number> ElementSource<C> for RowSource<'_, C> {
    #[inline(always)]
    fn next_element(&mut self) -> Option<C> {
        if self.1.is_empty() {
            self.1 = self.0;
        }
        let (one, rest) = self.1.split_first()?;
        self.1 = rest;
        Some(*one)
    }

    #[inline(always)]
    fn next_line(&mut self) -> Option<[C; LINE]> {
        if let Some((line, rest)) = self.1.split_first_chunk() {
            self.1 = rest;
            return Some(*line);
        }
        let mut line = [self.next_element()?; LINE];
        for x in &mut line[1..] {
            *x = self.next_element()?;
        }
        Some(line)
    }
}

/// The loop over two operands, for dispatch to the processor's vectors.
struct StreamLoop<'a, C, A, B, F> {
    dst: &'a mut [C],
    a: A,
    b: B,
    function: PhantomData<F>,
}

impl<C: Number, A: ElementSource<C>, B: ElementSource<C>, F: Function<(C, C), C>> WithSimd
    for StreamLoop<'_, C, A, B, F>
{
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(mut self, _: S) {
        let streaming = Streaming::new();
        // The elements before the first cache line. Elements are aligned to their size, so they reach a line boundary exactly.
        let head = self.dst.as_ptr().align_offset(64).min(self.dst.len());
        let (head, lines) = self.dst.split_at_mut(head);
        compute_elements::<C, A, B, F>(head, &mut self.a, &mut self.b);
        let (lines, tail) = lines.as_chunks_mut::<LINE>();
        for to in lines {
            let (Some(a), Some(b)) = (self.a.next_line(), self.b.next_line()) else { return };
            streaming.line(to, std::array::from_fn(|i| F::call((a[i], b[i]))));
        }
        compute_elements::<C, A, B, F>(tail, &mut self.a, &mut self.b);
    }
}

/// Computes fewer elements than a line has, one at a time.
#[inline(always)]
fn compute_elements<C: Number, A: ElementSource<C>, B: ElementSource<C>, F: Function<(C, C), C>>(
    dst: &mut [C],
    a: &mut A,
    b: &mut B,
) {
    for d in dst {
        let (Some(x), Some(y)) = (a.next_element(), b.next_element()) else { return };
        *d = F::call((x, y));
    }
}

/// Fills `dst` with stores past the cache, or returns one value for all elements instead.
pub(crate) fn binary<C: Number>(
    arch: Arch,
    op: Binary,
    a: TileIn<'_, C>,
    b: TileIn<'_, C>,
    dst: &mut [C],
) -> Option<C> {
    macro_rules! each {
        ($method:ident) => {{
            function!(F, (x, y): (C, C) => x.$method(y));
            dispatch_operands::<C, F>(arch, a, b, dst)
        }};
    }
    dispatch_cheap!(op, each)
}

fn dispatch_operands<C: Number, F: Function<(C, C), C>>(
    arch: Arch,
    a: TileIn<'_, C>,
    b: TileIn<'_, C>,
    dst: &mut [C],
) -> Option<C> {
    use TileIn::{Scalar, Slice};
    let function = PhantomData::<F>;
    let rows = |row, at: usize| RowSource(row, &row[at..]);
    match (a, b) {
        (Slice(a), Slice(b)) => arch.dispatch(StreamLoop { dst, a: SliceSource(a), b: SliceSource(b), function }),
        (Slice(a), Scalar(y)) => {
            arch.dispatch(StreamLoop { dst, a: SliceSource(a), b: ScalarSource([y; LINE]), function })
        }
        (Scalar(x), Slice(b)) => {
            arch.dispatch(StreamLoop { dst, a: ScalarSource([x; LINE]), b: SliceSource(b), function })
        }
        (Scalar(x), Scalar(y)) => return Some(F::call((x, y))),
        (Slice(a), TileIn::Rows(row, at)) => {
            arch.dispatch(StreamLoop { dst, a: SliceSource(a), b: rows(row, at), function })
        }
        (TileIn::Rows(row, at), Slice(b)) => {
            arch.dispatch(StreamLoop { dst, a: rows(row, at), b: SliceSource(b), function })
        }
        _ => unreachable!("rows go with a slice"),
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::interpreter;

    #[test]
    fn any_length_and_alignment_in_every_operand_form() {
        let x: Vec<f32> = (0..200).map(|i| if i % 41 == 7 { f32::NAN } else { i as f32 - 90.5 }).collect();
        let y: Vec<f32> = (0..200).map(|i| if i % 31 == 9 { f32::INFINITY } else { 70.0 - i as f32 }).collect();
        let same = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan());
        for start in 0..20 {
            for n in [0, 1, 15, 16, 17, 31, 33, 150] {
                for form in 0..7 {
                    let (xs, ys) = (TileIn::Slice(&x[2..2 + n]), TileIn::Slice(&y[5..5 + n]));
                    let (a, b) = match form {
                        0 => (xs, ys),
                        1 => (TileIn::Scalar(x[3]), ys),
                        2 => (xs, TileIn::Scalar(y[3])),
                        3 => (xs, TileIn::Rows(&y[..37], 30)),
                        4 => (xs, TileIn::Rows(&y[4..5], 0)),
                        5 => (xs, TileIn::Rows(&y[..16], 16)),
                        _ => (TileIn::Rows(&x[1..4], 1), ys),
                    };
                    let at = |t: &TileIn<f32>, i: usize| match t {
                        TileIn::Slice(s) => s[i],
                        TileIn::Scalar(x) => *x,
                        TileIn::Rows(row, at) => row[(at + i) % row.len()],
                        TileIn::Output(_) => unreachable!("none of them"),
                    };
                    for (op, f) in [
                        (Binary::Add, Number::add as fn(f32, f32) -> f32),
                        (Binary::Sub, Number::sub),
                        (Binary::Mul, Number::mul),
                        (Binary::Max, Number::max),
                        (Binary::Min, Number::min),
                    ] {
                        let mut out = vec![0.5f32; 200];
                        assert!(crate::backend::cpu::in_place::is_cheap(op));
                        let mut plain = vec![0.5f32; n];
                        interpreter::binary(Arch::new(), op, a, b, &mut plain);
                        assert!((0..n).all(|i| same(plain[i], f(at(&a, i), at(&b, i)))), "{op:?} {form} {n}");
                        assert_eq!(binary(Arch::new(), op, a, b, &mut out[start..start + n]), None);
                        assert!(
                            (0..n).all(|i| same(out[start + i], f(at(&a, i), at(&b, i)))),
                            "{op:?} {form} {start} {n}"
                        );
                        assert!(out[..start].iter().chain(&out[start + n..]).all(|&x| x == 0.5));
                    }
                }
            }
        }
        assert_eq!(binary(Arch::new(), Binary::Add, TileIn::Scalar(2.0), TileIn::Scalar(3.0), &mut []), Some(5.0f64));
    }
}
