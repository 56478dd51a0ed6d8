//! Gathers on the CPU. If an index is out of range, the gather returns an error and the result is discarded.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::dispatch::for_size;
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::scalar::Number;
use crate::device::cpu::parallel;
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{DType, Error, Result, Tensor};

pub(crate) use crate::backend::problem::index::Indexed;

/// The number of elements in a job of the thread pool.
pub(crate) const JOB_ELEMENTS: usize = 1 << 15;

/// The number of indices converted at a time.
pub(crate) const INDEX_TILE_LEN: usize = 256;

/// A list of indices in memory, of any integer dtype.
#[derive(Clone, Copy)]
pub(crate) struct Indices<'a> {
    pub(crate) dtype: DType,
    pub(crate) bytes: &'a [u8],
}

impl Indices<'_> {
    pub(crate) fn get(&self, at: isize) -> i64 {
        let mut index = [0];
        load_tile(self.dtype, self.bytes, at as usize, 0, &mut index);
        index[0]
    }

    /// Calls `f(number of indices so far, next indices)` for tiles of `n` indices, which start at element `start` and are `stride`
    /// elements apart.
    #[inline(always)]
    pub(crate) fn for_each_tile(
        &self,
        tile: &mut [i64; INDEX_TILE_LEN],
        start: isize,
        stride: isize,
        n: usize,
        mut f: impl FnMut(usize, &[i64]),
    ) {
        if self.dtype == DType::I64 && stride == 1 {
            let all: &[i64] = bytemuck::cast_slice(self.bytes);
            return f(0, &all[start as usize..][..n]);
        }
        for done in (0..n).step_by(INDEX_TILE_LEN) {
            let tile = &mut tile[..INDEX_TILE_LEN.min(n - done)];
            load_tile(self.dtype, self.bytes, (start + done as isize * stride) as usize, stride, tile);
            f(done, tile);
        }
    }
}

/// Returns an error for the first index that is not in `low..size`, where `low` is `-size` if negative indices wrap. Each index is
/// checked once, even if it is broadcast.
pub(crate) fn check_range(
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
        let (mut bad, mut tile) = (None, [0; INDEX_TILE_LEN]);
        strided.for_each_run(first, JOB_ELEMENTS.min(count - first), |_, offsets, n| {
            indices.for_each_tile(&mut tile, layout.offset as isize + offsets[0], stride, n, |_, some| {
                // The sign bit is set if an index is not in 0..=last.
                let signs = |i: i64| i.wrapping_sub(low) | last.wrapping_sub(i.wrapping_sub(low));
                if bad.is_none() && some.iter().fold(0, |all, &i| all | signs(i)) < 0 {
                    bad = some.iter().copied().find(|i| !(low..size as i64).contains(i));
                }
            });
        });
        bad
    };
    let found = match count <= JOB_ELEMENTS {
        true => bad(0),
        false => parallel::map(count.div_ceil(JOB_ELEMENTS), 1, |i| bad(i * JOB_ELEMENTS)).into_iter().flatten().next(),
    };
    found.map_or(Ok(()), |index| Err(Error::IndexOutOfRange { op, index, size }))
}

/// Reads elements of a tensor, whose dims and strides are `strided`, from element `first` on.
pub(crate) fn read_range<C: Number>(t: &Tensor, bytes: &[u8], strided: &StridedDims, first: usize, out: &mut [C]) {
    let stride = strided.strides[0].last().copied().unwrap_or(0);
    strided.for_each_run(first, out.len(), |at, offsets, n| {
        load_tile(t.dtype, bytes, (t.layout.offset as isize + offsets[0]) as usize, stride, &mut out[at..at + n]);
    });
}

impl Indexed<'_> {
    /// Resolves a negative index. The result is less than `size` exactly if `index` is valid.
    #[inline(always)]
    pub(crate) fn resolve(&self, index: i64) -> usize {
        (if self.wraps && index < 0 { index.wrapping_add(self.size as i64) } else { index }) as usize
    }
}

/// Resolves an index like [`Indexed::resolve`], without a branch; `below` is added to negative indices.
#[inline(always)]
fn resolve_branchless(index: i64, below: i64) -> usize {
    index.wrapping_add((index >> 63) & below) as usize
}

/// Gathers elements of a contiguous line; returns whether all indices were valid.
fn gather_line<T: Copy>(to: &mut [T], line: &[T], indices: &[i64], below: i64) -> bool {
    let mut good = true;
    for (o, &index) in to.iter_mut().zip(indices) {
        match line.get(resolve_branchless(index, below)) {
            Some(element) => *o = *element,
            None => good = false,
        }
    }
    good
}

