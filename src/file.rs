//! Files read and replaced as a whole: whoever opens one finds the old contents or the new, whatever happens meanwhile.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use tempfile::NamedTempFile;

/// What is read of a pipe or a device, which does not say how much it has and may never end.
const MOST_OF_A_STREAM: u64 = 64 << 20;

/// The bytes of a file; of a pipe or a device no more than 64 MiB.
///
/// ```
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("notes");
/// std::fs::write(&path, "ten bytes.")?;
/// assert_eq!(claystone::file::read(&path)?.len(), 10);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// What the file system fails with; more than 64 MiB where that is no regular file.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    if file.metadata()?.is_file() {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        return Ok(bytes);
    }
    // Once as large as it gets: a vector that grows is there twice.
    let mut bytes = Vec::with_capacity(MOST_OF_A_STREAM as usize + 2);
    file.take(MOST_OF_A_STREAM + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > MOST_OF_A_STREAM {
        true => Err(io::Error::other("it is no regular file and has more than 64 MiB: copy it to a file first")),
        false => Ok(bytes),
    }
}

/// How many links a name may go through, as on Linux.
const LINKS: usize = 40;

/// A file that takes its name in [`commit`](NewFile::commit), once all of it is on the disk; until then whatever has the
/// name keeps it, and a file that is dropped before leaves nothing behind. For checkpoints in formats of your own, as
/// [`io`](crate::io) writes its own.
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

enum Target {
    /// Written beside the file that it replaces, under an unpredictable name that nothing had.
    Temporary { file: NamedTempFile, target: PathBuf },
    /// A pipe or a device, which is written to and never replaced.
    Stream(File),
}

impl NewFile {
    /// Begins a file with the mode that creating it would give, or the mode and the owner of the file that it replaces. A
    /// link stays, and the file that it names is replaced. Pipes and devices are written to at once.
    ///
    /// # Errors
    /// Where there is a folder or a file that may not be written to, and where the folder takes no new file.
    pub fn create(path: &Path) -> io::Result<NewFile> {
        let target = behind_links(path);
        // A file that may not be written to, and a folder, are refused as if they were opened to be overwritten.
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
        temporary.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // less the process's umask
        let file = temporary.tempfile_in(folder(&target))?;
        if let Some(attributes) = attributes {
            #[cfg(unix)]
            {
                use std::os::unix::fs::MetadataExt;
                // Only root may give files away; for others the file becomes their own.
                let _ = std::os::unix::fs::fchown(file.as_file(), Some(attributes.uid()), Some(attributes.gid()));
            }
            file.as_file().set_permissions(attributes.permissions())?;
        }
        Ok(NewFile(Target::Temporary { file, target }))
    }

    /// Gives the file its name, after its contents are on the disk.
    ///
    /// # Errors
    /// What the file system fails with; the name is then as it was.
    pub fn commit(self) -> io::Result<()> {
        let Target::Temporary { file, target } = self.0 else { return Ok(()) };
        file.as_file().sync_all()?;
        file.persist(&target)?;
        // Not every file system can sync a folder; without it a crash of the machine may bring the old file back, whole.
        let _ = File::open(folder(&target)).and_then(|folder| folder.sync_all());
        Ok(())
    }

    fn file(&mut self) -> &mut File {
        match &mut self.0 {
            Target::Temporary { file, .. } => file.as_file_mut(),
            Target::Stream(file) => file,
        }
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file().flush()
    }
}

impl Seek for NewFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.file().seek(to)
    }
}

/// Writes a file whole or not at all.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = NewFile::create(path)?;
    file.write_all(bytes)?;
    file.commit()
}

/// The file that a name stands for, there or not: opening a link for writing creates the file that it names.
fn behind_links(path: &Path) -> PathBuf {
    let mut target = path.to_owned();
    for _ in 0..LINKS {
        let Ok(next) = fs::read_link(&target) else { break };
        target = folder(&target).join(next);
    }
    target
}

fn folder(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}
