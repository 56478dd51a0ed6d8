//! Memory outside a device that holds the bytes of spilled blocks: host memory, pinned memory, or part of a file.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::slice;
use std::sync::{Mutex, OnceLock};

use super::staging::{self, PinnedBytes};
use super::{At, Driver, Memory, MemoryKind};
use crate::device::cpu::bulk::copy;
use crate::device::{DeviceKind, lock};
use crate::storage::config::Spill;
use crate::{Device, Error, Result};

/// Size in bytes of the pieces in which bytes are copied to and from the file.
const PIECE_BYTES: usize = 4 << 20;
/// The unit of ranges of the file, in bytes.
const FILE_UNIT_BYTES: u64 = 4096;

/// The bytes of a spilled block.
pub(crate) struct HostCopy(Place);

enum Place {
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
    pinned.enqueue(pinned.start(), bytes, (buffer, offset), written)?;
    pinned.wait_and_check(true)
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
    bytemuck::allocation::try_zeroed_slice_box::<u8>(bytes).map_err(|()| no_room(bytes, ""))
}

impl HostCopy {
    /// Allocates room for `bytes` bytes of a block in `from`.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] of the CPU device if the host or the file system has no room.
    pub(in crate::storage) fn allocate(spill: Spill, driver: &dyn Driver, from: &Memory, bytes: usize) -> Result<Self> {
        if !from.has_contents() {
            return Ok(HostCopy(Place::Heap(Box::default()))); // the driver only counts the copies
        }
        if spill == Spill::Disk {
            return SpillFile::of_process()?.allocate(bytes).map(|range| HostCopy(Place::File(range)));
        }
        if matches!(from.0, MemoryKind::OpenCl(_))
            && let Ok(info) = driver.device().cached_info()
            && info.kind != DeviceKind::Cpu
            && !info.unified_memory
            && let Ok(Some(pinned)) = staging::alloc_pinned(driver.device(), bytes)
        {
            return Ok(HostCopy(Place::Pinned(pinned, bytes)));
        }
        zeroed(bytes).map(HostCopy::from_heap)
    }

    pub(in crate::storage) fn from_heap(bytes: Box<[u8]>) -> HostCopy {
        HostCopy(Place::Heap(bytes))
    }

    pub(in crate::storage) fn bytes(&self) -> usize {
        match &self.0 {
            Place::Heap(bytes) => bytes.len(),
            Place::Pinned(_, bytes) => *bytes,
            Place::File(range) => range.bytes,
        }
    }

    /// Fills the copy from the device, and waits.
    ///
    /// # Safety
    /// The conditions of [`Driver::read`] hold for `from` and as many bytes as the copy has. All work on them is done.
    pub(in crate::storage) unsafe fn fill(&mut self, driver: &dyn Driver, from: At<'_>) -> Result<()> {
        match &mut self.0 {
            // SAFETY: the caller promises what `read` requires.
            Place::Heap(bytes) => unsafe { driver.read(from, bytes) },
            Place::Pinned(pinned, bytes) => transfer_pinned(pinned, *bytes, from, true),
            Place::File(range) => range.for_each_piece(|at, piece| {
                // SAFETY: as above.
                unsafe { driver.read((from.0, from.1 + at), piece) }?;
                range.write(at, piece).map_err(|e| no_room(range.bytes, &format!(" to the file: {e}")))
            }),
        }
    }

    /// Writes the copy to the device, and waits.
    ///
    /// # Safety
    /// The conditions of [`Driver::write`] hold for `to` and as many bytes as the copy has. All work on them is done.
    pub(in crate::storage) unsafe fn write_to(&self, driver: &dyn Driver, to: At<'_>) -> Result<()> {
        match &self.0 {
            // SAFETY: the caller promises what `write` requires.
            Place::Heap(bytes) => unsafe { driver.write(bytes, to) },
            Place::Pinned(pinned, bytes) => transfer_pinned(pinned, *bytes, to, false),
            Place::File(range) => range.for_each_piece(|at, piece| {
                range.read(at, piece)?;
                // SAFETY: as above.
                unsafe { driver.write(piece, (to.0, to.1 + at)) }
            }),
        }
    }

