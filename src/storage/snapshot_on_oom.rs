//! Snapshots that are saved when memory runs out.

use std::path::PathBuf;
use std::sync::Arc;

use super::allocator::{Allocator, find_allocator};
use super::caching::CachingAllocator;
use super::history::{HistoryOptions, Snapshot};
use super::hooks::Registration;
use super::pool::snapshot_with_images;
use crate::{Error, Result};

/// Saves a snapshot to `path` when an allocation fails, until the returned value is dropped. Records the history from now on.
pub(super) fn register(allocator: &'static Arc<dyn Allocator>, path: PathBuf) -> Result<Registration> {
    const OP: &str = "snapshot_on_oom";
    Snapshot::check_name(OP, &path)?;
    let cannot = || Error::invalid(OP, format!("{allocator:?} calls no observers"));
    let caching: &CachingAllocator = find_allocator(&**allocator).ok_or_else(cannot)?;
    if !caching.records_history() {
        allocator.record_memory_history(HistoryOptions::default())?;
    }
    let save = move || match snapshot_with_images(&**allocator).save(&path) {
        Ok(()) => tracing::info!(?path, "a snapshot of the memory was saved"),
        Err(error) => tracing::error!(%error, "no snapshot of the memory could be saved"),
    };
    Ok(caching.add_oom_observer(Box::new(move |_| save())))
}

/// Calls [`register`] with the path in `CLAYSTONE_SNAPSHOT_ON_OOM`, if any.
pub(super) fn register_from_environment(allocator: &'static Arc<dyn Allocator>) {
    let Some(path) = std::env::var_os("CLAYSTONE_SNAPSHOT_ON_OOM").filter(|path| !path.is_empty()) else { return };
    match register(allocator, path.into()) {
        Ok(registration) => std::mem::forget(registration),
        Err(error) => tracing::warn!(?allocator, %error, "CLAYSTONE_SNAPSHOT_ON_OOM is ignored"),
    }
}
