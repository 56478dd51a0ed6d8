use std::cell::Cell;

use crate::backend::opencl::implicit_gemm::*;
use crate::device::DeviceKind;
use crate::device::count_launches;
use crate::device::opencl::{self, TensorCores};
use crate::{ConvOptions, ConvTransposeOptions, Device, Padding};

thread_local! {
    /// The tensor cores that every device is assumed to have. [`STAND_IN`] replaces the kernels, which most devices cannot run.
    pub(crate) static PRETENDED_CORES: Cell<Option<TensorCores>> = const { Cell::new(None) };
}

/// A kernel in OpenCL C with the same parameters as the tensor-core kernel. It computes one element after another.
pub(crate) const STAND_IN: &str = concat!(
    "
// Functions that no one calls here have PTX, which only NVIDIA's compiler reads.
#ifndef __NV_CL_C_VERSION
#define asm
#define volatile(...)
#endif
",
    include_str!("../../../../kernels/windows_mma.cl"),
    "
__kernel void gemm(const __global CAT(A, _t)* a, const __global CAT(B, _t)* b, const params p OPERANDS)
{
#ifdef PARTS
    if (get_group_id(0) % PARTS != 0) return;
    const long index = get_group_id(0) / PARTS;
#else
    const long index = get_group_id(0);
#endif
    const long tiles_n = (COLS + TILE_N - 1) / TILE_N, tiles = (ROWS + TILE_M - 1) / TILE_M * tiles_n;
    const long z = index / tiles, i0 = index % tiles / tiles_n * TILE_M, j0 = index % tiles_n * TILE_N;
    const long a0 = p.v[3] + batch_offset(p, z, 9 + BATCH), b0 = p.v[6] + batch_offset(p, z, 9 + 2 * BATCH);
    OPERAND_OFFSETS(z)
    for (int e = get_local_id(0); e < TILE_M * TILE_N; e += get_local_size(0)) {
        const long row = i0 + e / TILE_N, col = j0 + e % TILE_N;
        if (row >= ROWS || col >= COLS) continue;
        float sum = 0;
        for (long k = 0; k < DEPTH; k++) {
            const uint window = LEFT ? row : B_ALONG_K ? col : k, element = LEFT || B_ALONG_K ? k : col;
            const uint tap = element / CHANNELS, channel = element % CHANNELS, r = tap / KERNEL_COLS, c = tap % KERNEL_COLS;
            uint inside;
            const long at = window_at(p, window, &inside) + element_at(p, r, c, channel);
            if ((inside & tap_bits(r, c)) != tap_bits(r, c) || (LEFT || B_ALONG_K) && bytes_inside(p, channel) == 0) continue;
#if LEFT
            const float x = CAT(load_, A)(a, a0 + at / BYTES);
#if B_ALONG_K
            sum += x * CAT(load_, B)(b, b0 + k * B_ROW + col * B_COL);
#else
            sum += x * CAT(load_, B)(b, b0 + channel * B_ROW + r * WEIGHT_ROW + c * WEIGHT_COL + col * B_COL);
#endif
#else
            sum += CAT(load_, A)(a, a0 + row * A_ROW + k * A_COL) * CAT(load_, B)(b, b0 + at / BYTES);
#endif
        }
        FINISH(row, col, sum)
    }
}
"
);

/// Returns integers from -2 to 2, whose sums of products are exact in every dtype.
fn small_ints(dims: &[usize], seed: usize, dtype: DType, device: Device) -> Tensor {
    let value = |i: usize| ((i * 37 + i * i * 11 + seed) % 5) as i64 - 2;
    let values: Vec<i64> = (0..dims.iter().product()).map(value).collect();
    Tensor::from_vec(values, dims, device).unwrap().to_dtype(dtype).unwrap()
}

struct Case {
    n: usize,
    /// The number of channels of images and of windows, over all groups.
    channels: [usize; 2],
    image: [usize; 2],
    kernel: [usize; 2],
    options: ConvOptions<2>,
}

