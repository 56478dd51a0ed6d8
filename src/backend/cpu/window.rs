//! im2col, col2im and pooling on the CPU. Planes (one channel of one image) are partitioned among threads. In pooling, each kernel tap is
//! applied to a whole row of windows at a time, so that loops run over rows of the image. Every window still receives its taps in row-major
//! order.

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::dispatch::{for_compute, for_float, for_size, vectorised};
use crate::backend::cpu::map;
use crate::backend::cpu::scalar::{Number, is_nan};
use crate::backend::problem::map::{Formulas, Params};
use crate::backend::problem::windows::{Im2col, PoolTask, Pooling, Windows};
use crate::device::cpu::parallel;
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 14;
/// Maximum number of elements of a plane that is pooled as a whole; larger planes are pooled in parts.
const MAX_PLANE_ELEMENTS: usize = 1 << 17;

pub(crate) fn im2col(i: &Im2col) -> Result<()> {
    with_host(&[&i.x.storage], &[&i.out.storage], |reads, writes| {
        let to = &mut *writes[0];
        for_size!(i.x.dtype.size(), T => im2col_as::<T>(i, reads[0], bytemuck::cast_slice_mut(to)));
    })
}

/// Gathers elements as values of type `T`, which has the size of the dtype. One tap of one channel of one image is a plane of the result.
fn im2col_as<T: bytemuck::Pod + Send + Sync>(i: &Im2col, bytes: &[u8], out: &mut [T]) {
    let (&Im2col { windows: w, x, inside, .. }, from) = (i, bytemuck::cast_slice::<u8, T>(bytes));
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
        let ((top, bottom), (left, right)) = (w.windows_inside(0, row_tap), w.windows_inside(1, column_tap));
        // The offset of the element that this tap reads in the first window. The element may be in the padding.
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
    for_each_plane(&mut out[..count * plane], plane, one);
}

/// Calls `f` with the index and the elements of each plane of `out`; one job computes several small planes.
fn for_each_plane<T: Send>(out: &mut [T], plane: usize, f: impl Fn(usize, &mut [T]) + Sync) {
    let per_job = JOB_ELEMENTS.div_ceil(plane).max(1);
    parallel::for_each_chunk(out, per_job * plane, |i, out| {
        out.chunks_mut(plane).enumerate().for_each(|(j, out)| f(i * per_job + j, out));
    });
}

