//! Convolutions on the CPU with one or a few channels in each group, computed a part of a plane (one channel of one image) at a time.
//!
//! A part is copied with its padding into the cache. For a stride above 1, the copy is split into phases; phase p has every `stride`th
//! element, beginning at element p. Every tap then reads a contiguous slice of the copy, and a part of the result is a weighted sum of
//! such slices ([`vectors::correlate`]). The sum has the row length of the copy; the surplus elements are not stored. The image's
//! gradient is such a weighted sum of the result's gradient, for each phase. The weight's gradient consists of dot products of the image
//! and the result's gradient ([`vectors::dots`]), added in an order that depends only on the shapes.

mod vectors;

use std::ops::Range;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::depthwise::vectors::{
    VectorFloat, channel_block, copy_row, copy_strided, correlate, deinterleave, dots, interleave, lanes, pack_weights,
};
use crate::backend::cpu::dispatch::{for_float, vectorised};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, sizes_4d};
use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{DType, Result, Shape, Tensor};

/// The number of multiplications in a job of the thread pool; loading or storing an element counts as [`MOVE_COST`].
const JOB_COST: usize = 1 << 17;
/// The cost of loading or storing an element, in multiplications.
const MOVE_COST: usize = 4;
/// The number of elements that one part reads and writes; they fit in the caches of a core.
const PART_ELEMENTS: usize = 1 << 14;
/// The maximum number of elements in one copy, which limits the extent of windows.
const MAX_COPY_ELEMENTS: usize = 1 << 20;
/// The maximum number of phases. For larger strides, im2col is faster.
const MAX_PHASES: usize = 64;
/// The number of windows of a group over which the weight's gradient is summed separately, before these sums are added.
const SLICE_WINDOWS: usize = 1 << 16;
/// The number of elements that loops may read past the end of a copy: at least the elements of the longest vector.
const READ_SLACK: usize = 64;

/// The geometry of windows along one dim.
struct WindowAxis {
    /// For each tap, the phase that the tap reads, and the offset of the tap in that phase from the window's position.
    taps: Vec<(usize, usize)>,
    /// For each phase that some tap reads, the index of the phase's first element.
    phases: Vec<usize>,
    /// The largest offset of a tap from the window's position.
    reach: usize,
    stride: usize,
    padding: usize,
}

impl WindowAxis {
    fn new(w: &Windows, d: usize) -> WindowAxis {
        let (stride, mut phases) = (w.stride[d], Vec::new());
        let tap = |k: usize| {
            let (first, shift) = (k * w.dilation[d] % stride, k * w.dilation[d] / stride);
            let known = phases.iter().position(|&phase| phase == first);
            (known.unwrap_or_else(|| (phases.push(first), phases.len() - 1).1), shift)
        };
        let taps: Vec<(usize, usize)> = (0..w.kernel[d]).map(tap).collect();
        WindowAxis { reach: taps[taps.len() - 1].1, taps, phases, stride, padding: w.padding[d] }
    }

    /// Returns the start and length of the range of phase elements that covers the image's elements `first..first + size`.
    fn span(&self, first: usize, size: usize) -> (usize, usize) {
        let from = (first + self.padding) / self.stride;
        (from, (first + size - 1 + self.padding) / self.stride - from + 1)
    }
}

/// A convolution of images `[N, groups * inner, image]` to windows `[N, groups * outer, grid]`, with a weight
/// `[groups * outer, inner, kernel]`. Each of images, windows and weight can be computed from the other two.
pub(crate) struct Depthwise {
    w: Windows,
    axes: [WindowAxis; 2],
    n: usize,
    groups: usize,
    inner: usize,
    outer: usize,
}

impl Convolution for Depthwise {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        for_float!(x.dtype.compute(), C => self.windows_as::<C>(x, weight, bias))
    }

    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        for_float!(y.dtype.compute(), C => self.images_as::<C>(y, weight, bias))
    }

    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        for_float!(x.dtype.compute(), C => self.weight_as::<C>(x, y, slot))
    }
}

