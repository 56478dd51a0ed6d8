//! The disk cache: compiled programs, probe results and tuning measurements, in files for later processes.
//!
//! The folder is `CLAYSTONE_CACHE_DIR`, else `$XDG_CACHE_HOME/claystone`, else `claystone` in the system's folder for caches;
//! `CLAYSTONE_CACHE_DIR=off` disables the cache. A file's name is a hash of everything on which the contents depend, and the
//! checksum in the file covers that name. If the files exceed `CLAYSTONE_CACHE_MAXSIZE` bytes, the least recently used are
//! deleted.
//!
//! A binary is code that this process runs, so no other user may be able to change it. The folder must belong to this user
//! with mode 0700. A file must be a regular file of this user that no other user can write to. Folders above are not checked:
//! a user who can rename them can only insert files that are refused here. On Linux no folder can be inserted after the check,
//! because the checked folder is held open ([`Folder`]). The cache is optional: after any disk error, the file counts as missing.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{LazyLock, Once};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

use crate::device::log;
use crate::device::system::{OS, cache_folder};
use crate::{Error, Result};

/// The hash of everything on which a file's contents depend.
pub(super) type Key = [u8; 32];

/// Contents of files, by name.
pub(super) type Entries = BTreeMap<String, Vec<u8>>;

/// The default bound on the size of the folder, in bytes: as for CUDA's cache.
pub(super) const MAX_SIZE: u64 = 256 << 20;
/// The folder is scanned each time 1/16 of the bound has been written, and shrunk to 15/16 of the bound. So a single process
/// stays within the bound without a scan after every file.
const SHRINK_DIVISOR: u64 = 16;
/// A temporary file not written to for this long was left by a killed process.
const STALE_AFTER: Duration = Duration::from_secs(600);
/// The first bytes of every cache file. A checksum follows, because a driver may crash on a damaged binary.
const MAGIC: &[u8; 16] = b"claystone binary";
/// The advice in errors about a refused folder.
const ADVICE: &str = "make the folder private (chmod 700), or set CLAYSTONE_CACHE_DIR to a private folder, or to off";
/// The extension of temporary files.
const TEMPORARY: &str = ".tmp";

/// The kind of a file's contents, given by the extension of the file's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileKind {
    /// A compiled program.
    Program,
    /// The result of a probe of the device.
    Probe,
    /// Measurements by `claystone tune`: small, and minutes of work, so never evicted.
    Tuning,
}

impl FileKind {
    const ALL: [FileKind; 3] = [FileKind::Program, FileKind::Probe, FileKind::Tuning];

    fn extension(self) -> &'static str {
        match self {
            FileKind::Program => "clbin",
            FileKind::Probe => "found",
            FileKind::Tuning => "tuning",
        }
    }

    /// True if a file with this name is of this kind.
    pub(super) fn matches(self, name: &str) -> bool {
        name.strip_suffix(self.extension()).is_some_and(|stem| stem.ends_with('.'))
    }

    pub(super) fn name(self, key: &Key) -> String {
        let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}.{}", self.extension())
    }
}

/// The folder with the cache's files.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    max_size: u64,
    /// Bytes written since the folder was last scanned. The initial value makes the first write scan.
    written: AtomicU64,
    warned: Once,
}

