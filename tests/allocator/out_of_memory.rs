//! Finding what held the memory: snapshots when memory runs out, peaks of scopes, and histories that are larger than the memory.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use claystone::storage::{
    CachingAllocator, DirectAllocator, PeakScope, PoolAllocator, Snapshot, TraceAction, driver, peak, set_allocator,
};
use claystone::{DType, Device, Error, Result, Tensor};

use crate::common::{each_device, in_child_with, in_own_process};

const MIB: usize = 1 << 20;

fn bytes(n: usize, device: Device) -> Result<Tensor> {
    Tensor::zeros(&[n], (DType::U8, device))
}

/// Checks that the snapshot was taken when `missing` bytes could not be allocated, with a stack of this program for each large block.
fn check_snapshot(path: &Path, missing: usize) {
    let snapshot = Snapshot::load(path).unwrap();
    snapshot.check().unwrap();
    let oom = snapshot.device_traces.iter().flatten().rfind(|entry| entry.action == TraceAction::Oom).unwrap();
    assert_eq!(oom.size, missing as u64);
    assert!(oom.frames.iter().any(|frame| frame.filename.ends_with("out_of_memory.rs")), "{:?}", oom.frames);
    let held = snapshot.live_memory();
    assert_eq!(held[0].bytes, 5 * MIB as u64);
    assert!(held[0].frames[0].filename.ends_with("out_of_memory.rs"), "{:?}", held[0].frames);
}

#[test]
fn snapshots_are_saved_before_the_error_is_returned() {
    if !in_own_process("out_of_memory::snapshots_are_saved_before_the_error_is_returned") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    each_device(|device| {
        let path = folder.path().join("memory.pickle");
        let registration = device.snapshot_on_oom(&path).unwrap();
        let held = bytes(5 * MIB, device).unwrap();
        device.set_memory_limit(8 * MIB as u64).unwrap();
        let missing = bytes(6 * MIB, device).unwrap_err();
        assert!(matches!(missing, Error::OutOfMemory { .. }), "{missing}");
        check_snapshot(&path, 6 * MIB);
        bytes(7 * MIB, device).unwrap_err();
        check_snapshot(&path, 7 * MIB); // the later failure replaces the file
        drop(registration);
        fs::remove_file(&path).unwrap();
        bytes(6 * MIB, device).unwrap_err();
        assert!(!path.exists(), "{device}: no longer registered");
        device.set_memory_limit(u64::MAX).unwrap();
        drop(held);
        assert!(device.snapshot_on_oom(folder.path().join("memory.txt")).is_err());
    });
}

#[test]
fn a_variable_saves_snapshots_of_every_device() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("out-of-memory.json");
    let test = "out_of_memory::a_variable_saves_snapshots_of_every_device";
    if !in_child_with(test, "CLAYSTONE_SNAPSHOT_ON_OOM", path.to_str().unwrap()) {
        return;
    }
    each_device(|device| {
        _ = fs::remove_file(&path);
        let held = bytes(5 * MIB, device).unwrap();
        device.set_memory_limit(8 * MIB as u64).unwrap();
        bytes(6 * MIB, device).unwrap_err();
        check_snapshot(&path, 6 * MIB);
        device.set_memory_limit(u64::MAX).unwrap();
        drop(held);
    });
}

/// A snapshot that cannot be saved changes nothing: the error is the same, and memory can be allocated as before.
#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_leaves_the_error_as_it_was() {
    if !in_own_process("out_of_memory::a_full_disk_leaves_the_error_as_it_was") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let full = folder.path().join("full.pickle");
    std::os::unix::fs::symlink("/dev/full", &full).unwrap();
    File::create(folder.path().join("file")).unwrap();
    let missing = folder.path().join("no folder").join("memory.pickle");
    let not_a_folder = folder.path().join("file").join("memory.json");
    each_device(|device| {
        device.record_memory_history(Default::default()).unwrap();
        let _held = bytes(5 * MIB, device).unwrap();
        device.set_memory_limit(8 * MIB as u64).unwrap();
        let without = bytes(6 * MIB, device).unwrap_err().to_string();
        for path in [&full, &missing, &not_a_folder] {
            let _registration = device.snapshot_on_oom(path).unwrap();
            assert_eq!(bytes(6 * MIB, device).unwrap_err().to_string(), without, "{device}: {}", path.display());
            assert_eq!(bytes(2 * MIB, device).unwrap().to_vec::<u8>().unwrap(), vec![0; 2 * MIB]);
        }
        device.set_memory_limit(u64::MAX).unwrap();
    });
    let files = fs::read_dir(folder.path()).unwrap().count();
    assert_eq!(files, 2, "nothing is left behind");
}

