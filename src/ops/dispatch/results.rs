//! Converts return values of methods to and from lists of tensors. Calls by name and registered replacements return such lists.

use crate::{Error, Result, Tensor};

/// Converts the return value of a method to a list of tensors.
pub(crate) trait IntoResults {
    fn into_results(self) -> Vec<Tensor>;
}

/// Converts the tensors that a replacement returned (at least one) to the return value of a method.
pub(crate) trait FromResults: Sized {
    fn from_results(results: Vec<Tensor>) -> Result<Self>;
}

macro_rules! into_results {
    ($([$($generics:tt)*] $t:ty, $x:pat => $results:expr;)*) => { $(
        impl<$($generics)*> IntoResults for $t {
            fn into_results(self) -> Vec<Tensor> {
                let $x = self;
                $results
            }
        }
    )* };
}

into_results! {
    [] Tensor, t => vec![t];
    [] &Tensor, t => vec![t.shallow_clone()];
    [] Vec<Tensor>, all => all;
    [] (Tensor, Tensor), (a, b) => vec![a, b];
    [] (Tensor, Tensor, Tensor), (a, b, c) => vec![a, b, c];
    [const N: usize] [Option<Tensor>; N], all => all.into_iter().flatten().collect(); // only the results that are not `None`
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
        <[Tensor; 2]>::try_from(results).map(|[a, b]| (a, b)).map_err(|results| wrong_number(&results, "two"))
    }
}

impl FromResults for (Tensor, Tensor, Tensor) {
    fn from_results(results: Vec<Tensor>) -> Result<(Tensor, Tensor, Tensor)> {
        <[Tensor; 3]>::try_from(results).map(|[a, b, c]| (a, b, c)).map_err(|results| wrong_number(&results, "three"))
    }
}

fn wrong_number(results: &[Tensor], count: &str) -> Error {
    let reason = format!("the implementation returned {} results, and the operation has {count}", results.len());
    Error::invalid("register", reason)
}
