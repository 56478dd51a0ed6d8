//! Normalisation on the CPU. If the result's rows are contiguous, each row is computed completely while it is in the cache. Otherwise
//! (for example, channels of a batch), the statistics of all rows are computed first, then all elements in a second pass. The second
//! pass over contiguous batches is in memory order.

use smallvec::SmallVec;

use crate::backend::cpu::accumulate::{Add, fold_map, fold_simd, sum_deviations};
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::dispatch::{for_float, vectorised};
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::map;
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::map::{Formulas, Params};
use crate::backend::problem::norm::{Channels, Normalisation, RowGrouping, broadcast_view, unbind};
use crate::backend::problem::reduction::SafeRange;
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{Streaming, should_stream};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::with_host;
use crate::{Result, Scalar, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 14;
/// The minimum number of contiguous elements of a channel for this method.
const MIN_RUN_LEN: usize = 16;

pub(crate) fn normalise(rows: &Normalisation) -> Result<()> {
    for_float!(rows.x.dtype.compute(), C => match rows.y.is_contiguous() {
        true => normalise_contiguous::<C>(rows),
        false => normalise_strided::<C>(rows),
    })
}

/// The weight or the bias that applies to one row.
#[derive(Clone, Copy)]
enum RowFactor<'a, C> {
    Absent,
    /// One number for each of several runs of equal length, which together make up the row. A single number applies to the whole row.
    Runs(&'a [C]),
    /// One number for each element.
    Each(&'a [C]),
}

/// A four-dim view; its last two dims form the rows.
struct RowOperand<'a, C> {
    t: &'a Tensor,
    bytes: &'a [u8],
    /// A buffer for rows that cannot be read in place.
    buffer: Vec<C>,
}

impl<'a, C: Number> RowOperand<'a, C> {
    fn new(t: &'a Tensor, bytes: &'a [u8]) -> RowOperand<'a, C> {
        RowOperand { t, bytes, buffer: Vec::new() }
    }

    /// Returns the offset of row `r` in elements.
    fn start(&self, r: usize) -> isize {
        let (dims, s) = (self.t.shape().dims(), self.t.strides());
        self.t.layout.offset as isize + (r / dims[1]) as isize * s[0] + (r % dims[1]) as isize * s[1]
    }

    /// Returns row `r`, in the compute type.
    fn row(&mut self, r: usize) -> &[C] {
        let (dims, s, start) = (self.t.shape().dims(), self.t.strides(), self.start(r));
        let n = dims[2] * dims[3];
        let dense = (dims[3] == 1 || s[3] == 1) && (dims[2] == 1 || s[2] == dims[3] as isize);
        if dense && self.t.dtype == C::COMPUTE.dtype() {
            return &bytemuck::cast_slice(self.bytes)[start as usize..][..n];
        }
        let same = s[..2] == [0, 0] && self.buffer.len() == n; // all rows are the same row, which is already in the buffer
        if !same {
            self.buffer.resize(n, C::from_i32(0));
            for (outer, run) in self.buffer.chunks_mut(dims[3]).enumerate() {
                let from = (start + outer as isize * s[2]) as usize;
                match s[3] {
                    0 => {
                        load_tile(self.t.dtype, self.bytes, from, 1, &mut run[..1]);
                        run.fill(run[0]);
                    }
                    step => load_tile(self.t.dtype, self.bytes, from, step, run),
                }
            }
        }
        &self.buffer
    }

    /// Returns the operand's values for row `r` as a weight or bias.
    fn factor(&mut self, r: usize) -> RowFactor<'_, C> {
        let (dims, s, start) = (self.t.shape().dims(), self.t.strides(), self.start(r));
        if dims[3] > 1 && s[3] != 0 || dims[3] == 1 && dims[2] > 1 && s[2] != 0 {
            return RowFactor::Each(self.row(r));
        }
        let runs = if s[2] == 0 { 1 } else { dims[2] };
        self.buffer.resize(runs, C::from_i32(0));
        load_tile(self.t.dtype, self.bytes, start as _, s[2], &mut self.buffer);
        RowFactor::Runs(&self.buffer)
    }
}