pub(crate) fn col2im(w: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> {
    with_host(&[&columns.storage], &[&out.storage], |reads, writes| {
        for_compute!(out.dtype.compute(), C => col2im_as::<C>(w, columns, reads[0], writes[0]));
    })
}

fn col2im_as<C: Number>(w: &Windows, columns: &Tensor, bytes: &[u8], out: &mut [u8]) {
    let (dims, s) = (columns.shape().dims(), columns.strides());
    let (zero, [rows, width]) = (C::from_i32(0), w.image);
    let one = |i: usize, out: &mut [u8]| {
        let (mut sums, mut row) = (vec![zero; rows * width], vec![zero; w.grid[1]]);
        let start = columns.layout.offset as isize + (i / dims[1]) as isize * s[0] + (i % dims[1]) as isize * s[1];
        for kh in 0..w.kernel[0] {
            let (top, bottom) = w.windows_inside(0, kh);
            for kw in 0..w.kernel[1] {
                let (left, right) = w.windows_inside(1, kw);
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
    for_each_plane(&mut out[..dims[0] * dims[1] * rows * width * size], rows * width * size, one);
}

pub(crate) fn pool(p: &Pooling) -> Result<()> {
    let &Pooling { task, x, index, out, .. } = p;
    if !out.is_contiguous() {
        return pool_channels_last(p);
    }
    if task == PoolTask::Max {
        return with_host(&[&x.storage], &[&out.storage, &index.storage], |reads, writes| {
            let [values, indices] = writes else { unreachable!("two were given") };
            for_compute!(x.dtype.compute(), C => p.max_pool::<C>(reads[0], values, indices));
        });
    }
    with_host(&[&x.storage, &index.storage], &[&out.storage], |reads, writes| {
        let start = index.layout.offset;
        // `index` is a tensor of indices only for `MaxBackward`.
        let indices: &[i64] =
            if task == PoolTask::MaxBackward { &bytemuck::cast_slice(reads[1])[start..] } else { &[] };
        for_float!(x.dtype.compute(), C => p.average_or_gradient::<C>(reads[0], indices, writes[0]));
    })
}

/// Pools like [`pool`] into a channels-last result: computes plane by plane into contiguous tensors, and copies between the memory
/// formats.
fn pool_channels_last(p: &Pooling) -> Result<()> {
    let &Pooling { task, index, out, .. } = p;
    let rows = |t: &Tensor| Tensor::empty_with_shape(t.shape(), t.dtype, t.device());
    let copy = |from: &Tensor, to: &Tensor| {
        let (inputs, read, outputs) = (&[from], [Expr::input(0)], &[to]);
        let program = &Program::shared(&read);
        map::run_formulas(&Formulas { op: "copy", inputs, params: Params::default(), program, outputs })
    };
    let moves = matches!(task, PoolTask::Max | PoolTask::MaxBackward) && !index.is_contiguous();
    let (planes, indices) = (rows(out)?, if moves { rows(index)? } else { index.detach() });
    if moves && task == PoolTask::MaxBackward {
        copy(index, &indices)?;
    }
    pool(&Pooling { index: &indices, out: &planes, ..*p })?;
    if moves && task == PoolTask::Max {
        copy(&indices, index)?;
    }
    copy(&planes, out)
}

impl Pooling<'_> {
    /// Returns the elements of plane `i` that the part reads, in the compute type: in place if they already have that type and are
    /// contiguous, otherwise converted into `buffer`.
    fn plane<'b, C: Number>(&self, bytes: &'b [u8], i: usize, part: &WindowRows, buffer: &'b mut Vec<C>) -> &'b [C] {
        let (dims, s, [rows, columns]) = (self.x.shape().dims(), self.x.strides(), part.image);
        let first = [i / dims[1], i % dims[1], part.first[0], part.first[1]];
        let start = first.iter().zip(s).fold(self.x.layout.offset as isize, |at, (&i, s)| at + i as isize * s);
        if s[3] == 1 && (rows == 1 || s[2] == columns as isize) && self.x.dtype == C::COMPUTE.dtype() {
            return &bytemuck::cast_slice(bytes)[start as usize..][..rows * columns];
        }
        buffer.resize(rows * columns, C::from_i32(0));
        for (h, row) in buffer.chunks_mut(columns.max(1)).enumerate() {
            load_tile(self.x.dtype, bytes, (start + h as isize * s[2]) as _, s[3], row);
        }
        buffer
    }

    /// Returns the number of windows computed at a time: all windows of a plane, or a few rows of a large plane.
    fn windows_at_once(&self) -> usize {
        let (w, windows) = (self.windows, self.windows.grid[0] * self.windows.grid[1]);
        let parts = windows.max(w.image[0] * w.image[1]).div_ceil(MAX_PLANE_ELEMENTS);
        let step = if WindowRows::split_dim(w) == 0 { w.grid[1] } else { 1 };
        if parts <= 1 { windows } else { windows.div_ceil(parts).next_multiple_of(step).min(windows) }
    }

    fn max_pool<C: Number>(&self, bytes: &[u8], values: &mut [u8], indices: &mut [u8]) {
        let (w, dims, dtype) = (self.windows, self.x.shape().dims(), self.x.dtype);
        let (planes, count, at_once) = (dims[0] * dims[1], w.grid[0] * w.grid[1], self.windows_at_once());
        let first =
            |o: usize| (w.input_range(0, o / w.grid[1]).0 * w.image[1] + w.input_range(1, o % w.grid[1]).0) as i64;
        let of_whole: Vec<i64> = if at_once == count { (0..count).map(first).collect() } else { Vec::new() };
        // Computes windows beginning with window `o`, of planes beginning with plane `plane`. There are several planes only if `o..`
        // covers all windows.
        let compute_planes = |plane: usize, o: usize, chunks: &mut [&mut [u8]]| {
            let [values, indices] = chunks else { unreachable!("two were given") };
            let indices: &mut [i64] = bytemuck::cast_slice_mut(indices);
            let made = indices.len().min(at_once);
            let part = WindowRows::new(w, o, made);
            let (taps, skipped) = (Taps::new(&part.windows), (part.first[0] * w.image[1] + part.first[1]) as i64);
            let (mut buffer, mut best) = (Vec::new(), vec![C::from_i32(0); made]);
            let mut gathered = vec![C::from_i32(0); part.windows.grid[1]];
            for (j, (values, at)) in values.chunks_mut(made * dtype.size()).zip(indices.chunks_mut(made)).enumerate() {
                let elements = self.plane::<C>(bytes, plane + j, &part, &mut buffer);
                best.fill(C::from_f64(f64::NEG_INFINITY));
                match at_once == count {
                    true => at.copy_from_slice(&of_whole),
                    false => at.iter_mut().enumerate().for_each(|(i, at)| *at = first(o + i) - skipped),
                }
                match w.adaptive {
                    true => self.adaptive_max_pool(elements, o, skipped as usize, &mut best, at),
                    false => max_pool_plane(&taps, elements, &mut gathered, &mut best, at),
                }
                if skipped > 0 {
                    at.iter_mut().for_each(|at| *at += skipped);
                }
                store_tile(dtype, &best, values, 0, 1);
            }
        };
        let sizes = [dtype.size(), size_of::<i64>()];
        let [values, indices] =
            [(values, sizes[0]), (indices, sizes[1])].map(|(t, size)| &mut t[..planes * count * size]);
        if at_once < count {
            let planes = values.chunks_mut(count * sizes[0]).zip(indices.chunks_mut(count * sizes[1]));
            return planes.enumerate().for_each(|(plane, (values, indices))| {
                let each = |i: usize, chunks: &mut [&mut [u8]]| compute_planes(plane, i * at_once, chunks);
                parallel::for_each_chunks(&mut [values, indices], &sizes.map(|size| at_once * size), each);
            });
        }
        let per_job = match planes * count * w.kernel[0] * w.kernel[1] <= JOB_ELEMENTS {
            true => planes,
            false => (JOB_ELEMENTS / 4).div_ceil(w.image[0] * w.image[1]),
        };
        let each = |i: usize, chunks: &mut [&mut [u8]]| compute_planes(i * per_job, 0, chunks);
        parallel::for_each_chunks(&mut [values, indices], &sizes.map(|size| per_job * count * size), each);
    }

    /// Computes the maxima of windows of different sizes, beginning with window `first`. `plane` starts at element `skipped` of the whole
    /// plane.
    fn adaptive_max_pool<C: Number>(&self, plane: &[C], first: usize, skipped: usize, best: &mut [C], at: &mut [i64]) {
        let w = self.windows;
        for (o, (best, at)) in best.iter_mut().zip(at).enumerate() {
            let ((top, bottom), (left, right)) =
                (w.input_range(0, (first + o) / w.grid[1]), w.input_range(1, (first + o) % w.grid[1]));
            for h in top..bottom {
                for v in left..right {
                    let place = h * w.image[1] + v - skipped;
                    update_max(best, at, plane[place], place as i64);
                }
            }
        }
    }

    /// Computes average pooling, or the gradient of average or maximum pooling.
    fn average_or_gradient<C: Number>(&self, bytes: &[u8], indices: &[i64], out: &mut [u8]) {
        let (w, dims) = (self.windows, self.x.shape().dims());
        let (windows, elements) = (w.grid[0] * w.grid[1], w.image[0] * w.image[1]);
        // Gradients are computed for whole planes.
        let (made, at_once) = match self.task {
            PoolTask::Mean(_) => (windows, self.windows_at_once()),
            _ => (elements, windows),
        };
        let inside = |o: usize| {
            let ((top, bottom), (left, right)) = (w.input_range(0, o / w.grid[1]), w.input_range(1, o % w.grid[1]));
            (top..bottom).flat_map(move |h| (left..right).map(move |v| h * w.image[1] + v))
        };
        let divisors = |first: usize, count: usize| -> Vec<C> {
            let (PoolTask::Mean(divisor) | PoolTask::MeanBackward(divisor)) = self.task else { return Vec::new() };
            let of = |o: usize| C::from_i64(w.divisor([o / w.grid[1], o % w.grid[1]], divisor) as i64);
            (first..first + count).map(of).collect()
        };
        let of_whole = if at_once == windows { divisors(0, windows) } else { Vec::new() };
        let (zero, size) = (C::from_i32(0), DType::size(self.x.dtype));
        // Computes windows beginning with window `o`, of planes beginning with plane `plane`. There are several planes only if `o..`
        // covers all windows.
        let compute_planes = |plane: usize, o: usize, out: &mut [u8]| {
            let count = if at_once == windows { windows } else { out.len() / size };
            let part = match self.task {
                PoolTask::Mean(_) => WindowRows::new(w, o, count),
                _ => WindowRows { windows: *w, first: [0; 2], image: w.grid },
            };
            let made = if at_once == windows { made } else { count };
            let of_part = if at_once == windows { Vec::new() } else { divisors(o, count) };
            let part_divisors = if at_once == windows { &of_whole } else { &of_part };
            let (taps, skipped) = (Taps::new(&part.windows), part.first[0] * w.image[1] + part.first[1]);
            let (mut buffer, mut result) = (Vec::new(), vec![zero; made]);
            let mut gathered = vec![zero; part.windows.grid[1]];
            let mut scaled = vec![zero; if let PoolTask::MeanBackward(_) = self.task { windows } else { 0 }];
            for (i, out) in out.chunks_mut(made * size).enumerate() {
                let plane_i = plane + i;
                let plane = self.plane::<C>(bytes, plane_i, &part, &mut buffer);
                result.fill(zero);
                let result = &mut result[..];
                match self.task {
                    PoolTask::Mean(_) if !w.adaptive => {
                        avg_pool_plane(&taps, plane, &mut gathered, part_divisors, result)
                    }
                    PoolTask::MeanBackward(_) if !w.adaptive => {
                        avg_pool_gradient(&taps, plane, part_divisors, &mut scaled, result);
                    }
                    PoolTask::Mean(_) => {
                        result.iter_mut().zip(part_divisors).enumerate().for_each(|(i, (y, divisor))| {
                            *y = inside(o + i).fold(*y, |sum, at| sum.add(plane[at - skipped])).div(*divisor);
                        })
                    }
                    PoolTask::MeanBackward(_) => {
                        plane.iter().zip(part_divisors).enumerate().for_each(|(o, (g, divisor))| {
                            let g = g.div(*divisor);
                            inside(o).for_each(|at| result[at] = result[at].add(g));
                        })
                    }
                    PoolTask::MaxBackward => plane.iter().zip(&indices[plane_i * windows..]).for_each(|(g, &at)| {
                        if let Some(y) = result.get_mut(at as usize) {
                            *y = y.add(*g);
                        }
                    }),
                    PoolTask::Max => unreachable!("has two results"),
                }
                store_tile(self.x.dtype, result, out, 0, 1);
            }
        };
        let out = &mut out[..dims[0] * dims[1] * made * size];
        if at_once < windows {
            return out.chunks_mut(windows * size).enumerate().for_each(|(plane, out)| {
                parallel::for_each_chunk(out, at_once * size, |i, out| compute_planes(plane, i * at_once, out));
            });
        }
        let per_job = (JOB_ELEMENTS / 4).div_ceil(elements.max(windows));
        match dims[0] * dims[1] * elements.max(windows) <= JOB_ELEMENTS {
            true => compute_planes(0, 0, out),
            false => parallel::for_each_chunk(out, per_job * made * size, |i, out| compute_planes(i * per_job, 0, out)),
        }
    }
}

/// Consecutive rows of a plane's windows, or consecutive windows of its only row, and the part of the plane that they read.
struct WindowRows {
    windows: Windows,
    /// The first row and column of the plane that these windows read, and the number of rows and columns that they read.
    first: [usize; 2],
    image: [usize; 2],
}

impl WindowRows {
    /// Returns the dim along which a plane is divided.
    fn split_dim(w: &Windows) -> usize {
        usize::from(w.image[0] == 1 && w.grid[0] == 1)
    }

    fn new(w: &Windows, first: usize, count: usize) -> WindowRows {
        let d = WindowRows::split_dim(w);
        let step = if d == 0 { w.grid[1] } else { 1 };
        let (from, to) = (first / step, (first + count) / step);
        let start =
            if w.adaptive { w.input_range(d, from).0 } else { (from * w.stride[d]).saturating_sub(w.padding[d]) };
        let mut part = WindowRows { windows: *w, first: [0; 2], image: w.image };
        part.first[d] = start;
        part.image[d] = w.input_range(d, to - 1).1.saturating_sub(start);
        part.windows.padding[d] = w.padding[d].saturating_sub(from * w.stride[d]);
        part.windows.image = part.image;
        part.windows.grid[d] = to - from;
        part
    }
}

/// A kernel tap of a row of windows. For windows `first..last`, the tap is inside the image; window `first` reads column `at`.
#[derive(Clone, Copy)]
struct Tap {
    first: usize,
    last: usize,
    at: usize,
}

/// The taps that all rows of windows have in common.
struct Taps<'a> {
    w: &'a Windows,
    columns: Vec<Tap>,
}

impl Taps<'_> {
    fn new(w: &Windows) -> Taps<'_> {
        let (image, padding, dilation) = (w.image[1], w.padding[1], w.dilation[1]);
        let column = |k: usize| {
            let (first, last) = w.windows_inside(1, k);
            let at = || first * w.stride[1] + k * dilation - padding;
            (first < last).then(|| Tap { first, last, at: at() })
        };
        // Taps before `from` are in the padding even for the last window; taps at and after `to` are beyond the image even for the first
        // window.
        let from = padding.saturating_sub((w.grid[1] - 1) * w.stride[1]).div_ceil(dilation);
        let to = w.kernel[1].min((image + padding).div_ceil(dilation));
        Taps { w, columns: (from..to).filter_map(column).collect() }
    }

    /// Calls `f` with the taps of row `o` of windows, in order, or in reverse within each row if `reverse`. `at` in these taps is an
    /// index in the plane.
    #[inline(always)]
    fn for_row(&self, o: usize, reverse: bool, mut f: impl FnMut(Tap)) {
        let (top, bottom) = self.w.input_range(0, o);
        for h in (top..bottom).step_by(self.w.dilation[0]) {
            for k in 0..self.columns.len() {
                let tap = self.columns[if reverse { self.columns.len() - 1 - k } else { k }];
                f(Tap { at: h * self.w.image[1] + tap.at, ..tap });
            }
        }
    }
}

