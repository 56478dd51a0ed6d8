//! Matrix products on tensor cores: which problems `kernels/gemm_mma.cl` computes, and with which tiles.

#[cfg(test)]
mod tests;

use smallvec::SmallVec;

use crate::DType;
use crate::backend::opencl::geometry::flag;
use crate::backend::problem::gemm::{GemmOperand, GemmPlan};
use crate::backend::problem::precision;
use crate::device::opencl::{ARRIVALS, SM_90A, TensorCores};

/// The source after `kernels/gemm.cl`.
pub(crate) const TEMPLATE: &str = concat!(
    include_str!("../../../kernels/rounded.cl"),
    include_str!("../../../kernels/mma.cl"),
    include_str!("../../../kernels/gemm_tiles.cl"),
    include_str!("../../../kernels/windows_mma.cl"),
    include_str!("../../../kernels/gemm_mma.cl")
);

/// A work-group's tile: rows, columns and depth of a slice; warps along rows and columns; slices in local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    m: usize,
    n: usize,
    k: usize,
    warps: (usize, usize),
    stages: usize,
    wgmma: bool,
}

/// A tile for mma.sync, where each warp has its own part; the next one is for wgmma, with 64 rows for each of two groups of four warps.
const fn mma_tile(m: usize, n: usize, k: usize, warps: (usize, usize), stages: usize) -> Tile {
    Tile { m, n, k, warps, stages, wgmma: false }
}
const fn wgmma_tile(n: usize, k: usize, stages: usize) -> Tile {
    Tile { m: 128, n, k, warps: (8, 1), stages, wgmma: true }
}

/// A tile for wgmma by one group of four warps.
const fn few_rows(n: usize, k: usize, stages: usize) -> Tile {
    Tile { m: 64, warps: (4, 1), ..wgmma_tile(n, k, stages) }
}

/// The fewest rows and columns for tensor cores: the first number where k is at least [`LARGE_K`], else the second.
const MIN_SIDE: (usize, usize) = (8, 32);
const LARGE_K: usize = 1024;

/// Tiles for f16 and bf16: the fastest first, then those for fewer rows and columns.
const HALF: [Tile; 6] = [
    wgmma_tile(256, 64, 4),
    wgmma_tile(128, 64, 4),
    wgmma_tile(64, 64, 4),
    mma_tile(128, 256, 64, (2, 4), 3),
    mma_tile(128, 128, 32, (2, 2), 4),
    mma_tile(64, 64, 64, (2, 2), 4),
];
/// Tiles for convolutions with at most 64 output channels, for halves, for f32 and for TF32. Two work-groups of the first one for halves fit
/// on a multiprocessor.
const FEW_ROWS: [&[Tile]; 3] = [
    &[few_rows(128, 64, 4), few_rows(256, 64, 4), mma_tile(64, 64, 64, (2, 2), 4)],
    &[few_rows(128, 32, 3), few_rows(64, 32, 4), mma_tile(64, 64, 16, (2, 2), 4)],
    &[few_rows(128, 32, 4), few_rows(256, 32, 4), mma_tile(64, 128, 32, (2, 2), 3), mma_tile(64, 64, 32, (2, 2), 4)],
];
/// Tiles for f32, in the same order; local memory has the planes of bf16 beside the slices.
const SINGLE: [Tile; 5] = [
    wgmma_tile(128, 32, 3),
    wgmma_tile(64, 32, 4),
    mma_tile(128, 256, 16, (2, 4), 3),
    mma_tile(128, 128, 16, (2, 2), 3),
    mma_tile(64, 64, 16, (2, 2), 4),
];

/// Tiles for f32 as TF32: those for halves, with slices of as many bytes. wgmma multiplies TF32 only where both matrices are along k.
const TF32: [Tile; 6] = {
    let mut tiles = HALF;
    let mut i = 0;
    while i < tiles.len() {
        tiles[i].k /= 2;
        i += 1;
    }
    tiles
};

/// A tile without wgmma that occupies the device is chosen if its estimated time is at most this many times the shortest one.
const SLOWER: f64 = 1.3;
/// Columns of the narrowest tiles.
const MIN_TILE: usize = 64;
/// The largest k for which windows on the left are bound by memory, and their tile: two work-groups fit on a multiprocessor, so that one
/// writes while the other reads.
const SHALLOW: (usize, Tile) = (256, wgmma_tile(128, 32, 4));

