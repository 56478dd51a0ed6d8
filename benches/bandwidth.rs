//! Times operations that are limited by memory bandwidth, on one device: `bandwidth [--device D] [--seconds S] [FILTER]`.
//!
//! Checks the result of each case before timing it. Prints one JSON line per case. `benches/bandwidth_torch.py` runs the same cases in
//! PyTorch and prints both results side by side.

use std::cell::Cell;
use std::error::Error;
use std::time::{Duration, Instant};

use claystone::{DType, Device, Tensor};
use serde_json::json;

type Outcome<T> = Result<T, Box<dyn Error>>;
type Op<'a> = Box<dyn Fn() -> claystone::Result<Tensor> + 'a>;

const MIB: usize = 1 << 20;
const LARGE_LEN: usize = 1 << 28;

struct Bench {
    device: Device,
    budget: Duration,
    filter: String,
    /// The shape of the matrix in the current case.
    shape: Cell<Option<[usize; 2]>>,
}

/// Returns `(i mod m) / m - off` for each index i below n. All compared libraries get this input.
fn fill(n: usize, m: usize, off: f32) -> Vec<f32> {
    (0..n).map(|i| (i % m) as f32 / m as f32 - off).collect()
}

impl Bench {
    fn upload(&self, n: usize, m: usize, off: f32, dtype: DType) -> Outcome<Tensor> {
        // Large tensors are created on the device, because the transfer is not part of the measurement.
        if n <= 1 << 25 {
            return Ok(Tensor::from_slice(&fill(n, m, off), [n], self.device)?.to_dtype(dtype)?);
        }
        Ok(Tensor::rand(&[n], (dtype, self.device))?.add_scalar(-0.5)?)
    }

    /// Times `op`, checks that its result at index `i` is `want(i)`, and prints a line. `moved` is the number of bytes read and written.
    fn run(
        &self,
        case: &str,
        n: usize,
        dtype: DType,
        moved: usize,
        op: Op,
        want: Option<&dyn Fn(usize) -> f64>,
    ) -> Outcome<()> {
        let out = op()?;
        let shape = self.shape.get();
        if let Some(want) = want {
            let flat = out.flatten(0, -1)?;
            for i in [0, out.numel() / 3, out.numel() / 2, out.numel() - 1] {
                let got = f64::from(flat.narrow(0, i, 1)?.to_dtype(DType::F32)?.item::<f32>()?);
                let (want, size) = (want(i), if dtype.size() == 2 { 1e-2 } else { 1e-4 });
                if (got - want).abs() > size * (1.0 + want.abs()) {
                    return Err(format!("{case} {n} {dtype}: element {i} is {got}, not {want}").into());
                }
            }
        }
        drop(out);
        let waits = |calls: usize, budget: Duration| -> Outcome<f64> {
            let (start, mut times) = (Instant::now(), Vec::new());
            while times.len() < 3 || start.elapsed() < budget && times.len() < 5000 {
                let from = Instant::now();
                for _ in 0..calls {
                    op()?;
                }
                self.device.synchronize()?;
                times.push(from.elapsed().as_secs_f64() * 1e6 / calls as f64);
            }
            times.sort_by(f64::total_cmp);
            Ok(times[times.len() / 2])
        };
        waits(1, self.budget / 4)?;
        let median = waits(1, self.budget)?;
        let pipe = waits(((2e5 / median) as usize).clamp(1, 20), self.budget)?;
        println!(
            "{}",
            json!({"peer": "claystone", "device": self.device.info()?.name.trim(), "case": case, "n": n, "dtype": dtype.to_string(),
                   "shape": shape, "median_us": (median * 1e3).round() / 1e3, "pipe_us": (pipe * 1e3).round() / 1e3,
                   "gbps": (moved as f64 / pipe).round() / 1e3, "checked": want.is_some()})
        );
        Ok(())
    }

    fn is_selected(&self, case: &str) -> bool {
        case.contains(&self.filter)
    }

