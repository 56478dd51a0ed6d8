//! Runs the example programs with small sizes on every device.
#![allow(clippy::duplicate_mod)] // each example program includes the common module

#[allow(dead_code)]
#[path = "../char_transformer/main.rs"]
mod char_transformer;
#[allow(dead_code)]
#[path = "../digits.rs"]
mod digits;
#[allow(dead_code)]
#[path = "../gpt2/main.rs"]
mod gpt2;
#[allow(dead_code)]
#[path = "../lora.rs"]
mod lora;
#[allow(dead_code)]
#[path = "../minilm/main.rs"]
mod minilm;
#[allow(dead_code)]
#[path = "../mnist.rs"]
mod mnist;
#[allow(dead_code)]
#[path = "../resnet.rs"]
mod resnet;
#[allow(dead_code)]
#[path = "../rnn/main.rs"]
mod rnn;
#[allow(dead_code)]
#[path = "../super_resolution.rs"]
mod super_resolution;
#[allow(dead_code)]
#[path = "../vae.rs"]
mod vae;

#[path = "../../tests/common/mod.rs"]
mod tests_common;

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use clap::Parser;
use claystone::nn::{Forward, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig, clip_grad_norm_};
use claystone::storage::{MemoryMode, with_memory_mode};
use claystone::{DType, Device, Error, Generator, Graph, Tensor, TensorOptions, io, no_grad, with_generator};

use tests_common::{devices, each_device, in_own_process, values, vec};

/// Parses a program's arguments: `words`, separated by spaces, then `more`, such as the device.
fn args<A: Parser>(words: &str, more: &[&str]) -> A {
    let words = ["program"].into_iter().chain(words.split_whitespace());
    A::parse_from(words.chain(more.iter().copied()))
}

/// A resumed run must continue with the first epoch that was not completed.
#[test]
fn resnet_learns_and_resumes() {
    // The default random generator is shared by the process.
    if !in_own_process("resnet_learns_and_resumes") {
        return;
    }
    each_device(|device| {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("run.safetensors");
        let run = |epochs: &str| {
            let device = device.to_string();
            let more = ["--device", &device, "--epochs", epochs, "--resume", file.to_str().unwrap()];
            let right = resnet::train(&args("--images 200 --width 4 --batch 20", &more)).unwrap();
            let steps = io::load(&file, Device::Cpu).unwrap().get("rate.last_epoch").unwrap().item::<i64>().unwrap();
            (right, steps)
        };
        assert_eq!(run("1").1, 10);
        let (right, steps) = run("5");
        assert!(right > 0.3, "accuracy {right} on {device}, and a guess is 0.1");
        assert_eq!(steps, 50);
        assert_eq!(run("5").1, 50);
    });
}

/// Captures training steps of the ResNet with dropout. Replays with new images must give the same results as direct calls.
#[test]
fn resnet_steps_can_be_captured() {
    // Captured steps read buffers. Direct steps must read buffers too, because reading images rounds differently.
    with_memory_mode(MemoryMode::Buffer, || {
        devices().into_iter().filter(|&d| d != Device::Cpu).for_each(captured_steps)
    });
}

fn captured_steps(device: Device) {
    let at = TensorOptions::from(device);
    let make = || {
        let generator = Generator::new(4);
        let mut net = with_generator(&generator, || resnet::resnet18(4, 10, at)).unwrap();
        let config = AdamWConfig { lr: 1e-3, ..Default::default() };
        let adamw = AdamW::new(net.parameters_mut(), config).unwrap();
        let images = Tensor::zeros([6, 3, 16, 16], at).unwrap();
        let labels = Tensor::zeros(6, (DType::I64, device)).unwrap();
        (net, adamw, images, labels, generator)
    };
    let step = |net: &Sequential, adamw: &mut AdamW, images: &Tensor, labels: &Tensor| {
        adamw.zero_grad();
        let loss = net.forward(&images.dropout(0.2)?)?.cross_entropy(labels)?;
        loss.backward()?;
        let norm = clip_grad_norm_(net.parameters(), 1.0, 2.0)?;
        adamw.step()?;
        Ok([loss, norm])
    };
    let (net, mut adamw, images, labels, generator) = make();
    let capture = || Graph::capture(device, || step(&net, &mut adamw, &images, &labels));
    let (graph, results) = with_generator(&generator, capture).unwrap();
    let (same, mut eager, same_images, same_labels, calls) = make();
    let batches = Generator::new(5);
    for number in 0..20 {
        with_generator(&batches, || {
            images.copy_(&Tensor::randn(images.shape(), at).unwrap()).unwrap();
            labels.copy_(&Tensor::randint(0, 10, 6, (DType::I64, device)).unwrap()).unwrap();
        });
        same_images.copy_(&images).unwrap();
        same_labels.copy_(&labels).unwrap();
        graph.replay().unwrap();
        let want = with_generator(&calls, || step(&same, &mut eager, &same_images, &same_labels)).unwrap();
        assert_eq!(results.each_ref().map(vec), want.each_ref().map(vec), "step {number} on {device}");
    }
    // Running statistics must be equal too.
    let state = |net: &Sequential| net.state_dict().iter().map(|(_, t)| values(t)).collect::<Vec<_>>();
    assert_eq!(state(&net), state(&same));
    // A replay must report an invalid label like a direct call.
    labels.fill_(10).unwrap();
    graph.replay().unwrap();
    let told = results[0].item::<f32>();
    assert!(matches!(told, Err(Error::IndexOutOfRange { index: 10, size: 10, .. })), "{told:?}");
}

