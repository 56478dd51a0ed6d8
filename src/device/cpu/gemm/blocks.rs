//! Products of f32 and of halves, block by block: both matrices are laid out in panels once, by all threads, and tiles of
//! the result are computed from the panels, a group of neighbours at a time, so that what a group reads stays in the
//! cache of the core that computes it.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use half::{bf16, f16};

use super::super::{parallel, threads};
use super::kernel::{Kernels, Tile};
use super::pack::{Copies, From, Half, Pairs, SLACK, pack};
use crate::storage::driver::host::advise_huge;

/// Steps of k that a tile does before the next: of the panels that a group reads for them, one stays in the first-level cache
/// and all in the second. Of 192, 256, 320, 384 and 512 this was the fastest.
const DEPTH: usize = 512;
/// Steps of k, and elements of a matrix, that are laid out at a time.
pub(super) const DEEP: usize = 2048;
const LAID_OUT: usize = 1 << 20;
/// Groups of tiles a thread should have, so that all are through at about the same time, as long as a group has so many
/// steps of its tiles.
const GROUPS: usize = 12;
const STEPS: usize = 1024;
/// Panels of a group at most, of rows and of columns: the rows stay in the second-level cache.
const GROUP: [usize; 2] = [16, 32];
/// Elements of a group that is handed over: it stays in the second-level cache beside the panels, too.
const HANDED_OVER: usize = 1 << 14;
/// Elements of a large page: panels that need more begin where one does, so that few are in use.
const HUGE: usize = 1 << 19;
/// Elements that it is worth going for to lay them out.
const PIECE: usize = 1 << 14;
/// Panels that are laid out together where a row of the matrix lies in one piece: it is read in long stretches.
const TOGETHER: usize = 32;

/// The first element of an operand.
#[derive(Clone, Copy)]
pub(super) enum Start {
    F32(*const f32),
    F16(*const f16),
    BF16(*const bf16),
    /// Two steps of k at a time, of so many of k.
    Pairs(*const bf16, usize),
}

/// An operand: element (i, j) at `start + i * row + j * col`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<T> {
    pub(super) start: T,
    pub(super) row: isize,
    pub(super) col: isize,
}

impl<T> Matrix<T> {
    fn transposed(self) -> Matrix<T> {
        Matrix { row: self.col, col: self.row, ..self }
    }
}

impl Matrix<Start> {
    /// The first element, and how many bytes rows are apart, where kernels read rows as they are.
    fn in_place(self) -> Option<(*const f32, isize)> {
        let rows = |element: usize| self.row * element as isize;
        match self.start {
            Start::F32(start) if self.col == 1 => Some((start, rows(size_of::<f32>()))),
            Start::Pairs(start, k) if self.col == 1 && k % 2 == 0 => Some((start.cast(), rows(size_of::<bf16>()))),
            _ => None,
        }
    }

    /// The same in pairs of steps.
    fn in_pairs(self, k: usize) -> Matrix<Start> {
        match self.start {
            Start::BF16(start) => Matrix { start: Start::Pairs(start, k), ..self },
            _ => self,
        }
    }
}

/// What is done with the result.
#[derive(Clone, Copy)]
pub(super) enum Out<'a> {
    /// It is written there.
    Memory(Matrix<*mut f32>),
    /// Pieces of it are handed over as soon as they are computed; of at most [`DEEP`] steps.
    Pieces(HandOver<'a>),
}

/// Called with rows, columns, and the elements that they have in common.
type HandOver<'a> = &'a (dyn Fn(Range<usize>, Range<usize>, &[f32]) + Sync);

/// `n` in pieces of one size, a multiple of `step`, at most `most`.
fn even(n: usize, most: usize, step: usize) -> usize {
    n.div_ceil(n.div_ceil(most)).next_multiple_of(step)
}

