//! Packing into panels: a few adjacent rows of the left matrix, or columns of the right matrix, in the order in which the kernels read
//! them, so that a product's inner loop reads memory sequentially. A step is one index along k. Halves (f16 and bf16) are converted to
//! f32, or to [pairs](Pairs) of bf16 for kernels of pairs. The packing of a matrix is split into pieces that threads share.
//! Kernels read some matrices in place instead.

use std::arch::x86_64::*;

use half::{bf16, f16};

/// Maximum number of rows of the result for which contiguous rows of the right matrix are read in place: packing costs more than it
/// gains.
const IN_PLACE_MAX_ROWS: usize = 256;
/// The maximum number of elements of a right matrix that is read in place for any number of rows: the matrix stays in the L2 cache.
const IN_PLACE_MAX_ELEMENTS: usize = 1 << 16;
/// The row stride, in elements, at and above which the right matrix is packed.
const IN_PLACE_MAX_STRIDE: usize = 4096;
/// Row strides that are multiples of this number of elements are packed as well, because the rows would evict each other from the caches.
const CACHE_ALIASING_STRIDE: usize = 1024;

#[derive(Clone, Copy)]
pub(super) enum ElementPtr {
    F32(*const f32),
    F16(*const f16),
    BF16(*const bf16),
    /// Elements of bf16, multiplied in pairs that are adjacent along k. The second field is the number of elements along k.
    Pairs(*const bf16, usize),
}

/// An operand: element (i, j) is at `start + i * row + j * col`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<T> {
    pub(super) start: T,
    pub(super) row: isize,
    pub(super) col: isize,
}

impl<T> Matrix<T> {
    pub(super) fn transposed(self) -> Matrix<T> {
        Matrix { row: self.col, col: self.row, ..self }
    }
}

impl Matrix<ElementPtr> {
    /// Returns the first element and the row stride in bytes if kernels read rows of this left matrix in place, else `None`.
    pub(super) fn left_in_place(self) -> Option<(*const f32, isize)> {
        let rows = |element: usize| self.row * element as isize;
        match self.start {
            ElementPtr::F32(start) if self.col == 1 => Some((start, rows(size_of::<f32>()))),
            ElementPtr::Pairs(start, k) if self.col == 1 && k % 2 == 0 => Some((start.cast(), rows(size_of::<bf16>()))),
            _ => None,
        }
    }

    /// Returns the first element and the row stride in bytes if kernels read this right matrix of an `m` x `n` result in place, else
    /// `None`. Vectors have `lanes` lanes.
    pub(super) fn right_in_place(self, lanes: usize, (m, n, k): (usize, usize, usize)) -> Option<(*const f32, isize)> {
        let stride = self.row.unsigned_abs();
        let near = stride < IN_PLACE_MAX_STRIDE && !stride.is_multiple_of(CACHE_ALIASING_STRIDE);
        let is_small = (m <= IN_PLACE_MAX_ROWS || n * k <= IN_PLACE_MAX_ELEMENTS) && n.is_multiple_of(lanes);
        match self.start {
            ElementPtr::F32(start) if self.col == 1 && near && is_small => {
                Some((start, self.row * size_of::<f32>() as isize))
            }
            _ => None,
        }
    }

    pub(super) fn in_pairs(self, k: usize) -> Matrix<ElementPtr> {
        match self.start {
            ElementPtr::BF16(start) => Matrix { start: ElementPtr::Pairs(start, k), ..self },
            _ => self,
        }
    }
}

/// The source of a panel: element (lane, step) is at `start + lane * across + step * along`.
#[derive(Clone, Copy)]
pub(super) struct PanelSource<S> {
    pub(super) start: *const S,
    pub(super) across: isize,
    pub(super) along: isize,
}

/// The size of adjacent panels.
#[derive(Clone, Copy)]
pub(super) struct PanelShape {
    pub(super) panels: usize,
    /// The stride between panels, in elements.
    pub(super) stride: usize,
    /// The number of steps in each panel.
    pub(super) steps: usize,
    /// The number of lanes that are packed, and the number of lanes of a panel: the lanes after the packed lanes are zeros.
    pub(super) lanes: usize,
    pub(super) width: usize,
}