#[test]
fn vae_learns_and_generates_images() {
    // The default random generator is shared by the process.
    if !in_own_process("vae_learns_and_generates_images") {
        return;
    }
    let losses = std::cell::RefCell::new(Vec::new());
    each_device(|device| {
        let folder = tempfile::tempdir().unwrap();
        let device = device.to_string();
        let more = ["--device", &device, "--pictures", folder.path().to_str().unwrap()];
        let loss = |words| vae::train(&args(words, &more)).unwrap();
        let (untrained, trained) = (loss("--epochs 0"), loss("--epochs 3 --every 2"));
        assert!(trained < 0.8 * untrained, "{untrained} to {trained} on {device}");
        losses.borrow_mut().push(trained);
        let picture = |epoch: u8| {
            let file = File::open(folder.path().join(format!("epoch-{epoch:03}.png"))).unwrap();
            let mut reader = png::Decoder::new(BufReader::new(file)).read_info().unwrap();
            let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
            let picture = reader.next_frame(&mut pixels).unwrap();
            assert_eq!((picture.width, picture.height, pixels.len()), (800, 800, 800 * 800));
            pixels
        };
        assert!(!folder.path().join("epoch-001.png").exists());
        picture(2);
        // Each generated pixel is drawn eight pixels wide. Strokes are in the middle of an image, so the border must be darker.
        let last = picture(3);
        let pixel = |x: usize, y: usize| last[y * 800 + x];
        assert!((0..800 * 800).map(|i| (i % 800, i / 800)).all(|(x, y)| pixel(x, y) == pixel(x - x % 8, y - y % 8)));
        let mean = |column: usize| (0..800).map(|y| u32::from(pixel(column, y))).sum::<u32>() / 800;
        assert!(mean(36) > 2 * mean(12), "{} in the middle and {} at the edge", mean(36), mean(12));
        assert_eq!(mean(0), 0);
    });
    let losses = losses.into_inner();
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 0.01 * losses[0]), "{losses:?}");
}

#[test]
fn super_resolution_learns() {
    // The default random generator is shared by the process.
    if !in_own_process("super_resolution_learns") {
        return;
    }
    each_device(|device| {
        let device = device.to_string();
        let quality = |epochs| {
            let words = format!("--images 100 --width 8 --epochs {epochs}");
            super_resolution::train(&args(&words, &["--device", &device])).unwrap()[0]
        };
        let [first, last] = [1, 6].map(quality);
        assert!(last > first + 3.0, "{first} dB to {last} dB on {device}");
    });
}

const GPT2: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/gpt2");

const MINILM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/data/minilm");

/// Compares tokens and embeddings of a padded batch with PyTorch's values, which `tests/data/minilm.py` prints.
#[test]
fn minilm_embeddings_match_pytorch() {
    each_device(|device| {
        let model = minilm::MiniLm::load(Path::new(MINILM), device).unwrap();
        let sentences = ["A man eats food.", "Eating thing"];
        let wanted: [(&[i64], [f64; 8]); 2] = [
            (
                &[101, 103, 104, 105, 106, 108, 109, 102],
                [0.381386, -0.032799, -0.097609, -0.668747, 0.011751, -0.189332, 0.232854, 0.553637],
            ),
            (
                &[101, 105, 107, 100, 102],
                [0.418279, -0.105387, -0.164552, -0.605796, 0.012147, -0.199707, 0.357626, 0.50194],
            ),
        ];
        let embeddings = values(&no_grad(|| model.embed(&sentences)).unwrap());
        for (i, (tokens, embedding)) in wanted.into_iter().enumerate() {
            assert_eq!(model.tokens(sentences[i]), tokens);
            let close = |(a, b): (&f64, f64)| (a - b).abs() < 2e-5;
            assert!(embeddings[8 * i..].iter().zip(embedding).all(close), "{embeddings:?} on {device}");
        }
    });
    let missing = minilm::MiniLm::load(Path::new("/no/such/folder"), Device::Cpu);
    assert!(missing.is_err());
}

