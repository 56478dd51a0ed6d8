//! The fields of modules: tensors, submodules, and the switch between training and evaluation.

use std::sync::atomic::{AtomicBool, Ordering};

use super::Module;
use crate::Tensor;
use crate::internal::join_names;

/// The role of a tensor in its module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// A trained tensor.
    Parameter,
    /// A tensor that is saved with the parameters but not trained, such as running statistics.
    Buffer,
}

/// A field that [`parts!`](crate::parts) can list: a tensor (a parameter), a [`Buffer`], a module, a [`Mode`], or a vector or option
/// of these. The elements of a vector are named 0, 1 and so on, as in PyTorch's `ModuleList`.
pub trait Part {
    /// Does the part of [`Module::visit`] for this field, which has the given name.
    fn visit_field<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor));

    /// Does the part of [`Module::visit_mut`] for this field, which has the given name.
    fn visit_field_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor));

    /// Does the part of [`Module::set_training`] for this field. By default nothing.
    fn set_field_training(&self, training: bool) {
        let _ = training;
    }

    /// Does the part of [`Module::shallow_clone`] for this field.
    fn clone_handle(&self) -> Self
    where
        Self: Sized;

    /// Does the part of [`Module::visit_modules`] for this field. If the field is a module, visits the field itself too.
    fn visit_field_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        let _ = (name, visitor);
    }
}

/// Lists the fields of a [`Module`] that hold tensors, inside the `impl`: `parts!(conv, norm, fc);`, or `parts!();` if there are none.
///
/// The names of tensors begin with the name of their field. `field as "name"` replaces the field's name; `name` may contain dots, like
/// PyTorch's names of submodules. A field `r#type` has the name `type`. With `as ""`, tensors are named as inside the field.
///
/// [`Module::shallow_clone`] copies the remaining fields. Remaining fields that are not `Copy` are listed after a semicolon, as in
/// `parts!(weight; names, sizes)`, and are cloned. An enum without tensors uses `parts!(; self)`, which clones the whole value.
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
                $($field: $crate::nn::Part::clone_handle(&self.$field),)*
                $($($cloned: ::std::clone::Clone::clone(&self.$cloned),)+)?
                ..*self
            }
        }
    };
    (@visit $($field:ident [$($name:literal)?])*) => {
        fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, $crate::nn::Role, &'a $crate::Tensor)) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::visit_field(&self.$field, &$crate::parts!(@name prefix $field [$($name)?]), visitor);)*
        }

        fn visit_mut<'a>(
            &'a mut self,
            prefix: &str,
            visitor: &mut dyn FnMut(String, $crate::nn::Role, &'a mut $crate::Tensor),
        ) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::visit_field_mut(&mut self.$field, &$crate::parts!(@name prefix $field [$($name)?]), visitor);)*
        }

        fn set_training(&self, training: bool) {
            let _ = training;
            $($crate::nn::Part::set_field_training(&self.$field, training);)*
        }

        fn visit_modules<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, &'a dyn $crate::nn::Module)) {
            let _ = (prefix, &visitor);
            $($crate::nn::Part::visit_field_modules(&self.$field, &$crate::parts!(@name prefix $field [$($name)?]), visitor);)*
        }
    };
    (@name $prefix:ident $field:ident [$($name:literal)?]) => {
        $crate::internal::field_name($prefix, stringify!($field), &[$($name)?])
    };
}

/// Returns the name of a field, after `prefix`. `renamed` is the name given with `as` in [`parts!`](crate::parts); empty if none.
pub fn field_name(prefix: &str, field: &str, renamed: &[&str]) -> String {
    let own = field.strip_prefix("r#").unwrap_or(field);
    join_names(prefix, renamed.first().unwrap_or(&own))
}

impl Part for Tensor {
    fn visit_field<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        visitor(name.to_string(), Role::Parameter, self);
    }

    fn visit_field_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        visitor(name.to_string(), Role::Parameter, self);
    }

    fn clone_handle(&self) -> Tensor {
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
    fn visit_field<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        visitor(name.to_string(), Role::Buffer, &self.0);
    }

    fn visit_field_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        visitor(name.to_string(), Role::Buffer, &mut self.0);
    }

    fn clone_handle(&self) -> Buffer {
        Buffer(self.0.shallow_clone())
    }
}

/// The switch between training and evaluation. It starts as training.
#[derive(Debug)]
pub struct Mode(AtomicBool);

impl Mode {
    /// True in training, and false in evaluation.
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
    fn visit_field<'a>(&'a self, _name: &str, _visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {}

    fn visit_field_mut<'a>(&'a mut self, _name: &str, _visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {}

    fn set_field_training(&self, training: bool) {
        self.0.store(training, Ordering::Relaxed);
    }

    fn clone_handle(&self) -> Mode {
        Mode(AtomicBool::new(self.is_training()))
    }
}

impl<M: Module> Part for M {
    fn visit_field<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        self.visit(name, visitor);
    }

    fn visit_field_mut<'a>(&'a mut self, name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        self.visit_mut(name, visitor);
    }

    fn set_field_training(&self, training: bool) {
        self.set_training(training);
    }

    fn clone_handle(&self) -> M {
        self.shallow_clone()
    }

    fn visit_field_modules<'a>(&'a self, name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
        visitor(name.to_string(), self);
        self.visit_modules(name, visitor);
    }
}

/// Implements [`Part`] for a collection of parts, which `$collect` makes from an iterator. `$item_name` is the name of part number `$i` in
/// a field called `$name`.
macro_rules! impl_part_for_collections {
    ($($collection:ident $collect:ident, $name:ident, $i:ident => $item_name:expr;)*) => { $(
        impl<P: Part> Part for $collection<P> {
            fn visit_field<'a>(&'a self, $name: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
                self.iter().enumerate().for_each(|($i, part)| part.visit_field($item_name, visitor));
            }

            fn visit_field_mut<'a>(&'a mut self, $name: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
                self.iter_mut().enumerate().for_each(|($i, part)| part.visit_field_mut($item_name, visitor));
            }

            fn set_field_training(&self, training: bool) {
                self.iter().for_each(|part| part.set_field_training(training));
            }

            fn clone_handle(&self) -> $collection<P> {
                self.iter().map(P::clone_handle).$collect()
            }

            fn visit_field_modules<'a>(&'a self, $name: &str, visitor: &mut dyn FnMut(String, &'a dyn Module)) {
                self.iter().enumerate().for_each(|($i, part)| part.visit_field_modules($item_name, visitor));
            }
        }
    )* };
}

impl_part_for_collections! {
    Vec collect, name, i => &join_names(name, &i.to_string());
    Option next, name, _i => name;
}
