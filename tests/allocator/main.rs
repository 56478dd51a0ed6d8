//! Device memory from the user's view: allocators, statistics, plans, snapshots, replays and exhausted memory.
//!
//! Statistics belong to the whole process: a test that checks a device's statistics takes [`common::serial_guard`] or runs in a
//! child process.

#[path = "../common/mod.rs"]
mod common;

mod allocators;
mod callers;
mod custom_driver;
mod estimate;
mod host;
mod out_of_memory;
mod oversubscribe;
mod plans;
mod snapshot;
mod spill;
mod stacks;
mod storage;
mod threads;
