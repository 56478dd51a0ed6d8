//! Whether kernels read their operands from buffers or from images.

use std::cell::Cell;

use super::config::Config;
use crate::device::OnDrop;

/// The operand type for kernels that can read both buffers and images (MNN's memory modes). The key `memory` of
/// `CLAYSTONE_ALLOC_CONF` sets the mode of the process, and [`with_memory_mode`] sets the mode of a scope.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MemoryMode {
    /// Buffers.
    Buffer,
    /// Images, if the device has them and the operands fit. Tensors are converted first.
    Image,
    /// The faster of the two, as measured by `claystone tune` on the device. Buffers if the device was not measured.
    #[default]
    Auto,
}

// The mode set by [`with_memory_mode`] on this thread.
thread_local!(static MODE: Cell<Option<MemoryMode>> = const { Cell::new(None) });

pub(crate) fn memory_mode() -> MemoryMode {
    let of_process = || Config::from_env_once().map_or(MemoryMode::Buffer, |config| config.memory);
    MODE.get().unwrap_or_else(of_process)
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
    let outer = MODE.replace(Some(mode));
    let _restore = OnDrop(|| MODE.set(outer));
    f()
}
