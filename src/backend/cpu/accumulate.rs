//! Reduces a slice to one value with several accumulators in vector registers. The loops are written with explicit vectors, because
//! the compiler turns an array of accumulators into scalars.

use pulp::Simd;

use crate::Compute;
use crate::backend::cpu::dispatch::vectorised;
use crate::backend::cpu::scalar::Number;

/// The number of vectors accumulated side by side, so that an addition does not have to wait for the previous addition.
const ACCUMULATORS: usize = 8;
/// The number of vectors of sums, and equally of sums of squares, that are accumulated side by side.
const PAIRS: usize = ACCUMULATORS / 2;
/// The maximum number of elements of a row that is folded one element at a time, because its vectors would be mostly empty.
const SHORT_ROW_LEN: usize = 16;
/// The number of elements that are accumulated separately before their sum is added to the total, which bounds the error of long sums.
const PART_LEN: usize = 1 << 10;

/// The operation that combines two partial results.
pub(crate) trait CombineOp {
    fn identity<C: Number>() -> C;
    fn combine<C: Number>(a: C, b: C) -> C;
    fn f32s<V: Simd>(simd: V, a: V::f32s, b: V::f32s) -> V::f32s;
    fn f64s<V: Simd>(simd: V, a: V::f64s, b: V::f64s) -> V::f64s;
}

macro_rules! combines {
    ($($name:ident: $identity:expr, $method:ident; |$v:ident, $a:ident, $b:ident| $f32s:expr, $f64s:expr;)*) => { $(
        pub(crate) struct $name;
        impl CombineOp for $name {
            fn identity<C: Number>() -> C {
                C::from_f64($identity)
            }
            #[inline(always)]
            fn combine<C: Number>(a: C, b: C) -> C {
                a.$method(b)
            }
            #[inline(always)]
            fn f32s<V: Simd>($v: V, $a: V::f32s, $b: V::f32s) -> V::f32s {
                $f32s
            }
            #[inline(always)]
            fn f64s<V: Simd>($v: V, $a: V::f64s, $b: V::f64s) -> V::f64s {
                $f64s
            }
        }
    )* };
}

// An infinity converts to the least or greatest integer of an integer type. If either operand is NaN, the result is NaN.
combines! {
    Add: 0.0, add; |v, a, b| v.add_f32s(a, b), v.add_f64s(a, b);
    Mul: 1.0, mul; |v, a, b| v.mul_f32s(a, b), v.mul_f64s(a, b);
    Max: f64::NEG_INFINITY, max; |v, a, b|
        v.select_f32s(v.less_than_or_equal_f32s(a, b), b, v.select_f32s(v.equal_f32s(b, b), a, b)),
        v.select_f64s(v.less_than_or_equal_f64s(a, b), b, v.select_f64s(v.equal_f64s(b, b), a, b));
    Min: f64::INFINITY, min; |v, a, b|
        v.select_f32s(v.greater_than_or_equal_f32s(a, b), b, v.select_f32s(v.equal_f32s(b, b), a, b)),
        v.select_f64s(v.greater_than_or_equal_f64s(a, b), b, v.select_f64s(v.equal_f64s(b, b), a, b));
}

