//! Products of f32 and of halves, block by block: both matrices are laid out in panels, and tiles of the result are
//! computed from the panels, a group of neighbours at a time, so that what a group reads stays in the cache of the core
//! that computes it. The result has parts, each with panels and a thread or several of its own, which go on with the
//! others' when theirs is done.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use smallvec::SmallVec;

use super::super::{parallel, threads};
use super::kernel::{Kernels, Tile};
use super::matrix::{Matrix, Start};
use super::pack::{SLACK, add_steps};
use super::panels::Panels;
use super::{Finish, cut, start};
use crate::device::cpu::huge_pages::advise_huge;

/// Steps of k that a tile does before the next, for each lane of a vector: of the panels that a group reads for them, one stays in
/// the first-level cache and all in the second. The fastest with vectors of 8 (of 192, 256, 320, 384 and 512 steps) and of 16.
const DEPTH: usize = 64;
/// Up to so many multiplications every thread has panels of its own: what one lays out for another has to come from its cache,
/// which takes longer than to do it twice.
const APART: usize = 1 << 28;
/// Elements of the left matrix that threads read in place for what it takes to lay out one.
const IN_PLACE: usize = 6;
/// Up to so many it does all of its part at once.
const AT_ONCE: usize = 1 << 25;
/// Steps of k, and elements of a matrix, that are laid out at a time.
pub(super) const DEEP: usize = 2048;
const LAID_OUT: usize = 1 << 20;
/// Groups of tiles a thread should have, so that all are through at about the same time, as long as a group has so many
/// steps of its tiles.
const GROUPS: usize = 12;
const STEPS: usize = 1024;
/// Groups for each thread that are cut into rows of tiles, because they are the last.
const LAST: usize = 2;
/// Panels of a group at most, of rows and of columns: the rows stay in the second-level cache.
const GROUP: [usize; 2] = [16, 32];
/// Elements of a group that is handed over: it stays in the second-level cache beside the panels, too.
const HANDED_OVER: usize = 1 << 14;
/// Elements of a large page: panels that need more begin where one does, so that few are in use.
const HUGE: usize = 1 << 19;

/// What is done with the result.
#[derive(Clone, Copy)]
pub(super) enum Out<'a> {
    /// It is written there, finished; columns are one apart unless nothing is left to do.
    Memory(Matrix<*mut f32>, Finish<*const f32>),
    /// Pieces of it are handed over as soon as they are computed; of at most [`DEEP`] steps.
    Pieces(HandOver<'a>),
}

/// Called with rows, columns, and the elements that they have in common.
type HandOver<'a> = &'a (dyn Fn(Range<usize>, Range<usize>, &[f32]) + Sync);

/// `n` in pieces of one size, a multiple of `step`, at most `most`.
pub(super) fn even(n: usize, most: usize, step: usize) -> usize {
    n.div_ceil(n.div_ceil(most)).next_multiple_of(step)
}