/// The number of unused elements after a panel, which packing can overwrite and [`sum_steps`] can read: one cache line, so that panels stay
/// aligned.
pub(super) const PANEL_SLACK: usize = 16;

/// The prefetch distance in steps, or in blocks of eight steps: the matrix is often in the cache of another core that wrote it.
const PREFETCH_STEPS: usize = 8;

/// The approximate number of elements in a piece: enough to justify a separate task.
const PIECE_ELEMENTS: usize = 1 << 14;
/// The number of panels that are packed together if the matrix's rows are adjacent in memory: each step along k then reads a long
/// contiguous run.
const PANELS_AT_ONCE: usize = 32;

/// Packs panels at `to`.
///
/// # Safety
/// The elements of the lanes and steps are readable. `to` has room for `steps * width` elements in each panel, and for [`PANEL_SLACK`]
/// after them unless lanes are adjacent; no other code accesses this memory. `width` is `lanes` or a multiple of 8, and equals
/// `lanes` if there is more than one panel. The processor has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn pack<S: PanelElement>(from: PanelSource<S::Element>, to: *mut f32, shape: PanelShape) {
    macro_rules! row_by_row {
        ($($width:literal)*) => {
            match (from.across, shape.lanes) {
                // SAFETY: the caller guarantees the requirements of this function.
                $((1, $width) if shape.width == $width => unsafe { pack_adjacent::<S, $width>(from, to, shape) },)*
                _ => {
                    for panel in 0..shape.panels {
                        let start = from.start.wrapping_offset((panel * shape.lanes) as isize * from.across);
                        // SAFETY: the caller guarantees the requirements of this function.
                        unsafe { pack_panel::<S>(PanelSource { start, ..from }, to.add(panel * shape.stride), shape) };
                    }
                }
            }
        };
    }
    row_by_row!(1 2 3 4 5 6 7 8 9 10 11 12 16 32);
}

/// Packs rows of [pairs](Pairs); rows are `stride` elements apart in `to`.
///
/// # Safety
/// The elements of the lanes and steps are readable; `to` has room for the rows, and no other code accesses it. The processor has AVX2.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn pack_rows(from: PanelSource<bf16>, to: *mut f32, (rows, steps): (usize, usize), stride: usize) {
    let whole = if from.across == 1 { (rows / 8 * 8, steps / 8 * 8) } else { (0, 0) };
    // SAFETY: the caller guarantees the requirements of this function.
    unsafe {
        let at =
            |row: usize, step: usize| from.start.offset(row as isize * from.across + 2 * step as isize * from.along);
        for (row, step) in (0..whole.0).step_by(8).flat_map(|row| (0..whole.1).step_by(8).map(move |step| (row, step)))
        {
            let block = std::array::from_fn(|i| Pairs::lanes(at(row, step + i), from.along));
            for (i, row) in (row..).zip(transpose_8x8(block)) {
                _mm256_storeu_ps(to.add(i * stride + step), row);
            }
        }
        for row in 0..rows {
            let done = if row < whole.0 { whole.1 } else { 0 };
            match from.along {
                1 => at(row, done)
                    .cast::<u8>()
                    .copy_to_nonoverlapping(to.add(row * stride + done).cast(), 4 * (steps - done)),
                _ => {
                    (done..steps).for_each(|step| *to.add(row * stride + step) = Pairs::one(at(row, step), from.along))
                }
            }
        }
    }
}

