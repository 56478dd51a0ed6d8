//! OpenCL devices.
