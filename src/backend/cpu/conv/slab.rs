//! The im2col and col2im steps of one job of a convolution, in the cache of its core.
//!
//! A slab holds the elements that one column of kernel taps reads in one channel, for each row of windows in turn. If windows are one row
//! apart, the taps of a column read the same image rows, and a slab stores each row once: for a 3 x 3 kernel, slabs take a third of the
//! memory of the im2col matrix.
//!
//! The elements of slabs are f32, pairs of bf16 from neighbouring channels packed in 32 bits, or bf16. One multiplication step of the kernels
//! takes an f32, or two bf16 packed in 32 bits, from neighbouring channels or neighbouring windows.

use std::marker::PhantomData;
use std::ops::Range;

use bytemuck::Pod;

use crate::Tensor;
use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::dispatch::vectorised;
use crate::backend::cpu::kernels::gemm::serial::LeftMatrix;
use crate::backend::problem::windows::Windows;
use crate::device::cpu::parallel;

/// A range of images, and a range of windows in each: some rows of windows, or a part of the only row. With several images, all windows
/// of each.
#[derive(Debug, Clone)]
pub(crate) struct WindowPart {
    pub(crate) images: Range<usize>,
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
}

impl WindowPart {
    pub(crate) fn count(&self) -> usize {
        self.images.len() * self.windows_per_image()
    }

    pub(crate) fn windows_per_image(&self) -> usize {
        self.rows.len() * self.columns.len()
    }
}

/// True if slabs of T are filled directly from the rows of x, whose elements have the size of T and are contiguous. Other rows are
/// first loaded into line buffers.
fn in_place<T>(x: &Tensor) -> bool {
    x.dtype.size() == size_of::<T>() && x.strides()[3] == 1
}

/// The value in the table of row offsets for a row in the padding.
const PADDING_ROW: isize = isize::MIN;

/// The slabs of a part of the windows, with elements of type T.
pub(crate) struct Slabs<'a, T> {
    w: &'a Windows,
    part: WindowPart,
    /// The rows of each image that the windows read.
    image_rows: Range<usize>,
    /// For each row of a slab, the offset in the image from which the row is copied.
    from: &'a [isize],
    /// The distance within a slab from the elements of one row of taps to those of the next; `stride` is the distance between slabs. Both
    /// in elements.
    pub(crate) jump: usize,
    pub(crate) stride: usize,
    elements: PhantomData<T>,
}

/// True if a slab stores each image row once for all rows of taps, because the slab then has fewer rows.
fn shares_rows(w: &Windows, part: &WindowPart) -> bool {
    let rows = part.rows.len();
    part.images.len() == 1 && w.stride[0] == 1 && (w.kernel[0] - 1) * w.dilation[0] + rows <= w.kernel[0] * rows
}

fn slab_rows(w: &Windows, part: &WindowPart) -> usize {
    match shares_rows(w, part) {
        true => (w.kernel[0] - 1) * w.dilation[0] + part.rows.len(),
        false => w.kernel[0] * part.images.len() * part.rows.len(),
    }
}

/// Returns the number of f32 that have the memory of the table for [`Slabs::new`].
pub(crate) fn table_len(w: &Windows, part: &WindowPart) -> usize {
    slab_rows(w, part) * size_of::<isize>() / size_of::<f32>()
}

/// Returns the distance between slabs of a part, in elements of T: an odd number of cache lines, so that slabs do not evict one another
/// from the cache.
pub(crate) fn slab_stride<T>(w: &Windows, part: &WindowPart) -> usize {
    let line = 64 / size_of::<T>();
    (slab_rows(w, part) * part.columns.len()).div_ceil(line) / 2 * 2 * line + line
}

/// Returns the number of elements of the buffer for image rows that are not read in place.
pub(crate) fn line_buffer_len(w: &Windows, part: &WindowPart) -> usize {
    let rows = (part.rows.len() - 1) * w.stride[0] + (w.kernel[0] - 1) * w.dilation[0] + 1;
    part.images.len() * rows.min(w.image[0]) * w.image[1]
}

