//! Panels: a few neighbouring rows of the left matrix, or columns of the right one, laid out in the order in which
//! the kernels read them, so that a product's inner loop walks straight through memory. Halves become f32 on the way, or
//! [pairs](Pairs) of bf16 are laid out where the kernels multiply these.

use std::arch::x86_64::*;

use half::{bf16, f16};

/// Where a panel comes from: element (lane, step) of the matrix at `start + lane * across + step * along`.
#[derive(Clone, Copy)]
pub(super) struct From<S> {
    pub(super) start: *const S,
    pub(super) across: isize,
    pub(super) along: isize,
}

/// Neighbouring panels, `stride` elements from one to the next, and how many steps of each.
#[derive(Clone, Copy)]
pub(super) struct Copies {
    pub(super) panels: usize,
    pub(super) stride: usize,
    pub(super) steps: usize,
}

/// Elements behind a panel that packing may write to and [`add_steps`] may read: a line, so that panels begin where lines do.
pub(super) const SLACK: usize = 16;

/// Steps, or blocks of eight of them, that are fetched ahead: what is laid out was often written by another core just before.
const AHEAD: usize = 8;

/// Lays out panels of `width` lanes at `to`; lanes from `lanes` on are zero.
///
/// # Safety
/// The elements of the lanes and steps are there to be read; `to` has room for `steps * width` elements in each panel, which
/// nobody else uses, and [`SLACK`] behind them unless lanes lie one after another; `width` is `lanes` or a multiple of 8,
/// and `lanes` where there is more than one panel. The processor has AVX2 and F16C.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn pack<S: Source>(from: From<S::Element>, to: *mut f32, copies: Copies, lanes: usize, width: usize) {
    macro_rules! row_by_row {
        ($($width:literal)*) => {
            match (from.across, lanes) {
                // SAFETY: the caller's promise.
                $((1, $width) if width == $width => unsafe { rows::<S, $width>(from, to, copies) },)*
                _ => {
                    for panel in 0..copies.panels {
                        let start = from.start.wrapping_offset((panel * lanes) as isize * from.across);
                        // SAFETY: the caller's promise.
                        unsafe { one::<S>(From { start, ..from }, to.add(panel * copies.stride), copies.steps, lanes, width) };
                    }
                }
            }
        };
    }
    row_by_row!(1 2 3 4 5 6 7 8 9 10 11 12 16 32);
}

/// Lays out rows of pairs, `stride` elements apart at `to`.
///
/// # Safety
/// The elements of the lanes and steps are there to be read; `to` has room for the rows, which nobody else uses. The processor has AVX2.
#[target_feature(enable = "avx2,f16c")]
pub(super) unsafe fn pack_rows(from: From<bf16>, to: *mut f32, (rows, steps): (usize, usize), stride: usize) {
    let whole = if from.across == 1 { (rows / 8 * 8, steps / 8 * 8) } else { (0, 0) };
    // SAFETY: the caller's promise.
    unsafe {
        let at =
            |row: usize, step: usize| from.start.offset(row as isize * from.across + 2 * step as isize * from.along);
        for (row, step) in (0..whole.0).step_by(8).flat_map(|row| (0..whole.1).step_by(8).map(move |step| (row, step)))
        {
            let block = std::array::from_fn(|i| Pairs::lanes(at(row, step + i), from.along));
            for (i, row) in (row..).zip(turn(block)) {
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

/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn one<S: Source>(from: From<S::Element>, to: *mut f32, steps: usize, lanes: usize, width: usize) {
    let whole = if from.along == 1 { steps / 8 * 8 } else { 0 };
    // SAFETY: the caller's promise; whole blocks of 8 steps first, then the others, which lie behind them.
    unsafe {
        transposed::<S>(from, to, whole, lanes, width);
        let rest = From { start: from.start.wrapping_offset((whole * S::STEPS) as isize * from.along), ..from };
        each::<S>(rest, to.add(whole * width), steps - whole, lanes, width);
    }
}

/// What panels are made of.
///
/// # Safety
/// Of all methods: there are as many elements at the pointers as they take, the next step's `along` further, and the processor has
/// AVX2 and F16C.
pub(super) trait Source {
    type Element: Copy;
    /// Steps of the matrix in one of the panel.
    const STEPS: usize = 1;
    unsafe fn one(at: *const Self::Element, along: isize) -> f32;
    /// Of eight lanes, one after another.
    unsafe fn lanes(at: *const Self::Element, along: isize) -> __m256;
    /// Of eight steps, one after another.
    #[inline(always)]
    unsafe fn steps(at: *const Self::Element) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { Self::lanes(at, 1) }
    }
    /// Of W lanes, one after another.
    #[inline(always)]
    unsafe fn row<const W: usize>(at: *const Self::Element, along: isize, to: *mut f32) {
        let vectors = W / 8 * 8;
        // SAFETY: the caller's promise.
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

impl Source for f32 {
    type Element = f32;
    #[inline(always)]
    unsafe fn one(at: *const f32, _: isize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *at }
    }
    #[inline(always)]
    unsafe fn lanes(at: *const f32, _: isize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(at) }
    }
    #[inline(always)]
    unsafe fn row<const W: usize>(at: *const f32, _: isize, to: *mut f32) {
        // SAFETY: the caller's promise.
        unsafe { *to.cast::<[f32; W]>() = *at.cast() }
    }
}

impl Source for f16 {
    type Element = f16;
    #[inline(always)]
    unsafe fn one(at: *const f16, _: isize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128((*at).to_bits().into()))) }
    }
    #[inline(always)]
    unsafe fn lanes(at: *const f16, _: isize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
    }
}

