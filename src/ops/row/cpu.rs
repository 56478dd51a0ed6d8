//! Row operations on the CPU: a row at a time in the compute type, rows shared out among the pool's threads.

use rayon::prelude::*;

use super::{CrossEntropy, LossReduction, RowOp, Rows};
use crate::device::{count_launch, cpu};
use crate::ops::convert::{load_tile, store_tile};
use crate::ops::lane::Lane;
use crate::storage::with_host;
use crate::{Compute, Error, Result, Tensor};

/// Elements a job of the pool has: enough to hide what handing it over costs.
const JOB: usize = 1 << 13;
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
        let work = |(i, part): (usize, &mut [u8])| self.part::<C>(i * least * self.inner, part);
        if self.out.numel() <= stretch * least {
            return work((0, out));
        }
        cpu::run(|| out.par_chunks_mut(stretch * least * size).enumerate().for_each(work));
    }

    /// Rows from `first` on, into `out`, which starts where the first of them does.
    fn part<C: Lane>(&self, first: usize, out: &mut [u8]) {
        let (n, inner, rows) = (self.rows.n, self.inner, self.rows);
        let length = if self.kind == RowOp::LogSumExp { 1 } else { n };
        let zero = C::from_i32(0);
        let (mut row, mut other) = (vec![zero; n], vec![zero; n]);
        let count = out.len() / self.out.dtype.size() / length;
        for i in 0..count {
            rows.walk.runs(first + i, 1, |_, at, _| {
                let x = self.x.layout.offset as isize + at[0];
                load_tile(self.x.dtype, self.bytes[0], x as _, rows.steps[0], &mut row);
                if matches!(self.kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad) {
                    let z = self.z.layout.offset as isize + at[2];
                    load_tile(self.z.dtype, self.bytes[1], z as _, rows.steps[2], &mut other);
                }
            });
            let len = compute(self.kind, &mut row, &other);
            let to = i / inner * inner * length + i % inner;
            store_tile(self.out.dtype, &row[..len], out, to as _, inner as isize);
        }
    }
}

/// The operation on a row, in place; how long the result is.
fn compute<C: Lane>(kind: RowOp, row: &mut [C], other: &[C]) -> usize {
    pulp::Arch::new().dispatch(
        #[inline(always)]
        || match kind {
            RowOp::Softmax => {
                let (m, s) = exp_sum(row, false);
                row.iter_mut().for_each(|x| *x = x.sub(m).exp().div(s));
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
                let s = sum(row.iter().zip(other).map(|(y, g)| y.mul(*g)));
                row.iter_mut().zip(other).for_each(|(y, g)| *y = g.sub(s).mul(*y));
                row.len()
            }
            RowOp::LogSoftmaxGrad => {
                let s = sum(other.iter().copied());
                row.iter_mut().zip(other).for_each(|(y, g)| *y = g.sub(y.exp().mul(s)));
                row.len()
            }
        },
    )
}

/// The greatest element and the sum of `exp(x - greatest)`; `finite`: an infinite greatest counts as 0.
#[inline(always)]
fn exp_sum<C: Lane>(row: &[C], finite: bool) -> (C, C) {
    let m = lanes(row.iter().copied(), C::from_f64(f64::NEG_INFINITY), |a, b| b.max(a));
    let m = if finite && m.to_f64().is_infinite() { C::from_i32(0) } else { m };
    (m, sum(row.iter().map(|x| x.sub(m).exp())))
}

#[inline(always)]
fn sum<C: Lane>(values: impl Iterator<Item = C>) -> C {
    lanes(values, C::from_i32(0), |a, b| a.add(b))
}

/// Sixteen chains at a time, so that the loop fits the vector units.
#[inline(always)]
fn lanes<C: Lane>(mut values: impl Iterator<Item = C>, neutral: C, f: impl Fn(C, C) -> C) -> C {
    let mut lanes = [neutral; 16];
    'all: loop {
        for lane in &mut lanes {
            match values.next() {
                Some(v) => *lane = f(*lane, v),
                None => break 'all,
            }
        }
    }
    lanes.into_iter().reduce(&f).unwrap_or(neutral)
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
    let losses: Vec<Vec<C>> = match grad {
        Some(grad) if alone => grad.chunks_mut(stretch).enumerate().map(|(b, g)| block(b, Some(g))).collect(),
        Some(grad) => {
            cpu::run(|| grad.par_chunks_mut(stretch).take(blocks).enumerate().map(|(b, g)| block(b, Some(g))).collect())
        }
        None if alone => (0..blocks).map(|b| block(b, None)).collect(),
        None => cpu::run(|| (0..blocks).into_par_iter().map(|b| block(b, None)).collect()),
    };
    if options.reduction == LossReduction::None {
        store_tile(x.dtype, &losses.concat(), out, 0 as _, 1);
        return Ok(());
    }
    let total = sum(losses.iter().map(|l| sum(l.iter().copied())));
    store_tile(x.dtype, &[total.div(count)], out, 0 as _, 1);
    Ok(())
}
