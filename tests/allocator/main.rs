//! Device memory as a user sees it: allocators, statistics, plans, snapshots, replays and what happens when it runs out.
//!
//! Statistics are the whole process's: a test that uses a device takes [`common::turn`], or has a process of its own.

#[path = "../common/mod.rs"]
mod common;

mod allocators;
mod callers;
mod custom_driver;
mod host;
mod oversubscribe;
mod plans;
mod replay;
mod snapshot;
mod stacks;
mod storage;
mod threads;
