//! Operations in the form in which PyTorch's device backends call them: forward passes that return the data for the backward pass,
//! gradients computed from that data, calls that keep their graph, and launches over lists of tensors.
//!
//! These operations are for callers that have an autograd of their own. The layers of `nn` and the optimisers do not use them.

pub(crate) mod each;
pub(crate) mod lstm;
pub(crate) mod norm;
pub(crate) mod recorded;
