//! Convolutions on the CPU without an im2col matrix in memory. A job gathers the elements of some windows of an image, and multiplies them
//! while they are in its core's cache.
//!
//! Images, windows and the weight are each computed from the other two: [`Conv::forward`] is a convolution, [`Conv::transposed`] a transposed
//! convolution, and [`Conv::weight_gradient`] the gradient of the weight. The weight is packed once for all jobs. Sums are f32, in an order that
//! depends only on the sizes and the number of threads; for the weight's gradient, each part of the windows has separate sums. f16 and bf16 are widened, unless the processor multiplies pairs of bf16.

mod slab;

use std::borrow::Cow;

use crate::backend::cpu::conv::slab::{Slabs, StepElement, WindowPart, add_columns, load_pairs, pair_rows, table_len};
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::index::read_range;
use crate::backend::cpu::kernels::buffers::{Content, MAX_KEPT_ELEMENTS, with_buffer, with_scratch};
use crate::backend::cpu::kernels::gemm::Floats;
use crate::backend::cpu::kernels::gemm::serial::{LeftMatrix, RightMatrix, SerialGemm};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, sizes_4d};
use crate::device::cpu::blocks::{Block, BlockPartition, for_each_block};
use crate::device::cpu::{l2_bytes, parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// The minimum number of windows in a job.
const MIN_JOB_WINDOWS: usize = 128;
/// The number of jobs for each thread, if there is enough work.
const JOBS_PER_THREAD: usize = 4;
/// Maximum number of multiplications that one thread computes alone: it finishes before other threads have woken up.
const MAX_SERIAL_PRODUCTS: usize = 1 << 19;
/// The maximum number of image elements whose sums a job holds.
const MAX_SUM_ELEMENTS: usize = 1 << 20;
/// The maximum length of a row of an image or of windows. For longer rows, im2col is faster.
const MAX_ROW_LEN: usize = 1 << 14;
/// The maximum width of a kernel. For wider kernels, im2col is faster.
const MAX_KERNEL_WIDTH: usize = 64;
/// The number of elements above which a weight needs at least `MIN_WINDOWS_OF_LARGE_WEIGHT` windows. With fewer windows, im2col is
/// faster.
const LARGE_WEIGHT: usize = 1 << 18;
/// The minimum number of windows for a large weight.
const MIN_WINDOWS_OF_LARGE_WEIGHT: usize = 1 << 10;
/// The minimum number of windows for a large weight if the processor multiplies pairs of bf16.
const MIN_WINDOWS_OF_LARGE_PAIRED_WEIGHT: usize = 1 << 8;
/// The number of elements that kernels may read past the last slab: at most one vector.
const READ_SLACK: usize = 32;
/// The maximum number of steps of a product whose right matrix stays in the L1 cache.
const PANEL_STEPS: usize = 256;
/// The number of rows of the weight's gradient that are summed together.
const SUMMED_ROWS: usize = 16;

/// Returns the number of slab elements in a job: three eighths of the L2 cache, which also holds the product and a part of the weight.
fn slab_elements() -> usize {
    l2_bytes() * 3 / 8 / size_of::<f32>()
}

/// Returns the maximum number of elements of the product that a job computes: a quarter of the L2 cache.
fn product_elements() -> usize {
    l2_bytes() / 4 / size_of::<f32>()
}

/// A convolution of images `[N, groups * inner, image]` to windows `[N, groups * outer, grid]`, with a weight `[groups * outer, inner, kernel]`.
#[derive(Clone)]
pub(crate) struct Conv {
    serial_gemm: SerialGemm,
    w: Windows,
    n: usize,
    groups: usize,
    inner: usize,
    outer: usize,
}

/// The number of images, and of rows and columns of windows, in a job.
#[derive(Clone, Copy)]
struct JobWindows {
    images: usize,
    rows: usize,
    columns: usize,
}

impl Conv {
    /// Returns the convolution if there are kernels for it and im2col is not faster, else `None`. Requires that no size is 0, that there
    /// are enough windows for every thread and to amortise reading a large weight, and that rows and kernels fit in the caches.
    pub(crate) fn new(w: Windows, images: &Tensor, weight: &Tensor, groups: usize) -> Option<Conv> {
        let (n, [outer, inner, ..]) = (images.shape().dims()[0], sizes_4d(weight));
        let sizes = [n, inner, outer, w.image[0], w.image[1], w.grid[0], w.grid[1], w.kernel[0], w.kernel[1]];
        let floats = matches!(images.dtype, DType::F32 | DType::F16 | DType::BF16);
        if !floats || sizes.contains(&0) {
            return None;
        }
        // The forward pass sums over `inner` channels, and the gradient of the images over `outer / groups` channels.
        let for_pairs = || SerialGemm::for_pairs(inner.min(outer / groups));
        let pairs = (images.dtype == DType::BF16).then(for_pairs).flatten();
        let many = if pairs.is_some() { MIN_WINDOWS_OF_LARGE_PAIRED_WEIGHT } else { MIN_WINDOWS_OF_LARGE_WEIGHT };
        if w.image[1].max(w.grid[1]) > MAX_ROW_LEN
            || w.kernel[1] > MAX_KERNEL_WIDTH
            || (weight.numel() > LARGE_WEIGHT && n.saturating_mul(w.grid[0] * w.grid[1]) < many)
        {
            return None;
        }
        let serial_gemm = pairs.or_else(SerialGemm::for_f32)?;
        let conv = Conv { serial_gemm, w, n, groups, inner, outer: outer / groups };
        let pieces = conv.window_count().div_ceil(MIN_JOB_WINDOWS);
        let pieces = if w.grid[0] == 1 { pieces } else { pieces.min(w.grid[0]) };
        (conv.is_serial() || n * groups * pieces >= threads()).then_some(conv)
    }

    fn kernel_len(&self) -> usize {
        self.w.kernel[0] * self.w.kernel[1]
    }

    fn window_count(&self) -> usize {
        self.w.grid[0] * self.w.grid[1]
    }

    /// Returns the number of elements in a channel of an image.
    fn image_len(&self) -> usize {
        self.w.image[0] * self.w.image[1]
    }

    /// True if one thread should compute the whole convolution.
    fn is_serial(&self) -> bool {
        let sizes = [self.n, self.groups, self.window_count(), self.outer, self.inner, self.kernel_len()];
        sizes.into_iter().fold(1, usize::saturating_mul) <= MAX_SERIAL_PRODUCTS
    }

    /// Returns the number of small images that a job computes together. All threads get about equally many images.
    fn images_per_job(&self) -> usize {
        let images = (2 * MIN_JOB_WINDOWS / self.window_count()).min(self.n.div_ceil(threads())).max(1);
        self.n.div_ceil(self.n.div_ceil(images).next_multiple_of(threads()))
    }

    /// Divides windows into jobs of up to about `most` windows. A single image is divided into `pieces` pieces, unless the pieces would be too small.
    fn divide_windows(&self, images: usize, most: usize, pieces: usize) -> JobWindows {
        let ([rows, columns], plane) = (self.w.grid, self.window_count());
        if images > 1 {
            return JobWindows { images, rows, columns };
        }
        let pieces = plane.div_ceil(most).max(pieces.min(plane.div_ceil(MIN_JOB_WINDOWS)));
        let (rows, columns) = match rows {
            1 => (1, self.serial_gemm.padded_width(columns.div_ceil(pieces)).min(columns)),
            _ => (rows.div_ceil(pieces), columns),
        };
        JobWindows { images, rows, columns }
    }

    /// Returns the windows of piece `piece` of the images, beginning with image `image`.
    fn window_part(&self, job_windows: JobWindows, image: usize, piece: usize) -> WindowPart {
        let [rows, columns] = self.w.grid;
        let (row, column) = match rows {
            1 => (0, piece * job_windows.columns),
            _ => (piece * job_windows.rows, 0),
        };
        WindowPart {
            images: image..self.n.min(image + job_windows.images),
            rows: row..rows.min(row + job_windows.rows),
            columns: column..columns.min(column + job_windows.columns),
        }
    }

    /// Returns the number of pieces that an image is divided into.
    fn piece_count(&self, job_windows: JobWindows) -> usize {
        self.w.grid[0].div_ceil(job_windows.rows) * self.w.grid[1].div_ceil(job_windows.columns)
    }

    /// Returns the number of channels, at most `most`, whose slabs fit in the cache together.
    fn slab_channels<T>(&self, job_windows: JobWindows, most: usize) -> usize {
        let slabs = self.w.kernel[1] * slab::slab_stride::<T>(&self.w, &self.window_part(job_windows, 0, 0));
        even_size(most, slab_elements() * size_of::<f32>() / (slabs * size_of::<T>()))
    }

    /// Returns the number of kernel steps for `channels` channels: half as many, rounded up, if steps are pairs.
    fn steps(&self, channels: usize) -> usize {
        channels.div_ceil(self.serial_gemm.elements_per_step())
    }

    /// Loads steps from the elements of one channel, which begin at `start` and are `stride` apart. For pairs, the elements of the next
    /// channel begin at `next`.
    fn load_steps(&self, from: (&Tensor, &[u8]), start: usize, next: Option<usize>, stride: isize, to: &mut [f32]) {
        let (x, bytes) = from;
        match self.serial_gemm.elements_per_step() {
            1 => load_tile(x.dtype, bytes, start, stride, to),
            _ => load_pairs(bytemuck::cast_slice(bytes), start, next, stride, to),
        }
    }

    /// Loads the channels of a group, for a part of the windows, as rows of steps.
    fn load(&self, x: &Tensor, bytes: &[u8], group: usize, part: &WindowPart, to: &mut [f32], stride: usize) {
        let (of_image, of_step) = (part.windows_per_image(), self.serial_gemm.elements_per_step());
        for (step, o) in (0..self.outer).step_by(of_step).enumerate() {
            for (j, image) in part.images.clone().enumerate() {
                let channel = (image * self.groups + group) * self.outer + o;
                let at = channel * self.window_count() + part.rows.start * self.w.grid[1] + part.columns.start;
                let at = x.layout.offset + at;
                let next = (o + 1 < self.outer).then_some(at + self.window_count());
                self.load_steps((x, bytes), at, next, 1, &mut to[step * stride + j * of_image..][..of_image]);
            }
        }
    }

    /// Packs the weight into `pieces` pieces of `stride` elements each; `lay_out` writes one piece from rows of steps. If steps are
    /// pairs, neighbouring rows are first combined into pairs: `rows` has the number of channels and the length of a row.
    fn pack_weight(
        &self,
        (weight, bytes): (&Tensor, &[u8]),
        rows: (usize, usize),
        (pieces, stride): (usize, usize),
        lay_out: impl Fn(&[f32], usize, &mut [f32]) + Sync,
    ) -> Vec<f32> {
        let from = match self.serial_gemm.elements_per_step() {
            1 => contiguous_floats(weight, bytes),
            _ => pair_rows(&contiguous_floats(weight, bytes), rows).into(),
        };
        let mut to = vec![0.0; pieces * stride];
        match to.len() <= 1 << 14 {
            true => to.chunks_exact_mut(stride).enumerate().for_each(|(i, to)| lay_out(&from, i, to)),
            false => parallel::for_each_chunk(&mut to, stride, |i, to| lay_out(&from, i, to)),
        }
        to
    }

    /// Computes the gradient of the weight: the gradient of every window times the image elements that the window reads, summed over all
    /// windows. Writes to `out` if given, which is contiguous. `windows` is contiguous. Slabs have elements of T.
    fn sum_weight_gradient<T: StepElement>(&self, x: &Tensor, windows: &Tensor, out: Option<Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.kernel_len());
        let [kh, kw] = self.w.kernel;
        let shape = [self.groups * self.outer, self.inner, kh, kw];
        let out = out.map_or_else(|| Tensor::empty_with_shape(shape, dtype, x.device()), Ok)?;
        // A block is a number of channels whose sums fit in the cache. Each part of the windows has separate sums.
        let block = even_size(self.inner, slab_elements() / (taps * self.outer));
        let blocks = self.inner.div_ceil(block);
        let parts = (2 * threads()).div_ceil(self.groups * blocks);
        let most = (product_elements() / self.outer).max(MIN_JOB_WINDOWS);
        let job_windows = self.divide_windows(self.images_per_job(), most, parts.div_ceil(self.n));
        let pieces = self.piece_count(job_windows);
        let units = self.n.div_ceil(job_windows.images) * pieces;
        let parts = parts.min(units);
        let of_block = self.outer * block * taps;
        let channels = self.slab_channels::<T>(job_windows, block);
        let panel = self.serial_gemm.tile_columns();
        with_host(&[&x.storage, &windows.storage], &[&out.storage], |reads, writes| {
            let images = (x, reads[0]);
            let from = Floats::new(dtype, reads[1]);
            // Computes the sums of a block, ordered by row of taps, then channel, then column of taps; each has the sums for all channels
            // of the windows.
            let job = |i: usize, sums: &mut [f32]| {
                let (range, rest) = (i / (self.groups * blocks), i % (self.groups * blocks));
                let (group, first) = (rest / blocks, rest % blocks * block);
                let last = self.inner.min(first + block);
                let (begin, end) = (units * range / parts, units * (range + 1) / parts);
                for unit in begin..end {
                    let part = self.window_part(job_windows, unit / pieces * job_windows.images, unit % pieces);
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
                        table_len(&self.w, &part),
                    ];
                    with_scratch(rooms, |[slabs, panels, lines, rests, copy, table]| {
                        let [slabs, lines]: [&mut [T]; 2] = [slabs, lines].map(bytemuck::cast_slice_mut);
                        let copy: &mut [u16] = bytemuck::cast_slice_mut(copy);
                        let place = |image: usize, o: usize| {
                            let channel = (image * self.groups + group) * self.outer + o;
                            let first = part.rows.start * self.w.grid[1] + part.columns.start;
                            windows.layout.offset + channel * self.window_count() + first
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
                                let begun = j * of_image / T::ELEMENTS_PER_STEP * self.serial_gemm.padded_width(n);
                                let columns = (place(image, p * panel), self.window_count());
                                self.serial_gemm.pack_columns(from, columns, (n, of_image), &mut panels[begun..]);
                            }
                        }
                        let from = Slabs::new(&self.w, x, part, bytemuck::cast_slice_mut(table));
                        for c in (first..last).step_by(channels) {
                            let some = c..last.min(c + channels);
                            let of_group = some.clone().map(|c| group * self.inner + c);
                            from.fill(images, of_group, (&mut *lines, &mut *slabs), |_, start, to| {
                                T::load(images, start, x.strides()[3], to);
                            });
                            for (p, panels) in panels.chunks_exact(of_panel).enumerate() {
                                let n = panel.min(self.outer - p * panel);
                                let stride = self.serial_gemm.padded_width(n);
                                // Multiplies at most `PANEL_STEPS` steps at a time, so that a panel stays in the L1 cache.
                                let mut multiply = |row: usize, left: LeftMatrix, begun: usize, steps: usize| {
                                    let data = &panels[begun * stride..];
                                    let right = RightMatrix { data, stride, times: 1, jump: 0 };
                                    let at = (row * block + c - first) * kw * self.outer + p * panel;
                                    let to = &mut Block::new(&mut sums[at..], some.len() * kw, n, self.outer);
                                    let size = (some.len() * kw, n, steps);
                                    self.serial_gemm.multiply(size, left, right, to, unit > begin || begun > 0);
                                };
                                let whole = count / T::ELEMENTS_PER_STEP;
                                for begun in (0..whole).step_by(PANEL_STEPS) {
                                    for row in 0..kh {
                                        let data = &slabs[row * from.jump + begun * T::ELEMENTS_PER_STEP..];
                                        let left = T::rows(data, from.stride);
                                        multiply(row, left, begun, PANEL_STEPS.min(whole - begun));
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
                    with_scratch([SUMMED_ROWS * self.inner * taps], |[values]| {
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

impl Convolution for Conv {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.kernel_len());
        let [rows, columns] = self.w.grid;
        let out = Tensor::empty_with_shape([self.n, self.groups * self.outer, rows, columns], dtype, x.device())?;
        let jobs = (JOBS_PER_THREAD * threads()).div_ceil(self.groups);
        let images = if self.groups == 1 { self.images_per_job() } else { 1 };
        let job_windows =
            self.divide_windows(images, (product_elements() / self.outer).max(MIN_JOB_WINDOWS), jobs.div_ceil(self.n));
        let inner = self.steps(self.inner);
        let channels = self.serial_gemm.round_steps(self.slab_channels::<f32>(job_windows, inner));
        let chunks = inner.div_ceil(channels);
        let stride = self.outer * channels * taps;
        // The steps of a chunk are ordered by row of taps, then channel (or pair of channels), then column of taps.
        let lay_out = |weight: &[f32], piece: usize, to: &mut [f32]| {
            let (group, first) = (piece / chunks, piece % chunks * channels);
            let (count, kw) = (channels.min(inner - first), self.w.kernel[1]);
            let high = self.serial_gemm.panel_rows(self.outer);
            for i in 0..self.outer {
                let (panel, lane) = (i / high * high, i % high);
                let width = high.min(self.outer - panel);
                let panel = &mut to[panel * count * taps..][..width * count * taps];
                let [across, along] = self.serial_gemm.panel_strides(width, count * taps);
                let from = &weight[((group * self.outer + i) * inner + first) * taps..][..count * taps];
                for (c, from) in from.chunks_exact(taps).enumerate() {
                    for (row, from) in from.chunks_exact(kw).enumerate() {
                        for (column, x) in from.iter().enumerate() {
                            panel[((row * count + c) * kw + column) * along + lane * across] = *x;
                        }
                    }
                }
            }
        };
        let storages = [&x.storage, &weight.storage, &bias.unwrap_or(weight).storage];
        with_host(&storages, &[&out.storage], |reads, writes| {
            let images = (x, reads[0]);
            let weight =
                self.pack_weight((weight, reads[1]), (self.inner, taps), (self.groups * chunks, stride), lay_out);
            let bias = bias.map(|bias| contiguous_floats(bias, reads[2]));
            let (band, width) = (job_windows.images * self.outer, job_windows.rows * job_windows.columns * size);
            let columns = self.window_count() * size;
            let cut = BlockPartition { columns, pitch: columns, band, height: band, width };
            let to = &mut writes[0][..out.numel() * size];
            for_each_block(to, cut, self.is_serial(), |[band, _, piece], mut block| {
                let (group, first) = (band % self.groups, band / self.groups * job_windows.images);
                let part = self.window_part(job_windows, first, piece);
                let (count, of_image) = (part.count(), part.windows_per_image());
                let (wide, room) = (self.serial_gemm.padded_width(count), slab::line_buffer_len(&self.w, &part));
                let slabs = self.w.kernel[1] * channels * slab::slab_stride::<f32>(&self.w, &part) + READ_SLACK;
                // True if products are written to the result directly, without scratch memory: there is one image, and no conversion.
                let direct = dtype == DType::F32 && part.images.len() == 1;
                let of_product = if direct { 0 } else { self.outer * wide };
                with_scratch([slabs, of_product, room, table_len(&self.w, &part)], |[slabs, product, lines, table]| {
                    let from = Slabs::new(&self.w, x, part, bytemuck::cast_slice_mut(table));
                    let biased = direct && bias.is_some();
                    if let Some(bias) = bias.as_ref().filter(|_| biased) {
                        let mut to = block.floats();
                        (0..self.outer).for_each(|o| to.row(o).fill(bias[group * self.outer + o]));
                    }
                    for chunk in 0..chunks {
                        let channels = chunk * channels..inner.min((chunk + 1) * channels);
                        let k = channels.len() * self.w.kernel[1];
                        let (end, of_step) = ((group + 1) * self.inner, self.serial_gemm.elements_per_step());
                        let channels = channels.map(|step| group * self.inner + step * of_step);
                        from.fill(images, channels, (lines, slabs), |c, start, to| {
                            let next = (c + 1 < end).then(|| start.wrapping_add_signed(x.strides()[1]));
                            self.load_steps(images, start, next, x.strides()[3], to);
                        });
                        let left = LeftMatrix::Panels(&weight[(group * chunks + chunk) * stride..]);
                        let (stride, times, jump) = (from.stride, self.w.kernel[0], from.jump);
                        let right = RightMatrix { data: slabs, stride, times, jump };
                        let mut to = if direct { block.floats() } else { Block::new(product, self.outer, count, wide) };
                        let size = (self.outer, count, k);
                        self.serial_gemm.multiply(size, left, right, &mut to, chunk > 0 || biased);
                    }
                    if direct {
                        return;
                    }
                    for i in 0..block.rows() {
                        let (image, o) = (i / self.outer, i % self.outer);
                        let values = &mut product[o * wide + image * of_image..][..of_image];
                        if let Some(bias) = &bias {
                            let bias = bias[group * self.outer + o];
                            values.iter_mut().for_each(|y| *y += bias);
                        }
                        store_tile(dtype, values, block.row(i), 0, 1);
                    }
                });
            });
        })?;
        Ok(out)
    }

    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let x = &y.detach().contiguous()?;
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.kernel_len());
        let [rows, columns] = self.w.image;
        let out = Tensor::empty_with_shape([self.n, self.groups * self.inner, rows, columns], dtype, x.device())?;
        let outer = self.steps(self.outer);
        let most = (slab_elements() / outer).min(product_elements() / taps).max(1);
        let images = if self.groups == 1 { self.images_per_job() } else { 1 };
        let job_windows = self.divide_windows(images, most, 1);
        let pieces = self.piece_count(job_windows);
        let parts = (JOBS_PER_THREAD * threads()).div_ceil(self.n.div_ceil(job_windows.images) * self.groups);
        let height = if job_windows.images > 1 { self.inner } else { self.inner.div_ceil(parts) };
        let of_image = job_windows.images * self.image_len();
        let channels = even_size(
            height,
            (product_elements() / (taps * self.window_part(job_windows, 0, 0).count()))
                .min(MAX_SUM_ELEMENTS / of_image),
        );
        let height = height.next_multiple_of(channels);
        let blocks = self.inner.div_ceil(channels);
        let stride = outer * channels * taps;
        let lay_out = |weight: &[f32], piece: usize, to: &mut [f32]| {
            let (group, first) = (piece / blocks, piece % blocks * channels);
            let m = channels.min(self.inner - first) * taps;
            let high = self.serial_gemm.panel_rows(m);
            for o in 0..outer {
                let from = &weight[((group * outer + o) * self.inner + first) * taps..][..m];
                for (panel, from) in from.chunks(high).enumerate() {
                    let [across, along] = self.serial_gemm.panel_strides(from.len(), outer);
                    let to = to[panel * high * outer + o * along..].iter_mut().step_by(across);
                    to.zip(from).for_each(|(to, x)| *to = *x);
                }
            }
        };
        let storages = [&x.storage, &weight.storage, &bias.unwrap_or(weight).storage];
        with_host(&storages, &[&out.storage], |reads, writes| {
            let rows = (self.outer, self.inner * taps);
            let weight = self.pack_weight((weight, reads[1]), rows, (self.groups * blocks, stride), lay_out);
            let bias = bias.map(|bias| contiguous_floats(bias, reads[2]));
            let (columns, band) = (self.image_len() * size, job_windows.images * self.inner);
            let height_of_block = job_windows.images * height;
            let cut = BlockPartition { columns, pitch: columns, band, height: height_of_block, width: columns };
            let to = &mut writes[0][..out.numel() * size];
            for_each_block(to, cut, self.is_serial(), |[band, down, _], mut block| {
                let (group, first) = (band % self.groups, band / self.groups * job_windows.images);
                let part = self.window_part(job_windows, first, 0);
                let (count, image) = (part.count(), self.image_len());
                let (wide, of_channel) = (self.serial_gemm.padded_width(count), part.images.len() * image);
                let rooms = [outer * wide + READ_SLACK, channels * taps * wide, channels * of_channel];
                with_scratch(rooms, |[windows, product, sums]| {
                    let last = self.inner.min((down + 1) * height);
                    for from in (down * height..last).step_by(channels) {
                        let some = channels.min(last - from);
                        sums[..some * of_channel].fill(0.0);
                        for piece in 0..pieces {
                            let part = self.window_part(job_windows, first, piece);
                            let count = part.count();
                            if pieces > 1 || from == down * height {
                                self.load(x, reads[0], group, &part, &mut windows[..], wide);
                            }
                            let left = LeftMatrix::Panels(&weight[(group * blocks + from / channels) * stride..]);
                            let right = RightMatrix { data: windows, stride: wide, times: 1, jump: 0 };
                            let to = &mut Block::new(product, some * taps, count, wide);
                            self.serial_gemm.multiply((some * taps, count, outer), left, right, to, false);
                            for (c, sums) in sums.chunks_exact_mut(of_channel).take(some).enumerate() {
                                add_columns(&self.w, &part, &mut product[c * taps * wide..], wide, sums);
                            }
                        }
                        for (c, sums) in sums.chunks_exact_mut(of_channel).take(some).enumerate() {
                            if let Some(bias) = &bias {
                                let bias = bias[group * self.inner + from + c];
                                sums.iter_mut().for_each(|y| *y += bias);
                            }
                            for (i, values) in sums.chunks_exact(image).enumerate() {
                                let row = i * self.inner + from - down * height + c;
                                store_tile(dtype, values, block.row(row), 0, 1);
                            }
                        }
                    }
                });
            });
        })?;
        Ok(out)
    }

    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let windows = &y.detach().contiguous()?;
        match self.serial_gemm.elements_per_step() {
            f32::ELEMENTS_PER_STEP => self.sum_weight_gradient::<f32>(x, windows, slot),
            _ => self.sum_weight_gradient::<u16>(x, windows, slot),
        }
    }
}

/// Divides `n` into pieces of about equal size, each at most `most`, and returns the size of a piece.
fn even_size(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most.max(1)))
}

/// Returns the elements of a weight or a bias as contiguous f32.
fn contiguous_floats<'a>(t: &Tensor, bytes: &'a [u8]) -> Cow<'a, [f32]> {
    if t.is_contiguous() {
        let size = t.dtype.size();
        return Floats::new(t.dtype, &bytes[t.layout.offset * size..][..t.numel() * size]).widened();
    }
    let mut made = vec![0.0; t.numel()];
    read_range(t, bytes, &StridedDims::new(t.shape(), [t.strides()]), 0, &mut made);
    made.into()
}