/// `out = a b` for an `m` x `k` and a `k` x `n` matrix, none of the numbers 0; on this thread alone where it is told so.
/// Kernels of pairs are for two matrices of bf16.
///
/// # Safety
/// The elements of all three are in memory that lives through the call. Nobody writes to those of the operands, nobody else
/// uses those of the result, and no two of these are one.
pub(super) unsafe fn product(
    kernels: &'static Kernels,
    (m, n, k): (usize, usize, usize),
    out: Out,
    a: Matrix<Start>,
    b: Matrix<Start>,
    alone: bool,
) {
    if let Out::Memory(out) = out
        && out.col != 1
        && out.row == 1
    {
        // SAFETY: the caller's promise. The columns of the transposed result follow one another.
        return unsafe {
            product(kernels, (n, m, k), Out::Memory(out.transposed()), b.transposed(), a.transposed(), alone);
        };
    }
    debug_assert!(k <= DEEP || matches!(out, Out::Memory(_)));
    let (a, b, k) = match kernels.pairs {
        true => (a.in_pairs(k), b.in_pairs(k), k.div_ceil(2)),
        false => (a, b, k),
    };
    let columns = 2 * kernels.lanes;
    let deep = even(k, DEEP, 1);
    let depth = even(deep, DEPTH, 1);
    let most = |step: usize| (LAID_OUT / deep).max(step);
    let wide = even(n, most(columns), columns);
    let high = even(m, if a.in_place().is_some() { m } else { most(kernels.rows) }, 1);
    let rows = even(high, kernels.rows, 1);
    let blocks = deep.div_ceil(depth);
    let room_b = blocks * wide.min(n).div_ceil(columns) * (depth * columns + SLACK);
    let room_a = match a.in_place() {
        Some(_) => 0,
        None => blocks * high.div_ceil(rows) * (depth * rows + SLACK),
    };
    BUFFER.with(|kept| {
        let mut buffer = kept.take();
        let room = room_a + room_b + SLACK;
        let line = if room >= HUGE { HUGE * size_of::<f32>() } else { 64 };
        if buffer.len() < room + buffer.as_ptr().align_offset(line) {
            buffer = Vec::with_capacity(room + line / size_of::<f32>());
            advise_huge(buffer.spare_capacity_mut());
            buffer.resize(buffer.capacity(), 0.0);
        }
        let aligned = buffer.as_ptr().align_offset(line);
        let packed_b = buffer[aligned..].as_mut_ptr();
        for k0 in (0..k).step_by(deep) {
            for j0 in (0..n).step_by(wide) {
                for i0 in (0..m).step_by(high) {
                    let region = Region {
                        kernels,
                        first: (i0, j0, k0),
                        size: (high.min(m - i0), wide.min(n - j0), deep.min(k - k0)),
                        rows,
                        depth,
                        out,
                        a,
                        b,
                        packed_b,
                        // SAFETY: the buffer has room for both.
                        packed_a: unsafe { packed_b.add(room_b) },
                        lay_out_b: i0 == 0,
                    };
                    // SAFETY: the caller's promise; the buffer is this call's until it is put back.
                    unsafe { region.compute(alone) };
                }
            }
        }
        kept.set(buffer);
    });
}

thread_local! {
    /// Where panels are laid out, kept so that its pages stay. A product inside one of its pieces would find it gone, and make another.
    static BUFFER: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
    /// Where a group is computed that is handed over.
    static PIECE_OF_OUT: Cell<Vec<f32>> = const { Cell::new(Vec::new()) };
}

/// A part of the result, and the steps of k that are laid out at a time.
struct Region<'a> {
    kernels: &'static Kernels,
    /// Of m, n and k.
    first: (usize, usize, usize),
    size: (usize, usize, usize),
    /// Rows of a panel of a.
    rows: usize,
    depth: usize,
    out: Out<'a>,
    a: Matrix<Start>,
    b: Matrix<Start>,
    /// For every `depth` steps of k all panels, one after another, [`SLACK`] behind each.
    packed_a: *mut f32,
    packed_b: *mut f32,
    /// Whether the panels of b are not there yet.
    lay_out_b: bool,
}

// SAFETY: threads read the operands, write panels of their own, read panels when all are written, and write groups of the
// result that have no element in common.
unsafe impl Sync for Region<'_> {}

