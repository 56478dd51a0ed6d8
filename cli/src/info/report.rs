//! The data of the report. The names of the fields are the JSON keys, which docs/guide/reporting-bugs.md lists.

use std::collections::BTreeMap;
use std::env;
use std::fs;

use claystone::device::{Capabilities, DeviceInfo, Platform, ProgramCache, platforms};
use claystone::storage::Config;
use claystone::{Device, Error};
use serde::Serialize;

use super::self_test::{self, Outcome};

/// All data of the report.
#[derive(Serialize)]
pub struct Report {
    pub claystone: BuildInfo,
    pub host: Host,
    pub opencl: OpenCl,
    pub devices: Vec<DeviceReport>,
    pub configuration: Configuration,
    pub cache: Cache,
}

/// The build of the program.
#[derive(Serialize)]
pub struct BuildInfo {
    pub version: &'static str,
    pub target: String,
    pub debug_assertions: bool,
    pub minimum_rust: &'static str,
}

/// The machine and its operating system.
#[derive(Serialize)]
pub struct Host {
    pub os: String,
    pub kernel: Option<String>,
    pub processor: String,
    pub vector_features: Vec<String>,
    pub threads: usize,
    pub memory: u64,
}

/// The OpenCL loader and its drivers.
#[derive(Serialize)]
pub struct OpenCl {
    /// The files of OpenCL libraries that are loaded, if the system shows them.
    pub libraries: Vec<String>,
    /// The ICD files, which list drivers for the loader.
    pub icd_files: Vec<String>,
    pub platforms: Vec<Platform>,
    /// The reason why `platforms` is empty; `None` if there are platforms.
    pub error: Option<String>,
    /// True if `error` reports a failing driver, false if OpenCL is not installed.
    #[serde(skip)]
    fails: bool,
}

/// A device with its properties and self-test.
#[derive(Serialize)]
pub struct DeviceReport {
    pub device: String,
    pub info: Option<DeviceInfo>,
    pub capabilities: Option<Capabilities>,
    /// The outcomes of the self-test; empty if the self-test was skipped.
    pub self_test: Vec<Outcome>,
    pub error: Option<String>,
}

/// Environment variables and the allocator's settings.
#[derive(Serialize)]
pub struct Configuration {
    pub environment: Vec<Variable>,
    pub allocator: Vec<ConfigEntry>,
    pub error: Option<String>,
}

/// An environment variable that this crate or a driver reads.
#[derive(Serialize)]
pub struct Variable {
    pub name: String,
    pub value: Option<String>,
    pub source: ValueSource,
    /// False for a name that begins like a variable of this crate, but is not one.
    pub known: bool,
}

/// A key of `CLAYSTONE_ALLOC_CONF`.
#[derive(Serialize)]
pub struct ConfigEntry {
    pub key: &'static str,
    pub value: String,
    pub source: ValueSource,
}

/// Whether a value is the default or was set by an environment variable.
#[derive(Serialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum ValueSource {
    Default,
    Environment,
}

/// The cache files of compiled kernels and tuned parameters.
#[derive(Serialize)]
pub struct Cache {
    pub folder: Option<String>,
    pub max_bytes: Option<u64>,
    /// For each kind of contents (programs, probes, tunings): the number and the total size of the files.
    pub files: BTreeMap<String, Files>,
    pub error: Option<String>,
}

/// The number and total size of files.
#[derive(Serialize, Default)]
pub struct Files {
    pub count: u64,
    pub bytes: u64,
}

impl Report {
    pub fn gather(self_tests: bool) -> Report {
        // Devices first, because querying them loads the libraries that are reported.
        let devices: Vec<_> =
            Device::all().into_iter().map(|device| DeviceReport::gather(device, self_tests)).collect();
        let (about, host) = (BuildInfo::gather(), Host::gather());
        let (opencl, configuration, cache) = (OpenCl::gather(), Configuration::gather(), Cache::gather());
        Report { claystone: about, host, opencl, devices, configuration, cache }
    }

