//! Structs of options whose default values stand beside the fields, and setters, which users need because they cannot construct a
//! `#[non_exhaustive]` struct.

/// Defines structs whose fields have default values, as in `pub lr: f64 = 0.1,`, and implements [`Default`] for them.
macro_rules! options {
    ($($(#[$meta:meta])* pub struct $name:ident $(<const $d:ident: usize>)? {
        $($(#[$field_meta:meta])* pub $field:ident: $type:ty = $default:expr,)*
    })*) => { $(
        $(#[$meta])*
        pub struct $name $(<const $d: usize>)? {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl $(<const $d: usize>)? Default for $name $(<$d>)? {
            fn default() -> Self {
                $name { $($field: $default,)* }
            }
        }
    )* };
}
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
