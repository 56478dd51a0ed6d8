//! Windows on the CPU (unfold, fold, pooling): planes (one channel of one image) are partitioned among threads.

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::map;
use crate::backend::cpu::pool_taps::{Taps, greater, greatest, means, spread};
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::map::{Formulas, Params};
use crate::backend::problem::windows::{Task, Windows};
use crate::device::cpu::parallel;
use crate::expr::Expr;
use crate::storage::with_host;
use crate::{Compute, DType, Result, Tensor};

/// Elements a job of the pool has.
const JOB: usize = 1 << 14;

pub(crate) fn unfold(w: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()> {
    with_host(&[&x.storage], &[&out.storage], |reads, writes| {
        let to = &mut *writes[0];
        match x.dtype.size() {
            1 => unfold_as::<u8>(w, x, reads[0], bytemuck::cast_slice_mut(to), inside),
            2 => unfold_as::<u16>(w, x, reads[0], bytemuck::cast_slice_mut(to), inside),
            4 => unfold_as::<u32>(w, x, reads[0], bytemuck::cast_slice_mut(to), inside),
            _ => unfold_as::<u64>(w, x, reads[0], bytemuck::cast_slice_mut(to), inside),
        }
    })
}

/// Elements as bits of their size: one tap of one channel of one image is a plane of the result.
fn unfold_as<T: bytemuck::Pod + Send + Sync>(w: &Windows, x: &Tensor, bytes: &[u8], out: &mut [T], inside: bool) {
    let from: &[T] = bytemuck::cast_slice(bytes);
    let (n, c) = (x.shape().dims()[0], x.shape().dims()[1]);
    let ([kh, kw], plane) = (w.kernel, w.grid[0] * w.grid[1]);
    let count = n * c * kh * kw;
    let strides = x.strides();
    let one = |i: usize, out: &mut [T]| {
        let (batch, channel, tap) = match inside {
            true => (i % n, i / n / (kh * kw), i / n % (kh * kw)),
            false => (i / (kh * kw) / c, i / (kh * kw) % c, i % (kh * kw)),
        };
        let (row_tap, column_tap) = (tap / kw, tap % kw);
        let ((top, bottom), (left, right)) = (w.inside(0, row_tap), w.inside(1, column_tap));
        // Where element 0, 0 of the unpadded grid would be.
        let origin = x.layout.offset as isize
            + batch as isize * strides[0]
            + channel as isize * strides[1]
            + (row_tap * w.dilation[0]) as isize * strides[2]
            + (column_tap * w.dilation[1]) as isize * strides[3]
            - w.padding[0] as isize * strides[2]
            - w.padding[1] as isize * strides[3];
        let step = w.stride[1] as isize * strides[3];
        for (oh, row) in out.chunks_mut(w.grid[1]).enumerate() {
            if oh < top || oh >= bottom || left >= right {
                row.fill(T::zeroed());
                continue;
            }
            row[..left].fill(T::zeroed());
            row[right..].fill(T::zeroed());
            let start = origin + (oh * w.stride[0]) as isize * strides[2] + left as isize * step;
            let row = &mut row[left..right];
            match step {
                1 => row.copy_from_slice(&from[start as usize..][..row.len()]),
                _ => row.iter_mut().enumerate().for_each(|(j, y)| *y = from[(start + j as isize * step) as usize]),
            }
        }
    };
    pieces(&mut out[..count * plane], plane, one);
}

/// Calls `f` with each plane of `out`; several planes a job where they are small.
fn pieces<T: Send>(out: &mut [T], plane: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let per_job = JOB.div_ceil(plane).max(1);
    let job = |i: usize, out: &mut [T]| {
        out.chunks_mut(plane).enumerate().for_each(|(j, out)| f(i * per_job + j, out));
    };
    match out.len() <= JOB {
        true => job(0, out),
        false => parallel::for_each_chunk(out, per_job * plane, job),
    }
}

pub(crate) fn fold(w: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> {
    with_host(&[&columns.storage], &[&out.storage], |reads, writes| match out.dtype.compute() {
        Compute::F32 => fold_as::<f32>(w, columns, reads[0], writes[0]),
        Compute::F64 => fold_as::<f64>(w, columns, reads[0], writes[0]),
        Compute::I64 => fold_as::<i64>(w, columns, reads[0], writes[0]),
    })
}

fn fold_as<C: Number>(w: &Windows, columns: &Tensor, bytes: &[u8], out: &mut [u8]) {
    let (dims, s) = (columns.shape().dims(), columns.strides());
    let (zero, [rows, width]) = (C::from_i32(0), w.image);
    let one = |i: usize, out: &mut [u8]| {
        let (mut sums, mut row) = (vec![zero; rows * width], vec![zero; w.grid[1]]);
        let start = columns.layout.offset as isize + (i / dims[1]) as isize * s[0] + (i % dims[1]) as isize * s[1];
        for kh in 0..w.kernel[0] {
            let (top, bottom) = w.inside(0, kh);
            for kw in 0..w.kernel[1] {
                let (left, right) = w.inside(1, kw);
                if left == right {
                    continue;
                }
                let row = &mut row[..right - left];
                for oh in top..bottom {
                    let at =
                        start + kh as isize * s[2] + kw as isize * s[3] + oh as isize * s[4] + left as isize * s[5];
                    load_tile(columns.dtype, bytes, at as _, s[5], row);
                    let h = oh * w.stride[0] + kh * w.dilation[0] - w.padding[0];
                    for (j, x) in row.iter().enumerate() {
                        let v = (left + j) * w.stride[1] + kw * w.dilation[1] - w.padding[1];
                        sums[h * width + v] = sums[h * width + v].add(*x);
                    }
                }
            }
        }
        store_tile(columns.dtype, &sums, out, 0, 1);
    };
    let size = columns.dtype.size();
    pieces(&mut out[..dims[0] * dims[1] * rows * width * size], rows * width * size, one);
}

pub(crate) fn run(w: &Windows, task: Task, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
    if !out.is_contiguous() {
        return in_planes(w, task, x, index, out);
    }
    let job = PoolJob { w, x, task };
    if task == Task::Max {
        return with_host(&[&x.storage], &[&out.storage, &index.storage], |reads, writes| {
            let [values, indices] = writes else { unreachable!("two were given") };
            match x.dtype.compute() {
                Compute::F32 => job.greatest::<f32>(reads[0], values, indices),
                Compute::F64 => job.greatest::<f64>(reads[0], values, indices),
                Compute::I64 => job.greatest::<i64>(reads[0], values, indices),
            }
        });
    }
    with_host(&[&x.storage, &index.storage], &[&out.storage], |reads, writes| {
        let start = index.layout.offset;
        // Read for its dtype only where it is an index.
        let indices: &[i64] = if task == Task::MaxBackward { &bytemuck::cast_slice(reads[1])[start..] } else { &[] };
        match x.dtype.compute() {
            Compute::F64 => job.others::<f64>(reads[0], indices, writes[0]),
            _ => job.others::<f32>(reads[0], indices, writes[0]),
        }
    })
}

/// [`run`] where channels are innermost: by planes, as what is computed has them, and copies between the orders.
fn in_planes(w: &Windows, task: Task, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
    let rows = |t: &Tensor| Tensor::empty_like_shape(t.shape(), t.dtype, t.device());
    let copy = |from: &Tensor, to: &Tensor| {
        let (inputs, exprs, outputs) = (&[from], &[Expr::input(0)], &[to]);
        map::formulas(&Formulas { op: "copy", inputs, params: Params::default(), exprs, outputs })
    };
    let moves = matches!(task, Task::Max | Task::MaxBackward) && !index.is_contiguous();
    let (planes, indices) = (rows(out)?, if moves { rows(index)? } else { index.detach() });
    if moves && task == Task::MaxBackward {
        copy(index, &indices)?;
    }
    run(w, task, x, &indices, &planes)?;
    if moves && task == Task::Max {
        copy(&indices, index)?;
    }
    copy(&planes, out)
}

struct PoolJob<'a> {
    w: &'a Windows,
    x: &'a Tensor,
    task: Task,
}

impl PoolJob<'_> {
    /// Plane i of what is read, in the compute type: where it lies if it can be read there, otherwise in `buffer`.
    fn plane<'b, C: Number>(&self, bytes: &'b [u8], i: usize, buffer: &'b mut Vec<C>) -> &'b [C] {
        let (dims, s) = (self.x.shape().dims(), self.x.strides());
        let start = self.x.layout.offset as isize + (i / dims[1]) as isize * s[0] + (i % dims[1]) as isize * s[1];
        if s[3] == 1 && s[2] == dims[3] as isize && self.x.dtype == C::COMPUTE.dtype() {
            return &bytemuck::cast_slice(bytes)[start as usize..][..dims[2] * dims[3]];
        }
        buffer.resize(dims[2] * dims[3], C::from_i32(0));
        for (h, row) in buffer.chunks_mut(dims[3]).enumerate() {
            load_tile(self.x.dtype, bytes, (start + h as isize * s[2]) as _, s[3], row);
        }
        buffer
    }

    fn greatest<C: Number>(&self, bytes: &[u8], values: &mut [u8], indices: &mut [u8]) {
        let (w, dims, dtype) = (self.w, self.x.shape().dims(), self.x.dtype);
        let count = w.grid[0] * w.grid[1];
        let (planes, taps) = (dims[0] * dims[1], Taps::new(w));
        let firsts: Vec<i64> =
            (0..count).map(|o| (w.span(0, o / w.grid[1]).0 * w.image[1] + w.span(1, o % w.grid[1]).0) as i64).collect();
        let per_job = match planes * count * w.kernel[0] * w.kernel[1] <= JOB {
            true => planes,
            false => (JOB / 4).div_ceil(w.image[0] * w.image[1]),
        };
        let mut results =
            [&mut values[..planes * count * dtype.size()], &mut indices[..planes * count * size_of::<i64>()]];
        let sizes = [per_job * count * dtype.size(), per_job * count * size_of::<i64>()];
        parallel::for_each_chunks(&mut results, &sizes, |i, chunks| {
            let [values, indices] = chunks else { unreachable!("two were given") };
            let (mut buffer, mut best) = (Vec::new(), vec![C::from_i32(0); count]);
            let mut picked = vec![C::from_i32(0); w.grid[1]];
            let indices: &mut [i64] = bytemuck::cast_slice_mut(indices);
            for (j, (values, at)) in values.chunks_mut(count * dtype.size()).zip(indices.chunks_mut(count)).enumerate()
            {
                let plane = self.plane::<C>(bytes, i * per_job + j, &mut buffer);
                best.fill(C::from_f64(f64::NEG_INFINITY));
                at.copy_from_slice(&firsts);
                match w.adaptive {
                    true => self.greatest_each(plane, &mut best, at),
                    false => greatest(&taps, plane, &mut picked, &mut best, at),
                }
                store_tile(dtype, &best, values, 0, 1);
            }
        });
    }

    /// The greatest elements of windows that differ in size.
    fn greatest_each<C: Number>(&self, plane: &[C], best: &mut [C], at: &mut [i64]) {
        let w = self.w;
        for (o, (best, at)) in best.iter_mut().zip(at).enumerate() {
            let ((top, bottom), (left, right)) = (w.span(0, o / w.grid[1]), w.span(1, o % w.grid[1]));
            for h in top..bottom {
                for v in left..right {
                    greater(best, at, plane[h * w.image[1] + v], (h * w.image[1] + v) as i64);
                }
            }
        }
    }

    /// Means and gradients.
    fn others<C: Number>(&self, bytes: &[u8], indices: &[i64], out: &mut [u8]) {
        let (w, dims) = (self.w, self.x.shape().dims());
        let (windows, elements) = (w.grid[0] * w.grid[1], w.image[0] * w.image[1]);
        let made = if let Task::Mean(_) = self.task { windows } else { elements };
        let inside = |o: usize| {
            let ((top, bottom), (left, right)) = (w.span(0, o / w.grid[1]), w.span(1, o % w.grid[1]));
            (top..bottom).flat_map(move |h| (left..right).map(move |v| h * w.image[1] + v))
        };
        let shares: Vec<C> = match self.task {
            Task::Mean(divisor) | Task::MeanBackward(divisor) => {
                (0..windows).map(|o| C::from_i64(w.divisor([o / w.grid[1], o % w.grid[1]], divisor) as i64)).collect()
            }
            _ => Vec::new(),
        };
        let (zero, size, taps) = (C::from_i32(0), DType::size(self.x.dtype), Taps::new(w));
        let several = |first: usize, out: &mut [u8]| {
            let (mut buffer, mut result, mut picked) = (Vec::new(), vec![zero; made], vec![zero; w.grid[1]]);
            let mut scaled = vec![zero; if let Task::MeanBackward(_) = self.task { windows } else { 0 }];
            for (i, out) in out.chunks_mut(made * size).enumerate() {
                let plane = self.plane::<C>(bytes, first + i, &mut buffer);
                result.fill(zero);
                let result = &mut result[..];
                match self.task {
                    Task::Mean(_) if !w.adaptive => means(&taps, plane, &mut picked, &shares, result),
                    Task::MeanBackward(_) if !w.adaptive => {
                        spread(&taps, plane, &shares, &mut scaled, result);
                    }
                    Task::Mean(_) => result.iter_mut().zip(&shares).enumerate().for_each(|(o, (y, share))| {
                        *y = inside(o).fold(*y, |sum, at| sum.add(plane[at])).div(*share);
                    }),
                    Task::MeanBackward(_) => plane.iter().zip(&shares).enumerate().for_each(|(o, (g, share))| {
                        let g = g.div(*share);
                        inside(o).for_each(|at| result[at] = result[at].add(g));
                    }),
                    Task::MaxBackward => plane.iter().zip(&indices[(first + i) * windows..]).for_each(|(g, &at)| {
                        result[at as usize] = result[at as usize].add(*g);
                    }),
                    Task::Max => unreachable!("has two results"),
                }
                store_tile(self.x.dtype, result, out, 0, 1);
            }
        };
        let out = &mut out[..dims[0] * dims[1] * made * size];
        let per_job = (JOB / 4).div_ceil(elements.max(windows));
        match dims[0] * dims[1] * elements.max(windows) <= JOB {
            true => several(0, out),
            false => parallel::for_each_chunk(out, per_job * made * size, |i, out| several(i * per_job, out)),
        }
    }
}
