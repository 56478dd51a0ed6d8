//! Matrix products on tensor cores: the problems that `kernels/gemm_mma.cl` computes, and the choice of their tiles.

#[cfg(test)]
mod tests;

use crate::backend::opencl::prelude::*;
use crate::device::opencl::{ARRIVAL_COUNTERS, SM_90A, TensorCores};

/// The source that is appended to `kernels/gemm.cl`.
pub(crate) const TEMPLATE: &str = concat!(
    include_str!("../../../kernels/rounded.cl"),
    include_str!("../../../kernels/mma.cl"),
    include_str!("../../../kernels/gemm_tiles.cl"),
    include_str!("../../../kernels/windows_mma.cl"),
    include_str!("../../../kernels/gemm_mma.cl")
);

/// The number of parameters that the kernel takes to describe the windows.
pub(crate) const WINDOW_PARAMETERS: usize = 22;

/// The tile of a work-group: the rows m, columns n and depth k of a slice, the warps along rows and columns, and the slices in local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Tile {
    m: usize,
    n: usize,
    k: usize,
    warps: (usize, usize),
    stages: usize,
    wgmma: bool,
}

/// Returns a tile for mma.sync, whose warps each compute a separate part of the tile.
const fn mma_tile(m: usize, n: usize, k: usize, warps: (usize, usize), stages: usize) -> Tile {
    Tile { m, n, k, warps, stages, wgmma: false }
}
/// Returns a tile for wgmma: two groups of four warps with 64 rows each.
const fn wgmma_tile(n: usize, k: usize, stages: usize) -> Tile {
    Tile { m: 128, n, k, warps: (8, 1), stages, wgmma: true }
}

/// Returns a tile for wgmma with 64 rows: one group of four warps.
const fn few_rows_tile(n: usize, k: usize, stages: usize) -> Tile {
    Tile { m: 64, warps: (4, 1), ..wgmma_tile(n, k, stages) }
}

/// The minimum number of rows and of columns for tensor cores: the first value if k is at least [`LARGE_K`], otherwise the second.
const MIN_SIDE: (usize, usize) = (8, 32);
const LARGE_K: usize = 1024;

/// Tiles for f16 and bf16: the fastest first, then tiles for products with fewer rows and columns.
const HALF_TILES: [Tile; 6] = [
    wgmma_tile(256, 64, 4),
    wgmma_tile(128, 64, 4),
    wgmma_tile(64, 64, 4),
    mma_tile(128, 256, 64, (2, 4), 3),
    mma_tile(128, 128, 32, (2, 2), 4),
    mma_tile(64, 64, 64, (2, 2), 4),
];
/// Tiles for convolutions with at most 64 output channels: for halves, for f32 split into planes, and for TF32. Two work-groups with the
/// first tile for halves fit on a compute unit.
const FEW_ROWS_TILES: [&[Tile]; 3] = [
    &[few_rows_tile(128, 64, 4), few_rows_tile(256, 64, 4), mma_tile(64, 64, 64, (2, 2), 4)],
    &[few_rows_tile(128, 32, 3), few_rows_tile(64, 32, 4), mma_tile(64, 64, 16, (2, 2), 4)],
    &[
        few_rows_tile(128, 32, 4),
        few_rows_tile(256, 32, 4),
        mma_tile(64, 128, 32, (2, 2), 3),
        mma_tile(64, 64, 32, (2, 2), 4),
    ],
];
/// Tiles for f32 split into planes, in the same order as [`HALF_TILES`]. Local memory holds the bf16 planes in addition to the f32 slices.
const F32_TILES: [Tile; 5] = [
    wgmma_tile(128, 32, 3),
    wgmma_tile(64, 32, 4),
    mma_tile(128, 256, 16, (2, 4), 3),
    mma_tile(128, 128, 16, (2, 2), 3),
    mma_tile(64, 64, 16, (2, 2), 4),
];

/// Tiles for f32 as TF32: [`HALF_TILES`] with half the depth, because an f32 has twice the bytes. wgmma multiplies TF32 only if both matrices are
/// contiguous along k.
const TF32: [Tile; 6] = {
    let mut tiles = HALF_TILES;
    let mut i = 0;
    while i < tiles.len() {
        tiles[i].k /= 2;
        i += 1;
    }
    tiles
};

