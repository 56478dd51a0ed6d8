//! Ordered collections of named tensors, which are the contents of saved files.

use indexmap::IndexMap;

use crate::internal::Excerpt;
use crate::{DType, Result, Tensor};

/// An ordered map from names to tensors. [`crate::nn::Module::state_dict`] and [`crate::optim::Optimizer::state_dict`] return a state
/// dict whose tensors share memory with the module or optimiser. A clone of a state dict has its own memory.
///
/// ```
/// use claystone::{Device, Tensor, nn::StateDict};
/// let state: StateDict = [("weight".to_string(), Tensor::zeros(3, Device::Cpu)?)].into_iter().collect();
/// assert_eq!(state.get("weight").unwrap().numel(), 3);
/// assert_eq!(state.names().collect::<Vec<_>>(), ["weight"]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Default, Clone)]
pub struct StateDict {
    entries: IndexMap<String, Tensor>,
}

impl StateDict {
    /// Creates an empty state dict.
    pub fn new() -> StateDict {
        StateDict::default()
    }

    /// Adds an entry at the end. If the name exists, replaces its tensor and keeps the position.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.entries.insert(name.into(), tensor);
    }

    /// Returns the tensor with this name, or `None`.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.entries.get(name)
    }

    /// Removes and returns the tensor with this name (PyTorch's `state.pop(name, None)`). The remaining entries keep their order.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.entries.shift_remove(name)
    }

    /// Returns the names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(|name| &name[..])
    }

    /// Returns names and tensors, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|(name, t)| (&name[..], t))
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// True if there are no entries.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Puts `prefix` and a dot before each name: `weight` becomes `encoder.weight`. An empty name becomes `prefix`.
    pub fn with_prefix(self, prefix: &str) -> StateDict {
        self.into_iter().map(|(name, t)| (join_names(prefix, &name), t)).collect()
    }

    /// Removes `prefix` and the dot after it from names. Other names are kept (PyTorch's `consume_prefix_in_state_dict_if_present`).
    ///
    /// ```
    /// use claystone::{Device, nn::{Linear, Module}};
    /// let saved = Linear::new(3, 2, Device::Cpu)?.state_dict().with_prefix("module");
    /// assert_eq!(saved.names().collect::<Vec<_>>(), ["module.weight", "module.bias"]);
    /// assert_eq!(saved.strip_prefix("module").names().collect::<Vec<_>>(), ["weight", "bias"]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn strip_prefix(self, prefix: &str) -> StateDict {
        let stripped = |name: String| strip_name_prefix(&name, prefix).map(String::from).unwrap_or(name);
        self.into_iter().map(|(name, t)| (stripped(name), t)).collect()
    }

    /// Replaces each name by `f(name)`, for files in which layers have other names. Fails with [`crate::Error::Invalid`] if
    /// two entries would get the same name.
    ///
    /// ```
    /// use claystone::{Device, nn::{Linear, Module}};
    /// let state = Linear::new(3, 2, Device::Cpu)?.state_dict().rename(|name| name.replace("weight", "gamma"))?;
    /// assert_eq!(state.names().collect::<Vec<_>>(), ["gamma", "bias"]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn rename(self, f: impl Fn(&str) -> String) -> Result<StateDict> {
        let mut renamed = StateDict::new();
        for (name, t) in self {
            let new = f(&name);
            invalid!("StateDict::rename" if renamed.get(&new).is_some(),
                "{} is the second entry that becomes {}", Excerpt(&name), Excerpt(&new));
            renamed.insert(new, t);
        }
        Ok(renamed)
    }

    /// Keeps the entries for whose name `f` is true, for example only the adapters of a model, if its other weights are in another file.
    ///
    /// ```
    /// use claystone::{Device, nn::{Linear, Module}};
    /// let state = Linear::new(3, 2, Device::Cpu)?.state_dict().filter(|name| name != "bias");
    /// assert_eq!(state.names().collect::<Vec<_>>(), ["weight"]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn filter(self, f: impl Fn(&str) -> bool) -> StateDict {
        self.into_iter().filter(|(name, _)| f(name)).collect()
    }

    /// Adds the entries of `other`. If a name exists, its tensor is replaced.
    pub fn merge(&mut self, other: StateDict) {
        self.entries.extend(other.entries);
    }

    /// Returns the entries under `prefix`, with the prefix removed, and the other entries: for example a backbone and its head.
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::StateDict};
    /// let names = ["encoder.weight", "head.weight", "head.bias"];
    /// let entries = names.map(|name| (name.to_string(), Tensor::zeros(2, Device::Cpu).unwrap()));
    /// let (head, mut rest) = StateDict::from_iter(entries).split("head");
    /// assert_eq!(head.names().collect::<Vec<_>>(), ["weight", "bias"]);
    /// assert_eq!(rest.names().collect::<Vec<_>>(), ["encoder.weight"]);
    /// rest.merge(head.with_prefix("head"));
    /// assert_eq!(rest.names().collect::<Vec<_>>(), names);
    /// ```
    pub fn split(self, prefix: &str) -> (StateDict, StateDict) {
        let (below, others): (Vec<_>, Vec<_>) =
            self.into_iter().partition(|(name, _)| strip_name_prefix(name, prefix).is_some());
        (StateDict::from_iter(below).strip_prefix(prefix), others.into_iter().collect())
    }

    /// Returns an error unless names and shapes equal those of `wanted`.
    pub(crate) fn check_against(&self, op: &'static str, wanted: &StateDict) -> Result<()> {
        let (missing, unknown) = (wanted.names_not_in(self), self.names_not_in(wanted));
        invalid!(op if !missing.is_empty() || !unknown.is_empty(),
            "the state has other names: missing {missing:?}, unknown {unknown:?}");
        wanted.iter().try_for_each(|(name, t)| self.check_shape(op, name, t))
    }

    /// Returns an error if the entry with this name has another shape than `t`. A missing entry is no error.
    pub(crate) fn check_shape(&self, op: &'static str, name: &str, t: &Tensor) -> Result<()> {
        let Some(own) = self.get(name).filter(|own| own.shape() != t.shape()) else { return Ok(()) };
        let (wanted, given) = (t.shape(), own.shape());
        let name = Excerpt(if name.is_empty() { "it" } else { name });
        let remedy =
            match own.dtype() == DType::U8 && given.dims().split_last().is_some_and(|(_, d)| d == wanted.dims()) {
                true => "bytes of a dtype that claystone lacks have one more dim: convert them first",
                false => "give both the same sizes",
            };
        invalid!(op, "{name} has shape {wanted} here and {given} in the state: {remedy}");
    }

    /// Returns the names that only one of the two state dicts has.
    pub(crate) fn incompatible_keys(&self, wanted: &StateDict) -> IncompatibleKeys {
        let owned = |names: Vec<&str>| names.into_iter().map(String::from).collect();
        let missing_keys = owned(wanted.names_not_in(self));
        IncompatibleKeys { missing_keys, unexpected_keys: owned(self.names_not_in(wanted)) }
    }

    fn names_not_in<'a>(&'a self, other: &StateDict) -> Vec<&'a str> {
        self.names().filter(|name| other.get(name).is_none()).collect()
    }
}

/// Joins a prefix and a name, with a dot unless one of them is empty. Used by [`parts!`](crate::parts).
pub fn join_names(prefix: &str, name: &str) -> String {
    let dot = if prefix.is_empty() || name.is_empty() { "" } else { "." };
    format!("{prefix}{dot}{name}")
}

/// Removes the prefix from a name made by [`join_names`]. `None` if the name does not begin with the prefix.
pub(super) fn strip_name_prefix<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let rest = name.strip_prefix(prefix)?;
    if prefix.is_empty() || rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
}

/// Names that only the module has or only the loaded state has; see [`crate::nn::Module::load_state_dict`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IncompatibleKeys {
    /// Names of the module's tensors that are not in the state. These tensors have kept their values.
    pub missing_keys: Vec<String>,
    /// Names in the state that no tensor of the module has.
    pub unexpected_keys: Vec<String>,
}

impl FromIterator<(String, Tensor)> for StateDict {
    fn from_iter<I: IntoIterator<Item = (String, Tensor)>>(entries: I) -> StateDict {
        StateDict { entries: entries.into_iter().collect() }
    }
}

impl IntoIterator for StateDict {
    type Item = (String, Tensor);
    type IntoIter = indexmap::map::IntoIter<String, Tensor>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}
