//! Interpolation on OpenCL: `kernels/interpolate.cl`.

use smallvec::SmallVec;

use crate::Result;
use crate::backend::opencl::geometry::{STRIDED_DIMS, launch_tuned, needs_64_bit, offset_type, vector_width};
use crate::backend::opencl::kernels::{Bit, KernelConfig, args, element_types, kernel_config};
use crate::backend::problem::interpolation::{Interpolate, Samples};
use crate::backend::problem::windows::sizes_4d;

const TEMPLATE: &str = include_str!("../../../kernels/interpolate.cl");

/// Returns the words of the struct that the kernels take. The last word is the integer part of the scale.
fn samples_words(s: &Samples) -> [i64; 6] {
    [s.from as i64, s.to as i64, s.scale, s.shift, s.unit, s.scale / s.unit]
}

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
    let words: SmallVec<[i64; 20]> =
        [rows, columns].iter().flat_map(samples_words).chain([c as i64]).chain(strides).collect();
    let (from, to) = (x.device_view()?, out.device_view()?);
    let args = args![from, to; &words[..], items];
    launch_tuned(device, &kernel, &args, items)
}
