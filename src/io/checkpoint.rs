//! Checkpoints: the complete state of a training run in one file.

use std::path::Path;

use super::state::strip_name_prefix;
use super::{StateDict, file_error, load, save};
use crate::internal::{Excerpt, for_each_part};
use crate::{Device, Element, Error, Generator, Result, Seed, Tensor, no_grad};

/// State that can be saved in a checkpoint and restored (like `Stateful` of PyTorch's `torch.distributed.checkpoint`).
/// Implemented by modules, optimisers, schedulers, the gradient scaler, generators, tensors and numbers. Implement it for a type
/// of your own in terms of its parts:
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
    /// Returns the state. Its tensors may share memory with the object.
    ///
    /// # Errors
    /// Device failures.
    fn state_dict(&self) -> Result<StateDict>;

    /// Restores a state of [`Stateful::state_dict`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for the state of a different object; device failures.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;
}

/// Saves the state of a training run in one file, `.safetensors` or `.npz` by its extension. Each part's state is saved under the
/// part's name: `model.fc.weight`, `optimizer.state.0.exp_avg`, `epoch`. The file is replaced atomically, like by [`save`].
/// [`load_checkpoint`] resumes from the file, bit for bit if all state that changes from step to step is among the parts.
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
///
/// # Errors
/// Errors of [`save`]; [`Error::Invalid`] if a part's name equals another part's name or is below it.
pub fn save_checkpoint(path: impl AsRef<Path>, parts: &[(&str, &dyn Stateful)]) -> Result<()> {
    save(path, &StateDict::from_parts(parts)?)
}

/// Restores parts from a file of [`save_checkpoint`], in the given order: pass the optimiser after the model. Other parts of the
/// file are ignored, so a model alone can be loaded from the checkpoint of a run.
///
/// # Errors
/// Errors of [`load`]. [`Error::Invalid`] with the names of file and part if the file lacks the part, before anything is
/// changed; or if a part's state is of a different object, after the parts before it were loaded.
pub fn load_checkpoint(path: impl AsRef<Path>, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
    let path = path.as_ref();
    load(path, Device::default())?.load_parts(parts).map_err(|e| match e {
        Error::Invalid { reason, .. } => file_error("load_checkpoint", path, reason),
        e => e,
    })
}

impl StateDict {
    /// Collects the states of several parts, each under its name, like [`save_checkpoint`]. See [`Stateful`].
    ///
    /// # Errors
    /// [`Error::Invalid`] if a part's name equals another part's name or is below it; the errors of the parts.
    pub fn from_parts(parts: &[(&str, &dyn Stateful)]) -> Result<StateDict> {
        let mut all = StateDict::new();
        for (i, (name, part)) in parts.iter().enumerate() {
            let clash =
                parts.iter().enumerate().find(|(j, (other, _))| *j != i && strip_name_prefix(name, other).is_some());
            if let Some((_, (other, _))) = clash {
                let reason = format!("part {} is below part {}: give it another name", Excerpt(name), Excerpt(other));
                return Err(Error::invalid("StateDict::from_parts", reason));
            }
            all.merge(part.state_dict()?.with_prefix(name));
        }
        Ok(all)
    }

    /// Restores each part from its entries, like [`load_checkpoint`]. Other entries are ignored.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the part's name if a part has no entry, before anything is changed; the errors of the parts, after the
    /// parts before were loaded.
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
                let known = known.join(", ");
                let reason = format!("there is no part {}, only {}", Excerpt(name), Excerpt(&known));
                return Err(Error::invalid(op, reason));
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

/// Returns the only tensor of a state that is a single unnamed tensor.
fn single_tensor(state: &StateDict) -> Result<&Tensor> {
    let names = || state.names().collect::<Vec<_>>().join(", ");
    let wrong =
        || Error::invalid("load_state_dict", format!("the state is not a single value, it has {}", Excerpt(&names())));
    state.get("").ok_or_else(wrong)
}

/// Returns the values of a state's only tensor, converted from any dtype.
fn values<T: Element>(state: &StateDict) -> Result<Vec<T>> {
    single_tensor(state)?.to_dtype(T::DTYPE)?.to_vec()
}

/// Returns the only element of a state that holds a single number.
fn value<T: Element>(state: &StateDict) -> Result<T> {
    match values(state)?[..] {
        [value] => Ok(value),
        ref all => {
            let reason = format!("the state has {} values, not one number: load it into a Vec<f64>", all.len());
            Err(Error::invalid("load_state_dict", reason))
        }
    }
}

fn unnamed_entry(tensor: Tensor) -> StateDict {
    [(String::new(), tensor)].into_iter().collect()
}

/// Implements [`Stateful`] for numbers, as tensors of one element: the type, the element type, and both conversions.
macro_rules! numbers {
    ($($type:ty: $element:ty, $number:ident => $to:expr, $value:ident => $from:expr;)*) => { $(
        impl Stateful for $type {
            fn state_dict(&self) -> Result<StateDict> {
                let $number = *self;
                Ok(unnamed_entry(Tensor::full((), $to, (<$element as Element>::DTYPE, Device::default()))?))
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
                let $value = value::<$element>(state)?;
                *self = $from;
                Ok(())
            }
        }
    )* };
}

// There is no unsigned 64-bit dtype, so the bits are stored as i64.
numbers! {
    f64: f64, x => x, x => x;
    f32: f32, x => x, x => x;
    i64: i64, x => x, x => x;
    i32: i32, x => x, x => x;
    u64: i64, x => x as i64, x => x as u64;
    usize: i64, x => x as i64, x => x as usize;
    bool: bool, x => x, x => x;
}

impl Stateful for Vec<f64> {
    fn state_dict(&self) -> Result<StateDict> {
        Ok(unnamed_entry(Tensor::from_slice(self, self.len(), Device::default())?))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        *self = values(state)?;
        Ok(())
    }
}

/// Loading copies the values into the tensor.
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

/// Saves the seed and the number of draws, so that the next draw after loading is the draw that would have followed.
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
