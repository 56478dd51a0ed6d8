//! The cases in which claystone is compared with other libraries, through claystone's public interface. `scripts/compare` runs these cases
//! and those of the other libraries. Prints a JSON line per case; a case that fails has a null time and the error.
//!
//! `cargo bench --bench peers -- --device opencl:0`. `PEERS_TIME` is the sampling time of a case in seconds (0.5 by default).
//! `PEERS_ONLY` selects the cases whose names contain one of the given texts, which are separated by `|`.

#[path = "../examples/common/measure.rs"]
mod measure;

use std::cell::RefCell;
use std::error::Error;
use std::time::Duration;

use clap::Parser;
use claystone::device::DeviceKind;
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{Optimizer, Sgd, SgdConfig};
use claystone::{DType, Device, Graph, Tensor, no_grad};
use measure::{Calls, Case, Meter, Work};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const ALLOCATIONS: [usize; 3] = [4 * KIB, MIB, 64 * MIB];
const CLONES: [usize; 4] = [4 * KIB, MIB, 64 * MIB, 256 * MIB];
const TRANSFERS: [usize; 2] = [MIB, 64 * MIB];
const SUMS: [usize; 3] = [10_000, 1_000_000, LARGE_LEN];
const LARGE_LEN: usize = 10_000_000;
/// The number of rows of the matrix that is reduced along its rows.
const ROWS: usize = 4096;
/// The number of columns of the matrix that is reduced along its rows.
const COLUMNS: usize = 1024;
/// The number of rows and of columns of the matrix that is transposed.
const SIDE: usize = 4096;
const PRODUCTS: [usize; 4] = [128, 512, 1024, 2048];
const BATCHES: [usize; 3] = [64, 1024, 8192];
const LAYERS: [usize; 4] = [784, 256, 128, 10];

/// Measures every case of the comparison, and prints a JSON line each
#[derive(Parser)]
struct Args {
    /// The device: cpu, opencl:N or best
    #[arg(long, default_value = "best", value_parser = device)]
    device: Device,
    /// The library's name in the lines
    #[arg(long)]
    peer: Option<String>,
    /// Passed by cargo bench to every bench
    #[arg(long, hide = true)]
    bench: bool,
}

fn device(name: &str) -> Result<Device, claystone::Error> {
    if name == "best" { Ok(Device::best()) } else { name.parse() }
}

