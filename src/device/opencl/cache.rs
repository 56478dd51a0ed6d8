//! What one process compiles or finds out about a device, in files for the next.
//!
//! They are in `CLAYSTONE_CACHE_DIR`, else in `$XDG_CACHE_HOME/claystone`, else in `claystone` in the system's folder for caches;
//! `CLAYSTONE_CACHE_DIR=off` keeps none. A file is named by a hash of all that its contents depend on, and sealed with its
//! name. Where they would exceed `CLAYSTONE_CACHE_MAXSIZE` bytes those go that were not used for longest.
//!
//! A binary is code that this process runs, so nobody else may have a hand in it: the folder is this user's with mode 0700,
//! a file is regular, this user's, and writable by nobody else. Folders above are not judged: whoever can rename them can
//! only put in place what is refused here, and on Linux not after the check, since the folder is held open meanwhile
//! ([`Folder`]). The disk is a convenience: whatever goes wrong with it, there is no file.

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

/// The hash of what a file's contents depend on.
pub(super) type Key = [u8; 32];

/// What the folder may hold in bytes, where nothing else is asked for: as CUDA's cache.
const MAX_SIZE: u64 = 256 << 20;
/// After every 1/16 of the bound that is written the folder is scanned and shrunk to 15/16 of the bound: so one process does
/// not exceed it, and does not scan the folder after every file.
const PART: u64 = 16;
/// A temporary file that nobody has written to for so long is of a process that was killed.
const STALE: Duration = Duration::from_secs(600);
/// In front of the contents: what the file is, and a checksum, for a driver given a damaged binary may crash.
const MAGIC: &[u8; 16] = b"claystone binary";
/// What to do about a folder that is not used.
const ADVICE: &str = "make it yours alone (chmod 700), or set CLAYSTONE_CACHE_DIR to a folder that is, or to off";
/// Temporary files end with this.
const TEMPORARY: &str = ".tmp";

/// What is in a file, which is how its name ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Program,
    /// An answer of a device to a probe.
    Found,
    /// What `claystone tune` measured: small, and minutes of work, so never thrown out.
    Tuning,
}

impl Kind {
    const ALL: [Kind; 3] = [Kind::Program, Kind::Found, Kind::Tuning];

    fn extension(self) -> &'static str {
        match self {
            Kind::Program => "clbin",
            Kind::Found => "found",
            Kind::Tuning => "tuning",
        }
    }

    /// Whether a file of this name is one.
    pub(super) fn is_of(self, name: &str) -> bool {
        name.strip_suffix(self.extension()).is_some_and(|stem| stem.ends_with('.'))
    }

    pub(super) fn name(self, key: &Key) -> String {
        let hex: String = key.iter().map(|byte| format!("{byte:02x}")).collect();
        format!("{hex}.{}", self.extension())
    }
}

/// The folder of the files.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
    max_size: u64,
    /// Bytes written since the folder was last scanned. It starts so that the first write scans.
    written: AtomicU64,
    warned: Once,
}

