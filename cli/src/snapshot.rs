//! `claystone snapshot`: summarises a memory snapshot.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use claystone::storage::{LiveMemory, Snapshot};

/// Summarise memory snapshots: pools, free memory, the largest segments, and the owners and age of memory in use
#[derive(clap::Args)]
#[command(
    long_about = "Summarises memory snapshots of PyTorch or claystone (.pickle, .pkl or .json): a line for each pool
and stream; the largest segments, drawn with # for memory in use, + for partly used and . for free memory; the memory in
use by allocation site (by source line if no stacks were recorded), by the names given to with_context and by age; the
ten largest blocks, which shows leaks; and the memory in use at the peak of the recorded history by allocation site.
Pickles of more than 256 MiB are read as a stream, in memory that does not grow with the length of their history.
'claystone replay' replays the history of a snapshot."
)]
pub struct Args {
    /// Snapshots to show
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Show only the memory in use that was not yet in use in this earlier snapshot of the same process
    #[arg(long, value_name = "EARLIER")]
    since: Option<PathBuf>,
}

/// Pickles with more bytes are read as a stream.
const MAX_WHOLE_BYTES: u64 = 256 << 20;

/// The number of call sites that `--since` prints.
const MAX_LISTED_SITES: usize = 16;

/// Prints every file's summary; returns false if a file is not a snapshot, after reporting it on standard error.
///
/// # Errors
/// Only errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let earlier = match args.since.as_deref().map(load).transpose() {
        Ok(earlier) => earlier,
        Err(error) => {
            eprintln!("claystone snapshot: {error}");
            return Ok(false);
        }
    };
    let mut good = true;
    for file in &args.files {
        match (load(file), &earlier) {
            (Ok(snapshot), None) => write!(out, "{}:\n{snapshot}", file.display())?,
            (Ok(snapshot), Some(earlier)) => {
                writeln!(out, "{}:", file.display())?;
                print_new(&snapshot.live_since(earlier), out)?;
            }
            (Err(error), _) => {
                eprintln!("claystone snapshot: {error}");
                good = false;
            }
        }
    }
    Ok(good)
}

fn load(file: &Path) -> claystone::Result<Snapshot> {
    let is_large = file.metadata().is_ok_and(|file| file.is_file() && file.len() > MAX_WHOLE_BYTES);
    if is_large { Snapshot::load_in_use(file) } else { Snapshot::load(file) }
}

/// Prints a table of call sites with the memory that is in use since the earlier snapshot.
fn print_new(sites: &[LiveMemory], out: &mut impl Write) -> io::Result<()> {
    let bytes = sites.iter().map(|site| site.bytes).fold(0, u64::saturating_add);
    let blocks: u64 = sites.iter().map(|site| site.blocks).sum();
    writeln!(out, "{bytes} bytes in {blocks} blocks are in use that were not in use before")?;
    for site in sites.iter().take(MAX_LISTED_SITES) {
        let mut frames = site.frames.iter().take(4).map(ToString::to_string);
        let place = frames.next().unwrap_or("unknown".into());
        writeln!(out, "{:>15} {:>8}  {place}", site.bytes, site.blocks)?;
        frames.try_for_each(|caller| writeln!(out, "{:>25}  < {caller}", ""))?;
    }
    match sites.len().checked_sub(MAX_LISTED_SITES) {
        Some(more @ 1..) => writeln!(out, "and {more} call sites with less"),
        _ => Ok(()),
    }
}
