//! The tiles of the attention kernels: their sizes on a device, and the choice of a kernel for a call.

use crate::backend::opencl::prelude::*;
use crate::device::opencl::{MOST_REGISTERS, SM_90A};

/// The maximum head width. Of wider heads, only a few rows would fit in local memory.
pub(crate) const MAX_HEAD_WIDTH: usize = 256;

/// The maximum head width on tensor cores. The gradients stay in registers, and wider heads would need too many.
const MAX_MMA_HEAD_WIDTH: usize = 128;

/// The maximum number of queries for which tensor cores are not used, because most of their fragments would be empty.
const MAX_QUERIES_WITHOUT_MMA: usize = 16;

/// The kernels that the template can generate; `kernels/attention.cl` describes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum AttentionKernel {
    Forward,
    Split,
    Combine,
    Queries,
    Keys,
}

/// The part of the score matrix that a work-group computes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Tile {
    /// The work-items along rows (`rows`) and columns (`columns`), and the scores of each work-item along rows (`mi`) and columns (`ni`).
    Plain { columns: usize, rows: usize, mi: usize, ni: usize },
    /// A tile on tensor cores: `warps` warps of `fragments` x 16 own rows each, against `other` rows. With `wgmma`, four warps multiply together.
    Mma { warps: usize, fragments: usize, other: usize, wgmma: bool },
}

/// The rows of work-items, and the scores of each work-item along rows and columns, of the plain tiles: the largest tile first, because a larger
/// tile does more arithmetic per element read.
const PLAIN_TILES: [[usize; 3]; 9] =
    [[16, 4, 4], [16, 2, 4], [16, 2, 2], [16, 1, 2], [8, 2, 2], [8, 1, 4], [8, 1, 2], [4, 1, 2], [4, 1, 1]];

const fn mma(fragments: usize, other: usize) -> Tile {
    Tile::Mma { warps: 4, fragments, other, wgmma: false }
}

/// The register limit of a work-item for f32 heads of at most 64 columns on tensor cores, so that three work-groups run on a compute unit.
const F32_MAX_REGISTERS: usize = 168;

const WGMMA_TILE: Tile = Tile::Mma { warps: 4, fragments: 1, other: 64, wgmma: true };

/// True if the dtype is f32 or a half, the device has tensor cores, and the queries are enough to fill their fragments.
pub(crate) fn suits_tensor_cores(device: &ClDevice, a: &FusedAttention) -> bool {
    a.q.dtype.size() <= 4 && a.sizes()[1] > MAX_QUERIES_WITHOUT_MMA && device.tensor_cores().local > 0
}

/// Returns the bytes of one asynchronous copy from the rows of these tensors. None if tensor cores cannot be used: rows are strided or unaligned,
/// heads are too wide, or the scale is not positive in f32, so that the largest product need not give the largest weight.
pub(crate) fn async_copy_bytes(device: &ClDevice, a: &FusedAttention, tensors: &[&Tensor]) -> Option<usize> {
    let [.., width, value_width] = a.sizes();
    let last = |t: &Tensor| t.rank() - 1;
    let in_rows = tensors.iter().all(|t| t.strides()[last(t)] == 1 || t.shape().dims()[last(t)] == 1);
    let taken = suits_tensor_cores(device, a)
        && in_rows
        && width.max(value_width) <= MAX_MMA_HEAD_WIDTH
        && a.scale as f32 >= f32::MIN_POSITIVE;
    let aligned = |copy: usize| {
        let mut starts = tensors.iter().flat_map(|t| row_starts(t).map(|start| start.unsigned_abs() * t.dtype.size()));
        starts.all(|bytes| bytes.is_multiple_of(copy))
    };
    taken.then(|| [16, 8, 4].into_iter().find(|&copy| aligned(copy))).flatten()
}

impl Tile {
    /// Returns the number of rows that a work-group keeps (OWN in the template).
    pub(crate) fn own_rows(self) -> usize {
        match self {
            Tile::Plain { rows, mi, .. } => rows * mi,
            Tile::Mma { warps, fragments, .. } => warps * fragments * 16,
        }
    }

    /// Returns the number of rows in each tile that a work-group iterates over (OTHER in the template).
    fn other_rows(self) -> usize {
        match self {
            Tile::Plain { columns, ni, .. } => columns * ni,
            Tile::Mma { other, .. } => other,
        }
    }

    pub(crate) fn group_size(self) -> usize {
        match self {
            Tile::Plain { columns, rows, .. } => rows * columns,
            Tile::Mma { warps, .. } => warps * 32,
        }
    }

