//! Times products of square matrices, after checking some elements against f64. Prints a JSON line for each product, like `matmul_torch.py` in this
//! folder. `cargo bench --bench matmul -- --help`.
//!
//! With `--halves`, products in f32, bf16 and f16 are timed in turns: products with few rows, square products, and batches of small products.
//! Prints the median over all turns of the ratio to f32. `matmul_torch.py halves` prints the same for PyTorch on the CPU.

use std::time::Instant;

use clap::Parser;
use serde_json::json;

use claystone::{DType, Device, Result, Tensor, manual_seed, set_float32_matmul_precision};

#[derive(Parser)]
struct Args {
    /// The device: cpu, opencl:0, ...; by default the best device.
    #[arg(long)]
    device: Option<Device>,
    #[arg(long, value_delimiter = ',', default_value = "1024,2048,4096,8192")]
    sizes: Vec<usize>,
    /// Dtypes: f32, f16, bf16.
    #[arg(long, value_delimiter = ',', default_value = "f32,f16,bf16")]
    dtypes: Vec<String>,
    /// The precision of f32 products: highest, high, medium.
    #[arg(long, default_value = "highest")]
    precision: String,
    /// Compare halves with f32 in turns.
    #[arg(long)]
    halves: bool,
    #[arg(long, hide = true)]
    bench: bool, // passed by cargo
}

fn main() -> Result<()> {
    let args = Args::parse();
    set_float32_matmul_precision(&args.precision)?;
    let device = args.device.unwrap_or_else(Device::best);
    if args.halves {
        return HALVES.iter().try_for_each(|&case| halves(case, device));
    }
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

/// Returns the largest error among some elements, divided by the square root of n, which is the magnitude of a product's elements.
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

/// Returns the median time of a product in seconds, when several products are enqueued before one wait.
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

/// A batch size, and the sizes of products of `[m, k]` and `[k, n]`. If the last field is true, right matrices are stored as `[n, k]`.
type Case = (usize, [usize; 3], bool);

const HALVES: [Case; 10] = [
    (1, [1, 4096, 4096], false),
    (1, [1, 4096, 4096], true), // decoding: the right matrix is a weight, stored as layers store it
    (1, [4, 4096, 4096], false),
    (1, [4, 4096, 4096], true),
    (1, [512, 512, 512], false),
    (1, [512, 512, 512], true),
    (1, [2048, 2048, 2048], false),
    (512, [1, 64, 64], true), // the scores of one query in each of many attention heads
    (512, [1, 64, 64], false),
    (512, [4, 64, 64], false),
];

/// Times products of one case in f32, bf16 and f16. The three dtypes alternate.
fn halves((batch, [m, k, n], transposed): Case, device: Device) -> Result<()> {
    const TURNS: usize = 31;
    manual_seed(1);
    let right = if transposed { [batch, n, k] } else { [batch, k, n] };
    let operands = [DType::F32, DType::BF16, DType::F16].map(|dtype| -> Result<(Tensor, Tensor)> {
        let (a, b) = (Tensor::randn(&[batch, m, k], device)?, Tensor::randn(&right, device)?);
        Ok((a.to_dtype(dtype)?, if transposed { b.to_dtype(dtype)?.transpose(1, 2)? } else { b.to_dtype(dtype)? }))
    });
    let operands = operands.into_iter().collect::<Result<Vec<_>>>()?;
    let turn = |(a, b): &(Tensor, Tensor), count: usize| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            a.matmul(b)?;
        }
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    operands.iter().try_for_each(|of| turn(of, 3).map(drop))?;
    let count = ((0.01 / turn(&operands[0], 3)?) as usize).clamp(1, 1000);
    let turns =
        (0..TURNS).map(|_| operands.iter().map(|of| turn(of, count)).collect()).collect::<Result<Vec<Vec<f64>>>>()?;
    let median = |f: &dyn Fn(&[f64]) -> f64| {
        let mut values: Vec<f64> = turns.iter().map(|turn| f(turn)).collect();
        values.sort_by(f64::total_cmp);
        (values[TURNS / 2] * 1000.0).round() / 1000.0
    };
    let [us, bf16, f16] = [median(&|t| t[0] * 1e6), median(&|t| t[1] / t[0]), median(&|t| t[2] / t[0])];
    let b = if transposed { "[n, k]" } else { "[k, n]" };
    println!(
        "{}",
        json!({ "peer": "claystone", "device": device.to_string(), "case": "halves", "batch": batch, "m": m, "k": k, "n": n,
                "b": b, "f32_us": us, "bf16_over_f32": bf16, "f16_over_f32": f16, "bf16_us": median(&|t| t[1] * 1e6) })
    );
    Ok(())
}
