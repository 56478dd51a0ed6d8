//! Times products of quantised weights. Prints a JSON line for each format and number of rows: the time, the packed bytes read a second, and the
//! time of the same product with an f32 weight. `cargo bench --bench quantized -- --device cpu`.

use std::time::Instant;

use clap::Parser;
use serde_json::json;

use claystone::quantized::{QuantFormat, QuantizedTensor};
use claystone::{Device, Result, Tensor};

#[derive(Parser)]
struct Args {
    /// The device: cpu, opencl:0, ...; by default the best device.
    #[arg(long)]
    device: Option<Device>,
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "q8_0,q4_0,q4_1,q5_0,q5_1,q2_k,q3_k,q4_k,q5_k,q6_k,g4_128_zero"
    )]
    formats: Vec<String>,
    /// The numbers of rows of activations.
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,256")]
    rows: Vec<usize>,
    /// The rows of the weight.
    #[arg(long, default_value_t = 4096)]
    n: usize,
    /// The elements of a row of the weight.
    #[arg(long, default_value_t = 4096)]
    k: usize,
    #[arg(long, hide = true)]
    bench: bool, // passed by cargo
}

fn main() -> Result<()> {
    let args = Args::parse();
    let (n, k, device) = (args.n, args.k, args.device.unwrap_or_else(Device::best));
    let wide = Tensor::randn([n, k], device)?;
    for name in &args.formats {
        let format: QuantFormat = name.parse()?;
        // Bytes of small scales: the time does not depend on the values.
        let bytes: Vec<u8> = (0..n * format.row_bytes(k)?).map(|i| (i * 7919 % 1013) as u8 & 0x3f).collect();
        let weight = QuantizedTensor::from_bytes(&bytes, [n, k], format, device)?;
        for &m in &args.rows {
            let x = Tensor::randn([m, k], device)?;
            let (packed, f32) = (time(|| weight.matmul(&x), device)?, time(|| x.linear(&wide, None), device)?);
            println!(
                "{}",
                json!({ "peer": "claystone", "device": device.to_string(), "case": "quantized", "format": name, "rows": m, "n": n, "k": k,
                        "median_us": packed * 1e6, "gb_per_s": bytes.len() as f64 / packed / 1e9, "f32_us": f32 * 1e6 })
            );
        }
    }
    Ok(())
}

/// Returns the median time of a product in seconds, when several products are enqueued before one wait.
fn time(f: impl Fn() -> Result<Tensor>, device: Device) -> Result<f64> {
    let sample = |count: usize| -> Result<f64> {
        let start = Instant::now();
        for _ in 0..count {
            f()?;
        }
        device.synchronize()?;
        Ok(start.elapsed().as_secs_f64() / count as f64)
    };
    sample(3)?;
    let count = ((0.03 / sample(3)?) as usize).clamp(1, 1000);
    let mut samples = (0..7).map(|_| sample(count)).collect::<Result<Vec<f64>>>()?;
    samples.sort_by(f64::total_cmp);
    Ok(samples[3])
}