impl Case {
    fn new(n: usize, channels: [usize; 2], image: [usize; 2], kernel: [usize; 2]) -> Case {
        Case { n, channels, image, kernel, options: ConvOptions::default() }
    }

    fn with(self, stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], groups: usize) -> Case {
        Case { options: ConvOptions { stride, padding: padding.into(), dilation, groups }, ..self }
    }

    fn windows(&self) -> Windows {
        let ConvOptions { stride, dilation, padding, .. } = self.options;
        let Padding::Explicit(padding) = padding else { unreachable!("cases give the padding") };
        let (before, behind) = (padding.map(|p| p.0), padding.map(|p| p.1));
        Windows::new("conv2d", self.image, self.kernel, [stride, before, behind, dilation]).unwrap()
    }

    /// Returns the result, and the gradients of images, weight and bias. `last` selects which of the images, the weight and the result's
    /// gradient are channels-last.
    fn run(&self, device: Device, dtype: DType, last: [bool; 3], transposed: bool) -> [Vec<f64>; 4] {
        let Case { n, channels: [c, o], image: [h, w], kernel: [kh, kw], options } = *self;
        let made = |dims: [usize; 4], seed: usize, last: bool| {
            let format = if last { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous };
            small_ints(&dims, seed, dtype, device).to_memory_format(format).unwrap()
        };
        let x = made([n, c, h, w], 1, last[0]).requires_grad_(true).unwrap();
        let (first, second) = if transposed { (c, o / options.groups) } else { (o, c / options.groups) };
        let weight = made([first, second, kh, kw], 2, last[1]).requires_grad_(true).unwrap();
        let bias = small_ints(&[o], 3, dtype, device).requires_grad_(true).unwrap();
        let y = match transposed {
            false => x.conv2d(&weight, Some(&bias), options),
            true => {
                let ConvOptions { stride, padding, dilation, groups } = options;
                let options = ConvTransposeOptions { stride, padding, dilation, groups, ..Default::default() };
                x.conv_transpose2d(&weight, Some(&bias), options)
            }
        };
        let y = y.unwrap();
        y.backward_with(&made(sizes_4d(&y), 4, last[2])).unwrap();
        let read =
            |t: &Tensor| t.to_dtype(DType::F64).unwrap().to_device(Device::Cpu).unwrap().to_vec::<f64>().unwrap();
        let [gx, gw, gb] = [&x, &weight, &bias].map(|t| read(&t.grad().unwrap()));
        [read(&y), gx, gw, gb]
    }
}

const OTHER: TensorCores = TensorCores { local: 97 << 10, wgmma: false };

/// Runs `f` while devices are assumed to have tensor cores.
fn with_pretended_cores<R>(f: impl FnOnce() -> R) -> R {
    PRETENDED_CORES.set(Some(OTHER));
    let made = f();
    PRETENDED_CORES.set(None);
    made
}

fn conv2d<'a>(windows: Windows, x: &'a Tensor, weight: &'a Tensor, groups: usize, single: bool) -> Conv2d<'a> {
    Conv2d { windows, x, weight, bias: None, groups, single }
}