impl<'a, T: Pod> Slabs<'a, T> {
    pub(crate) fn new(w: &'a Windows, x: &Tensor, part: WindowPart, table: &'a mut [isize]) -> Slabs<'a, T> {
        let (count, width) = (part.rows.len(), part.columns.len());
        let row = |o: usize, tap: usize| {
            let h = (o * w.stride[0] + tap * w.dilation[0]).checked_sub(w.padding[0])?;
            (h < w.image[0]).then_some(h)
        };
        let last = (part.rows.end - 1) * w.stride[0] + (w.kernel[0] - 1) * w.dilation[0] + 1;
        let first = (part.rows.start * w.stride[0]).saturating_sub(w.padding[0]).min(w.image[0]);
        let image_rows = first..last.saturating_sub(w.padding[0]).clamp(first, w.image[0]);
        let in_place = in_place::<T>(x);
        let place = |image: usize, h: Option<usize>| match h {
            None => PADDING_ROW,
            Some(h) if in_place => (part.images.start + image) as isize * x.strides()[0] + h as isize * x.strides()[2],
            Some(h) => ((image * image_rows.len() + h - image_rows.start) * w.image[1]) as isize,
        };
        let (shared, images) = (shares_rows(w, &part), part.images.len());
        for (r, to) in table.iter_mut().enumerate() {
            *to = match shared {
                true => place(0, row(part.rows.start + r, 0)),
                false => place(r / count % images, row(part.rows.start + r % count, r / count / images)),
            };
        }
        let jump = if shared { w.dilation[0] * width } else { images * count * width };
        let stride = slab_stride::<T>(w, &part);
        Slabs { w, part, image_rows, from: table, jump, stride, elements: PhantomData }
    }

    /// Fills one slab for each channel and column of taps; `lines` has [`line_buffer_len`] elements. The images are `[N, C, H, W]`. Rows that are not plain copies are loaded into
    /// `lines` by `load(channel, offset of the first element, line)`.
    pub(crate) fn fill(
        &self,
        (t, bytes): (&Tensor, &[u8]),
        channels: impl Iterator<Item = usize>,
        (lines, to): (&mut [T], &mut [T]),
        load: impl Fn(usize, usize, &mut [T]),
    ) {
        let (s, w, part) = (t.strides(), self.w, &self.part);
        let in_place = in_place::<T>(t);
        for (i, c) in channels.enumerate() {
            let first = t.layout.offset as isize + c as isize * s[1];
            if !in_place {
                // Adjacent rows are loaded together.
                let rows = if s[2] == w.image[1] as isize && s[3] == 1 { self.image_rows.len().max(1) } else { 1 };
                let rows_seen =
                    part.images.clone().flat_map(|n| self.image_rows.clone().step_by(rows).map(move |h| (n, h)));
                for ((n, h), line) in rows_seen.zip(lines.chunks_exact_mut(rows * w.image[1])) {
                    let start = first + n as isize * s[0] + h as isize * s[2];
                    load(c, start as usize, line);
                }
            }
            let (from, first) = if in_place { (bytemuck::cast_slice(bytes), first) } else { (&*lines, 0) };
            for tap in 0..w.kernel[1] {
                let (left, right) = w.windows_inside(1, tap);
                let (left, right) = (left.max(part.columns.start), right.min(part.columns.end));
                let slab = &mut to[(i * w.kernel[1] + tap) * self.stride..][..self.from.len() * part.columns.len()];
                if left >= right {
                    slab.fill(T::zeroed());
                    continue;
                }
                let column = left * w.stride[1] + tap * w.dilation[1] - w.padding[1];
                let (left, right) = (left - part.columns.start, right - part.columns.start);
                let taken = SlabSource { from, first: first + column as isize, rows: self.from, step: w.stride[1] };
                let inside = InsideColumns { width: part.columns.len(), left, right };
                let adjacent = w.image[1] == inside.width && w.stride[1] == 1;
                fill_slab(slab, taken, inside, adjacent);
            }
        }
    }
}

/// The columns of a row of windows whose tap is inside the image.
#[derive(Clone, Copy)]
struct InsideColumns {
    width: usize,
    left: usize,
    right: usize,
}

impl InsideColumns {
    /// Writes zeros to the columns outside the image, in all rows of windows.
    #[inline(always)]
    fn clear<T: Pod>(self, rows: &mut [T]) {
        for column in (0..self.left).chain(self.right..self.width) {
            rows.iter_mut().skip(column).step_by(self.width).for_each(|x| *x = T::zeroed());
        }
    }
}

/// The source of a slab.
struct SlabSource<'a, T> {
    from: &'a [T],
    first: isize,
    rows: &'a [isize],
    step: usize,
}

