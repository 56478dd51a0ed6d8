//! Runs every kernel family on tiny shapes and compares with the CPU device. `scripts/test` also runs this file under Oclgrind, which
//! detects accesses out of bounds, data races between work-items and wrong use of the OpenCL API.

#[path = "common/quantized.rs"]
mod quantized;

use std::sync::{Mutex, PoisonError};

use claystone::device::DeviceKind;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::ops::{Attention, CacheRows, CacheType, ConvOptions, MaxPoolOptions, ScatterReduce, cached_attention};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::quantized::QuantFormat;
use claystone::{BatchNormOptions, DType, Device, Interpolation, MemoryFormat, Result, Tensor, manual_seed};

/// Sizes just below and above the widths of vectors, work-groups and tiles.
const SIZES: [usize; 6] = [1, 2, 15, 16, 17, 33];
const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

fn devices() -> Vec<Device> {
    let devices: Vec<Device> = Device::all().into_iter().filter(|&d| d != Device::Cpu).collect();
    if std::env::var_os("CLAYSTONE_EXPECT_OCLGRIND").is_some() {
        assert_eq!(devices.len(), 1, "Oclgrind is one device");
        let name = devices[0].info().unwrap().name;
        assert!(name.contains("Oclgrind"), "this runs on {name}, not under Oclgrind");
    }
    if std::env::var_os("CLAYSTONE_REQUIRE_OPENCL").is_some() {
        assert!(!devices.is_empty(), "no OpenCL device");
    }
    devices
}

/// Asserts that `f`, with the same seed, has the same results on the CPU and on each OpenCL device.
fn assert_devices_agree(tolerance: f64, f: impl Fn(Device) -> Result<Vec<Tensor>>) {
    agree_on(devices(), tolerance, f);
}

/// Does the same as [`assert_devices_agree`] for these devices and the CPU.
fn agree_on(devices: Vec<Device>, tolerance: f64, f: impl Fn(Device) -> Result<Vec<Tensor>>) {
    let run = |device| {
        // The random seed is process-wide, so only one test at a time may use it.
        static SEED: Mutex<()> = Mutex::new(());
        let _alone = SEED.lock().unwrap_or_else(PoisonError::into_inner);
        manual_seed(3);
        let tensors = f(device).unwrap();
        // Values are converted to f64 on the host, because not every device supports f64.
        let values = |t: &Tensor| t.to_device(Device::Cpu)?.to_dtype(DType::F64)?.to_vec::<f64>();
        tensors.iter().map(|t| values(t).unwrap()).collect::<Vec<_>>()
    };
    let want = run(Device::Cpu);
    for device in devices {
        for (i, (got, want)) in run(device).iter().zip(&want).enumerate() {
            assert_eq!(got.len(), want.len());
            for (g, w) in got.iter().zip(want) {
                let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * (1.0 + w.abs());
                assert!(same, "result {i} on {device}: {g}, on the CPU {w}");
            }
        }
    }
}

