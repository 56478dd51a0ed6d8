//! Weighted sums of shifted slices, and dot products of slices with shifted slices, in vector registers. Several channels are computed at a
//! time, so that each loaded vector is multiplied once for every channel.

use pulp::Simd;

use crate::backend::cpu::scalar::Number;

/// A float type that has SIMD vectors.
pub(crate) trait VectorFloat: Number {
    type V<S: Simd>: Copy;

    fn splat<S: Simd>(simd: S, x: Self) -> Self::V<S>;
    fn vectors<S: Simd>(of: &[Self]) -> &[Self::V<S>];
    fn vectors_mut<S: Simd>(of: &mut [Self]) -> &mut [Self::V<S>];
    fn mul_add<S: Simd>(simd: S, a: Self::V<S>, b: Self::V<S>, c: Self::V<S>) -> Self::V<S>;
    fn sum<S: Simd>(simd: S, of: Self::V<S>) -> Self;
}

macro_rules! real {
    ($t:ident, $v:ident, $splat:ident, $vectors:ident, $vectors_mut:ident, $mul_add:ident, $sum:ident) => {
        impl VectorFloat for $t {
            type V<S: Simd> = S::$v;

            #[inline(always)]
            fn splat<S: Simd>(simd: S, x: $t) -> S::$v {
                simd.$splat(x)
            }
            #[inline(always)]
            fn vectors<S: Simd>(of: &[$t]) -> &[S::$v] {
                S::$vectors(of).0
            }
            #[inline(always)]
            fn vectors_mut<S: Simd>(of: &mut [$t]) -> &mut [S::$v] {
                S::$vectors_mut(of).0
            }
            #[inline(always)]
            fn mul_add<S: Simd>(simd: S, a: S::$v, b: S::$v, c: S::$v) -> S::$v {
                simd.$mul_add(a, b, c)
            }
            #[inline(always)]
            fn sum<S: Simd>(simd: S, of: S::$v) -> $t {
                simd.$sum(of)
            }
        }
    };
}

real!(f32, f32s, splat_f32s, as_simd_f32s, as_mut_simd_f32s, mul_add_e_f32s, reduce_sum_f32s);
real!(f64, f64s, splat_f64s, as_simd_f64s, as_mut_simd_f64s, mul_add_e_f64s, reduce_sum_f64s);

/// Returns the number of elements in a vector.
pub(crate) const fn lanes<C: VectorFloat, S: Simd>() -> usize {
    size_of::<C::V<S>>() / size_of::<C>()
}

/// Returns the number of channels to compute together if `channels` channels remain.
pub(crate) fn channel_block(channels: usize) -> usize {
    match channels {
        4.. => 4,
        2.. => 2,
        _ => channels,
    }
}

/// Packs weights for [`correlate`]: for each of `taps`, the weights of the channels that are computed together.
pub(crate) fn pack_weights<C>(channels: usize, taps: usize, to: &mut Vec<C>, weight: impl Fn(usize, usize) -> C) {
    let mut first = 0;
    while first < channels {
        let now = first..first + channel_block(channels - first);
        (0..taps).for_each(|tap| to.extend(now.clone().map(|channel| weight(channel, tap))));
        first = now.end;
    }
}

/// Computes element i of each channel of `to`: the channel's start value plus, for every tap, the channel's weight times the element of
/// `from` at the tap's offset + i. Channels have `len` elements, a multiple of [`lanes`].
#[inline(always)]
pub(crate) fn correlate<C: VectorFloat, S: Simd>(
    simd: S,
    (mut to, len): (&mut [C], usize),
    (from, offsets): (&[C], &[usize]),
    (mut weights, mut starts): (&[C], &[C]),
) {
    while !to.is_empty() {
        let many = channel_block(to.len() / len);
        let (now, rest) = to.split_at_mut(many * len);
        let (weights_now, weights_rest) = weights.split_at(many * offsets.len());
        let (starts_now, starts_rest) = starts.split_at(many);
        match many {
            4 => correlate_channels::<C, S, 4, 3>(simd, (now, len), (from, offsets), weights_now, starts_now),
            2 => correlate_channels::<C, S, 2, 4>(simd, (now, len), (from, offsets), weights_now, starts_now),
            _ => correlate_channels::<C, S, 1, 8>(simd, (now, len), (from, offsets), weights_now, starts_now),
        }
        (to, weights, starts) = (rest, weights_rest, starts_rest);
    }
}

