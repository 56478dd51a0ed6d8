//! The example programs themselves, with small numbers, on every device.

#[allow(dead_code)]
#[path = "../../examples/resnet.rs"]
mod resnet;

#[allow(dead_code)]
#[path = "../../examples/vae.rs"]
mod vae;

use clap::Parser;
use claystone::{Device, io};

use crate::common::{alone, each_device};

/// The arguments of a program: words, and then the device and others that are not known before.
fn args<A: Parser>(words: &str, more: &[&str]) -> A {
    let words = ["program"].into_iter().chain(words.split_whitespace());
    A::parse_from(words.chain(more.iter().copied()))
}

/// A run that is started again goes on with the epoch that it had not begun.
#[test]
fn resnet_learns_and_resumes() {
    // The generator is the process's.
    if !alone("examples::resnet_learns_and_resumes") {
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

#[test]
fn vae_learns_and_draws() {
    // The generator is the process's.
    if !alone("examples::vae_learns_and_draws") {
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
        let picture = |epoch: u8| image::open(folder.path().join(format!("epoch-{epoch:03}.png"))).unwrap().to_luma8();
        assert!(!folder.path().join("epoch-001.png").exists());
        assert_eq!(picture(2).dimensions(), (800, 800));
        // Elements are eight pixels wide, strokes in the middle of an image, and there is a rim.
        let last = picture(3);
        assert!(last.enumerate_pixels().all(|(x, y, p)| p == last.get_pixel(x - x % 8, y - y % 8)));
        let mean = |column: u32| (0..800).map(|y| u32::from(last.get_pixel(column, y).0[0])).sum::<u32>() / 800;
        assert!(mean(36) > 2 * mean(12), "{} in the middle and {} at the edge", mean(36), mean(12));
        assert_eq!(mean(0), 0);
    });
    let losses = losses.into_inner();
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 0.01 * losses[0]), "{losses:?}");
}