/// Returns `gathered.len()` elements of `row`, `stride` apart: in place if `stride` is 1, otherwise copied to `gathered`.
#[inline(always)]
fn strided_row<'a, C: Number>(row: &'a [C], stride: usize, gathered: &'a mut [C]) -> &'a [C] {
    match (stride, gathered.split_last_mut()) {
        (1, _) => return &row[..gathered.len()],
        // Stride 2 has a separate loop, because the compiler vectorises it.
        (2, Some((last, gathered))) => {
            let (pairs, rest) = row[..2 * gathered.len() + 1].as_chunks::<2>();
            gathered.iter_mut().zip(pairs).for_each(|(y, pair)| *y = pair[0]);
            *last = rest[0];
        }
        _ => gathered.iter_mut().zip(row.iter().step_by(stride)).for_each(|(y, x)| *y = *x),
    }
    gathered
}

/// Replaces the maximum `best` by `x` and its index `at` by `place` if `x` is greater or NaN.
#[inline(always)]
fn update_max<C: Number>(best: &mut C, at: &mut i64, x: C, place: i64) {
    let greater = x > *best || is_nan(x);
    *best = x.max(*best);
    *at = if greater { place } else { *at };
}

vectorised! {
    /// Computes the maximum of each window and its index. Initially, `best` has the lowest value, and `at` the index of each window's
    /// first element. `gathered` is scratch memory for a row of windows.
    fn max_pool_plane<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, plane: &'a [C], gathered: &'a mut [C], best: &'a mut [C], at: &'a mut [i64]
    ) {
        let (width, stride) = (taps.w.grid[1], taps.w.stride[1]);
        for (o, (best, at)) in best.chunks_exact_mut(width).zip(at.chunks_exact_mut(width)).enumerate() {
            taps.for_row(o, false, |tap| {
                let (best, at) = (&mut best[tap.first..tap.last], &mut at[tap.first..tap.last]);
                let row = strided_row(&plane[tap.at..], stride, &mut gathered[tap.first..tap.last]);
                for (i, (x, (best, at))) in row.iter().zip(best.iter_mut().zip(at)).enumerate() {
                    update_max(best, at, *x, (tap.at + i * stride) as i64);
                }
            });
        }
    }
}

