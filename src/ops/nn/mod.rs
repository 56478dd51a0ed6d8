//! Softmax, attention, convolutions, pooling, norms, resizing and losses.

pub(crate) mod attention;
pub(crate) mod cached;
pub(crate) mod conv;
pub(crate) mod interpolate;
pub(crate) mod loss;
pub(crate) mod norm;
pub(crate) mod padding;
pub(crate) mod pool;
pub(crate) mod recurrence;
pub(crate) mod softmax;
pub(crate) mod window;
