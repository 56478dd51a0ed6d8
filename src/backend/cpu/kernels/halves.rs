//! Functions of two f16 or bf16 operands, computed in f32 without a temporary array.

use half::f16;

use crate::backend::cpu::kernels::convert::bf16_bits;
use crate::backend::cpu::vectorised::{Function, vectorised};

/// An operand: f16 or bf16 elements given by their bits, or one number.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HalfOperand<'a> {
    /// One element per result.
    Each(&'a [u16]),
    /// The same number for all results.
    One(f32),
}

/// Which of the two operands have one element per result; `number` replaces an operand that does not.
trait Form {
    fn call<F: Function<(f32, f32), f32>>(x: f32, y: f32, number: f32) -> f32;
}

macro_rules! forms {
    ($($(#[$doc:meta])* $name:ident: $x:ident, $y:ident, $number:ident => $args:expr;)*) => { $(
        $(#[$doc])*
        struct $name;
        impl Form for $name {
            #[inline(always)]
            fn call<F: Function<(f32, f32), f32>>($x: f32, $y: f32, $number: f32) -> f32 {
                F::call($args)
            }
        }
    )* };
}

forms! {
    Both: x, y, _number => (x, y);
    Left: x, _y, number => (x, number);
    Right: _x, y, number => (number, y);
}

macro_rules! map_halves {
    ($(#[$doc:meta])* $name:ident, $form:ident, $round:expr) => {
        $(#[$doc])*
        pub(crate) fn $name<F: Function<(f32, f32), f32>>(a: HalfOperand, b: HalfOperand, to: &mut [u16]) {
            match (a, b) {
                (HalfOperand::Each(a), HalfOperand::Each(b)) => $form::<F, Both>(a, b, 0.0, to),
                (HalfOperand::Each(a), HalfOperand::One(y)) => $form::<F, Left>(a, a, y, to),
                (HalfOperand::One(x), HalfOperand::Each(b)) => $form::<F, Right>(b, b, x, to),
                (HalfOperand::One(x), HalfOperand::One(y)) => to.fill($round(F::call((x, y)))),
            }
        }
    };
}

map_halves! {
    /// Applies the function elementwise to f16 operands.
    map_f16, map_f16_form, |y: f32| f16::from_f32(y).to_bits()
}
map_halves! {
    /// Applies the function elementwise to bf16 operands.
    map_bf16, map_bf16_form, bf16_bits
}

vectorised! {
    fn map_bf16_form<'a, F: Function<(f32, f32), f32>, P: Form>(
        _simd: S, a: &'a [u16], b: &'a [u16], number: f32, to: &'a mut [u16]
    ) {
        assert!(a.len() == to.len() && b.len() == to.len());
        for ((to, &a), &b) in to.iter_mut().zip(a).zip(b) {
            let [a, b] = [a, b].map(|x| f32::from_bits(u32::from(x) << 16));
            *to = bf16_bits(P::call::<F>(a, b, number));
        }
    }
}

fn map_f16_form<F: Function<(f32, f32), f32>, P: Form>(a: &[u16], b: &[u16], number: f32, to: &mut [u16]) {
    assert!(a.len() == to.len() && b.len() == to.len());
    #[cfg(target_arch = "x86_64")]
    if crate::device::cpu::has_avx512() {
        let ((a, a_rest), (b, b_rest), (to, to_rest)) = (a.as_chunks(), b.as_chunks(), to.as_chunks_mut());
        // SAFETY: the processor has the instructions.
        unsafe { x86::map_16::<F, P>(a, b, number, to) };
        return map_f16_scalar::<F, P>(a_rest, b_rest, number, to_rest);
    } else if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx") {
        let ((a, a_rest), (b, b_rest), (to, to_rest)) = (a.as_chunks(), b.as_chunks(), to.as_chunks_mut());
        // SAFETY: the processor has the instructions.
        unsafe { x86::map_8::<F, P>(a, b, number, to) };
        return map_f16_scalar::<F, P>(a_rest, b_rest, number, to_rest);
    }
    map_f16_scalar::<F, P>(a, b, number, to);
}

/// Computes one element at a time.
fn map_f16_scalar<F: Function<(f32, f32), f32>, P: Form>(a: &[u16], b: &[u16], number: f32, to: &mut [u16]) {
    for ((to, &a), &b) in to.iter_mut().zip(a).zip(b) {
        let wide = |bits: u16| f16::from_bits(bits).to_f32();
        *to = f16::from_f32(P::call::<F>(wide(a), wide(b), number)).to_bits();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::{Form, Function};

    /// Defines a function that computes a vector at a time. No slice has to be aligned to vectors.
    macro_rules! by_vectors {
        ($name:ident, $feature:literal, $Vector:ident = [f32; $n:literal], $load:ident, $widen:ident, $narrow:expr, $store:ident) => {
            #[target_feature(enable = $feature)]
            pub(super) fn $name<F: Function<(f32, f32), f32>, P: Form>(
                a: &[[u16; $n]],
                b: &[[u16; $n]],
                number: f32,
                to: &mut [[u16; $n]],
            ) {
                let wide = |side: &[u16; $n]| {
                    // SAFETY: the load reads the bytes of one vector, for which any bits are valid; the vector has the layout of the
                    // array.
                    unsafe { transmute::<$Vector, [f32; $n]>($widen($load(side.as_ptr().cast()))) }
                };
                for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
                    let (x, y) = (wide(a), wide(b));
                    let made: [f32; $n] = std::array::from_fn(|i| P::call::<F>(x[i], y[i], number));
                    // SAFETY: the store writes the bytes of one vector; the array has the layout of the vector.
                    unsafe { $store(to.as_mut_ptr().cast(), $narrow(transmute::<[f32; $n], $Vector>(made))) };
                }
            }
        };
    }

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    by_vectors!(
        map_16,
        "avx512f",
        __m512 = [f32; 16],
        _mm256_loadu_si256,
        _mm512_cvtph_ps,
        _mm512_cvtps_ph::<NEAREST>,
        _mm256_storeu_si256
    );
    by_vectors!(
        map_8,
        "avx,f16c",
        __m256 = [f32; 8],
        _mm_loadu_si128,
        _mm256_cvtph_ps,
        _mm256_cvtps_ph::<NEAREST>,
        _mm_storeu_si128
    );
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    struct Less;
    impl Function<(f32, f32), f32> for Less {
        fn call((x, y): (f32, f32)) -> f32 {
            x - y * 0.75
        }
    }

    /// Returns all 16-bit patterns, in an order that depends on `seed`.
    fn halves(seed: usize) -> Vec<u16> {
        (0..1 << 16).map(|i| (i * 40_503 + seed) as u16).collect()
    }

    fn same(got: u16, want: u16, is_nan: impl Fn(u16) -> bool) -> bool {
        got == want || (is_nan(got) && is_nan(want))
    }

    #[test]
    fn functions_of_two_operands_at_any_length() {
        let (a, b) = (halves(1), halves(7_777));
        let number = 1.0 / 3.0; // not exact in f16
        for n in [0, 1, 7, 8, 15, 16, 17, 40, a.len()] {
            let sides = |form| match form {
                0 => (HalfOperand::Each(&a[..n]), HalfOperand::Each(&b[..n])),
                1 => (HalfOperand::Each(&a[..n]), HalfOperand::One(number)),
                2 => (HalfOperand::One(number), HalfOperand::Each(&b[..n])),
                _ => (HalfOperand::One(number), HalfOperand::One(2.5)),
            };
            for form in 0..4 {
                let (left, right) = sides(form);
                let at = |side, i: usize, wide: fn(u16) -> f32| match side {
                    HalfOperand::Each(s) => wide(s[i]),
                    HalfOperand::One(x) => x,
                };
                let mut to = vec![7; n];
                map_f16::<Less>(left, right, &mut to);
                let wide = |bits| f16::from_bits(bits).to_f32();
                for (i, &got) in to.iter().enumerate() {
                    let want = f16::from_f32(Less::call((at(left, i, wide), at(right, i, wide)))).to_bits();
                    assert!(same(got, want, |x| f16::from_bits(x).is_nan()), "{form} {i}: {got:x} {want:x}");
                }
                map_bf16::<Less>(left, right, &mut to);
                let wide = |bits| bf16::from_bits(bits).to_f32();
                for (i, &got) in to.iter().enumerate() {
                    let want = bf16::from_f32(Less::call((at(left, i, wide), at(right, i, wide)))).to_bits();
                    assert!(same(got, want, |x| bf16::from_bits(x).is_nan()), "{form} {i}: {got:x} {want:x}");
                }
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn both_vector_lengths_agree() {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("f16c") {
            let (a, b) = (halves(1), halves(7_777));
            let (mut x, mut y) = (vec![0; a.len()], vec![1; a.len()]);
            // SAFETY: the processor has the instructions.
            unsafe {
                x86::map_16::<Less, Both>(a.as_chunks().0, b.as_chunks().0, 0.0, x.as_chunks_mut().0);
                x86::map_8::<Less, Both>(a.as_chunks().0, b.as_chunks().0, 0.0, y.as_chunks_mut().0);
            }
            assert!(x.iter().zip(&y).all(|(&x, &y)| same(x, y, |x| f16::from_bits(x).is_nan())));
        }
    }
}
