//! Storages without memory, for parameters whose values are loaded from a file.

use std::sync::OnceLock;

use super::allocation::{Allocation, Backing, Storage};
use super::{registry, thread};
use crate::error::Excerpt;
use crate::{Device, Error, Result};

/// Runs `f`, in which this thread's new tensors have a shape, a dtype and a device, but no memory (PyTorch's `with
/// torch.device("meta")`). Modules are created at once and without random numbers;
/// [`Module::assign_state_dict`](crate::nn::Module::assign_state_dict) then takes over the tensors of a file.
///
/// ```
/// use claystone::nn::{self, Linear, Module};
/// use claystone::{Device, Tensor};
/// let saved = Linear::new(3, 2, Device::Cpu)?.state_dict();
/// let mut layer = nn::uninit(|| Linear::new(3, 2, Device::Cpu))?;
/// assert!(layer.weight().is_uninit() && layer.forward(&Tensor::ones(3, Device::Cpu)?).is_err());
/// layer.assign_state_dict(saved, true)?;
/// assert_eq!(layer.forward(&Tensor::ones(3, Device::Cpu)?)?.shape().dims(), [2]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// Inside `f`, `empty`, `zeros`, `ones`, `full` and random tensors have no memory; nor do the results of elementwise
/// functions of such tensors. Writing to such a tensor does nothing, so that [`nn::init`](crate::nn::init) and layers
/// of your own need no change. Tensors made from host values (`from_slice`, `from_vec`, `from_ndarray`) and by `arange`
/// have memory as usual. Reading a tensor without memory is [`Error::Invalid`].
pub fn uninit<R>(f: impl FnOnce() -> R) -> R {
    thread::with(|state| &state.is_uninit, true, f)
}

/// True while this thread is inside [`uninit`].
#[inline]
pub(crate) fn is_uninit_scope() -> bool {
    thread::get(|state| &state.is_uninit)
}

impl Storage {
    /// Makes a storage of `bytes` bytes without memory; any access to the bytes is an error. Returns `None` outside [`uninit`](fn@uninit).
    #[inline]
    pub(crate) fn uninit(device: Device, bytes: usize) -> Result<Option<Storage>> {
        if !is_uninit_scope() || bytes == 0 {
            return Ok(None);
        }
        registry::device_entry(device)?; // returns an error if the device does not exist, as for other storages
        Ok(Some(Storage::new(device, bytes, Backing::Uninit(OnceLock::new()))))
    }

    /// True if the storage was made in [`nn::uninit`](crate::nn::uninit): the storage has a size and a device, but no memory.
    pub fn is_uninit(&self) -> bool {
        matches!(self.allocation().backing, Backing::Uninit(_))
    }

    /// Sets the parameter name for errors about a storage without memory.
    #[doc(hidden)]
    pub fn name_uninit(&self, name: &str) {
        if let Backing::Uninit(known) = &self.allocation().backing {
            _ = known.set(name.into());
        }
    }
}

impl Allocation {
    /// Returns an error if the storage has no memory.
    pub(super) fn check_memory(&self) -> Result<()> {
        let Backing::Uninit(name) = &self.backing else { return Ok(()) };
        let name = name.get().map(|name| format!("{} ", Excerpt(name))).unwrap_or_default();
        let remedy =
            "load them with Module::assign_state_dict, or make tensors that no file contains outside nn::uninit";
        Err(Error::invalid("nn::uninit", format!("the tensor {name}has no values: {remedy}")))
    }
}
