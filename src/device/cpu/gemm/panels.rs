//! Which piece of a matrix goes where when it is laid out in panels, so that threads can share that.

use half::{bf16, f16};

use super::matrix::{Matrix, Start};
use super::pack::{Copies, From, Half, Pairs, SLACK, pack, pack_rows};

/// Elements that it is worth going for to lay them out.
const PIECE: usize = 1 << 14;
/// Panels that are laid out at once where rows of the matrix are contiguous: each is read in long stretches.
const PANELS_AT_ONCE: usize = 32;

/// A matrix that is laid out in panels of neighbouring rows, piece by piece.
pub(super) struct Panels {
    from: Matrix<Start>,
    /// Its rows and steps, and the first of them.
    size: (usize, usize),
    first: (usize, usize),
    /// For every `depth` steps all panels, one after another, [`SLACK`] behind each.
    to: *mut f32,
    /// Rows of a panel; the last one has as many as there are, up to a multiple of `lanes`.
    rows: usize,
    lanes: usize,
    panels: usize,
    depth: usize,
    /// Panels and steps of a piece.
    piece: (usize, usize),
    /// Whether panels have row after row, `depth` elements apart, instead of step after step.
    row_by_row: bool,
}

// SAFETY: threads read the matrix, and each writes to pieces of its own.
unsafe impl Sync for Panels {}

impl Panels {
    pub(super) fn new(
        from: Matrix<Start>,
        size: (usize, usize),
        first: (usize, usize),
        to: *mut f32,
        (rows, lanes): (usize, usize),
        (panels, depth): (usize, usize),
        row_by_row: bool,
    ) -> Panels {
        // Rows of the matrix follow one another, then its steps are far apart: each is read over many panels. Otherwise a
        // panel is laid out in one go, for that may write behind what it lays out.
        let piece = match from.row == 1 && from.col != 1 {
            true => (panels.min(PANELS_AT_ONCE), (PIECE / (rows * panels.min(PANELS_AT_ONCE))).clamp(1, depth)),
            false => ((PIECE / (rows * depth)).max(1), depth),
        };
        Panels { from, size, first, to, rows, lanes, panels, depth, piece, row_by_row }
    }

    /// In each block of `depth` steps, groups of panels and parts of the steps.
    fn grid(&self) -> (usize, usize, usize) {
        let blocks = self.size.1.div_ceil(self.depth);
        (blocks, self.panels.div_ceil(self.piece.0), self.depth.div_ceil(self.piece.1))
    }

    pub(super) fn pieces(&self) -> usize {
        let (blocks, groups, parts) = self.grid();
        blocks * groups * parts
    }

    /// # Safety
    /// The matrix is there to be read, the panels' memory is there to be written, and nobody else uses that of this piece.
    pub(super) unsafe fn lay_out(&self, piece: usize) {
        let (_, groups, parts) = self.grid();
        let (block, group, part) = (piece / (groups * parts), piece / parts % groups, piece % parts);
        let depth = self.depth.min(self.size.1 - block * self.depth);
        let (begin, end) = (depth.min(part * self.piece.1), depth.min((part + 1) * self.piece.1));
        if begin == end {
            return;
        }
        let (first, last) = (group * self.piece.0, self.panels.min((group + 1) * self.piece.0));
        let whole = last.min(self.size.0 / self.rows).max(first);
        let stride = self.depth * self.rows + SLACK;
        if self.row_by_row {
            for panel in first..last {
                let (down, rows) = (panel * self.rows, self.rows.min(self.size.0 - panel * self.rows));
                // SAFETY: the caller's promise; the panels' memory has room for all of them; the rows and steps are the matrix's.
                unsafe {
                    let to = self.to.add((block * self.panels + panel) * stride + begin);
                    let first = (self.first.0 + down, self.first.1 + block * self.depth + begin);
                    lay_out_rows(self.from, first, (rows, end - begin), to, self.depth);
                }
            }
            return;
        }
        // SAFETY: the panels' memory has room for all of them; the rows and steps are the matrix's.
        let to =
            |panel: usize, width: usize| unsafe { self.to.add((block * self.panels + panel) * stride + begin * width) };
        let from = |panel: usize| (self.first.0 + panel * self.rows, self.first.1 + block * self.depth + begin);
        // SAFETY: the caller's promise, and as above. Lanes beyond the matrix are written as zeros.
        unsafe {
            if first < whole {
                let copies = Copies { panels: whole - first, stride, steps: end - begin };
                lay_out(self.from, from(first), to(first, self.rows), copies, self.rows, self.rows);
            }
            if whole < last {
                let lanes = self.size.0 - whole * self.rows;
                let width = lanes.next_multiple_of(self.lanes);
                let copies = Copies { panels: 1, stride, steps: end - begin };
                lay_out(self.from, from(whole), to(whole, width), copies, lanes, width);
            }
        }
    }
}

/// Rows of pairs, `stride` elements apart at `to`.
///
/// # Safety
/// The matrix's rows and steps from `first` on are there to be read, and `to` to be written, which nobody else uses. The processor has AVX2.
unsafe fn lay_out_rows(
    from: Matrix<Start>,
    first: (usize, usize),
    (rows, steps): (usize, usize),
    to: *mut f32,
    stride: usize,
) {
    let Start::Pairs(start, _) = from.start else { unreachable!("only pairs are laid out in rows") };
    let at = first.0 as isize * from.row + 2 * first.1 as isize * from.col;
    // SAFETY: the caller's promise.
    unsafe {
        let from = From { start: start.offset(at), across: from.row, along: from.col };
        pack_rows(from, to, (rows, steps), stride);
    }
}

/// Panels of the matrix: lanes along its rows, from `first` on.
///
/// # Safety
/// As [`pack`].
unsafe fn lay_out(
    from: Matrix<Start>,
    first: (usize, usize),
    to: *mut f32,
    copies: Copies,
    lanes: usize,
    width: usize,
) {
    let at = |steps: usize| first.0 as isize * from.row + (first.1 * steps) as isize * from.col;
    let (across, along) = (from.row, from.col);
    // SAFETY: the caller's promise.
    unsafe {
        match from.start {
            Start::F32(start) => {
                pack::<f32>(From { start: start.offset(at(1)), across, along }, to, copies, lanes, width)
            }
            Start::F16(start) => {
                pack::<f16>(From { start: start.offset(at(1)), across, along }, to, copies, lanes, width)
            }
            Start::BF16(start) => {
                pack::<bf16>(From { start: start.offset(at(1)), across, along }, to, copies, lanes, width)
            }
            Start::Pairs(start, k) => {
                let pairs = copies.steps.min((k / 2).saturating_sub(first.1));
                let start = start.offset(at(2));
                pack::<Pairs>(From { start, across, along }, to, Copies { steps: pairs, ..copies }, lanes, width);
                if pairs < copies.steps {
                    let start = start.offset(2 * pairs as isize * along);
                    let copies = Copies { steps: 1, ..copies };
                    pack::<Half>(From { start, across, along }, to.add(pairs * width), copies, lanes, width);
                }
            }
        }
    }
}
