//! What crosses from operations to a backend: checked, plain descriptions.

pub(crate) mod interpolation;
pub(crate) mod reduction;
pub(crate) mod sequence;
