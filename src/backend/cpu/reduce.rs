//! Reductions on the CPU: tiles converted to the accumulator's type, many accumulators, slices of fixed length, so that
//! the result does not depend on the number of threads.

use std::sync::LazyLock;

use smallvec::SmallVec;

use crate::backend::cpu::accumulate::{Add, Combine, Max, Min, Mul, combine_all, fold, fold_rows};
use crate::backend::cpu::convert::{load_tile, read, store_tile};
use crate::backend::cpu::interpreter::{Scratch, TILE, Tile, TileIn};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::reduction::{Combination, Element, Reduction, ReductionPlan, Rescaled, Rule, SafeRange};
use crate::device::cpu::parallel;
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::with_host;
use crate::{Compute, DType, Result, Scalar};

/// Elements a slice of one result has: partial results keep rounding small and give threads work.
const SLICE: usize = 1 << 16;
/// Elements that are accumulated at once where they lie.
const STRETCH: usize = 1 << 12;
/// Rows a slice of columns has, and those that are added up before they are added to the others.
const ROWS: usize = 1 << 8;
const FEW: usize = 64;
/// Columns whose sums stay in registers over all rows.
const ACROSS: usize = 32;
/// Elements a job of the pool reduces: enough to hide what handing it over costs.
const JOB: usize = 1 << 15;

/// The formula whose results are accumulated as they are computed.
static SQUARE: LazyLock<Expr> = LazyLock::new(|| Expr::input(0).square());

pub(crate) fn run(reduction: &Reduction) -> Result<()> {
    let Reduction { rule, x: t, out, number, .. } = *reduction;
    let plan = &reduction.plan();
    with_host(&[&t.storage], &[&out.storage], |reads, writes| {
        let job = ReductionJob { rule, dtype: t.dtype, bytes: reads[0], plan, number };
        let (to, start) = (&mut *writes[0], out.layout.offset);
        match (t.dtype.compute(), rule.accumulator(t.dtype)) {
            (Compute::F32, Compute::I64) => job.run::<f32, i64>(out.dtype, to, start),
            (Compute::F64, Compute::I64) => job.run::<f64, i64>(out.dtype, to, start),
            (Compute::F32, _) => job.run::<f32, f32>(out.dtype, to, start),
            (Compute::F64, _) => job.run::<f64, f64>(out.dtype, to, start),
            (Compute::I64, _) => job.run::<i64, i64>(out.dtype, to, start),
        }
    })
}

/// Loads elements `start`, `start + stride`, .. as they are accumulated.
type Load<'a, S> = &'a (dyn Fn(isize, isize, &mut [S]) + Sync);

struct ReductionJob<'a> {
    rule: &'a Rule,
    dtype: DType,
    bytes: &'a [u8],
    plan: &'a ReductionPlan,
    number: f64,
}

