//! Products of f32 and of halves, block by block. Both matrices are packed into panels. Threads compute groups of adjacent tiles from the
//! panels, so that the panels of a group stay in the cache of one core. For a large product, all threads together pack one set of panels.
//! For a small product, each thread packs panels for its own part of the result. A thread that has finished its part helps with the other
//! parts.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use smallvec::SmallVec;

use super::epilogue::KernelEpilogue;
use super::kernel::{Kernels, Tile};
use super::pack::{ElementPtr, Matrix, PANEL_SLACK, Panels, sum_steps};
use super::{partition, piece_start};
use crate::backend::cpu::kernels::buffers::{Content, HUGE_PAGE_ELEMENTS, aligned_room, with_buffer};
use crate::device::cpu::{parallel, threads};

/// The number of steps of k, per vector lane, that a tile sums before the next tile. One panel of a group then stays in the L1 cache, and
/// all panels of the group in the L2 cache. This was the fastest of 192, 256, 320, 384 and 512 steps with 8 lanes, and also with 16
/// lanes.
const TILE_STEPS_PER_LANE: usize = 64;
/// Maximum number of multiplications of a product in which every thread packs its own panels: fetching panels from the cache of another
/// core takes longer than packing them twice.
pub(super) const OWN_PANELS_MAX_PRODUCTS: usize = 1 << 28;
/// The number of elements of the left matrix that a thread reads in place in the time it takes to pack one element.
const IN_PLACE_READS_PER_PACKED: usize = 6;
/// Maximum number of multiplications of a part that one thread computes alone, without splitting the part into groups for other threads.
const UNSPLIT_MAX_PRODUCTS: usize = 1 << 25;
/// The maximum number of steps of k that are packed at a time.
pub(super) const MAX_PACKED_STEPS: usize = 2048;
/// The maximum number of elements of a matrix that are packed at a time.
const MAX_PACKED_ELEMENTS: usize = 1 << 20;
/// The minimum number of groups per thread, so that all threads finish at about the same time. Groups are never smaller than
/// [`MIN_GROUP_STEPS`], even if there are then fewer groups.
const MIN_GROUPS_PER_THREAD: usize = 12;
/// The minimum size of a group, as its number of tiles times the number of steps of k.
const MIN_GROUP_STEPS: usize = 1024;
/// The number of groups per thread that are split into rows of tiles at the end of the work, so that all threads finish together.
const SPLIT_GROUPS_PER_THREAD: usize = 2;
/// The maximum numbers of row panels and column panels of a group: the row panels stay in the L2 cache.
const MAX_GROUP_PANELS: [usize; 2] = [16, 32];
/// The maximum number of elements of a group for [`Destination::Pieces`]: they stay in the L2 cache beside the panels.
const MAX_PIECE_ELEMENTS: usize = 1 << 14;

#[derive(Clone, Copy)]
pub(super) enum Destination<'a> {
    /// A matrix in memory, and the epilogue to apply. With an epilogue, columns must be one element apart.
    Memory(Matrix<*mut f32>, KernelEpilogue<*const f32>),
    /// A callback that gets pieces of the result as soon as they are computed; for products of at most [`MAX_PACKED_STEPS`] steps.
    Pieces(PieceCallback<'a>),
}

/// Called with the rows, the columns, and the elements of a piece of the result.
type PieceCallback<'a> = &'a (dyn Fn(Range<usize>, Range<usize>, &[f32]) + Sync);

/// Returns the length of the pieces if `n` is split into equal pieces of at most `most`; the length is then rounded up to a multiple of
/// `step`.
pub(super) fn even_len(n: usize, most: usize, step: usize) -> usize {
    n.div_ceil(n.div_ceil(most)).next_multiple_of(step)
}