macro_rules! in_vectors {
    ($($t:ident: $name:ident $map:ident $total:ident $above:ident, $vectors:ident $splat:ident $join:ident $sub:ident $mul_add:ident;)*) => { $(
        #[inline(always)]
        fn $name<K: CombineOp, V: Simd>(simd: V, elements: &[$t]) -> $t {
            let (vectors, rest) = V::$vectors(elements);
            let mut sums = [simd.$splat(K::identity()); ACCUMULATORS];
            let (whole, last) = vectors.as_chunks::<ACCUMULATORS>();
            for chunk in whole {
                for (sum, x) in sums.iter_mut().zip(chunk) {
                    *sum = K::$join(simd, *sum, *x);
                }
            }
            for (sum, x) in sums.iter_mut().zip(last) {
                *sum = K::$join(simd, *sum, *x);
            }
            rest.iter().fold($total::<K, V, ACCUMULATORS>(simd, sums), |a, &b| K::combine(a, b))
        }

        /// Computes [`fold_map`] for this type: computes as many elements as the accumulators hold, then accumulates them.
        #[inline(always)]
        fn $map<K: CombineOp, C: Number, V: Simd>(simd: V, x: &[C], y: &[C], map: impl Fn(C, C) -> C) -> $t {
            let mut sums = [simd.$splat(K::identity()); ACCUMULATORS];
            let mut made = sums;
            let all = size_of_val(&made) / size_of::<C>();
            let (xs, ys) = (x.chunks_exact(all), y.chunks_exact(all));
            let (x_rest, y_rest) = (xs.remainder(), ys.remainder());
            for (x, y) in xs.zip(ys) {
                let to: &mut [C] = bytemuck::cast_slice_mut(&mut made);
                to.iter_mut().zip(x.iter().zip(y)).for_each(|(m, (x, y))| *m = map(*x, *y));
                for (sum, x) in sums.iter_mut().zip(&made) {
                    *sum = K::$join(simd, *sum, *x);
                }
            }
            let (xs, ys) = (x_rest.chunks_exact(all / ACCUMULATORS), y_rest.chunks_exact(all / ACCUMULATORS));
            let (x_rest, y_rest) = (xs.remainder(), ys.remainder());
            for (sum, (x, y)) in sums.iter_mut().zip(xs.zip(ys)) {
                let to: &mut [C] = bytemuck::cast_slice_mut(&mut made[..1]);
                to.iter_mut().zip(x.iter().zip(y)).for_each(|(m, (x, y))| *m = map(*x, *y));
                *sum = K::$join(simd, *sum, made[0]);
            }
            let mut total = $total::<K, V, ACCUMULATORS>(simd, sums);
            for (x, y) in x_rest.iter().zip(y_rest) {
                total = K::combine(total, bytemuck::cast(map(*x, *y)));
            }
            total
        }

        /// Computes [`sum_deviations`] for this type.
        #[inline(always)]
        fn $above<V: Simd>(simd: V, x: &[$t], mean: $t) -> [$t; 2] {
            let (vectors, rest) = V::$vectors(x);
            let near = simd.$splat(mean);
            let (mut sums, mut squares) = ([simd.$splat(0.0); PAIRS], [simd.$splat(0.0); PAIRS]);
            let (whole, last) = vectors.as_chunks::<PAIRS>();
            for chunk in whole {
                for ((sum, square), x) in sums.iter_mut().zip(&mut squares).zip(chunk) {
                    let above = simd.$sub(*x, near);
                    *sum = Add::$join(simd, *sum, above);
                    *square = simd.$mul_add(above, above, *square);
                }
            }
            for ((sum, square), x) in sums.iter_mut().zip(&mut squares).zip(last) {
                let above = simd.$sub(*x, near);
                *sum = Add::$join(simd, *sum, above);
                *square = simd.$mul_add(above, above, *square);
            }
            let mut totals = [$total::<Add, V, PAIRS>(simd, sums), $total::<Add, V, PAIRS>(simd, squares)];
            for x in rest {
                totals = [totals[0] + (x - mean), totals[1] + (x - mean) * (x - mean)];
            }
            totals
        }

        /// Combines all lanes of all accumulators to one value.
        #[inline(always)]
        fn $total<K: CombineOp, V: Simd, const N: usize>(simd: V, mut sums: [V::$join; N]) -> $t {
            let mut half = N / 2;
            while half > 0 {
                for i in 0..half {
                    sums[i] = K::$join(simd, sums[i], sums[i + half]);
                }
                half /= 2;
            }
            let lanes: &mut [$t] = bytemuck::cast_slice_mut(&mut sums[..1]);
            let mut half = lanes.len() / 2;
            while half > 0 {
                for i in 0..half {
                    lanes[i] = K::combine(lanes[i], lanes[i + half]);
                }
                half /= 2;
            }
            lanes[0]
        }
    )* };
}

in_vectors! {
    f32: fold_f32 map_f32 lanes_f32 sum_deviations_f32, as_simd_f32s splat_f32s f32s sub_f32s mul_add_f32s;
    f64: fold_f64 map_f64 lanes_f64 sum_deviations_f64, as_simd_f64s splat_f64s f64s sub_f64s mul_add_f64s;
}

