//! Gathers and scatters on the CPU. If an index is out of range, a gather returns an error and the result is discarded. Scattered writes to
//! the same element happen in the order of the indices for any number of threads, because each thread owns some rows or columns of the target.

use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use bytemuck::{Pod, cast_slice, cast_slice_mut};
use half::{bf16, f16};

use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::dispatch::for_size;
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::index::{Combine, IndexTerm, Indexed, Scatter};
use crate::device::cpu::blocks::{BlockPartition, for_each_block};
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{DType, Error, Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 15;

/// The number of indices converted at a time.
const INDEX_TILE_LEN: usize = 256;
/// The maximum number of columns that one thread owns if every element has its own index. The rows of such a narrow band stay in the
/// cache.
const MAX_BAND_WIDTH: usize = 128;
/// The number of parts for each thread if rows are divided. More parts than threads even out rows that are written more often than
/// others.
const PARTS_PER_THREAD: usize = 4;
/// The minimum number of columns for dividing rows among threads. With fewer, skipping an index costs as much as writing its row.
const MIN_ROW_LEN: usize = 16;
/// The number of 4-byte elements in a cache line: bands of whole lines avoid false sharing.
const LINE_ELEMENTS: usize = 16;

/// A list of indices in memory, of any integer dtype.
#[derive(Clone, Copy)]
struct Indices<'a> {
    dtype: DType,
    bytes: &'a [u8],
}

