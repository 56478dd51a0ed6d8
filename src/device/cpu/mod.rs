//! The CPU as a device: worker pool and vectorised math.
