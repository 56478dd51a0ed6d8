//! The model of the example `char_transformer`, with tiny sizes, must train equally on every device, in f32 and mixed precision.

#[path = "../../examples/char_transformer/model.rs"]
pub mod model;

use claystone::nn::Module;
use claystone::ops::Attention;
use claystone::optim::{AdamW, AdamWConfig, Optimizer, clip_grad_norm_};
use claystone::{DType, Device, Generator, Graph, Result, Tensor, manual_seed, no_grad, with_generator};
use model::{Gpt, Sizes, Text, windows};

use crate::common::{devices, in_own_process, vec};

const STEPS: usize = 100;

fn text(device: Device) -> (Text, Tensor) {
    let text = Text::new(include_str!("transformer.rs"));
    let numbers = Tensor::from_slice(&text.numbers, text.numbers.len(), device).unwrap();
    (text, numbers)
}

fn sizes(text: &Text, tied: bool) -> Sizes {
    Sizes { vocabulary: text.characters.len(), context: 12, width: 16, layers: 1, heads: 2, tied, dropout: 0.0 }
}

/// Returns the mean losses of the first five steps and of the last five steps.
fn train(device: Device, precision: DType) -> (f64, f64) {
    manual_seed(1);
    let (text, numbers) = text(device);
    let mut gpt = Gpt::new(sizes(&text, false), device).unwrap();
    let mut adamw = AdamW::new(gpt.parameters_mut(), AdamWConfig { lr: 1e-2, ..Default::default() }).unwrap();
    let losses: Vec<f64> = (0..STEPS)
        .map(|_| {
            adamw.zero_grad();
            let loss = gpt.loss(&windows(&numbers, 8, 13).unwrap(), precision).unwrap();
            loss.backward().unwrap();
            adamw.step().unwrap();
            loss.item::<f32>().unwrap().into()
        })
        .collect();
    let mean = |part: &[f64]| part.iter().sum::<f64>() / part.len() as f64;
    (mean(&losses[..5]), mean(&losses[STEPS - 5..]))
}

#[test]
fn the_transformer_learns_equally_on_every_device() {
    // The default random generator is shared by the process.
    if !in_own_process("transformer::the_transformer_learns_equally_on_every_device") {
        return;
    }
    let (start, end) = train(Device::Cpu, DType::F32);
    println!("cpu: {start} to {end}");
    assert!(end < 0.8 * start, "{start} to {end}");
    for device in devices() {
        for precision in [DType::F32, DType::BF16] {
            let (_, other) = train(device, precision);
            println!("{device} {precision}: {other}");
            assert!((other - end).abs() <= 0.01 * end, "{other} on {device} in {precision}, {end} on the CPU in f32");
        }
    }
}

/// Runs a complete step: random windows, dropout, clipping and AdamW.
fn train_step(gpt: &Gpt, adamw: &mut AdamW, numbers: &Tensor, precision: DType) -> Result<[Tensor; 2]> {
    adamw.zero_grad();
    let loss = gpt.loss(&windows(numbers, 8, 13)?, precision)?;
    loss.backward()?;
    let norm = clip_grad_norm_(gpt.parameters(), 0.5, 2.0)?;
    adamw.step()?;
    Ok([loss, norm])
}