/// `out = a b` for an `m` x `k` and a `k` x `n` matrix, none of the numbers 0. Kernels of pairs are for two matrices of bf16. The sums
/// of the rows of `a` go to `sums`, `m` elements, where it is laid out anyway; gives whether they did.
///
/// # Safety
/// The elements of all of them are in memory that lives through the call. Nobody writes to those of the operands, to which what the
/// result is finished with belongs, as many as [`Finish`] says; nobody else uses those of the results, and no two of these are one.
pub(super) unsafe fn product(
    kernels: &'static Kernels,
    (m, n, k): (usize, usize, usize),
    out: Out,
    a: Matrix<Start>,
    b: Matrix<Start>,
    sums: Option<*mut f32>,
) -> bool {
    if let Out::Memory(out, Finish::Nothing) = out
        && out.col != 1
        && out.row == 1
    {
        // SAFETY: the caller's promise. The columns of the transposed result follow one another.
        return unsafe {
            let out = Out::Memory(out.transposed(), Finish::Nothing);
            product(kernels, (n, m, k), out, b.transposed(), a.transposed(), None)
        };
    }
    debug_assert!(match out {
        Out::Memory(out, finish) => matches!(finish, Finish::Nothing) || out.col == 1,
        Out::Pieces(_) => k <= DEEP,
    });
    let (a, b, k) = match kernels.pairs {
        true => (a.in_pairs(k), b.in_pairs(k), k.div_ceil(2)),
        false => (a, b, k),
    };
    let sums = sums.filter(|_| !kernels.pairs && a.in_place().is_none());
    let ((down, across), threads) = shares(kernels, (m, n, k), a, b);
    let along = |n: usize, pieces: usize| (0..pieces).map(move |i| start(n, pieces, i)..start(n, pieces, i + 1));
    let parts: SmallVec<[(Range<usize>, Range<usize>); 8]> = along(m, down)
        .flat_map(|down| along(n, across).map(move |across| (down.clone(), across)))
        .filter(|(down, across)| !down.is_empty() && !across.is_empty())
        .collect();
    let m = parts.iter().map(|(down, _)| down.len()).max().unwrap_or(0);
    let n = parts.iter().map(|(_, across)| across.len()).max().unwrap_or(0);
    let columns = 2 * kernels.lanes;
    let deep = even(k, DEEP, kernels.step);
    let depth = even(deep, DEPTH * kernels.lanes, kernels.step);
    let most = |step: usize| (LAID_OUT / deep).max(step);
    let wide = even(n, most(columns), columns);
    let high = even(m, if a.in_place().is_some() { m } else { most(kernels.rows) }, 1);
    let rows = even(high, kernels.rows, 1);
    let blocks = deep.div_ceil(depth);
    let room_b = blocks * wide.min(n).div_ceil(columns) * (depth * columns + SLACK);
    let room_a = match a.in_place() {
        Some(_) => 0,
        None => (blocks * high.div_ceil(rows) * (depth * rows + SLACK)).next_multiple_of(SLACK),
    };
    BUFFER.with(|kept| {
        let mut buffer = kept.take();
        let room = parts.len() * (room_a + room_b) + SLACK;
        let line = if room >= HUGE { HUGE * size_of::<f32>() } else { 64 };
        if buffer.len() < room + buffer.as_ptr().align_offset(line) {
            buffer = Vec::with_capacity(room + line / size_of::<f32>());
            advise_huge(buffer.spare_capacity_mut());
            buffer.resize(buffer.capacity(), 0.0);
        }
        let aligned = buffer.as_ptr().align_offset(line);
        let panels = buffer[aligned..].as_mut_ptr();
        for k0 in (0..k).step_by(deep) {
            for j0 in (0..n).step_by(wide) {
                for i0 in (0..m).step_by(high) {
                    let region = |(part, (down, across)): (usize, &(Range<usize>, Range<usize>))| {
                        let left = (down.len().checked_sub(i0)?, across.len().checked_sub(j0)?);
                        let packed_b = panels.wrapping_add(part * (room_a + room_b));
                        let packed_a = packed_b.wrapping_add(room_b);
                        (left.0 > 0 && left.1 > 0).then(|| Region {
                            kernels,
                            first: (down.start + i0, across.start + j0, k0),
                            size: (high.min(left.0), wide.min(left.1), deep.min(k - k0)),
                            rows,
                            depth,
                            out,
                            a,
                            b,
                            sums,
                            packed_b,
                            packed_a,
                            lay_out_b: i0 == 0,
                            last: k0 + deep >= k,
                        })
                    };
                    let regions: SmallVec<[Region; 4]> = parts.iter().enumerate().filter_map(region).collect();
                    // SAFETY: the caller's promise; the buffer is this call's until it is put back.
                    unsafe { compute(&regions, threads) };
                }
            }
        }
        kept.set(buffer);
    });
    sums.is_some()
}

/// How threads share a product: the parts of its result, down and across, each with panels of its own, and the threads that
/// begin with each.
fn shares(
    kernels: &Kernels,
    (m, n, k): (usize, usize, usize),
    a: Matrix<Start>,
    b: Matrix<Start>,
) -> ((usize, usize), usize) {
    let of_a = if a.in_place().is_some() { m / IN_PLACE } else { m };
    let (down, across) =
        cut((m, n, k), of_a, |rows| match b.right_in_place(kernels, (m / rows, n * rows / threads(), k)) {
            Some(_) => 0,
            None => n,
        });
    match m.saturating_mul(n).saturating_mul(k) <= APART {
        true => ((down, across), 1),
        false => ((1, 1), threads()),
    }
}