impl Cache {
    /// Returns the cache that the environment variables configure, read at the first call.
    pub(super) fn of_process() -> Option<&'static Cache> {
        static CACHE: LazyLock<Option<Cache>> =
            LazyLock::new(|| Cache::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty())));
        let _messages = log::defer(); // a subscriber that calls this function would deadlock
        CACHE.as_ref()
    }

    /// Configures a cache from environment variables; `None` if they disable the cache.
    fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Option<Cache> {
        let folder = match variable("CLAYSTONE_CACHE_DIR") {
            Some(folder) if folder == "off" => return None,
            Some(folder) => PathBuf::from(folder),
            None => cache_folder(OS, &variable)?.join("claystone"),
        };
        let asked = variable("CLAYSTONE_CACHE_MAXSIZE");
        let max_size = asked.as_deref().map_or(Some(MAX_SIZE), |text| text.to_str()?.trim().parse().ok());
        let max_size = max_size.unwrap_or_else(|| {
            log::emit(move || {
                tracing::warn!(?asked, "CLAYSTONE_CACHE_MAXSIZE is not a number of bytes: {MAX_SIZE} is used instead");
            });
            MAX_SIZE
        });
        (max_size > 0).then(|| Cache::new(folder, max_size))
    }

    pub(super) fn new(folder: impl Into<PathBuf>, max_size: u64) -> Cache {
        let (folder, written) = (folder.into(), AtomicU64::new(max_size));
        Cache { folder, max_size, written, warned: Once::new() }
    }

    /// Returns the contents stored under this name. A damaged file is deleted.
    ///
    /// # Errors
    /// `NotFound`; `PermissionDenied` if others have access to the folder or the file, `InvalidData` for a damaged file.
    pub(super) fn load(&self, name: &str) -> io::Result<Vec<u8>> {
        let folder = self.open_folder()?;
        let mut file = open_private_file(&folder.at.join(name))?;
        let mut bytes = Vec::new();
        (&mut file).take(self.max_size).read_to_end(&mut bytes)?;
        let contents = unseal(name, bytes).ok_or_else(|| {
            self.remove(name);
            io::Error::new(io::ErrorKind::InvalidData, "the file was damaged")
        })?;
        let _ = file.set_modified(SystemTime::now()); // marks the file as used
        Ok(contents)
    }

    /// Stores contents under a name. Other threads and processes get the whole file or none.
    ///
    /// # Errors
    /// A folder to which other users have access, contents larger than the bound on the whole folder, and errors of writing.
    pub(super) fn store(&self, name: &str, contents: &[u8]) -> io::Result<PathBuf> {
        let sealed = seal(name, contents);
        let size = sealed.len() as u64;
        if size > self.max_size {
            return Err(io::Error::other(format!(
                "{size} bytes exceed the bound on the cache, {} bytes",
                self.max_size
            )));
        }
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&self.folder)?;
        let folder = self.open_folder()?;
        // Only this user can read the file. It is not synced, because a truncated file fails its checksum.
        let mut builder = tempfile::Builder::new();
        let mut file = builder.prefix(&format!("{name}.")).suffix(TEMPORARY).tempfile_in(&folder.at)?;
        file.write_all(&sealed)?;
        file.persist(folder.at.join(name))?;
        if self.written.fetch_add(size, Relaxed).saturating_add(size) > self.max_size / SHRINK_DIVISOR {
            self.written.store(0, Relaxed);
            self.shrink(&folder)?;
        }
        Ok(self.folder.join(name))
    }

    pub(super) fn remove(&self, name: &str) {
        let (folder, file) = (self.folder.clone(), name.to_owned());
        log::emit(move || tracing::debug!(?folder, file, "cached file refused"));
        let _ = self.open_folder().and_then(|folder| fs::remove_file(folder.at.join(name)));
    }

    /// Deletes temporary files of killed processes, then the least recently used files beyond the bound. A missing file counts as
    /// deleted, because another process may shrink the folder at the same time.
    fn shrink(&self, folder: &Folder) -> io::Result<()> {
        let mut files = folder.files()?;
        files.retain(|file| {
            // A file with a time in the future was written before the clock was set back, so it counts as stale.
            let stale = file.kind.is_none() && !file.modified.elapsed().is_ok_and(|age| age < STALE_AFTER);
            !(stale && fs::remove_file(folder.at.join(&file.name)).is_ok())
        });
        files.sort_unstable_by_key(|file| file.modified);
        let mut size: u64 = files.iter().map(|file| file.bytes).sum();
        for file in files.iter().filter(|file| matches!(file.kind, Some(FileKind::Program | FileKind::Probe))) {
            if size <= self.max_size - self.max_size / SHRINK_DIVISOR {
                break;
            }
            match fs::remove_file(folder.at.join(&file.name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {}
                _ => size -= file.bytes,
            }
        }
        Ok(())
    }

    /// Opens the folder. Fails if the folder is missing, or if other users have access to it, which is logged once.
    fn open_folder(&self) -> io::Result<Folder> {
        let checked = Folder::open(&self.folder);
        if let Err(error) = &checked
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            let _messages = log::defer(); // a subscriber that calls this function would deadlock
            self.warned.call_once(|| {
                let (folder, error) = (self.folder.clone(), error.to_string());
                log::emit(move || tracing::warn!(?folder, "compiled kernels are not cached: {error}; {ADVICE}"));
            });
        }
        checked
    }
}