impl Depthwise {
    /// Returns the convolution if this method suits it and no size is 0, else `None`.
    pub(crate) fn new(w: Windows, images: &Tensor, weight: &Tensor, groups: usize) -> Option<Depthwise> {
        let (n, [outer, inner, ..]) = (images.shape().dims()[0], sizes_4d(weight));
        let sizes = [n, inner, outer, w.image[0], w.image[1], w.grid[0], w.grid[1], w.kernel[0], w.kernel[1]];
        let phase_counts = [0, 1].map(|d| w.kernel[d].min(w.stride[d]));
        // For groups with many channels, matrix products are faster.
        let of_group = outer / groups * inner;
        let small = groups > 1 && of_group <= 256 || of_group == 1;
        if sizes.contains(&0) || phase_counts[0] * phase_counts[1] > MAX_PHASES || !small {
            return None;
        }
        let axes = [0, 1].map(|d| WindowAxis::new(&w, d));
        let made = Depthwise { w, axes, n, groups, inner, outer: outer / groups };
        let copied = |size: [usize; 2], channels: usize| {
            let [high, wide] = made.phase_size(size);
            high.saturating_mul(wide).saturating_mul(channels)
        };
        let (windows, image) = (made.parts(w.grid, 0..0).most, made.parts(w.image, 0..0).most);
        let most = copied(windows, made.inner * made.phases()).max(copied(image, made.outer));
        (most <= MAX_COPY_ELEMENTS).then_some(made)
    }

    fn phases(&self) -> usize {
        self.axes[0].phases.len() * self.axes[1].phases.len()
    }

    fn taps(&self) -> usize {
        self.w.kernel[0] * self.w.kernel[1]
    }

    /// Returns the row and column of every tap.
    fn each_tap(&self) -> impl Iterator<Item = [usize; 2]> {
        (0..self.taps()).map(|tap| [tap / self.w.kernel[1], tap % self.w.kernel[1]])
    }

    /// Divides a range of elements of all planes into parts.
    fn parts(&self, dims: [usize; 2], range: Range<usize>) -> PlaneParts {
        let elements = (PART_ELEMENTS / (self.inner * self.phases() + self.outer)).max(1 << 10);
        // The part has enough rows that its `reach` extra rows, which are read but not computed, are few in comparison.
        let rows = (elements / dims[1]).max(2 * self.axes[0].reach + 1).min(dims[0]);
        PlaneParts::new(dims, [rows, dims[1].min(2 * elements)], range)
    }

    /// Returns the number of elements of each channel in a job. With several channels in a group, a job has whole planes; with one
    /// channel, a job may have whole rows or a part of a row.
    fn job_elements(&self, [rows, columns]: [usize; 2], channels: usize) -> usize {
        let each = self.inner * self.outer * self.taps() + (self.inner + self.outer) * MOVE_COST;
        let wanted = (JOB_COST / each).max(1);
        match (channels, wanted) {
            (1, n) if n < columns => n,
            (1, n) if n < rows * columns => n / columns * columns,
            (_, n) => n.div_ceil(rows * columns) * rows * columns,
        }
    }

    /// Copies the image elements that the windows of a part read: each channel, phase after phase. Unless `is_new`, `to` already holds a
    /// part with the same position and size, so the elements in the padding are already 0 and are not written again.
    #[inline(always)]
    fn load_phases<C: VectorFloat>(
        &self,
        x: &Planes<C>,
        at: [usize; 2],
        part: &PlanePart,
        is_new: bool,
        to: &mut Vec<C>,
    ) {
        let [n, group] = at;
        let ([high, wide], [rows, columns]) = (self.phase_size(part.size), &self.axes);
        if is_new {
            to.clear();
            to.resize(self.inner * self.phases() * high * wide + READ_SLACK, C::from_i32(0));
        }
        let place = |d: usize| (part.first[d] * self.axes[d].stride) as isize - self.axes[d].padding as isize;
        let channels = group * self.inner..(group + 1) * self.inner;
        for (channel, to) in channels.zip(to.chunks_exact_mut(self.phases() * high * wide)) {
            for (&top, to) in rows.phases.iter().zip(to.chunks_exact_mut(columns.phases.len() * high * wide)) {
                let top = place(0) + top as isize;
                if (columns.stride, &columns.phases[..]) == (2, &[0, 1]) {
                    let (even, odd) = to.split_at_mut(high * wide);
                    x.copy_even_odd([n, channel], [top, place(1)], rows.stride, wide, [even, odd]);
                    continue;
                }
                for (&left, to) in columns.phases.iter().zip(to.chunks_exact_mut(high * wide)) {
                    let first = [top, place(1) + left as isize];
                    x.copy([n, channel], first, [rows.stride, columns.stride], (wide, wide), to);
                }
            }
        }
    }

