//! Named tensors in order: what is saved and loaded.

use indexmap::IndexMap;

use crate::{DType, Error, Excerpt, Result, Tensor};

/// Tensors by name, in order: what [`crate::nn::Module::state_dict`] and [`crate::optim::Optimizer::state_dict`] give. Those
/// share memory with what they were taken of; a clone has memory of its own, and so stays what it was.
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
    /// Without entries.
    pub fn new() -> StateDict {
        StateDict::default()
    }

    /// Adds an entry, or replaces the one of this name where it is.
    pub fn insert(&mut self, name: impl Into<String>, tensor: Tensor) {
        self.entries.insert(name.into(), tensor);
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.entries.get(name)
    }

    /// Takes the entry of this name out (PyTorch's `state.pop(name, None)`); the others keep their order.
    pub fn remove(&mut self, name: &str) -> Option<Tensor> {
        self.entries.shift_remove(name)
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.entries.keys().map(|name| &name[..])
    }

    /// Names and tensors, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.entries.iter().map(|(name, t)| (&name[..], t))
    }

    /// How many entries there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The same tensors with `prefix` and a dot before each name: `encoder.weight` of `weight`. An entry without a name gets
    /// the prefix alone.
    pub fn with_prefix(self, prefix: &str) -> StateDict {
        self.into_iter().map(|(name, t)| (joined(prefix, &name), t)).collect()
    }

    /// Takes `prefix` and its dot off the names that have it; the others stay as they are (PyTorch's
    /// `consume_prefix_in_state_dict_if_present`).
    ///
    /// ```
    /// use claystone::{Device, nn::{Linear, Module}};
    /// let saved = Linear::new(3, 2, Device::Cpu)?.state_dict().with_prefix("module");
    /// assert_eq!(saved.names().collect::<Vec<_>>(), ["module.weight", "module.bias"]);
    /// assert_eq!(saved.strip_prefix("module").names().collect::<Vec<_>>(), ["weight", "bias"]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn strip_prefix(self, prefix: &str) -> StateDict {
        let stripped = |name: String| stripped(&name, prefix).map(String::from).unwrap_or(name);
        self.into_iter().map(|(name, t)| (stripped(name), t)).collect()
    }

    /// The same tensors, each with the name that `f` makes of its name: for a file whose program named its layers differently.
    ///
    /// ```
    /// use claystone::{Device, nn::{Linear, Module}};
    /// let state = Linear::new(3, 2, Device::Cpu)?.state_dict().rename(|name| name.replace("weight", "gamma"))?;
    /// assert_eq!(state.names().collect::<Vec<_>>(), ["gamma", "bias"]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] where two entries get one name.
    pub fn rename(self, f: impl Fn(&str) -> String) -> Result<StateDict> {
        let mut renamed = StateDict::new();
        for (name, t) in self {
            let new = f(&name);
            if renamed.get(&new).is_some() {
                let reason = format!("{} is the second entry that becomes {}", Excerpt(&name), Excerpt(&new));
                return Err(Error::invalid("StateDict::rename", reason));
            }
            renamed.insert(new, t);
        }
        Ok(renamed)
    }

    /// The entries whose names `f` accepts: the adapters of a model whose other weights are in a file already.
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

    /// Adds the entries of `other`, which replace those of the same names.
    pub fn merge(&mut self, other: StateDict) {
        self.entries.extend(other.entries);
    }

    /// The entries below `prefix`, without it, and the others: a backbone and its head.
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
            self.into_iter().partition(|(name, _)| stripped(name, prefix).is_some());
        (StateDict::from_iter(below).strip_prefix(prefix), others.into_iter().collect())
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
                let (wanted, given) = (t.shape(), own.shape());
                let name = if name.is_empty() { "it" } else { name };
                let are_bytes =
                    own.dtype() == DType::U8 && given.dims().split_last().is_some_and(|(_, d)| d == wanted.dims());
                let remedy = match are_bytes {
                    true => "bytes of a dtype that claystone lacks have one more dim: convert them first",
                    false => "give both the same sizes",
                };
                let reason = format!("{} has shape {wanted} here and {given} in the state: {remedy}", Excerpt(name));
                Err(Error::invalid(op, reason))
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
        self.names().filter(|name| other.get(name).is_none()).collect()
    }
}

/// A name below a prefix, with a dot between them where neither is empty: for [`parts!`](crate::parts).
#[doc(hidden)]
pub fn joined(prefix: &str, name: &str) -> String {
    let dot = if prefix.is_empty() || name.is_empty() { "" } else { "." };
    format!("{prefix}{dot}{name}")
}

/// The name that [`joined`] was given with this prefix, if it was.
pub(super) fn stripped<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    let rest = name.strip_prefix(prefix)?;
    if prefix.is_empty() || rest.is_empty() { Some(rest) } else { rest.strip_prefix('.') }
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
    type IntoIter = indexmap::map::IntoIter<String, Tensor>;

    fn into_iter(self) -> Self::IntoIter {
        self.entries.into_iter()
    }
}