    fn elementwise(&self, n: usize, dtype: DType) -> Outcome<()> {
        let size = n * dtype.size();
        let (a, b) = (self.upload(n, 1009, 0.5, dtype)?, self.upload(n, 613, 0.3, dtype)?);
        let known = n <= 1 << 25;
        let (x, y) = (
            |i: usize| f64::from((i % 1009) as f32 / 1009.0 - 0.5),
            |i: usize| f64::from((i % 613) as f32 / 613.0 - 0.3),
        );
        let (add, relu, exp) = (|i| x(i) + y(i), |i| x(i).max(0.0), |i| x(i).exp());
        let check = |f| known.then_some(f);
        if self.is_selected("add") {
            self.run("add", n, dtype, 3 * size, Box::new(|| a.add(&b)), check(&add as &dyn Fn(usize) -> f64))?;
        }
        if self.is_selected("relu") {
            self.run("relu", n, dtype, 2 * size, Box::new(|| a.relu()), check(&relu))?;
        }
        if self.is_selected("exp") {
            self.run("exp", n, dtype, 2 * size, Box::new(|| a.exp()), check(&exp))?;
        }
        drop(b);
        if self.is_selected("sum_all") && dtype.is_float() {
            let total: f64 = (0..n).map(x).sum();
            let sum = |_| total;
            let known = known && dtype == DType::F32;
            self.run(
                "sum_all",
                n,
                dtype,
                size,
                Box::new(|| a.sum((), false)),
                known.then_some(&sum as &dyn Fn(usize) -> f64),
            )?;
        }
        if self.is_selected("fill") {
            let ones = |_| 1.0;
            self.run("fill", n, dtype, size, Box::new(|| Tensor::ones(&[n], (dtype, self.device))), Some(&ones))?;
        }
        if self.is_selected("clone") {
            self.run("clone", n, dtype, 2 * size, Box::new(|| a.try_clone()), check(&x))?;
        }
        Ok(())
    }

    fn rows(&self, rows: usize, columns: usize, dtype: DType) -> Outcome<()> {
        let (n, size) = (rows * columns, rows * columns * dtype.size());
        self.shape.set(Some([rows, columns]));
        let x = self.upload(n, 1009, 0.5, dtype)?.reshape([rows, columns])?;
        let r = self.upload(columns, 613, 0.3, dtype)?;
        let known = n <= 1 << 25;
        let at = |i: usize| f64::from((i % 1009) as f32 / 1009.0 - 0.5);
        if self.is_selected("broadcast_add") {
            let add = |i: usize| at(i) + f64::from((i % columns % 613) as f32 / 613.0 - 0.3);
            self.run(
                "broadcast_add",
                n,
                dtype,
                2 * size,
                Box::new(|| x.add(&r)),
                known.then_some(&add as &dyn Fn(usize) -> f64),
            )?;
        }
        if self.is_selected("sum_axis1") {
            let sum = |i: usize| (0..columns).map(|j| at(i * columns + j)).sum();
            self.run(
                "sum_axis1",
                n,
                dtype,
                size,
                Box::new(|| x.sum(1, false)),
                known.then_some(&sum as &dyn Fn(usize) -> f64),
            )?;
        }
        if self.is_selected("sum_axis0") {
            self.run("sum_axis0", n, dtype, size, Box::new(|| x.sum(0, false)), None)?;
        }
        if self.is_selected("softmax") {
            let softmax = |i: usize| {
                let row = i / columns * columns;
                at(i).exp() / (0..columns).map(|j| at(row + j).exp()).sum::<f64>()
            };
            self.run(
                "softmax",
                n,
                dtype,
                2 * size,
                Box::new(|| x.softmax(1)),
                known.then_some(&softmax as &dyn Fn(usize) -> f64),
            )?;
        }
        Ok(())
    }

