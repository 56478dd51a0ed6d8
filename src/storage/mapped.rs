//! Files as memory.

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{Error, Result};

/// A file whose bytes are memory, read from the disk where they are touched.
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
    /// [`Error::Invalid`] with the file's name where it is not there or cannot be mapped.
    ///
    /// # Safety
    /// As long as this lives nobody, no other process either, changes or shortens the file: its bytes are borrowed as memory
    /// that does not change, and touching what is not there any more ends the process.
    pub unsafe fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref().to_owned();
        // SAFETY: the caller's promise is what the call asks for.
        let mapped = File::open(&path).and_then(|file| unsafe { Mmap::map(&file) });
        let bytes = mapped.map_err(|e| Error::invalid("MappedFile::open", format!("{}: {e}", path.display())))?;
        Ok(MappedFile { path, bytes })
    }

    /// The file's name.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What is in it.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