/// Folds all elements. For vectors of four lanes, the error of a sum of n f32 is at most that of n / 32 + 20 roundings of the sum of
/// magnitudes; wider vectors have smaller errors. The caller must be compiled for the instructions of `V`.
#[inline(always)]
pub(crate) fn fold_simd<K: CombineOp, C: Number, V: Simd>(simd: V, elements: &[C]) -> C {
    match C::COMPUTE {
        Compute::F32 => bytemuck::cast(fold_f32::<K, V>(simd, bytemuck::cast_slice(elements))),
        Compute::F64 => bytemuck::cast(fold_f64::<K, V>(simd, bytemuck::cast_slice(elements))),
        Compute::I64 => elements.iter().fold(K::identity(), |a, &b| K::combine(a, b)),
    }
}

/// Folds `map(x, y)` like [`fold_simd`]; long slices are folded in parts of [`PART_LEN`] elements.
#[inline(always)]
pub(crate) fn fold_map<K: CombineOp, C: Number, V: Simd>(simd: V, x: &[C], y: &[C], map: impl Fn(C, C) -> C) -> C {
    let mut total = K::identity();
    for (x, y) in x.chunks(PART_LEN).zip(y.chunks(PART_LEN)) {
        let part = match C::COMPUTE {
            Compute::F32 => bytemuck::cast(map_f32::<K, C, V>(simd, x, y, &map)),
            Compute::F64 => bytemuck::cast(map_f64::<K, C, V>(simd, x, y, &map)),
            Compute::I64 => x.iter().zip(y).fold(K::identity(), |a, (&x, &y)| K::combine(a, map(x, y))),
        };
        total = K::combine(total, part);
    }
    total
}

/// Sums the differences of the floats from `mean`, and the squares of the differences; long slices in parts of [`PART_LEN`] elements.
#[inline(always)]
pub(crate) fn sum_deviations<C: Number, V: Simd>(simd: V, x: &[C], mean: C) -> [C; 2] {
    let mut totals: [C; 2] = [Add::identity(); 2];
    // This is a loop, because a closure that is not inlined is compiled without the vectors of `V`.
    for x in x.chunks(PART_LEN) {
        let part: [C; 2] = match C::COMPUTE {
            Compute::F64 => bytemuck::cast(sum_deviations_f64(simd, bytemuck::cast_slice(x), bytemuck::cast(mean))),
            Compute::F32 => bytemuck::cast(sum_deviations_f32(simd, bytemuck::cast_slice(x), bytemuck::cast(mean))),
            Compute::I64 => unreachable!("integers are not normalised"),
        };
        totals = [totals[0].add(part[0]), totals[1].add(part[1])];
    }
    totals
}

vectorised! {
    /// Folds all elements like [`fold_simd`], with the processor's vectors.
    pub(crate) fn fold<'a, K: CombineOp, C: Number>(simd: S, elements: &'a [C]) -> C {
        fold_simd::<K, C, S>(simd, elements)
    }
}

vectorised! {
    /// Folds each row of `n` elements, or of their squares, like [`fold`]; the result of row i is `out[i]`.
    pub(crate) fn fold_rows<'a, K: CombineOp, C: Number>(simd: S, rows: &'a [C], n: usize, squares: bool, out: &'a mut [C]) {
        if n <= SHORT_ROW_LEN {
            return match squares {
                true => map_rows(rows, n, out, |row| row.iter().fold(K::identity(), |a, &x| K::combine(a, x.mul(x)))),
                false => map_rows(rows, n, out, |row| row.iter().fold(K::identity(), |a, &x| K::combine(a, x))),
            };
        }
        for (out, row) in out.iter_mut().zip(rows.chunks_exact(n)) {
            *out = match squares {
                true => fold_map::<K, C, S>(simd, row, row, |x, _| x.mul(x)),
                false => fold_simd::<K, C, S>(simd, row),
            };
        }
    }
}

/// Calls `f` for every row of `n` elements. For very short rows, `n` is a compile-time constant in the loop.
#[inline(always)]
pub(crate) fn map_rows<C, R>(rows: &[C], n: usize, out: &mut [R], f: impl Fn(&[C]) -> R) {
    #[inline(always)]
    fn known<const N: usize, C, R>(rows: &[C], out: &mut [R], f: impl Fn(&[C]) -> R) {
        out.iter_mut().zip(rows.as_chunks::<N>().0).for_each(|(out, row)| *out = f(row));
    }
    match n {
        1 => known::<1, C, R>(rows, out, f),
        2 => known::<2, C, R>(rows, out, f),
        3 => known::<3, C, R>(rows, out, f),
        4 => known::<4, C, R>(rows, out, f),
        8 => known::<8, C, R>(rows, out, f),
        _ => out.iter_mut().zip(rows.chunks_exact(n)).for_each(|(out, row)| *out = f(row)),
    }
}