    /// True if all queries and self-tests succeeded. The absence of OpenCL is not a failure.
    pub fn is_good(&self) -> bool {
        let device = |d: &DeviceReport| d.error.is_none() && d.self_test.iter().all(|outcome| outcome.passed);
        self.devices.iter().all(device)
            && self.configuration.error.is_none()
            && self.cache.error.is_none()
            && !self.opencl.fails
    }
}

impl BuildInfo {
    fn gather() -> BuildInfo {
        BuildInfo {
            version: env!("CARGO_PKG_VERSION"),
            target: format!("{}-{}", env::consts::ARCH, env::consts::OS),
            debug_assertions: cfg!(debug_assertions),
            minimum_rust: env!("CARGO_PKG_RUST_VERSION"),
        }
    }
}

/// Returns the value of `name` in a text of lines `name=value`.
fn find_assignment(text: &str, name: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
    Some(value.trim_matches('"').to_owned())
}

impl Host {
    fn gather() -> Host {
        let read = |path| fs::read_to_string(path).ok();
        let os = read("/etc/os-release").and_then(|text| find_assignment(&text, "PRETTY_NAME"));
        let info = Device::Cpu.info().ok();
        let capabilities = Device::Cpu.capabilities().unwrap_or_default();
        Host {
            os: os.unwrap_or_else(|| env::consts::OS.to_owned()),
            kernel: read("/proc/sys/kernel/osrelease").map(|text| text.trim().to_owned()),
            processor: info.as_ref().map_or_else(String::new, |info| info.name.clone()),
            vector_features: capabilities.extensions,
            threads: info.as_ref().map_or(0, |info| info.compute_units),
            memory: info.map_or(0, |info| info.memory),
        }
    }
}

impl OpenCl {
    fn gather() -> OpenCl {
        let (platforms, error) = match platforms() {
            Ok(platforms) => (platforms, None),
            Err(error) => (Vec::new(), Some(error)),
        };
        let fails = error.as_ref().is_some_and(|error| !matches!(error, Error::NoDevice { .. }));
        let error = error.map(|error| error.to_string());
        OpenCl { libraries: loaded_libraries(), icd_files: icd_files(), platforms, error, fails }
    }
}

/// Returns the mapped files whose names look like OpenCL libraries.
fn loaded_libraries() -> Vec<String> {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
    let is_opencl = |path: &&str| {
        let file = path.rsplit('/').next().unwrap_or(path).to_lowercase();
        file.contains("opencl") || file.contains("libpocl")
    };
    let mut found: Vec<String> = paths.filter(is_opencl).map(str::to_owned).collect();
    found.sort();
    found.dedup();
    found
}

fn icd_files() -> Vec<String> {
    let folder = env::var("OCL_ICD_VENDORS").ok().filter(|folder| !folder.is_empty());
    let entries = fs::read_dir(folder.as_deref().unwrap_or("/etc/OpenCL/vendors")).into_iter().flatten().flatten();
    let mut files: Vec<String> = entries.map(|entry| entry.path().display().to_string()).collect();
    files.sort();
    files
}

impl DeviceReport {
    fn gather(device: Device, self_test: bool) -> DeviceReport {
        let (info, capabilities) = (device.info(), device.capabilities());
        let error = info.as_ref().err().or(capabilities.as_ref().err()).map(ToString::to_string);
        DeviceReport {
            device: device.to_string(),
            info: info.ok(),
            capabilities: capabilities.ok(),
            self_test: if self_test { self_test::run_self_tests(device) } else { Vec::new() },
            error,
        }
    }
}

/// The environment variables of this crate.
pub const VARIABLES: [&str; 17] = [
    "CLAYSTONE_ALLOC_CONF",
    "CLAYSTONE_CACHE_DIR",
    "CLAYSTONE_CACHE_MAXSIZE",
    "CLAYSTONE_DEVICES",
    "CLAYSTONE_DISTRIBUTED_DEBUG",
    "CLAYSTONE_DISTRIBUTED_SHARED_MEMORY",
    "CLAYSTONE_DISTRIBUTED_TIMEOUT",
    "CLAYSTONE_DRY_RUN",
    "CLAYSTONE_DRY_RUN_JSON",
    "CLAYSTONE_DRY_RUN_SNAPSHOT",
    "CLAYSTONE_GRAPH_REPLAY",
    "CLAYSTONE_KERNELS",
    "CLAYSTONE_NO_CACHING",
    "CLAYSTONE_PROFILE",
    "CLAYSTONE_SNAPSHOT_ON_OOM",
    "CLAYSTONE_SPILL_DIR",
    "CLAYSTONE_TUNING",
];

