//! Runs the commands of the program `claystone` as a user would.

#[path = "../../../tests/common/mod.rs"]
mod common;
#[path = "../../../tests/stand_in/mod.rs"]
mod stand_in;

mod cache;
mod estimate;
mod info;
mod replay;
mod tune;