/// Computes `M` channels, in steps of `N` vectors per channel.
#[inline(always)]
fn correlate_channels<C: VectorFloat, S: Simd, const M: usize, const N: usize>(
    simd: S,
    (to, len): (&mut [C], usize),
    (from, offsets): (&[C], &[usize]),
    weights: &[C],
    starts: &[C],
) {
    let (lanes, weights) = (lanes::<C, S>(), weights.as_chunks::<M>().0);
    let starts: [C; M] = std::array::from_fn(|m| starts[m]);
    let mut at = 0;
    while at + N * lanes <= len {
        correlate_block::<C, S, M, N>(simd, &mut to[at..], len, (&from[at..], offsets), weights, starts);
        at += N * lanes;
    }
    while at + lanes <= len {
        correlate_block::<C, S, M, 1>(simd, &mut to[at..], len, (&from[at..], offsets), weights, starts);
        at += lanes;
    }
}

#[inline(always)]
fn correlate_block<C: VectorFloat, S: Simd, const M: usize, const N: usize>(
    simd: S,
    to: &mut [C],
    len: usize,
    (from, offsets): (&[C], &[usize]),
    weights: &[[C; M]],
    starts: [C; M],
) {
    let elements = N * lanes::<C, S>();
    let mut sums = starts.map(|start| [C::splat(simd, start); N]);
    for (&offset, weights) in offsets.iter().zip(weights) {
        let read = C::vectors::<S>(&from[offset..][..elements]);
        let read: [C::V<S>; N] = std::array::from_fn(|n| read[n]);
        for (sums, &weight) in sums.iter_mut().zip(weights) {
            let weight = C::splat(simd, weight);
            for (sum, &x) in sums.iter_mut().zip(&read) {
                *sum = C::mul_add(simd, weight, x, *sum);
            }
        }
    }
    for (m, sums) in sums.iter().enumerate() {
        C::vectors_mut::<S>(&mut to[m * len..][..elements]).copy_from_slice(sums);
    }
}

/// Computes, for each channel and tap, the dot product of the channel's first `count` elements (a multiple of [`lanes`]) with the
/// elements of `from` that begin at the tap's offset. The channels of `with` are `len` elements apart.
#[inline(always)]
pub(crate) fn dots<C: VectorFloat, S: Simd>(
    simd: S,
    (with, len, count): (&[C], usize, usize),
    (from, offsets): (&[C], &[usize]),
    sums: &mut [C],
) {
    let taps = offsets.len();
    let (mut with, mut sums) = (with, sums);
    while !sums.is_empty() {
        let many = channel_block(sums.len() / taps);
        let (now, rest) = sums.split_at_mut(many * taps);
        match many {
            4 => dot_taps::<C, S, 4, 3>(simd, (with, len, count), (from, offsets), now),
            2 => dot_taps::<C, S, 2, 4>(simd, (with, len, count), (from, offsets), now),
            _ => dot_taps::<C, S, 1, 4>(simd, (with, len, count), (from, offsets), now),
        }
        (with, sums) = (&with[many * len..], rest);
    }
}

/// Computes `M` channels, with the taps divided evenly into groups of at most `N` taps.
#[inline(always)]
fn dot_taps<C: VectorFloat, S: Simd, const M: usize, const N: usize>(
    simd: S,
    with: (&[C], usize, usize),
    (from, offsets): (&[C], &[usize]),
    sums: &mut [C],
) {
    let all = offsets.len();
    let mut first = 0;
    while first < all {
        let left = all - first;
        let many = left.div_ceil(left.div_ceil(N));
        let (offsets, to) = (&offsets[first..first + many], &mut sums[first..]);
        match many {
            4 => dot_block::<C, S, M, 4>(simd, with, (from, offsets), to, all),
            3 => dot_block::<C, S, M, 3>(simd, with, (from, offsets), to, all),
            2 => dot_block::<C, S, M, 2>(simd, with, (from, offsets), to, all),
            _ => dot_block::<C, S, M, 1>(simd, with, (from, offsets), to, all),
        }
        first += many;
    }
}

#[inline(always)]
fn dot_block<C: VectorFloat, S: Simd, const M: usize, const N: usize>(
    simd: S,
    (with, len, count): (&[C], usize, usize),
    (from, offsets): (&[C], &[usize]),
    to: &mut [C],
    stride: usize,
) {
    let vectors = count / lanes::<C, S>();
    let with: [&[C::V<S>]; M] = std::array::from_fn(|m| &C::vectors::<S>(&with[m * len..][..count])[..vectors]);
    let from: [&[C::V<S>]; N] = std::array::from_fn(|n| &C::vectors::<S>(&from[offsets[n]..][..count])[..vectors]);
    let mut sums = [[C::splat(simd, C::from_i32(0)); N]; M];
    for i in 0..vectors {
        let read: [C::V<S>; N] = std::array::from_fn(|n| from[n][i]);
        for (sums, with) in sums.iter_mut().zip(&with) {
            for (sum, &x) in sums.iter_mut().zip(&read) {
                *sum = C::mul_add(simd, with[i], x, *sum);
            }
        }
    }
    for (m, sums) in sums.iter().enumerate() {
        to[m * stride..].iter_mut().zip(sums).for_each(|(to, &sum)| *to = C::sum(simd, sum));
    }
}