/// Compares with the CPU while the stand-in kernel replaces tensor cores. Covers copies of images and weights, and the plans and kernel parameters of
/// the forward pass and both gradients.
#[test]
fn convolutions_and_their_gradients_equal_the_cpu() {
    if opencl::count() == 0 {
        return;
    }
    let (one, none) = ([1, 1], [0, 0]);
    let cases = [
        Case::new(2, [16, 24], [5, 7], [3, 3]).with(one, one, one, 1),
        Case::new(2, [9, 20], [6, 5], [3, 2]).with(one, [2, 0], [1, 2], 1),
        Case::new(2, [8, 8], [5, 6], [3, 3]).with(one, one, one, 1),
        Case::new(1, [16, 9], [8, 8], [3, 3]).with(one, [3, 3], one, 1), // so much padding that the image gradient has negative padding
        Case::new(3, [3, 64], [9, 11], [5, 5]).with([2, 2], [2, 2], one, 1),
        Case::new(2, [40, 32], [7, 8], [3, 3]).with(one, one, one, 2),
        Case::new(2, [18, 36], [4, 6], [1, 3]).with([1, 2], [0, 1], one, 2),
        Case::new(2, [72, 80], [7, 7], [1, 1]).with(one, none, one, 1),
        Case::new(3, [32, 16], [7, 9], [1, 1]).with([2, 3], none, one, 1),
        Case::new(2, [130, 8], [3, 3], [3, 3]).with(one, one, one, 1),
        Case::new(2, [16, 40], [9, 8], [3, 3]).with([2, 2], one, one, 1),
        Case::new(1, [24, 32], [11, 13], [4, 5]).with([2, 2], [1, 2], one, 1),
        Case::new(2, [16, 72], [10, 12], [3, 4]).with([1, 2], [3, 0], [2, 3], 2),
        Case::new(2, [16, 64], [6, 7], [3, 3]).with(one, one, one, 1), // both passes read the weight without a copy
        Case::new(2, [16, 64], [9, 8], [3, 3]).with([2, 2], one, one, 1),
        Case::new(1, [48, 128], [6, 5], [3, 2]).with([2, 1], one, [1, 2], 2),
        Case::new(2, [24, 64], [8, 8], [1, 1]).with(one, none, one, 1),
        Case::new(2, [24, 64], [8, 7], [1, 1]).with([2, 2], none, one, 1), // some pixels are read by no window
        Case::new(1, [16, 32], [3, 40], [1, 20]).with(one, [0, 9], one, 1), // a row has more taps than a padding bit mask has bits
        Case::new(1, [16, 64], [3, 40], [2, 35]).with([1, 2], [1, 30], one, 1),
        // Here taps are whole rows of the kernel.
        Case::new(2, [3, 64], [10, 13], [7, 7]).with([2, 2], [3, 3], one, 1),
        Case::new(1, [4, 16], [10, 13], [4, 6]).with([1, 2], [2, 7], [2, 1], 1),
        Case::new(2, [2, 24], [9, 17], [7, 10]).with([2, 4], [1, 2], one, 1),
        Case::new(1, [1, 16], [17, 23], [11, 11]).with([4, 4], [0, 2], one, 1),
        Case::new(2, [3, 32], [16, 17], [8, 8]).with([8, 8], none, one, 1),
        Case::new(1, [3, 16], [20, 23], [17, 18]).with([3, 2], [1, 0], one, 1),
        // Here the image gradient is computed by blocks: images of whole blocks, and blocks that a single window reads.
        Case::new(2, [3, 16], [8, 12], [3, 3]).with(one, one, one, 1),
        Case::new(1, [5, 64], [9, 8], [5, 4]).with([2, 2], [1, 1], one, 1),
    ];
    let device = Device::OpenCL(0);
    for (i, case) in cases.iter().enumerate() {
        for (dtype, last, transposed) in [
            (DType::F16, [false, false, false], false),
            (DType::F16, [false, true, false], false),
            (DType::BF16, [true, true, true], false),
            (DType::F32, [true, false, true], false),
            (DType::F32, [false, false, true], true),
            (DType::F16, [true, true, true], true),
        ] {
            if transposed && case.options.groups * 8 > case.channels[1] {
                continue;
            }
            let run = |device| case.run(device, dtype, last, transposed);
            let (want, got) = (run(Device::Cpu), with_pretended_cores(|| run(device)));
            // The kernels without tensor cores must give the same result for channels-last tensors.
            let without = if last[2] && i % 4 == 0 { run(device) } else { want.clone() };
            for (k, name) in ["result", "images", "weight", "bias"].iter().enumerate() {
                let what = format!("case {i}, {dtype}, channels last {last:?}, transposed {transposed}: {name}");
                assert_eq!(got[k], want[k], "{what}");
                assert_eq!(without[k], want[k], "{what}, without tensor cores");
            }
        }
    }
}

