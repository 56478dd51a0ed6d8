//! Checkpoints: the complete state of a training run in one file.

use std::path::Path;

use super::state::strip_name_prefix;
use super::{StateDict, file_error, load, save};
use crate::internal::{Excerpt, for_each_part};
use crate::{Device, Element, Error, Generator, Result, Seed, Tensor, no_grad};

/// State that can be saved in a checkpoint and restored (like `Stateful` of PyTorch's `torch.distributed.checkpoint`).
/// Modules, optimisers, schedulers, the gradient scaler, generators, tensors and numbers implement it. For your own type,
/// implement it with the states of its fields:
///
/// ```
/// use claystone::io::{StateDict, Stateful};
/// use claystone::Result;
/// #[derive(Default)]
/// struct Progress {
///     epoch: usize,
///     best_loss: f64,
/// }
///
/// impl Stateful for Progress {
///     fn state_dict(&self) -> Result<StateDict> {
///         StateDict::from_parts(&[("epoch", &self.epoch), ("best_loss", &self.best_loss)])
///     }
///     fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
///         state.load_parts(&mut [("epoch", &mut self.epoch), ("best_loss", &mut self.best_loss)])
///     }
/// }
///
/// let mut later = Progress::default();
/// later.load_state_dict(&Progress { epoch: 3, best_loss: 0.25 }.state_dict()?)?;
/// assert_eq!((later.epoch, later.best_loss), (3, 0.25));
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Stateful {
    /// Returns the state. The tensors in it may share memory with the object. Fails if the device fails.
    fn state_dict(&self) -> Result<StateDict>;

    /// Restores a state that [`Stateful::state_dict`] returned. Fails with [`Error::Invalid`] if the state belongs to a
    /// different object, and if the device fails.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;
}

/// Saves the state of a training run in one file, `.safetensors` or `.npz` by its extension. The tensors of each part
/// are saved under the part's name: `model.fc.weight`, `optimizer.state.0.exp_avg`, `epoch`. The file is replaced
/// atomically, as by [`save`]. [`load_checkpoint`] resumes from the file. Training continues bit for bit if the parts
/// include all state that changes. Fails as [`save`] does, and with [`Error::Invalid`] if two parts have the same name,
/// or one name is a dotted prefix of another.
///
/// ```
/// use claystone::nn::{Linear, Module};
/// use claystone::optim::{AdamW, AdamWConfig, Optimizer, Scheduler, StepLr};
/// use claystone::{Device, Generator, Tensor, io};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("run.safetensors");
/// let mut net = Linear::new(3, 1, Device::Cpu)?;
/// let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
/// let mut scheduler = Scheduler::new(&mut adam, StepLr { step_size: 10, gamma: 0.5 })?;
/// let mut epoch = 0;
/// if path.exists() {
///     io::load_checkpoint(&path, &mut [
///         ("model", &mut net),
///         ("optimizer", &mut adam),
///         ("scheduler", &mut scheduler),
///         ("generator", &mut Generator::current()),
///         ("epoch", &mut epoch),
///     ])?;
/// }
/// while epoch < 2 {
///     adam.zero_grad();
///     net.forward(&Tensor::randn(&[8, 3], Device::Cpu)?)?.square()?.mean((), false)?.backward()?;
///     adam.step()?;
///     scheduler.step(&mut adam)?;
///     epoch += 1;
///     io::save_checkpoint(&path, &[
///         ("model", &net),
///         ("optimizer", &adam),
///         ("scheduler", &scheduler),
///         ("generator", &Generator::current()),
///         ("epoch", &epoch),
///     ])?;
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn save_checkpoint(path: impl AsRef<Path>, parts: &[(&str, &dyn Stateful)]) -> Result<()> {
    save(path, &StateDict::from_parts(parts)?)
}

/// Restores parts from a file of [`save_checkpoint`], in the given order: pass the optimiser after the model. Other parts in the
/// file are ignored, so a model can be loaded from the checkpoint of a whole training run.
///
/// # Errors
/// Errors of [`load`]. [`Error::Invalid`], with the names of file and part, if the file lacks a part; then nothing is changed.
/// [`Error::Invalid`] also if a part's state belongs to a different object; then the parts before it are already loaded.
pub fn load_checkpoint(path: impl AsRef<Path>, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
    let path = path.as_ref();
    load(path, Device::default())?.load_parts(parts).map_err(|e| match e {
        Error::Invalid { reason, .. } => file_error("load_checkpoint", path, reason),
        e => e,
    })
}

