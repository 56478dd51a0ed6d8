//! Normalisation on OpenCL: `kernels/norm.cl`.

use smallvec::SmallVec;

use super::Rows;
use crate::device::DeviceKind;
use crate::device::opencl::Arg;
use crate::ops::kernels::{KernelKey, kernel};
use crate::ops::reduce::opencl::{WALK, group_size, is_wide, lanes};
use crate::{Compute, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/norm.cl");

pub(super) fn run(rows: &Rows) -> Result<()> {
    let device = rows.x.cl_device()?;
    let (count, n) = (rows.count(), rows.len());
    let group = group_size(device);
    let cpu = device.info().kind == DeviceKind::Cpu;
    let shared = if cpu { 1 } else { lanes(group, false, n, 1, |_| true) };
    let (global, local) = match cpu {
        true => (count, 1),
        false => (count.div_ceil(group / shared) * group, group),
    };
    let (wide, flat) = (is_wide([count, n, global]), rows.x.shape().dims()[2] == 1);
    let dtype = rows.x.dtype;
    let switches =
        [wide, flat, rows.rms, rows.z.is_some(), rows.weight.is_some(), rows.bias.is_some(), rows.sums.is_some()];
    let bits = switches.iter().fold(0, |bits, &on| bits << 1 | u64::from(on));
    let params = SmallVec::from_slice(&[dtype as u64, bits]);
    let kernel = kernel(device, KernelKey { template: "norm", params, exprs: SmallVec::new() }, "norm", || {
        let names = ["", "FLAT", "RMS", "BACKWARD", "WEIGHT", "BIAS", "WEIGHTED_ROWS"];
        let on = names.iter().zip(switches).filter(|(name, on)| *on && !name.is_empty());
        let defines: String = on.map(|(name, _)| format!("#define {name}\n")).collect();
        let (acc, idx) = (dtype.compute(), if wide { "ulong" } else { "uint" });
        format!(
            "#define A {dtype}\n#define ACC {}\n#define ACC_NAME {acc:?}\n#define IDX {idx}\n#define GROUP {group}\n{defines}{WALK}{TEMPLATE}",
            acc.cl_name()
        )
    })?;
    // What is not there is not read, but is some buffer.
    let or_x = |t: Option<&'_ Tensor>| -> Tensor { t.unwrap_or(rows.x).detach() };
    let (z, weight, bias) = (or_x(rows.z), or_x(rows.weight), or_x(rows.bias));
    let sums = rows.sums.unwrap_or(rows.mean);
    let dims = rows.x.shape().dims();
    let sizes = [dims[1], dims[2], dims[3]].map(|d| d as i64);
    let strides = [rows.x, rows.y, &z, &weight, &bias].into_iter().flat_map(|t| t.strides().iter().map(|&s| s as i64));
    let words: SmallVec<[i64; 24]> = sizes.into_iter().chain(strides).collect();
    let eps = match dtype.compute() {
        Compute::F64 => Arg::F64(rows.eps),
        _ => Arg::F32(rows.eps as f32),
    };
    let places = [rows.x, rows.y, &z, &weight, &bias, rows.mean, rows.var, sums].map(Tensor::place);
    let places = places.into_iter().collect::<Result<SmallVec<[_; 8]>>>()?;
    let mut args: SmallVec<[Arg; 20]> = places.iter().flat_map(|p| [p.buffer(), p.offset()]).collect();
    args.extend([Arg::Bytes(bytemuck::cast_slice(&words)), Arg::U64(count as u64), eps, Arg::U32(shared as u32)]);
    device.launch(&kernel, &args, &[global], &[local])
}
