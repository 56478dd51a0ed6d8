//! Kernels that read OpenCL image objects: their results for many shapes, and the allocation of images.

use claystone::autograd::{GradOptions, grad_with_options};
use claystone::device::count_launches;
use claystone::storage::{Image, ImageDesc, ImageFormat, MemoryMode, StorageType, with_memory_mode};
use claystone::{
    AvgPoolOptions, ConvOptions, DType, Device, Error, Graph, MaxPoolOptions, Padding, Result, Tensor, no_grad,
    with_stream,
};

use crate::common::{devices, in_own_process, values};

/// Returns the devices that support images. PoCL supports images, so there must be such a device if OpenCL is required.
fn with_images() -> Vec<Device> {
    let found: Vec<Device> =
        devices().into_iter().filter(|device| device.capabilities().is_ok_and(|c| c.images.is_some())).collect();
    assert!(!found.is_empty() || std::env::var_os("CLAYSTONE_REQUIRE_OPENCL").is_none());
    found
}

/// Returns positive and negative numbers that f16 and bf16 represent exactly.
fn numbers(dims: &[usize], seed: usize, dtype: DType, device: Device) -> Tensor {
    let n: usize = dims.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * i * 7 + i * 3 + seed * 11) % 31) as f32 / 8.0 - 2.0).collect();
    Tensor::from_vec(values, dims, Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
}

/// Returns a copy that is a strided view with an offset and with NaN in the gaps.
fn odd_view(t: &Tensor) -> Tensor {
    let dims = t.shape().dims();
    if dims.is_empty() {
        return t.shallow_clone();
    }
    let mut padded = dims.to_vec();
    padded.iter_mut().for_each(|d| *d = 2 * *d + 1);
    padded.swap(0, dims.len() - 1);
    padded.push(2); // every dim has a stride above 1
    let all = Tensor::full(&padded[..], f64::NAN, (t.dtype(), t.device())).unwrap();
    let mut view = all.select(-1, 1).unwrap().transpose(0, -1).unwrap();
    for (d, &size) in dims.iter().enumerate() {
        view = view.narrow(d as isize, 1, size).unwrap();
    }
    view.copy_(t).unwrap();
    view
}

/// Returns the tolerance of results against f64.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 2e-6,
        DType::F16 => 1e-3,
        _ => 8e-3,
    }
}

/// Compares `f` with images on the device of the inputs with `f` in f64 on the CPU. Results must agree within rounding, with NaN in
/// the same elements.
#[track_caller]
fn check(inputs: &[Tensor], what: &str, f: impl Fn(&[Tensor]) -> Result<Tensor>) {
    let exact: Vec<Tensor> =
        inputs.iter().map(|t| t.detach().to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap()).collect();
    let want = f(&exact).unwrap();
    let got = with_memory_mode(MemoryMode::Image, || f(inputs)).unwrap();
    assert_eq!(got.shape(), want.shape(), "{what}");
    let (dtype, got, want) = (got.dtype(), values(&got), values(&want));
    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
        let near = (g - w).abs() <= tolerance(dtype) * (1.0 + w.abs());
        assert!(near || g == w || (g.is_nan() && w.is_nan()), "{what}, {dtype}, {i}: {g}, not {w}");
    }
}

#[test]
fn every_shape_survives_the_conversion_to_images() {
    for device in with_images() {
        for dims in [&[][..], &[1], &[7], &[3, 5], &[1, 1, 1], &[5, 3, 2], &[2, 3, 5, 7], &[1, 4, 1, 9], &[3, 8, 4, 1]]
        {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let x = numbers(dims, 1, dtype, device);
                for t in [odd_view(&x), x] {
                    let there_and_back = || Tensor::from_image(&t.to_image().unwrap(), dims).unwrap();
                    let (back, launches) = count_launches(there_and_back);
                    assert_eq!(launches, 1, "the conversion there is none of the program's");
                    assert_eq!(values(&back), values(&t), "{dims:?} of {dtype}");
                    let wanted = if dtype == DType::F16 { DType::F16 } else { DType::F32 };
                    assert_eq!(back.dtype(), wanted);
                }
            }
        }
        // Elements keep their bits, including infinities and the smallest and largest numbers.
        let numbers = [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN_POSITIVE, 1e-3];
        let x = Tensor::from_slice(&numbers, 7, device).unwrap();
        let back = Tensor::from_image(&x.to_image().unwrap(), 7).unwrap().to_vec::<f32>().unwrap();
        assert!(back.iter().zip(numbers).all(|(a, b)| a.to_bits() == b.to_bits()), "{back:?}");
    }
}

