//! The operations that measure and check tuning parameters.

use crate::backend::opencl::geometry::default_group_size;
use crate::device::opencl::{ClDevice, TuningParameter};
use crate::ops::Attention;
use crate::storage::{MemoryMode, with_memory_mode};
use crate::{ConvOptions, DType, Device, Error, MaxPoolOptions, Result, Tensor};

/// An operation whose kernel uses the parameter that is measured.
#[derive(Debug, Clone, Copy)]
pub(super) enum Workload {
    /// Adds two tensors with this many elements.
    Add(usize),
    /// Like `Add`, with operands that start at an offset not aligned to vectors.
    AddUnaligned(usize),
    /// Copies a transposed matrix with this many rows and columns.
    CopyTransposed(usize, usize, DType),
    /// Multiplies `[m, k]` by `[k, n]`; the flags say whether the first and the second matrix are transposed in memory.
    MatMul([usize; 3], [bool; 2], DType),
    /// Convolves `[n, c, side, side]` into `o` channels. The sizes are `[n, c, o, side]`, then the side of the kernel.
    Convolution([usize; 4], usize),
    /// Max-pools `[n, c, side, side]` with windows of 2 x 2.
    Pooling([usize; 3]),
    /// Adds two tensors `[n, c, side, side]`.
    AddImages([usize; 3]),
    /// Computes attention of `[heads, queries, width]`, with as many keys as queries.
    Attention([usize; 3]),
    /// Computes a depthwise convolution of `[n, c, side, side]`; the last number is the side of the kernel.
    Depthwise([usize; 3], usize),
    /// Sorts each line of a `[lines, elements]` tensor.
    Sort([usize; 2], DType),
}

/// Returns workloads of usual sizes, for tuning ahead of time.
pub(super) fn usual_workloads() -> Vec<Workload> {
    let counts = || (10..=24).step_by(2).map(|log| 1usize << log);
    let sides = || [64, 256, 1024, 4096];
    let squares = || [64, 128, 256, 512, 1024];
    let thin = [[1, 1024, 1024], [32, 1024, 1024], [1024, 32, 1024], [1024, 1024, 32], [2048, 2048, 64]];
    let products = squares().map(|n| [n; 3]).into_iter().chain(thin);
    let transposed = [[false, false], [false, true], [true, false]];
    let multiplied = products.flat_map(|size| transposed.map(|t| Workload::MatMul(size, t, DType::F32)));
    let moved = sides().into_iter().map(|side| Workload::CopyTransposed(side, side, DType::F32));
    counts().map(Workload::Add).chain(counts().map(Workload::AddUnaligned)).chain(moved).chain(multiplied).collect()
}

/// Returns the workload that times a parameter's choices.
pub(super) fn timing_workload(knob: TuningParameter) -> Workload {
    use TuningParameter::*;
    match knob {
        MapGroup => Workload::Add(1 << 22),
        MapLoads => Workload::AddUnaligned(1 << 22),
        TransposeTile | TransposeLine => Workload::CopyTransposed(4096, 4096, DType::F32),
        PanelRows | PanelVectors | PanelDepth | PanelBlock => Workload::MatMul([1024; 3], [false; 2], DType::F32),
        DotSide => Workload::MatMul([512; 3], [false, true], DType::F32),
        ConvolutionImages => Workload::Convolution([16, 32, 64, 32], 3),
        PoolingImages => Workload::Pooling([16, 32, 64]),
        ProductImages => Workload::MatMul([512; 3], [false; 2], DType::F32),
        ElementwiseImages => Workload::AddImages([16, 32, 64]),
        // k = 64 is too small for tensor cores, so the tiled kernel runs.
        Tile => Workload::MatMul([2048, 2048, 64], [false; 2], DType::F32),
        MmaColumns => Workload::MatMul([1024, 2048, 1024], [false; 2], DType::F16),
        ThinGroups => Workload::MatMul([1, 4096, 4096], [false, true], DType::F32),
        AttentionRows => Workload::Attention([64, 512, 64]),
        DepthwiseColumns => Workload::Depthwise([32, 64, 56], 3),
        SortItems => Workload::Sort([1024, 4096], DType::F32),
    }
}

