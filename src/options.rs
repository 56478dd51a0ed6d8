//! Structs of options whose default values stand beside the fields.

/// Defines structs whose fields have default values, as in `pub lr: f64 = 0.1,`, and implements [`Default`] for them.
macro_rules! options {
    ($($(#[$meta:meta])* pub struct $name:ident {
        $($(#[$field_meta:meta])* pub $field:ident: $type:ty = $default:expr,)*
    })*) => { $(
        $(#[$meta])*
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        impl Default for $name {
            fn default() -> $name {
                $name { $($field: $default,)* }
            }
        }
    )* };
}
