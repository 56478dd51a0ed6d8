//! `claystone cache`: the files that compiled kernels are kept in.

use std::io::{self, Write};

use claystone::Result;
use claystone::device::ProgramCache;

/// Print where compiled kernels are kept and how large they are, or remove them
///
/// They lie in CLAYSTONE_CACHE_DIR (off: nowhere), else in $XDG_CACHE_HOME/claystone, else in ~/.cache/claystone, a folder
/// that only its user may enter (mode 0700). Beyond CLAYSTONE_CACHE_MAXSIZE bytes, 268435456 unless set, those go that were
/// not used for longest.
#[derive(clap::Args)]
pub struct Args {
    /// Remove them; what `claystone tune` measured stays
    #[arg(long)]
    clear: bool,
}

/// Prints what there is; false where the folder is not used, which it has reported.
///
/// # Errors
/// Those of writing.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    match state(args) {
        Ok(Some(ProgramCache { folder, files, bytes, max_bytes, .. })) => {
            let plural = if files == 1 { "" } else { "s" };
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            let (folder, bytes, most) = (folder.display(), mib(bytes), mib(max_bytes));
            writeln!(out, "{folder}: {files} file{plural}, {bytes:.1} of at most {most:.1} MiB")?;
        }
        Ok(None) => writeln!(out, "nothing is kept: CLAYSTONE_CACHE_DIR is off, or there is no home")?,
        Err(error) => {
            eprintln!("claystone cache: {error}");
            return Ok(false);
        }
    }
    Ok(true)
}

/// The one of this process, for `claystone info`.
///
/// # Errors
/// For a folder that is not used.
pub fn program_cache() -> Result<Option<ProgramCache>> {
    ProgramCache::of_process()
}

fn state(args: &Args) -> Result<Option<ProgramCache>> {
    if args.clear {
        ProgramCache::clear()?;
    }
    program_cache()
}
