//! Indices on the CPU: checked all at once, before anything is written.

use super::Indexed;
use super::scatter::Combine;
use crate::device::{count_launch, cpu::parallel};
use crate::ops::collapse::Walk;
use crate::ops::convert::{load_tile, store_tile};
use crate::ops::lane::Lane;
use crate::ops::tiles::TILE;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{Compute, Error, Result, Tensor};

/// Elements a job of the pool reads.
const JOB: usize = 1 << 15;

/// The first index of the layout that is not in `low..size`, as an error. Positions along broadcast dims are looked at once.
fn check(op: &'static str, t: &Tensor, bytes: &[u8], layout: &Layout, size: usize, wraps: bool) -> Result<()> {
    let shape = layout.shape.dims().iter().zip(&layout.strides).map(|(&n, &s)| if s == 0 { 1 } else { n }).collect();
    let walk = Walk::new(&shape, [&layout.strides[..]]);
    let mut tile = [0i64; TILE];
    let mut bad = None;
    let (count, low) = (shape.numel(), if wraps { -(size as i64) } else { 0 });
    for first in (0..count).step_by(TILE) {
        let len = TILE.min(count - first);
        read(t, bytes, layout, &walk, 0, first, &mut tile[..len]);
        bad = bad.or(tile[..len].iter().copied().find(|i| !(low..size as i64).contains(i)));
    }
    bad.map_or(Ok(()), |index| Err(Error::IndexOutOfRange { op, index, size }))
}

/// Elements `first..` of operand k of the walk.
fn read<C: Lane>(t: &Tensor, bytes: &[u8], layout: &Layout, walk: &Walk, k: usize, first: usize, out: &mut [C]) {
    let stride = walk.strides[k].last().copied().unwrap_or(0);
    walk.runs(first, out.len(), |at, offsets, n| {
        let start = layout.offset as isize + offsets[k];
        load_tile(t.dtype, bytes, start as _, stride, &mut out[at..at + n]);
    });
}

impl Indexed<'_> {
    /// Indices from element `start` of the index's storage on, as steps in the tensor they point into; they are good.
    fn steps(&self, bytes: &[u8], start: isize, stride: isize, out: &mut [i64]) {
        load_tile(self.index.dtype, bytes, start as _, stride, out);
        for i in out {
            *i = (*i + if *i < 0 { self.size as i64 } else { 0 }) * self.step as i64;
        }
    }
}

pub(super) fn gather(g: &Indexed, out: &Tensor) -> Result<()> {
    count_launch();
    with_host(&[&g.x.storage, &g.index.storage], &[&out.storage], |reads, writes| {
        check(g.op, g.index, reads[1], &g.index_layout, g.size, g.wraps)?;
        let to = &mut *writes[0];
        match g.x.dtype.size() {
            1 => gather_as::<u8>(g, reads, bytemuck::cast_slice_mut(to)),
            2 => gather_as::<u16>(g, reads, bytemuck::cast_slice_mut(to)),
            4 => gather_as::<u32>(g, reads, bytemuck::cast_slice_mut(to)),
            _ => gather_as::<u64>(g, reads, bytemuck::cast_slice_mut(to)),
        }
        Ok(())
    })?
}

/// Elements as bits of their size; the indices are good.
fn gather_as<T: bytemuck::Pod + Send + Sync>(g: &Indexed, reads: &[&[u8]], out: &mut [T]) {
    let x: &[T] = bytemuck::cast_slice(reads[0]);
    let walk = Walk::new(&g.x_layout.shape, [&g.x_layout.strides[..], &g.index_layout.strides[..]]);
    let steps = [0, 1].map(|k| walk.strides[k].last().copied().unwrap_or(0));
    let count = g.x_layout.numel();
    let part = |first: usize, out: &mut [T]| {
        walk.runs(first, out.len(), |at, offsets, n| {
            let out = &mut out[at..at + n];
            let base = g.x_layout.offset as isize + offsets[0];
            let index_at = g.index_layout.offset as isize + offsets[1];
            if steps[1] == 0 {
                let mut step = [0i64];
                g.steps(reads[1], index_at, 0, &mut step);
                let base = base + step[0] as isize;
                if steps[0] == 1 {
                    return out.copy_from_slice(&x[base as usize..][..n]);
                }
                return out.iter_mut().enumerate().for_each(|(i, o)| *o = x[(base + i as isize * steps[0]) as usize]);
            }
            let mut tile = [0i64; TILE];
            for (j, out) in out.chunks_mut(TILE).enumerate() {
                let (tile, from) = (&mut tile[..out.len()], (j * TILE) as isize);
                g.steps(reads[1], index_at + from * steps[1], steps[1], tile);
                for (i, (o, step)) in out.iter_mut().zip(tile).enumerate() {
                    *o = x[(base + (from + i as isize) * steps[0] + *step as isize) as usize];
                }
            }
        });
    };
    if count <= JOB {
        return part(0, &mut out[..count]);
    }
    parallel::for_each_chunk(&mut out[..count], JOB, |i, out| part(i * JOB, out));
}

