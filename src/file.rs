//! Files that are read and replaced as a whole: a reader gets either the old or the new contents, even after a crash.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// Upper bound, in bytes, on the contents of a pipe or a device, which has no known size and may never end.
const MAX_STREAM_BYTES: u64 = 64 << 20;

/// Reads all bytes of a file. At most 64 MiB are read from a pipe or a device. More bytes are an error.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("notes");
/// std::fs::write(&path, "ten bytes.")?;
/// assert_eq!(claystone::file::read(&path)?.len(), 10);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    if file.metadata()?.is_file() {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        return Ok(bytes);
    }
    // Reserves the whole capacity at once, because a vector that grows needs the old and the new memory together.
    let mut bytes = Vec::with_capacity(MAX_STREAM_BYTES as usize + 2);
    file.take(MAX_STREAM_BYTES + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MAX_STREAM_BYTES {
        true => Err(io::Error::other("it is not a regular file and has more than 64 MiB: copy it to a file first")),
        false => Ok(bytes),
    }
}

/// The maximum number of symbolic links that are followed, as on Linux.
const MAX_SYMLINKS: usize = 40;

/// A file that takes its final name in [`commit`](NewFile::commit), after all bytes are on the disk.
///
/// Until then an existing file of that name stays as it is. Dropping a `NewFile` without a commit removes the temporary
/// file. [`io`](crate::io) writes its checkpoints this way; use it for formats of your own.
///
/// ```
/// use std::io::Write;
/// use claystone::file::NewFile;
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("checkpoint");
/// let mut file = NewFile::create(&path)?;
/// file.write_all(b"all of it")?;
/// assert!(!path.exists());
/// file.commit()?;
/// assert_eq!(std::fs::read(&path)?, b"all of it");
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct NewFile(Target);

/// The destination of the bytes.
enum Target {
    /// A temporary file with an unpredictable, unused name in the folder of the file that it replaces.
    Temporary { file: NamedTempFile, target: PathBuf },
    /// A pipe or a device, which is written to directly and never replaced.
    Stream(File),
}

impl NewFile {
    /// Creates the temporary file, which gets the mode and the owner of the file that it replaces, or the default mode.
    /// A symbolic link is kept, and its target is replaced. Pipes and devices are written to directly. Fails for a
    /// folder, for a file without write permission, and in a folder that does not accept new files.
    pub fn create(path: &Path) -> io::Result<NewFile> {
        let target = resolve_symlinks(path);
        // Opening for writing makes folders and files without write permission fail, as if they were overwritten in place.
        let old = match OpenOptions::new().write(true).open(&target) {
            Ok(old) => Some(old),
            Err(e) if e.kind() == io::ErrorKind::NotFound => None,
            Err(e) => return Err(e),
        };
        let attributes = old.as_ref().map(File::metadata).transpose()?;
        if let (Some(old), Some(attributes)) = (old, &attributes)
            && !attributes.is_file()
        {
            return Ok(NewFile(Target::Stream(old)));
        }
        let mut temporary = tempfile::Builder::new();
        temporary.prefix(".claystone-").suffix(".tmp");
        #[cfg(unix)]
        temporary.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // minus the process's umask
        let file = temporary.tempfile_in(parent_folder(&target))?;
        if let Some(attributes) = attributes {
            #[cfg(unix)]
            {
                use std::os::unix::fs::MetadataExt;
                // Only root may give files to other users. The call fails for other users, who then own the new file.
                let _ = std::os::unix::fs::fchown(file.as_file(), Some(attributes.uid()), Some(attributes.gid()));
            }
            file.as_file().set_permissions(attributes.permissions())?;
        }
        Ok(NewFile(Target::Temporary { file, target }))
    }

    /// Renames the file to its final name after its contents are on the disk. After an error the final name is
    /// unchanged.
    pub fn commit(self) -> io::Result<()> {
        let Target::Temporary { file, target } = self.0 else { return Ok(()) };
        file.as_file().sync_all()?;
        file.persist(&target)?;
        // Not every file system can sync a folder. Without the sync, a crash may bring the old file back, but intact.
        let _ = File::open(parent_folder(&target)).and_then(|folder| folder.sync_all());
        Ok(())
    }

    fn file_mut(&mut self) -> &mut File {
        match &mut self.0 {
            Target::Temporary { file, .. } => file.as_file_mut(),
            Target::Stream(file) => file,
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file_mut().flush()
    }
}

impl Seek for NewFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file_mut().seek(to)
    }
}

/// Replaces a file atomically: all bytes are written, or the old file stays.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = NewFile::create(path)?;
    file.write_all(bytes)?;
    file.commit()
}

/// Follows symbolic links, also to a file that does not exist: opening a link for writing creates its target.
fn resolve_symlinks(path: &Path) -> PathBuf {
    let mut target = path.to_owned();
    for _ in 0..MAX_SYMLINKS {
        let Ok(next) = fs::read_link(&target) else { break };
        target = parent_folder(&target).join(next);
    }
    target
}

fn parent_folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
