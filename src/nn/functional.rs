//! Functions named as in PyTorch's `torch.nn.functional`, for operations whose names are already used by other methods of [`crate::Tensor`].

pub use crate::ops::{fold, unfold};
