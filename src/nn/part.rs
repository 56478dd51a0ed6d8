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

    /// [`Module::visit_modules`] of the field, and the field itself where it is a module.
    fn show_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        let _ = (name, visitor);
    }
}

/// Writes what a [`Module`] is made of, from the names of its fields: `parts!(conv, norm, fc);` inside of the `impl`.
/// `parts!();` for a module that has nothing to train and does the same always.
#[macro_export]
macro_rules! parts {
    ($($field:ident),* $(,)?) => {
        fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, $crate::nn::Role, &'a $crate::Tensor)) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::show(&self.$field, &$crate::nn::joined(prefix, stringify!($field)), visitor);)*
        }

        fn visit_mut<'a>(
            &'a mut self,
            prefix: &str,
            visitor: &mut dyn FnMut(String, $crate::nn::Role, &'a mut $crate::Tensor),
        ) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::show_mut(&mut self.$field, &$crate::nn::joined(prefix, stringify!($field)), visitor);)*
        }

        fn set_training(&self, training: bool) {
            let _ = training;
            $($crate::nn::Part::switch(&self.$field, training);)*
        }

        fn visit_modules<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, &'a dyn $crate::nn::Module)) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::show_modules(&self.$field, &$crate::nn::joined(prefix, stringify!($field)), visitor);)*
        }
    };
}

impl Part for Tensor {
    fn show<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        visitor(name.to_string(), Role::Parameter, self);
    }

    fn show_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        visitor(name.to_string(), Role::Parameter, self);
    }

    fn switch(&self, _training: bool) {}
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

    fn show_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        self.iter().for_each(|part| part.show_modules(name, visitor));
    }
}
