//! Normalisation on OpenCL: `kernels/norm.cl`.

use smallvec::SmallVec;

use super::Rows;
use crate::device::DeviceKind;
use crate::device::opencl::Arg;
use crate::ops::elementwise::Params;
use crate::ops::kernels::{KernelKey, kernel};
use crate::ops::memo::{self, Key, Of};
use crate::ops::prepared::{Prepared, Ready};
use crate::ops::reduce::opencl::{WALK, group_size, is_wide, lanes};
use crate::{Compute, Device, Result};

const TEMPLATE: &str = include_str!("../../../kernels/norm.cl");

pub(super) fn run(rows: &Rows, device: Device) -> Result<()> {
    let (tensors, numbers) = (rows.tensors(), [switches(rows), rows.eps.to_bits()]);
    let key = Key { of: Of::NormRows, device, numbers: &numbers, exprs: &[], tensors: &tensors };
    memo::launch(&key, Params::default(), || prepare(rows)).map(drop)
}

/// What a kernel is made with besides types and sizes, a bit each.
fn switches(rows: &Rows) -> u64 {
    let given = [rows.z, rows.weight, rows.bias, rows.sums].map(|t| t.is_some());
    given.into_iter().chain([rows.rms]).fold(0, |bits, on| bits << 1 | u64::from(on))
}

/// Tensors of the launch are those of [`Rows::tensors`].
pub(super) fn prepare(rows: &Rows) -> Result<Prepared> {
    let tensors = rows.tensors();
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
    let dims = rows.x.shape().dims();
    let sizes = [dims[1], dims[2], dims[3]].map(|d| d as i64);
    let strided = [Some(rows.x), Some(rows.y), rows.z, rows.weight, rows.bias];
    let strides = strided.iter().flat_map(|t| t.unwrap_or(rows.x).strides().iter().map(|&s| s as i64));
    let mut ready = Ready::new(kernel, global, local);
    (0..tensors.len()).for_each(|k| ready.tensor(k));
    ready.words(sizes.into_iter().chain(strides));
    let eps = match dtype.compute() {
        Compute::F64 => Arg::F64(rows.eps),
        _ => Arg::F32(rows.eps as f32),
    };
    ready.args([Arg::U64(count as u64), eps, Arg::U32(shared as u32)]);
    Ok(Prepared::one(device, ready))
}
