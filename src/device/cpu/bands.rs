//! A matrix split by columns over the team's threads, for work that combines rows.

use std::marker::PhantomData;

use super::parallel::for_each_index;

/// Adjacent columns of a matrix, over all rows.
pub(crate) struct Band<'a, T> {
    start: *mut T,
    rows: usize,
    pitch: usize,
    columns: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

impl<T> Band<'_, T> {
    /// Returns a row's elements in these columns.
    ///
    /// # Panics
    /// If the matrix has no such row.
    #[inline(always)]
    pub(crate) fn row(&mut self, row: usize) -> &mut [T] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        // SAFETY: `for_each_band` has checked that all rows are in the borrowed slice, no other band has these columns,
        // and the result borrows this band.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.pitch), self.columns) }
    }
}

/// Calls `f(first column, band)` for bands of `width` columns; the last may be narrower. The matrix is at the start of `data`: it
/// has `rows` rows, `pitch` elements apart, of `columns` elements. The calls run on this thread and on its team.
///
/// # Panics
/// With the panic of a call; if the matrix is larger than `data`, its rows overlap, or `width` is 0.
pub(crate) fn for_each_band<T: Send>(
    data: &mut [T],
    (rows, pitch, columns): (usize, usize, usize),
    width: usize,
    f: impl Fn(usize, Band<T>) + Sync,
) {
    struct SharedPtr<T>(*mut T);
    // SAFETY: each thread makes references to elements that no other thread accesses.
    unsafe impl<T: Send> Sync for SharedPtr<T> {}
    let needed = rows.checked_sub(1).and_then(|last| last.checked_mul(pitch)?.checked_add(columns));
    assert!(columns <= pitch && needed.is_some_and(|needed| needed <= data.len()), "the matrix is in the slice");
    let start = SharedPtr(data.as_mut_ptr());
    for_each_index(columns.div_ceil(width), |i| {
        let (start, first) = (&start, i * width);
        // SAFETY: `first` is below `columns`, which are in the slice.
        let start = unsafe { start.0.add(first) };
        f(first, Band { start, rows, pitch, columns: width.min(columns - first), borrowed: PhantomData });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_cover_the_columns_once() {
        for (rows, pitch, columns, width) in [(1, 1, 1, 1), (3, 7, 5, 2), (4, 6, 6, 6), (2, 40, 33, 16), (5, 8, 3, 99)]
        {
            let mut data = vec![0; (rows - 1) * pitch + columns];
            for_each_band(&mut data, (rows, pitch, columns), width, |first, mut band| {
                for row in 0..rows {
                    band.row(row).iter_mut().enumerate().for_each(|(c, x)| *x += 1 + row * 100 + first + c);
                }
            });
            for (at, &x) in data.iter().enumerate() {
                let (row, column) = (at / pitch, at % pitch);
                assert_eq!(x, if column < columns { 1 + row * 100 + column } else { 0 });
            }
        }
    }

    #[test]
    #[should_panic(expected = "the matrix is in the slice")]
    fn a_matrix_beyond_the_slice_is_refused() {
        for_each_band(&mut [0; 9], (2, 5, 5), 5, |_, _| ());
    }

    #[test]
    #[should_panic(expected = "row 2 of 2")]
    fn a_row_beyond_the_matrix_is_refused() {
        for_each_band(&mut [0; 10], (2, 5, 5), 5, |_, mut band| band.row(2).fill(1));
    }
}