fn setting(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

// ---- inputs and checks: the same numbers in every library ------------------------------------------------------------

/// Returns `(i mod m) / m - offset` for each index i below n.
fn fill(n: usize, m: usize, offset: f32) -> Vec<f32> {
    (0..n).map(|i| (i % m) as f32 / m as f32 - offset).collect()
}

fn first(n: usize) -> Vec<f32> {
    fill(n, 1009, 0.5)
}

fn second(n: usize) -> Vec<f32> {
    fill(n, 613, 0.3)
}

/// Returns deterministic pseudo-random numbers in 0..1.
fn noise(n: usize, seed: u64) -> Vec<f32> {
    let mix = |i: u64| {
        let x = (i + 1 + seed * 1_000_003).wrapping_mul(2_654_435_761) & 0xFFFF_FFFF;
        let x = (x ^ x >> 16).wrapping_mul(2_246_822_519) & 0xFFFF_FFFF;
        ((x ^ x >> 13) >> 8) as f32 / (1u32 << 24) as f32
    };
    (0..n as u64).map(mix).collect()
}

/// Returns an error unless `got[i]` is within `absolute + 1e-4 |want(i)|` of `want(i)`, for every `step`-th i.
fn check_close(got: &[f32], n: usize, step: usize, absolute: f64, want: impl Fn(usize) -> f64) -> Outcome {
    if got.len() != n {
        return Err(format!("{} elements, not {n}", got.len()).into());
    }
    for i in (0..n).step_by(step) {
        let (got, want) = (f64::from(got[i]), want(i));
        if got.is_nan() || (got - want).abs() > absolute + 1e-4 * want.abs() {
            return Err(format!("element {i} is {got}, not {want}").into());
        }
    }
    Ok(())
}

fn host(t: &Tensor) -> Outcome<Vec<f32>> {
    Ok(t.to_dtype(DType::F32)?.to_vec::<f32>()?)
}

// ---- the suite -------------------------------------------------------------------------------------------------------

struct Suite {
    meter: Meter,
    device: Device,
    peer: String,
    only: Option<String>,
}

impl Suite {
    fn new(args: Args) -> Outcome<Suite> {
        let info = args.device.info()?;
        let name = match (args.device, info.kind) {
            (Device::Cpu, _) => "claystone-cpu",
            (_, DeviceKind::Cpu) => "claystone-pocl",
            _ => "claystone-gpu",
        };
        let seconds = setting("PEERS_TIME").map_or(Ok(0.5), |s| s.parse())?;
        let meter = Meter { budget: Duration::from_secs_f64(seconds), device: info.name.trim().to_owned() };
        let peer = args.peer.unwrap_or_else(|| name.to_owned());
        Ok(Suite { meter, device: args.device, peer, only: setting("PEERS_ONLY") })
    }

    fn is_selected(&self, case: &str) -> bool {
        self.only.as_ref().is_none_or(|only| only.split('|').any(|part| case.contains(part)))
    }

    /// True if at least one of these cases will run, so that their common inputs must be created.
    fn is_any_selected(&self, cases: &[&str]) -> bool {
        cases.iter().any(|case| self.is_selected(case))
    }

    fn upload(&self, values: &[f32], shape: &[usize]) -> Outcome<Tensor> {
        Ok(Tensor::from_slice(values, shape, self.device)?)
    }

    fn case(&self, name: &'static str, n: usize, work: Work) -> Case {
        Case { peer: self.peer.clone(), name, n, dtype: "f32", work }
    }

    /// Checks the result of a call, times the call and prints the line.
    fn run<T>(
        &self,
        case: Case,
        calls: Calls,
        call: impl FnMut() -> claystone::Result<T>,
        check: impl FnOnce(T) -> Outcome,
    ) {
        self.run_noted(case, calls, None, call, check);
    }

    fn run_noted<T>(
        &self,
        case: Case,
        calls: Calls,
        note: Option<String>,
        mut call: impl FnMut() -> claystone::Result<T>,
        check: impl FnOnce(T) -> Outcome,
    ) {
        if !self.is_selected(case.name) {
            return;
        }
        // On the CPU an operation is complete when it returns, so enqueuing many calls before one wait would measure nothing new.
        let calls = match (calls, self.device) {
            (Calls::Pipelined, Device::Cpu) => Calls::Single,
            (calls, _) => calls,
        };
        let measured = || {
            let out = call()?;
            self.device.synchronize()?;
            check(out)?;
            let mut line = self.meter.time(case.clone(), calls, &mut call, || Ok(self.device.synchronize()?))?;
            line.note = note;
            Outcome::Ok(line)
        };
        match measured() {
            Ok(line) => println!("{}", line.json()),
            Err(error) => println!("{}", case.failed(&self.meter.device, error.as_ref())),
        }
    }

    /// Allocations, copies on the device, and transfers from and to pageable host memory. The case `d2h` copies to the library's own memory,
    /// which is viewed as a slice (PyTorch's `cpu().numpy()`), and `d2h_vec` copies to a vector.
    fn memory(&self) -> Outcome {
        for n in ALLOCATIONS {
            let allocate = || Tensor::empty([n / 4], self.device);
            self.run(self.case("alloc_free", n, Work::Nothing), Calls::Batch(100), allocate, |_| Ok(()));
        }
        for n in CLONES.into_iter().filter(|_| self.is_selected("clone_into")) {
            let values = first(n / 4);
            let same = |t: &Tensor| check_close(&host(t)?, n / 4, n / 64, 0.0, |i| values[i].into());
            let a = self.upload(&values, &[n / 4])?;
            self.run(
                self.case("clone", n, Work::Bytes(2 * n)),
                Calls::Pipelined,
                || a.try_clone(),
                |c| {
                    assert!(!c.shares_storage(&a), "a clone has its own storage");
                    same(&c)
                },
            );
            let out = a.zeros_like()?;
            let copy = || out.copy_(&a);
            self.run(self.case("clone_into", n, Work::Bytes(2 * n)), Calls::Pipelined, copy, same);
        }
        for n in TRANSFERS.into_iter().filter(|_| self.is_any_selected(&["h2d", "d2h", "d2h_vec"])) {
            let values = first(n / 4);
            let same = |got: &[f32]| check_close(got, n / 4, 997, 0.0, |i| values[i].into());
            let up = || Tensor::from_slice(&values, [n / 4], self.device);
            self.run(self.case("h2d", n, Work::Bytes(n)), Calls::Single, up, |c| same(&host(&c)?));
            let a = up()?;
            let d2h = |name| self.case(name, n, Work::Bytes(n));
            self.run(d2h("d2h"), Calls::Single, || a.to_host::<f32>(), |c| same(&c));
            self.run(d2h("d2h_vec"), Calls::Single, || a.to_vec::<f32>(), |c| same(&c));
        }
        Ok(())
    }

    fn elementwise(&self) -> Outcome {
        if !self.is_any_selected(&["add_into", "relu", "exp_into", "sum_all", "axpy_inplace"]) {
            return Ok(());
        }
        for n in SUMS {
            let (ha, hb) = (first(n), second(n));
            let (a, b) = (self.upload(&ha, &[n])?, self.upload(&hb, &[n])?);
            let out = a.zeros_like()?;
            let bytes = Work::Bytes(12 * n);
            let sum = |t: &Tensor| check_close(&host(t)?, n, 97, 1e-6, |i| (ha[i] + hb[i]).into());
            self.run(self.case("add", n, bytes), Calls::Pipelined, || a.add(&b), |c| sum(&c));
            let into = || Tensor::map_into(&[&a, &b], &[], &[&out], |x, _| vec![&x[0] + &x[1]]);
            self.run(self.case("add_into", n, bytes), Calls::Pipelined, into, |()| sum(&out));
            if n == LARGE_LEN {
                self.unary(&ha, &a, &out)?;
            }
        }
        Ok(())
    }

    fn unary(&self, values: &[f32], a: &Tensor, out: &Tensor) -> Outcome {
        let n = values.len();
        let bytes = Work::Bytes(8 * n);
        let relu = |c: Tensor| check_close(&host(&c)?, n, 97, 0.0, |i| values[i].max(0.0).into());
        self.run(self.case("relu", n, bytes), Calls::Pipelined, || a.relu(), relu);
        let exp = |t: &Tensor| check_close(&host(t)?, n, 97, 0.0, |i| f64::from(values[i]).exp());
        self.run(self.case("exp", n, bytes), Calls::Pipelined, || a.exp(), |c| exp(&c));
        let into = || Tensor::map_into(&[a], &[], &[out], |x, _| vec![x[0].exp()]);
        self.run(self.case("exp_into", n, bytes), Calls::Pipelined, into, |()| exp(out));
        let total: f64 = values.iter().map(|&v| f64::from(v)).sum();
        self.run(
            self.case("sum_all", n, Work::Bytes(4 * n)),
            Calls::Pipelined,
            || a.sum((), false),
            |c| check_close(&host(&c)?, 1, 1, 1.0, |_| total),
        );
        let sums = a.zeros_like()?;
        self.run(
            self.case("axpy_inplace", n, Work::Bytes(12 * n)),
            Calls::Pipelined,
            || sums.add_(a).map(|_| ()),
            |()| check_close(&host(&sums)?, n, 97, 0.0, |i| values[i].into()),
        );
        Ok(())
    }

    /// Times reductions and softmax along rows, and the transposed copy.
    fn rows(&self) -> Outcome {
        if !self.is_any_selected(&["broadcast_add", "sum_axis1", "softmax", "transpose_copy"]) {
            return Ok(());
        }
        let n = ROWS * COLUMNS;
        let (hx, hr) = (first(n), second(COLUMNS));
        let (x, r) = (self.upload(&hx, &[ROWS, COLUMNS])?, self.upload(&hr, &[COLUMNS])?);
        let bytes = 8 * n + 4 * COLUMNS;
        self.run(
            self.case("broadcast_add", n, Work::Bytes(bytes)),
            Calls::Pipelined,
            || x.add(&r),
            |c| check_close(&host(&c)?, n, 97, 1e-6, |i| (hx[i] + hr[i % COLUMNS]).into()),
        );
        let row = |i: usize| hx[i * COLUMNS..(i + 1) * COLUMNS].iter().map(|&v| f64::from(v));
        self.run(
            self.case("sum_axis1", n, Work::Bytes(4 * n)),
            Calls::Pipelined,
            || x.sum(1, false),
            |c| check_close(&host(&c)?, ROWS, 1, 1e-2, |i| row(i).sum()),
        );
        let totals: Vec<f64> = (0..ROWS).map(|i| row(i).map(f64::exp).sum()).collect();
        self.run(
            self.case("softmax", n, Work::Bytes(8 * n)),
            Calls::Pipelined,
            || x.softmax(1),
            |c| check_close(&host(&c)?, n, 1, 1e-6, |i| f64::from(hx[i]).exp() / totals[i / COLUMNS]),
        );
        let n = SIDE * SIDE;
        let values = first(n);
        let turned = self.upload(&values, &[SIDE, SIDE])?.t()?;
        self.run(
            self.case("transpose_copy", n, Work::Bytes(8 * n)),
            Calls::Pipelined,
            || turned.contiguous(),
            |c| check_close(&host(&c)?, n, 1, 0.0, |i| values[i % SIDE * SIDE + i / SIDE].into()),
        );
        Ok(())
    }

    fn products(&self) -> Outcome {
        for n in PRODUCTS.into_iter().filter(|_| self.is_selected("matmul_tn")) {
            let (ha, hb) = (first(n * n), second(n * n));
            let (a, b) = (self.upload(&ha, &[n, n])?, self.upload(&hb, &[n, n])?);
            // Checks a few elements against sums in f64. `at(i, k)` is the index of the left operand's element.
            let check = |c: Tensor, tolerance: f64, at: &dyn Fn(usize, usize) -> usize| {
                let c = host(&c)?;
                for (i, j) in [(0, 0), (n - 1, n - 1), (3, 5), (n / 2, n - 2)] {
                    let want: f64 = (0..n).map(|k| f64::from(ha[at(i, k)]) * f64::from(hb[k * n + j])).sum();
                    let got = f64::from(c[i * n + j]);
                    if got.is_nan() || (got - want).abs() > tolerance * n as f64 {
                        return Err(format!("element ({i}, {j}) is {got}, not {want}").into());
                    }
                }
                Ok(())
            };
            let straight = |i: usize, k: usize| i * n + k;
            let case = |name| self.case(name, n, Work::Flops(2.0 * (n as f64).powi(3)));
            self.run(case("matmul"), Calls::Pipelined, || a.matmul(&b), |c| check(c, 1e-4, &straight));
            if n != 1024 {
                continue;
            }
            let turned = a.t()?;
            let product = || turned.matmul(&b);
            self.run(case("matmul_tn"), Calls::Pipelined, product, |c| check(c, 1e-4, &|i, k| k * n + i));
            for (dtype, name, tolerance) in [(DType::F16, "f16", 1e-3), (DType::BF16, "bf16", 4e-3)] {
                let (a, b) = (a.to_dtype(dtype)?, b.to_dtype(dtype)?);
                let case = Case { dtype: name, ..case("matmul") };
                self.run(case, Calls::Pipelined, || a.matmul(&b), |c| check(c, tolerance, &straight));
            }
        }
        Ok(())
    }

    /// Times a training step of a small network. The largest batch runs on GPUs only.
    fn training(&self) -> Outcome {
        let most = if self.device.info()?.kind == DeviceKind::Cpu { 1024 } else { usize::MAX };
        for batch in BATCHES.into_iter().filter(|&batch| batch <= most && self.is_selected("mlp_step_async")) {
            let mut probe = Training::new(batch, self.device)?;
            let losses = (0..20).map(|_| Ok(probe.step()?.item::<f32>()?)).collect::<Outcome<Vec<f32>>>()?;
            assert!(losses[19] < losses[0], "training makes the loss smaller: {losses:?}");
            let note = format!("loss0={:.5} loss19={:.5}", losses[0], losses[19]);
            let weights: usize = LAYERS.windows(2).map(|l| l[0] * l[1]).sum();
            let flops = 2.0 * batch as f64 * (3 * weights - LAYERS[0] * LAYERS[1]) as f64;
            let training = RefCell::new(Training::new(batch, self.device)?);
            let positive = |loss: Tensor| match loss.item::<f32>()? {
                loss if loss > 0.0 => Ok(()),
                loss => Err(format!("a loss of {loss}").into()),
            };
            let run = |name, calls, step: &dyn Fn() -> claystone::Result<Tensor>| {
                self.run_noted(self.case(name, batch, Work::Flops(flops)), calls, Some(note.clone()), step, positive);
            };
            let step = || training.borrow_mut().step();
            run("mlp_step", Calls::Single, &step);
            run("mlp_step_async", Calls::Batch(100), &step);
            if self.device != Device::Cpu {
                let (graph, loss) = Graph::capture(self.device, step)?;
                let step = || graph.replay().map(|()| loss.shallow_clone());
                run("mlp_step_graph", Calls::Single, &step);
                run("mlp_step_async_graph", Calls::Batch(100), &step);
            }
        }
        Ok(())
    }
}

/// An MLP 784-256-128-10 with cross-entropy, trained by SGD with momentum.
struct Training {
    net: Sequential,
    sgd: Sgd,
    x: Tensor,
    y: Tensor,
}

impl Training {
    fn new(batch: usize, device: Device) -> Outcome<Training> {
        let layer = |l: usize| -> Outcome<Linear> {
            let (inputs, outputs) = (LAYERS[l], LAYERS[l + 1]);
            let bound = (1.0 / (inputs as f64).sqrt()) as f32;
            let values: Vec<f32> = noise(inputs * outputs, l as u64).iter().map(|v| (v - 0.5) * 2.0 * bound).collect();
            let layer = Linear::new(inputs, outputs, device)?;
            no_grad(|| -> Outcome {
                layer.weight().copy_(&Tensor::from_slice(&values, [inputs, outputs], device)?.t()?)?;
                layer.bias().ok_or("a layer has a bias")?.zero_()?;
                Ok(())
            })?;
            Ok(layer)
        };
        let mut net = Sequential::new()
            .push(layer(0)?.with_activation(Activation::Relu))
            .push(layer(1)?.with_activation(Activation::Relu))
            .push(layer(2)?);
        let config = SgdConfig { lr: 0.05, momentum: 0.9, ..Default::default() };
        let sgd = Sgd::new(net.parameters_mut(), config)?;
        let labels: Vec<i64> = (0..batch as i64).map(|i| i * 7 % 10).collect();
        let x = Tensor::from_slice(&noise(batch * LAYERS[0], 7), [batch, LAYERS[0]], device)?;
        Ok(Training { net, sgd, x, y: Tensor::from_slice(&labels, [batch], device)? })
    }

    fn step(&mut self) -> claystone::Result<Tensor> {
        self.sgd.zero_grad();
        let loss = self.net.forward(&self.x)?.cross_entropy(&self.y)?;
        loss.backward()?;
        self.sgd.step()?;
        Ok(loss)
    }
}

fn main() -> Outcome {
    let suite = Suite::new(Args::parse())?;
    suite.memory()?;
    suite.elementwise()?;
    suite.rows()?;
    suite.products()?;
    suite.training()
}