/// Packs one panel whose lanes are not adjacent. Steps that are adjacent in memory are packed by transposing blocks of 8 x 8 in registers;
/// the remaining steps, which follow them, one element at a time.
///
/// # Safety
/// The requirements of [`pack`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn pack_panel<S: PanelElement>(from: PanelSource<S::Element>, to: *mut f32, shape: PanelShape) {
    let PanelShape { steps, lanes, width, .. } = shape;
    let whole = if from.along == 1 { steps / 8 * 8 } else { 0 };
    for p in (0..whole).step_by(8) {
        // The last lanes are written first: a block writes past the panel's width into the first lanes of the next step, which are
        // written later.
        for first in (0..width).step_by(8).rev() {
            // SAFETY: lanes below `lanes` exist; a block writes 8 elements from a position in the panel on, at most 7 past
            // the panel's end.
            unsafe {
                let mut block = [_mm256_setzero_ps(); 8];
                for (i, row) in block.iter_mut().enumerate().take(lanes.saturating_sub(first)) {
                    let start = from.start.offset((first + i) as isize * from.across).add(p * S::STEPS);
                    _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(8 * PREFETCH_STEPS * S::STEPS).cast());
                    *row = S::steps(start);
                }
                for (i, step) in transpose_8x8(block).into_iter().enumerate() {
                    _mm256_storeu_ps(to.add((p + i) * width + first), step);
                }
            }
        }
    }
    for p in whole..steps {
        for i in 0..width {
            let at = from.start.wrapping_offset(i as isize * from.across + (p * S::STEPS) as isize * from.along);
            // SAFETY: the caller's promise, for lanes below `lanes`.
            unsafe { *to.add(p * width + i) = if i < lanes { S::one(at, from.along) } else { 0.0 } };
        }
    }
}

/// The conversion of a matrix's elements into a panel's elements.
///
/// # Safety
/// For all methods: the elements that the method reads are at the pointer, the next step's elements are `along` elements further, and
/// the processor has AVX2 and F16C.
pub(super) trait PanelElement {
    type Element: Copy;
    /// The number of steps of the matrix that one step of the panel holds.
    const STEPS: usize = 1;
    /// Converts the element of one lane.
    unsafe fn one(at: *const Self::Element, along: isize) -> f32;
    /// Converts the elements of eight adjacent lanes.
    unsafe fn lanes(at: *const Self::Element, along: isize) -> __m256;
    /// Converts the elements of eight adjacent steps.
    #[inline(always)]
    unsafe fn steps(at: *const Self::Element) -> __m256 {
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe { Self::lanes(at, 1) }
    }
    /// Converts the elements of W adjacent lanes.
    #[inline(always)]
    unsafe fn row<const W: usize>(at: *const Self::Element, along: isize, to: *mut f32) {
        let vectors = W / 8 * 8;
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe {
            for i in (0..vectors).step_by(8) {
                _mm256_storeu_ps(to.add(i), Self::lanes(at.add(i), along));
            }
            for i in vectors..W {
                *to.add(i) = Self::one(at.add(i), along);
            }
        }
    }
}

impl PanelElement for f32 {
    type Element = f32;
    unsafe_methods! {
        one(at: *const f32, _: isize) -> f32 = *at;
        lanes(at: *const f32, _: isize) -> __m256 = _mm256_loadu_ps(at);
    }

    #[inline(always)]
    unsafe fn row<const W: usize>(at: *const f32, _: isize, to: *mut f32) {
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe { *to.cast::<[f32; W]>() = *at.cast() }
    }
}

impl PanelElement for f16 {
    type Element = f16;
    unsafe_methods! {
        one(at: *const f16, _: isize) -> f32 = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128((*at).to_bits().into())));
        lanes(at: *const f16, _: isize) -> __m256 = _mm256_cvtph_ps(_mm_loadu_si128(at.cast()));
    }
}

// A bf16 is the upper half of an f32.
impl PanelElement for bf16 {
    type Element = bf16;
    unsafe_methods! {
        one(at: *const bf16, _: isize) -> f32 = f32::from_bits(u32::from((*at).to_bits()) << 16);
        lanes(at: *const bf16, _: isize) -> __m256 =
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()))));
    }
}

/// Two adjacent steps of bf16 in the bits of one f32, the first step in the lower half.
pub(super) struct Pairs;