vectorised! {
    /// Fills one slab. `adjacent` is true if consecutive image rows are also consecutive in the slab.
    fn fill_slab<'a, T: Pod>(_simd: S, slab: &'a mut [T], taken: SlabSource<'a, T>, inside: InsideColumns, adjacent: bool) {
        let SlabSource { from, first, rows, step } = taken;
        let InsideColumns { width, left, right } = inside;
        let mut r = 0;
        while r < rows.len() {
            if rows[r] == PADDING_ROW {
                slab[r * width..][..width].fill(T::zeroed());
                r += 1;
                continue;
            }
            let (start, begin) = ((first + rows[r]) as usize, r);
            r += 1;
            while adjacent && r < rows.len() && rows[r] == rows[r - 1] + width as isize {
                r += 1;
            }
            let rows = &mut slab[begin * width..r * width];
            let end = rows.len() - (width - right);
            let to = &mut rows[left..end];
            match step {
                1 => copy_vectors(to, &from[start..][..to.len()]),
                _ => to.iter_mut().zip(from[start..].iter().step_by(step)).for_each(|(y, x)| *y = *x),
            }
            inside.clear(rows);
        }
    }
}

/// Copies `from` in vectors; the last two vectors may overlap. For short rows, this is faster than `memcpy`.
#[inline(always)]
fn copy_vectors<T: Pod>(to: &mut [T], from: &[T]) {
    const LANES: usize = 16;
    let n = to.len();
    if n < LANES {
        to.iter_mut().zip(from).for_each(|(y, x)| *y = *x);
        return;
    }
    for i in (0..n - LANES).step_by(LANES).chain([n - LANES]) {
        let vector: [T; LANES] = from[i..][..LANES].try_into().unwrap_or([T::zeroed(); LANES]);
        to[i..][..LANES].copy_from_slice(&vector);
    }
}

/// Adds the columns of one channel to the image elements that their windows read. The taps are `stride` elements apart in `columns`, and
/// the images' planes are adjacent in `to`. Elements of `columns` for taps outside the image are scratch and may be overwritten.
pub(crate) fn add_columns(w: &Windows, part: &WindowPart, columns: &mut [f32], stride: usize, to: &mut [f32]) {
    let (count, width) = (part.rows.len(), part.columns.len());
    let plane = w.image[0] * w.image[1];
    for tap in 0..w.kernel[0] * w.kernel[1] {
        let (down, across) = (tap / w.kernel[1], tap % w.kernel[1]);
        let ((top, bottom), (left, right)) = (w.windows_inside(0, down), w.windows_inside(1, across));
        let (top, bottom) = (top.max(part.rows.start), bottom.min(part.rows.end));
        let (left, right) = (left.max(part.columns.start), right.min(part.columns.end));
        if top >= bottom || left >= right {
            continue;
        }
        let row = top * w.stride[0] + down * w.dilation[0] - w.padding[0];
        let column = left * w.stride[1] + across * w.dilation[1] - w.padding[1];
        let inside = InsideColumns { width, left: left - part.columns.start, right: right - part.columns.start };
        for image in 0..part.images.len() {
            let first = tap * stride + (image * count + top - part.rows.start) * width;
            let columns = &mut columns[first..][..(bottom - top) * width];
            let to = &mut to[image * plane + row * w.image[1] + column..(image + 1) * plane];
            fold_rows(columns, to, inside, w.stride[1], w.stride[0] * w.image[1]);
        }
    }
}

vectorised! {
    /// Adds rows of columns to an image. In the image, windows are `step` elements apart, and rows of windows `line` elements apart.
    fn fold_rows<'a>(_simd: S, columns: &'a mut [f32], to: &'a mut [f32], inside: InsideColumns, step: usize, line: usize) {
        let InsideColumns { width, left, right } = inside;
        if step == 1 && line == width {
            inside.clear(columns);
            let end = columns.len() - (width - right);
            to.iter_mut().zip(&columns[left..end]).for_each(|(y, x)| *y += *x);
            return;
        }
        for (r, row) in columns.chunks_exact(width).enumerate() {
            let (row, to) = (&row[left..right], &mut to[r * line..]);
            match step {
                1 => to.iter_mut().zip(row).for_each(|(y, x)| *y += *x),
                _ => to.iter_mut().step_by(step).zip(row).for_each(|(y, x)| *y += *x),
            }
        }
    }
}