#[test]
fn tensors_without_image_support_are_errors() {
    for device in with_images() {
        let fails = |t: Tensor| t.to_image().unwrap_err().to_string();
        assert!(fails(Tensor::zeros(4, (DType::I32, device)).unwrap()).contains("f32, f16 or bf16"));
        assert!(fails(Tensor::zeros(&[1, 1, 1, 1, 1], device).unwrap()).contains("has no image on"));
        assert!(fails(Tensor::zeros(&[2, 0], device).unwrap()).contains("has no image on"));
        let image = Tensor::zeros(&[2, 3, 4, 5], device).unwrap().to_image().unwrap();
        let other = Tensor::from_image(&image, [2, 3, 5, 4]).unwrap_err().to_string();
        assert!(other.contains("does not have the size for a tensor of shape"), "{other}");
        let none = ImageDesc { width: 0, height: 1, format: ImageFormat::F32 };
        assert!(matches!(Image::new(device, none, StorageType::Dynamic), Err(Error::Invalid { .. })));
        let wide = ImageDesc { width: 1 << 30, height: 1, format: ImageFormat::F32 };
        let error = Image::new(device, wide, StorageType::Dynamic).unwrap_err().to_string();
        assert!(error.contains("has images of 1 x 1 to"), "{error}");
    }
    assert!(Tensor::zeros(4, Device::Cpu).unwrap().to_image().is_err());
}

#[test]
fn convolutions() {
    let windows = [
        ([1, 1], [1, 1], Padding::Valid, [1, 1]),
        ([3, 3], [1, 1], [1, 1].into(), [1, 1]),
        ([3, 3], [2, 2], [1, 1].into(), [1, 1]),
        ([2, 4], [1, 3], [0, 2].into(), [2, 1]),
        ([3, 3], [1, 1], Padding::Same, [2, 2]),
    ];
    for device in with_images() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for ([kh, kw], stride, padding, dilation) in windows {
                for (n, c, o, h, w, groups) in [
                    (1, 1, 1, 5, 5, 1),
                    (2, 3, 5, 7, 6, 1),
                    (1, 4, 8, 5, 9, 1),
                    (3, 9, 4, 5, 8, 1),
                    (2, 5, 5, 6, 7, 5),
                    (1, 8, 8, 5, 5, 8),
                    (2, 4, 6, 5, 5, 2), // grouped but not depthwise, which only matrix products of im2col columns support
                ] {
                    let options = ConvOptions { stride, padding, dilation, groups };
                    let x = numbers(&[n, c, h, w], 1, dtype, device);
                    let weight = numbers(&[o, c / groups, kh, kw], 2, dtype, device);
                    let bias = numbers(&[o], 3, dtype, device);
                    let what = format!("{n} x {c} x {h} x {w} by {o} x {kh} x {kw}, {options:?}");
                    let conv = |t: &[Tensor]| t[0].conv2d(&t[1], t.get(2), options);
                    check(&[x.shallow_clone(), weight.shallow_clone()], &what, conv);
                    check(&[odd_view(&x), odd_view(&weight), odd_view(&bias)], &what, conv);
                    check(&[x.detach(), weight.detach(), bias], &what, conv);
                }
            }
        }
    }
}

