//! Setters of option structs, which users need because they cannot construct a `#[non_exhaustive]` struct.

/// Adds a method for each field of a struct, which sets it: `HistoryOptions::default().stacks(false)`.
macro_rules! setters {
    ($options:ident { $($field:ident: $type:ty),* }) => {
        impl $options {
            $(
                #[doc = concat!("Returns these options with another `", stringify!($field), "`.")]
                #[must_use]
                pub const fn $field(mut self, $field: $type) -> Self {
                    self.$field = $field;
                    self
                }
            )*
        }
    };
}

pub(crate) use setters;
