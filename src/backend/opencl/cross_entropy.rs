//! Cross-entropy with class labels on OpenCL: `kernels/cross_entropy.cl` on GPUs, `kernels/softmax.cl` on CPUs.

use crate::backend::opencl::prelude::*;
use crate::backend::opencl::softmax::{ROWS, TEMPLATE, row_config};

const GPU_TEMPLATE: &str = include_str!("../../../kernels/cross_entropy.cl");

/// The maximum number of labels for which every work-group counts the labels that are not ignored. A separate launch would take longer.
const MAX_LABELS_COUNTED_PER_GROUP: usize = 1 << 16;

/// How the kernels get the number of labels that are not ignored. The discriminants equal the codes in `kernels/cross_entropy.cl`.
#[derive(Clone, Copy)]
enum LabelCount {
    /// Every work-group counts all labels.
    EveryGroup,
    /// The count is 1, because no mean is computed.
    One,
    /// An earlier launch has counted the labels.
    Given,
    /// Every work-group counts the labels of its rows, and the last work-group to finish adds up these counts.
    LastGroup,
}

/// How rows are distributed over the device.
struct CrossEntropySchedule {
    /// The number of elements that a work-item loads at once.
    width: usize,
    /// The number of work-items that share a row.
    lanes: usize,
    /// The number of work-items of a work-group.
    group: usize,
    /// The number of vectors of `width` elements that each work-item keeps in registers: for a full row if `whole`, otherwise for a block.
    kept: usize,
    whole: bool,
    groups: usize,
    /// Whether the last work-group to finish adds up the losses of all work-groups.
    last_group_sums: bool,
    /// The number of slices into which a row is cut, each reduced by a separate work-group; 0 if one work-group reduces a row.
    slices: usize,
    /// The number of elements of a slice.
    chunk: usize,
}

/// The part of the work that one launch does if rows are cut into slices; see `kernels/cross_entropy.cl`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CrossEntropyStage {
    Whole,
    Slices,
    Gradients,
    Combines,
}

impl CrossEntropySchedule {
    fn choose(device: &ClDevice, x: &Tensor, grad: Option<&Tensor>, each: bool) -> CrossEntropySchedule {
        let (rows, n) = (x.shape().dims()[0], x.shape().dims()[1]);
        let units = device.info().compute_units.max(1);
        if device.info().kind == DeviceKind::Cpu {
            let groups = if rows * n <= 1 << 13 { 1 } else { rows.min(4 * units) };
            let (width, lanes, group, whole) = (1, 1, 1, true);
            let (kept, slices, chunk, last_group_sums) = (0, 0, 0, false);
            return CrossEntropySchedule { width, lanes, group, kept, whole, groups, last_group_sums, slices, chunk };
        }
        let group = default_group_size(device);
        let starts = [x.layout.offset as isize, if rows > 1 { x.strides()[0] } else { 0 }, n as isize];
        let starts = starts.into_iter().chain(grad.map(|t| t.layout.offset as isize));
        let width = if x.strides()[1] == 1 { vector_width(device, x.dtype, starts) } else { 1 };
        // A small batch is computed by one work-group, with all rows at once if the work-items suffice.
        let alone = rows * n <= 16 * group;
        let most = if alone { 1 << (group / rows).max(1).ilog2() } else { group };
        let lanes = n.div_ceil(4 * width).next_power_of_two().min(most);
        let kept = vectors_per_item(n, width * lanes);
        // The number of 32-bit registers that one value takes.
        let size = x.dtype.compute().dtype().size() / 4;
        let whole = kept * width * size <= 32;
        let (lanes, kept) = if whole { (lanes, kept) } else { (group, (16 / width / size).max(1)) };
        let (slices, chunk) = slice_rows(device, rows, n, lanes * kept * width);
        let slices = if whole || rows >= 2 * units || slices == 1 { 0 } else { slices };
        let sharing = if slices > 0 { slices.next_power_of_two() } else { lanes };
        let rounds = rows.div_ceil(group / sharing);
        // All work-groups get the same number of rows and run on the device at the same time.
        let groups = if alone { 1 } else { rounds.div_ceil(rounds.div_ceil(8 * units)) };
        let last_group_sums = !each && groups > 1 && device.has_fence();
        CrossEntropySchedule { width, lanes, group, kept, whole, groups, last_group_sums, slices, chunk }
    }

    /// True if in this launch the last work-group to finish adds up the losses of all work-groups.
    fn sums_in_last_group(&self, stage: CrossEntropyStage) -> bool {
        self.last_group_sums && matches!(stage, CrossEntropyStage::Whole | CrossEntropyStage::Combines)
    }

    /// Returns the part of the configuration that only the GPU template needs.
    fn spread(&self, dtype: DType, stage: CrossEntropyStage) -> impl KernelConfig + use<> {
        let combines = stage == CrossEntropyStage::Combines;
        let lanes = if combines { self.slices.next_power_of_two() } else { self.lanes };
        kernel_config! {
            "LANES" => lanes, "CACHED" => self.kept, "" => Vectors(dtype, self.width),
            "" => ["", "SLICES", "GRADIENTS", "COMBINES"][stage as usize],
            "WHOLE" => self.whole, "LAST_GROUP_SUMS" => self.sums_in_last_group(stage),
        }
    }
}