    /// Returns the number of rows and columns of each phase that the windows of a part of this size read.
    fn phase_size(&self, size: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|d| size[d] + self.axes[d].reach)
    }

    /// Fills `offsets` with the offset at which each tap of each channel reads in the copy that [`load_phases`](Self::load_phases) makes
    /// for a part of this size.
    fn offsets(&self, size: [usize; 2], offsets: &mut Vec<usize>) {
        let [high, wide] = self.phase_size(size);
        let phases = self.axes[1].phases.len();
        offsets.clear();
        for channel in 0..self.inner {
            offsets.extend(self.each_tap().map(|[row, column]| {
                let ((top, down), (left, right)) = (self.axes[0].taps[row], self.axes[1].taps[column]);
                ((channel * self.axes[0].phases.len() + top) * phases + left) * high * wide + down * wide + right
            }));
        }
    }

    fn windows_as<C: VectorFloat>(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (weight, starts) = (read_elements::<C>(weight)?, self.initial_sums(bias, self.outer)?);
        let k = self.inner * self.taps();
        let mut weights = Vec::with_capacity(weight.len());
        for weight in weight.chunks_exact(self.outer * k) {
            pack_weights(self.outer, k, &mut weights, |channel, tap| weight[channel * k + tap]);
        }
        self.compute_planes(x, [self.outer, self.w.grid[0], self.w.grid[1]], |x, first, made| {
            windows(self, x, &weights, &starts, first, made);
        })
    }

    /// Allocates a result `[N, groups * channels, rows, columns]` with the dtype of `x`. `f(x, first, made)` computes a part of the
    /// result, starting at element `first` of each channel.
    fn compute_planes<C: VectorFloat>(
        &self,
        x: &Tensor,
        [channels, rows, columns]: [usize; 3],
        f: impl Fn(Planes<C>, usize, JobOutput<C>) + Sync,
    ) -> Result<Tensor> {
        let shape = Shape::from([self.n, self.groups * channels, rows, columns]);
        let out = Tensor::empty_with_shape(shape, x.dtype, x.device())?;
        let (job, unit) = (self.job_elements([rows, columns], channels), channels * x.dtype.size());
        with_host(&[&x.storage], &[&out.storage], |reads, writes| {
            let x = Planes::new(x, reads[0]);
            let to = &mut writes[0][..out.numel() * out.dtype.size()];
            parallel::for_each_chunk(to, job * unit, |i, to| f(x, i * job, JobOutput::new(out.dtype, to)));
        })?;
        Ok(out)
    }

    /// Returns the initial value of each channel's sums: the bias, or 0 without a bias.
    fn initial_sums<C: VectorFloat>(&self, bias: Option<&Tensor>, channels: usize) -> Result<Vec<C>> {
        bias.map_or_else(|| Ok(vec![C::from_i32(0); self.groups * channels]), read_elements)
    }

    fn images_as<C: VectorFloat>(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (weight, starts) = (read_elements::<C>(weight)?, self.initial_sums(bias, self.inner)?);
        let (taps, lefts) = (self.taps(), self.axes[1].phases.len());
        let group = self.outer * self.inner * taps;
        let phase = |phase: usize| {
            let is_in =
                |&[row, column]: &[usize; 2]| self.axes[0].taps[row].0 * lefts + self.axes[1].taps[column].0 == phase;
            let taps_in: Vec<[usize; 2]> = self.each_tap().filter(is_in).collect();
            let mut weights = Vec::new();
            for weight in weight.chunks_exact(group) {
                pack_weights(self.inner, self.outer * taps_in.len(), &mut weights, |channel, i| {
                    let [row, column] = taps_in[i % taps_in.len()];
                    weight[(i / taps_in.len() * self.inner + channel) * taps + row * self.w.kernel[1] + column]
                });
            }
            let shift = |[row, column]: [usize; 2]| [self.axes[0].taps[row].1, self.axes[1].taps[column].1];
            Phase { shifts: taps_in.into_iter().map(shift).collect(), weights }
        };
        let phases: Vec<Phase<C>> = (0..self.phases()).map(phase).collect();
        let finite: Vec<bool> = weight.chunks_exact(group).map(are_finite).collect();
        self.compute_planes(y, [self.inner, self.w.image[0], self.w.image[1]], |y, first, made| {
            images(ImagesJob { d: self, y, phases: &phases, finite: &finite, starts: &starts, first, made });
        })
    }

    fn weight_as<C: VectorFloat>(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let shape = [self.groups * self.outer, self.inner, self.w.kernel[0], self.w.kernel[1]];
        let out = slot.map_or_else(|| Tensor::empty_with_shape(shape, x.dtype, x.device()), Ok)?;
        let (count, size) = (self.n * self.w.grid[0] * self.w.grid[1], self.outer * self.inner * self.taps());
        let slices = count.div_ceil(SLICE_WINDOWS);
        let mut sums = vec![C::from_i32(0); slices * self.groups * size];
        let per_job = self.job_elements([1, 1], 2).div_ceil(count.min(SLICE_WINDOWS));
        with_host(&[&x.storage, &y.storage], &[&out.storage], |reads, writes| {
            let (x, y) = (Planes::new(x, reads[0]), Planes::new(y, reads[1]));
            parallel::for_each_chunk(&mut sums, per_job * size, |i, sums| {
                weight(self, x, y, slices, i * per_job, sums);
            });
            let mut group_sums = Vec::with_capacity(self.groups * size);
            for group in sums.chunks_exact(slices * size) {
                let add = |i: usize| group[i..].iter().step_by(size).fold(C::from_i32(0), |sum, x| sum.add(*x));
                group_sums.extend((0..size).map(add));
            }
            store_tile(out.dtype, &group_sums, writes[0], out.layout.offset, 1);
        })?;
        Ok(out)
    }
}