fn factor<'b, C: Number>(operand: &'b mut Option<RowOperand<'_, C>>, r: usize) -> RowFactor<'b, C> {
    operand.as_mut().map_or(RowFactor::Absent, |operand| operand.factor(r))
}

/// The statistics of one row; see [`Normalisation::statistics`].
type Statistics<C> = [C; 3];

vectorised! {
    /// Normalises one row. Returns its statistics, and as the last number 1 or, if the plain moments overflowed or underflowed `C`, the
    /// factor by which the row has to be scaled.
    fn normalise_row_unscaled<'a, C: Number>(
        simd: S, x: &'a [C], y: &'a mut [C], weight: RowFactor<'a, C>, bias: RowFactor<'a, C>, eps: C, rms: bool
    ) -> (Statistics<C>, f64) {
        use RowFactor::{Each, Runs};
        let (zero, n) = (C::from_i32(0), C::from_i64(x.len() as i64));
        let mean = if rms { zero } else { fold_simd::<Add, C, S>(simd, x).div(n) };
        // The mean is `mean + low`, where `low` corrects the rounding of the first sum.
        let [sum, square_sum] = sum_deviations::<C, S>(simd, x, mean);
        let low = if rms { zero } else { sum.div(n) };
        let square_sum = if rms { square_sum } else { square_sum.sub(sum.mul(low)) };
        let square_sum = if square_sum < zero { zero } else { square_sum };
        let range = SafeRange::for_accumulator(C::COMPUTE);
        // Squares that underflow to 0 do not matter if eps is larger.
        let factor = match range.factor(mean.to_f64(), false) {
            1.0 => range.factor(square_sum.to_f64(), eps.to_f64() < range.min_square_sum),
            factor => factor,
        };
        let var = square_sum.div(n);
        let scale = C::from_i32(1).div(var.add(eps).sqrt());
        match (weight, bias) {
            (Each(w), Each(b)) => {
                let xs = x.iter().zip(w).zip(b);
                y.iter_mut().zip(xs).for_each(|(y, ((x, w), b))| *y = x.sub(mean).sub(low).mul(scale).mul(*w).add(*b));
            }
            (Each(w), _) => {
                y.iter_mut().zip(x.iter().zip(w)).for_each(|(y, (x, w))| *y = x.sub(mean).sub(low).mul(scale).mul(*w));
            }
            (_, Each(b)) => {
                y.iter_mut().zip(x.iter().zip(b)).for_each(|(y, (x, b))| *y = x.sub(mean).sub(low).mul(scale).add(*b))
            }
            _ => {
                let runs = [weight, bias].map(|t| if let Runs(t) = t { t } else { &[] });
                let run = x.len() / runs[0].len().max(runs[1].len()).max(1);
                for (i, (x, y)) in x.chunks(run).zip(y.chunks_mut(run)).enumerate() {
                    let of = |runs: &[C]| runs.get(i % runs.len().max(1)).copied();
                    let scale = of(runs[0]).map_or(scale, |w| scale.mul(w));
                    shift_simd(x, y, [mean, low], scale, of(runs[1]));
                }
            }
        }
        ([mean.add(low), scale, var], factor)
    }
}

/// Normalises one row and returns its statistics. If the moments overflow or underflow, recomputes them from elements scaled by a power
/// of two.
fn normalise_row<C: Number>(x: &[C], y: &mut [C], factors: [RowFactor<C>; 2], eps: C, rms: bool) -> Statistics<C> {
    let [weight, bias] = factors;
    let (statistics, factor) = normalise_row_unscaled(x, &mut *y, weight, bias, eps, rms);
    if factor == 1.0 {
        return statistics;
    }
    let factor = C::from_f64(factor);
    let scaled: Vec<C> = x.iter().map(|x| x.mul(factor)).collect();
    let ([mean, scale, var], _) = normalise_row_unscaled(&scaled, y, weight, bias, eps.mul(factor).mul(factor), rms);
    [mean.div(factor), scale.mul(factor), var.div(factor).div(factor)]
}

