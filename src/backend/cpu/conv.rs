//! Convolutions on the CPU without im2col in memory: a job takes some windows of an image and multiplies them while they are
//! in its core's cache.
//!
//! Images, windows and the weight are each a product of the other two: [`Conv::windows`] is a convolution, [`Conv::images`]
//! a transposed one, [`Conv::weight`] the gradient of the weight. The weight is packed once for all jobs. Sums are f32, in an
//! order that depends only on the sizes and on the number of threads. Halves are widened, unless the processor multiplies pairs of bf16.

pub(crate) mod scratch;
pub(crate) mod slab;
pub(crate) mod steps;
pub(crate) mod weight;

use std::borrow::Cow;

use crate::backend::cpu::conv::scratch::with_scratch;
use crate::backend::cpu::conv::slab::{Images, Slabs, WindowPart, fold};
use crate::backend::cpu::conv::steps::{load_pairs, paired};
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, four};
use crate::device::cpu::blocks::{Block, Cut, for_each_block};
use crate::device::cpu::gemm::Floats;
use crate::device::cpu::gemm::alone::{Alone, Left, Right};
use crate::device::cpu::{parallel, threads};
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// Elements of slabs and of a product that a job has at a time: they stay in the second-level cache.
pub(crate) const SLABS: usize = 3 << 15;
pub(crate) const PRODUCT: usize = 1 << 16;
/// Windows of a job that are worth one, and jobs for each thread where there are so many.
pub(crate) const WINDOWS: usize = 128;
const JOBS: usize = 4;
/// Up to this many multiplications one thread is done before others have woken up.
const ALONE: usize = 1 << 19;
/// Elements that the sums of images have in a job, where these are smaller.
const SUMS: usize = 1 << 20;
/// Columns of images, taps of a row, a weight's elements and windows beyond or below which columns are the better way.
const LONG: usize = 1 << 14;
const WIDE: usize = 64;
const LARGE: usize = 1 << 18;
const MANY: usize = 1 << 10;
const MANY_OF_PAIRS: usize = 1 << 8;
/// What is read behind the last slab: up to a vector.
pub(crate) const SLACK: usize = 32;

/// Images `[N, groups * inner, image]`, windows `[N, groups * outer, grid]` and a weight `[groups * outer, inner, kernel]`.
#[derive(Clone)]
pub(crate) struct Conv {
    pub(crate) alone: Alone,
    pub(crate) w: Windows,
    pub(crate) n: usize,
    pub(crate) groups: usize,
    pub(crate) inner: usize,
    pub(crate) outer: usize,
}

/// Windows of a job.
#[derive(Clone, Copy)]
pub(crate) struct Share {
    pub(crate) images: usize,
    rows: usize,
    columns: usize,
}

impl Conv {
    /// If there are kernels for it, something to do, enough windows that every thread has some and that a weight which is larger
    /// than the caches is worth reading for each job, and rows and kernels of which some fit into these.
    pub(crate) fn new(w: Windows, images: &Tensor, weight: &Tensor, groups: usize) -> Option<Conv> {
        let (n, [outer, inner, ..]) = (images.shape().dims()[0], four(weight));
        let sizes = [n, inner, outer, w.image[0], w.image[1], w.grid[0], w.grid[1], w.kernel[0], w.kernel[1]];
        let floats = matches!(images.dtype, DType::F32 | DType::F16 | DType::BF16);
        if !floats || sizes.contains(&0) {
            return None;
        }
        // Sums of images and of their gradients are over the channels of a group.
        let of_pairs = || Alone::of_pairs(inner.min(outer / groups));
        let pairs = (images.dtype == DType::BF16).then(of_pairs).flatten();
        let many = if pairs.is_some() { MANY_OF_PAIRS } else { MANY };
        if w.image[1].max(w.grid[1]) > LONG
            || w.kernel[1] > WIDE
            || (weight.numel() > LARGE && n.saturating_mul(w.grid[0] * w.grid[1]) < many)
        {
            return None;
        }
        let alone = pairs.or_else(Alone::get)?;
        let conv = Conv { alone, w, n, groups, inner, outer: outer / groups };
        let pieces = conv.plane().div_ceil(WINDOWS);
        let pieces = if w.grid[0] == 1 { pieces } else { pieces.min(w.grid[0]) };
        (conv.is_small() || n * groups * pieces >= threads()).then_some(conv)
    }

