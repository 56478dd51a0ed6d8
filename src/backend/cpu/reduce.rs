//! Reductions on the CPU: tiles converted to the accumulator's type, many accumulators, slices of fixed length, so that
//! the result does not depend on the number of threads.

use std::ops::Range;
use std::sync::LazyLock;

use smallvec::SmallVec;

use crate::backend::cpu::accumulate::{Add, Combine, Max, Min, Mul, combine_all, fold, fold_rows};
use crate::backend::cpu::convert::{load_tile, read, store_tile};
use crate::backend::cpu::interpreter::{Scratch, TILE, Tile, TileIn};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::reduction::{Combination, Element, Reduction, ReductionPlan, Rescaled, Rule, SafeRange};
use crate::device::cpu::{parallel, threads};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::with_host;
use crate::{Compute, DType, Result, Scalar};

/// Elements a slice of one result has: partial results keep rounding small and give threads work.
pub(super) const SLICE: usize = 1 << 16;
/// Elements that are accumulated at once where they lie.
const STRETCH: usize = 1 << 12;
/// Rows a slice of columns has, and those that are added up before they are added to the others.
const ROWS: usize = 1 << 8;
pub(super) const FEW: usize = 64;
/// Results side by side that are combined at once.
pub(super) const NARROW: usize = 8;
/// The most elements of results that are combined element by element.
const SHORT_ROW: usize = 16;
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
pub(super) type Load<'a, S> = &'a (dyn Fn(isize, isize, &mut [S]) + Sync);

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
        let out = &mut out[start * out_dtype.size()..][..plan.outs * out_dtype.size()];
        let mut reduced = |load: Load<S>| {
            let source = Source { plan, load, elements, squares };
            let finish = |_: usize, results: &mut [S]| self.finish(results);
            match rule.combination {
                Combination::ArgMax => source.arg::<Max>(out_dtype, out),
                Combination::ArgMin => source.arg::<Min>(out_dtype, out),
                Combination::Add => source.reduce::<Add>(out_dtype, out, |o, sums| {
                    let again = rule.rescaled.map(|rescaled| self.rescaled(rescaled, o, sums)).unwrap_or_default();
                    self.finish(sums);
                    again.into_iter().for_each(|(i, result)| sums[i] = result);
                }),
                Combination::Mul => source.reduce::<Mul>(out_dtype, out, finish),
                Combination::Max => source.reduce::<Max>(out_dtype, out, finish),
                Combination::Min => source.reduce::<Min>(out_dtype, out, finish),
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
    /// Replaces each result by the rule's formula of it, where the rule has one.
    fn finish<S: Number>(&self, results: &mut [S]) {
        if let Some(finish) = &self.rule.finish {
            results.copy_from_slice(&evaluated(finish, self.number, results));
        }
    }

    /// Returns the results whose sums left the range of `S`, computed from elements times a power of two, with their indices in `sums`,
    /// which begins at result `first`.
    fn rescaled<S: Number>(&self, rescaled: Rescaled, first: usize, sums: &[S]) -> Vec<(usize, S)> {
        let (range, squares, plan) = (SafeRange::of(S::COMPUTE), rescaled.squares(), self.plan);
        let [most, least] = [range.largest, if squares { range.least } else { -range.largest }].map(S::from_f64);
        let mut made = Vec::new();
        // Without an early end the loop has vectors.
        if sums.iter().fold(true, |all, sum| all & (*sum <= most) & (*sum >= least)) {
            return made;
        }
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
                source.line::<Add>(first + which[item / slices], slice * SLICE, plan.n.min((slice + 1) * SLICE))
            });
            let mut results = merge::<Add, S>(partial, which.len(), slices);
            self.finish(&mut results);
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

pub(super) struct Source<'a, S> {
    pub(super) plan: &'a ReductionPlan,
    pub(super) load: Load<'a, S>,
    /// The storage's elements, if they or their squares can be accumulated as they are; else nothing.
    pub(super) elements: &'a [S],
    squares: bool,
}

