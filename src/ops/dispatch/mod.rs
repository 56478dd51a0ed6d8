//! What every operation passes through.

pub(crate) mod arguments;
pub(crate) mod autocast;
pub(crate) mod operation;
pub(crate) mod promote;
pub(crate) mod registry;
