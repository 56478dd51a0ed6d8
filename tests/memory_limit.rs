//! Under a memory limit of N bytes, an operation on inputs of N / 8 bytes must succeed and use at most N bytes plus little scratch memory.
//! The test runs every operation of the catalogue, with contiguous and strided inputs. `MEMORY_LIMIT_OP=name` selects one operation.
//!
//! On the CPU device the test also limits the heap used outside the allocator, and the resident memory that the system reports.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

use claystone::ops::{self, Argument, Kind, Operation, ParameterKind};
use claystone::{DType, Device, Error, Result, Tensor};

const MIB: usize = 1 << 20;
const LIMIT_BYTES: usize = 64 * MIB;
/// The bytes of heap that may be used outside the allocator: this many in total, and this many for each thread.
const SCRATCH_BYTES: usize = 8 * MIB;
const SCRATCH_BYTES_PER_THREAD: usize = 4 * MIB;
/// The number of elements in a row.
const ROW: usize = 512;

/// Operations that may run out of memory, because they keep an 8-byte index for each element. They must still not exceed the limit.
const OUT_OF_MEMORY: [&str; 9] = [
    "masked_scatter",
    "masked_scatter_",
    "mode",
    "msort",
    "unique",
    "unique_all",
    "unique_consecutive",
    "unique_counts",
    "unique_inverse",
];

/// Operations that may also run out of memory on OpenCL devices. Sorts keep the keys and indices of two passes. Transposed 3-D
/// convolutions keep a copy in f32.
const OUT_OF_MEMORY_ON_OPENCL: [&str; 3] = ["argsort", "conv_transpose3d", "sort"];

/// An allocator that counts the heap in use and its peak, without the segments of the CPU device's allocator.
struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);
static PEAK: AtomicIsize = AtomicIsize::new(0);

/// Adds or subtracts the size. Segments are recognised and left out by their 16-byte alignment, which no vector of elements has.
fn count(layout: Layout, sign: isize) {
    if layout.align() < 16 || layout.size() < MIB {
        let change = sign * layout.size() as isize;
        let live = LIVE.fetch_add(change, Relaxed) + change;
        PEAK.fetch_max(live, Relaxed);
    }
}

// SAFETY: all calls are forwarded to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout, 1);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout, 1);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(layout, -1);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// A tensor argument of a call.
enum Input {
    /// Numbers in the tested dtype: floats in (0, 1), or integers from 1 to 100.
    Numbers(Vec<usize>),
    /// I64 indices that are below this bound.
    Index(Vec<usize>, usize),
    Mask(Vec<usize>),
    /// Ascending numbers in the tested dtype.
    Sorted(usize),
    None,
}

