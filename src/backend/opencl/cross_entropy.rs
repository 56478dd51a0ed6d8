//! Cross-entropy with class labels on OpenCL: `kernels/cross_entropy.cl`, on processors `kernels/softmax.cl`.

use crate::backend::opencl::geometry::{
    ROW_BLOCKS, STRIDED_DIMS, flag, group_size, groups_kept, is_wide, row_slices, vector_defines, vector_width,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache;
use crate::backend::opencl::launch_cache::{Key, OpKind};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::opencl::softmax::{ROWS, TEMPLATE, defines};
use crate::backend::problem::cross_entropy::{LabelEntropy, LossReduction};
use crate::backend::problem::map::Params;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice};
use crate::{DType, Error, Result, Tensor};

const GPU_TEMPLATE: &str = include_str!("../../../kernels/cross_entropy.cl");

/// The most labels of which every group counts those that are not ignored, because that is faster than a launch of its own.
const MAX_COUNTED: usize = 1 << 16;

/// How the kernels get the number of labels that are not ignored; the values are those of `kernels/cross_entropy.cl`.
#[derive(Clone, Copy)]
enum Count {
    /// Every group counts all of them.
    EveryGroup,
    /// It is 1, because no mean is wanted.
    One,
    /// An earlier launch has counted them.
    Given,
    /// Every group counts those of its rows, and the last group adds these numbers up.
    LastGroup,
}

/// How the rows are distributed over the device.
struct Schedule {
    /// Elements that a work-item loads at once.
    width: usize,
    /// Work-items that share a row, and those of a group.
    lanes: usize,
    group: usize,
    /// Vectors of `width` elements that each of them keeps in registers: those of a full row if `whole`, else of a block of it.
    kept: usize,
    whole: bool,
    groups: usize,
    /// Whether the last group adds up the losses of all groups.
    last_group_sums: bool,
    /// Slices of a row, of `chunk` elements each, which separate groups reduce; 0 where one group reduces a row.
    slices: usize,
    chunk: usize,
}

/// The part of the work that a launch does where rows are cut into slices; see `kernels/cross_entropy.cl`.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Whole,
    Slices,
    Gradients,
    Combines,
}

impl Schedule {
    fn choose(device: &ClDevice, x: &Tensor, grad: Option<&Tensor>, each: bool) -> Schedule {
        let (rows, n) = (x.shape().dims()[0], x.shape().dims()[1]);
        let units = device.info().compute_units.max(1);
        if device.info().kind == DeviceKind::Cpu {
            let groups = if rows * n <= 1 << 13 { 1 } else { rows.min(4 * units) };
            let (slices, chunk, last_group_sums) = (0, 0, false);
            return Schedule {
                width: 1,
                lanes: 1,
                group: 1,
                kept: 0,
                whole: true,
                groups,
                last_group_sums,
                slices,
                chunk,
            };
        }
        let group = group_size(device);
        let starts = [x.layout.offset as isize, if rows > 1 { x.strides()[0] } else { 0 }, n as isize];
        let starts = starts.into_iter().chain(grad.map(|t| t.layout.offset as isize));
        let width = if x.strides()[1] == 1 { vector_width(device, x.dtype, starts) } else { 1 };
        // A small batch is computed by one group, with all rows at once if they fit.
        let alone = rows * n <= 16 * group;
        let most = if alone { 1 << (group / rows).max(1).ilog2() } else { group };
        let lanes = n.div_ceil(4 * width).next_power_of_two().min(most);
        let kept = groups_kept(n, width * lanes);
        // The 32-bit registers of a value.
        let size = x.dtype.compute().dtype().size() / 4;
        let whole = kept * width * size <= 32;
        let (lanes, kept) = if whole { (lanes, kept) } else { (group, (16 / width / size).max(1)) };
        let (slices, chunk) = row_slices(device, rows, n, lanes * kept * width);
        let slices = if whole || rows >= 2 * units || slices == 1 { 0 } else { slices };
        let sharing = if slices > 0 { slices.next_power_of_two() } else { lanes };
        let rounds = rows.div_ceil(group / sharing);
        // Each group has as many rows as any other, and the device runs all groups at once.
        let groups = if alone { 1 } else { rounds.div_ceil(rounds.div_ceil(8 * units)) };
        let last_group_sums = !each && groups > 1 && device.has_fence();
        Schedule { width, lanes, group, kept, whole, groups, last_group_sums, slices, chunk }
    }

    /// The work-items that share a row in a launch.
    fn sharing(&self, stage: Stage) -> usize {
        if stage == Stage::Combines { self.slices.next_power_of_two() } else { self.lanes }
    }

    /// Whether the last group of this launch adds up the losses of all groups.
    fn sums(&self, stage: Stage) -> bool {
        self.last_group_sums && matches!(stage, Stage::Whole | Stage::Combines)
    }

    fn defines(&self, dtype: DType, stage: Stage) -> String {
        let (lanes, kept) = (self.sharing(stage), self.kept);
        let spread = format!("#define LANES {lanes}\n#define CACHED {kept}\n") + &vector_defines(dtype, self.width);
        let name = match stage {
            Stage::Whole => "",
            Stage::Slices => "#define SLICES\n",
            Stage::Gradients => "#define GRADIENTS\n",
            Stage::Combines => "#define COMBINES\n",
        };
        spread + name + &flag(self.whole, "WHOLE") + &flag(self.sums(stage), "LAST_GROUP_SUMS")
    }
}

