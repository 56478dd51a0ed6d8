//! Files mapped into memory.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

use memmap2::{Mmap, MmapOptions};

use super::allocation::Storage;
use crate::{Device, Error, Result};

/// A file mapped into memory, whose bytes are read from the disk when they are accessed.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    bytes: Mmap,
}

impl MappedFile {
    /// Maps a file for reading.
    ///
    /// ```
    /// use claystone::{Device, Tensor, io, nn::StateDict, storage::MappedFile};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("model.safetensors");
    /// # let state: StateDict = [("w".to_string(), Tensor::ones(3, Device::Cpu)?)].into_iter().collect();
    /// # io::save(&path, &state)?;
    /// // SAFETY: nobody writes to the file meanwhile.
    /// let file = unsafe { MappedFile::open(&path)? };
    /// let tensors = io::SafeTensors::new(&file)?;
    /// assert_eq!(tensors.names().collect::<Vec<_>>(), ["w"]);
    /// assert_eq!(tensors.get("w", Device::best())?.to_vec::<f32>()?, [1.0; 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name if it does not exist or cannot be mapped.
    ///
    /// # Safety
    /// As long as the value lives, no process changes or shortens the file. Its bytes are borrowed as memory that does
    /// not change, and accessing bytes that no longer exist ends the process.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref().to_owned();
        // SAFETY: the caller promises what `Mmap::map` requires.
        let mapped = File::open(&path).and_then(|file| unsafe { Mmap::map(&file) });
        let bytes = mapped.map_err(|e| map_error("MappedFile::open", &path, &e))?;
        Ok(MappedFile { path, bytes })
    }

    /// Returns the file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the file's contents.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}

fn map_error(op: &'static str, path: &Path, cause: &io::Error) -> Error {
    Error::invalid(op, format!("{}: {cause}", path.display()))
}

/// A file mapped into memory, parts of which can be the bytes of storages on the CPU device without a copy.
#[derive(Debug)]
pub struct SharedFile {
    mapped: MappedFile,
    file: File,
}

impl SharedFile {
    /// Maps a file. Its bytes are read from the disk when they are accessed.
    ///
    /// ```
    /// use claystone::storage::SharedFile;
    /// use claystone::{DType, Device, Tensor};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("weights");
    /// # std::fs::write(&path, [0, 0, 128, 63].repeat(8)).unwrap();
    /// // SAFETY: no process writes to the file meanwhile.
    /// let file = unsafe { SharedFile::open(&path)? };
    /// let storage = file.map_storage(16, 16, Device::Cpu)?.expect("the CPU device uses the file's pages");
    /// let x = Tensor::from_storage(storage, 4, DType::F32)?;
    /// x.fill_(2.0)?; // changes a copy of the page, not the file
    /// assert_eq!((x.to_vec::<f32>()?, file.bytes()), (vec![2.0; 4], &[0, 0, 128, 63].repeat(8)[..]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name if it does not exist or cannot be mapped.
    ///
    /// # Safety
    /// No process changes or shortens the file while the value or one of its storages exists, as [`MappedFile::open`] requires.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<SharedFile> {
        // SAFETY: the caller promises what `MappedFile::open` requires.
        let mapped = unsafe { MappedFile::open(path)? };
        let file = File::open(mapped.path()).map_err(|e| map_error("SharedFile::open", mapped.path(), &e))?;
        Ok(SharedFile { mapped, file })
    }

    /// Returns the file's name.
    pub fn path(&self) -> &Path {
        self.mapped.path()
    }

    /// Returns the file's contents, which writes to storages do not change.
    pub fn bytes(&self) -> &[u8] {
        self.mapped.bytes()
    }

    /// Maps `bytes` bytes at `offset` copy-on-write as a storage of `device`, which allocators do not count. Returns `None` for a
    /// device other than the CPU, and for an `offset` that is not a multiple of 16: copy [`bytes`](Self::bytes) instead.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a range that is not inside the file, and if it cannot be mapped.
    pub fn map_storage(&self, offset: usize, bytes: usize, device: Device) -> Result<Option<Storage>> {
        let size = self.bytes().len();
        if offset.checked_add(bytes).is_none_or(|end| end > size) {
            let reason =
                format!("{bytes} bytes at {offset} are not inside the {size} bytes of {}", self.path().display());
            return Err(Error::invalid("map_storage", reason));
        }
        if device != Device::Cpu || bytes == 0 || !offset.is_multiple_of(16) {
            return Ok(None);
        }
        let mut options = MmapOptions::new();
        options.offset(offset as u64).len(bytes).no_reserve_swap();
        // SAFETY: no process changes the file while the storage, which keeps the mapping, exists: the caller of `open` promised.
        let mut mapping =
            unsafe { options.map_copy(&self.file) }.map_err(|e| map_error("map_storage", self.path(), &e))?;
        #[cfg(unix)]
        let _ = mapping.advise(memmap2::Advice::WillNeed); // a hint, which may fail
        let start = NonNull::from(&mut mapping[..]).cast();
        // SAFETY: only the storage uses this private mapping, whose bytes do not move until the mapping is dropped.
        unsafe { Storage::from_host_memory(start, bytes, mapping) }.map(Some)
    }
}
