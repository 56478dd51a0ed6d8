//! The packing of a matrix into panels, split into pieces that threads share.

use half::{bf16, f16};

use super::matrix::{ElementPtr, Matrix};
use super::pack::{LastPair, PANEL_SLACK, Pairs, PanelCopies, PanelSource, pack, pack_rows};

/// The approximate number of elements in a piece: enough to justify a separate task.
const PIECE_ELEMENTS: usize = 1 << 14;
/// The number of panels that are packed together if the matrix's rows are adjacent in memory: each step along k then reads a long
/// contiguous run.
const PANELS_AT_ONCE: usize = 32;

/// A matrix to be packed into panels of adjacent rows, piece by piece.
pub(super) struct Panels {
    from: Matrix<ElementPtr>,
    /// The number of rows, and the number of steps along k.
    size: (usize, usize),
    /// The indices in `from` of the first row and the first step to pack.
    first: (usize, usize),
    /// The destination. For each run of `depth` steps, all panels follow one another, each followed by [`PANEL_SLACK`].
    to: *mut f32,
    rows: usize,
    /// The number of vector lanes. The last panel is as wide as its number of rows, rounded up to a multiple of `lanes`.
    lanes: usize,
    panels: usize,
    /// The maximum number of steps in a panel.
    depth: usize,
    /// The number of panels and the number of steps in a piece.
    piece: (usize, usize),
    /// True if panels are stored row by row, `depth` elements apart, rather than step by step.
    row_by_row: bool,
}

// SAFETY: threads only read the matrix, and each thread writes only the pieces that it packs.
unsafe impl Sync for Panels {}

impl Panels {
    pub(super) fn new(
        from: Matrix<ElementPtr>,
        size: (usize, usize),
        first: (usize, usize),
        to: *mut f32,
        (rows, lanes): (usize, usize),
        (panels, depth): (usize, usize),
        row_by_row: bool,
    ) -> Panels {
        // If rows are adjacent, steps are far apart, so each step is read over many panels. Otherwise a panel is packed in one
        // piece, because packing may write past the steps that it packs.
        let piece = match from.row == 1 && from.col != 1 {
            true => {
                (panels.min(PANELS_AT_ONCE), (PIECE_ELEMENTS / (rows * panels.min(PANELS_AT_ONCE))).clamp(1, depth))
            }
            false => ((PIECE_ELEMENTS / (rows * depth)).max(1), depth),
        };
        Panels { from, size, first, to, rows, lanes, panels, depth, piece, row_by_row }
    }

    /// Returns the number of runs of `depth` steps, and for each run the number of panel groups and the number of step ranges.
    fn grid(&self) -> (usize, usize, usize) {
        let blocks = self.size.1.div_ceil(self.depth);
        (blocks, self.panels.div_ceil(self.piece.0), self.depth.div_ceil(self.piece.1))
    }

    pub(super) fn pieces(&self) -> usize {
        let (blocks, groups, parts) = self.grid();
        blocks * groups * parts
    }