fn numbers(n: usize, dtype: DType, device: Device) -> Result<Tensor> {
    let values: Vec<f32> = (0..n).map(|i| (i * 37 % 19) as f32 / 8.0 - 1.0).collect();
    // Values are converted on the host, so that all devices start from the same bits.
    Tensor::from_slice(&values, n, Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// Checks the device's limits. Prints the device, for the table of `scripts/test-implementations`.
#[test]
fn devices_meet_the_minimum_that_kernels_need() {
    for device in devices() {
        let info = device.info().unwrap();
        let (group, local) = (info.max_work_group, info.local_memory >> 10);
        let doubles = if info.fp64 { "" } else { ", no doubles" };
        println!("on: {}, {}, groups of {group}, {local} KiB of local memory{doubles}", info.name, info.driver);
        assert!(info.kind == DeviceKind::Cpu || (group >= 32 && local >= 16), "{info}");
    }
}

#[test]
fn elementwise() {
    for n in SIZES {
        for dtype in FLOATS {
            assert_devices_agree(1e-2, |device| {
                let (a, b) = (numbers(n, dtype, device)?, numbers(n, dtype, device)?.flip(0)?);
                let row = numbers(2 * n, dtype, device)?.reshape([2, n])?;
                Ok(vec![
                    a.add(&b)?,
                    a.mul(&row)?,
                    row.t()?.contiguous()?.exp()?,
                    a.gt(&b)?,
                    a.narrow(0, n / 2, n - n / 2)?.tanh()?,
                ])
            });
        }
    }
}

#[test]
fn conversions_and_copies() {
    for dtype in DType::ALL {
        let has = |device: &Device| dtype != DType::F64 || device.info().unwrap().fp64;
        agree_on(devices().into_iter().filter(has).collect(), 1e-6, |device| {
            let converted = numbers(17, DType::F32, device)?.to_dtype(dtype)?;
            let target = Tensor::zeros([3, 17], (dtype, device))?;
            target.narrow(0, 1, 1)?.copy_(&converted)?;
            Ok(vec![
                converted.narrow(0, 3, 9)?.clone(),
                target.t()?.contiguous()?,
                Tensor::full(5, 3, (dtype, device))?,
            ])
        });
    }
}

#[test]
fn reductions_and_rows() {
    for n in SIZES {
        for dtype in FLOATS {
            assert_devices_agree(1e-2, |device| {
                let a = numbers(3 * n * 2, dtype, device)?.reshape([3, n, 2])?;
                let rows = a.select(2, 1)?;
                Ok(vec![
                    a.sum((), false)?,
                    a.sum(1, false)?,
                    a.mean(0, true)?,
                    a.max(1, false)?,
                    a.argmax(1, false)?,
                    rows.softmax(1)?,
                    rows.log_softmax(-1)?,
                ])
            });
        }
    }
}

#[test]
fn products() {
    for (m, k, n) in [(1, 1, 1), (3, 5, 2), (17, 16, 15), (33, 17, 20)] {
        for dtype in FLOATS {
            assert_devices_agree(2e-2, |device| {
                let a = numbers(m * k, dtype, device)?.reshape([m, k])?;
                let b = numbers(n * k, dtype, device)?.reshape([n, k])?;
                let batch = numbers(2 * m * k, dtype, device)?.reshape([2, m, k])?;
                Ok(vec![a.matmul(&b.t()?)?, b.matmul(&a.t()?)?, batch.matmul(&b.t()?)?])
            });
        }
    }
}

#[test]
fn quantized_weights() {
    for name in quantized::FORMATS {
        let format: QuantFormat = name.parse().unwrap();
        let k = format.block_len(64).max(64);
        assert_devices_agree(0.0, |device| {
            let w = quantized::random_weight(format, 5, k, device);
            let rows = Tensor::from_slice(&[4i32, 0, 0], 3, device)?;
            Ok(vec![
                w.dequantize(DType::F16)?,
                w.narrow_rows(1, 3)?.dequantize(DType::F32)?,
                w.rows(&rows, DType::BF16)?,
            ])
        });
        // The CPU device rounds the activations to 16 bits.
        assert_devices_agree(2e-3, |device| {
            let w = quantized::random_weight(format, 5, k, device);
            let x = numbers(3 * k, DType::F32, device)?.reshape([3, k])?;
            let bias = numbers(5, DType::F32, device)?;
            Ok(vec![w.linear(&x, Some(&bias))?, w.narrow_rows(2, 3)?.matmul(&x.narrow(0, 1, 1)?)?])
        });
    }
}

#[test]
fn gathers() {
    assert_devices_agree(0.0, |device| {
        let a = numbers(35, DType::F32, device)?.reshape([7, 5])?;
        let rows = Tensor::from_slice(&[6i64, 0, 3, 3], 4, device)?;
        let index = Tensor::from_slice(&[4i64, 0, 1, 2, 3, 4, 0], [7, 1], device)?;
        let wide = numbers(96, DType::F32, device)?.reshape([8, 12])?;
        Ok(vec![
            a.index_select(0, &rows)?,
            a.index_select(1, &rows.narrow(0, 1, 3)?)?,
            a.gather(1, &index)?,
            wide.index_select(0, &rows)?,
            wide.index_add(0, &rows, &wide.narrow(0, 2, 4)?)?,
        ])
    });
}

#[test]
fn indices() {
    assert_devices_agree(1e-5, |device| {
        let a = numbers(35, DType::F32, device)?.reshape([7, 5])?.requires_grad_(true)?;
        let index = Tensor::from_slice(&[4i64, 0, 1, 1, 3, 2, 0, 4], [2, 4], device)?;
        let source = numbers(8, DType::F32, device)?.reshape([2, 4])?;
        let [rows, cols] = [index.select(0, 0)?, index.select(0, 1)?];
        let picked = [Some(&rows), Some(&cols)];
        let mask = a.detach().gt(&Tensor::zeros([7, 5], device)?)?;
        let outs = [
            a.scatter(0, &index, &source)?,
            a.scatter_add(1, &index, &source)?,
            a.scatter_reduce(0, &index, &source, ScatterReduce::Amax, true)?,
            a.index(&picked)?,
            a.index_put(&picked, &source.select(0, 0)?, true)?,
            a.masked_select(&mask)?,
        ];
        let mut all: Vec<Tensor> = outs.iter().map(Tensor::detach).collect();
        outs.iter().try_for_each(|out| out.sum((), false)?.backward())?;
        all.extend([mask.nonzero()?, a.grad().expect("a took part")]);
        Ok(all)
    });
}

#[test]
fn scans_and_sorts() {
    for n in SIZES {
        assert_devices_agree(2e-2, |device| {
            let a = numbers(3 * n, DType::F32, device)?.reshape([3, n])?;
            let half = numbers(3 * n, DType::F16, device)?.reshape([3, n])?;
            let whole = a.mul_scalar(8)?.to_dtype(DType::I64)?;
            let (greatest, at) = a.cummax(1)?;
            let (sorted, order) = whole.sort(1, true)?;
            let (top, _) = a.topk(n.div_ceil(2), 1, true)?;
            Ok(vec![
                a.cumsum(1)?,
                a.t()?.cumsum(0)?,
                half.cumprod(1)?,
                a.logcumsumexp(1)?,
                greatest,
                at,
                sorted,
                order,
                top,
                whole.unique()?,
                a.sort(1, false)?.0.searchsorted(&a, true)?,
            ])
        });
    }
}

#[test]
fn windows() {
    for dtype in FLOATS {
        assert_devices_agree(5e-2, |device| {
            let x = numbers(2 * 4 * 5 * 6, dtype, device)?.reshape([2, 4, 5, 6])?.requires_grad_(true)?;
            let w = numbers(6 * 2 * 3 * 2, dtype, device)?.reshape([6, 2, 3, 2])?.requires_grad_(true)?;
            let bias = numbers(6, dtype, device)?.requires_grad_(true)?;
            let options = ConvOptions { stride: [2, 1], padding: [1, 1].into(), groups: 2, ..Default::default() };
            let y = x.conv2d(&w, Some(&bias), options)?;
            let pooled = y.max_pool2d([2, 3], MaxPoolOptions { stride: Some([1, 2]), ..Default::default() })?;
            let mean = y.adaptive_avg_pool2d([2, 3])?;
            pooled.sum((), false)?.add(&mean.mul(&mean)?.sum((), false)?)?.backward()?;
            let grads = [&x, &w, &bias].map(|t| t.grad().expect("each took part"));
            Ok([y, pooled, mean].iter().map(Tensor::detach).chain(grads).collect())
        });
    }
}

/// Batch norm and 2-D pooling of channels-last images. The 2 x 9 x 8 = 144 pixels exceed a work-group of 32 work-items, so the reduction
/// runs in several slices.
#[test]
fn windows_and_norms_of_channels_last() {
    for (dtype, c) in [(DType::F32, 8), (DType::BF16, 16), (DType::F32, 3)] {
        assert_devices_agree(5e-2, |device| {
            let x = numbers(2 * c * 9 * 8, dtype, device)?.reshape([2, c, 9, 8])?;
            let x = x.to_memory_format(MemoryFormat::ChannelsLast)?.requires_grad_(true)?;
            let (weight, bias) = (numbers(c, dtype, device)?, numbers(c, dtype, device)?);
            let y = x.batch_norm(BatchNormOptions {
                weight: Some(&weight),
                bias: Some(&bias),
                training: true,
                ..Default::default()
            })?;
            let options = MaxPoolOptions { stride: Some([2, 2]), padding: 1.into(), ..Default::default() };
            let (pooled, mean) = (x.max_pool2d([3, 3], options)?, x.avg_pool2d([3, 2], Default::default())?);
            y.mul(&y)?
                .sum((), false)?
                .add(&pooled.sum((), false)?)?
                .add(&mean.mul(&mean)?.sum((), false)?)?
                .backward()?;
            Ok([y, pooled, mean].iter().map(Tensor::detach).chain(x.grad()).collect())
        });
    }
}

/// Resizes images of one to three spatial dims to larger, smaller and equal sizes, with gradients.
#[test]
fn images_of_other_sizes() {
    let linear = [false, true].map(|align_corners| Interpolation::Linear { align_corners });
    let modes = [linear[0], linear[1], Interpolation::Nearest, Interpolation::NearestExact];
    for (i, (from, to)) in [
        (&[2, 3, 17][..], &[33][..]),
        (&[1, 2, 5, 4], &[9, 2]),
        (&[2, 2, 1, 7], &[3, 7]),
        (&[1, 2, 2, 3, 5], &[3, 1, 8]),
        (&[1, 1, 16, 15], &[1, 17]),
    ]
    .into_iter()
    .enumerate()
    {
        for (k, mode) in modes.into_iter().enumerate() {
            assert_devices_agree(1e-2, |device| {
                let x = numbers(from.iter().product(), FLOATS[(i + k) % 3], device)?.reshape(from)?;
                let x = x.flip(-1)?.requires_grad_(true)?;
                let y = x.interpolate(to, mode)?;
                y.square()?.sum((), false)?.backward()?;
                Ok(vec![y.detach(), x.grad().expect("it took part")])
            });
        }
    }
}

#[test]
fn norms_and_attention() {
    for n in [1, 15, 33] {
        assert_devices_agree(2e-2, |device| {
            let x = numbers(2 * 3 * n, DType::F32, device)?.reshape([2, 3, n])?.requires_grad_(true)?;
            let w = numbers(n, DType::F32, device)?.requires_grad_(true)?;
            let normal = x.layer_norm(&[n], Some(&w), None, 1e-5)?;
            let root = x.rms_norm(&[n], None, Some(1e-5))?;
            let options = Attention { is_causal: true, ..Default::default() };
            let attended = x.scaled_dot_product_attention(&x, &normal, options)?;
            attended.mul(&root)?.sum((), false)?.backward()?;
            let grads = [&x, &w].map(|t| t.grad().expect("each took part"));
            let (x, w) = (x.detach(), w.detach());
            let (y, mean, rstd) = x.native_layer_norm(&[n], Some(&w), None, 1e-5)?;
            let [dx, ..] =
                y.native_layer_norm_backward(&x, &[n], &mean, &rstd, Some(&w), None, [true, false, false])?;
            let native = [y, mean, rstd, dx.expect("it is wanted")];
            Ok([normal, root, attended].iter().map(Tensor::detach).chain(grads).chain(native).collect())
        });
    }
}

/// Attention with masks, grouped heads and dropout. In the last case there are few queries, and several work-groups divide their keys.
#[test]
fn attention() {
    for (dtype, queries, keys) in [(DType::F32, 11, 17), (DType::F16, 5, 9), (DType::F32, 1, 520)] {
        assert_devices_agree(2e-2, |device| {
            let made = |heads: usize, length: usize| {
                let t = numbers(heads * length * 6, dtype, device)?.reshape([1, heads, length, 6])?;
                t.narrow(-1, 1, 4)?.detach().requires_grad_(true)
            };
            let (q, kv) = (made(4, queries)?, made(2, keys)?);
            let mask = numbers(keys, dtype, device)?.gt_scalar(-0.7)?;
            let options = Attention { attn_mask: Some(&mask), dropout_p: 0.2, enable_gqa: true, ..Default::default() };
            let attended = q.scaled_dot_product_attention(&kv, &kv, options)?;
            attended.backward_with(&attended.detach())?;
            let grads = [&q, &kv].map(|t| t.grad().expect("each took part"));
            Ok([attended.detach()].into_iter().chain(grads).collect())
        });
    }
}

#[test]
fn attention_over_a_cache() {
    for kind in [CacheType::F16, CacheType::Q8_0] {
        assert_devices_agree(2e-2, |device| {
            let made = |heads: usize, rows: usize| {
                numbers(heads * rows * 32, DType::F32, device)?.reshape([1, heads, rows, 32])
            };
            let cache = [CacheRows::new([1, 2, 80, 32], kind, device)?, CacheRows::new([1, 2, 80, 32], kind, device)?];
            let position = Tensor::zeros(1, (DType::I64, device))?;
            let mut results = Vec::new();
            // Rows that one work-group attends to, and more rows.
            for new in [66, 1, 5] {
                let (q, rows) = (made(6, new)?, made(2, new)?);
                results.push(cached_attention(&q, [&rows, &rows], cache.each_ref(), &position, None)?);
                position.add_scalar_(new as i64)?;
            }
            Ok(results)
        });
    }
}

#[test]
fn random_numbers() {
    assert_devices_agree(1e-5, |device| {
        Ok(vec![
            Tensor::rand([3, 7], device)?,
            Tensor::randn(33, device)?,
            Tensor::randint(-3, 9, 17, (DType::I64, device))?,
            Tensor::ones(20, device)?.dropout(0.5)?,
        ])
    });
}

#[test]
fn training_steps() {
    for dtype in FLOATS {
        assert_devices_agree(5e-2, |device| {
            let mut net = Sequential::new()
                .push(Linear::new(5, 7, (dtype, device))?.with_activation(Activation::Relu))
                .push(Linear::new(7, 3, (dtype, device))?);
            let x = numbers(20, dtype, device)?.reshape([4, 5])?;
            let y = Tensor::from_slice(&[0i64, 2, 1, 2], 4, device)?;
            let mut losses = Vec::new();
            // The optimizers run one after the other, because an optimizer takes over the parameters.
            for sgd in [true, false] {
                let parameters = net.parameters_mut();
                let mut optimizer: Box<dyn Optimizer> = match sgd {
                    true => Box::new(Sgd::new(parameters, SgdConfig { lr: 0.1, momentum: 0.9, ..Default::default() })?),
                    false => Box::new(AdamW::new(parameters, AdamWConfig { lr: 0.01, ..Default::default() })?),
                };
                for _ in 0..2 {
                    optimizer.zero_grad();
                    let loss = net.forward(&x)?.cross_entropy(&y)?;
                    loss.backward()?;
                    optimizer.step()?;
                    losses.push(loss.detach());
                }
            }
            for pair in losses.windows(2) {
                assert!(!pair[0].eq(&pair[1])?.to_vec::<bool>()?[0], "a step on {device} changed nothing");
            }
            Ok(losses)
        });
    }
}
