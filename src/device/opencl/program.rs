//! Builds kernels once per process, and stores the binaries on disk for later processes: see [`cache`](super::cache).
//!
//! A program's key is the SHA-256 of everything on which the binary depends: the device, its driver, the source, the
//! options and this crate's version.

use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opencl_sys as cl;
use sha2::{Digest, Sha256};

use super::ClDevice;
use super::cache::{Cache, Entries, FileKind, Key};
use super::description::{decode_number, text};
use super::driver::{ClKernel, Program, call, create, info};
use super::errors::ClError;
use super::exit;
use crate::device::lru::Lru;
use crate::device::profiler;
use crate::device::{DeviceKind, log};
use crate::sync::lock;
use crate::{Error, Result};

/// A source with this line has inline assembly for NVIDIA's `sm_90a`, commented out by [`HIDDEN_MARK`], because drivers build for
/// `sm_90`, which lacks these instructions. The comment marks are removed from the PTX that is the program's binary.
pub(crate) const SM_90A: &str = "#define SM_90A\n";
/// The comment mark in front of instructions for `sm_90a`.
const HIDDEN_MARK: &str = "//@ ";

/// A source line that ends with the maximum number of registers per work-item, for NVIDIA's compiler. By default the compiler
/// gives each work-item many registers, so that a compute unit may hold only few work-items.
pub(crate) const MOST_REGISTERS: &str = "#define MOST_REGISTERS ";

/// Rounds f32 division and square roots correctly; NVIDIA's are otherwise off by one unit in the last place.
const CORRECT_DIVISION: &str = "-cl-fp32-correctly-rounded-divide-sqrt ";
/// Kernels that keep fast division: softmax and attention divide sums of exponentials, whose own errors are larger.
const FAST_KERNELS: [&str; 5] = ["attention", "row", "softmax_slices", "cross_entropy", "interpolate"];
/// A source line that keeps fast division. Rounding to f16 or bf16 hides the last place of f32, and correct division would
/// take 1.4 times as long.
pub(crate) const FAST_DIVISION: &str = "#define FAST_DIVISION\n";

/// Makes Intel's compiler compute offsets in 64 bits, as required for programs that use a buffer of more than 4 GiB.
const WIDE_OFFSETS: &str = "-cl-intel-greater-than-4GB-buffer-required ";

/// Declarations of the built-in functions that the crate's own sources call; see the file's comments.
const BUILTINS: &str = include_str!("../../../kernels/builtins.cl");
/// Skips clang's header of 18,000 lines, by defining its include guard. PoCL includes the header twice in every program, which
/// takes five sixths of the build time.
const WITHOUT_HEADER: &str = "-D_OPENCL_H_ ";

/// A program; `None` until it is built. The lock is held during a build, so that a second thread waits instead of building.
type ProgramSlot = Arc<Mutex<Option<Arc<Program>>>>;

#[derive(Default)]
pub(super) struct Programs {
    loaded: Loaded,
    /// Results of probes of the device, by file name.
    pub(super) probe_results: Mutex<Entries>,
    /// Programs and results of probes that were imported, by file name.
    pub(super) imported: Mutex<Entries>,
    from_source: AtomicU64,
    from_disk: AtomicU64,
    /// The number of the crate's programs that failed to build [`WITHOUT_HEADER`] and were built with the header.
    pub(super) with_header: AtomicU64,
    /// The number of binaries that took longer than [`SLOW_BINARY_TIME`] to get.
    slow_binaries: AtomicU32,
}

/// A driver that takes longer to return a binary compiles the binary for the request: for work-groups of any size, which no launch
/// runs. Such a driver (PoCL) caches launched programs itself, so after [`SLOW_BINARIES`] slow requests, no binary is requested.
const SLOW_BINARY_TIME: Duration = Duration::from_millis(20);
/// The number of slow binaries after which no binary is requested any more.
const SLOW_BINARIES: u32 = 2;

/// An odd multiplier that mixes bits: 2^64 divided by the golden ratio.
const HASH_MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;

/// The maximum number of the crate's programs that stay loaded after their kernels are dropped.
const MAX_OWN: usize = 1024;
/// The maximum number of users' programs that stay loaded after their kernels are dropped.
const MAX_OF_USERS: usize = 32;

/// The loaded programs of each [`Author`], with least-recently-used eviction, kept for kernels that are created again. A kernel
/// itself keeps its program alive.
struct Loaded([Mutex<Lru<Key, ProgramSlot>>; 2]);

