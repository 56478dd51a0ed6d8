//! Files mapped into memory.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{Error, Result};

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
        let bytes = mapped.map_err(|e| Error::invalid("MappedFile::open", format!("{}: {e}", path.display())))?;
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
