//! Row operations on the CPU: a row at a time in the compute type, rows shared out among the team's threads.

use pulp::{Arch, Simd, WithSimd};

use super::{CrossEntropy, LossReduction, Mask, RowOp, Rows};
use crate::device::{count_launch, cpu::parallel};
use crate::ops::convert::{load_tile, store_tile};
use crate::ops::fold::{Add, Max, fold, fold_in, fold_map};
use crate::ops::lane::Lane;
use crate::ops::tiles::TILE;
use crate::storage::with_host;
use crate::{Compute, Error, Result, Tensor};

/// Elements a job of the pool has: enough to hide what handing it over costs.
const JOB: usize = 1 << 13;
/// Elements whose exponentials are computed before they are added up.
const PART: usize = 256;
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
        let zero = C::from_i32(0);
        let mask = rows.sight.mask;
        let two = matches!(self.kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad) || mask != Mask::None;
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let mut compute = |i: usize, row: &mut [C]| {
            let at = rows.walk.offsets(first + i);
            let from = self.row(self.x, 0, at[0], &mut one);
            let other = if two { self.row(self.z, 2, at[2], &mut other) } else { &[] };
            let from = &from[..rows.sight.of(first + i, n)];
            Arch::new().dispatch(OnRow { kind: self.kind, from, row, other, mask })
        };
        let length = if self.kind == RowOp::LogSumExp { 1 } else { n };
        if inner == 1 && self.out.dtype == C::COMPUTE.dtype() {
            let out: &mut [C] = bytemuck::cast_slice_mut(out);
            out.chunks_mut(length).enumerate().for_each(|(i, row)| _ = compute(i, row));
            return;
        }
        let mut row = vec![zero; length];
        let count = out.len() / self.out.dtype.size() / length;
        for i in 0..count {
            let len = compute(i, &mut row);
            let to = i / inner * inner * length + i % inner;
            store_tile(self.out.dtype, &row[..len], out, to as _, inner as isize);
        }
    }

    /// A row of the `k`-th operand: where it lies if it can be read there, otherwise in `buffer`.
    fn row<'b, C: Lane>(&'b self, t: &Tensor, k: usize, at: isize, buffer: &'b mut Vec<C>) -> &'b [C] {
        let (n, start) = (self.rows.n, (t.layout.offset as isize + at) as usize);
        let bytes = self.bytes[k.min(1)];
        if self.rows.steps[k] == 1 && t.dtype == C::COMPUTE.dtype() {
            return &bytemuck::cast_slice(bytes)[start..start + n];
        }
        buffer.resize(n, C::from_i32(0));
        load_tile(t.dtype, bytes, start, self.rows.steps[k], buffer);
        buffer
    }
}

/// A type, not a closure: a closure that is not inlined is compiled without the vector units.
struct OnRow<'a, C> {
    kind: RowOp,
    from: &'a [C],
    row: &'a mut [C],
    other: &'a [C],
    mask: Mask,
}

impl<C: Lane> WithSimd for OnRow<'_, C> {
    type Output = usize;

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) -> usize {
        let OnRow { kind, from, row, other, mask } = self;
        match kind {
            RowOp::Softmax => {
                let m = fold_in::<Max, C, S>(simd, from);
                C::exp_each(row, from, |x| x.sub(m));
                let s = C::from_i32(1).div(fold_in::<Add, C, S>(simd, row));
                row.iter_mut().for_each(|x| *x = x.mul(s));
                row.len()
            }
            RowOp::MaskedSoftmax => {
                let (seen, hidden) = row.split_at_mut(from.len());
                let low = C::from_f64(f64::NEG_INFINITY);
                seen.copy_from_slice(from);
                match mask {
                    Mask::None => {}
                    Mask::Keep => {
                        seen.iter_mut().zip(other).for_each(|(x, k)| *x = if k.is_true() { *x } else { low });
                    }
                    Mask::Add => seen.iter_mut().zip(other).for_each(|(x, a)| *x = x.add(*a)),
                }
                let m = fold_in::<Max, C, S>(simd, seen);
                let m = if m == low { C::from_i32(0) } else { m };
                C::exp_in_place(seen, |x| x.sub(m));
                let s = fold_in::<Add, C, S>(simd, seen);
                let scale = if s == C::from_i32(0) { s } else { C::from_i32(1).div(s) };
                seen.iter_mut().for_each(|x| *x = x.mul(scale));
                hidden.fill(C::from_i32(0));
                row.len()
            }
            RowOp::LogSoftmax => {
                let (m, s) = exp_sum(simd, from, false);
                let log_s = s.log();
                row.iter_mut().zip(from).for_each(|(y, x)| *y = x.sub(m).sub(log_s));
                row.len()
            }
            RowOp::LogSumExp => {
                let (m, s) = exp_sum(simd, from, true);
                row[0] = m.add(s.log());
                1
            }
            RowOp::SoftmaxGrad => {
                let s = fold_map::<Add, C, S>(simd, from, other, |y, g| y.mul(g));
                row.iter_mut().zip(from.iter().zip(other)).for_each(|(dx, (y, g))| *dx = g.sub(s).mul(*y));
                row.len()
            }
            RowOp::LogSoftmaxGrad => {
                let s = fold_in::<Add, C, S>(simd, other);
                row.iter_mut().zip(from.iter().zip(other)).for_each(|(dx, (y, g))| *dx = g.sub(y.exp().mul(s)));
                row.len()
            }
        }
    }
}