impl ReductionJob<'_> {
    /// Elements are computed in `C` and accumulated in `S`, which is `C` or i64.
    fn run<C: Number, S: Number>(&self, out_dtype: DType, out: &mut [u8], start: usize) {
        let ReductionJob { rule, dtype, bytes, plan, .. } = *self;
        let squares = matches!(&rule.element, Element::Of(formula) if *formula == *SQUARE);
        let in_place = (rule.element == Element::Itself || squares) && dtype == S::COMPUTE.dtype();
        let elements = if in_place { bytemuck::cast_slice(bytes) } else { &[] };
        let mut reduced = |load: Load<S>| {
            let source = Source { plan, load, elements, squares };
            let finish = |results: Vec<S>| self.finished(&results).unwrap_or(results);
            match rule.combination {
                Combination::ArgMax => store_tile(out_dtype, &source.arg::<Max>(), out, start as _, 1),
                Combination::ArgMin => store_tile(out_dtype, &source.arg::<Min>(), out, start as _, 1),
                Combination::Add => {
                    let sums = source.reduce::<Add>();
                    let again = rule.rescaled.map(|rescaled| self.rescaled(rescaled, &sums)).unwrap_or_default();
                    let mut results = finish(sums);
                    again.into_iter().for_each(|(o, result)| results[o] = result);
                    store_tile(out_dtype, &results, out, start as _, 1);
                }
                Combination::Mul => store_tile(out_dtype, &finish(source.reduce::<Mul>()), out, start as _, 1),
                Combination::Max => store_tile(out_dtype, &finish(source.reduce::<Max>()), out, start as _, 1),
                Combination::Min => store_tile(out_dtype, &finish(source.reduce::<Min>()), out, start as _, 1),
            }
        };
        match &rule.element {
            Element::Itself => reduced(&|at, stride, out| load_tile(dtype, bytes, at as usize, stride, out)),
            Element::NonZero => reduced(&|at, stride, out| {
                let mut values = [C::from_i32(0); TILE];
                let values = &mut values[..out.len()];
                load_tile(dtype, bytes, at as usize, stride, values);
                out.iter_mut().zip(values).for_each(|(o, v)| *o = S::truth(v.is_true()));
            }),
            Element::Of(formula) => {
                let program: &Program = &Program::of(std::slice::from_ref(formula));
                reduced(&|at, stride, out| {
                    let (mut loaded, mut made) = (Vec::new(), Vec::new());
                    let values = read((dtype, bytes), at as usize, stride, out.len(), &mut loaded);
                    if C::COMPUTE == S::COMPUTE {
                        return eval(program, values, &[], bytemuck::cast_slice_mut(out));
                    }
                    made.resize(out.len(), C::from_i32(0));
                    eval(program, values, &[], &mut made);
                    out.iter_mut().zip(made).for_each(|(o, v)| *o = S::from_i64(v.to_i64()));
                });
            }
        }
    }
}

impl ReductionJob<'_> {
    /// The formula of each result, where the rule has one.
    fn finished<S: Number>(&self, results: &[S]) -> Option<Vec<S>> {
        Some(evaluated(self.rule.finish.as_ref()?, self.number, results))
    }

    /// The results whose sums left the range of `S`, by sums of elements times a power of two.
    fn rescaled<S: Number>(&self, rescaled: Rescaled, sums: &[S]) -> Vec<(usize, S)> {
        let (range, squares, plan) = (SafeRange::of(S::COMPUTE), rescaled.squares(), self.plan);
        let mut made = Vec::new();
        for factor in [range.down, range.up] {
            let needs = |o: &usize| range.factor(sums[*o].to_f64(), squares) == factor;
            let which: Vec<usize> = (0..sums.len()).filter(needs).collect();
            let factor = S::from_f64(factor);
            let load = |at: isize, stride: isize, out: &mut [S]| {
                load_tile(self.dtype, self.bytes, at as usize, stride, out);
                out.iter_mut().for_each(|x| *x = x.mul(factor));
                if squares {
                    out.iter_mut().for_each(|x| *x = x.mul(*x));
                }
            };
            let source = Source { plan, load: &load, elements: &[], squares: false };
            let slices = plan.n.div_ceil(SLICE);
            let partial = source.items(which.len() * slices, SLICE.min(plan.n), |item| {
                let slice = item % slices;
                source.line::<Add>(which[item / slices], slice * SLICE, plan.n.min((slice + 1) * SLICE))
            });
            let results = self.finished(&merge::<Add, S>(partial, which.len(), slices)).unwrap_or_default();
            let undone = |x: S| if rescaled == Rescaled::Variance { x.div(factor).div(factor) } else { x.div(factor) };
            made.extend(which.into_iter().zip(results.into_iter().map(undone)));
        }
        made
    }
}

/// The program of one input over a tile.
fn eval<C: Number>(program: &Program, values: &[C], scalars: &[Scalar], out: &mut [C]) {
    let inputs = [TileIn::Slice(values)];
    let tile = Tile { inputs: &inputs, scalars, seeds: &[], first: 0, len: values.len() };
    program.eval_tile(&tile, &mut Scratch::new(), &mut [out]);
}

