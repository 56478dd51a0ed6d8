//! The gradient of a convolution's weight: every part of the windows has sums of its own, which are added up in one order.

use std::cell::Cell;

use crate::backend::cpu::conv::scratch::{MOST, with_scratch};
use crate::backend::cpu::conv::slab::{Images, Slabs};
use crate::backend::cpu::conv::{Conv, PRODUCT, SLABS, SLACK, WINDOWS, even, slab};
use crate::backend::cpu::convert::store_tile;
use crate::device::cpu::blocks::Block;
use crate::device::cpu::gemm::Floats;
use crate::device::cpu::gemm::alone::{Left, Right};
use crate::device::cpu::{parallel, threads};
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// Steps of a product of which the right matrix stays in the first-level cache.
const STEPS: usize = 256;
/// Rows of a weight's gradient that are summed up together.
const LANES: usize = 16;

thread_local! {
    /// All sums, kept so that their pages stay.
    static SUMS: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

impl Conv {
    /// Every window times the elements that it sees, summed over all windows: of the weight's shape. Into `out` where that is given,
    /// contiguous. `windows` is contiguous.
    pub(crate) fn weight_gradient(&self, x: &Tensor, windows: &Tensor, out: Option<Tensor>) -> Result<Tensor> {
        let (dtype, size, taps) = (x.dtype, x.dtype.size(), self.taps());
        let [kh, kw] = self.w.kernel;
        let out = match out {
            Some(out) => out,
            None => Tensor::empty_like_shape([self.groups * self.outer, self.inner, kh, kw], dtype, x.device())?,
        };
        // Channels whose sums stay in the cache, and parts of the windows that have sums of their own.
        let block = even(self.inner, SLABS / (taps * self.outer));
        let blocks = self.inner.div_ceil(block);
        let parts = (2 * threads()).div_ceil(self.groups * blocks);
        let share = self.share(self.images_per_job(), (PRODUCT / self.outer).max(WINDOWS), parts.div_ceil(self.n));
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
                        kw * channels * slab::slab_stride(&self.w, &part) + SLACK,
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
                                let stride = self.alone.whole(n);
                                // Steps of which a panel stays in the first-level cache.
                                for begun in (0..count).step_by(STEPS) {
                                    let steps = STEPS.min(count - begun);
                                    let right = Right { data: &panels[begun * stride..], stride, times: 1, jump: 0 };
                                    for row in 0..kh {
                                        let data = &slabs[row * from.jump + begun..];
                                        let left = Left::Rows { data, stride: from.stride };
                                        let at = (row * block + c - first) * kw * self.outer + p * panel;
                                        let to = &mut Block::new(&mut sums[at..], some.len() * kw, n, self.outer);
                                        let size = (some.len() * kw, n, steps);
                                        self.alone.multiply(size, left, right, to, unit > begin || begun > 0);
                                    }
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
                    drop(sums);
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
                let piece = |i: usize, to: &mut [u8]| {
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
                let of_piece = LANES * self.inner * taps * size;
                match out_bytes.len() <= 1 << 14 {
                    true => out_bytes.chunks_mut(of_piece).enumerate().for_each(|(i, to)| piece(i, to)),
                    false => parallel::for_each_chunk(out_bytes, of_piece, piece),
                }
                if sums.len() <= MOST {
                    kept.set(sums);
                }
            });
        })?;
        Ok(out)
    }
}
