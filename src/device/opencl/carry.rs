//! Export and import of a device's programs, probe results and tuning, as one file for the same device and driver elsewhere.

use std::path::Path;

use super::cache::FileKind;
use super::{ClDevice, blob};
use crate::device::lock;
use crate::{Error, Result, file};

impl ClDevice {
    /// Writes the programs that this process has loaded for the device, its probe results and its tuning to a file. Returns the
    /// number of programs.
    ///
    /// # Errors
    /// The driver's errors, and [`Error::Invalid`] if the file cannot be written.
    pub(crate) fn export_cache(&self, path: &Path) -> Result<usize> {
        self.check_lost()?;
        let mut entries = self.programs.binaries().map_err(|e| self.error(self.detect_loss(e)))?;
        let programs = entries.len();
        entries.extend(lock(&self.programs.probe_results).clone());
        if self.tuning().is_chosen() {
            entries.insert(self.tuning_file(), self.tuning_text().into_bytes());
        }
        let blob = blob::write(&self.cache_identity(), &entries);
        let refused = |e| Error::invalid("export_cache", format!("{}: {e}", path.display()));
        file::replace(path, &blob).map_err(refused)?;
        Ok(programs)
    }

    /// Loads a complete file of [`export_cache`](Self::export_cache), or nothing. Returns the number of programs.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a file that cannot be read, is damaged, or is of another device, driver or version.
    pub(crate) fn import_cache(&self, path: &Path) -> Result<usize> {
        self.check_lost()?;
        let refused = |why: String| Error::invalid("import_cache", format!("{}: {why}", path.display()));
        let blob = std::fs::read(path).map_err(|e| refused(e.to_string()))?;
        let mut entries = blob::read(&blob, &self.cache_identity()).map_err(refused)?;
        let tuning = entries.remove(&self.tuning_file()).map(|text| self.read_tuning(&String::from_utf8_lossy(&text)));
        let tuning = tuning.transpose().map_err(refused)?;
        let programs = entries.keys().filter(|name| FileKind::Program.matches(name)).count();
        self.imported.extend(entries);
        if let Some(stored) = tuning {
            self.tuning().set_all(stored);
        }
        Ok(programs)
    }

    /// Returns the identity of the device and the driver for which the programs are valid.
    fn cache_identity(&self) -> String {
        format!("{}, {}, {}", self.identity(), self.info().vendor, self.description.platform_version)
    }
}
