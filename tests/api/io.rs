//! Files: round trips on every device, files written by other programs, and damaged files.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use claystone::nn::{Linear, Module, StateDict};
use claystone::storage::MappedFile;
use claystone::{DType, Device, Error, Result, Tensor, io};
use tempfile::TempDir;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::common::{devices, each_device, f64s};

struct Folder(TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn with(&self, name: &str, bytes: &[u8]) -> PathBuf {
        fs::write(self.file(name), bytes).unwrap();
        self.file(name)
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits.chunks(2).map(|two| u8::from_str_radix(std::str::from_utf8(two).unwrap(), 16).unwrap()).collect()
}

/// Returns tensors of every dtype: contiguous, strided views, empty, scalar, and so large that files are written in several pieces.
fn tensors(device: Device) -> Vec<(String, Tensor)> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        let numbers: Vec<f32> = (0..24).map(|i| (i % 7) as f32).collect();
        let t = Tensor::from_slice(&numbers, [4, 6], Device::Cpu).unwrap();
        let t = t.to_dtype(dtype).unwrap().to_device(device).unwrap();
        all.push((format!("{dtype}.whole"), t.shallow_clone()));
        all.push((format!("{dtype}.view"), t.i((1.., ..5)).unwrap().t().unwrap().slice(0, None, None, -2).unwrap()));
        all.push((format!("{dtype}.wide"), t.i(1).unwrap().unsqueeze(1).unwrap().expand([6, 3]).unwrap()));
        all.push((format!("{dtype}.empty"), t.narrow(0, 1, 0).unwrap()));
        all.push((format!("{dtype}.scalar"), t.i((1, 1)).unwrap()));
    }
    let long = Tensor::arange(0, 1_500_001, 1, device).unwrap();
    all.push(("long".into(), long));
    all
}

fn assert_same(name: &str, got: &Tensor, want: &Tensor, device: Device) {
    assert_eq!((got.shape(), got.dtype(), got.device()), (want.shape(), want.dtype(), device), "{name}");
    assert_eq!(f64s(got), f64s(want), "{name} on {device}");
}

#[test]
fn saved_tensors_can_be_loaded_on_every_device() {
    let folder = Folder::new();
    each_device(|d| {
        let state: StateDict = tensors(d).into_iter().collect();
        for name in ["all.safetensors", "all.npz"] {
            let path = folder.file(name);
            io::save(&path, &state).unwrap();
            let loaded = io::load(&path, d).unwrap();
            assert_eq!(loaded.len(), state.len());
            state.iter().for_each(|(name, want)| assert_same(name, loaded.get(name).unwrap(), want, d));
        }
        // SAFETY: nothing writes to the file.
        let file = unsafe { MappedFile::open(folder.file("all.safetensors")) }.unwrap();
        let mapped = io::SafeTensors::new(&file).unwrap();
        assert_eq!(mapped.names().count(), state.len());
        for (name, want) in state.iter() {
            assert_same(name, &mapped.get(name, d).unwrap(), want, d);
            io::write_npy(folder.file("one.npy"), want).unwrap();
            assert_same(name, &io::read_npy(folder.file("one.npy"), d).unwrap(), want, d);
        }
    });
}

