//! What every operation passes through. A method usually begins with `replaced!`, `cast_first!` and its checks, has a line in
//! its family's `operations!`, and is `#[track_caller]`, so that memory histories have the line that called it.

pub(crate) mod args;
pub(crate) mod arguments;
pub(crate) mod autocast;
pub(crate) mod checks;
pub(crate) mod operation;
pub(crate) mod parameters;
pub(crate) mod precision;
pub(crate) mod promote;
pub(crate) mod recorded;
pub(crate) mod registry;
pub(crate) mod results;

/// What methods begin with, and what lists them.
pub(crate) mod prelude {
    pub(crate) use super::autocast::{lowered, widened};
    pub(crate) use super::checks::{
        NamedError, cast_first, invalid, mismatch, same_device, same_dtype, shape_mismatch, unsupported,
    };
    pub(crate) use super::operation::operations;
    pub(crate) use super::registry::{replaced, replacement};
    pub(crate) use crate::Error;
    pub(crate) use crate::storage::Caller; // the documentation of most methods names it
}