    /// Copies the bytes from `at` on to the slice.
    pub(in crate::storage) fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        match &self.0 {
            Place::Heap(bytes) if bytes.is_empty() => to.fill(0), // of memory without contents
            Place::Heap(bytes) => copy(to, &bytes[at..][..to.len()]),
            Place::Pinned(pinned, bytes) => {
                pinned.wait_and_check(false)?;
                // SAFETY: the pinned memory has this many initialised bytes. No transfer writes to them, as was checked just now, and
                // none begins before the block's lock, which the caller holds for reading, is released.
                copy(to, &unsafe { slice::from_raw_parts(pinned.start().as_ptr(), *bytes) }[at..][..to.len()]);
            }
            Place::File(range) => range.read(at, to)?,
        }
        Ok(())
    }
}

/// The file of this process for spilled blocks. The file has no name, so the system removes it when the process ends.
struct SpillFile {
    file: File,
    ranges: Mutex<FileRanges>,
}

/// The used length of the file, and the length of each free range before the end by its start, none adjacent. In bytes.
#[derive(Default)]
struct FileRanges {
    end: u64,
    free: BTreeMap<u64, u64>,
}

impl FileRanges {
    /// Takes `length` bytes, and returns their start.
    fn take(&mut self, length: u64) -> u64 {
        let fits = self.free.iter().map(|(&start, &free)| (start, free)).find(|&(_, free)| free >= length);
        let Some((start, free)) = fits else {
            self.end += length;
            return self.end - length;
        };
        self.free.remove(&start);
        if free > length {
            self.free.insert(start + length, free - length);
        }
        start
    }

    /// Gives back a range that [`take`](Self::take) returned.
    fn give_back(&mut self, mut start: u64, mut length: u64) {
        length += self.free.remove(&(start + length)).unwrap_or(0);
        let before = self.free.range(..start).next_back().map(|(&before, &free)| (before, free));
        if let Some((before, free)) = before.filter(|(before, free)| before + free == start) {
            self.free.remove(&before);
            (start, length) = (before, free + length);
        }
        match start + length == self.end {
            true => self.end = start,
            false => _ = self.free.insert(start, length),
        }
    }
}

impl SpillFile {
    /// Returns the file, which the first call creates in the directory `CLAYSTONE_SPILL_DIR`.
    fn of_process() -> Result<&'static SpillFile> {
        static FILE: OnceLock<io::Result<SpillFile>> = OnceLock::new();
        let create = || {
            let directory = std::env::var_os("CLAYSTONE_SPILL_DIR").filter(|name| !name.is_empty());
            let file = tempfile::tempfile_in(directory.map_or_else(std::env::temp_dir, Into::into))?;
            Ok(SpillFile { file, ranges: Mutex::default() })
        };
        FILE.get_or_init(create).as_ref().map_err(|e| no_room(0, &format!(": CLAYSTONE_SPILL_DIR: {e}")))
    }

    fn allocate(&'static self, bytes: usize) -> Result<FileRange> {
        let start = lock(&self.ranges).take((bytes as u64).next_multiple_of(FILE_UNIT_BYTES));
        Ok(FileRange { file: self, start, bytes })
    }
}

/// A range of the file, which is free again when the value is dropped.
struct FileRange {
    file: &'static SpillFile,
    start: u64,
    bytes: usize,
}

impl FileRange {
    /// Calls `f` with each offset and a buffer for the piece there.
    fn for_each_piece(&self, mut f: impl FnMut(usize, &mut [u8]) -> Result<()>) -> Result<()> {
        let mut buffer = vec![0; PIECE_BYTES.min(self.bytes)];
        (0..self.bytes).step_by(PIECE_BYTES).try_for_each(|at| f(at, &mut buffer[..PIECE_BYTES.min(self.bytes - at)]))
    }

