//! Shapes, strides and an offset over a storage.

pub(crate) mod layout;
pub(crate) mod shape;

pub use shape::{NewShape, Shape};