/// A kernel of the template: its tile, and the layouts of both matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mma {
    dtype: DType,
    planes: usize,
    tile: Tile,
    a: Side,
    b: Side,
    /// How windows form one of the matrices; none where both are in memory.
    pub(crate) windows: Option<WindowsAs>,
}

/// Which operand the windows are: rows of the left matrix, columns of the right one, or rows of it. `Apart`: their results are not
/// contiguous. See `kernels/windows_mma.cl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WindowsAs {
    Left,
    LeftApart,
    /// Results of an image are contiguous.
    Columns,
    ColumnsApart,
    Rows,
    RowsApart,
}

impl WindowsAs {
    pub(crate) fn is_left(self) -> bool {
        matches!(self, WindowsAs::Left | WindowsAs::LeftApart)
    }

    fn are_columns(self) -> bool {
        matches!(self, WindowsAs::Columns | WindowsAs::ColumnsApart)
    }

    pub(crate) fn are_apart(self) -> bool {
        matches!(self, WindowsAs::LeftApart | WindowsAs::ColumnsApart | WindowsAs::RowsApart)
    }
}

/// The layout of a matrix: whether it is contiguous along k, and the bytes that may be copied at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Side {
    along_k: bool,
    copy: usize,
}

/// Split-k: how the depth of a product is divided among work-groups. The last of them to finish a tile adds the parts up, always in the
/// same order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Parts {
    pub(crate) count: usize,
    /// The depth of each part but the last.
    pub(crate) depth: usize,
}

impl Parts {
    /// The most tiles that can have parts: each needs a counter.
    pub(crate) const TILES: usize = ARRIVALS;
}

/// A matrix in a buffer: its dtype, and the offset of its first element from the start of the buffer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InBuffer {
    pub(crate) dtype: DType,
    pub(crate) first: usize,
}

/// How many bf16 an element is split into: 1 for halves, and for f32 that is multiplied as TF32.
pub(crate) fn planes(dtype: DType) -> usize {
    if dtype == DType::F32 { precision::planes() } else { 1 }
}

/// The tiles for a dtype, perhaps those for few rows, and the fewest elements of k. In shorter sums f32 would round less than three planes do.
fn tiles(dtype: DType, planes: usize, few: bool) -> Option<(&'static [Tile], usize)> {
    Some(match (dtype, planes) {
        (DType::F16 | DType::BF16, _) => (if few { FEW_ROWS[0] } else { &HALF }, 32),
        (DType::F32, 1) => (if few { FEW_ROWS[2] } else { &TF32 }, 32),
        (DType::F32, _) => (if few { FEW_ROWS[1] } else { &SINGLE }, 64),
        _ => return None,
    })
}

impl Mma {
    /// The kernel for this problem; an f32 is split into so many planes, and `device` has the number of compute units and the most columns of
    /// a tile. None where the matrices are too small, or not contiguous in any direction. `cores` is called last, because its answer
    /// takes building a kernel.
    pub(crate) fn choose(
        plan: &GemmPlan,
        planes: usize,
        a: InBuffer,
        b: InBuffer,
        device: (usize, usize),
        cores: impl FnOnce() -> TensorCores,
    ) -> Option<Mma> {
        let planes = if a.dtype == DType::F32 { planes } else { 1 };
        let (tiles, depth) = tiles(a.dtype, planes, false)?;
        let fits = i32::MAX as usize;
        if a.dtype != b.dtype || plan.k < depth || plan.k > fits {
            return None;
        }
        if plan.m.min(plan.n) < if plan.k < LARGE_K { MIN_SIDE.1 } else { MIN_SIDE.0 } {
            return None;
        }
        let bytes = a.dtype.size();
        let side = |t: &GemmOperand, first: usize, k: isize, across: isize| {
            let (along_k, line) = match (k, across) {
                (1, line) => (true, line),
                (line, 1) => (false, line),
                _ => return None,
            };
            let whole = |copy: usize| {
                let strides = t.batch.iter().copied().chain([line]).map(isize::unsigned_abs);
                strides.chain([first]).all(|elements| (elements * bytes).is_multiple_of(copy))
            };
            Some(Side { along_k, copy: [16, 8, 4].into_iter().find(|&copy| whole(copy))? })
        };
        let a_side = side(&plan.a, a.first, plan.a.col, plan.a.row)?;
        let b_side = side(&plan.b, b.first, plan.b.row, plan.b.col)?;
        let made = Mma { dtype: a.dtype, planes, tile: tiles[0], a: a_side, b: b_side, windows: None };
        made.with_tile(tiles, plan, device, cores())
    }

