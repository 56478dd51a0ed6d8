//! Row operations on the CPU: a row at a time in the compute type, rows shared out among the pool's threads.

use pulp::{Arch, Simd, WithSimd};

use super::{CrossEntropy, LossReduction, RowOp, Rows};
use crate::device::{count_launch, cpu::parallel};
use crate::ops::convert::{load_tile, store_tile};
use crate::ops::lane::Lane;
use crate::storage::with_host;
use crate::{Compute, Error, Result, Tensor};

/// Elements a job of the pool has: enough to hide what handing it over costs.
const JOB: usize = 1 << 13;
/// Sums that are kept side by side, so that one addition need not wait for the one before.
const CHAINS: usize = 32;
/// Rows whose losses are added up before they meet the others': fixed, so that the sum is the same on any machine.
const BLOCK: usize = 64;

pub(super) fn run(kind: RowOp, x: &Tensor, z: &Tensor, out: &Tensor, d: usize, rows: &Rows) -> Result<()> {
    count_launch();
    with_host(&[&x.storage, &z.storage], &[&out.storage], |reads, writes| {
        let job = Job {
            kind,
            x,
            z,
            bytes: [reads[0], reads[1]],
            out,
            rows,
            inner: out.shape().dims()[d + 1..].iter().product(),
        };
        let start = out.layout.offset * out.dtype.size();
        let to = &mut writes[0][start..][..out.numel() * out.dtype.size()];
        match x.dtype.compute() {
            Compute::F64 => job.run::<f64>(to),
            _ => job.run::<f32>(to),
        }
    })
}

struct Job<'a> {
    kind: RowOp,
    x: &'a Tensor,
    z: &'a Tensor,
    bytes: [&'a [u8]; 2],
    out: &'a Tensor,
    rows: &'a Rows,
    /// Elements after the row's dim: rows that share a stretch of the output.
    inner: usize,
}

impl Job<'_> {
    /// Stretches of the output that hold whole rows are dealt out.
    fn run<C: Lane>(&self, out: &mut [u8]) {
        let length = if self.kind == RowOp::LogSumExp { 1 } else { self.rows.n };
        let stretch = (self.inner * length).max(1);
        let least = JOB.div_ceil(self.inner * self.rows.n).max(1);
        let size = self.out.dtype.size();
        parallel::for_each_chunk(out, stretch * least * size, |i, part| self.part::<C>(i * least * self.inner, part));
    }

    /// Rows from `first` on, into `out`, which starts where the first of them does.
    fn part<C: Lane>(&self, first: usize, out: &mut [u8]) {
        let (n, inner, rows) = (self.rows.n, self.inner, self.rows);
        let length = if self.kind == RowOp::LogSumExp { 1 } else { n };
        let zero = C::from_i32(0);
        let two = matches!(self.kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad);
        let mut other = vec![zero; if two { n } else { 0 }];
        let mut load = |i: usize, row: &mut [C]| {
            let at = rows.walk.offsets(first + i);
            let x = self.x.layout.offset as isize + at[0];
            load_tile(self.x.dtype, self.bytes[0], x as _, rows.steps[0], row);
            if two {
                let z = self.z.layout.offset as isize + at[2];
                load_tile(self.z.dtype, self.bytes[1], z as _, rows.steps[2], &mut other);
            }
            compute(self.kind, row, &other)
        };
        if inner == 1 && length == n && self.out.dtype == C::COMPUTE.dtype() {
            let out: &mut [C] = bytemuck::cast_slice_mut(out);
            out.chunks_mut(n).enumerate().for_each(|(i, row)| _ = load(i, row));
            return;
        }
        let mut row = vec![zero; n];
        let count = out.len() / self.out.dtype.size() / length;
        for i in 0..count {
            let len = load(i, &mut row);
            let to = i / inner * inner * length + i % inner;
            store_tile(self.out.dtype, &row[..len], out, to as _, inner as isize);
        }
    }
}