/// Returns workloads with sizes around multiples of the parameter's current value.
pub(super) fn edge_workloads(cl: &ClDevice, knob: TuningParameter) -> Vec<Workload> {
    use TuningParameter::*;
    let value = cl.tuned(knob);
    match knob {
        // A work-item computes four elements, so a group of `value` work-items computes `4 * value` elements.
        MapGroup => [1, value, 4 * value - 1, 4 * value, 4 * value + 1].map(Workload::Add).into(),
        MapLoads => [1, 255 * value, 256 * value, 256 * value + 1].map(Workload::AddUnaligned).into(),
        TransposeTile | TransposeLine => {
            let side = value;
            let sizes = [(side, side), (side - 1, side + 1), (2 * side, side), (2 * side + 1, 3 * side - 1)];
            let all = sizes.into_iter().flat_map(|(r, c)| [DType::F32, DType::BF16].map(|t| (r, c, t)));
            all.map(|(rows, cols, dtype)| Workload::CopyTransposed(rows, cols, dtype)).collect()
        }
        PanelRows | PanelVectors | PanelDepth | PanelBlock => {
            let [r, v, d, b] = [PanelRows, PanelVectors, PanelDepth, PanelBlock].map(|knob| cl.tuned(knob));
            let w = 16 * v;
            let sizes = [[1, w, d], [r, w, d + 1], [r + 1, w + 1, d - 1], [b + 1, 2 * w - 1, 2 * d + 1], [b, 3, 9]];
            let transposed = [false, true].map(|a| sizes.map(|size| Workload::MatMul(size, [a, false], DType::F32)));
            let half = Workload::MatMul([b - 1, 8 * w + 3, d], [false; 2], DType::F16);
            transposed.into_iter().flatten().chain([half]).collect()
        }
        DotSide => [[1, value + 1, 17], [value, value, 16], [2 * value - 1, value + 1, 33]]
            .map(|size| Workload::MatMul(size, [false, true], DType::F32))
            .into(),
        ConvolutionImages => {
            let sizes = [[1, 1, 1, 3], [2, 3, 5, 4], [1, 4, 4, 5], [3, 9, 8, 7]];
            sizes.into_iter().flat_map(|size| [1, 3].map(|k| Workload::Convolution(size, k))).collect()
        }
        PoolingImages => [[1, 1, 2], [2, 3, 5], [1, 4, 4], [3, 9, 7]].map(Workload::Pooling).into(),
        ProductImages => {
            [[1, 1, 1], [3, 5, 7], [4, 4, 4], [9, 6, 17]].map(|s| Workload::MatMul(s, [false; 2], DType::F32)).into()
        }
        ElementwiseImages => [[1, 1, 1], [2, 3, 5], [1, 4, 4], [3, 9, 7]].map(Workload::AddImages).into(),
        Tile => {
            let sizes = [[value, value, 32], [value - 1, value + 1, 33], [2 * value + 1, value, 65]];
            let transposed = [[false, false], [true, true]];
            sizes.into_iter().flat_map(|s| transposed.map(|t| Workload::MatMul(s, t, DType::F32))).collect()
        }
        MmaColumns => {
            let sizes = [[128, value, 64], [127, value + 1, 72], [65, 2 * value - 1, 1024]];
            let products = sizes.map(|s| [DType::F16, DType::F32].map(|dtype| Workload::MatMul(s, [false; 2], dtype)));
            products.into_iter().flatten().collect()
        }
        ThinGroups => {
            let sizes = [[1, 1, 1], [1, 33, 4096], [7, 64, 4097], [3, 255, 2048]];
            sizes.into_iter().flat_map(|s| [false, true].map(|t| Workload::MatMul(s, [false, t], DType::F32))).collect()
        }
        AttentionRows => {
            // Heads with a width of more than 128 do not use tensor cores.
            let sizes = [[1, value - 1, 32], [2, value, 160], [3, value + 1, 33], [1, 2 * value + 1, 256]];
            sizes.map(Workload::Attention).into()
        }
        DepthwiseColumns => {
            let sides = [3, value.max(3), value + 3, 2 * value + 3];
            sides.into_iter().flat_map(|side| [1, 3].map(|k| Workload::Depthwise([2, 3, side], k))).collect()
        }
        SortItems => {
            let tile = value * default_group_size(cl);
            let lengths = [1, tile - 1, tile, tile + 1, 2 * tile + 1, 4 * tile + 1];
            lengths.into_iter().flat_map(|n| [DType::F32, DType::I64].map(|t| Workload::Sort([2, n], t))).collect()
        }
    }
}

