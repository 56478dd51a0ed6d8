//! Elementwise launches on OpenCL: chooses a form of `kernels/elementwise.cl` and prepares its arguments.

mod source;

use std::cell::RefCell;

use crate::backend::opencl::image;
use crate::backend::opencl::prelude::*;
use crate::device::capture;
use crate::device::cpu::streaming;
use crate::device::opencl::MAX_TUNED_GROUP_ITEMS;

/// The maximum number of bytes of local memory that tiles may take.
const MAX_TILE_BYTES: usize = 32 << 10;

/// The number of adjacent elements whose random numbers are computed together: the macro `DRAWN` in `kernels/random.cl`.
pub(crate) const RANDOM_BLOCK_LEN: usize = 64;

/// How a work-item accesses an operand.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum MemoryAccess {
    Element,
    /// As a vector of contiguous elements.
    Vector,
    /// Element by element, through a tile that is in local memory on GPUs and in private memory on CPUs.
    Tile,
}

/// An operand of the kernel, and how the kernel accesses the operand.
#[derive(Clone, Copy, Hash)]
struct MapOperand {
    dtype: DType,
    /// How the operand is indexed. The indexing is compiled into the kernel, so that contiguous operands and scalars need no index arithmetic.
    kind: OperandKind,
    access: MemoryAccess,
    /// Whether the expressions read the operand. Inputs that the expressions do not read are not passed to the kernel.
    used: bool,
}

impl MapOperand {
    /// True if the operand's offset is computed from dims and strides.
    fn is_strided(&self) -> bool {
        self.kind == OperandKind::Strided
    }
}

type MapOperands = SmallVec<[MapOperand; 6]>;

/// The configuration of an elementwise kernel, without the formulas.
#[derive(Hash)]
struct MapConfig {
    compute: Compute,
    rank: usize,
    wide: bool,
    /// Whether seeds are relative to [`Params::base`](crate::backend::problem::map::Params::base), which a graph's replay advances.
    has_base: bool,
    form: Form,
    /// The work-group size for which the tiled form is compiled; 0 for the other forms.
    tile_group: usize,
    operands: MapOperands,
}

/// The form of the kernel; see `kernels/elementwise.cl`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Form {
    /// Each work-item computes `per_item` elements, one by one.
    Scalar { per_item: usize },
    /// Each work-item computes `RANDOM_BLOCK_LEN` adjacent elements, whose random numbers are computed together, in vectors. Used on CPUs.
    Drawn,
    /// Each work-item computes a vector of `width` elements.
    Vector {
        width: usize,
        /// Whether results that exceed the cache are written with non-temporal stores.
        nontemporal: bool,
    },
    /// Each work-group computes a tile of `side` elements of dim `dim` by `across` elements of the innermost dim. CPUs move a tile line by line;
    /// `lines` holds whether they write results that exceed the cache with non-temporal stores.
    Tiled { side: usize, across: usize, dim: usize, lines: Option<bool> },
}

/// A function that is called for each launch of formulas that was recorded as a single command, with the formulas and the command's number.
type FormulaSink = Box<dyn FnMut(&Formulas, usize)>;

thread_local! {
    /// The sink of this thread's current capture.
    pub(crate) static FORMULA_SINK: RefCell<Option<FormulaSink>> = const { RefCell::new(None) };
}

/// Launches formulas. During a capture, also passes them to [`FORMULA_SINK`], unless copies of operands made the launch take several commands.
pub(crate) fn launch_or_record(formulas: &Formulas) -> Result<()> {
    if !capture::is_capturing(formulas.outputs[0].device()) {
        return launch_formulas(formulas);
    }
    let command = capture::command_count();
    launch_formulas(formulas)?;
    if capture::command_count() == command + 1 {
        FORMULA_SINK.with_borrow_mut(|sink| sink.iter_mut().for_each(|record| record(formulas, command)));
    }
    Ok(())
}

