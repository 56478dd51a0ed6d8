//! Batch norm on GPUs where channels lie innermost: `kernels/norm_channels.cl`.

use crate::backend::opencl::geometry::{
    NEIGHBOURS, declarable_local_memory, is_wide, types, vector_defines, vector_width,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::opencl::norm::{ARGUMENTS, names, switches};
use crate::backend::problem::norm::Normalisation;
use crate::backend::problem::reduction::SafeRange;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, FAST_DIVISION};
use crate::{Compute, DType, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/norm_channels.cl");

/// Work-items of a group, at most, and for each compute unit: a GPU holds so many of 64 registers. Fewer groups have fewer parts to combine.
const BUSY: usize = 1024;
/// Bytes of a row that a group has side by side, at most: a line of a cache.
const LINE: usize = 128;
/// Slices, at most: every group combines what all of them left.
const SLICES: usize = 256;
/// Rows for each work-item that are not worth a second launch.
const FEW: usize = 8;

/// A batch whose channels lie innermost: how many rows there are of how many channels, and what work-items have.
struct Channels {
    rows: usize,
    channels: usize,
    /// Neighbouring channels of a work-item, work-items that share a row, work-items of a group.
    width: usize,
    lanes: usize,
    group: usize,
    /// Rows that a work-item loads before it computes: 64 bytes, or as much as is left of registers for single elements.
    at_once: usize,
    /// Slices of `chunk` rows.
    slices: usize,
    chunk: usize,
}

/// From one row to the next of a view `[1, channels, outer, inner]` whose channels are neighbours and whose rows step evenly.
fn row_step(t: &Tensor) -> Option<isize> {
    let (dims, s) = (t.shape().dims(), t.strides());
    let (outer, inner) = (dims[2], dims[3]);
    let even = outer == 1 || inner == 1 || s[2] == s[3] * inner as isize;
    (dims[0] == 1 && dims[1] > 1 && s[1] == 1 && even).then_some(if inner > 1 { s[3] } else { s[2] })
}

/// The launches of a norm where it is one of these.
pub(super) fn prepare(norm: &Normalisation) -> Result<Option<LaunchPlan>> {
    let device = norm.x.cl_device()?;
    let by_channel = norm.z.is_some() == norm.sums.is_some() && norm.columns.is_none() && norm.variance.is_none();
    // A weight is one for each channel.
    let repeated = |t: &Tensor| (2..4).all(|d| t.shape().dims()[d] == 1 || t.strides()[d] == 0);
    let alone = |t: Option<&Tensor>| t.is_none_or(repeated);
    let fits = by_channel && !norm.rms && alone(norm.weight) && alone(norm.bias);
    let alike = norm.weight.zip(norm.bias).is_none_or(|(w, b)| w.dtype == b.dtype);
    let steps = [Some(norm.x), Some(norm.y), norm.z].map(|t| t.map_or(Some(0), row_step));
    match steps {
        [Some(x), Some(y), Some(z)] if device.info().kind != DeviceKind::Cpu && fits && alike => {
            let channels = Channels::choose(device, norm, [x, y, z]);
            channels.plan(device, norm, [x, y, z]).map(Some)
        }
        _ => Ok(None),
    }
}

impl Channels {
    fn choose(device: &ClDevice, norm: &Normalisation, steps: [isize; 3]) -> Channels {
        let (rows, channels, dtype) = (norm.len(), norm.count(), norm.x.dtype);
        let offsets = [Some(norm.x), Some(norm.y), norm.z].into_iter().flatten().map(|t| t.layout.offset as isize);
        let width = vector_width(device, dtype, offsets.chain(steps).chain([channels as isize]));
        let lanes = (LINE / dtype.size() / width).min(channels.div_ceil(width).next_power_of_two());
        // Local memory of a work-item: a sum for each of its channels, one for the block's, and less than that of what channels come to.
        let local = (width + 2) * dtype.compute().dtype().size();
        let room = declarable_local_memory(device) / local;
        let group = 1 << device.info().max_work_group.min(room).clamp(1, BUSY).ilog2();
        let lanes = lanes.min(group / width);
        let at_once = if width == 1 { 8 } else { 4 } / if norm.z.is_some() { 2 } else { 1 };
        let (items, blocks) = (BUSY * device.info().compute_units.max(1), channels.div_ceil(width * lanes));
        // All groups run at once: one more would have the device to itself.
        let slices = if rows <= FEW * (group / lanes) { 1 } else { (items / group / blocks).clamp(1, SLICES) };
        let chunk = rows.div_ceil(slices);
        Channels { rows, channels, width, lanes, group, at_once, slices: rows.div_ceil(chunk), chunk }
    }

    fn plan(&self, device: &'static ClDevice, norm: &Normalisation, steps: [isize; 3]) -> Result<LaunchPlan> {
        if self.slices == 1 {
            return Ok(LaunchPlan::one(device, self.launch(device, norm, steps, "")?));
        }
        let scratch = (2 * self.slices * self.channels, norm.x.dtype.compute().dtype());
        let launches = [self.launch(device, norm, steps, "PARTS")?, self.launch(device, norm, steps, "APPLY")?];
        Ok(LaunchPlan::new(device, Some(scratch), launches))
    }

    /// One launch. `part`: what of it a launch of slices is.
    fn launch(
        &self,
        device: &'static ClDevice,
        norm: &Normalisation,
        steps: [isize; 3],
        part: &'static str,
    ) -> Result<KernelLaunch> {
        let Channels { rows, channels, width, lanes, group, at_once, slices, chunk } = *self;
        let tensors = norm.tensors();
        let global = channels.div_ceil(width * lanes) * slices * group;
        // Rows past the end are counted too.
        let wide = is_wide([rows + group * at_once, channels, global]);
        let (dtype, weights) = (norm.x.dtype, norm.weight.or(norm.bias).unwrap_or(norm.x).dtype);
        let own = [wide, part == "PARTS", part == "APPLY"];
        let switches = own.into_iter().fold(switches(norm), |bits, on| bits << 1 | u64::from(on));
        let sizes = (width << 32 | lanes << 16 | group) as u64;
        let params = [dtype as u64, weights as u64, switches, sizes];
        let kernel = kernel(device, KernelKey::new("norm_channels", &params), "norm", || {
            let on = names(norm).chain([part].into_iter().filter(|part| !part.is_empty()));
            let defines: String = on.map(|name| format!("#define {name}\n")).collect();
            let spread = format!("#define LANES {lanes}\n#define GROUP {group}\n#define AT_ONCE {at_once}\n");
            let types = types(dtype, wide) + &SafeRange::defines(dtype.compute()) + &vector_defines(dtype, width);
            let types = types + &format!("#define W {weights}\n");
            let division = if matches!(dtype, DType::F16 | DType::BF16) { FAST_DIVISION } else { "" };
            types + division + &spread + &defines + NEIGHBOURS + ARGUMENTS + TEMPLATE
        })?;
        let mut launch = KernelLaunch::new(kernel, global, group);
        (0..tensors.len()).for_each(|k| launch.tensor(k));
        let along = |t: Option<&Tensor>| t.map_or(0, |t| t.strides()[1] as i64);
        let counts = [rows, channels, chunk, slices].map(|n| n as i64);
        launch.words(counts.into_iter().chain(steps.map(|s| s as i64)).chain([along(norm.weight), along(norm.bias)]));
        launch.args([match dtype.compute() {
            Compute::F64 => Arg::F64(norm.eps),
            _ => Arg::F32(norm.eps as f32),
        }]);
        if !part.is_empty() {
            // Two numbers are an element of the scratch memory, which comes after all tensors.
            launch.tensor_from(tensors.len(), 0, 2);
        }
        Ok(launch)
    }
}