/// Files written by NumPy: `save` of `[[1, 2, 3], [4, 5, 6]]` as `>i4` in Fortran order, of `[1.5, -2]` as `<f2`, of three bools, and
/// of a scalar; and `savez_compressed` of two of these arrays.
mod numpy {
    pub const BIG_ENDIAN_FORTRAN: &str = "
        934e554d5059010076007b276465736372273a20273e6934272c2027666f727472616e5f6f72646572273a20547275652c202773686170
        65273a2028322c2033292c207d202020202020202020202020202020202020202020202020202020202020202020202020202020202020
        20202020202020202020202020202020200a000000010000000400000002000000050000000300000006";
    pub const HALVES: &str = "
        934e554d5059010076007b276465736372273a20273c6632272c2027666f727472616e5f6f72646572273a2046616c73652c2027736861
        7065273a2028322c292c207d20202020202020202020202020202020202020202020202020202020202020202020202020202020202020
        20202020202020202020202020202020200a003e00c0";
    pub const BOOLS: &str = "
        934e554d5059010076007b276465736372273a20277c6231272c2027666f727472616e5f6f72646572273a2046616c73652c2027736861
        7065273a2028332c292c207d20202020202020202020202020202020202020202020202020202020202020202020202020202020202020
        20202020202020202020202020202020200a010001";
    pub const SCALAR: &str = "
        934e554d5059010076007b276465736372273a20273c6638272c2027666f727472616e5f6f72646572273a2046616c73652c2027736861
        7065273a2028292c207d202020202020202020202020202020202020202020202020202020202020202020202020202020202020202020
        20202020202020202020202020202020200a0000000000000440";
    pub const INT16: &str = "
        934e554d5059010076007b276465736372273a20273c6932272c2027666f727472616e5f6f72646572273a2046616c73652c2027736861
        7065273a2028312c292c207d20202020202020202020202020202020202020202020202020202020202020202020202020202020202020
        20202020202020202020202020202020200a0100";
    pub const COMPRESSED: &str = "
        504b03042d00000008000000210091f4e7dbffffffffffffffff100014006c617965722e7765696768742e6e7079010010009000000000
        00000050000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46ea5a06e9366a2aea3a09e965f54529498179f5f94920a12774b
        cc294e058a17672416a402f91a463a0a469a3a0ab50a64032e063068b007120e40e40000504b03042d00000008000000210023b8f06cff
        ffffffffffffff050014006e2e6e707901001000880000000000000046000000000000009bec17ea1b10c9c850c650ad9e925a9c5ca46e
        a5a06e9369a1aea3a09e965f54529498179f5f94920a12774bcc294e058a17672416a402f91a9a3a0ab50a14012e7606080000504b0102
        2d032d00000008000000210091f4e7db50000000900000001000000000000000000000008001000000006c617965722e7765696768742e
        6e7079504b01022d032d00000008000000210023b8f06c46000000880000000500000000000000000000008001920000006e2e6e707950
        4b05060000000002000200710000000f0100000000";
}

#[test]
fn numpy_files_can_be_read() {
    let folder = Folder::new();
    each_device(|d| {
        let read = |text: &str| io::read_npy(folder.with("x.npy", &hex(text)), d).unwrap();
        let x = read(numpy::BIG_ENDIAN_FORTRAN);
        assert_eq!((x.shape().dims(), x.dtype(), x.strides()), (&[2, 3][..], DType::I32, &[1, 2][..]));
        assert_eq!(x.to_vec::<i32>().unwrap(), [1, 2, 3, 4, 5, 6]);
        let x = read(numpy::HALVES);
        assert_eq!((x.dtype(), f64s(&x).into_raw_vec_and_offset().0), (DType::F16, vec![1.5, -2.0]));
        assert_eq!(read(numpy::BOOLS).to_vec::<bool>().unwrap(), [true, false, true]);
        assert_eq!(read(numpy::SCALAR).item::<f64>().unwrap(), 2.5);
        let x = read(numpy::INT16);
        assert_eq!((x.dtype(), x.to_vec::<i16>().unwrap()), (DType::I16, vec![1]));
        let all = io::load(folder.with("x.npz", &hex(numpy::COMPRESSED)), d).unwrap();
        assert_eq!(all.names().collect::<Vec<_>>(), ["layer.weight", "n"]);
        assert_eq!(all.get("layer.weight").unwrap().to_vec::<f32>().unwrap(), [0.0, 1.0, 2.0, 3.0]);
        assert_eq!(all.get("n").unwrap().item::<i64>().unwrap(), 7);
    });
}

/// Files as Hugging Face's Python library writes them: with metadata, and with names in another order than the data.
#[test]
fn safetensors_files_follow_the_format() {
    let folder = Folder::new();
    let header = br#"{"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"a":{"dtype":"U8","shape":[],"data_offsets":[4,5]}}"#;
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header, &[0xc0, 0x3f, 0x00, 0xc0, 9]].concat();
    each_device(|d| {
        let state = io::load(folder.with("x.safetensors", &bytes), d).unwrap();
        assert_eq!(state.names().collect::<Vec<_>>(), ["b", "a"]);
        assert_eq!(f64s(state.get("b").unwrap()).into_raw_vec_and_offset().0, [1.5, -2.0]);
        assert_eq!(state.get("a").unwrap().item::<u8>().unwrap(), 9);
    });
    let t = Tensor::from_slice(&[1f32, 2.0], 2, Device::Cpu).unwrap();
    let state: StateDict = [("w".to_string(), t)].into_iter().collect();
    io::save(folder.file("y.safetensors"), &state).unwrap();
    let written = fs::read(folder.file("y.safetensors")).unwrap();
    let length = u64::from_le_bytes(written[..8].try_into().unwrap()) as usize;
    assert_eq!((length % 8, written.len()), (0, 8 + length + 8));
    let text = std::str::from_utf8(&written[8..8 + length]).unwrap();
    assert_eq!(text.trim_end(), r#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#);
    assert_eq!(written[8 + length..], [0, 0, 128, 63, 0, 0, 0, 64]);
}

