//! Products of square matrices, checked against f64 in places, then timed: a line of JSON each, like
//! `matmul_torch.py` beside this file. `cargo bench --bench matmul -- --help`.

use std::time::Instant;

use clap::Parser;
use serde_json::json;

use claystone::{DType, Device, Result, Tensor, manual_seed, set_float32_matmul_precision};

#[derive(Parser)]
struct Args {
    /// Where: cpu, opencl:0, ...; the best device unless told.
    #[arg(long)]
    device: Option<Device>,
    #[arg(long, value_delimiter = ',', default_value = "1024,2048,4096,8192")]
    sizes: Vec<usize>,
    /// Of f32, f16, bf16.
    #[arg(long, value_delimiter = ',', default_value = "f32,f16,bf16")]
    dtypes: Vec<String>,
    /// Of f32: highest, high, medium.
    #[arg(long, default_value = "highest")]
    precision: String,
    #[arg(long, hide = true)]
    bench: bool, // what cargo adds
}

fn main() -> Result<()> {
    let args = Args::parse();
    set_float32_matmul_precision(&args.precision)?;
    let device = args.device.unwrap_or_else(Device::best);
    for name in &args.dtypes {
        let dtype = match name.as_str() {
            "f16" => DType::F16,
            "bf16" => DType::BF16,
            _ => DType::F32,
        };
        for &n in &args.sizes {
            manual_seed(n as u64);
            let [a, b] = [0, 1].map(|_| Tensor::randn(&[n, n], device).and_then(|t| t.to_dtype(dtype)));
            let (a, b) = (a?, b?);
            let error = check(&a, &b, n)?;
            let seconds = time(|| a.matmul(&b), device)?;
            let (peer, rate) = ("claystone", 2.0 * (n as f64).powi(3) / seconds / 1e9);
            println!(
                "{}",
                json!({ "peer": peer, "device": device.to_string(), "case": "matmul", "n": n, "dtype": name,
                        "median_us": seconds * 1e6, "gflops": rate, "error": error })
            );
        }
    }
    Ok(())
}

/// The largest error of some results, relative to the root of n: a product's size.
fn check(a: &Tensor, b: &Tensor, n: usize) -> Result<f64> {
    let c = a.matmul(b)?;
    let values = |t: Tensor| t.to_device(Device::Cpu)?.to_dtype(DType::F64)?.to_vec::<f64>();
    let mut most = 0f64;
    for (i, j) in [(0, 0), (n - 1, n - 1), (n / 3, n / 2), (n / 2 + 1, n / 5)] {
        let (row, column) = (values(a.narrow(0, i, 1)?)?, values(b.narrow(1, j, 1)?)?);
        let want: f64 = row.iter().zip(&column).map(|(x, y)| x * y).sum();
        most = most.max((values(c.narrow(0, i, 1)?.narrow(1, j, 1)?)?[0] - want).abs() / (n as f64).sqrt());
    }
    assert!(most < 0.05, "wrong by {most}");
    Ok(most)
}

/// The median time of one in a row of products, in seconds.
fn time(f: impl Fn() -> Result<Tensor>, device: Device) -> Result<f64> {
    let row = |count: usize| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            f()?;
        }
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    row(3)?;
    let count = ((0.03 / row(3)?) as usize).clamp(1, 1000);
    let mut samples = (0..7).map(|_| row(count)).collect::<Result<Vec<f64>>>()?;
    samples.sort_by(f64::total_cmp);
    Ok(samples[3])
}
