//! The `claystone` program.
fn main() {}