/// Launches the cached plan for these formulas and tensor layouts. If there is no cached plan, makes one.
pub(crate) fn launch_formulas(formulas: &Formulas) -> Result<()> {
    if image::elementwise(formulas)? {
        return Ok(());
    }
    let Formulas { inputs, params, program, outputs, .. } = *formulas;
    let tensors: SmallVec<[&Tensor; 10]> = inputs.iter().chain(outputs).copied().chain(params.base).collect();
    let in_place = in_place(inputs.iter().copied(), outputs);
    let numbers = &[in_place.into()];
    let key = Key { kind: OpKind::Map, numbers, exprs: program.exprs(), tensors: &tensors };
    // If an input overlaps an output at other elements, a copy of the input is read, and the plan for that copy cannot be cached.
    let slot = match !in_place || inputs.iter().all(|t| can_overwrite_elementwise(t, outputs)) {
        true => match launch_cache::find_plan(&key) {
            Ok(entry) => return entry.plan.launch(&tensors, params),
            Err(slot) => Some(slot),
        },
        false => None,
    };
    formulas.checked(true, |launch, copied| {
        let written = outputs.iter().copied();
        let tensors: SmallVec<[&Tensor; 8]> = launch.inputs.iter().chain(written).chain(params.base).collect();
        let run = |plan: &LaunchPlan| plan.launch(&tensors, params);
        let (plan, may_keep) = outputs[0].cl_device()?.launch_on_trial(|| make_plan(launch), run)?;
        if let Some(slot) = slot.filter(|_| !copied && may_keep) {
            slot.insert_plan(&key, plan);
        }
        Ok(())
    })
}

pub(crate) fn make_plan(launch: &Launch) -> Result<LaunchPlan> {
    let device = launch.outputs[0].cl_device()?;
    let gpu = device.info().kind != DeviceKind::Cpu;
    let tensors: SmallVec<[&Tensor; 6]> = launch.inputs.iter().chain(launch.outputs.iter().copied()).collect();
    let inputs = launch.inputs.len();
    // Reorders dims to match the results' strides. Formulas with seeds keep their order, because random numbers depend on row-major positions.
    let reordered = if gpu && launch.program.seeds() == 0 { launch.strided.reordered_for(inputs) } else { None };
    let strided = reordered.as_ref().unwrap_or(&launch.strided);
    let mut operands: MapOperands = (0..tensors.len())
        .map(|k| MapOperand {
            dtype: tensors[k].dtype,
            kind: match OperandKind::classify_dims(strided, k) {
                OperandKind::RowBroadcast(_) => OperandKind::Strided,
                kind => kind,
            },
            access: MemoryAccess::Element,
            used: k >= inputs || launch.program.exprs().iter().any(|e| e.uses_input(k)),
        })
        .collect();
    let count = launch.outputs[0].numel();
    let nontemporal = !gpu && uses_nontemporal_stores(launch);
    // PoCL vectorises function calls across work-items, but not loads and stores. So only formulas without function calls need vectors.
    let form = match gpu || !launch.program.calls_functions() {
        _ if !gpu && launch.program.seeds() > 0 => Some(Form::Drawn),
        true => choose_vector_form(strided, &tensors, nontemporal, &mut operands)
            .or_else(|| choose_tiled_form(device, strided, launch, nontemporal, &mut operands)),
        false => None,
    };
    // The number of bytes of one element of each operand together.
    let bytes = operands.iter().filter(|o| o.used).map(|o| o.dtype.size()).sum();
    let class = SizeClass::from_sizes([count, bytes]);
    let form = form.unwrap_or_else(|| Form::Scalar {
        per_item: if gpu { device.tuned_for(TuningParameter::MapLoads, class) } else { 1 },
    });
    let most = max_group_size(device);
    let local = match form {
        Form::Tiled { .. } if !gpu => 1,
        // The tiled form is compiled for a work-group of this size. The other forms accept any size.
        Form::Tiled { .. } => device.tuned_for(TuningParameter::MapGroup, class).min(most),
        _ => device.tuned(TuningParameter::MapGroup).min(most),
    };
    let has_strides = operands.iter().any(|o| o.is_strided());
    let rank = if has_strides { strided.dims.len() } else { 0 };
    // The index type must hold the positions past the end in the last work-group. If these wrapped around, in-place results would be computed
    // twice.
    let wide = count >= u32::MAX as usize - MAX_VECTOR_BYTES.max(RANDOM_BLOCK_LEN) * MAX_TUNED_GROUP_ITEMS;

    let tile_group = if let Form::Tiled { .. } = form { local } else { 0 };
    let (compute, has_base) = (launch.compute, launch.base.is_some());
    let config = MapConfig { compute, rank, wide, has_base, form, tile_group, operands };
    let key = KernelKey::new("elementwise", &config, launch.program.exprs());
    let source = || source::generate_source(device, launch, &config);
    let kernel = get_or_build_kernel(device, key, "elementwise", source)?;
    let operands = &config.operands;

    let (counts, items): (SmallVec<[usize; 2]>, _) = match form {
        Form::Tiled { side, across, dim, .. } => {
            let (columns, rows) = (strided.dims[rank - 1], strided.dims[dim]);
            let (across, down) = (columns.div_ceil(across), rows.div_ceil(side));
            (SmallVec::from_slice(&[across, down]), across * down * (count / columns / rows) * local)
        }
        Form::Drawn => (SmallVec::from_slice(&[count]), count.div_ceil(RANDOM_BLOCK_LEN)),
        Form::Vector { width: each, .. } | Form::Scalar { per_item: each } => {
            (SmallVec::from_slice(&[count]), count.div_ceil(each))
        }
    };
    // The driver may limit the work-group size of kernels that do not declare a size.
    let local = match form {
        Form::Tiled { .. } => clamp_group_size(&kernel, local),
        _ => tuned_group_size(device, &kernel, items, local),
    };
    let mut kernel_launch = KernelLaunch::new(kernel, items, local);
    operands.iter().enumerate().filter(|(_, o)| o.used).for_each(|(k, _)| kernel_launch.push_tensor(k));
    if has_strides {
        // Fills in the struct `layout_t` of the generated source.
        let strides = strided.strides.iter().flatten().map(|&s| s as i64);
        kernel_launch.push_words(strided.dims.iter().map(|&d| d as i64).chain(strides));
    }
    kernel_launch.push(Argument::Scalars(launch.program.scalars(), launch.compute));
    kernel_launch.push(Argument::Seeds(launch.program.seeds()));
    if launch.base.is_some() {
        kernel_launch.push_tensor(operands.len());
    }
    if launch.program.can_fault(launch.compute) {
        kernel_launch.push(Argument::Faults);
    }
    kernel_launch.push_fixed(counts.into_iter().map(|n| if wide { Arg::from(n) } else { Arg::from(n as u32) }));
    Ok(LaunchPlan::single(device, kernel_launch))
}

