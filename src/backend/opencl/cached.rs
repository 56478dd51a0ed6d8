//! Attention over a cache of keys and values: `kernels/cached_attention.cl`. Takes one launch to store the new rows and attend to the cache; a launch
//! more to store many new rows, and to join partial results on devices without FENCE.

use crate::backend::opencl::gemm::uses_cpu_kernels;
use crate::backend::opencl::prelude::*;
use crate::backend::problem::cached::{CacheType, CachedAttention};
use crate::device::opencl::ARRIVAL_COUNTERS;

const TEMPLATE: &str = include_str!("../../../kernels/cached_attention.cl");

/// The maximum number of rows for which a work-group reads the keys once.
const MAX_ROWS: usize = 8;
/// The work-group size on GPUs.
const GPU_THREADS: usize = 128;
/// The maximum number of adjacent work-items that read a key.
const MAX_TEAM: usize = 4;
/// The limits of the number of keys of a part. On CPUs, whose launches take longer, a part has the maximum.
const MIN_KEYS: usize = 64;
const MAX_KEYS: usize = 256;
const MAX_CPU_KEYS: usize = 1024;

/// How a launch is distributed over work-groups.
struct CachedSchedule {
    /// The number of rows of a work-group, and the number of work-groups for the rows of a head of keys.
    rows: usize,
    passes: usize,
    threads: usize,
    team: usize,
    /// The number of elements of a vector load, and of a vector of weights.
    width: usize,
    wide: usize,
    /// The number of keys of a part, and the number of parts.
    keys: usize,
    parts: usize,
}

impl CachedSchedule {
    fn choose(device: &ClDevice, a: &CachedAttention) -> CachedSchedule {
        let ([batch, heads, capacity, width], cache) = (a.cache[0].sizes(), a.cache[0]);
        let (cpu, all_rows) = (uses_cpu_kernels(device), a.len() * a.group());
        let vector = match (cpu, cache.kind) {
            (true, _) => 16,
            (false, CacheType::Q8_0) => 8,
            (false, kind) => {
                vector_width(device, kind.dtype(), a.cache.iter().flat_map(|rows| row_starts(&rows.tensor)))
            }
        };
        let vector = if width.is_multiple_of(vector) { vector } else { 1 };
        let threads = if cpu { 1 } else { max_group_size(device).min(GPU_THREADS) };
        let mut rows = all_rows.min(MAX_ROWS);
        let mut team = if cpu { 1 } else { (width / vector).next_power_of_two().min(MAX_TEAM) };
        let groups = batch * heads * all_rows.div_ceil(rows);
        let fair = (capacity * groups).div_ceil(4 * device.info().compute_units.max(1)).next_power_of_two();
        let mut keys =
            if cpu { capacity.next_multiple_of(16).min(MAX_CPU_KEYS) } else { fair.clamp(MIN_KEYS, MAX_KEYS) };
        // Local memory holds the queries, the scores, a vector and two numbers for each work-item.
        while 4 * (rows * width + rows * keys * team + threads * (vector + 2) + 2 * rows)
            > declarable_local_memory(device)
        {
            match (team, keys) {
                (2.., _) => team /= 2,
                (_, 33..) => keys = (keys / 2).next_multiple_of(16),
                _ if rows > 1 => rows /= 2,
                _ => break,
            }
        }
        let wide = if cpu { 16 } else { 1 };
        let (passes, parts) = (all_rows.div_ceil(rows), capacity.div_ceil(keys));
        CachedSchedule { rows, passes, threads, team, width: vector, wide, keys, parts }
    }
}

pub(crate) fn attend(a: &CachedAttention) -> Result<()> {
    let ([k, v], [q, out]) = (a.cache.map(|rows| &rows.tensor), a.attend.unwrap_or(a.rows));
    let tensors = [a.rows[0], a.rows[1], k, v, a.position, q, out];
    let numbers = [a.attend.is_some().into()];
    let key = Key { kind: OpKind::CachedAttention, numbers: &numbers, exprs: &[], tensors: &tensors };
    let scale = [Scalar::Float(a.scale)];
    launch_cache::launch_cached(&key, Params::from_scalars(&scale), || make_plan(a, &tensors)).map(drop)
}

fn make_plan(a: &CachedAttention, tensors: &[&Tensor; 7]) -> Result<LaunchPlan> {
    let device = a.position.cl_device()?;
    let schedule = CachedSchedule::choose(device, a);
    let ([batch, heads, capacity, width], kind) = (a.cache[0].sizes(), a.cache[0].kind);
    let CachedSchedule { rows, passes, threads, parts, .. } = schedule;
    let units = batch * heads * passes;
    let launch = |[stores, attend, join]: [bool; 3]| {
        let config = kernel_config! {
            "A" => a.rows[0].dtype, "B" => kind.dtype(), "Q8" => kind == CacheType::Q8_0, "WIDTH" => width, "R" => rows,
            "T" => threads, "TEAM" => schedule.team, "VEC" => schedule.width, "WIDE" => schedule.wide,
            "KEYS" => schedule.keys, "PARTS" => parts > 1, "STORES" => stores, "ATTEND" => attend, "JOIN" => join,
            "IDX" => index_type(false),
        };
        let kernel = config.kernel(device, "cached_attention", "attention", &[STRIDED_DIMS, TEMPLATE])?;
        // A launch that only stores rows has one unit per head, and a launch that only joins has one work-group per unit.
        let passes = if attend || join { passes } else { 1 };
        let groups = batch * heads * passes * if stores || attend { parts } else { 1 };
        let mut launch = KernelLaunch::new(kernel, groups * threads, threads);
        for (i, t) in tensors.iter().enumerate() {
            launch.push_tensor(i);
            if ![2, 3, 4].contains(&i) {
                launch.push_words(t.strides().iter().map(|&step| step as i64));
            }
        }
        launch.push_tensor(if a.attend.is_some() { tensors.len() } else { 0 });
        let step = a.position_step() as usize;
        launch.push_words([heads, capacity, a.len(), step, a.group(), passes, parts].map(|n| n as i64));
        launch.push(Argument::Scalars(1, Compute::F32));
        launch.push(Argument::Faults);
        if attend && join && parts > 1 {
            launch.push(Argument::Arrivals);
            launch.push(Argument::FirstArrival);
        }
        Ok::<_, Error>(launch)
    };
    // Many rows are stored first, because several work-groups read each of the new rows.
    let fused = a.attend.is_some() && passes == 1;
    let joins = parts == 1 || units <= ARRIVAL_COUNTERS && device.has_fence();
    let mut phases: SmallVec<[[bool; 3]; 3]> = SmallVec::new();
    phases.extend((!fused).then_some([true, false, false]));
    if a.attend.is_some() {
        phases.push([fused, true, joins]);
        phases.extend((!joins).then_some([false, false, true]));
    }
    let launches = phases.into_iter().map(launch).collect::<Result<Vec<_>>>()?;
    let partial = a.attend.map(|_| (units * parts * rows * (width + 2), DType::F32));
    Ok(LaunchPlan::new(device, partial, launches))
}
