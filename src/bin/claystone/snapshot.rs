//! `claystone snapshot`: a memory snapshot in figures.

use std::io::{self, Write};
use std::path::PathBuf;

use claystone::storage::Snapshot;

/// Summarise memory snapshots: pools, free memory, the largest segments, who holds what is in use, and since when
#[derive(clap::Args)]
#[command(
    long_about = "Summarises memory snapshots of PyTorch or claystone (.pickle, .pkl or .json): a line for each pool
and stream, the largest segments, drawn with # for memory in use, + for partly, . for free, and the memory in use by
where it was allocated (by source line, where no stacks were recorded), by the names given to with_context and by age, the
ten largest blocks, which shows what leaks, and the memory that was in use at the peak of the recorded history by where it
was allocated.
'claystone replay' replays the history that a snapshot has."
)]
pub struct Args {
    /// Snapshots to show
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
}

/// Prints every file's summary; false where one is no snapshot, of which standard error tells.
///
/// # Errors
/// Only those of writing.
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
