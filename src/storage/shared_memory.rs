//! Memory that the processes of one machine share.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;

use memmap2::{MmapOptions, MmapRaw};
use tempfile::NamedTempFile;

/// Words of memory that processes share. Any of them may change a word at any time, so each is an atomic. What one process has to
/// itself for a while, by an agreement about other words, is [written](Self::write) and [read](Self::read) many bytes at a time.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    map: MmapRaw,
}

impl SharedMemory {
    /// So many words of zeros, and the file under whose name other processes of this user [open](Self::open) them. Once its
    /// name is gone, which is when it is dropped, the memory goes with the last who have opened it.
    pub(crate) fn create(words: usize) -> std::io::Result<(SharedMemory, NamedTempFile)> {
        let folder = Some(PathBuf::from("/dev/shm")).filter(|shm| shm.is_dir()).unwrap_or_else(std::env::temp_dir);
        let mut file = tempfile::Builder::new().prefix("claystone-").tempfile_in(folder)?;
        // Written, so that a full disk is an error here and not a fault at the first touch.
        let zeros = [0; 1 << 16];
        let bytes = words * size_of::<u64>();
        (0..bytes).step_by(zeros.len()).try_for_each(|at| file.write_all(&zeros[..zeros.len().min(bytes - at)]))?;
        Ok((SharedMemory::map(file.as_file(), words)?, file))
    }

    /// What another process has created with so many words.
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
        // SAFETY: a mapping begins at a page, is of this many words, each a valid one, and lives as long as `self`. Whoever else
        // has it changes words by the functions here only: only this user may open
        // the file, under a name that is gone once all ranks have it, and nobody makes it shorter.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr().cast::<AtomicU64>(), words) }
    }

    /// Copies bytes to the words from `at` on, of which the caller has those to itself: others read them once another word, stored
    /// with `Release` afterwards, tells them to.
    ///
    /// # Panics
    /// Where there are no such words.
    pub(crate) fn write(&self, at: usize, bytes: &[u8]) {
        let to = &self.words()[at..at + bytes.len().div_ceil(size_of::<u64>())];
        // SAFETY: so many words are there, checked above, which may change under a shared reference, and nobody else uses
        // them meanwhile: see above. Where they are not the caller's after all, the bytes are some mixture, each of them valid.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(to.as_ptr().cast_mut().cast(), bytes.len()) }
    }

    /// Copies bytes from the words from `at` on, which nobody writes meanwhile: a word that was loaded with `Acquire` before
    /// has said so.
    ///
    /// # Panics
    /// Where there are no such words.
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
    fn what_one_writes_the_other_reads_until_both_are_gone() {
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