vectorised! {
    /// Combines each element of `to` with the corresponding element of `from`.
    pub(crate) fn combine_all<'a, K: CombineOp, C: Number>(_simd: S, to: &'a mut [C], from: &'a [C]) {
        to.iter_mut().zip(from).for_each(|(a, b)| *a = K::combine(*a, *b));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares folds of every length up to several vectors with a plain loop over the elements, and places a NaN at every index.
    fn checked<C: Number>(of: impl Fn(usize) -> C, nan: Option<C>) {
        for n in (0..200).chain([PART_LEN - 1, PART_LEN, PART_LEN + 1, 1009, 4096]) {
            let x: Vec<C> = (0..n).map(&of).collect();
            let one_by_one = |f: fn(C, C) -> C, from: C| x.iter().fold(from, |a, &b| f(a, b));
            assert_eq!(fold::<Add, C>(&x), one_by_one(C::add, C::from_i32(0)), "sum of {n}");
            assert_eq!(fold::<Max, C>(&x), one_by_one(C::max, Max::identity()), "greatest of {n}");
            assert_eq!(fold::<Min, C>(&x), one_by_one(C::min, Min::identity()), "least of {n}");
            let Some(nan) = nan else { continue };
            for at in (0..n).step_by(1 + n / 50) {
                let mut x = x.clone();
                x[at] = nan;
                for got in [fold::<Add, C>(&x), fold::<Max, C>(&x), fold::<Min, C>(&x), fold::<Mul, C>(&x)] {
                    assert!(got.to_f64().is_nan(), "{at} of {n}");
                }
            }
        }
    }

    #[test]
    fn folds_of_every_length_equal_a_loop() {
        // The elements are small integers, so that sums are exact in any order.
        let of = |i: usize| (i * 7919 % 201) as i32 - 100;
        checked(|i| of(i) as f32, Some(f32::NAN));
        checked(|i| f64::from(of(i)), Some(f64::NAN));
        checked(|i| i64::from(of(i)), None);
    }

    #[test]
    fn rows_are_folded_separately() {
        for n in [1, 7, 64, 100, 127, 128, 129, 300] {
            let x: Vec<f32> = (0..n * 5).map(|i| (i * 7919 % 201) as f32 - 100.0).collect();
            let mut out = [0f32; 5];
            fold_rows::<Max, f32>(&x, n, false, &mut out);
            assert!(out.iter().zip(x.chunks(n)).all(|(&got, row)| got == fold::<Max, f32>(row)), "{n}");
            fold_rows::<Add, f32>(&x, n, true, &mut out);
            // The elements are integers, so that sums are exact in any order.
            let squares = |row: &[f32]| row.iter().map(|x| x * x).sum::<f32>();
            assert!(out.iter().zip(x.chunks(n)).all(|(&got, row)| got == squares(row)), "squares of {n}");
        }
    }

    #[test]
    fn folds_of_products_and_maps_equal_iterators() {
        let x: Vec<f64> = (0..777).map(|i| 1.0 + f64::from(i % 13) * 1e-3).collect();
        let want: f64 = x.iter().product();
        assert!((fold::<Mul, f64>(&x) - want).abs() < 1e-12 * want);
        assert_eq!(fold::<Mul, i64>(&[3, -4, 5]), -60);
        vectorised! {
            fn square<'a>(simd: S, x: &'a [f64]) -> f64 {
                fold_map::<Add, f64, S>(simd, x, x, |a, b| a * b)
            }
        }
        let want: f64 = x.iter().map(|v| v * v).sum();
        assert!((square(&x) - want).abs() < 1e-12 * want);
    }

    #[test]
    fn f32_sums_stay_within_their_error_bound() {
        let x: Vec<f32> = (0..100_000).map(|i| ((i * 7919) % 1009) as f32 / 1009.0 - 0.3).collect();
        let exact: f64 = x.iter().map(|&v| f64::from(v)).sum();
        let magnitudes: f64 = x.iter().map(|&v| f64::from(v.abs())).sum();
        let bound = (x.len() as f64 / 32.0 + 20.0) * f64::from(f32::EPSILON) / 2.0 * magnitudes;
        assert!((f64::from(fold::<Add, f32>(&x)) - exact).abs() <= bound);
    }
}