/// Reads all elements of a tensor in row-major order.
fn read_elements<C: VectorFloat>(t: &Tensor) -> Result<Vec<C>> {
    let t = t.detach().contiguous()?;
    let mut made = vec![C::from_i32(0); t.numel()];
    with_host(&[&t.storage], &[], |reads, _| load_tile(t.dtype, reads[0], t.layout.offset, 1, &mut made))?;
    Ok(made)
}

fn are_finite<C: VectorFloat>(all: &[C]) -> bool {
    all.iter().fold(true, |finite, x| finite & (x.sub(*x) == C::from_i32(0)))
}

vectorised! {
    /// Computes windows from images, beginning with element `first` of each channel.
    fn windows<'a, C: VectorFloat>(
        simd: S, d: &'a Depthwise, x: Planes<'a, C>, weights: &'a [C], starts: &'a [C], first: usize, made: JobOutput<'a, C>
    ) {
        let mut made = made;
        let (outer, taps, grid) = (d.outer, d.inner * d.taps(), d.w.grid);
        let (mut phases, mut sums, mut offsets, mut last) = (Vec::new(), Vec::new(), Vec::new(), [[0; 2]; 2]);
        for part in d.parts(grid, first..first + made.len() / outer) {
            let (n, group) = (part.plane / d.groups, part.plane % d.groups);
            let is_new = last != [part.first, part.size];
            d.load_phases(&x, [n, group], &part, is_new, &mut phases);
            let [high, wide] = part.size;
            let pitch = wide + d.axes[1].reach;
            let len = ((high - 1) * pitch + wide).next_multiple_of(lanes::<C, S>());
            if is_new {
                last = [part.first, part.size];
                d.offsets(part.size, &mut offsets);
                sums.resize(outer * len, C::from_i32(0));
            }
            let weights = &weights[group * outer * taps..][..outer * taps];
            correlate(simd, (&mut sums, len), (&phases, &offsets), (weights, &starts[group * outer..][..outer]));
            for (channel, sums) in sums.chunks_exact(len).enumerate() {
                let plane = (part.plane * outer + channel) * grid[0] * grid[1];
                for (row, sums) in (part.first[0]..part.first[0] + high).zip(sums.chunks(pitch)) {
                    made.store(plane + row * grid[1] + part.first[1] - first * outer, &sums[..wide]);
                }
            }
        }
    }
}

/// The taps that contribute to one phase of the images.
struct Phase<C> {
    /// For each tap that reads the phase, the tap's offset from the window's position.
    shifts: Vec<[usize; 2]>,
    weights: Vec<C>,
}

