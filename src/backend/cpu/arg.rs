//! argmax and argmin on the CPU.

use smallvec::SmallVec;

use crate::DType;
use crate::backend::cpu::accumulate::{CombineOp, fold, map_rows};
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::reduce::{GROUP_LEN, MIN_VECTOR_WIDTH, ReductionInput, SLICE_LEN};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;

impl<S: Number> ReductionInput<'_, S> {
    /// Computes, for each result, the index of the first NaN or, if there is none, of the first greatest (or least) element.
    pub(super) fn arg_reduce<K: CombineOp>(&self, dtype: DType, out: &mut [u8]) {
        let plan = self.plan;
        let slices = plan.n.div_ceil(SLICE_LEN);
        if slices > 1 {
            let partial = self.parallel_items(plan.outs * slices, SLICE_LEN, |item| {
                let (o, slice) = (item / slices, item % slices);
                self.arg_line::<K>(o, slice * SLICE_LEN, plan.n.min((slice + 1) * SLICE_LEN))
            });
            let first = |found: &[(S, usize)]| {
                let first = found.iter().copied().reduce(|a, b| if keeps_first::<K, S>(a.0, b.0) { a } else { b });
                first.map_or(0, |a| a.1 as i64)
            };
            return self.store_results(dtype, out, false, |o, results: &mut [i64]| {
                results.iter_mut().zip(partial[o * slices..].chunks(slices)).for_each(|(to, found)| *to = first(found));
            });
        }
        let (short, rows) = (self.is_short(), self.has_rows());
        let strided = plan.kept.inner().0 >= MIN_VECTOR_WIDTH && plan.by_column() || (short && !rows);
        self.store_results(dtype, out, strided, |o, results: &mut [i64]| match (strided, short) {
            (true, _) => {
                self.for_neighbours(o, results, |start, stride, found| self.arg_across::<K>(start, stride, found))
            }
            (false, true) => self.map_rows(o, results, |rows, _, found| arg_of_rows::<K, S>(rows, plan.n, found)),
            _ => results.iter_mut().enumerate().for_each(|(i, to)| *to = self.arg_line::<K>(o + i, 0, plan.n).1 as i64),
        });
    }

    /// Computes indices for results whose first input elements are at `start`, `start + stride`, ....
    fn arg_across<K: CombineOp>(&self, start: isize, stride: isize, found: &mut [i64]) {
        let mut best: SmallVec<[S; 64]> = SmallVec::from_elem(K::identity(), found.len());
        let mut tile = best.clone();
        found.fill(0);
        for r in 0..self.plan.n {
            let to = if r == 0 { &mut best } else { &mut tile };
            (self.load)(start + self.plan.reduced.locate(r, 1).0, stride, to);
            if r > 0 {
                take_better::<K, S>(&mut best, &tile, r as i64, found);
            }
        }
    }

    /// Finds the first best element among elements `r..end` of result `o`, and returns its value and its index.
    fn arg_line<K: CombineOp>(&self, o: usize, mut r: usize, end: usize) -> (S, usize) {
        let base = self.plan.start as isize + self.plan.kept.locate(o, 1).0;
        let stride = self.plan.reduced.inner().1;
        let (mut loaded, mut best) = (Vec::new(), None);
        while r < end {
            let (at, n) = self.plan.reduced.locate(r, (end - r).min(TILE));
            let tile = match stride == 1 && !self.elements.is_empty() {
                true => &self.elements[(base + at) as usize..][..n],
                false => {
                    loaded.resize(n, K::identity());
                    (self.load)(base + at, stride, &mut loaded);
                    &loaded[..]
                }
            };
            let value = fold::<K, S>(tile);
            if best.is_none_or(|(b, _)| !keeps_first::<K, S>(b, value)) {
                best = Some((value, r + first_position(tile, value)));
            }
            r += n;
        }
        best.unwrap_or((K::identity(), r))
    }
}

/// Returns the index of the first element that equals `value` or, if `value` is NaN, of the first NaN.
fn first_position<S: Number>(elements: &[S], value: S) -> usize {
    if is_nan(value) {
        return elements.iter().position(|v| is_nan(*v)).unwrap_or(0);
    }
    // The inner loop has no early exit, so it is vectorised. It finds the chunk that contains the element; then the chunk is searched.
    let has = |some: &[S]| some.iter().map(|v| u32::from(*v == value)).sum::<u32>() > 0;
    let (which, some) = elements.chunks(GROUP_LEN).enumerate().find(|(_, some)| has(some)).unwrap_or((0, elements));
    which * GROUP_LEN + some.iter().position(|v| *v == value).unwrap_or(0)
}

fn is_nan<S: Number>(v: S) -> bool {
    v.partial_cmp(&v).is_none()
}

/// True if the earlier element `a` is preferred to the later element `b`: `a` is NaN or at least as good.
fn keeps_first<K: CombineOp, S: Number>(a: S, b: S) -> bool {
    is_nan(a) || (!is_nan(b) && K::combine(a, b) == a)
}

vectorised! {
    /// Compares each best element with the element at index `r` of the same result, and replaces it and its index if the new element is
    /// better.
    fn take_better<'a, K: CombineOp, S2: Number>(_simd: S, best: &'a mut [S2], elements: &'a [S2], r: i64, found: &'a mut [i64]) {
        for ((best, &v), found) in best.iter_mut().zip(elements).zip(found) {
            let keeps_first = keeps_first::<K, S2>(*best, v);
            (*best, *found) = if keeps_first { (*best, *found) } else { (v, r) };
        }
    }
}

vectorised! {
    /// Finds the index of the first best element in every row of `n` elements.
    fn arg_of_rows<'a, K: CombineOp, S2: Number>(_simd: S, rows: &'a [S2], n: usize, found: &'a mut [i64]) {
        map_rows(rows, n, found, |row| {
            let first = (row[0], 0);
            row.iter().enumerate().skip(1).fold(first, |a, (i, &v)| if keeps_first::<K, S2>(a.0, v) { a } else { (v, i as i64) }).1
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_first_of_equal_elements() {
        for n in [1, 2, GROUP_LEN - 1, GROUP_LEN, GROUP_LEN + 1, 3 * GROUP_LEN + 5] {
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
