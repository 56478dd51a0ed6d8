//! Recurrences of recurrent layers on GPUs: `kernels/recurrence.cl`. One launch computes all time steps.

use crate::backend::opencl::gemm::uses_cpu_kernels;
use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/recurrence.cl");

/// The maximum work-group size. Each work-item then has 128 registers on NVIDIA GPUs.
const MAX_THREADS: usize = 512;
/// The maximum size of a weight, in bytes. Every work-group reads the whole weight in every step, so larger weights take longer than products.
const MAX_WEIGHT_BYTES: usize = 512 << 10;
/// The number of registers for a part of the weight: in an f32 backward pass of at most two sequences per work-group, and otherwise. Compilers
/// spill other registers if there are more.
const WEIGHT_REGISTERS: [usize; 2] = [64, 32];
/// The maximum number of sequences of a work-group.
const MAX_SEQUENCES: usize = 8;
/// The number of work-items that share a row of the weight, in the forward pass.
const TEAM: usize = 8;

/// Computes a pass in one launch. Returns false on CPUs, whose caches hold the operands of products, for f64, and for large weights.
pub(crate) fn run(pass: &Recurrence) -> Result<bool> {
    let (device, dtype) = (pass.weight.cl_device()?, pass.weight.dtype);
    let ([n, total], h, sums) = (pass.rows(), pass.hidden(), pass.weight.shape().dims()[0]);
    let fits = dtype != DType::F64 && sums * h * dtype.size() <= MAX_WEIGHT_BYTES && h <= max_group_size(device);
    if uses_cpu_kernels(device) || !fits || needs_64_bit([(n + total) * 4 * h]) {
        return Ok(false);
    }
    let tensors = pass.tensors();
    let numbers = [pass.cell as u64, pass.reverse.into(), pass.kept.is_some().into(), pass.starts.is_some().into()];
    let backward = matches!(pass.pass, Pass::Backward { .. });
    let numbers = [numbers[0], numbers[1], numbers[2], numbers[3], backward.into()];
    let key = Key { kind: OpKind::Recurrence, numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch_cached(&key, Default::default(), || make_plan(pass, &tensors, backward))?;
    Ok(true)
}

fn make_plan(pass: &Recurrence, tensors: &[&Tensor], backward: bool) -> Result<LaunchPlan> {
    let (device, weight) = (pass.weight.cl_device()?, pass.weight);
    let ([n, total], h, sums) = (pass.rows(), pass.hidden(), weight.shape().dims()[0]);
    let width = vector_width(device, weight.dtype, row_starts(weight));
    let threads = sums.next_multiple_of(32).min(MAX_THREADS).min(max_group_size(device)).max(h / width);
    let lanes = h / width;
    // Local memory holds the states and the sums, and on the way to the sums the work-items' own sums.
    let local = |r: usize| 4 * (r * (h + sums) + if backward { threads / lanes * r * h } else { TEAM * threads });
    let mut sequences = n.div_ceil(device.info().compute_units.max(1)).next_power_of_two().min(MAX_SEQUENCES);
    while sequences > 1 && local(sequences) > declarable_local_memory(device) {
        sequences /= 2;
    }
    let registers = WEIGHT_REGISTERS[usize::from(!backward || sequences > 2 || weight.dtype != DType::F32)];
    let per_vector = (width * weight.dtype.size()).div_ceil(4);
    let (vectors, unit) = match backward {
        true => (sums.div_ceil(threads / lanes), 1),
        false => (lanes.div_ceil(TEAM), TEAM),
    };
    let config = kernel_config! {
        "" => element_types(weight.dtype, false), "" => Vectors(weight.dtype, width), "H" => h, "R" => sequences,
        "T" => threads, "UNITS" => vectors.min(registers / (per_vector * unit)),
        "" => ["TANH", "RELU", "LSTM", "GRU"][pass.cell as usize], "BACKWARD" => backward,
        "KEEP" => pass.kept.is_some(), "PACKED" => pass.starts.is_some(),
    };
    let kernel = config.kernel(device, "recurrence", "recurrence", &[STRIDED_DIMS, VECTOR_ACCESS, TEMPLATE])?;
    let mut launch = KernelLaunch::new(kernel, n.div_ceil(sequences) * threads, threads);
    (0..tensors.len()).for_each(|k| launch.push_tensor(k));
    launch.push_words([pass.steps(), n, total, usize::from(pass.reverse)].map(|n| n as i64));
    Ok(LaunchPlan::single(device, launch))
}
