//! Valid inputs of each format, written by the library or by hand. The tests mutate these inputs.

use std::io::{Cursor, Write};

use claystone::nn::StateDict;
use claystone::storage::{Config, CsvAction, CsvLog, HistoryOptions, Snapshot, annotate, with_context};
use claystone::{DType, Device, Tensor, io};
use sha2::{Digest, Sha256};
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::gguf::{GgufWriter, array, file_of_all_types};
use crate::targets::CACHE_FILE;

/// A profiler trace with one event of each kind.
const PROFILE: &str = r#"{"otherData":{"duration_us":200.0,"dropped_events":3,
"devices":[{"device":"opencl:0","name":"Some GPU","pid":1,"copy_bytes_per_s":1e9}]},"traceEvents":[
{"ph":"M","name":"thread_name","pid":0,"tid":4,"args":{"name":"main"}},
{"ph":"X","cat":"operation","name":"matmul","pid":0,"tid":4,"ts":10,"dur":20,"args":{"device":"opencl:0","bytes":104}},
{"ph":"X","cat":"launch","name":"gemm","pid":0,"tid":4,"ts":12,"dur":5,"args":{"device":"opencl:0","launch":1}},
{"ph":"X","cat":"kernel","name":"gemm","pid":1,"tid":0,"ts":20,"dur":30,"args":{"device":"opencl:0","launch":1,
"operation":"matmul","shapes":[[2,3],[3,4]],"dtype":"f32","bytes":104,"flops":48,"queued_us":13,"submitted_us":15}},
{"ph":"s","id":1,"cat":"launch","name":"launch","pid":0,"tid":4,"ts":12},
{"ph":"C","name":"memory opencl:0","pid":1,"ts":30,"args":{"allocated":100,"reserved":2000}}]}"#;

/// A trace written by another program: a list of events without the closing bracket.
const PAGE: &str = r#"[{"ph":"M","name":"process_sort_index","pid":"a","args":{"sort_index":-3}},null,
{"ph":"B","name":"step","pid":"a","tid":"b","ts":"1.5"},{"ph":"i","name":"mark","pid":7,"tid":8,"ts":2,"id":"0x1"},
{"ph":"E","pid":"a","tid":"b","ts":9},{"ph":"B","name":"open","pid":"a","tid":"b","ts":10,"args":{"n":1e300,"x":{"y":[]}}},
{"ph":"t","id":"0x1","cat":"a","pid":7,"tid":8,"ts":3},{"ph":"f","id":"0x1","cat":"a","pid":"a","tid":"b","ts":1},"#;

/// Returns valid inputs for the named reader.
pub fn of(name: &str) -> Vec<Vec<u8>> {
    let texts = |texts: &[&str]| texts.iter().map(|text| text.as_bytes().to_vec()).collect();
    match name {
        "npy" => npy_files(),
        "npz" => {
            vec![
                file_of_all_dtypes("x.npz"),
                zip(CompressionMethod::Deflated, &npy_files()),
                zip(CompressionMethod::Stored, &npy_files()),
            ]
        }
        "safetensors" | "mapped" => {
            let odd = r#"{"a":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[0,3]},"b":{"dtype":"NEW","shape":[9],"data_offsets":[3,4]}}"#;
            let odd = [&(odd.len() as u64).to_le_bytes()[..], odd.as_bytes(), &[1, 2, 3, 4]].concat();
            vec![file_of_all_dtypes("x.safetensors"), odd]
        }
        "gguf" => vec![file_of_all_types().finish(), odd_gguf_file().finish()],
        "pickle" => vec![snapshot().to_pickle().unwrap(), PYTORCH.to_vec(), nested_lists(3, 4)],
        "json" => vec![snapshot().to_json().unwrap().into_bytes()],
        "profile" => texts(&[PROFILE]),
        "page" => texts(&[PROFILE, PAGE]),
        "csv" => vec![log()],
        "traces" => {
            let mut all = vec![log(), snapshot().to_pickle().unwrap(), snapshot().to_json().unwrap().into_bytes()];
            all.extend(texts(&["# a step\na 7 1000\na 8 600 # bytes\nf 7\na 9 0\na 7 300\nf 9\nf 8\n"]));
            all
        }
        "config" => {
            let keys = Config::KEYS.iter().map(|key| format!("{}:{}", key.name, key.default_value()));
            let lists = "roundup_power2_divisions:[64:8,256:4,>:1],decay_ms:20,segments:pytorch,pool_overfit:1.5";
            let all = "max_split_size_mb:20,garbage_collection_threshold:0.5,backend:pool,memory_limit_mb:100";
            keys.map(String::into_bytes).chain(texts(&[lists, all])).collect()
        }
        "device" => texts(&["cpu", "opencl:0", "opencl", "opencl:4294967295", "f32", "bf16"]),
        "einsum" => texts(&["abc,bcd->ad", "...c,...cd", "iji->j", "abc->", "a b c , c b a -> c a b"]),
        "cache" => {
            let text = b"here, driver 1\ngemm_tile 8\n".to_vec();
            vec![sealed(&text), sealed(&(0..2000u32).flat_map(u32::to_le_bytes).collect::<Vec<_>>()), text]
        }
        _ => unreachable!("{name} is no reader"),
    }
}

const PYTORCH: &[u8] = include_bytes!("../../src/storage/history/tests/pytorch.pickle");

/// Returns a file of the program cache whose checksum is valid.
fn sealed(contents: &[u8]) -> Vec<u8> {
    let sum = Sha256::new().chain_update(CACHE_FILE).chain_update([0]).chain_update(contents).finalize();
    [&b"claystone binary"[..], &sum[..], contents].concat()
}

