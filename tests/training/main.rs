//! Training: layers, optimizers, complete steps and small networks.

#[path = "../common/mod.rs"]
mod common;

mod autocast;
mod budget;
mod cache;
mod checkpoint;
mod data;
mod decoding;
mod foreach;
mod graphs;
mod handles;
mod hooks;
mod layers;
mod memory_formats;
mod modules;
mod optim;
mod optim_shared;
mod packed;
mod pytorch_layers;
mod pytorch_windows;
mod recurrent;
mod schedules;
mod steps;
mod transformer;
mod uninit;