/// Returns the arguments of an operation, with about `n` tensor elements in total. `None` for operations that compute nothing.
fn call(op: &Operation, n: usize, dtype: DType, device: Device) -> Option<(Vec<Input>, Vec<Argument>)> {
    use Input::{Index, Mask, None as Missing, Numbers, Sorted};
    let x = |dims: &[usize]| Numbers(dims.to_vec());
    let int = |i: usize| Argument::Int(i as i64);
    let ints = |sizes: &[usize]| Argument::Ints(sizes.iter().map(|&i| i as i64).collect());
    let text = |s: &str| Argument::from(s);
    let place = || Argument::Device(device);
    let (rows, half) = (n / ROW, n / 2 / ROW);
    let side = n.isqrt();
    let index = |below: usize, dims: &[usize]| Index(dims.to_vec(), below);
    // Indices have 8 bytes in every dtype, so there are fewer of them.
    let few = n * dtype.size() / (dtype.size() + 8) / ROW;
    let pair = || vec![x(&[half, ROW]), x(&[half, ROW])];
    let indexed = || vec![x(&[few, ROW]), index(few, &[few, ROW]), x(&[few, ROW])];
    let some = || vec![x(&[half, ROW]), index(half, &[half]), x(&[half, ROW])];
    let images = |channels: usize, dims: &[usize]| {
        let plane: usize = dims.iter().product();
        x(&[&[n / channels / plane, channels][..], dims].concat())
    };
    Some(match op.name.trim_end_matches('_') {
        "empty" | "zeros" | "ones" | "rand" | "randn" => (vec![], vec![ints(&[n]), dtype.into(), place()]),
        "full" => (vec![], vec![ints(&[n]), int(1), dtype.into(), place()]),
        "randint" => (vec![], vec![int(0), int(100), ints(&[n]), dtype.into(), place()]),
        "arange" => (vec![], vec![int(0), int(n / 8), int(1), Argument::None, place()]),
        "linspace" => (vec![], vec![0.0.into(), 1.0.into(), int(n / 8), Argument::None, place()]),
        "logspace" => (vec![], vec![0.0.into(), 1.0.into(), int(n / 8), 10.0.into(), Argument::None, place()]),
        "eye" => (vec![], vec![ints(&[side, side]), dtype.into(), place()]),
        "tril_indices" | "triu_indices" => (vec![], vec![int(side / 4), int(side / 4), int(0), place()]),
        "randperm" => (vec![], vec![int(n / 8), place()]),
        "randint_like" => (vec![x(&[rows, ROW])], vec![int(0), int(100)]),
        "multinomial" => (vec![x(&[rows, ROW])], vec![int(20)]),
        _ if op.kind == Kind::View => return None,
        "cat" | "stack" | "hstack" | "vstack" | "dstack" => (pair(), vec![]),
        "column_stack" => (vec![x(&[n / 2]), x(&[n / 2])], vec![]),
        "block_diag" => (vec![x(&[side, side / 2]), x(&[side / 2, side])], vec![]),
        "diag_embed" => (vec![x(&[2 * rows, 4])], vec![]),
        "pad" => (vec![x(&[rows, ROW])], vec![ints(&[1, 2])]),
        "repeat" | "tile" => (vec![x(&[rows, ROW])], vec![ints(&[2, 1])]),
        "repeat_interleave" => (vec![x(&[rows, ROW])], vec![int(2), int(1)]),
        "repeat_interleave_tensor" => (vec![x(&[rows, ROW]), index(4, &[ROW])], vec![int(1)]),
        "roll" => (vec![x(&[rows, ROW])], vec![ints(&[3]), ints(&[1])]),
        "to_dtype" => (vec![x(&[rows, ROW])], vec![DType::F32.into()]),
        "slice_assign" => (vec![x(&[rows, ROW]), x(&[ROW])], vec![ints(&[0])]),
        "slice_scatter" => (pair(), vec![]),
        "select_scatter" => (vec![x(&[rows, ROW]), x(&[ROW])], vec![int(0), int(1)]),
        "diagonal_scatter" => (vec![x(&[rows, ROW]), x(&[ROW.min(rows)])], vec![]),
        "masked_select" => (vec![x(&[half, ROW]), Mask(vec![half, ROW])], vec![]),
        "index_select" => (vec![x(&[half, ROW]), index(half, &[half])], vec![int(0)]),
        "gather" => (vec![x(&[few, ROW]), index(ROW, &[few, ROW])], vec![int(1)]),
        "take_along_dim" => (vec![x(&[few, ROW]), index(ROW, &[few, ROW])], vec![int(1)]),
        "embedding" | "embedding_with" => (vec![x(&[half, ROW]), index(half, &[half])], vec![]),
        "one_hot" => (vec![index(8, &[n * dtype.size() / 16])], vec![int(8)]),
        "scatter" | "scatter_add" => (indexed(), vec![int(0)]),
        "scatter_reduce" => (indexed(), vec![int(0), text("amax")]),
        "scatter_value" => (vec![x(&[few, ROW]), index(few, &[few, ROW])], vec![int(0), int(1)]),
        "index_add" | "index_add_alpha" | "index_copy" => (some(), vec![int(0)]),
        "index_reduce" => (some(), vec![int(0), text("amax")]),
        "index_fill" => (vec![x(&[half, ROW]), index(half, &[half])], vec![int(0), int(1)]),
        "index" => (vec![x(&[half, ROW]), index(half, &[half])], vec![ints(&[0])]),
        "index_put" => (vec![x(&[half, ROW]), x(&[half, ROW]), index(half, &[half])], vec![ints(&[0])]),
        "take" => (vec![x(&[few * ROW]), index(few * ROW, &[few * ROW])], vec![]),
        "put" => (vec![x(&[few * ROW]), index(few * ROW, &[few * ROW]), x(&[few * ROW])], vec![true.into()]),
        "masked_scatter" => (vec![x(&[half, ROW]), Mask(vec![half, ROW]), x(&[half, ROW])], vec![]),
        "masked_fill" => (vec![x(&[half, ROW]), Mask(vec![half, ROW])], vec![int(1)]),
        "where_cond" => (vec![Mask(vec![half / 2, ROW]), x(&[half / 2, ROW]), x(&[half / 2, ROW])], vec![]),
        "round_decimals" => (vec![x(&[rows, ROW])], vec![int(1)]),
        "prelu" => (vec![x(&[rows, ROW]), x(&[1])], vec![]),
        "bincount" => (vec![x(&[n])], vec![]),
        "histc" => (vec![x(&[rows, ROW])], vec![]),
        "isin" => (vec![x(&[rows, ROW]), x(&[100])], vec![]),
        "searchsorted" => (vec![Sorted(100), x(&[rows, ROW])], vec![]),
        "bucketize" => (vec![x(&[rows, ROW]), Sorted(100)], vec![]),
        "topk" | "kthvalue" => (vec![x(&[rows, ROW])], vec![int(4)]),
        "quantile" | "nanquantile" => (vec![x(&[rows, ROW])], vec![0.5.into(), int(1)]),
        "matmul" | "mm" => (vec![x(&[half * 128, 4]), x(&[4, 4])], vec![]),
        "inner" => (vec![x(&[half * 128, 4]), x(&[4, 4])], vec![]),
        "bmm" => (vec![x(&[half / 64, 64, ROW]), x(&[half / 64, ROW, 8])], vec![]),
        "mv" => (vec![x(&[rows, ROW]), x(&[ROW])], vec![]),
        "dot" | "vdot" => (vec![x(&[n / 2]), x(&[n / 2])], vec![]),
        "outer" | "ger" => (vec![x(&[n / 16]), x(&[16])], vec![]),
        "addr" => (vec![x(&[half, ROW]), x(&[half]), x(&[ROW])], vec![]),
        "addmm" => (vec![x(&[half, ROW]), x(&[half, 8]), x(&[8, ROW])], vec![]),
        "addmv" => (vec![x(&[rows]), x(&[rows, ROW]), x(&[ROW])], vec![]),
        "baddbmm" => (vec![x(&[4, half / 4, ROW]), x(&[4, half / 4, 8]), x(&[4, 8, ROW])], vec![]),
        "addbmm" => (vec![x(&[half / 4, ROW]), x(&[4, half / 4, 8]), x(&[4, 8, ROW])], vec![]),
        "multi_dot" => (vec![x(&[half, 8]), x(&[8, ROW]), x(&[ROW, 8])], vec![]),
        "matrix_power" => (vec![x(&[n / 64, 8, 8])], vec![int(3)]),
        "kron" => (vec![x(&[half, 8]), x(&[8, 8])], vec![]),
        "cross" => (vec![x(&[n / 6, 3]), x(&[n / 6, 3])], vec![]),
        "einsum" => (vec![x(&[half, ROW]), x(&[half, ROW])], vec![text("ij,ij->i")]),
        "tensordot" => (vec![x(&[half, 4, 128]), x(&[4, 128, 3])], vec![]),
        "cdist" => (vec![x(&[half, ROW]), x(&[16, ROW])], vec![]),
        "linear" => (vec![x(&[rows, ROW]), x(&[8, ROW]), x(&[8])], vec![]),
        name if name.starts_with("scaled_dot_product_attention") => {
            let t = || x(&[n / 3 / 8192, 2, 64, 64]);
            (vec![t(), t(), t()], vec![])
        }
        "packed_attention" => (vec![x(&[n / 3 / 8192, 64, 3 * 128]), Missing], vec![int(2)]),
        "conv1d" | "conv_transpose1d" => (vec![images(8, &[1024]), x(&[8, 8, 3])], vec![]),
        "conv2d" | "conv_transpose2d" => (vec![images(8, &[32, 32]), x(&[8, 8, 3, 3])], vec![]),
        "conv3d" | "conv_transpose3d" => (vec![images(4, &[8, 16, 16]), x(&[4, 4, 3, 3, 3])], vec![]),
        "unfold2d" => (vec![images(8, &[32, 32])], vec![ints(&[2, 2]), ints(&[1, 1]), ints(&[0, 0]), ints(&[2, 2])]),
        "fold" => {
            (vec![x(&[n / 4096, 16, 256])], vec![ints(&[32, 32]), ints(&[2, 2]), ints(&[1, 1]), int(0), ints(&[2, 2])])
        }
        "max_pool2d_backward" => {
            let windows = [1, 1, few / 2, ROW / 2];
            (vec![x(&windows), x(&[1, 1, few, ROW]), index(few * ROW, &windows)], vec![ints(&[2, 2])])
        }
        name if name.contains("pool1d") => {
            (vec![x(&[1, 1, n])], vec![int(if name.starts_with("ad") { n / 2 } else { 2 })])
        }
        name if name.contains("pool2d") => (
            vec![x(&[1, 1, n / ROW, ROW])],
            vec![if name.starts_with("ad") { ints(&[rows / 2, ROW / 2]) } else { ints(&[2, 2]) }],
        ),
        name if name.contains("pool3d") => (
            vec![x(&[1, 1, rows / 16, 16, ROW])],
            vec![if name.starts_with("ad") { ints(&[rows / 32, 8, ROW / 2]) } else { ints(&[2, 2, 2]) }],
        ),
        "layer_norm" | "rms_norm" | "native_layer_norm" => (vec![x(&[rows, ROW])], vec![ints(&[ROW])]),
        "group_norm" | "native_group_norm" => (vec![images(8, &[32, 32])], vec![int(2)]),
        "instance_norm" => (vec![images(8, &[32, 32])], vec![]),
        "batch_norm" => (vec![images(8, &[32, 32]), Missing, Missing, Missing, Missing], vec![true.into()]),
        "native_batch_norm" => (vec![images(8, &[32, 32])], vec![]),
        "native_layer_norm_backward" => {
            (vec![x(&[half, ROW]), x(&[half, ROW]), x(&[half, 1]), x(&[half, 1])], vec![ints(&[ROW]), ints(&[1, 0, 0])])
        }
        "native_batch_norm_backward" | "native_group_norm_backward" => {
            let (t, grouped) = (|| x(&[n / 2 / 8192, 8, 32, 32]), op.name.contains("group"));
            let facts = || if grouped { x(&[n / 2 / 8192, 2]) } else { x(&[8]) };
            let mask = ints(&[1, 0, 0]);
            (vec![t(), t(), facts(), facts()], if grouped { vec![int(2), mask] } else { vec![mask] })
        }
        "fused_lstm_cell" => (vec![x(&[rows / 3, 4 * 128]), x(&[rows / 3, 4 * 128]), x(&[rows / 3, 128])], vec![]),
        "fused_lstm_cell_backward" => {
            (vec![x(&[rows / 4, 128]), x(&[rows / 4, 128]), x(&[rows / 4, 512]), x(&[rows / 4, 128])], vec![])
        }
        "interpolate" => (vec![images(8, &[32, 32])], vec![ints(&[40, 40]), text("linear")]),
        "pixel_shuffle" => (vec![images(8, &[32, 32])], vec![int(2)]),
        "pixel_unshuffle" => (vec![images(8, &[32, 32])], vec![int(2)]),
        "cosine_embedding_loss" => (vec![x(&[half, ROW]), x(&[half, ROW]), x(&[half])], vec![]),
        "cross_entropy" | "nll_loss" => (vec![x(&[rows, ROW]), index(ROW, &[rows])], vec![]),
        "nan_to_num" | "nan_to_num_" => (vec![x(&[rows, ROW])], vec![int(0), int(1), int(1)]),
        // The required parameters: tensors get equal shapes, and other arguments a value of their type.
        _ => {
            let required = || op.signature().parameters.iter().filter(|p| p.default.is_none());
            let tensors = required().filter(|p| p.kind == ParameterKind::Tensor).count();
            let arguments = required().filter(|p| p.kind != ParameterKind::Tensor).map(|p| match p.kind.name() {
                "float" => 0.5.into(),
                _ => int(1),
            });
            ((0..tensors).map(|_| x(&[rows / tensors, ROW])).collect(), arguments.collect())
        }
    })
}

