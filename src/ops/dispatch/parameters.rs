//! The parameters and signatures of operations, and the values that a call by name passes.

use std::fmt;

use smallvec::SmallVec;

use crate::error::Excerpt;
use crate::layout::shape::impl_from;
use crate::ops::dispatch::args::Args;
use crate::ops::dispatch::arguments::{Argument, ParameterKind};
use crate::{Error, Result, Tensor};

/// A parameter of an operation, printed as in a signature: `input`, `bias?`, `*tensors`, `dim: int`, `eps: float = 1e-5`.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Parameter {
    /// The name of the parameter in PyTorch.
    pub name: &'static str,
    /// The kind of value that the parameter accepts.
    pub kind: ParameterKind,
    /// The default value, which is [`Argument::None`] for optional tensors and some arguments. `None` if a value is required.
    pub default: Option<Argument>,
}

impl Parameter {
    pub(crate) fn new(name: &'static str, kind: ParameterKind, default: Option<Argument>) -> Parameter {
        Parameter { name, kind, default }
    }

    /// True if the parameter is a tensor or a list of tensors.
    pub fn is_tensor(&self) -> bool {
        matches!(self.kind, ParameterKind::Tensor | ParameterKind::Tensors)
    }
}

impl fmt::Display for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Parameter { name, kind, default } = self;
        match (kind, default) {
            (ParameterKind::Tensor, None) => f.write_str(name),
            (ParameterKind::Tensor, Some(_)) => write!(f, "{name}?"),
            (ParameterKind::Tensors, _) => write!(f, "*{name}"),
            (_, None) => write!(f, "{name}: {}", kind.name()),
            (_, Some(Argument::None)) => write!(f, "{name}: {}?", kind.name()),
            (_, Some(default)) => write!(f, "{name}: {} = {default}", kind.name()),
        }
    }
}

/// The value of a named parameter: a tensor, a list of tensors, or a non-tensor [`Argument`] (number, flag, dtype, ...).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Value<'a> {
    /// A tensor.
    Tensor(&'a Tensor),
    /// A list of tensors.
    Tensors(&'a [&'a Tensor]),
    /// Any other value. [`Argument::None`] leaves out a parameter of any kind.
    Argument(Argument),
}

impl_from! { Value<'a>:
    ['a] &'a Tensor, t => Value::Tensor(t);
    ['a] Option<&'a Tensor>, t => t.map_or(Value::Argument(Argument::None), Value::Tensor);
    ['a] &'a [&'a Tensor], tensors => Value::Tensors(tensors);
    ['a, T: Into<Argument>] T, argument => Value::Argument(argument.into());
}

impl fmt::Display for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Tensor(_) => f.write_str("a tensor"),
            Value::Tensors(_) => f.write_str("a list of tensors"),
            Value::Argument(argument) => write!(f, "{argument}"),
        }
    }
}

/// The tensors of a call, with `None` for each tensor that is left out.
pub(crate) type Slots<'a> = SmallVec<[Option<&'a Tensor>; 6]>;

/// The name and the parameters of an operation, in the order of the method's parameters. A signature is printed in one line.
///
/// ```
/// use claystone::ops::{self, Argument, ParameterKind};
/// let signature = ops::signature("layer_norm").unwrap();
/// assert_eq!(signature.to_string(), "layer_norm(input, normalized_shape: sizes, weight?, bias?, eps: float = 1e-5)");
/// let names: Vec<&str> = signature.tensors().map(|p| p.name).collect();
/// assert_eq!(names, ["input", "weight", "bias"]);
/// let eps = signature.arguments().last().unwrap();
/// assert_eq!((eps.name, eps.kind, &eps.default), ("eps", ParameterKind::Float, &Some(Argument::Float(1e-5))));
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Signature<'a> {
    /// The operation's name.
    pub name: &'static str,
    /// The operation's parameters.
    pub parameters: &'a [Parameter],
}

impl fmt::Display for Signature<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parameters: Vec<String> = self.parameters.iter().map(Parameter::to_string).collect();
        write!(f, "{}({})", self.name, parameters.join(", "))
    }
}

