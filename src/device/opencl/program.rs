//! Building kernels, once a process, and keeping the result on disk for the next: see [`cache`](super::cache).
//!
//! A program is named by the SHA-256 of everything that its binary depends on: the device, its driver, the source, the
//! options and this crate's version.

use std::ffi::CString;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use opencl3::device::CL_DEVICE_SINGLE_FP_CONFIG;
use opencl3::kernel::{CL_KERNEL_COMPILE_WORK_GROUP_SIZE, CL_KERNEL_NUM_ARGS, CL_KERNEL_WORK_GROUP_SIZE};
use opencl3::program::{CL_PROGRAM_BINARIES, CL_PROGRAM_BINARY_SIZES, CL_PROGRAM_BUILD_LOG};
use sha2::{Digest, Sha256};

use super::ClDevice;
use super::blob::Entries;
use super::cache::{Cache, Key, Kind};
use super::discovery::number_of;
use super::driver::{ClKernel, Program, call, create, info, value};
use super::errors::ClError;
use super::exit;
use crate::device::lock;
use crate::device::lru::Lru;
use crate::device::profiler;
use crate::device::{DeviceKind, log};
use crate::{Error, Result};

/// A source with this line has instructions for NVIDIA's `sm_90a` in inline assembly, each of their lines behind
/// [`HIDDEN`]: drivers build for `sm_90`, which lacks them. They are opened in the PTX that is the program's binary.
pub(crate) const SM_90A: &str = "#define SM_90A\n";
const HIDDEN: &str = "//@ ";

/// A line of a source that ends with how many registers a work-item may take, where the compiler is NVIDIA's: it takes as many as help one,
/// which can leave a compute unit with few of them.
pub(crate) const MOST_REGISTERS: &str = "#define MOST_REGISTERS ";

/// Rounds f32 division and square roots correctly, where NVIDIA's are off by one unit in the last place without.
const CORRECT_DIVISION: &str = "-cl-fp32-correctly-rounded-divide-sqrt ";
/// Kernels that keep fast division: softmax and attention divide sums of exponentials, whose own errors are larger.
const FAST_KERNELS: [&str; 4] = ["attention", "row", "softmax_slices", "cross_entropy"];
/// A line of a source that keeps fast division: rounding to halves hides the last place, which costs them 1.4 times the time.
pub(crate) const FAST_DIVISION: &str = "#define FAST_DIVISION\n";

/// What the crate's own sources call, declared: see there.
const BUILTINS: &str = include_str!("../../../kernels/builtins.cl");
/// Leaves out clang's header of 18,000 lines, whose include guard this is. PoCL includes it twice in every program, which is
/// five sixths of the time of a build.
const WITHOUT_HEADER: &str = "-D_OPENCL_H_ ";

/// A program, or nothing yet. The lock is held while building, so that a second thread waits for the first's result.
type Slot = Arc<Mutex<Option<Arc<Program>>>>;

/// The programs of one device.
#[derive(Default)]
pub(super) struct Programs {
    /// This crate's own. A kernel keeps its program, so these are only for kernels that are made again.
    own: Loaded<MAX_OWN>,
    /// Programs from users' sources. A `Kernel` needs two or more.
    of_users: Loaded<MAX_OF_USERS>,
    /// Answers of the device to probes, by the names of their files.
    pub(super) found: Mutex<Entries>,
    from_source: AtomicU64,
    from_disk: AtomicU64,
    /// Of those from source, the ones of the crate that could not be built [`WITHOUT_HEADER`].
    with_header: AtomicU64,
    /// Binaries that the driver took long to give.
    slow_binaries: AtomicU32,
}

/// A binary that takes longer than this to get is compiled for the asking: for work-groups of any size, which is not what
/// the launch will run. A driver that does so (PoCL) keeps what it compiles for launches itself, so after
/// [`SLOW_BINARIES`] it is not asked any more.
const SLOW: Duration = Duration::from_millis(20);
const SLOW_BINARIES: u32 = 2;