impl Input {
    fn make(&self, dtype: DType, device: Device, strided: bool) -> Result<Option<Tensor>> {
        let (dims, below, dtype) = match self {
            Input::None => return Ok(None),
            Input::Numbers(dims) => (dims, 100, dtype),
            Input::Index(dims, below) => (dims, *below, DType::I64),
            Input::Mask(dims) => (dims, 2, DType::Bool),
            Input::Sorted(n) => {
                let top = if dtype.is_float() { 1.0 } else { *n as f64 };
                return Tensor::linspace(top / *n as f64, top, *n, device)?.to_dtype(dtype).map(Some);
            }
        };
        // Strided input: the dims are reversed, and only every other element of the first dim is used.
        let mut memory = dims.clone();
        if strided {
            memory.reverse();
            *memory.last_mut().unwrap() *= 2;
        }
        let t = Tensor::empty(&memory, (dtype, device))?;
        let values: &[f64] = &[0.37, 0.11, 0.89, 0.63, 0.05, 0.97, 0.53];
        let flat = t.reshape(&[t.numel()])?;
        for (i, &u) in values.iter().enumerate() {
            let value = match self {
                Input::Numbers(_) if dtype.is_float() => u,
                Input::Numbers(_) if dtype != DType::Bool => (1.0 + u * below as f64).floor(),
                _ => (u * below.max(1) as f64).floor().min(if dtype == DType::Bool { 1.0 } else { f64::MAX }),
            };
            if i < flat.numel() {
                flat.slice(0, Some(i as isize), None, values.len() as isize)?.fill_(value)?;
            }
        }
        if !strided {
            return Ok(Some(t));
        }
        let order: Vec<isize> = (0..dims.len() as isize).rev().collect();
        t.permute(&order)?.slice(0, None, None, 2).map(Some)
    }
}

