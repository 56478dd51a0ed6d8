//! Triangular matrices (`tril`, `triu`) on OpenCL: `kernels/triangle.cl`.

use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/triangle.cl");

/// Copies matrices, with zeros where column - row is in `from..to`. The matrices must not be empty. Takes one launch, plus a launch to make a
/// strided `x` contiguous.
pub(crate) fn tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Tensor> {
    let (device, x) = (x.cl_device()?, x.detach().contiguous()?);
    let [.., rows, columns] = *x.shape().dims() else { unreachable!("two dimensions at least") };
    let out = Tensor::empty_with_shape(x.shape(), x.dtype, x.device())?;
    let (count, size) = (x.numel(), x.dtype.size());
    let starts = [&x, &out].map(|t| t.layout.offset as isize);
    let (width, wide) = (vector_width(device, x.dtype, starts.into_iter()), needs_64_bit([count]));
    let config = kernel_config! {
        "T" => bits_type(size), "VEC" => width, "IDX" => index_type(wide), "INT" => offset_type(wide),
    };
    let kernel = config.kernel(device, "triangle", "triangle", &[STRIDED_DIMS, TEMPLATE])?;
    // Diagonals are clamped to the range of the matrices.
    let diagonal = |d: isize| d.clamp(-(rows as isize), columns as isize);
    let (read, written) = (x.device_view()?, out.device_view()?);
    let args = args![read, written; rows, columns, diagonal(from), diagonal(to), count];
    launch_tuned(device, &kernel, &args, count.div_ceil(width))?;
    drop((read, written));
    Ok(out)
}
