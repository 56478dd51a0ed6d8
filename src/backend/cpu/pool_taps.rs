//! Pooling of one plane, one tap of a row of windows at a time, so that loops are over rows of the image. Taps come in
//! row-major order for every window, as if one window were done after another.

use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::windows::Windows;

/// A column of taps in a row of windows: those from `first` to before `last` have it in the image, from column `at` on.
#[derive(Clone, Copy)]
struct Tap {
    first: usize,
    last: usize,
    at: usize,
}

/// What all rows of windows have in common.
pub(crate) struct Taps<'a> {
    w: &'a Windows,
    columns: Vec<Tap>,
}

impl Taps<'_> {
    pub(crate) fn new(w: &Windows) -> Taps<'_> {
        let (image, padding, dilation) = (w.image[1], w.padding[1], w.dilation[1]);
        let column = |k: usize| {
            let (first, last) = w.inside(1, k);
            let at = || first * w.stride[1] + k * dilation - padding;
            (first < last).then(|| Tap { first, last, at: at() })
        };
        // The last window has none before, the first none behind.
        let from = padding.saturating_sub((w.grid[1] - 1) * w.stride[1]).div_ceil(dilation);
        let to = w.kernel[1].min((image + padding).div_ceil(dilation));
        Taps { w, columns: (from..to).filter_map(column).collect() }
    }

    /// Calls `f` with the taps of row `o` of windows, in order, from behind in a row where `reverse`; `at` is in the plane.
    #[inline(always)]
    fn of(&self, o: usize, reverse: bool, mut f: impl FnMut(Tap)) {
        let (top, bottom) = self.w.span(0, o);
        for h in (top..bottom).step_by(self.w.dilation[0]) {
            for k in 0..self.columns.len() {
                let tap = self.columns[if reverse { self.columns.len() - 1 - k } else { k }];
                f(Tap { at: h * self.w.image[1] + tap.at, ..tap });
            }
        }
    }
}

/// As many elements of `row` as `picked` has, a stride apart: where they lie if they are neighbours, otherwise in there.
#[inline(always)]
fn pick<'a, C: Number>(row: &'a [C], stride: usize, picked: &'a mut [C]) -> &'a [C] {
    match (stride, picked.split_last_mut()) {
        (1, _) => return &row[..picked.len()],
        // A loop of its own, which is put in vectors.
        (2, Some((last, picked))) => {
            let (pairs, rest) = row[..2 * picked.len() + 1].as_chunks::<2>();
            picked.iter_mut().zip(pairs).for_each(|(y, pair)| *y = pair[0]);
            *last = rest[0];
        }
        _ => picked.iter_mut().zip(row.iter().step_by(stride)).for_each(|(y, x)| *y = *x),
    }
    picked
}

/// Element `x` at `place`, if it is greater than the one found so far, or NaN.
#[inline(always)]
pub(crate) fn greater<C: Number>(best: &mut C, at: &mut i64, x: C, place: i64) {
    let greater = x > *best || x.partial_cmp(&x).is_none();
    *best = if greater { x } else { *best };
    *at = if greater { place } else { *at };
}

vectorised! {
    /// The greatest elements and their places: `best` begins with what is below all, `at` with the first element of each window.
    ///
    /// `picked`: as many elements as a row has windows.
    pub(crate) fn greatest<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, plane: &'a [C], picked: &'a mut [C], best: &'a mut [C], at: &'a mut [i64]
    ) {
        let (width, stride) = (taps.w.grid[1], taps.w.stride[1]);
        for (o, (best, at)) in best.chunks_exact_mut(width).zip(at.chunks_exact_mut(width)).enumerate() {
            taps.of(o, false, |tap| {
                let (best, at) = (&mut best[tap.first..tap.last], &mut at[tap.first..tap.last]);
                let row = pick(&plane[tap.at..], stride, &mut picked[tap.first..tap.last]);
                for (i, (x, (best, at))) in row.iter().zip(best.iter_mut().zip(at)).enumerate() {
                    greater(best, at, *x, (tap.at + i * stride) as i64);
                }
            });
        }
    }
}

vectorised! {
    /// The means of windows, added to `result`.
    ///
    /// `picked`: as many elements as a row has windows.
    pub(crate) fn means<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, plane: &'a [C], picked: &'a mut [C], shares: &'a [C], result: &'a mut [C]
    ) {
        let (width, stride) = (taps.w.grid[1], taps.w.stride[1]);
        for (o, (result, shares)) in result.chunks_exact_mut(width).zip(shares.chunks_exact(width)).enumerate() {
            taps.of(o, false, |tap| {
                let sums = &mut result[tap.first..tap.last];
                let row = pick(&plane[tap.at..], stride, &mut picked[tap.first..tap.last]);
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = sum.add(*x));
            });
            result.iter_mut().zip(shares).for_each(|(y, share)| *y = y.div(*share));
        }
    }
}

vectorised! {
    /// The gradients of means, added to where the elements of windows are in `result`.
    ///
    /// `scaled`: as many elements.
    pub(crate) fn spread<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, grads: &'a [C], shares: &'a [C], scaled: &'a mut [C], result: &'a mut [C]
    ) {
        scaled.iter_mut().zip(grads.iter().zip(shares)).for_each(|(y, (g, share))| *y = g.div(*share));
        let stride = taps.w.stride[1];
        for (o, scaled) in scaled.chunks_exact(taps.w.grid[1]).enumerate() {
            taps.of(o, true, |tap| {
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