/// Computes `out = a b` for an `m` x `k` and a `k` x `n` matrix; no size may be 0. Kernels of pairs require two matrices of bf16.
/// If `a` is packed, the sums of its `m` rows are written to `sums`; returns whether the sums were written. With `alone`, one thread
/// starts the product, and other threads help only with a large product.
///
/// # Safety
/// All elements are in memory that stays valid during the call. No code writes to the operands, including the epilogue's operand, which
/// is as large as [`KernelEpilogue`] says. No other code accesses the results, and the results' elements are distinct.
pub(super) unsafe fn product(
    kernels: &'static Kernels,
    (m, n, k): (usize, usize, usize),
    out: Destination,
    a: Matrix<ElementPtr>,
    b: Matrix<ElementPtr>,
    sums: Option<*mut f32>,
    alone: bool,
) -> bool {
    if let Destination::Memory(out, KernelEpilogue::Nothing) = out
        && out.col != 1
        && out.row == 1
    {
        // SAFETY: the caller guarantees the requirements of this function. The columns of the transposed result are one element apart.
        return unsafe {
            let out = Destination::Memory(out.transposed(), KernelEpilogue::Nothing);
            product(kernels, (n, m, k), out, b.transposed(), a.transposed(), None, alone)
        };
    }
    debug_assert!(match out {
        Destination::Memory(out, finish) => matches!(finish, KernelEpilogue::Nothing) || out.col == 1,
        Destination::Pieces(_) => k <= MAX_PACKED_STEPS,
    });
    let (a, b, k) = if kernels.pairs { (a.in_pairs(k), b.in_pairs(k), k.div_ceil(2)) } else { (a, b, k) };
    let sums = sums.filter(|_| !kernels.pairs && a.left_in_place().is_none());
    // The numbers of parts along the rows and along the columns (each part has its own panels), and the number of threads that start with
    // each part.
    let of_a = if a.left_in_place().is_some() { m / IN_PLACE_READS_PER_PACKED } else { m };
    let right_in_place = |rows| b.right_in_place(kernels.lanes, (m / rows, n * rows / threads(), k));
    let own = || partition((m, n, k), of_a, |rows| if right_in_place(rows).is_some() { 0 } else { n });
    let ((down, across), threads) = match m.saturating_mul(n).saturating_mul(k) <= OWN_PANELS_MAX_PRODUCTS {
        _ if alone => ((1, 1), 1),
        true => (own(), 1),
        false => ((1, 1), threads()),
    };
    let along =
        |n: usize, pieces: usize| (0..pieces).map(move |i| piece_start(n, pieces, i)..piece_start(n, pieces, i + 1));
    let parts: SmallVec<[(Range<usize>, Range<usize>); 8]> = along(m, down)
        .flat_map(|down| along(n, across).map(move |across| (down.clone(), across)))
        .filter(|(down, across)| !down.is_empty() && !across.is_empty())
        .collect();
    let m = parts.iter().map(|(down, _)| down.len()).max().unwrap_or(0);
    let n = parts.iter().map(|(_, across)| across.len()).max().unwrap_or(0);
    let columns = 2 * kernels.lanes;
    let deep = even_len(k, MAX_PACKED_STEPS, kernels.step);
    let depth = even_len(deep, TILE_STEPS_PER_LANE * kernels.lanes, kernels.step);
    let most = |step: usize| (MAX_PACKED_ELEMENTS / deep).max(step);
    let wide = even_len(n, most(columns), columns);
    let high = even_len(m, if a.left_in_place().is_some() { m } else { most(kernels.rows) }, 1);
    let rows = even_len(high, kernels.rows, 1);
    let blocks = deep.div_ceil(depth);
    let room_b = blocks * wide.min(n).div_ceil(columns) * (depth * columns + PANEL_SLACK);
    let room_a = match a.left_in_place() {
        Some(_) => 0,
        None => (blocks * high.div_ceil(rows) * (depth * rows + PANEL_SLACK)).next_multiple_of(PANEL_SLACK),
    };
    with_buffer(Content::Panels, usize::MAX, |buffer| {
        let room = parts.len() * (room_a + room_b) + PANEL_SLACK;
        // A large buffer starts at a huge page, so that few pages are in use.
        let line = if room >= HUGE_PAGE_ELEMENTS { HUGE_PAGE_ELEMENTS * size_of::<f32>() } else { 64 };
        let panels = aligned_room(buffer, room, line).as_mut_ptr();
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
                            packs_b: i0 == 0,
                            last: k0 + deep >= k,
                        })
                    };
                    let regions: SmallVec<[Region; 4]> = parts.iter().enumerate().filter_map(region).collect();
                    // SAFETY: the caller's promise; this call owns the buffer until it is put back.
                    unsafe { compute(&regions, threads) };
                }
            }
        }
    });
    sums.is_some()
}

