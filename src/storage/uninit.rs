//! Storages without memory: parameters whose values come from a file.

use std::cell::Cell;
use std::sync::OnceLock;

use super::allocation::{Allocation, Backing, Storage};
use super::registry;
use crate::{Device, Error, Excerpt, Result};

thread_local!(static IN_SCOPE: Cell<bool> = const { Cell::new(false) });

/// Runs `f`, in which new tensors of this thread have a shape, a dtype and a device, but no memory: modules are made at once
/// and without random numbers, for a file to give them their values (PyTorch's `with torch.device("meta")`).
/// [`Module::assign_state_dict`](crate::nn::Module::assign_state_dict) then takes over the tensors of the file.
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
/// `empty`, `zeros`, `ones`, `full`, and random tensors have no memory then, nor have elementwise functions of such a tensor;
/// writing to one does nothing, so that [`nn::init`](crate::nn::init) and layers of your own need no change. Tensors of
/// values that the host has (`from_slice`, `from_vec`, `from_ndarray`) and `arange` are made as ever. Reading a tensor
/// without memory is [`Error::Invalid`].
pub fn uninit<R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_SCOPE.set(self.0);
        }
    }
    let _restore = Restore(IN_SCOPE.replace(true));
    f()
}

/// True while this thread is inside [`uninit`].
#[inline]
pub(crate) fn is_uninit_scope() -> bool {
    IN_SCOPE.get()
}

impl Storage {
    /// A storage of `bytes` bytes that has no memory, where every access is an error; `None` outside of [`uninit`](fn@uninit).
    #[inline]
    pub(crate) fn uninit(device: Device, bytes: usize) -> Result<Option<Storage>> {
        if !is_uninit_scope() || bytes == 0 {
            return Ok(None);
        }
        registry::current(device)?; // a missing device is an error here, as for other storages
        Ok(Some(Storage::new(device, bytes, Backing::Uninit(OnceLock::new()))))
    }

    /// True where the storage was made in [`nn::uninit`](crate::nn::uninit): it has a size and a device, but no memory.
    pub fn is_uninit(&self) -> bool {
        matches!(self.allocation().backing, Backing::Uninit(_))
    }

    /// Gives a storage without memory the name that errors call the parameter by.
    #[doc(hidden)]
    pub fn name_uninit(&self, name: &str) {
        if let Backing::Uninit(known) = &self.allocation().backing {
            _ = known.set(name.into());
        }
    }

    /// An error where the storage has no memory.
    pub(crate) fn check_memory(&self) -> Result<()> {
        self.allocation().check_memory()
    }
}

impl Allocation {
    /// An error where the storage has no memory.
    pub(super) fn check_memory(&self) -> Result<()> {
        let Backing::Uninit(name) = &self.backing else { return Ok(()) };
        let name = name.get().map(|name| format!("{} ", Excerpt(name))).unwrap_or_default();
        let remedy =
            "load them with Module::assign_state_dict, or make a tensor that no file has outside of nn::uninit";
        Err(Error::invalid("nn::uninit", format!("the tensor {name}made there has no values: {remedy}")))
    }
}