    pub(crate) fn taps(&self) -> usize {
        self.w.kernel[0] * self.w.kernel[1]
    }

    pub(crate) fn plane(&self) -> usize {
        self.w.grid[0] * self.w.grid[1]
    }

    fn image(&self) -> usize {
        self.w.image[0] * self.w.image[1]
    }

    /// Whether one thread should do it.
    pub(crate) fn is_small(&self) -> bool {
        [self.n, self.groups, self.plane(), self.outer, self.inner, self.taps()]
            .into_iter()
            .fold(1, usize::saturating_mul)
            <= ALONE
    }

    /// Images that a job has together because they are small, as many in each thread's jobs.
    pub(crate) fn images_per_job(&self) -> usize {
        let images = (2 * WINDOWS / self.plane()).min(self.n.div_ceil(threads())).max(1);
        self.n.div_ceil(self.n.div_ceil(images).next_multiple_of(threads()))
    }

    /// How windows are shared out, up to about `most` of them a job; those of an image in `pieces` pieces, unless these are too
    /// small.
    pub(crate) fn share(&self, images: usize, most: usize, pieces: usize) -> Share {
        let ([rows, columns], plane) = (self.w.grid, self.plane());
        if images > 1 {
            return Share { images, rows, columns };
        }
        let pieces = plane.div_ceil(most).max(pieces.min(plane.div_ceil(WINDOWS)));
        match rows {
            1 => Share { images, rows, columns: self.alone.whole(columns.div_ceil(pieces)).min(columns) },
            _ => Share { images, rows: rows.div_ceil(pieces), columns },
        }
    }

    /// The windows of piece `piece` of those `images` that begin with the given one.
    pub(crate) fn part(&self, share: Share, image: usize, piece: usize) -> WindowPart {
        let [rows, columns] = self.w.grid;
        let (row, column) = match rows {
            1 => (0, piece * share.columns),
            _ => (piece * share.rows, 0),
        };
        WindowPart {
            images: image..self.n.min(image + share.images),
            rows: row..rows.min(row + share.rows),
            columns: column..columns.min(column + share.columns),
        }
    }

    /// Pieces of an image that a share has.
    pub(crate) fn pieces(&self, share: Share) -> usize {
        self.w.grid[0].div_ceil(share.rows) * self.w.grid[1].div_ceil(share.columns)
    }

    /// Channels whose slabs stay in the cache together, of up to `most`.
    pub(crate) fn channels<T>(&self, share: Share, most: usize) -> usize {
        let slabs = self.w.kernel[1] * slab::slab_stride::<T>(&self.w, &self.part(share, 0, 0));
        even(most, SLABS * size_of::<f32>() / (slabs * size_of::<T>()))
    }

    /// Steps of so many channels.
    fn steps(&self, channels: usize) -> usize {
        channels.div_ceil(self.alone.of_step())
    }

    /// Steps of the elements from `start` on, each next one `stride` elements on, of a channel and, where there is one, the next.
    fn load_steps(
        &self,
        (x, bytes): (&Tensor, &[u8]),
        start: usize,
        next: Option<usize>,
        stride: isize,
        to: &mut [f32],
    ) {
        match self.alone.of_step() {
            1 => load_tile(x.dtype, bytes, start, stride, to),
            _ => load_pairs(bytemuck::cast_slice(bytes), start, next, stride, to),
        }
    }

    /// The channels of a group of a part of the windows, as rows of steps.
    fn load(&self, x: &Tensor, bytes: &[u8], group: usize, part: &WindowPart, to: &mut [f32], stride: usize) {
        let (of_image, of_step) = (part.of_image(), self.alone.of_step());
        for (step, o) in (0..self.outer).step_by(of_step).enumerate() {
            for (j, image) in part.images.clone().enumerate() {
                let channel = (image * self.groups + group) * self.outer + o;
                let at = channel * self.plane() + part.rows.start * self.w.grid[1] + part.columns.start;
                let at = x.layout.offset + at;
                let next = (o + 1 < self.outer).then_some(at + self.plane());
                self.load_steps((x, bytes), at, next, 1, &mut to[step * stride + j * of_image..][..of_image]);
            }
        }
    }

