//! Operations whose names in PyTorch's `torch.nn.functional` mean something else for a tensor itself.

pub use crate::ops::{fold, unfold};
