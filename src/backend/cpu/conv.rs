//! Convolutions on the CPU without an im2col matrix in memory. A job gathers the elements of some windows of an image, and multiplies them
//! while they are in its core's cache.
//!
//! Images, windows and the weight are each computed from the other two: [`Conv::forward`] is a convolution, [`Conv::transposed`] a transposed
//! convolution, and [`Conv::weight_gradient`] the gradient of the weight. The weight is packed once for all jobs. Sums are f32, in an order that
//! depends only on the sizes and the number of threads. f16 and bf16 are widened, unless the processor multiplies pairs of bf16.

pub(crate) mod scratch;
pub(crate) mod slab;
pub(crate) mod steps;
pub(crate) mod weight;

use std::borrow::Cow;

use crate::backend::cpu::conv::scratch::with_scratch;
use crate::backend::cpu::conv::slab::{Images, Slabs, WindowPart, add_columns};
use crate::backend::cpu::conv::steps::{StepElement, load_pairs, pair_rows};
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::gather::read_range;
use crate::backend::cpu::kernels::gemm::Floats;
use crate::backend::cpu::kernels::gemm::serial::{LeftMatrix, RightMatrix, SerialGemm};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, sizes_4d};
use crate::device::cpu::blocks::{Block, BlockPartition, for_each_block};
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// The number of slab elements in a job. Slabs and product stay in the L2 cache.
pub(crate) const SLAB_ELEMENTS: usize = 3 << 15;
/// The maximum number of elements of the product that a job computes.
pub(crate) const PRODUCT_ELEMENTS: usize = 1 << 16;
/// The minimum number of windows in a job.
pub(crate) const MIN_JOB_WINDOWS: usize = 128;
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
pub(crate) const READ_SLACK: usize = 32;

/// A convolution of images `[N, groups * inner, image]` to windows `[N, groups * outer, grid]`, with a weight `[groups * outer, inner, kernel]`.
#[derive(Clone)]
pub(crate) struct Conv {
    pub(crate) serial_gemm: SerialGemm,
    pub(crate) w: Windows,
    pub(crate) n: usize,
    pub(crate) groups: usize,
    pub(crate) inner: usize,
    pub(crate) outer: usize,
}

/// The number of images, and of rows and columns of windows, in a job.
#[derive(Clone, Copy)]
pub(crate) struct JobWindows {
    pub(crate) images: usize,
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

    pub(crate) fn kernel_len(&self) -> usize {
        self.w.kernel[0] * self.w.kernel[1]
    }

    pub(crate) fn window_count(&self) -> usize {
        self.w.grid[0] * self.w.grid[1]
    }

    /// Returns the number of elements in a channel of an image.
    fn image_len(&self) -> usize {
        self.w.image[0] * self.w.image[1]
    }

    /// True if one thread should compute the whole convolution.
    pub(crate) fn is_serial(&self) -> bool {
        [self.n, self.groups, self.window_count(), self.outer, self.inner, self.kernel_len()]
            .into_iter()
            .fold(1, usize::saturating_mul)
            <= MAX_SERIAL_PRODUCTS
    }

    /// Returns the number of small images that a job computes together. All threads get about equally many images.
    pub(crate) fn images_per_job(&self) -> usize {
        let images = (2 * MIN_JOB_WINDOWS / self.window_count()).min(self.n.div_ceil(threads())).max(1);
        self.n.div_ceil(self.n.div_ceil(images).next_multiple_of(threads()))
    }

    /// Divides windows into jobs of up to about `most` windows. A single image is divided into `pieces` pieces, unless the pieces would be too small.
    pub(crate) fn divide_windows(&self, images: usize, most: usize, pieces: usize) -> JobWindows {
        let ([rows, columns], plane) = (self.w.grid, self.window_count());
        if images > 1 {
            return JobWindows { images, rows, columns };
        }
        let pieces = plane.div_ceil(most).max(pieces.min(plane.div_ceil(MIN_JOB_WINDOWS)));
        match rows {
            1 => JobWindows {
                images,
                rows,
                columns: self.serial_gemm.padded_width(columns.div_ceil(pieces)).min(columns),
            },
            _ => JobWindows { images, rows: rows.div_ceil(pieces), columns },
        }
    }