impl PanelElement for Pairs {
    type Element = bf16;
    const STEPS: usize = 2;
    unsafe_methods! {
        one(at: *const bf16, along: isize) -> f32 =
            f32::from_bits(LastPair::one(at, along).to_bits() | bf16::one(at.offset(along), along).to_bits());
        lanes(at: *const bf16, along: isize) -> __m256 =
            _mm256_or_ps(LastPair::lanes(at, along), bf16::lanes(at.offset(along), along));
        steps(at: *const bf16) -> __m256 = _mm256_loadu_ps(at.cast());
    }
}

/// A pair whose second element is zero: the last pair of an odd number of steps.
pub(super) struct LastPair;

impl PanelElement for LastPair {
    type Element = bf16;
    unsafe_methods! {
        one(at: *const bf16, _: isize) -> f32 = f32::from_bits((*at).to_bits().into());
        lanes(at: *const bf16, _: isize) -> __m256 =
            _mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())));
    }
}

/// Packs adjacent lanes, step by step over all panels.
///
/// # Safety
/// The requirements of [`pack`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn pack_adjacent<S: PanelElement, const W: usize>(
    from: PanelSource<S::Element>,
    to: *mut f32,
    shape: PanelShape,
) {
    for p in 0..shape.steps {
        for panel in 0..shape.panels {
            // SAFETY: the caller guarantees the requirements of this function.
            unsafe {
                let start = from.start.offset((p * S::STEPS) as isize * from.along).add(panel * W);
                _mm_prefetch::<_MM_HINT_T0>(
                    start.wrapping_offset((PREFETCH_STEPS * S::STEPS) as isize * from.along).cast(),
                );
                S::row::<W>(start, from.along, to.add(panel * shape.stride + p * W));
            }
        }
    }
}

/// Sums a panel of up to 16 lanes over all steps, and writes the sums to `to`, or adds them to `to` with `accumulate`.
///
/// # Safety
/// The panel, with [`PANEL_SLACK`] after it, and one sum per lane exist, and no other code accesses the sums; the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn sum_steps(panel: *const f32, (steps, lanes): (usize, usize), to: *mut f32, accumulate: bool) {
    // The number of independent chains of additions. A vector may include elements of the next step after a step's lanes; their sums are
    // dropped below.
    const CHAINS: usize = 4;
    let mut sums = [[_mm256_setzero_ps(); 2]; CHAINS];
    let mut total = [0f32; 16];
    // SAFETY: the caller's promise: 16 elements from a step of the panel on are in the panel or in the slack after it.
    unsafe {
        let add = |p: usize, [low, high]: &mut [__m256; 2]| {
            let step = panel.add(p * lanes);
            *low = _mm256_add_ps(*low, _mm256_loadu_ps(step));
            *high = _mm256_add_ps(*high, _mm256_loadu_ps(step.add(8)));
        };
        let whole = steps / CHAINS * CHAINS;
        for p in (0..whole).step_by(CHAINS) {
            sums.iter_mut().enumerate().for_each(|(i, sum)| add(p + i, sum));
        }
        (whole..steps).for_each(|p| add(p, &mut sums[0]));
        for half in 0..2 {
            let pair = |i: usize| _mm256_add_ps(sums[i][half], sums[i + 1][half]);
            _mm256_storeu_ps(total[8 * half..].as_mut_ptr(), _mm256_add_ps(pair(0), pair(2)));
        }
        for (i, sum) in total[..lanes].iter().enumerate() {
            *to.add(i) = if accumulate { *to.add(i) + sum } else { *sum };
        }
    }
}

