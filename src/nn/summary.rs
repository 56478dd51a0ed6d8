//! A table of a module's submodules and their parameter counts.

use std::fmt;

use super::Module;
use crate::Shape;

/// A table with one line for each submodule, and totals.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// The module itself, followed by its submodules in order.
    pub layers: Vec<LayerSummary>,
    /// The number of elements of all parameters. Tied parameters count once.
    pub parameters: usize,
    /// The number of elements of all parameters that are not frozen with `requires_grad_(false)`.
    pub trainable: usize,
    /// The number of elements of all buffers.
    pub buffers: usize,
    /// The total size of parameters and buffers, in bytes.
    pub nbytes: usize,
}

/// One line of a [`Summary`].
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSummary {
    /// The dotted name of the submodule, with which its parameters' names begin. Empty for the module itself.
    pub name: String,
    /// The name of the type, such as `Linear`.
    pub type_name: &'static str,
    /// The number of modules that contain this one.
    pub depth: usize,
    /// The names and shapes of the layer's own parameters, without those of submodules.
    pub shapes: Vec<(String, Shape)>,
    /// The number of elements of the layer's parameters, including those of submodules.
    pub parameters: usize,
}

/// Returns a table of a module's submodules, like `torchinfo` and Keras.
///
/// ```
/// use claystone::Device;
/// use claystone::nn::{Activation, BatchNorm1d, Linear, Sequential, summary};
/// let net = Sequential::new()
///     .push(Linear::new(64, 128, Device::Cpu)?.with_activation(Activation::Relu))
///     .push(BatchNorm1d::new(128, Device::Cpu)?)
///     .push(Linear::new(128, 10, Device::Cpu)?);
/// let table = "\
/// layer  type        shapes of parameters          parameters
/// -----------------------------------------------------------
/// .      Sequential                                     9,866
///   0    Linear      weight [128, 64], bias [128]       8,320
///   1    BatchNorm   weight [128], bias [128]             256
///   2    Linear      weight [10, 128], bias [10]        1,290
/// -----------------------------------------------------------
/// 9,866 parameters, 9,866 of them trainable; 257 numbers in buffers; 40,496 bytes
/// ";
/// assert_eq!(summary(&net).to_string(), table);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn summary(module: &dyn Module) -> Summary {
    let mut modules = vec![(String::new(), module)];
    modules.extend(named_modules(module));
    let layer = |(name, module): &(String, &dyn Module)| {
        let inside: Vec<_> = named_modules(*module).collect();
        let is_own = |parameter: &str| !inside.iter().any(|(child, _)| is_inside(parameter, child));
        let own = module.named_parameters("").into_iter().filter(|(parameter, _)| is_own(parameter));
        let around = modules.iter().filter(|(other, _)| other != name && is_inside(name, other));
        LayerSummary {
            name: name.clone(),
            type_name: module.type_name(),
            depth: around.count(),
            shapes: own.map(|(parameter, t)| (parameter, t.shape().clone())).collect(),
            parameters: module.parameter_count(),
        }
    };
    let (parameters, buffers) = (module.parameters(), module.named_buffers(""));
    let tensors = || parameters.iter().copied().chain(buffers.iter().map(|(_, t)| *t));
    Summary {
        layers: modules.iter().map(layer).collect(),
        parameters: module.parameter_count(),
        trainable: parameters.iter().filter(|p| p.requires_grad()).map(|p| p.numel()).sum(),
        buffers: buffers.iter().map(|(_, t)| t.numel()).sum(),
        nbytes: tensors().map(|t| t.numel() * t.dtype().size()).sum(),
    }
}

/// Returns the submodules, except fields with an empty name: their layers count as layers of the enclosing module.
fn named_modules(module: &dyn Module) -> impl Iterator<Item = (String, &dyn Module)> {
    module.named_modules("").into_iter().filter(|(name, _)| !name.is_empty())
}

/// True if `name` is the name of a tensor or module inside the module called `module`.
fn is_inside(name: &str, module: &str) -> bool {
    module.is_empty() || name.strip_prefix(module).is_some_and(|rest| rest.starts_with('.'))
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shapes = |l: &LayerSummary| l.shapes.iter().map(|(n, s)| format!("{n} {s}")).collect::<Vec<_>>().join(", ");
        let name = |l: &LayerSummary| format!("{}{}", "  ".repeat(l.depth), if l.depth == 0 { "." } else { &l.name });
        let line =
            |l: &LayerSummary| [name(l), l.type_name.to_string(), shapes(l), with_thousands_separators(l.parameters)];
        let head = ["layer", "type", "shapes of parameters", "parameters"].map(String::from);
        let rows: Vec<[String; 4]> = std::iter::once(head).chain(self.layers.iter().map(line)).collect();
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or_default());
        let rule = "-".repeat(a + b + c + d + 6);
        for (i, [name, type_name, shapes, parameters]) in rows.iter().enumerate() {
            writeln!(f, "{name:a$}  {type_name:b$}  {shapes:c$}  {parameters:>d$}")?;
            if i == 0 {
                writeln!(f, "{rule}")?;
            }
        }
        writeln!(f, "{rule}")?;
        let numbers = [self.parameters, self.trainable, self.buffers, self.nbytes];
        let [all, trainable, buffers, nbytes] = numbers.map(with_thousands_separators);
        writeln!(f, "{all} parameters, {trainable} of them trainable; {buffers} numbers in buffers; {nbytes} bytes")
    }
}

fn with_thousands_separators(n: usize) -> String {
    let digits = n.to_string();
    let comma = |(i, digit): (usize, char)| {
        let before = if i > 0 && (digits.len() - i).is_multiple_of(3) { "," } else { "" };
        format!("{before}{digit}")
    };
    digits.chars().enumerate().map(comma).collect()
}
