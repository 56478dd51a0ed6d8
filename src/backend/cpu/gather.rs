//! Reads through indices on the CPU. An index out of range is an error, and the result is dropped.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::scalar::Number;
use crate::device::cpu::parallel;
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{DType, Error, Result, Tensor};

pub(crate) use crate::backend::problem::index::Indexed;

/// Elements a job of the pool reads.
pub(crate) const JOB: usize = 1 << 15;

/// Indices that are converted at a time.
pub(crate) const SOME: usize = 256;

/// Indices as they lie in memory.
#[derive(Clone, Copy)]
pub(crate) struct Indices<'a> {
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
}

impl Indices<'_> {
    pub(crate) fn one(&self, at: isize) -> i64 {
        let mut index = [0];
        load_tile(self.dtype, self.bytes, at as usize, 0, &mut index);
        index[0]
    }

    /// Calls `f(how many came before, indices)` until that were `n`, from element `start` of the memory on.
    #[inline(always)]
    pub(crate) fn each(
        &self,
        tile: &mut [i64; SOME],
        start: isize,
        stride: isize,
        n: usize,
        mut f: impl FnMut(usize, &[i64]),
    ) {
        if self.dtype == DType::I64 && stride == 1 {
            let all: &[i64] = bytemuck::cast_slice(self.bytes);
            return f(0, &all[start as usize..][..n]);
        }
        for done in (0..n).step_by(SOME) {
            let tile = &mut tile[..SOME.min(n - done)];
            load_tile(self.dtype, self.bytes, (start + done as isize * stride) as usize, stride, tile);
            f(done, tile);
        }
    }
}

/// The first index of the layout that is not in `low..size`, as an error. Positions along broadcast dims are looked at once.
pub(crate) fn check(
    op: &'static str,
    t: &Tensor,
    bytes: &[u8],
    layout: &Layout,
    size: usize,
    wraps: bool,
) -> Result<()> {
    let shape = layout.shape.dims().iter().zip(&layout.strides).map(|(&n, &s)| if s == 0 { 1 } else { n }).collect();
    let strided = StridedDims::new(&shape, [&layout.strides[..]]);
    let indices = Indices { dtype: t.dtype, bytes };
    let (stride, count) = (strided.strides[0].last().copied().unwrap_or(0), shape.numel());
    let low = if wraps { -(size as i64) } else { 0 };
    let last = size as i64 - 1 - low;
    let bad = |first: usize| {
        let (mut bad, mut tile) = (None, [0; SOME]);
        strided.runs(first, JOB.min(count - first), |_, offsets, n| {
            indices.each(&mut tile, layout.offset as isize + offsets[0], stride, n, |_, some| {
                // The sign of one of them says that it is not in 0..=last.
                let signs = |i: i64| i.wrapping_sub(low) | last.wrapping_sub(i.wrapping_sub(low));
                if bad.is_none() && some.iter().fold(0, |all, &i| all | signs(i)) < 0 {
                    bad = some.iter().copied().find(|i| !(low..size as i64).contains(i));
                }
            });
        });
        bad
    };
    let found = match count <= JOB {
        true => bad(0),
        false => parallel::map(count.div_ceil(JOB), 1, |i| bad(i * JOB)).into_iter().flatten().next(),
    };
    found.map_or(Ok(()), |index| Err(Error::IndexOutOfRange { op, index, size }))
}

/// Elements `first..` of operand k of the walk.
fn read<C: Number>(
    t: &Tensor,
    bytes: &[u8],
    layout: &Layout,
    strided: &StridedDims,
    k: usize,
    first: usize,
    out: &mut [C],
) {
    let stride = strided.strides[k].last().copied().unwrap_or(0);
    strided.runs(first, out.len(), |at, offsets, n| {
        let start = layout.offset as isize + offsets[k];
        load_tile(t.dtype, bytes, start as _, stride, &mut out[at..at + n]);
    });
}

impl Indexed<'_> {
    /// What an index points to along the dim: below its size if it is good.
    #[inline(always)]
    pub(crate) fn wrapped(&self, index: i64) -> usize {
        (if self.wraps && index < 0 { index.wrapping_add(self.size as i64) } else { index }) as usize
    }
}

/// [`Indexed::wrapped`] without a branch; `below` is what is added to indices below 0.
#[inline(always)]
fn position(index: i64, below: i64) -> usize {
    index.wrapping_add((index >> 63) & below) as usize
}

/// Elements of `line` that indices name; whether all of these are in it.
fn pick<T: Copy>(to: &mut [T], line: &[T], indices: &[i64], below: i64) -> bool {
    let mut good = true;
    for (o, &index) in to.iter_mut().zip(indices) {
        match line.get(position(index, below)) {
            Some(element) => *o = *element,
            None => good = false,
        }
    }
    good
}