/// Only the adapters must be trained and saved.
#[test]
fn lora_learns() {
    each_device(|device| {
        let folder = tempfile::tempdir().unwrap();
        for name in ["config.json", "vocab.txt", "model.safetensors"] {
            std::fs::copy(Path::new(MINILM).join(name), folder.path().join(name)).unwrap();
        }
        let losses = lora::train(folder.path(), device).unwrap();
        assert!(losses[19] < losses[0], "{losses:?} on {device}");
        let saved = io::load(folder.path().join("lora.safetensors"), Device::Cpu).unwrap();
        assert_eq!(saved.len(), 8); // two layers, each with two matrices for queries and two for values
        assert!(saved.names().all(|name| name.starts_with("encoder.layer.") && name.contains("lora_")));
    });
}

/// Compares logits with PyTorch's, which `tests/data/gpt2.py` wrote: for the whole text at once, and token by token with the cache.
#[test]
fn gpt2_logits_match_pytorch() {
    each_device(|device| {
        let path = Path::new(GPT2).join("model.safetensors");
        let wanted = io::load(&path, device).unwrap();
        let gpt = gpt2::model::Gpt2::load(&path, Some(2), (DType::F32, device)).unwrap();
        let tokens = wanted.get("tokens").unwrap().unsqueeze(0).unwrap().expand([2, 7]).unwrap();
        for first in [1, 3, 7] {
            let mut cache = gpt.cache(2).unwrap();
            let mut at = 0;
            while at < 7 {
                let new = if at == 0 { first } else { 1 };
                let logits = no_grad(|| gpt.call((&tokens.narrow(1, at, new).unwrap(), &mut cache))).unwrap();
                at += new;
                let row = wanted.get("logits").unwrap().narrow(0, at - 1, 1).unwrap().expand([2, 17]).unwrap();
                assert!(logits.allclose(&row, 1e-5, 1e-5, false).unwrap(), "token {at} of {first} at once on {device}");
            }
        }
    });
}

#[test]
fn gpt2_generates_text() {
    // The default random generator is shared by the process.
    if !in_own_process("gpt2_generates_text") {
        return;
    }
    let wanted = io::load(Path::new(GPT2).join("model.safetensors"), Device::Cpu).unwrap();
    let wanted = wanted.get("written").unwrap().to_vec::<i64>().unwrap();
    each_device(|device| {
        let device = device.to_string();
        let write = |words: &str, prompt| gpt2::write(&args(words, &["--device", &device, "--prompt", prompt]));
        let greedy = format!("--model {GPT2} --heads 2 --tokens 5 --temperature 0 --batch 2");
        assert_eq!(write(&greedy, "3 14 1 5 9 2 6").unwrap(), [&wanted[..], &wanted]);
        let random = write("--layers 2 --width 64 --tokens 4 --dtype bf16 --top-k 5", "50256").unwrap();
        assert!(random[0].len() == 4 && random[0].iter().all(|token| (0..50257).contains(token)));
        let error = write(&greedy, "0 0 0 0 0 0 0 0").unwrap_err().to_string();
        assert!(error.contains("8 tokens of the prompt and 5 more"), "{error}");
    });
}

/// The vocabulary has all bytes and four merges.
#[test]
fn gpt2_tokenizes_and_decodes_text() {
    use gpt2::tokenizer::{Tokenizer, character, words};
    let folder = tempfile::tempdir().unwrap();
    let bytes = (0..=255).map(|byte| character(byte).to_string());
    let names: Vec<String> = bytes.chain(["he", "ll", "hell", "\u{120}w"].map(String::from)).collect();
    let vocabulary: HashMap<&String, usize> = names.iter().enumerate().map(|(i, name)| (name, i)).collect();
    std::fs::write(folder.path().join("vocab.json"), serde_json::to_string(&vocabulary).unwrap()).unwrap();
    let merges = "#version: 0.2\nh e\nl l\nhe ll\n\u{120} w\n";
    std::fs::write(folder.path().join("merges.txt"), merges).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    let tokens = tokenizer.encode("hello world").unwrap();
    assert_eq!(tokens, [258, 111, 259, 111, 114, 108, 100]);
    for text in ["hello world", "naïve: ¿日本?\n\t x", ""] {
        assert_eq!(tokenizer.decode(&tokenizer.encode(text).unwrap()), text);
    }
    // The expected words are those that GPT-2's regular expression gives.
    assert_eq!(
        words("It's  12 o'clock,\n ok? "),
        ["It", "'s", " ", " 12", " o", "'", "clock", ",", "\n", " ok", "?", " "]
    );
}

