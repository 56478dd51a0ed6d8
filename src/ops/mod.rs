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
mod primitives;
pub(crate) mod program;
#[macro_use]
mod rows;
pub(crate) mod source;
#[macro_use]
pub mod table;
pub(crate) mod tiles;

pub use expr::Expr;
pub use philox::Seed;
pub use table::{Accepts, Output, ROWS, Row};

#[cfg(test)]
mod device_tests;
