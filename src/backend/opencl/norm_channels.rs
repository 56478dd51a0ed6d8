//! Batch norm on GPUs for channels-last tensors: `kernels/norm_channels.cl`.

use crate::backend::opencl::norm::{ARGUMENTS, norm_operands, precision_defines};
use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/norm_channels.cl");

/// The maximum number of work-items of a work-group. They fill a compute unit with 64 registers each. Fewer groups leave fewer partial
/// results.
const MAX_GROUP_ITEMS: usize = 1024;
/// The maximum number of bytes of a row that a work-group reads at once: a cache line.
const MAX_ROW_BYTES: usize = 128;
/// The maximum number of slices. Every work-group combines the results of all slices, so more slices take longer.
const MAX_SLICES: usize = 256;
/// The maximum number of rows of a work-item for which one launch is faster than two with slices.
const MIN_ROWS_PER_ITEM_FOR_SLICES: usize = 8;

/// A batch with innermost channels, and how it is distributed over work-items.
struct ChannelSchedule {
    rows: usize,
    channels: usize,
    /// The number of adjacent channels that a work-item computes.
    width: usize,
    /// The number of work-items that share a row.
    lanes: usize,
    /// The number of work-items of a work-group.
    group: usize,
    /// The number of rows that a work-item loads before it computes: 64 bytes of vectors, or 8 rows of single elements, because of the registers.
    at_once: usize,
    /// The number of slices, and the rows of a slice (`chunk`).
    slices: usize,
    chunk: usize,
}

/// Returns the step between rows of a view `[1, channels, outer, inner]`. None unless channels are adjacent and rows are evenly spaced.
fn row_step(t: &Tensor) -> Option<isize> {
    let (dims, s) = (t.shape().dims(), t.strides());
    let (outer, inner) = (dims[2], dims[3]);
    let even = outer == 1 || inner == 1 || s[2] == s[3] * inner as isize;
    (dims[0] == 1 && dims[1] > 1 && s[1] == 1 && even).then_some(if inner > 1 { s[3] } else { s[2] })
}

/// Returns the launches of a batch norm over innermost channels, or None for any other norm.
pub(super) fn make_plan(norm: &Normalisation) -> Result<Option<LaunchPlan>> {
    let device = norm.x.cl_device()?;
    let by_channel = norm.z.is_some() == norm.sums.is_some() && norm.columns.is_none() && norm.variance.is_none();
    // True if a tensor has one element for each channel, as weights have.
    let repeated = |t: &Tensor| (2..4).all(|d| t.shape().dims()[d] == 1 || t.strides()[d] == 0);
    let alone = |t: Option<&Tensor>| t.is_none_or(repeated);
    let fits = by_channel && !norm.rms && alone(norm.weight) && alone(norm.bias);
    let alike = norm.weight.zip(norm.bias).is_none_or(|(w, b)| w.dtype == b.dtype);
    let steps = [Some(norm.x), Some(norm.y), norm.z].map(|t| t.map_or(Some(0), row_step));
    match steps {
        [Some(x), Some(y), Some(z)] if device.info().kind != DeviceKind::Cpu && fits && alike => {
            let channels = ChannelSchedule::choose(device, norm, [x, y, z]);
            channels.plan(device, norm, [x, y, z]).map(Some)
        }
        _ => Ok(None),
    }
}

impl ChannelSchedule {
    fn choose(device: &ClDevice, norm: &Normalisation, steps: [isize; 3]) -> ChannelSchedule {
        let (rows, channels, dtype) = (norm.len(), norm.count(), norm.x.dtype);
        let offsets = [Some(norm.x), Some(norm.y), norm.z].into_iter().flatten().map(|t| t.layout.offset as isize);
        let width = vector_width(device, dtype, offsets.chain(steps).chain([channels as isize]));
        let lanes = (MAX_ROW_BYTES / dtype.size() / width).min(channels.div_ceil(width).next_power_of_two());
        // The bytes of local memory of a work-item: a sum for each of its channels, a sum for the block's channels, and at most one final value.
        let local = (width + 2) * dtype.compute().dtype().size();
        let room = declarable_local_memory(device) / local;
        let group = 1 << device.info().max_work_group.min(room).clamp(1, MAX_GROUP_ITEMS).ilog2();
        let lanes = lanes.min(group / width);
        let at_once = if width == 1 { 8 } else { 4 } / if norm.z.is_some() { 2 } else { 1 };
        let (items, blocks) = (MAX_GROUP_ITEMS * device.info().compute_units.max(1), channels.div_ceil(width * lanes));
        // All work-groups run at the same time. One more work-group would have to run alone afterwards.
        let slices = if rows <= MIN_ROWS_PER_ITEM_FOR_SLICES * (group / lanes) {
            1
        } else {
            (items / group / blocks).clamp(1, MAX_SLICES)
        };
        let chunk = rows.div_ceil(slices);
        ChannelSchedule { rows, channels, width, lanes, group, at_once, slices: rows.div_ceil(chunk), chunk }
    }

    fn plan(&self, device: &'static ClDevice, norm: &Normalisation, steps: [isize; 3]) -> Result<LaunchPlan> {
        if self.slices == 1 {
            return Ok(LaunchPlan::single(device, self.launch(device, norm, steps, "")?));
        }
        let scratch = (2 * self.slices * self.channels, norm.x.dtype.compute().dtype());
        let launches = [self.launch(device, norm, steps, "PARTS")?, self.launch(device, norm, steps, "APPLY")?];
        Ok(LaunchPlan::new(device, Some(scratch), launches))
    }

    /// Makes one launch. If rows are cut into slices, `part` is the macro of the launch's stage; otherwise `part` is empty.
    fn launch(
        &self,
        device: &'static ClDevice,
        norm: &Normalisation,
        steps: [isize; 3],
        part: &'static str,
    ) -> Result<KernelLaunch> {
        let ChannelSchedule { rows, channels, width, lanes, group, at_once, slices, chunk } = *self;
        let tensors = norm.tensors();
        let global = channels.div_ceil(width * lanes) * slices * group;
        // Kernels also compute rows past the end, so the index type must hold these rows.
        let wide = needs_64_bit([rows + group * at_once, channels, global]);
        let (dtype, weights) = (norm.x.dtype, norm.weight.or(norm.bias).unwrap_or(norm.x).dtype);
        let config = kernel_config! {
            "" => element_types(dtype, wide), "" => Vectors(dtype, width), "W" => weights, "LANES" => lanes,
            "GROUP" => group, "AT_ONCE" => at_once, "" => norm_operands(norm), "" => part,
        };
        let precision = precision_defines(dtype);
        let parts = [&*precision, VECTOR_ACCESS, ARGUMENTS, TEMPLATE];
        let kernel = config.kernel(device, "norm_channels", "norm", &parts)?;
        let mut launch = KernelLaunch::new(kernel, global, group);
        (0..tensors.len()).for_each(|k| launch.push_tensor(k));
        let along = |t: Option<&Tensor>| t.map_or(0, |t| t.strides()[1] as i64);
        let counts = [rows, channels, chunk, slices].map(|n| n as i64);
        let words = counts.into_iter().chain(steps.map(|s| s as i64));
        launch.push_words(words.chain([along(norm.weight), along(norm.bias)]));
        launch.push_fixed([scalar_arg(dtype.compute(), Scalar::Float(norm.eps))]);
        if !part.is_empty() {
            // The scratch tensor follows all other tensors. Its elements are pairs of numbers.
            launch.push_tensor_at(tensors.len(), 0, 2);
        }
        Ok(launch)
    }
}
