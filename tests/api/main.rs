//! Tests of the public API: tensors, views, autograd, streams, graphs, files, errors and devices.

#[path = "../common/mod.rs"]
mod common;
#[path = "../stand_in/mod.rs"]
mod stand_in;

mod adopt;
mod autograd;
mod convert;
mod custom;
mod device;
mod display;
#[cfg(feature = "dlpack")]
mod dlpack;
mod docs;
mod edge_cases;
mod errors;
mod gguf;
mod gradient_checks;
mod graph;
mod graph_fusion;
mod hooks;
mod host_memory;
mod idx;
mod import;
mod in_place;
mod io;
mod leaves;
mod non_blocking;
mod operators;
mod precision;
mod program_cache;
mod replay_modes;
mod saving;
mod streams;
mod views;
mod with_host;