/// The operation on a row, in place; how long the result is.
fn compute<C: Lane>(kind: RowOp, row: &mut [C], other: &[C]) -> usize {
    Arch::new().dispatch(OnRow { kind, row, other })
}

/// A type, not a closure: a closure that is not inlined is compiled without the vector units.
struct OnRow<'a, C> {
    kind: RowOp,
    row: &'a mut [C],
    other: &'a [C],
}

impl<C: Lane> WithSimd for OnRow<'_, C> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> usize {
        let OnRow { kind, row, other } = self;
        match kind {
            RowOp::Softmax => {
                let m = greatest(row);
                row.iter_mut().for_each(|x| *x = x.sub(m).exp());
                let s = C::from_i32(1).div(sum(row));
                row.iter_mut().for_each(|x| *x = x.mul(s));
                row.len()
            }
            RowOp::LogSoftmax => {
                let (m, s) = exp_sum(row, false);
                let log_s = s.log();
                row.iter_mut().for_each(|x| *x = x.sub(m).sub(log_s));
                row.len()
            }
            RowOp::LogSumExp => {
                let (m, s) = exp_sum(row, true);
                row[0] = m.add(s.log());
                1
            }
            RowOp::SoftmaxGrad => {
                let s = lanes(row, other, C::from_i32(0), |y, g| y.mul(g), |a, b| a.add(b));
                row.iter_mut().zip(other).for_each(|(y, g)| *y = g.sub(s).mul(*y));
                row.len()
            }
            RowOp::LogSoftmaxGrad => {
                let s = sum(other);
                row.iter_mut().zip(other).for_each(|(y, g)| *y = g.sub(y.exp().mul(s)));
                row.len()
            }
        }
    }
}

/// The greatest element and the sum of `exp(x - greatest)`; `finite`: an infinite greatest counts as 0.
#[inline(always)]
fn exp_sum<C: Lane>(row: &[C], finite: bool) -> (C, C) {
    let m = greatest(row);
    let m = if finite && m.to_f64().is_infinite() { C::from_i32(0) } else { m };
    (m, lanes(row, row, C::from_i32(0), |x, _| x.sub(m).exp(), |a, b| a.add(b)))
}

#[inline(always)]
fn greatest<C: Lane>(row: &[C]) -> C {
    lanes(row, row, C::from_f64(f64::NEG_INFINITY), |x, _| x, |a, b| b.max(a))
}

#[inline(always)]
fn sum<C: Lane>(row: &[C]) -> C {
    lanes(row, row, C::from_i32(0), |x, _| x, |a, b| a.add(b))
}

/// `join` of all `map(x, y)`, many chains at a time, so that the loop fits the vector units.
#[inline(always)]
fn lanes<C: Lane>(x: &[C], y: &[C], neutral: C, map: impl Fn(C, C) -> C, join: impl Fn(C, C) -> C) -> C {
    let mut lanes = [neutral; CHAINS];
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<CHAINS>(), y.as_chunks::<CHAINS>());
    for (x, y) in x.iter().zip(y) {
        for (lane, (x, y)) in lanes.iter_mut().zip(x.iter().zip(y)) {
            *lane = join(*lane, map(*x, *y));
        }
    }
    for (lane, (x, y)) in lanes.iter_mut().zip(x_rest.iter().zip(y_rest)) {
        *lane = join(*lane, map(*x, *y));
    }
    lanes.into_iter().reduce(&join).unwrap_or(neutral)
}

pub(super) fn cross_entropy(
    x: &Tensor,
    labels: &Tensor,
    options: CrossEntropy,
    grad: Option<&Tensor>,
) -> Result<Tensor> {
    count_launch();
    let shape = if options.reduction == LossReduction::None { labels.shape().clone() } else { ().into() };
    let out = Tensor::empty_like_shape(shape, x.dtype, x.device())?;
    let writes: Vec<_> = std::iter::once(&out).chain(grad).map(|t| &t.storage).collect();
    with_host(&[&x.storage, &labels.storage], &writes, |reads, writes| {
        let mut targets = vec![0i64; labels.numel()];
        load_tile(labels.dtype, reads[1], labels.layout.offset as _, labels.strides()[0], &mut targets);
        let (loss, grad) = writes.split_first_mut().expect("the loss at least");
        let grad = grad.first_mut().map(|g| &mut **g);
        match x.dtype.compute() {
            Compute::F64 => entropy::<f64>(x, reads[0], &targets, options, loss, grad),
            _ => entropy::<f32>(x, reads[0], &targets, options, loss, grad),
        }
    })??;
    Ok(out)
}