/// A formula of each result and of [`Reduction::number`].
fn evaluated<S: Number>(finish: &Expr, number: f64, results: &[S]) -> Vec<S> {
    let program = &Program::of(std::slice::from_ref(finish));
    let mut out = vec![S::from_i32(0); results.len()];
    for (out, results) in out.chunks_mut(TILE).zip(results.chunks(TILE)) {
        eval(program, results, &[Scalar::Float(number)], out);
    }
    out
}

struct Source<'a, S> {
    plan: &'a ReductionPlan,
    load: Load<'a, S>,
    /// The storage's elements, if they or their squares can be accumulated as they are; else nothing.
    elements: &'a [S],
    squares: bool,
}

impl<S: Number> Source<'_, S> {
    /// Every result, in order.
    fn reduce<K: Combine>(&self) -> Vec<S> {
        let plan = self.plan;
        if plan.by_column() && plan.kept.inner().0 >= 8 {
            return self.columns::<K>();
        }
        let slices = plan.n.div_ceil(SLICE);
        let rows = plan.kept.is_one(plan.outs, plan.n as isize) && plan.reduced.is_one(plan.n, 1);
        if rows && slices == 1 && !self.elements.is_empty() {
            let (n, elements) = (plan.n, &self.elements[plan.start..][..plan.outs * plan.n]);
            let mut out = vec![K::neutral(); plan.outs];
            let group = (JOB / n).max(1);
            parallel::for_each_chunk(&mut out, group, |i, out| {
                fold_rows::<K, S>(&elements[i * group * n..], n, self.squares, out);
            });
            return out;
        }
        let partial = self.items(plan.outs * slices, SLICE.min(plan.n), |item| {
            let (o, slice) = (item / slices, item % slices);
            self.line::<K>(o, slice * SLICE, plan.n.min((slice + 1) * SLICE))
        });
        merge::<K, S>(partial, plan.outs, slices)
    }

    /// `f(item)` for every item, on all threads where there is enough to do.
    fn items<R: Send>(&self, count: usize, cost: usize, f: impl Fn(usize) -> R + Send + Sync) -> Vec<R> {
        parallel::map(count, (JOB / cost.max(1)).max(1), f)
    }

    /// The reduction of positions `r..end` of result `o`.
    fn line<K: Combine>(&self, o: usize, mut r: usize, end: usize) -> S {
        let base = self.plan.start as isize + self.plan.kept.run(o, 1).0;
        let mut total = K::neutral();
        let stride = self.plan.reduced.inner().1;
        while r < end && stride == 1 && !self.elements.is_empty() {
            let (at, n) = self.plan.reduced.run(r, end - r);
            for stretch in self.elements[(base + at) as usize..][..n].chunks(STRETCH) {
                let mut part = [K::neutral()];
                fold_rows::<K, S>(stretch, stretch.len(), self.squares, &mut part);
                total = K::combine(total, part[0]);
            }
            r += n;
        }
        if r == end {
            return total;
        }
        let mut tile = [K::neutral(); TILE];
        while r < end {
            let mut filled = 0;
            while filled < TILE && r < end {
                let (at, n) = self.plan.reduced.run(r, (end - r).min(TILE - filled));
                (self.load)(base + at, stride, &mut tile[filled..filled + n]);
                filled += n;
                r += n;
            }
            total = K::combine(total, fold::<K, S>(&tile[..filled]));
        }
        total
    }

    /// Results that are neighbours in memory, a tile of them at a time.
    fn columns<K: Combine>(&self) -> Vec<S> {
        let plan = self.plan;
        let (columns, across) = plan.kept.inner();
        let (blocks, slices) = (columns.div_ceil(TILE), plan.n.div_ceil(ROWS));
        let outer = plan.outs / columns;
        let cost = columns.min(TILE) * ROWS.min(plan.n);
        let parts: Vec<Vec<S>> = self.items(outer * blocks * slices, cost, |item| {
            let (block, slice) = (item / slices, item % slices);
            let (first, o) = (block % blocks * TILE, block / blocks * columns);
            let width = TILE.min(columns - first);
            let base = plan.start as isize + plan.kept.run(o + first, 1).0;
            let mut total = vec![K::neutral(); width];
            let rows = slice * ROWS..plan.n.min((slice + 1) * ROWS);
            for top in rows.clone().step_by(FEW) {
                let starts: SmallVec<[isize; FEW]> =
                    (top..rows.end.min(top + FEW)).map(|r| base + plan.reduced.run(r, 1).0).collect();
                let mut sums = [K::neutral(); TILE];
                let sums = &mut sums[..width];
                if across == 1 && !self.elements.is_empty() {
                    combine_rows::<K, S>(sums, self.elements, &starts, self.squares);
                } else {
                    let mut tile = [K::neutral(); TILE];
                    for start in starts {
                        (self.load)(start, across, &mut tile[..width]);
                        combine_all::<K, S>(sums, &tile[..width]);
                    }
                }
                combine_all::<K, S>(&mut total, sums);
            }
            total
        });
        let mut parts = parts.into_iter();
        let mut out = Vec::with_capacity(plan.outs);
        for _ in 0..outer * blocks {
            let mut total = parts.next().expect("a slice at least");
            for _ in 1..slices {
                combine_all::<K, S>(&mut total, &parts.next().expect("all slices"));
            }
            out.extend(total);
        }
        out
    }

    /// The position of every result's first greatest (or least) element, of its first NaN where it has one.
    fn arg<K: Combine>(&self) -> Vec<i64> {
        let plan = self.plan;
        let slices = plan.n.div_ceil(SLICE);
        let partial = self.items(plan.outs * slices, SLICE.min(plan.n), |item| {
            let (o, slice) = (item / slices, item % slices);
            self.arg_line::<K>(o, slice * SLICE, plan.n.min((slice + 1) * SLICE))
        });
        let first = |found: &[(S, usize)]| {
            found.iter().copied().reduce(|a, b| if stays::<K, S>(a.0, b.0) { a } else { b }).map_or(0, |a| a.1 as i64)
        };
        partial.chunks(slices).map(first).collect()
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
    /// Combines rows of elements, as long as there are sums, that lie where they start, or their squares, into these.
    fn combine_rows<'a, K: Combine, C: Number>(
        _simd: S, sums: &'a mut [C], elements: &'a [C], starts: &'a [isize], squares: bool
    ) {
        match squares {
            true => combine_rows_of::<K, C>(sums, elements, starts, |x| x.mul(x)),
            false => combine_rows_of::<K, C>(sums, elements, starts, |x| x),
        }
    }
}

