//! Tests of the GPU kernels. Without a GPU, an OpenCL CPU device runs the kernels: the test restarts itself in a process with
//! `CLAYSTONE_KERNELS=gpu`.

#[path = "../common/mod.rs"]
mod common;

mod attention;
mod channels_last;
mod choice;
mod depthwise;
mod implicit_gemm;
mod indices;
mod kernels;
mod products;
mod quantized;
mod recurrent;
mod reductions;
mod rows;
mod softmax;
mod trials;
mod tune;
