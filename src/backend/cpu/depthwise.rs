//! Convolutions on the CPU with one or a few channels in each group, computed a part of a plane (one channel of one image) at a time.
//!
//! A part is copied with its padding into the cache. For a stride above 1, the copy is split into phases; phase p has every `stride`th
//! element, beginning at element p. Every tap then reads a contiguous slice of the copy, and a part of the result is a weighted sum of
//! such slices ([`vectors::correlate`]). The sum has the row length of the copy; the surplus elements are not stored. The image's
//! gradient is such a weighted sum of the result's gradient, for each phase. The weight's gradient consists of dot products of the image
//! and the result's gradient ([`vectors::dots`]), added in an order that depends only on the shapes.

mod jobs;
mod planes;
mod vectors;

use std::ops::Range;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::depthwise::jobs::{ImagesJob, Phase, images, weight, windows};
use crate::backend::cpu::depthwise::planes::{JobOutput, PlanePart, PlaneParts, Planes};
use crate::backend::cpu::depthwise::vectors::{VectorFloat, pack_weights};
use crate::backend::cpu::dispatch::for_float;
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, sizes_4d};
use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{Result, Shape, Tensor};

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
        [n, group]: [usize; 2],
        part: &PlanePart,
        is_new: bool,
        to: &mut Vec<C>,
    ) {
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
        let out = match slot {
            Some(slot) => slot,
            None => Tensor::empty_with_shape(shape, x.dtype, x.device())?,
        };
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
