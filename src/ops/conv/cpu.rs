//! Convolutions on the CPU, without columns in memory: jobs of some windows of an image each, whose columns stay in the cache of
//! the core that multiplies them.
//!
//! Of images, windows and a weight that meet in a convolution, each is a product of the other two: [`Conv::windows`] of a
//! convolution, [`Conv::images`] of a transposed one, [`Conv::weight`] of their gradients. The weight is laid out once for all
//! jobs. Sums are f32, in an order that depends on the sizes and on the number of threads alone.

use std::cell::Cell;

use super::slab::{self, Images, Part, Slabs, fold};
use crate::device::count_launch;
use crate::device::cpu::blocks::{Cut, for_each_block};
use crate::device::cpu::gemm::Floats;
use crate::device::cpu::gemm::alone::{Alone, Left, Right};
use crate::device::cpu::{parallel, threads};
use crate::ops::convert::{load_tile, store_tile};
use crate::ops::window::{Windows, four};
use crate::storage::driver::host::advise_huge;
use crate::storage::with_host;
use crate::{DType, Device, Result, Tensor};

/// Elements of slabs and of a product that a job has at a time: they stay in the second-level cache.
const SLABS: usize = 3 << 15;
const PRODUCT: usize = 1 << 16;
/// Windows of a job that are worth one, and jobs for each thread where there are so many.
const WINDOWS: usize = 128;
const JOBS: usize = 4;
/// Up to this many multiplications one thread is done before others have woken up.
const ALONE: usize = 1 << 19;
/// What is read behind the last slab: up to a vector.
const SLACK: usize = 32;

/// Images `[N, groups * inner, image]`, windows `[N, groups * outer, grid]` and a weight `[groups * outer, inner, kernel]`.
#[derive(Clone)]
pub(super) struct Conv {
    alone: Alone,
    w: Windows,
    n: usize,
    groups: usize,
    inner: usize,
    outer: usize,
}

/// Windows of a job.
#[derive(Clone, Copy)]
struct Share {
    images: usize,
    rows: usize,
    columns: usize,
}

impl Conv {
    /// If there are kernels for it, and something to do.
    pub(super) fn new(w: Windows, images: &Tensor, weight: &Tensor, groups: usize) -> Option<Conv> {
        let (n, [outer, inner, ..]) = (images.shape().dims()[0], four(weight));
        let sizes = [n, inner, outer, w.image[0], w.image[1], w.grid[0], w.grid[1], w.kernel[0], w.kernel[1]];
        let floats = matches!(images.dtype, DType::F32 | DType::F16 | DType::BF16);
        if images.device() != Device::Cpu || !floats || sizes.contains(&0) {
            return None;
        }
        Some(Conv { alone: Alone::get()?, w, n, groups, inner, outer: outer / groups })
    }

    fn taps(&self) -> usize {
        self.w.kernel[0] * self.w.kernel[1]
    }

    fn plane(&self) -> usize {
        self.w.grid[0] * self.w.grid[1]
    }

    fn image(&self) -> usize {
        self.w.image[0] * self.w.image[1]
    }

    /// Whether one thread should do it.
    fn is_small(&self) -> bool {
        [self.n, self.groups, self.plane(), self.outer, self.inner, self.taps()]
            .into_iter()
            .fold(1, usize::saturating_mul)
            <= ALONE
    }

    /// Images that a job has together, because they are small, of `jobs` jobs.
    fn together(&self, jobs: usize) -> usize {
        (2 * WINDOWS / self.plane()).min(self.n / jobs).max(1)
    }