#[inline(always)]
fn combine_rows_of<K: Combine, C: Number>(sums: &mut [C], elements: &[C], starts: &[isize], of: impl Fn(C) -> C) {
    let (blocks, rest) = sums.as_chunks_mut::<ACROSS>();
    let done = blocks.len() * ACROSS;
    for (b, sums) in blocks.iter_mut().enumerate() {
        let mut kept = *sums;
        for &start in starts {
            let row = &elements[start as usize + b * ACROSS..][..ACROSS];
            kept.iter_mut().zip(row).for_each(|(a, &x)| *a = K::combine(*a, of(x)));
        }
        *sums = kept;
    }
    for &start in starts {
        let row = &elements[start as usize + done..][..rest.len()];
        rest.iter_mut().zip(row).for_each(|(a, &x)| *a = K::combine(*a, of(x)));
    }
}

/// Pairwise over the slices of each result.
fn merge<K: Combine, S: Number>(mut partial: Vec<S>, outs: usize, slices: usize) -> Vec<S> {
    for own in partial.chunks_mut(slices) {
        let mut n = slices;
        while n > 1 {
            let half = n.div_ceil(2);
            for i in 0..n - half {
                own[i] = K::combine(own[i], own[i + half]);
            }
            n = half;
        }
    }
    (0..outs).map(|o| partial[o * slices]).collect()
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
