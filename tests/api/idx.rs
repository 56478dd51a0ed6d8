//! Tests the readers that the examples `mnist` and `resnet` use for `--data`, with this repository's digits written as IDX files
//! (plain and compressed), and with CIFAR-10 files.

#[allow(dead_code)] // the tests use only some functions of the example's module
#[path = "../../examples/common/images.rs"]
mod images;

use std::fs;
use std::io::Write;
use std::path::Path;

use claystone::{DType, Device, Tensor};
use flate2::{Compression, write::GzEncoder};
use images::Set;

use crate::common::each_device;

/// Returns an IDX file of u8 elements.
fn idx(shape: &[usize], elements: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0, 0, 8, shape.len() as u8];
    shape.iter().for_each(|&d| bytes.extend((d as u32).to_be_bytes()));
    bytes.extend(elements);
    bytes
}

fn gzipped(bytes: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::default());
    packed.write_all(bytes).unwrap();
    packed.finish().unwrap()
}

/// Returns the pixels of a data set as bytes (the pixels have 17 levels), and its labels.
fn bytes(set: &Set) -> (Vec<u8>, Vec<u8>) {
    let pixels = set.images.to_vec::<f32>().unwrap().iter().map(|p| (p * 16.0).round() as u8 * 15).collect();
    (pixels, set.labels.to_vec::<i64>().unwrap().iter().map(|&l| l as u8).collect())
}

fn write(folder: &Path, name: &str, set: &Set, packed: bool) {
    let (pixels, labels) = bytes(set);
    for (name, file) in [
        (format!("{name}-images-idx3-ubyte"), idx(&[set.len(), 8, 8], &pixels)),
        (format!("{name}-labels-idx1-ubyte"), idx(&[set.len()], &labels)),
    ] {
        match packed {
            true => fs::write(folder.join(format!("{name}.gz")), gzipped(&file)).unwrap(),
            false => fs::write(folder.join(name), file).unwrap(),
        }
    }
}

#[test]
fn idx_files_survive_a_round_trip() {
    let folder = tempfile::tempdir().unwrap();
    let (train, test) = images::digits(Device::Cpu, DType::F32).unwrap();
    write(folder.path(), "train", &train, false);
    write(folder.path(), "t10k", &test, true);
    each_device(|device| {
        let (read_train, read_test) = images::idx(folder.path(), device, DType::F32).unwrap();
        for (written, read) in [(&train, &read_train), (&test, &read_test)] {
            assert_eq!(read.images.shape().dims(), [written.len(), 1, 8, 8]);
            assert_eq!((read.images.device(), read.labels.dtype()), (device, DType::I64));
            let labels = |set: &Set| set.labels.to_vec::<i64>().unwrap();
            assert_eq!(labels(written), labels(read));
            let wanted = written.images.mul_scalar(16.0 * 15.0 / 255.0).unwrap().to_device(device).unwrap();
            assert!(wanted.allclose(&read.images, 0.0, 1e-6, false).unwrap());
        }
    });
}

#[test]
fn invalid_idx_files_are_errors_that_name_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let says = |wanted: &str| {
        let error = images::idx(folder.path(), Device::Cpu, DType::F32).err().unwrap().to_string();
        assert!(error.contains(wanted), "{error}");
    };
    says("train-images-idx3-ubyte.gz");
    let two = Set {
        images: Tensor::zeros([2, 1, 8, 8], Device::Cpu).unwrap(),
        labels: Tensor::zeros(2, (DType::I64, Device::Cpu)).unwrap(),
    };
    write(folder.path(), "train", &two, false);
    write(folder.path(), "t10k", &two, true);
    assert_eq!(images::idx(folder.path(), Device::Cpu, DType::F32).unwrap().0.len(), 2);
    let labels = folder.path().join("train-labels-idx1-ubyte");
    fs::write(&labels, idx(&[3], &[0, 1, 2])).unwrap();
    says("2 images and 3 labels");
    fs::write(&labels, idx(&[3], &[0])).unwrap();
    says("has 1 bytes for shape [3]");
    fs::write(&labels, [0, 0, 13, 1, 0, 0]).unwrap(); // floats instead of bytes
    says("no IDX file of bytes");
    fs::write(&labels, [0, 0, 8, 2, 0, 0]).unwrap(); // truncated
    says("no IDX file of bytes");
}

/// Each file has two images. The red plane contains the file's number f, the green plane the image's number i; the label is 10 f + i.
#[test]
fn cifar_10_files_have_planes_and_labels() {
    let folder = tempfile::tempdir().unwrap();
    let names = ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"];
    let file = |i: usize| folder.path().join(format!("{}.bin", names[i]));
    for i in 0..6u8 {
        let image = |k: u8| [&[10 * i + k][..], &[i; 1024], &[k; 1024], &[255; 1024]].concat();
        fs::write(file(i.into()), [image(0), image(1)].concat()).unwrap();
    }
    let (train, test) = images::cifar10(folder.path()).unwrap();
    assert_eq!(train.images.shape().dims(), [10, 3, 32, 32]);
    assert_eq!(test.images.shape().dims(), [2, 3, 32, 32]);
    assert_eq!(train.labels.to_vec::<i64>().unwrap(), [0, 1, 10, 11, 20, 21, 30, 31, 40, 41]);
    let planes = |set: &Set, i: usize| set.images.i((i, .., 31, 31)).unwrap().to_vec::<u8>().unwrap();
    assert_eq!(planes(&train, 7), [3, 1, 255]);
    assert_eq!(planes(&test, 0), [5, 0, 255]);
    let says = |wanted: &str| {
        let error = images::cifar10(folder.path()).err().unwrap().to_string();
        assert!(error.contains(wanted), "{error}");
    };
    fs::write(file(3), [0; 3072]).unwrap();
    says("data_batch_4.bin: 3072 bytes are not images of 3073 bytes");
    fs::remove_file(file(5)).unwrap();
    fs::write(file(3), [0; 3073]).unwrap();
    says("test_batch.bin: ");
}
