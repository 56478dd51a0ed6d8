//! Grouped convolutions with one or a few channels per group, and their gradients.

use claystone::autograd::gradgradcheck;
use claystone::{ConvTransposeOptions, DType, Device, Tensor};

use crate::conv_size::{Size, compare, compare_special, pseudo_random, repeats, size};

/// Returns a depthwise convolution: one input and one output channel per group.
const fn planes(n: usize, groups: usize, image: [usize; 2], kernel: [usize; 2]) -> Size {
    size(n, [1, 1], image, kernel).groups(groups)
}

/// Sizes at the edges of vectors, of blocks of vectors and channels, and of the sections into which planes and rows are split.
const SIZES: &[Size] = &[
    planes(1, 2, [1, 1], [1, 1]),
    planes(2, 3, [1, 1], [3, 3]).with_geometry([3, 3], [4, 4], [2, 2]), // windows that contain only padding
    planes(2, 3, [7, 7], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    planes(1, 5, [8, 15], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    planes(2, 2, [13, 16], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    planes(1, 3, [16, 17], [5, 4]).with_geometry([1, 1], [2, 2], [1, 1]),
    planes(1, 2, [31, 33], [3, 3]).with_geometry([1, 1], [0, 1], [1, 1]),
    planes(3, 2, [28, 28], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    planes(1, 3, [12, 13], [3, 3]).with_geometry([1, 1], [2, 3], [2, 3]),
    planes(1, 2, [9, 40], [1, 7]).with_geometry([1, 1], [0, 3], [1, 1]),
    planes(1, 2, [40, 9], [7, 1]).with_geometry([1, 1], [3, 0], [1, 1]),
    planes(2, 3, [2, 3], [5, 4]).with_geometry([1, 1], [4, 3], [1, 1]), // windows larger than the image
    planes(2, 3, [28, 29], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]),
    planes(1, 3, [17, 38], [3, 3]).with_geometry([2, 2], [0, 0], [1, 1]),
    planes(1, 2, [15, 20], [2, 2]).with_geometry([2, 2], [0, 0], [1, 1]),
    planes(1, 2, [15, 20], [1, 1]).with_geometry([2, 2], [0, 0], [1, 1]), // stride 2 with a 1 x 1 kernel: every second row and column is not read
    planes(1, 2, [15, 20], [3, 3]).with_geometry([2, 2], [1, 1], [2, 2]),
    planes(1, 2, [23, 29], [2, 2]).with_geometry([5, 4], [0, 1], [1, 1]), // gaps between windows
    planes(1, 2, [19, 22], [4, 3]).with_geometry([3, 1], [2, 1], [2, 3]),
    planes(2, 3, [10, 11], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).of(1, 2),
    planes(1, 2, [9, 18], [3, 2]).with_geometry([2, 1], [1, 1], [1, 2]).of(1, 7),
    planes(2, 2, [10, 11], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).of(3, 1),
    planes(1, 3, [14, 14], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).of(4, 4),
    planes(2, 2, [6, 19], [3, 3]).with_geometry([1, 2], [1, 1], [1, 1]).of(5, 6),
    planes(1, 2, [12, 12], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).of(8, 8),
    planes(67, 2, [3, 4], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    planes(3, 41, [21, 23], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // several jobs for the threads
    planes(1, 1, [151, 157], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // the plane is split into sections for several jobs
    planes(1, 2, [203, 97], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]),
    planes(2, 2, [1, 20011], [1, 4]).with_geometry([1, 1], [0, 3], [1, 1]), // the row is split into sections
    planes(1, 2, [2, 40009], [2, 3]).with_geometry([1, 2], [1, 0], [1, 2]),
    planes(0, 2, [5, 5], [3, 3]),
];

#[test]
fn depthwise_convolutions_match_their_definition() {
    for size in SIZES {
        for turned in [false, true] {
            [DType::F32, DType::F64, DType::F16, DType::BF16].into_iter().for_each(|d| compare(size, 0, d, turned));
            (1..4).for_each(|how| compare(size, how, DType::F32, turned));
        }
    }
    for size in &SIZES[..25] {
        (1..4).for_each(|how| compare(size, how, if how == 2 { DType::BF16 } else { DType::F64 }, how == 3));
    }
}

#[test]
fn depthwise_convolutions_propagate_nan_and_infinity() {
    let plain = planes(2, 3, [9, 20], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]);
    let halved = planes(2, 3, [13, 20], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]).of(1, 2);
    for size in [plain, plain.of(2, 4), halved] {
        [false, true].into_iter().for_each(|turned| compare_special(&size, DType::F32, turned));
    }
}

#[test]
fn depthwise_convolutions_have_second_derivatives() {
    for (size, turned) in [
        (planes(2, 2, [4, 5], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), false),
        (planes(1, 2, [5, 5], [3, 2]).with_geometry([2, 1], [1, 0], [1, 2]).of(1, 2), false),
        (planes(1, 2, [5, 6], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]), true),
    ] {
        let [x, weight, bias, _] = size.shapes(turned);
        let inputs = [
            pseudo_random(&x, 1, DType::F64),
            pseudo_random(&weight, 2, DType::F64),
            pseudo_random(&bias, 3, DType::F64),
        ];
        let squares = |t: &[Tensor]| size.run([&t[0], &t[1], &t[2]], turned)?.square()?.sum((), false);
        gradgradcheck(squares, &inputs, 1e-6).unwrap_or_else(|e| panic!("{size:?}: {e}"));
    }
}

#[test]
fn depthwise_convolutions_take_one_launch_and_are_deterministic() {
    repeats(&planes(5, 20, [19, 23], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), true);
}

/// Each dim is within its limit, but the number of elements in a plane overflows.
#[test]
fn planes_larger_than_any_memory_are_errors() {
    let ones = |shape: &[usize]| Tensor::ones(shape, Device::Cpu).unwrap();
    let far = ConvTransposeOptions { stride: [1 << 29; 2], padding: 1.into(), ..ConvTransposeOptions::default() };
    assert!(ones(&[1, 1, 9, 9]).conv_transpose2d(&ones(&[1, 1, 2, 2]), None, far).is_err());
}