/// A tile without wgmma that occupies the device is chosen if its estimated time is at most this multiple of the fastest tile's time.
const MAX_TIME_RATIO: f64 = 1.3;
/// The number of columns of the narrowest tiles.
const MIN_TILE_COLUMNS: usize = 64;
/// The largest k for which memory bandwidth limits products with windows as the left matrix, and the tile for these products. Two of its work-groups
/// fit on a compute unit, so one writes while the other reads.
const SHALLOW_K_AND_TILE: (usize, Tile) = (256, wgmma_tile(128, 32, 4));

/// A kernel of the template: its tile and the layouts of both matrices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Mma {
    dtype: DType,
    planes: usize,
    tile: Tile,
    a: MatrixAccess,
    b: MatrixAccess,
    /// Which matrix consists of convolution windows; `None` if both matrices are stored in memory.
    pub(crate) windows: Option<WindowsOperand>,
}

/// The matrix that consists of convolution windows: the left matrix (windows are rows), or the right matrix (windows are columns or
/// rows). `Apart` means that adjacent results are not contiguous. See `kernels/windows_mma.cl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum WindowsOperand {
    Left,
    LeftApart,
    /// Windows are columns, and the results of one image are contiguous.
    Columns,
    ColumnsApart,
    Rows,
    RowsApart,
}

impl WindowsOperand {
    pub(crate) fn is_left(self) -> bool {
        matches!(self, WindowsOperand::Left | WindowsOperand::LeftApart)
    }

    fn are_columns(self) -> bool {
        matches!(self, WindowsOperand::Columns | WindowsOperand::ColumnsApart)
    }

    pub(crate) fn are_strided(self) -> bool {
        matches!(self, WindowsOperand::LeftApart | WindowsOperand::ColumnsApart | WindowsOperand::RowsApart)
    }
}

/// The access to a matrix: whether it is contiguous along k, and the number of bytes that one asynchronous copy may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct MatrixAccess {
    along_k: bool,
    copy: usize,
}

/// Split-K: the division of a product's depth among work-groups. The last work-group to finish a tile adds up the parts, always in the same order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SplitK {
    pub(crate) count: usize,
    /// The depth of each part but the last, which may have less.
    pub(crate) depth: usize,
}

impl SplitK {
    /// The maximum number of tiles of a product whose depth is split, because each tile needs an arrival counter.
    pub(crate) const MAX_TILES: usize = ARRIVAL_COUNTERS;
}

/// A matrix in a buffer: its dtype, and the offset of its first element from the start of the buffer, in elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BufferMatrix {
    pub(crate) dtype: DType,
    pub(crate) first: usize,
}

/// Returns the number of bf16 planes into which an element is split: 1 for halves, and for f32 if TF32 is used.
pub(crate) fn planes(dtype: DType) -> usize {
    if dtype == DType::F32 { precision::split_terms() } else { 1 }
}

/// Returns the tiles for a dtype (with `few`, the tiles for few rows) and the minimum k. With a smaller k, plain f32 would be more
/// precise than three planes.
fn tiles_for(dtype: DType, planes: usize, few: bool) -> Option<(&'static [Tile], usize)> {
    Some(match (dtype, planes) {
        (DType::F16 | DType::BF16, _) => (if few { FEW_ROWS_TILES[0] } else { &HALF_TILES }, 32),
        (DType::F32, 1) => (if few { FEW_ROWS_TILES[2] } else { &TF32 }, 32),
        (DType::F32, _) => (if few { FEW_ROWS_TILES[1] } else { &F32_TILES }, 64),
        _ => return None,
    })
}

