//! Export and import of a device's programs, probe results and tuning, as one file for the same device and driver elsewhere.
//!
//! The file starts with [`MAGIC`] and the SHA-256 of the rest. The rest is the identity of the exporting device, then each
//! entry's name and contents. Each of these byte strings follows its length, in 8 bytes, little-endian.

use std::ffi::OsStr;
use std::path::Path;

use sha2::{Digest, Sha256};

use super::cache::{Cache, Entries, FileKind, MAX_SIZE};
use super::{ClDevice, tuning};
use crate::error::Excerpt;
use crate::sync::lock;
use crate::{Error, Result, file};

const MAGIC: &[u8; 16] = b"claystone cache\n";

fn write(identity: &str, entries: &Entries) -> Vec<u8> {
    let mut rest = Vec::new();
    let mut put = |bytes: &[u8]| {
        rest.extend((bytes.len() as u64).to_le_bytes());
        rest.extend(bytes);
    };
    put(identity.as_bytes());
    for (name, contents) in entries {
        put(name.as_bytes());
        put(contents);
    }
    [&MAGIC[..], &Sha256::digest(&rest), &rest].concat()
}

/// Parses a file and returns its entries. The error says that the file is damaged, or was exported by another device.
fn read(blob: &[u8], identity: &str) -> Result<Entries, String> {
    let damaged = || "it is damaged: export it again".to_owned();
    let rest = blob.strip_prefix(MAGIC).ok_or("it is not a file that export_cache wrote")?;
    let (sum, mut rest) = rest.split_first_chunk::<32>().ok_or_else(damaged)?;
    if Sha256::digest(rest)[..] != sum[..] {
        return Err(damaged());
    }
    let mut take = || -> Option<&[u8]> {
        let (length, after) = rest.split_first_chunk()?;
        let (bytes, after) = after.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
        rest = after;
        Some(bytes)
    };
    let of = String::from_utf8_lossy(take().ok_or_else(damaged)?).into_owned();
    if of != identity {
        return Err(format!("it was exported on \"{}\", and this is \"{identity}\": export a file here", Excerpt(&of)));
    }
    let mut entries = Entries::new();
    while let Some(name) = take() {
        let name = std::str::from_utf8(name).map_err(|_| damaged())?.to_owned();
        entries.insert(name, take().ok_or_else(damaged)?.to_vec());
    }
    if rest.is_empty() { Ok(entries) } else { Err(damaged()) }
}

/// Writes the programs that this process has loaded for the device, its probe results and its tuning to a file. Returns the
/// number of programs.
pub(crate) fn export_cache(device: &ClDevice, path: &Path) -> Result<usize> {
    device.check_lost()?;
    let mut entries = device.programs.binaries().map_err(|e| device.failed(e))?;
    let programs = entries.len();
    entries.extend(lock(&device.programs.probe_results).clone());
    let tuning = device.tuning();
    if tuning.is_chosen() {
        entries.insert(tuning.file.clone(), tuning.text().into_bytes());
    }
    let blob = write(&cache_identity(device), &entries);
    let refused = |e| Error::invalid("export_cache", format!("{}: {e}", path.display()));
    file::replace(path, &blob).map_err(refused)?;
    Ok(programs)
}

/// Loads a complete file of [`export_cache`], or nothing. Returns the number of programs.
pub(crate) fn import_cache(device: &ClDevice, path: &Path) -> Result<usize> {
    device.check_lost()?;
    let refused = |why: String| Error::invalid("import_cache", format!("{}: {why}", path.display()));
    let blob = std::fs::read(path).map_err(|e| refused(e.to_string()))?;
    let mut entries = read(&blob, &cache_identity(device)).map_err(refused)?;
    let tuning = device.tuning();
    let stored = entries.remove(&tuning.file).map(|text| tuning.read(&String::from_utf8_lossy(&text)));
    let stored = stored.transpose().map_err(refused)?;
    let programs = entries.keys().filter(|name| FileKind::Program.matches(name)).count();
    lock(&device.programs.imported).extend(entries);
    if let Some(stored) = stored {
        tuning.set_all(stored);
    }
    Ok(programs)
}

/// Returns the identity of the device and the driver for which the programs are valid.
fn cache_identity(device: &ClDevice) -> String {
    format!("{}, {}, {}", tuning::identity(device.info()), device.info().vendor, device.description.platform_version)
}

/// Reads a file as a tuning file: checks the checksum, and parses the contents. A file without a valid checksum is parsed as a
/// whole. For tests and fuzzing.
#[doc(hidden)]
pub fn read_cache_file(path: &Path) -> Result<()> {
    let error = |error: &dyn std::fmt::Display| Error::invalid("read_cache_file", error.to_string());
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(OsStr::to_str)) else {
        return Err(error(&"it is not a file"));
    };
    let bytes = std::fs::read(path).map_err(|e| error(&e))?;
    let contents = Cache::new(folder, MAX_SIZE).load(name).unwrap_or(bytes);
    tuning::check(&String::from_utf8_lossy(&contents)).map_err(|e| error(&e))
}

#[cfg(test)]
mod tests {
    use super::super::mutate::{self, Random, mutated};
    use super::*;

    fn entries() -> Entries {
        let contents = [&b"a program"[..], b"", &[7; 1000]];
        (0..3).map(|i| (FileKind::Program.name(&[i; 32]), contents[usize::from(i)].to_vec())).collect()
    }

    #[test]
    fn an_exported_file_is_read_only_by_the_same_device() {
        let blob = write("a device", &entries());
        assert_eq!(read(&blob, "a device"), Ok(entries()));
        assert_eq!(read(&write("", &Entries::new()), ""), Ok(Entries::new()));
        let other = read(&blob, "another").unwrap_err();
        assert!(other.contains("on \"a device\", and this is \"another\""), "{other}");
    }

    /// No file that was changed at random may be imported. `CLAYSTONE_MUTATIONS` sets the number of changed files.
    #[test]
    fn no_damaged_file_is_read() {
        let whole = [write("a device", &entries()), write("a device", &Entries::new()), b"something else".to_vec()];
        let mut random = Random(0);
        for _ in 0..mutate::count(10_000) {
            let blob = mutated(&mut random, &whole);
            if !whole.contains(&blob) {
                assert!(read(&blob, "a device").is_err());
            }
        }
        // Files with a valid checksum but truncated contents, which random changes would never produce.
        let rest: Vec<u8> = [&8u64.to_le_bytes()[..], b"a device", &u64::MAX.to_le_bytes()].concat();
        for end in 0..=rest.len() {
            let blob = [&MAGIC[..], &Sha256::digest(&rest[..end]), &rest[..end]].concat();
            assert_eq!(read(&blob, "a device").is_ok(), end == 16, "{end}");
        }
    }
}
