//! The gradient of a convolution's weight. Each part of the windows has separate sums; the sums of all parts are added in a fixed order.

use crate::backend::cpu::conv::scratch::{MAX_KEPT_ELEMENTS, with_scratch};
use crate::backend::cpu::conv::slab::{Images, Slabs};
use crate::backend::cpu::conv::steps::StepElement;
use crate::backend::cpu::conv::{Conv, MIN_JOB_WINDOWS, PRODUCT_ELEMENTS, READ_SLACK, SLAB_ELEMENTS, even_size, slab};
use crate::backend::cpu::convert::store_tile;
use crate::backend::cpu::kernels::buffers::{Content, with_buffer};
use crate::backend::cpu::kernels::gemm::Floats;
use crate::backend::cpu::kernels::gemm::serial::{LeftMatrix, RightMatrix};
use crate::device::cpu::blocks::Block;
use crate::device::cpu::{parallel, threads};
use crate::storage::with_host;
use crate::{Result, Tensor};

/// The maximum number of steps of a product whose right matrix stays in the L1 cache.
const PANEL_STEPS: usize = 256;
/// The number of rows of the weight's gradient that are summed together.
const SUMMED_ROWS: usize = 16;

impl Conv {
    /// Computes the gradient of the weight: the gradient of every window times the image elements that the window reads, summed over all
    /// windows. Writes to `out` if given, which is contiguous. `windows` is contiguous. Slabs have elements of T.
    pub(crate) fn sum_weight_gradient<T: StepElement>(
        &self,
        x: &Tensor,
        windows: &Tensor,
        out: Option<Tensor>,
    ) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.kernel_len());
        let [kh, kw] = self.w.kernel;
        let out = match out {
            Some(out) => out,
            None => Tensor::empty_with_shape([self.groups * self.outer, self.inner, kh, kw], dtype, x.device())?,
        };
        // A block is a number of channels whose sums fit in the cache. Each part of the windows has separate sums.
        let block = even_size(self.inner, SLAB_ELEMENTS / (taps * self.outer));
        let blocks = self.inner.div_ceil(block);
        let parts = (2 * threads()).div_ceil(self.groups * blocks);
        let job_windows = self.divide_windows(
            self.images_per_job(),
            (PRODUCT_ELEMENTS / self.outer).max(MIN_JOB_WINDOWS),
            parts.div_ceil(self.n),
        );
        let units = self.n.div_ceil(job_windows.images) * self.piece_count(job_windows);
        let parts = parts.min(units);
        let of_block = self.outer * block * taps;
        let channels = self.slab_channels::<T>(job_windows, block);
        let panel = self.serial_gemm.tile_columns();
        with_host(&[&x.storage, &windows.storage], &[&out.storage], |reads, writes| {
            let images = Images { t: x, bytes: reads[0] };
            let from = Floats::new(dtype, reads[1]);
            // Computes the sums of a block, ordered by row of taps, then channel, then column of taps; each has the sums for all channels
            // of the windows.
            let job = |i: usize, sums: &mut [f32]| {
                let (range, rest) = (i / (self.groups * blocks), i % (self.groups * blocks));
                let (group, first) = (rest / blocks, rest % blocks * block);
                let last = self.inner.min(first + block);
                let (begin, end) = (units * range / parts, units * (range + 1) / parts);
                for unit in begin..end {
                    let (image, piece) = (
                        unit / self.piece_count(job_windows) * job_windows.images,
                        unit % self.piece_count(job_windows),
                    );
                    let part = self.window_part(job_windows, image, piece);
                    let (count, of_image) = (part.count(), part.windows_per_image());
                    let of_panel = self.serial_gemm.packed_len(panel, count);
                    // If the last step of an image would include the first window of the next image, the windows of all images are copied
                    // into one sequence.
                    let copies_images = of_image % T::ELEMENTS_PER_STEP > 0 && part.images.len() > 1;
                    let rooms = [
                        kw * channels * slab::slab_stride::<T>(&self.w, &part) + READ_SLACK,
                        self.outer.div_ceil(panel) * of_panel,
                        slab::line_buffer_len(&self.w, &part),
                        channels * kw,
                        if copies_images { self.outer * count } else { 0 },
                    ];
                    with_scratch(rooms, |[slabs, panels, lines, rests, copy], table| {
                        let [slabs, lines]: [&mut [T]; 2] = [slabs, lines].map(bytemuck::cast_slice_mut);
                        let copy: &mut [u16] = bytemuck::cast_slice_mut(copy);
                        let place = |image: usize, o: usize| {
                            let channel = (image * self.groups + group) * self.outer + o;
                            let at =
                                channel * self.window_count() + part.rows.start * self.w.grid[1] + part.columns.start;
                            windows.layout.offset + at
                        };
                        if copies_images {
                            let (from, of) = (bytemuck::cast_slice(reads[1]), part.images.len());
                            for (i, to) in copy.chunks_exact_mut(of_image).take(self.outer * of).enumerate() {
                                to.copy_from_slice(&from[place(part.images.start + i % of, i / of)..][..of_image]);
                            }
                        }
                        for (p, panels) in panels.chunks_exact_mut(of_panel).enumerate() {
                            let n = panel.min(self.outer - p * panel);
                            if copies_images {
                                let copied = Floats::new(dtype, bytemuck::cast_slice(copy));
                                self.serial_gemm.pack_columns(copied, (p * panel * count, count), (n, count), panels);
                                continue;
                            }
                            for (j, image) in part.images.clone().enumerate() {
                                let to = &mut panels
                                    [j * of_image / T::ELEMENTS_PER_STEP * self.serial_gemm.padded_width(n)..];
                                self.serial_gemm.pack_columns(
                                    from,
                                    (place(image, p * panel), self.window_count()),
                                    (n, of_image),
                                    to,
                                );
                            }
                        }
                        let from = Slabs::new(&self.w, x, part, table);
                        for c in (first..last).step_by(channels) {
                            let some = c..last.min(c + channels);
                            let of_group = some.clone().map(|c| group * self.inner + c);
                            from.fill(&images, of_group, (&mut *lines, &mut *slabs), |_, start, to| {
                                T::load((x, images.bytes), start, x.strides()[3], to);
                            });
                            for (p, panels) in panels.chunks_exact(of_panel).enumerate() {
                                let n = panel.min(self.outer - p * panel);
                                let stride = self.serial_gemm.padded_width(n);
                                // Multiplies at most `PANEL_STEPS` steps at a time, so that a panel stays in the L1 cache.
                                let mut multiply = |row: usize, left: LeftMatrix, begun: usize, steps: usize| {
                                    let right =
                                        RightMatrix { data: &panels[begun * stride..], stride, times: 1, jump: 0 };
                                    let at = (row * block + c - first) * kw * self.outer + p * panel;
                                    let to = &mut Block::new(&mut sums[at..], some.len() * kw, n, self.outer);
                                    let size = (some.len() * kw, n, steps);
                                    self.serial_gemm.multiply(size, left, right, to, unit > begin || begun > 0);
                                };
                                let whole = count / T::ELEMENTS_PER_STEP;
                                for begun in (0..whole).step_by(PANEL_STEPS) {
                                    for row in 0..kh {
                                        let data = &slabs[row * from.jump + begun * T::ELEMENTS_PER_STEP..];
                                        multiply(
                                            row,
                                            T::rows(data, from.stride),
                                            begun,
                                            PANEL_STEPS.min(whole - begun),
                                        );
                                    }
                                }
                                // If the number of windows is odd, the last window gets a separate product: padding the pair with a zero
                                // could produce NaN.
                                for row in 0..if count > whole * T::ELEMENTS_PER_STEP { kh } else { 0 } {
                                    let last = slabs[row * from.jump + count - 1..].iter().step_by(from.stride);
                                    rests.iter_mut().zip(last).for_each(|(to, x)| *to = x.step());
                                    multiply(row, LeftMatrix::Rows { data: rests, stride: 1 }, whole, 1);
                                }
                            }
                        }
                    });
                }
            };
            let of_part = self.groups * blocks * of_block;
            with_buffer(Content::Sums, MAX_KEPT_ELEMENTS, |sums| {
                if sums.len() < parts * of_part {
                    *sums = Vec::new(); // frees the buffer before a larger one is allocated
                    *sums = vec![0.0; parts * of_part];
                }
                let used = &mut sums[..parts * of_part];
                if self.is_serial() {
                    used.chunks_exact_mut(of_block).enumerate().for_each(|(i, sums)| job(i, sums));
                } else {
                    parallel::for_each_chunk(used, of_block, job);
                }
                let used = &*used;
                // Sums over the parts for a few channels of the windows (rows of the weight) at a time.
                let piece = |i: usize, to: &mut [u8]| {
                    with_scratch([SUMMED_ROWS * self.inner * taps], |[values], _| {
                        let (first, count) = (i * SUMMED_ROWS, to.len() / (self.inner * taps * size));
                        for row in 0..self.inner * taps {
                            let (c, tap) = (row / taps, row % taps);
                            let place = (tap / kw * block + c % block) * kw + tap % kw;
                            // A piece can contain channels of several groups.
                            let mut lane = 0;
                            while lane < count {
                                let (group, o) = ((first + lane) / self.outer, (first + lane) % self.outer);
                                let some = (self.outer - o).min(count - lane);
                                let at = (group * blocks + c / block) * of_block + place * self.outer + o;
                                let mut total = [0f32; SUMMED_ROWS];
                                for part in used.chunks_exact(of_part) {
                                    total.iter_mut().zip(&part[at..at + some]).for_each(|(y, x)| *y += x);
                                }
                                for (l, y) in total[..some].iter().enumerate() {
                                    values[(lane + l) * self.inner * taps + row] = *y;
                                }
                                lane += some;
                            }
                        }
                        store_tile(dtype, &values[..to.len() / size], to, 0, 1);
                    });
                };
                let out_bytes = &mut writes[0][out.layout.offset * size..][..out.numel() * size];
                let of_piece = SUMMED_ROWS * self.inner * taps * size;
                match out_bytes.len() <= 1 << 14 {
                    true => out_bytes.chunks_mut(of_piece).enumerate().for_each(|(i, to)| piece(i, to)),
                    false => parallel::for_each_chunk(out_bytes, of_piece, piece),
                }
            });
        })?;
        Ok(out)
    }
}