    /// `pieces` pieces of the weight, `stride` elements from one to the next, each as `lay_out` writes it from rows of steps: `rows`
    /// of them have those of as many channels.
    fn laid_out(
        &self,
        (weight, bytes): (&Tensor, &[u8]),
        rows: (usize, usize),
        (pieces, stride): (usize, usize),
        lay_out: impl Fn(&[f32], usize, &mut [f32]) + Sync,
    ) -> Vec<f32> {
        let from = match self.alone.of_step() {
            1 => plain(weight, bytes),
            _ => paired(&plain(weight, bytes), rows).into(),
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
    /// Every window's products with the weight, summed, plus the bias.
    fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.taps());
        let [rows, columns] = self.w.grid;
        let out = Tensor::empty_like_shape([self.n, self.groups * self.outer, rows, columns], dtype, x.device())?;
        let jobs = (JOBS * threads()).div_ceil(self.groups);
        let images = if self.groups == 1 { self.images_per_job() } else { 1 };
        let share = self.share(images, (PRODUCT / self.outer).max(WINDOWS), jobs.div_ceil(self.n));
        let inner = self.steps(self.inner);
        let channels = self.alone.whole_steps(self.channels::<f32>(share, inner));
        let chunks = inner.div_ceil(channels);
        let stride = self.outer * channels * taps;
        // Steps of a chunk: rows of taps, its channels or pairs of these, columns of taps.
        let lay_out = |weight: &[f32], piece: usize, to: &mut [f32]| {
            let (group, first) = (piece / chunks, piece % chunks * channels);
            let (count, kw) = (channels.min(inner - first), self.w.kernel[1]);
            let high = self.alone.rows(self.outer);
            for i in 0..self.outer {
                let (panel, lane) = (i / high * high, i % high);
                let width = high.min(self.outer - panel);
                let panel = &mut to[panel * count * taps..][..width * count * taps];
                let [across, along] = self.alone.panel(width, count * taps);
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
            let weight = self.laid_out((weight, reads[1]), (self.inner, taps), (self.groups * chunks, stride), lay_out);
            let bias = bias.map(|bias| plain(bias, reads[2]));
            let (band, width) = (share.images * self.outer, share.rows * share.columns * size);
            let cut = Cut { columns: self.plane() * size, band, height: band, width };
            for_each_block(
                &mut writes[0][..out.numel() * size],
                cut,
                self.is_small(),
                |[band, _, piece], mut block| {
                    let (group, first) = (band % self.groups, band / self.groups * share.images);
                    let part = self.part(share, first, piece);
                    let (count, of_image) = (part.count(), part.of_image());
                    let (wide, room) = (self.alone.whole(count), slab::room(&self.w, &part));
                    let slabs = self.w.kernel[1] * channels * slab::slab_stride::<f32>(&self.w, &part) + SLACK;
                    // Written where it belongs; or first to the scratch, to be converted or because images lie apart.
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
                            let (end, of_step) = ((group + 1) * self.inner, self.alone.of_step());
                            from.fill(
                                &images,
                                channels.map(|step| group * self.inner + step * of_step),
                                (lines, slabs),
                                |c, start, to| {
                                    let next = (c + 1 < end).then(|| start.wrapping_add_signed(x.strides()[1]));
                                    self.load_steps((x, images.bytes), start, next, x.strides()[3], to);
                                },
                            );
                            let left = Left::Panels(&weight[(group * chunks + chunk) * stride..]);
                            let right =
                                Right { data: slabs, stride: from.stride, times: self.w.kernel[0], jump: from.jump };
                            let size = (self.outer, count, k);
                            match direct {
                                true => {
                                    self.alone.multiply(size, left, right, &mut block.floats(), chunk > 0 || biased)
                                }
                                false => {
                                    let to = &mut Block::new(product, self.outer, count, wide);
                                    self.alone.multiply(size, left, right, to, chunk > 0);
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

    /// Every window times the weight, added up in images, plus the bias.
    fn images(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let x = &y.detach().contiguous()?;
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.taps());
        let [rows, columns] = self.w.image;
        let out = Tensor::empty_like_shape([self.n, self.groups * self.inner, rows, columns], dtype, x.device())?;
        let outer = self.steps(self.outer);
        let most = (SLABS / outer).min(PRODUCT / taps).max(1);
        let images = if self.groups == 1 { self.images_per_job() } else { 1 };
        let share = self.share(images, most, 1);
        let pieces = self.pieces(share);
        let parts = (JOBS * threads()).div_ceil(self.n.div_ceil(share.images) * self.groups);
        let height = if share.images > 1 { self.inner } else { self.inner.div_ceil(parts) };
        let of_image = share.images * self.image();
        let channels = even(height, (PRODUCT / (taps * self.part(share, 0, 0).count())).min(SUMS / of_image));
        let height = height.next_multiple_of(channels);
        let blocks = self.inner.div_ceil(channels);
        let stride = outer * channels * taps;
        let lay_out = |weight: &[f32], piece: usize, to: &mut [f32]| {
            let (group, first) = (piece / blocks, piece % blocks * channels);
            let m = channels.min(self.inner - first) * taps;
            let high = self.alone.rows(m);
            for o in 0..outer {
                let from = &weight[((group * outer + o) * self.inner + first) * taps..][..m];
                for (panel, from) in from.chunks(high).enumerate() {
                    let [across, along] = self.alone.panel(from.len(), outer);
                    let to = to[panel * high * outer + o * along..].iter_mut().step_by(across);
                    to.zip(from).for_each(|(to, x)| *to = *x);
                }
            }
        };
        let storages = [&x.storage, &weight.storage, &bias.unwrap_or(weight).storage];
        with_host(&storages, &[&out.storage], |reads, writes| {
            let rows = (self.outer, self.inner * taps);
            let weight = self.laid_out((weight, reads[1]), rows, (self.groups * blocks, stride), lay_out);
            let bias = bias.map(|bias| plain(bias, reads[2]));
            let cut = Cut {
                columns: self.image() * size,
                band: share.images * self.inner,
                height: share.images * height,
                width: self.image() * size,
            };
            for_each_block(&mut writes[0][..out.numel() * size], cut, self.is_small(), |[band, down, _], mut block| {
                let (group, first) = (band % self.groups, band / self.groups * share.images);
                let part = self.part(share, first, 0);
                let (count, image) = (part.count(), self.image());
                let (wide, of_channel) = (self.alone.whole(count), part.images.len() * image);
                let rooms = [outer * wide + SLACK, channels * taps * wide, channels * of_channel];
                with_scratch(rooms, |[windows, product, sums], _| {
                    let last = self.inner.min((down + 1) * height);
                    for from in (down * height..last).step_by(channels) {
                        let some = channels.min(last - from);
                        sums[..some * of_channel].fill(0.0);
                        for piece in 0..pieces {
                            let part = self.part(share, first, piece);
                            let count = part.count();
                            if pieces > 1 || from == down * height {
                                self.load(x, reads[0], group, &part, &mut windows[..], wide);
                            }
                            let left = Left::Panels(&weight[(group * blocks + from / channels) * stride..]);
                            let right = Right { data: windows, stride: wide, times: 1, jump: 0 };
                            let to = &mut Block::new(product, some * taps, count, wide);
                            self.alone.multiply((some * taps, count, outer), left, right, to, false);
                            for (c, sums) in sums.chunks_exact_mut(of_channel).take(some).enumerate() {
                                fold(&self.w, &part, &mut product[c * taps * wide..], wide, sums);
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

    fn weight(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        self.weight_gradient(x, &y.detach().contiguous()?, slot)
    }
}

/// `n` in pieces of about one size, at most `most`.
pub(crate) fn even(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most.max(1)))
}

/// Elements of one of the dtypes that there are kernels for.
pub(crate) fn floats(dtype: DType, bytes: &[u8]) -> Floats<'_> {
    match dtype {
        DType::F32 => Floats::F32(bytemuck::cast_slice(bytes)),
        DType::F16 => Floats::F16(bytemuck::cast_slice(bytes)),
        _ => Floats::BF16(bytemuck::cast_slice(bytes)),
    }
}

/// The elements of a weight or a bias, one after another.
fn plain<'a>(t: &Tensor, bytes: &'a [u8]) -> Cow<'a, [f32]> {
    if t.is_contiguous() {
        let size = t.dtype.size();
        return floats(t.dtype, &bytes[t.layout.offset * size..][..t.numel() * size]).widened();
    }
    let mut made = vec![0.0; t.numel()];
    let (dims, strides) = (t.shape().dims(), t.strides());
    let (row, step) = (dims[dims.len() - 1], strides[dims.len() - 1]);
    for (i, made) in made.chunks_exact_mut(row).enumerate() {
        let (mut rest, mut at) = (i, t.layout.offset as isize);
        for d in (0..dims.len() - 1).rev() {
            at += (rest % dims[d]) as isize * strides[d];
            rest /= dims[d];
        }
        load_tile(t.dtype, bytes, at as usize, step, made);
    }
    made.into()
}
