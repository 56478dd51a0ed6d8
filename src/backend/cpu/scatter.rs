//! Scatters on the CPU. Writes to the same element happen in the order of the indices for any number of threads, because each thread owns
//! some rows or columns of the target.

use bytemuck::{cast_slice, cast_slice_mut};
use half::{bf16, f16};

use crate::backend::cpu::dispatch::for_size;
use crate::backend::cpu::gather::{INDEX_TILE_LEN, Indexed, Indices, JOB_ELEMENTS, check_range};
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::index::Combine;
use crate::device::cpu::blocks::{BlockPartition, for_each_block};
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{DType, Result, Tensor};

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

pub(crate) fn scatter(g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout) -> Result<()> {
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
        }
        match (combine, target.dtype) {
            (Combine::Set, dtype) => for_size!(dtype.size(), T => run!(T, |_, new| new)),
            (Combine::Add, DType::F32) => run!(f32, |old, new| old + new),
            (_, DType::F32) => run!(f32, |old, new| combine_elements(combine, old, new)),
            (_, DType::F64) => run!(f64, |old, new| combine_elements(combine, old, new)),
            (_, DType::I64) => run!(i64, |old, new| combine_elements(combine, old, new)),
            (_, DType::F16) => {
                run!(f16, |old: f16, new| f16::from_f32(combine_elements(combine, old.to_f32(), new.to_f32())))
            }
            (_, DType::BF16) => {
                run!(bf16, |old: bf16, new| bf16::from_f32(combine_elements(combine, old.to_f32(), new.to_f32())))
            }
            (_, DType::I32) => run!(i32, |old, new| combine_elements(combine, i64::from(old), i64::from(new)) as i32),
            (_, DType::U32) => run!(u32, |old, new| combine_elements(combine, i64::from(old), i64::from(new)) as u32),
            (_, DType::U8) => run!(u8, |old, new| combine_elements(combine, i64::from(old), i64::from(new)) as u8),
            (_, DType::Bool) => {
                run!(u8, |old, new| u8::from(combine_elements(combine, i64::from(old != 0), i64::from(new != 0)) != 0));
            }
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
    fn run<T: bytemuck::Pod + Send + Sync>(&self, x: &[T], to: &mut [T], f: impl Fn(T, T) -> T + Copy + Sync) {
        if self.count > JOB_ELEMENTS {
            if let Some((stride, row_len)) = self.row_pieces() {
                let (rows, start) = (self.strided.dims[0], self.starts[2] as usize);
                let each = self.count / rows;
                let some = JOB_ELEMENTS.div_ceil(each);
                let to = &mut to[start..start + (rows - 1) * stride + row_len];
                return parallel::for_each_chunk(to, some * stride, |i, to| {
                    let first = i * some;
                    self.scatter_range(x, first * each, some.min(rows - first) * each, to, start + first * stride, f);
                });
            }
            if let Some(columns) = self.row_columns() {
                return self.scatter_rows(x, to, columns, f);
            }
        }
        self.scatter_range(x, 0, self.count, to, 0, f);
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

    /// Writes the elements `first..first + len` of the source, in order. `to[0]` is element `origin` of the target.
    fn scatter_range<T: bytemuck::Pod>(
        &self,
        x: &[T],
        first: usize,
        len: usize,
        to: &mut [T],
        origin: usize,
        f: impl Fn(T, T) -> T + Copy,
    ) {
        let (g, mut tile) = (self.g, [0; INDEX_TILE_LEN]);
        let steps = [0, 1, 2].map(|k| self.strided.strides[k].last().copied().unwrap_or(0));
        self.strided.for_each_run(first, len, |_, offsets, n| {
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
    fn scatter_rows<T: bytemuck::Pod + Send + Sync>(
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
                    self.indices.for_each_tile(
                        &mut tile,
                        self.starts[1] + offsets[1],
                        index_next,
                        n,
                        |done, indices| {
                            for (i, position) in indices.iter().map(|&index| g.resolve(index)).enumerate() {
                                if mine.contains(&position) {
                                    let from = self.starts[0] + offsets[0] + (done + i) as isize * next;
                                    combine_slice(
                                        &mut to[(position - mine.start) * pitch..][..columns],
                                        x,
                                        from,
                                        step,
                                        f,
                                    );
                                }
                            }
                        },
                    );
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
