//! Readers of files and text: for any bytes they do not panic, use bounded memory, and return errors of one sentence.
//!
//! Each reader gets 2,000 mutated inputs. The environment variable `CLAYSTONE_MUTATIONS` sets another number.

mod corpus;
#[path = "../common/gguf.rs"]
mod gguf;
mod mutate;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use claystone::storage::{Config, CsvEvent, SharedFile, Snapshot};
use claystone::{Device, Result, Tensor, io};
use corpus::{literal, nested_lists, npy, pickled_snapshot, text, zip};
use gguf::GgufWriter;
use mutate::{Random, mutated};
use peak_alloc::PeakAlloc;
use targets::TARGETS;
use zip::CompressionMethod::{Deflated, Stored};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Bytes that a reader may allocate in addition to the size of its input.
const SLACK_BYTES: usize = 64 << 20;

/// Locks a mutex for a test that measures memory, because the measured memory is that of the whole process.
fn serial_guard() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    Device::Cpu.empty_cache().unwrap();
    guard
}

/// Runs `f` and returns its result, and the peak number of bytes that it allocated on the heap and on the CPU device.
fn peak<R>(f: impl FnOnce() -> R) -> (usize, R) {
    Device::Cpu.reset_peak_stats().unwrap();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let result = f();
    let heap = HEAP.peak_usage() - before;
    (heap + Device::Cpu.memory_stats().unwrap().reserved_bytes.peak as usize, result)
}

#[test]
fn mutations_cause_neither_panics_nor_large_allocations() {
    let _guard = serial_guard();
    let count = mutate::count(2000);
    let only = std::env::var("CLAYSTONE_READER").ok();
    for (name, run) in TARGETS.into_iter().filter(|(name, _)| only.as_deref().is_none_or(|only| only == *name)) {
        let whole = corpus::of(name);
        whole.iter().for_each(|bytes| run(bytes));
        let mut random = Random(0);
        let (mut most, mut longest, begun) = (0, Duration::ZERO, Instant::now());
        for i in 0..count {
            let input = mutated(&mut random, &whole);
            let started = Instant::now();
            let (taken, outcome) = peak(|| catch_unwind(AssertUnwindSafe(|| run(&input))));
            longest = longest.max(started.elapsed());
            most = most.max(taken.saturating_sub(input.len()));
            if outcome.is_err() || taken > input.len() + SLACK_BYTES {
                let path = std::env::temp_dir().join(format!("claystone-{name}.input"));
                std::fs::write(&path, &input).unwrap();
                panic!("{name}: mutation {i}, which is in {}: {taken} bytes, {outcome:?}", path.display());
            }
        }
        println!("{name}: {count} inputs in {:.1?}, at most {most} bytes, {longest:.1?} for one", begun.elapsed());
    }
}

/// Writes `bytes` to a file of this name, reads the file and checks the limit of memory.
#[track_caller]
fn read_bounded<T>(name: &str, bytes: &[u8], read: impl FnOnce(&std::path::Path) -> Result<T>) -> Result<T> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, bytes).unwrap();
    let (taken, outcome) = peak(|| read(&path));
    assert!(taken <= bytes.len() + SLACK_BYTES, "{taken} bytes for a file of {}", bytes.len());
    outcome
}

#[track_caller]
fn assert_refused<T>(outcome: Result<T>, why: &str) {
    let error = outcome.err().expect("it is damaged").to_string();
    assert!(error.contains(why) && error.len() < 3000, "{error}");
}