pub(super) fn scatter(g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout) -> Result<()> {
    count_launch();
    with_host(&[&g.x.storage, &g.index.storage], &[&target.storage], |reads, writes| {
        check(g.op, g.index, reads[1], &g.index_layout, g.size, g.wraps)?;
        let to = &mut *writes[0];
        match (combine, target.dtype.compute()) {
            (Combine::Set, _) => match target.dtype.size() {
                1 => set_as::<u8>(g, layout, reads, to),
                2 => set_as::<u16>(g, layout, reads, to),
                4 => set_as::<u32>(g, layout, reads, to),
                _ => set_as::<u64>(g, layout, reads, to),
            },
            (_, Compute::F32) => combine_as::<f32>(g, combine, target, layout, reads, to),
            (_, Compute::F64) => combine_as::<f64>(g, combine, target, layout, reads, to),
            (_, Compute::I64) => combine_as::<i64>(g, combine, target, layout, reads, to),
        }
        Ok(())
    })?
}

/// Calls `f` for runs of elements in row-major order, with where the source's and the target's first is (before its
/// index), the step along both, and the indices as steps: one for the whole run, or one for each element. One thread:
/// what goes to one element must not meet.
fn each_run(g: &Indexed, layout: &Layout, bytes: &[u8], mut f: impl FnMut([isize; 2], [isize; 2], &[i64], usize)) {
    let walk =
        Walk::new(&g.x_layout.shape, [&g.x_layout.strides[..], &g.index_layout.strides[..], &layout.strides[..]]);
    let steps = [0, 1, 2].map(|k| walk.strides[k].last().copied().unwrap_or(0));
    let mut tile = [0i64; TILE];
    let count = g.x_layout.numel();
    for first in (0..count).step_by(TILE) {
        walk.runs(first, TILE.min(count - first), |_, offsets, n| {
            let starts = [&g.x_layout, &g.index_layout, layout].map(|l| l.offset as isize);
            let at = [0, 1, 2].map(|k| starts[k] + offsets[k]);
            let one = steps[1] == 0 && steps[2] != 0;
            let indices = &mut tile[..if one { 1 } else { n }];
            g.steps(bytes, at[1], steps[1], indices);
            f([at[0], at[2]], [steps[0], steps[2]], indices, n);
        });
    }
}

fn set_as<T: bytemuck::Pod>(g: &Indexed, layout: &Layout, reads: &[&[u8]], to: &mut [u8]) {
    let (x, to): (&[T], &mut [T]) = (bytemuck::cast_slice(reads[0]), bytemuck::cast_slice_mut(to));
    each_run(g, layout, reads[1], |[from, at], steps, indices, n| {
        for i in 0..n {
            let index = indices[i.min(indices.len() - 1)] as isize;
            to[(at + i as isize * steps[1] + index) as usize] = x[(from + i as isize * steps[0]) as usize];
        }
    });
}

fn combine_as<C: Lane>(
    g: &Indexed,
    combine: Combine,
    target: &Tensor,
    layout: &Layout,
    reads: &[&[u8]],
    to: &mut [u8],
) {
    let dtype = target.dtype;
    let (mut source, mut sums) = ([C::from_i32(0); TILE], [C::from_i32(0); TILE]);
    each_run(g, layout, reads[1], |[from, at], steps, indices, n| {
        let (source, sums) = (&mut source[..n], &mut sums[..n]);
        load_tile(dtype, reads[0], from as _, steps[0], source);
        if let [index] = indices {
            let start = at + *index as isize;
            load_tile(dtype, to, start as _, steps[1], sums);
            sums.iter_mut().zip(source).for_each(|(s, x)| *s = combine.of(*s, *x));
            return store_tile(dtype, sums, to, start as _, steps[1]);
        }
        for (i, (x, index)) in source.iter().zip(indices).enumerate() {
            let start = at + i as isize * steps[1] + *index as isize;
            load_tile(dtype, to, start as _, 0, &mut sums[..1]);
            store_tile(dtype, &[combine.of(sums[0], *x)], to, start as _, 0);
        }
    });
}

pub(super) fn linear(
    op: &'static str,
    index: &Tensor,
    out: &Tensor,
    (size, step): (usize, isize),
    base: Option<i64>,
) -> Result<()> {
    count_launch();
    with_host(&[&index.storage], &[&out.storage], |reads, writes| {
        check(op, index, reads[0], &index.layout, size, true)?;
        let walk = Walk::new(index.shape(), [index.strides()]);
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..index.numel()];
        let mut tile = [0i64; TILE];
        for (k, out) in out.chunks_mut(TILE).enumerate() {
            let tile = &mut tile[..out.len()];
            read(index, reads[0], &index.layout, &walk, 0, k * TILE, tile);
            for (o, i) in out.iter_mut().zip(tile) {
                *o = base.unwrap_or(*o) + (*i + if *i < 0 { size as i64 } else { 0 }) * step as i64;
            }
        }
        Ok(())
    })?
}

pub(super) fn one_hot(op: &'static str, t: &Tensor, out: &Tensor, classes: usize) -> Result<()> {
    count_launch();
    with_host(&[&t.storage], &[&out.storage], |reads, writes| {
        check(op, t, reads[0], &t.layout, classes, false)?;
        let walk = Walk::new(t.shape(), [t.strides()]);
        let mut indices = vec![0i64; t.numel()];
        read(t, reads[0], &t.layout, &walk, 0, 0, &mut indices);
        let out: &mut [i64] = bytemuck::cast_slice_mut(&mut *writes[0]);
        out[..indices.len() * classes].fill(0);
        indices.iter().enumerate().for_each(|(i, c)| out[i * classes + *c as usize] = 1);
        Ok(())
    })?
}