    /// The kernel for windows. `along_k` says whether the other matrix is contiguous along k; lines of both are multiples of 16 bytes.
    pub(crate) fn of_windows(
        plan: &GemmPlan,
        (dtype, planes): (DType, usize),
        (windows, along_k): (WindowsAs, bool),
        device: (usize, usize),
        cores: impl FnOnce() -> TensorCores,
    ) -> Option<Mma> {
        let few = plan.m <= 64 && !windows.is_left();
        let (tiles, depth) = tiles(dtype, planes, few)?;
        if plan.k < depth || plan.k > i32::MAX as usize || plan.m.min(plan.n) < MIN_SIDE.0 {
            return None;
        }
        let side = |along_k: bool| Side { along_k, copy: 16 };
        let of_windows = side(windows.is_left() || windows.are_columns());
        let (a, b) = if windows.is_left() { (of_windows, side(along_k)) } else { (side(along_k), of_windows) };
        // Tiles that the right matrix would leave half empty are passed over where there are narrower ones.
        let shallow = (planes == 1 && plan.k <= SHALLOW.0).then(|| Tile { k: 64 / dtype.size(), ..SHALLOW.1 });
        let narrow = shallow.iter().chain(tiles).copied().filter(|tile| tile.n < 2 * plan.n.max(MIN_TILE));
        let narrow: SmallVec<[Tile; 8]> = narrow.collect();
        let tiles = if windows.is_left() { &narrow[..] } else { tiles };
        Mma { dtype, planes, tile: tiles[0], a, b, windows: Some(windows) }.with_tile(tiles, plan, device, cores())
    }

    /// The kernel with the largest tile that occupies the device; else with the tile that takes the least time, with split-k.
    fn with_tile(
        self,
        tiles: &[Tile],
        plan: &GemmPlan,
        (units, columns): (usize, usize),
        cores: TensorCores,
    ) -> Option<Mma> {
        let made = tiles.iter().filter(|tile| tile.n <= columns).map(|&tile| Mma { tile, ..self });
        let wgmma = cores.wgmma && (!self.is_tf32() || self.a.along_k && self.b.along_k);
        let usable = made.filter(|mma: &Mma| mma.local_memory() <= cores.local && (wgmma || !mma.tile.wgmma));
        let time = |mma: &Mma| mma.best(plan, units).1;
        let quickest = usable.clone().min_by(|a, b| time(a).total_cmp(&time(b)))?;
        // Small tiles without wgmma can occupy the device and yet be slower than larger ones that share the depth.
        let is_good = |mma: &Mma| mma.tile.wgmma || time(mma) <= SLOWER * time(&quickest);
        let chosen = usable.clone().find(|mma| mma.is_busy(plan, units)).filter(is_good).unwrap_or(quickest);
        (chosen.tiles(plan) <= i32::MAX as usize).then_some(chosen)
    }

    fn is_tf32(&self) -> bool {
        self.dtype == DType::F32 && self.planes == 1
    }

    fn tiles(&self, plan: &GemmPlan) -> usize {
        plan.m.div_ceil(self.tile.m) * plan.n.div_ceil(self.tile.n) * plan.count()
    }

    /// Whether the device is occupied when each work-group computes a whole tile.
    fn is_busy(&self, plan: &GemmPlan, units: usize) -> bool {
        4 * self.tiles(plan) >= 3 * units
    }

    /// How many work-groups share a tile.
    pub(crate) fn parts(&self, plan: &GemmPlan, units: usize) -> Parts {
        let depth = plan.k.div_ceil(self.best(plan, units).0).next_multiple_of(self.tile.k);
        Parts { count: plan.k.div_ceil(depth), depth }
    }