/// Computes regions that have no element of the result in common, each by `threads` threads to begin with.
///
/// # Safety
/// As [`product`], of the regions' elements; nobody else uses the panels' memory.
unsafe fn compute(regions: &[Region], threads: usize) {
    if threads == 1 && regions.iter().all(Region::is_small) {
        return parallel::for_each_index(regions.len(), |part| {
            let work = Work::new(&regions[part], 1);
            // SAFETY: as below.
            (0..work.count).for_each(|i| unsafe { work.piece(i) });
        });
    }
    let works: SmallVec<[Work; 8]> = regions.iter().map(|region| Work::new(region, threads)).collect();
    let most = works.iter().map(|work| work.count).max().unwrap_or(0);
    // SAFETY: the caller's promise. Every piece comes once, and those of a region are begun in order.
    parallel::for_each_in_order(works.len() * most, works.len(), |i| unsafe { works[i / most].piece(i % most) });
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
    /// Where sums of rows of a go, which is then laid out.
    sums: Option<*mut f32>,
    /// For every `depth` steps of k all panels, one after another, [`SLACK`] behind each.
    packed_a: *mut f32,
    packed_b: *mut f32,
    /// Whether the panels of b are not there yet.
    lay_out_b: bool,
    /// Whether these are the last steps.
    last: bool,
}

// SAFETY: threads read the operands, write panels of their own, read panels when all are written, and write groups of the
// result that have no element in common.
unsafe impl Sync for Region<'_> {}

/// What there is to do for a region: pieces that are laid out, and groups of tiles, which come after them.
struct Work<'a> {
    region: &'a Region<'a>,
    a: Panels,
    b: Panels,
    /// Pieces of b, and of both matrices.
    pieces_b: usize,
    pieces: usize,
    laid_out: Counter,
    /// Panels of a group, and groups beside one another.
    group: (usize, usize),
    across: usize,
    /// Groups that are not cut into rows of tiles.
    whole: usize,
    /// All pieces; it may be too many.
    count: usize,
}

/// In a cache line of its own: what is beside it is read all the time.
#[repr(align(128))]
struct Counter(AtomicUsize);

impl<'a> Work<'a> {
    fn new(region: &'a Region, threads: usize) -> Work<'a> {
        let (of_a, of_b) = region.panels();
        let (a, b) = (region.operand_a(of_a), region.operand_b(of_b));
        let pieces_b = if region.lay_out_b && region.b_in_place().is_none() { b.pieces() } else { 0 };
        let pieces = pieces_b + if region.a.in_place().is_some() { 0 } else { a.pieces() };
        let (groups, last) =
            if threads == 1 && region.is_small() { (1, 0) } else { (GROUPS * threads, LAST * threads) };
        let (high, wide) = match region.out {
            Out::Memory(..) => group(of_a, of_b, region.size.2, groups),
            Out::Pieces(_) => rows_of_groups(of_a, of_b, region.rows * 2 * region.kernels.lanes, groups),
        };
        let across = of_b.div_ceil(wide);
        let groups = of_a.div_ceil(high) * across;
        let whole = groups.saturating_sub(last);
        let count = pieces + whole + (groups - whole) * high;
        let laid_out = Counter(AtomicUsize::new(0));
        Work { region, a, b, pieces_b, pieces, laid_out, group: (high, wide), across, whole, count }
    }

    /// # Safety
    /// As [`compute`]; every piece comes once, when those before it have been begun.
    unsafe fn piece(&self, i: usize) {
        // SAFETY: the caller's promise; groups are computed when all pieces are laid out.
        unsafe {
            if i < self.pieces_b {
                self.b.lay_out(i);
            } else if i < self.pieces {
                self.a.lay_out(i - self.pieces_b);
            } else {
                let mut looks = 0u32;
                while self.laid_out.0.load(Ordering::Acquire) < self.pieces {
                    looks += 1;
                    if looks.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
                }
                let ((of_a, of_b), (high, wide)) = (self.region.panels(), self.group);
                let (group, first, rows) = match i - self.pieces {
                    group if group < self.whole => (group, 0, high),
                    row => (self.whole + (row - self.whole) / high, (row - self.whole) % high, 1),
                };
                let (top, left) = (group / self.across * high + first, group % self.across * wide);
                if top < of_a {
                    self.region.group(top..of_a.min(top + rows), left..of_b.min(left + wide), (of_a, of_b));
                }
                return;
            }
        }
        self.laid_out.0.fetch_add(1, Ordering::Release);
    }
}

impl Region<'_> {
    /// Whether one thread computes all of it where it is its own.
    fn is_small(&self) -> bool {
        self.size.0 * self.size.1 * self.size.2 <= AT_ONCE
    }

    /// Panels of a and of b.
    fn panels(&self) -> (usize, usize) {
        (self.size.0.div_ceil(self.rows), self.size.1.div_ceil(2 * self.kernels.lanes))
    }

    fn b_in_place(&self) -> Option<(*const f32, isize)> {
        self.b.right_in_place(self.kernels, self.size)
    }

    /// Each `depth` steps of k: their number, the first, and how many they are.
    fn depths(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let k = self.size.2;
        (0..k.div_ceil(self.depth)).map(move |z| (z, z * self.depth, self.depth.min(k - z * self.depth)))
    }

