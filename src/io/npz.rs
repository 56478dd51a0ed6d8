//! npz: npy files in a zip archive.

use std::io::Write;
use std::path::Path;

use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::npy::{from_reader, to_writer};
use super::{create, fail, fail_in, open};
use crate::nn::StateDict;
use crate::{Device, Result};

/// The tensors of an npz file, on `device`, in the archive's order (NumPy's `load`); compressed ones too.
///
/// # Errors
/// As [`read_npy`](super::read_npy), with the tensor's name.
pub fn read_npz(path: impl AsRef<Path>, device: Device) -> Result<StateDict> {
    let (op, path) = ("read_npz", path.as_ref());
    let mut archive = ZipArchive::new(open(op, path)?).map_err(|e| fail(op, path, e))?;
    let mut tensors = Vec::with_capacity(archive.len());
    for i in 0..archive.len() {
        let mut file = archive.by_index(i).map_err(|e| fail(op, path, e))?;
        let name = file.name().map_err(|e| fail(op, path, e))?.into_owned();
        let name = name.strip_suffix(".npy").unwrap_or(&name).to_owned();
        let tensor = from_reader(&mut file, device).map_err(|e| e.of(op, path, Some(&name)))?;
        tensors.push((name, tensor));
    }
    Ok(tensors.into_iter().collect())
}

/// Writes tensors as an npz file (NumPy's `savez`), not compressed.
///
/// # Errors
/// [`crate::Error::Invalid`] with the file's name where it cannot be written.
pub fn write_npz(path: impl AsRef<Path>, tensors: &StateDict) -> Result<()> {
    let (op, path) = ("write_npz", path.as_ref());
    let mut archive = ZipWriter::new(create(op, path)?);
    // Entries may be larger than 4 GiB.
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(true);
    for (name, tensor) in tensors.iter() {
        archive.start_file(format!("{name}.npy"), stored).map_err(|e| fail_in(op, path, name, e))?;
        to_writer(tensor, &mut archive).map_err(|e| e.of(op, path, Some(name)))?;
    }
    archive.finish().and_then(|mut file| Ok(file.flush()?)).map_err(|e| fail(op, path, e))
}