#[test]
fn headers_beyond_the_file_are_errors() {
    let _guard = serial_guard();
    let read_npy = |bytes: &[u8]| read_bounded("x.npy", bytes, |path| io::read_npy(path, Device::Cpu));
    let mut long = npy(2, &literal("(1,)"), &[1]);
    long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_refused(read_npy(&long), "too long for an array");
    assert_refused(read_npy(&npy(1, &literal("(9000000000,)"), &[1; 8 << 20])), "ends before");
    assert_refused(read_npy(&npy(1, &"(".repeat(60_000), &[])), "header");
    assert_refused(read_npy(&npy(1, &literal(&format!("({})", "0,".repeat(20_000))), &[])), "dims");
    let load = |bytes: &[u8]| read_bounded("x.safetensors", bytes, |path| io::load(path, Device::Cpu));
    let file = |header: &str| [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    let sizes = format!("[{}0]", "0,".repeat(1 << 20));
    assert_refused(load(&file(&format!(r#"{{"a":{{"dtype":"U8","shape":{sizes},"data_offsets":[0,0]}}}}"#))), "dims");
    assert_refused(load(&file(&"[".repeat(1 << 20))), "x.safetensors");
    let one = r#""a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}"#;
    assert_refused(load(&file(&format!("{{{one},{one}}}"))), "twice");
    let open = |bytes: &[u8]| {
        // SAFETY: `read_bounded` writes the file once.
        let open = |path: &std::path::Path| io::gguf::Gguf::new(unsafe { SharedFile::open(path)? });
        read_bounded("x.gguf", bytes, open)
    };
    let whole = gguf::file_of_all_types().finish();
    for at in [8, 16] {
        let mut counted = whole.clone();
        counted[at..at + 8].copy_from_slice(&(1u64 << 60).to_le_bytes());
        assert_refused(open(&counted), "too many");
    }
    let long = GgufWriter::new().pair("a", 9, &[&8u32.to_le_bytes()[..], &u64::MAX.to_le_bytes()].concat());
    assert_refused(open(&long.finish()), "the file ends");
    let beyond = GgufWriter::new().info("a", &[1 << 40, 32], 2, 0);
    assert_refused(open(&beyond.finish()), "tensor a: 19791209299968 bytes at 0 are not inside the file");
    assert_refused(open(&GgufWriter::new().info("a", &[u64::MAX, u64::MAX], 0, 0).finish()), "too large");
}

#[test]
fn archives_are_checked_before_memory_is_taken() {
    let _guard = serial_guard();
    let load = |bytes: &[u8]| read_bounded("x.npz", bytes, |path| io::load(path, Device::Cpu));
    // The header of 200 MiB of spaces is compressed to about 200 KiB.
    let header = npy(2, &" ".repeat(200 << 20), &[]);
    let header = zip(Deflated, &[header]);
    assert_refused(load(&header), "use read_npz_limited");
    let load_all =
        |bytes: &[u8]| read_bounded("x.npz", bytes, |path| io::read_npz_limited(path, Device::Cpu, u64::MAX));
    assert_refused(load_all(&header), "too long for an array");
    // 200 MiB of zeros: a valid archive is read, and a damaged archive is refused before memory is allocated.
    let zeros = npy(1, &literal("(209715200,)"), &vec![0; 200 << 20]);
    let mut archive = zip(Deflated, &[zeros]);
    assert!(archive.len() < 1 << 20);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("x.npz");
    std::fs::write(&path, &archive).unwrap();
    assert_refused(load(&archive), "use read_npz_limited");
    assert_refused(io::read_npz_limited(&path, Device::Cpu, 200 << 20), "more than 209715200");
    let state = io::read_npz_limited(&path, Device::Cpu, 201 << 20).unwrap();
    assert_eq!(state.get("0").unwrap().sum((), false).unwrap().item::<i64>().unwrap(), 0);
    drop(state);
    Device::Cpu.empty_cache().unwrap();
    let end = archive.len() - 500;
    archive[end] ^= 0x55;
    assert_refused(load_all(&archive), "x.npz");
    // By default, a reader may allocate up to 8 times the archive's size plus 32 MiB.
    let zeros = npy(1, &literal("(31457280,)"), &vec![0; 30 << 20]);
    load(&zip(Deflated, &[zeros])).unwrap();
    // Refuses an array that is longer than its archive entry, and an entry that is longer than its data.
    assert_refused(load(&zip(Stored, &[npy(1, &literal("(1000000000,)"), &[0; 100])])), "ends before");
    let small = npy(1, &literal("(3,)"), &[1, 2, 3]);
    let mut long = zip(Deflated, std::slice::from_ref(&small));
    let directory = long.windows(4).rposition(|w| w == b"PK\x01\x02").unwrap();
    long[directory + 24..directory + 28].copy_from_slice(&0xf000_0000_u32.to_le_bytes());
    assert_refused(load(&long), "x.npz");
    assert_refused(load(&archive_with_duplicate_entry(&zip(Stored, &[small]))), "overlap");
}

/// Returns the archive with its only entry listed twice in the zip directory.
fn archive_with_duplicate_entry(archive: &[u8]) -> Vec<u8> {
    let directory = archive.windows(4).rposition(|w| w == b"PK\x01\x02").unwrap();
    let end = archive.windows(4).rposition(|w| w == b"PK\x05\x06").unwrap();
    let (entry, mut tail) = (&archive[directory..end], archive[end..].to_vec());
    let mut second = entry.to_vec();
    let name = second.windows(5).position(|w| w == b"0.npy").unwrap();
    second[name] = b'1';
    tail[8..12].copy_from_slice(&[2, 0, 2, 0]);
    tail[12..16].copy_from_slice(&(2 * entry.len() as u32).to_le_bytes());
    [&archive[..end], &second, &tail].concat()
}

/// Endless files such as /dev/zero are read up to a limit, so that reading ends with an error.
#[test]
#[cfg(unix)]
fn endless_files_are_read_up_to_a_bound() {
    let _guard = serial_guard();
    let folder = tempfile::tempdir().unwrap();
    for name in ["x.pickle", "x.json"] {
        let path = folder.path().join(name);
        std::os::unix::fs::symlink("/dev/zero", &path).unwrap();
        let (taken, outcome) = peak(|| Snapshot::load(&path));
        assert_refused(outcome, "copy it to a file");
        assert!(taken <= SLACK_BYTES + (1 << 20), "{taken} bytes of a device");
        let (taken, outcome) = peak(|| targets::trace::Trace::open(&path));
        assert!(outcome.unwrap_err().contains("copy it to a file"));
        assert!(taken <= SLACK_BYTES + (1 << 20), "{taken} bytes of a device");
    }
}

#[test]
fn pickles_with_shared_values_take_bounded_memory() {
    let _guard = serial_guard();
    let read = |bytes: &[u8]| {
        let (taken, outcome) = peak(|| Snapshot::from_pickle(bytes));
        assert!(taken <= bytes.len() + SLACK_BYTES, "{taken} bytes for a pickle of {}", bytes.len());
        outcome
    };
    assert_eq!(read(&nested_lists(3, 4)).unwrap().allocator_settings.len(), 1);
    assert_refused(read(&nested_lists(5, 200)), "too many values");
    assert_refused(read(&nested_lists(40, 2)), "nested too deep");
    assert_refused(read(&b"(".repeat(1 << 20)), "too many values");
    assert_refused(read(&b"]".repeat(1 << 20)), "too many values");
    // A list that contains itself is refused.
    assert_refused(
        read(&pickled_snapshot("allocator_settings", &[&b"}("[..], &text("a"), b"]q\x00h\x00au"].concat())),
        "too deep",
    );
    // An event that refers 100,000 times to one frame with a long name.
    let frame = [&b"}("[..], &text("filename"), &text(&"x".repeat(10_000)), &text("line"), b"K\x01"].concat();
    let frame = [&frame[..], &text("name"), &text("f"), b"uq\x00"].concat();
    let stack = [&b"]("[..], &frame, &b"h\x00".repeat(100_000), b"e"].concat();
    let event = [&b"}("[..], &text("action"), &text("alloc"), &text("size"), b"K\x01"].concat();
    let event = [&event[..], &text("frames"), &stack, b"uq\x01"].concat();
    let traces = [&b"](]("[..], &event, &b"h\x01".repeat(100_000), b"ee"].concat();
    assert_refused(read(&pickled_snapshot("device_traces", &traces)), "too many values");
}

/// As in PyTorch's snapshots, every event has its own list of frames, and all lists refer to the same frames.
#[test]
fn shared_stacks_are_stored_once() {
    let _guard = serial_guard();
    let mut frames = Vec::new();
    for i in 0..100u8 {
        let head = [&b"}("[..], &text("filename"), &text(&"x".repeat(100)), &text("line"), b"K\x01"].concat();
        frames.extend([&head[..], &text("name"), &text("function"), &[b'u', b'q', i]].concat());
    }
    let recalled: Vec<u8> = (0..100u8).flat_map(|i| [b'h', i]).collect();
    let event = [&b"}("[..], &text("action"), &text("alloc"), &text("size"), b"K\x01"].concat();
    let event = [&event[..], &text("frames"), b"](", &recalled, b"eu"].concat();
    // The frames come first, in a setting that the reader ignores.
    let first = [&text("frames")[..], b"](", &frames, b"e"].concat();
    let value = [&b"](]("[..], &event.repeat(20_000), b"ee"].concat();
    let pickle = pickled_snapshot("device_traces", &value);
    let pickle = [&b"\x80\x02}("[..], &first, &pickle[4..]].concat();
    let (taken, snapshot) = peak(|| Snapshot::from_pickle(&pickle).unwrap());
    assert_eq!(snapshot.device_traces[0].len(), 20_000);
    assert!(snapshot.device_traces[0].iter().all(|event| event.frames.len() == 100));
    // Separate copies of the frames would take 400 MiB.
    assert!(taken < 16 * pickle.len(), "{taken} bytes for a pickle of {}", pickle.len());
}

/// The cache opens a file with a valid checksum, and removes a file with an invalid checksum.
#[test]
fn cache_files_need_a_valid_seal() {
    let _guard = serial_guard();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(targets::CACHE_FILE);
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        claystone::device::read_cache_file(&path).unwrap_err().to_string()
    };
    let [sealed, _, text] = &corpus::of("cache")[..] else { panic!("three files") };
    let error = read(sealed);
    assert!(path.exists() && error.contains("is not a valid choice"), "{error}");
    assert_eq!(read(text), error, "the same text without a seal");
    let mut broken = sealed.clone();
    broken[20] ^= 1;
    read(&broken);
    assert!(!path.exists(), "what is damaged is removed");
}

#[test]
fn errors_quote_only_the_start_of_long_inputs() {
    let _guard = serial_guard();
    let long = "x".repeat(1 << 20);
    let tensor = Tensor::ones([2, 2], Device::Cpu).unwrap();
    assert_refused(long.parse::<Config>(), "xxx...");
    assert_refused(format!("backend:{long}").parse::<Config>(), "caching, pool or direct");
    assert_refused(long.parse::<Device>(), "write cpu");
    assert_refused(long.parse::<claystone::DType>(), "f32");
    assert_refused(Tensor::einsum(&long, &[&tensor]), "dims");
    assert_refused(Tensor::einsum(&format!("{long}!"), &[&tensor]), "letter");
    assert_refused(Snapshot::from_json(&format!("{{\"segments\": \"{long}\"}}")), "JSON");
    assert_refused(Snapshot::from_json(&"[".repeat(1 << 20)), "JSON");
    let address = [&b"](](}("[..], &text("addr"), &text(&long), b"uee"].concat();
    assert_refused(Snapshot::from_pickle(&pickled_snapshot("device_traces", &address)), "pickle");
    assert_refused(CsvEvent::read_all(long.as_bytes()), "longer than any event");
    assert_refused(CsvEvent::read_all(format!("1,{},allocate,0,0,0", &long[..60_000]).as_bytes()), "23:59");
    let (taken, outcome) = peak(|| CsvEvent::read_all(",".repeat(8 << 20).as_bytes()));
    assert_refused(outcome, "longer");
    assert!(taken < 12 << 20, "{taken}");
    assert_refused(io::read_npy("/dev/zero", Device::Cpu), "npy");
    let header = format!("{{\"{long}\":{{\"dtype\":\"{long}\"}}}}");
    let file = [&(header.len() as u64).to_le_bytes()[..], header.as_bytes()].concat();
    assert_refused(read_bounded("x.safetensors", &file, |path| io::load(path, Device::Cpu)), "x.safetensors");
}
