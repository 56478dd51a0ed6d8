//! Budgets: saved tensors of a step are computed again, or move to the host and back; losses and gradients stay the same to the bit.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use claystone::autograd::*;
use claystone::device::StreamId;
use claystone::nn::{Activation, BatchNorm2d, Conv2d, LayerNorm, Linear, Module};
use claystone::ops::ConvOptions;
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::storage::{self, Allocator, Block, DeviceStats};
use claystone::{DType, Device, Error, Result, Tensor, autocast, no_grad};

use super::transformer::model;
use crate::common::{devices, each_device, in_own_process, scattered};

/// An allocator that measures the bytes of blocks on the device and the largest block.
#[derive(Debug)]
struct Meter {
    inner: Arc<dyn Allocator>,
    peak: AtomicU64,
    largest: AtomicU64,
}

impl Allocator for Meter {
    fn device(&self) -> Device {
        self.inner.device()
    }

    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        Some(&self.inner)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        let block = self.inner.allocate(bytes, stream)?;
        let stats = self.inner.stats();
        self.peak.fetch_max(stats.allocated_bytes.current - stats.spilled_bytes.current, Relaxed);
        self.largest.fetch_max(block.size() as u64, Relaxed);
        Ok(block)
    }

    fn deallocate(&self, block: Block) {
        self.inner.deallocate(block);
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        self.inner.record_stream(block, stream);
    }
}

/// Makes a new caching allocator that keeps blocks on the host or in a file, behind a meter, the device's allocator.
fn install(device: Device, spill: &str) -> Arc<Meter> {
    device.empty_cache().unwrap();
    let config = format!("spill:{spill}").parse().unwrap();
    let inner = storage::build_allocator(storage::driver(device).unwrap(), config).unwrap();
    let meter = Arc::new(Meter { inner, peak: AtomicU64::new(0), largest: AtomicU64::new(0) });
    storage::set_allocator(device, meter.clone()).unwrap();
    meter
}

fn stats(device: Device) -> DeviceStats {
    device.memory_stats().unwrap()
}

/// A small character transformer with its optimizer.
struct Training {
    gpt: model::Gpt,
    adamw: AdamW,
    device: Device,
    steps: i64,
}

impl Training {
    fn new(device: Device) -> Result<Training> {
        claystone::manual_seed(7);
        let sizes =
            model::Sizes { vocabulary: 64, context: 64, width: 64, layers: 3, heads: 4, tied: false, dropout: 0.1 };
        let mut gpt = model::Gpt::new(sizes, device)?;
        let adamw = AdamW::new(gpt.parameters_mut(), AdamWConfig::default())?;
        Ok(Training { gpt, adamw, device, steps: 0 })
    }

    /// Runs a step and returns the loss's bits.
    fn step(&mut self) -> Result<u32> {
        let (batch, length) = (16, 65);
        let text: Vec<i64> = (0..batch * length).map(|i| (i * i + 31 * self.steps) % 64).collect();
        let loss =
            self.gpt.loss(&Tensor::from_slice(&text, [batch as usize, length as usize], self.device)?, DType::F32)?;
        loss.backward()?;
        self.adamw.step()?;
        self.adamw.zero_grad();
        self.steps += 1;
        Ok(loss.item::<f32>()?.to_bits())
    }
}

/// Trains two steps, records the third, and runs three in a budget of the smallest one plus a share, in percent, of the bytes that move.
fn train_in_budget(device: Device, percent: Option<u64>, meter: &Meter) -> (Vec<u32>, Option<(Budget, DeviceStats)>) {
    let mut training = Training::new(device).unwrap();
    let mut losses: Vec<u32> = (0..2).map(|_| training.step().unwrap()).collect();
    let (loss, uses) = StepUses::record(device, || training.step()).unwrap();
    losses.push(loss.unwrap());
    let (smallest, peak) = (uses.smallest_budget(), uses.peak());
    assert!(smallest < peak, "{smallest} {peak}");
    let budget = percent.map(|percent| memory_budget(&uses, smallest + (peak - smallest) * percent / 100).unwrap());
    let before = stats(device);
    meter.peak.store(0, Relaxed);
    for _ in 0..3 {
        let mut step = || training.step();
        losses.push(if let Some(budget) = &budget { budget.run(step) } else { step() }.unwrap());
    }
    let after = stats(device);
    let moves = budget.as_ref().is_some_and(|budget| budget.moved_bytes > 0);
    assert_eq!(moves, after.num_spills > before.num_spills, "{after}");
    (losses, budget.map(|budget| (budget, after)))
}

