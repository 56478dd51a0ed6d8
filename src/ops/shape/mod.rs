//! Joining, padding, triangles and sequences.

pub(crate) mod join;
pub(crate) mod operations;
pub(crate) mod pad;
pub(crate) mod sequence;
pub(crate) mod triangle;
