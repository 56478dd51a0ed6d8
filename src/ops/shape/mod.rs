//! Operations that put tensors together, pad them and cut them.

pub(crate) mod join;
pub(crate) mod operations;
pub(crate) mod pad;
pub(crate) mod sequence;
pub(crate) mod triangle;
