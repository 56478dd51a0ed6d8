//! Transposed copies on the CPU, block by block: walked row by row, every element would cost a cache line of its own.

use bytemuck::Pod;

use super::collapse::Walk;
use super::elementwise::Launch;
use super::expr::Expr;
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{LARGE, Streaming};

/// Elements along each side of a block: as many pages as the processor finds at once, and whole cache lines of each.
const BLOCK: usize = 64;

/// Copies that are smaller stay in the cache however they are walked.
const SMALL: usize = 1 << 12;

/// A copy of unchanged elements whose closest neighbours in memory lie along another dimension than the last.
pub(super) struct Transpose<'a> {
    walk: &'a Walk,
    /// The dimension with the shortest steps through the source.
    near: usize,
    offset: usize,
    size: usize,
}

impl<'a> Transpose<'a> {
    /// The launch as a transposed copy, if it is one.
    pub(super) fn of(launch: &'a Launch) -> Option<Transpose<'a>> {
        let ([input], [output]) = (launch.inputs, launch.outputs) else { return None };
        let walk = &launch.walk;
        let copies = launch.program.exprs() == [Expr::input(0)] && input.dtype == output.dtype;
        if !copies || !walk.is_contiguous(1) || input.shares_storage(output) || output.numel() < SMALL {
            return None;
        }
        let strides = &walk.strides[0];
        let near = (0..strides.len()).min_by_key(|&d| (strides[d].unsigned_abs(), strides.len() - d))?;
        let last = strides.len() - 1;
        (near != last).then(|| Transpose { walk, near, offset: input.layout.offset, size: input.dtype.size() })
    }

    /// Copies from the bytes of the source's storage to the bytes of the result alone.
    pub(super) fn run(&self, from: &[u8], to: &mut [u8]) {
        match self.size {
            1 => self.copy::<u8>(from, to),
            2 => self.copy::<u16>(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
            4 => self.copy::<u32>(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
            _ => self.copy::<u64>(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
        }
    }

    fn copy<T: Pod + Send + Sync>(&self, from: &[T], to: &mut [T]) {
        let (dims, strides) = (&self.walk.dims, &self.walk.strides[0]);
        let (near, last) = (self.near, dims.len() - 1);
        // The result is `outer` pieces of `rows` rows; a row is `middle` runs of `columns`.
        let (rows, columns) = (dims[near], dims[last]);
        let row: usize = dims[near + 1..].iter().product();
        let at = |index: usize, range: std::ops::Range<usize>| {
            let mut rest = index;
            range.rev().fold(0, |sum, d| {
                let i = rest % dims[d];
                rest /= dims[d];
                sum + i as isize * strides[d]
            })
        };
        let mut jobs: Vec<(usize, usize, &mut [T])> = to
            .chunks_mut(rows * row)
            .enumerate()
            .flat_map(|(o, piece)| piece.chunks_mut(BLOCK * row).enumerate().map(move |(b, rows)| (o, b * BLOCK, rows)))
            .collect();
        let large = jobs.iter().map(|(.., part)| size_of_val(*part)).sum::<usize>() >= LARGE;
        let copy = |outer: usize, first: usize, to: &mut [T]| {
            let streaming = large.then(Streaming::new);
            let mut block = [[T::zeroed(); BLOCK]; BLOCK];
            let start = self.offset as isize + at(outer, 0..near) + first as isize * strides[near];
            for middle in 0..row / columns {
                let start = start + at(middle, near + 1..last);
                for left in (0..columns).step_by(BLOCK) {
                    let width = BLOCK.min(columns - left);
                    let height = to.len() / row;
                    for j in 0..width {
                        let start = start + (left + j) as isize * strides[last];
                        if strides[near] == 1 {
                            let line = &from[start as usize..][..height];
                            line.iter().zip(&mut block).for_each(|(x, row)| row[j] = *x);
                        } else {
                            let at = |i: usize| (start + i as isize * strides[near]) as usize;
                            block.iter_mut().take(height).enumerate().for_each(|(i, row)| row[j] = from[at(i)]);
                        }
                    }
                    for (to, block) in to.chunks_mut(row).zip(&block) {
                        let to = &mut to[middle * columns + left..][..width];
                        match &streaming {
                            Some(streaming) => streaming.copy(to, &block[..width]),
                            None => to.copy_from_slice(&block[..width]),
                        }
                    }
                }
            }
        };
        parallel::for_each(&mut jobs, |_, (outer, first, to)| copy(*outer, *first, to));
    }
}