/// Prefixes of variables that loaders, drivers and rayon read.
const FOREIGN_PREFIXES: [&str; 8] =
    ["OCL_", "OPENCL_", "POCL_", "RUSTICL_", "RAYON_", "CUDA_", "NEO", "XDG_CACHE_HOME"];

impl Configuration {
    fn gather() -> Configuration {
        let known = VARIABLES.map(|name| {
            let value = env::var_os(name).map(|value| value.to_string_lossy().into_owned());
            let source = if value.is_some() { ValueSource::Environment } else { ValueSource::Default };
            Variable { name: name.to_owned(), value, source, known: true }
        });
        let is_other = |name: &str| name.starts_with("CLAYSTONE_") && !VARIABLES.contains(&name);
        let set = env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value));
        let others =
            set.filter(|(name, _)| is_other(name) || FOREIGN_PREFIXES.iter().any(|start| name.starts_with(start)));
        let mut others: Vec<Variable> = others
            .map(|(name, value)| {
                let known = !is_other(&name);
                let value = Some(value.to_string_lossy().into_owned());
                Variable { name, value, source: ValueSource::Environment, known }
            })
            .collect();
        others.sort_by(|a, b| a.name.cmp(&b.name));
        let (allocator, error) = match Config::from_env() {
            Ok(config) => (allocator_keys(&config), None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        Configuration { environment: known.into_iter().chain(others).collect(), allocator, error }
    }
}

/// Returns the allocator's options, and whether the environment sets each of them.
fn allocator_keys(config: &Config) -> Vec<ConfigEntry> {
    let text: String = env::var("CLAYSTONE_ALLOC_CONF").unwrap_or_default().split_whitespace().collect();
    // A key is the text between the beginning or a comma and the next colon.
    let is_given = |key: &str| text.split(',').any(|item| item.split(':').next() == Some(key));
    let by_other = |key: &str| key == "backend" && env::var("CLAYSTONE_NO_CACHING").is_ok_and(|value| value == "1");
    let key = |key: &claystone::storage::ConfigKey| ConfigEntry {
        key: key.name,
        value: key.value(config),
        source: if is_given(key.name) || by_other(key.name) { ValueSource::Environment } else { ValueSource::Default },
    };
    Config::KEYS.iter().map(key).collect()
}

/// The file extensions of the cache's files, each with the kind of contents: a key of [`Cache::files`].
const CACHE_FILE_KINDS: [(&str, &str); 3] = [("clbin", "programs"), ("found", "probes"), ("tuning", "tunings")];

impl Cache {
    fn gather() -> Cache {
        let mut files: BTreeMap<String, Files> =
            CACHE_FILE_KINDS.iter().map(|(_, kind)| (kind.to_string(), Files::default())).collect();
        let (cache, error) = match ProgramCache::of_process() {
            Ok(cache) => (cache, None),
            Err(error) => (None, Some(error.to_string())),
        };
        let entries = cache.iter().filter_map(|cache| fs::read_dir(&cache.folder).ok()).flatten().flatten();
        for entry in entries {
            let path = entry.path();
            let ending = path.extension().and_then(|ending| ending.to_str());
            let kind = CACHE_FILE_KINDS.iter().find(|(known, _)| Some(*known) == ending).map(|(_, kind)| *kind);
            if let Some(kind) = kind.and_then(|kind| files.get_mut(kind)) {
                kind.count += 1;
                kind.bytes += entry.metadata().map_or(0, |metadata| metadata.len());
            }
        }
        Cache {
            folder: cache.as_ref().map(|cache| cache.folder.display().to_string()),
            max_bytes: cache.map(|cache| cache.max_bytes),
            files,
            error,
        }
    }
}