pub(crate) fn gather(g: &Indexed, out: &Tensor) -> Result<()> {
    with_host(&[&g.x.storage, &g.index.storage], &[&out.storage], |reads, writes| {
        let to = &mut *writes[0];
        let good =
            g.size > 0 && for_size!(g.x.dtype.size(), T => gather_as::<T>(g, reads, bytemuck::cast_slice_mut(to)));
        if good { Ok(()) } else { check_range(g.op, g.index, reads[1], &g.index_layout, g.size, g.wraps) }
    })?
}

/// Gathers elements as values of type `T`, which has the size of the dtype. Returns whether all indices were valid.
fn gather_as<T: bytemuck::Pod + Send + Sync>(g: &Indexed, reads: &[&[u8]], out: &mut [T]) -> bool {
    let x: &[T] = bytemuck::cast_slice(reads[0]);
    let indices = Indices { dtype: g.index.dtype, bytes: reads[1] };
    let strided = StridedDims::new(&g.x_layout.shape, [&g.x_layout.strides[..], &g.index_layout.strides[..]]);
    let steps = [0, 1].map(|k| strided.strides[k].last().copied().unwrap_or(0));
    let count = g.x_layout.numel();
    let bad = AtomicBool::new(false);
    let part = |first: usize, out: &mut [T]| {
        let (mut good, mut tile) = (true, [0; INDEX_TILE_LEN]);
        strided.for_each_run(first, out.len(), |at, offsets, n| {
            let out = &mut out[at..at + n];
            let base = g.x_layout.offset as isize + offsets[0];
            let index_at = g.index_layout.offset as isize + offsets[1];
            if steps[1] == 0 {
                let position = g.resolve(indices.get(index_at));
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
            indices.for_each_tile(&mut tile, index_at, steps[1], n, |done, indices| {
                // The fields of `g` are copied to locals; otherwise the compiler would reload them for every element, in case the result
                // aliases `g`.
                let (to, below) = (&mut out[done..], if g.wraps { g.size as i64 } else { 0 });
                if steps[0] == 0 && g.step == 1 {
                    good &= gather_line(to, &x[base as usize..][..g.size], indices, below);
                    return;
                }
                let (size, step, next) = (g.size, g.step, steps[0]);
                let (mut at, mut all) = (base + done as isize * next, true);
                for (o, &index) in to.iter_mut().zip(indices) {
                    let position = resolve_branchless(index, below);
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
    match count <= JOB_ELEMENTS {
        true => part(0, &mut out[..count]),
        false => parallel::for_each_chunk(&mut out[..count], JOB_ELEMENTS, |i, out| part(i * JOB_ELEMENTS, out)),
    }
    !bad.into_inner()
}

/// Adds `index * step` of one axis to linear indices; see [`Backend::linear_index`](crate::backend::Backend::linear_index).
pub(crate) fn linear_index(
    op: &'static str,
    index: &Tensor,
    out: &Tensor,
    (size, step): (usize, isize),
    base: Option<i64>,
) -> Result<()> {
    with_host(&[&index.storage], &[&out.storage], |reads, writes| {
        check_range(op, index, reads[0], &index.layout, size, true)?;
        let strided = StridedDims::new(index.shape(), [index.strides()]);
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..index.numel()];
        let mut tile = [0i64; TILE];
        for (k, out) in out.chunks_mut(TILE).enumerate() {
            let tile = &mut tile[..out.len()];
            read_range(index, reads[0], &strided, k * TILE, tile);
            for (o, i) in out.iter_mut().zip(tile) {
                *o = base.unwrap_or(*o) + (*i + if *i < 0 { size as i64 } else { 0 }) * step as i64;
            }
        }
        Ok(())
    })?
}

pub(crate) fn one_hot(op: &'static str, t: &Tensor, out: &Tensor, classes: usize) -> Result<()> {
    with_host(&[&t.storage], &[&out.storage], |reads, writes| {
        check_range(op, t, reads[0], &t.layout, classes, false)?;
        let strided = StridedDims::new(t.shape(), [t.strides()]);
        let rows = (JOB_ELEMENTS / classes).clamp(1, TILE);
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..t.numel() * classes];
        parallel::for_each_chunk(out, rows * classes, |k, out| {
            let mut tile = [0i64; TILE];
            let tile = &mut tile[..out.len() / classes];
            read_range(t, reads[0], &strided, k * rows, tile);
            out.fill(0);
            out.chunks_exact_mut(classes).zip(tile).for_each(|(row, class)| row[*class as usize] = 1);
        });
        Ok(())
    })?
}
