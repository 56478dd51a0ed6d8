//! The format of an exported cache: one file for another process or machine.
//!
//! The file starts with [`MAGIC`] and the SHA-256 of the rest. The rest is the identity of the exporting device, then each
//! entry's name and contents. Each of these byte strings follows its length, in 8 bytes, little-endian.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use sha2::{Digest, Sha256};

use crate::error::Excerpt;

const MAGIC: &[u8; 16] = b"claystone cache\n";

/// Entries, keyed by the file names of the disk cache.
pub(super) type Entries = BTreeMap<String, Vec<u8>>;

#[derive(Default)]
pub(super) struct ImportedEntries(RwLock<Entries>);

impl ImportedEntries {
    pub(super) fn get(&self, name: &str) -> Option<Vec<u8>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    pub(super) fn extend(&self, entries: Entries) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).extend(entries);
    }
}

pub(super) fn write(identity: &str, entries: &Entries) -> Vec<u8> {
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
pub(super) fn read(blob: &[u8], identity: &str) -> Result<Entries, String> {
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

#[cfg(test)]
mod tests {
    use super::super::cache::FileKind;
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

    /// `CLAYSTONE_MUTATIONS` sets the number of damaged files.
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
        // Files with a valid checksum but a truncated rest, which random damage would never produce.
        let rest: Vec<u8> = [&8u64.to_le_bytes()[..], b"a device", &u64::MAX.to_le_bytes()].concat();
        for end in 0..=rest.len() {
            let blob = [&MAGIC[..], &Sha256::digest(&rest[..end]), &rest[..end]].concat();
            assert_eq!(read(&blob, "a device").is_ok(), end == 16, "{end}");
        }
    }
}