fn entropy<C: Lane>(
    x: &Tensor,
    bytes: &[u8],
    targets: &[i64],
    options: CrossEntropy,
    out: &mut [u8],
    grad: Option<&mut [u8]>,
) -> Result<()> {
    let classes = x.shape().dims()[1];
    let counts = |t: i64| t != options.ignore_index;
    if let Some(&index) = targets.iter().find(|t| counts(**t) && !(0..classes as i64).contains(*t)) {
        return Err(Error::IndexOutOfRange { op: "cross_entropy", index, size: classes });
    }
    let count = match options.reduction {
        LossReduction::Mean => targets.iter().filter(|t| counts(**t)).count(),
        _ => 1,
    };
    let count = C::from_i64(count as i64);
    let zero = C::from_i32(0);
    // Losses of a block of rows, and their gradients where wanted.
    let block = |b: usize, grad: Option<&mut [u8]>| -> Vec<C> {
        let targets = &targets[b * BLOCK..targets.len().min((b + 1) * BLOCK)];
        let mut row = vec![zero; classes];
        let mut grad = grad;
        let losses = targets.iter().enumerate().map(|(i, &target)| {
            let start = x.layout.offset as isize + (b * BLOCK + i) as isize * x.strides()[0];
            load_tile(x.dtype, bytes, start as _, x.strides()[1], &mut row);
            let mut loss = zero;
            if counts(target) {
                let (m, s) = pulp::Arch::new().dispatch(
                    #[inline(always)]
                    || exp_sum(&row, false),
                );
                let lse = m.add(s.log());
                loss = lse.sub(row[target as usize]);
                if grad.is_some() {
                    let label = row[target as usize].sub(lse).exp().sub(C::from_i32(1)).div(count);
                    pulp::Arch::new().dispatch(
                        #[inline(always)]
                        || row.iter_mut().for_each(|x| *x = x.sub(lse).exp().div(count)),
                    );
                    row[target as usize] = label;
                }
            } else {
                row.fill(zero);
            }
            if let Some(grad) = &mut grad {
                store_tile(x.dtype, &row, grad, (i * classes) as _, 1);
            }
            loss
        });
        losses.collect()
    };
    let blocks = targets.len().div_ceil(BLOCK);
    let alone = targets.len() * classes <= JOB;
    let stretch = BLOCK * classes * x.dtype.size();
    let mut grads: Vec<Option<&mut [u8]>> = match grad {
        Some(grad) => grad.chunks_mut(stretch).take(blocks).map(Some).collect(),
        None => (0..blocks).map(|_| None).collect(),
    };
    let mut losses: Vec<Vec<C>> = vec![Vec::new(); blocks];
    let mut work: Vec<_> = losses.iter_mut().zip(&mut grads).collect();
    let one = |b: usize, (losses, grad): &mut (&mut Vec<C>, &mut Option<&mut [u8]>)| **losses = block(b, grad.take());
    match alone {
        true => work.iter_mut().enumerate().for_each(|(b, work)| one(b, work)),
        false => parallel::for_each(&mut work, one),
    }
    if options.reduction == LossReduction::None {
        store_tile(x.dtype, &losses.concat(), out, 0 as _, 1);
        return Ok(());
    }
    let blocks: Vec<C> = losses.iter().map(|l| sum(l)).collect();
    let total = sum(&blocks);
    store_tile(x.dtype, &[total.div(count)], out, 0 as _, 1);
    Ok(())
}
