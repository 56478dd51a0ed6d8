//! Attention in one kernel, and its gradients in two: `kernels/attention.cl`.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::opencl::gemm::is_processor;
use crate::backend::opencl::geometry::{
    LOCAL, declarable_local_memory, flag, free_group, vector_defines, vector_width,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache::{self, Key, OpKind};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::problem::attention::{Attended, FusedAttention};
use crate::backend::problem::map::Params;
use crate::device::opencl::{ClDevice, ClKernel};
use crate::layout::collapse::StridedDims;
use crate::{DType, Result, Scalar, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/attention.cl");

/// The widest heads: of wider ones a tile of a few rows fills the local memory.
const WIDEST_HEAD: usize = 256;
/// Keys that a group goes over at least where several share those of a tile of queries.
const KEYS_OF_A_PART: usize = 256;

/// What the template is compiled to; see there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    Forward,
    Split,
    Combine,
    Queries,
    Keys,
}

/// Work-items along rows and columns of the scores of a tile, and the scores of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tile {
    columns: usize,
    rows: usize,
    mi: usize,
    ni: usize,
}

/// The largest first: these do the most arithmetic for an element that they read.
const TILES: [Tile; 9] = [
    tile(16, 4, 4),
    tile(16, 2, 4),
    tile(16, 2, 2),
    tile(16, 1, 2),
    tile(8, 2, 2),
    tile(8, 1, 4),
    tile(8, 1, 2),
    tile(4, 1, 2),
    tile(4, 1, 1),
];

const fn tile(rows: usize, mi: usize, ni: usize) -> Tile {
    Tile { columns: 8, rows, mi, ni }
}

impl Tile {
    fn own(self) -> usize {
        self.rows * self.mi
    }

    fn other(self) -> usize {
        self.columns * self.ni
    }

    fn group(self) -> usize {
        self.rows * self.columns
    }

    /// The widths of keys and values in local memory: every work-item has four neighbours, or several times four.
    fn padded(self, width: usize) -> usize {
        width.next_multiple_of(4 * self.columns)
    }

    /// Bytes of local memory: the arrays that the kernels declare.
    fn local_memory(self, a: &FusedAttention, backward: bool) -> usize {
        let [.., width, value_width] = a.sizes();
        let [k, v] = [width, value_width].map(|width| self.padded(width) + 4);
        let resident = if backward { self.own() * (k + v) } else { self.own() * (k + self.columns) };
        let elements = resident + self.other() * k.max(v) + self.own() * (self.other() + 4);
        elements * a.q.dtype.compute().dtype().size()
    }

    /// Those that this device has room for, without those of more than 8 rows of which more than half would be empty.
    fn fitting(device: &ClDevice, a: &FusedAttention, backward: bool) -> impl Iterator<Item = Tile> {
        let (info, [heads, queries, ..]) = (device.info(), a.sizes());
        let (group, memory) = (info.max_work_group, declarable_local_memory(device));
        let enough = (heads * queries).next_power_of_two().max(8);
        let fits = move |tile: &Tile| tile.group() <= group && tile.local_memory(a, backward) <= memory;
        TILES.into_iter().filter(fits).filter(move |tile| tile.own() <= enough)
    }
}

/// Queries up to which the kernels, which multiply in f32, are used for halves on a device with tensor cores.
const FEW_QUERIES: usize = 16;

/// Whether the kernels compute this: on processors products of blocks are faster, and so, by their arithmetic, are those of halves on
/// tensor cores.
pub(crate) fn has(a: &FusedAttention) -> Result<bool> {
    let device = a.q.cl_device()?;
    let [heads, queries, keys, width, value_width] = a.sizes();
    let by_tensor_cores = || queries > FEW_QUERIES && a.q.dtype.size() == 2 && device.tensor_cores().local > 0;
    Ok(!is_processor(device)
        && !by_tensor_cores()
        && (a.q.dtype != DType::F64 || device.info().fp64)
        && width.max(value_width) <= WIDEST_HEAD
        && (heads * queries).max(keys) < 1 << 31
        && [false, true].iter().all(|&backward| Tile::fitting(device, a, backward).next().is_some()))
}

/// The tensors of the launches, the mask's place taken by another one where there is none.
fn operands<'a>(a: &FusedAttention<'a>) -> [&'a Tensor; 4] {
    [a.q, a.k, a.v, a.mask.unwrap_or(a.q)]
}