impl StateDict {
    /// Collects the states of several parts, each under the part's name, as [`save_checkpoint`] does. See [`Stateful`].
    /// Fails with [`Error::Invalid`] if two parts have the same name, or one name is a dotted prefix of another, and as
    /// the parts do.
    pub fn from_parts(parts: &[(&str, &dyn Stateful)]) -> Result<StateDict> {
        let mut all = StateDict::new();
        for (i, (name, part)) in parts.iter().enumerate() {
            let mut others = parts.iter().enumerate().filter(|(j, _)| *j != i).map(|(_, (other, _))| other);
            invalid!("StateDict::from_parts" if let Some(other) = others.find(|other| strip_name_prefix(name, other).is_some()),
                "part {} is below part {}: give it another name", Excerpt(name), Excerpt(other));
            all.merge(part.state_dict()?.with_prefix(name));
        }
        Ok(all)
    }

    /// Restores each part from the entries under its name, as [`load_checkpoint`] does. Other entries are ignored.
    ///
    /// # Errors
    /// [`Error::Invalid`], with the part's name, if a part has no entry; then nothing is changed. Errors of a part; then the parts before
    /// it are already loaded.
    pub fn load_parts(&self, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
        let op = "StateDict::load_parts";
        let below = |part: &str| -> StateDict {
            let entry =
                |(name, t): (&str, &Tensor)| Some((strip_name_prefix(name, part)?.to_string(), t.shallow_clone()));
            self.iter().filter_map(entry).collect()
        };
        for (name, part) in parts.iter() {
            if below(name).is_empty() && !part.state_dict()?.is_empty() {
                let mut known: Vec<&str> = self.names().map(|n| n.split('.').next().unwrap_or(n)).collect();
                known.sort_unstable();
                known.dedup();
                invalid!(op, "there is no part {}, only {}", Excerpt(name), Excerpt(&known.join(", ")));
            }
        }
        for_each_part(op, parts, |(name, part)| {
            part.load_state_dict(&below(name)).map_err(|e| match e {
                Error::Invalid { reason, .. } => Error::invalid(op, format!("part {}: {reason}", Excerpt(name))),
                e => e,
            })
        })
    }
}

/// Returns the tensor of a state that consists of a single unnamed tensor.
fn single_tensor(state: &StateDict) -> Result<&Tensor> {
    let Some(tensor) = state.get("") else {
        let names = state.names().collect::<Vec<_>>().join(", ");
        invalid!("load_state_dict", "the state is not a single value, it has {}", Excerpt(&names));
    };
    Ok(tensor)
}

/// Returns the values of a state's only tensor, converted from any dtype.
fn values<T: Element>(state: &StateDict) -> Result<Vec<T>> {
    single_tensor(state)?.to_dtype(T::DTYPE)?.to_vec()
}

/// Returns the number in a state that consists of one tensor with one element.
fn value<T: Element>(state: &StateDict) -> Result<T> {
    match values(state)?[..] {
        [value] => Ok(value),
        ref all => {
            invalid!("load_state_dict", "the state has {} values, not one number: load it into a Vec<f64>", all.len())
        }
    }
}

fn unnamed_entry(tensor: Tensor) -> StateDict {
    [(String::new(), tensor)].into_iter().collect()
}

/// Implements [`Stateful`] for numbers, as tensors of one element of the given type.
macro_rules! numbers {
    ($($type:ty: $element:ty),*) => { $(
        impl Stateful for $type {
            fn state_dict(&self) -> Result<StateDict> {
                Ok(unnamed_entry(Tensor::full((), *self as $element, (<$element as Element>::DTYPE, Device::default()))?))
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
                *self = value::<$element>(state)? as $type;
                Ok(())
            }
        }
    )* };
}

// There is no unsigned 64-bit dtype, so the bits are stored as i64.
numbers!(f64: f64, f32: f32, i64: i64, i32: i32, u64: i64, usize: i64, bool: bool);

impl Stateful for Vec<f64> {
    fn state_dict(&self) -> Result<StateDict> {
        Ok(unnamed_entry(Tensor::from_slice(self, self.len(), Device::default())?))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        *self = values(state)?;
        Ok(())
    }
}

/// Loading copies the values into the existing tensor.
impl Stateful for Tensor {
    fn state_dict(&self) -> Result<StateDict> {
        Ok(unnamed_entry(self.detach()))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let value = single_tensor(state)?;
        state.check_shape("load_state_dict", "", self)?;
        no_grad(|| self.copy_(&value.to_dtype(self.dtype())?.to_device(self.device())?)).map(|_| ())
    }
}

/// Saves the seed and the number of draws. After loading, the generator continues with the draw that followed the saved state.
impl Stateful for Generator {
    fn state_dict(&self) -> Result<StateDict> {
        let Seed { key, stream } = self.state();
        StateDict::from_parts(&[("seed", &key), ("stream", &stream)])
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let mut seed = Seed::default();
        state.load_parts(&mut [("seed", &mut seed.key), ("stream", &mut seed.stream)])?;
        self.set_state(seed);
        Ok(())
    }
}
