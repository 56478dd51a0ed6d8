use std::cell::Cell;

use crate::device::count_launches;
use crate::device::opencl::{self, TuningParameter};
use crate::storage::{MemoryMode, with_memory_mode};
use crate::{AvgPoolOptions, ConvOptions, Device, MaxPoolOptions, Result, Tensor};

thread_local! {
    /// Image size limits (width and height in pixels) that a test sets instead of the device's.
    pub(super) static IMAGE_LIMITS: Cell<Option<[usize; 2]>> = const { Cell::new(None) };
}

/// Returns the result of `f` and the number of its launches, on a device whose images have at most the width and height `limits`.
fn run_with_limits(limits: [usize; 2], f: impl Fn() -> Result<Tensor>) -> (Vec<f32>, u64) {
    IMAGE_LIMITS.set(Some(limits));
    let (made, launches) = count_launches(|| with_memory_mode(MemoryMode::Image, || f().unwrap()));
    IMAGE_LIMITS.set(None);
    (made.to_vec().unwrap(), launches)
}

#[test]
fn high_batches_are_divided_and_wide_ones_read_buffers() {
    for device in Device::all().into_iter().filter(|&device| device != Device::Cpu) {
        let whole = |n: i64, dims: &[usize]| Tensor::arange(0, n, 1, device).unwrap().reshape(dims).unwrap();
        let x = whole(5 * 6 * 4 * 5, &[5, 6, 4, 5]).remainder_scalar(7).unwrap();
        let weight = whole(3 * 6 * 2 * 2, &[3, 6, 2, 2]).remainder_scalar(5).unwrap();
        let conv = || x.conv2d(&weight, None, ConvOptions::default());
        let most = || x.max_pool2d([2, 2], MaxPoolOptions::default());
        let mean = || x.avg_pool2d([2, 2], AvgPoolOptions::default());
        let sum = || x.add(&x);
        let operations: [(&dyn Fn() -> Result<Tensor>, bool); 4] =
            [(&conv, true), (&most, true), (&mean, true), (&sum, false)];
        for (f, cuts) in operations {
            let want = with_memory_mode(MemoryMode::Buffer, || f().unwrap()).to_vec::<f32>().unwrap();
            // The whole batch fits in an image of 10 x 20 pixels. The other limits divide the batch into 2 + 2 + 1 items, or into single items.
            for (limits, launches) in [([10, 20], 1), ([10, 8], 3), ([10, 11], 3), ([64, 4], 5)] {
                let (got, count) = run_with_limits(limits, f);
                assert_eq!(got, want);
                assert!(count == launches || !cuts, "{count} launches within {limits:?}");
            }
            // Not even one item of the batch fits in the width or in the height, so buffers are read.
            for limits in [[9, 20], [10, 3], [0, 0]] {
                assert_eq!(run_with_limits(limits, f).0, want);
            }
        }
    }
}

/// In mode auto, the tuning parameter decides whether images are read. Other threads that pool meanwhile get the same results.
#[test]
fn auto_reads_images_if_the_tuned_parameter_says_so() {
    for device in Device::all().into_iter().filter(|&device| device != Device::Cpu) {
        let cl = opencl::open_device(device).unwrap();
        let x = Tensor::arange(0, 96, 1, device).unwrap().reshape([1, 6, 4, 4]).unwrap();
        let pool = |mode| with_memory_mode(mode, || x.max_pool2d([2, 2], MaxPoolOptions::default())).unwrap();
        let want = pool(MemoryMode::Buffer).to_vec::<f32>().unwrap();
        let images = || device.image_memory_stats().unwrap().allocation.allocated;
        cl.tuning().set(TuningParameter::PoolingImages, 1);
        let before = images();
        let got = pool(MemoryMode::Auto).to_vec::<f32>().unwrap();
        cl.tuning().set(TuningParameter::PoolingImages, 0);
        assert!(cl.image_limits().is_none() || images() > before);
        assert_eq!(got, want);
    }
}
