//! Macros that evaluate an expression with a type parameter chosen by a dtype.

/// Evaluates `$made` with `$C` as the type that a [`Compute`](crate::Compute) names.
macro_rules! for_compute {
    ($compute:expr, $C:ident => $made:expr) => {
        match $compute {
            $crate::Compute::F32 => {
                type $C = f32;
                $made
            }
            $crate::Compute::F64 => {
                type $C = f64;
                $made
            }
            $crate::Compute::I64 => {
                type $C = i64;
                $made
            }
        }
    };
}
pub(crate) use for_compute;

/// Evaluates `$made` with `$C` as the type that a [`Compute`](crate::Compute) of floats names.
macro_rules! for_float {
    ($compute:expr, $C:ident => $made:expr) => {
        match $compute {
            $crate::Compute::F64 => {
                type $C = f64;
                $made
            }
            _ => {
                type $C = f32;
                $made
            }
        }
    };
}
pub(crate) use for_float;

/// Evaluates `$made` with `$T` as the unsigned integer of `$size` bytes, for operations that move elements without computing.
macro_rules! for_size {
    ($size:expr, $T:ident => $made:expr) => {
        match $size {
            1 => {
                type $T = u8;
                $made
            }
            2 => {
                type $T = u16;
                $made
            }
            4 => {
                type $T = u32;
                $made
            }
            _ => {
                type $T = u64;
                $made
            }
        }
    };
}
pub(crate) use for_size;