impl Workload {
    pub(super) fn operands(self, device: Device) -> Result<[Tensor; 2]> {
        // Small whole numbers made on the CPU, because their sums are exact.
        let make = |dims: &[usize], seed: usize, dtype: DType| -> Result<Tensor> {
            let values = (0..dims.iter().product()).map(|i: usize| ((i * i + i / 7 + seed) % 7) as f32 - 3.0);
            Tensor::from_vec(values.collect::<Vec<f32>>(), dims, Device::default())?.to_dtype(dtype)?.to_device(device)
        };
        let matrix = |rows, cols, transposed: bool, dtype| match transposed {
            true => make(&[cols, rows], rows, dtype)?.t(),
            false => make(&[rows, cols], cols, dtype),
        };
        let pair = |a: &[usize], b: &[usize]| Ok([make(a, 0, DType::F32)?, make(b, 1, DType::F32)?]);
        let twice = |t: Tensor| Ok([t.shallow_clone(), t]);
        match self {
            Workload::Add(n) => pair(&[n], &[n]),
            Workload::AddUnaligned(n) => {
                let shifted = |seed| make(&[n + 1], seed, DType::F32)?.narrow(0, 1, n);
                Ok([shifted(0)?, shifted(1)?])
            }
            Workload::CopyTransposed(rows, cols, dtype) => twice(matrix(rows, cols, true, dtype)?),
            Workload::MatMul([m, n, k], [a, b], dtype) => Ok([matrix(m, k, a, dtype)?, matrix(k, n, b, dtype)?]),
            Workload::Convolution([n, c, o, side], k) => pair(&[n, c, side, side], &[o, c, k, k]),
            Workload::Attention(dims) => pair(&dims, &dims),
            Workload::Depthwise([n, c, side], k) => pair(&[n, c, side, side], &[c, 1, k, k]),
            Workload::Sort(dims, dtype) => twice(make(&dims, 0, dtype)?),
            Workload::Pooling([n, c, side]) | Workload::AddImages([n, c, side]) => {
                pair(&[n, c, side, side], &[n, c, side, side])
            }
        }
    }

    pub(super) fn run(self, [a, b]: &[Tensor; 2]) -> Result<Tensor> {
        // Runs in memory mode Auto, whatever the process's mode, because choices apply to this mode.
        with_memory_mode(MemoryMode::Auto, || match self {
            Workload::Add(_) | Workload::AddUnaligned(_) | Workload::AddImages(_) => a.add(b),
            Workload::CopyTransposed(..) => a.contiguous(),
            Workload::MatMul(..) => a.matmul(b),
            Workload::Convolution(..) => a.conv2d(b, None, ConvOptions::default()),
            Workload::Pooling(_) => a.max_pool2d([2, 2], MaxPoolOptions::default()),
            Workload::Attention(_) => a.scaled_dot_product_attention(b, b, Attention::default()),
            Workload::Depthwise([_, groups, _], _) => a.conv2d(b, None, ConvOptions { groups, ..Default::default() }),
            Workload::Sort(..) => Ok(a.sort(-1, false)?.1),
        })
    }

    /// Returns the largest accepted difference from the CPU's results: 0 for whole numbers, more for averages with rounded weights.
    fn tolerance(self) -> f32 {
        if matches!(self, Workload::Attention(_)) { 1e-5 } else { 0.0 }
    }

    /// Fails if the device's results differ from the CPU's.
    pub(super) fn check(self, device: Device, name: &str, choice: usize) -> Result<()> {
        let cpu = Device::default();
        let values = |device: Device| -> Result<Vec<f32>> {
            self.run(&self.operands(device)?)?.to_device(cpu)?.to_dtype(DType::F32)?.to_vec()
        };
        let (ours, right) = (values(device)?, values(cpu)?);
        if ours.len() == right.len() && ours.iter().zip(&right).all(|(a, b)| (a - b).abs() <= self.tolerance()) {
            return Ok(());
        }
        let reason = format!("{self:?} gives a wrong result on {device} with {name} = {choice}: nothing is saved");
        Err(Error::invalid("tune", reason))
    }
}
