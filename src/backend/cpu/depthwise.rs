//! Convolutions on the CPU whose groups have one channel or a few: a part of a plane (one channel of one image) at a time.
//!
//! A part is copied with its padding, so that it stays in the cache; for a stride above 1 it is split in phases, each of every
//! `stride`th element. Each tap then reads a contiguous slice of the copy, and a part of the result, in rows as long as the
//! copy's, is a sum of such slices, each times its weight ([`vectors::correlate`]). The elements between its rows are left out
//! when it is stored. The gradient of the image is the same sum over the result's gradient, for each phase. That of the weight
//! is made of products of both ([`vectors::dots`]), added up in an order that depends on the shapes alone.

mod jobs;
mod planes;
mod vectors;

use std::ops::Range;

use pulp::Arch;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::depthwise::jobs::{OfImages, Phase, weight, windows};
use crate::backend::cpu::depthwise::planes::{Made, PlanePart, PlaneParts, Planes};
use crate::backend::cpu::depthwise::vectors::{Real, packed};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, four};
use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{Compute, Result, Shape, Tensor};

/// Multiplications that are worth a job of the pool, where loading and storing an element counts as [`MOVED`].
const JOB: usize = 1 << 17;
const MOVED: usize = 4;
/// Elements of what a part reads and of what it gives: both stay in the caches of a core.
const PART: usize = 1 << 14;
/// What one copy may have at most, where windows reach far.
const LARGEST: usize = 1 << 20;
/// Phases that there are at most: columns are the way for windows that lie far apart.
const PHASES: usize = 64;
/// Windows of one group whose products with its gradients are added up by themselves.
const SLICE: usize = 1 << 16;
/// Elements behind a copy, which are read and belong to nothing: no vector has more.
const SLACK: usize = 64;

/// A direction of windows.
struct Along {
    /// Of each tap the phase that it reads, and how many elements on from the window's place.
    taps: Vec<(usize, usize)>,
    /// The first element of each phase that a tap reads.
    phases: Vec<usize>,
    /// The most that a tap is on from the window's place.
    reach: usize,
    stride: usize,
    padding: usize,
}

impl Along {
    fn new(w: &Windows, d: usize) -> Along {
        let (stride, mut phases) = (w.stride[d], Vec::new());
        let tap = |k: usize| {
            let (first, shift) = (k * w.dilation[d] % stride, k * w.dilation[d] / stride);
            let known = phases.iter().position(|&phase| phase == first);
            (known.unwrap_or_else(|| (phases.push(first), phases.len() - 1).1), shift)
        };
        let taps: Vec<(usize, usize)> = (0..w.kernel[d]).map(tap).collect();
        Along { reach: taps[taps.len() - 1].1, taps, phases, stride, padding: w.padding[d] }
    }

    /// The elements of a phase that `first..first + size` of the image are: the first one, and how many.
    fn span(&self, first: usize, size: usize) -> (usize, usize) {
        let from = (first + self.padding) / self.stride;
        (from, (first + size - 1 + self.padding) / self.stride - from + 1)
    }
}

/// Images `[N, groups * inner, image]`, windows `[N, groups * outer, grid]` and a weight `[groups * outer, inner, kernel]`, of which
/// each is made of the other two.
pub(crate) struct Depthwise {
    w: Windows,
    along: [Along; 2],
    n: usize,
    groups: usize,
    inner: usize,
    outer: usize,
}

impl Convolution for Depthwise {
    fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match x.dtype.compute() {
            Compute::F64 => self.windows_as::<f64>(x, weight, bias),
            _ => self.windows_as::<f32>(x, weight, bias),
        }
    }

    fn images(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match y.dtype.compute() {
            Compute::F64 => self.images_as::<f64>(y, weight, bias),
            _ => self.images_as::<f32>(y, weight, bias),
        }
    }

    fn weight(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        match x.dtype.compute() {
            Compute::F64 => self.weight_as::<f64>(x, y, slot),
            _ => self.weight_as::<f32>(x, y, slot),
        }
    }
}

impl Depthwise {
    /// If this is the way for it, and there is something to do.
    pub(crate) fn new(w: Windows, images: &Tensor, weight: &Tensor, groups: usize) -> Option<Depthwise> {
        let (n, [outer, inner, ..]) = (images.shape().dims()[0], four(weight));
        let sizes = [n, inner, outer, w.image[0], w.image[1], w.grid[0], w.grid[1], w.kernel[0], w.kernel[1]];
        let phase_counts = [0, 1].map(|d| w.kernel[d].min(w.stride[d]));
        if sizes.contains(&0) || phase_counts[0] * phase_counts[1] > PHASES || !is_few(groups, outer / groups, inner) {
            return None;
        }
        let along = [0, 1].map(|d| Along::new(&w, d));
        let made = Depthwise { w, along, n, groups, inner, outer: outer / groups };
        let copied = |size: [usize; 2], channels: usize| {
            let [high, wide] = made.phase_size(size);
            high.saturating_mul(wide).saturating_mul(channels)
        };
        let (windows, image) = (made.parts(w.grid, 0..0).most, made.parts(w.image, 0..0).most);
        let most = copied(windows, made.inner * made.phases()).max(copied(image, made.outer));
        (most <= LARGEST).then_some(made)
    }

