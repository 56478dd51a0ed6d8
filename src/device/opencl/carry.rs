//! What a device's cache has, carried to another process or machine of the same device and driver in one file.

use std::path::Path;

use super::cache::Kind;
use super::{ClDevice, blob};
use crate::device::lock;
use crate::{Error, Result, file};

impl ClDevice {
    /// Writes the programs that this process has used on the device, answers of the device, and its tuning to a file, and
    /// says how many programs there are.
    ///
    /// # Errors
    /// What the driver refuses, and [`Error::Invalid`] where the file cannot be written.
    pub(crate) fn export_cache(&self, path: &Path) -> Result<usize> {
        self.check_lost()?;
        let mut entries = self.programs.binaries().map_err(|e| self.error(self.settle(e)))?;
        let programs = entries.len();
        entries.extend(lock(&self.programs.found).clone());
        if self.is_tuned() {
            entries.insert(self.tuning_file(), self.tuning_text().into_bytes());
        }
        let blob = blob::write(&self.of_driver(), &entries);
        let refused = |e| Error::invalid("export_cache", format!("{}: {e}", path.display()));
        file::replace(path, &blob).map_err(refused)?;
        Ok(programs)
    }

    /// Takes over what [`export_cache`](Self::export_cache) wrote, and says how many programs there are. All of it, or
    /// nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a file that cannot be read, is damaged, or is of another device, driver or version.
    pub(crate) fn import_cache(&self, path: &Path) -> Result<usize> {
        self.check_lost()?;
        let refused = |why: String| Error::invalid("import_cache", format!("{}: {why}", path.display()));
        let blob = std::fs::read(path).map_err(|e| refused(e.to_string()))?;
        let mut entries = blob::read(&blob, &self.of_driver()).map_err(refused)?;
        let tuning = entries.remove(&self.tuning_file()).map(|text| self.read_tuning(&String::from_utf8_lossy(&text)));
        let tuning = tuning.transpose().map_err(refused)?;
        let programs = entries.keys().filter(|name| Kind::Program.is_of(name)).count();
        self.imported.extend(entries);
        if let Some(stored) = tuning {
            self.set_all_tuned(stored);
        }
        Ok(programs)
    }

    /// Whose programs they are.
    fn of_driver(&self) -> String {
        format!("{}, {}, {}", self.identity(), self.info().vendor, self.found.platform_version)
    }
}
