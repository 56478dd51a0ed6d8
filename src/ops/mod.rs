//! What is computed.
//!
//! An elementwise operation is a formula, an [`Expr`]: one row of a table. From it come the loop over tiles on the CPU,
//! the OpenCL kernel, the gradient, the tests and the documentation.

pub(crate) mod convert;
mod derivative;
pub mod expr;
mod formulas;
pub(crate) mod lane;
pub(crate) mod philox;
pub(crate) mod program;
pub(crate) mod source;
pub(crate) mod tiles;

pub use expr::Expr;
pub use philox::Seed;

#[cfg(test)]
mod device_tests;