/// The greatest element and the sum of `exp(x - greatest)`; `finite`: an infinite greatest counts as 0.
#[inline(always)]
fn exp_sum<C: Lane, S: Simd>(simd: S, row: &[C], finite: bool) -> (C, C) {
    let m = fold_in::<Max, C, S>(simd, row);
    let m = if finite && m.to_f64().is_infinite() { C::from_i32(0) } else { m };
    let (mut part, mut sum) = ([C::from_i32(0); PART], C::from_i32(0));
    for row in row.chunks(PART) {
        let part = &mut part[..row.len()];
        C::exp_each(part, row, |x| x.sub(m));
        sum = sum.add(fold_in::<Add, C, S>(simd, part));
    }
    (m, sum)
}

/// The losses of rows of logits, 0 where a row does not count; rows become their gradients, divided by `count`, where there
/// is one. Several rows at a time, for what a row costs is much more than a few exponentials.
struct Entropy<'a, C, F> {
    rows: &'a mut [C],
    targets: &'a [i64],
    counts: F,
    losses: &'a mut [C],
    count: Option<C>,
}

impl<C: Lane, F: Fn(i64) -> bool> WithSimd for Entropy<'_, C, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        let Entropy { rows, targets, counts, losses, count } = self;
        let (zero, one) = (C::from_i32(0), C::from_i32(1));
        let classes = (rows.len() / targets.len()).max(1);
        let (mut sums, mut tops) = ([zero; BLOCK], [zero; BLOCK]);
        let (sums, tops) = (&mut sums[..targets.len()], &mut tops[..targets.len()]);
        match rows.len() <= TILE {
            true => {
                let mut powers = [zero; TILE];
                let powers = &mut powers[..rows.len()];
                for ((row, to), top) in rows.chunks(classes).zip(powers.chunks_mut(classes)).zip(&mut *tops) {
                    *top = fold_in::<Max, C, S>(simd, row);
                    to.iter_mut().zip(row).for_each(|(p, x)| *p = x.sub(*top));
                }
                C::exp_in_place(powers, |x| x);
                powers.chunks(classes).zip(&mut *sums).for_each(|(row, s)| *s = fold_in::<Add, C, S>(simd, row));
            }
            false => {
                for ((row, top), sum) in rows.chunks(classes).zip(&mut *tops).zip(&mut *sums) {
                    (*top, *sum) = exp_sum(simd, row, false);
                }
            }
        }
        sums.iter_mut().zip(tops).for_each(|(s, top)| *s = top.add(s.log()));
        for (((row, lse), &target), loss) in rows.chunks_mut(classes).zip(&mut *sums).zip(targets).zip(losses) {
            *loss = if counts(target) { lse.sub(row[target as usize]) } else { zero };
            row.iter_mut().for_each(|x| *x = x.sub(*lse));
        }
        let Some(count) = count else { return };
        C::exp_in_place(rows, |x| x);
        for (row, &target) in rows.chunks_mut(classes).zip(targets).filter(|(_, target)| counts(**target)) {
            row[target as usize] = row[target as usize].sub(one);
        }
        rows.iter_mut().for_each(|x| *x = x.div(count));
        // Last: where no row counts the others were divided by 0.
        let others = rows.chunks_mut(classes).zip(targets).filter(|(_, target)| !counts(**target));
        others.for_each(|(row, _)| row.fill(zero));
    }
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
    let together = (TILE / classes.max(1)).clamp(1, BLOCK);
    // Losses of a block of rows, and their gradients where wanted.
    let block = |b: usize, grad: Option<&mut [u8]>| -> Vec<C> {
        let targets = &targets[b * BLOCK..targets.len().min((b + 1) * BLOCK)];
        let (mut grad, mut losses) = (grad, vec![zero; targets.len()]);
        let mut rows = vec![zero; together.min(targets.len()) * classes];
        for (i, (targets, losses)) in targets.chunks(together).zip(losses.chunks_mut(together)).enumerate() {
            let rows = &mut rows[..targets.len() * classes];
            for (j, row) in rows.chunks_mut(classes.max(1)).enumerate() {
                let start = x.layout.offset as isize + (b * BLOCK + i * together + j) as isize * x.strides()[0];
                load_tile(x.dtype, bytes, start as _, x.strides()[1], row);
            }
            let count = grad.is_some().then_some(count);
            Arch::new().dispatch(Entropy { rows, targets, counts, losses, count });
            if let Some(grad) = &mut grad {
                store_tile(x.dtype, rows, grad, i * together * classes, 1);
            }
        }
        losses
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
    let blocks: Vec<C> = losses.iter().map(|l| fold::<Add, C>(l)).collect();
    let total = fold::<Add, C>(&blocks);
    store_tile(x.dtype, &[total.div(count)], out, 0 as _, 1);
    Ok(())
}