    /// The number of parts that takes the least time, and how long that is, in us. The numbers were measured on an H200;
    /// what matters is how they compare.
    fn best(&self, plan: &GemmPlan, units: usize) -> (usize, f64) {
        let Tile { m, n, k, wgmma, .. } = self.tile;
        let tiles = self.tiles(plan);
        // The time of a slice: waiting for it in us, and multiply-adds per us.
        let (wait, rate) = match (self.dtype, wgmma) {
            (DType::F32, true) if self.planes > 1 => (0.35, 1.3e6 / self.planes as f64),
            (DType::F32, false) if self.planes > 1 => (0.24, 0.87e6 / self.planes as f64),
            (dtype, true) => (0.2, 5.2e6 / dtype.size() as f64),
            (dtype, false) => (0.2, 2.8e6 / dtype.size() as f64),
        };
        let work = (m * n * k) as f64 / rate;
        let time = |parts: usize| {
            let slices = plan.k.div_ceil(parts).div_ceil(k) as f64;
            // Two work-groups without wgmma fit on a unit, and wait at the same time.
            let tiles_per_unit = (tiles * parts).div_ceil(units) as f64;
            let waits = if wgmma { tiles_per_unit } else { (tiles_per_unit / 2.0).ceil() };
            // One work-group reads all parts of a tile.
            let read = ((m.min(plan.m) * n) as f64 * 4.0 / 1e5).max(0.17);
            slices * (waits * wait + tiles_per_unit * work) + if parts > 1 { 4.5 + parts as f64 * read } else { 0.0 }
        };
        let alone = tiles > Parts::TILES || self.is_busy(plan, units);
        let most = if alone { 1 } else { (2 * units / tiles).min(plan.k / (2 * k)) };
        let steps = [2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64];
        let shared = steps.into_iter().take_while(|&parts| parts <= most).map(|parts| (parts, time(parts)));
        shared.fold((1, time(1)), |best, other| if other.1 < best.1 { other } else { best })
    }

    /// Whether the kernel can add up the rows of the left matrix: where a work-item splits elements of few rows into planes.
    pub(crate) fn sums_rows(&self) -> bool {
        self.planes > 1 && !self.a.along_k
    }

    /// Whether the kernel can round results to halves in registers, where the epilogue does nothing else.
    pub(crate) fn rounds(&self) -> bool {
        self.tile.wgmma && self.dtype != DType::F32
    }

    /// Rows and columns of the result that a work-group computes.
    pub(crate) fn tile(self) -> (usize, usize) {
        (self.tile.m, self.tile.n)
    }

    /// Work-items of a group.
    pub(crate) fn threads(self) -> usize {
        32 * self.tile.warps.0 * self.tile.warps.1
    }

    /// Bytes of local memory.
    fn local_memory(self) -> usize {
        let Tile { m, n, k, stages, .. } = self.tile;
        let cut = if self.planes > 1 { 2 * self.planes * 2 } else { 0 };
        let slices = (m + n) * k * (stages * self.dtype.size() + cut);
        slices.max(m * (n + 8) * size_of::<f32>()) + 16
    }

    /// A number that differs for all kernels of the same dtypes.
    pub(crate) fn key(self) -> usize {
        let Tile { m, n, k, wgmma, .. } = self.tile;
        let side = |s: Side| (s.copy / 4) << 1 | s.along_k as usize;
        [
            wgmma as usize | self.windows.map_or(0, |w| w as usize + 1) << 1,
            k / 16,
            n / 16,
            m / 16,
            self.planes,
            side(self.a),
            side(self.b),
        ]
        .into_iter()
        .fold(0, |key, x| key << 5 | x)
    }

    pub(crate) fn defines(self) -> String {
        let Tile { m, n, k, warps, stages, wgmma } = self.tile;
        let Mma { dtype, planes, a, b, .. } = self;
        let unit = match dtype {
            DType::F16 => "f16",
            _ if self.is_tf32() => "tf32",
            _ => "bf16",
        };
        let tf32 = flag(self.is_tf32(), "TF32");
        // Tile rows in a band, whose work-groups run together; measured.
        let band = if dtype == DType::F32 { 4 } else { 8 };
        // With wgmma on what is not split the multiplication of one slice begins before that of the previous one has ended: one slot more is in use.
        let ahead = stages - if wgmma && planes == 1 { 3 } else { 2 };
        format!(
            "{}{tf32}#define MMA \"{unit}\"\n#define BYTES {}\n#define PLANES {planes}\n#define TILE_M {m}\n#define TILE_N {n}\n\
             #define TILE_K {k}\n#define WARPS_M {}\n#define WARPS_N {}\n#define STAGES {stages}\n#define AHEAD {ahead}\n\
             #define A_ALONG_K {}\n#define B_ALONG_K {}\n#define A_TRANSPOSED {}\n#define B_TRANSPOSED {}\n\
             #define A_COPY {}\n#define B_COPY {}\n#define BAND {band}\n",
            if wgmma { SM_90A } else { "" },
            dtype.size(),
            warps.0,
            warps.1,
            a.along_k as u8,
            b.along_k as u8,
            !a.along_k as u8,
            !b.along_k as u8,
            a.copy,
            b.copy,
        )
    }
}