impl Cache {
    /// The one that the environment asks for, when it is first asked for.
    pub(super) fn of_process() -> Option<&'static Cache> {
        static CACHE: LazyLock<Option<Cache>> =
            LazyLock::new(|| Cache::from_variables(|name| std::env::var_os(name).filter(|value| !value.is_empty())));
        let _messages = log::defer(); // a subscriber may ask for it as well
        CACHE.as_ref()
    }

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
                tracing::warn!(?asked, "CLAYSTONE_CACHE_MAXSIZE is no number of bytes: {MAX_SIZE} is used instead");
            });
            MAX_SIZE
        });
        (max_size > 0).then(|| Cache::at(folder, max_size))
    }

    pub(super) fn at(folder: impl Into<PathBuf>, max_size: u64) -> Cache {
        let (folder, written) = (folder.into(), AtomicU64::new(max_size));
        Cache { folder, max_size, written, warned: Once::new() }
    }

    /// What was stored under this name. A damaged file is removed.
    ///
    /// # Errors
    /// `NotFound`; `PermissionDenied` for a folder or a file that is not for us alone, `InvalidData` for a damaged file.
    pub(super) fn load(&self, name: &str) -> io::Result<Vec<u8>> {
        let folder = self.open_folder()?;
        let mut file = open(&folder.at.join(name))?;
        let mut bytes = Vec::new();
        (&mut file).take(self.max_size).read_to_end(&mut bytes)?;
        let contents = unseal(name, bytes).ok_or_else(|| {
            self.remove(name);
            io::Error::new(io::ErrorKind::InvalidData, "the file was damaged")
        })?;
        let _ = file.set_modified(SystemTime::now()); // it was used
        Ok(contents)
    }

    /// Stores contents under a name, for this process and others: they see the file whole or not at all.
    ///
    /// # Errors
    /// A folder that is not for us alone, contents larger than all of it may be, and those of writing.
    pub(super) fn store(&self, name: &str, contents: &[u8]) -> io::Result<PathBuf> {
        let sealed = seal(name, contents);
        let size = sealed.len() as u64;
        if size > self.max_size {
            return Err(io::Error::other(format!("{size} bytes are more than all files may be: {}", self.max_size)));
        }
        make_folder(&self.folder)?;
        let folder = self.open_folder()?;
        // Created by this process, readable by its user alone; not synced, for a file that is cut short is not used.
        let mut builder = tempfile::Builder::new();
        let mut file = builder.prefix(&format!("{name}.")).suffix(TEMPORARY).tempfile_in(&folder.at)?;
        file.write_all(&sealed)?;
        file.persist(folder.at.join(name))?;
        if self.written.fetch_add(size, Relaxed).saturating_add(size) > self.max_size / PART {
            self.written.store(0, Relaxed);
            self.shrink(&folder)?;
        }
        Ok(self.folder.join(name))
    }

    /// Removes a file that turned out to be of no use.
    pub(super) fn remove(&self, name: &str) {
        let (folder, file) = (self.folder.clone(), name.to_owned());
        log::emit(move || tracing::debug!(?folder, file, "cached file refused"));
        let _ = self.open_folder().and_then(|folder| fs::remove_file(folder.at.join(name)));
    }

    /// Removes what killed processes left, and the files that were not used for longest beyond the bound. Another process
    /// may do so at the same time: a file that is gone already is as good as removed.
    fn shrink(&self, folder: &Folder) -> io::Result<()> {
        let mut files = folder.files()?;
        files.retain(|file| {
            // One from the future is of before the clock was set.
            let stale = file.kind.is_none() && !file.modified.elapsed().is_ok_and(|age| age < STALE);
            !(stale && fs::remove_file(folder.at.join(&file.name)).is_ok())
        });
        files.sort_unstable_by_key(|file| file.modified);
        let mut size: u64 = files.iter().map(|file| file.bytes).sum();
        for file in files.iter().filter(|file| matches!(file.kind, Some(Kind::Program | Kind::Found))) {
            if size <= self.max_size - self.max_size / PART {
                break;
            }
            match fs::remove_file(folder.at.join(&file.name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {}
                _ => size -= file.bytes,
            }
        }
        Ok(())
    }

    /// Fails where the folder is not there, or others may have put something in. The latter is told once.
    fn open_folder(&self) -> io::Result<Folder> {
        let checked = Folder::open(&self.folder);
        if let Err(error) = &checked
            && error.kind() == io::ErrorKind::PermissionDenied
        {
            let _messages = log::defer(); // a subscriber may get here as well
            self.warned.call_once(|| {
                let (folder, error) = (self.folder.clone(), error.to_string());
                log::emit(move || tracing::warn!(?folder, "compiled kernels are not kept: {error}; {ADVICE}"));
            });
        }
        checked
    }
}

/// A file in the folder.
struct Listed {
    /// None of a temporary file.
    kind: Option<Kind>,
    /// When it was last used.
    modified: SystemTime,
    bytes: u64,
    name: OsString,
}

/// The kind of a file of ours, nothing inside for a temporary one, nothing for what is not ours.
fn kind_of(name: &OsStr) -> Option<Option<Kind>> {
    let (key, rest) = name.to_str()?.split_once('.')?;
    if key.len() != 2 * size_of::<Key>() || !key.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let kind = Kind::ALL.into_iter().find(|kind| kind.extension() == rest);
    (kind.is_some() || rest.ends_with(TEMPORARY)).then_some(kind)
}

/// The checksum is of the name as well, so that no file can stand in for another.
fn checksum(name: &str, contents: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(name).chain_update([0]).chain_update(contents).finalize().into()
}

pub(super) fn seal(name: &str, contents: &[u8]) -> Vec<u8> {
    [&MAGIC[..], &checksum(name, contents), contents].concat()
}

fn unseal(name: &str, mut file: Vec<u8>) -> Option<Vec<u8>> {
    let (sum, contents) = file.strip_prefix(MAGIC)?.split_first_chunk::<32>()?;
    if contents.is_empty() || checksum(name, contents) != *sum {
        return None;
    }
    file.drain(..file.len() - contents.len());
    Some(file)
}

fn make_folder(folder: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder)
}

/// Opens a file to read it, if it is a regular one of ours that nobody else may write to. No link is followed and no pipe
/// waited for.
fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(path)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(denied("it is no regular file"));
    }
    #[cfg(unix)]
    unix::owned(&metadata, 0o022)?;
    Ok(file)
}

/// The folder, found to be for us alone. What is done in it goes through its descriptor where the system has paths for those:
/// its own path may lead elsewhere by then.
struct Folder {
    at: PathBuf,
    #[cfg(unix)]
    _open: File,
}

