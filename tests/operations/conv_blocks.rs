//! Convolutions that the CPU computes in blocks, and their gradients.

use claystone::autograd::{GradOptions, grad_with_options};
use claystone::{ConvOptions, ConvTransposeOptions, DType, Tensor, no_grad};

use crate::common::{each_device, in_own_process, values};
use crate::conv::has_single_launch_kernels;
use crate::conv_size::{Size, compare, compare_special, pseudo_random, repeats, size};

/// Sizes at the edges of every kernel's tiles and vectors, of channel blocks, of image sections and of groups of images.
const SIZES: &[Size] = &[
    size(2, [3, 5], [9, 11], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    size(1, [1, 1], [5, 7], [2, 3]),
    size(3, [13, 12], [28, 28], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    size(2, [5, 11], [13, 17], [3, 3]).with_geometry([1, 1], [2, 0], [2, 3]),
    size(2, [4, 33], [16, 16], [5, 5]).with_geometry([1, 1], [2, 2], [1, 1]),
    size(2, [7, 31], [15, 32], [1, 3]).with_geometry([1, 1], [0, 1], [1, 1]),
    size(2, [6, 17], [31, 9], [3, 1]).with_geometry([1, 1], [1, 0], [1, 1]),
    size(2, [3, 24], [33, 31], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]),
    size(1, [3, 13], [40, 37], [7, 7]).with_geometry([2, 3], [3, 3], [1, 1]),
    size(2, [3, 4], [23, 29], [2, 2]).with_geometry([5, 4], [0, 1], [1, 1]), // gaps between windows, so that some pixels are not read
    size(2, [3, 4], [2, 3], [5, 4]).with_geometry([1, 1], [4, 3], [1, 1]),   // windows larger than the image
    size(1, [2, 3], [1, 1], [3, 3]).with_geometry([3, 3], [4, 4], [2, 2]),   // windows that contain only padding
    size(2, [3, 4], [4, 4], [3, 3]).with_geometry([1, 1], [6, 6], [1, 1]),
    size(1, [4, 6], [12, 12], [3, 3]).with_geometry([1, 1], [9, 9], [9, 9]), // kernel taps farther apart than the length of a row
    size(2, [17, 16], [9, 10], [3, 3]).with_geometry([1, 2], [1, 1], [2, 1]).groups(3),
    size(3, [1, 3], [14, 14], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).groups(4),
    size(1, [24, 33], [6, 6], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).groups(2),
    size(67, [5, 9], [3, 3], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // several images per job, and fewer images in the last job
    size(67, [20, 13], [3, 4], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).groups(2),
    size(37, [6, 5], [7, 7], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]),
    size(1, [3, 7], [64, 65], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // the image is processed in sections
    size(1, [2, 3], [1, 1031], [1, 5]).with_geometry([1, 1], [0, 2], [1, 1]), // the single row is processed in sections
    size(1, [2, 3], [1, 1031], [1, 5]).with_geometry([1, 3], [0, 2], [1, 2]),
    size(5, [2, 3], [1, 40], [1, 4]).with_geometry([1, 2], [0, 0], [1, 1]),
    size(1, [90, 4], [28, 28], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // more channels than fit into the cache
    size(1, [61, 130], [12, 12], [5, 5]).with_geometry([1, 1], [2, 2], [1, 1]),
    size(1, [2, 40], [61, 60], [5, 5]).with_geometry([1, 1], [2, 2], [1, 1]), // windows that do not fit into the cache
    size(1, [3, 2], [1, 9001], [1, 9]).with_geometry([1, 1], [0, 4], [1, 1]),
    size(9, [64, 33], [7, 7], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // AMX kernels process two rows at a time; the number of windows is odd
    size(2, [79, 64], [11, 13], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // AMX kernels process two rows at a time, and one row remains
];

#[test]
fn convolutions_in_blocks_match_their_definition() {
    for size in SIZES {
        for turned in [false, true] {
            (0..5).for_each(|how| compare(size, how, DType::F32, turned));
            [DType::F16, DType::BF16].into_iter().for_each(|dtype| compare(size, 0, dtype, turned));
        }
    }
    for size in &SIZES[..12] {
        for dtype in [DType::F16, DType::BF16] {
            (1..5).for_each(|how| compare(size, how, dtype, how == 2));
        }
    }
}

/// The im2col columns are too large to be in memory at once, so they are computed in blocks: several images, rows of an image, or
/// channels of an image.
#[test]
fn convolutions_in_blocks_of_columns_match_their_definition() {
    for size in [
        size(3, [20, 4], [130, 130], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
        size(1, [6, 3], [256, 260], [3, 5]).with_geometry([1, 1], [2, 0], [1, 2]),
        size(2, [3, 4], [521, 517], [5, 3]).with_geometry([2, 1], [1, 2], [2, 1]),
        size(2, [11, 4], [130, 128], [3, 3]).with_geometry([1, 1], [2, 1], [1, 1]).groups(2),
        size(1, [3, 2], [300, 1100], [2, 2]).with_geometry([1, 1], [4, 4], [1, 1]), // rows that contain only padding
    ] {
        for turned in [false, true] {
            compare(&size, 0, DType::F32, turned);
        }
        compare(&size, 1, DType::BF16, false);
    }
}

/// The im2col columns of these images would take 72 MiB. They must never all be in memory at once, and must not be cached.
#[test]
fn convolutions_use_little_extra_memory() {
    if !in_own_process("conv_blocks::convolutions_use_little_extra_memory") {
        return;
    }
    each_device(|device| {
        let at = (DType::F32, device);
        let leaf = |shape: &[usize]| Tensor::full(shape, 0.5, at).unwrap().requires_grad_(true).unwrap();
        let (x, w, b) = (leaf(&[16, 32, 64, 64]), leaf(&[32, 32, 3, 3]), leaf(&[32]));
        let grad = Tensor::ones([16, 32, 64, 64], at).unwrap();
        let (plain, turned) = (
            ConvOptions { padding: 1.into(), ..Default::default() },
            ConvTransposeOptions { padding: 1.into(), ..Default::default() },
        );
        let memory = || {
            device.synchronize().unwrap();
            device.memory_stats().unwrap().allocated_bytes
        };
        for transposed in [false, true] {
            let run = || match transposed {
                false => x.conv2d(&w, Some(&b), plain).unwrap(),
                true => x.conv_transpose2d(&w, Some(&b), turned).unwrap(),
            };
            // The first run makes copies of the weights, which the device caches, so memory is measured from the second run on.
            run().backward_with(&grad).unwrap();
            [&x, &w, &b].into_iter().for_each(Tensor::zero_grad);
            let before = memory().current;
            let more = |bytes: u64| (bytes - before) >> 20;
            device.reset_peak_stats().unwrap();
            drop(no_grad(run));
            let unrecorded = more(memory().peak);
            let y = run();
            let kept = more(memory().current);
            device.reset_peak_stats().unwrap();
            y.backward_with(&grad).unwrap();
            let backward = more(memory().peak);
            [&x, &w, &b].into_iter().for_each(Tensor::zero_grad);
            println!(
                "{device}, transposed {transposed}: {unrecorded} MiB without gradients, {kept} kept, {backward} in backward"
            );
            assert!(unrecorded < 44 && kept < 18 && backward < 60, "{unrecorded}, {kept}, {backward} MiB on {device}");
        }
    });
}

#[test]
fn convolutions_propagate_nan_and_infinity() {
    let size = size(2, [3, 13], [9, 20], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]);
    for dtype in [DType::F32, DType::BF16] {
        [false, true].into_iter().for_each(|turned| compare_special(&size, dtype, turned));
    }
}

/// Compares second derivatives with f64, for each combination of inputs that require a gradient.
#[test]
fn second_derivatives_of_convolutions_match_f64() {
    let size = size(2, [3, 4], [6, 7], [3, 3]).with_geometry([2, 1], [1, 1], [1, 1]);
    for (turned, wanted) in
        [false, true].into_iter().flat_map(|t| [[true, true], [true, false], [false, true]].map(|w| (t, w)))
    {
        let [x, weight, bias, _] = size.shapes(turned);
        let twice = |dtype: DType| {
            let leaf = |shape: &[usize], seed, wanted| {
                pseudo_random(shape, seed, DType::F32).to_dtype(dtype).unwrap().requires_grad_(wanted).unwrap()
            };
            let inputs = [leaf(&x, 1, wanted[0]), leaf(&weight, 2, wanted[1]), leaf(&bias, 3, true)];
            let y = size.run(inputs.each_ref(), turned).unwrap();
            let loss = y.mul(&y).unwrap().mul(&y).unwrap().sum((), false).unwrap();
            let leaves: Vec<&Tensor> = inputs.iter().filter(|t| t.requires_grad()).collect();
            let options = GradOptions { create_graph: true, ..GradOptions::default() };
            let first: Vec<Tensor> =
                grad_with_options(&[&loss], &leaves, options).unwrap().into_iter().flatten().collect();
            let squares = first.iter().map(|g| g.mul(g).unwrap().sum((), false).unwrap());
            let sum = squares.reduce(|a, b| a.add(&b).unwrap()).unwrap();
            sum.backward().unwrap();
            let second = leaves.iter().map(|t| values(&t.grad().unwrap()));
            first.iter().map(values).chain(second).collect::<Vec<_>>()
        };
        for (part, (got, want)) in twice(DType::F32).iter().zip(&twice(DType::F64)).enumerate() {
            let scale = want.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                assert!((got - want).abs() <= 1e-5 * scale, "{part}, {turned}, {wanted:?}: {i} is {got}, not {want}");
            }
        }
    }
}

#[test]
fn blocked_convolutions_take_one_launch_and_are_deterministic() {
    repeats(&size(64, [5, 13], [19, 23], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), has_single_launch_kernels());
}