impl Region<'_> {
    /// # Safety
    /// As [`product`], of the region's elements; nobody else uses the panels' memory.
    unsafe fn compute(&self, alone: bool) {
        let (m, n, k) = self.size;
        let (of_a, of_b) = (m.div_ceil(self.rows), n.div_ceil(2 * self.kernels.lanes));
        let (a, b) = (self.operand_a(of_a), self.operand_b(of_b));
        let pieces_b = if self.lay_out_b { b.pieces() } else { 0 };
        let pieces = pieces_b + if self.a.in_place().is_some() { 0 } else { a.pieces() };
        let groups = if alone { 1 } else { GROUPS * threads() };
        let (high, wide) = match self.out {
            Out::Memory(_) => group(of_a, of_b, k, groups),
            Out::Pieces(_) => rows_of_groups(of_a, of_b, self.rows * 2 * self.kernels.lanes, groups),
        };
        let (down, across) = (of_a.div_ceil(high), of_b.div_ceil(wide));
        let laid_out = AtomicUsize::new(0);
        let piece = |i: usize| {
            // SAFETY: the caller's promise. Every piece comes once, and groups come when all pieces are laid out.
            unsafe {
                if i < pieces_b {
                    b.lay_out(i);
                } else if i < pieces {
                    a.lay_out(i - pieces_b);
                } else {
                    let mut looks = 0u32;
                    while laid_out.load(Ordering::Acquire) < pieces {
                        looks += 1;
                        if looks.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
                    }
                    let (i, j) = ((i - pieces) / across, (i - pieces) % across);
                    let (top, left) = (i * high, j * wide);
                    self.group(top..of_a.min(top + high), left..of_b.min(left + wide), (of_a, of_b));
                    return;
                }
            }
            laid_out.fetch_add(1, Ordering::Release);
        };
        let count = pieces + down * across;
        if alone { (0..count).for_each(piece) } else { parallel::for_each_in_order(count, piece) }
    }

    /// Each `depth` steps of k: their number, the first, and how many they are.
    fn depths(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let k = self.size.2;
        (0..k.div_ceil(self.depth)).map(move |z| (z, z * self.depth, self.depth.min(k - z * self.depth)))
    }

    fn operand_a(&self, panels: usize) -> Panels {
        let (size, first) = ((self.size.0, self.size.2), (self.first.0, self.first.2));
        Panels::new(self.a, size, first, self.packed_a, (self.rows, 1), (panels, self.depth))
    }

    fn operand_b(&self, panels: usize) -> Panels {
        let (size, first) = ((self.size.1, self.size.2), (self.first.1, self.first.2));
        let lanes = self.kernels.lanes;
        Panels::new(self.b.transposed(), size, first, self.packed_b, (2 * lanes, lanes), (panels, self.depth))
    }

    /// Some panels of rows and of columns, computed and, where that is wanted, handed over.
    ///
    /// # Safety
    /// As [`compute`](Region::compute); all panels are laid out, and nobody else uses the tiles.
    unsafe fn group(&self, down: Range<usize>, across: Range<usize>, panels: (usize, usize)) {
        let (rows, columns) = (self.rows, 2 * self.kernels.lanes);
        let i = down.start * rows..self.size.0.min(down.end * rows);
        let j = across.start * columns..self.size.1.min(across.end * columns);
        let (top, left) = (self.first.0 + i.start, self.first.1 + j.start);
        match self.out {
            Out::Memory(out) => {
                let at = top as isize * out.row + left as isize * out.col;
                // SAFETY: the caller's promise; the group's first element is one of the result.
                unsafe { self.tiles(down, across, panels, Matrix { start: out.start.offset(at), ..out }) }
            }
            Out::Pieces(hand_over) => PIECE_OF_OUT.with(|kept| {
                let mut piece = kept.take();
                let len = i.len() * j.len();
                if piece.len() < len {
                    piece.resize(len, 0.0);
                }
                let out = Matrix { start: piece.as_mut_ptr(), row: j.len() as isize, col: 1 };
                let (down_to, right_to) = (top + i.len(), left + j.len());
                // SAFETY: the caller's promise; the piece has room for the group, and is this call's until it is put back.
                unsafe { self.tiles(down, across, panels, out) };
                hand_over(top..down_to, left..right_to, &piece[..len]);
                kept.set(piece);
            }),
        }
    }

    /// The tiles of some panels of rows and of columns, into `out`, which starts where the first of them does.
    ///
    /// # Safety
    /// As [`group`](Region::group); `out` has room for all of them.
    unsafe fn tiles(
        &self,
        down: Range<usize>,
        across: Range<usize>,
        (of_a, of_b): (usize, usize),
        out: Matrix<*mut f32>,
    ) {
        let (top, start) = (down.start, across.start);
        let (rows, columns) = (self.rows, 2 * self.kernels.lanes);
        let in_place = self.a.in_place();
        for (z, first, steps) in self.depths() {
            for right in across.clone() {
                let left = columns.min(self.size.1 - right * columns);
                // SAFETY: in the buffer.
                let b = unsafe { self.packed_b.add((z * of_b + right) * (self.depth * columns + SLACK)) };
                for down in down.clone() {
                    let (i, high) = (down * rows, rows.min(self.size.0 - down * rows));
                    let kernel = self.kernels.tile(high, left.div_ceil(self.kernels.lanes), in_place.is_some());
                    let at = ((down - top) * rows) as isize * out.row + ((right - start) * columns) as isize * out.col;
                    // SAFETY: the panel is in the buffer and laid out; the tile is in the result, and this call's alone.
                    unsafe {
                        kernel(&Tile {
                            k: steps,
                            a: match in_place {
                                Some((a, row)) => {
                                    a.byte_offset((self.first.0 + i) as isize * row).add(self.first.2 + first)
                                }
                                None => self.packed_a.add((z * of_a + down) * (self.depth * rows + SLACK)),
                            },
                            a_row: in_place.map_or(0, |(_, row)| row),
                            b,
                            out: out.start.offset(at),
                            row: out.row,
                            col: out.col,
                            columns: left,
                            accumulate: self.first.2 + first > 0,
                        });
                    }
                }
            }
        }
    }
}

