//! Writing through indices on the CPU. Writes to one element come in the order of the indices, however many threads there are:
//! each thread has rows or columns of the target to itself.

use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};

use crate::backend::cpu::gather::{Indexed, Indices, JOB, SOME, check};
use crate::backend::problem::index::Combine;
use crate::device::cpu::bands::for_each_band;
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{DType, Result, Tensor};

/// Columns of a band whose elements have indices of their own: few, so that rows of a band are in a cache.
const NARROW: usize = 128;
/// Parts that the rows of a thread are cut into: some rows are named more often than others.
const PARTS: usize = 4;
/// Fewer columns than that are not shared out by rows: to pass over an index costs as much.
const SHORT: usize = 16;
/// A line of the cache has as many elements at most, of a size at which that matters.
const LINE: usize = 16;

pub(crate) fn scatter(g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout) -> Result<()> {
    with_host(&[&g.x.storage, &g.index.storage], &[&target.storage], |reads, writes| {
        check(g.op, g.index, reads[1], &g.index_layout, g.size, g.wraps)?;
        let strides = [&g.x_layout.strides[..], &g.index_layout.strides[..], &layout.strides[..]];
        let write = Write {
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
        }
        match (combine, target.dtype) {
            (Combine::Set, dtype) => match dtype.size() {
                1 => run!(u8, |_, new| new),
                2 => run!(u16, |_, new| new),
                4 => run!(u32, |_, new| new),
                _ => run!(u64, |_, new| new),
            },
            (Combine::Add, DType::F32) => run!(f32, |old, new| old + new),
            (_, DType::F32) => run!(f32, |old, new| combine.of(old, new)),
            (_, DType::F64) => run!(f64, |old, new| combine.of(old, new)),
            (_, DType::I64) => run!(i64, |old, new| combine.of(old, new)),
            (_, DType::F16) => run!(f16, |old: f16, new| f16::from_f32(combine.of(old.to_f32(), new.to_f32()))),
            (_, DType::BF16) => run!(bf16, |old: bf16, new| bf16::from_f32(combine.of(old.to_f32(), new.to_f32()))),
            (_, DType::I32) => run!(i32, |old, new| combine.of(i64::from(old), i64::from(new)) as i32),
            (_, DType::U32) => run!(u32, |old, new| combine.of(i64::from(old), i64::from(new)) as u32),
            (_, DType::U8) => run!(u8, |old, new| combine.of(i64::from(old), i64::from(new)) as u8),
            (_, DType::Bool) => {
                run!(u8, |old, new| u8::from(combine.of(i64::from(old != 0), i64::from(new != 0)) != 0));
            }
        }
        Ok(())
    })?
}

/// Elements on their way to positions that are all in range.
struct Write<'a> {
    g: &'a Indexed<'a>,
    indices: Indices<'a>,
    /// Over source, index and target, whose stride is 0 along the indexed dim.
    strided: StridedDims,
    starts: [isize; 3],
    count: usize,
}

