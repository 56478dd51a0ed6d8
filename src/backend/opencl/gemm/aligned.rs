//! Copies f16 and bf16 matrices whose rows are not aligned for tensor cores. For a large product, the copies take less time than a
//! kernel without tensor cores would lose.

use crate::backend::opencl::gemm::uses_cpu_kernels;
use crate::backend::problem::gemm::Gemm;
use crate::layout::Layout;
use crate::{Result, Shape, Tensor};

/// The minimum m, n and k of a product whose matrices are copied.
const MIN_SIDE_LEN: usize = 64;
/// The minimum number of multiplications, m * n * k, of a product whose matrices are copied.
const MIN_MULTIPLICATIONS: usize = 1 << 28;

/// The alignment of rows, in bytes, that tensor cores need: the size of the shortest asynchronous copy.
const MIN_ROW_ALIGNMENT_BYTES: usize = 4;
/// The alignment of the rows of a copy, in bytes: the size of the longest asynchronous copy.
const COPY_ALIGNMENT_BYTES: usize = 16;

/// Returns both matrices of the product, with at least one of them copied. None if neither needs a copy, or if the product is too small.
pub(super) fn aligned_copies(g: &Gemm, shape: &Shape) -> Result<Option<[Tensor; 2]>> {
    let size = g.a.dtype.size();
    if size != 2 || g.b.dtype != g.a.dtype || has_aligned_rows(&g.a.layout, size) && has_aligned_rows(&g.b.layout, size)
    {
        return Ok(None);
    }
    let ([.., m, n], [.., k]) = (shape.dims(), g.a.shape().dims()) else { return Ok(None) };
    let device = g.a.cl_device()?;
    let is_large = (*m).min(*n).min(*k) >= MIN_SIDE_LEN && m * n >= MIN_MULTIPLICATIONS.div_ceil(*k);
    let has_cores = || device.tensor_cores().local > 0;
    #[cfg(test)]
    let has_cores = || super::tests::PRETEND_GPU.get() || has_cores();
    if !is_large || uses_cpu_kernels(device) || !has_cores() {
        return Ok(None);
    }
    let copy = |t: &Tensor| if has_aligned_rows(&t.layout, size) { Ok(t.detach()) } else { copy_aligned(t) };
    Ok(Some([copy(g.a)?, copy(g.b)?]))
}

/// True if one of the last two dims is contiguous, and each line along that dim begins at a multiple of [`MIN_ROW_ALIGNMENT_BYTES`] bytes.
fn has_aligned_rows(layout: &Layout, size: usize) -> bool {
    let [batch @ .., row, col] = &layout.strides[..] else { return true };
    let line = match (*row, *col) {
        (line, 1) | (1, line) => line,
        _ => return false,
    };
    let mut steps = batch.iter().copied().chain([line, layout.offset as isize]);
    steps.all(|step| (step.unsigned_abs() * size).is_multiple_of(MIN_ROW_ALIGNMENT_BYTES))
}

