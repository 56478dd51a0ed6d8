//! The tiles of the attention kernels: their sizes on a device, and which of the kernels computes a call.

use crate::backend::opencl::geometry::{declarable_local_memory, row_starts};
use crate::backend::problem::attention::FusedAttention;
use crate::device::opencl::{ClDevice, Knob, MOST_REGISTERS, SM_90A};
use crate::{DType, Tensor};

/// The widest heads: of wider ones only a few rows would fit in local memory.
pub(crate) const WIDEST_HEAD: usize = 256;

/// The widest heads on tensor cores, whose gradients stay in registers.
const WIDEST_MMA: usize = 128;

/// The most queries for which tensor cores are not used, because most of their fragments would be empty.
const FEW_QUERIES: usize = 16;

/// The kernels of the template, described in `kernels/attention.cl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Entry {
    Forward,
    Split,
    Combine,
    Queries,
    Keys,
}

/// The part of the scores that a work-group computes at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tile {
    /// Work-items along rows and columns, and the scores of each.
    Plain { columns: usize, rows: usize, mi: usize, ni: usize },
    /// On tensor cores: warps, and fragments of 16 rows in each. With `wgmma` four warps multiply together.
    Mma { warps: usize, fragments: usize, other: usize, wgmma: bool },
}

/// The largest first: these do the most arithmetic per element read.
const PLAIN: [Tile; 9] = [
    plain(16, 4, 4),
    plain(16, 2, 4),
    plain(16, 2, 2),
    plain(16, 1, 2),
    plain(8, 2, 2),
    plain(8, 1, 4),
    plain(8, 1, 2),
    plain(4, 1, 2),
    plain(4, 1, 1),
];

const fn plain(rows: usize, mi: usize, ni: usize) -> Tile {
    Tile::Plain { columns: 8, rows, mi, ni }
}

const fn mma(fragments: usize, other: usize) -> Tile {
    Tile::Mma { warps: 4, fragments, other, wgmma: false }
}

/// The most registers of a work-item for f32 on tensor cores with heads of up to 64, so that three groups share a compute unit.
const REGISTERS: usize = 168;

const WGMMA: Tile = Tile::Mma { warps: 4, fragments: 1, other: 64, wgmma: true };

/// Whether the dtype is a half or f32, the queries are enough for tensor cores, and the device has them.
pub(crate) fn many_for_tensor_cores(device: &ClDevice, a: &FusedAttention) -> bool {
    a.q.dtype.size() <= 4 && a.sizes()[1] > FEW_QUERIES && device.tensor_cores().local > 0
}

/// The bytes that are copied at once from the rows of these tensors, on tensor cores. None where these cannot be used: rows are not contiguous
/// or not aligned, heads are too wide, or the scale is not positive in f32, so that the greatest product need not have the greatest weight.
pub(crate) fn copied_at_once(device: &ClDevice, a: &FusedAttention, tensors: &[&Tensor]) -> Option<usize> {
    let [.., width, value_width] = a.sizes();
    let last = |t: &Tensor| t.rank() - 1;
    let in_rows = tensors.iter().all(|t| t.strides()[last(t)] == 1 || t.shape().dims()[last(t)] == 1);
    let taken = many_for_tensor_cores(device, a)
        && in_rows
        && width.max(value_width) <= WIDEST_MMA
        && a.scale as f32 >= f32::MIN_POSITIVE;
    let aligned = |copy: usize| {
        let mut starts = tensors.iter().flat_map(|t| row_starts(t).map(|start| start.unsigned_abs() * t.dtype.size()));
        starts.all(|bytes| bytes.is_multiple_of(copy))
    };
    taken.then(|| [16, 8, 4].into_iter().find(|&copy| aligned(copy))).flatten()
}

impl Tile {
    /// Rows of the tile that a group keeps (OWN).
    pub(crate) fn own(self) -> usize {
        match self {
            Tile::Plain { rows, mi, .. } => rows * mi,
            Tile::Mma { warps, fragments, .. } => warps * fragments * 16,
        }
    }

    /// Rows of the tiles that it goes over (OTHER).
    fn other(self) -> usize {
        match self {
            Tile::Plain { columns, ni, .. } => columns * ni,
            Tile::Mma { other, .. } => other,
        }
    }

