//! The indices of the greatest or least elements on the CPU.

use smallvec::SmallVec;

use crate::DType;
use crate::backend::cpu::accumulate::{Combine, each_row, fold};
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::reduce::{FEW, NARROW, SLICE, Source};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;

impl<S: Number> Source<'_, S> {
    /// The position of every result's first greatest (or least) element, of its first NaN where it has one.
    pub(super) fn arg<K: Combine>(&self, dtype: DType, out: &mut [u8]) {
        let plan = self.plan;
        let slices = plan.n.div_ceil(SLICE);
        if slices > 1 {
            let partial = self.items(plan.outs * slices, SLICE, |item| {
                let (o, slice) = (item / slices, item % slices);
                self.arg_line::<K>(o, slice * SLICE, plan.n.min((slice + 1) * SLICE))
            });
            let first = |found: &[(S, usize)]| {
                let first = found.iter().copied().reduce(|a, b| if stays::<K, S>(a.0, b.0) { a } else { b });
                first.map_or(0, |a| a.1 as i64)
            };
            return self.results(dtype, out, false, |o, results: &mut [i64]| {
                results.iter_mut().zip(partial[o * slices..].chunks(slices)).for_each(|(to, found)| *to = first(found));
            });
        }
        let (short, rows) = (self.is_short(), self.has_rows());
        let strided = plan.kept.inner().0 >= NARROW && plan.by_column() || (short && !rows);
        self.results(dtype, out, strided, |o, results: &mut [i64]| match (strided, short) {
            (true, _) => self.neighbours(o, results, |start, stride, found| self.arg_across::<K>(start, stride, found)),
            (false, true) => self.rows(o, results, |rows, _, found| first_of_rows::<K, S>(rows, plan.n, found)),
            _ => results.iter_mut().enumerate().for_each(|(i, to)| *to = self.arg_line::<K>(o + i, 0, plan.n).1 as i64),
        });
    }

    /// The positions of results whose first elements begin at `start` and are `stride` apart.
    fn arg_across<K: Combine>(&self, start: isize, stride: isize, found: &mut [i64]) {
        let mut best: SmallVec<[S; 64]> = SmallVec::from_elem(K::neutral(), found.len());
        let mut tile = best.clone();
        found.fill(0);
        for r in 0..self.plan.n {
            let to = if r == 0 { &mut best } else { &mut tile };
            (self.load)(start + self.plan.reduced.run(r, 1).0, stride, to);
            if r > 0 {
                take_better::<K, S>(&mut best, &tile, r as i64, found);
            }
        }
    }

    fn arg_line<K: Combine>(&self, o: usize, mut r: usize, end: usize) -> (S, usize) {
        let base = self.plan.start as isize + self.plan.kept.run(o, 1).0;
        let stride = self.plan.reduced.inner().1;
        let (mut loaded, mut best) = (Vec::new(), None);
        while r < end {
            let (at, n) = self.plan.reduced.run(r, (end - r).min(TILE));
            let tile = match stride == 1 && !self.elements.is_empty() {
                true => &self.elements[(base + at) as usize..][..n],
                false => {
                    loaded.resize(n, K::neutral());
                    (self.load)(base + at, stride, &mut loaded);
                    &loaded[..]
                }
            };
            let value = fold::<K, S>(tile);
            if best.is_none_or(|(b, _)| !stays::<K, S>(b, value)) {
                best = Some((value, r + first_position(tile, value)));
            }
            r += n;
        }
        best.unwrap_or((K::neutral(), r))
    }
}

/// The position of the first that equals `value`, or is NaN as it is.
fn first_position<S: Number>(elements: &[S], value: S) -> usize {
    if is_nan(value) {
        return elements.iter().position(|v| is_nan(*v)).unwrap_or(0);
    }
    // A loop without an end of its own, which is put in vectors, tells which of them to look through.
    let has = |some: &[S]| some.iter().map(|v| u32::from(*v == value)).sum::<u32>() > 0;
    let (which, some) = elements.chunks(FEW).enumerate().find(|(_, some)| has(some)).unwrap_or((0, elements));
    which * FEW + some.iter().position(|v| *v == value).unwrap_or(0)
}

fn is_nan<S: Number>(v: S) -> bool {
    v.partial_cmp(&v).is_none()
}

/// Whether the earlier `a` is kept beside the later `b`: as good, or NaN.
fn stays<K: Combine, S: Number>(a: S, b: S) -> bool {
    is_nan(a) || (!is_nan(b) && K::combine(a, b) == a)
}

vectorised! {
    /// Replaces what the elements of position `r` are better than.
    fn take_better<'a, K: Combine, S2: Number>(_simd: S, best: &'a mut [S2], elements: &'a [S2], r: i64, found: &'a mut [i64]) {
        for ((best, &v), found) in best.iter_mut().zip(elements).zip(found) {
            let stays = stays::<K, S2>(*best, v);
            (*best, *found) = if stays { (*best, *found) } else { (v, r) };
        }
    }
}

vectorised! {
    /// The position of the first of every `n` elements that is as good as any.
    fn first_of_rows<'a, K: Combine, S2: Number>(_simd: S, rows: &'a [S2], n: usize, found: &'a mut [i64]) {
        each_row(rows, n, found, |row| {
            let first = (row[0], 0);
            row.iter().enumerate().skip(1).fold(first, |a, (i, &v)| if stays::<K, S2>(a.0, v) { a } else { (v, i as i64) }).1
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_those_that_are_equal_is_found() {
        for n in [1, 2, FEW - 1, FEW, FEW + 1, 3 * FEW + 5] {
            for at in 0..n {
                let mut elements = vec![1f32; n];
                (at..n).step_by(3).for_each(|i| elements[i] = 2.0);
                assert_eq!(first_position(&elements, 2.0), at, "of {n}");
                elements[at] = f32::NAN;
                assert_eq!(first_position(&elements, f32::NAN), at, "NaN of {n}");
            }
        }
    }
}
