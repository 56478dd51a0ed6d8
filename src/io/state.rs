//! Named tensors in order: what is saved and loaded.

use crate::{Error, Result, Tensor};

/// Tensors by name, in order: what [`crate::nn::Module::state_dict`] and [`crate::optim::Optimizer::state_dict`] give.
///
/// ```
/// use claystone::{Device, Tensor, nn::StateDict};
/// let state: StateDict = [("weight".to_string(), Tensor::zeros(3, Device::Cpu)?)].into_iter().collect();
/// assert_eq!(state.get("weight").unwrap().numel(), 3);
/// assert_eq!(state.names().collect::<Vec<_>>(), ["weight"]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct StateDict {
    entries: Vec<(String, Tensor)>,
}

impl StateDict {
    /// Without entries.
    pub fn new() -> StateDict {
        StateDict::default()
    }

    /// Adds an entry, or replaces the one of this name where it is.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        let name = name.into();
        match self.entries.iter_mut().find(|(n, _)| *n == name) {
            Some(entry) => entry.1 = tensor,
            None => self.entries.push((name, tensor)),
        }
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.entries.iter().find(|(n, _)| n == name).map(|(_, t)| t)
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.iter().map(|(n, _)| &n[..])
    }

    /// Names and tensors, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|(n, t)| (&n[..], t))
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// An error unless the names and shapes are those of `wanted`.
    pub(crate) fn check_against(&self, op: &'static str, wanted: &StateDict) -> Result<()> {
        let (missing, unknown) = (wanted.names_not_in(self), self.names_not_in(wanted));
        if !missing.is_empty() || !unknown.is_empty() {
            let reason = format!("the state has other names: missing {missing:?}, not known {unknown:?}");
            return Err(Error::invalid(op, reason));
        }
        wanted.iter().try_for_each(|(name, t)| self.check_shape(op, name, t))
    }

    /// An error unless the entry of this name has the shape of `t`.
    pub(crate) fn check_shape(&self, op: &'static str, name: &str, t: &Tensor) -> Result<()> {
        match self.get(name) {
            Some(own) if own.shape() != t.shape() => {
                let hint = "an entry has the shape of the tensor it is loaded into";
                Err(Error::ShapeMismatch { op, lhs: t.shape().clone(), rhs: own.shape().clone(), hint })
            }
            _ => Ok(()),
        }
    }

    /// The names that only one of the two has.
    pub(crate) fn compared_with(&self, wanted: &StateDict) -> IncompatibleKeys {
        let owned = |names: Vec<&str>| names.into_iter().map(String::from).collect();
        let missing_keys = owned(wanted.names_not_in(self));
        IncompatibleKeys { missing_keys, unexpected_keys: owned(self.names_not_in(wanted)) }
    }

    fn names_not_in<'a>(&'a self, other: &StateDict) -> Vec<&'a str> {
        let known: std::collections::HashSet<&str> = other.names().collect();
        self.names().filter(|n| !known.contains(n)).collect()
    }
}

/// Names that a module and the state loaded into it do not have in common; see [`crate::nn::Module::load_state_dict`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IncompatibleKeys {
    /// Tensors of the module that kept their values.
    pub missing_keys: Vec<String>,
    /// Entries that the module has no tensor for.
    pub unexpected_keys: Vec<String>,
}

impl FromIterator<(String, Tensor)> for StateDict {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(entries: I) -> StateDict {
        StateDict { entries: entries.into_iter().collect() }
    }
}

impl IntoIterator for StateDict {
    type Item = (String, Tensor);
    type IntoIter = std::vec::IntoIter<(String, Tensor)>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}