/// Images, weights and gradients with innermost channels are read in place, so the number of launches is minimal. Results have innermost channels too.
#[test]
fn channels_last_tensors_are_not_copied() {
    if opencl::count() == 0 {
        return;
    }
    let device = Device::OpenCL(0);
    let last = |dims: [usize; 4]| {
        let [n, c, h, w] = dims;
        small_ints(&[n, h, w, c], 1, DType::F16, device).permute(&[0, 3, 1, 2]).unwrap()
    };
    let (one, none) = ([1, 1], [0, 0]);
    // The third column is the number of launches of the forward pass, of the image gradient and of the weight gradient.
    let cases = [
        (Case::new(2, [16, 64], [8, 8], [3, 3]).with(one, one, one, 1), [1, 1, 1]),
        (Case::new(2, [16, 64], [8, 8], [3, 3]).with([2, 2], one, one, 1), [1, 4, 1]),
        (Case::new(2, [32, 64], [8, 8], [1, 1]).with(one, none, one, 1), [1, 1, 1]),
        (Case::new(2, [32, 64], [8, 8], [1, 1]).with([2, 2], none, one, 1), [1, 1, 1]), // also zeros the pixels that no window reads
        (Case::new(2, [32, 24], [8, 8], [3, 3]).with(one, one, one, 1), [1, 2, 1]), // the taps of the weight are not whole slices
        (Case::new(2, [12, 64], [9, 9], [3, 3]).with(one, one, one, 1), [3, 2, 2]), // channels are padded
        (Case::new(2, [12, 64], [9, 9], [3, 3]).with([2, 2], one, one, 1), [3, 8, 2]),
    ];
    for (i, (case, want)) in cases.into_iter().enumerate() {
        let Case { n, channels: [c, o], image: [h, w], kernel: [kh, kw], .. } = case;
        let windows = case.windows();
        let (x, weight, y) = (last([n, c, h, w]), last([o, c, kh, kw]), last([n, o, windows.grid[0], windows.grid[1]]));
        let single = [kh, kw] == [1, 1] && windows.grid == windows.image;
        let made = with_pretended_cores(|| ImplicitGemm::new(&conv2d(windows, &x, &weight, 1, single)).unwrap());
        let run = |f: &dyn Fn() -> Result<Tensor>| count_launches(|| with_pretended_cores(|| f().unwrap()));
        let (results, launches): (Vec<_>, Vec<_>) = [
            run(&|| made.forward(&x, &weight, None)),
            run(&|| made.transposed(&y, &weight, None)),
            run(&|| made.weight_gradient(&x, &y, None)),
        ]
        .into_iter()
        .unzip();
        assert_eq!(launches, want, "case {i}");
        // The weight gradient is the same if it is written to a given tensor, in either memory format.
        for slot in [weight.zeros_like().unwrap(), last([o, c, kh, kw])] {
            assert!(made.accepts(&slot));
            let (made, launches) = run(&|| made.weight_gradient(&x, &y, Some(slot.shallow_clone())));
            assert_eq!((launches, made.strides()), (want[2], slot.strides()), "case {i}");
            let [made, own] = [&slot, &results[2]].map(|t| t.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap());
            assert_eq!(made, own, "case {i}");
        }
        for (made, like) in results.iter().zip([&y, &x, &weight]) {
            assert_eq!(is_channels_last(made), is_channels_last(like), "case {i}");
        }
    }
}

