//! Memory outside a device that holds the bytes of spilled blocks: host memory, pinned memory, or part of a file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::sync::{Mutex, MutexGuard, OnceLock};
use std::{mem, process, slice};

use super::staging::{self, PinnedBytes};
use super::{At, Driver, Memory, MemoryKind, SpilledBytes};
use crate::device::cpu::bulk::copy;
use crate::device::cpu::huge_pages::advise_huge;
use crate::device::{DeviceInfo, DeviceKind, lock};
use crate::storage::config::Spill;
use crate::{Device, Error, Result};

/// Size in bytes of the pieces in which bytes are copied to and from the file.
const PIECE_BYTES: usize = 4 << 20;
/// The unit of ranges of the file, in bytes.
const FILE_UNIT_BYTES: u64 = 4096;

/// The bytes of a spilled block.
pub(crate) enum HostCopy {
    Heap(Box<[u8]>),
    /// Pinned memory, and the number of bytes in use.
    Pinned(PinnedBytes, usize),
    File(FileRange),
}

/// Transfers bytes between pinned memory, which they fill if `written`, and a buffer, and waits.
fn transfer_pinned(pinned: &PinnedBytes, bytes: usize, (memory, offset): At<'_>, written: bool) -> Result<()> {
    let MemoryKind::OpenCl(buffer) = &memory.0 else {
        return Err(Error::invalid("spill", "pinned memory is for OpenCL buffers"));
    };
    pinned.transfer(bytes, (buffer, offset), written)
}

/// The error if the host has no room for a copy of `bytes` bytes.
fn no_room(bytes: usize, why: &str) -> Error {
    let detail = format!("the host has no room for a block that is being moved{why}");
    Error::OutOfMemory { device: Device::Cpu, requested: bytes, detail }
}

/// Allocates ordinary host memory.
///
/// # Errors
/// [`Error::OutOfMemory`] of the CPU device.
pub(in crate::storage) fn zeroed(bytes: usize) -> Result<Box<[u8]>> {
    let mut zeroed = bytemuck::allocation::try_zeroed_slice_box::<u8>(bytes).map_err(|()| no_room(bytes, ""))?;
    advise_huge(&mut zeroed);
    Ok(zeroed)
}

/// True if the device works in the host's memory.
pub(in crate::storage) fn shares_host_memory(device: Device) -> bool {
    let is_shared = |info: &DeviceInfo| info.kind == DeviceKind::Cpu || info.unified_memory;
    device.cached_info().is_ok_and(is_shared)
}

impl HostCopy {
    /// Allocates room for `bytes` bytes of a block in `from`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] of the CPU device if the host or the file system has no room.
    pub(in crate::storage) fn allocate(spill: Spill, driver: &dyn Driver, from: &Memory, bytes: usize) -> Result<Self> {
        if !from.has_contents() {
            return Ok(HostCopy::Heap(Box::default())); // the driver only counts the copies
        }
        if spill == Spill::Disk {
            return SpillFile::of_process()?.allocate(bytes).map(HostCopy::File);
        }
        if matches!(from.0, MemoryKind::OpenCl(_))
            && !shares_host_memory(driver.device())
            && let Ok(Some(pinned)) = staging::alloc_pinned(driver.device(), bytes)
        {
            return Ok(HostCopy::Pinned(pinned, bytes));
        }
        zeroed(bytes).map(HostCopy::Heap)
    }

    /// Fills the copy from the device, and waits.
    ///
    /// # Safety
    /// The conditions of [`Driver::read`] hold for `from` and as many bytes as the copy has. All work on them is done.
    pub(in crate::storage) unsafe fn fill(&mut self, driver: &dyn Driver, from: At<'_>) -> Result<()> {
        match self {
            // SAFETY: the caller promises what `read` requires.
            HostCopy::Heap(bytes) => unsafe { driver.read(from, bytes) },
            HostCopy::Pinned(pinned, bytes) => transfer_pinned(pinned, *bytes, from, true),
            HostCopy::File(range) => range.for_each_piece(|at, piece| {
                // SAFETY: as above.
                unsafe { driver.read((from.0, from.1 + at), piece) }?;
                range.write(at, piece)
            }),
        }
    }
}

impl SpilledBytes for HostCopy {
    fn is_simulated(&self) -> bool {
        matches!(self, HostCopy::Heap(bytes) if bytes.is_empty())
    }

    fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        match self {
            _ if self.is_simulated() => to.fill(0),
            HostCopy::Heap(bytes) => copy(to, &bytes[at..][..to.len()]),
            HostCopy::Pinned(pinned, bytes) => {
                // SAFETY: the pinned memory has this many initialised bytes. The only transfer that writes to them is over: see `fill`.
                copy(to, &unsafe { slice::from_raw_parts(pinned.start().as_ptr(), *bytes) }[at..][..to.len()]);
            }
            HostCopy::File(range) => range.read(at, to)?,
        }
        Ok(())
    }

    unsafe fn write_to(&self, driver: &dyn Driver, to: At<'_>) -> Result<()> {
        match self {
            // SAFETY: the caller promises what `write` requires.
            HostCopy::Heap(bytes) => unsafe { driver.write(bytes, to) },
            HostCopy::Pinned(pinned, bytes) => transfer_pinned(pinned, *bytes, to, false),
            HostCopy::File(range) => range.for_each_piece(|at, piece| {
                range.read(at, piece)?;
                // SAFETY: as above.
                unsafe { driver.write(piece, (to.0, to.1 + at)) }
            }),
        }
    }
}

/// The file of this process for spilled blocks, and the process's number. The file has no name, so the system removes it when the process
/// ends. A forked process must not use the file: the process that made it goes on freeing and reusing the ranges.
pub(in crate::storage) struct SpillFile(Mutex<Ranges>, u32);

/// The ranges of a file that are in use.
struct Ranges {
    file: File,
    /// The end of each range in use by its start, in bytes.
    used: BTreeMap<u64, u64>,
    /// The buffer of the last transfer, for the next one.
    buffer: Box<[u8]>,
}

impl SpillFile {
    /// Returns the file, which the first call creates in the directory `CLAYSTONE_SPILL_DIR`. If that call fails, so do all later ones.
    pub(in crate::storage) fn of_process() -> Result<&'static SpillFile> {
        static FILE: OnceLock<io::Result<SpillFile>> = OnceLock::new();
        let create = || {
            let directory = std::env::var_os("CLAYSTONE_SPILL_DIR").filter(|name| !name.is_empty());
            let file = tempfile::tempfile_in(directory.map_or_else(std::env::temp_dir, Into::into))?;
            Ok(SpillFile::new(file, process::id()))
        };
        FILE.get_or_init(create).as_ref().map_err(|e| no_room(0, &format!(": CLAYSTONE_SPILL_DIR: {e}")))
    }

    fn new(file: File, process: u32) -> SpillFile {
        SpillFile(Mutex::new(Ranges { file, used: BTreeMap::new(), buffer: Box::default() }), process)
    }

    /// Locks the file, unless this process was forked from the one that made the file.
    fn lock(&self) -> io::Result<MutexGuard<'_, Ranges>> {
        let is_own = process::id() == self.1;
        is_own
            .then(|| lock(&self.0))
            .ok_or_else(|| io::Error::other("it belongs to the process that this one was forked from"))
    }

    /// Takes the first free range with room for `bytes` bytes.
    fn allocate(&'static self, bytes: usize) -> Result<FileRange> {
        let used = &mut self.lock().map_err(|e| no_room(bytes, &format!(" to the file: {e}")))?.used;
        let (length, mut start) = ((bytes as u64).next_multiple_of(FILE_UNIT_BYTES), 0);
        for (&next, &end) in &*used {
            if next - start >= length {
                break;
            }
            start = end;
        }
        used.insert(start, start + length);
        Ok(FileRange { file: self, start, bytes })
    }
}

/// A range of the file, which is free again when the value is dropped.
pub(crate) struct FileRange {
    file: &'static SpillFile,
    start: u64,
    bytes: usize,
}

impl FileRange {
    /// Calls `f` with each offset and a buffer for the piece there.
    fn for_each_piece(&self, mut f: impl FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
        let mut buffer = self.file.lock().map(|mut locked| mem::take(&mut locked.buffer)).unwrap_or_default();
        if buffer.is_empty() {
            buffer = zeroed(PIECE_BYTES)?;
        }
        let mut pieces = (0..self.bytes).step_by(PIECE_BYTES);
        let result = pieces.try_for_each(|at| f(at, &mut buffer[..PIECE_BYTES.min(self.bytes - at)]));
        if let Ok(mut locked) = self.file.lock() {
            locked.buffer = buffer;
        }
        result
    }

    /// Calls `f` with the file at offset `at` of the range.
    fn with_file(&self, at: usize, f: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
        let file = &mut self.file.lock()?.file;
        file.seek(SeekFrom::Start(self.start + at as u64)).and_then(|_| f(file))
    }

    fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        self.with_file(at, |file| file.write_all(from)).map_err(|e| no_room(self.bytes, &format!(" to the file: {e}")))
    }

    fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        let unreadable = |e| Error::invalid("spill", format!("the file of spilled tensors cannot be read: {e}"));
        self.with_file(at, |file| file.read_exact(to)).map_err(unreadable)
    }
}

impl Drop for FileRange {
    fn drop(&mut self) {
        let Ok(mut locked) = self.file.lock() else { return };
        locked.used.remove(&self.start);
    }
}

#[cfg(test)]
mod tests {
    use super::super::opencl::OpenCl;
    use super::*;
    use crate::device::opencl;

    #[test]
    fn ranges_of_the_file_do_not_overlap_and_are_reused() {
        let file: &'static SpillFile =
            Box::leak(Box::new(SpillFile::new(tempfile::tempfile().unwrap(), process::id())));
        let (mut ranges, mut state) = (Vec::<FileRange>::new(), 7u64);
        for _ in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let random = (state >> 33) as usize;
            if ranges.is_empty() || ranges.len() < 40 && !random.is_multiple_of(3) {
                ranges.push(file.allocate(1 + random % 40_000).unwrap());
            } else {
                ranges.swap_remove(random % ranges.len());
            }
            let used: Vec<(u64, u64)> = lock(&file.0).used.iter().map(|(&start, &end)| (start, end)).collect();
            assert!(used.len() == ranges.len() && used.is_sorted_by(|a, b| a.1 <= b.0), "{used:?}");
            assert!(used.last().is_none_or(|last| last.1 <= 80 * 45_056), "freed ranges are not reused");
        }
        drop(ranges);
        let locked = lock(&file.0);
        assert!(locked.used.is_empty());
    }

    #[test]
    fn every_kind_of_copy_holds_the_bytes_of_a_block() {
        const BYTES: usize = 3 << 20;
        for index in 0..opencl::count() {
            let driver = OpenCl::open(index).unwrap();
            let [from, to] = [0; 2].map(|_| driver.create(BYTES).unwrap());
            let bytes: Vec<u8> = (0..BYTES).map(|i| (i * 7 + i / 999) as u8).collect();
            let pinned = staging::alloc_pinned(driver.device(), BYTES).unwrap().unwrap();
            let kinds = vec![
                HostCopy::Pinned(pinned, BYTES),
                HostCopy::allocate(Spill::Host, &driver, &from, BYTES).unwrap(),
                HostCopy::allocate(Spill::Disk, &driver, &from, BYTES).unwrap(),
            ];
            for mut copy in kinds {
                let (mut read, mut back) = (vec![0; BYTES], vec![0; BYTES]);
                // SAFETY: no other code uses the memory.
                unsafe {
                    driver.write(&bytes, (&from, 0)).unwrap();
                    copy.fill(&driver, (&from, 0)).unwrap();
                    driver.write(&read, (&from, 0)).unwrap();
                    copy.write_to(&driver, (&to, 0)).unwrap();
                    driver.read((&to, 0), &mut back).unwrap();
                }
                assert!(back == bytes);
                copy.read(0, &mut read).unwrap();
                assert!(read == bytes);
                let mut part = [0; 999];
                copy.read(12_345, &mut part).unwrap();
                assert_eq!(part, bytes[12_345..][..999]);
            }
        }
    }

    #[test]
    fn a_forked_process_leaves_the_file_alone() {
        let file = SpillFile::new(tempfile::tempfile().unwrap(), process::id() + 1);
        lock(&file.0).used.insert(0, 4096);
        let file: &'static SpillFile = Box::leak(Box::new(file));
        assert!(file.allocate(1).is_err());
        let range = FileRange { file, start: 0, bytes: 1 };
        assert!(range.write(0, &[1]).is_err() && range.read(0, &mut [0]).is_err());
        drop(range);
        assert_eq!(lock(&file.0).used.len(), 1);
    }

    #[test]
    fn the_file_holds_what_was_written() {
        let file = SpillFile::of_process().unwrap();
        let ranges: Vec<FileRange> = [5_000_000, 1, 4096].map(|bytes| file.allocate(bytes).unwrap()).into();
        for (range, byte) in ranges.iter().zip(1..) {
            range
                .for_each_piece(|at, piece| {
                    piece.fill(byte);
                    range.write(at, piece)
                })
                .unwrap();
        }
        for (range, byte) in ranges.iter().zip(1..) {
            let mut bytes = vec![0; range.bytes];
            range.read(0, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&b| b == byte));
        }
    }
}
