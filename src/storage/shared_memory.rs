//! Memory shared by processes on one machine.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};
use tempfile::NamedTempFile;

/// Words of memory shared by processes, which may change a word at any time, so each word is atomic. The processes can
/// agree, through other words, that one process owns a range for a while. That process then [writes](Self::write) and
/// [reads](Self::read) many bytes at a time.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    map: MmapRaw,
}

impl SharedMemory {
    /// Creates `words` words of zeros, and the file through which other processes of this user [open](Self::open) them.
    /// Dropping the file removes its name; the memory is released when the last process that opened it drops it.
    pub(crate) fn create(words: usize) -> std::io::Result<(SharedMemory, NamedTempFile)> {
        let folder = Some(PathBuf::from("/dev/shm")).filter(|shm| shm.is_dir()).unwrap_or_else(std::env::temp_dir);
        let mut file = tempfile::Builder::new().prefix("claystone-").tempfile_in(folder)?;
        // The zeros are written explicitly, so that a full disk is an error here and not a fault at the first access.
        let zeros = [0; 1 << 16];
        let bytes = words * size_of::<u64>();
        (0..bytes).step_by(zeros.len()).try_for_each(|at| file.write_all(&zeros[..zeros.len().min(bytes - at)]))?;
        Ok((SharedMemory::map(file.as_file(), words)?, file))
    }

    /// Opens the memory that another process created with `words` words.
    pub(crate) fn open(path: &Path, words: usize) -> std::io::Result<SharedMemory> {
        SharedMemory::map(&OpenOptions::new().read(true).write(true).open(path)?, words)
    }

    fn map(file: &File, words: usize) -> std::io::Result<SharedMemory> {
        let bytes = words * size_of::<u64>();
        if file.metadata()?.len() < bytes as u64 {
            return Err(std::io::Error::from(std::io::ErrorKind::UnexpectedEof));
        }
        Ok(SharedMemory { map: MmapOptions::new().len(bytes).map_raw(file)? })
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        let words = self.map.len() / size_of::<u64>();
        // SAFETY: a mapping begins at a page, has this many words, all of them valid, and lives as long as `self`. Other processes change words
        // only through the functions here. Only this user may open the file, its name is removed once all ranks have opened it, and no process
        // shortens it.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), words) }
    }

    /// Copies bytes to the words starting at `at`, which this process must own. Other processes may read the words after
    /// another word, stored later with `Release`, says so.
    ///
    /// # Panics
    /// If the words are out of range.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        let to = &self.words()[at..at + bytes.len().div_ceil(size_of::<u64>())];
        // SAFETY: the words exist, as checked above; they may change under a shared reference, and no other process uses the words
        // during the copy, as required above. If another process does write, each byte is still a valid byte of one of the writers.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(to.as_ptr().cast_mut().cast(), bytes.len()) }
    }

    /// Copies bytes from the words starting at `at`. No process may write these words meanwhile; a word loaded before with
    /// `Acquire` must have said so.
    ///
    /// # Panics
    /// If the words are out of range.
    pub(crate) fn read(&self, at: usize, bytes: &mut [u8]) {
        let from = &self.words()[at..at + bytes.len().div_ceil(size_of::<u64>())];
        // SAFETY: as in `write`.
        unsafe { bytes.as_mut_ptr().copy_from_nonoverlapping(from.as_ptr().cast(), bytes.len()) }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::Relaxed;

    use super::*;

    #[test]
    fn mappings_share_words_after_the_file_is_removed() {
        let (own, file) = SharedMemory::create(20_000).unwrap();
        let other = SharedMemory::open(file.path(), 20_000).unwrap();
        assert!(SharedMemory::open(file.path(), 20_001).is_err());
        let path = file.path().to_owned();
        drop(file);
        assert!(SharedMemory::open(&path, 1).is_err());
        own.words()[19_999].store(7, Relaxed);
        assert_eq!((other.words()[19_999].load(Relaxed), other.words()[0].load(Relaxed)), (7, 0));
        own.write(19_998, b"eleven byte");
        let mut read = [0; 11];
        other.read(19_998, &mut read);
        assert_eq!(&read, b"eleven byte");
    }
}