pub(crate) fn gather(g: &Indexed, out: &Tensor) -> Result<()> {
    with_host(&[&g.x.storage, &g.index.storage], &[&out.storage], |reads, writes| {
        let to = &mut *writes[0];
        let good = g.size > 0
            && match g.x.dtype.size() {
                1 => gather_as::<u8>(g, reads, bytemuck::cast_slice_mut(to)),
                2 => gather_as::<u16>(g, reads, bytemuck::cast_slice_mut(to)),
                4 => gather_as::<u32>(g, reads, bytemuck::cast_slice_mut(to)),
                _ => gather_as::<u64>(g, reads, bytemuck::cast_slice_mut(to)),
            };
        if good { Ok(()) } else { check(g.op, g.index, reads[1], &g.index_layout, g.size, g.wraps) }
    })?
}

/// Elements as bits of their size; whether all indices were good.
fn gather_as<T: bytemuck::Pod + Send + Sync>(g: &Indexed, reads: &[&[u8]], out: &mut [T]) -> bool {
    let x: &[T] = bytemuck::cast_slice(reads[0]);
    let indices = Indices { dtype: g.index.dtype, bytes: reads[1] };
    let strided = StridedDims::new(&g.x_layout.shape, [&g.x_layout.strides[..], &g.index_layout.strides[..]]);
    let steps = [0, 1].map(|k| strided.strides[k].last().copied().unwrap_or(0));
    let count = g.x_layout.numel();
    let bad = AtomicBool::new(false);
    let part = |first: usize, out: &mut [T]| {
        let (mut good, mut tile) = (true, [0; SOME]);
        strided.runs(first, out.len(), |at, offsets, n| {
            let out = &mut out[at..at + n];
            let base = g.x_layout.offset as isize + offsets[0];
            let index_at = g.index_layout.offset as isize + offsets[1];
            if steps[1] == 0 {
                let position = g.wrapped(indices.one(index_at));
                if position >= g.size {
                    good = false;
                    return;
                }
                let base = base + position as isize * g.step;
                if steps[0] == 1 {
                    return out.copy_from_slice(&x[base as usize..][..n]);
                }
                return out.iter_mut().enumerate().for_each(|(i, o)| *o = x[(base + i as isize * steps[0]) as usize]);
            }
            indices.each(&mut tile, index_at, steps[1], n, |done, indices| {
                // In registers: `g` would be read for every element, for the result might lie over it.
                let (to, below) = (&mut out[done..], if g.wraps { g.size as i64 } else { 0 });
                if steps[0] == 0 && g.step == 1 {
                    good &= pick(to, &x[base as usize..][..g.size], indices, below);
                    return;
                }
                let (size, step, next) = (g.size, g.step, steps[0]);
                let (mut at, mut all) = (base + done as isize * next, true);
                for (o, &index) in to.iter_mut().zip(indices) {
                    let position = position(index, below);
                    match position < size {
                        true => *o = x[(at + position as isize * step) as usize],
                        false => all = false,
                    }
                    at += next;
                }
                good &= all;
            });
        });
        if !good {
            bad.store(true, Relaxed);
        }
    };
    match count <= JOB {
        true => part(0, &mut out[..count]),
        false => parallel::for_each_chunk(&mut out[..count], JOB, |i, out| part(i * JOB, out)),
    }
    !bad.into_inner()
}

pub(crate) fn linear(
    op: &'static str,
    index: &Tensor,
    out: &Tensor,
    (size, step): (usize, isize),
    base: Option<i64>,
) -> Result<()> {
    with_host(&[&index.storage], &[&out.storage], |reads, writes| {
        check(op, index, reads[0], &index.layout, size, true)?;
        let strided = StridedDims::new(index.shape(), [index.strides()]);
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..index.numel()];
        let mut tile = [0i64; TILE];
        for (k, out) in out.chunks_mut(TILE).enumerate() {
            let tile = &mut tile[..out.len()];
            read(index, reads[0], &index.layout, &strided, 0, k * TILE, tile);
            for (o, i) in out.iter_mut().zip(tile) {
                *o = base.unwrap_or(*o) + (*i + if *i < 0 { size as i64 } else { 0 }) * step as i64;
            }
        }
        Ok(())
    })?
}

pub(crate) fn one_hot(op: &'static str, t: &Tensor, out: &Tensor, classes: usize) -> Result<()> {
    with_host(&[&t.storage], &[&out.storage], |reads, writes| {
        check(op, t, reads[0], &t.layout, classes, false)?;
        let strided = StridedDims::new(t.shape(), [t.strides()]);
        let rows = (JOB / classes).clamp(1, TILE);
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..t.numel() * classes];
        parallel::for_each_chunk(out, rows * classes, |k, out| {
            let mut tile = [0i64; TILE];
            let tile = &mut tile[..out.len() / classes];
            read(t, reads[0], &t.layout, &strided, 0, k * rows, tile);
            out.fill(0);
            out.chunks_exact_mut(classes).zip(tile).for_each(|(row, class)| row[*class as usize] = 1);
        });
        Ok(())
    })?
}
