//! Times operations that no other bench measures, small and large: `operations [--device D] [--only TEXT]`. For each case, prints a JSON line with
//! the median of many calls in microseconds. `benches/operations_torch.py` compares PyTorch.
//!
//! With `--level L` each case is first tuned at that level. Calls with and without the tuned choices are then timed in turns. A line
//! has the seconds of tuning, both medians, and their ratio. Without `--large` only the smaller sizes run.

use std::cell::RefCell;
use std::error::Error;
use std::hint::black_box;
use std::time::{Duration, Instant};

use claystone::nn::{Gru, Lstm, Module, RnnOptions};
use claystone::ops::Attention;
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::tune::{self, Level};
use claystone::{BatchNormOptions, ConvOptions, DType, Device, Interpolation, PadMode, Result, Tensor, no_grad};

/// The time for which each case is measured.
const BUDGET: Duration = Duration::from_millis(150);

type Case<'a> = (&'static str, Box<dyn Fn() -> Result<()> + 'a>);

/// Makes a list of named cases from expressions that return a result.
macro_rules! cases {
    ($($name:literal => $e:expr;)*) => { vec![$(($name, Box::new(|| $e.map(|made| _ = black_box(made))) as Box<dyn Fn() -> Result<()>>)),*] };
}

struct Suite {
    device: Device,
    only: String,
    /// The level at which each case is tuned first.
    level: Option<Level>,
}

/// The maximum number of calls of a case for tuning. Trials that are not finished by then are abandoned.
const MAX_TUNING_CALLS: usize = 5000;
/// The number of turns with the tuned choices, and of turns without them.
const TURNS: usize = 15;
/// The minimum time of a turn.
const MIN_TURN_TIME: Duration = Duration::from_millis(10);

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

impl Suite {
    fn run(&self, size: &str, cases: Vec<Case>) -> Result<()> {
        for (name, f) in cases.iter().filter(|(name, _)| name.contains(&self.only)) {
            let call = || -> Result<f64> {
                let from = Instant::now();
                f()?;
                self.device.synchronize()?;
                Ok(from.elapsed().as_secs_f64() * 1e6)
            };
            (0..3).try_for_each(|_| call().map(drop))?;
            if let Some(level) = self.level {
                self.compare_tuned(level, &call, &format!("\"case\": \"{name}\", \"size\": \"{size}\""))?;
                continue;
            }
            let (begun, mut times) = (Instant::now(), Vec::new());
            while times.len() < 3 || begun.elapsed() < BUDGET {
                times.push(call()?);
            }
            let median = median(times);
            println!("{{\"case\": \"{name}\", \"size\": \"{size}\", \"median_us\": {median:.2}}}");
        }
        Ok(())
    }

    /// Tunes a case. Then times the case with and without the tuned choices, in turns.
    fn compare_tuned(&self, level: Level, call: &dyn Fn() -> Result<f64>, case: &str) -> Result<()> {
        let (device, from, known) = (self.device, Instant::now(), tune::choices(self.device)?.len());
        tune::set_level(device, level)?;
        for _ in 0..MAX_TUNING_CALLS {
            let begun = tune::on_trial(device)?;
            call()?;
            if begun + tune::on_trial(device)? == 0 {
                break;
            }
        }
        let left = tune::on_trial(device)?;
        tune::set_level(device, Level::None)?;
        let (took, chosen) = (from.elapsed().as_secs_f64(), tune::choices(device)?.len() - known);
        let mut turns = [Vec::new(), Vec::new()];
        for turn in 0..2 * TURNS {
            // After every two turns, the order of the two settings is swapped.
            let on = (turn + turn / 2) % 2;
            tune::use_choices(device, on == 1)?;
            call()?;
            let (begun, mut times) = (Instant::now(), Vec::new());
            while times.len() < 3 || begun.elapsed() < MIN_TURN_TIME {
                times.push(call()?);
            }
            turns[on].push(median(times));
        }
        tune::use_choices(device, true)?;
        let ratio = median(turns[1].iter().zip(&turns[0]).map(|(with, without)| with / without).collect());
        let [without, with] = turns.map(median);
        println!(
            "{{{case}, \"level\": \"{level}\", \"tuning_s\": {took:.2}, \"chosen\": {chosen}, \"left\": {left}, \
             \"none_us\": {without:.2}, \"tuned_us\": {with:.2}, \"ratio\": {ratio:.3}}}"
        );
        Ok(())
    }

