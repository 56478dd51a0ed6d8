//! Reductions on the CPU. Tiles are converted to the accumulator's type and reduced with many accumulators, in slices of fixed length,
//! so that the result does not depend on the number of threads. argmax and argmin also reduce, to indices.

use std::ops::Range;
use std::sync::LazyLock;

use smallvec::SmallVec;

use crate::backend::cpu::accumulate::{Add, CombineOp, Max, Min, Mul, combine_all, fold, fold_rows, map_rows};
use crate::backend::cpu::convert::{load_tile, read_or_convert, store_tile};
use crate::backend::cpu::dispatch::vectorised;
use crate::backend::cpu::interpreter::{Scratch, TILE, Tile, TileIn};
use crate::backend::cpu::scalar::{Number, is_nan};
use crate::backend::problem::reduction::{Combination, Element, Reduction, ReductionPlan, Rescaled, Rule, SafeRange};
use crate::device::cpu::{parallel, threads};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::with_host;
use crate::{Compute, DType, Result, Scalar};

/// The maximum number of input elements of one result that are reduced as one slice, by one thread. Partial results per slice keep
/// rounding errors small and give threads work.
const SLICE_LEN: usize = 1 << 16;
/// The number of elements that one call accumulates directly from the input, without copying them to a tile.
const FOLD_LEN: usize = 1 << 12;
/// The number of rows in a slice of a reduction over columns.
const SLICE_ROWS: usize = 1 << 8;
/// The number of rows that are summed separately before their sum is added to the total, which limits rounding errors.
const GROUP_LEN: usize = 64;
/// The minimum number of adjacent results for which reducing several results in the lanes of a vector pays off.
const MIN_VECTOR_WIDTH: usize = 8;
/// Maximum number of input elements per result for which many results are computed together, adding one input element to each result in
/// turn.
const SHORT_ROW_LEN: usize = 16;
/// The number of columns whose sums stay in registers over all rows.
const REGISTER_COLUMNS: usize = 32;
/// The number of elements in a job of the thread pool: enough to hide the cost of handing the job over.
const JOB_ELEMENTS: usize = 1 << 15;

/// The only formula that is applied while elements are accumulated, without a tile in between.
static SQUARE: LazyLock<Expr> = LazyLock::new(|| Expr::input(0).square());

pub(crate) fn run_reduction(reduction: &Reduction) -> Result<()> {
    let (&Reduction { rule, x, out, number, .. }, plan) = (reduction, &reduction.plan());
    with_host(&[&x.storage], &[&out.storage], |reads, writes| {
        let job = ReductionJob { rule, dtype: x.dtype, bytes: reads[0], plan, number };
        let size = out.dtype.size();
        let to = &mut writes[0][out.layout.offset * size..][..plan.outs * size];
        match (x.dtype.compute(), rule.accumulator(x.dtype)) {
            (Compute::F32, Compute::I64) => job.run::<f32, i64>(out.dtype, to),
            (Compute::F64, Compute::I64) => job.run::<f64, i64>(out.dtype, to),
            (Compute::F32, _) => job.run::<f32, f32>(out.dtype, to),
            (Compute::F64, _) => job.run::<f64, f64>(out.dtype, to),
            (Compute::I64, _) => job.run::<i64, i64>(out.dtype, to),
        }
    })
}

/// Loads the elements at offsets `start`, `start + stride`, ... into a slice, converted to the accumulator's type.
type LoadElements<'a, S> = &'a (dyn Fn(isize, isize, &mut [S]) + Sync);

/// A reduction, and the bytes of its input's storage.
struct ReductionJob<'a> {
    rule: &'a Rule,
    dtype: DType,
    bytes: &'a [u8],
    plan: &'a ReductionPlan,
    number: f64,
}