/// Copies a matrix so that its rows, or its columns if the columns are contiguous, begin at multiples of [`COPY_ALIGNMENT_BYTES`] bytes. Batch
/// dims with stride 0 stay broadcast.
fn copy_aligned(t: &Tensor) -> Result<Tensor> {
    let last = t.rank() - 1;
    let by_columns = t.strides()[last - 1] == 1;
    let mut whole = if by_columns { t.layout.transpose(last - 1, last) } else { t.layout.clone() };
    let dims = whole.shape.dims().to_vec();
    let is_broadcast = |d: usize| d + 1 < last && whole.strides[d] == 0;
    let kept = dims.iter().enumerate().map(|(d, &n)| if is_broadcast(d) { 1 } else { n }).collect::<Vec<_>>();
    let mut padded = kept.clone();
    padded[last] = kept[last].next_multiple_of(COPY_ALIGNMENT_BYTES / t.dtype.size());
    let mut layout = Layout::contiguous(Shape::from(&padded[..]));
    let out = Tensor::empty_with_shape(&padded[..], t.dtype, t.device())?;
    (layout.shape, whole.shape) = (Shape::from(&kept[..]), Shape::from(&kept[..]));
    out.with_layout(layout.clone()).copy_(&t.detach().with_layout(whole))?;
    let made = out.with_layout(layout.broadcast_to(&Shape::from(&dims[..])));
    Ok(if by_columns { made.with_layout(made.layout.transpose(last - 1, last)) } else { made })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::opencl::gemm::tests::{PRETEND_GPU, small_ints};
    use crate::backend::problem::gemm::EPILOGUES;
    use crate::device::opencl;
    use crate::{DType, Device};

    #[test]
    fn rows_are_loaded_if_contiguous_and_aligned() {
        let layout = |strides: &[isize], offset| Layout {
            shape: Shape::from(&[2, 64, 64][3 - strides.len()..]),
            strides: strides.iter().copied().collect(),
            offset,
        };
        for (strides, offset, can) in [
            (&[64, 1][..], 0, true),
            (&[64, 1], 1, false),
            (&[1, 66], 2, true),
            (&[65, 1], 0, false),
            (&[1, 65], 0, false),
            (&[128, 2], 0, false),
            (&[0, -64, 1], 0, true),
            (&[4097, 64, 1], 0, false),
        ] {
            assert_eq!(has_aligned_rows(&layout(strides, offset), 2), can, "{strides:?} from {offset}");
        }
    }

    /// Checks that copies have aligned rows and unchanged elements, and that products of copies equal the CPU's products. Covers odd
    /// numbers of columns, transposed matrices, odd offsets and broadcast matrices.
    #[test]
    fn aligned_copies_give_the_cpus_products() {
        if opencl::count() == 0 {
            return;
        }
        let run = |device| {
            let parts = |rows, cols| small_ints([rows + 1, cols], DType::BF16, device).narrow(0, 1, rows).unwrap();
            let (a, b) = (parts(1031, 517), parts(517, 519));
            let shared = parts(1031, 517).unsqueeze(0).unwrap().expand([2, 1031, 517]).unwrap();
            let pairs = [
                [a.shallow_clone(), b.shallow_clone()],
                [parts(517, 1031).t().unwrap(), parts(519, 517).t().unwrap()],
                [shared, b.unsqueeze(0).unwrap().expand([2, 517, 519]).unwrap()],
                [a.narrow(1, 1, 512).unwrap(), b.narrow(0, 2, 512).unwrap()],
            ];
            let product = |[a, b]: [Tensor; 2]| {
                let g = Gemm::plain("test", &a, &b, std::slice::from_ref(&EPILOGUES.product), &DType::F32);
                if device != Device::Cpu {
                    let [m, n] = [a.shape().dims()[a.rank() - 2], b.shape().dims()[b.rank() - 1]];
                    let shape = Shape::from([m, n]);
                    for (copy, t) in aligned_copies(&g, &shape).unwrap().expect("worth it").iter().zip([&a, &b]) {
                        assert!(has_aligned_rows(&copy.layout, 2) && copy.shape() == t.shape());
                        assert_eq!(copy.to_vec::<half::bf16>().unwrap(), t.to_vec::<half::bf16>().unwrap());
                    }
                }
                g.compute_one().unwrap().to_vec::<f32>().unwrap()
            };
            pairs.map(product)
        };
        PRETEND_GPU.set(true);
        let got = run(Device::OpenCL(0));
        PRETEND_GPU.set(false);
        assert!(got == run(Device::Cpu));
        // This product is below the size limits, so no matrix is copied.
        let t = small_ints([65, 65], DType::BF16, Device::OpenCL(0));
        let small = Gemm::plain("test", &t, &t, std::slice::from_ref(&EPILOGUES.product), &DType::F32);
        PRETEND_GPU.set(true);
        let copied = aligned_copies(&small, t.shape());
        PRETEND_GPU.set(false);
        assert!(copied.unwrap().is_none());
    }
}