/// The image is a view that contains an infinity. Only the windows that contain the infinity may give infinite or NaN results.
#[test]
fn infinities_reach_only_their_windows_in_whole_rows() {
    if opencl::count() == 0 {
        return;
    }
    let run = |device| {
        let x = small_ints(&[2, 6, 12, 21], 1, DType::F16, device);
        let hole = Tensor::full(&[1], f32::INFINITY, device).unwrap().to_dtype(DType::F16).unwrap();
        x.narrow(2, 5, 1).unwrap().narrow(3, 9, 1).unwrap().copy_(&hole.reshape([1, 1, 1, 1]).unwrap()).unwrap();
        let weight = small_ints(&[16, 3, 5, 5], 4, DType::F16, device) + 3.0;
        let options = ConvOptions { stride: [1, 2], padding: [0, 1].into(), ..ConvOptions::default() };
        let odd = x.narrow(1, 1, 3).unwrap().narrow(3, 1, 19).unwrap();
        let views = [x.slice(1, 0, 6, 2).unwrap(), odd.flip(&[3]).unwrap(), odd.transpose(2, 3).unwrap(), odd];
        views.map(|x| {
            let y = x.conv2d(&weight, None, options).unwrap().to_dtype(DType::F32).unwrap();
            y.to_device(Device::Cpu).unwrap().to_vec::<f32>().unwrap()
        })
    };
    let (want, got) = (run(Device::Cpu), with_pretended_cores(|| run(Device::OpenCL(0))));
    for (want, got) in want.iter().zip(&got) {
        let finite = want.iter().filter(|y| y.is_finite()).count();
        assert!((1..want.len()).contains(&finite));
        assert_eq!(got, want);
    }
}

/// The image gradient of few channels is computed by blocks, but an infinity must reach only the elements of its window.
#[test]
fn infinities_reach_only_their_windows_in_blocks() {
    if opencl::count() == 0 {
        return;
    }
    let run = |device| {
        let x = small_ints(&[1, 16, 8, 8], 1, DType::F16, device);
        x.narrow(2, 3, 1).unwrap().narrow(3, 2, 1).unwrap().narrow(1, 0, 1).unwrap().fill_(f32::INFINITY).unwrap();
        let weight = small_ints(&[16, 3, 4, 4], 4, DType::F16, device) + 3.0;
        let options = ConvTransposeOptions { stride: [2, 2], padding: [1, 1].into(), ..Default::default() };
        let y = x.conv_transpose2d(&weight, None, options).unwrap().to_dtype(DType::F32).unwrap();
        y.to_device(Device::Cpu).unwrap().to_vec::<f32>().unwrap()
    };
    let (want, got) = (run(Device::Cpu), with_pretended_cores(|| run(Device::OpenCL(0))));
    assert_eq!(want.iter().filter(|y| !y.is_finite()).count(), 3 * 4 * 4);
    assert_eq!(got, want);
}

/// Copies have zeros around images and after the channels of each group. Covers every order of dims, and views of parts of images.
#[test]
fn copies_are_channels_last() {
    if opencl::count() == 0 {
        return;
    }
    for (dtype, groups, each) in
        [(DType::F16, 1, 70), (DType::BF16, 2, 9), (DType::F32, 3, 4), (DType::F32, 1, 7), (DType::F32, 1, 130)]
    {
        let x = small_ints(&[2, groups * each, 5, 14], 5, dtype, Device::OpenCL(0));
        let transposed = x.permute(&[3, 0, 2, 1]).unwrap().contiguous().unwrap().permute(&[1, 3, 2, 0]).unwrap();
        for x in [&x, &x.narrow(3, 1, 9).unwrap(), &transposed, &x.flip(&[2]).unwrap()] {
            let [n, _, h, w] = sizes_4d(x);
            for (before, size) in [([0, 0], [h, w]), ([2, 1], [h + 3, w + 5]), ([-1, -2], [h, w])] {
                let ChannelsLast { tensor, channels, .. } =
                    channels_last(x, Strided::images(x, groups), before, size).unwrap();
                assert_eq!(tensor.shape().dims(), [n, size[0], size[1], groups * channels]);
                let [from, got] = [x, &tensor].map(|t| t.to_dtype(DType::F64).unwrap().to_ndarray::<f64>().unwrap());
                for (at, &value) in got.indexed_iter() {
                    let (place, c) = ([0, 1].map(|d| at[1 + d] as isize - before[d]), at[3] % channels);
                    let inside = (0..h as isize).contains(&place[0]) && (0..w as isize).contains(&place[1]) && c < each;
                    let channel = at[3] / channels * each + c;
                    let want = if inside { from[[at[0], channel, place[0] as usize, place[1] as usize]] } else { 0.0 };
                    assert_eq!(value, want, "{dtype}, {groups} groups, {before:?}, {size:?}, at {at:?}");
                }
            }
        }
    }
}