#[test]
fn training_in_a_budget_gives_the_same_losses() {
    if !in_own_process("budget::training_in_a_budget_gives_the_same_losses") {
        return;
    }
    for device in devices() {
        for (spill, percents) in [("host", &[75, 50, 35, 0][..]), ("disk", &[50])] {
            let meter = install(device, spill);
            let (losses, _) = train_in_budget(device, None, &meter);
            let free = meter.peak.load(Relaxed);
            for &percent in percents {
                let meter = install(device, spill);
                let (under, budget) = train_in_budget(device, Some(percent), &meter);
                let (budget, stats) = budget.unwrap();
                let (peak, largest) = (meter.peak.load(Relaxed), meter.largest.load(Relaxed));
                println!(
                    "{device}, spill:{spill}, {percent} %: {budget}; peak {peak} of {free}, {} moves",
                    stats.num_spills
                );
                assert_eq!(under, losses, "{device} at {percent} %");
                assert!(peak <= budget.expected_peak + 3 * largest, "{peak} bytes: {budget}");
                assert!(peak < free && budget.recomputed_bytes > 0, "{budget}");
                assert!(percent > 0 || stats.num_spills > 0 && stats.num_returns > 0, "{stats}");
                device.empty_cache().unwrap();
                assert_eq!(self::stats(device).spilled_bytes.current, 0);
            }
        }
    }
}

/// A function of which many operations save large tensors. Views and several handles of a storage are saved, too.
fn network(x: &Tensor, w: &Tensor, layers: usize) -> Result<Tensor> {
    let h = (0..layers).try_fold(x.shallow_clone(), |x, _| {
        let h = x.linear(w, None)?.tanh()?;
        h.mul(&h.t()?.exp()?)?.add(&h.narrow(0, 0, 1)?.square()?)?.sub(&x)
    })?;
    h.softmax(-1)?.square()?.sum((), false)
}

fn leaf(n: usize, device: Device) -> Tensor {
    scattered(&[n, n], 0.5, device).requires_grad_(true).unwrap()
}

fn gradient_bits(of: &[&Tensor]) -> Vec<Vec<u32>> {
    let bits = |t: &&Tensor| {
        let grad = t.grad().unwrap().to_vec::<f32>().unwrap();
        t.zero_grad();
        grad.into_iter().map(f32::to_bits).collect()
    };
    of.iter().map(bits).collect()
}

#[test]
fn steps_that_deviate_compute_the_same_gradients() {
    if !in_own_process("budget::steps_that_deviate_compute_the_same_gradients") {
        return;
    }
    each_device(|device| {
        install(device, "host");
        let (x, w) = (leaf(256, device), leaf(256, device));
        let step = |layers: usize| network(&x, &w, layers).and_then(|loss| loss.backward());
        let (done, uses) = StepUses::record(device, || step(6)).unwrap();
        done.unwrap();
        let budget = memory_budget(&uses, uses.smallest_budget()).unwrap();
        gradient_bits(&[&x, &w]);
        for layers in [6, 7, 3, 9, 6] {
            step(layers).unwrap();
            let want = gradient_bits(&[&x, &w]);
            let before = stats(device).num_spills;
            budget.run(|| step(layers)).unwrap();
            assert!(budget.moved_bytes == 0 || stats(device).num_spills > before || layers != 6);
            assert!(budget.recomputed_bytes > 0);
            assert_eq!(gradient_bits(&[&x, &w]), want, "{layers} layers");
            // Backward after the run, and on another thread.
            let loss = budget.run(|| network(&x, &w, layers)).unwrap();
            std::thread::scope(|scope| scope.spawn(|| loss.backward().unwrap()).join().unwrap());
            assert_eq!(gradient_bits(&[&x, &w]), want, "{layers} layers, on another thread");
        }
        // A step that fails.
        budget.run(|| network(&x, &w, 4).and_then(|_| x.reshape(&[1]))).unwrap_err();
    });
}