#[test]
fn convolutions_of_images_take_one_launch_with_the_gradients_of_buffers() {
    for device in with_images() {
        for (c, o, groups) in [(3, 5, 1), (4, 4, 4)] {
            let make = || {
                let x = numbers(&[2, c, 6, 7], 1, DType::F32, device).requires_grad_(true).unwrap();
                let weight = numbers(&[o, c / groups, 3, 3], 2, DType::F32, device).requires_grad_(true).unwrap();
                (x, weight, numbers(&[o], 3, DType::F32, device).requires_grad_(true).unwrap())
            };
            let options = ConvOptions { padding: [1, 1].into(), groups, ..ConvOptions::default() };
            let gradients = |mode| {
                let (x, weight, bias) = make();
                with_memory_mode(mode, || {
                    let (y, launches) = count_launches(|| x.conv2d(&weight, Some(&bias), options).unwrap());
                    y.mul(&y).unwrap().sum((), false).unwrap().backward().unwrap();
                    (launches, [x, weight, bias].map(|t| values(&t.grad().unwrap())))
                })
            };
            let (launches, images) = gradients(MemoryMode::Image);
            let (_, buffers) = gradients(MemoryMode::Buffer);
            assert_eq!(launches, 1);
            for (a, b) in images.iter().flatten().zip(buffers.iter().flatten()) {
                assert!((a - b).abs() <= 1e-4 * (1.0 + b.abs()), "{a} and {b}");
            }
            // Second derivatives agree too.
            let second = |mode| {
                let (x, weight, _) = make();
                with_memory_mode(mode, || {
                    let y = x.conv2d(&weight, None, options).unwrap();
                    let loss = y.mul(&y).unwrap().sum((), false).unwrap();
                    let options = GradOptions { create_graph: true, ..GradOptions::default() };
                    let first = grad_with_options(&[&loss], &[&weight], options).unwrap().remove(0).unwrap();
                    first.mul(&first).unwrap().sum((), false).unwrap().backward().unwrap();
                    values(&x.grad().unwrap())
                })
            };
            for (a, b) in second(MemoryMode::Image).iter().zip(&second(MemoryMode::Buffer)) {
                assert!((a - b).abs() <= 1e-4 * (1.0 + b.abs()), "{a} and {b}");
            }
        }
    }
}

#[test]
fn pools() {
    for device in with_images() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for dims in [[1, 1, 4, 4], [2, 3, 7, 5], [3, 4, 6, 6], [1, 9, 5, 8]] {
                let x = numbers(&dims, 1, dtype, device);
                x.narrow(3, 1, 1).unwrap().narrow(2, 1, 1).unwrap().fill_(f64::NAN).unwrap();
                x.narrow(3, 3, 1).unwrap().narrow(2, 3, 1).unwrap().fill_(f64::NEG_INFINITY).unwrap();
                for x in [odd_view(&x), x] {
                    let what = format!("{dims:?}");
                    for (kernel, stride, padding) in [
                        ([2, 2], [2, 2], [(0, 0); 2]),
                        ([3, 2], [1, 2], [(1, 1); 2]),
                        ([4, 4], [1, 1], [(2, 1), (0, 2)]),
                    ] {
                        let padding = padding.into();
                        let most = MaxPoolOptions { stride: Some(stride), padding, ..MaxPoolOptions::default() };
                        check(&[x.shallow_clone()], &what, |t| t[0].max_pool2d(kernel, most));
                        check(&[x.shallow_clone()], &what, |t| {
                            t[0].max_pool2d_with_indices(kernel, most)?.1.to_dtype(DType::F32)
                        });
                        let mean = AvgPoolOptions { stride: Some(stride), padding, ..AvgPoolOptions::default() };
                        check(&[x.shallow_clone()], &what, |t| t[0].avg_pool2d(kernel, mean));
                        let inside = AvgPoolOptions { count_include_pad: false, ..mean };
                        check(&[x.shallow_clone()], &what, |t| t[0].avg_pool2d(kernel, inside));
                    }
                    check(&[x.shallow_clone()], &what, |t| t[0].adaptive_avg_pool2d([3, 2]));
                    check(&[x.shallow_clone()], &what, |t| t[0].adaptive_max_pool2d([2, 3]));
                }
            }
        }
    }
}

