//! Training past the device's memory: idle tensors move to the host or to a file, and every value stays the same.

use std::time::Instant;

use claystone::nn::{Activation, AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::storage::{self, DeviceStats};
use claystone::{ConvOptions, DType, Device, Error, Result, Tensor};

use crate::common::{devices, each_device, in_own_process};

#[path = "../../examples/char_transformer/model.rs"]
#[allow(dead_code)]
mod model;

const MIB: u64 = 1 << 20;

/// Makes a new caching allocator the device's allocator.
fn install(device: Device, config: &str) {
    device.empty_cache().unwrap();
    let allocator = storage::build_allocator(storage::driver(device).unwrap(), config.parse().unwrap()).unwrap();
    storage::set_allocator(device, allocator).unwrap();
}

/// Trains a small character transformer for three steps. Returns the losses' bits.
fn transformer(device: Device) -> Result<Vec<u32>> {
    let (vocabulary, context, batch) = (64, 64, 16);
    let sizes = model::Sizes { vocabulary, context, width: 64, layers: 3, heads: 4, tied: false, dropout: 0.1 };
    let mut gpt = model::Gpt::new(sizes, device)?;
    let mut adamw = AdamW::new(gpt.parameters_mut(), AdamWConfig::default())?;
    let step = |step: usize| {
        let text: Vec<i64> = (0..batch * (context + 1)).map(|i| ((i * i + 31 * step) % vocabulary) as i64).collect();
        let loss = gpt.loss(&Tensor::from_slice(&text, [batch, context + 1], device)?, DType::F32)?;
        loss.backward()?;
        adamw.step()?;
        adamw.zero_grad();
        loss.item::<f32>().map(f32::to_bits)
    };
    (0..3).map(step).collect()
}

/// A residual block of two convolutions with batch norm.
struct Residual {
    layers: Sequential,
}

impl Module for Residual {
    claystone::parts!(layers);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layers.forward(x)?.add(x)?.relu()
    }
}

/// Trains a small residual network for three steps. Returns the losses' bits.
fn resnet(device: Device) -> Result<Vec<u32>> {
    const WIDTH: usize = 16;
    let conv = |from| -> Result<Sequential> {
        let options = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
        let conv = Conv2d::new(from, WIDTH, [3; 2], options, device)?.without_bias();
        Ok(Sequential::new().push(conv).push(BatchNorm2d::new(WIDTH, device)?))
    };
    let mut net = conv(3)?.push(Activation::Relu);
    for _ in 0..4 {
        net = net.push(Residual { layers: conv(WIDTH)?.push(Activation::Relu).push(conv(WIDTH)?) });
    }
    net = net.push(AdaptiveAvgPool2d([1; 2])).push(Flatten::default()).push(Linear::new(WIDTH, 10, device)?);
    let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { momentum: 0.9, ..SgdConfig::default() })?;
    let labels = Tensor::from_slice(&(0..16).map(|i| i % 10).collect::<Vec<i64>>(), 16, device)?;
    let step = |_| {
        let loss = net.forward(&Tensor::randn([16, 3, 32, 32], device)?)?.cross_entropy(&labels)?;
        sgd.zero_grad();
        loss.backward()?;
        sgd.step()?;
        loss.item::<f32>().map(f32::to_bits)
    };
    (0..3).map(step).collect()
}

/// Trains from the same seed. Returns the losses' bits, the statistics and the seconds.
fn train(device: Device, network: fn(Device) -> Result<Vec<u32>>) -> Result<(Vec<u32>, DeviceStats, f64)> {
    claystone::manual_seed(7);
    device.reset_peak_stats()?;
    let began = Instant::now();
    let losses = network(device)?;
    Ok((losses, device.memory_stats()?, began.elapsed().as_secs_f64()))
}

#[test]
fn training_under_a_limit_gives_the_same_losses() {
    if !in_own_process("spill::training_under_a_limit_gives_the_same_losses") {
        return;
    }
    let networks = [("transformer", transformer as fn(Device) -> Result<Vec<u32>>), ("resnet", resnet)];
    let devices = devices().into_iter().filter(|device| matches!(device, Device::Cpu | Device::OpenCL(0)));
    for (device, (name, network)) in devices.flat_map(|device| networks.map(|network| (device, network))) {
        install(device, "");
        train(device, network).unwrap(); // builds the kernels
        let (losses, free, seconds) = train(device, network).unwrap();
        let peak = free.allocated_bytes.peak;
        println!("{name} on {device}: {peak} bytes at the peak, {seconds:.2} s");
        for (spill, percents) in [("host", &[100, 75, 50, 35][..]), ("disk", &[60])] {
            for percent in percents {
                let (limit, what) = (peak * percent / 100, format!("{name} on {device}, spill:{spill} at {percent} %"));
                install(device, &format!("spill:{spill}"));
                device.set_memory_limit(limit).unwrap();
                let (under, stats, took) = train(device, network).unwrap_or_else(|e| panic!("{what}: {e}"));
                println!(
                    "{what}: {:.2} of the time, {} spills, {} returns, {} MiB at most on the host",
                    took / seconds,
                    stats.num_spills,
                    stats.num_returns,
                    stats.spilled_bytes.peak / MIB
                );
                assert_eq!(under, losses, "{what}");
                assert!(stats.reserved_bytes.peak <= limit, "{what}: {stats}");
                assert!(*percent > 60 || stats.num_spills > 0 && stats.num_returns > 0, "{what}: {stats}");
                device.empty_cache().unwrap();
                let left = device.memory_stats().unwrap();
                assert_eq!((left.spilled_bytes.current, left.allocated_bytes.current), (0, 0), "{what}: {left}");
            }
        }
    }
}