/// The element type of slabs in the weight gradient, where neighbouring windows form a step: f32, or the bits of bf16.
pub(crate) trait StepElement: Pod {
    /// The number of elements in a step.
    const ELEMENTS_PER_STEP: usize;
    /// Returns a step that has this element; for a pair, the second element is zero.
    fn step(self) -> f32;
    /// Views `data` as rows of a left matrix; rows are `stride` elements apart.
    fn rows(data: &[Self], stride: usize) -> LeftMatrix<'_>;
    /// Fills `to` with elements of a tensor, beginning at element `start` and `stride` elements apart.
    fn load(from: (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [Self]);
}

impl StepElement for f32 {
    const ELEMENTS_PER_STEP: usize = 1;

    fn step(self) -> f32 {
        self
    }

    fn rows(data: &[f32], stride: usize) -> LeftMatrix<'_> {
        LeftMatrix::Rows { data, stride }
    }

    fn load((x, bytes): (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [f32]) {
        load_tile(x.dtype, bytes, start, stride, to);
    }
}

impl StepElement for u16 {
    const ELEMENTS_PER_STEP: usize = 2;

    fn step(self) -> f32 {
        pair(self, 0)
    }

    fn rows(data: &[u16], stride: usize) -> LeftMatrix<'_> {
        LeftMatrix::Halves { data, stride }
    }

    fn load((_, bytes): (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [u16]) {
        let from: &[u16] = bytemuck::cast_slice(bytes);
        to.iter_mut().enumerate().for_each(|(i, to)| *to = from[start.wrapping_add_signed(i as isize * stride)]);
    }
}

/// The number of elements that a job of [`pair_rows`] writes.
const PAIR_JOB_LEN: usize = 1 << 12;

/// Loads pairs: the first elements begin at `start`, the second elements at `next`, both `stride` apart. The second elements are 0 if
/// `next` is `None`.
pub(crate) fn load_pairs(from: &[u16], start: usize, next: Option<usize>, stride: isize, to: &mut [f32]) {
    let n = to.len();
    match (stride, next) {
        (1, Some(next)) => interleave(&from[start..][..n], &from[next..][..n], to),
        (1, None) => pair_with_zeros(&from[start..][..n], to),
        _ => {
            for (i, to) in to.iter_mut().enumerate() {
                let at = |start: usize| from[start.wrapping_add_signed(i as isize * stride)];
                *to = pair(at(start), next.map_or(0, at));
            }
        }
    }
}

#[inline(always)]
fn pair(first: u16, second: u16) -> f32 {
    f32::from_bits(u32::from(first) | u32::from(second) << 16)
}

vectorised! {
    fn interleave<'a>(_simd: S, first: &'a [u16], second: &'a [u16], to: &'a mut [f32]) {
        to.iter_mut().zip(first).zip(second).for_each(|((to, &first), &second)| *to = pair(first, second));
    }
}

vectorised! {
    fn pair_with_zeros<'a>(_simd: S, first: &'a [u16], to: &'a mut [f32]) {
        to.iter_mut().zip(first).for_each(|(to, &first)| *to = pair(first, 0));
    }
}

vectorised! {
    /// Interleaves elements into pairs like [`interleave`], for bf16 that were widened to f32.
    fn interleave_wide<'a>(_simd: S, first: &'a [f32], second: &'a [f32], to: &'a mut [f32]) {
        to.iter_mut().zip(first).zip(second).for_each(|((to, first), second)| {
            *to = f32::from_bits(first.to_bits() >> 16 | second.to_bits());
        });
    }
}

/// Combines each two neighbouring rows into a row of pairs, in groups of `count` rows of `length` bf16 that were widened to f32. In a
/// group with an odd number of rows, the last row is paired with zeros.
pub(crate) fn pair_rows(from: &[f32], (count, length): (usize, usize)) -> Vec<f32> {
    let (zeros, pairs) = (vec![0.0; length], count.div_ceil(2));
    let mut to = vec![0.0; from.len() / (count * length) * pairs * length];
    let rows = PAIR_JOB_LEN.div_ceil(length);
    parallel::for_each_chunk(&mut to, rows * length, |part, to| {
        for (i, to) in to.chunks_exact_mut(length).enumerate() {
            let (group, row) = ((part * rows + i) / pairs, (part * rows + i) % pairs * 2);
            let of = |row: usize| &from[(group * count + row) * length..][..length];
            interleave_wide(of(row), if row + 1 < count { of(row + 1) } else { &zeros }, to);
        }
    });
    to
}