/// Computes regions that share no element of the result. Each region starts with `threads` threads.
///
/// # Safety
/// The requirements of [`product`], for the regions' elements; no other code uses the panels' memory.
unsafe fn compute(regions: &[Region], threads: usize) {
    if threads == 1 && regions.iter().all(Region::is_small) {
        return parallel::for_each_index(regions.len(), |part| {
            let work = Work::new(&regions[part], 1);
            // SAFETY: every piece is computed once, in order, as below.
            (0..work.count).for_each(|i| unsafe { work.run_piece(i) });
        });
    }
    let works: SmallVec<[Work; 8]> = regions.iter().map(|region| Work::new(region, threads)).collect();
    let most = works.iter().map(|work| work.count).max().unwrap_or(0);
    // SAFETY: the caller guarantees the requirements of this function. Every piece is computed once, and the pieces of a region are
    // started in order.
    parallel::for_each_in_order(works.len() * most, works.len(), |i| unsafe { works[i / most].run_piece(i % most) });
}

/// A part of the result, and the steps of k that are packed at a time.
struct Region<'a> {
    kernels: &'static Kernels,
    /// The first row, column and step.
    first: (usize, usize, usize),
    /// The numbers of rows, columns and steps.
    size: (usize, usize, usize),
    /// The number of rows of a panel of a.
    rows: usize,
    /// The number of steps of k of a panel.
    depth: usize,
    out: Destination<'a>,
    a: Matrix<ElementPtr>,
    b: Matrix<ElementPtr>,
    /// The destination of the sums of a's rows, if wanted; a is then always packed.
    sums: Option<*mut f32>,
    /// The packed panels of a. For each run of `depth` steps of k, all panels follow one another, each followed by [`PANEL_SLACK`].
    packed_a: *mut f32,
    packed_b: *mut f32,
    /// True if the panels of b are still to be packed.
    packs_b: bool,
    last: bool,
}

// SAFETY: threads read the operands, each thread writes different panels, panels are read once all are written, and no two groups of the
// result share an element.
unsafe impl Sync for Region<'_> {}

/// The work of a region: pieces to pack, then groups of tiles to compute.
struct Work<'a> {
    region: &'a Region<'a>,
    a: Panels,
    b: Panels,
    /// The number of pieces of b to pack.
    pieces_b: usize,
    /// The total number of pieces of a and b to pack.
    pieces: usize,
    /// The number of pieces that are packed.
    packed_pieces: Counter,
    /// The numbers of row panels and column panels of a group.
    group: (usize, usize),
    /// The number of groups along the columns of the result.
    across: usize,
    /// The number of groups that are not split into rows of tiles.
    unsplit_groups: usize,
    /// An upper bound on the number of pieces of work.
    count: usize,
}

/// A counter in its own cache lines, so that updating it does not slow down reads of the neighbouring fields.
#[repr(align(128))]
struct Counter(AtomicUsize);

