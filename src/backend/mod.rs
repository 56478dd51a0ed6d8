//! How operations are computed.

pub(crate) mod cpu;
pub(crate) mod opencl;
pub(crate) mod problem;