#[test]
fn spilled_tensors_are_read_changed_viewed_and_exported() {
    if !in_own_process("spill::spilled_tensors_are_read_changed_viewed_and_exported") {
        return;
    }
    each_device(|device| {
        install(device, "spill:host");
        device.set_memory_limit(40 * MIB).unwrap();
        let n = 1 << 20; // elements: 4 MiB
        let mut tensors: Vec<Tensor> = (0..24).map(|i| Tensor::full([n], f64::from(i), device).unwrap()).collect();
        let stats = device.memory_stats().unwrap();
        assert!(stats.spilled_bytes.current >= 56 * MIB && stats.reserved_bytes.current <= 40 * MIB, "{stats}");
        // Reads, views, in-place changes, sums over several tensors, and copies, all of tensors of which most are on the host.
        let first = |t: &Tensor| t.narrow(0, n - 1, 1).unwrap().to_vec::<f32>().unwrap()[0];
        assert!(tensors.iter().zip(0..).all(|(t, i)| first(t) == i as f32));
        let views: Vec<Tensor> = tensors.iter().map(|t| t.narrow(0, 1, n - 1).unwrap()).collect();
        views.iter().for_each(|view| _ = view.add_scalar_(100).unwrap());
        tensors
            .iter()
            .zip(0..)
            .for_each(|(t, i)| assert_eq!((t.to_vec::<f32>().unwrap()[0], first(t)), (i as f32, 100.0 + i as f32)));
        let sums: Vec<Tensor> =
            tensors.iter().zip(tensors.iter().rev()).map(|(a, b)| a.add(b).unwrap().narrow(0, 1, 8).unwrap()).collect();
        assert!(sums.iter().all(|sum| sum.to_vec::<f32>().unwrap() == [223.0; 8]));
        drop(sums);
        let host = tensors[0].to_device(Device::Cpu).unwrap().to_vec::<f32>().unwrap();
        assert_eq!((host[0], host[1], host.len()), (0.0, 100.0, n));
        if device == Device::Cpu {
            // Closures over the elements and an exclusive owner need the bytes in place.
            let sum = tensors[1].with_host::<f32, _>(|x| x[..3].iter().sum::<f32>()).unwrap();
            assert_eq!(sum, 203.0);
        }
        let stats = device.memory_stats().unwrap();
        assert!(stats.num_returns > 20 && stats.reserved_bytes.peak <= 40 * MIB, "{stats}");
        // More operands than fit at once are an error, and change nothing.
        let refs: Vec<&Tensor> = tensors.iter().collect();
        let all = Tensor::cat(&refs, 0);
        assert!(matches!(all, Err(Error::OutOfMemory { .. })), "{all:?}");
        assert!(tensors.iter().zip(0..).all(|(t, i)| first(t) == 100.0 + i as f32));
        drop(views);
        if device == Device::Cpu {
            // The owner of a vector's elements needs them in place, too.
            let host = tensors.remove(3).into_host::<f32>().unwrap();
            assert_eq!(host[..2], [3.0, 103.0]);
        }
        drop(tensors);
        device.empty_cache().unwrap();
        let left = device.memory_stats().unwrap();
        assert_eq!((left.spilled_bytes.current, left.reserved_bytes.current), (0, 0), "{left}");
    });
}

#[test]
fn threads_share_a_limit_that_holds_a_part_of_their_tensors() {
    if !in_own_process("spill::threads_share_a_limit_that_holds_a_part_of_their_tensors") {
        return;
    }
    each_device(|device| {
        install(device, "spill:host");
        device.set_memory_limit(48 * MIB).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..3 {
                scope.spawn(move || {
                    let n = 1 << 18; // elements: 1 MiB
                    let own: Vec<Tensor> =
                        (0..24).map(|i| Tensor::full([n], f64::from(thread * 100 + i), device).unwrap()).collect();
                    for round in 0..6 {
                        for (i, t) in (0..).zip(&own) {
                            let next = &own[(i + 7 * round + 1) % 24];
                            let sum = t.add(next).unwrap().narrow(0, n - 2, 2).unwrap().to_vec::<f32>().unwrap();
                            let want = (thread as usize * 200 + i + (i + 7 * round + 1) % 24) as f32;
                            assert_eq!(sum, [want; 2], "thread {thread}, round {round}");
                        }
                    }
                });
            }
        });
        let stats = device.memory_stats().unwrap();
        assert!(stats.num_spills > 0 && stats.reserved_bytes.peak <= 48 * MIB, "{stats}");
        device.empty_cache().unwrap();
        assert_eq!(device.memory_stats().unwrap().spilled_bytes.current, 0);
    });
}