#[target_feature(enable = "avx2")]
fn transpose_8x8(r: [__m256; 8]) -> [__m256; 8] {
    let (a0, a1) = (_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
    let (a2, a3) = (_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
    let (b0, b1) = (_mm256_unpacklo_ps(r[4], r[5]), _mm256_unpackhi_ps(r[4], r[5]));
    let (b2, b3) = (_mm256_unpacklo_ps(r[6], r[7]), _mm256_unpackhi_ps(r[6], r[7]));
    let (c0, c1) = (_mm256_shuffle_ps::<0x44>(a0, a2), _mm256_shuffle_ps::<0xee>(a0, a2));
    let (c2, c3) = (_mm256_shuffle_ps::<0x44>(a1, a3), _mm256_shuffle_ps::<0xee>(a1, a3));
    let (d0, d1) = (_mm256_shuffle_ps::<0x44>(b0, b2), _mm256_shuffle_ps::<0xee>(b0, b2));
    let (d2, d3) = (_mm256_shuffle_ps::<0x44>(b1, b3), _mm256_shuffle_ps::<0xee>(b1, b3));
    [
        _mm256_permute2f128_ps::<0x20>(c0, d0),
        _mm256_permute2f128_ps::<0x20>(c1, d1),
        _mm256_permute2f128_ps::<0x20>(c2, d2),
        _mm256_permute2f128_ps::<0x20>(c3, d3),
        _mm256_permute2f128_ps::<0x31>(c0, d0),
        _mm256_permute2f128_ps::<0x31>(c1, d1),
        _mm256_permute2f128_ps::<0x31>(c2, d2),
        _mm256_permute2f128_ps::<0x31>(c3, d3),
    ]
}

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
            let ElementPtr::Pairs(start, _) = self.from.start else { unreachable!("only pairs are stored row by row") };
            let (across, along) = (self.from.row, self.from.col);
            for panel in first..last {
                let (down, rows) = (panel * self.rows, self.rows.min(self.size.0 - panel * self.rows));
                let (row, step) = (self.first.0 + down, self.first.1 + block * self.depth + begin);
                // SAFETY: the caller's promise; the panels' memory has room for all panels; the rows and steps are the matrix's.
                unsafe {
                    let start = start.offset(row as isize * across + 2 * step as isize * along);
                    let to = self.to.add((block * self.panels + panel) * stride + begin);
                    pack_rows(PanelSource { start, across, along }, to, (rows, end - begin), self.depth);
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
                let (lanes, width) = (self.rows, self.rows);
                let shape = PanelShape { panels: whole - first, stride, steps: end - begin, lanes, width };
                pack_panels(self.from, from(first), to(first, width), shape);
            }
            if whole < last {
                let lanes = self.size.0 - whole * self.rows;
                let width = lanes.next_multiple_of(self.lanes);
                let shape = PanelShape { panels: 1, stride, steps: end - begin, lanes, width };
                pack_panels(self.from, from(whole), to(whole, width), shape);
            }
        }
    }
}

/// Packs panels of the matrix, starting at row and step `first`. The matrix's rows become the lanes.
///
/// # Safety
/// The requirements of [`pack`].
unsafe fn pack_panels(from: Matrix<ElementPtr>, first: (usize, usize), to: *mut f32, shape: PanelShape) {
    let at = |steps: usize| first.0 as isize * from.row + (first.1 * steps) as isize * from.col;
    let (across, along) = (from.row, from.col);
    macro_rules! pack_as {
        ($T:ty, $start:expr, $to:expr, $shape:expr) => {
            pack::<$T>(PanelSource { start: $start, across, along }, $to, $shape)
        };
    }
    // SAFETY: the caller guarantees the requirements of this function.
    unsafe {
        match from.start {
            ElementPtr::F32(start) => pack_as!(f32, start.offset(at(1)), to, shape),
            ElementPtr::F16(start) => pack_as!(f16, start.offset(at(1)), to, shape),
            ElementPtr::BF16(start) => pack_as!(bf16, start.offset(at(1)), to, shape),
            ElementPtr::Pairs(start, k) => {
                let pairs = shape.steps.min((k / 2).saturating_sub(first.1));
                let start = start.offset(at(2));
                pack_as!(Pairs, start, to, PanelShape { steps: pairs, ..shape });
                if pairs < shape.steps {
                    let start = start.offset(2 * pairs as isize * along);
                    pack_as!(LastPair, start, to.add(pairs * shape.width), PanelShape { steps: 1, ..shape });
                }
            }
        }
    }
}