/// Checks which convolutions and image gradients implicit GEMM computes, and which are left to im2col.
#[test]
fn unsuitable_convolutions_are_left_to_im2col() {
    if opencl::count() == 0 {
        return;
    }
    let device = Device::OpenCL(0);
    let of = |case: Case, dtype: DType| {
        let ([c, o], ConvOptions { groups, .. }, w) = (case.channels, case.options, case.windows());
        let single = case.kernel == [1, 1] && w.grid == w.image;
        let [kh, kw] = case.kernel;
        let (x, weight) = (
            small_ints(&[case.n, c, case.image[0], case.image[1]], 1, dtype, device),
            small_ints(&[o, c / groups, kh, kw], 2, dtype, device),
        );
        with_pretended_cores(|| {
            ImplicitGemm::new(&conv2d(w, &x, &weight, groups, single)).map(|made| made.has_image_gradient())
        })
    };
    let (one, none) = ([1, 1], [0, 0]);
    let plain = |channels, kernel| Case::new(2, channels, [14, 14], kernel).with(one, none, one, 1);
    assert_eq!(of(plain([64, 64], [3, 3]), DType::F16), Some(true));
    assert_eq!(of(plain([64, 64], [3, 3]), DType::F32), Some(true));
    assert_eq!(of(plain([64, 64], [3, 3]), DType::F64), None);
    // With stride 2, one phase has a single tap, which implicit GEMM accepts only if channels are innermost.
    assert_eq!(of(plain([64, 64], [3, 3]).with([2, 2], none, one, 1), DType::F16), Some(true));
    assert_eq!(of(plain([64, 24], [3, 3]).with([2, 2], none, one, 1), DType::F16), Some(false));
    let large = |kernel| Case { image: [40, 40], ..plain([64, 64], kernel) };
    assert_eq!(of(large([9, 9]).with([3, 3], none, one, 1), DType::F16), Some(false));
    assert_eq!(of(plain([64, 64], [2, 2]).with([2, 2], none, one, 1), DType::F16), Some(false));
    assert_eq!(of(plain([64, 64], [3, 3]).with([2, 1], none, [2, 1], 1), DType::F16), Some(false));
    assert_eq!(of(plain([3, 64], [7, 7]), DType::F16), Some(true));
    assert_eq!(of(plain([2, 64], [7, 7]), DType::F16), None);
    assert_eq!(of(plain([2, 64], [7, 7]).with([1, 2], none, one, 1), DType::F16), Some(true));
    assert_eq!(of(plain([1, 64], [7, 7]).with([1, 2], none, one, 1), DType::F16), None);
    assert_eq!(of(plain([1, 64], [7, 7]).with([1, 4], none, one, 1), DType::F16), Some(true));
    assert_eq!(of(plain([64, 2], [3, 3]), DType::F16), None);
    assert_eq!(of(plain([64, 64], [1, 1]), DType::F16), None);
    assert_eq!(of(Case { image: [7, 7], ..plain([64, 64], [1, 1]) }, DType::F16), Some(true));
    let device = Device::OpenCL(0);
    let (x, weight) =
        (small_ints(&[2, 64, 8, 8], 1, DType::F16, device), small_ints(&[64, 64, 3, 3], 2, DType::F16, device));
    let w = Windows::new("conv2d", [8, 8], [3, 3], [one, none, none, one]).unwrap();
    let without = device.info().unwrap().kind == DeviceKind::Cpu;
    assert_eq!(ImplicitGemm::new(&conv2d(w, &x, &weight, 1, false)).is_none(), without);
}