/// True if a CPU should use non-temporal stores. In-place operations should not use them, because their destination is already in the cache.
fn uses_nontemporal_stores(launch: &Launch) -> bool {
    let bytes = |t: &Tensor| t.numel() * t.dtype.size();
    let results = launch.outputs.iter().map(|t| bytes(t)).sum();
    let all = launch.inputs.iter().map(bytes).sum::<usize>() + results;
    !in_place(launch.inputs.iter(), launch.outputs) && streaming::should_stream(results, all)
}

/// Chooses the vector form, in which the widest operand is accessed 16 bytes at a time. Requires that every operand's innermost stride
/// is 1 or 0, and that its offset and other strides are multiples of the vector length. Returns None otherwise.
fn choose_vector_form(
    strided: &StridedDims,
    tensors: &[&Tensor],
    nontemporal: bool,
    operands: &mut MapOperands,
) -> Option<Form> {
    let (&inner, outer) = strided.dims.split_last()?;
    let step = |k: usize| strided.strides[k][outer.len()];
    let largest =
        operands.iter().enumerate().filter(|(k, o)| o.used && step(*k) != 0).map(|(_, o)| o.dtype.size()).max()?;
    let width = MAX_VECTOR_BYTES / largest;
    let fits = |k: usize| match step(k) {
        0 => true,
        1 => {
            let whole = |s: &isize| s.unsigned_abs().is_multiple_of(width);
            tensors[k].layout.offset.is_multiple_of(width) && strided.strides[k][..outer.len()].iter().all(whole)
        }
        _ => false,
    };
    // If there is only one dim, the last vector may be incomplete: the kernel computes that tail element by element.
    if !(outer.is_empty() || inner.is_multiple_of(width)) || !(0..operands.len()).all(|k| !operands[k].used || fits(k))
    {
        return None;
    }
    for (_, operand) in operands.iter_mut().enumerate().filter(|(k, o)| o.used && step(*k) == 1) {
        operand.access = MemoryAccess::Vector;
    }
    Some(Form::Vector { width, nontemporal })
}

