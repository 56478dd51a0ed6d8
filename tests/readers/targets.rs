//! Every reader of files and text as a function of bytes, for these tests and for the fuzz targets of `fuzz/`.

#![allow(dead_code)] // each target of `fuzz/` uses only one of the functions

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;

use claystone::io::gguf::{Gguf, MetaValue};
use claystone::profiler::Profile;
use claystone::storage::{Config, CsvEvent, MappedFile, SharedFile, Snapshot};
use claystone::{DType, Device, Result, Tensor, io};
use tempfile::TempDir;

#[path = "../../cli/src/view/blob.rs"]
pub mod blob;
#[path = "../../cli/src/view/profile.rs"]
pub mod page;
#[path = "../../cli/src/trace/mod.rs"]
pub mod trace;

/// Maximum length of an error message in bytes, for inputs of any length.
const MAX_ERROR_BYTES: usize = 3000;

thread_local! {
    static FOLDER: RefCell<Option<TempDir>> = const { RefCell::new(None) };
}

/// Writes a file in this thread's temporary folder, which is in memory if /dev/shm exists.
fn file(name: &str, bytes: &[u8]) -> PathBuf {
    FOLDER.with_borrow_mut(|folder| {
        let folder = folder.get_or_insert_with(|| {
            TempDir::new_in("/dev/shm").or_else(|_| TempDir::new()).expect("a folder for the files")
        });
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("the file is written");
        path
    })
}

/// Accepts success and errors, but checks that an error message is short.
#[track_caller]
fn checked_outcome<T>(outcome: Result<T>) -> Option<T> {
    outcome.inspect_err(|e| assert_short(&e.to_string())).ok()
}

#[track_caller]
fn assert_short(error: &str) {
    assert!(error.len() < MAX_ERROR_BYTES, "an error of {} bytes: {:.200}", error.len(), error);
}

pub fn npy(bytes: &[u8]) {
    checked_outcome(io::read_npy(file("x.npy", bytes), Device::Cpu));
}

pub fn npz(bytes: &[u8]) {
    checked_outcome(io::load(file("x.npz", bytes), Device::Cpu));
}

pub fn safetensors(bytes: &[u8]) {
    checked_outcome(io::load(file("x.safetensors", bytes), Device::Cpu));
}

pub fn mapped(bytes: &[u8]) {
    let path = file("mapped.safetensors", bytes);
    // SAFETY: the folder belongs to this thread, which overwrites the file only after the mapping was dropped.
    let Some(mapped) = checked_outcome(unsafe { MappedFile::open(path) }) else { return };
    let Some(tensors) = checked_outcome(io::SafeTensors::new(&mapped)) else { return };
    let names: Vec<&str> = tensors.names().collect();
    names.into_iter().for_each(|name| drop(checked_outcome(tensors.get(name, Device::Cpu))));
}

pub fn gguf(bytes: &[u8]) {
    let path = file("x.gguf", bytes);
    // SAFETY: the folder belongs to this thread, which overwrites the file only after the mappings were dropped.
    let Some(shared) = checked_outcome(unsafe { SharedFile::open(path) }) else { return };
    let Some(model) = checked_outcome(Gguf::new(shared)) else { return };
    for (_, value) in model.metadata() {
        if let MetaValue::Array(array) = value {
            assert_eq!(array.iter().count(), array.len());
        }
    }
    model.tensors().for_each(|(name, _)| drop(checked_outcome(model.weight(name, Device::Cpu))));
}

/// Calls the methods of a snapshot that the command-line tools call.
fn used(snapshot: Option<Snapshot>) {
    if let Some(snapshot) = snapshot {
        checked_outcome(snapshot.check());
        let _ = snapshot.to_string();
    }
}

pub fn pickle(bytes: &[u8]) {
    used(checked_outcome(Snapshot::from_pickle(bytes)));
}

pub fn json(bytes: &[u8]) {
    used(checked_outcome(Snapshot::from_json(&String::from_utf8_lossy(bytes))));
}

pub fn csv(bytes: &[u8]) {
    checked_outcome(CsvEvent::read_all(bytes));
}

pub fn profile(bytes: &[u8]) {
    if let Some(profile) = checked_outcome(Profile::from_bytes(bytes)) {
        let _ = (profile.key_averages_by_shape().to_string(), profile.timings().to_string());
        profile.write(&mut std::io::sink()).expect("what is read is written");
    }
}

/// Builds the HTML page that shows a profile.
pub fn page(bytes: &[u8]) {
    match page::blob(&String::from_utf8_lossy(bytes)) {
        Ok(blob) => blob.write(&mut std::io::sink()).expect("a sink takes everything"),
        Err(what) => assert_short(&what),
    }
}

pub fn traces(bytes: &[u8]) {
    match trace::Trace::read(bytes, "trace") {
        Ok(traces) => traces.iter().for_each(|trace| assert_eq!(trace.lifetimes().len(), trace.blocks)),
        Err(fault) => assert_short(&fault.what),
    }
}

pub fn config(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Some(config) = checked_outcome(text.parse::<Config>()) {
        assert_eq!(config.to_string().parse::<Config>().expect("what is printed is read"), config);
    }
}

pub fn device(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    if let Some(device) = checked_outcome(text.parse::<Device>()) {
        assert_eq!(device.to_string().parse::<Device>().expect("what is printed is read"), device);
    }
    checked_outcome(text.parse::<DType>());
}

pub fn einsum(bytes: &[u8]) {
    thread_local! {
        static OPERANDS: [Tensor; 2] = [[2, 3, 2], [3, 2, 2]].map(|shape| Tensor::ones(shape, Device::Cpu).expect("small"));
    }
    let text = String::from_utf8_lossy(bytes);
    OPERANDS.with(|operands| {
        checked_outcome(Tensor::einsum(&text, operands));
        checked_outcome(Tensor::einsum(&text, &operands[..1]));
    });
}

/// A file name in the program cache. The checksum of a cache file covers its name and contents.
pub const CACHE_FILE: &str = "0000000000000000000000000000000000000000000000000000000000000000.tuning";

pub fn cache(bytes: &[u8]) {
    checked_outcome(claystone::device::read_cache_file(&file(CACHE_FILE, bytes)));
}

/// The name of a reader and the function that runs it.
pub type Target = (&'static str, fn(&[u8]));

pub const TARGETS: [Target; 15] = [
    ("npy", npy),
    ("npz", npz),
    ("safetensors", safetensors),
    ("mapped", mapped),
    ("gguf", gguf),
    ("pickle", pickle),
    ("json", json),
    ("csv", csv),
    ("profile", profile),
    ("page", page),
    ("traces", traces),
    ("config", config),
    ("device", device),
    ("einsum", einsum),
    ("cache", cache),
];