    /// Returns the windows of piece `piece` of the images, beginning with image `image`.
    pub(crate) fn window_part(&self, job_windows: JobWindows, image: usize, piece: usize) -> WindowPart {
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
    pub(crate) fn piece_count(&self, job_windows: JobWindows) -> usize {
        self.w.grid[0].div_ceil(job_windows.rows) * self.w.grid[1].div_ceil(job_windows.columns)
    }

    /// Returns the number of channels, at most `most`, whose slabs fit in the cache together.
    pub(crate) fn slab_channels<T>(&self, job_windows: JobWindows, most: usize) -> usize {
        let slabs = self.w.kernel[1] * slab::slab_stride::<T>(&self.w, &self.window_part(job_windows, 0, 0));
        even_size(most, SLAB_ELEMENTS * size_of::<f32>() / (slabs * size_of::<T>()))
    }

    /// Returns the number of kernel steps for `channels` channels: half as many, rounded up, if steps are pairs.
    fn steps(&self, channels: usize) -> usize {
        channels.div_ceil(self.serial_gemm.elements_per_step())
    }

    /// Loads steps from the elements of one channel, which begin at `start` and are `stride` apart. For pairs, the elements of the next
    /// channel begin at `next`.
    fn load_steps(
        &self,
        (x, bytes): (&Tensor, &[u8]),
        start: usize,
        next: Option<usize>,
        stride: isize,
        to: &mut [f32],
    ) {
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
}

impl Convolution for Conv {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.kernel_len());
        let [rows, columns] = self.w.grid;
        let out = Tensor::empty_with_shape([self.n, self.groups * self.outer, rows, columns], dtype, x.device())?;
        let jobs = (JOBS_PER_THREAD * threads()).div_ceil(self.groups);
        let images = if self.groups == 1 { self.images_per_job() } else { 1 };
        let job_windows =
            self.divide_windows(images, (PRODUCT_ELEMENTS / self.outer).max(MIN_JOB_WINDOWS), jobs.div_ceil(self.n));
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
            let images = Images { t: x, bytes: reads[0] };
            let weight =
                self.pack_weight((weight, reads[1]), (self.inner, taps), (self.groups * chunks, stride), lay_out);
            let bias = bias.map(|bias| contiguous_floats(bias, reads[2]));
            let (band, width) = (job_windows.images * self.outer, job_windows.rows * job_windows.columns * size);
            let columns = self.window_count() * size;
            let cut = BlockPartition { columns, pitch: columns, band, height: band, width };
            for_each_block(
                &mut writes[0][..out.numel() * size],
                cut,
                self.is_serial(),
                |[band, _, piece], mut block| {
                    let (group, first) = (band % self.groups, band / self.groups * job_windows.images);
                    let part = self.window_part(job_windows, first, piece);
                    let (count, of_image) = (part.count(), part.windows_per_image());
                    let (wide, room) = (self.serial_gemm.padded_width(count), slab::line_buffer_len(&self.w, &part));
                    let slabs = self.w.kernel[1] * channels * slab::slab_stride::<f32>(&self.w, &part) + READ_SLACK;
                    // True if products are written to the result directly, without scratch memory: there is one image, and no conversion.
                    let direct = dtype == DType::F32 && part.images.len() == 1;
                    let of_product = if direct { 0 } else { self.outer * wide };
                    with_scratch([slabs, of_product, room], |[slabs, product, lines], table| {
                        let from = Slabs::new(&self.w, x, part, table);
                        let biased = direct && bias.is_some();
                        if let Some(bias) = bias.as_ref().filter(|_| biased) {
                            let mut to = block.floats();
                            (0..self.outer).for_each(|o| to.row(o).fill(bias[group * self.outer + o]));
                        }
                        for chunk in 0..chunks {
                            let channels = chunk * channels..inner.min((chunk + 1) * channels);
                            let k = channels.len() * self.w.kernel[1];
                            let (end, of_step) = ((group + 1) * self.inner, self.serial_gemm.elements_per_step());
                            from.fill(
                                &images,
                                channels.map(|step| group * self.inner + step * of_step),
                                (lines, slabs),
                                |c, start, to| {
                                    let next = (c + 1 < end).then(|| start.wrapping_add_signed(x.strides()[1]));
                                    self.load_steps((x, images.bytes), start, next, x.strides()[3], to);
                                },
                            );
                            let left = LeftMatrix::Panels(&weight[(group * chunks + chunk) * stride..]);
                            let right = RightMatrix {
                                data: slabs,
                                stride: from.stride,
                                times: self.w.kernel[0],
                                jump: from.jump,
                            };
                            let size = (self.outer, count, k);
                            match direct {
                                true => self.serial_gemm.multiply(
                                    size,
                                    left,
                                    right,
                                    &mut block.floats(),
                                    chunk > 0 || biased,
                                ),
                                false => {
                                    let to = &mut Block::new(product, self.outer, count, wide);
                                    self.serial_gemm.multiply(size, left, right, to, chunk > 0);
                                }
                            }
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
                },
            );
        })?;
        Ok(out)
    }

    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let x = &y.detach().contiguous()?;
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.kernel_len());
        let [rows, columns] = self.w.image;
        let out = Tensor::empty_with_shape([self.n, self.groups * self.inner, rows, columns], dtype, x.device())?;
        let outer = self.steps(self.outer);
        let most = (SLAB_ELEMENTS / outer).min(PRODUCT_ELEMENTS / taps).max(1);
        let images = if self.groups == 1 { self.images_per_job() } else { 1 };
        let job_windows = self.divide_windows(images, most, 1);
        let pieces = self.piece_count(job_windows);
        let parts = (JOBS_PER_THREAD * threads()).div_ceil(self.n.div_ceil(job_windows.images) * self.groups);
        let height = if job_windows.images > 1 { self.inner } else { self.inner.div_ceil(parts) };
        let of_image = job_windows.images * self.image_len();
        let channels = even_size(
            height,
            (PRODUCT_ELEMENTS / (taps * self.window_part(job_windows, 0, 0).count())).min(MAX_SUM_ELEMENTS / of_image),
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
            for_each_block(
                &mut writes[0][..out.numel() * size],
                cut,
                self.is_serial(),
                |[band, down, _], mut block| {
                    let (group, first) = (band % self.groups, band / self.groups * job_windows.images);
                    let part = self.window_part(job_windows, first, 0);
                    let (count, image) = (part.count(), self.image_len());
                    let (wide, of_channel) = (self.serial_gemm.padded_width(count), part.images.len() * image);
                    let rooms = [outer * wide + READ_SLACK, channels * taps * wide, channels * of_channel];
                    with_scratch(rooms, |[windows, product, sums], _| {
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
                },
            );
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
pub(crate) fn even_size(n: usize, most: usize) -> usize {
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
