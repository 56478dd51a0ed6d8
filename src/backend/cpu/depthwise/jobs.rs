//! The jobs of a depthwise convolution: windows from images, images from windows, and gradients of the weight.

use crate::backend::cpu::depthwise::planes::{JobOutput, PlanePart, Planes};
use crate::backend::cpu::depthwise::vectors::{VectorFloat, channel_block, correlate, dots, interleave, lanes};
use crate::backend::cpu::depthwise::{Depthwise, READ_SLACK, SLICE_WINDOWS, are_finite};
use crate::backend::cpu::vectorised::vectorised;

vectorised! {
    /// Computes windows from images, beginning with element `first` of each channel.
    pub(crate) fn windows<'a, C: VectorFloat>(
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
pub(crate) struct Phase<C> {
    /// For each tap that reads the phase, the tap's offset from the window's position.
    pub(crate) shifts: Vec<[usize; 2]>,
    pub(crate) weights: Vec<C>,
}

/// A job that computes images from windows, beginning with element `first` of each channel.
pub(crate) struct ImagesJob<'a, C> {
    pub(crate) d: &'a Depthwise,
    pub(crate) y: Planes<'a, C>,
    pub(crate) phases: &'a [Phase<C>],
    /// For each group, whether all weights of the group are finite.
    pub(crate) finite: &'a [bool],
    pub(crate) starts: &'a [C],
    pub(crate) first: usize,
    pub(crate) made: JobOutput<'a, C>,
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
    pub(crate) fn images<'a, C: VectorFloat>(simd: S, job: ImagesJob<'a, C>) {
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
    pub(crate) fn weight<'a, C: VectorFloat>(
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