/// A job that computes images from windows, beginning with element `first` of each channel.
struct ImagesJob<'a, C> {
    d: &'a Depthwise,
    y: Planes<'a, C>,
    phases: &'a [Phase<C>],
    /// For each group, whether all weights of the group are finite.
    finite: &'a [bool],
    starts: &'a [C],
    first: usize,
    made: JobOutput<'a, C>,
}

impl<C: VectorFloat> ImagesJob<'_, C> {
    /// Returns the range of phase elements that a part covers: the starts and the sizes along both dims.
    fn span(&self, part: &PlanePart) -> [[usize; 2]; 2] {
        let [rows, columns] = [0, 1].map(|d| self.d.axes[d].span(part.first[d], part.size[d]));
        [[rows.0, columns.0], [rows.1, columns.1]]
    }

    /// Copies the windows that contribute to the phase elements `first..first + size`, for each channel of the group. Each copy begins
    /// `reach` elements before the range.
    #[inline(always)]
    fn load_windows(&self, [n, group]: [usize; 2], [first, size]: [[usize; 2]; 2], is_new: bool, to: &mut Vec<C>) {
        let (d, [high, pitch]) = (self.d, self.d.phase_size(size));
        if is_new {
            to.clear();
            to.resize(d.outer * high * pitch + READ_SLACK, C::from_i32(0));
        }
        for (channel, to) in (group * d.outer..(group + 1) * d.outer).zip(to.chunks_exact_mut(high * pitch)) {
            let first = [0, 1].map(|i| first[i] as isize - d.axes[i].reach as isize);
            self.y.copy([n, channel], first, [1, 1], (pitch, pitch), to);
        }
    }

    /// Recomputes the sums of a phase without the zeros of the padding, because a weight that is not finite times 0 would give NaN.
    fn sum_without_padding(
        &self,
        phase: &Phase<C>,
        group: usize,
        [first, size]: [[usize; 2]; 2],
        windows: &[C],
        sums: &mut [C],
    ) {
        let d = self.d;
        let (len, [high, pitch]) = (sums.len() / d.inner, d.phase_size(size));
        let k = d.outer * phase.shifts.len();
        let weights = &phase.weights[group * d.inner * k..][..d.inner * k];
        let mut channel = 0;
        while channel < d.inner {
            let many = channel_block(d.inner - channel);
            for (i, sums) in sums[channel * len..(channel + many) * len].chunks_exact_mut(len).enumerate() {
                for (at, sum) in
                    sums.iter_mut().enumerate().filter(|(at, _)| at / pitch < size[0] && at % pitch < size[1])
                {
                    *sum = self.starts[group * d.inner + channel + i];
                    for tap in 0..k {
                        let shift = phase.shifts[tap % phase.shifts.len()];
                        let place = [at / pitch + first[0], at % pitch + first[1]];
                        let is_window = |i: usize| place[i] >= shift[i] && place[i] - shift[i] < d.w.grid[i];
                        if is_window(0) && is_window(1) {
                            let row = at / pitch + d.axes[0].reach - shift[0];
                            let column = at % pitch + d.axes[1].reach - shift[1];
                            let y = windows[(tap / phase.shifts.len() * high + row) * pitch + column];
                            *sum = sum.add(weights[channel * k + tap * many + i].mul(y));
                        }
                    }
                }
            }
            channel += many;
        }
    }
}