impl<'a> Signature<'a> {
    /// Returns the parameters that are tensors or lists of tensors.
    pub fn tensors(self) -> impl Iterator<Item = &'a Parameter> {
        self.parameters.iter().filter(|p| p.is_tensor())
    }

    /// Returns the parameters that are not tensors.
    pub fn arguments(self) -> impl Iterator<Item = &'a Parameter> {
        self.parameters.iter().filter(|p| !p.is_tensor())
    }

    /// Returns the error for a call that does not match this signature.
    #[cold]
    pub(crate) fn call_error(self, reason: impl fmt::Display) -> Error {
        Error::invalid(self.name, format!("{reason}: {self}"))
    }

    /// Returns the number of parameters that are single tensors. A list of tensors comes after all single tensors.
    fn single_tensors(self) -> usize {
        self.tensors().filter(|p| p.kind == ParameterKind::Tensor).count()
    }

    /// Checks the numbers of tensors and arguments, and fills in defaults, so that every parameter has a tensor or an argument.
    pub(crate) fn args(self, tensors: &[Option<&'a Tensor>], arguments: &[Argument]) -> Result<Args<'a>> {
        let (single, listed) = (self.single_tensors(), self.tensors().any(|p| p.kind == ParameterKind::Tensors));
        let most = if listed { usize::MAX } else { single };
        for (given, most, what) in
            [(tensors.len(), most, "tensors"), (arguments.len(), self.arguments().count(), "arguments besides tensors")]
        {
            if given > most {
                return Err(self.call_error(format_args!("it takes at most {most} {what} and was called with {given}")));
            }
        }
        let missing = |p: &Parameter| self.call_error(format_args!("{}, {}, is missing", p.name, p.kind.description()));
        let mut slots = Slots::from_slice(tensors);
        slots.resize(slots.len().max(single), None);
        if slots[single..].iter().any(Option::is_none) {
            return Err(self.call_error("no tensor of a list can be left out"));
        }
        if let Some((p, _)) = self.tensors().zip(&slots).find(|(p, t)| t.is_none() && p.default.is_none()) {
            return Err(missing(p));
        }
        let argument = |(i, p): (usize, &Parameter)| match (arguments.get(i), &p.default) {
            (None | Some(Argument::None), default) => default.clone().ok_or_else(|| missing(p)),
            (Some(given), _) => Ok(given.clone()),
        };
        let arguments = self.arguments().enumerate().map(argument).collect::<Result<_>>()?;
        Ok(Args { signature: self, tensors: slots, arguments })
    }

    /// Converts a call with named parameters to the positional tensors and arguments that [`call`](crate::ops::call) takes. Fails
    /// with [`Error::Invalid`] for an unknown name, a parameter that is given twice, and a value of the wrong kind.
    ///
    /// ```
    /// use claystone::{Device, Tensor, ops};
    /// let (x, bias) = (Tensor::ones([2, 3], Device::Cpu)?, Tensor::zeros(3, Device::Cpu)?);
    /// let signature = ops::signature("layer_norm").unwrap();
    /// let (tensors, arguments) = signature.by_position(&[Some(&x)], &[3.into()], &[("bias", (&bias).into())])?;
    /// assert!(tensors[1].is_none() && tensors[2].is_some());
    /// ops::call("layer_norm", &tensors, &arguments)?;
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn by_position<'t>(
        self,
        tensors: &[Option<&'t Tensor>],
        arguments: &[Argument],
        named: &[(&str, Value<'t>)],
    ) -> Result<(Vec<Option<&'t Tensor>>, Vec<Argument>)> {
        let (mut slots, mut by_position) = (tensors.to_vec(), arguments.to_vec());
        slots.resize(slots.len().max(self.single_tensors()), None);
        by_position.resize(arguments.len().max(self.arguments().count()), Argument::None);
        for (k, (name, value)) in named.iter().enumerate() {
            let same = |p: &Parameter| p.name == *name;
            let Some(parameter) = self.parameters.iter().find(|p| same(p)) else {
                return Err(self.call_error(format_args!("it has no parameter {}", Excerpt(name))));
            };
            let i = if parameter.is_tensor() { self.tensors().position(same) } else { self.arguments().position(same) };
            let i = i.unwrap_or_default();
            let given = if parameter.is_tensor() { tensors.len() } else { arguments.len() };
            if named[..k].iter().any(|(other, _)| other == name) || given > i {
                return Err(self.call_error(format_args!("{name} is given twice")));
            }
            match (parameter.kind, value) {
                (_, Value::Argument(Argument::None)) => {}
                (ParameterKind::Tensor, Value::Tensor(t)) => slots[i] = Some(t),
                (ParameterKind::Tensors, Value::Tensors(list)) => slots.extend(list.iter().map(|&t| Some(t))),
                (_, Value::Argument(argument)) if !parameter.is_tensor() => by_position[i] = argument.clone(),
                (kind, value) => {
                    return Err(self.call_error(format_args!("{name} is {value} and should be {}", kind.description())));
                }
            }
        }
        Ok((slots, by_position))
    }
}