    /// How windows are shared out, up to about `most` of them a job; those of an image in `pieces` pieces, unless these are too
    /// small.
    fn share(&self, images: usize, most: usize, pieces: usize) -> Share {
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
    fn part(&self, share: Share, image: usize, piece: usize) -> Part {
        let [rows, columns] = self.w.grid;
        let (row, column) = match rows {
            1 => (0, piece * share.columns),
            _ => (piece * share.rows, 0),
        };
        Part {
            images: image..self.n.min(image + share.images),
            rows: row..rows.min(row + share.rows),
            columns: column..columns.min(column + share.columns),
        }
    }

    /// Pieces of an image that a share has.
    fn pieces(&self, share: Share) -> usize {
        self.w.grid[0].div_ceil(share.rows) * self.w.grid[1].div_ceil(share.columns)
    }

    /// Channels whose slabs stay in the cache together, of up to `most`.
    fn channels(&self, share: Share, most: usize) -> usize {
        let slabs = self.w.kernel[1] * slab::apart(&self.w, &self.part(share, 0, 0));
        even(most, SLABS / slabs)
    }

    /// Every window's products with the weight, summed, plus the bias.
    pub(super) fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.taps());
        let [rows, columns] = self.w.grid;
        let out = Tensor::empty_like_shape([self.n, self.groups * self.outer, rows, columns], dtype, Device::Cpu)?;
        let jobs = (JOBS * threads()).div_ceil(self.groups);
        let images = if self.groups == 1 { self.together(jobs) } else { 1 };
        let share = self.share(images, (PRODUCT / self.outer).max(WINDOWS), jobs.div_ceil(self.n));
        let channels = self.channels(share, self.inner);
        let chunks = self.inner.div_ceil(channels);
        let apart = self.outer * channels * taps;
        // Steps of a chunk: rows of taps, its channels, columns of taps.
        let lay_out = |weight: &[f32], piece: usize, to: &mut [f32]| {
            let (group, first) = (piece / chunks, piece % chunks * channels);
            let (count, kw) = (channels.min(self.inner - first), self.w.kernel[1]);
            let high = self.alone.rows(self.outer);
            for i in 0..self.outer {
                let (panel, lane) = (i / high * high, i % high);
                let width = high.min(self.outer - panel);
                let panel = &mut to[panel * count * taps..][..width * count * taps];
                let from = &weight[((group * self.outer + i) * self.inner + first) * taps..][..count * taps];
                for (c, from) in from.chunks_exact(taps).enumerate() {
                    for (row, from) in from.chunks_exact(kw).enumerate() {
                        for (column, x) in from.iter().enumerate() {
                            panel[((row * count + c) * kw + column) * width + lane] = *x;
                        }
                    }
                }
            }
        };
        let storages = [&x.storage, &weight.storage, &bias.unwrap_or(weight).storage];
        with_host(&storages, &[&out.storage], |reads, writes| {
            let images = Images { t: x, bytes: reads[0] };
            let weight = self.laid_out(weight, reads[1], (self.groups * chunks, apart), lay_out);
            let bias = bias.map(|bias| plain(bias, reads[2]));
            let (band, width) = (share.images * self.outer, share.rows * share.columns * size);
            let cut = Cut { columns: self.plane() * size, band, height: band, width };
            for_each_block(writes[0], cut, self.is_small(), |[band, _, piece], mut block| {
                let (group, first) = (band % self.groups, band / self.groups * share.images);
                let part = self.part(share, first, piece);
                let (count, of_image) = (part.count(), part.of_image());
                let (wide, room) = (self.alone.whole(count), Slabs::room(&self.w, &part));
                let slabs = self.w.kernel[1] * channels * slab::apart(&self.w, &part) + SLACK;
                with_scratch([slabs, self.outer * wide, room], |[slabs, product, lines], table| {
                    let from = Slabs::new(&self.w, x, part, table);
                    for chunk in 0..chunks {
                        let channels = chunk * channels..self.inner.min((chunk + 1) * channels);
                        let k = channels.len() * self.w.kernel[1];
                        let of_group = |c: usize| group * self.inner + c;
                        from.fill(&images, of_group(channels.start)..of_group(channels.end), lines, slabs);
                        let left = Left::Panels(&weight[(group * chunks + chunk) * apart..]);
                        let right = Right { data: slabs, apart: from.apart, times: self.w.kernel[0], jump: from.jump };
                        self.alone.multiply((self.outer, count, k), left, right, (product, wide), chunk > 0);
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
        count_launch();
        out.storage.bump_version();
        Ok(out)
    }

    /// Every window times the weight, added up in images, plus the bias. `x` is contiguous.
    pub(super) fn images(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.taps());
        let [rows, columns] = self.w.image;
        let out = Tensor::empty_like_shape([self.n, self.groups * self.inner, rows, columns], dtype, Device::Cpu)?;
        let most = (SLABS / self.outer).min(PRODUCT / taps).max(1);
        let images = if self.groups == 1 { self.together(JOBS * threads()) } else { 1 };
        let share = self.share(images, most, 1);
        let pieces = self.pieces(share);
        let parts = (JOBS * threads()).div_ceil(self.n.div_ceil(share.images) * self.groups);
        let height = if share.images > 1 { self.inner } else { self.inner.div_ceil(parts) };
        let channels = even(height, PRODUCT / (taps * self.part(share, 0, 0).count()));
        let height = height.next_multiple_of(channels);
        let blocks = self.inner.div_ceil(channels);
        let apart = self.outer * channels * taps;
        let lay_out = |weight: &[f32], piece: usize, to: &mut [f32]| {
            let (group, first) = (piece / blocks, piece % blocks * channels);
            let m = channels.min(self.inner - first) * taps;
            let high = self.alone.rows(m);
            for o in 0..self.outer {
                let from = &weight[((group * self.outer + o) * self.inner + first) * taps..][..m];
                for (panel, from) in from.chunks(high).enumerate() {
                    to[panel * high * self.outer + o * from.len()..][..from.len()].copy_from_slice(from);
                }
            }
        };
        let storages = [&x.storage, &weight.storage, &bias.unwrap_or(weight).storage];
        with_host(&storages, &[&out.storage], |reads, writes| {
            let weight = self.laid_out(weight, reads[1], (self.groups * blocks, apart), lay_out);
            let bias = bias.map(|bias| plain(bias, reads[2]));
            let cut = Cut {
                columns: self.image() * size,
                band: share.images * self.inner,
                height: share.images * height,
                width: self.image() * size,
            };
            for_each_block(writes[0], cut, self.is_small(), |[band, down, _], mut block| {
                let (group, first) = (band % self.groups, band / self.groups * share.images);
                let part = self.part(share, first, 0);
                let (count, image) = (part.count(), self.image());
                let (wide, of_channel) = (self.alone.whole(count), part.images.len() * image);
                let rooms = [self.outer * wide + SLACK, channels * taps * wide, channels * of_channel];
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
                            let left = Left::Panels(&weight[(group * blocks + from / channels) * apart..]);
                            let right = Right { data: windows, apart: wide, times: 1, jump: 0 };
                            self.alone.multiply((some * taps, count, self.outer), left, right, (product, wide), false);
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
        count_launch();
        out.storage.bump_version();
        Ok(out)
    }

    /// Every window times the elements that it sees, summed over all windows: of the weight's shape. Into `out` where that is given,
    /// contiguous. `windows` is contiguous.
    pub(super) fn weight(&self, x: &Tensor, windows: &Tensor, out: Option<Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.taps());
        let [kh, kw] = self.w.kernel;
        let out = match out {
            Some(out) => out,
            None => Tensor::empty_like_shape([self.groups * self.outer, self.inner, kh, kw], dtype, Device::Cpu)?,
        };
        // Channels whose sums stay in the cache, and parts of the windows that have sums of their own.
        let block = even(self.inner, SLABS / (taps * self.outer));
        let blocks = self.inner.div_ceil(block);
        let parts = (2 * threads()).div_ceil(self.groups * blocks);
        let share = self.share(self.together(parts), (PRODUCT / self.outer).max(WINDOWS), parts.div_ceil(self.n));
        let units = self.n.div_ceil(share.images) * self.pieces(share);
        let parts = parts.min(units);
        let of_block = self.outer * block * taps;
        let channels = self.channels(share, block);
        let panel = self.alone.columns();
        with_host(&[&x.storage, &windows.storage], &[&out.storage], |reads, writes| {
            let images = Images { t: x, bytes: reads[0] };
            let from = match dtype {
                DType::F32 => Floats::F32(bytemuck::cast_slice(reads[1])),
                DType::F16 => Floats::F16(bytemuck::cast_slice(reads[1])),
                _ => Floats::BF16(bytemuck::cast_slice(reads[1])),
            };
            // The sums of a block: for each row of taps, channel and column of taps those of all windows' channels.
            let job = |i: usize, sums: &mut [f32]| {
                let (range, rest) = (i / (self.groups * blocks), i % (self.groups * blocks));
                let (group, first) = (rest / blocks, rest % blocks * block);
                let last = self.inner.min(first + block);
                let (begin, end) = (units * range / parts, units * (range + 1) / parts);
                for unit in begin..end {
                    let (image, piece) = (unit / self.pieces(share) * share.images, unit % self.pieces(share));
                    let part = self.part(share, image, piece);
                    let (count, of_image) = (part.count(), part.of_image());
                    let of_panel = self.alone.room(panel, count);
                    let rooms = [
                        kw * channels * slab::apart(&self.w, &part) + SLACK,
                        self.outer.div_ceil(panel) * of_panel,
                        Slabs::room(&self.w, &part),
                    ];
                    with_scratch(rooms, |[slabs, panels, lines], table| {
                        for (p, panels) in panels.chunks_exact_mut(of_panel).enumerate() {
                            let n = panel.min(self.outer - p * panel);
                            for (j, image) in part.images.clone().enumerate() {
                                let channel = (image * self.groups + group) * self.outer + p * panel;
                                let at = channel * self.plane() + part.rows.start * self.w.grid[1] + part.columns.start;
                                let place = (windows.layout.offset + at, self.plane());
                                let to = &mut panels[j * of_image * self.alone.whole(n)..];
                                self.alone.lay_out(from, place, (n, of_image), to);
                            }
                        }
                        let from = Slabs::new(&self.w, x, part, table);
                        for c in (first..last).step_by(channels) {
                            let some = c..last.min(c + channels);
                            let of_group = |c: usize| group * self.inner + c;
                            from.fill(&images, of_group(some.start)..of_group(some.end), lines, slabs);
                            for (p, panels) in panels.chunks_exact(of_panel).enumerate() {
                                let n = panel.min(self.outer - p * panel);
                                let apart = self.alone.whole(n);
                                for row in 0..kh {
                                    let left = Left::Rows { data: &slabs[row * from.jump..], apart: from.apart };
                                    let right = Right { data: panels, apart, times: 1, jump: 0 };
                                    let at = (row * block + c - first) * kw * self.outer + p * panel;
                                    let to = (&mut sums[at..], self.outer);
                                    self.alone.multiply((some.len() * kw, n, count), left, right, to, unit > begin);
                                }
                            }
                        }
                    });
                }
            };
            let of_part = self.groups * blocks * of_block;
            SUMS.with(|kept| {
                let mut sums = kept.take();
                if sums.len() < parts * of_part {
                    sums = vec![0.0; parts * of_part];
                }
                let used = &mut sums[..parts * of_part];
                if self.is_small() {
                    used.chunks_exact_mut(of_block).enumerate().for_each(|(i, sums)| job(i, sums));
                } else {
                    parallel::for_each_chunk(used, of_block, job);
                }
                let used = &*used;
                // Some of the windows' channels at a time: rows of the weight.
                let turn = |i: usize, to: &mut [u8]| {
                    with_scratch([LANES * self.inner * taps], |[values], _| {
                        let (first, count) = (i * LANES, to.len() / (self.inner * taps * size));
                        for row in 0..self.inner * taps {
                            let (c, tap) = (row / taps, row % taps);
                            let place = (tap / kw * block + c % block) * kw + tap % kw;
                            // The channels of several groups may be next to one another.
                            let mut lane = 0;
                            while lane < count {
                                let (group, o) = ((first + lane) / self.outer, (first + lane) % self.outer);
                                let some = (self.outer - o).min(count - lane);
                                let at = (group * blocks + c / block) * of_block + place * self.outer + o;
                                let mut total = [0f32; LANES];
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
                let of_turn = LANES * self.inner * taps * size;
                match out_bytes.len() <= 1 << 14 {
                    true => out_bytes.chunks_mut(of_turn).enumerate().for_each(|(i, to)| turn(i, to)),
                    false => parallel::for_each_chunk(out_bytes, of_turn, turn),
                }
                kept.set(sums);
            });
        })?;
        count_launch();
        out.storage.bump_version();
        Ok(out)
    }

    /// The channels of a group of a part of the windows, as rows.
    fn load(&self, x: &Tensor, bytes: &[u8], group: usize, part: &Part, to: &mut [f32], apart: usize) {
        let of_image = part.of_image();
        for o in 0..self.outer {
            for (j, image) in part.images.clone().enumerate() {
                let channel = (image * self.groups + group) * self.outer + o;
                let at = channel * self.plane() + part.rows.start * self.w.grid[1] + part.columns.start;
                let to = &mut to[o * apart + j * of_image..][..of_image];
                load_tile(x.dtype, bytes, x.layout.offset + at, 1, to);
            }
        }
    }

    /// `pieces` pieces of the weight, `apart` elements from one to the next, each as `lay_out` writes it.
    fn laid_out(
        &self,
        weight: &Tensor,
        bytes: &[u8],
        (pieces, apart): (usize, usize),
        lay_out: impl Fn(&[f32], usize, &mut [f32]) + Sync,
    ) -> Vec<f32> {
        let from = plain(weight, bytes);
        let mut to = vec![0.0; pieces * apart];
        match to.len() <= 1 << 14 {
            true => to.chunks_exact_mut(apart).enumerate().for_each(|(i, to)| lay_out(&from, i, to)),
            false => parallel::for_each_chunk(&mut to, apart, |i, to| lay_out(&from, i, to)),
        }
        to
    }
}

/// Rows of a weight's gradient that are summed up together.
const LANES: usize = 16;

/// `n` in pieces of about one size, at most `most`.
fn even(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most.max(1)))
}

/// The elements of a weight or a bias, one after another.
fn plain<'a>(t: &Tensor, bytes: &'a [u8]) -> std::borrow::Cow<'a, [f32]> {
    if t.dtype == DType::F32 && t.is_contiguous() {
        return bytemuck::cast_slice(bytes)[t.layout.offset..][..t.numel()].into();
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

thread_local! {
    /// What a job works in, kept so that its pages stay.
    static SCRATCH: Cell<(Vec<f32>, Vec<isize>)> = const { Cell::new((Vec::new(), Vec::new())) };
    /// Sums of a weight's gradient.
    static SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// Calls `f` with room for as many elements each, which begins where a line does.
fn with_scratch<const N: usize>(rooms: [usize; N], f: impl FnOnce([&mut [f32]; N], &mut Vec<isize>)) {
    const LINE: usize = 16;
    /// Elements of a huge page.
    const HUGE: usize = 1 << 19;
    SCRATCH.with(|kept| {
        let (mut buffer, mut table) = kept.take();
        let need: usize = rooms.iter().map(|room| room.next_multiple_of(LINE)).sum();
        let aligned = |buffer: &[f32]| buffer.as_ptr().align_offset(HUGE * size_of::<f32>());
        if buffer.len() < need.saturating_add(aligned(&buffer)) {
            buffer = Vec::with_capacity(need.next_multiple_of(HUGE) + HUGE);
            advise_huge(buffer.spare_capacity_mut());
            buffer.resize(need.next_multiple_of(HUGE) + aligned(&buffer), 0.0);
        }
        let first = aligned(&buffer);
        let mut rest = &mut buffer[first..];
        let parts = rooms.map(|room| {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(room.next_multiple_of(LINE));
            rest = behind;
            &mut part[..room]
        });
        f(parts, &mut table);
        kept.set((buffer, table));
    });
}