impl Write<'_> {
    fn run<T: bytemuck::Pod + Send + Sync>(&self, x: &[T], to: &mut [T], f: impl Fn(T, T) -> T + Copy + Sync) {
        if self.count > JOB {
            if let Some((stride, row_len)) = self.rows() {
                let (rows, start) = (self.strided.dims[0], self.starts[2] as usize);
                let each = self.count / rows;
                let some = JOB.div_ceil(each);
                let to = &mut to[start..start + (rows - 1) * stride + row_len];
                return parallel::for_each_chunk(to, some * stride, |i, to| {
                    let first = i * some;
                    self.part(x, first * each, some.min(rows - first) * each, to, start + first * stride, f);
                });
            }
            if let Some(columns) = self.columns() {
                return self.by_columns(x, to, columns, f);
            }
        }
        self.part(x, 0, self.count, to, 0, f);
    }

    /// Where positions along the first dim go to pieces of the target that lie one behind the other: from one to the next,
    /// and the length of one.
    fn rows(&self) -> Option<(usize, usize)> {
        let stride = self.strided.strides[2].first().copied().filter(|&stride| stride > 0)?;
        let others = self.strided.dims.iter().zip(&self.strided.strides[2]).skip(1).map(|(&n, &s)| (n, s));
        let mut row_len = 1;
        for (n, step) in others.chain([(self.g.size, self.g.step)]) {
            row_len += (n - 1) * usize::try_from(step).ok()?;
        }
        (row_len <= stride as usize).then_some((stride as usize, row_len))
    }

    /// How many columns the target has where only the last dim steps through it, one element at a time, and the index names
    /// rows.
    fn columns(&self) -> Option<usize> {
        let (&last, others) = self.strided.strides[2].split_last()?;
        let columns = *self.strided.dims.last()?;
        let rows = last == 1 && others.iter().all(|&s| s == 0) && self.g.step >= columns as isize;
        let short = self.strided.strides[1].last() == Some(&0) && columns < SHORT;
        (rows && !short).then_some(columns)
    }

    /// The run of elements at `first..first + len`, in order. `to` begins with element `origin` of the target.
    fn part<T: bytemuck::Pod>(
        &self,
        x: &[T],
        first: usize,
        len: usize,
        to: &mut [T],
        origin: usize,
        f: impl Fn(T, T) -> T + Copy,
    ) {
        let (g, mut tile) = (self.g, [0; SOME]);
        let steps = [0, 1, 2].map(|k| self.strided.strides[k].last().copied().unwrap_or(0));
        self.strided.runs(first, len, |_, offsets, n| {
            let [from, index, at] = [0, 1, 2].map(|k| self.starts[k] + offsets[k]);
            let at = at - origin as isize;
            if steps[1] == 0 && steps[2] == 1 {
                let start = at + g.wrapped(self.indices.one(index)) as isize * g.step;
                return merge(&mut to[start as usize..][..n], x, from, steps[0], f);
            }
            self.indices.each(&mut tile, index, steps[1], n, |done, indices| {
                let from = from + done as isize * steps[0];
                if steps[0] == 1 && steps[2] == 0 && g.step == 1 {
                    let line = &mut to[at as usize..][..g.size];
                    for (&index, &new) in indices.iter().zip(&x[from as usize..][..indices.len()]) {
                        let element = &mut line[g.wrapped(index)];
                        *element = f(*element, new);
                    }
                    return;
                }
                for (i, &index) in indices.iter().enumerate() {
                    let position = at + (done + i) as isize * steps[2] + g.wrapped(index) as isize * g.step;
                    let element = &mut to[position as usize];
                    *element = f(*element, x[(from + i as isize * steps[0]) as usize]);
                }
            });
        });
    }

    /// Of rows of the target that indices name, `columns` wide: a thread has some columns where each has indices of its own,
    /// else some rows, and passes over the indices of others.
    fn by_columns<T: bytemuck::Pod + Send + Sync>(
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
            let rows = g.size.div_ceil(PARTS * threads());
            return parallel::for_each_chunk(to, rows * pitch, |part, to| {
                let (mine, mut tile) = (part * rows..(part + 1) * rows, [0; SOME]);
                over.runs(0, lines, |_, offsets, n| {
                    self.indices.each(&mut tile, self.starts[1] + offsets[1], index_next, n, |done, indices| {
                        for (i, position) in indices.iter().map(|&index| g.wrapped(index)).enumerate() {
                            if mine.contains(&position) {
                                let from = self.starts[0] + offsets[0] + (done + i) as isize * next;
                                merge(&mut to[(position - mine.start) * pitch..][..columns], x, from, step, f);
                            }
                        }
                    });
                });
            });
        }
        let width = columns.div_ceil(threads()).next_multiple_of(LINE).min(NARROW);
        for_each_band(to, (g.size, pitch, columns), width, |first, mut band| {
            let (n, mut tile) = (width.min(columns - first), [0; SOME]);
            over.runs(0, lines, |_, offsets, count| {
                for i in 0..count as isize {
                    let from = self.starts[0] + offsets[0] + i * next + first as isize * step;
                    let index = self.starts[1] + offsets[1] + i * index_next + first as isize * index_step;
                    self.indices.each(&mut tile, index, index_step, n, |done, indices| {
                        let from = from + done as isize * step;
                        let to = indices.iter().map(|&index| g.wrapped(index)).enumerate();
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

/// Elements of `x` from `from` on into those of `to`.
#[inline(always)]
fn merge<T: Copy>(to: &mut [T], x: &[T], from: isize, step: isize, f: impl Fn(T, T) -> T) {
    if step == 1 {
        let x = &x[from as usize..][..to.len()];
        return to.iter_mut().zip(x).for_each(|(element, &new)| *element = f(*element, new));
    }
    to.iter_mut().enumerate().for_each(|(i, element)| *element = f(*element, x[(from + i as isize * step) as usize]));
}
