//! The CPU as a device: what its processor has, threads of rayon's pools that share work ([`parallel`]), and copies of memory.

#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only the x86-64 kernels write whole blocks
pub(crate) mod blocks;
pub(crate) mod bulk;
pub(crate) mod copy;
pub(crate) mod huge_pages;
pub(crate) mod parallel;
pub(crate) mod streaming;

use std::sync::OnceLock;

/// True if the processor has AVX-512 and the feature `avx512` is enabled. Without the feature, this is constant and the linker
/// drops the AVX-512 code.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx512() -> bool {
    cfg!(feature = "avx512") && std::arch::is_x86_feature_detected!("avx512f")
}

/// Returns the processor's vector instruction sets for which this crate has code.
pub(crate) fn vector_features() -> Vec<&'static str> {
    let mut found = Vec::new();
    macro_rules! detect {
        ($is_detected:ident: $($name:tt)*) => {
            $(if std::arch::$is_detected!($name) {
                found.push($name);
            })*
        };
    }
    #[cfg(target_arch = "x86_64")]
    detect!(is_x86_feature_detected: "sse4.1" "avx" "avx2" "fma" "f16c" "avx512f" "avx512dq" "avx512vl" "avx512bw");
    #[cfg(target_arch = "aarch64")]
    detect!(is_aarch64_feature_detected: "neon" "fp16");
    found
}

/// Returns the size of a core's L2 cache in bytes.
pub(crate) fn l2_bytes() -> usize {
    static BYTES: OnceLock<usize> = OnceLock::new();
    *BYTES.get_or_init(super::capabilities::l2_bytes)
}

/// Returns the number of threads that share one operation: the threads of rayon's current pool, which is the calling thread's
/// pool or else the global pool (`RAYON_NUM_THREADS`).
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}