    pub(crate) fn group(self) -> usize {
        match self {
            Tile::Plain { columns, rows, .. } => rows * columns,
            Tile::Mma { warps, .. } => warps * 32,
        }
    }

    /// The padded width of keys or values in local memory. In plain tiles each work-item has a multiple of four columns.
    pub(crate) fn padded(self, width: usize) -> usize {
        match self {
            Tile::Plain { columns, .. } => width.next_multiple_of(4 * columns),
            Tile::Mma { wgmma, .. } => width.next_power_of_two().max(if wgmma { 64 } else { 32 }),
        }
    }

    /// Bytes of local memory: the arrays that the kernels declare.
    fn local_memory(self, a: &FusedAttention, entry: Entry) -> usize {
        let [.., width, value_width] = a.sizes();
        let backward = matches!(entry, Entry::Queries | Entry::Keys);
        let ([k, v], own, other) = ([width, value_width].map(|width| self.padded(width)), self.own(), self.other());
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

    /// The plain tiles that fit in local memory, without those of more than 8 rows of which more than half would be empty.
    pub(crate) fn plain(device: &ClDevice, a: &FusedAttention, entry: Entry) -> impl Iterator<Item = Tile> {
        let (info, [heads, queries, ..]) = (device.info(), a.sizes());
        let (group, memory) = (info.max_work_group, declarable_local_memory(device));
        let enough = (heads * queries).next_power_of_two().max(8).min(device.tuned(Knob::AttentionRows));
        let fits = move |tile: &Tile| tile.group() <= group && tile.local_memory(a, entry) <= memory;
        PLAIN.into_iter().filter(fits).filter(move |tile| tile.own() <= enough)
    }

    /// The tiles for tensor cores, the fastest on an H200 first: with as many accumulators as registers allow, and with at least as many
    /// work-groups (`groups` of a tile) as the device has compute units.
    pub(crate) fn mma(
        device: &ClDevice,
        a: &FusedAttention,
        entry: Entry,
        groups: impl Fn(Tile) -> usize,
    ) -> Vec<Tile> {
        let (units, cores) = (device.info().compute_units, device.tensor_cores());
        let [.., width, value_width] = a.sizes();
        let tiles: &[Tile] = match (entry, width.max(value_width) > 64) {
            (Entry::Queries | Entry::Keys, true) if a.q.dtype == DType::F32 => &[mma(1, 16)],
            _ if a.q.dtype == DType::F32 => &[mma(1, 32)],
            _ if cores.wgmma => &[WGMMA],
            (Entry::Keys, false) => &[mma(2, 32), mma(1, 32)],
            (Entry::Forward, false) => &[mma(1, 64), mma(1, 32)],
            _ => &[mma(1, 32)],
        };
        let fits = |tile: &Tile| tile.local_memory(a, entry) <= cores.local;
        let mut tiles: Vec<Tile> = tiles.iter().copied().filter(fits).collect();
        tiles.sort_by_key(|&tile| if groups(tile) < units { tile.own() } else { 0 });
        tiles
    }

    /// A number that differs for all tiles.
    pub(crate) fn key(self) -> u64 {
        let numbers = match self {
            Tile::Plain { columns, rows, mi, ni } => [columns, rows, mi, ni],
            Tile::Mma { warps, fragments, other, wgmma } => [usize::from(wgmma), warps << 4 | fragments, 0, other],
        };
        numbers.into_iter().fold(0, |key, n| key << 8 | n as u64)
    }

    /// Its definitions for the template.
    pub(crate) fn defines(self, dtype: DType, widest: usize) -> String {
        match self {
            Tile::Plain { columns, rows, mi, ni } => {
                format!("#define TX {columns}\n#define TY {rows}\n#define MI {mi}\n#define NI {ni}\n")
            }
            Tile::Mma { warps, fragments, other, wgmma } => {
                let target = if wgmma { SM_90A } else { "" };
                let registers = match (dtype, widest) {
                    (DType::F32, ..=64) => format!("{MOST_REGISTERS}{REGISTERS}\n"),
                    _ => String::new(),
                };
                let size = dtype.size();
                format!(
                    "{target}{registers}#define MMA \"{dtype}\"\n#define SIZE {size}\n#define WARPS {warps}\n\
                     #define MT {fragments}\n#define OTHER {other}\n"
                )
            }
        }
    }
}
