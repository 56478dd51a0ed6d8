//! npz: npy files in a zip archive.

use std::io::{BufReader, Read, Seek};
use std::path::Path;

use zip::read::ZipFile;
use zip::result::ZipError;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipArchive, ZipWriter};

use super::npy::{from_reader, to_writer};
use super::{StateDict, create, fail, fail_in, finish, located, open};
use crate::storage::Caller;
use crate::{Device, Result};

/// The tensors of an npz file, on `device`, in the archive's order (NumPy's `load`); compressed ones too. Archives that
/// unpack to more than 8 times their size and 32 MiB are refused, because so few bytes can claim any amount of memory:
/// [`read_npz_limited`] reads those that are trusted.
///
/// # Errors
/// As [`read_npy`](super::read_npy), with the tensor's name.
#[track_caller]
pub fn read_npz(path: impl AsRef<Path>, device: Device) -> Result<StateDict> {
    read("read_npz", path.as_ref(), device, None)
}

/// [`read_npz`] of an archive that may unpack to `max_bytes`, however small it is; `u64::MAX` for any number.
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
///
/// # Errors
/// As [`read_npz`].
#[track_caller]
pub fn read_npz_limited(path: impl AsRef<Path>, device: Device, max_bytes: u64) -> Result<StateDict> {
    let _caller = Caller::enter();
    read("read_npz_limited", path.as_ref(), device, Some(max_bytes))
}

/// What an archive may unpack to without being asked for: so many times its size, and [`UNCHECKED`] bytes. Arrays of numbers
/// are seldom compressed further.
const RATIO: u64 = 8;

fn read(op: &'static str, path: &Path, device: Device, max_bytes: Option<u64>) -> Result<StateDict> {
    let (file, size) = open(op, path)?;
    let size = size.unwrap_or(0);
    let mut archive = ZipArchive::new(BufReader::new(file)).map_err(|e| fail(op, path, e))?;
    // Entries that share bytes would let a small archive stand for any number of large tensors.
    if archive.has_overlapping_entries().map_err(|e| fail(op, path, e))? {
        return Err(fail(op, path, "its entries overlap"));
    }
    let sum = (0..archive.len()).try_fold(0u64, |sum, i| Ok(sum.saturating_add(claimed(&archive.by_index(i)?))));
    let sum = sum.map_err(|e: ZipError| fail(op, path, e))?;
    let most = max_bytes.unwrap_or(size.saturating_mul(RATIO).saturating_add(UNCHECKED));
    if sum > most {
        let advice = "if it is to be trusted, read it with read_npz_limited";
        return Err(fail(op, path, format!("its {size} bytes unpack to {sum}, more than {most}: {advice}")));
    }
    if sum > size.saturating_add(UNCHECKED) {
        check_sizes(&mut archive).map_err(|e| fail(op, path, e))?;
    }
    let mut tensors = Vec::new();
    for i in 0..archive.len() {
        let mut file = archive.by_index(i).map_err(|e| fail(op, path, e))?;
        let name = file.name().map_err(|e| fail(op, path, e))?.into_owned();
        let name = name.strip_suffix(".npy").unwrap_or(&name).to_owned();
        let available = claimed(&file);
        let tensor = from_reader(&mut file, Some(available), device).map_err(|e| located(e, op, path, Some(&name)))?;
        tensors.push((name, tensor));
    }
    Ok(tensors.into_iter().collect())
}

/// How far beyond the archive's own size its entries are believed to go without a look at all of them.
const UNCHECKED: u64 = 32 << 20;

/// The bytes of an entry, as the archive has it.
fn claimed<R: Read>(file: &ZipFile<'_, R>) -> u64 {
    match file.compression() {
        CompressionMethod::Stored => file.compressed_size(),
        _ => file.size(),
    }
}

/// Decompresses everything, keeping nothing, to see that there is as much as the archive says.
fn check_sizes(archive: &mut ZipArchive<impl Read + Seek>) -> Result<(), String> {
    for i in 0..archive.len() {
        let file = archive.by_index(i).map_err(|e| e.to_string())?;
        let claimed = claimed(&file);
        let size = std::io::copy(&mut file.take(claimed.saturating_add(1)), &mut std::io::sink());
        match size.map_err(|e| e.to_string())? {
            size if size == claimed => {}
            _ => return Err(format!("an entry has not the {claimed} bytes that the archive says")),
        }
    }
    Ok(())
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
        to_writer(tensor, &mut archive).map_err(|e| located(e, op, path, Some(name)))?;
    }
    let file = archive.finish().map_err(|e| fail(op, path, e))?;
    finish(op, path, file)
}
