//! Indices on the CPU: checked all at once, before anything is written.

use super::Indexed;
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

/// The first index of the layout that is not in `0..size`, as an error. Positions along broadcast dims are looked at once.
fn check(op: &'static str, t: &Tensor, bytes: &[u8], layout: &Layout, size: usize) -> Result<()> {
    let shape = layout.shape.dims().iter().zip(&layout.strides).map(|(&n, &s)| if s == 0 { 1 } else { n }).collect();
    let walk = Walk::new(&shape, [&layout.strides[..]]);
    let mut tile = [0i64; TILE];
    let mut bad = None;
    let count = shape.numel();
    for first in (0..count).step_by(TILE) {
        let len = TILE.min(count - first);
        read(t, bytes, layout, &walk, 0, first, &mut tile[..len]);
        bad = bad.or(tile[..len].iter().copied().find(|i| !(0..size as i64).contains(i)));
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

pub(super) fn gather(g: &Indexed, out: &Tensor) -> Result<()> {
    count_launch();
    with_host(&[&g.x.storage, &g.index.storage], &[&out.storage], |reads, writes| {
        check(g.op, g.index, reads[1], &g.index_layout, g.size)?;
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
                let mut index = [0i64];
                load_tile(g.index.dtype, reads[1], index_at as _, 0, &mut index);
                let base = base + index[0] as isize * g.step;
                if steps[0] == 1 {
                    return out.copy_from_slice(&x[base as usize..][..n]);
                }
                return out.iter_mut().enumerate().for_each(|(i, o)| *o = x[(base + i as isize * steps[0]) as usize]);
            }
            let mut indices = [0i64; TILE];
            for (j, out) in out.chunks_mut(TILE).enumerate() {
                let (indices, from) = (&mut indices[..out.len()], (j * TILE) as isize);
                load_tile(g.index.dtype, reads[1], (index_at + from * steps[1]) as _, steps[1], indices);
                for (i, (o, index)) in out.iter_mut().zip(indices).enumerate() {
                    *o = x[(base + (from + i as isize) * steps[0] + *index as isize * g.step) as usize];
                }
            }
        });
    };
    if count <= JOB {
        return part(0, &mut out[..count]);
    }
    parallel::for_each_chunk(&mut out[..count], JOB, |i, out| part(i * JOB, out));
}

pub(super) fn scatter_add(g: &Indexed, target: &Tensor, layout: &Layout) -> Result<()> {
    count_launch();
    with_host(&[&g.x.storage, &g.index.storage], &[&target.storage], |reads, writes| {
        check(g.op, g.index, reads[1], &g.index_layout, g.size)?;
        match target.dtype.compute() {
            Compute::F32 => add_as::<f32>(g, target, layout, reads, writes[0]),
            Compute::F64 => add_as::<f64>(g, target, layout, reads, writes[0]),
            Compute::I64 => add_as::<i64>(g, target, layout, reads, writes[0]),
        }
        Ok(())
    })?
}

/// One thread, in row-major order: additions to one element must not meet.
fn add_as<C: Lane>(g: &Indexed, target: &Tensor, layout: &Layout, reads: &[&[u8]], to: &mut [u8]) {
    let walk =
        Walk::new(&g.x_layout.shape, [&g.x_layout.strides[..], &g.index_layout.strides[..], &layout.strides[..]]);
    let steps = [0, 1, 2].map(|k| walk.strides[k].last().copied().unwrap_or(0));
    let (mut source, mut sums, mut indices) = ([C::from_i32(0); TILE], [C::from_i32(0); TILE], [0i64; TILE]);
    let dtype = target.dtype;
    let count = g.x_layout.numel();
    for first in (0..count).step_by(TILE) {
        walk.runs(first, TILE.min(count - first), |_, offsets, n| {
            let starts = [&g.x_layout, &g.index_layout, layout].map(|l| l.offset as isize);
            let at = [0, 1, 2].map(|k| starts[k] + offsets[k]);
            let (source, sums, indices) = (&mut source[..n], &mut sums[..n], &mut indices[..n]);
            load_tile(dtype, reads[0], at[0] as _, steps[0], source);
            if steps[1] == 0 && steps[2] != 0 {
                load_tile(g.index.dtype, reads[1], at[1] as _, 0, &mut indices[..1]);
                let start = at[2] + indices[0] as isize * g.step;
                load_tile(dtype, to, start as _, steps[2], sums);
                sums.iter_mut().zip(source).for_each(|(s, x)| *s = s.add(*x));
                return store_tile(dtype, sums, to, start as _, steps[2]);
            }
            load_tile(g.index.dtype, reads[1], at[1] as _, steps[1], indices);
            for (i, (x, index)) in source.iter().zip(indices).enumerate() {
                let start = at[2] + i as isize * steps[2] + *index as isize * g.step;
                load_tile(dtype, to, start as _, 0, &mut sums[..1]);
                store_tile(dtype, &[sums[0].add(*x)], to, start as _, 0);
            }
        });
    }
}

pub(super) fn one_hot(op: &'static str, t: &Tensor, out: &Tensor, classes: usize) -> Result<()> {
    count_launch();
    with_host(&[&t.storage], &[&out.storage], |reads, writes| {
        check(op, t, reads[0], &t.layout, classes)?;
        let walk = Walk::new(t.shape(), [t.strides()]);
        let mut indices = vec![0i64; t.numel()];
        read(t, reads[0], &t.layout, &walk, 0, 0, &mut indices);
        let out: &mut [i64] = bytemuck::cast_slice_mut(&mut *writes[0]);
        out[..indices.len() * classes].fill(0);
        indices.iter().enumerate().for_each(|(i, c)| out[i * classes + *c as usize] = 1);
        Ok(())
    })?
}
