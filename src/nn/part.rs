//! What modules are made of: tensors, other modules, and the switch between training and evaluation.

use std::sync::atomic::{AtomicBool, Ordering};

use super::{Module, joined};
use crate::Tensor;

/// What a tensor is to its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Trained.
    Parameter,
    /// Saved with the parameters, but not trained.
    Buffer,
}

/// A field of a module that [`parts!`](crate::parts) can list: a tensor (a parameter), a [`Buffer`], a module, a [`Mode`], or a
/// vector or an option of those. A vector's are numbered from 0, as in PyTorch's `ModuleList`.
pub trait Part {
    /// [`Module::visit`] of the field of this name.
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor));

    /// [`Module::visit_mut`] of the field of this name.
    fn show_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor));

    /// [`Module::set_training`] of the field.
    fn switch(&self, training: bool);

    /// [`Module::shallow_clone`] of the field.
    fn handle(&self) -> Self
    where
        Self: Sized;

    /// [`Module::visit_modules`] of the field, and the field itself where it is a module.
    fn show_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        let _ = (name, visitor);
    }
}

/// Lists the fields of a [`Module`] that hold tensors, inside of its `impl`: `parts!(conv, norm, fc);`, or `parts!();` without any.
///
/// A field's name begins the names of its tensors. `as` gives another name, which may have dots, as PyTorch's submodules have; the
/// name of a field `r#type` is `type`, and tensors of a field `as ""` have no name before their own.
///
/// The other fields are copied by [`Module::shallow_clone`]. Those that are not `Copy` are listed after a semicolon,
/// `parts!(weight; names, sizes)`, and are cloned. An enum without tensors has `parts!(; self)`, which clones the whole value.
///
/// ```
/// use claystone::Device;
/// use claystone::nn::{Linear, Module};
///
/// struct Attention {
///     query: Linear,
///     r#type: Linear,
///     inner: Linear,
/// }
///
/// impl Module for Attention {
///     claystone::parts!(query as "self.query", r#type, inner as "");
/// }
///
/// let linear = || Linear::new(2, 2, Device::Cpu).unwrap().without_bias();
/// let state = Attention { query: linear(), r#type: linear(), inner: linear() }.state_dict();
/// assert_eq!(state.names().collect::<Vec<_>>(), ["self.query.weight", "type.weight", "weight"]);
/// ```
#[macro_export]
macro_rules! parts {
    (; self) => {
        $crate::parts!(@visit);

        fn shallow_clone(&self) -> Self {
            ::std::clone::Clone::clone(self)
        }
    };
    ($($field:ident $(as $name:literal)?),* $(,)? $(; $($cloned:ident),+ $(,)?)?) => {
        $crate::parts!(@visit $($field [$($name)?])*);

        #[allow(clippy::needless_update)]
        fn shallow_clone(&self) -> Self {
            Self {
                $($field: $crate::nn::Part::handle(&self.$field),)*
                $($($cloned: ::std::clone::Clone::clone(&self.$cloned),)+)?
                ..*self
            }
        }
    };
    (@visit $($field:ident [$($name:literal)?])*) => {
        fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, $crate::nn::Role, &'a $crate::Tensor)) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::show(&self.$field, &$crate::parts!(@name prefix $field [$($name)?]), visitor);)*
        }

        fn visit_mut<'a>(
            &'a mut self,
            prefix: &str,
            visitor: &mut dyn FnMut(String, $crate::nn::Role, &'a mut $crate::Tensor),
        ) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::show_mut(&mut self.$field, &$crate::parts!(@name prefix $field [$($name)?]), visitor);)*
        }

        fn set_training(&self, training: bool) {
            let _ = training;
            $($crate::nn::Part::switch(&self.$field, training);)*
        }

        fn visit_modules<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, &'a dyn $crate::nn::Module)) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::show_modules(&self.$field, &$crate::parts!(@name prefix $field [$($name)?]), visitor);)*
        }
    };
    (@name $prefix:ident $field:ident [$($name:literal)?]) => {
        $crate::nn::field_name($prefix, stringify!($field), &[$($name)?])
    };
}

/// The name of a module's field after `prefix`: `renamed` where [`parts!`](crate::parts) was given a name.
#[doc(hidden)]
pub fn field_name(prefix: &str, field: &str, renamed: &[&str]) -> String {
    let own = field.strip_prefix("r#").unwrap_or(field);
    joined(prefix, renamed.first().unwrap_or(&own))
}

impl Part for Tensor {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        visitor(name.to_string(), Role::Parameter, self);
    }

    fn show_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        visitor(name.to_string(), Role::Parameter, self);
    }

    fn switch(&self, _training: bool) {}

    fn handle(&self) -> Tensor {
        self.shallow_clone()
    }
}

/// A tensor of a module that is saved with its parameters but not trained.
#[derive(Debug)]
pub struct Buffer(
    /// The tensor.
    pub Tensor,
);

impl Part for Buffer {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        visitor(name.to_string(), Role::Buffer, &self.0);
    }

    fn show_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        visitor(name.to_string(), Role::Buffer, &mut self.0);
    }

    fn switch(&self, _training: bool) {}

    fn handle(&self) -> Buffer {
        Buffer(self.0.shallow_clone())
    }
}

/// Whether a module trains, for those that behave differently then; it starts so.
#[derive(Debug)]
pub struct Mode(AtomicBool);

impl Mode {
    /// Whether it is training.
    pub fn is_training(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

impl Default for Mode {
    fn default() -> Mode {
        Mode(AtomicBool::new(true))
    }
}

impl Part for Mode {
    fn show<'a>(&'a self, _name: &str, _visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {}

    fn show_mut<'a>(&'a mut self, _name: &str, _visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {}

    fn switch(&self, training: bool) {
        self.0.store(training, Ordering::Relaxed);
    }

    fn handle(&self) -> Mode {
        Mode(AtomicBool::new(self.is_training()))
    }
}

impl<M: Module> Part for M {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        self.visit(name, visitor);
    }

    fn show_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        self.visit_mut(name, visitor);
    }

    fn switch(&self, training: bool) {
        self.set_training(training);
    }

    fn handle(&self) -> M {
        self.shallow_clone()
    }

    fn show_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        visitor(name.to_string(), self);
        self.visit_modules(name, visitor);
    }
}

impl<P: Part> Part for Vec<P> {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        self.iter().enumerate().for_each(|(i, part)| part.show(&joined(name, &i.to_string()), visitor));
    }

    fn show_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        self.iter_mut().enumerate().for_each(|(i, part)| part.show_mut(&joined(name, &i.to_string()), visitor));
    }

    fn switch(&self, training: bool) {
        self.iter().for_each(|part| part.switch(training));
    }

    fn handle(&self) -> Vec<P> {
        self.iter().map(P::handle).collect()
    }

    fn show_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        self.iter().enumerate().for_each(|(i, part)| part.show_modules(&joined(name, &i.to_string()), visitor));
    }
}

impl<P: Part> Part for Option<P> {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        self.iter().for_each(|part| part.show(name, visitor));
    }

    fn show_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        self.iter_mut().for_each(|part| part.show_mut(name, visitor));
    }

    fn switch(&self, training: bool) {
        self.iter().for_each(|part| part.switch(training));
    }

    fn handle(&self) -> Option<P> {
        self.as_ref().map(P::handle)
    }

    fn show_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        self.iter().for_each(|part| part.show_modules(name, visitor));
    }
}