vectorised! {
    /// Computes images from windows.
    fn images<'a, C: VectorFloat>(simd: S, job: ImagesJob<'a, C>) {
        let mut job = job;
        let (d, zero) = (job.d, C::from_i32(0));
        let (inner, image, [rows, columns]) = (d.inner, d.w.image, &d.axes);
        let (mut windows, mut sums, mut offsets, mut line) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        let (mut last, mut lines, mut skips) = ([[0; 2]; 2], Vec::new(), Vec::new());
        for part in d.parts(image, job.first..job.first + job.made.len() / inner) {
            let (n, group) = (part.plane / d.groups, part.plane % d.groups);
            let span = job.span(&part);
            let [first, size] = span;
            let [high, pitch] = d.phase_size(size);
            let len = ((size[0] - 1) * pitch + size[1]).next_multiple_of(lanes::<C, S>());
            let is_new = last != [part.first, part.size];
            job.load_windows([n, group], span, is_new, &mut windows);
            if is_new {
                last = [part.first, part.size];
                sums.resize(d.phases() * inner * len, zero);
                line.resize(part.size[1], zero);
                // For each row, the start of its sums in the first phase of columns and the first channel; `None` if no tap reads the
                // row.
                lines.clear();
                lines.extend((part.first[0] + rows.padding..).take(part.size[0]).map(|at| {
                    let phase = rows.phases.iter().position(|&phase| phase == at % rows.stride)?;
                    Some(phase * columns.phases.len() * inner * len + (at / rows.stride - first[0]) * pitch)
                }));
                // For each phase of columns: the column of the phase's first element in a row, and the index of that element in the sums.
                let from = part.first[1] + columns.padding;
                skips.clear();
                skips.extend(columns.phases.iter().map(|phase| {
                    let skip = (phase + columns.stride - from % columns.stride) % columns.stride;
                    (skip, (from + skip) / columns.stride - first[1])
                }));
            }
            let starts = &job.starts[group * inner..][..inner];
            for (phase, sums) in job.phases.iter().zip(sums.chunks_exact_mut(inner * len)) {
                offsets.clear();
                for channel in 0..d.outer {
                    let place = |&[down, right]: &[usize; 2]| {
                        (channel * high + rows.reach - down) * pitch + columns.reach - right
                    };
                    offsets.extend(phase.shifts.iter().map(place));
                }
                match job.finite[group] {
                    true => {
                        let weights = &phase.weights[group * inner * offsets.len()..][..inner * offsets.len()];
                        correlate(simd, (sums, len), (&windows, &offsets), (weights, starts));
                    }
                    false => job.sum_without_padding(phase, group, span, &windows, sums),
                }
            }
            for (channel, &start) in starts.iter().enumerate() {
                let plane = (part.plane * inner + channel) * image[0] * image[1];
                for (row, at) in (part.first[0]..).zip(&lines) {
                    let to = plane + row * image[1] + part.first[1] - job.first * inner;
                    // Returns the sums of a row for one phase of columns, beginning with the phase's first element in the row.
                    let of = |column: usize| Some(&sums[(*at)? + (column * inner + channel) * len + skips[column].1..]);
                    if let (1, Some(sums)) = (columns.stride, of(0)) {
                        job.made.store(to, &sums[..part.size[1]]);
                        continue;
                    }
                    match (columns.stride, &skips[..], of(0), of(columns.phases.len() - 1)) {
                        (2, [(0, _), _], Some(even), Some(odd)) | (2, [_, (0, _)], Some(odd), Some(even)) => {
                            interleave(&mut line, even, odd);
                        }
                        _ => {
                            line.fill(start);
                            for (column, &(skip, _)) in skips.iter().enumerate() {
                                let to = line.iter_mut().skip(skip).step_by(columns.stride);
                                to.zip(of(column).unwrap_or(&[])).for_each(|(to, x)| *to = *x);
                            }
                        }
                    }
                    job.made.store(to, &line);
                }
            }
        }
    }
}

vectorised! {
    /// Sums products of images and windows for pairs of a group and a slice, beginning with pair `first`.
    fn weight<'a, C: VectorFloat>(
        simd: S, d: &'a Depthwise, x: Planes<'a, C>, y: Planes<'a, C>, slices: usize, first: usize, sums: &'a mut [C]
    ) {
        let (zero, lanes, count) = (C::from_i32(0), lanes::<C, S>(), d.n * d.w.grid[0] * d.w.grid[1]);
        let taps = d.inner * d.taps();
        let (mut phases, mut with, mut offsets, mut last) = (Vec::new(), Vec::new(), Vec::new(), [[0; 2]; 2]);
        let mut products = vec![zero; d.outer * taps];
        for (i, sums) in (first..).zip(sums.chunks_exact_mut(d.outer * taps)) {
            let (group, slice) = (i / slices, i % slices);
            for part in d.parts(d.w.grid, slice * SLICE_WINDOWS..count.min((slice + 1) * SLICE_WINDOWS)) {
                let (n, is_new) = (part.plane, last != [part.first, part.size]);
                d.load_phases(&x, [n, group], &part, is_new, &mut phases);
                let [high, wide] = part.size;
                let pitch = wide + d.axes[1].reach;
                let len = (high * pitch).next_multiple_of(lanes);
                if is_new {
                    last = [part.first, part.size];
                    d.offsets(part.size, &mut offsets);
                    with.clear();
                    with.resize(d.outer * len, zero);
                }
                // The elements between rows and after the last row are 0, because `dots` also multiplies image elements that belong to no
                // window.
                for (channel, with) in (group * d.outer..).zip(with.chunks_exact_mut(len)) {
                    let place = part.first.map(|first| first as isize);
                    y.copy([n, channel], place, [1, 1], (wide, pitch), &mut with[..high * pitch]);
                }
                let count = ((high - 1) * pitch + wide).next_multiple_of(lanes);
                dots(simd, (&with, len, count), (&phases, &offsets), &mut products);
                if !are_finite(&products) {
                    dot_rows(&with, [high, wide, pitch, len], &phases, &offsets, &mut products);
                }
                sums.iter_mut().zip(&products).for_each(|(sum, x)| *sum = sum.add(*x));
            }
        }
    }
}