#[test]
fn budgets_nest_with_hooks_checkpoints_and_kept_graphs() {
    if !in_own_process("budget::budgets_nest_with_hooks_checkpoints_and_kept_graphs") {
        return;
    }
    each_device(|device| {
        install(device, "host");
        let (x, w) = (leaf(256, device), leaf(256, device));
        let checkpointed = || {
            let weight = w.shallow_clone();
            let h = checkpoint(move |x| network(&x[0], &weight, 2)?.add(&x[0].exp()?), &[&x.mul(&x)?])?;
            network(&h, &w, 2)?.backward()
        };
        let twice = || {
            let loss = network(&x, &w, 4)?;
            loss.backward_with_options(BackwardOptions { retain_graph: true, ..Default::default() })?;
            loss.backward()
        };
        let second_order = || {
            let options = GradOptions { create_graph: true, ..Default::default() };
            let loss = network(&x, &w, 3)?;
            let grads = grad_with_options(&[&loss], &[&x], options)?;
            grads[0].as_ref().unwrap().square()?.sum((), false)?.add(&loss)?.backward()
        };
        let hooks_inside = || {
            let h = saved_tensors_hooks(Ok, |t: &Tensor| Ok(t.shallow_clone()), || network(&x, &w, 2)?.add(&x))?;
            save_on_cpu(true, || network(&h, &w, 3))?.backward()
        };
        let hooks_outside = || save_on_cpu(false, || network(&x, &w, 3)?.backward());
        let disabled = || {
            disable_saved_tensors_hooks("none", || network(&x, &w, 3)?.add(&x))
                .and_then(|h| network(&h, &w, 3)?.backward())
        };
        let steps: [(&str, &dyn Fn() -> Result<()>); 6] = [
            ("checkpoint", &checkpointed),
            ("retain_graph", &twice),
            ("create_graph", &second_order),
            ("hooks inside", &hooks_inside),
            ("hooks outside", &hooks_outside),
            ("disabled", &disabled),
        ];
        for (name, step) in steps {
            step().unwrap();
            let want = gradient_bits(&[&x, &w]);
            let may_hook = name != "disabled"; // hooks and their opposite do not nest
            let hooked =
                may_hook.then(|| save_on_cpu(false, step)).map(|done| done.map(|()| gradient_bits(&[&x, &w])).unwrap());
            let (done, uses) = StepUses::record(device, step).unwrap();
            done.unwrap();
            assert_eq!(gradient_bits(&[&x, &w]), want, "{name}, recorded");
            for bytes in [uses.smallest_budget(), (uses.smallest_budget() + uses.peak()) / 2, uses.peak()] {
                let budget = memory_budget(&uses, bytes).unwrap();
                budget.run(step).unwrap();
                assert_eq!(gradient_bits(&[&x, &w]), want, "{name} in {budget}");
                if let Some(hooked) = &hooked {
                    save_on_cpu(false, || budget.run(step)).unwrap();
                    assert_eq!(gradient_bits(&[&x, &w]), *hooked, "{name} in {budget}, inside hooks");
                }
                budget.run(|| budget.run(step)).unwrap();
                assert_eq!(gradient_bits(&[&x, &w]), want, "{name} in {budget}, twice");
            }
        }
    });
}

#[test]
fn a_saved_tensor_that_was_changed_in_place_is_an_error_in_a_budget() {
    let device = Device::Cpu;
    let x = leaf(64, device);
    let step = |changes: bool| -> Result<()> {
        let h = x.exp()?;
        let y = h.square()?.sum((), false)?;
        if changes {
            h.detach().add_scalar_(1)?;
        }
        y.backward()
    };
    let (done, uses) = StepUses::record(device, || step(false)).unwrap();
    done.unwrap();
    let budget = memory_budget(&uses, uses.smallest_budget()).unwrap();
    budget.run(|| step(false)).unwrap();
    let error = budget.run(|| step(true)).unwrap_err();
    assert!(error.to_string().contains("was changed in place"), "{error}");
}