/// Returns the number of rows of `n` elements in a backward job: at least 16 with column sums, because each job then also writes two rows
/// of sums.
fn rows_per_job(n: usize, columns: bool) -> usize {
    (JOB_ELEMENTS / n).max(if columns { 16 } else { 1 })
}

/// Allocates partial column sums over `count` rows of `n` elements, for each job: the sums of g, and the sums of g times the normalised
/// z.
pub(crate) fn alloc_column_sums(x: &Tensor, count: usize, n: usize) -> Result<Tensor> {
    let parts = count.div_ceil(rows_per_job(n, true));
    Tensor::empty_with_shape([parts, 2, n], x.dtype.compute().dtype(), x.device())
}

/// The operands and results of one row of the gradient.
struct BackwardRow<'a, C> {
    g: &'a [C],
    z: &'a [C],
    dz: &'a mut [C],
    /// Scratch memory for g times the weight, if the weight varies along the row.
    weighted: &'a mut Vec<C>,
    weight: RowFactor<'a, C>,
    /// The column sums to add to; empty if no column sums are needed.
    columns: &'a mut [C],
    mean: C,
    scale: C,
    rms: bool,
}

vectorised! {
    /// Computes one row of the gradient. Returns two sums over the row: of g times the weight, and of g times the weight times the normalised z.
    /// If the row has a single weight, the sums exclude the weight.
    fn backward_row<'a, C: Number>(simd: S, row: BackwardRow<'a, C>) -> [C; 2] {
        let BackwardRow { g, z, dz, weighted, weight, columns, mean, scale, rms } = row;
        let n = C::from_i64(g.len() as i64);
        let (sums, products) = columns.split_at_mut(columns.len() / 2);
        for ((sum, product), (g, z)) in sums.iter_mut().zip(products).zip(g.iter().zip(z)) {
            *sum = sum.add(*g);
            *product = product.add(z.sub(mean).mul(scale).mul(*g));
        }
        let g = match weight {
            RowFactor::Absent | RowFactor::Runs([_]) => g,
            RowFactor::Each(w) => {
                weighted.resize(g.len(), C::from_i32(0));
                weighted.iter_mut().zip(g.iter().zip(w)).for_each(|(to, (g, w))| *to = g.mul(*w));
                &weighted[..]
            }
            RowFactor::Runs(w) => {
                weighted.resize(g.len(), C::from_i32(0));
                let run = g.len() / w.len();
                for (w, (to, g)) in w.iter().zip(weighted.chunks_mut(run).zip(g.chunks(run))) {
                    to.iter_mut().zip(g).for_each(|(to, g)| *to = g.mul(*w));
                }
                &weighted[..]
            }
        };
        let sum = fold_simd::<Add, C, S>(simd, g);
        let product = fold_map::<Add, C, S>(simd, z, g, |z, g| z.sub(mean).mul(scale).mul(g));
        let less = if rms { C::from_i32(0) } else { sum.div(n) };
        let share = product.div(n);
        let scaled = if let RowFactor::Runs([w]) = weight { scale.mul(*w) } else { scale };
        dz.iter_mut().zip(g.iter().zip(z)).for_each(|(dz, (g, z))| {
            *dz = g.sub(less).sub(z.sub(mean).mul(scale).mul(share)).mul(scaled);
        });
        [sum, product]
    }
}

/// The results of a job: rows, beginning with row `first`, and two or three numbers for each row.
struct NormPart<'a, C> {
    first: usize,
    y: &'a mut [u8],
    numbers: SmallVec<[&'a mut [C]; 3]>,
}

impl<C: Number> NormPart<'_, C> {
    /// Computes each row of `n` elements by `f(row index, elements)`, and stores the numbers that `f` returns for the row.
    fn each<const N: usize>(mut self, y: &Tensor, n: usize, mut f: impl FnMut(usize, &mut [C]) -> [C; N]) {
        let mut buffer = Vec::new();
        for k in 0..self.numbers[0].len() {
            let plain = y.dtype == C::COMPUTE.dtype();
            let made = if plain {
                let out: &mut [C] = bytemuck::cast_slice_mut(self.y);
                f(self.first + k, &mut out[k * n..][..n])
            } else {
                buffer.resize(n, C::from_i32(0));
                f(self.first + k, &mut buffer)
            };
            self.numbers.iter_mut().zip(made).for_each(|(numbers, number)| numbers[k] = number);
            if !plain {
                store_tile(y.dtype, &buffer, self.y, (k * n) as _, 1);
            }
        }
    }
}

