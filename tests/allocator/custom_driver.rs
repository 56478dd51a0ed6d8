//! A user-defined driver that takes segments from a mapped file.
//!
//! Random allocations, frees and writes run on allocators over this driver, and contents are checked. CPU tensors are stored in
//! such a file too.

use std::collections::BTreeMap;
use std::fs::File;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use claystone::device::StreamId;
use claystone::storage::{self, At, Block, Config, Driver, Failure, Marker, Memory, build_allocator};
use claystone::{Device, Error, Result, Tensor};
use memmap2::{MmapOptions, MmapRaw};
use proptest::prelude::*;

use crate::common;

/// Page size in bytes.
const PAGE_BYTES: usize = 4096;

/// A mapped file. Each segment occupies a range of the file.
#[derive(Debug)]
struct MappedFile {
    map: MmapRaw,
    /// The ranges in use: start and end in bytes.
    taken: Mutex<BTreeMap<usize, usize>>,
}

/// The range of a segment, which becomes free on drop.
struct Range {
    file: Arc<MappedFile>,
    start: usize,
}

impl Drop for Range {
    fn drop(&mut self) {
        self.file.taken.lock().unwrap().remove(&self.start);
    }
}

#[derive(Debug, Clone)]
struct FileDriver(Arc<MappedFile>);

impl FileDriver {
    fn new(bytes: usize) -> FileDriver {
        let file: File = tempfile::tempfile().unwrap();
        file.set_len(bytes as u64).unwrap();
        let map = MmapOptions::new().len(bytes).map_raw(&file).unwrap();
        FileDriver(Arc::new(MappedFile { map, taken: Mutex::default() }))
    }

    fn bytes_taken(&self) -> u64 {
        self.0.taken.lock().unwrap().iter().map(|(start, end)| (end - start) as u64).sum()
    }

    /// Returns a pointer to `bytes` bytes at an offset of a segment.
    fn at(&self, (memory, offset): At<'_>, bytes: usize) -> Result<*mut u8> {
        let outside =
            || Error::Invalid { op: "file", reason: format!("{bytes} bytes at {offset} are not in a segment") };
        let range = memory.get::<Range>().ok_or_else(outside)?;
        let end = self.0.taken.lock().unwrap().get(&range.start).copied().ok_or_else(outside)?;
        if range.start + offset + bytes > end {
            return Err(outside());
        }
        Ok(self.0.map.as_mut_ptr().wrapping_add(range.start + offset))
    }
}

// SAFETY: segments are page-aligned ranges of the file that do not overlap, and the file stays mapped while a segment exists. Each
// call completes its work before it returns.
unsafe impl Driver for FileDriver {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn capacity(&self) -> u64 {
        self.0.map.len() as u64
    }

    fn largest_segment(&self) -> usize {
        self.0.map.len()
    }

    /// Takes the first gap between ranges that is large enough.
    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        let mut taken = self.0.taken.lock().unwrap();
        let mut start = 0;
        for (&next, &end) in taken.iter() {
            if start + bytes <= next {
                break;
            }
            start = end.next_multiple_of(PAGE_BYTES);
        }
        if start + bytes > self.0.map.len() {
            return Err(Failure::HostMemory);
        }
        taken.insert(start, start + bytes);
        drop(taken);
        let first = NonNull::new(self.0.map.as_mut_ptr().wrapping_add(start)).unwrap();
        let range = Range { file: Arc::clone(&self.0), start };
        // SAFETY: the range is inside the file, which stays mapped while the range exists, and no other segment contains these
        // bytes.
        unsafe { Memory::of_host(first, bytes, range) }.map_err(Failure::Other)
    }

    unsafe fn copy(&self, _: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        let (from, to) = (self.at(from, bytes)?, self.at(to, bytes)?);
        // SAFETY: both ranges are inside segments, and the caller guarantees access.
        unsafe { from.copy_to(to, bytes) };
        Ok(())
    }

    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        let from = self.at(from, to.len())?;
        // SAFETY: the range is inside a segment, and the caller guarantees access.
        unsafe { from.copy_to(to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        let to = self.at(to, from.len())?;
        // SAFETY: the range is inside a segment, and the caller guarantees access.
        unsafe { to.copy_from(from.as_ptr(), from.len()) };
        Ok(())
    }
}

#[derive(Debug, Clone, Copy)]
enum Action {
    Allocate(usize),
    Free(usize),
    EmptyCache,
    Trim(u64),
    Compact,
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let size = prop_oneof![1_usize..3000, 3000_usize..300_000, 300_000_usize..3_000_000];
    let action = prop_oneof![
        12 => size.prop_map(Action::Allocate),
        10 => any::<usize>().prop_map(Action::Free),
        1 => Just(Action::EmptyCache),
        1 => (0_u64..16 << 20).prop_map(Action::Trim),
        1 => Just(Action::Compact),
    ];
    prop::collection::vec(action, 1..300)
}

fn fill(driver: &FileDriver, block: &Block, tag: u8) {
    let place = block.location();
    // SAFETY: only this test uses the block.
    unsafe { driver.write(&vec![tag; block.requested()], (place.segment().memory(), place.offset())) }.unwrap();
}

fn check(driver: &FileDriver, block: &Block, tag: u8) {
    let place = block.location();
    let mut found = vec![0; block.requested()];
    // SAFETY: only this test uses the block.
    unsafe { driver.read((place.segment().memory(), place.offset()), &mut found) }.unwrap();
    assert!(found.iter().all(|&byte| byte == tag), "{block:?} has lost its {tag}");
}