fn run(
    of: OpKind,
    a: &FusedAttention,
    tensors: &[&Tensor],
    prepare: impl Fn(&'static ClDevice) -> Result<LaunchPlan>,
) -> Result<()> {
    let device = a.q.cl_device()?;
    let numbers = [a.causal, a.mask.is_some(), a.dropout.is_some()].map(u64::from);
    let (p, seed) = a.dropout.unwrap_or_default();
    let rescale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
    let scalars = [a.scale, p, rescale].map(Scalar::Float);
    let key = Key { of, device: device.device(), numbers: &numbers, exprs: &[], tensors };
    let params = Params { scalars: &scalars, seeds: &[seed], base: None };
    launch_cache::launch(&key, params, || prepare(device)).map(drop)
}

/// The result and the log-sum-exp of each row; one launch, or two where there are few queries to many keys.
pub(crate) fn forward(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> {
    let [q, k, v, mask] = operands(a);
    let tensors = [q, k, v, mask, out, logsumexp];
    run(OpKind::Attention, a, &tensors, |device| {
        let shape = Launches::new(device, a, false, &tensors[..5]);
        let [heads, queries, keys, ..] = a.sizes();
        let groups = |tile: Tile| shape.batches() * (heads * queries).div_ceil(tile.own());
        // Few tiles of queries share the device's compute units with their keys.
        let wanted = (4 * device.info().compute_units.max(1)).div_ceil(groups(shape.tile()));
        let parts = wanted.min(keys / KEYS_OF_A_PART).max(1);
        let (tile, kernel) = shape.kernel(if parts > 1 { Entry::Split } else { Entry::Forward })?;
        let groups = groups(tile);
        let mut launch = KernelLaunch::new(kernel, groups * parts * tile.group(), tile.group());
        (0..5).for_each(|i| shape.operand(&mut launch, i));
        launch.tensor(5);
        shape.numbers(&mut launch, parts);
        shape.call(&mut launch);
        if parts == 1 {
            return Ok(LaunchPlan::one(device, launch));
        }
        launch.tensor(6);
        let (_, combine) = shape.kernel(Entry::Combine)?;
        let group = free_group(device, &combine, out.numel(), LOCAL);
        let mut second = KernelLaunch::new(combine, out.numel(), group);
        shape.operand(&mut second, 4);
        second.tensor(5);
        shape.numbers(&mut second, parts);
        second.tensor(6);
        let partial = logsumexp.numel() * parts * (tile.padded(a.sizes()[4]) + 2);
        Ok(LaunchPlan::new(device, Some((partial, logsumexp.dtype)), [launch, second]))
    })
}

/// The gradients of queries, keys and values, in two launches.
pub(crate) fn backward(a: &FusedAttention, of: &Attended, results: [&Tensor; 3]) -> Result<()> {
    let ([q, k, v, mask], [dq, dk, dv]) = (operands(a), results);
    let tensors = [q, k, v, mask, of.out, of.grad, dq, dk, dv, of.logsumexp];
    run(OpKind::AttentionBackward, a, &tensors, |device| {
        let shape = Launches::new(device, a, true, &tensors[..9]);
        let [heads, queries, keys, ..] = a.sizes();
        let launch = |entry: Entry, rows: usize, operands: &[usize]| -> Result<KernelLaunch> {
            let (tile, kernel) = shape.kernel(entry)?;
            let groups = shape.batches() * rows.div_ceil(tile.own());
            let mut launch = KernelLaunch::new(kernel, groups * tile.group(), tile.group());
            operands.iter().for_each(|&i| shape.operand(&mut launch, i));
            // The log-sum-exp, and delta, which the first launch writes for the second.
            (9..11).for_each(|i| launch.tensor(i));
            shape.numbers(&mut launch, 1);
            shape.call(&mut launch);
            Ok(launch)
        };
        let of_queries = launch(Entry::Queries, heads * queries, &[0, 1, 2, 3, 4, 5, 6])?;
        let of_keys = launch(Entry::Keys, keys, &[0, 1, 2, 3, 5, 7, 8])?;
        let delta = (of.logsumexp.numel(), of.logsumexp.dtype);
        Ok(LaunchPlan::new(device, Some(delta), [of_queries, of_keys]))
    })
}

/// What the launches of a call have in common.
struct Launches<'a> {
    device: &'static ClDevice,
    a: &'a FusedAttention<'a>,
    backward: bool,
    /// `[batch.., heads, rows, columns]`.
    operands: &'a [&'a Tensor],
    /// Of the dims before the heads.
    batch: StridedDims,
    /// Elements that a work-item loads at once.
    width: usize,
}

