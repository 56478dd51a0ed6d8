//! All that a training run goes on from, in one file.

use std::path::Path;

use super::state::stripped;
use super::{StateDict, fail, load, save};
use crate::{Device, Element, Error, Excerpt, Generator, Result, Seed, Tensor, for_each_part, no_grad};

/// What can be saved in a checkpoint and go on from it (the protocol `Stateful` of PyTorch's `torch.distributed.checkpoint`).
/// Modules, optimisers, schedulers and the gradient scaler are, and so are generators, tensors and numbers. A type of your own
/// is by its parts:
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
    /// What to go on from. Tensors may share memory with what they are the state of.
    ///
    /// # Errors
    /// Device failures.
    fn state_dict(&self) -> Result<StateDict>;

    /// Goes on where [`Stateful::state_dict`] was taken.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a state of something else; device failures.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;
}

/// Saves what a training run goes on from in one file, `.safetensors` or `.npz` by its name: each part's state below the part's
/// name, and so `model.fc.weight`, `optimizer.state.0.exp_avg` and `epoch`. The file is replaced as a whole, as by [`save`].
/// [`load_checkpoint`] goes on from it, to the bit if everything that changes from step to step is among the parts.
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
/// As [`save`]; [`Error::Invalid`] for a part whose name is another's, or below it.
pub fn save_checkpoint(path: impl AsRef<Path>, parts: &[(&str, &dyn Stateful)]) -> Result<()> {
    save(path, &StateDict::from_parts(parts)?)
}

/// Goes on from a file of [`save_checkpoint`]. Parts of the file that are not asked for are left out, so that a model alone can
/// be loaded from the checkpoint of a run. Parts are loaded in the order in which they are given: the optimiser's after the model's.
///
/// # Errors
/// As [`load`]; [`Error::Invalid`] with the file's and the part's name for one that the file does not have, before anything is
/// changed, and for one that is the state of something else, when those before it are loaded.
pub fn load_checkpoint(path: impl AsRef<Path>, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
    let path = path.as_ref();
    load(path, Device::default())?.load_parts(parts).map_err(|e| match e {
        Error::Invalid { reason, .. } => fail("load_checkpoint", path, reason),
        e => e,
    })
}

impl StateDict {
    /// The states of several parts, each below its name: what [`save_checkpoint`] writes. See [`Stateful`].
    ///
    /// # Errors
    /// [`Error::Invalid`] for a part whose name is another's, or below it; those of the parts.
    pub fn from_parts(parts: &[(&str, &dyn Stateful)]) -> Result<StateDict> {
        let mut all = StateDict::new();
        for (i, (name, part)) in parts.iter().enumerate() {
            let clash = parts.iter().enumerate().find(|(j, (other, _))| *j != i && stripped(name, other).is_some());
            if let Some((_, (other, _))) = clash {
                let reason = format!("part {} is below part {}: give it another name", Excerpt(name), Excerpt(other));
                return Err(Error::invalid("StateDict::from_parts", reason));
            }
            all.merge(part.state_dict()?.with_prefix(name));
        }
        Ok(all)
    }

    /// Gives each part its state: what [`load_checkpoint`] does with a file. Other entries are left out.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the part's name, before anything is changed, for one that has no entry; those of the parts,
    /// when the parts before are loaded.
    pub fn load_parts(&self, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<()> {
        let op = "StateDict::load_parts";
        let below = |part: &str| -> StateDict {
            let entry = |(name, t): (&str, &Tensor)| Some((stripped(name, part)?.to_string(), t.shallow_clone()));
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

/// The entry of a state that is one tensor: it has no name of its own.
fn only(state: &StateDict) -> Result<&Tensor> {
    let names = || state.names().collect::<Vec<_>>().join(", ");
    let wrong = || Error::invalid("load_state_dict", format!("it is no single value, it has {}", Excerpt(&names())));
    state.get("").ok_or_else(wrong)
}

/// The values of a state that is one tensor, from whatever dtype.
fn values<T: Element>(state: &StateDict) -> Result<Vec<T>> {
    only(state)?.to_dtype(T::DTYPE)?.to_vec()
}

fn value<T: Element>(state: &StateDict) -> Result<T> {
    match values(state)?[..] {
        [value] => Ok(value),
        ref all => {
            let reason = format!("the state has {} values and this is one number: load it into a Vec<f64>", all.len());
            Err(Error::invalid("load_state_dict", reason))
        }
    }
}

fn unnamed(tensor: Tensor) -> StateDict {
    [(String::new(), tensor)].into_iter().collect()
}

/// Numbers, each as a tensor of one element: its type, the element's, and both conversions.
macro_rules! numbers {
    ($($type:ty: $element:ty, $number:ident => $to:expr, $value:ident => $from:expr;)*) => { $(
        impl Stateful for $type {
            fn state_dict(&self) -> Result<StateDict> {
                let $number = *self;
                Ok(unnamed(Tensor::full((), $to, (<$element as Element>::DTYPE, Device::default()))?))
            }

            fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
                let $value = value::<$element>(state)?;
                *self = $from;
                Ok(())
            }
        }
    )* };
}

// There are no unsigned tensors of 64 bits: the bits are kept as they are.
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
        Ok(unnamed(Tensor::from_slice(self, self.len(), Device::default())?))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        *self = values(state)?;
        Ok(())
    }
}

/// The values are copied into the tensor.
impl Stateful for Tensor {
    fn state_dict(&self) -> Result<StateDict> {
        Ok(unnamed(self.detach()))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let value = only(state)?;
        state.check_shape("load_state_dict", "", self)?;
        no_grad(|| self.copy_(&value.to_dtype(self.dtype())?.to_device(self.device())?)).map(|_| ())
    }
}

/// The seed and the number of draws: the next draw is the one that would have followed.
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