impl ReductionJob<'_> {
    /// Runs the reduction: elements are computed in `C` and accumulated in `S`, which is `C` or i64.
    fn run<C: Number, S: Number>(&self, out_dtype: DType, out: &mut [u8]) {
        let ReductionJob { rule, dtype, bytes, plan, .. } = *self;
        let squares = matches!(&rule.element, Element::Formula(formula) if *formula == *SQUARE);
        let in_place = (rule.element == Element::Identity || squares) && dtype == S::COMPUTE.dtype();
        let elements = if in_place { bytemuck::cast_slice(bytes) } else { &[] };
        let mut reduced = |load: LoadElements<S>| {
            let source = ReductionInput { plan, load, elements, squares };
            let finish = |_: usize, results: &mut [S]| self.finish(results);
            match rule.combination {
                Combination::ArgMax => source.arg_reduce::<Max>(out_dtype, out),
                Combination::ArgMin => source.arg_reduce::<Min>(out_dtype, out),
                Combination::Add => source.reduce::<Add>(out_dtype, out, |o, sums| {
                    let again = rule.rescaled.map(|rescaled| self.rescale_sums(rescaled, o, sums)).unwrap_or_default();
                    self.finish(sums);
                    again.into_iter().for_each(|(i, result)| sums[i] = result);
                }),
                Combination::Mul => source.reduce::<Mul>(out_dtype, out, finish),
                Combination::Max => source.reduce::<Max>(out_dtype, out, finish),
                Combination::Min => source.reduce::<Min>(out_dtype, out, finish),
            }
        };
        match &rule.element {
            Element::Identity => reduced(&|at, stride, out| load_tile(dtype, bytes, at as usize, stride, out)),
            Element::NonZero => reduced(&|at, stride, out| {
                let mut values = [C::from_i32(0); TILE];
                let values = &mut values[..out.len()];
                load_tile(dtype, bytes, at as usize, stride, values);
                out.iter_mut().zip(values).for_each(|(o, v)| *o = S::from_bool(v.is_true()));
            }),
            Element::Formula(formula) => {
                let program: &Program = &Program::shared(std::slice::from_ref(formula));
                reduced(&|at, stride, out| {
                    let (mut loaded, mut made) = (Vec::new(), Vec::new());
                    let values = read_or_convert((dtype, bytes), at as usize, stride, out.len(), &mut loaded);
                    if C::COMPUTE == S::COMPUTE {
                        return eval_program(program, values, &[], bytemuck::cast_slice_mut(out));
                    }
                    made.resize(out.len(), C::from_i32(0));
                    eval_program(program, values, &[], &mut made);
                    out.iter_mut().zip(made).for_each(|(o, v)| *o = S::from_i64(v.to_i64()));
                });
            }
        }
    }

    /// Applies the rule's finishing formula, if the rule has one, to each result. Scalar 0 of the formula is [`Reduction::number`].
    fn finish<S: Number>(&self, results: &mut [S]) {
        let Some(finish) = &self.rule.finish else { return };
        let program = &Program::shared(std::slice::from_ref(finish));
        for results in results.chunks_mut(TILE) {
            let mut made: SmallVec<[S; 32]> = SmallVec::from_slice(results);
            eval_program(program, results, &[Scalar::Float(self.number)], &mut made);
            results.copy_from_slice(&made);
        }
    }

    /// Recomputes the sums that overflowed the range of `S`, with elements scaled by a power of two. Returns the recomputed results with
    /// their indices in `sums`; `first` is the result index of `sums[0]`.
    fn rescale_sums<S: Number>(&self, rescaled: Rescaled, first: usize, sums: &[S]) -> Vec<(usize, S)> {
        let (range, squares, plan) = (SafeRange::for_accumulator(S::COMPUTE), rescaled.squares(), self.plan);
        let [most, least] =
            [range.max_sum, if squares { range.min_square_sum } else { -range.max_sum }].map(S::from_f64);
        let mut made = Vec::new();
        // A loop without an early exit is vectorised.
        if sums.iter().fold(true, |all, sum| all & (*sum <= most) & (*sum >= least)) {
            return made;
        }
        for factor in [range.scale_down, range.scale_up] {
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
            let source = ReductionInput { plan, load: &load, elements: &[], squares: false };
            let slices = plan.n.div_ceil(SLICE_LEN);
            let partial = source.parallel_items(which.len() * slices, SLICE_LEN.min(plan.n), |item| {
                source.reduce_line::<Add>(first + which[item / slices], source.slice(item % slices))
            });
            let mut results = merge_slices::<Add, S>(partial, which.len(), slices);
            self.finish(&mut results);
            let undone = |x: S| if rescaled == Rescaled::Variance { x.div(factor).div(factor) } else { x.div(factor) };
            made.extend(which.into_iter().zip(results.into_iter().map(undone)));
        }
        made
    }
}