#[test]
fn formulas_and_products() {
    for device in with_images() {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for dims in [&[1][..], &[5], &[3, 7], &[4, 1, 6], &[2, 5, 3, 4]] {
                let (a, b) = (numbers(dims, 1, dtype, device), numbers(dims, 2, dtype, device));
                let what = format!("{dims:?}");
                check(&[a.shallow_clone(), b.shallow_clone()], &what, |t| t[0].mul(&t[1])?.add_scalar(0.5));
                check(&[odd_view(&a), odd_view(&b)], &what, |t| t[0].sub(&t[1]));
                check(&[a.shallow_clone()], &what, |t| t[0].relu());
                let row = b.narrow(-1, 0, 1).unwrap();
                check(&[a.shallow_clone(), row], &what, |t| t[0].maximum(&t[1])); // the row operand is broadcast
                check(&[a.shallow_clone()], &what, |t| {
                    let out = t[0].try_clone()?;
                    out.mul_scalar_(3)?.add_(&out)?;
                    Ok(out)
                });
            }
            for (m, k, n) in [(1, 1, 1), (3, 5, 7), (4, 4, 4), (9, 17, 6), (33, 8, 12)] {
                let (a, b) = (numbers(&[m, k], 1, dtype, device), numbers(&[k, n], 2, dtype, device));
                let what = format!("{m} x {k} x {n}");
                for (a, b) in [(a.shallow_clone(), b.shallow_clone()), (odd_view(&a), odd_view(&b))] {
                    let bias = numbers(&[n], 3, dtype, device);
                    // The second call reuses the cached image of the second matrix. Later the matrix changes, so that the image
                    // must be made again.
                    check(&[a.shallow_clone(), b.shallow_clone()], &what, |t| t[0].matmul(&t[1]));
                    check(&[a.shallow_clone(), b.shallow_clone()], &what, |t| t[0].matmul(&t[1]));
                    check(&[a.shallow_clone(), b.shallow_clone(), bias], &what, |t| {
                        t[0].linear(&t[1].t()?, Some(&t[2]))
                    });
                    b.mul_scalar_(2).unwrap();
                    check(&[a.shallow_clone(), b.shallow_clone()], &what, |t| t[0].matmul(&t[1]));
                    b.copy_(&Tensor::zeros_like(&b).unwrap()).unwrap();
                    check(&[a, b], &what, |t| t[0].matmul(&t[1]));
                }
            }
        }
    }
}

#[test]
fn graph_capture_uses_buffers_instead_of_images() {
    for device in with_images() {
        let x = numbers(&[1, 4, 6, 6], 1, DType::F32, device);
        let weight = numbers(&[3, 4, 3, 3], 2, DType::F32, device);
        let image = x.to_image().unwrap();
        let error = Graph::capture(device, || x.to_image()).unwrap_err().to_string();
        assert!(error.contains("not while a graph is captured"), "{error}");
        assert!(Graph::capture(device, || Tensor::from_image(&image, [1, 4, 6, 6])).is_err());
        let conv = || x.conv2d(&weight, None, ConvOptions::default());
        let (graph, y) = with_memory_mode(MemoryMode::Image, || Graph::capture(device, conv)).unwrap();
        graph.replay().unwrap();
        assert_eq!(values(&y), values(&with_memory_mode(MemoryMode::Buffer, conv).unwrap()));
    }
}

#[test]
fn cached_images_of_views_are_bounded() {
    if !in_own_process("images::cached_images_of_views_are_bounded") {
        return;
    }
    for device in with_images() {
        let (a, all) = (numbers(&[4, 64], 1, DType::F32, device), numbers(&[512, 64], 2, DType::F32, device));
        let kept = || device.image_memory_stats().unwrap().allocated_bytes.current;
        with_memory_mode(MemoryMode::Image, || {
            for from in 0..448 {
                a.matmul(&all.narrow(0, from, 64).unwrap()).unwrap();
            }
        });
        assert!((1..=4 * 512 * 64 * 4).contains(&kept()), "{}", kept());
        // `empty_cache` frees the cached images, and later calls make them again.
        device.empty_cache().unwrap();
        assert_eq!(kept(), 0);
        check(&[a, all.narrow(0, 3, 64).unwrap()], "again", |t| t[0].matmul(&t[1]));
        assert!(kept() > 0);
    }
}

