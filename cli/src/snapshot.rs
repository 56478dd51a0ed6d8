//! `claystone snapshot`: summarises a memory snapshot.

use std::io::{self, Write};
use std::path::PathBuf;

use claystone::storage::Snapshot;

/// Summarise memory snapshots: pools, free memory, the largest segments, and the owners and age of memory in use
#[derive(clap::Args)]
#[command(
    long_about = "Summarises memory snapshots of PyTorch or claystone (.pickle, .pkl or .json): a line for each pool
and stream; the largest segments, drawn with # for memory in use, + for partly used and . for free memory; the memory in
use by allocation site (by source line if no stacks were recorded), by the names given to with_context and by age; the
ten largest blocks, which shows leaks; and the memory in use at the peak of the recorded history by allocation site.
'claystone replay' replays the history of a snapshot."
)]
pub struct Args {
    /// Snapshots to show
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Prints every file's summary; returns false if a file is not a snapshot, after reporting it on standard error.
///
/// # Errors
/// Only errors of writing to `out`.
pub fn run(args: &Args, out: &mut impl Write) -> io::Result<bool> {
    let mut good = true;
    for file in &args.files {
        match Snapshot::load(file) {
            Ok(snapshot) => write!(out, "{}:\n{snapshot}", file.display())?,
            Err(error) => {
                eprintln!("claystone snapshot: {error}");
                good = false;
            }
        }
    }
    Ok(good)
}
