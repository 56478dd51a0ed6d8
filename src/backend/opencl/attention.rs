//! Fused attention, and its gradients in two launches: `kernels/attention.cl` with `attention_tiles.cl`, or on tensor cores with
//! `attention_products.cl` and `attention_mma.cl`.

use crate::backend::opencl::attention_tile::{self, AttentionKernel, MAX_HEAD_WIDTH, Tile, TileMacros};
use crate::backend::opencl::gemm::uses_cpu_kernels;
use crate::backend::opencl::prelude::*;

const TILES: &str =
    concat!(include_str!("../../../kernels/attention.cl"), "\n", include_str!("../../../kernels/attention_tiles.cl"));
const MMA: &str = concat!(
    include_str!("../../../kernels/mma.cl"),
    "\n",
    include_str!("../../../kernels/attention.cl"),
    "\n",
    include_str!("../../../kernels/attention_products.cl"),
    "\n",
    include_str!("../../../kernels/attention_mma.cl")
);

/// The minimum number of keys of a work-group when the keys for a tile of queries are divided among several work-groups.
const MIN_KEYS_PER_PART: usize = 256;

/// True if these kernels should compute the call. Attention by blocked matrix products is faster on CPUs, and also for halves on
/// devices with tensor cores if `attention_mma.cl` cannot compute the call.
pub(crate) fn is_supported(a: &FusedAttention) -> Result<bool> {
    let device = a.q.cl_device()?;
    let [heads, queries, keys, width, value_width] = a.sizes();
    let by_products = || {
        a.q.dtype.size() == 2
            && attention_tile::suits_tensor_cores(device, a)
            && attention_tile::async_copy_bytes(device, a, &[a.q, a.k, a.v]).is_none()
    };
    Ok(!uses_cpu_kernels(device)
        && !by_products()
        && (a.q.dtype != DType::F64 || device.info().fp64)
        && width.max(value_width) <= MAX_HEAD_WIDTH
        && (heads * queries).max(keys) < 1 << 31
        && [AttentionKernel::Split, AttentionKernel::Queries]
            .iter()
            .all(|&entry| Tile::plain(device, a, entry).next().is_some()))
}

/// Returns queries, keys, values and mask. Without a mask the queries are passed as the mask argument, which the kernel then does not read.
fn operands<'a>(a: &FusedAttention<'a>) -> [&'a Tensor; 4] {
    [a.q, a.k, a.v, a.mask.unwrap_or(a.q)]
}

