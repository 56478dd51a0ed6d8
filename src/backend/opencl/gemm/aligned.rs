//! Aligned copies of f16 and bf16 matrices whose rows are not aligned for tensor cores: for a large product a copy takes less time than a
//! kernel without tensor cores loses.

use crate::backend::opencl::gemm::is_processor;
use crate::backend::problem::gemm::Gemm;
use crate::layout::Layout;
use crate::{Result, Shape, Tensor};

/// The smallest side and the fewest multiplications of a product whose matrices are copied.
const LEAST_SIDE: usize = 64;
const LEAST_WORK: usize = 1 << 28;

/// The alignment that rows need, in bytes: that of the shortest asynchronous copy.
const LOADED: usize = 4;
/// The alignment of rows in a copy, in bytes: that of the longest asynchronous copy.
const ALIGNMENT: usize = 16;

/// The matrices of the product, of which at least one is a copy; None where both can be read as they are, or the product is too small.
pub(super) fn copies(g: &Gemm, shape: &Shape) -> Result<Option<[Tensor; 2]>> {
    let size = g.a.dtype.size();
    if size != 2 || g.b.dtype != g.a.dtype || is_loaded(&g.a.layout, size) && is_loaded(&g.b.layout, size) {
        return Ok(None);
    }
    let ([.., m, n], [.., k]) = (shape.dims(), g.a.shape().dims()) else { return Ok(None) };
    let device = g.a.cl_device()?;
    let is_large = (*m).min(*n).min(*k) >= LEAST_SIDE && m * n >= LEAST_WORK.div_ceil(*k);
    let has_cores = || device.tensor_cores().local > 0;
    #[cfg(test)]
    let has_cores = || super::tests::PRETEND_GPU.get() || has_cores();
    if !is_large || is_processor(device) || !has_cores() {
        return Ok(None);
    }
    let copy = |t: &Tensor| if is_loaded(&t.layout, size) { Ok(t.detach()) } else { copy(t) };
    Ok(Some([copy(g.a)?, copy(g.b)?]))
}

/// Whether one of the last two dims is contiguous, and all lines along it begin at multiples of [`LOADED`] bytes.
fn is_loaded(layout: &Layout, size: usize) -> bool {
    let [batch @ .., row, col] = &layout.strides[..] else { return true };
    let line = match (*row, *col) {
        (line, 1) | (1, line) => line,
        _ => return false,
    };
    let mut steps = batch.iter().copied().chain([line, layout.offset as isize]);
    steps.all(|step| (step.unsigned_abs() * size).is_multiple_of(LOADED))
}

/// A copy whose rows, or columns where these are contiguous, begin at multiples of [`ALIGNMENT`] bytes. Broadcast batch dims stay broadcast.
fn copy(t: &Tensor) -> Result<Tensor> {
    let last = t.rank() - 1;
    let by_columns = t.strides()[last - 1] == 1;
    let mut whole = if by_columns { t.layout.transpose(last - 1, last) } else { t.layout.clone() };
    let dims = whole.shape.dims().to_vec();
    let is_broadcast = |d: usize| d + 1 < last && whole.strides[d] == 0;
    let kept = dims.iter().enumerate().map(|(d, &n)| if is_broadcast(d) { 1 } else { n }).collect::<Vec<_>>();
    let mut padded = kept.clone();
    padded[last] = kept[last].next_multiple_of(ALIGNMENT / t.dtype.size());
    let mut layout = Layout::contiguous(Shape::from(&padded[..]));
    let out = Tensor::empty_like_shape(&padded[..], t.dtype, t.device())?;
    (layout.shape, whole.shape) = (Shape::from(&kept[..]), Shape::from(&kept[..]));
    out.with_layout(layout.clone()).copy_(&t.detach().with_layout(whole))?;
    let made = out.with_layout(layout.broadcast_to(&Shape::from(&dims[..])));
    Ok(if by_columns { made.with_layout(made.layout.transpose(last - 1, last)) } else { made })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::opencl::gemm::tests::{PRETEND_GPU, whole};
    use crate::backend::problem::gemm::PRODUCT;
    use crate::device::opencl;
    use crate::{DType, Device};

    #[test]
    fn rows_that_can_be_loaded() {
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
            assert_eq!(is_loaded(&layout(strides, offset), 2), can, "{strides:?} from {offset}");
        }
    }

    /// With odd numbers of columns, transposed matrices, odd offsets and broadcast matrices, copies are aligned and equal, and products with
    /// them are those of the CPU.
    #[test]
    fn copies_of_matrices() {
        if opencl::count() == 0 {
            return;
        }
        let run = |device| {
            let parts = |rows, cols| whole([rows + 1, cols], DType::BF16, device).narrow(0, 1, rows).unwrap();
            let (a, b) = (parts(1031, 517), parts(517, 519));
            let shared = parts(1031, 517).unsqueeze(0).unwrap().expand([2, 1031, 517]).unwrap();
            let pairs = [
                [a.shallow_clone(), b.shallow_clone()],
                [parts(517, 1031).t().unwrap(), parts(519, 517).t().unwrap()],
                [shared, b.unsqueeze(0).unwrap().expand([2, 517, 519]).unwrap()],
                [a.narrow(1, 1, 512).unwrap(), b.narrow(0, 2, 512).unwrap()],
            ];
            let product = |[a, b]: [Tensor; 2]| {
                let g = Gemm::plain("test", &a, &b, std::slice::from_ref(&PRODUCT), &DType::F32);
                if device != Device::Cpu {
                    let [m, n] = [a.shape().dims()[a.rank() - 2], b.shape().dims()[b.rank() - 1]];
                    let shape = Shape::from([m, n]);
                    for (copy, t) in copies(&g, &shape).unwrap().expect("worth it").iter().zip([&a, &b]) {
                        assert!(is_loaded(&copy.layout, 2) && copy.shape() == t.shape());
                        assert_eq!(copy.to_vec::<half::bf16>().unwrap(), t.to_vec::<half::bf16>().unwrap());
                    }
                }
                g.run_one().unwrap().to_vec::<f32>().unwrap()
            };
            pairs.map(product)
        };
        PRETEND_GPU.set(true);
        let got = run(Device::OpenCL(0));
        PRETEND_GPU.set(false);
        assert!(got == run(Device::Cpu));
        // A product that is too small for copies.
        let t = whole([65, 65], DType::BF16, Device::OpenCL(0));
        let small = Gemm::plain("test", &t, &t, std::slice::from_ref(&PRODUCT), &DType::F32);
        PRETEND_GPU.set(true);
        let copied = copies(&small, t.shape());
        PRETEND_GPU.set(false);
        assert!(copied.unwrap().is_none());
    }
}