    fn operand_a(&self, panels: usize) -> Panels {
        let (size, first) = ((self.size.0, self.size.2), (self.first.0, self.first.2));
        let row_by_row = self.kernels.step > 1;
        Panels::new(self.a, size, first, self.packed_a, (self.rows, 1), (panels, self.depth), row_by_row)
    }

    fn operand_b(&self, panels: usize) -> Panels {
        let (size, first) = ((self.size.1, self.size.2), (self.first.1, self.first.2));
        let lanes = self.kernels.lanes;
        Panels::new(self.b.transposed(), size, first, self.packed_b, (2 * lanes, lanes), (panels, self.depth), false)
    }

    /// Some panels of rows and of columns, computed and, where that is wanted, handed over.
    ///
    /// # Safety
    /// As [`compute`]; all panels are laid out, and nobody else uses the tiles.
    unsafe fn group(&self, down: Range<usize>, across: Range<usize>, panels: (usize, usize)) {
        let (rows, columns) = (self.rows, 2 * self.kernels.lanes);
        let i = down.start * rows..self.size.0.min(down.end * rows);
        let j = across.start * columns..self.size.1.min(across.end * columns);
        let (top, left) = (self.first.0 + i.start, self.first.1 + j.start);
        match self.out {
            Out::Memory(out, finish) => {
                let at = top as isize * out.row + left as isize * out.col;
                // Of the group's first row or element.
                let finish = finish.map(|row| row.wrapping_add(left), |x| x.wrapping_offset(at));
                // SAFETY: the caller's promise; the group's first element is one of the result.
                unsafe { self.tiles(down, across, panels, Matrix { start: out.start.offset(at), ..out }, finish) }
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
                unsafe { self.tiles(down, across, panels, out, Finish::Nothing) };
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
        finish: Finish<*const f32>,
    ) {
        let (top, start) = (down.start, across.start);
        let (rows, columns) = (self.rows, 2 * self.kernels.lanes);
        let (in_place, b_in_place) = (self.a.in_place(), self.b_in_place());
        for (z, first, steps) in self.depths() {
            let finish = if self.last && first + steps == self.size.2 { finish } else { Finish::Nothing };
            for right in across.clone() {
                let left = columns.min(self.size.1 - right * columns);
                // SAFETY: an element of the matrix, or in the buffer.
                let (b, b_step) = unsafe {
                    match b_in_place {
                        Some((b, row)) => {
                            let at = (self.first.2 + first) as isize * row;
                            (b.byte_offset(at).add(self.first.1 + right * columns), row)
                        }
                        None => {
                            let at = (z * of_b + right) * (self.depth * columns + SLACK);
                            let step = left.next_multiple_of(self.kernels.lanes) * size_of::<f32>();
                            (self.packed_b.add(at).cast_const(), step as isize)
                        }
                    }
                };
                for down in down.clone() {
                    let (i, high) = (down * rows, rows.min(self.size.0 - down * rows));
                    let kernel = self.kernels.tile(high, left.div_ceil(self.kernels.lanes), in_place.is_some());
                    if let Some(sums) = self.sums.filter(|_| self.first.1 + right == 0) {
                        // SAFETY: the panel is in the buffer and laid out, and the sums of its rows are this call's alone.
                        unsafe {
                            let panel = self.packed_a.add((z * of_a + down) * (self.depth * rows + SLACK));
                            add_steps(panel, (steps, high), sums.add(self.first.0 + i), self.first.2 + first > 0);
                        }
                    }
                    let beside = (right - start) * columns;
                    let at = ((down - top) * rows) as isize * out.row + beside as isize * out.col;
                    // SAFETY: the panel is in the buffer and laid out; the tile is in the result, and this call's alone.
                    unsafe {
                        kernel(&Tile {
                            k: steps,
                            times: 1,
                            a_jump: 0,
                            b_jump: 0,
                            a: match in_place {
                                Some((a, row)) => {
                                    a.byte_offset((self.first.0 + i) as isize * row).add(self.first.2 + first)
                                }
                                None => self.packed_a.add((z * of_a + down) * (self.depth * rows + SLACK)),
                            },
                            a_row: in_place.map_or((self.depth * size_of::<f32>()) as isize, |(_, row)| row),
                            b,
                            b_step,
                            out: out.start.offset(at),
                            row: out.row,
                            col: out.col,
                            columns: left,
                            accumulate: self.first.2 + first > 0,
                            finish: finish.map(|row| row.wrapping_add(beside), |x| x.wrapping_offset(at)),
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