/// Computes [`dots`] over the rows only, without the zeros between rows: a non-finite element times 0 would give NaN.
fn dot_rows<C: VectorFloat>(
    with: &[C],
    [high, wide, pitch, len]: [usize; 4],
    phases: &[C],
    offsets: &[usize],
    products: &mut [C],
) {
    for (with, products) in with.chunks_exact(len).zip(products.chunks_exact_mut(offsets.len())) {
        for (product, &offset) in products.iter_mut().zip(offsets) {
            let rows = (0..high).flat_map(|row| row * pitch..row * pitch + wide);
            *product = rows.fold(C::from_i32(0), |sum, at| sum.add(with[at].mul(phases[offset + at])));
        }
    }
}

/// A tensor `[N, C, rows, columns]`, whose planes a job reads.
#[derive(Clone, Copy)]
struct Planes<'a, C> {
    t: &'a Tensor,
    bytes: &'a [u8],
    /// The storage's elements if they have the compute type, otherwise empty.
    elements: &'a [C],
}

impl<'a, C: VectorFloat> Planes<'a, C> {
    fn new(t: &'a Tensor, bytes: &'a [u8]) -> Planes<'a, C> {
        let elements = if t.dtype == C::COMPUTE.dtype() { bytemuck::cast_slice(bytes) } else { &[] };
        Planes { t, bytes, elements }
    }

    /// Copies every `step`th element of a plane, beginning at `first`, into the rows of `to`: `width` elements into each row of `pitch`
    /// elements, until `to` ends. Where the source position is outside the plane, `to` is left unchanged.
    #[inline(always)]
    fn copy(
        &self,
        [n, channel]: [usize; 2],
        first: [isize; 2],
        step: [usize; 2],
        (width, pitch): (usize, usize),
        to: &mut [C],
    ) {
        let ([top, bottom], [left, right]) =
            (self.inside_range(0, first[0], step[0], to.len() / pitch), self.inside_range(1, first[1], step[1], width));
        if left >= right {
            return;
        }
        let s = self.t.strides();
        let start = self.start([n, channel], [first[0], first[1] + (left * step[1]) as isize]);
        for row in top..bottom {
            let start = start + (row * step[0]) as isize * s[2];
            let to = &mut to[row * pitch + left..row * pitch + right];
            match self.in_place() {
                true => copy_strided(to, &self.elements[start as usize..], step[1]),
                false => load_tile(self.t.dtype, self.bytes, start as usize, s[3] * step[1] as isize, to),
            }
        }
    }

    /// Copies elements like [`copy`](Self::copy), but even columns into `even` and odd columns into `odd`, in rows of `pitch` elements.
    #[inline(always)]
    fn copy_even_odd(
        &self,
        plane: [usize; 2],
        first: [isize; 2],
        step: usize,
        pitch: usize,
        [even, odd]: [&mut [C]; 2],
    ) {
        if !self.in_place() {
            self.copy(plane, first, [step, 2], (pitch, pitch), even);
            return self.copy(plane, [first[0], first[1] + 1], [step, 2], (pitch, pitch), odd);
        }
        let ([top, bottom], [left, right]) =
            (self.inside_range(0, first[0], step, even.len() / pitch), self.inside_range(1, first[1], 1, 2 * pitch));
        if left >= right {
            return;
        }
        let start = self.start(plane, [first[0], first[1] + left as isize]);
        for row in top..bottom {
            let start = start + (row * step) as isize * self.t.strides()[2];
            let mut from = &self.elements[start as usize..][..right - left];
            let (even, odd) = (&mut even[row * pitch..][..pitch], &mut odd[row * pitch..][..pitch]);
            if !left.is_multiple_of(2) {
                (odd[left / 2], from) = (from[0], &from[1..]);
            }
            let (first, pairs) = (left.div_ceil(2), from.len() / 2);
            if let Some(&last) = from.get(2 * pairs) {
                even[first + pairs] = last;
            }
            deinterleave(&mut even[first..first + pairs], &mut odd[first..first + pairs], &from[..2 * pairs]);
        }
    }

    /// Returns the index range of the positions inside the plane, among the `count` positions `first`, `first + step`, ... along dim `d`.
    #[inline(always)]
    fn inside_range(&self, d: usize, first: isize, step: usize, count: usize) -> [usize; 2] {
        // A division takes as long as copying a short row, so it is avoided for step 1.
        let steps = |n: usize| if step == 1 { n } else { n.div_ceil(step) };
        [-first, sizes_4d(self.t)[2 + d] as isize - first].map(|end| steps(end.max(0) as usize).min(count))
    }

    fn in_place(&self) -> bool {
        self.t.strides()[3] == 1 && !self.elements.is_empty()
    }

    fn start(&self, [n, channel]: [usize; 2], [row, column]: [isize; 2]) -> isize {
        let s = self.t.strides();
        self.t.layout.offset as isize + n as isize * s[0] + channel as isize * s[1] + row * s[2] + column * s[3]
    }
}