/// An odd number that spreads bits.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

/// The most programs that stay loaded after their kernels are dropped.
const MAX_OWN: usize = 1024;
const MAX_OF_USERS: usize = 32;

struct Loaded<const CAPACITY: usize>(Mutex<Lru<Key, Slot>>);

impl<const CAPACITY: usize> Default for Loaded<CAPACITY> {
    fn default() -> Self {
        Loaded(Mutex::new(Lru::new(CAPACITY)))
    }
}

/// Who wrote the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum By {
    Crate,
    User,
}

impl Programs {
    fn slot(&self, key: Key, by: By) -> Slot {
        let mut loaded = lock(match by {
            By::Crate => &self.own.0,
            By::User => &self.of_users.0,
        });
        let (slot, evicted) = loaded.get_or_insert(key, Slot::default);
        let slot = Arc::clone(slot);
        drop(loaded); // before the driver is asked to release programs
        drop(evicted);
        slot
    }

    /// The binary of every program that is loaded, by the name of its file.
    pub(super) fn binaries(&self) -> Result<Entries, ClError> {
        let all = |loaded: &Mutex<Lru<Key, Slot>>| -> Vec<(Key, Slot)> {
            lock(loaded).iter().map(|(&key, slot)| (key, Arc::clone(slot))).collect()
        };
        let loaded = [all(&self.own.0), all(&self.of_users.0)].concat();
        let programs = loaded.into_iter().filter_map(|(key, slot)| Some((key, lock(&slot).clone()?)));
        programs.map(|(key, program)| Ok((Kind::Program.name(&key), binary(&program)?))).collect()
    }
}

impl ClDevice {
    /// A kernel: `entry` of the program in `source`, which is built unless this process or an earlier one has.
    /// `HAS_F64` is defined where the device has doubles, `IS_CPU` where it is a processor. Every call makes a new
    /// kernel object; keep it.
    ///
    /// # Errors
    /// [`Error::Build`] with the compiler's log; `name` is what it calls the kernel.
    pub(crate) fn build(&self, name: &'static str, source: &str, entry: &str) -> Result<ClKernel> {
        // PoCL keeps what it compiles in files of its own. Its binaries take as long to load as that, and longer to get: for one it
        // compiles work-group functions of any size, which no launch runs.
        let cache = Cache::of_process().filter(|_| !self.is_pocl());
        let registers = source.lines().find_map(|line| line.strip_prefix(MOST_REGISTERS));
        let fast = FAST_KERNELS.contains(&name) || source.contains(FAST_DIVISION);
        let division = if !fast && self.divides_correctly() { CORRECT_DIVISION } else { "" };
        if let Some(registers) = registers {
            let options = format!("{division}-cl-nv-maxrregcount={registers} ");
            match self.build_cached(By::Crate, name, source, &options, entry, cache) {
                Err(Error::Build { .. }) => {} // a driver without the option
                made => return made,
            }
        }
        self.build_cached(By::Crate, name, source, division, entry, cache)
    }

    /// Whether the device takes [`CORRECT_DIVISION`]: CL_FP_CORRECTLY_ROUNDED_DIVIDE_SQRT, bit 7 of its configuration of f32.
    fn divides_correctly(&self) -> bool {
        let single = info!(clGetDeviceInfo(self.id(), CL_DEVICE_SINGLE_FP_CONFIG)).unwrap_or_default();
        number_of(&single) & 1 << 7 != 0
    }

    /// [`build`](Self::build) of a source of the user's, with further options for the compiler.
    pub(crate) fn build_with(&self, name: &'static str, source: &str, options: &str, entry: &str) -> Result<ClKernel> {
        self.build_cached(By::User, name, source, options, entry, Cache::of_process())
    }