impl Default for Loaded {
    fn default() -> Self {
        Loaded([MAX_OWN, MAX_OF_USERS].map(|capacity| Mutex::new(Lru::new(capacity))))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Author {
    Crate,
    User,
}

impl Programs {
    fn slot(&self, key: Key, by: Author) -> ProgramSlot {
        let mut loaded = lock(&self.loaded.0[by as usize]);
        let (slot, evicted) = loaded.get_or_insert(key, ProgramSlot::default);
        let slot = Arc::clone(slot);
        drop(loaded); // releases the lock before the evicted programs are dropped
        drop(evicted);
        slot
    }

    /// Returns the binary of every loaded program, by file name.
    pub(super) fn binaries(&self) -> Result<Entries, ClError> {
        let all = |loaded: &Mutex<Lru<Key, ProgramSlot>>| -> Vec<(Key, ProgramSlot)> {
            lock(loaded).iter().map(|(&key, slot)| (key, Arc::clone(slot))).collect()
        };
        let programs = self.loaded.0.iter().flat_map(all).filter_map(|(key, slot)| Some((key, lock(&slot).clone()?)));
        programs.map(|(key, program)| Ok((FileKind::Program.name(&key), binary(&program)?))).collect()
    }

    fn imported(&self, name: &str) -> Option<Vec<u8>> {
        lock(&self.imported).get(name).cloned()
    }

    /// Returns the number of programs built from source, and the number loaded from disk, on this device so far.
    #[cfg(test)]
    pub(super) fn builds(&self) -> (u64, u64) {
        (self.from_source.load(Relaxed), self.from_disk.load(Relaxed))
    }
}

/// Builds a kernel for [`ClDevice::build`].
pub(crate) fn build(device: &ClDevice, name: &'static str, source: &str, entry: &str) -> Result<ClKernel> {
    let source = &without_comment_lines(source);
    // PoCL has its own disk cache. Getting a binary from PoCL compiles work-group functions of any size, which no launch runs,
    // and loading it takes as long as loading from PoCL's cache.
    let cache = Cache::of_process().filter(|_| !is_pocl(device));
    let registers = source.lines().find_map(|line| line.strip_prefix(MOST_REGISTERS));
    let fast = FAST_KERNELS.contains(&name) || source.contains(FAST_DIVISION);
    let single =
        || decode_number(&info!(clGetDeviceInfo(device.id(), cl::CL_DEVICE_SINGLE_FP_CONFIG)).unwrap_or_default());
    let divides_correctly = || single() & 1 << 7 != 0; // CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT
    let division = if !fast && divides_correctly() { CORRECT_DIVISION } else { "" };
    if let Some(registers) = registers {
        let options = format!("{division}-cl-nv-maxrregcount={registers} ");
        match build_cached(device, Author::Crate, name, source, &options, entry, cache) {
            Err(Error::Build { .. }) => {} // the driver does not know the option
            made => return made,
        }
    }
    build_cached(device, Author::Crate, name, source, division, entry, cache)
}

/// Builds a kernel like [`build`] from a user's source, with more options for the compiler.
pub(crate) fn build_with(
    device: &ClDevice,
    name: &'static str,
    source: &str,
    options: &str,
    entry: &str,
) -> Result<ClKernel> {
    build_cached(device, Author::User, name, source, options, entry, Cache::of_process())
}

/// Builds a kernel like [`build`] with a given cache.
pub(super) fn build_cached(
    device: &ClDevice,
    by: Author,
    name: &'static str,
    source: &str,
    more_options: &str,
    entry: &str,
    cache: Option<&Cache>,
) -> Result<ClKernel> {
    device.check_lost()?;
    let options = build_options(device) + more_options;
    let key = key(device, source, &options);
    let _messages = log::defer(); // a subscriber may build the same program, which needs the lock
    let slot = device.programs.slot(key, by);
    let program = {
        let mut slot = lock(&slot);
        match &*slot {
            Some(program) => Arc::clone(program),
            None => {
                let file = FileKind::Program.name(&key);
                let built = exit::delay_exit(|| load_or_build(device, by, name, source, &options, cache, &file))?;
                Arc::clone(slot.insert(Arc::new(built)))
            }
        }
    };
    let mix = |id: u64, byte| (id.rotate_left(8) ^ u64::from(byte)).wrapping_mul(HASH_MULTIPLIER);
    let id = entry.bytes().chain(key).fold(0, mix);
    exit::call(|| ClKernel::create(device.id(), program, name, entry, id)).map_err(|e| match e.code {
        // CL_INVALID_KERNEL_NAME
        -46 => Error::Build {
            device: device.device(),
            kernel: name.into(),
            log: format!("the program has no kernel named {entry}"),
        },
        _ => device.failed(e),
    })
}

fn is_pocl(device: &ClDevice) -> bool {
    device.description.platform_version.to_lowercase().contains("pocl")
}

fn build_options(device: &ClDevice) -> String {
    let mut options = String::new();
    if device.description.opencl_c >= (1, 2) {
        options += "-cl-std=CL1.2 ";
    }
    if device.info().fp64 {
        options += "-DHAS_F64 ";
    }
    if device.info().kind == DeviceKind::Cpu {
        options += "-DIS_CPU ";
    }
    if device.imitates_fence_device() {
        options += "-DBUILTIN_FENCE ";
    }
    if device.has_wide_offsets() {
        options += WIDE_OFFSETS;
    }
    options
}

/// Returns the program's key: the hash of everything on which its binary depends.
fn key(device: &ClDevice, source: &str, options: &str) -> Key {
    let info = device.info();
    let parts = [
        env!("CARGO_PKG_VERSION"),
        &info.name,
        &info.vendor,
        &info.driver,
        &device.description.platform_version,
        options,
        source,
    ];
    let mut hash = Sha256::new();
    for part in parts {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    hash.finalize().into()
}

/// Returns the cached result of the probe in `source`. Without a cached result, calls `find`, and caches the result unless `None`.
pub(super) fn cached_probe(device: &ClDevice, source: &str, find: impl FnOnce() -> Option<Vec<u8>>) -> Option<Vec<u8>> {
    let (cache, name) = (Cache::of_process(), FileKind::Probe.name(&key(device, source, &build_options(device))));
    let known = device.programs.imported(&name).or_else(|| cache?.load(&name).ok());
    let found = known.or_else(|| {
        let found = find()?;
        if let Some(cache) = cache {
            let _ = cache.store(&name, &found);
        }
        Some(found)
    })?;
    lock(&device.programs.probe_results).insert(name, found.clone());
    Some(found)
}

/// Gets the program from an imported file or the disk cache, else builds it from source and caches it.
fn load_or_build(
    device: &ClDevice,
    by: Author,
    name: &'static str,
    source: &str,
    options: &str,
    cache: Option<&Cache>,
    file: &str,
) -> Result<Program> {
    let span = |kind| profiler::span(kind, name, device.device(), device.current_stream().0, 0);
    let loading = span(profiler::RecordKind::Load);
    let imported = device.programs.imported(file).and_then(|binary| {
        let program = load_binary(device, &binary, options);
        if program.is_none() {
            log::emit(move || tracing::debug!(name, "the driver refuses the program that was imported"));
        }
        program
    });
    if let Some(program) = imported.or_else(|| load(device, cache?, file, options)) {
        device.programs.from_disk.fetch_add(1, Relaxed);
        return Ok(program);
    }
    if let Some(loading) = loading {
        loading.forget();
    }
    let _compiling = span(profiler::RecordKind::Compile);
    let started = Instant::now();
    let mut program = compile(device, by, name, source, options)?;
    if source.contains(SM_90A) {
        // Never use the program with hidden instructions: it computes a wrong result.
        let ptx = binary(&program).ok().and_then(|binary| enable_hidden_instructions(&binary));
        program = ptx.and_then(|ptx| load_binary(device, ptx.as_bytes(), options)).ok_or_else(|| Error::Build {
            device: device.device(),
            kernel: name.into(),
            log: "instructions of sm_90a could not be put into the program".into(),
        })?;
    }
    device.programs.from_source.fetch_add(1, Relaxed);
    let (kernel, at, took) = (name.to_owned(), device.device(), started.elapsed());
    log::emit(move || tracing::debug!(kernel, device = %at, ?took, "built from source"));
    if let Some(cache) = cache
        && device.programs.slow_binaries.load(Relaxed) < SLOW_BINARIES
    {
        let asked = Instant::now();
        let saved = binary(&program)
            .map_err(|e| e.name().to_owned())
            .and_then(|b| cache.store(file, &b).map_err(|e| e.to_string()));
        if let Err(cause) = saved {
            let file = file.to_owned();
            log::emit(move || tracing::debug!(file, cause, "program not cached on disk"));
        }
        if asked.elapsed() > SLOW_BINARY_TIME {
            device.programs.slow_binaries.fetch_add(1, Relaxed);
        }
    }
    Ok(program)
}

/// Compiles from source. On PoCL, the crate's own programs are built without the header of built-in functions, and with the
/// header if that fails.
fn compile(device: &ClDevice, by: Author, name: &str, source: &str, options: &str) -> Result<Program> {
    if by == Author::User || !is_pocl(device) {
        return compile_text(device, name, source, options);
    }
    let short = compile_text(
        device,
        name,
        &[&without_comment_lines(BUILTINS), source].concat(),
        &[options, WITHOUT_HEADER].concat(),
    );
    let Err(Error::Build { log, .. }) = short else { return short };
    let whole = compile_text(device, name, source, options)?;
    device.programs.with_header.fetch_add(1, Relaxed);
    #[cfg(test)]
    assert!(!source.starts_with("#define FAULT_"), "kernels/builtins.cl lacks what {name} calls: {log}");
    let kernel = name.to_owned();
    log::emit(move || tracing::debug!(kernel, log, "built with all built-in functions"));
    Ok(whole)
}

/// Compiles a source. The error has the compiler's log.
fn compile_text(device: &ClDevice, name: &str, source: &str, options: &str) -> Result<Program> {
    let source_text = CString::new(source).map_err(|_| Error::invalid("build", "the source contains a zero byte"))?;
    let (mut line, len) = (source_text.as_ptr(), source.len());
    let program = create!(clCreateProgramWithSource(device.context, 1, &mut line, &len))
        .map(Program)
        .map_err(|e| device.failed(e))?;
    match build_program(device, &program, options) {
        Ok(()) => Ok(program),
        // CL_BUILD_PROGRAM_FAILURE, CL_INVALID_BUILD_OPTIONS; some drivers return other codes, with a log.
        Err(e) => {
            let log = info!(clGetProgramBuildInfo(program.0, device.id(), cl::CL_PROGRAM_BUILD_LOG));
            let mut log = text(&log.unwrap_or_default());
            if log.is_empty() {
                if !matches!(e.code, -11 | -43) {
                    return Err(device.failed(e));
                }
                log = format!("{} (the driver gave no log)", e.name());
            }
            Err(Error::Build { device: device.device(), kernel: name.into(), log })
        }
    }
}

fn build_program(device: &ClDevice, program: &Program, options: &str) -> Result<(), ClError> {
    let options = CString::new(options).map_err(|_| ClError::new("clBuildProgram", -43))?;
    call!(clBuildProgram(program.0, 1, &device.id(), options.as_ptr(), None, ptr::null_mut()))
}

/// Loads the program in a file, which is deleted if the driver refuses the binary.
fn load(device: &ClDevice, cache: &Cache, file: &str, options: &str) -> Option<Program> {
    let program = load_binary(device, &cache.load(file).ok()?, options);
    if program.is_none() {
        cache.remove(file);
    }
    program
}

/// Loads a binary; none if the driver refuses it.
fn load_binary(device: &ClDevice, binary: &[u8], options: &str) -> Option<Program> {
    let (mut status, len, mut start) = (0, binary.len(), binary.as_ptr());
    let program = create!(clCreateProgramWithBinary(device.context, 1, &device.id(), &len, &mut start, &mut status));
    let program = Program(program.ok()?);
    (status == 0 && build_program(device, &program, options).is_ok()).then_some(program)
}

/// Returns the binary of a program built for one device. In an adopted context, the binaries of other devices are empty.
fn binary(program: &Program) -> Result<Vec<u8>, ClError> {
    let sizes = info!(clGetProgramInfo(program.0, cl::CL_PROGRAM_BINARY_SIZES))?;
    let sizes = sizes.chunks_exact(size_of::<usize>()).map(|size| decode_number(size) as usize);
    let mut binaries: Vec<Vec<u8>> = sizes.map(|size| vec![0; size]).collect();
    let mut starts: Vec<*mut u8> = binaries.iter_mut().map(|bytes| bytes.as_mut_ptr()).collect();
    let (to, size) = (starts.as_mut_ptr().cast(), size_of_val(&starts[..]));
    call!(clGetProgramInfo(program.0, cl::CL_PROGRAM_BINARIES, size, to, ptr::null_mut()))?;
    Ok(binaries.into_iter().max_by_key(Vec::len).unwrap_or_default())
}

/// Returns the source without lines that are comments, because drivers and caches identify a program by its text: a changed comment
/// must not compile all kernels again.
fn without_comment_lines(source: &str) -> String {
    source.lines().filter(|line| !line.trim_start().starts_with("//")).flat_map(|line| [line, "\n"]).collect()
}

/// Removes the comment marks in front of hidden instructions, and sets the target `sm_90a`.
fn enable_hidden_instructions(binary: &[u8]) -> Option<String> {
    let ptx = std::str::from_utf8(binary).ok()?;
    let target = ".target sm_90";
    let (head, tail) = ptx.split_once(target).filter(|(_, tail)| !tail.starts_with(char::is_alphanumeric))?;
    tail.contains(HIDDEN_MARK).then(|| format!("{head}{target}a{}", tail.replace(HIDDEN_MARK, "")))
}

#[cfg(test)]
mod tests;