/// Replays must equal direct calls: random windows, dropout, AdamW's bias corrections and learning rates must all advance.
#[test]
fn complete_steps_can_be_captured() {
    for device in devices().into_iter().filter(|&device| device != Device::Cpu) {
        for (precision, tied) in [(DType::F32, false), (DType::F32, true), (DType::BF16, false)] {
            let (text, numbers) = text(device);
            let make = || {
                let generator = Generator::new(3);
                let sizes = Sizes { layers: 2, dropout: 0.1, ..sizes(&text, tied) };
                let mut gpt = with_generator(&generator, || Gpt::new(sizes, device)).unwrap();
                let config = AdamWConfig { lr: 1e-2, ..Default::default() };
                let adamw = AdamW::new(gpt.parameters_mut(), config).unwrap();
                (gpt, adamw, generator)
            };
            let ((eager, mut by_call, calls), (replayed, mut by_replay, replays)) = (make(), make());
            let (graph, results) = with_generator(&replays, || {
                Graph::capture(device, || train_step(&replayed, &mut by_replay, &numbers, precision)).unwrap()
            });
            for step in 0..20 {
                let rate = 1e-2 / (1.0 + f64::from(step));
                [&mut by_call, &mut by_replay].into_iter().for_each(|adamw| adamw.set_learning_rate(rate));
                let want = with_generator(&calls, || train_step(&eager, &mut by_call, &numbers, precision)).unwrap();
                graph.replay().unwrap();
                assert_eq!(results.each_ref().map(vec), want.each_ref().map(vec), "step {step}, {precision}, {device}");
            }
            for (a, b) in eager.parameters().into_iter().zip(replayed.parameters()) {
                assert_eq!(vec(a), vec(b));
            }
        }
    }
}

/// Later characters must not affect earlier outputs. Parameters must have PyTorch's names.
#[test]
fn the_transformer_is_causal_and_names_its_parameters() {
    for device in devices() {
        let (text, numbers) = text(device);
        for tied in [false, true] {
            let gpt = Gpt::new(sizes(&text, tied), device).unwrap();
            let x = numbers.narrow(0, 0, 12).unwrap().unsqueeze(0).unwrap();
            let last = x.try_clone().unwrap();
            last.narrow(1, 11, 1).unwrap().fill_(0).unwrap();
            let [a, b] = [&x, &last].map(|x| no_grad(|| gpt.forward(x)).unwrap());
            let upto = |t: &Tensor, n: usize| t.narrow(1, 0, n).unwrap().to_vec::<f32>().unwrap();
            assert_eq!(upto(&a, 11), upto(&b, 11));
            assert_ne!(upto(&a, 12), upto(&b, 12));
            let next = no_grad(|| gpt.next(&text.numbers[..20], device)).unwrap();
            assert_eq!(next.shape().dims(), [1, text.characters.len()]);
            let names: Vec<String> = gpt.named_parameters("").into_iter().map(|(name, _)| name).collect();
            assert_eq!(names.contains(&"lm_head.weight".to_string()), !tied);
            assert!(
                ["wte.weight", "h.0.ln_1.weight", "h.0.attn.bias", "ln_f.bias"]
                    .iter()
                    .all(|n| names.contains(&n.to_string()))
            );
        }
    }
}

/// The scores of 3,000 positions and two heads would take 69 MiB. Attention must compute them in blocks instead.
#[test]
fn attention_over_long_sequences_does_not_store_scores() {
    // The memory statistics are shared by the process.
    if !in_own_process("transformer::attention_over_long_sequences_does_not_store_scores") {
        return;
    }
    let device = Device::Cpu;
    let made = || Tensor::randn(&[2, 3000, 8], device).unwrap().requires_grad_(true).unwrap();
    let (q, k, v) = (made(), made(), made());
    let most = |f: &dyn Fn()| {
        device.reset_peak_stats().unwrap();
        let before = device.memory_stats().unwrap().allocated_bytes.current;
        f();
        device.memory_stats().unwrap().allocated_bytes.peak - before
    };
    let attend = |is_causal, dropout_p| {
        let options = Attention { is_causal, dropout_p, ..Attention::default() };
        q.scaled_dot_product_attention(&k, &v, options).unwrap()
    };
    let forward = most(&|| drop(no_grad(|| attend(false, 0.0))));
    let trained = most(&|| attend(true, 0.0).backward_with(&q.detach()).unwrap());
    let kept = most(&|| drop(attend(true, 0.1)));
    println!("{forward} bytes forward, {trained} with backward, {kept} with dropout");
    assert!(forward < 12 << 20 && trained < 24 << 20, "{forward} bytes forward, {trained} with backward");
    assert!(kept > 69 << 20, "{kept} bytes with dropout");
}