// A bf16 is the upper half of an f32.
impl Source for bf16 {
    type Element = bf16;
    #[inline(always)]
    unsafe fn one(at: *const bf16, _: isize) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(u32::from(unsafe { *at }.to_bits()) << 16)
    }
    #[inline(always)]
    unsafe fn lanes(at: *const bf16, _: isize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast())))) }
    }
}

/// Two steps of bf16 in the bits of an f32, the first one in the lower half.
pub(super) struct Pairs;

impl Source for Pairs {
    type Element = bf16;
    const STEPS: usize = 2;
    #[inline(always)]
    unsafe fn one(at: *const bf16, along: isize) -> f32 {
        // SAFETY: the caller's promise.
        let (first, second) = unsafe { (Half::one(at, along), bf16::one(at.offset(along), along)) };
        f32::from_bits(first.to_bits() | second.to_bits())
    }
    #[inline(always)]
    unsafe fn lanes(at: *const bf16, along: isize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_or_ps(Half::lanes(at, along), bf16::lanes(at.offset(along), along)) }
    }
    #[inline(always)]
    unsafe fn steps(at: *const bf16) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }
}

/// A pair of which the second one is zero: what an odd number of steps ends with.
pub(super) struct Half;

impl Source for Half {
    type Element = bf16;
    #[inline(always)]
    unsafe fn one(at: *const bf16, _: isize) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_bits(unsafe { *at }.to_bits().into())
    }
    #[inline(always)]
    unsafe fn lanes(at: *const bf16, _: isize) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_castsi256_ps(_mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()))) }
    }
}

/// Lanes that lie one after another, over all panels.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn rows<S: Source, const W: usize>(from: From<S::Element>, to: *mut f32, copies: Copies) {
    for p in 0..copies.steps {
        for panel in 0..copies.panels {
            // SAFETY: the caller's promise.
            unsafe {
                let start = from.start.offset((p * S::STEPS) as isize * from.along).add(panel * W);
                _mm_prefetch::<_MM_HINT_T0>(start.wrapping_offset((AHEAD * S::STEPS) as isize * from.along).cast());
                S::row::<W>(start, from.along, to.add(panel * copies.stride + p * W));
            }
        }
    }
}

/// The sums over all steps of a panel of up to 16 lanes, written to `to` or added to what is there.
///
/// # Safety
/// The panel, with [`SLACK`] behind it, and as many sums as lanes are there, which nobody else uses; the processor has AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn add_steps(panel: *const f32, (steps, lanes): (usize, usize), to: *mut f32, accumulate: bool) {
    // Steps that do not wait for one another. What is read behind a step's lanes is the next one's, and left out below.
    const CHAINS: usize = 4;
    let mut sums = [[_mm256_setzero_ps(); 2]; CHAINS];
    let mut total = [0f32; 16];
    // SAFETY: the caller's promise: 16 elements from a step of the panel on are in it or in what is behind it.
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

/// Steps that lie one after another, `steps` a multiple of 8: blocks of 8 x 8, transposed in registers.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn transposed<S: Source>(from: From<S::Element>, to: *mut f32, steps: usize, lanes: usize, width: usize) {
    for p in (0..steps).step_by(8) {
        // From the last lanes on: what a block writes behind the width is the next step's first lanes, written after it.
        for first in (0..width).step_by(8).rev() {
            // SAFETY: lanes below `lanes` are there; a block writes 8 elements from a place in the panel on, at most
            // 7 past its end.
            unsafe {
                let mut block = [_mm256_setzero_ps(); 8];
                for (i, row) in block.iter_mut().enumerate().take(lanes.saturating_sub(first)) {
                    let start = from.start.offset((first + i) as isize * from.across).add(p * S::STEPS);
                    _mm_prefetch::<_MM_HINT_T0>(start.wrapping_add(8 * AHEAD * S::STEPS).cast());
                    *row = S::steps(start);
                }
                for (i, step) in turn(block).into_iter().enumerate() {
                    _mm256_storeu_ps(to.add((p + i) * width + first), step);
                }
            }
        }
    }
}

/// Columns as rows.
#[target_feature(enable = "avx2")]
fn turn(r: [__m256; 8]) -> [__m256; 8] {
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

/// Any other panel.
///
/// # Safety
/// As [`pack`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn each<S: Source>(from: From<S::Element>, to: *mut f32, steps: usize, lanes: usize, width: usize) {
    for p in 0..steps {
        for i in 0..width {
            // SAFETY: the caller's promise, of lanes below `lanes`.
            unsafe {
                let at = from.start.wrapping_offset(i as isize * from.across + (p * S::STEPS) as isize * from.along);
                *to.add(p * width + i) = if i < lanes { S::one(at, from.along) } else { 0.0 };
            }
        }
    }
}