    fn phases(&self) -> usize {
        self.along[0].phases.len() * self.along[1].phases.len()
    }

    fn taps(&self) -> usize {
        self.w.kernel[0] * self.w.kernel[1]
    }

    /// Taps as row, column.
    fn each_tap(&self) -> impl Iterator<Item = [usize; 2]> {
        (0..self.taps()).map(|tap| [tap / self.w.kernel[1], tap % self.w.kernel[1]])
    }

    /// The parts that elements of planes are made of.
    fn parts(&self, dims: [usize; 2], range: Range<usize>) -> PlaneParts {
        let elements = (PART / (self.inner * self.phases() + self.outer)).max(1 << 10);
        // Rows that are looked at beside those of a part are few.
        let rows = (elements / dims[1]).max(2 * self.along[0].reach + 1).min(dims[0]);
        PlaneParts::new(dims, [rows, dims[1].min(2 * elements)], range)
    }

    /// Elements of each channel of a group that a job makes, of `channels` channels: whole planes, or whole rows if one channel is
    /// all that there is, or a part of a row.
    fn job(&self, [rows, columns]: [usize; 2], channels: usize) -> usize {
        let each = self.inner * self.outer * self.taps() + (self.inner + self.outer) * MOVED;
        let wanted = (JOB / each).max(1);
        match (channels, wanted) {
            (1, n) if n < columns => n,
            (1, n) if n < rows * columns => n / columns * columns,
            (_, n) => n.div_ceil(rows * columns) * rows * columns,
        }
    }

    /// What the windows of a part see of the images of a group: each channel, phase after phase. `to` has 0 in the padding if
    /// it has what a part of the same place and size sees, otherwise `is_new`.
    #[inline(always)]
    fn load_phases<C: Real>(
        &self,
        x: &Planes<C>,
        [n, group]: [usize; 2],
        part: &PlanePart,
        is_new: bool,
        to: &mut Vec<C>,
    ) {
        let ([high, wide], [rows, columns]) = (self.phase_size(part.size), &self.along);
        if is_new {
            to.clear();
            to.resize(self.inner * self.phases() * high * wide + SLACK, C::from_i32(0));
        }
        let place = |d: usize| (part.first[d] * self.along[d].stride) as isize - self.along[d].padding as isize;
        let channels = group * self.inner..(group + 1) * self.inner;
        for (channel, to) in channels.zip(to.chunks_exact_mut(self.phases() * high * wide)) {
            for (&top, to) in rows.phases.iter().zip(to.chunks_exact_mut(columns.phases.len() * high * wide)) {
                let top = place(0) + top as isize;
                if (columns.stride, &columns.phases[..]) == (2, &[0, 1]) {
                    let (even, odd) = to.split_at_mut(high * wide);
                    x.copy_by_turns([n, channel], [top, place(1)], rows.stride, wide, [even, odd]);
                    continue;
                }
                for (&left, to) in columns.phases.iter().zip(to.chunks_exact_mut(high * wide)) {
                    let first = [top, place(1) + left as isize];
                    x.copy([n, channel], first, [rows.stride, columns.stride], (wide, wide), to);
                }
            }
        }
    }

    /// Rows and columns that windows of a part of this size see of each phase.
    fn phase_size(&self, size: [usize; 2]) -> [usize; 2] {
        [0, 1].map(|d| size[d] + self.along[d].reach)
    }

    /// Where each tap of each channel reads in what a part of this size [loads](Self::load_phases).
    fn offsets(&self, size: [usize; 2], offsets: &mut Vec<usize>) {
        let [high, wide] = self.phase_size(size);
        let phases = self.along[1].phases.len();
        offsets.clear();
        for channel in 0..self.inner {
            offsets.extend(self.each_tap().map(|[row, column]| {
                let ((top, down), (left, right)) = (self.along[0].taps[row], self.along[1].taps[column]);
                ((channel * self.along[0].phases.len() + top) * phases + left) * high * wide + down * wide + right
            }));
        }
    }

