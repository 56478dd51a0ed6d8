//! Until the reductions land.
use crate::{Result, Shape, Tensor};

impl Tensor {
    pub fn sum_to(&self, shape: &Shape) -> Result<Tensor> {
        assert_eq!(self.shape(), shape, "reductions have not landed");
        Ok(self.shallow_clone())
    }
}