/// Returns the peak resident memory of the process since the last call, in bytes.
fn peak_resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let kib: usize = line.split_whitespace().next().unwrap().parse().unwrap();
    _ = std::fs::write("/proc/self/clear_refs", "5");
    kib << 10
}

/// Runs one operation, and returns a message if its memory use exceeds the bounds.
fn check(op: &Operation, dtype: DType, strided: bool, device: Device) -> Result<Option<String>> {
    let elements = LIMIT_BYTES / 8 / dtype.size() / if strided { 2 } else { 1 };
    let Some((inputs, arguments)) = call(op, elements, dtype, device) else { return Ok(None) };
    device.empty_cache()?;
    let tensors = inputs.iter().map(|t| t.make(dtype, device, strided)).collect::<Result<Vec<_>>>()?;
    let tensors: Vec<Option<&Tensor>> = tensors.iter().map(Option::as_ref).collect();
    device.synchronize()?;
    let held: usize = tensors.iter().flatten().map(|t| t.storage().nbytes()).sum();
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let (resident, started) = (if device == Device::Cpu { resident() } else { 0 }, std::time::Instant::now());
    peak_resident();
    let result = ops::call(op.name, &tensors, &arguments);
    device.synchronize()?;
    let scratch = (PEAK.load(Relaxed) - before).max(0) as usize;
    let growth = peak_resident().saturating_sub(resident) + held;
    let took = started.elapsed().as_secs_f64();
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let name = format!("{} in {dtype}{} on {device}", op.name, if strided { ", strided" } else { "" });
    if std::env::var_os("MEMORY_LIMIT_TIMES").is_some() {
        println!("{took:.2} s, heap {} MiB: {name}", scratch / MIB);
    }
    Ok(match result {
        Err(Error::OutOfMemory { .. }) if device != Device::Cpu && OUT_OF_MEMORY_ON_OPENCL.contains(&op.name) => None,
        Err(Error::OutOfMemory { .. })
            if OUT_OF_MEMORY.contains(&op.name) && (device != Device::Cpu || growth <= LIMIT_BYTES + 64 * MIB) =>
        {
            None
        }
        Err(error @ Error::OutOfMemory { .. }) => {
            // Running out of memory is right if inputs and results alone exceed the limit. Their size is measured without the limit.
            device.set_memory_limit(u64::MAX)?;
            let results = ops::call(op.name, &tensors, &arguments)?;
            let bytes: usize = results.iter().map(|t| t.storage().nbytes()).sum();
            drop(results);
            device.empty_cache()?;
            device.set_memory_limit(LIMIT_BYTES as u64)?;
            (held + bytes < LIMIT_BYTES - MIB).then(|| format!("{name}: {error}; results are {} MiB", bytes / MIB))
        }
        Err(error) => Some(format!("{name}: cannot be called: {error}")),
        Ok(_) if device == Device::Cpu && scratch > SCRATCH_BYTES + threads * SCRATCH_BYTES_PER_THREAD => {
            Some(format!("{name}: {} MiB of heap beside the allocator", scratch / MIB))
        }
        Ok(_) if device == Device::Cpu && growth > LIMIT_BYTES + 64 * MIB => {
            Some(format!("{name}: {} MiB resident", growth / MIB))
        }
        Ok(_) => None,
    })
}

