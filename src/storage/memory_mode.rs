//! Whether kernels read their operands from buffers or from images.

use super::config::{Config, MemoryMode};
use super::thread;

pub(crate) fn memory_mode() -> MemoryMode {
    let of_process = || Config::from_env_once().map_or(MemoryMode::Buffer, |config| config.memory);
    thread::get(|state| &state.memory_mode).unwrap_or_else(of_process)
}

/// Runs `f` with this memory mode on this thread, overriding the mode of the process.
///
/// ```
/// use claystone::storage::{MemoryMode, with_memory_mode};
/// use claystone::{ConvOptions, Device, Tensor};
/// let device = Device::best();
/// let (x, w) = (Tensor::ones(&[1, 3, 8, 8], device)?, Tensor::ones(&[4, 3, 3, 3], device)?);
/// let conv = |mode| with_memory_mode(mode, || x.conv2d(&w, None, ConvOptions::default()));
/// assert_eq!(conv(MemoryMode::Image)?.to_vec::<f32>()?, conv(MemoryMode::Buffer)?.to_vec::<f32>()?);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn with_memory_mode<R>(mode: MemoryMode, f: impl FnOnce() -> R) -> R {
    thread::with(|state| &state.memory_mode, Some(mode), f)
}