/// How many panels of rows and of columns a group has, for at least `groups` of them where there is so much to do.
fn group(of_a: usize, of_b: usize, k: usize, groups: usize) -> (usize, usize) {
    let (mut high, mut wide) = (of_a.min(GROUP[0]), of_b.min(GROUP[1]));
    while of_a.div_ceil(high) * of_b.div_ceil(wide) < groups && high * wide > 1 && high * wide * k > STEPS {
        match high >= wide {
            true => high = high.div_ceil(2),
            false => wide = wide.div_ceil(2),
        }
    }
    (even(of_a, high, 1), even(of_b, wide, 1))
}

/// As [`group`], of groups that are as wide as can be, and no larger than what is handed over; a tile has `tile` elements.
fn rows_of_groups(of_a: usize, of_b: usize, tile: usize, groups: usize) -> (usize, usize) {
    let wide = even(of_b, GROUP[1], 1);
    let high = GROUP[0].min(HANDED_OVER / (wide * tile)).min(of_a * of_b.div_ceil(wide) / groups).max(1);
    (even(of_a, high, 1), wide)
}

/// A matrix that is laid out in panels of neighbouring rows, piece by piece.
struct Panels {
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
}

// SAFETY: threads read the matrix, and each writes to pieces of its own.
unsafe impl Sync for Panels {}

impl Panels {
    fn new(
        from: Matrix<Start>,
        size: (usize, usize),
        first: (usize, usize),
        to: *mut f32,
        (rows, lanes): (usize, usize),
        (panels, depth): (usize, usize),
    ) -> Panels {
        // Rows of the matrix follow one another, then its steps are far apart: each is read over many panels. Otherwise a
        // panel is laid out in one go, for that may write behind what it lays out.
        let piece = match from.row == 1 && from.col != 1 {
            true => (panels.min(TOGETHER), (PIECE / (rows * panels.min(TOGETHER))).clamp(1, depth)),
            false => ((PIECE / (rows * depth)).max(1), depth),
        };
        Panels { from, size, first, to, rows, lanes, panels, depth, piece }
    }

    /// In each block of `depth` steps, groups of panels and parts of the steps.
    fn grid(&self) -> (usize, usize, usize) {
        let blocks = self.size.1.div_ceil(self.depth);
        (blocks, self.panels.div_ceil(self.piece.0), self.depth.div_ceil(self.piece.1))
    }

    fn pieces(&self) -> usize {
        let (blocks, groups, parts) = self.grid();
        blocks * groups * parts
    }

    /// # Safety
    /// The matrix is there to be read, the panels' memory is there to be written, and nobody else uses that of this piece.
    unsafe fn lay_out(&self, piece: usize) {
        let (_, groups, parts) = self.grid();
        let (block, group, part) = (piece / (groups * parts), piece / parts % groups, piece % parts);
        let depth = self.depth.min(self.size.1 - block * self.depth);
        let (begin, end) = (depth.min(part * self.piece.1), depth.min((part + 1) * self.piece.1));
        let (first, last) = (group * self.piece.0, self.panels.min((group + 1) * self.piece.0));
        let whole = last.min(self.size.0 / self.rows).max(first);
        let apart = self.depth * self.rows + SLACK;
        // SAFETY: the panels' memory has room for all of them; the rows and steps are the matrix's.
        let to =
            |panel: usize, width: usize| unsafe { self.to.add((block * self.panels + panel) * apart + begin * width) };
        let from = |panel: usize| (self.first.0 + panel * self.rows, self.first.1 + block * self.depth + begin);
        // SAFETY: the caller's promise, and as above. Lanes beyond the matrix are written as zeros.
        unsafe {
            if first < whole {
                let copies = Copies { panels: whole - first, apart, steps: end - begin };
                lay_out(self.from, from(first), to(first, self.rows), copies, self.rows, self.rows);
            }
            if whole < last {
                let lanes = self.size.0 - whole * self.rows;
                let width = lanes.next_multiple_of(self.lanes);
                let copies = Copies { panels: 1, apart, steps: end - begin };
                lay_out(self.from, from(whole), to(whole, width), copies, lanes, width);
            }
        }
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
