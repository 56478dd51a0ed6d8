//! Functions of two operands in f16 or bf16, computed in f32 without a detour through memory.

use std::marker::PhantomData;

use half::f16;
use pulp::{Arch, Simd, WithSimd};

use super::convert::bf16_bits;

/// A function of two numbers.
pub(crate) trait OfTwo {
    fn call(x: f32, y: f32) -> f32;
}

/// One side of such a function; bits of the numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Side<'a> {
    /// An element each.
    Each(&'a [u16]),
    /// The same for all.
    One(f32),
}

/// Which sides have an element each.
const BOTH: u8 = 0;
const LEFT: u8 = 1;
const RIGHT: u8 = 2;

/// The function of each two, into `to`, in f16.
pub(crate) fn f16_of_two<F: OfTwo>(a: Side, b: Side, to: &mut [u16]) {
    match (a, b) {
        (Side::Each(a), Side::Each(b)) => f16_in_form::<F, BOTH>(a, b, 0.0, to),
        (Side::Each(a), Side::One(y)) => f16_in_form::<F, LEFT>(a, a, y, to),
        (Side::One(x), Side::Each(b)) => f16_in_form::<F, RIGHT>(b, b, x, to),
        (Side::One(x), Side::One(y)) => to.fill(f16::from_f32(F::call(x, y)).to_bits()),
    }
}

/// As [`f16_of_two`], in bf16.
pub(crate) fn bf16_of_two<F: OfTwo>(a: Side, b: Side, to: &mut [u16]) {
    let function = PhantomData::<F>;
    match (a, b) {
        (Side::Each(a), Side::Each(b)) => Arch::new().dispatch(Bf16::<F, BOTH> { a, b, number: 0.0, to, function }),
        (Side::Each(a), Side::One(number)) => Arch::new().dispatch(Bf16::<F, LEFT> { a, b: a, number, to, function }),
        (Side::One(number), Side::Each(b)) => Arch::new().dispatch(Bf16::<F, RIGHT> { a: b, b, number, to, function }),
        (Side::One(x), Side::One(y)) => to.fill(bf16_bits(F::call(x, y))),
    }
}

struct Bf16<'a, F, const FORM: u8> {
    a: &'a [u16],
    b: &'a [u16],
    number: f32,
    to: &'a mut [u16],
    function: PhantomData<F>,
}

impl<F: OfTwo, const FORM: u8> WithSimd for Bf16<'_, F, FORM> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        assert!(self.a.len() == self.to.len() && self.b.len() == self.to.len());
        for ((to, &a), &b) in self.to.iter_mut().zip(self.a).zip(self.b) {
            let [a, b] = [a, b].map(|x| f32::from_bits(u32::from(x) << 16));
            *to = bf16_bits(match FORM {
                BOTH => F::call(a, b),
                LEFT => F::call(a, self.number),
                _ => F::call(self.number, b),
            });
        }
    }
}

fn f16_in_form<F: OfTwo, const FORM: u8>(a: &[u16], b: &[u16], number: f32, to: &mut [u16]) {
    assert!(a.len() == to.len() && b.len() == to.len());
    #[cfg(target_arch = "x86_64")]
    if crate::device::cpu::has_avx512() {
        let ((a, a_rest), (b, b_rest), (to, to_rest)) = (a.as_chunks(), b.as_chunks(), to.as_chunks_mut());
        // SAFETY: the processor has the instructions.
        unsafe { x86::of_16::<F, FORM>(a, b, number, to) };
        return singly::<F, FORM>(a_rest, b_rest, number, to_rest);
    } else if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx") {
        let ((a, a_rest), (b, b_rest), (to, to_rest)) = (a.as_chunks(), b.as_chunks(), to.as_chunks_mut());
        // SAFETY: likewise.
        unsafe { x86::of_8::<F, FORM>(a, b, number, to) };
        return singly::<F, FORM>(a_rest, b_rest, number, to_rest);
    }
    singly::<F, FORM>(a, b, number, to);
}