    /// [`build`](Self::build) with the cache in a given place.
    pub(super) fn build_cached(
        &self,
        by: By,
        name: &'static str,
        source: &str,
        more_options: &str,
        entry: &str,
        cache: Option<&Cache>,
    ) -> Result<ClKernel> {
        self.check_lost()?;
        let options = self.build_options() + more_options;
        let key = self.key(source, &options);
        let _messages = log::defer(); // a subscriber may want the same program
        let _under_way = exit::under_way();
        let slot = self.programs.slot(key, by);
        let program = {
            let mut slot = lock(&slot);
            match &*slot {
                Some(program) => Arc::clone(program),
                None => {
                    let _compiling = exit::registering();
                    let program =
                        Arc::new(self.obtain(by, name, source, &options, cache, &Kind::Program.name(&key))?);
                    exit::built();
                    Arc::clone(slot.insert(program))
                }
            }
        };
        self.kernel(program, name, entry, &key).map_err(|e| match e.code {
            // CL_INVALID_KERNEL_NAME
            -46 => Error::Build {
                device: self.device(),
                kernel: name.into(),
                log: format!("the program has no kernel named {entry}"),
            },
            _ => self.error(self.settle(e)),
        })
    }

    /// Of the programs from source, those of the crate that called what kernels/builtins.cl does not declare.
    #[cfg(test)]
    pub(super) fn builds_with_header(&self) -> u64 {
        self.programs.with_header.load(Relaxed)
    }

    /// Programs built from source, and loaded from disk, on this device so far.
    #[cfg(test)]
    pub(super) fn builds(&self) -> (u64, u64) {
        (self.programs.from_source.load(Relaxed), self.programs.from_disk.load(Relaxed))
    }

    fn is_pocl(&self) -> bool {
        self.found.platform_version.to_lowercase().contains("pocl")
    }

    fn build_options(&self) -> String {
        let mut options = String::new();
        if self.found.opencl_c >= (1, 2) {
            options += "-cl-std=CL1.2 ";
        }
        if self.info().fp64 {
            options += "-DHAS_F64 ";
        }
        if self.info().kind == DeviceKind::Cpu {
            options += "-DIS_CPU ";
        }
        if self.stands_in_with_fence() {
            options += "-DBUILTIN_FENCE ";
        }
        options + self.offsets_option()
    }