/// Evaluates a program of one input over a tile.
fn eval_program<C: Number>(program: &Program, values: &[C], scalars: &[Scalar], out: &mut [C]) {
    let inputs = [TileIn::Slice(values)];
    let tile = Tile { inputs: &inputs, scalars, seeds: &[], first: 0, len: values.len() };
    program.eval_tile(&tile, &mut Scratch::new(), &mut [out]);
}

/// The input of a reduction, and how to load its elements.
struct ReductionInput<'a, S> {
    plan: &'a ReductionPlan,
    load: LoadElements<'a, S>,
    /// The storage's elements, if the elements or their squares can be accumulated without a copy; otherwise empty.
    elements: &'a [S],
    /// Whether to accumulate the squares of `elements`.
    squares: bool,
}

impl<S: Number> ReductionInput<'_, S> {
    /// Computes every result in order and applies `finish`. A result that is split into several slices is combined from their partial
    /// results at the end; any other result is stored at once.
    fn reduce<K: CombineOp>(&self, dtype: DType, out: &mut [u8], finish: impl Fn(usize, &mut [S]) + Sync) {
        let plan = self.plan;
        let by_column = plan.by_column() && plan.kept.inner().0 >= MIN_VECTOR_WIDTH;
        let slices = plan.n.div_ceil(if by_column { SLICE_ROWS } else { SLICE_LEN });
        if slices > 1 {
            let slice = |item: usize| self.reduce_line::<K>(item / slices, self.slice(item % slices));
            let all = match by_column {
                true => self.reduce_columns::<K>(),
                false => {
                    merge_slices::<K, S>(self.parallel_items(plan.outs * slices, SLICE_LEN, slice), plan.outs, slices)
                }
            };
            return self.store_results(dtype, out, false, |o, results| {
                results.copy_from_slice(&all[o..][..results.len()]);
                finish(o, results);
            });
        }
        let strided = by_column || (self.is_short() && !self.has_rows());
        let rows = self.has_rows() && (!self.elements.is_empty() || plan.n <= TILE / 2);
        self.store_results(dtype, out, strided, |o, results| {
            if strided {
                self.for_neighbours(o, results, |start, stride, sums| {
                    self.reduce_across::<K>(start, stride, 0..plan.n, sums)
                });
            } else if rows {
                self.map_rows(o, results, |rows, squares, results| fold_rows::<K, S>(rows, plan.n, squares, results));
            } else {
                results.iter_mut().enumerate().for_each(|(i, to)| *to = self.reduce_line::<K>(o + i, 0..plan.n));
            }
            finish(o, results);
        });
    }

    /// True if each result reduces so few elements that many results are computed together.
    fn is_short(&self) -> bool {
        self.plan.n <= SHORT_ROW_LEN && self.plan.outs >= MIN_VECTOR_WIDTH
    }

    /// True if each result reduces a contiguous row, and the rows are adjacent.
    fn has_rows(&self) -> bool {
        self.plan.kept.is_single(self.plan.outs, self.plan.n as isize) && self.plan.reduced.is_single(self.plan.n, 1)
    }

    /// The number of results whose multiples [`for_neighbours`](Self::for_neighbours) accepts.
    fn group_len(&self) -> usize {
        let (inner, _) = self.plan.kept.inner();
        if inner < MIN_VECTOR_WIDTH && self.plan.kept.rank() > 1 { inner } else { 1 }
    }

    /// Stores the results that `fill(first, results)` computes, a tile at a time, on all threads. With `strided`, the number of results in a tile is
    /// a multiple of [`group_len`](Self::group_len), as [`for_neighbours`](Self::for_neighbours) needs.
    fn store_results<R: Number>(
        &self,
        dtype: DType,
        out: &mut [u8],
        strided: bool,
        fill: impl Fn(usize, &mut [R]) + Sync,
    ) {
        let (size, plan) = (dtype.size(), self.plan);
        let unit = if strided { self.group_len() } else { 1 };
        let least = if strided { plan.kept.inner().0.min((plan.outs / threads()).clamp(64, TILE)) } else { 1 };
        let (job, tile) = ((JOB_ELEMENTS / plan.n).max(least).next_multiple_of(unit), TILE / unit * unit);
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

    /// Computes `results`, the first of which has index `o`, from contiguous rows. Calls `fold(rows, whether to square, results)`.
    fn map_rows<R>(&self, o: usize, results: &mut [R], fold: impl Fn(&[S], bool, &mut [R])) {
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

    /// Computes `results`, the first of which has index `o`; their number is a multiple of [`group_len`](Self::group_len). Calls
    /// `fold(start, stride, results)` for groups of results whose first input elements are at `start`, `start + stride`, .... If the
    /// innermost kept dim is short, a group runs along the dim before it.
    fn for_neighbours<R: Copy>(&self, o: usize, results: &mut [R], fold: impl Fn(isize, isize, &mut [R])) {
        let (kept, unit) = (&self.plan.kept, self.group_len());
        let ((_, across), mut done) = (kept.inner(), 0);
        let start = |o: usize| self.plan.start as isize + kept.locate(o, 1).0;
        if unit == 1 {
            while done < results.len() {
                let (at, n) = kept.locate(o + done, results.len() - done);
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

    /// Combines the input elements of `rows` into `total`, one result per element. In each row, the results' elements are `stride` apart,
    /// beginning at `start`.
    fn reduce_across<K: CombineOp>(&self, start: isize, stride: isize, rows: Range<usize>, total: &mut [S]) {
        total.fill(K::identity());
        let (width, single_group) = (total.len(), rows.len() <= GROUP_LEN);
        let mut kept: SmallVec<[S; 64]> = SmallVec::from_elem(K::identity(), if single_group { 0 } else { width });
        for top in rows.clone().step_by(GROUP_LEN) {
            let starts = (top..rows.end.min(top + GROUP_LEN)).map(|r| start + self.plan.reduced.locate(r, 1).0);
            let sums = if single_group { &mut *total } else { &mut kept[..] };
            sums.fill(K::identity());
            if stride == 1 && !self.elements.is_empty() {
                combine_rows::<K, S>(
                    sums,
                    self.elements,
                    &starts.collect::<SmallVec<[isize; GROUP_LEN]>>(),
                    self.squares,
                );
            } else {
                let mut tile: SmallVec<[S; 64]> = SmallVec::from_elem(K::identity(), width);
                for start in starts {
                    (self.load)(start, stride, &mut tile);
                    combine_all::<K, S>(sums, &tile);
                }
            }
            if !single_group {
                combine_all::<K, S>(total, &kept);
            }
        }
    }

    /// Calls `f(item)` for every item, on all threads if there is enough work.
    fn parallel_items<R: Send>(&self, count: usize, cost: usize, f: impl Fn(usize) -> R + Send + Sync) -> Vec<R> {
        parallel::map(count, (JOB_ELEMENTS / cost.max(1)).max(1), f)
    }

    /// Returns the elements of a result in a slice.
    fn slice(&self, slice: usize) -> Range<usize> {
        slice * SLICE_LEN..self.plan.n.min((slice + 1) * SLICE_LEN)
    }

    /// Reduces the given elements of result `o`.
    fn reduce_line<K: CombineOp>(&self, o: usize, Range { start: mut r, end }: Range<usize>) -> S {
        let base = self.plan.start as isize + self.plan.kept.locate(o, 1).0;
        let mut total = K::identity();
        let stride = self.plan.reduced.inner().1;
        while r < end && stride == 1 && !self.elements.is_empty() {
            let (at, n) = self.plan.reduced.locate(r, end - r);
            for stretch in self.elements[(base + at) as usize..][..n].chunks(FOLD_LEN) {
                let mut part = [K::identity()];
                fold_rows::<K, S>(stretch, stretch.len(), self.squares, &mut part);
                total = K::combine(total, part[0]);
            }
            r += n;
        }
        if r == end {
            return total;
        }
        let mut tile = [K::identity(); TILE];
        while r < end {
            let mut filled = 0;
            while filled < TILE && r < end {
                let (at, n) = self.plan.reduced.locate(r, (end - r).min(TILE - filled));
                (self.load)(base + at, stride, &mut tile[filled..filled + n]);
                filled += n;
                r += n;
            }
            total = K::combine(total, fold::<K, S>(&tile[..filled]));
        }
        total
    }

    /// Reduces results whose input elements are adjacent in memory, a tile of results at a time.
    fn reduce_columns<K: CombineOp>(&self) -> Vec<S> {
        let plan = self.plan;
        let (columns, across) = plan.kept.inner();
        let (blocks, slices) = (columns.div_ceil(TILE), plan.n.div_ceil(SLICE_ROWS));
        let outer = plan.outs / columns;
        let cost = columns.min(TILE) * SLICE_ROWS.min(plan.n);
        let parts: Vec<Vec<S>> = self.parallel_items(outer * blocks * slices, cost, |item| {
            let (block, slice) = (item / slices, item % slices);
            let (first, o) = (block % blocks * TILE, block / blocks * columns);
            let width = TILE.min(columns - first);
            let base = plan.start as isize + plan.kept.locate(o + first, 1).0;
            let mut total = vec![K::identity(); width];
            self.reduce_across::<K>(base, across, slice * SLICE_ROWS..plan.n.min((slice + 1) * SLICE_ROWS), &mut total);
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

    /// Computes, for each result, the index of the first NaN or, if there is none, of the first greatest (or least) element.
    fn arg_reduce<K: CombineOp>(&self, dtype: DType, out: &mut [u8]) {
        let plan = self.plan;
        let slices = plan.n.div_ceil(SLICE_LEN);
        if slices > 1 {
            let slice = |item: usize| self.arg_line::<K>(item / slices, self.slice(item % slices));
            let partial = self.parallel_items(plan.outs * slices, SLICE_LEN, slice);
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
            _ => results.iter_mut().enumerate().for_each(|(i, to)| *to = self.arg_line::<K>(o + i, 0..plan.n).1 as i64),
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

    /// Finds the first best of the given elements of result `o`, and returns its value and its index.
    fn arg_line<K: CombineOp>(&self, o: usize, Range { start: mut r, end }: Range<usize>) -> (S, usize) {
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

vectorised! {
    /// Combines rows of elements, or of their squares, into `sums`. Each row begins at one of `starts` and is as long as `sums`.
    fn combine_rows<'a, K: CombineOp, C: Number>(
        _simd: S, sums: &'a mut [C], elements: &'a [C], starts: &'a [isize], squares: bool
    ) {
        match squares {
            true => combine_rows_of::<K, C>(sums, elements, starts, |x| x.mul(x)),
            false => combine_rows_of::<K, C>(sums, elements, starts, |x| x),
        }
    }
}

#[inline(always)]
fn combine_rows_of<K: CombineOp, C: Number>(sums: &mut [C], elements: &[C], starts: &[isize], of: impl Fn(C) -> C) {
    let (blocks, rest) = sums.as_chunks_mut::<REGISTER_COLUMNS>();
    let done = blocks.len() * REGISTER_COLUMNS;
    for (b, sums) in blocks.iter_mut().enumerate() {
        let mut kept = *sums;
        for &start in starts {
            let row = &elements[start as usize + b * REGISTER_COLUMNS..][..REGISTER_COLUMNS];
            kept.iter_mut().zip(row).for_each(|(a, &x)| *a = K::combine(*a, of(x)));
        }
        *sums = kept;
    }
    for &start in starts {
        let row = &elements[start as usize + done..][..rest.len()];
        rest.iter_mut().zip(row).for_each(|(a, &x)| *a = K::combine(*a, of(x)));
    }
}

/// Combines the partial results of each result's slices pairwise.
fn merge_slices<K: CombineOp, S: Number>(mut partial: Vec<S>, outs: usize, slices: usize) -> Vec<S> {
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