/// Returns the tensor for the numbers of each row: the statistics in the forward pass, two sums in the backward pass. Allocates a
/// temporary tensor if the caller does not need the numbers.
fn row_numbers<C: Number>(rows: &Normalisation) -> Result<Tensor> {
    match (rows.z, rows.sums) {
        (None, _) => Ok(rows.statistics.detach()),
        (Some(_), Some(sums)) => Ok(sums.detach()),
        (Some(_), None) => {
            let dims = rows.x.shape().dims();
            Tensor::empty_with_shape([2, dims[0], dims[1], 1, 1], C::COMPUTE.dtype(), rows.x.device())
        }
    }
}

/// Computes a normalisation whose result has contiguous rows in order.
fn normalise_contiguous<C: Number>(rows: &Normalisation) -> Result<()> {
    let (count, n, y) = (rows.count(), rows.len(), rows.y);
    let eps = C::from_f64(rows.eps);
    let numbers = row_numbers::<C>(rows)?;
    let others = [rows.z, rows.weight, rows.bias].map(|t| t.unwrap_or(rows.x));
    let reads = [rows.x, others[0], others[1], others[2], rows.statistics].map(|t| &t.storage);
    let read = if rows.z.is_some() { &reads[..] } else { &reads[..4] };
    let mut writes = vec![&y.storage, &numbers.storage];
    writes.extend(rows.columns.map(|t| &t.storage));
    with_host(read, &writes, |reads, writes| {
        let (size, each) = (y.dtype.size(), size_of::<C>());
        let (out, others) = writes.split_first_mut().expect("the result");
        let (numbers, columns) = others.split_first_mut().expect("the numbers");
        let out = &mut out[y.layout.offset * size..][..count * n * size];
        let rows_per_job = rows_per_job(n, rows.columns.is_some());
        let mut parts: SmallVec<[&mut [u8]; 4]> = SmallVec::from_iter([out]);
        parts.extend(numbers.chunks_mut(count * each));
        let of_numbers = parts.len() - 1;
        parts.extend(columns.iter_mut().map(|columns| &mut **columns));
        let mut sizes: SmallVec<[usize; 4]> = SmallVec::from_elem(rows_per_job * each, parts.len());
        sizes[0] = rows_per_job * n * size;
        sizes.iter_mut().skip(1 + of_numbers).for_each(|size| *size = 2 * n * each);
        parallel::for_each_chunks(&mut parts, &sizes, |i, parts| {
            let (y_part, parts) = parts.split_first_mut().expect("the result");
            let (numbers, columns) = parts.split_at_mut(of_numbers);
            let columns: &mut [C] = columns.first_mut().map_or(&mut [], |bytes| bytemuck::cast_slice_mut(bytes));
            columns.fill(C::from_i32(0));
            let numbers = numbers.iter_mut().map(|numbers| bytemuck::cast_slice_mut(numbers)).collect();
            let part = NormPart { first: i * rows_per_job, y: y_part, numbers };
            let mut x = RowOperand::<C>::new(rows.x, reads[0]);
            let mut weight = rows.weight.map(|t| RowOperand::<C>::new(t, reads[2]));
            let Some(z) = rows.z else {
                let mut bias = rows.bias.map(|t| RowOperand::<C>::new(t, reads[3]));
                return part.each(y, n, |r, y| {
                    let factors = [factor(&mut weight, r), factor(&mut bias, r)];
                    normalise_row(x.row(r), y, factors, eps, rows.rms)
                });
            };
            let mut z = RowOperand::<C>::new(z, reads[1]);
            let (means, scales) = bytemuck::cast_slice::<u8, C>(reads[4]).split_at(count);
            let mut weighted = Vec::new();
            part.each(y, n, |r, dz| {
                let (weight, mean, scale) = (factor(&mut weight, r), means[r], scales[r]);
                let (g, z, weighted, columns) = (x.row(r), z.row(r), &mut weighted, &mut *columns);
                backward_row(BackwardRow { g, z, dz, weighted, weight, columns, mean, scale, rms: rows.rms })
            });
        });
    })
}