struct CachedFile {
    /// `None` for a temporary file.
    kind: Option<FileKind>,
    /// The time of the last use.
    modified: SystemTime,
    bytes: u64,
    name: OsString,
}

/// Returns the kind of a cache file: `Some(None)` for a temporary file, `None` for a foreign file.
fn kind_of(name: &OsStr) -> Option<Option<FileKind>> {
    let (key, rest) = name.to_str()?.split_once('.')?;
    if key.len() != 2 * size_of::<Key>() || !key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let kind = FileKind::ALL.into_iter().find(|kind| kind.extension() == rest);
    (kind.is_some() || rest.ends_with(TEMPORARY)).then_some(kind)
}

/// Returns the checksum of name and contents. The name is included so that no file can replace another.
fn checksum(name: &str, contents: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(name).chain_update([0]).chain_update(contents).finalize().into()
}

/// Returns the bytes of a file: magic number, checksum and contents.
pub(super) fn seal(name: &str, contents: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &checksum(name, contents), contents].concat()
}

/// Returns the contents of a file, if its magic number and checksum are right.
fn unseal(name: &str, mut file: Vec<u8>) -> Option<Vec<u8>> {
    let (sum, contents) = file.strip_prefix(MAGIC)?.split_first_chunk::<32>()?;
    if contents.is_empty() || checksum(name, contents) != *sum {
        return None;
    }
    file.drain(..file.len() - contents.len());
    Some(file)
}

/// Opens a file for reading if it is a regular file of this user that no other user can write to. Does not follow links or
/// wait for pipes.
fn open_private_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(denied("it is not a regular file"));
    }
    #[cfg(unix)]
    check_owner(&metadata, 0o022)?;
    Ok(file)
}

/// The folder, after the check of its owner and mode. Files are accessed through the folder's descriptor if the system has paths
/// for descriptors, because the folder's path may refer to another folder after the check.
struct Folder {
    at: PathBuf,
    #[cfg(unix)]
    _open: File,
}

impl Folder {
    /// Fails with `PermissionDenied` if other users have access. If they can only read, and the folder is empty or holds only
    /// cache files, the mode is set to 0700 instead: the folder was made for this user, perhaps by an earlier version.
    #[cfg(unix)]
    fn open(path: &Path) -> io::Result<Folder> {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

        check_owner(&fs::symlink_metadata(path)?, 0)?; // the path may be a link, but only a link of this user
        let open = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let metadata = open.metadata()?;
        if !metadata.is_dir() {
            return Err(denied("it is not a folder"));
        }
        let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        let at = if by_descriptor.is_dir() { by_descriptor } else { path.to_owned() };
        let closed = check_owner(&metadata, 0o077);
        if closed.is_err() && check_owner(&metadata, 0o022).is_ok() {
            let mut entries = fs::read_dir(&at)?;
            if entries.all(|entry| entry.is_ok_and(|entry| kind_of(&entry.file_name()).is_some())) {
                open.set_permissions(PermissionsExt::from_mode(0o700))?;
                return Ok(Folder { at, _open: open });
            }
        }
        closed.map(|()| Folder { at, _open: open })
    }