/// Returns the resident memory of the process, in bytes.
fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
}

#[test]
fn every_operation_stays_within_the_memory_limit() {
    let mut wrong = Vec::new();
    let only = std::env::var("MEMORY_LIMIT_OP").ok();
    let opencl = common::devices().into_iter().find(|&device| device != Device::Cpu);
    for device in [Device::Cpu].into_iter().chain(opencl) {
        device.set_memory_limit(LIMIT_BYTES as u64).unwrap();
        for (i, op) in ops::operations().iter().enumerate() {
            if only.as_deref().is_some_and(|only| only != op.name) {
                continue;
            }
            // All elementwise formulas take the same path through a backend. So each is tested in one dtype, and on OpenCL only every 16th.
            let is_row = op.row().is_some();
            if is_row && device != Device::Cpu && i % 16 > 0 && only.is_none() {
                continue;
            }
            let mut dtypes: Vec<DType> = DType::ALL.into_iter().filter(|&t| op.takes.contains(t)).collect();
            if is_row && op.name.ends_with('_') {
                // Integers cannot store float results, and bool cannot store integer results.
                dtypes.retain(|&t| t.is_float() || (t != DType::Bool && !op.takes.contains(DType::F32)));
            }
            // Temporaries of other dtypes are largest, relative to the input, for the dtype with the smallest elements.
            let smallest = dtypes.iter().copied().min_by_key(|t| t.size()).unwrap();
            let mut variants = vec![(smallest, false), (smallest, true), (dtypes[i % dtypes.len()], i % 2 == 0)];
            if is_row {
                variants = vec![variants[2]];
            } else if device != Device::Cpu {
                variants.pop(); // each dtype needs its own kernels
            }
            variants.dedup();
            for (dtype, strided) in variants {
                match check(op, dtype, strided, device) {
                    Ok(found) => wrong.extend(found),
                    Err(error) => wrong.push(format!("{} in {dtype}, inputs: {error}", op.name)),
                }
            }
        }
        device.set_memory_limit(u64::MAX).unwrap();
    }
    assert!(wrong.is_empty(), "{} of them:\n{}", wrong.len(), wrong.join("\n"));
}
