//! Boxed modules. Modules of different types can be stored together as `Box<dyn Module>`.

use std::any::Any;

use super::{Module, Role};
use crate::{Result, Tensor};

/// Makes the type name of a module and [`Module::shallow_clone`] available for `dyn Module`. Implemented for all modules.
pub trait AnyModule {
    fn boxed_handle(&self) -> Box<dyn Module>;

    fn as_any(&self) -> &dyn Any;
}

impl<M: Module> AnyModule for M {
    fn boxed_handle(&self) -> Box<dyn Module> {
        Box::new(self.shallow_clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

macro_rules! impl_boxed_module {
    ($([$($generics:tt)*] $module:ty: $this:ident => $handle:expr;)*) => { $(
        /// A boxed module behaves like the module in the box.
        impl<$($generics)*> Module for Box<$module> {
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                (**self).forward(x)
            }

            fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
                (**self).visit(prefix, visitor);
            }

            fn visit_mut<'a>(&'a mut self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
                (**self).visit_mut(prefix, visitor);
            }

            fn set_training(&self, training: bool) {
                (**self).set_training(training);
            }

            fn shallow_clone(&self) -> Self {
                let $this = &**self;
                $handle
            }

            fn visit_modules<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
                (**self).visit_modules(prefix, visitor);
            }

            fn type_name(&self) -> &'static str {
                (**self).type_name()
            }
        }
    )* };
}

impl_boxed_module! {
    [M: Module] M: module => Box::new(module.shallow_clone());
    [] dyn Module: module => module.boxed_handle();
}
