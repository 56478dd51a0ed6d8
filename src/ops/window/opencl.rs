//! Windows on OpenCL: `kernels/window.cl`.

use std::sync::Arc;

use smallvec::SmallVec;

use super::{Task, Windows, words};
use crate::device::opencl::{Arg, ClDevice, ClKernel};
use crate::ops::kernels::{KernelKey, kernel};
use crate::ops::reduce::opencl::{WALK, is_wide};
use crate::{DType, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/window.cl");

/// Work-items a group.
const LOCAL: usize = 64;

/// The kernel of a task, named by its macro, that computes in `dtype`'s compute type.
fn computing(
    device: &'static ClDevice,
    name: &'static str,
    dtype: DType,
    adaptive: bool,
    wide: bool,
) -> Result<Arc<ClKernel>> {
    let params = SmallVec::from_slice(&[dtype as u64, adaptive as u64, wide as u64]);
    kernel(device, KernelKey { template: name, params, exprs: SmallVec::new() }, "window", || {
        let (acc, idx) = (dtype.compute(), if wide { "ulong" } else { "uint" });
        let adaptive = if adaptive { "#define ADAPTIVE\n" } else { "" };
        format!(
            "#define {name}\n#define A {dtype}\n#define ACC {}\n#define ACC_NAME {acc:?}\n#define IDX {idx}\n{adaptive}{WALK}{TEMPLATE}",
            acc.cl_name()
        )
    })
}

pub(super) fn unfold(w: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()> {
    let device = out.cl_device()?;
    let (count, size) = (out.numel() / (w.kernel[0] * w.kernel[1]), out.dtype.size());
    let wide = is_wide([count]);
    let params = SmallVec::from_slice(&[size as u64, wide as u64]);
    let kernel = kernel(device, KernelKey { template: "UNFOLD", params, exprs: SmallVec::new() }, "window", || {
        let v = ["uchar", "ushort", "uint", "ulong"][size.ilog2() as usize];
        let idx = if wide { "ulong" } else { "uint" };
        format!("#define UNFOLD\n#define V {v}\n#define IDX {idx}\n{WALK}{TEMPLATE}")
    })?;
    let words = words(w, x, x.strides());
    let (from, to) = (x.place()?, out.place()?);
    let args = [
        from.buffer(),
        from.offset(),
        to.buffer(),
        to.offset(),
        Arg::Bytes(bytemuck::cast_slice(&words)),
        Arg::U64(count as u64),
        Arg::U32(inside.into()),
    ];
    device.launch(&kernel, &args, &[count], &[LOCAL])
}

pub(super) fn fold(w: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> {
    let device = out.cl_device()?;
    let count = out.numel();
    let kernel = computing(device, "FOLD_WINDOWS", out.dtype, false, is_wide([count]))?;
    let words = words(w, columns, columns.strides());
    let (from, to) = (columns.place()?, out.place()?);
    let args = [
        from.buffer(),
        from.offset(),
        to.buffer(),
        to.offset(),
        Arg::Bytes(bytemuck::cast_slice(&words)),
        Arg::U64(count as u64),
    ];
    device.launch(&kernel, &args, &[count], &[LOCAL])
}

pub(super) fn run(w: &Windows, task: Task, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
    let device = out.cl_device()?;
    let count = out.numel();
    let name = match task {
        Task::Max => "MAX",
        Task::Unmax => "UNMAX",
        Task::Mean(_) => "MEAN",
        Task::Unmean(_) => "UNMEAN",
    };
    let kernel = computing(device, name, out.dtype, w.adaptive, is_wide([count]))?;
    let words = words(w, x, x.strides());
    let words = Arg::Bytes(bytemuck::cast_slice(&words));
    let (from, to, place) = (x.place()?, out.place()?, index.place()?);
    let mut args: SmallVec<[Arg; 8]> = SmallVec::from_iter([from.buffer(), from.offset(), to.buffer(), to.offset()]);
    match task {
        Task::Max | Task::Unmax => args.extend([place.buffer(), place.offset(), words, Arg::U64(count as u64)]),
        Task::Mean(divisor) | Task::Unmean(divisor) => {
            args.extend([words, Arg::U64(count as u64), Arg::I64(divisor.code())]);
        }
    }
    device.launch(&kernel, &args, &[count], &[LOCAL])
}
