//! Nonzero and masked select on OpenCL: `kernels/nonzero.cl`. The first launch counts the nonzero elements of each chunk of the mask,
//! and the host reads the counts to size the result. From the counts, the second launch computes where each chunk begins in the result.

use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/nonzero.cl");

/// The number of elements that a GPU work-item reads at a time.
const READS_PER_ITEM: usize = 16;
/// The minimum number of elements of a CPU work-item.
const MIN_CPU_CHUNK_LEN: usize = 1 << 12;

/// The output of one launch.
enum NonzeroStage<'a> {
    Count,
    /// Writes the indices of each nonzero element as a row. The indices are for a tensor of these sizes.
    Rows(&'a [usize]),
    /// Writes the element of this tensor at each nonzero position of the mask.
    Elements(&'a Tensor),
}

/// Returns the indices of the nonzero elements of `mask`, in row-major order, one row per element. The indices are for a tensor of the
/// sizes `dims`. The mask must not be empty.
pub(crate) fn nonzero_indices(mask: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let counts = ChunkCounts::new(mask)?;
    let out = Tensor::empty_with_shape([counts.total, dims.len()], DType::I64, mask.device())?;
    counts.fill(&NonzeroStage::Rows(dims), &out)
}

/// Returns the elements of `x` where `mask` is not zero, in row-major order. `x` and `mask` have the same shape and must not be empty.
pub(crate) fn masked_select(x: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let counts = ChunkCounts::new(mask)?;
    let out = Tensor::empty_with_shape(counts.total, x.dtype, x.device())?;
    counts.fill(&NonzeroStage::Elements(x), &out)
}

/// The number of nonzero elements of each chunk of a mask.
struct ChunkCounts<'a> {
    device: &'static ClDevice,
    mask: &'a Tensor,
    chunk: usize,
    counts: Tensor,
    total: usize,
}

impl ChunkCounts<'_> {
    /// Counts the nonzero elements on the device, and waits until the counts are on the host.
    fn new(mask: &Tensor) -> Result<ChunkCounts<'_>> {
        let (device, n) = (mask.cl_device()?, mask.numel());
        let units = device.info().compute_units.max(1);
        let (least, most) = match device.info().kind {
            DeviceKind::Cpu => (MIN_CPU_CHUNK_LEN, 4 * units),
            _ => (READS_PER_ITEM * default_group_size(device), 8 * units),
        };
        let chunk = n.div_ceil(most).next_multiple_of(least);
        let counts = Tensor::empty_with_shape(n.div_ceil(chunk), DType::U32, mask.device())?;
        let mut made = ChunkCounts { device, mask, chunk, counts, total: 0 };
        made.launch(&NonzeroStage::Count, &made.counts)?;
        made.total = match made.counts.storage.simulated_count("nonzero", n) {
            Some(largest) => largest,
            None => made.counts.to_vec::<u32>()?.iter().map(|&n| n as usize).sum(),
        };
        Ok(made)
    }

    fn fill(&self, stage: &NonzeroStage, out: &Tensor) -> Result<Tensor> {
        if self.total > 0 {
            self.launch(stage, out)?;
        }
        Ok(out.shallow_clone())
    }

    fn launch(&self, stage: &NonzeroStage, out: &Tensor) -> Result<()> {
        let (mask, n, chunks) = (self.mask, self.mask.numel(), self.counts.numel());
        let cpu = self.device.info().kind == DeviceKind::Cpu;
        let group = default_group_size(self.device);
        let local = if cpu { 1 } else { group };
        let axes = |t: &Tensor| {
            let dims = StridedDims::new(mask.shape(), [t.strides()]);
            (dims.dims.len().max(1), dims_words(&dims))
        };
        let (rank, strided) = axes(mask);
        let (from_rank, from) = if let NonzeroStage::Elements(x) = stage { axes(x) } else { Default::default() };
        let (name, row, element) = match *stage {
            NonzeroStage::Count => ("COUNT", None, None),
            NonzeroStage::Rows(dims) => ("ROWS", Some(dims.len()), None),
            NonzeroStage::Elements(x) => ("ELEMENTS", None, Some(bits_type(x.dtype.size()))),
        };
        let wide = needs_64_bit([n + self.chunk]);
        // A vector comparison gives integers of the same size as the compared elements.
        let truth = offset_type(mask.dtype.compute() != Compute::F32);
        let config = kernel_config! {
            "A" => mask.dtype, "NK" => rank, "IDX" => index_type(wide), "GROUP" => group, "MASK" => truth, "" => name,
            "RANK" => row, "NV" => element.map(|_| from_rank), "V" => element,
        };
        let kernel = config.kernel(self.device, "count", "count", &[STRIDED_DIMS, TEMPLATE])?;
        let sizes: SmallVec<[u64; 8]> = match stage {
            NonzeroStage::Rows(dims) => dims.iter().map(|&n| n as u64).collect(),
            _ => SmallVec::new(),
        };
        let v = if let NonzeroStage::Elements(x) = stage { Some(x.device_view()?) } else { None };
        let (x, counts, y) = (mask.device_view()?, self.counts.device_view()?, out.device_view()?);
        let mut args: SmallVec<[Arg; 16]> = SmallVec::from_slice(&args![x, counts; &strided[..], n, self.chunk]);
        if matches!(stage, NonzeroStage::Count) {
            return self.device.launch(&kernel, &args, &[chunks * local], &[local]);
        }
        match &v {
            Some(v) => args.extend(args![y, v; &from[..], self.total]),
            None => args.extend(args![y; &sizes[..], self.total]),
        }
        self.device.launch(&kernel, &args, &[chunks * local], &[local])
    }
}