#[test]
fn buffers_are_used_when_images_do_not_fit_in_memory() {
    if !in_own_process("images::buffers_are_used_when_images_do_not_fit_in_memory") {
        return;
    }
    for device in with_images() {
        let x = numbers(&[1, 1, 512, 512], 1, DType::F32, device); // 1 MiB as a buffer, but 4 MiB as an image
        device.empty_cache().unwrap();
        let held = device.memory_stats().unwrap().reserved_bytes.current;
        device.set_memory_limit(held + (2 << 20)).unwrap();
        let failed = || device.image_memory_stats().unwrap().num_ooms;
        let before = failed();
        check(&[x], "a sum", |t| t[0].add(&t[0]));
        assert!(failed() > before);
        device.set_memory_limit(u64::MAX).unwrap();
    }
}

/// A small convolutional network.
struct Network {
    convs: Vec<Tensor>,
    last: Tensor,
}

impl Network {
    fn new(dtype: DType, device: Device) -> Network {
        let convs = vec![numbers(&[8, 3, 3, 3], 1, dtype, device), numbers(&[8, 8, 3, 3], 2, dtype, device)];
        Network { convs, last: numbers(&[8 * 4 * 4, 10], 3, dtype, device) }
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let same = ConvOptions { padding: Padding::Same, ..ConvOptions::default() };
        let mut x = x.shallow_clone();
        for weight in &self.convs {
            x = x.conv2d(weight, None, same)?.relu()?.max_pool2d([2, 2], MaxPoolOptions::default())?;
        }
        x.flatten(1, -1)?.matmul(&self.last)
    }
}

#[test]
fn repeated_forward_passes_make_no_new_images() {
    if !in_own_process("images::repeated_forward_passes_make_no_new_images") {
        return;
    }
    for device in with_images() {
        with_memory_mode(MemoryMode::Image, || {
            no_grad(|| {
                let made = || device.image_memory_stats().unwrap().num_device_alloc;
                let network = Network::new(DType::F32, device);
                let x = numbers(&[2, 3, 16, 16], 4, DType::F32, device);
                let first = values(&network.forward(&x).unwrap());
                let before = made();
                assert!(before > 0);
                for _ in 0..3 {
                    assert_eq!(values(&network.forward(&x).unwrap()), first);
                }
                assert_eq!(made(), before);
                // f16 needs images in another format, so the free f32 images cannot be reused.
                let (halves, x) = (Network::new(DType::F16, device), x.to_dtype(DType::F16).unwrap());
                halves.forward(&x).unwrap();
                assert!(made() > before);
                let free = device.image_memory_stats().unwrap();
                assert!(free.allocated_bytes.current < free.reserved_bytes.current);
                drop((network, halves));
                assert_eq!(device.image_memory_stats().unwrap().allocated_bytes.current, 0);
                device.empty_cache().unwrap();
                assert_eq!(device.image_memory_stats().unwrap().reserved_bytes.current, 0);
            });
        });
    }
}

#[test]
fn every_kind_of_operation_can_read_images() {
    if !in_own_process("images::every_kind_of_operation_can_read_images") {
        return;
    }
    for device in with_images() {
        let [x, w] = [[1, 4, 6, 6], [4, 4, 3, 3]].map(|dims| numbers(&dims, 1, DType::F32, device));
        let (each, m) = (numbers(&[4, 1, 3, 3], 2, DType::F32, device), numbers(&[8, 8], 3, DType::F32, device));
        let depthwise = ConvOptions { groups: 4, ..ConvOptions::default() };
        let allocations = || device.image_memory_stats().unwrap().allocation.allocated;
        let operations: [(u64, &dyn Fn() -> Result<Tensor>); 7] = [
            (2, &|| x.conv2d(&w, None, ConvOptions::default())),
            (2, &|| x.conv2d(&each, None, depthwise)),
            (1, &|| x.max_pool2d([2, 2], MaxPoolOptions::default())),
            (1, &|| x.avg_pool2d([2, 2], AvgPoolOptions::default())),
            (2, &|| x.add(&x)),
            (1, &|| x.gelu()),
            (1, &|| m.matmul(&m)),
        ];
        for (i, (images, f)) in operations.into_iter().enumerate() {
            let before = allocations();
            with_memory_mode(MemoryMode::Image, f).unwrap();
            assert_eq!(allocations() - before, images, "operation {i}");
            with_memory_mode(MemoryMode::Buffer, f).unwrap();
            with_memory_mode(MemoryMode::Auto, f).unwrap(); // without measurements, `Auto` uses buffers
            assert_eq!(allocations() - before, images, "operation {i}");
        }
    }
}

