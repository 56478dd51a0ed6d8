//! Compares kernels that read images, kernels that read buffers, and the choice of `claystone tune`. The three alternate:
//! `images [--device D] [--rounds N]`. Prints the median time in microseconds, and the ratio to the time with buffers.

use std::error::Error;
use std::time::Instant;

use claystone::nn::{Activation, Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::storage::MemoryMode::{Auto, Buffer, Image};
use claystone::storage::{MemoryMode, with_memory_mode};
use claystone::{AvgPoolOptions, ConvOptions, DType, Device, MaxPoolOptions, Padding, Tensor, no_grad};

const MODES: [MemoryMode; 3] = [Buffer, Image, Auto];

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().collect();
    let value = |option: &str| args.iter().position(|a| a == option).map(|i| args.get(i + 1).ok_or("it needs a value"));
    let device: Device = value("--device").transpose()?.map_or(Ok(Device::best()), |name| name.parse())?;
    let rounds: usize = value("--rounds").transpose()?.map_or(Ok(21), |n| n.parse())?;
    println!("{}", device.info()?.name);
    println!("{:34} {:>10} {:>18} {:>18}", "", "buffers", "images", "auto");

    let randn = |dims: &[usize], dtype| Tensor::randn(dims, device)?.to_dtype(dtype);
    for dtype in [DType::F32, DType::F16] {
        let x = randn(&[16, 32, 32, 32], dtype)?;
        let same = ConvOptions { padding: Padding::Same, ..ConvOptions::default() };
        let (one, three) = (randn(&[64, 32, 1, 1], dtype)?, randn(&[64, 32, 3, 3], dtype)?);
        let (depthwise, each) = (randn(&[32, 1, 3, 3], dtype)?, ConvOptions { groups: 32, ..same });
        let (rows, matrix) = (randn(&[256, 512], dtype)?, randn(&[512, 512], dtype)?);
        let cases: [(&str, &dyn Fn() -> claystone::Result<Tensor>); 7] = [
            ("convolution 1x1", &|| x.conv2d(&one, None, same)),
            ("convolution 3x3", &|| x.conv2d(&three, None, same)),
            ("depthwise 3x3", &|| x.conv2d(&depthwise, None, each)),
            ("max_pool2d 2x2", &|| x.max_pool2d([2, 2], MaxPoolOptions::default())),
            ("avg_pool2d 3x3", &|| x.avg_pool2d([3, 3], AvgPoolOptions::default())),
            ("gelu", &|| x.gelu()),
            ("product 256 x 512 x 512", &|| rows.matmul(&matrix)),
        ];
        for (name, f) in cases {
            compare(&format!("{name} {dtype}"), rounds, || no_grad(|| wait_for(f()?)))?;
        }
    }

    let mut network = network(device)?;
    let x = Tensor::randn(&[32, 3, 32, 32], device)?;
    let labels = Tensor::from_vec((0..32).map(|i| i % 10).collect::<Vec<i64>>(), 32, device)?;
    compare("forward pass of a network", rounds, || no_grad(|| wait_for(network.forward(&x)?)))?;
    let config = SgdConfig { lr: 1e-3, ..SgdConfig::default() };
    let mut sgd = Sgd::new(network.parameters_mut(), config)?;
    compare("training step of a network", rounds, || {
        sgd.zero_grad();
        let loss = network.forward(&x)?.cross_entropy(&labels)?;
        loss.backward()?;
        sgd.step()?;
        wait_for(loss)
    })
}

/// Returns a network of three convolutions (the second of 1 x 1) with pooling, and a linear layer.
fn network(device: Device) -> Outcome<Sequential> {
    let same = ConvOptions { padding: Padding::Same, ..ConvOptions::default() };
    let conv = |from, to, side| Conv2d::new(from, to, [side, side], same, device);
    Ok(Sequential::new()
        .push(conv(3, 32, 3)?)
        .push(Activation::Relu)
        .push(MaxPool2d::new([2, 2]))
        .push(conv(32, 64, 1)?)
        .push(Activation::Relu)
        .push(conv(64, 64, 3)?)
        .push(Activation::Relu)
        .push(MaxPool2d::new([2, 2]))
        .push(Flatten::default())
        .push(Linear::new(64 * 8 * 8, 10, device)?))
}

/// Times the three modes in turns and prints a line.
fn compare(name: &str, rounds: usize, mut f: impl FnMut() -> Outcome) -> Outcome {
    let mut times = MODES.map(|_| Vec::new());
    for round in 0..rounds + 3 {
        // The order of the modes changes every round, because the cache contents left by one mode affect the next mode.
        for i in 0..MODES.len() {
            let (mode, times) = (MODES[(i + round) % MODES.len()], &mut times[(i + round) % MODES.len()]);
            let from = Instant::now();
            with_memory_mode(mode, &mut f)?;
            // In the first rounds, kernels are built and the backend detects that a matrix is constant, so these rounds are not measured.
            if round >= 3 {
                times.push(from.elapsed().as_secs_f64() * 1e6);
            }
        }
    }
    let [buffers, images, auto] = times.map(median);
    println!("{name:34} {buffers:10.0} {images:10.0} ({:5.2}) {auto:10.0} ({:5.2})", images / buffers, auto / buffers);
    Ok(())
}

/// Waits until a result is computed.
fn wait_for(result: Tensor) -> Outcome {
    Ok(result.device().synchronize()?)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