    fn transposed(&self, side: usize, dtype: DType) -> Outcome<()> {
        let (n, size) = (side * side, side * side * dtype.size());
        self.shape.set(Some([side, side]));
        let t = self.upload(n, 1009, 0.5, dtype)?.reshape([side, side])?.t()?;
        let at = |i: usize| f64::from(((i % side * side + i / side) % 1009) as f32 / 1009.0 - 0.5);
        if self.is_selected("transpose_copy") {
            let known = n <= 1 << 25;
            self.run(
                "transpose_copy",
                n,
                dtype,
                2 * size,
                Box::new(|| t.contiguous()),
                known.then_some(&at as &dyn Fn(usize) -> f64),
            )?;
        }
        if self.is_selected("strided_copy") {
            // The view has every second row, so that each contiguous range of memory is one row.
            let half = t.t()?.reshape([side / 2, 2, side])?.narrow(1, 0, 1)?;
            self.run("strided_copy", n / 2, dtype, size, Box::new(|| half.contiguous()), None)?;
        }
        Ok(())
    }

    fn transfers(&self, bytes: usize) -> Outcome<()> {
        self.shape.set(None);
        let host = Tensor::from_slice(&fill(bytes / 4, 1009, 0.5), [bytes / 4], Device::Cpu)?;
        let here = host.to_device(self.device)?;
        let at = |i: usize| f64::from((i % 1009) as f32 / 1009.0 - 0.5);
        if self.is_selected("h2d") {
            self.run("h2d", bytes, DType::F32, bytes, Box::new(|| host.to_device(self.device)), Some(&at))?;
        }
        if self.is_selected("d2h") {
            self.run("d2h", bytes, DType::F32, bytes, Box::new(|| here.to_device(Device::Cpu)), Some(&at))?;
        }
        let pinned = host.pin_memory(self.device)?;
        if self.is_selected("h2d_pinned") {
            self.run("h2d_pinned", bytes, DType::F32, bytes, Box::new(|| pinned.to_device(self.device)), Some(&at))?;
        }
        if self.is_selected("d2h_pinned") {
            let back = || pinned.copy_(&here).map(Tensor::shallow_clone);
            self.run("d2h_pinned", bytes, DType::F32, bytes, Box::new(back), Some(&at))?;
        }
        Ok(())
    }
}

fn main() -> Outcome<()> {
    let mut bench = Bench {
        device: Device::best(),
        budget: Duration::from_millis(100),
        filter: String::new(),
        shape: Cell::new(None),
    };
    let (mut most, mut args) = (LARGE_LEN, std::env::args().skip(1));
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or(format!("{arg} needs a value"));
        match &*arg {
            "--device" => bench.device = value()?.parse()?,
            "--seconds" => bench.budget = Duration::from_secs_f64(value()?.parse()?),
            "--most" => most = value()?.parse()?,
            "--bench" => {}
            _ => bench.filter = arg,
        }
    }
    for n in [10_000, 1_000_000, 10_000_000, LARGE_LEN].into_iter().filter(|&n| n <= most) {
        bench.elementwise(n, DType::F32)?;
    }
    for dtype in [DType::F16, DType::BF16] {
        [10_000_000, LARGE_LEN].into_iter().filter(|&n| n <= most).try_for_each(|n| bench.elementwise(n, dtype))?;
    }
    for (rows, columns) in [(4096, 1024), (8192, 8192), (1 << 18, 1 << 10), (1 << 14, 1 << 14)] {
        for dtype in [DType::F32, DType::F16].into_iter().filter(|_| rows * columns <= most) {
            bench.rows(rows, columns, dtype)?;
        }
    }
    for side in [1024, 4096, 8192, 16384].into_iter().filter(|s| s * s <= most) {
        bench.transposed(side, DType::F32)?;
        bench.transposed(side, DType::F16)?;
    }
    if bench.device != Device::Cpu {
        [MIB, 2 * MIB, 3 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
            .into_iter()
            .filter(|&n| n / 4 <= most)
            .try_for_each(|n| bench.transfers(n))?;
    }
    Ok(())
}
