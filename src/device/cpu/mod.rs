//! The CPU as a device: threads of rayon's that share work, in [`parallel`], and vectorised math.

pub(crate) mod bands;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))] // only products with kernels of their own are written so
pub(crate) mod blocks;
pub(crate) mod bulk;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod gemm;
pub(crate) mod halves;
pub(crate) mod huge_pages;
pub(crate) mod math;
pub(crate) mod parallel;
pub(crate) mod streaming;
pub(crate) mod transpose;

/// Whether the processor has AVX-512 and the crate has code for it (the feature `avx512`): without the feature the linker drops
/// that code.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn has_avx512() -> bool {
    cfg!(feature = "avx512") && std::arch::is_x86_feature_detected!("avx512f")
}

/// The vector instructions of this processor that some code here is written for.
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

/// Threads that work together on one operation: those of rayon's current pool, which is the one that the calling thread
/// belongs to, or the global one (`RAYON_NUM_THREADS`).
pub(crate) fn threads() -> usize {
    rayon::current_num_threads()
}
