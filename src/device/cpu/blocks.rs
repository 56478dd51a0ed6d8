//! A matrix in memory that is written block by block, one to a thread.

use std::marker::PhantomData;

use super::parallel;

/// How a matrix is cut: into bands of rows, these into blocks of up to `height` rows and `width` columns.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cut {
    pub(crate) columns: usize,
    pub(crate) band: usize,
    pub(crate) height: usize,
    pub(crate) width: usize,
}

/// A block of a matrix, which is this one's alone.
pub(crate) struct Block<'a, T> {
    first: *mut T,
    rows: usize,
    width: usize,
    stride: usize,
    lives: PhantomData<&'a mut [T]>,
}

impl<'a, T> Block<'a, T> {
    /// `rows` rows of `width` elements, `stride` elements from one to the next.
    ///
    /// # Panics
    /// Where the slice is too short, or rows are closer to one another than they are long.
    pub(crate) fn new(data: &'a mut [T], rows: usize, width: usize, stride: usize) -> Block<'a, T> {
        assert!(width <= stride && (rows == 0 || (rows - 1) * stride + width <= data.len()));
        Block { first: data.as_mut_ptr(), rows, width, stride, lives: PhantomData }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// The first element, which nobody else uses while this is borrowed, nor any other of the block, and how far rows are apart.
    pub(crate) fn start(&mut self) -> (*mut T, usize) {
        (self.first, self.stride)
    }

    /// # Panics
    /// Where it has no such row.
    pub(crate) fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows);
        // SAFETY: a row of the block, which no other block has elements of, in a slice that is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.first.add(i * self.stride), self.width) }
    }
}

impl Block<'_, u8> {
    /// The bytes as f32.
    ///
    /// # Panics
    /// Where they do not begin or end where one does.
    pub(crate) fn floats(&mut self) -> Block<'_, f32> {
        const SIZE: usize = size_of::<f32>();
        let first = self.first.cast::<f32>();
        assert!(first.is_aligned() && self.width.is_multiple_of(SIZE) && self.stride.is_multiple_of(SIZE));
        Block { first, rows: self.rows, width: self.width / SIZE, stride: self.stride / SIZE, lives: PhantomData }
    }
}

/// Calls `f` with every block of the matrix and which one it is: its band, and in that from above and from the left. On this thread
/// and those of the team, or here only where it is `alone`.
///
/// # Panics
/// As [`parallel::for_each_index`]; where a number of the cut is 0.
pub(crate) fn for_each_block<T: Send>(data: &mut [T], cut: Cut, alone: bool, f: impl Fn([usize; 3], Block<T>) + Sync) {
    struct Start<T>(*mut T);
    // SAFETY: each thread makes of it references to elements that no other has.
    unsafe impl<T: Send> Sync for Start<T> {}
    let Cut { columns, band, height, width } = cut;
    let rows = data.len() / columns;
    let (down, across) = (band.div_ceil(height), columns.div_ceil(width));
    let start = Start(data.as_mut_ptr());
    let piece = |i: usize| {
        let (at, j) = (i / across, i % across);
        let (top, left) = (at / down * band + at % down * height, j * width);
        let bottom = rows.min((top + height).min((at / down + 1) * band));
        if top < bottom {
            let start = &start;
            // SAFETY: an element of the slice: its row is below `rows`, its column below `columns`.
            let first = unsafe { start.0.add(top * columns + left) };
            let (rows, width) = (bottom - top, width.min(columns - left));
            f([at / down, at % down, j], Block { first, rows, width, stride: columns, lives: PhantomData });
        }
    };
    let count = rows.div_ceil(band) * down * across;
    if alone { (0..count).for_each(piece) } else { parallel::for_each_index(count, piece) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every element is in one block, whichever numbers do not divide one another.
    #[test]
    fn blocks_cover_a_matrix() {
        for (rows, columns, band, height, width) in
            [(7, 5, 3, 2, 2), (6, 4, 6, 4, 4), (1, 1, 1, 1, 1), (9, 8, 2, 5, 3), (4, 1, 10, 1, 7), (0, 3, 1, 1, 1)]
        {
            for alone in [true, false] {
                let mut data = vec![0u32; rows * columns];
                for_each_block(&mut data, Cut { columns, band, height, width }, alone, |[b, d, a], mut block| {
                    for i in 0..block.rows() {
                        let row = b * band + d * height + i;
                        assert!(row < rows.min((b + 1) * band));
                        block.row(i).iter_mut().enumerate().for_each(|(j, x)| {
                            *x += (row * columns + a * width + j + 1) as u32;
                        });
                    }
                });
                assert!(data.iter().enumerate().all(|(i, &x)| x as usize == i + 1), "{rows} x {columns}: {data:?}");
            }
        }
    }
}