    #[cfg(not(unix))]
    fn open(path: &Path) -> io::Result<Folder> {
        match fs::metadata(path)?.is_dir() {
            true => Ok(Folder { at: path.to_owned() }),
            false => Err(denied("it is not a folder")),
        }
    }

    /// Lists the cache files in the folder, including files of other processes.
    fn files(&self) -> io::Result<Vec<CachedFile>> {
        let listed = |entry: fs::DirEntry| {
            let (kind, metadata) = (kind_of(&entry.file_name())?, entry.metadata().ok()?);
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            Some(CachedFile { kind, modified, bytes: metadata.len(), name: entry.file_name() })
        };
        Ok(fs::read_dir(&self.at)?.flatten().filter_map(listed).collect())
    }
}

fn denied(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why.into())
}

/// Fails if another user owns the file, or if the mode has any of the bits in `forbidden_bits`.
#[cfg(unix)]
fn check_owner(metadata: &fs::Metadata, forbidden_bits: u32) -> io::Result<()> {
    use std::os::unix::fs::MetadataExt;

    // SAFETY: a call without arguments that cannot fail.
    let user = unsafe { libc::geteuid() };
    let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
    if owner != user {
        return Err(denied(format!("it belongs to user {owner}, and this process runs as user {user}")));
    }
    if mode & forbidden_bits != 0 {
        return Err(denied(format!("its mode is {mode:04o}, so that others have access")));
    }
    Ok(())
}

/// The files that store compiled kernels and the measurements of `claystone tune` for later processes, as printed by
/// `claystone cache`. [`device`](crate::device) documents the folder.
///
/// ```
/// if let Some(cache) = claystone::device::ProgramCache::of_process()? {
///     println!("{}: {} of at most {} bytes", cache.folder.display(), cache.bytes, cache.max_bytes);
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProgramCache {
    /// The folder, which is created when the first file is stored.
    pub folder: PathBuf,
    /// The number of files.
    pub files: usize,
    /// The size of the files together, in bytes.
    pub bytes: u64,
    /// The bound on the size of the files together, in bytes.
    pub max_bytes: u64,
}

impl ProgramCache {
    /// Returns the current state of this process's cache; `None` if the cache is off.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a folder that cannot be read, or is refused because other users have access to it.
    pub fn of_process() -> Result<Option<ProgramCache>> {
        let Some(cache) = Cache::of_process() else { return Ok(None) };
        let files = cache.existing_files()?.map_or(Vec::new(), |(files, _)| files);
        let bytes = files.iter().map(|file| file.bytes).sum();
        let (folder, max_bytes) = (cache.folder.clone(), cache.max_size);
        Ok(Some(ProgramCache { folder, files: files.len(), bytes, max_bytes }))
    }

    /// Deletes the files, except the measurements of `claystone tune`. Running processes keep their loaded programs.
    ///
    /// # Errors
    /// The errors of [`of_process`](Self::of_process), and files that cannot be deleted.
    pub fn clear() -> Result<()> {
        let Some(cache) = Cache::of_process() else { return Ok(()) };
        let Some((files, folder)) = cache.existing_files()? else { return Ok(()) };
        for file in files.iter().filter(|file| file.kind != Some(FileKind::Tuning)) {
            match fs::remove_file(folder.at.join(&file.name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(cache.error(&error)),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Cache {
    fn existing_files(&self) -> Result<Option<(Vec<CachedFile>, Folder)>> {
        let listed = match self.open_folder() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            folder => folder.and_then(|folder| Ok((folder.files()?, folder))),
        };
        listed.map(Some).map_err(|error| self.error(&error))
    }

    fn error(&self, error: &io::Error) -> Error {
        let advice = if error.kind() == io::ErrorKind::PermissionDenied { ADVICE } else { "check the disk" };
        Error::invalid("ProgramCache", format!("{}: {error}: {advice}", self.folder.display()))
    }
}

#[cfg(test)]
mod tests;