#[test]
fn budgets_that_cannot_be_kept_are_refused_with_the_sizes() {
    if !in_own_process("budget::budgets_that_cannot_be_kept_are_refused_with_the_sizes") {
        return;
    }
    let device = Device::Cpu;
    // Parameters stay, also as views, and so does everything else that was allocated before.
    let (w, held) = (leaf(512, device), Tensor::zeros(&[1 << 20], device).unwrap());
    device.reset_peak_stats().unwrap();
    let step = || w.t()?.matmul(&w)?.sin()?.mean((), false)?.backward();
    let ((done, uses), peak) = storage::peak(device, || StepUses::record(device, step).unwrap()).unwrap();
    done.unwrap();
    assert_eq!(uses.peak(), peak.allocated, "a recording keeps the peaks of scopes");
    let smallest = uses.smallest_budget();
    assert!(smallest >= (5 << 20) && smallest <= uses.peak(), "{smallest}");
    let error = memory_budget(&uses, smallest - 1).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Invalid { .. }));
    assert!([smallest - 1, smallest, uses.peak()].iter().all(|n| text.contains(&format!("{n} bytes"))), "{text}");
    assert!(memory_budget(&uses, smallest).is_ok());
    assert_eq!(memory_budget(&uses, u64::MAX).unwrap().moved_bytes, 0);
    assert!(matches!(StepUses::record(Device::OpenCL(999), || ()), Err(Error::NoDevice { .. })));
    drop(held);
}

/// Two residual blocks of convolutions, batch norms and relu, as in ResNet.
fn residual_network(device: Device) -> Result<(Vec<Tensor>, impl Fn() -> Result<Tensor>)> {
    let options = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
    let layer = |_| -> Result<_> {
        Ok((Conv2d::new(8, 8, [3; 2], options, device)?.without_bias(), BatchNorm2d::new(8, device)?))
    };
    let layers: Vec<(Conv2d, BatchNorm2d)> = (0..5).map(layer).collect::<Result<_>>()?;
    let images = scattered(&[4, 8, 24, 24], 1.0, device);
    let parameters = layers.iter().flat_map(|(conv, norm)| conv.parameters().into_iter().chain(norm.parameters()));
    let parameters = parameters.map(|t| t.shallow_clone()).collect();
    let forward = move || {
        let norm = |x: &Tensor, i: usize| layers[i].1.forward(&layers[i].0.forward(x)?);
        let first = norm(&images, 0)?.relu()?;
        let block = |x: Tensor, i: usize| norm(&norm(&x, i)?.relu()?, i + 1)?.add(&x)?.relu();
        block(block(first, 1)?, 3)?.square()?.mean((), false)
    };
    Ok((parameters, forward))
}

/// Three blocks of layer norm, a linear layer with GELU (in the same launch, or apart) and a linear layer, in mixed precision.
fn feed_forward_network(device: Device, fused: bool) -> Result<(Vec<Tensor>, impl Fn() -> Result<Tensor>)> {
    let layer = |_| -> Result<_> {
        let up = Linear::new(64, 256, device)?;
        let up = if fused { up.with_activation(Activation::Gelu) } else { up };
        Ok((LayerNorm::new(&[64], device)?, up, Linear::new(256, 64, device)?))
    };
    let layers: Vec<(LayerNorm, Linear, Linear)> = (0..3).map(layer).collect::<Result<_>>()?;
    let x = scattered(&[128, 64], 1.0, device);
    let parameters = layers
        .iter()
        .flat_map(|(norm, up, down)| norm.parameters().into_iter().chain(up.parameters()).chain(down.parameters()));
    let parameters = parameters.map(|t| t.shallow_clone()).collect();
    let forward = move || {
        let block = |x: Tensor, (norm, up, down): &(LayerNorm, Linear, Linear)| {
            let inner = up.forward(&norm.forward(&x)?)?;
            let inner = if fused { inner } else { inner.gelu()? };
            x.add(&down.forward(&inner)?.dropout(0.1)?)
        };
        let out = autocast(DType::BF16, || layers.iter().try_fold(x.shallow_clone(), block));
        out?.square()?.mean((), false)
    };
    Ok((parameters, forward))
}