vectorised! {
    /// Adds the means of windows to `result`. `gathered` is scratch memory for a row of windows.
    fn avg_pool_plane<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, plane: &'a [C], gathered: &'a mut [C], divisors: &'a [C], result: &'a mut [C]
    ) {
        let (width, stride) = (taps.w.grid[1], taps.w.stride[1]);
        for (o, (result, divisors)) in result.chunks_exact_mut(width).zip(divisors.chunks_exact(width)).enumerate() {
            taps.for_row(o, false, |tap| {
                let sums = &mut result[tap.first..tap.last];
                let row = strided_row(&plane[tap.at..], stride, &mut gathered[tap.first..tap.last]);
                sums.iter_mut().zip(row).for_each(|(sum, x)| *sum = sum.add(*x));
            });
            result.iter_mut().zip(divisors).for_each(|(y, divisor)| *y = y.div(*divisor));
        }
    }
}

vectorised! {
    /// Adds the gradient of each window's mean to the elements of `result` that the window covers. `scaled` is scratch memory for all
    /// windows.
    fn avg_pool_gradient<'a, C: Number>(
        _simd: S, taps: &'a Taps<'a>, grads: &'a [C], divisors: &'a [C], scaled: &'a mut [C], result: &'a mut [C]
    ) {
        scaled.iter_mut().zip(grads.iter().zip(divisors)).for_each(|(y, (g, divisor))| *y = g.div(*divisor));
        let stride = taps.w.stride[1];
        for (o, scaled) in scaled.chunks_exact(taps.w.grid[1]).enumerate() {
            taps.for_row(o, true, |tap| {
                let (scaled, to) = (&scaled[tap.first..tap.last], &mut result[tap.at..]);
                match stride {
                    1 => to.iter_mut().zip(scaled).for_each(|(y, g)| *y = y.add(*g)),
                    2 => {
                        let (pairs, rest) = to[..2 * scaled.len() - 1].as_chunks_mut::<2>();
                        pairs.iter_mut().zip(scaled).for_each(|(y, g)| y[0] = y[0].add(*g));
                        rest.iter_mut().zip(scaled.last()).for_each(|(y, g)| *y = y.add(*g));
                    }
                    _ => to.iter_mut().step_by(stride).zip(scaled).for_each(|(y, g)| *y = y.add(*g)),
                }
            });
        }
    }
}
