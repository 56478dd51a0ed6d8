//! The npz format: npy files in a zip archive.

use std::io::{BufReader, Read, Seek};
use std::path::Path;

use zip::read::ZipFile;
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::npy::{from_reader, to_writer};
use super::{StateDict, create, file_error, finish, open, tensor_error, with_location};
use crate::storage::Caller;
use crate::{Device, Result};

/// Reads the tensors of an npz file, compressed or not, to `device`, in the archive's order (NumPy's `load`). An archive that unpacks to
/// more than 8 times its size plus 32 MiB is refused, because a small file could claim any amount of memory. Use [`read_npz_limited`] for
/// such archives if they are trusted. Fails as [`read_npy`](super::read_npy) does; the error also names the tensor.
#[track_caller]
pub fn read_npz(path: impl AsRef<Path>, device: Device) -> Result<StateDict> {
    read("read_npz", path.as_ref(), device, None)
}

/// Does the same as [`read_npz`] for an archive that may unpack to `max_bytes`, regardless of its size. `u64::MAX` means no limit. Fails as
/// [`read_npz`] does.
///
/// ```
/// use claystone::{Device, Tensor, io, nn::StateDict};
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("masks.npz");
/// let state: StateDict = [("mask".to_string(), Tensor::zeros(&[1000], Device::Cpu)?)].into_iter().collect();
/// io::save(&path, &state)?;
/// assert!(io::read_npz_limited(&path, Device::Cpu, 1 << 20)?.get("mask").is_some());
/// assert!(io::read_npz_limited(&path, Device::Cpu, 1000).is_err());
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn read_npz_limited(path: impl AsRef<Path>, device: Device, max_bytes: u64) -> Result<StateDict> {
    let _caller = Caller::enter();
    read("read_npz_limited", path.as_ref(), device, Some(max_bytes))
}

/// By default an archive may unpack to this multiple of its size, plus [`UNCHECKED_BYTES`]. Arrays of numbers rarely compress better.
const MAX_UNPACK_RATIO: u64 = 8;

/// Reads all arrays of an archive. Returns an error if entries overlap, or unpack to too many bytes.
fn read(op: &'static str, path: &Path, device: Device, max_bytes: Option<u64>) -> Result<StateDict> {
    let (file, size) = open(op, path)?;
    let size = size.unwrap_or(0);
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|e| file_error(op, path, e))?;
    // With overlapping entries, a small archive could contain any number of large tensors.
    if archive.has_overlapping_entries().map_err(|e| file_error(op, path, e))? {
        return Err(file_error(op, path, "its entries overlap"));
    }
    let sum = (0..archive.len()).try_fold(0u64, |sum, i| Ok(sum.saturating_add(claimed_bytes(&archive.by_index(i)?))));
    let sum = sum.map_err(|e: ZipError| file_error(op, path, e))?;
    let most = max_bytes.unwrap_or(size.saturating_mul(MAX_UNPACK_RATIO).saturating_add(UNCHECKED_BYTES));
    if sum > most {
        let advice = "use read_npz_limited if you trust the archive";
        return Err(file_error(op, path, format!("its {size} bytes unpack to {sum}, more than {most}: {advice}")));
    }
    if sum > size.saturating_add(UNCHECKED_BYTES) {
        check_sizes(&mut archive).map_err(|e| file_error(op, path, e))?;
    }
    let mut tensors = Vec::new();
    for i in 0..archive.len() {
        let mut file = archive.by_index(i).map_err(|e| file_error(op, path, e))?;
        let name = file.name().map_err(|e| file_error(op, path, e))?.into_owned();
        let name = name.strip_suffix(".npy").unwrap_or(&name).to_owned();
        let available = claimed_bytes(&file);
        let tensor =
            from_reader(&mut file, Some(available), device).map_err(|e| with_location(e, op, path, Some(&name)))?;
        tensors.push((name, tensor));
    }
    Ok(tensors.into_iter().collect())
}

/// If all claimed sizes together exceed the archive's size by at most this many bytes, entries are not decompressed to check them.
const UNCHECKED_BYTES: u64 = 32 << 20;

/// Returns the size in bytes of an entry, as claimed by the archive.
fn claimed_bytes<R: Read>(file: &ZipFile<'_, R>) -> u64 {
    match file.compression() {
        CompressionMethod::Stored => file.compressed_size(),
        _ => file.size(),
    }
}

/// Decompresses all entries and discards the data, to check the sizes that the archive claims.
fn check_sizes(archive: &mut ZipArchive<impl Read + Seek>) -> Result<(), String> {
    for i in 0..archive.len() {
        let file = archive.by_index(i).map_err(|e| e.to_string())?;
        let claimed = claimed_bytes(&file);
        let size = std::io::copy(&mut file.take(claimed.saturating_add(1)), &mut std::io::sink());
        match size.map_err(|e| e.to_string())? {
            size if size == claimed => {}
            _ => return Err(format!("an entry does not have the {claimed} bytes that the archive claims")),
        }
    }
    Ok(())
}

/// Writes tensors as an uncompressed npz file (NumPy's `savez`). Fails with [`crate::Error::Invalid`], with the file's name, if writing
/// fails.
pub fn write_npz(path: impl AsRef<Path>, tensors: &StateDict) -> Result<()> {
    let (op, path) = ("write_npz", path.as_ref());
    let mut archive = ZipWriter::new(create(op, path)?);
    // Entries may be larger than 4 GiB.
    let stored = SimpleFileOptions::default().compression_method(CompressionMethod::Stored).large_file(true);
    for (name, tensor) in tensors.iter() {
        archive.start_file(format!("{name}.npy"), stored).map_err(|e| tensor_error(op, path, name, e))?;
        to_writer(tensor, &mut archive).map_err(|e| with_location(e, op, path, Some(name)))?;
    }
    let file = archive.finish().map_err(|e| file_error(op, path, e))?;
    finish(op, path, file)
}