impl<'a> Work<'a> {
    fn new(region: &'a Region, threads: usize) -> Work<'a> {
        let (of_a, of_b) = region.panels();
        let (kernels, depth, (m, n, k), (i, j, p)) = (region.kernels, region.depth, region.size, region.first);
        let (row_by_row, columns) = (kernels.step > 1, (2 * kernels.lanes, kernels.lanes));
        let a = Panels::new(region.a, (m, k), (i, p), region.packed_a, (region.rows, 1), (of_a, depth), row_by_row);
        let b = Panels::new(region.b.transposed(), (n, k), (j, p), region.packed_b, columns, (of_b, depth), false);
        let pieces_b = if region.packs_b && region.b_in_place().is_none() { b.pieces() } else { 0 };
        let pieces = pieces_b + if region.a.left_in_place().is_some() { 0 } else { a.pieces() };
        let (groups, last) = if threads == 1 && region.is_small() {
            (1, 0)
        } else {
            (MIN_GROUPS_PER_THREAD * threads, SPLIT_GROUPS_PER_THREAD * threads)
        };
        let (high, wide) = match region.out {
            Destination::Memory(..) => group_size(of_a, of_b, region.size.2, groups),
            Destination::Pieces(_) => wide_group_size(of_a, of_b, region.rows * 2 * region.kernels.lanes, groups),
        };
        let across = of_b.div_ceil(wide);
        let groups = of_a.div_ceil(high) * across;
        let unsplit_groups = groups.saturating_sub(last);
        let count = pieces + unsplit_groups + (groups - unsplit_groups) * high;
        let packed_pieces = Counter(AtomicUsize::new(0));
        Work { region, a, b, pieces_b, pieces, packed_pieces, group: (high, wide), across, unsplit_groups, count }
    }

    /// Performs piece `i` of the work: packs a piece of a matrix or computes tiles.
    ///
    /// # Safety
    /// The requirements of [`compute`]; every piece is started once, after all pieces with lower numbers have been started.
    unsafe fn run_piece(&self, i: usize) {
        // SAFETY: the caller's promise; groups are computed once all pieces are packed.
        unsafe {
            if i < self.pieces_b {
                self.b.pack_piece(i);
            } else if i < self.pieces {
                self.a.pack_piece(i - self.pieces_b);
            } else {
                let mut looks = 0u32;
                while self.packed_pieces.0.load(Ordering::Acquire) < self.pieces {
                    looks += 1;
                    if looks.is_multiple_of(4096) { std::thread::yield_now() } else { std::hint::spin_loop() }
                }
                let ((of_a, of_b), (high, wide)) = (self.region.panels(), self.group);
                let (group, first, rows) = match i - self.pieces {
                    group if group < self.unsplit_groups => (group, 0, high),
                    i => {
                        let row = i - self.unsplit_groups;
                        (self.unsplit_groups + row / high, row % high, 1)
                    }
                };
                let (top, left) = (group / self.across * high + first, group % self.across * wide);
                if top < of_a {
                    self.region.compute_group(top..of_a.min(top + rows), left..of_b.min(left + wide), (of_a, of_b));
                }
                return;
            }
        }
        self.packed_pieces.0.fetch_add(1, Ordering::Release);
    }
}

impl Region<'_> {
    /// True if one thread computes the region without splitting it into groups, unless several threads share the region.
    fn is_small(&self) -> bool {
        self.size.0 * self.size.1 * self.size.2 <= UNSPLIT_MAX_PRODUCTS
    }

    fn panels(&self) -> (usize, usize) {
        (self.size.0.div_ceil(self.rows), self.size.1.div_ceil(2 * self.kernels.lanes))
    }

    /// Returns the first element and the stride between rows of b in bytes, if the kernels read b in place, else `None`.
    fn b_in_place(&self) -> Option<(*const f32, isize)> {
        self.b.right_in_place(self.kernels.lanes, self.size)
    }

    /// Computes the group of these row panels and column panels, and passes the group to the callback, if any.
    ///
    /// # Safety
    /// The requirements of [`compute`]; all panels are packed, and no other code accesses the tiles.
    unsafe fn compute_group(&self, down: Range<usize>, across: Range<usize>, panels: (usize, usize)) {
        let (rows, columns) = (self.rows, 2 * self.kernels.lanes);
        let i = down.start * rows..self.size.0.min(down.end * rows);
        let j = across.start * columns..self.size.1.min(across.end * columns);
        let (top, left) = (self.first.0 + i.start, self.first.1 + j.start);
        match self.out {
            Destination::Memory(out, finish) => {
                let at = top as isize * out.row + left as isize * out.col;
                // The epilogue's operand is advanced to the group's first column (a row operand) or first element (a matrix operand).
                let finish = finish.map(|row| row.wrapping_add(left), |x| x.wrapping_offset(at));
                // SAFETY: the caller's promise; the group's first element is one of the result.
                unsafe { self.tiles(down, across, panels, Matrix { start: out.start.offset(at), ..out }, finish) }
            }
            Destination::Pieces(hand_over) => with_buffer(Content::Piece, usize::MAX, |piece| {
                let len = i.len() * j.len();
                if piece.len() < len {
                    piece.resize(len, 0.0);
                }
                let out = Matrix { start: piece.as_mut_ptr(), row: j.len() as isize, col: 1 };
                let (down_to, right_to) = (top + i.len(), left + j.len());
                // SAFETY: the caller's promise; the piece has room for the group, and this call owns it until it is put back.
                unsafe { self.tiles(down, across, panels, out, KernelEpilogue::Nothing) };
                hand_over(top..down_to, left..right_to, &piece[..len]);
            }),
        }
    }