impl Mma {
    /// Chooses the kernel for this problem. Each f32 is split into `planes` planes. `device` holds the number of compute units and
    /// the maximum number of columns of a tile. Returns None if the matrices are too small or not contiguous in any direction.
    /// `cores` is called last, because it may build a kernel.
    pub(crate) fn choose(
        plan: &GemmPlan,
        planes: usize,
        a: BufferMatrix,
        b: BufferMatrix,
        device: (usize, usize),
        cores: impl FnOnce() -> TensorCores,
    ) -> Option<Mma> {
        let planes = if a.dtype == DType::F32 { planes } else { 1 };
        let (tiles, depth) = tiles_for(a.dtype, planes, false)?;
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
            Some(MatrixAccess { along_k, copy: [16, 8, 4].into_iter().find(|&copy| whole(copy))? })
        };
        let a_side = side(&plan.a, a.first, plan.a.col, plan.a.row)?;
        let b_side = side(&plan.b, b.first, plan.b.row, plan.b.col)?;
        let made = Mma { dtype: a.dtype, planes, tile: tiles[0], a: a_side, b: b_side, windows: None };
        made.choose_tile(tiles, plan, device, cores())
    }

    /// Chooses the kernel for a product with windows. `along_k` is true if the other matrix is contiguous along k. Lines of both
    /// matrices must begin at multiples of 16 bytes.
    pub(crate) fn choose_for_windows(
        plan: &GemmPlan,
        (dtype, planes): (DType, usize),
        (windows, along_k): (WindowsOperand, bool),
        device: (usize, usize),
        cores: impl FnOnce() -> TensorCores,
    ) -> Option<Mma> {
        let few = plan.m <= 64 && !windows.is_left();
        let (tiles, depth) = tiles_for(dtype, planes, few)?;
        if plan.k < depth || plan.k > i32::MAX as usize || plan.m.min(plan.n) < MIN_SIDE.0 {
            return None;
        }
        let side = |along_k: bool| MatrixAccess { along_k, copy: 16 };
        let of_windows = side(windows.is_left() || windows.are_columns());
        let (a, b) = if windows.is_left() { (of_windows, side(along_k)) } else { (side(along_k), of_windows) };
        // Skips tiles of which the right matrix would fill at most half, if there are narrower tiles.
        let shallow = (planes == 1 && plan.k <= SHALLOW_K_AND_TILE.0)
            .then(|| Tile { k: 64 / dtype.size(), ..SHALLOW_K_AND_TILE.1 });
        let narrow = shallow.iter().chain(tiles).copied().filter(|tile| tile.n < 2 * plan.n.max(MIN_TILE_COLUMNS));
        let narrow: SmallVec<[Tile; 8]> = narrow.collect();
        let tiles = if windows.is_left() { &narrow[..] } else { tiles };
        Mma { dtype, planes, tile: tiles[0], a, b, windows: Some(windows) }.choose_tile(tiles, plan, device, cores())
    }

    /// Chooses the largest tile that occupies the device. If there is none, chooses the tile that takes the least time with split-K.
    fn choose_tile(
        self,
        tiles: &[Tile],
        plan: &GemmPlan,
        (units, columns): (usize, usize),
        cores: TensorCores,
    ) -> Option<Mma> {
        let made = tiles.iter().filter(|tile| tile.n <= columns).map(|&tile| Mma { tile, ..self });
        let wgmma = cores.wgmma && (!self.is_tf32() || self.a.along_k && self.b.along_k);
        let usable = made.filter(|mma: &Mma| mma.local_memory() <= cores.local && (wgmma || !mma.tile.wgmma));
        let time = |mma: &Mma| mma.best_split(plan, units).1;
        let quickest = usable.clone().min_by(|a, b| time(a).total_cmp(&time(b)))?;
        // Small tiles without wgmma can occupy the device and still be slower than larger tiles with split-K.
        let is_good = |mma: &Mma| mma.tile.wgmma || time(mma) <= MAX_TIME_RATIO * time(&quickest);
        let chosen = usable.clone().find(|mma| mma.occupies_device(plan, units)).filter(is_good).unwrap_or(quickest);
        (chosen.tile_count(plan) <= i32::MAX as usize).then_some(chosen)
    }

    fn is_tf32(&self) -> bool {
        self.dtype == DType::F32 && self.planes == 1
    }

    fn tile_count(&self, plan: &GemmPlan) -> usize {
        plan.m.div_ceil(self.tile.m) * plan.n.div_ceil(self.tile.n) * plan.count()
    }

    /// True if the tiles are enough to occupy the device without split-K, with one work-group per tile.
    fn occupies_device(&self, plan: &GemmPlan, units: usize) -> bool {
        4 * self.tile_count(plan) >= 3 * units
    }

    /// Returns how many work-groups share the depth of a tile, and the depth of each part.
    pub(crate) fn parts(&self, plan: &GemmPlan, units: usize) -> SplitK {
        let depth = plan.k.div_ceil(self.best_split(plan, units).0).next_multiple_of(self.tile.k);
        SplitK { count: plan.k.div_ceil(depth), depth }
    }

    /// Returns the number of parts that takes the least time, and that time in microseconds. Constants are from an H200; only their ratios matter.
    fn best_split(&self, plan: &GemmPlan, units: usize) -> (usize, f64) {
        let Tile { m, n, k, wgmma, .. } = self.tile;
        let tiles = self.tile_count(plan);
        // The time of a slice: the waiting time in microseconds, and the rate in multiply-adds per microsecond.
        let (wait, rate) = match (self.dtype, wgmma) {
            (DType::F32, true) if self.planes > 1 => (0.35, 1.3e6 / self.planes as f64),
            (DType::F32, false) if self.planes > 1 => (0.24, 0.87e6 / self.planes as f64),
            (dtype, true) => (0.2, 5.2e6 / dtype.size() as f64),
            (dtype, false) => (0.2, 2.8e6 / dtype.size() as f64),
        };
        let work = (m * n * k) as f64 / rate;
        let time = |parts: usize| {
            let slices = plan.k.div_ceil(parts).div_ceil(k) as f64;
            // Without wgmma, two work-groups fit on a compute unit, and while one waits, the other multiplies.
            let tiles_per_unit = (tiles * parts).div_ceil(units) as f64;
            let waits = if wgmma { tiles_per_unit } else { (tiles_per_unit / 2.0).ceil() };
            // After split-K, a single work-group reads all parts of a tile.
            let read = ((m.min(plan.m) * n) as f64 * 4.0 / 1e5).max(0.17);
            slices * (waits * wait + tiles_per_unit * work) + if parts > 1 { 4.5 + parts as f64 * read } else { 0.0 }
        };
        let alone = tiles > SplitK::MAX_TILES || self.occupies_device(plan, units);
        let most = if alone { 1 } else { (2 * units / tiles).min(plan.k / (2 * k)) };
        let steps = [2, 3, 4, 5, 6, 8, 9, 10, 12, 16, 20, 24, 32, 48, 64];
        let shared = steps.into_iter().take_while(|&parts| parts <= most).map(|parts| (parts, time(parts)));
        shared.fold((1, time(1)), |best, other| if other.1 < best.1 { other } else { best })
    }

    /// True if the kernel can add up the rows of the left matrix. For these sums, each work-item must split elements of only a few rows into planes.
    pub(crate) fn can_sum_rows(&self) -> bool {
        self.planes > 1 && !self.a.along_k
    }

    /// True if the kernel can round results to halves in registers. This requires an epilogue that returns the product unchanged.
    pub(crate) fn can_round(&self) -> bool {
        self.tile.wgmma && self.dtype != DType::F32
    }

    /// Returns the rows and columns of the result that one work-group computes.
    pub(crate) fn tile(self) -> (usize, usize) {
        (self.tile.m, self.tile.n)
    }

    /// Returns the number of work-items of a work-group.
    pub(crate) fn threads(self) -> usize {
        32 * self.tile.warps.0 * self.tile.warps.1
    }

    fn local_memory(self) -> usize {
        let Tile { m, n, k, stages, .. } = self.tile;
        let cut = if self.planes > 1 { 2 * self.planes * 2 } else { 0 };
        let slices = (m + n) * k * (stages * self.dtype.size() + cut);
        slices.max(m * (n + 8) * size_of::<f32>()) + 16
    }

    pub(crate) fn defines(self) -> String {
        let Tile { m, n, k, warps, stages, wgmma } = self.tile;
        let Mma { dtype, planes, a, b, .. } = self;
        let unit = match dtype {
            DType::F16 => "f16",
            _ if self.is_tf32() => "tf32",
            _ => "bf16",
        };
        let tf32 = define_if(self.is_tf32(), "TF32");
        // The number of tile rows in a band. The work-groups of a band run at the same time. The best sizes were measured.
        let band = if dtype == DType::F32 { 4 } else { 8 };
        // With wgmma and without planes, the multiplication of a slice begins before that of the previous slice ends, so one more stage of local
        // memory is needed.
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