    /// Packs a piece.
    ///
    /// # Safety
    /// The matrix is readable, the panels' memory is writable, and no other code accesses the part of it that belongs to this piece.
    pub(super) unsafe fn pack_piece(&self, piece: usize) {
        let (_, groups, parts) = self.grid();
        let (block, group, part) = (piece / (groups * parts), piece / parts % groups, piece % parts);
        let depth = self.depth.min(self.size.1 - block * self.depth);
        let (begin, end) = (depth.min(part * self.piece.1), depth.min((part + 1) * self.piece.1));
        if begin == end {
            return;
        }
        let (first, last) = (group * self.piece.0, self.panels.min((group + 1) * self.piece.0));
        let whole = last.min(self.size.0 / self.rows).max(first);
        let stride = self.depth * self.rows + PANEL_SLACK;
        if self.row_by_row {
            for panel in first..last {
                let (down, rows) = (panel * self.rows, self.rows.min(self.size.0 - panel * self.rows));
                // SAFETY: the caller's promise; the panels' memory has room for all panels; the rows and steps are the matrix's.
                unsafe {
                    let to = self.to.add((block * self.panels + panel) * stride + begin);
                    let first = (self.first.0 + down, self.first.1 + block * self.depth + begin);
                    pack_row_panels(self.from, first, (rows, end - begin), to, self.depth);
                }
            }
            return;
        }
        // SAFETY: the panels' memory has room for all panels; the rows and steps are the matrix's.
        let to =
            |panel: usize, width: usize| unsafe { self.to.add((block * self.panels + panel) * stride + begin * width) };
        let from = |panel: usize| (self.first.0 + panel * self.rows, self.first.1 + block * self.depth + begin);
        // SAFETY: the caller's promise, and as above. Lanes beyond the matrix are written as zeros.
        unsafe {
            if first < whole {
                let copies = PanelCopies { panels: whole - first, stride, steps: end - begin };
                pack_panels(self.from, from(first), to(first, self.rows), copies, self.rows, self.rows);
            }
            if whole < last {
                let lanes = self.size.0 - whole * self.rows;
                let width = lanes.next_multiple_of(self.lanes);
                let copies = PanelCopies { panels: 1, stride, steps: end - begin };
                pack_panels(self.from, from(whole), to(whole, width), copies, lanes, width);
            }
        }
    }
}

/// Packs rows of [pairs](Pairs); rows are `stride` elements apart in `to`.
///
/// # Safety
/// The packed rows and steps of the matrix, beginning with `first`, are readable, `to` is writable, and no other code accesses it. The
/// processor has AVX2.
unsafe fn pack_row_panels(
    from: Matrix<ElementPtr>,
    first: (usize, usize),
    (rows, steps): (usize, usize),
    to: *mut f32,
    stride: usize,
) {
    let ElementPtr::Pairs(start, _) = from.start else { unreachable!("only pairs are laid out in rows") };
    let at = first.0 as isize * from.row + 2 * first.1 as isize * from.col;
    // SAFETY: the caller guarantees the requirements of this function.
    unsafe {
        let from = PanelSource { start: start.offset(at), across: from.row, along: from.col };
        pack_rows(from, to, (rows, steps), stride);
    }
}

/// Packs panels of the matrix, starting at row and step `first`. The matrix's rows become the lanes.
///
/// # Safety
/// The requirements of [`pack`].
unsafe fn pack_panels(
    from: Matrix<ElementPtr>,
    first: (usize, usize),
    to: *mut f32,
    copies: PanelCopies,
    lanes: usize,
    width: usize,
) {
    let at = |steps: usize| first.0 as isize * from.row + (first.1 * steps) as isize * from.col;
    let (across, along) = (from.row, from.col);
    // SAFETY: the caller guarantees the requirements of this function.
    unsafe {
        match from.start {
            ElementPtr::F32(start) => {
                pack::<f32>(PanelSource { start: start.offset(at(1)), across, along }, to, copies, lanes, width)
            }
            ElementPtr::F16(start) => {
                pack::<f16>(PanelSource { start: start.offset(at(1)), across, along }, to, copies, lanes, width)
            }
            ElementPtr::BF16(start) => {
                pack::<bf16>(PanelSource { start: start.offset(at(1)), across, along }, to, copies, lanes, width)
            }
            ElementPtr::Pairs(start, k) => {
                let pairs = copies.steps.min((k / 2).saturating_sub(first.1));
                let start = start.offset(at(2));
                pack::<Pairs>(
                    PanelSource { start, across, along },
                    to,
                    PanelCopies { steps: pairs, ..copies },
                    lanes,
                    width,
                );
                if pairs < copies.steps {
                    let start = start.offset(2 * pairs as isize * along);
                    let copies = PanelCopies { steps: 1, ..copies };
                    pack::<LastPair>(PanelSource { start, across, along }, to.add(pairs * width), copies, lanes, width);
                }
            }
        }
    }
}