/// Without vectors.
fn singly<F: OfTwo, const FORM: u8>(a: &[u16], b: &[u16], number: f32, to: &mut [u16]) {
    for ((to, &a), &b) in to.iter_mut().zip(a).zip(b) {
        let wide = |bits: u16| f16::from_bits(bits).to_f32();
        let y = match FORM {
            BOTH => F::call(wide(a), wide(b)),
            LEFT => F::call(wide(a), number),
            _ => F::call(number, wide(b)),
        };
        *to = f16::from_f32(y).to_bits();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::{BOTH, LEFT, OfTwo};

    /// A function that computes a vector at a time; no side need be aligned.
    macro_rules! by_vectors {
        ($name:ident, $feature:literal, $Vector:ident = [f32; $n:literal], $load:ident, $widen:ident, $narrow:expr, $store:ident) => {
            #[target_feature(enable = $feature)]
            pub(super) fn $name<F: OfTwo, const FORM: u8>(
                a: &[[u16; $n]],
                b: &[[u16; $n]],
                number: f32,
                to: &mut [[u16; $n]],
            ) {
                let wide = |side: &[u16; $n]| {
                    // SAFETY: as many bytes as the vector's, of which any will do; and a vector is so many f32.
                    unsafe { transmute::<$Vector, [f32; $n]>($widen($load(side.as_ptr().cast()))) }
                };
                for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
                    let (x, y) = (wide(a), wide(b));
                    let made: [f32; $n] = std::array::from_fn(|i| match FORM {
                        BOTH => F::call(x[i], y[i]),
                        LEFT => F::call(x[i], number),
                        _ => F::call(number, y[i]),
                    });
                    // SAFETY: likewise.
                    unsafe { $store(to.as_mut_ptr().cast(), $narrow(transmute::<[f32; $n], $Vector>(made))) };
                }
            }
        };
    }

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    by_vectors!(
        of_16,
        "avx512f",
        __m512 = [f32; 16],
        _mm256_loadu_si256,
        _mm512_cvtph_ps,
        _mm512_cvtps_ph::<NEAREST>,
        _mm256_storeu_si256
    );
    by_vectors!(
        of_8,
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
    impl OfTwo for Less {
        fn call(x: f32, y: f32) -> f32 {
            x - y * 0.75
        }
    }

    /// Bits of all halves in another order.
    fn halves(seed: usize) -> Vec<u16> {
        (0..1 << 16).map(|i| (i * 40_503 + seed) as u16).collect()
    }

    fn same(got: u16, want: u16, is_nan: impl Fn(u16) -> bool) -> bool {
        got == want || (is_nan(got) && is_nan(want))
    }

    #[test]
    fn any_length_in_every_form() {
        let (a, b) = (halves(1), halves(7_777));
        let number = 1.0 / 3.0; // no half
        for n in [0, 1, 7, 8, 15, 16, 17, 40, a.len()] {
            let sides = |form| match form {
                0 => (Side::Each(&a[..n]), Side::Each(&b[..n])),
                1 => (Side::Each(&a[..n]), Side::One(number)),
                2 => (Side::One(number), Side::Each(&b[..n])),
                _ => (Side::One(number), Side::One(2.5)),
            };
            for form in 0..4 {
                let (left, right) = sides(form);
                let at = |side, i: usize, wide: fn(u16) -> f32| match side {
                    Side::Each(s) => wide(s[i]),
                    Side::One(x) => x,
                };
                let mut to = vec![7; n];
                f16_of_two::<Less>(left, right, &mut to);
                let wide = |bits| f16::from_bits(bits).to_f32();
                for (i, &got) in to.iter().enumerate() {
                    let want = f16::from_f32(Less::call(at(left, i, wide), at(right, i, wide))).to_bits();
                    assert!(same(got, want, |x| f16::from_bits(x).is_nan()), "{form} {i}: {got:x} {want:x}");
                }
                bf16_of_two::<Less>(left, right, &mut to);
                let wide = |bits| bf16::from_bits(bits).to_f32();
                for (i, &got) in to.iter().enumerate() {
                    let want = bf16::from_f32(Less::call(at(left, i, wide), at(right, i, wide))).to_bits();
                    assert!(same(got, want, |x| bf16::from_bits(x).is_nan()), "{form} {i}: {got:x} {want:x}");
                }
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn vectors_of_either_length() {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("f16c") {
            let (a, b) = (halves(1), halves(7_777));
            let (mut x, mut y) = (vec![0; a.len()], vec![1; a.len()]);
            // SAFETY: the processor has the instructions.
            unsafe {
                x86::of_16::<Less, BOTH>(a.as_chunks().0, b.as_chunks().0, 0.0, x.as_chunks_mut().0);
                x86::of_8::<Less, BOTH>(a.as_chunks().0, b.as_chunks().0, 0.0, y.as_chunks_mut().0);
            }
            assert!(x.iter().zip(&y).all(|(&x, &y)| same(x, y, |x| f16::from_bits(x).is_nan())));
        }
    }
}
