//! What is chosen from lines by order, on the CPU, without sorting all of them.

use super::cpu::{Ordered, compared_in};
use crate::device::{count_launch, cpu::parallel, cpu::threads};
use crate::ops::convert::load_tile;
use crate::ops::lines::Lines;
use crate::storage::with_host;
use crate::{Compute, Result, Tensor};

/// Elements a job of the pool has.
const JOB: usize = 1 << 11;
/// Elements of a long line that are read at a time.
const PIECE: usize = 1 << 14;
/// Up to so many the first are kept in order; of more those that are too many are dropped now and then.
const FEW: usize = 32;
/// Elements that are compared with the last of the first at a time.
const BLOCK: usize = 16;

/// The keys of the first elements in order, of those seen so far.
struct First<C: Ordered> {
    k: usize,
    descending: bool,
    kept: Vec<C::Key>,
    /// The key that one must be below to be among them, once there are `k`.
    limit: Option<C::Key>,
}

impl<C: Ordered> First<C> {
    fn new(k: usize, descending: bool) -> First<C> {
        First { k, descending, kept: Vec::with_capacity(k + 1), limit: None }
    }

    /// Looks at elements `first..` of a line; all before them were seen.
    fn see(&mut self, elements: &[C], first: usize) {
        for (b, block) in elements.chunks(BLOCK).enumerate() {
            if let Some(limit) = self.limit {
                // Conservative where there is NaN.
                let limit = C::value(limit, self.descending);
                let beyond = |v: &C| u32::from(if self.descending { *v <= limit } else { *v >= limit });
                if block.iter().map(beyond).sum::<u32>() == block.len() as u32 {
                    continue;
                }
            }
            for (i, v) in block.iter().enumerate() {
                self.offer(v.key(first + b * BLOCK + i, self.descending));
            }
        }
    }

    fn offer(&mut self, key: C::Key) {
        if self.limit.is_some_and(|limit| key >= limit) {
            return;
        }
        self.kept.push(key);
        if self.k <= FEW {
            let mut at = self.kept.len() - 1;
            while at > 0 && self.kept[at - 1] > key {
                self.kept[at] = self.kept[at - 1];
                at -= 1;
            }
            self.kept[at] = key;
            self.kept.truncate(self.k);
            self.limit = self.kept.get(self.k - 1).copied();
        } else if self.kept.len() == 2 * self.k {
            self.drop_others();
            self.limit = self.kept.iter().max().copied();
        }
    }

    fn drop_others(&mut self) {
        if self.kept.len() > self.k {
            self.kept.select_nth_unstable(self.k - 1);
            self.kept.truncate(self.k);
        }
    }

    /// The indices, in order.
    fn write(&mut self, to: &mut [i64]) {
        self.drop_others();
        self.kept.sort_unstable();
        to.iter_mut().zip(&self.kept).for_each(|(to, &key)| *to = C::index(key) as i64);
    }
}

/// The indices of the first `k` elements of each line of `x` along d, into `out`.
pub(super) fn first(x: &Tensor, d: usize, k: usize, descending: bool, out: &Tensor) -> Result<()> {
    match compared_in(x, x.shape().dims()[d]) {
        Compute::F32 => first_as::<f32>(x, d, k, descending, out),
        Compute::F64 => first_as::<f64>(x, d, k, descending, out),
        Compute::I64 => first_as::<i64>(x, d, k, descending, out),
    }
}

fn first_as<C: Ordered>(x: &Tensor, d: usize, k: usize, descending: bool, out: &Tensor) -> Result<()> {
    count_launch();
    let lines = Lines::new(x, d);
    with_host(&[&x.storage], &[&out.storage], |reads, writes| {
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..lines.count * k];
        let see = |kept: &mut First<C>, buffer: &mut Vec<C>, line: usize, from: usize, to: usize| {
            buffer.resize(PIECE.min(to - from), C::from_i32(0));
            let start = x.layout.offset as isize + lines.walk.offsets(line)[0];
            for first in (from..to).step_by(PIECE) {
                let piece = &mut buffer[..PIECE.min(to - first)];
                load_tile(x.dtype, reads[0], (start + first as isize * lines.step) as usize, lines.step, piece);
                kept.see(piece, first);
            }
        };
        let threads = threads();
        if lines.count < threads && lines.n >= threads * PIECE && k <= PIECE {
            // A part of the line for each thread; then the first of theirs.
            for (line, to) in out.chunks_mut(k).enumerate() {
                let parts = parallel::map(threads, 1, |i| {
                    let mut kept = First::<C>::new(k, descending);
                    let end = |i: usize| lines.n / threads * i + (lines.n % threads) * i / threads;
                    see(&mut kept, &mut Vec::new(), line, end(i), end(i + 1));
                    kept.kept
                });
                First::<C> { kept: parts.concat(), ..First::new(k, descending) }.write(to);
            }
            return;
        }
        let mut beside = if lines.inner > 1 { vec![0; out.len()] } else { Vec::new() };
        let found: &mut [i64] = if lines.inner > 1 { &mut beside } else { &mut *out };
        let group = JOB.div_ceil(lines.n);
        let part = |job: usize, found: &mut [i64]| {
            let (mut kept, mut buffer) = (First::<C>::new(k, descending), Vec::new());
            for (i, to) in found.chunks_mut(k).enumerate() {
                (kept.limit, _) = (None, kept.kept.clear());
                see(&mut kept, &mut buffer, job * group + i, 0, lines.n);
                kept.write(to);
            }
        };
        match lines.count <= group {
            true => part(0, found),
            false => parallel::for_each_chunk(found, group * k, part),
        }
        // Lines that lie side by side in the result were found one after the other.
        for (line, found) in beside.chunks(k).enumerate() {
            let to = line / lines.inner * lines.inner * k + line % lines.inner;
            out[to..].iter_mut().step_by(lines.inner).zip(found).for_each(|(to, &index)| *to = index);
        }
    })
}

/// The index of the element of each line of `x` along d that has place `which(number of NaN)` in ascending order.
pub(super) fn nth(x: &Tensor, d: usize, which: impl Fn(usize) -> usize + Sync, out: &Tensor) -> Result<()> {
    match compared_in(x, x.shape().dims()[d]) {
        Compute::F32 => nth_as::<f32>(x, d, which, out),
        Compute::F64 => nth_as::<f64>(x, d, which, out),
        Compute::I64 => nth_as::<i64>(x, d, which, out),
    }
}

fn nth_as<C: Ordered>(x: &Tensor, d: usize, which: impl Fn(usize) -> usize + Sync, out: &Tensor) -> Result<()> {
    count_launch();
    let lines = Lines::new(x, d);
    let group = JOB.div_ceil(lines.n);
    with_host(&[&x.storage], &[&out.storage], |reads, writes| {
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..lines.count];
        let part = |job: usize, out: &mut [i64]| {
            let (mut line, mut keys) = (vec![C::from_i32(0); lines.n], Vec::with_capacity(lines.n));
            for (i, to) in out.iter_mut().enumerate() {
                let start = x.layout.offset as isize + lines.walk.offsets(job * group + i)[0];
                load_tile(x.dtype, reads[0], start as usize, lines.step, &mut line);
                let nans = line.iter().filter(|v| v.partial_cmp(v).is_none()).count();
                keys.clear();
                keys.extend(line.iter().enumerate().map(|(i, v)| v.key(i, false)));
                *to = C::index(*keys.select_nth_unstable(which(nans)).1) as i64;
            }
        };
        match lines.count <= group {
            true => part(0, out),
            false => parallel::for_each_chunk(out, group, part),
        }
    })
}
