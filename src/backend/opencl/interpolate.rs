//! Images of other sizes on OpenCL: `kernels/interpolate.cl`.

use smallvec::SmallVec;

use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::reduce::{WALK, is_wide};
use crate::backend::problem::interpolation::{Places, Resize};
use crate::backend::problem::windows::four;
use crate::device::opencl::Arg;
use crate::{Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/interpolate.cl");

/// Work-items a group.
const LOCAL: usize = 64;

/// As [`crate::backend::cpu::interpolate::run`].
pub(crate) fn run(resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()> {
    let device = out.cl_device()?;
    let (count, dtype, [_, c, h, w]) = (out.numel(), out.dtype, four(x));
    let [rows, columns] = [(resize.rows, h), (resize.columns, w)].map(|(p, n)| p.unwrap_or_else(|| Places::same(n)));
    let (wide, near) = (is_wide([count]), rows.is_near() && columns.is_near());
    let flags = [transposed, rows.linear, columns.linear, wide, near].map(u64::from);
    let params = SmallVec::from_iter([dtype as u64].into_iter().chain(flags));
    let kernel = kernel(
        device,
        KernelKey { template: "interpolate", params, exprs: SmallVec::new() },
        "interpolate",
        || {
            let (acc, idx) = (dtype.compute(), if wide { "ulong" } else { "uint" });
            let [mixed_rows, mixed_columns] = [rows, columns].map(|places| u8::from(places.linear));
            let transposed = if transposed { "#define TRANSPOSED\n" } else { "" };
            let near = if near { "#define INT int\n" } else { "" };
            format!(
                "#define A {dtype}\n#define ACC {}\n#define ACC_NAME {acc:?}\n#define IDX {idx}\n#define ROWS {mixed_rows}\n\
             #define COLUMNS {mixed_columns}\n{transposed}{near}{WALK}{TEMPLATE}",
                acc.cl_name()
            )
        },
    )?;
    let strides = x.strides().iter().map(|&s| s as i64);
    let words: SmallVec<[i64; 16]> =
        rows.words().into_iter().chain(columns.words()).chain([c as i64]).chain(strides).collect();
    let (from, to) = (x.device_view()?, out.device_view()?);
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