/// Computes `N` numbers for each row of `n` elements. `to` receives the first number of every row, then the second number of every row,
/// and so on.
fn compute_row_numbers<const N: usize, C: Number>(to: &mut [u8], n: usize, f: impl Fn(usize) -> [C; N] + Send + Sync) {
    let to: &mut [C] = bytemuck::cast_slice_mut(to);
    let count = to.len() / N;
    let made = parallel::map(count, (JOB_ELEMENTS / n).max(1), f);
    to.iter_mut().enumerate().for_each(|(i, to)| *to = made[i % count][i / count]);
}

/// Computes a normalisation whose result has rows that are not contiguous.
fn normalise_strided<C: Number>(rows: &Normalisation) -> Result<()> {
    let numbers = row_numbers::<C>(rows)?;
    let (eps, rms) = (C::from_f64(rows.eps), rows.rms);
    let reads = [rows.x, rows.z.unwrap_or(rows.x), rows.statistics];
    let read = if rows.z.is_some() { 3 } else { 2 };
    with_host(&reads.map(|t| &t.storage)[..read], &[&numbers.storage], |reads, writes| {
        let Some(z) = rows.z else {
            return compute_row_numbers(&mut *writes[0], rows.len(), |r| {
                let mut x = RowOperand::<C>::new(rows.x, reads[0]);
                normalise_row(x.row(r), &mut [], [RowFactor::Absent; 2], eps, rms)
            });
        };
        let (means, scales) = bytemuck::cast_slice::<u8, C>(reads[2]).split_at(rows.count());
        compute_row_numbers(&mut *writes[0], rows.len(), |r| {
            let (mut x, mut z) = (RowOperand::new(rows.x, reads[0]), RowOperand::new(z, reads[1]));
            let (weight, weighted, columns, dz) = (RowFactor::Absent, &mut Vec::new(), &mut [][..], &mut [][..]);
            let (mean, scale) = (means[r], scales[r]);
            backward_row(BackwardRow { g: x.row(r), z: z.row(r), dz, weighted, weight, columns, mean, scale, rms })
        });
    })?;
    let [mean, scale] = &unbind("norm", rows.statistics)?;
    let of_channels = [Some(mean), Some(scale), rows.weight, rows.bias];
    if rows.z.is_none() && normalise_into(rows.x, rows.y, of_channels, rows.eps, true)? {
        return Ok(());
    }
    let scalars = [Scalar::Float(1.0 / rows.len() as f64)];
    let (params, x) = (Params::from_scalars(&scalars), Expr::input);
    let Some(z) = rows.z else {
        let mut inputs = vec![rows.x, mean, scale];
        let mut result = (x(0) - x(1)) * x(2);
        if let Some(weight) = rows.weight {
            result = result * x(inputs.len());
            inputs.push(weight);
        }
        if let Some(bias) = rows.bias {
            result = result + x(inputs.len());
            inputs.push(bias);
        }
        let exprs = [result];
        let (inputs, program, outputs) = (&inputs, &Program::shared(&exprs), &[rows.y]);
        return map::run_formulas(&Formulas { op: "norm", inputs, params, program, outputs });
    };
    let [sum, product] = &unbind("norm", &numbers)?;
    let mut inputs = vec![rows.x, z, mean, scale, sum, product];
    // The sums exclude the weight, which is one number for the whole row here.
    let (mut grad, mut share) = (x(0), Expr::scalar(0));
    if let Some(weight) = rows.weight {
        (grad, share) = (grad * x(6), share * x(6));
        inputs.push(weight);
    }
    let normal = (x(1) - x(2)) * x(3);
    let less = if rows.rms { grad } else { grad - x(4) * &share };
    let exprs = [(less - normal * x(5) * share) * x(3)];
    let program = &Program::shared(&exprs);
    map::run_formulas(&Formulas { op: "norm", inputs: &inputs, params, program, outputs: &[rows.y] })
}

