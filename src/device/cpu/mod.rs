//! The CPU as a device: a team of threads that share work, in [`parallel`], and vectorised math.

use std::sync::OnceLock;

pub(crate) mod bands;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only products with kernels of their own are written so
pub(crate) mod blocks;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod gemm;
pub(crate) mod halves;
pub(crate) mod math;
pub(crate) mod parallel;
pub(crate) mod streaming;
pub(crate) mod transpose;

/// Threads that work together on one operation: as many as the machine runs at once, or `RAYON_NUM_THREADS`, the name by
/// which users know the number.
pub(crate) fn threads() -> usize {
    static THREADS: OnceLock<usize> = OnceLock::new();
    let asked = || std::env::var("RAYON_NUM_THREADS").ok()?.parse().ok().filter(|&n| n > 0);
    let all = || std::thread::available_parallelism().map_or(1, usize::from);
    *THREADS.get_or_init(|| asked().unwrap_or_else(all))
}
