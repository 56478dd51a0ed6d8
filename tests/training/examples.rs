//! The example programs themselves, with small numbers, on every device.

#[allow(dead_code)]
#[path = "../../examples/resnet.rs"]
mod resnet;

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
