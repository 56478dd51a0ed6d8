//! Reading and writing by index.

pub(crate) mod advanced;
pub(crate) mod assign;
pub(crate) mod gather;
pub(crate) mod nonzero;
pub(crate) mod scatter;
pub(crate) mod scatter_reduce;
pub(crate) mod scatter_reduction;
