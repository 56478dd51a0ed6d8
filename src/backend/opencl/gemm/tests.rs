use std::cell::Cell;

use crate::Device;
use crate::backend::opencl::gemm::*;
use crate::backend::opencl::kernels::hashed_values;
use crate::device::opencl;
use crate::ops::Expr;

thread_local! {
    /// Makes every device use the GPU kernels.
    pub(crate) static PRETEND_GPU: Cell<bool> = const { Cell::new(false) };
}

pub(super) fn small_ints(shape: [usize; 2], dtype: DType, device: Device) -> Tensor {
    let values: Vec<i64> = (0..shape[0] * shape[1]).map(|i| ((i * i + i) % 7) as i64 - 3).collect();
    Tensor::from_vec(values, shape, device).unwrap().to_dtype(dtype).unwrap()
}

/// Compares products with tiles of 32, 64 and 128 with the CPU's, in every orientation, with an epilogue of two results, a row and a
/// scalar. A device with few compute units uses large tiles even for small sizes.
#[test]
fn the_tiled_kernel_equals_the_cpu() {
    if opencl::count() == 0 {
        return;
    }
    let device = Device::OpenCL(0);
    let sizes = [(1, 1, 1), (31, 33, 64), (20, 32, 65), (64, 65, 33), (70, 63, 1), (3, 99, 0)];
    // With the second and the third size, work-items store four adjacent results at once.
    let large = [(129, 130, 17), (128, 128, 16), (256, 128, 17)]; // a slow kernel to build on a CPU: two orientations
    let all = sizes.into_iter().flat_map(|size| (0..8).map(move |turns| (size, turns)));
    for (size, turns) in all.chain(large.into_iter().flat_map(|size| [(size, 0), (size, 7)])) {
        check(device, DType::F32, size, turns);
    }
    for dtype in [DType::F16, DType::BF16, DType::F64, DType::I32] {
        if dtype != DType::F64 || device.info().unwrap().fp64 {
            check(device, dtype, (31, 33, 64), 1);
            check(device, dtype, (70, 65, 33), 2);
            check(device, dtype, (128, 68, 33), 0);
        }
    }
}

/// Products with one to four rows or columns, with a small and a large k, in every orientation, equal the CPU's.
#[test]
fn the_thin_kernel_equals_the_cpu() {
    if opencl::count() == 0 {
        return;
    }
    let device = Device::OpenCL(0);
    let sizes =
        [(1, 1, 1), (1, 257, 9), (2, 31, 300), (4, 300, 65), (33, 1, 255), (257, 3, 64), (1, 2, 20_000), (3, 5, 0)];
    for (size, turns) in sizes.into_iter().flat_map(|size| (0..8).map(move |turns| (size, turns))) {
        check(device, DType::F32, size, turns);
    }
    for dtype in [DType::F16, DType::BF16, DType::F64, DType::I32] {
        if dtype != DType::F64 || device.info().unwrap().fp64 {
            check(device, dtype, (1, 70, 300), 0);
            check(device, dtype, (2, 70, 300), 2);
        }
    }
}

/// Compares a product with the CPU's. The bits of `turns` select which of a, b and the result are transposed.
fn check(device: Device, dtype: DType, (m, n, k): (usize, usize, usize), turns: u8) {
    let run = |device| {
        let matrix = |rows, cols, transposed: bool| match transposed {
            true => small_ints([cols, rows], dtype, device).t().unwrap(),
            false => small_ints([rows, cols], dtype, device),
        };
        let (a, b) = (matrix(m, k, turns & 1 > 0), matrix(k, n, turns & 2 > 0));
        let (bias, slot) = (small_ints([1, n], dtype, device), matrix(m, n, turns & 4 > 0));
        let sum = Expr::input(0) + Expr::input(1);
        let outs = Gemm {
            op: "test",
            a: &a,
            b: &b,
            epilogue: &[&sum * Expr::scalar(0), sum],
            extras: &[&bias],
            scalars: &[2.into()],
            out: Some(slot.shallow_clone()),
            dtypes: &[dtype, DType::F32],
            sums: None,
        }
        .compute_all()
        .unwrap();
        assert!(outs[0].shares_storage(&slot) && outs[0].strides() == slot.strides());
        let f32s = |t: &Tensor| t.to(DType::F32, Device::Cpu).unwrap().to_vec::<f32>().unwrap();
        outs.iter().map(f32s).collect::<Vec<_>>()
    };
    PRETEND_GPU.set(true);
    let got = run(device);
    PRETEND_GPU.set(false);
    assert_eq!(got, run(Device::Cpu), "{dtype} {m} x {k} x {n}, transposed {turns:03b}, on {device}");
}

/// A product whose f16 or bf16 result is a view must not change the other elements of the larger tensor. Compares with the CPU for
/// numbers of columns that are not multiples of eight, and for tiles of every size including their edges.
#[test]
fn products_into_part_of_a_tensor_keep_the_rest() {
    if opencl::count() == 0 {
        return;
    }
    let run = |device, dtype, (m, n, k), batch: usize| {
        let (a, b) = (small_ints([batch * m, k], dtype, device), small_ints([k, n], dtype, device));
        let all = Tensor::full([batch, m + 1, n / 8 * 8 + 24], 7.0, device).unwrap().to_dtype(dtype).unwrap();
        let part = all.narrow(1, 1, m).unwrap().narrow(2, 8, n).unwrap();
        let a = a.reshape([batch, m, k]).unwrap();
        let product = Expr::input(0);
        let gemm = Gemm { out: Some(part), ..Gemm::plain("test", &a, &b, std::slice::from_ref(&product), &dtype) };
        gemm.compute_one().unwrap();
        all.to(DType::F32, Device::Cpu).unwrap().to_vec::<f32>().unwrap()
    };
    for dtype in [DType::F16, DType::BF16] {
        for (size, batch) in [((1100, 2819, 136), 1), ((130, 259, 200), 1), ((70, 45, 40), 3), ((33, 64, 64), 2)] {
            let got = run(Device::OpenCL(0), dtype, size, batch);
            assert!(got == run(Device::Cpu, dtype, size, batch), "{dtype} {size:?}, {batch} of them");
        }
    }
}

#[test]
fn gemm_kernels_have_different_keys() {
    let mut keys = Vec::new();
    for flag in [false, true] {
        for (tile, k, items) in [(128, 16, 8), (64, 32, 4), (64, 16, 4), (32, 64, 4), (32, 32, 4)] {
            let tiled = |b_along_k| GemmKernel::Tiled { m: tile, n: tile, k, items, a_along_k: flag, b_along_k };
            keys.extend([false, true].map(|b_along_k| hashed_values(&tiled(b_along_k))));
        }
        for (rows, vectors, width) in [(1, 1, 8), (1, 2, 16), (6, 1, 16), (8, 2, 8), (8, 2, 16)] {
            for (depth, block) in [(128, 48), (256, 48), (256, 384)] {
                let panel = Panel { rows, vectors, depth, block };
                let height = AtLaunch(block);
                keys.push(hashed_values(&GemmKernel::Panel { panel, width, unit: flag, height }));
            }
        }
    }
    for (rows, cols, width) in [(1, 2, 8), (1, 4, 16), (2, 2, 16), (4, 4, 8), (4, 4, 16)] {
        keys.push(hashed_values(&GemmKernel::Dot { rows, cols, width }));
    }
    let count = keys.len();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), count);
}