impl Indices<'_> {
    fn get(&self, at: isize) -> i64 {
        let mut index = [0];
        load_tile(self.dtype, self.bytes, at as usize, 0, &mut index);
        index[0]
    }

    /// Calls `f(number of indices so far, next indices)` for tiles of `n` indices, which start at element `start` and are `stride`
    /// elements apart.
    #[inline(always)]
    fn for_each_tile(
        &self,
        tile: &mut [i64; INDEX_TILE_LEN],
        start: isize,
        stride: isize,
        n: usize,
        mut f: impl FnMut(usize, &[i64]),
    ) {
        if self.dtype == DType::I64 && stride == 1 {
            let all: &[i64] = cast_slice(self.bytes);
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
fn check_range(op: &'static str, t: &Tensor, bytes: &[u8], layout: &Layout, size: usize, wraps: bool) -> Result<()> {
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
    fn resolve(&self, index: i64) -> usize {
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
        let good = g.size > 0 && for_size!(g.x.dtype.size(), T => gather_as::<T>(g, reads, cast_slice_mut(to)));
        if good { Ok(()) } else { check_range(g.op, g.index, reads[1], &g.index_layout, g.size, g.wraps) }
    })?
}

/// Gathers elements as values of type `T`, which has the size of the dtype. Returns whether all indices were valid.
fn gather_as<T: Pod + Send + Sync>(g: &Indexed, reads: &[&[u8]], out: &mut [T]) -> bool {
    let x: &[T] = cast_slice(reads[0]);
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
pub(crate) fn linear_index(t: &IndexTerm) -> Result<()> {
    let &IndexTerm { op, index, size, step, base, out } = t;
    with_host(&[&index.storage], &[&out.storage], |reads, writes| {
        check_range(op, index, reads[0], &index.layout, size, true)?;
        let strided = StridedDims::new(index.shape(), [index.strides()]);
        let out: &mut [i64] = &mut cast_slice_mut(&mut *writes[0])[..index.numel()];
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
        let out: &mut [i64] = &mut cast_slice_mut(&mut *writes[0])[..t.numel() * classes];
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

pub(crate) fn scatter(s: &Scatter) -> Result<()> {
    let &Scatter { moved: g, combine, target, layout, .. } = s;
    with_host(&[&g.x.storage, &g.index.storage], &[&target.storage], |reads, writes| {
        check_range(g.op, g.index, reads[1], &g.index_layout, g.size, g.wraps)?;
        let strides = [&g.x_layout.strides[..], &g.index_layout.strides[..], &layout.strides[..]];
        let write = ScatterJob {
            g,
            indices: Indices { dtype: g.index.dtype, bytes: reads[1] },
            strided: StridedDims::new(&g.x_layout.shape, strides),
            starts: [&g.x_layout, &g.index_layout, layout].map(|l| l.offset as isize),
            count: g.x_layout.numel(),
        };
        let (x, to) = (reads[0], &mut *writes[0]);
        macro_rules! run {
            ($t:ty, $f:expr) => {
                write.run::<$t>(cast_slice(x), cast_slice_mut(to), $f)
            };
            ($t:ty as $C:ty: $from:expr, $to:expr) => {
                run!($t, |old: $t, new: $t| $to(combine_elements::<$C>(combine, $from(old), $from(new))))
            };
        }
        match (combine, target.dtype) {
            (Combine::Set, dtype) => for_size!(dtype.size(), T => run!(T, |_, new| new)),
            (Combine::Add, DType::F32) => run!(f32, |old, new| old + new),
            (_, DType::F32) => run!(f32, |old, new| combine_elements(combine, old, new)),
            (_, DType::F64) => run!(f64, |old, new| combine_elements(combine, old, new)),
            (_, DType::I64) => run!(i64, |old, new| combine_elements(combine, old, new)),
            (_, DType::F16) => run!(f16 as f32: f16::to_f32, f16::from_f32),
            (_, DType::BF16) => run!(bf16 as f32: bf16::to_f32, bf16::from_f32),
            (_, DType::I32) => run!(i32 as i64: i64::from, |x| x as i32),
            (_, DType::U32) => run!(u32 as i64: i64::from, |x| x as u32),
            (_, DType::I16) => run!(i16 as i64: i64::from, |x| x as i16),
            (_, DType::I8) => run!(i8 as i64: i64::from, |x| x as i8),
            (_, DType::U8) => run!(u8 as i64: i64::from, |x| x as u8),
            (_, DType::Bool) => run!(u8 as i64: |x| i64::from(x != 0), |x| u8::from(x != 0)),
        }
        Ok(())
    })?
}

/// Combines the old element with the new element.
#[inline(always)]
fn combine_elements<C: Number>(combine: Combine, old: C, new: C) -> C {
    match combine {
        Combine::Set => new,
        Combine::Add => old.add(new),
        Combine::Multiply => old.mul(new),
        Combine::Max => old.max(new),
        Combine::Min => old.min(new),
    }
}

/// A scatter whose indices are all in range.
struct ScatterJob<'a> {
    g: &'a Indexed<'a>,
    indices: Indices<'a>,
    /// The iteration over source, index and target. The target's stride is 0 along the indexed dim.
    strided: StridedDims,
    starts: [isize; 3],
    count: usize,
}

impl ScatterJob<'_> {
    fn run<T: Pod + Send + Sync>(&self, x: &[T], to: &mut [T], f: impl Fn(T, T) -> T + Copy + Sync) {
        if self.count > JOB_ELEMENTS {
            if let Some((stride, row_len)) = self.row_pieces() {
                let (rows, start) = (self.strided.dims[0], self.starts[2] as usize);
                let each = self.count / rows;
                let some = JOB_ELEMENTS.div_ceil(each);
                let to = &mut to[start..start + (rows - 1) * stride + row_len];
                return parallel::for_each_chunk(to, some * stride, |i, to| {
                    let first = i * some;
                    let last = rows.min(first + some);
                    self.scatter_range(x, first * each..last * each, to, start + first * stride, f);
                });
            }
            if let Some(columns) = self.row_columns() {
                return self.scatter_rows(x, to, columns, f);
            }
        }
        self.scatter_range(x, 0..self.count, to, 0, f);
    }

    /// If the first dim steps through disjoint pieces of the target, returns the stride between pieces and the length of a piece; else
    /// `None`.
    fn row_pieces(&self) -> Option<(usize, usize)> {
        let stride = self.strided.strides[2].first().copied().filter(|&stride| stride > 0)?;
        let others = self.strided.dims.iter().zip(&self.strided.strides[2]).skip(1).map(|(&n, &s)| (n, s));
        let mut row_len = 1;
        for (n, step) in others.chain([(self.g.size, self.g.step)]) {
            row_len += (n - 1) * usize::try_from(step).ok()?;
        }
        (row_len <= stride as usize).then_some((stride as usize, row_len))
    }

    /// Returns the number of columns if the index selects rows of the target, and only the last dim steps through a row, one element at a
    /// time; else `None`.
    fn row_columns(&self) -> Option<usize> {
        let (&last, others) = self.strided.strides[2].split_last()?;
        let columns = *self.strided.dims.last()?;
        let rows = last == 1 && others.iter().all(|&s| s == 0) && self.g.step >= columns as isize;
        let short = self.strided.strides[1].last() == Some(&0) && columns < MIN_ROW_LEN;
        (rows && !short).then_some(columns)
    }

    /// Writes a range of the source's elements, in order. `to[0]` is element `origin` of the target.
    fn scatter_range<T: Pod>(
        &self,
        x: &[T],
        range: Range<usize>,
        to: &mut [T],
        origin: usize,
        f: impl Fn(T, T) -> T + Copy,
    ) {
        let (g, mut tile) = (self.g, [0; INDEX_TILE_LEN]);
        let steps = [0, 1, 2].map(|k| self.strided.strides[k].last().copied().unwrap_or(0));
        self.strided.for_each_run(range.start, range.len(), |_, offsets, n| {
            let [from, index, at] = [0, 1, 2].map(|k| self.starts[k] + offsets[k]);
            let at = at - origin as isize;
            if steps[1] == 0 && steps[2] == 1 {
                let start = at + g.resolve(self.indices.get(index)) as isize * g.step;
                return combine_slice(&mut to[start as usize..][..n], x, from, steps[0], f);
            }
            self.indices.for_each_tile(&mut tile, index, steps[1], n, |done, indices| {
                let from = from + done as isize * steps[0];
                if steps[0] == 1 && steps[2] == 0 && g.step == 1 {
                    let line = &mut to[at as usize..][..g.size];
                    for (&index, &new) in indices.iter().zip(&x[from as usize..][..indices.len()]) {
                        let element = &mut line[g.resolve(index)];
                        *element = f(*element, new);
                    }
                    return;
                }
                for (i, &index) in indices.iter().enumerate() {
                    let position = at + (done + i) as isize * steps[2] + g.resolve(index) as isize * g.step;
                    let element = &mut to[position as usize];
                    *element = f(*element, x[(from + i as isize * steps[0]) as usize]);
                }
            });
        });
    }

    /// Writes rows of the target that are selected by an index. If every element has its own index, each thread owns some of the
    /// `columns`. Otherwise each thread owns some rows, and skips the indices of all other rows.
    fn scatter_rows<T: Pod + Sync + Send>(
        &self,
        x: &[T],
        to: &mut [T],
        columns: usize,
        f: impl Fn(T, T) -> T + Copy + Sync,
    ) {
        let (g, strided, pitch) = (self.g, &self.strided, self.g.step as usize);
        let outer = strided.dims.len() - 1;
        let over = StridedDims {
            dims: strided.dims[..outer].into(),
            strides: strided.strides.iter().map(|s| s[..outer].into()).collect(),
        };
        let [step, index_step] = [0, 1].map(|k| strided.strides[k][outer]);
        let [next, index_next] = [0, 1].map(|k| over.strides[k].last().copied().unwrap_or(0));
        let lines = self.count / columns;
        let to = &mut to[self.starts[2] as usize..][..(g.size - 1) * pitch + columns];
        if index_step == 0 {
            let rows = g.size.div_ceil(PARTS_PER_THREAD * threads());
            return parallel::for_each_chunk(to, rows * pitch, |part, to| {
                let (mine, mut tile) = (part * rows..(part + 1) * rows, [0; INDEX_TILE_LEN]);
                over.for_each_run(0, lines, |_, offsets, n| {
                    let [from, index] = [0, 1].map(|k| self.starts[k] + offsets[k]);
                    self.indices.for_each_tile(&mut tile, index, index_next, n, |done, indices| {
                        for (i, position) in indices.iter().map(|&index| g.resolve(index)).enumerate() {
                            if mine.contains(&position) {
                                let row = &mut to[(position - mine.start) * pitch..][..columns];
                                combine_slice(row, x, from + (done + i) as isize * next, step, f);
                            }
                        }
                    });
                });
            });
        }
        let width = columns.div_ceil(threads()).next_multiple_of(LINE_ELEMENTS).min(MAX_BAND_WIDTH);
        let cut = BlockPartition { columns, pitch, band: g.size, height: g.size, width };
        for_each_block(to, cut, false, |[_, _, j], mut band| {
            let (first, n, mut tile) = (j * width, band.width(), [0; INDEX_TILE_LEN]);
            over.for_each_run(0, lines, |_, offsets, count| {
                for i in 0..count as isize {
                    let from = self.starts[0] + offsets[0] + i * next + first as isize * step;
                    let index = self.starts[1] + offsets[1] + i * index_next + first as isize * index_step;
                    self.indices.for_each_tile(&mut tile, index, index_step, n, |done, indices| {
                        let from = from + done as isize * step;
                        let to = indices.iter().map(|&index| g.resolve(index)).enumerate();
                        if step == 1 {
                            for ((i, row), &new) in to.zip(&x[from as usize..][..indices.len()]) {
                                let element = &mut band.row(row)[done + i];
                                *element = f(*element, new);
                            }
                            return;
                        }
                        for (i, row) in to {
                            let element = &mut band.row(row)[done + i];
                            *element = f(*element, x[(from + i as isize * step) as usize]);
                        }
                    });
                }
            });
        });
    }
}

/// Combines the elements of `x` at `from`, `from + step`, ... into the elements of `to`.
#[inline(always)]
fn combine_slice<T: Copy>(to: &mut [T], x: &[T], from: isize, step: isize, f: impl Fn(T, T) -> T) {
    if step == 1 {
        let x = &x[from as usize..][..to.len()];
        return to.iter_mut().zip(x).for_each(|(element, &new)| *element = f(*element, new));
    }
    to.iter_mut().enumerate().for_each(|(i, element)| *element = f(*element, x[(from + i as isize * step) as usize]));
}