    fn matrices(&self, rows: usize, columns: usize) -> Result<()> {
        let device = self.device;
        let shape = [rows, columns];
        let made = || Tensor::randn(&shape, device);
        let (x, y, turned) = (made()?, made()?, Tensor::randn(&[columns, rows], device)?.t()?);
        let (flat, row, column) =
            (x.reshape([rows * columns])?, Tensor::randn(&[columns], device)?, x.narrow(1, 0, 1)?);
        let (positive, mask) = (x.abs()?.add_scalar(0.1)?, x.lt_scalar(0.3)?);
        let whole = |below: usize, shape: &[usize]| Tensor::randint(0, below as i64, shape, (DType::I64, device));
        let (places, down) = (whole(columns, &shape)?, whole(rows, &shape)?);
        let (lines, some) = (whole(rows, &[rows])?, whole(columns, &[columns])?);
        let [f16, bf16] = [DType::F16, DType::BF16].map(|dtype| x.to_dtype(dtype));
        let (f16, bf16, f64) = (f16?, bf16?, x.to_dtype(DType::F64)?);
        let down_one = Tensor::randn(&[rows], device)?;
        let f16_one = down_one.to_dtype(DType::F16)?;
        let four = x.reshape([rows / 16, 16, 4, columns / 4])?;
        let leaf = |t: &Tensor| t.try_clone()?.requires_grad_(true);
        let (tracked, weight, bias) = (leaf(&x)?, leaf(&row)?, leaf(&row)?);
        // Computes forward, then backward with a gradient of ones.
        let backward = |y: Result<Tensor>| -> Result<()> {
            let y = y?;
            y.backward_with(&y.ones_like()?)?;
            [&tracked, &weight, &bias].into_iter().for_each(Tensor::zero_grad);
            Ok(())
        };
        let norm = |x: &Tensor| x.layer_norm(&[columns], Some(&row), Some(&row), 1e-5);
        let tracked_norm = || tracked.layer_norm(&[columns], Some(&weight), Some(&bias), 1e-5);
        self.run(
            &format!("{rows}x{columns}"),
            cases! {
                "layer_norm" => norm(&x);
                "layer_norm, backward" => backward(tracked_norm());
                "rms_norm" => x.rms_norm(&[columns], Some(&row), Some(1e-5));
                "softmax" => x.softmax(1);
                "softmax, dim 0" => x.softmax(0);
                "log_softmax" => x.log_softmax(1);
                "softmax, backward" => backward(tracked.softmax(1));
                "logsumexp, dim 0" => x.logsumexp(0, false);
                "gelu" => x.gelu();
                "gelu, tanh" => x.gelu_tanh();
                "silu" => x.silu();
                "pow 2" => x.pow_scalar(2.0);
                "clamp" => x.clamp(-0.5, 0.5);
                "where" => mask.where_cond(&x, &y);
                "addcmul" => x.addcmul(&y, &y, 0.5);
                "add_" => x.add_(&y).map(drop);
                "logical_and" => mask.logical_and(&mask);
                "add, a row" => x.add(&row);
                "add, a column" => x.add(&column);
                "add, transposed" => x.add(&turned);
                "exp, transposed" => turned.exp();
                "matrix and vector" => x.matmul(&row);
                "vector and matrix" => down_one.matmul(&x);
                "f16, vector and matrix" => f16_one.matmul(&f16);
                "linear, one row" => row.unsqueeze(0)?.linear(&x, None);
                "sum" => x.sum((), false);
                "sum, dim 0" => x.sum(0, false);
                "sum, dim 1" => x.sum(1, false);
                "var, dim 1" => x.var(1, 1, false);
                "norm, dim 1" => x.norm(1, false);
                "argmax, dim 1" => x.argmax(1, false);
                "cumsum, dim 0" => x.cumsum(0);
                "cumsum, dim 1" => x.cumsum(1);
                "sort" => x.sort(1, false);
                "topk" => x.topk(8, 1, true);
                "topk, flat" => flat.topk(8, 0, true);
                "median" => x.median(1, false);
                "gather" => x.gather(1, &places);
                "gather, dim 0" => x.gather(0, &down);
                "scatter_add" => x.scatter_add(1, &places, &y);
                "scatter_add, dim 0" => x.scatter_add(0, &down, &y);
                "index_select" => x.index_select(0, &lines);
                "index_select, dim 1" => x.index_select(1, &some);
                "index_add" => x.index_add(0, &lines, &y);
                "embedding, backward" => backward(tracked.embedding(&lines));
                "nonzero" => mask.nonzero();
                "masked_select" => x.masked_select(&mask);
                "cat, dim 0" => Tensor::cat(&[&x, &y], 0);
                "cat, dim 1" => Tensor::cat(&[&x, &y], 1);
                "stack, dim 2" => Tensor::stack(&[&x, &y], 2);
                "permute 0213" => four.permute(&[0, 2, 1, 3])?.contiguous();
                "permute 0231" => four.permute(&[0, 2, 3, 1])?.contiguous();
                "transpose" => turned.contiguous();
                "repeat" => x.repeat(&[2, 2]);
                "expand, a row" => row.expand(shape)?.contiguous();
                "roll" => x.roll(&[3], &[1]);
                "pad" => x.pad(&[2, 2, 2, 2], PadMode::Constant(0.0.into()));
                "tril" => x.tril(0);
                "f16, add" => f16.add(&f16);
                "f16, sum" => f16.sum((), false);
                "f16, softmax" => f16.softmax(1);
                "f16 to f32" => f16.to_dtype(DType::F32);
                "f32 to f16" => x.to_dtype(DType::F16);
                "bf16, add" => bf16.add(&bf16);
                "bf16 to f32" => bf16.to_dtype(DType::F32);
                "f32 to bf16" => x.to_dtype(DType::BF16);
                "f32 to i64" => x.to_dtype(DType::I64);
                "i64, add" => places.add(&places);
                "f64, exp" => f64.exp();
                "dropout" => x.dropout(0.3);
                "randn" => made();
                "arange" => Tensor::arange(0, (rows * columns) as i64, 1, (DType::I64, device));
                "mse_loss" => x.mse_loss(&positive);
            },
        )
    }