/// Compares losses and gradients in budgets with those without, from the largest budget to the smallest. The peak never rises.
fn compare_in_budgets(name: &str, device: Device, parameters: &[Tensor], forward: &dyn Fn() -> Result<Tensor>) {
    let meter = install(device, "host");
    let parameters: Vec<&Tensor> = parameters.iter().collect();
    let step = || {
        claystone::manual_seed(3);
        let loss = forward().unwrap();
        loss.backward().unwrap();
        let mut bits = gradient_bits(&parameters);
        bits.push(vec![loss.item::<f32>().unwrap().to_bits()]);
        bits
    };
    let want = step();
    let (recorded, uses) = StepUses::record(device, step).unwrap();
    assert!(recorded == want, "{name} on {device}");
    let mut last = u64::MAX;
    for percent in [100, 75, 50, 25, 0] {
        let bytes = uses.smallest_budget() + (uses.peak() - uses.smallest_budget()) * percent / 100;
        let budget = memory_budget(&uses, bytes).unwrap();
        meter.peak.store(0, Relaxed);
        assert!(budget.run(step) == want, "{name} on {device}: {budget}");
        let peak = meter.peak.load(Relaxed);
        println!("{name} on {device}, {percent} %: {budget}; peak {peak}");
        assert_eq!(budget.recomputed_bytes > 0, percent < 100, "{budget}");
        assert!(peak <= last, "{peak} bytes after {last}: {budget}");
        last = peak;
    }
}

#[test]
fn norms_and_formulas_are_computed_again_to_the_same_bits() {
    if !in_own_process("budget::norms_and_formulas_are_computed_again_to_the_same_bits") {
        return;
    }
    for device in devices() {
        let (parameters, forward) = residual_network(device).unwrap();
        compare_in_budgets("residual network", device, &parameters, &forward);
        for fused in [true, false] {
            let (parameters, forward) = feed_forward_network(device, fused).unwrap();
            compare_in_budgets("feed-forward network", device, &parameters, &forward);
        }
    }
}

#[test]
fn a_dropped_tensor_whose_operand_was_changed_in_place_is_an_error() {
    if !in_own_process("budget::a_dropped_tensor_whose_operand_was_changed_in_place_is_an_error") {
        return;
    }
    each_device(|device| {
        let (x, w) = (leaf(128, device), leaf(128, device));
        // Only a budget reads the parameter w again in backward, to compute the factors again.
        let step = |changes: bool| -> Result<()> {
            let y = (2..6).try_fold(x.shallow_clone(), |x, i| x.matmul(&w.mul_scalar(i)?))?.sum((), false)?;
            if changes {
                no_grad(|| w.add_scalar_(1).map(drop))?;
            }
            y.backward()
        };
        step(false).unwrap();
        let (done, uses) = StepUses::record(device, || step(false)).unwrap();
        done.unwrap();
        let budget = memory_budget(&uses, uses.smallest_budget()).unwrap();
        assert!(budget.recomputed_bytes >= 4 * 128 * 128, "{budget}");
        let error = budget.run(|| step(true)).unwrap_err();
        assert!(error.to_string().contains("was changed in place"), "{error}");
        step(true).unwrap();
    });
}

#[test]
fn a_result_that_was_changed_in_place_is_kept() {
    if !in_own_process("budget::a_result_that_was_changed_in_place_is_kept") {
        return;
    }
    each_device(|device| {
        let (x, w) = (leaf(128, device), leaf(128, device));
        let step = || {
            let h = x.mul_scalar(3)?.tanh()?;
            h.add_scalar_(1)?; // tanh was noted before the change
            h.relu_()?;
            h.matmul(&w)?.sin()?.sum((), false)?.backward()
        };
        step().unwrap();
        let want = gradient_bits(&[&x, &w]);
        let (done, uses) = StepUses::record(device, step).unwrap();
        done.unwrap();
        gradient_bits(&[&x, &w]);
        let budget = memory_budget(&uses, uses.smallest_budget()).unwrap();
        budget.run(step).unwrap();
        assert_eq!(gradient_bits(&[&x, &w]), want, "{budget}");
    });
}