/// Tensors of unsupported dtypes are read as bytes with one more dim; other tensors in the file are not affected.
#[test]
fn unsupported_dtypes_are_read_as_bytes() {
    let folder = Folder::new();
    let entry = |name: &str, dtype: &str, shape: &str, from: usize, to: usize| {
        format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{from},{to}]}}"#)
    };
    let entries = [
        entry("weight", "F8_E5M2", "[2,3]", 0, 6),
        entry("scale", "U16", "[]", 6, 8),
        entry("four", "F4", "[2,2]", 8, 10),
        entry("later", "X9_NEW", "[7]", 10, 13),
        entry("eight", "F8_E4M3", "[1]", 13, 14),
        entry("wide", "C64", "[1]", 14, 22),
        entry("bias", "F32", "[1]", 22, 26),
    ];
    let header = format!("{{{}}}", entries.join(","));
    let data: Vec<u8> = (0..22).chain(1.5f32.to_le_bytes()).collect();
    let bytes = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat();
    let path = folder.with("x.safetensors", &bytes);
    // SAFETY: nothing writes to the file.
    let mapped = unsafe { MappedFile::open(&path) }.unwrap();
    let mapped = io::SafeTensors::new(&mapped).unwrap();
    let wanted: [(&str, &[usize], std::ops::Range<u8>); 6] = [
        ("weight", &[2, 3, 1], 0..6),
        ("scale", &[2], 6..8),
        ("four", &[2], 8..10),
        ("later", &[3], 10..13),
        ("eight", &[1, 1], 13..14),
        ("wide", &[1, 8], 14..22),
    ];
    each_device(|d| {
        let state = io::load(&path, d).unwrap();
        for (name, shape, values) in &wanted {
            for x in [state.get(name).unwrap().shallow_clone(), mapped.get(name, d).unwrap()] {
                assert_eq!((x.shape().dims(), x.dtype(), x.device()), (*shape, DType::U8, d), "{name}");
                assert_eq!(x.to_vec::<u8>().unwrap(), values.clone().collect::<Vec<u8>>(), "{name}");
            }
        }
        assert_eq!(state.get("bias").unwrap().to_vec::<f32>().unwrap(), [1.5]);
        // A layer refuses to load bytes as its parameters.
        let layer = Linear::new(3, 2, d).unwrap();
        let error = layer.load_state_dict(&state, false).unwrap_err().to_string();
        assert!(error.contains("weight") && error.contains("dtype"), "{error}");
    });

    let npy = |descr: &str, fortran: &str, shape: &str, elements: &[u8]| {
        let literal = format!("{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}");
        [b"\x93NUMPY\x01\x00", &(literal.len() as u16).to_le_bytes()[..], literal.as_bytes(), elements].concat()
    };
    let bytes = |n: u8| (0..n).collect::<Vec<u8>>();
    type Case<'a> = (&'a str, Vec<u8>, &'a [usize], Vec<u8>);
    let cases: [Case; 10] = [
        ("u2", npy("'<u2'", "False", "(2, 3)", &bytes(12)), &[2, 3, 2], bytes(12)),
        ("big", npy("'>u2'", "False", "(2,)", &bytes(4)), &[2, 2], vec![1, 0, 3, 2]),
        ("columns", npy("'<u2'", "True", "(2, 3)", &bytes(12)), &[2, 3, 2], vec![0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]),
        ("void", npy("'|V1'", "False", "()", &bytes(1)), &[1], bytes(1)),
        ("c8", npy("'>c8'", "False", "(1,)", &bytes(8)), &[1, 8], vec![3, 2, 1, 0, 7, 6, 5, 4]),
        ("text", npy("'<U2'", "False", "(2,)", &bytes(16)), &[2, 8], bytes(16)),
        ("name", npy("'|S3'", "False", "(1,)", &bytes(3)), &[1, 3], bytes(3)),
        ("date", npy("'<M8[ns]'", "False", "(1,)", &bytes(8)), &[1, 8], bytes(8)),
        ("objects", npy("'|O'", "False", "(2,)", &bytes(9)), &[9], bytes(9)),
        ("record", npy("[('a', '<f4'), ('b', '|u1')]", "False", "(1,)", &bytes(5)), &[5], bytes(5)),
    ];
    for method in [CompressionMethod::Stored, CompressionMethod::Deflated] {
        let mut archive = ZipWriter::new(std::io::Cursor::new(Vec::new()));
        let options = SimpleFileOptions::default().compression_method(method);
        let known = npy("'<f4'", "False", "(1,)", &1.5f32.to_le_bytes());
        for (name, file) in cases.iter().map(|(name, file, ..)| (*name, file)).chain([("known", &known)]) {
            archive.start_file(format!("{name}.npy"), options).unwrap();
            archive.write_all(file).unwrap();
        }
        let path = folder.with("x.npz", &archive.finish().unwrap().into_inner());
        each_device(|d| {
            let state = io::load(&path, d).unwrap();
            for (name, file, shape, values) in &cases {
                for x in
                    [state.get(name).unwrap().shallow_clone(), io::read_npy(folder.with("x.npy", file), d).unwrap()]
                {
                    assert_eq!((x.shape().dims(), x.dtype()), (*shape, DType::U8), "{name}");
                    assert_eq!(x.to_vec::<u8>().unwrap(), *values, "{name}");
                }
            }
            assert_eq!(state.get("known").unwrap().item::<f32>().unwrap(), 1.5);
        });
    }
}

