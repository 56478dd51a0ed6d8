//! Scans on OpenCL, in one or three launches: `kernels/scan.cl`.

use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/scan.cl");

/// The number of contiguous elements that a GPU work-item scans at a time.
const ELEMENTS_PER_ITEM: usize = 4;

/// The phase of a scan that a launch computes. Whole scans each line in one launch; the other three phases follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Whole,
    /// Computes the total of every slice.
    Totals,
    /// Scans the totals of each line.
    Between,
    /// Scans every slice, starting from the total of the slices before it in the line.
    Finish,
}

/// The operands and the schedule of a scan, which takes one launch per phase.
struct ScanLaunches<'a> {
    kind: Scan,
    x: &'a Tensor,
    values: &'a Tensor,
    indices: &'a Tensor,
    /// The totals of slices. If there is only one slice, any tensor, which is not used.
    totals: &'a Tensor,
    lines: &'a Lines,
    acc: Compute,
    /// Whether a single work-item scans a slice, instead of a work-group.
    serial: bool,
    group: usize,
}

pub(crate) fn launch_scan(problem: &RunningReduction) -> Result<()> {
    let &RunningReduction { scan: kind, x, d, values, indices } = problem;
    let device = x.cl_device()?;
    let lines = &Lines::new(x, d);
    let cpu = device.info().kind == DeviceKind::Cpu;
    // On a CPU, one running sum covers a long slice, so an f64 accumulator is used: it is more precise and takes no more time.
    let acc = match x.dtype.compute() {
        Compute::F32 if cpu && device.info().fp64 => Compute::F64,
        acc => acc,
    };
    let group = default_group_size(device);
    let serial = cpu || (lines.is_interleaved() && lines.count >= 64 * device.info().compute_units);
    let units = device.info().compute_units.max(1);
    let (least, unit, enough) = match serial {
        true => (1 << 14, 64, units),
        false => (8 * group * ELEMENTS_PER_ITEM, group * ELEMENTS_PER_ITEM, 2 * units),
    };
    // A line is cut only if there are too few lines to keep the device busy.
    let whole = lines.count >= enough || lines.n < 2 * least;
    let wanted = if whole { 1 } else { (4 * units).div_ceil(lines.count) };
    let (slices, chunk) = cut_into_slices(lines.n, wanted, least, unit);
    let indices = indices.unwrap_or(values);
    let job = ScanLaunches { kind, x, values, indices, totals: values, lines, acc, serial, group };
    if slices == 1 {
        return job.launch(device, Phase::Whole, chunk, 1);
    }
    let count = lines.count * slices;
    let totals = match kind.is_arg() {
        // A pair of value and index takes two I64 elements (16 bytes).
        true => Tensor::empty_with_shape(2 * count, DType::I64, x.device())?,
        false => Tensor::empty_with_shape(count, acc.dtype(), x.device())?,
    };
    let job = ScanLaunches { totals: &totals, ..job };
    job.launch(device, Phase::Totals, chunk, slices)?;
    job.launch(device, Phase::Between, slices, slices)?;
    job.launch(device, Phase::Finish, chunk, slices)
}

impl ScanLaunches<'_> {
    fn launch(&self, device: &'static ClDevice, phase: Phase, chunk: usize, slices: usize) -> Result<()> {
        let lines = self.lines;
        // In phase Between, the elements of a line are the totals of its slices.
        let (n, slices_of_line) = if phase == Phase::Between { (slices, 1) } else { (lines.n, slices) };
        let items = lines.count * slices_of_line;
        let (global, local) = match (self.serial, device.info().kind) {
            (true, DeviceKind::Cpu) => {
                (items, if items >= 512 * device.info().compute_units { DEFAULT_GROUP_SIZE } else { 1 })
            }
            (true, _) => (items, DEFAULT_GROUP_SIZE),
            (false, _) => (items * self.group, self.group),
        };
        let wide = needs_64_bit([lines.count * lines.n, global + local]);
        let config = kernel_config! {
            "A" => self.x.dtype, "B" => self.values.dtype, "ACC" => self.acc,
            "" => ["OP_SUM", "OP_PROD", "OP_MAX", "OP_MIN", "OP_LOG_SUM"][self.kind as usize], "NK" => lines.rank(),
            "IDX" => index_type(wide), "PHASE" => phase as usize, "GROUP" => self.group, "PER" => ELEMENTS_PER_ITEM,
            "ARG" => self.kind.is_arg(), "INTEGERS" => self.acc == Compute::I64, "SERIAL" => self.serial,
        };
        let kernel = config.kernel(device, "scan", "scan", &[STRIDED_DIMS, TEMPLATE])?;
        let words = dims_words(&lines.strided);
        let (x, y) = (self.x.device_view()?, self.values.device_view()?);
        let (indices, totals) = (self.indices.device_view()?, self.totals.device_view()?);
        // A pair of value and index takes two elements of an I64 tensor.
        let totals_at = totals.first_element() / if self.kind.is_arg() { 2 } else { 1 };
        let args = args![
            x, y, indices; totals.buffer(), totals_at, &words[..], lines.count, n, lines.step, lines.inner, chunk,
            slices_of_line
        ];
        device.launch(&kernel, &args, &[global], &[clamp_group_size(&kernel, local)])
    }
}