    fn key(&self, source: &str, options: &str) -> Key {
        let info = self.info();
        let parts = [
            env!("CARGO_PKG_VERSION"),
            &info.name,
            &info.vendor,
            &info.driver,
            &self.found.platform_version,
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

    /// What an earlier process found out about the device by way of `source`; else what `find` does, kept for the next one.
    pub(super) fn remembered(&self, source: &str, find: impl FnOnce() -> Option<Vec<u8>>) -> Option<Vec<u8>> {
        let (cache, name) = (Cache::of_process(), Kind::Found.name(&self.key(source, &self.build_options())));
        let known = self.imported.get(&name).or_else(|| cache?.load(&name).ok());
        let found = known.or_else(|| {
            let found = find()?;
            if let Some(cache) = cache {
                let _ = cache.store(&name, &found);
            }
            Some(found)
        })?;
        lock(&self.programs.found).insert(name, found.clone());
        Some(found)
    }

    /// From what was imported or the file if it is there and whole, otherwise from source, and then into the file.
    fn obtain(
        &self,
        by: By,
        name: &'static str,
        source: &str,
        options: &str,
        cache: Option<&Cache>,
        file: &str,
    ) -> Result<Program> {
        let span = |kind| profiler::span(kind, name, self.device(), self.current_stream().0, 0);
        let loading = span(profiler::Kind::Load);
        let imported = self.imported.get(file).and_then(|binary| {
            let program = self.of_binary(&binary, options);
            if program.is_none() {
                log::emit(move || tracing::debug!(name, "the driver refuses the program that was imported"));
            }
            program
        });
        if let Some(program) = imported.or_else(|| self.load(cache?, file, options)) {
            self.programs.from_disk.fetch_add(1, Relaxed);
            return Ok(program);
        }
        if let Some(loading) = loading {
            loading.forget();
        }
        let _compiling = span(profiler::Kind::Compile);
        let started = Instant::now();
        let mut program = self.compile(by, name, source, options)?;
        if source.contains(SM_90A) {
            // Never the program as it is: it would compute something else.
            program = self.opened(&program, options).ok_or_else(|| Error::Build {
                device: self.device(),
                kernel: name.into(),
                log: "instructions of sm_90a could not be put into the program".into(),
            })?;
        }
        self.programs.from_source.fetch_add(1, Relaxed);
        let (kernel, device, took) = (name.to_owned(), self.device(), started.elapsed());
        log::emit(move || tracing::debug!(kernel, %device, ?took, "built from source"));
        if let Some(cache) = cache
            && self.programs.slow_binaries.load(Relaxed) < SLOW_BINARIES
        {
            let asked = Instant::now();
            let saved = binary(&program)
                .map_err(|e| e.name().to_owned())
                .and_then(|b| cache.store(file, &b).map_err(|e| e.to_string()));
            if let Err(cause) = saved {
                let file = file.to_owned();
                log::emit(move || tracing::debug!(file, cause, "program not kept on disk"));
            }
            if asked.elapsed() > SLOW {
                self.programs.slow_binaries.fetch_add(1, Relaxed);
            }
        }
        Ok(program)
    }

    /// From source. One of the crate's is built without the header of built-in functions where the driver is PoCL, and with it
    /// if that fails.
    fn compile(&self, by: By, name: &str, source: &str, options: &str) -> Result<Program> {
        if by == By::User || !self.is_pocl() {
            return self.compile_text(name, source, options);
        }
        let short = self.compile_text(name, &[BUILTINS, source].concat(), &[options, WITHOUT_HEADER].concat());
        let Err(Error::Build { log, .. }) = short else { return short };
        let whole = self.compile_text(name, source, options)?;
        self.programs.with_header.fetch_add(1, Relaxed);
        #[cfg(test)]
        assert!(!source.starts_with("#define FAULT_"), "kernels/builtins.cl lacks what {name} calls: {log}");
        let kernel = name.to_owned();
        log::emit(move || tracing::debug!(kernel, log, "built with all built-in functions"));
        Ok(whole)
    }

    fn compile_text(&self, name: &str, source: &str, options: &str) -> Result<Program> {
        let text = CString::new(source).map_err(|_| Error::invalid("build", "the source contains a zero byte"))?;
        let (mut line, len) = (text.as_ptr(), source.len());
        let program = create!(clCreateProgramWithSource(self.context, 1, &mut line, &len))
            .map(Program)
            .map_err(|e| self.error(self.settle(e)))?;
        match self.build_program(&program, options) {
            Ok(()) => Ok(program),
            // CL_BUILD_PROGRAM_FAILURE, CL_INVALID_BUILD_OPTIONS; some drivers give others, with a log.
            Err(e) => match self.log(&program) {
                log if matches!(e.code, -11 | -43) || !log.is_empty() => {
                    let log = if log.is_empty() { format!("{} (the driver gave no log)", e.name()) } else { log };
                    Err(Error::Build { device: self.device(), kernel: name.into(), log })
                }
                _ => Err(self.error(self.settle(e))),
            },
        }
    }

    fn build_program(&self, program: &Program, options: &str) -> Result<(), ClError> {
        let options = CString::new(options).map_err(|_| ClError::new("clBuildProgram", -43))?;
        call!(clBuildProgram(program.0, 1, &self.id(), options.as_ptr(), None, ptr::null_mut()))
    }

    fn log(&self, program: &Program) -> String {
        let bytes = info!(clGetProgramBuildInfo(program.0, self.id(), CL_PROGRAM_BUILD_LOG)).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim_matches(|c: char| c == '\0' || c.is_whitespace()).to_owned()
    }

    /// The program in a file, which is removed if the driver refuses it.
    fn load(&self, cache: &Cache, file: &str, options: &str) -> Option<Program> {
        let program = self.of_binary(&cache.load(file).ok()?, options);
        if program.is_none() {
            cache.remove(file);
        }
        program
    }

    fn of_binary(&self, binary: &[u8], options: &str) -> Option<Program> {
        let (mut status, len, mut start) = (0, binary.len(), binary.as_ptr());
        let program = create!(clCreateProgramWithBinary(self.context, 1, &self.id(), &len, &mut start, &mut status));
        let program = Program(program.ok()?);
        (status == 0 && self.build_program(&program, options).is_ok()).then_some(program)
    }

    /// The program with its hidden instructions, if it is PTX for `sm_90` that has some and the driver takes them.
    fn opened(&self, program: &Program, options: &str) -> Option<Program> {
        let bytes = binary(program).ok()?;
        self.of_binary(open_ptx(&bytes)?.as_bytes(), options)
    }

    fn kernel(&self, program: Arc<Program>, name: &'static str, entry: &str, key: &Key) -> Result<ClKernel, ClError> {
        let id =
            entry.bytes().chain(*key).fold(0, |id: u64, byte| (id.rotate_left(8) ^ u64::from(byte)).wrapping_mul(MIX));
        let entry = CString::new(entry).map_err(|_| ClError::new("clCreateKernel", -46))?;
        let raw = create!(clCreateKernel(program.0, entry.as_ptr()))?;
        // Owned from here on, so that it is released if a query fails.
        let kernel = ClKernel::new(raw, program, name);
        let args = value!(clGetKernelInfo(raw, CL_KERNEL_NUM_ARGS) as u32)?;
        let group = value!(clGetKernelWorkGroupInfo(raw, self.id(), CL_KERNEL_WORK_GROUP_SIZE) as usize)?;
        // A kernel made for groups of one size has that: NVIDIA's driver says 256 of larger ones too.
        let made_for =
            value!(clGetKernelWorkGroupInfo(raw, self.id(), CL_KERNEL_COMPILE_WORK_GROUP_SIZE) as [usize; 3])?;
        let made_for = made_for.iter().product();
        Ok(kernel.with_limits(args as usize, group.max(made_for)).with_identity(id, made_for > 0))
    }
}

/// The binary of a program that was built for one device of its context: an adopted context may have others.
fn binary(program: &Program) -> Result<Vec<u8>, ClError> {
    let sizes = info!(clGetProgramInfo(program.0, CL_PROGRAM_BINARY_SIZES))?;
    let sizes = sizes.chunks_exact(size_of::<usize>()).map(|size| number_of(size) as usize);
    let mut binaries: Vec<Vec<u8>> = sizes.map(|size| vec![0; size]).collect();
    let mut starts: Vec<*mut u8> = binaries.iter_mut().map(|bytes| bytes.as_mut_ptr()).collect();
    let (to, size) = (starts.as_mut_ptr().cast(), size_of_val(&starts[..]));
    call!(clGetProgramInfo(program.0, CL_PROGRAM_BINARIES, size, to, ptr::null_mut()))?;
    Ok(binaries.into_iter().max_by_key(Vec::len).unwrap_or_default())
}

fn open_ptx(binary: &[u8]) -> Option<String> {
    let ptx = std::str::from_utf8(binary).ok()?;
    let target = ".target sm_90";
    let (head, tail) = ptx.split_once(target).filter(|(_, tail)| !tail.starts_with(char::is_alphanumeric))?;
    tail.contains(HIDDEN).then(|| format!("{head}{target}a{}", tail.replace(HIDDEN, "")))
}

#[cfg(test)]
mod tests;
