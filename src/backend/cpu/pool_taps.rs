//! Pooling of one plane. Each kernel tap is applied to a whole row of windows at a time, so that loops run over rows of the image. Every
//! window still receives its taps in row-major order.

use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::windows::Windows;

/// A kernel tap of a row of windows. For windows `first..last`, the tap is inside the image; window `first` reads column `at`.
#[derive(Clone, Copy)]
struct Tap {
    first: usize,
    last: usize,
    at: usize,
}

/// The taps that all rows of windows have in common.
pub(crate) struct Taps<'a> {
    w: &'a Windows,
    columns: Vec<Tap>,
}

impl Taps<'_> {
    pub(crate) fn new(w: &Windows) -> Taps<'_> {
        let (image, padding, dilation) = (w.image[1], w.padding[1], w.dilation[1]);
        let column = |k: usize| {
            let (first, last) = w.windows_inside(1, k);
            let at = || first * w.stride[1] + k * dilation - padding;
            (first < last).then(|| Tap { first, last, at: at() })
        };
        // Taps before `from` are in the padding even for the last window; taps at and after `to` are beyond the image even for the first
        // window.
        let from = padding.saturating_sub((w.grid[1] - 1) * w.stride[1]).div_ceil(dilation);
        let to = w.kernel[1].min((image + padding).div_ceil(dilation));
        Taps { w, columns: (from..to).filter_map(column).collect() }
    }

    /// Calls `f` with the taps of row `o` of windows, in order, or in reverse within each row if `reverse`. `at` in these taps is an
    /// index in the plane.
    #[inline(always)]
    fn for_row(&self, o: usize, reverse: bool, mut f: impl FnMut(Tap)) {
        let (top, bottom) = self.w.input_range(0, o);
        for h in (top..bottom).step_by(self.w.dilation[0]) {
            for k in 0..self.columns.len() {
                let tap = self.columns[if reverse { self.columns.len() - 1 - k } else { k }];
                f(Tap { at: h * self.w.image[1] + tap.at, ..tap });
            }
        }
    }
}

/// Returns `gathered.len()` elements of `row`, `stride` apart: in place if `stride` is 1, otherwise copied to `gathered`.
#[inline(always)]
fn strided_row<'a, C: Number>(row: &'a [C], stride: usize, gathered: &'a mut [C]) -> &'a [C] {
    match (stride, gathered.split_last_mut()) {
        (1, _) => return &row[..gathered.len()],
        // Stride 2 has a separate loop, because the compiler vectorises it.
        (2, Some((last, gathered))) => {
            let (pairs, rest) = row[..2 * gathered.len() + 1].as_chunks::<2>();
            gathered.iter_mut().zip(pairs).for_each(|(y, pair)| *y = pair[0]);
            *last = rest[0];
        }
        _ => gathered.iter_mut().zip(row.iter().step_by(stride)).for_each(|(y, x)| *y = *x),
    }
    gathered
}

/// Replaces the maximum `best` by `x` and its index `at` by `place` if `x` is greater or NaN.
#[inline(always)]
pub(crate) fn update_max<C: Number>(best: &mut C, at: &mut i64, x: C, place: i64) {
    let greater = x > *best || x.partial_cmp(&x).is_none();
    *best = if greater { x } else { *best };
    *at = if greater { place } else { *at };
}

vectorised! {
    /// Computes the maximum of each window and its index. Initially, `best` has the lowest value, and `at` the index of each window's
    /// first element. `gathered` is scratch memory for a row of windows.
    pub(crate) fn max_pool_plane<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, plane: &'a [C], gathered: &'a mut [C], best: &'a mut [C], at: &'a mut [i64]
    ) {
        let (width, stride) = (taps.w.grid[1], taps.w.stride[1]);
        for (o, (best, at)) in best.chunks_exact_mut(width).zip(at.chunks_exact_mut(width)).enumerate() {
            taps.for_row(o, false, |tap| {
                let (best, at) = (&mut best[tap.first..tap.last], &mut at[tap.first..tap.last]);
                let row = strided_row(&plane[tap.at..], stride, &mut gathered[tap.first..tap.last]);
                for (i, (x, (best, at))) in row.iter().zip(best.iter_mut().zip(at)).enumerate() {
                    update_max(best, at, *x, (tap.at + i * stride) as i64);
                }
            });
        }
    }
}

vectorised! {
    /// Adds the means of windows to `result`. `gathered` is scratch memory for a row of windows.
    pub(crate) fn avg_pool_plane<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, plane: &'a [C], gathered: &'a mut [C], divisors: &'a [C], result: &'a mut [C]
    ) {
        let (width, stride) = (taps.w.grid[1], taps.w.stride[1]);
        for (o, (result, divisors)) in result.chunks_exact_mut(width).zip(divisors.chunks_exact(width)).enumerate() {
            taps.for_row(o, false, |tap| {
                let sums = &mut result[tap.first..tap.last];
                let row = strided_row(&plane[tap.at..], stride, &mut gathered[tap.first..tap.last]);
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = sum.add(*x));
            });
            result.iter_mut().zip(divisors).for_each(|(y, divisor)| *y = y.div(*divisor));
        }
    }
}

vectorised! {
    /// Adds the gradient of each window's mean to the elements of `result` that the window covers. `scaled` is scratch memory for all
    /// windows.
    pub(crate) fn avg_pool_gradient<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, grads: &'a [C], divisors: &'a [C], scaled: &'a mut [C], result: &'a mut [C]
    ) {
        scaled.iter_mut().zip(grads.iter().zip(divisors)).for_each(|(y, (g, divisor))| *y = g.div(*divisor));
        let stride = taps.w.stride[1];
        for (o, scaled) in scaled.chunks_exact(taps.w.grid[1]).enumerate() {
            taps.for_row(o, true, |tap| {
                let (scaled, to) = (&scaled[tap.first..tap.last], &mut result[tap.at..]);
                match stride {
                    1 => to.iter_mut().zip(scaled).for_each(|(y, g)| *y = y.add(*g)),
                    2 => {
                        let (pairs, rest) = to[..2 * scaled.len() - 1].as_chunks_mut::<2>();
                        pairs.iter_mut().zip(scaled).for_each(|(y, g)| y[0] = y[0].add(*g));
                        rest.iter_mut().zip(scaled.last()).for_each(|(y, g)| *y = y.add(*g));
                    }
                    _ => to.iter_mut().step_by(stride).zip(scaled).for_each(|(y, g)| *y = y.add(*g)),
                }
            });
        }
    }
}