    /// Computes the tiles of these row panels and column panels into `out`, which starts at the first tile.
    ///
    /// # Safety
    /// The requirements of [`compute_group`](Region::compute_group); `out` has room for all tiles.
    unsafe fn tiles(
        &self,
        down: Range<usize>,
        across: Range<usize>,
        (of_a, of_b): (usize, usize),
        out: Matrix<*mut f32>,
        finish: KernelEpilogue<*const f32>,
    ) {
        let (top, start) = (down.start, across.start);
        let (rows, columns) = (self.rows, 2 * self.kernels.lanes);
        let (in_place, b_in_place) = (self.a.left_in_place(), self.b_in_place());
        for (z, first) in (0..self.size.2).step_by(self.depth).enumerate() {
            let steps = self.depth.min(self.size.2 - first);
            let finish = if self.last && first + steps == self.size.2 { finish } else { KernelEpilogue::Nothing };
            for right in across.clone() {
                let left = columns.min(self.size.1 - right * columns);
                // SAFETY: the pointer is to an element of the matrix, or into the buffer.
                let (b, b_step) = unsafe {
                    match b_in_place {
                        Some((b, row)) => {
                            let at = (self.first.2 + first) as isize * row;
                            (b.byte_offset(at).add(self.first.1 + right * columns), row)
                        }
                        None => {
                            let at = (z * of_b + right) * (self.depth * columns + PANEL_SLACK);
                            let step = left.next_multiple_of(self.kernels.lanes) * size_of::<f32>();
                            (self.packed_b.add(at).cast_const(), step as isize)
                        }
                    }
                };
                for down in down.clone() {
                    let (i, high) = (down * rows, rows.min(self.size.0 - down * rows));
                    let kernel = self.kernels.tile(high, left.div_ceil(self.kernels.lanes), in_place.is_some());
                    if let Some(sums) = self.sums.filter(|_| self.first.1 + right == 0) {
                        // SAFETY: the panel is in the buffer and packed, and only this call accesses the sums of its rows.
                        unsafe {
                            let panel = self.packed_a.add((z * of_a + down) * (self.depth * rows + PANEL_SLACK));
                            sum_steps(panel, (steps, high), sums.add(self.first.0 + i), self.first.2 + first > 0);
                        }
                    }
                    let beside = (right - start) * columns;
                    let at = ((down - top) * rows) as isize * out.row + beside as isize * out.col;
                    // SAFETY: the panel is in the buffer and packed; the tile is in the result, and only this call accesses it.
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
                                None => self.packed_a.add((z * of_a + down) * (self.depth * rows + PANEL_SLACK)),
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

/// Returns the number of row panels and of column panels of a group. If the product is large enough, there are at least `groups` groups.
fn group_size(of_a: usize, of_b: usize, k: usize, groups: usize) -> (usize, usize) {
    let (mut high, mut wide) = (of_a.min(MAX_GROUP_PANELS[0]), of_b.min(MAX_GROUP_PANELS[1]));
    while of_a.div_ceil(high) * of_b.div_ceil(wide) < groups && high * wide > 1 && high * wide * k > MIN_GROUP_STEPS {
        if high >= wide { high = high.div_ceil(2) } else { wide = wide.div_ceil(2) }
    }
    (even_len(of_a, high, 1), even_len(of_b, wide, 1))
}

/// Returns the size of a group for [`Destination::Pieces`], like [`group_size`]. The group is as wide as possible, and has at most
/// [`MAX_PIECE_ELEMENTS`] elements. A tile has `tile` elements.
fn wide_group_size(of_a: usize, of_b: usize, tile: usize, groups: usize) -> (usize, usize) {
    let wide = even_len(of_b, MAX_GROUP_PANELS[1], 1);
    let high =
        MAX_GROUP_PANELS[0].min(MAX_PIECE_ELEMENTS / (wide * tile)).min(of_a * of_b.div_ceil(wide) / groups).max(1);
    (even_len(of_a, high, 1), wide)
}