impl<S: Number> Source<'_, S> {
    /// Every result, in order, after `finish`. Slices of results are combined at the end; others are stored as they are computed.
    fn reduce<K: Combine>(&self, dtype: DType, out: &mut [u8], finish: impl Fn(usize, &mut [S]) + Sync) {
        let plan = self.plan;
        let by_column = plan.by_column() && plan.kept.inner().0 >= NARROW;
        let slices = plan.n.div_ceil(if by_column { ROWS } else { SLICE });
        if slices > 1 {
            let all = if by_column { self.columns::<K>() } else { self.sliced::<K>(slices) };
            return self.results(dtype, out, false, |o, results| {
                results.copy_from_slice(&all[o..][..results.len()]);
                finish(o, results);
            });
        }
        let strided = by_column || (self.is_short() && !self.has_rows());
        let rows = self.has_rows() && (!self.elements.is_empty() || plan.n <= TILE / 2);
        self.results(dtype, out, strided, |o, results| {
            if strided {
                self.neighbours(o, results, |start, stride, sums| self.across::<K>(start, stride, 0..plan.n, sums));
            } else if rows {
                self.rows(o, results, |rows, squares, results| fold_rows::<K, S>(rows, plan.n, squares, results));
            } else {
                results.iter_mut().enumerate().for_each(|(i, to)| *to = self.line::<K>(o + i, 0, plan.n));
            }
            finish(o, results);
        });
    }

    /// Whether results are of so few elements that those of many are combined at once, element by element.
    pub(super) fn is_short(&self) -> bool {
        self.plan.n <= SHORT_ROW && self.plan.outs >= NARROW
    }

    /// Whether the elements of all results follow each other.
    pub(super) fn has_rows(&self) -> bool {
        self.plan.kept.is_one(self.plan.outs, self.plan.n as isize) && self.plan.reduced.is_one(self.plan.n, 1)
    }

    /// The results that [`neighbours`](Self::neighbours) computes come in multiples of this number.
    fn unit(&self) -> usize {
        let (inner, _) = self.plan.kept.inner();
        if inner < NARROW && self.plan.kept.rank() > 1 { inner } else { 1 }
    }

    /// Stores results that `fill(first, results)` computes, a tile of them at a time, on all threads; with `strided` of such numbers
    /// as suit [`neighbours`](Self::neighbours).
    pub(super) fn results<R: Number>(
        &self,
        dtype: DType,
        out: &mut [u8],
        strided: bool,
        fill: impl Fn(usize, &mut [R]) + Sync,
    ) {
        let (size, plan) = (dtype.size(), self.plan);
        let unit = if strided { self.unit() } else { 1 };
        let least = if strided { plan.kept.inner().0.min((plan.outs / threads()).clamp(64, TILE)) } else { 1 };
        let (job, tile) = ((JOB / plan.n).max(least).next_multiple_of(unit), TILE / unit * unit);
        let store = |first: usize, out: &mut [u8]| {
            let mut results: SmallVec<[R; 32]> = SmallVec::from_elem(R::from_i32(0), tile.min(out.len() / size));
            for (t, out) in out.chunks_mut(tile * size).enumerate() {
                let results = &mut results[..out.len() / size];
                fill(first + t * tile, results);
                store_tile(dtype, results, out, 0, 1);
            }
        };
        match out.len() <= job * size {
            true => store(0, out),
            false => parallel::for_each_chunk(out, job * size, |i, out| store(i * job, out)),
        }
    }

    /// Results of contiguous rows, from result `o` on: `fold(rows, whether of their squares, results)`.
    pub(super) fn rows<R>(&self, o: usize, results: &mut [R], fold: impl Fn(&[S], bool, &mut [R])) {
        let n = self.plan.n;
        let start = self.plan.start + o * n;
        if !self.elements.is_empty() {
            return fold(&self.elements[start..][..results.len() * n], self.squares, results);
        }
        let mut tile = [S::from_i32(0); TILE];
        for (i, results) in results.chunks_mut(TILE / n).enumerate() {
            let tile = &mut tile[..results.len() * n];
            (self.load)((start + i * (TILE / n) * n) as isize, 1, tile);
            fold(tile, false, results);
        }
    }

    /// Results from `o` on, a multiple of [`unit`](Self::unit): `fold(start, stride, results)` of results whose first elements begin at
    /// `start` and are `stride` apart. Where the innermost kept dim is short, these are along the dim before.
    pub(super) fn neighbours<R: Copy>(&self, o: usize, results: &mut [R], fold: impl Fn(isize, isize, &mut [R])) {
        let (kept, unit) = (&self.plan.kept, self.unit());
        let ((_, across), mut done) = (kept.inner(), 0);
        let start = |o: usize| self.plan.start as isize + kept.run(o, 1).0;
        if unit == 1 {
            while done < results.len() {
                let (at, n) = kept.run(o + done, results.len() - done);
                fold(self.plan.start as isize + at, across, &mut results[done..done + n]);
                done += n;
            }
            return;
        }
        let before = kept.rank() - 2;
        let (size, stride) = (kept.sizes[before], kept.strides[before]);
        let mut column: SmallVec<[R; 256]> = SmallVec::new();
        while done < results.len() {
            let n = (size - (o + done) / unit % size).min((results.len() - done) / unit);
            for j in 0..unit {
                column.clear();
                column.extend(results[done..done + n].iter().copied());
                fold(start(o + done) + j as isize * across, stride, &mut column);
                results[done + j..].iter_mut().step_by(unit).zip(&column).for_each(|(to, from)| *to = *from);
            }
            done += n * unit;
        }
    }

    /// Combines `rows` of results whose first elements begin at `start` and are `stride` apart.
    fn across<K: Combine>(&self, start: isize, stride: isize, rows: Range<usize>, total: &mut [S]) {
        total.fill(K::neutral());
        let (width, alone) = (total.len(), rows.len() <= FEW);
        let mut kept: SmallVec<[S; 64]> = SmallVec::from_elem(K::neutral(), if alone { 0 } else { width });
        for top in rows.clone().step_by(FEW) {
            let starts = (top..rows.end.min(top + FEW)).map(|r| start + self.plan.reduced.run(r, 1).0);
            let sums = if alone { &mut *total } else { &mut kept[..] };
            sums.fill(K::neutral());
            if stride == 1 && !self.elements.is_empty() {
                combine_rows::<K, S>(sums, self.elements, &starts.collect::<SmallVec<[isize; FEW]>>(), self.squares);
            } else {
                let mut tile: SmallVec<[S; 64]> = SmallVec::from_elem(K::neutral(), width);
                for start in starts {
                    (self.load)(start, stride, &mut tile);
                    combine_all::<K, S>(sums, &tile);
                }
            }
            if !alone {
                combine_all::<K, S>(total, &kept);
            }
        }
    }

    /// Results of many elements each, in slices.
    fn sliced<K: Combine>(&self, slices: usize) -> Vec<S> {
        let plan = self.plan;
        let partial = self.items(plan.outs * slices, SLICE, |item| {
            let (o, slice) = (item / slices, item % slices);
            self.line::<K>(o, slice * SLICE, plan.n.min((slice + 1) * SLICE))
        });
        merge::<K, S>(partial, plan.outs, slices)
    }

    /// `f(item)` for every item, on all threads where there is enough to do.
    pub(super) fn items<R: Send>(&self, count: usize, cost: usize, f: impl Fn(usize) -> R + Send + Sync) -> Vec<R> {
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
            self.across::<K>(base, across, slice * ROWS..plan.n.min((slice + 1) * ROWS), &mut total);
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