    fn labels(&self, rows: usize, classes: usize) -> Result<()> {
        let x = Tensor::randn(&[rows, classes], self.device)?;
        let labels = Tensor::randint(0, classes as i64, &[rows], (DType::I64, self.device))?;
        let tracked = x.try_clone()?.requires_grad_(true)?;
        let backward = || -> Result<()> {
            tracked.cross_entropy(&labels)?.backward()?;
            tracked.zero_grad();
            Ok(())
        };
        let logs = || -> Result<()> {
            let y = tracked.log_softmax(1)?;
            y.backward_with(&y.ones_like()?)?;
            tracked.zero_grad();
            Ok(())
        };
        self.run(
            &format!("{rows}x{classes}"),
            cases! {
                "cross_entropy" => x.cross_entropy(&labels);
                "cross_entropy, backward" => backward();
                "softmax of classes" => x.softmax(1);
                "log_softmax of classes, backward" => logs();
                "logsumexp of classes" => x.logsumexp(1, false);
            },
        )
    }

    fn images(&self, [n, channels, high, wide]: [usize; 4]) -> Result<()> {
        let x = Tensor::randn(&[n, channels, high, wide], self.device)?;
        let (ones, zeros) = (Tensor::ones(&[channels], self.device)?, Tensor::zeros(&[channels], self.device)?);
        let options = |training| BatchNormOptions {
            running_mean: Some(&zeros),
            running_var: Some(&ones),
            weight: Some(&ones),
            bias: Some(&zeros),
            training,
            momentum: 0.0,
            ..BatchNormOptions::default()
        };
        let weight = |of: usize, side: usize| Tensor::randn(&[channels, of, side, side], self.device);
        let (three, one, deep, fours) = (weight(channels, 3)?, weight(channels, 1)?, weight(1, 3)?, weight(4, 3)?);
        let conv = |x: &Tensor, weight: &Tensor, padding: usize, groups: usize| {
            x.conv2d(weight, None, ConvOptions { padding: padding.into(), groups, ..ConvOptions::default() })
        };
        let [half, half_three] = [&x, &three].map(|t| t.to_dtype(DType::F16));
        let (half, half_three) = (half?, half_three?);
        let linear = Interpolation::Linear { align_corners: false };
        let leaf = |t: &Tensor| t.try_clone()?.requires_grad_(true);
        let (tracked, tracked_three, tracked_deep) = (leaf(&x)?, leaf(&three)?, leaf(&deep)?);
        let backward = |y: Result<Tensor>| -> Result<()> {
            let y = y?;
            y.backward_with(&y.ones_like()?)?;
            [&tracked, &tracked_three, &tracked_deep].into_iter().for_each(Tensor::zero_grad);
            Ok(())
        };
        let (line, four) = (x.reshape([n, channels, high * wide])?, Tensor::randn(&[channels, 1, 4], self.device)?);
        let along = ConvOptions { padding: 3.into(), groups: channels, ..ConvOptions::<1>::default() };
        self.run(
            &format!("{n}x{channels}x{high}x{wide}"),
            cases! {
                "group_norm" => x.group_norm(8, Some(&ones), Some(&zeros), 1e-5);
                "batch_norm, training" => x.batch_norm(options(true));
                "batch_norm" => x.batch_norm(options(false));
                "max_pool2d" => x.max_pool2d([2, 2], Default::default());
                "avg_pool2d" => x.avg_pool2d([2, 2], Default::default());
                "softmax, channels" => x.softmax(1);
                "conv2d 3x3" => conv(&x, &three, 1, 1);
                "conv2d 3x3, backward" => backward(conv(&tracked, &tracked_three, 1, 1));
                "conv2d 3x3, f16" => conv(&half, &half_three, 1, 1);
                "conv2d 1x1" => conv(&x, &one, 0, 1);
                "conv2d 3x3, depthwise" => conv(&x, &deep, 1, channels);
                "conv2d 3x3, depthwise, backward" => backward(conv(&tracked, &tracked_deep, 1, channels));
                "conv2d 3x3, groups of 4" => conv(&x, &fours, 1, channels / 4);
                "conv1d 4, depthwise" => line.conv1d(&four, None, along);
                "max_pool2d, backward" => backward(tracked.max_pool2d([2, 2], Default::default()));
                "interpolate" => x.interpolate(&[2 * high, 2 * wide], linear);
                "interpolate, half" => x.interpolate(&[high / 2, wide / 2], linear);
                "interpolate, nearest" => x.interpolate(&[2 * high, 2 * wide], Interpolation::Nearest);
                "interpolate, f16" => half.interpolate(&[2 * high, 2 * wide], linear);
                "interpolate, backward" => backward(tracked.interpolate(&[2 * high, 2 * wide], linear));
            },
        )
    }