/// Returns an npy file with the given version, header (a Python dict literal) and elements.
pub fn npy(version: u8, literal: &str, elements: &[u8]) -> Vec<u8> {
    let length = (literal.len() as u32).to_le_bytes();
    let length = if version == 1 { &length[..2] } else { &length[..] };
    [b"\x93NUMPY", &[version, 0][..], length, literal.as_bytes(), elements].concat()
}

/// Returns the npy header of a byte array of the given shape.
pub fn literal(shape: &str) -> String {
    format!("{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}")
}

fn npy_files() -> Vec<Vec<u8>> {
    let turned = "{'descr': '>i4', 'fortran_order': True, 'shape': (2, 3), }";
    let halves = "{\"shape\": (2L,), \"descr\": \"<f2\", \"fortran_order\": False}";
    vec![
        npy(1, turned, &[7; 24]),
        npy(2, halves, &[1; 4]),
        npy(3, &literal("()"), &[1]),
        npy(1, "{'descr': '>c16', 'fortran_order': True, 'shape': (2, 1), }", &[7; 32]),
        npy(1, "{'descr': '<U3', 'fortran_order': False, 'shape': (2,), }", &[7; 24]),
        npy(1, "{'descr': '|O', 'fortran_order': False, 'shape': (2,), }", &[7; 9]),
        npy(1, &literal("(30000,)"), &[0; 30000]),
    ]
}

/// Returns a zip archive of the given files. With compression, long runs of zeros take few bytes.
pub fn zip(method: CompressionMethod, files: &[Vec<u8>]) -> Vec<u8> {
    let mut archive = ZipWriter::new(Cursor::new(Vec::new()));
    for (i, file) in files.iter().enumerate() {
        let options = SimpleFileOptions::default().compression_method(method);
        archive.start_file(format!("{i}.npy"), options).unwrap();
        archive.write_all(file).unwrap();
    }
    archive.finish().unwrap().into_inner()
}

/// Returns a file with tensors of all dtypes.
fn file_of_all_dtypes(name: &str) -> Vec<u8> {
    let folder = tempfile::tempdir().unwrap();
    let tensor =
        |dtype| Tensor::arange(0, 6, 1, Device::Cpu).unwrap().reshape([2, 3]).unwrap().to_dtype(dtype).unwrap();
    let state: StateDict = DType::ALL.into_iter().map(|dtype| (format!("layer.{dtype}"), tensor(dtype))).collect();
    io::save(folder.path().join(name), &state).unwrap();
    std::fs::read(folder.path().join(name)).unwrap()
}

/// Returns a GGUF file of version 2 with a small alignment, empty arrays, and tensors without dims, without elements and with 4 dims.
fn odd_gguf_file() -> GgufWriter {
    let file = GgufWriter::of_version(2, 8);
    let file = file.pair("general.alignment", 4, &[8, 0, 0, 0]).pair("empty", 9, &array(8, &[]));
    let file = file.tensor("scalar", &[], 0, &[0; 4]).tensor("none", &[0, 32], 2, &[]);
    file.tensor("four", &[1, 2, 1, 3], 1, &[0; 12]).tensor("vector", &[32], 8, &[0; 34])
}

/// Returns a snapshot of the CPU device, taken while tensors are created and dropped.
fn snapshot() -> Snapshot {
    Device::Cpu.record_memory_history(HistoryOptions::default()).unwrap();
    let _kept = annotate("setup", || with_context("input", || Tensor::ones(&[64, 64], Device::Cpu))).unwrap();
    for n in 1..4 {
        with_context("step", || Tensor::zeros(1000 * n, Device::Cpu)).unwrap();
    }
    Device::Cpu.memory_snapshot().unwrap()
}

fn log() -> Vec<u8> {
    struct Bytes<'a>(&'a mut Vec<u8>);
    impl Write for Bytes<'_> {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.write(bytes)
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut bytes = Vec::new();
    let log = CsvLog::new(Bytes(&mut bytes)).unwrap();
    for (action, addr) in [
        (CsvAction::Allocate, 512),
        (CsvAction::Allocate, 1024),
        (CsvAction::Free, 512),
        (CsvAction::AllocateFailure, 0),
        (CsvAction::Allocate, 512),
    ] {
        log.log(action, addr, 500, 1).unwrap();
    }
    drop(log);
    bytes
}

/// Returns a pickled snapshot that has nested lists as a setting: each of `depth` levels contains the next level's list `fold`
/// times.
pub fn nested_lists(depth: u8, fold: usize) -> Vec<u8> {
    fn list(depth: u8, fold: usize) -> Vec<u8> {
        let Some(inner) = depth.checked_sub(1) else { return b"]q\x00".to_vec() };
        let more = [b'h', inner].repeat(fold - 1);
        [&b"]("[..], &list(inner, fold), &more, &[b'e', b'q', depth]].concat()
    }
    pickled_snapshot("allocator_settings", &[&b"}("[..], &text("a"), &list(depth, fold), b"u"].concat())
}

/// Returns a pickled snapshot that has no segments and one more entry, with the given name and value.
pub fn pickled_snapshot(name: &str, value: &[u8]) -> Vec<u8> {
    [&b"\x80\x02}("[..], &text("segments"), b"]", &text(name), value, b"u."].concat()
}

/// Returns the pickle instruction that pushes a short text.
pub fn text(text: &str) -> Vec<u8> {
    [&b"X"[..], &(text.len() as u32).to_le_bytes(), text.as_bytes()].concat()
}
