//! Conversions between what methods return and the lists of tensors of calls by name and replacements.

use crate::{Error, Result, Tensor};

/// A method's return value as a list of tensors.
pub(crate) trait IntoResults {
    fn into_results(self) -> Vec<Tensor>;
}

/// A method's return value made of the list of tensors, never empty, that a replacement returned.
pub(crate) trait FromResults: Sized {
    fn from_results(results: Vec<Tensor>) -> Result<Self>;
}

impl IntoResults for Tensor {
    fn into_results(self) -> Vec<Tensor> {
        vec![self]
    }
}

impl IntoResults for &Tensor {
    fn into_results(self) -> Vec<Tensor> {
        vec![self.shallow_clone()]
    }
}

impl IntoResults for Vec<Tensor> {
    fn into_results(self) -> Vec<Tensor> {
        self
    }
}

impl IntoResults for (Tensor, Tensor) {
    fn into_results(self) -> Vec<Tensor> {
        vec![self.0, self.1]
    }
}

impl IntoResults for (Tensor, Tensor, Tensor) {
    fn into_results(self) -> Vec<Tensor> {
        vec![self.0, self.1, self.2]
    }
}

/// Those that are there.
impl<const N: usize> IntoResults for [Option<Tensor>; N] {
    fn into_results(self) -> Vec<Tensor> {
        self.into_iter().flatten().collect()
    }
}

impl FromResults for Tensor {
    fn from_results(mut results: Vec<Tensor>) -> Result<Tensor> {
        Ok(results.swap_remove(0))
    }
}

impl FromResults for bool {
    fn from_results(results: Vec<Tensor>) -> Result<bool> {
        results[0].item()
    }
}

impl FromResults for (Tensor, Tensor) {
    fn from_results(results: Vec<Tensor>) -> Result<(Tensor, Tensor)> {
        exactly(results, "two").map(|[a, b]| (a, b))
    }
}

impl FromResults for (Tensor, Tensor, Tensor) {
    fn from_results(results: Vec<Tensor>) -> Result<(Tensor, Tensor, Tensor)> {
        exactly(results, "three").map(|[a, b, c]| (a, b, c))
    }
}

fn exactly<const N: usize>(results: Vec<Tensor>, count: &str) -> Result<[Tensor; N]> {
    <[Tensor; N]>::try_from(results).map_err(|results| {
        Error::invalid("register", format!("{} results of an operation that has {count}", results.len()))
    })
}