/// Computes the loss. If the last work-group does not add up the sums, the result is one partial sum per work-group.
pub(crate) fn cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> {
    let LabelEntropy { logits: x, labels, options, dtype, grad, count } = *entropy;
    let device = x.cl_device()?;
    let (rows, n) = (x.shape().dims()[0], x.shape().dims()[1]);
    let each = options.reduction == LossReduction::None;
    let cpu = device.info().kind == DeviceKind::Cpu;
    let schedule = CrossEntropySchedule::choose(device, x, grad, each);
    let (groups, alone) = (schedule.groups, schedule.groups == 1 || schedule.last_group_sums);
    let loss = match (each, alone) {
        (true, _) => Tensor::empty_with_shape(rows, dtype, x.device())?,
        (false, true) => Tensor::empty_with_shape((), dtype, x.device())?,
        (false, false) => Tensor::empty_with_shape(groups, x.dtype.compute().dtype(), x.device())?,
    };
    let counting = match options.reduction {
        LossReduction::Mean if grad.is_none() && alone && !cpu => LabelCount::LastGroup,
        LossReduction::Mean if rows > MAX_LABELS_COUNTED_PER_GROUP => LabelCount::Given,
        LossReduction::Mean => LabelCount::EveryGroup,
        _ => LabelCount::One,
    };
    let counted = match counting {
        LabelCount::Given => Some(count()?),
        _ => None,
    };
    let acc = x.dtype.compute().dtype();
    // The scratch memory holds two values for each slice, followed by two values for each work-group.
    let of_slices = 2 * rows * schedule.slices;
    let launch = |stage: CrossEntropyStage| {
        let groups = match stage {
            CrossEntropyStage::Whole | CrossEntropyStage::Combines => groups,
            CrossEntropyStage::Slices | CrossEntropyStage::Gradients => rows * schedule.slices,
        };
        let block = schedule.lanes * schedule.kept * schedule.width;
        let wide = needs_64_bit([rows + schedule.group * groups, n + block]);
        let with_grad = grad.is_some() && stage == CrossEntropyStage::Whole;
        let config = kernel_config! {
            "" => row_config(x.dtype, 1, wide, schedule.group), "B" => loss.dtype, "T" => labels.dtype,
            "WITH_GRAD" => with_grad, "CROSS_ENTROPY" => cpu, "" => (!cpu).then(|| schedule.spread(x.dtype, stage)),
        };
        let (rows_template, template) = if cpu { (ROWS, TEMPLATE) } else { (ROW_BLOCKS, GPU_TEMPLATE) };
        let kernel = config.kernel(device, "cross_entropy", "row", &[STRIDED_DIMS, rows_template, template])?;
        let mut launch = KernelLaunch::new(kernel, groups * schedule.group, schedule.group);
        (0..2).for_each(|k| launch.push_tensor(k));
        launch.push_fixed(args![; labels.strides()[0]]);
        (2..5).for_each(|k| launch.push_tensor(k));
        launch.push(Argument::Faults);
        let (row, step) = (x.strides()[0], x.strides()[1]);
        launch.push_fixed(args![; rows, n, row, step, options.ignore_index, counting as u32, !each]);
        if stage != CrossEntropyStage::Whole {
            launch.push_tensor_at(5, 0, 2);
            launch.push_fixed(args![; schedule.slices as u32, schedule.chunk]);
        }
        if schedule.sums_in_last_group(stage) {
            launch.push_tensor_at(5, of_slices as isize, 2);
            launch.push(Argument::Arrivals);
            launch.push(Argument::FirstArrival);
        }
        Ok::<_, Error>(launch)
    };
    let prepare = || {
        let stages: &[CrossEntropyStage] = match (schedule.slices, grad) {
            (0, _) => &[CrossEntropyStage::Whole],
            (_, None) => &[CrossEntropyStage::Slices, CrossEntropyStage::Combines],
            (_, Some(_)) => &[CrossEntropyStage::Slices, CrossEntropyStage::Gradients, CrossEntropyStage::Combines],
        };
        let launches = stages.iter().map(|&stage| launch(stage)).collect::<Result<Vec<_>>>()?;
        let scratch = of_slices + if schedule.last_group_sums { 2 * groups } else { 0 };
        Ok(LaunchPlan::new(device, (scratch > 0).then_some((scratch, acc)), launches).with_index_check(1))
    };
    let numbers = [grad.is_some().into(), options.reduction as u64, options.ignore_index as u64];
    // Kernel arguments that are not used still need a buffer.
    let tensors = [x, labels, grad.unwrap_or(&loss), &loss, counted.as_ref().unwrap_or(&loss)];
    let key = Key { kind: OpKind::CrossEntropy, numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch_cached(&key, Params::default(), prepare)?;
    Ok(loss)
}
