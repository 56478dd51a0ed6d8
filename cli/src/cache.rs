//! `claystone cache`: the cache files of compiled kernels.

use std::io::{self, Write};

use claystone::Result;
use claystone::device::ProgramCache;

/// Print the folder and size of the cache of compiled kernels, or clear it
///
/// The folder is CLAYSTONE_CACHE_DIR (off: no cache), else $XDG_CACHE_HOME/claystone, else ~/.cache/claystone. Only its user may
/// enter it (mode 0700). Above CLAYSTONE_CACHE_MAXSIZE bytes, 268435456 by default, the least recently used files are removed.
#[derive(clap::Args)]
pub struct Args {
    /// Remove the compiled kernels; results of `claystone tune` are kept
    #[arg(long)]
    clear: bool,
}

/// Prints the state of the cache; returns false if the folder cannot be used, after reporting the error.
///
/// # Errors
/// Errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    match cache_state(args) {
        Ok(Some(ProgramCache { folder, files, bytes, max_bytes, .. })) => {
            let plural = if files == 1 { "" } else { "s" };
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let (folder, bytes, most) = (folder.display(), mib(bytes), mib(max_bytes));
            writeln!(out, "{folder}: {files} file{plural}, {bytes:.1} of at most {most:.1} MiB")?;
        }
        Ok(None) => writeln!(out, "there is no cache: CLAYSTONE_CACHE_DIR is off, or there is no home folder")?,
        Err(error) => {
            eprintln!("claystone cache: {error}");
            return Ok(false);
        }
    }
    Ok(true)
}

fn cache_state(args: &Args) -> Result<Option<ProgramCache>> {
    if args.clear {
        ProgramCache::clear()?;
    }
    ProgramCache::of_process()
}
