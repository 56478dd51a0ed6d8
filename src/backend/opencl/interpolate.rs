//! Interpolation on OpenCL: `kernels/interpolate.cl`.

use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/interpolate.cl");

pub(crate) fn interpolate(problem: &Interpolate) -> Result<()> {
    let &Interpolate { resize, x, out, transposed } = problem;
    let device = out.cl_device()?;
    let (count, dtype, [_, c, h, w]) = (out.numel(), out.dtype, sizes_4d(x));
    let [rows, columns] =
        [(resize.rows, h), (resize.columns, w)].map(|(p, n)| p.unwrap_or_else(|| Samples::identity(n)));
    let (wide, near) = (needs_64_bit([count]), rows.fits_32_bits() && columns.fits_32_bits());
    // In a gradient, adjacent elements are sums of different numbers of terms, so they cannot be computed as vectors.
    let width = match transposed {
        true => 1,
        false => vector_width(device, dtype, [columns.to, out.layout.offset].into_iter().map(|n| n as isize)),
    };
    let dense = x.strides()[3] == 1;
    let config = kernel_config! {
        "" => element_types(dtype, wide), "VEC" => width, "ROWS" => Bit(rows.linear),
        "COLUMNS" => Bit(columns.linear), "TRANSPOSED" => transposed, "DENSE" => dense, "INT" => offset_type(!near),
    };
    let kernel = config.kernel(device, "interpolate", "interpolate", &[STRIDED_DIMS, TEMPLATE])?;
    let items = count / width;
    let strides = x.strides().iter().map(|&s| s as i64);
    let samples = [rows, columns];
    let samples = samples.iter().flat_map(|s| [s.from as i64, s.to as i64, s.scale, s.shift, s.unit, s.scale / s.unit]);
    let words: SmallVec<[i64; 20]> = samples.chain([c as i64]).chain(strides).collect();
    let (from, to) = (x.device_view()?, out.device_view()?);
    let args = args![from, to; &words[..], items];
    launch_tuned(device, &kernel, &args, items)
}
