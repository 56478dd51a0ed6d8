//! Copies of a few KiB. C libraries often copy with a single instruction that is slow to start (`rep movsb`): a plain loop over
//! vectors takes half as long.

/// The range of sizes that are copied by the loop, in bytes. Smaller copies take equally long either way. The source and
/// destination of larger copies exceed the L1 cache, where `rep movsb` is faster.
#[cfg(target_arch = "x86_64")]
const VECTOR_COPY_BYTES: std::ops::RangeInclusive<usize> = 1 << 10..=16 << 10;

/// Copies `from` to `to`, which must have the same length.
#[inline]
pub(crate) fn copy(to: &mut [u8], from: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    if VECTOR_COPY_BYTES.contains(&from.len()) && to.len() == from.len() {
        if crate::device::cpu::has_avx512() {
            // SAFETY: the processor has these vector instructions.
            return unsafe { wide(to, from) };
        }
        if is_x86_feature_detected!("avx") {
            // SAFETY: likewise.
            return unsafe { narrow(to, from) };
        }
    }
    to.copy_from_slice(from);
}

/// Defines a function that copies four vectors at a time; the last four vectors may overlap the previous four.
#[cfg(target_arch = "x86_64")]
macro_rules! by_vectors {
    ($name:ident, $feature:literal, $vector:ident, $load:ident, $store:ident) => {
        #[target_feature(enable = $feature)]
        fn $name(to: &mut [u8], from: &[u8]) {
            use std::arch::x86_64::{$load, $store, $vector};
            const STEP: usize = 4 * size_of::<$vector>();
            assert!(to.len() == from.len() && from.len() >= STEP);
            let last = from.len() - STEP;
            let mut at = 0;
            loop {
                // SAFETY: four vectors from `at` on, which is at most `last`, are in both slices.
                unsafe {
                    let (from, to) =
                        (from.as_ptr().add(at).cast::<$vector>(), to.as_mut_ptr().add(at).cast::<$vector>());
                    let vectors = [$load(from), $load(from.add(1)), $load(from.add(2)), $load(from.add(3))];
                    (0..4).for_each(|i| $store(to.add(i), vectors[i]));
                }
                if at == last {
                    return;
                }
                at = last.min(at + STEP);
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
by_vectors!(wide, "avx512f", __m512i, _mm512_loadu_si512, _mm512_storeu_si512);
#[cfg(target_arch = "x86_64")]
by_vectors!(narrow, "avx", __m256i, _mm256_loadu_si256, _mm256_storeu_si256);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_every_length_write_nothing_else() {
        let from: Vec<u8> = (0..70_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        let lengths = (0..1200).chain([4095, 4096, 4097, 16 << 10, (16 << 10) + 1, 65_536]);
        for (i, n) in lengths.enumerate() {
            let (at, to_at) = (i % 67, 1 + i % 131);
            let mut to = vec![7u8; to_at + n + 1];
            copy(&mut to[to_at..to_at + n], &from[at..at + n]);
            assert_eq!(to[to_at..to_at + n], from[at..at + n], "{n} bytes");
            assert!(to[to_at - 1] == 7 && to[to_at + n] == 7, "{n} bytes");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn both_vector_lengths_agree() {
        let from: Vec<u8> = (0..2000u32).map(|i| ((i * 31) >> 2) as u8).collect();
        for n in (512..2000).step_by(13) {
            let (mut a, mut b) = (vec![0; n], vec![0; n]);
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has AVX-512.
                unsafe { wide(&mut a, &from[..n]) };
                assert_eq!(a, from[..n]);
            }
            if is_x86_feature_detected!("avx") {
                // SAFETY: the processor has AVX.
                unsafe { narrow(&mut b, &from[..n]) };
                assert_eq!(b, from[..n]);
            }
        }
    }
}