/// Allocators of each kind measure scopes, which nest, end by a panic, and leave the device's own peaks as they were.
#[test]
fn peaks_of_scopes_nest() {
    if !in_own_process("out_of_memory::peaks_of_scopes_nest") {
        return;
    }
    each_device(|device| {
        let driver = || driver(device).unwrap();
        let config = || "decay_ms:0".parse().unwrap();
        let allocators: [std::sync::Arc<dyn claystone::storage::Allocator>; 3] = [
            std::sync::Arc::new(CachingAllocator::new(driver(), config()).unwrap()),
            std::sync::Arc::new(PoolAllocator::new(driver(), config()).unwrap()),
            std::sync::Arc::new(DirectAllocator::new(driver(), config()).unwrap()),
        ];
        for allocator in allocators {
            println!("{allocator:?}");
            set_allocator(device, allocator).unwrap();
            let requested = || device.memory_stats().unwrap().requested_bytes;
            drop(bytes(9 * MIB, device).unwrap());
            let held = bytes(MIB, device).unwrap();
            let (inner, outer) = peak(device, || {
                drop(bytes(4 * MIB, device).unwrap());
                let ((), inner) = peak(device, || drop(bytes(2 * MIB, device).unwrap())).unwrap();
                let panics = || peak(device, || panic!("{:?}", bytes(3 * MIB, device).map(drop)));
                assert!(catch_unwind(AssertUnwindSafe(panics)).is_err());
                inner
            })
            .unwrap();
            assert_eq!((inner.requested, outer.requested), (3 * MIB as u64, 5 * MIB as u64), "{device}");
            assert!(inner.requested <= inner.allocated && inner.allocated <= inner.reserved, "{inner:?}");
            assert_eq!((requested().peak, requested().current), (9 * MIB as u64, MIB as u64), "{device}");

            let scope = PeakScope::begin(device).unwrap();
            assert_eq!(scope.peak().unwrap().requested, MIB as u64);
            drop(bytes(19 * MIB, device).unwrap());
            assert_eq!(scope.peak().unwrap().requested, 20 * MIB as u64);
            drop(scope);
            assert_eq!(requested().peak, 20 * MIB as u64, "a higher peak of a scope is the device's");
            drop(held);
        }
    });
}

/// Writes a pickle as Python does, with events whose stacks are lists of shared frames: `events` pairs of allocation and free, of which
/// every 1000th block stays in use for 100 pairs.
fn write_long_history(path: &Path, events: u64) {
    let text = |text: &str| [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
    let int = |int: u64| [&[0x8a, 8], &int.to_le_bytes()[..]].concat();
    let mut out = BufWriter::new(File::create(path).unwrap());
    let mut put = |parts: &[&[u8]]| parts.iter().for_each(|part| out.write_all(part).unwrap());
    put(&[b"\x80\x04}\x94(", &text("frames"), b"]\x94("]); // a key that is not known, with the frames: memo keys 2 to 31
    for line in 0..30_u8 {
        put(&[
            b"}\x94(",
            &text("filename"),
            &text("a.py"),
            &text("line"),
            &[b'K', line],
            &text("name"),
            &text("f"),
            b"u",
        ]);
    }
    put(&[b"e", &text("segments"), b"]\x94", &text("device_traces"), b"]\x94]\x94"]);
    let event = |action: &str, addr: u64, size: u64, time: u64| {
        let mut event = [&b"}\x94("[..], &text("action"), &text(action), &text("frames"), b"]\x94("].concat();
        (0..30).for_each(|frame| event.extend([b'h', 2 + ((frame + addr) % 30) as u8]));
        let pool = [&b"e"[..], &text("pool_id"), b"K\0K\0\x86\x94"].concat();
        let rest =
            [text("addr"), int(addr << 12), text("size"), int(size), text("time_us"), int(time), vec![b'u']].concat();
        [event, pool, rest].concat()
    };
    for first in (0..events).step_by(400) {
        put(&[b"("]);
        for i in first..first + 400 {
            let size = 100 + i % 100;
            put(&[&event("alloc", i, size, 2 * i)]);
            match i % 1000 {
                0 => {}
                100 => put(&[
                    &event("free_completed", i - 100, 100, 2 * i + 1),
                    &event("free_completed", i, size, 2 * i + 1),
                ]),
                _ => put(&[&event("free_completed", i, size, 2 * i + 1)]),
            }
        }
        put(&[b"e"]);
    }
    put(&[b"au."]);
    out.flush().unwrap();
}

/// Returns the most resident memory of this process so far, in MiB.
fn peak_resident() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim_end_matches("kB").trim().parse::<u64>().ok()? >> 10)
}

#[test]
fn long_histories_take_little_memory() {
    if !in_own_process("out_of_memory::long_histories_take_little_memory") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("long.pickle");
    write_long_history(&path, 400_000);
    let length = path.metadata().unwrap().len() >> 20;
    assert!(length > 100, "{length} MiB");
    let before = peak_resident();
    let snapshot = Snapshot::load_in_use(&path).unwrap();
    if let (Some(before), Some(after)) = (before, peak_resident()) {
        assert!(after - before < 24, "{} MiB for a file of {length} MiB", after - before);
    }
    let [peak] = &snapshot.peak_memory()[..] else { panic!() };
    assert_eq!((peak.bytes, peak.sites.len(), peak.sites[0].frames.len()), (299, 2, 30));
    assert!(snapshot.to_string().contains("of 800000 events of device 0 kept"), "{snapshot}");
}