#[test]
fn damaged_files_are_errors_that_name_file_and_problem() {
    let folder = Folder::new();
    let says = |r: Result<()>, what: &[&str]| {
        let error = r.unwrap_err().to_string();
        assert!(what.iter().all(|w| error.contains(w)), "{error} should say {what:?}");
    };
    let load = |name: &str, bytes: &[u8]| io::load(folder.with(name, bytes), Device::Cpu).map(drop);
    says(io::load(folder.file("none.npz"), Device::Cpu).map(drop), &["none.npz"]);
    says(load("x.bin", b""), &["x.bin", "safetensors"]);
    says(load("x.npy", b""), &["read_npy"]);
    says(load("x.npz", b"no archive at all"), &["x.npz"]);
    says(load("x.safetensors", b"abc"), &["too short"]);
    says(load("x.safetensors", &u64::MAX.to_le_bytes()), &["header of"]);
    let file = |header: &str, data: &[u8]| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat();
    let one = |dtype: &str| format!(r#"{{"a.b":{{"dtype":"{dtype}","shape":[2],"data_offsets":[0,2]}}}}"#);
    says(load("x.safetensors", &file(&one("BOOL"), &[1])), &["2 bytes of elements, but the file has 1"]);
    says(load("x.safetensors", &file(&one("BOOL"), &[1, 2])), &["x.safetensors", "a.b", "must be 0 or 1"]);
    says(load("x.pt", b""), &["x.pt", "python -c", "torch.load", "x.safetensors"]);
    says(load("x.safetensors", &file(&one("F32"), &[1, 2])), &["x.safetensors"]);
    says(load("x.safetensors", &file("{", &[])), &["x.safetensors"]);
    let path = folder.with("x.safetensors", &file(&one("U8"), &[1, 2]));
    // SAFETY: nothing writes to the file.
    let mapped = unsafe { MappedFile::open(&path) }.unwrap();
    says(
        io::SafeTensors::new(&mapped).unwrap().get("c", Device::Cpu).map(drop),
        &["tensor c", "no tensor of this name"],
    );
    // npy files that are refused: files of other formats, truncated files, and sizes that overflow.
    let npy = |bytes: &[u8]| io::read_npy(folder.with("y.npy", bytes), Device::Cpu).map(drop);
    says(npy(b"\x93NUMPX"), &["y.npy"]);
    io::write_npy(folder.file("whole.npy"), &Tensor::zeros(10, Device::Cpu).unwrap()).unwrap();
    let whole = fs::read(folder.file("whole.npy")).unwrap();
    says(npy(&whole[..whole.len() - 1]), &["y.npy", "ends before"]);
    let huge = String::from_utf8_lossy(&whole[10..128]).replace("(10,)", "(9999999999, 9999999999)");
    says(npy(&[&whole[..10], &huge.as_bytes()[..118]].concat()), &["y.npy", "too large"]);
    // A dim of size 0 makes the number of elements 0, but the error about the other, too large dims must remain.
    let hidden = String::from_utf8_lossy(&whole[10..128]).replace("(10,)", "(0, 9223372036854775807, 4)");
    says(npy(&[&whole[..10], &hidden.as_bytes()[..118]].concat()), &["y.npy", "too large"]);
    let none = Tensor::zeros(1, Device::Cpu).unwrap();
    says(io::write_npy(folder.file("no/such/folder.npy"), &none), &["folder.npy"]);
    says(io::save(folder.file("x.txt"), &StateDict::new()), &["x.txt"]);
}

#[test]
fn tensors_survive_a_round_trip_as_bytes() {
    each_device(|device| {
        // A strided tensor that is written in more than one piece.
        let x = Tensor::arange(0, 1_200_000, 1, device).unwrap().reshape([1000, 1200]).unwrap();
        let mut bytes = Vec::new();
        x.t().unwrap().write_to(&mut bytes).unwrap();
        let y = Tensor::read_from(&mut &bytes[..], [1200, 1000], device).unwrap();
        assert_eq!(y.t().unwrap().to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
        let z = Tensor::from_bytes(&bytes, [1200, 1000], device).unwrap();
        assert_eq!(z.to_vec::<f32>().unwrap(), y.to_vec::<f32>().unwrap());

        let short = Tensor::read_from(&mut &bytes[1..], [1200, 1000], device);
        assert!(matches!(short, Err(Error::Invalid { op: "read_from", .. })));
        let other = Tensor::from_bytes(&bytes, [1200, 999], device);
        assert!(matches!(other, Err(Error::Invalid { op: "from_bytes", .. })));
        let no_bool = Tensor::from_bytes(&[1, 2], 2, (DType::Bool, device));
        assert!(matches!(no_bool, Err(Error::Invalid { op: "from_bytes", .. })));
    });
}

#[test]
fn bytes_can_be_written_into_existing_tensors() {
    for device in devices() {
        let x = Tensor::zeros([2, 3], (DType::I32, device)).unwrap();
        let bytes: Vec<u8> = (1..7i32).flat_map(i32::to_ne_bytes).collect();
        let mut back = vec![0; 24];
        let before = x.storage().version();
        x.t().unwrap().write_bytes_(&bytes).unwrap();
        assert!(x.storage().version() > before, "autograd sees it");
        assert_eq!(x.to_vec::<i32>().unwrap(), [1, 3, 5, 2, 4, 6]);
        x.narrow(0, 1, 1).unwrap().write_bytes_(&bytes[..12]).unwrap();
        x.t().unwrap().read_bytes(&mut back).unwrap();
        let seen: Vec<i32> = back.chunks(4).map(|b| i32::from_ne_bytes(b.try_into().unwrap())).collect();
        assert_eq!(seen, [1, 1, 3, 2, 5, 3]);
        for (result, op) in
            [(x.write_bytes_(&bytes[1..]).map(drop), "write_bytes_"), (x.read_bytes(&mut back[1..]), "read_bytes")]
        {
            let message = result.unwrap_err().to_string();
            assert_eq!(message, format!("{op}: shape [2, 3] of i32 takes 24 bytes, not 23"));
        }
        assert!(x.narrow(0, 0, 1).unwrap().expand([2, 3]).unwrap().write_bytes_(&bytes).is_err());
        let flags = Tensor::zeros(2, (DType::Bool, device)).unwrap();
        assert!(flags.write_bytes_(&[1, 2]).unwrap_err().to_string().contains("must be 0 or 1, not 2"));
        let leaf = Tensor::zeros(1, device).unwrap().requires_grad_(true).unwrap();
        assert!(matches!(leaf.write_bytes_(&[0; 4]), Err(Error::Autograd { op: "write_bytes_", .. })));
    }
}
