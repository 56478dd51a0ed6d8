//! Times products with quantised weights: `cargo bench --bench quantized -- --device opencl:0`.
//!
//! Each line has the gigabytes of packed bytes that a product reads in a second, for 1, 2, 4, 8 and 256 rows, and for one row the share of the
//! copy speed (bytes read and written) and the ratio to the same product in f16 on the same device. The products take weights in turn from a set
//! that is larger than the caches, as a language model does. Before timing, some columns are checked against f64.

use std::time::Instant;

use clap::Parser;

use claystone::device::DeviceKind;
use claystone::quantized::{QuantFormat, QuantizedTensor};
use claystone::{DType, Device, Result, Tensor, manual_seed};

#[derive(Parser)]
struct Args {
    /// The device: cpu, opencl:0, ...; by default the best device.
    #[arg(long)]
    device: Option<Device>,
    /// The shapes of weights, as rows x columns.
    #[arg(long, value_delimiter = ',', default_value = "4096x4096,11008x4096,4096x11008")]
    shapes: Vec<String>,
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,g4_128_zero"
    )]
    formats: Vec<QuantFormat>,
    /// The numbers of rows of the activations.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,256")]
    rows: Vec<usize>,
    /// The megabytes of weights that are read in turn; by default 256 on GPUs, otherwise 64.
    #[arg(long)]
    megabytes: Option<usize>,
    /// The seconds for each number.
    #[arg(long, default_value_t = 0.05)]
    seconds: f64,
    #[arg(long, hide = true)]
    bench: bool, // passed by cargo
}

fn main() -> Result<()> {
    let args = Args::parse();
    let device = args.device.unwrap_or_else(Device::best);
    manual_seed(49);
    let is_gpu = matches!(device.info()?.kind, DeviceKind::DiscreteGpu | DeviceKind::IntegratedGpu);
    let memory = args.megabytes.unwrap_or(if is_gpu { 256 } else { 64 }) << 20;
    let source = Tensor::zeros([memory / 8], device)?;
    let target = source.try_clone()?;
    let copy = seconds_of(device, args.seconds, |_| target.copy_(&source).map(drop))?;
    let copy = 8.0 * source.numel() as f64 / copy / 1e9;
    println!("{}: copies {copy:.1} GB/s", device.info()?.name.trim());
    for shape in &args.shapes {
        let (n, k) = shape.split_once('x').expect("rows x columns");
        let (n, k): (usize, usize) = (n.parse().expect("a number"), k.parse().expect("a number"));
        let rows = |dtype: DType| -> Result<Vec<Tensor>> {
            args.rows.iter().map(|&m| Tensor::randn(&[m, k], device)?.to_dtype(dtype)).collect()
        };
        let time =
            |bytes: usize, xs: &[Tensor], f: &dyn Fn(&Tensor, usize) -> Result<Tensor>| -> Result<(Vec<f64>, String)> {
                let times = xs.iter().map(|x| seconds_of(device, args.seconds, |i| f(x, i).map(drop)));
                let times = times.collect::<Result<Vec<f64>>>()?;
                let rates: Vec<String> = times.iter().map(|t| format!("{:9.1}", bytes as f64 / t / 1e9)).collect();
                Ok((times, rates.concat()))
            };
        let header: Vec<String> = args.rows.iter().map(|m| format!("{:>9}", format!("m = {m}"))).collect();
        println!("\n{shape}, GB/s{:>5}{}  of copy  over f16      us", "", header.concat());
        let bytes = 2 * n * k;
        let plain = (0..(memory / bytes).max(2))
            .map(|_| Tensor::randn(&[n, k], device)?.mul_scalar(0.02)?.to_dtype(DType::F16));
        let plain = plain.collect::<Result<Vec<Tensor>>>()?;
        let (half, rates) = time(bytes, &rows(DType::F16)?, &|x, i| x.linear(&plain[i % plain.len()], None))?;
        let share = |bytes: usize, time: f64| bytes as f64 / time / 1e9 / copy;
        println!("{:<16}{rates}{:>9.2}{:>10}{:>8.1}", "f16", share(bytes, half[0]), "", half[0] * 1e6);
        drop(plain);
        let xs = rows(DType::F32)?;
        for &format in args.formats.iter().filter(|format| format.row_bytes(k).is_ok()) {
            let bytes = n * format.row_bytes(k)?;
            let first = weight(format, n, k, device)?;
            check(&first, &xs[0])?;
            let blocks = first.to_bytes()?;
            let more =
                (1..(memory / bytes).max(2)).map(|_| QuantizedTensor::from_bytes(&blocks, [n, k], format, device));
            let all = [Ok(first)].into_iter().chain(more).collect::<Result<Vec<QuantizedTensor>>>()?;
            let (times, rates) = time(bytes, &xs, &|x, i| all[i % all.len()].matmul(x))?;
            let over = half[0] / times[0];
            println!(
                "{:<16}{rates}{:>9.2}{over:>10.2}{:>8.1}",
                format.to_string(),
                share(bytes, times[0]),
                times[0] * 1e6
            );
        }
    }
    Ok(())
}

/// Makes a weight of random blocks with small scales.
fn weight(format: QuantFormat, n: usize, k: usize, device: Device) -> Result<QuantizedTensor> {
    let mut state = 1u32;
    let mut bytes = vec![0u8; n * format.row_bytes(k)?];
    for byte in &mut bytes {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        *byte = (state >> 24) as u8;
    }
    let halves: &[usize] = match format {
        QuantFormat::Q2K => &[80, 82],
        QuantFormat::Q3K => &[108],
        QuantFormat::Q6K => &[208],
        QuantFormat::Q8_0 | QuantFormat::Q4_0 | QuantFormat::Q5_0 => &[0],
        _ => &[0, 2],
    };
    for block in bytes.chunks_exact_mut(format.block_bytes(k)) {
        for (i, &at) in halves.iter().enumerate() {
            block[at + 1] = if i == 1 && matches!(format, QuantFormat::Grouped { .. }) { 0 } else { 0x1c };
        }
    }
    QuantizedTensor::from_bytes(&bytes, [n, k], format, device)
}

/// Compares some columns of a product with the sums in f64.
fn check(w: &QuantizedTensor, x: &Tensor) -> Result<()> {
    let values = |t: &Tensor| t.to_device(Device::Cpu)?.to_dtype(DType::F64)?.to_vec::<f64>();
    let (n, got, row) = (w.shape().dims()[0], values(&w.matmul(x)?)?, values(&x.narrow(0, 0, 1)?)?);
    for j in [0, n / 3, n - 1] {
        let column = values(&w.narrow_rows(j, 1)?.dequantize(DType::F32)?)?;
        let terms = || row.iter().zip(&column).map(|(x, w)| x * w);
        let (want, sizes) = (terms().sum::<f64>(), terms().map(f64::abs).sum::<f64>());
        assert!((got[j] - want).abs() <= 1e-4 * sizes, "{w:?}: column {j} is {}, not {want}", got[j]);
    }
    Ok(())
}

/// Returns the median time of a call, when several calls are enqueued before one wait.
fn seconds_of(device: Device, budget: f64, f: impl Fn(usize) -> Result<()>) -> Result<f64> {
    let run = |count: usize| -> Result<f64> {
        let start = Instant::now();
        (0..count).try_for_each(&f)?;
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    run(3)?;
    let count = ((budget / 5.0 / run(3)?) as usize).clamp(1, 2000);
    let mut times = (0..5).map(|_| run(count)).collect::<Result<Vec<f64>>>()?;
    times.sort_by(f64::total_cmp);
    Ok(times[2])
}