    fn windows_as<C: Real>(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (weight, starts) = (numbers::<C>(weight)?, self.starts(bias, self.outer)?);
        let k = self.inner * self.taps();
        let mut weights = Vec::with_capacity(weight.len());
        for weight in weight.chunks_exact(self.outer * k) {
            packed(self.outer, k, &mut weights, |channel, tap| weight[channel * k + tap]);
        }
        self.made(x, [self.outer, self.w.grid[0], self.w.grid[1]], |x, first, made| {
            windows(self, x, &weights, &starts, first, made);
        })
    }

    /// A result `[N, groups * channels, rows, columns]` of `x`'s dtype: `f(x, first, made)` makes a part of it, from element
    /// `first` of each channel on.
    fn made<C: Real>(
        &self,
        x: &Tensor,
        [channels, rows, columns]: [usize; 3],
        f: impl Fn(Planes<C>, usize, Made<C>) + Sync,
    ) -> Result<Tensor> {
        let shape = Shape::from([self.n, self.groups * channels, rows, columns]);
        let out = Tensor::empty_like_shape(shape, x.dtype, x.device())?;
        let (job, unit) = (self.job([rows, columns], channels), channels * x.dtype.size());
        with_host(&[&x.storage], &[&out.storage], |reads, writes| {
            let x = Planes::new(x, reads[0]);
            let to = &mut writes[0][..out.numel() * out.dtype.size()];
            parallel::for_each_chunk(to, job * unit, |i, to| f(x, i * job, Made::new(out.dtype, to)));
        })?;
        Ok(out)
    }

    /// What sums of each channel start from.
    fn starts<C: Real>(&self, bias: Option<&Tensor>, channels: usize) -> Result<Vec<C>> {
        bias.map_or_else(|| Ok(vec![C::from_i32(0); self.groups * channels]), numbers)
    }

    fn images_as<C: Real>(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (weight, starts) = (numbers::<C>(weight)?, self.starts(bias, self.inner)?);
        let (taps, lefts) = (self.taps(), self.along[1].phases.len());
        let group = self.outer * self.inner * taps;
        let phase = |phase: usize| {
            let is_in =
                |&[row, column]: &[usize; 2]| self.along[0].taps[row].0 * lefts + self.along[1].taps[column].0 == phase;
            let taps_in: Vec<[usize; 2]> = self.each_tap().filter(is_in).collect();
            let mut weights = Vec::new();
            for weight in weight.chunks_exact(group) {
                packed(self.inner, self.outer * taps_in.len(), &mut weights, |channel, i| {
                    let [row, column] = taps_in[i % taps_in.len()];
                    weight[(i / taps_in.len() * self.inner + channel) * taps + row * self.w.kernel[1] + column]
                });
            }
            let shift = |[row, column]: [usize; 2]| [self.along[0].taps[row].1, self.along[1].taps[column].1];
            Phase { shifts: taps_in.into_iter().map(shift).collect(), weights }
        };
        let phases: Vec<Phase<C>> = (0..self.phases()).map(phase).collect();
        let finite: Vec<bool> = weight.chunks_exact(group).map(are_finite).collect();
        self.made(y, [self.inner, self.w.image[0], self.w.image[1]], |y, first, made| {
            Arch::new().dispatch(OfImages {
                d: self,
                y,
                phases: &phases,
                finite: &finite,
                starts: &starts,
                first,
                made,
            });
        })
    }

    fn weight_as<C: Real>(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let shape = [self.groups * self.outer, self.inner, self.w.kernel[0], self.w.kernel[1]];
        let out = match slot {
            Some(slot) => slot,
            None => Tensor::empty_like_shape(shape, x.dtype, x.device())?,
        };
        let (count, size) = (self.n * self.w.grid[0] * self.w.grid[1], self.outer * self.inner * self.taps());
        let slices = count.div_ceil(SLICE);
        let mut sums = vec![C::from_i32(0); slices * self.groups * size];
        let per_job = self.job([1, 1], 2).div_ceil(count.min(SLICE));
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

/// Whether groups are so small that products of matrices of them are not worth it.
fn is_few(groups: usize, outer: usize, inner: usize) -> bool {
    groups > 1 && outer * inner <= 256 || outer * inner == 1
}

/// The elements of a tensor, in order.
fn numbers<C: Real>(t: &Tensor) -> Result<Vec<C>> {
    let t = t.detach().contiguous()?;
    let mut made = vec![C::from_i32(0); t.numel()];
    with_host(&[&t.storage], &[], |reads, _| load_tile(t.dtype, reads[0], t.layout.offset, 1, &mut made))?;
    Ok(made)
}

fn are_finite<C: Real>(all: &[C]) -> bool {
    all.iter().fold(true, |finite, x| finite & (x.sub(*x) == C::from_i32(0)))
}
