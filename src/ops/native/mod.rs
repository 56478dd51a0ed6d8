//! Operations in the form in which PyTorch's device backends call them: forward passes that return the data for backward, gradients
//! computed from that data, calls that keep their graph, and launches over lists of tensors.
//!
//! The layers of `nn` and the optimisers do without these operations, which serve callers that have an autograd of their own.

pub(crate) mod each;
pub(crate) mod lstm;
pub(crate) mod norm;
pub(crate) mod recorded;
