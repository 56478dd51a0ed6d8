//! Triangular matrices (`tril`, `triu`) on OpenCL: `kernels/triangle.cl`.

use crate::backend::opencl::geometry::{
    STRIDED_DIMS, bits_type, index_type, launch_tuned, needs_64_bit, tensor_args, vector_width,
};
use crate::backend::opencl::kernels::{KernelKey, get_or_build_kernel};
use crate::device::opencl::Arg;
use crate::{Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/triangle.cl");

/// Copies matrices, with zeros where column - row is in `from..to`. The matrices must not be empty. Takes one launch, and another to copy a strided
/// `x`.
pub(crate) fn tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Tensor> {
    let (device, x) = (x.cl_device()?, x.detach().contiguous()?);
    let [.., rows, columns] = *x.shape().dims() else { unreachable!("two dimensions at least") };
    let out = Tensor::empty_with_shape(x.shape(), x.dtype, x.device())?;
    let (count, size) = (x.numel(), x.dtype.size());
    let starts = [&x, &out].map(|t| t.layout.offset as isize);
    let (width, wide) = (vector_width(device, x.dtype, starts.into_iter()), needs_64_bit([count]));
    let params = [size as u64, width as u64, wide.into()];
    let kernel = get_or_build_kernel(device, KernelKey::new("triangle", &params), "triangle", || {
        let (t, idx, int) = (bits_type(size), index_type(wide), if wide { "long" } else { "int" });
        format!("#define T {t}\n#define VEC {width}\n#define IDX {idx}\n#define INT {int}\n{STRIDED_DIMS}{TEMPLATE}")
    })?;
    // Clamped to the diagonals of the matrices.
    let diagonal = |d: isize| Arg::I64(d.clamp(-(rows as isize), columns as isize) as i64);
    let size = |n: usize| Arg::U64(n as u64);
    let (read, written) = (x.device_view()?, out.device_view()?);
    let args = [size(rows), size(columns), diagonal(from), diagonal(to), size(count)];
    launch_tuned(device, &kernel, &tensor_args(&[&read, &written], args), count.div_ceil(width))?;
    drop((read, written));
    Ok(out)
}