/// Copies `from` to `to` of the same length. For short rows, this is faster than `copy_from_slice`, which calls `memcpy`.
#[inline(always)]
pub(crate) fn copy_row<C: Copy>(to: &mut [C], from: &[C]) {
    match to.len() {
        256.. => to.copy_from_slice(from),
        8.. => copy_parts::<C, 8>(to, from),
        4.. => copy_parts::<C, 4>(to, from),
        _ => to.iter_mut().zip(from).for_each(|(to, x)| *to = *x),
    }
}

/// Copies at least `N` elements, `N` at a time; the last copy may overlap the previous one.
#[inline(always)]
fn copy_parts<C: Copy, const N: usize>(to: &mut [C], from: &[C]) {
    let from = &from[..to.len()];
    to.as_chunks_mut::<N>().0.iter_mut().zip(from.as_chunks::<N>().0).for_each(|(to, x)| *to = *x);
    if let (Some(to), Some(x)) = (to.last_chunk_mut::<N>(), from.last_chunk::<N>()) {
        *to = *x;
    }
}

/// Copies elements 0, `step`, 2 `step`, ... of `from`, which may end right after the last copied element.
#[inline(always)]
pub(crate) fn copy_strided<C: Copy>(to: &mut [C], from: &[C], step: usize) {
    match step {
        1 => copy_row(to, &from[..to.len()]),
        2 if to.len() > 8 => {
            let (all, parts) = (to.len(), to.as_chunks_mut::<8>().0);
            for (to, from) in parts.iter_mut().zip(from.as_chunks::<16>().0) {
                *to = std::array::from_fn(|i| from[2 * i]);
            }
            // The last 8 elements are copied together, so some elements may be copied twice.
            if let (Some(to), Some(from)) = (to.last_chunk_mut::<8>(), from[..2 * all - 1].last_chunk::<16>()) {
                *to = std::array::from_fn(|i| from[2 * i + 1]);
            }
        }
        _ => to.iter_mut().zip(from.iter().step_by(step)).for_each(|(to, x)| *to = *x),
    }
}

/// Fills `to` with elements taken alternately from `even` and `odd`.
#[inline(always)]
pub(crate) fn interleave<C: Copy>(to: &mut [C], even: &[C], odd: &[C]) {
    let (pairs, last) = to.as_chunks_mut::<2>();
    let (parts, rest) = pairs.as_chunks_mut::<8>();
    let (evens, odds) = (even.as_chunks::<8>().0, odd.as_chunks::<8>().0);
    for (to, (even, odd)) in parts.iter_mut().zip(evens.iter().zip(odds)) {
        *to = std::array::from_fn(|i| [even[i], odd[i]]);
    }
    let done = 8 * parts.len();
    rest.iter_mut().zip(even[done..].iter().zip(&odd[done..])).for_each(|(to, (even, odd))| *to = [*even, *odd]);
    last.iter_mut().zip(&even[done + rest.len()..]).for_each(|(to, x)| *to = *x);
}

/// Distributes the elements of `from` alternately to `even` and `odd`.
#[inline(always)]
pub(crate) fn deinterleave<C: Copy>(even: &mut [C], odd: &mut [C], from: &[C]) {
    let parts = even.as_chunks_mut::<8>().0.iter_mut().zip(odd.as_chunks_mut::<8>().0);
    for ((even, odd), from) in parts.zip(from.as_chunks::<16>().0) {
        (*even, *odd) = (std::array::from_fn(|i| from[2 * i]), std::array::from_fn(|i| from[2 * i + 1]));
    }
    // The last elements are copied together, so some elements may be copied twice.
    match (even.last_chunk_mut::<8>(), odd.last_chunk_mut::<8>(), from.last_chunk::<16>()) {
        (Some(even), Some(odd), Some(from)) => {
            (*even, *odd) = (std::array::from_fn(|i| from[2 * i]), std::array::from_fn(|i| from[2 * i + 1]));
        }
        _ => {
            let pairs = from.as_chunks::<2>().0;
            even.iter_mut().zip(odd).zip(pairs).for_each(|((even, odd), pair)| (*even, *odd) = (pair[0], pair[1]));
        }
    }
}