impl<'a> Launches<'a> {
    fn new(
        device: &'static ClDevice,
        a: &'a FusedAttention<'a>,
        backward: bool,
        operands: &'a [&'a Tensor],
    ) -> Launches<'a> {
        let batch = StridedDims::new(&a.batch(), operands.iter().map(|t| &t.strides()[..t.rank() - 3]));
        // Those that are staged in local memory.
        let staged: SmallVec<[&Tensor; 4]> =
            operands[..3].iter().chain(backward.then(|| &operands[5])).copied().collect();
        let starts = staged.iter().flat_map(|t| {
            let dims = t.shape().dims().iter().zip(t.strides());
            let steps = dims.rev().skip(1).map(|(&n, &step)| if n == 1 { 0 } else { step });
            steps.chain([t.layout.offset as isize, t.shape().dims()[t.rank() - 1] as isize])
        });
        let in_rows = staged.iter().all(|t| t.strides()[t.rank() - 1] == 1);
        let width = if in_rows { vector_width(device, a.q.dtype, starts) } else { 1 };
        Launches { device, a, backward, operands, batch, width }
    }

    fn batches(&self) -> usize {
        self.batch.dims.iter().product()
    }

    /// The largest tile.
    fn tile(&self) -> Tile {
        let mut tiles = Tile::fitting(self.device, self.a, self.backward);
        tiles.next().expect("there is one, or the call was declined")
    }

    /// The kernel with the largest tile that it can be launched with: how many registers it takes is the compiler's to say.
    fn kernel(&self, entry: Entry) -> Result<(Tile, Arc<ClKernel>)> {
        let mut made = (self.tile(), self.build(entry, self.tile())?);
        for tile in Tile::fitting(self.device, self.a, self.backward).skip(1) {
            if entry == Entry::Combine || made.0.group() <= made.1.max_work_group() {
                break;
            }
            made = (tile, self.build(entry, tile)?);
        }
        Ok(made)
    }

    fn build(&self, entry: Entry, tile: Tile) -> Result<Arc<ClKernel>> {
        let (a, rank, width) = (self.a, self.batch.dims.len().max(1), self.width);
        let (dtype, acc) = (a.q.dtype, a.q.dtype.compute());
        let mask = a.mask.map_or(0, |mask| if mask.dtype == DType::Bool { 1 } else { 2 });
        let z = a.mask.map_or(dtype, |mask| mask.dtype);
        let [.., k, v] = a.sizes().map(|width| tile.padded(width));
        let Tile { columns, rows, mi, ni } = tile;
        let sizes = (rows << 24 | mi << 16 | ni << 8 | width) as u64;
        let dropout = u64::from(a.dropout.is_some());
        let params =
            [entry as u64, dtype as u64, mask << 8 | z as u64, rank as u64, sizes, k as u64, v as u64, dropout];
        kernel(self.device, KernelKey::new("attention", &params), "attention", || {
            let entry = match entry {
                Entry::Forward => "FORWARD",
                Entry::Split => "FORWARD\n#define SPLIT",
                Entry::Combine => "COMBINE",
                Entry::Queries => "QUERIES",
                Entry::Keys => "KEYS",
            };
            format!(
                "#define A {dtype}\n#define Z {z}\n#define MASK {mask}\n#define ACC {}\n#define ACC_NAME {acc:?}\n\
                 #define NB {rank}\n#define TX {columns}\n#define TY {rows}\n#define MI {mi}\n#define NI {ni}\n\
                 #define DK {k}\n#define DV {v}\n#define {entry}\n{}{}{TEMPLATE}",
                acc.cl_name(),
                vector_defines(dtype, width),
                flag(dropout == 1, "DROPOUT"),
            )
        })
    }

    /// A tensor of the list, with its strides.
    fn operand(&self, launch: &mut KernelLaunch, i: usize) {
        let t = self.operands[i];
        launch.tensor(i);
        let batch = &self.batch.strides[i];
        let none = batch.is_empty().then_some(0);
        let steps = batch.iter().copied().chain(none).chain(t.strides()[t.rank() - 3..].iter().copied());
        launch.words(steps.map(|step| step as i64));
    }

    fn numbers(&self, launch: &mut KernelLaunch, parts: usize) {
        let none = self.batch.dims.is_empty().then_some(1);
        let sizes = self.batch.dims.iter().copied().chain(none).chain([self.batches()]).chain(self.a.sizes());
        launch.words(sizes.chain([usize::from(self.a.causal), parts]).map(|n| n as i64));
    }

    /// The scale, what concerns dropout, and its seed.
    fn call(&self, launch: &mut KernelLaunch) {
        launch.scalars(3, self.a.q.dtype.compute());
        launch.seeds(1);
    }
}