/// The programs whose estimates must equal real runs, with the arguments that make them short.
const ESTIMATED: [(&str, &str); 7] = [
    ("digits", "--epochs 2"),
    ("mnist", "--epochs 1"),
    ("resnet", ""),
    ("vae", "--epochs 1 --every 1"),
    ("rnn", "--steps 4"),
    ("char_transformer", "--steps 3 --layers 1 --width 64 --sample 4"),
    ("gpt2", "--layers 2 --width 64 --tokens 4"),
];

/// Three training steps of the network of `resnet`. The program itself loads its images with threads, whose allocations are in no
/// fixed order.
fn resnet_steps(device: Device) -> claystone::Result<()> {
    let mut net = resnet::resnet18(8, 10, device.into())?;
    let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { momentum: 0.9, ..Default::default() })?;
    for _ in 0..3 {
        let images = Tensor::randn([20, 3, 32, 32], device)?;
        let labels = Tensor::randint(0, 10, 20, (DType::I64, device))?;
        net.forward(&images)?.cross_entropy(&labels)?.backward()?;
        sgd.step()?;
        sgd.zero_grad();
    }
    Ok(())
}

/// The body of the child processes of the test below: runs a program and prints the peaks of its device's memory.
#[test]
fn estimated_program() {
    let Ok(program) = std::env::var("ESTIMATED_PROGRAM") else { return };
    let (_, words) = ESTIMATED.into_iter().find(|(name, _)| *name == program).unwrap();
    let text = std::env::var("ESTIMATED_DEVICE").unwrap();
    let (device, more): (Device, _) = (text.parse().unwrap(), ["--device", &text]);
    let folder = tempfile::tempdir().unwrap();
    let pictures = ["--device", &text, "--pictures", folder.path().to_str().unwrap()];
    match &program[..] {
        "digits" => digits::run(args(words, &more)).unwrap(),
        "mnist" => mnist::run(args(words, &more)).unwrap(),
        "resnet" => resnet_steps(device).unwrap(),
        "vae" => drop(vae::train(&args(words, &pictures)).unwrap()),
        "rnn" => rnn::run(&args(words, &more)).unwrap(),
        "char_transformer" => char_transformer::run(args(words, &more)).unwrap(),
        _ => drop(gpt2::write(&args(words, &more)).unwrap()),
    }
    let stats = device.memory_stats().unwrap();
    println!("peaks: {} {}", stats.allocated_bytes.peak, stats.reserved_bytes.peak);
}

#[test]
fn estimates_equal_real_runs() {
    let all = devices();
    for device in [Device::Cpu].into_iter().chain(all.into_iter().find(|&device| device != Device::Cpu)) {
        for (program, _) in ESTIMATED {
            let report = tempfile::NamedTempFile::new().unwrap();
            let peaks = |variables: &[(&str, &str)]| {
                let mut child = std::process::Command::new(std::env::current_exe().unwrap());
                child.args(["estimated_program", "--exact", "--nocapture"]).envs(variables.iter().copied());
                child.env("ESTIMATED_PROGRAM", program).env("ESTIMATED_DEVICE", device.to_string());
                let output = child.env("CLAYSTONE_ALLOC_CONF", "decay_ms:0").output().unwrap();
                let said = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
                let line = said.lines().find_map(|line| line.strip_prefix("peaks: "));
                line.unwrap_or_else(|| panic!("{program} on {device}: {said}")).to_owned()
            };
            let real = peaks(&[]);
            let file = report.path().to_str().unwrap();
            let dry = peaks(&[("CLAYSTONE_DRY_RUN", "device"), ("CLAYSTONE_DRY_RUN_JSON", file)]);
            assert_eq!(dry, real, "{program} on {device}");
            let report: serde_json::Value = serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
            let of =
                report["devices"].as_array().unwrap().iter().find(|of| of["device"] == device.to_string()).unwrap();
            assert_eq!(format!("{} {}", of["peak_allocated"], of["peak_reserved"]), real, "{program} on {device}");
            assert_eq!(of["fits"], true, "{program} on {device}");
            println!("{program} on {device}: {real}, smallest device {}", of["smallest_device"]);
        }
    }
}
