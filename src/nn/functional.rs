//! Operations whose names in PyTorch's `torch.nn.functional` are taken by other methods of a tensor.

pub use crate::ops::{fold, unfold};