/// Chooses the tiled form if the results are contiguous along the innermost dim, and some inputs are contiguous along another dim; otherwise None.
fn choose_tiled_form(
    device: &ClDevice,
    strided: &StridedDims,
    launch: &Launch,
    nontemporal: bool,
    operands: &mut MapOperands,
) -> Option<Form> {
    let (inputs, last) = (launch.inputs.len(), strided.dims.len().checked_sub(1)?);
    if launch.program.seeds() > 0 || (inputs..operands.len()).any(|k| strided.strides[k][last] != 1) {
        return None;
    }
    let transposed = |k: usize, d: usize| {
        operands[k].used && strided.strides[k][d] == 1 && !matches!(strided.strides[k][last], 0 | 1)
    };
    // If one of the two dims is short, most of a tile would be unused.
    let dim = (0..last)
        .find(|&d| strided.dims[d] >= 8 && strided.dims[last] >= 8 && (0..inputs).any(|k| transposed(k, d)))?;
    let size: usize = (0..inputs).filter(|&k| transposed(k, dim)).map(|k| operands[k].dtype.size()).sum();
    let info = device.info();
    let class = SizeClass::from_sizes([strided.dims[dim], strided.dims[last], size]);
    let (side, lines) = match info.kind {
        DeviceKind::Cpu => (device.tuned_for(TuningParameter::TransposeLine, class), Some(nontemporal)),
        _ => {
            // The size of a tile includes the padding of columns that the generated source adds.
            let fits =
                |side: &usize| side * (side + (32 / side).max(1)) * size <= MAX_TILE_BYTES.min(info.local_memory);
            let sides = [device.tuned_for(TuningParameter::TransposeTile, class), 32, 16].into_iter().filter(fits);
            // With too few large tiles, most of the device would be idle.
            let count = strided.dims.iter().product::<usize>();
            let busy = |side: &usize| side * side * info.compute_units <= count;
            (sides.clone().find(busy).or_else(|| sides.min())?, None)
        }
    };
    // If the innermost dim is shorter than a tile, tiles become narrower and get more rows.
    let (side, across) = match strided.dims[last].next_power_of_two() {
        short if lines.is_none() && short < side => {
            ((side * side / short).min(strided.dims[dim].next_power_of_two().max(side)), short)
        }
        _ => (side, side),
    };
    let tiled: SmallVec<[bool; 6]> = (0..operands.len()).map(|k| k < inputs && transposed(k, dim)).collect();
    for (operand, tiled) in operands.iter_mut().zip(tiled) {
        operand.access = if tiled { MemoryAccess::Tile } else { MemoryAccess::Element };
        if operand.kind == OperandKind::Contiguous {
            operand.kind = OperandKind::Strided;
        }
    }
    Some(Form::Tiled { side, across, dim, lines })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::device::opencl;

    /// A formula reads only one of two inputs. The unused input has a wider dtype, which must not matter.
    #[test]
    fn unread_inputs_may_have_a_wider_dtype() {
        for device in (0..opencl::count()).map(Device::OpenCL) {
            let a = Tensor::arange(0, 40, 1, device).unwrap();
            let (b, out) = (a.to_dtype(DType::U8).unwrap(), a.to_dtype(DType::U8).unwrap());
            Tensor::map_into(&[&a, &b], &[], &[&out], |x, _| vec![&x[1] + 1.0]).unwrap();
            assert_eq!(out.to_vec::<u8>().unwrap(), (1..41).collect::<Vec<u8>>());
        }
    }

    /// Strided copies must keep all bits, even those of quiet NaNs. NaNs in computations stay NaNs, but may change bits.
    #[test]
    fn copies_keep_the_bits_of_nans() {
        let bits: Vec<half::bf16> =
            (0..2 * 72u16).map(|i| half::bf16::from_bits(0xffc0 - i % 64 * 0x400 + i % 64)).collect();
        for device in (0..opencl::count()).map(Device::OpenCL) {
            let rows = Tensor::from_slice(&bits, [2, 72], device).unwrap().narrow(1, 0, 64).unwrap();
            let (copy, negative) = (rows.contiguous().unwrap(), rows.neg().unwrap());
            let of = |t: &Tensor| t.to_vec::<half::bf16>().unwrap();
            let right: Vec<half::bf16> = [&bits[..64], &bits[72..136]].concat();
            assert!(of(&copy).iter().zip(&right).all(|(a, b)| a.to_bits() == b.to_bits()), "{device}");
            assert!(of(&negative).iter().zip(&right).all(|(a, b)| a.is_nan() == b.is_nan()), "{device}");
        }
    }

    /// For results larger than the cache, CPUs use non-temporal stores, except in place. Both ways must give the CPU backend's results.
    #[test]
    fn results_larger_than_the_cache_equal_the_cpu() {
        let n = (streaming::STREAMING_MIN_BYTES / 4 + 1003) as i64;
        let results = |device| -> Result<Vec<Tensor>> {
            let (x, y) = (Tensor::arange(0, n, 1, device)?, Tensor::arange(n, 0, -1, device)?);
            let (half, out) = (y.to_dtype(DType::BF16)?, x.empty_like()?);
            Tensor::map_into(&[&x, &y], &[], &[&out], |x, _| vec![&x[0] - &x[1]])?;
            let sum = x.add(&out)?;
            x.add_(&out)?;
            Ok(vec![out.relu()?, out, sum, x.add(&half)?, half.abs()?.to_dtype(DType::F32)?, x])
        };
        let right = results(Device::Cpu).unwrap();
        for device in (0..opencl::count()).map(Device::OpenCL) {
            for (i, (got, right)) in results(device).unwrap().iter().zip(&right).enumerate() {
                assert!(got.to_device(Device::Cpu).unwrap().equal(right).unwrap(), "result {i} on {device}");
            }
        }
    }
}
