//! A matrix in memory that several threads write block by block.

use std::marker::PhantomData;

use super::parallel::{self, SharedPtr};

/// The partition of a matrix of `columns` columns, whose rows are `pitch` elements apart: into bands of `band` rows, and each band into
/// blocks of up to `height` rows and `width` columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlockPartition {
    pub(crate) columns: usize,
    pub(crate) pitch: usize,
    pub(crate) band: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

/// Exclusive access to a block of a matrix.
pub(crate) struct Block<'a, T> {
    first: *mut T,
    rows: usize,
    width: usize,
    stride: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

impl<'a, T> Block<'a, T> {
    /// Makes a block of `rows` rows of `width` elements, `stride` elements apart.
    ///
    /// # Panics
    /// If the slice is too short, or rows overlap.
    pub(crate) fn new(data: &'a mut [T], rows: usize, width: usize, stride: usize) -> Block<'a, T> {
        assert!(width <= stride && (rows == 0 || (rows - 1) * stride + width <= data.len()));
        Block { first: data.as_mut_ptr(), rows, width, stride, borrowed: PhantomData }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// Returns the first element and the row stride in elements. No other code accesses the block during this borrow.
    pub(crate) fn start(&mut self) -> (*mut T, usize) {
        (self.first, self.stride)
    }

    /// Returns a row of the block.
    ///
    /// # Panics
    /// If the block has no such row.
    #[inline(always)]
    pub(crate) fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        // SAFETY: a row of the block, which shares no elements with other blocks, in a slice that is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(i * self.stride), self.width) }
    }
}

impl Block<'_, u8> {
    /// Returns the block as f32.
    ///
    /// # Panics
    /// If the bytes are not aligned for f32, or a row does not consist of whole f32.
    pub(crate) fn floats(&mut self) -> Block<'_, f32> {
        const SIZE: usize = size_of::<f32>();
        let first = self.first.cast::<f32>();
        assert!(first.is_aligned() && self.width.is_multiple_of(SIZE) && self.stride.is_multiple_of(SIZE));
        Block { first, rows: self.rows, width: self.width / SIZE, stride: self.stride / SIZE, borrowed: PhantomData }
    }
}

/// Calls `f` with each block and its indices: the band, and the block's row and column in the band. The calls run on this thread
/// and on its team, or only on this thread if `single_threaded`.
///
/// # Panics
/// As [`parallel::for_each_index`]; if a size in the partition is 0, or rows of the matrix overlap.
pub(crate) fn for_each_block<T: Send>(
    data: &mut [T],
    cut: BlockPartition,
    single_threaded: bool,
    f: impl Fn([usize; 3], Block<T>) + Sync,
) {
    let BlockPartition { columns, pitch, band, height, width } = cut;
    assert!(columns <= pitch, "rows of {columns} elements overlap, {pitch} apart");
    let rows = (data.len() + pitch - columns) / pitch;
    let (down, across) = (band.div_ceil(height), columns.div_ceil(width));
    let start = SharedPtr(data.as_mut_ptr());
    let piece = |i: usize| {
        let (at, j) = (i / across, i % across);
        let (top, left) = (at / down * band + at % down * height, j * width);
        let bottom = rows.min((top + height).min((at / down + 1) * band));
        if top < bottom {
            let start = &start;
            // SAFETY: an element of the slice: its row is below `rows`, its column below `columns`, which is at most `pitch`.
            let first = unsafe { start.0.add(top * pitch + left) };
            let (rows, width) = (bottom - top, width.min(columns - left));
            f([at / down, at % down, j], Block { first, rows, width, stride: pitch, borrowed: PhantomData });
        }
    };
    let count = rows.div_ceil(band) * down * across;
    if single_threaded { (0..count).for_each(piece) } else { parallel::for_each_index(count, piece) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element must be in exactly one block, also if the sizes do not divide each other, and elements between rows in none.
    #[test]
    fn blocks_cover_a_matrix() {
        for (rows, columns, band, height, width) in
            [(7, 5, 3, 2, 2), (6, 4, 6, 4, 4), (1, 1, 1, 1, 1), (9, 8, 2, 5, 3), (4, 1, 10, 1, 7), (0, 3, 1, 1, 1)]
        {
            for (single_threaded, gap) in [(true, 0), (false, 0), (false, 1), (true, 6)] {
                let pitch: usize = columns + gap;
                let mut data = vec![0u32; (rows * pitch).saturating_sub(gap)];
                for_each_block(
                    &mut data,
                    BlockPartition { columns, pitch, band, height, width },
                    single_threaded,
                    |[b, d, a], mut block| {
                        for i in 0..block.rows() {
                            let row = b * band + d * height + i;
                            assert!(row < rows.min((b + 1) * band));
                            block.row(i).iter_mut().enumerate().for_each(|(j, x)| {
                                *x += (row * pitch + a * width + j + 1) as u32;
                            });
                        }
                    },
                );
                let right = |i: usize| if i % pitch < columns { i as u32 + 1 } else { 0 };
                assert!(data.iter().enumerate().all(|(i, &x)| x == right(i)), "{rows} x {columns}: {data:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "overlap")]
    fn overlapping_rows_are_refused() {
        let cut = BlockPartition { columns: 5, pitch: 4, band: 2, height: 2, width: 5 };
        for_each_block(&mut [0; 9], cut, true, |_, _| ());
    }

    #[test]
    #[should_panic(expected = "row 2 of 2")]
    fn a_row_beyond_the_block_is_refused() {
        let cut = BlockPartition { columns: 5, pitch: 5, band: 2, height: 2, width: 5 };
        for_each_block(&mut [0; 10], cut, true, |_, mut block| block.row(2).fill(1));
    }
}