impl Folder {
    /// Fails with `PermissionDenied` where it is not for us alone. One that others could only look into is set to mode 0700 if
    /// it is empty or holds our files alone: it was made for us, perhaps by an earlier version.
    #[cfg(unix)]
    fn open(path: &Path) -> io::Result<Folder> {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

        unix::owned(&fs::symlink_metadata(path)?, 0)?; // it may be a link, but not one of others
        let open = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
        let metadata = open.metadata()?;
        if !metadata.is_dir() {
            return Err(denied("it is no folder"));
        }
        let by_descriptor = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        let at = if by_descriptor.is_dir() { by_descriptor } else { path.to_owned() };
        let closed = unix::owned(&metadata, 0o077);
        if closed.is_err() && unix::owned(&metadata, 0o022).is_ok() {
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
            false => Err(denied("it is no folder")),
        }
    }

    /// The files of ours in it, whoever made it.
    fn files(&self) -> io::Result<Vec<Listed>> {
        let listed = |entry: fs::DirEntry| {
            let (kind, metadata) = (kind_of(&entry.file_name())?, entry.metadata().ok()?);
            let modified = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
            Some(Listed { kind, modified, bytes: metadata.len(), name: entry.file_name() })
        };
        Ok(fs::read_dir(&self.at)?.flatten().filter_map(listed).collect())
    }
}

fn denied(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why.into())
}

#[cfg(unix)]
mod unix {
    use std::fs::Metadata;
    use std::io;
    use std::os::unix::fs::MetadataExt;

    /// Fails where it is another user's, or its mode has some of these bits.
    pub(super) fn owned(metadata: &Metadata, never: u32) -> io::Result<()> {
        // SAFETY: a call without arguments that cannot fail.
        let user = unsafe { libc::geteuid() };
        let (owner, mode) = (metadata.uid(), metadata.mode() & 0o7777);
        if owner != user {
            return Err(super::denied(format!("it belongs to user {owner}, and this process runs as user {user}")));
        }
        if mode & never != 0 {
            return Err(super::denied(format!("its mode is {mode:04o}, so that others have access")));
        }
        Ok(())
    }
}

/// The files in which compiled kernels and what `claystone tune` found are kept for later processes; `claystone cache`
/// prints this. [`device`](crate::device) says where they are.
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
    /// Where they are. It is made when there is something to keep.
    pub folder: PathBuf,
    /// How many there are.
    pub files: usize,
    /// How large they are together.
    pub bytes: u64,
    /// How large they may be together.
    pub max_bytes: u64,
}

impl ProgramCache {
    /// The one that this process uses, as it is now; none where it keeps no files.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a folder that cannot be read, or is not used because others have access to it.
    pub fn of_process() -> Result<Option<ProgramCache>> {
        let Some(cache) = Cache::of_process() else { return Ok(None) };
        let files =
            cache.usable()?.map_or(Ok(Vec::new()), |folder| folder.files().map_err(|error| cache.error(&error)))?;
        let bytes = files.iter().map(|file| file.bytes).sum();
        let (folder, max_bytes) = (cache.folder.clone(), cache.max_size);
        Ok(Some(ProgramCache { folder, files: files.len(), bytes, max_bytes }))
    }

    /// Removes the files, all but what `claystone tune` found. Processes keep what they have in memory.
    ///
    /// # Errors
    /// As [`of_process`](Self::of_process), and for a file that cannot be removed.
    pub fn clear() -> Result<()> {
        let Some(cache) = Cache::of_process() else { return Ok(()) };
        let Some(folder) = cache.usable()? else { return Ok(()) };
        let files = folder.files().map_err(|error| cache.error(&error))?;
        for file in files.iter().filter(|file| file.kind != Some(Kind::Tuning)) {
            match fs::remove_file(folder.at.join(&file.name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(cache.error(&error)),
                _ => {}
            }
        }
        Ok(())
    }
}

impl Cache {
    /// The folder, if it is there.
    fn usable(&self) -> Result<Option<Folder>> {
        match self.open_folder() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            folder => folder.map(Some).map_err(|error| self.error(&error)),
        }
    }

    fn error(&self, error: &io::Error) -> Error {
        let advice = if error.kind() == io::ErrorKind::PermissionDenied { ADVICE } else { "look at the disk" };
        Error::invalid("ProgramCache", format!("{}: {error}: {advice}", self.folder.display()))
    }
}

/// Reads a file as this library reads those of its cache: sealed, and what is sealed, or what it has where no seal is, as
/// the choices of `claystone tune`. For tests and fuzzing.
#[doc(hidden)]
pub fn read_cache_file(path: &Path) -> Result<()> {
    let error = |error: &dyn std::fmt::Display| Error::invalid("read_cache_file", error.to_string());
    let (Some(folder), Some(name)) = (path.parent(), path.file_name().and_then(OsStr::to_str)) else {
        return Err(error(&"it is no file"));
    };
    let bytes = fs::read(path).map_err(|e| error(&e))?;
    let contents = Cache::at(folder, MAX_SIZE).load(name).unwrap_or(bytes);
    super::tuning::check(&String::from_utf8_lossy(&contents)).map_err(|e| error(&e))
}

#[cfg(test)]
mod tests;