/// The loss, or where the last group does not add them up, one partial sum for each group.
pub(crate) fn cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> {
    let LabelEntropy { logits: x, labels, options, dtype, grad, count } = *entropy;
    let device = x.cl_device()?;
    let (rows, n) = (x.shape().dims()[0], x.shape().dims()[1]);
    let each = options.reduction == LossReduction::None;
    let cpu = device.info().kind == DeviceKind::Cpu;
    let schedule = Schedule::choose(device, x, grad, each);
    let (groups, alone) = (schedule.groups, schedule.groups == 1 || schedule.last_group_sums);
    let loss = match (each, alone) {
        (true, _) => Tensor::empty_like_shape(rows, dtype, x.device())?,
        (false, true) => Tensor::empty_like_shape((), dtype, x.device())?,
        (false, false) => Tensor::empty_like_shape(groups, x.dtype.compute().dtype(), x.device())?,
    };
    let counting = match options.reduction {
        LossReduction::Mean if grad.is_none() && alone && !cpu => Count::LastGroup,
        LossReduction::Mean if rows > MAX_COUNTED => Count::Given,
        LossReduction::Mean => Count::EveryGroup,
        _ => Count::One,
    };
    let counted = match counting {
        Count::Given => Some(count()?),
        _ => None,
    };
    let acc = x.dtype.compute().dtype();
    // The scratch memory has two numbers for each slice, and then two for each group.
    let of_slices = 2 * rows * schedule.slices;
    let launch = |stage: Stage| {
        let lanes = schedule.sharing(stage);
        let groups = match stage {
            Stage::Whole | Stage::Combines => groups,
            Stage::Slices | Stage::Gradients => rows * schedule.slices,
        };
        let block = schedule.lanes * schedule.kept * schedule.width;
        let wide = is_wide([rows + schedule.group * groups, n + block]);
        let with_grad = grad.is_some() && stage == Stage::Whole;
        let bits = [with_grad, wide, schedule.whole, schedule.sums(stage)]
            .iter()
            .fold(stage as u64, |bits, &on| bits << 1 | u64::from(on));
        let spread = (schedule.group << 40 | lanes << 24 | schedule.kept << 8 | schedule.width) as u64;
        let params = [x.dtype as u64, labels.dtype as u64, loss.dtype as u64, bits, spread];
        let kernel = kernel(device, KernelKey::new("cross_entropy", &params), "row", || {
            let gradient = if with_grad { "#define WITH_GRAD\n" } else { "" };
            let (b, t) = (loss.dtype, labels.dtype);
            let common = defines(x, 1, wide, schedule.group) + &format!("#define B {b}\n#define T {t}\n{gradient}");
            match cpu {
                true => format!("{common}#define CROSS_ENTROPY\n{STRIDED_DIMS}{ROWS}{TEMPLATE}"),
                false => common + &schedule.defines(x.dtype, stage) + STRIDED_DIMS + ROW_BLOCKS + GPU_TEMPLATE,
            }
        })?;
        let mut launch = KernelLaunch::new(kernel, groups * schedule.group, schedule.group);
        (0..2).for_each(|k| launch.tensor(k));
        launch.args([Arg::I64(labels.strides()[0] as i64)]);
        (2..5).for_each(|k| launch.tensor(k));
        launch.faults();
        launch.args([rows, n].map(|n| Arg::U64(n as u64)));
        launch.args([x.strides()[0], x.strides()[1]].map(|s| Arg::I64(s as i64)));
        launch.args([Arg::I64(options.ignore_index)]);
        launch.args([counting as u32, u32::from(!each)].map(Arg::U32));
        if stage != Stage::Whole {
            launch.tensor_from(5, 0, 2);
            launch.args([Arg::U32(schedule.slices as u32), Arg::U64(schedule.chunk as u64)]);
        }
        if schedule.sums(stage) {
            launch.tensor_from(5, of_slices as isize, 2);
            launch.arrivals();
            launch.first_arrival();
        }
        Ok::<_, Error>(launch)
    };
    let prepare = || {
        let stages: &[Stage] = match (schedule.slices, grad) {
            (0, _) => &[Stage::Whole],
            (_, None) => &[Stage::Slices, Stage::Combines],
            (_, Some(_)) => &[Stage::Slices, Stage::Gradients, Stage::Combines],
        };
        let launches = stages.iter().map(|&stage| launch(stage)).collect::<Result<Vec<_>>>()?;
        let scratch = of_slices + if schedule.last_group_sums { 2 * groups } else { 0 };
        Ok(LaunchPlan::new(device, (scratch > 0).then_some((scratch, acc)), launches).checking(1))
    };
    let numbers = [grad.is_some().into(), options.reduction as u64, options.ignore_index as u64];
    // Kernel arguments that are not used need a buffer nevertheless.
    let tensors = [x, labels, grad.unwrap_or(&loss), &loss, counted.as_ref().unwrap_or(&loss)];
    let key =
        Key { of: OpKind::CrossEntropy, device: device.device(), numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch(&key, Params::default(), prepare)?;
    Ok(loss)
}