/// The memory for a job's results: elements of the compute type, or bytes of another dtype to which results are converted.
enum JobOutput<'a, C> {
    Elements(&'a mut [C]),
    Bytes(&'a mut [u8], DType),
}

impl<'a, C: VectorFloat> JobOutput<'a, C> {
    fn new(dtype: DType, bytes: &'a mut [u8]) -> JobOutput<'a, C> {
        match dtype == C::COMPUTE.dtype() {
            true => JobOutput::Elements(bytemuck::cast_slice_mut(bytes)),
            false => JobOutput::Bytes(bytes, dtype),
        }
    }

    fn len(&self) -> usize {
        match self {
            JobOutput::Elements(to) => to.len(),
            JobOutput::Bytes(to, dtype) => to.len() / dtype.size(),
        }
    }

    #[inline(always)]
    fn store(&mut self, at: usize, row: &[C]) {
        match self {
            JobOutput::Elements(to) => copy_row(&mut to[at..at + row.len()], row),
            JobOutput::Bytes(to, dtype) => store_tile(*dtype, row, to, at, 1),
        }
    }
}

/// A part of a plane: some of its rows, or some elements of one row.
struct PlanePart {
    plane: usize,
    first: [usize; 2],
    size: [usize; 2],
}

/// An iterator that divides a range of elements of consecutive planes into parts.
struct PlaneParts {
    dims: [usize; 2],
    /// The maximum numbers of rows and columns in a part.
    most: [usize; 2],
    /// The plane and position of the next part, and the number of elements left.
    plane: usize,
    first: [usize; 2],
    left: usize,
}

impl PlaneParts {
    fn new(dims: [usize; 2], most: [usize; 2], range: Range<usize>) -> PlaneParts {
        let of_plane = dims[0].saturating_mul(dims[1]);
        let (plane, place) = (range.start / of_plane, range.start % of_plane);
        PlaneParts { dims, most, plane, first: [place / dims[1], place % dims[1]], left: range.len() }
    }
}

impl Iterator for PlaneParts {
    type Item = PlanePart;

    fn next(&mut self) -> Option<PlanePart> {
        let ([rows, columns], first) = (self.dims, self.first);
        if self.left == 0 {
            return None;
        }
        let most = self.most[0].min(rows - first[0]);
        let size = match first[1] == 0 && columns <= self.left && columns <= self.most[1] {
            true if columns * most <= self.left => [most, columns],
            true => [self.left / columns, columns],
            false => [1, (columns - first[1]).min(self.left).min(self.most[1])],
        };
        let part = PlanePart { plane: self.plane, first, size };
        self.left -= size[0] * size[1];
        self.first = match first[1] + size[1] == columns {
            true => [first[0] + size[0], 0],
            false => [first[0], first[1] + size[1]],
        };
        if self.first[0] == rows {
            (self.plane, self.first) = (self.plane + 1, [0; 2]);
        }
        Some(part)
    }
}