    /// Times attention in `n` sequences of `heads` heads each.
    fn sequences(&self, [n, heads, length, width]: [usize; 4]) -> Result<()> {
        let made = || Tensor::randn(&[n * heads, length, width], self.device);
        let (q, k, v) = (made()?, made()?, made()?);
        let four = |t: &Tensor| t.reshape([n, heads, length, width]);
        let (q4, k4, v4) = (four(&q)?, four(&k)?, four(&v)?);
        let three = |dtype: DType| -> Result<[Tensor; 3]> {
            Ok([q4.to_dtype(dtype)?, k4.to_dtype(dtype)?, v4.to_dtype(dtype)?])
        };
        let ([q16, k16, v16], [qb, kb, vb]) = (three(DType::F16)?, three(DType::BF16)?);
        let tracked = q4.try_clone()?.requires_grad_(true)?;
        let plain = Attention::default();
        let causal = Attention { is_causal: true, ..plain };
        let of_halves = q16.detach().requires_grad_(true)?;
        let of_bf16 = qb.detach().requires_grad_(true)?;
        let backward = |leaf: &Tensor| -> Result<()> {
            let y = leaf.scaled_dot_product_attention(leaf, leaf, causal)?;
            y.backward_with(&y.ones_like()?)?;
            leaf.zero_grad();
            Ok(())
        };
        let size = format!("{n}x{heads}x{length}x{width}");
        if length <= 4096 {
            // Not run for longer sequences, whose scores do not fit in memory.
            self.run(&size, cases! { "bmm" => q.bmm(&k.transpose(1, 2)?); })?;
        }
        self.run(
            &size,
            cases! {
                "attention" => q4.scaled_dot_product_attention(&k4, &v4, plain);
                "attention, causal" => q4.scaled_dot_product_attention(&k4, &v4, causal);
                "attention, backward" => backward(&tracked);
                "attention, f16" => q16.scaled_dot_product_attention(&k16, &v16, causal);
                "attention, f16, backward" => backward(&of_halves);
                "attention, bf16" => qb.scaled_dot_product_attention(&kb, &vb, causal);
                "attention, bf16, backward" => backward(&of_bf16);
            },
        )
    }

