//! GGUF files: metadata, tensors on every device, and damaged files.

use std::fs;

use claystone::io::gguf::{Gguf, GgufType, MetaValue, Weight};
use claystone::storage::SharedFile;
use claystone::{DType, Device, Result};

use crate::common::gguf::{BLOCKS, GgufWriter, array, file_of_all_types, text};
use crate::common::{devices, values};

/// Writes a file and opens it.
fn open(file: &GgufWriter) -> Result<Gguf> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.gguf");
    fs::write(&path, file.finish()).unwrap();
    // SAFETY: the file has only the name in the folder, which is removed.
    Gguf::new(unsafe { SharedFile::open(path)? })
}

#[track_caller]
fn assert_refused<T>(outcome: Result<T>, why: &str) {
    let error = outcome.err().expect("it is refused").to_string();
    assert!(error.contains(why) && error.contains("x.gguf"), "{error}");
}

#[test]
fn values_of_all_types_are_read() -> Result<()> {
    let file = open(&file_of_all_types().pair("big", 5, &7i32.to_le_bytes()))?;
    let ints = [200, -3, 60_000, -300, 4_000_000_000, -70_000, i128::from(u64::MAX), i128::from(i64::MIN)];
    for (kind, expected) in [0, 1, 2, 3, 4, 5, 10, 11].into_iter().zip(ints) {
        assert_eq!(file.get(&format!("value.{kind}")), Some(MetaValue::Int(expected)));
    }
    assert_eq!((file.u32("value.0")?, file.u32("value.4")?), (200, 4_000_000_000));
    assert_eq!((file.f32("value.6")?, file.f32("value.12")?, file.f32("value.5")?), (1.5, 0.1, -70_000.0));
    assert_eq!((file.bool("value.7")?, file.str("value.8")?), (true, "llama"));
    let tokens: Vec<MetaValue> = file.array("value.9")?.iter().collect();
    assert_eq!(tokens, ["<s>", "a", "é"].map(MetaValue::Str));
    let integers = file.array("integers")?;
    assert_eq!(integers.iter().collect::<Vec<_>>(), [1, -2, 3].map(MetaValue::Int));
    assert_eq!((integers.len(), file.metadata().count(), file.get("other")), (3, 15, None));
    for key in ["value.1", "value.10", "value.6", "value.8"] {
        assert_refused(file.u32(key), &format!("the value of key {key} is not a u32"));
    }
    assert_refused(file.str("value.9"), "value.9 is not a text");
    assert_refused(file.bool("other"), "there is no key other");
    Ok(())
}

#[test]
fn tensors_are_mapped_on_the_cpu_and_copied_to_devices() -> Result<()> {
    let values = [1.5f32, -2.0, 3.0, 4.0, 5.0, 6.0];
    let bytes = values.map(f32::to_le_bytes).concat();
    let halves = [0u8, 60].repeat(4);
    let file = GgufWriter::new().tensor("w", &[2, 3], 0, &bytes).tensor("h", &[4], 1, &halves);
    let file = open(&file)?;
    for device in devices() {
        let w = file.tensor("w", device)?;
        let is_mapped = w.storage().allocation().segment().is_none();
        assert_eq!(is_mapped, device == Device::Cpu, "no allocator counts mapped bytes");
        assert_eq!((w.shape().dims(), w.to_vec::<f32>()?), (&[2, 3][..], values.to_vec()));
        w.fill_(7.0)?;
        assert_eq!(file.tensor("w", device)?.to_vec::<f32>()?, values, "the file does not change");
        assert_eq!(w.to_vec::<f32>()?, [7.0; 6]);
        let h = file.tensor("h", device)?;
        assert_eq!((h.dtype(), h.to_dtype(DType::F32)?.to_vec::<f32>()?), (DType::F16, vec![1.0; 4]));
    }
    let kept = file.tensor("w", Device::Cpu)?;
    drop(file);
    assert_eq!(kept.to_vec::<f32>()?, values, "the storage keeps its pages");
    Ok(())
}

#[test]
fn tensors_of_all_types_keep_their_bytes() -> Result<()> {
    let file = open(&file_of_all_types())?;
    assert_eq!(file.tensors().len(), 18);
    for device in devices() {
        for (number, len, bytes) in BLOCKS {
            let name = format!("quantised.{number}");
            let w = file.quantized(&name, device)?;
            let expected: Vec<u8> = (0..6 * bytes).map(|i| (i * 7 % 60) as u8).collect();
            assert_eq!((w.shape().dims(), w.nbytes()), (&[3, 2 * len as usize][..], 6 * bytes), "{name}");
            assert_eq!(w.to_bytes()?, expected, "{name} on {device}");
            assert_refused(file.tensor(&name, device), "it is quantised");
            assert!(matches!(file.weight(&name, device)?, Weight::Quantized(_)));
        }
        for (name, info) in file.tensors() {
            let GgufType::Plain(dtype) = info.kind else { continue };
            let tensor = file.tensor(name, device)?;
            assert_eq!((tensor.dtype(), values(&tensor)), (dtype, vec![0.0; 6]), "{name} on {device}");
            assert_refused(file.quantized(name, device), "it is not quantised");
        }
        assert_refused(file.weight("other", device), "tensor other: there is no tensor of this name");
    }
    Ok(())
}

#[test]
fn damaged_files_are_errors() {
    let new = GgufWriter::new;
    let one = |kind, shape: &[u64]| open(&new().tensor("a", shape, kind, &[0; 64]));
    assert_refused(one(23, &[2]), "tensor a: elements of type 23 (IQ4_XS) are not supported");
    assert_refused(one(99, &[2]), "type 99 (unknown)");
    assert_refused(one(0, &[1; 5]), "5 dims are more than the maximum of 4");
    assert_refused(one(0, &[17]), "68 bytes at 0 are not inside the file");
    assert_refused(one(2, &[33]), "33");
    assert_refused(open(&new().tensor("a", &[8], 0, &[0; 64]).info("a", &[8], 0, 32)), "tensor a occurs twice");
    assert_refused(open(&new().tensor("a", &[16], 0, &[0; 64]).info("b", &[8], 0, 32)), "tensors a and b overlap");
    assert_refused(open(&new().tensor("a", &[8], 0, &[0; 64]).info("b", &[4], 0, 33)), "not aligned");
    assert_refused(open(&new().pair("k", 0, &[1]).pair("k", 0, &[2])), "key k occurs twice");
    assert_refused(open(&new().pair("k", 13, &[1])), "key k: there is no value type 13");
    assert_refused(open(&new().pair("k", 9, &array(9, &[array(0, &[])]))), "an array of arrays");
    assert_refused(open(&new().pair("k", 8, &[&text("a")[..8], &[0xff]].concat())), "not UTF-8");
    assert_refused(open(&new().pair("general.alignment", 4, &[3, 0, 0, 0])), "not a power of two");
    let version = |version| open(&GgufWriter::of_version(version, 32));
    assert_refused(version(1), "version 1 of the format is not supported");
    assert_refused(version(3 << 24), "its numbers are big-endian");
    assert!(version(2).is_ok());
}