    fn write(&self, at: usize, from: &[u8]) -> io::Result<()> {
        #[cfg(unix)]
        return std::os::unix::fs::FileExt::write_all_at(&self.file.file, from, self.start + at as u64);
        #[cfg(not(unix))]
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!("no positioned writes at {at}: {}", from.len()),
        ));
    }

    fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        #[cfg(unix)]
        let read = std::os::unix::fs::FileExt::read_exact_at(&self.file.file, to, self.start + at as u64);
        #[cfg(not(unix))]
        let read =
            Err(io::Error::new(io::ErrorKind::Unsupported, format!("no positioned reads at {at}: {}", to.len())));
        read.map_err(|e| Error::invalid("spill", format!("the file of spilled tensors cannot be read: {e}")))
    }
}

impl Drop for FileRange {
    fn drop(&mut self) {
        let mut ranges = lock(&self.file.ranges);
        let before = ranges.end;
        ranges.give_back(self.start, (self.bytes as u64).next_multiple_of(FILE_UNIT_BYTES));
        if ranges.end < before {
            let _ = self.file.file.set_len(ranges.end); // under the lock, so that no range beyond the end is in use
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::opencl::OpenCl;
    use super::*;
    use crate::device::opencl;

    #[test]
    fn ranges_of_the_file_do_not_overlap_and_are_reused() {
        let (mut ranges, mut used, mut state) = (FileRanges::default(), Vec::<(u64, u64)>::new(), 7u64);
        for _ in 0..2000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let random = state >> 33;
            if used.is_empty() || used.len() < 40 && !random.is_multiple_of(3) {
                let length = 1 + random % 9;
                let start = ranges.take(length);
                assert!(
                    used.iter().all(|&(s, l)| start + length <= s || s + l <= start),
                    "{start} {length} in {used:?}"
                );
                used.push((start, length));
            } else {
                let (start, length) = used.swap_remove(random as usize % used.len());
                ranges.give_back(start, length);
            }
            let (free, taken) =
                (ranges.free.values().sum::<u64>(), used.iter().map(|&(_, length)| length).sum::<u64>());
            assert_eq!(free + taken, ranges.end);
        }
        used.into_iter().for_each(|(start, length)| ranges.give_back(start, length));
        assert_eq!((ranges.end, ranges.free.len()), (0, 0));
    }

    #[test]
    fn every_kind_of_copy_holds_the_bytes_of_a_block() {
        const BYTES: usize = 3 << 20;
        for index in 0..opencl::count() {
            let driver = OpenCl::open(index).unwrap();
            let [from, to] = [0; 2].map(|_| driver.create(BYTES).unwrap());
            let bytes: Vec<u8> = (0..BYTES).map(|i| (i * 7 + i / 999) as u8).collect();
            let pinned = staging::alloc_pinned(driver.device(), BYTES).unwrap().unwrap();
            let mut kinds = vec![
                HostCopy(Place::Pinned(pinned, BYTES)),
                HostCopy::allocate(Spill::Host, &driver, &from, BYTES).unwrap(),
            ];
            kinds.extend(cfg!(unix).then(|| HostCopy::allocate(Spill::Disk, &driver, &from, BYTES).unwrap()));
            for mut copy in kinds {
                assert_eq!(copy.bytes(), BYTES);
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

    #[cfg(unix)]
    #[test]
    fn the_file_holds_what_was_written() {
        let file = SpillFile::of_process().unwrap();
        let ranges: Vec<FileRange> = [5_000_000, 1, 4096].map(|bytes| file.allocate(bytes).unwrap()).into();
        for (range, byte) in ranges.iter().zip(1..) {
            range
                .for_each_piece(|at, piece| {
                    piece.fill(byte);
                    range.write(at, piece).map_err(|e| no_room(at, &e.to_string()))
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