    /// Returns the padded width of keys or values in local memory. In plain tiles, the number of columns of each work-item is a multiple of four.
    pub(crate) fn padded_width(self, width: usize) -> usize {
        match self {
            Tile::Plain { columns, .. } => width.next_multiple_of(4 * columns),
            Tile::Mma { wgmma, .. } => width.next_power_of_two().max(if wgmma { 64 } else { 32 }),
        }
    }

    /// Returns the number of bytes of the arrays that the kernels declare in local memory.
    fn local_memory(self, a: &FusedAttention, entry: AttentionKernel) -> usize {
        let [.., width, value_width] = a.sizes();
        let backward = matches!(entry, AttentionKernel::Queries | AttentionKernel::Keys);
        let ([k, v], own, other) =
            ([width, value_width].map(|width| self.padded_width(width)), self.own_rows(), self.other_rows());
        let elements = match self {
            Tile::Plain { columns, .. } => {
                let resident = if backward { own * (k + v + 8) } else { own * (k + 4 + columns) };
                resident + other * (k.max(v) + 4) + own * (other + 4)
            }
            Tile::Mma { .. } if backward => own * (k + v) + (2 * other * (k + v)).max(own * v) + 8 * other,
            Tile::Mma { .. } => own * k + 2 * other * (k + v),
        };
        let dtype = if matches!(self, Tile::Plain { .. }) { a.q.dtype.compute().dtype() } else { a.q.dtype };
        elements * dtype.size()
    }

    /// Returns the plain tiles that fit in local memory, except tiles of more than 8 rows that would be more than half empty.
    pub(crate) fn plain(device: &ClDevice, a: &FusedAttention, entry: AttentionKernel) -> impl Iterator<Item = Tile> {
        let (info, [heads, queries, ..]) = (device.info(), a.sizes());
        let (group, memory) = (info.max_work_group, declarable_local_memory(device));
        let enough = (heads * queries).next_power_of_two().max(8).min(device.tuned(TuningParameter::AttentionRows));
        let fits = move |tile: &Tile| tile.group_size() <= group && tile.local_memory(a, entry) <= memory;
        let tiles = PLAIN_TILES.into_iter().map(|[rows, mi, ni]| Tile::Plain { columns: 8, rows, mi, ni });
        tiles.filter(fits).filter(move |tile| tile.own_rows() <= enough)
    }

    /// Returns the tiles for tensor cores, the fastest on an H200 first: tiles with as many accumulators as registers allow, and
    /// tiles with at least as many work-groups as the device has compute units. `groups` counts the work-groups of a tile.
    pub(crate) fn mma(
        device: &ClDevice,
        a: &FusedAttention,
        entry: AttentionKernel,
        groups: impl Fn(Tile) -> usize,
    ) -> Vec<Tile> {
        let (units, cores) = (device.info().compute_units, device.tensor_cores());
        let [.., width, value_width] = a.sizes();
        let tiles: &[Tile] = match (entry, width.max(value_width) > 64) {
            (AttentionKernel::Queries | AttentionKernel::Keys, true) if a.q.dtype == DType::F32 => &[mma(1, 16)],
            _ if a.q.dtype == DType::F32 => &[mma(1, 32)],
            _ if cores.wgmma => &[WGMMA_TILE],
            (AttentionKernel::Keys, false) => &[mma(2, 32), mma(1, 32)],
            (AttentionKernel::Forward, false) => &[mma(1, 64), mma(1, 32)],
            _ => &[mma(1, 32)],
        };
        let fits = |tile: &Tile| tile.local_memory(a, entry) <= cores.local;
        let mut tiles: Vec<Tile> = tiles.iter().copied().filter(fits).collect();
        tiles.sort_by_key(|&tile| if groups(tile) < units { tile.own_rows() } else { 0 });
        tiles
    }
}

/// The macros of a tile, for keys and values that are at most `widest` columns wide.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct TileMacros {
    pub(crate) tile: Tile,
    pub(crate) dtype: DType,
    pub(crate) widest: usize,
}

impl Define for TileMacros {
    fn define(&self, _: &str, out: &mut String) {
        let TileMacros { tile, dtype, widest } = *self;
        out.push_str(&match tile {
            Tile::Plain { columns, rows, mi, ni } => {
                format!("#define TX {columns}\n#define TY {rows}\n#define MI {mi}\n#define NI {ni}\n")
            }
            Tile::Mma { warps, fragments, other, wgmma } => {
                let target = if wgmma { SM_90A } else { "" };
                let registers = match (dtype, widest) {
                    (DType::F32, ..=64) => format!("{MOST_REGISTERS}{F32_MAX_REGISTERS}\n"),
                    _ => String::new(),
                };
                let size = dtype.size();
                format!(
                    "{target}{registers}#define MMA \"{dtype}\"\n#define SIZE {size}\n#define WARPS {warps}\n\
                     #define MT {fragments}\n#define OTHER {other}\n"
                )
            }
        });
    }
}