#[test]
fn images_count_as_device_memory() {
    if !in_own_process("images::images_count_as_device_memory") {
        return;
    }
    const MIB: u64 = 1 << 20;
    let four = ImageDesc { width: 512, height: 512, format: ImageFormat::F32 }; // the image takes 4 MiB
    for device in with_images() {
        device.empty_cache().unwrap();
        let new = || Image::new(device, four, StorageType::Dynamic);
        let before = device.memory_stats().unwrap();
        let images = [new().unwrap(), new().unwrap()];
        let stats = device.memory_stats().unwrap();
        assert_eq!(stats.allocated_bytes.current, before.allocated_bytes.current + 8 * MIB);
        assert_eq!(stats.reserved_bytes.current, before.reserved_bytes.current + 8 * MIB);
        let snapshot = device.memory_snapshot().unwrap();
        snapshot.check().unwrap();
        let shown = |pool: (i64, i64)| snapshot.segments.iter().filter(move |s| s.segment_pool_id == pool);
        assert_eq!(shown((1, 0)).map(|s| s.total_size).sum::<u64>(), 8 * MIB);
        // Free images are reused, also for smaller images. The memory limit applies to images too.
        let reserved = stats.reserved_bytes.current;
        device.set_memory_limit(reserved + 6 * MIB).unwrap();
        let third = new().unwrap();
        let error = new().unwrap_err();
        assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
        let tensor = || Tensor::empty(&[4 << 20], (DType::U8, device));
        let error = tensor().unwrap_err();
        assert!(error.to_string().contains("are held by images"), "{error}");
        // Free images are released when a tensor needs memory, and free buffers when an image needs memory.
        drop(third);
        let reserved = device.image_memory_stats().unwrap().reserved_bytes.current;
        let kept = tensor().unwrap();
        assert!(device.image_memory_stats().unwrap().reserved_bytes.current < reserved);
        drop(kept);
        let third = new().unwrap();
        // If an image allocation runs out of memory, the device's out-of-memory observers and callbacks are called.
        let spare = std::sync::Arc::new(std::sync::Mutex::new(Some(third)));
        let asked = spare.clone();
        let callback =
            device.add_free_memory_callback(Box::new(move || asked.lock().unwrap().take().is_some())).unwrap();
        let fourth = new().unwrap();
        assert!(spare.lock().unwrap().is_none());
        drop(callback);
        let message = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let tell = message.clone();
        let observer = device
            .add_oom_observer(Box::new(move |event| {
                tell.store(event.requested, std::sync::atomic::Ordering::Relaxed);
            }))
            .unwrap();
        assert!(new().is_err());
        assert_eq!(message.load(std::sync::atomic::Ordering::Relaxed), 4 << 20);
        drop((observer, fourth, images));
        device.set_memory_limit(u64::MAX).unwrap();
    }
}

#[test]
fn streams_have_separate_images() {
    for device in with_images() {
        let weight = numbers(&[4, 3, 3, 3], 1, DType::F32, device);
        let x = numbers(&[1, 3, 8, 8], 2, DType::F32, device);
        device.synchronize().unwrap();
        let conv = || with_memory_mode(MemoryMode::Image, || x.conv2d(&weight, None, ConvOptions::default())).unwrap();
        let want = values(&conv());
        let stream = claystone::Stream::new(device).unwrap();
        for _ in 0..20 {
            let other = with_stream(&stream, conv);
            stream.synchronize().unwrap();
            assert_eq!(values(&other), want);
            assert_eq!(values(&conv()), want);
        }
    }
}