    /// Times two recurrent layers of `hidden` features over `n` sequences of `length` elements of `width` features.
    fn recurrent(&self, [n, length, width, hidden]: [usize; 4]) -> Result<()> {
        let options = RnnOptions { num_layers: 2, batch_first: true, ..RnnOptions::default() };
        let x = Tensor::randn(&[n, length, width], self.device)?;
        let half = x.to_dtype(DType::F16)?;
        let lstm = Lstm::new(width, hidden, options, self.device)?;
        let lstm_f16 = Lstm::new(width, hidden, options, (DType::F16, self.device))?;
        let gru = Gru::new(width, hidden, options, self.device)?;
        let backward = |layer: &dyn Module, x: &Tensor| -> Result<()> {
            let y = layer.forward(x)?;
            y.backward_with(&y.ones_like()?)?;
            layer.parameters().into_iter().for_each(Tensor::zero_grad);
            Ok(())
        };
        self.run(
            &format!("{n}x{length}x{width}x{hidden}"),
            cases! {
                "lstm" => no_grad(|| lstm.forward(&x));
                "lstm, backward" => backward(&lstm, &x);
                "lstm, f16" => no_grad(|| lstm_f16.forward(&half));
                "lstm, f16, backward" => backward(&lstm_f16, &half);
                "gru" => no_grad(|| gru.forward(&x));
                "gru, backward" => backward(&gru, &x);
            },
        )
    }

    fn optimisers(&self, rows: usize, columns: usize) -> Result<()> {
        let leaf = || -> Result<Tensor> { Tensor::randn(&[rows, columns], self.device)?.requires_grad_(true) };
        let (mut a, mut b) = (leaf()?, leaf()?);
        let momentum = SgdConfig { momentum: 0.9, ..SgdConfig::default() };
        let sgd = RefCell::new(Sgd::new(vec![&mut a], momentum)?);
        let adamw = RefCell::new(AdamW::new(vec![&mut b], AdamWConfig::default())?);
        a.mean((), false)?.backward()?;
        b.mean((), false)?.backward()?;
        self.run(
            &format!("{rows}x{columns}"),
            cases! {
                "sgd" => sgd.borrow_mut().step();
                "adamw" => adamw.borrow_mut().step();
            },
        )
    }
}

fn main() -> std::result::Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().collect();
    let value = |option: &str| args.iter().position(|a| a == option).and_then(|i| args.get(i + 1));
    let device = value("--device").map_or(Ok(Device::best()), |name| name.parse())?;
    let suite = Suite {
        device,
        only: value("--only").cloned().unwrap_or_default(),
        level: value("--level").map(|l| l.parse()).transpose()?,
    };
    for (rows, columns) in [(64, 64), (1024, 768)] {
        suite.matrices(rows, columns)?;
        suite.optimisers(rows, columns)?;
    }
    for (rows, classes) in [(64, 10), (1024, 10), (1024, 1000)] {
        suite.labels(rows, classes)?;
    }
    suite.images([8, 16, 32, 32])?;
    suite.images([32, 64, 28, 28])?;
    suite.recurrent([16, 32, 64, 128])?;
    suite.recurrent([64, 50, 64, 64])?;
    suite.sequences([4, 8, 128, 64])?;
    suite.sequences([16, 12, 256, 64])?;
    suite.sequences([1, 8, 2048, 64])?;
    if device != Device::Cpu && (suite.level.is_none() || args.iter().any(|a| a == "--large")) {
        // These sizes are large enough to occupy a whole GPU.
        suite.matrices(8192, 4096)?;
        suite.optimisers(8192, 4096)?;
        for (rows, classes) in [(8192, 4096), (64, 50_257), (8, 128_000)] {
            suite.labels(rows, classes)?;
        }
        suite.images([64, 64, 112, 112])?;
        suite.sequences([16, 12, 1024, 64])?;
        suite.sequences([1, 16, 16_384, 64])?;
    }
    Ok(())
}
