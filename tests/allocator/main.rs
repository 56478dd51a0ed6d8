//! Device memory from the user's view: allocators, statistics, plans, snapshots, replays and exhaustion.
//!
//! Statistics are global to the process: a test that uses a device takes [`common::serial_guard`] or runs in a child process.

#[path = "../common/mod.rs"]
mod common;

mod allocators;
mod callers;
mod custom_driver;
mod host;
mod oversubscribe;
mod plans;
mod snapshot;
mod stacks;
mod storage;
mod threads;