/// Runs the actions on an allocator, and checks that live blocks keep their contents and that the statistics equal the bytes taken
/// from the file.
fn check_random_actions(config: &str, actions: &[Action]) {
    let driver = FileDriver::new(16 << 20);
    let config: Config = config.parse().unwrap();
    let guarded = config.guard_bytes; // guard bytes count as requested bytes
    let allocator = build_allocator(Arc::new(driver.clone()), config).unwrap();
    let mut live: Vec<(Block, u8)> = Vec::new();
    for (i, &action) in actions.iter().enumerate() {
        let held = allocator.stats().reserved_bytes.current;
        match action {
            Action::Allocate(bytes) => match allocator.allocate(bytes, StreamId::DEFAULT) {
                Ok(block) => {
                    assert!(block.requested() == bytes && block.size() >= bytes);
                    fill(&driver, &block, i as u8);
                    live.push((block, i as u8));
                }
                Err(Error::OutOfMemory { requested, .. }) => assert_eq!(requested, bytes),
                Err(other) => panic!("{other}"),
            },
            Action::Free(at) if !live.is_empty() => {
                let (block, tag) = live.swap_remove(at % live.len());
                check(&driver, &block, tag);
                allocator.deallocate(block);
            }
            Action::Free(_) => {}
            Action::EmptyCache => allocator.empty_cache().unwrap(),
            Action::Trim(keep) => {
                let freed = allocator.trim(keep).unwrap();
                assert_eq!(allocator.stats().reserved_bytes.current, held - freed);
            }
            Action::Compact => _ = allocator.compact(u64::MAX).unwrap(),
        }
        let stats = allocator.stats();
        assert_eq!(stats.reserved_bytes.current, driver.bytes_taken());
        assert_eq!(stats.allocation.current, live.len() as u64);
        let requested: u64 = live.iter().map(|(block, _)| block.requested() as u64).sum();
        if guarded {
            assert!(stats.requested_bytes.current >= requested);
        } else {
            assert_eq!(stats.requested_bytes.current, requested);
        }
        assert!(stats.allocated_bytes.current <= stats.reserved_bytes.current);
    }
    for (block, tag) in live {
        check(&driver, &block, tag);
        allocator.deallocate(block);
    }
    allocator.empty_cache().unwrap();
    assert_eq!((driver.bytes_taken(), allocator.stats().allocated_bytes.current), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn blocks_keep_their_contents(actions in actions(), config in prop_oneof![
        Just("backend:caching"),
        Just("backend:caching,segments:pytorch,garbage_collection_threshold:0.6"),
        Just("backend:caching,compaction:False,max_split_size_mb:20"),
        Just("backend:caching,guard_bytes:True"),
        Just("backend:pool"),
        Just("backend:direct"),
    ]) {
        check_random_actions(config, &actions);
    }
}

#[test]
fn memory_knows_its_owner_and_refuses_unaligned_addresses() {
    let driver = FileDriver::new(1 << 20);
    let memory = driver.create(1000).unwrap();
    assert_eq!(memory.get::<Range>().map(|range| range.start), Some(0));
    assert!(memory.get::<u32>().is_none());
    drop(memory);
    assert_eq!(driver.bytes_taken(), 0);
    let odd = NonNull::new(driver.0.map.as_mut_ptr().wrapping_add(64)).unwrap();
    // SAFETY: the call refuses the misaligned address, so the memory is not used.
    let error = unsafe { Memory::of_host(odd, 64, ()) }.unwrap_err().to_string();
    assert!(error.contains("512"), "{error}");
    assert_eq!(Marker::new(7_u32).get::<u32>(), Some(&7));
    assert!(Marker::done().get::<u32>().is_none());
}

/// Runs in its own process, because each device has one allocator per process.
#[test]
fn cpu_tensors_are_stored_in_the_file() {
    if !common::in_own_process("custom_driver::cpu_tensors_are_stored_in_the_file") {
        return;
    }
    let driver = FileDriver::new(8 << 20);
    let before = Tensor::ones(1000, Device::Cpu).unwrap();
    storage::set_allocator(Device::Cpu, build_allocator(Arc::new(driver.clone()), Config::default()).unwrap()).unwrap();
    let x = Tensor::arange(0.0, 10_000.0, 1.0, Device::Cpu).unwrap();
    assert!(driver.bytes_taken() >= 40_000);
    let y = x.add(&x).unwrap().narrow(0, 5000, 3).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [10_000.0, 10_002.0, 10_004.0]);
    let file = driver.0.map.as_ptr();
    // SAFETY: the file is mapped, and no thread writes to it meanwhile.
    let bytes = unsafe { std::slice::from_raw_parts(file, driver.0.map.len()) };
    assert!(
        bytes.windows(8).any(|eight| eight == bytemuck::bytes_of(&[9998.0_f32, 9999.0])),
        "the file has the values"
    );
    // An allocation fails when the file is full, although the machine has more memory. All values are intact.
    assert!(matches!(Tensor::zeros(4 << 20, Device::Cpu), Err(Error::OutOfMemory { .. })));
    assert_eq!(x.sum((), false).unwrap().item::<f32>().unwrap(), 49_995_000.0);
    assert_eq!(before.sum((), false).unwrap().item::<f32>().unwrap(), 1000.0);
    drop((x, y));
    Device::Cpu.empty_cache().unwrap();
    assert_eq!(driver.bytes_taken(), 0);
}
