//! Copying, computing and storing parts of planes.

use std::ops::Range;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::depthwise::vectors::{VectorFloat, copy_row, copy_strided, deinterleave};
use crate::backend::problem::windows::sizes_4d;
use crate::{DType, Tensor};

/// A tensor `[N, C, rows, columns]`, whose planes a job reads.
#[derive(Clone, Copy)]
pub(crate) struct Planes<'a, C> {
    t: &'a Tensor,
    bytes: &'a [u8],
    /// The storage's elements if they have the compute type, otherwise empty.
    elements: &'a [C],
}

impl<'a, C: VectorFloat> Planes<'a, C> {
    pub(crate) fn new(t: &'a Tensor, bytes: &'a [u8]) -> Planes<'a, C> {
        let elements = if t.dtype == C::COMPUTE.dtype() { bytemuck::cast_slice(bytes) } else { &[] };
        Planes { t, bytes, elements }
    }

    /// Copies every `step`th element of a plane, beginning at `first`, into the rows of `to`: `width` elements into each row of `pitch`
    /// elements, until `to` ends. Where the source position is outside the plane, `to` is left unchanged.
    #[inline(always)]
    pub(crate) fn copy(
        &self,
        [n, channel]: [usize; 2],
        first: [isize; 2],
        step: [usize; 2],
        (width, pitch): (usize, usize),
        to: &mut [C],
    ) {
        let ([top, bottom], [left, right]) =
            (self.inside_range(0, first[0], step[0], to.len() / pitch), self.inside_range(1, first[1], step[1], width));
        if left >= right {
            return;
        }
        let s = self.t.strides();
        let start = self.start([n, channel], [first[0], first[1] + (left * step[1]) as isize]);
        for row in top..bottom {
            let start = start + (row * step[0]) as isize * s[2];
            let to = &mut to[row * pitch + left..row * pitch + right];
            match self.in_place() {
                true => copy_strided(to, &self.elements[start as usize..], step[1]),
                false => load_tile(self.t.dtype, self.bytes, start as usize, s[3] * step[1] as isize, to),
            }
        }
    }

    /// Copies elements like [`copy`](Self::copy), but even columns into `even` and odd columns into `odd`, in rows of `pitch` elements.
    #[inline(always)]
    pub(crate) fn copy_even_odd(
        &self,
        plane: [usize; 2],
        first: [isize; 2],
        step: usize,
        pitch: usize,
        [even, odd]: [&mut [C]; 2],
    ) {
        if !self.in_place() {
            self.copy(plane, first, [step, 2], (pitch, pitch), even);
            return self.copy(plane, [first[0], first[1] + 1], [step, 2], (pitch, pitch), odd);
        }
        let ([top, bottom], [left, right]) =
            (self.inside_range(0, first[0], step, even.len() / pitch), self.inside_range(1, first[1], 1, 2 * pitch));
        if left >= right {
            return;
        }
        let start = self.start(plane, [first[0], first[1] + left as isize]);
        for row in top..bottom {
            let start = start + (row * step) as isize * self.t.strides()[2];
            let mut from = &self.elements[start as usize..][..right - left];
            let (even, odd) = (&mut even[row * pitch..][..pitch], &mut odd[row * pitch..][..pitch]);
            if !left.is_multiple_of(2) {
                (odd[left / 2], from) = (from[0], &from[1..]);
            }
            let (first, pairs) = (left.div_ceil(2), from.len() / 2);
            if let Some(&last) = from.get(2 * pairs) {
                even[first + pairs] = last;
            }
            deinterleave(&mut even[first..first + pairs], &mut odd[first..first + pairs], &from[..2 * pairs]);
        }
    }

    /// Returns the index range of the positions inside the plane, among the `count` positions `first`, `first + step`, ... along dim `d`.
    #[inline(always)]
    fn inside_range(&self, d: usize, first: isize, step: usize, count: usize) -> [usize; 2] {
        // A division takes as long as copying a short row, so it is avoided for step 1.
        let steps = |n: usize| if step == 1 { n } else { n.div_ceil(step) };
        [-first, sizes_4d(self.t)[2 + d] as isize - first].map(|end| steps(end.max(0) as usize).min(count))
    }

    fn in_place(&self) -> bool {
        self.t.strides()[3] == 1 && !self.elements.is_empty()
    }

    fn start(&self, [n, channel]: [usize; 2], [row, column]: [isize; 2]) -> isize {
        let s = self.t.strides();
        self.t.layout.offset as isize + n as isize * s[0] + channel as isize * s[1] + row * s[2] + column * s[3]
    }
}

/// The memory for a job's results: elements of the compute type, or bytes of another dtype to which results are converted.
pub(crate) enum JobOutput<'a, C> {
    Elements(&'a mut [C]),
    Bytes(&'a mut [u8], DType),
}

impl<'a, C: VectorFloat> JobOutput<'a, C> {
    pub(crate) fn new(dtype: DType, bytes: &'a mut [u8]) -> JobOutput<'a, C> {
        match dtype == C::COMPUTE.dtype() {
            true => JobOutput::Elements(bytemuck::cast_slice_mut(bytes)),
            false => JobOutput::Bytes(bytes, dtype),
        }
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            JobOutput::Elements(to) => to.len(),
            JobOutput::Bytes(to, dtype) => to.len() / dtype.size(),
        }
    }

    #[inline(always)]
    pub(crate) fn store(&mut self, at: usize, row: &[C]) {
        match self {
            JobOutput::Elements(to) => copy_row(&mut to[at..at + row.len()], row),
            JobOutput::Bytes(to, dtype) => store_tile(*dtype, row, to, at, 1),
        }
    }
}

/// A part of a plane: some of its rows, or some elements of one row.
pub(crate) struct PlanePart {
    pub(crate) plane: usize,
    pub(crate) first: [usize; 2],
    pub(crate) size: [usize; 2],
}

/// An iterator that divides a range of elements of consecutive planes into parts.
pub(crate) struct PlaneParts {
    dims: [usize; 2],
    /// The maximum numbers of rows and columns in a part.
    pub(crate) most: [usize; 2],
    /// The plane and position of the next part, and the number of elements left.
    plane: usize,
    first: [usize; 2],
    left: usize,
}

impl PlaneParts {
    pub(crate) fn new(dims: [usize; 2], most: [usize; 2], range: Range<usize>) -> PlaneParts {
        let of_plane = dims[0].saturating_mul(dims[1]);
        let (plane, place) = (range.start / of_plane, range.start % of_plane);
        PlaneParts { dims, most, plane, first: [place / dims[1], place % dims[1]], left: range.len() }
    }
}

impl Iterator for PlaneParts {
    type Item = PlanePart;

    fn next(&mut self) -> Option<PlanePart> {
        let ([rows, columns], first) = (self.dims, self.first);
        if self.left == 0 {
            return None;
        }
        let most = self.most[0].min(rows - first[0]);
        let size = match first[1] == 0 && columns <= self.left && columns <= self.most[1] {
            true if columns * most <= self.left => [most, columns],
            true => [self.left / columns, columns],
            false => [1, (columns - first[1]).min(self.left).min(self.most[1])],
        };
        let part = PlanePart { plane: self.plane, first, size };
        self.left -= size[0] * size[1];
        self.first = match first[1] + size[1] == columns {
            true => [first[0] + size[0], 0],
            false => [first[0], first[1] + size[1]],
        };
        if self.first[0] == rows {
            (self.plane, self.first) = (self.plane + 1, [0; 2]);
        }
        Some(part)
    }
}