/// Computes `y = (x - mean) * scale + shift`. The mean is given as the sum of two numbers, for more digits.
#[inline(always)]
fn shift_simd<C: Number>(x: &[C], y: &mut [C], [mean, low]: [C; 2], scale: C, shift: Option<C>) {
    match shift {
        Some(shift) => y.iter_mut().zip(x).for_each(|(y, x)| *y = x.sub(mean).sub(low).mul(scale).add(shift)),
        None => y.iter_mut().zip(x).for_each(|(y, x)| *y = x.sub(mean).sub(low).mul(scale)),
    }
}

vectorised! {
    /// Computes [`shift_simd`] with the processor's vectors.
    fn shift<'a, C: Number>(_simd: S, x: &'a [C], y: &'a mut [C], mean: C, scale: C, shift: Option<C>) {
        shift_simd(x, y, [mean, C::from_i32(0)], scale, shift);
    }
}

/// Computes the batch norm of `[N, C, ..]` from the channels' statistics. Returns `None` if [`normalise_into`] does not support the
/// layout.
pub(crate) fn normalise_batch(x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> {
    if !x.is_contiguous() || x.numel() == 0 {
        return Ok(None);
    }
    let view = RowGrouping::Batch;
    let from = view.as_rows(&x.detach())?;
    let own = |t: Option<&Tensor>| t.map(|t| broadcast_view(&t.detach(), from.shape(), view.weight_dims())).transpose();
    let [mean, var, weight, bias] = numbers;
    let own = [own(mean)?, own(var)?, own(weight)?, own(bias)?];
    let out = Tensor::empty_with_shape(x.shape(), x.dtype, x.device())?;
    let done = normalise_into(&from, &view.as_rows(&out)?, own.each_ref().map(Option::as_ref), eps, false)?;
    Ok(done.then_some(out))
}

/// Normalises x, a four-dim view, by mean, variance (with `rstd`, the inverse standard deviation instead of the variance), weight and
/// bias. Returns false, without any effect, unless x and y are contiguous batches of the compute type.
fn normalise_into(x: &Tensor, y: &Tensor, numbers: Channels, eps: f64, rstd: bool) -> Result<bool> {
    for_float!(x.dtype.compute(), C => normalise_into_as::<C>(x, y, numbers, eps, rstd))
}

fn normalise_into_as<C: Number>(x: &Tensor, y: &Tensor, numbers: Channels, eps: f64, rstd: bool) -> Result<bool> {
    let [_, channels, batch, n] = *x.shape().dims() else { unreachable!("views of four dims") };
    let has_batch_layout = |t: &Tensor| {
        let (s, same) = (t.strides(), |count: usize, s: isize, step: usize| count == 1 || s == step as isize);
        t.dtype == C::COMPUTE.dtype() && same(channels, s[1], n) && same(batch, s[2], channels * n) && same(n, s[3], 1)
    };
    if n < MIN_RUN_LEN || !has_batch_layout(x) || !has_batch_layout(y) {
        return Ok(false);
    }
    let mut read: SmallVec<[_; 5]> = SmallVec::from_slice(&[&x.storage]);
    read.extend(numbers.iter().map(|t| &t.unwrap_or(x).storage));
    let (count, bytes) = (x.numel(), x.numel() * x.dtype.size());
    let streamed = should_stream(bytes, 2 * bytes);
    with_host(&read, &[&y.storage], |reads, writes| {
        // Reads operand `k`, which has one number for each channel.
        let each = |k: usize| {
            numbers[k].map(|t| {
                let mut all = vec![C::from_i32(0); channels];
                load_tile(t.dtype, reads[1 + k], t.layout.offset, t.strides()[1], &mut all);
                all
            })
        };
        let (mean, mut scale, shifts) = (each(0).expect("there is one"), each(1).expect("there is one"), each(3));
        let eps = C::from_f64(eps);
        if !rstd {
            scale.iter_mut().for_each(|s| *s = C::from_i32(1).div(s.add(eps).sqrt()));
        }
        each(2).iter().for_each(|weight| scale.iter_mut().zip(weight).for_each(|(s, w)| *s = s.mul(*w)));
        let from = &bytemuck::cast_slice::<u8, C>(reads[0])[x.layout.offset..][..count];
        let to = &mut bytemuck::cast_slice_mut::<u8, C>(&mut *writes[0])[y.layout.offset..][..count];
        parallel::for_each_chunk(to, JOB_ELEMENTS, |i, part| {
            let streaming = streamed.then(Streaming::new);
            let mut tile = [C::from_i32(0); TILE];
            let (mut at, mut rest) = (i * JOB_ELEMENTS, part);
            while !rest.is_empty() {
                let most = if streamed { TILE } else { n };
                let (run, more) = rest.split_at_mut(most.min(n - at % n).min(rest.len()));
                let (c, x) = (at / n % channels, &from[at..][..run.len()]);
                let shift_to = |y: &mut [C]| shift(x, y, mean[c], scale[c], shifts.as_ref().map(|s| s[c]));
                match &streaming {
                    Some(streaming) => {
                        let tile = &mut tile[..run.len()];
                        shift_to(&mut *tile);
                        streaming.copy(run, tile);
                    }
                    None => shift_to(run),
                }
                at += x.len();
                rest = more;
            }
        });
    })?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BatchNormOptions;
    use crate::Device;

    /// Batch norm equals its definition for channels of every length, for whole and partial jobs, and for results written with
    /// non-temporal stores.
    #[test]
    fn batch_norm_equals_its_definition() -> Result<()> {
        let shapes =
            [[2, 3, 15], [2, 3, 16], [1, 1, 17], [5, 1, 40], [1, 4, 33], [3, 2, JOB_ELEMENTS + 7], [40, 5, 300]];
        for [batch, channels, n] in shapes.into_iter().chain([[2, 3, 1_100_003]]) {
            let of = |count: usize, f: &dyn Fn(usize) -> f64| (0..count).map(f).collect::<Vec<f64>>();
            let x = of(batch * channels * n, &|i| (i * 7919 % 1009) as f64 / 100.0 - 5.0);
            let [mean, var, weight, bias] = [0.3, 0.5, -0.7, 1.1].map(|by| of(channels, &|c| by + c as f64));
            for (dtype, within) in [(crate::DType::F32, 1e-6), (crate::DType::F64, 1e-14)] {
                let vector = |t: &[f64]| Tensor::from_slice(t, channels, Device::Cpu)?.to_dtype(dtype);
                let given = Tensor::from_slice(&x, [batch, channels, n], Device::Cpu)?.to_dtype(dtype)?;
                let [m, v, w, b] = [vector(&mean)?, vector(&var)?, vector(&weight)?, vector(&bias)?];
                for (weighted, shifted) in [(true, true), (true, false), (false, true), (false, false)] {
                    let (weight_of, bias_of) = (weighted.then_some(&w), shifted.then_some(&b));
                    let options = BatchNormOptions {
                        running_mean: Some(&m),
                        running_var: Some(&v),
                        weight: weight_of,
                        bias: bias_of,
                        ..BatchNormOptions::default()
                    };
                    let numbers = [Some(&m), Some(&v), weight_of, bias_of];
                    assert_eq!(normalise_batch(&given, numbers, options.eps)?.is_some(), n >= MIN_RUN_LEN);
                    let got = given.batch_norm(options)?.to_dtype(crate::DType::F64)?.to_vec::<f64>()?;
                    for (i, (got, x)) in got.iter().zip(&x).enumerate() {
                        let c = i / n % channels;
                        let w = if weighted { weight[c] } else { 1.0 };
                        let b = if shifted { bias[c] } else { 0.0 };
                        let right = (x - mean[c]) / (var[c] + options.eps).sqrt() * w + b;
                        let size = 6.0 * (x.abs() + mean[c].abs()) * w.abs() + b.abs();
                        assert!((got - right).abs() <= within * size, "{dtype} {i} of {batch} x {channels} x {n}");
                    }
                }
            }
        }
        Ok(())
    }
}
