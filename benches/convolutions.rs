//! Times each distinct convolution of ResNet-50 and each distinct depthwise convolution of MobileNetV2, forward and with both gradients, with
//! channels-last and row-major images and weights: `convolutions [--device D] [--only TEXT] [--format channels_last|contiguous_format] [--precision
//! P]`. Prints a JSON line for each case with the microseconds of a call, the median of seven runs of ten. P is an argument of
//! `set_float32_matmul_precision`. `benches/convolutions_torch.py` compares PyTorch in the same formats.

use std::error::Error;
use std::time::Instant;

use claystone::autograd::{GradOptions, grad_with_options};
use claystone::ops::ConvOptions;
use claystone::{DType, Device, MemoryFormat, Result, Tensor, set_float32_matmul_precision};

/// The number of images in a call.
const BATCH: usize = 64;

/// Input channels, output channels, side of the images, side of the kernel, and stride of each convolution; all have one group.
const RESNET_50: [[usize; 5]; 19] = [
    [3, 64, 224, 7, 2],
    [64, 64, 56, 1, 1],
    [64, 64, 56, 3, 1],
    [64, 256, 56, 1, 1],
    [256, 64, 56, 1, 1],
    [256, 128, 56, 1, 1],
    [128, 128, 56, 3, 2],
    [128, 512, 28, 1, 1],
    [256, 512, 56, 1, 2],
    [512, 128, 28, 1, 1],
    [128, 128, 28, 3, 1],
    [512, 256, 28, 1, 1],
    [256, 256, 28, 3, 2],
    [256, 1024, 14, 1, 1],
    [256, 256, 14, 3, 1],
    [1024, 512, 14, 1, 1],
    [512, 512, 14, 3, 2],
    [512, 2048, 7, 1, 1],
    [512, 512, 7, 3, 1],
];

/// The same five numbers for depthwise convolutions, which have one group per channel.
const MOBILENET_V2: [[usize; 5]; 6] = [
    [32, 32, 112, 3, 1],
    [96, 96, 112, 3, 2],
    [144, 144, 56, 3, 1],
    [192, 192, 28, 3, 1],
    [384, 384, 14, 3, 1],
    [960, 960, 7, 3, 1],
];

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let device = value("--device").map_or(Ok(Device::best()), |text| text.parse())?;
    let [only, wanted] = ["--only", "--format"].map(|name| value(name).cloned().unwrap_or_default());
    if let Some(precision) = value("--precision") {
        set_float32_matmul_precision(precision)?;
    }
    let cases = RESNET_50.iter().map(|c| (c, 1)).chain(MOBILENET_V2.iter().map(|c| (c, c[0])));
    let formats = [MemoryFormat::ChannelsLast, MemoryFormat::Contiguous];
    for (&[inputs, outputs, side, kernel, stride], groups) in cases {
        let kinds = [DType::F16, DType::F32].into_iter().flat_map(|dtype| formats.map(|format| (dtype, format)));
        for (dtype, format) in kinds.filter(|(_, format)| format.to_string().contains(&wanted)) {
            let name = if groups == 1 { "convolution" } else { "depthwise" };
            if !format!("{name} {dtype}").contains(&only) {
                continue;
            }
            let made = |shape: [usize; 4]| {
                Tensor::randn(shape, device)?.to_dtype(dtype)?.to_memory_format(format)?.requires_grad_(true)
            };
            let x = made([BATCH, inputs, side, side])?;
            let w = made([outputs, inputs / groups, kernel, kernel])?;
            let options =
                ConvOptions { stride: [stride; 2], padding: (kernel / 2).into(), groups, ..ConvOptions::default() };
            let forward = || x.detach().conv2d(&w.detach(), None, options);
            // The gradient has the strides of the result, as in a real backward pass.
            let grad = forward()?;
            let both = || {
                let y = x.conv2d(&w, None, options)?;
                let options = GradOptions { grad_outputs: &[&grad], ..GradOptions::default() };
                grad_with_options(&[&y], &[&x, &w], options).map(drop)
            };
            let (forward, both) = (time(device, || forward().map(drop))?, time(device, both)?);
            println!(
                "{{\"case\":\"{name}\",\"dtype\":\"{dtype}\",\"format\":\"{format}\",\"sizes\":[{inputs},{outputs},{side},{kernel},{stride},{groups}],\
                 \"forward_us\":{forward:.1},\"both_us\":{both:.1}}}"
            );
        }
    }
    Ok(())
}

/// Returns the time of a call in microseconds: the median of seven runs of ten calls each.
fn time(device: Device, f: impl Fn() -> Result<()>) -> Result<f64> {
    (0..3).try_for_each(|_| f())?;
    let mut times = Vec::new();
    for _ in 0..7 {
        device.synchronize()?;
        let begun = Instant::now();
        (0..10).try_for_each(|_| f())?;
        device.synchronize()?;
        times.push(begun.elapsed().as_secs_f64() * 1e5);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[3])
}