fn launch_attention(
    kind: OpKind,
    a: &FusedAttention,
    tensors: &[&Tensor],
    prepare: impl Fn(&'static ClDevice) -> Result<LaunchPlan>,
) -> Result<()> {
    let device = a.q.cl_device()?;
    let numbers = [a.causal, a.mask.is_some(), a.dropout.is_some()].map(u64::from);
    let (p, seed) = a.dropout.unwrap_or_default();
    let rescale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
    let scalars = [a.scale, p, rescale].map(Scalar::Float);
    let key = Key { kind, numbers: &numbers, exprs: &[], tensors };
    let params = Params { scalars: &scalars, seeds: &[seed], base: None };
    launch_cache::launch_cached(&key, params, || prepare(device)).map(drop)
}

/// Computes the result and the log-sum-exp of each row. Takes one launch, or two if few queries attend to many keys.
pub(crate) fn forward(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> {
    let [q, k, v, mask] = operands(a);
    let tensors = [q, k, v, mask, out, logsumexp];
    launch_attention(OpKind::Attention, a, &tensors, |device| {
        let mut shape = AttentionLaunches::new(device, a, &tensors[..5]);
        // With fewer query tiles than compute units, several work-groups share the keys of a tile, except on tensor cores (many queries).
        let (units, mut parts) = (device.info().compute_units.max(1), 1);
        let groups = |shape: &AttentionLaunches| {
            shape.groups(AttentionKernel::Forward, shape.tiles(AttentionKernel::Forward)[0])
        };
        if a.q.dtype == DType::F32 && groups(&shape) < units {
            shape = AttentionLaunches::with_copy(device, a, &tensors[..5], None);
        }
        if shape.copy.is_none() {
            parts = (4 * units).div_ceil(groups(&shape)).min(a.sizes()[2] / MIN_KEYS_PER_PART).max(1);
        }
        let (tile, kernel) = shape.kernel(if parts > 1 { AttentionKernel::Split } else { AttentionKernel::Forward })?;
        let groups = shape.groups(AttentionKernel::Forward, tile);
        let mut launch = KernelLaunch::new(kernel, groups * parts * tile.group_size(), tile.group_size());
        (0..5).for_each(|i| shape.push_operand(&mut launch, i));
        launch.push_tensor(5);
        shape.push_sizes(&mut launch, parts);
        shape.push_scalars(&mut launch);
        if parts == 1 {
            return Ok(LaunchPlan::single(device, launch));
        }
        launch.push_tensor(6);
        let (_, combine) = shape.kernel(AttentionKernel::Combine)?;
        let group = tuned_group_size(device, &combine, out.numel(), DEFAULT_GROUP_SIZE);
        let mut second = KernelLaunch::new(combine, out.numel(), group);
        shape.push_operand(&mut second, 4);
        second.push_tensor(5);
        shape.push_sizes(&mut second, parts);
        second.push_tensor(6);
        let partial = logsumexp.numel() * parts * (tile.padded_width(a.sizes()[4]) + 2);
        Ok(LaunchPlan::new(device, Some((partial, logsumexp.dtype)), [launch, second]))
    })
}

/// Computes the gradients of queries, keys and values, in two launches.
pub(crate) fn backward(a: &FusedAttention, of: &AttentionBackward) -> Result<()> {
    let ([q, k, v, mask], [dq, dk, dv]) = (operands(a), of.results);
    let tensors = [q, k, v, mask, of.out, of.grad, dq, dk, dv, of.logsumexp];
    launch_attention(OpKind::AttentionBackward, a, &tensors, |device| {
        let shape = AttentionLaunches::new(device, a, &tensors[..9]);
        let launch = |entry: AttentionKernel, operands: &[usize]| -> Result<KernelLaunch> {
            let (tile, kernel) = shape.kernel(entry)?;
            let groups = shape.groups(entry, tile);
            let mut launch = KernelLaunch::new(kernel, groups * tile.group_size(), tile.group_size());
            operands.iter().for_each(|&i| shape.push_operand(&mut launch, i));
            // Arguments: the log-sum-exp, and the scratch tensor `delta`, which the first launch writes and the second reads.
            (9..11).for_each(|i| launch.push_tensor(i));
            shape.push_sizes(&mut launch, 1);
            shape.push_scalars(&mut launch);
            Ok(launch)
        };
        let of_queries = launch(AttentionKernel::Queries, &[0, 1, 2, 3, 4, 5, 6])?;
        let of_keys = launch(AttentionKernel::Keys, &[0, 1, 2, 3, 5, 7, 8])?;
        let delta = (of.logsumexp.numel(), of.logsumexp.dtype);
        Ok(LaunchPlan::new(device, Some(delta), [of_queries, of_keys]))
    })
}

/// Returns the operands that every kernel copies to local memory: queries, keys, values and the result's gradient.
fn staged_operands<'a>(operands: &'a [&'a Tensor]) -> impl Iterator<Item = &'a Tensor> {
    operands[..3].iter().chain(operands.get(5)).copied()
}

/// The state that the launches of one attention call share.
struct AttentionLaunches<'a> {
    device: &'static ClDevice,
    a: &'a FusedAttention<'a>,
    /// Tensors `[batch.., heads, rows, columns]`: q, k, v, mask and result; in the backward pass also the gradients of the result, q, k and v.
    operands: &'a [&'a Tensor],
    /// The dims in front of the heads.
    batch: StridedDims,
    /// The bytes of one asynchronous copy to local memory on tensor cores; None without tensor cores.
    copy: Option<usize>,
    /// The number of elements per store of a work-item on tensor cores, or per load elsewhere.
    width: usize,
}

impl<'a> AttentionLaunches<'a> {
    fn new(device: &'static ClDevice, a: &'a FusedAttention<'a>, operands: &'a [&'a Tensor]) -> AttentionLaunches<'a> {
        // The kernels for tensor cores also copy the result of the forward pass to local memory.
        let result = (operands.len() > 5).then(|| operands[4]);
        let all: SmallVec<[&Tensor; 5]> = staged_operands(operands).chain(result).collect();
        AttentionLaunches::with_copy(device, a, operands, attention_tile::async_copy_bytes(device, a, &all))
    }

    /// Like [`new`](Self::new), with a given `copy`. With `None`, the kernels without tensor cores are used.
    fn with_copy(
        device: &'static ClDevice,
        a: &'a FusedAttention<'a>,
        operands: &'a [&'a Tensor],
        copy: Option<usize>,
    ) -> AttentionLaunches<'a> {
        let batch = StridedDims::new(&a.batch(), operands.iter().map(|t| &t.strides()[..t.rank() - 3]));
        let backward = operands.len() > 5;
        let staged: SmallVec<[&Tensor; 5]> = staged_operands(operands).collect();
        let results = if backward { &operands[6..] } else { &operands[4..] };
        let moved = if copy.is_some() { results } else { &staged[..] };
        let last = moved.iter().map(|t| t.shape().dims()[t.rank() - 1] as isize);
        let mut starts = moved.iter().flat_map(|t| row_starts(t)).chain(last);
        let width = match moved.iter().all(|t| t.strides()[t.rank() - 1] == 1) {
            true if copy.is_some() => {
                let piece = if a.q.dtype == DType::F32 { 4 } else { 2 };
                if starts.all(|start| start % piece == 0) { piece as usize } else { 1 }
            }
            true => vector_width(device, a.q.dtype, starts),
            false => 1,
        };
        AttentionLaunches { device, a, operands, batch, copy, width }
    }

    fn batches(&self) -> usize {
        self.batch.dims.iter().product()
    }

    fn groups(&self, entry: AttentionKernel, tile: Tile) -> usize {
        let [heads, queries, keys, ..] = self.a.sizes();
        let rows = if entry == AttentionKernel::Keys { keys } else { heads * queries };
        self.batches() * rows.div_ceil(tile.own_rows())
    }

    /// Returns the tiles that the device can use, the best tile first.
    fn tiles(&self, entry: AttentionKernel) -> Vec<Tile> {
        match self.copy {
            Some(_) => Tile::mma(self.device, self.a, entry, |tile| self.groups(entry, tile)),
            None => Tile::plain(self.device, self.a, entry).collect(),
        }
    }

    /// Returns the kernel for the best tile that can be launched. Tiles whose kernel needs too many registers for their work-group are skipped.
    fn kernel(&self, entry: AttentionKernel) -> Result<(Tile, Arc<ClKernel>)> {
        let mut made = None;
        for tile in self.tiles(entry) {
            let kernel = self.build(entry, tile)?;
            let launched = entry == AttentionKernel::Combine || tile.group_size() <= kernel.max_work_group();
            made = Some((tile, kernel));
            if launched {
                break;
            }
        }
        Ok(made.expect("there is a tile, or the call was declined"))
    }

    fn build(&self, entry: AttentionKernel, tile: Tile) -> Result<Arc<ClKernel>> {
        let [.., k, v] = self.a.sizes().map(|width| tile.padded_width(width));
        let (dtype, mask, copy) = (self.a.q.dtype, self.a.mask.map(|mask| mask.dtype), self.copy);
        let config = kernel_config! {
            "A" => dtype, "Z" => mask.unwrap_or(dtype),
            "MASK" => mask.map_or(0usize, |mask| if mask == DType::Bool { 1 } else { 2 }), "ACC" => dtype.compute(),
            "NB" => self.batch.dims.len().max(1), "DK" => k, "DV" => v,
            "" => match entry {
                AttentionKernel::Forward => "FORWARD",
                AttentionKernel::Split => "FORWARD\n#define SPLIT",
                AttentionKernel::Combine => "COMBINE",
                AttentionKernel::Queries => "QUERIES",
                AttentionKernel::Keys => "KEYS",
            },
            "" => TileMacros { tile, dtype, widest: k.max(v) }, "COPY" => copy,
            "OUT_WIDE" => copy.is_some() && self.width > 1,
            "" => copy.is_none().then_some(Vectors(dtype, self.width)), "DROPOUT" => self.a.dropout.is_some(),
        };
        config.kernel(self.device, "attention", "attention", &[if self.copy.is_some() { MMA } else { TILES }])
    }

    /// Appends operand i and its strides to the arguments.
    fn push_operand(&self, launch: &mut KernelLaunch, i: usize) {
        let t = self.operands[i];
        launch.push_tensor(i);
        let batch = &self.batch.strides[i];
        let none = batch.is_empty().then_some(0);
        let steps = batch.iter().copied().chain(none).chain(t.strides()[t.rank() - 3..].iter().copied());
        launch.push_words(steps.map(|step| step as i64));
    }

    fn push_sizes(&self, launch: &mut KernelLaunch, parts: usize) {
        let none = self.batch.dims.is_empty().then_some(1);
        let sizes = self.batch.dims.iter().copied().chain(none).chain([self.batches()]).chain(self.a.sizes());
        launch.push_words(sizes.chain([usize::from(self.a.causal), parts]).map(|n| n as i64));
    }

    /// Appends the scale, and the probability, factor and seed of dropout.
    fn push_scalars(&self, launch: &mut KernelLaunch) {
        launch.push(Argument::Scalars(3, self.a.q.dtype.compute()));
        launch.push(Argument::Seeds(1));
    }
}
