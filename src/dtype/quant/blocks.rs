//! Unpacks the blocks of quantised weights into integers, scales and offsets. These functions define the values of all formats.

use half::f16;

use super::{GroupOffset, QuantFormat};

/// The scales and offsets of 32 elements, one of each for every 16 elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scales {
    pub(crate) scale: [f32; 2],
    pub(crate) offset: [f32; 2],
}

/// 32 integers of 16 bits, in a form that the processor computes with.
pub(crate) trait Lanes: Copy {
    /// Converts an f16, given by its bytes.
    fn half(bytes: [u8; 2]) -> f32;
    /// Converts two adjacent f16.
    fn halves(bytes: [u8; 4]) -> [f32; 2];
    /// Converts 32 signed bytes.
    fn signed(bytes: &[u8]) -> Self;
    /// Extracts the bits of `mask` from each of 32 bytes, which begin at bit `shift`.
    fn bits(bytes: &[u8], shift: usize, mask: u8) -> Self;
    /// Extracts 32 integers of four bits from 16 bytes: the low bits are the first 16 integers.
    fn nibbles(bytes: &[u8]) -> Self;
    /// Expands each bit to the integer 0 or 1.
    fn flags(bits: u32) -> Self;
    /// Returns these integers plus `2^shift` times other integers.
    fn add_shifted(self, other: Self, shift: u32) -> Self;
    /// Adds the same integer to all.
    fn plus(self, n: i16) -> Self;
}

/// Defines functions that are one expression.
macro_rules! inlined {
    ($(fn $name:ident($($arg:ident $(: $t:ty)?),*) -> $made:ty = $e:expr;)*) => { $(
        #[inline(always)]
        fn $name($($arg $(: $t)?),*) -> $made {
            $e
        }
    )* };
}

impl Lanes for [i16; 32] {
    inlined! {
        fn half(bytes: [u8; 2]) -> f32 = f16::from_le_bytes(bytes).to_f32();
        fn halves(bytes: [u8; 4]) -> [f32; 2] = [0, 2].map(|i| Self::half([bytes[i], bytes[i + 1]]));
        fn signed(bytes: &[u8]) -> Self = std::array::from_fn(|e| i16::from(bytes[e] as i8));
        fn bits(bytes: &[u8], shift: usize, mask: u8) -> Self =
            std::array::from_fn(|e| i16::from(bytes[e] >> shift & mask));
        fn nibbles(bytes: &[u8]) -> Self =
            std::array::from_fn(|e| i16::from(if e < 16 { bytes[e] & 15 } else { bytes[e - 16] >> 4 }));
        fn flags(bits: u32) -> Self = std::array::from_fn(|e| (bits >> e) as i16 & 1);
        fn add_shifted(self, other: Self, shift: u32) -> Self = std::array::from_fn(|e| self[e] + (other[e] << shift));
        fn plus(self, n: i16) -> Self = self.map(|q| q.wrapping_add(n));
    }
}

/// Unpacks the blocks of a format, 32 elements at a time: element `e` of these is `scale[e / 16] * q[e] + offset[e / 16]`, in f32 and in
/// this order.
pub(crate) trait Unpack: Copy + Send + Sync {
    /// True if elements have offsets. Without, nothing is added, so that -0 keeps its sign.
    const HAS_OFFSET: bool;
    /// True if the first and the last 16 elements have different scales and offsets.
    const HAS_HALVES: bool;
    /// Returns the size of a block in bytes.
    fn block_bytes(self) -> usize;
    /// Returns the number of 32 elements in a block.
    fn sub_blocks(self) -> usize;
    /// Unpacks the integers of the elements from number `32 * i` on.
    fn unpack<V: Lanes>(self, block: &[u8], i: usize) -> (V, Scales);
}

/// Reads an f16 at byte `at`.
#[inline(always)]
fn half<V: Lanes>(block: &[u8], at: usize) -> f32 {
    V::half([block[at], block[at + 1]])
}

/// Reads two f16 from byte `at` on.
#[inline(always)]
fn halves<V: Lanes>(block: &[u8], at: usize) -> [f32; 2] {
    V::halves([block[at], block[at + 1], block[at + 2], block[at + 3]])
}

/// One scale and offset for all 32 elements.
#[inline(always)]
fn one(scale: f32, offset: f32) -> Scales {
    Scales { scale: [scale; 2], offset: [offset; 2] }
}

/// Extracts 32 integers of five bits: 32 high bits, and 16 bytes of low bits.
#[inline(always)]
fn five_bits<V: Lanes>(high: &[u8], low: &[u8]) -> V {
    V::nibbles(low).add_shifted(V::flags(u32::from_le_bytes([high[0], high[1], high[2], high[3]])), 4)
}

/// Unpacks scale and minimum number `t` of the 12 bytes in `Q4K` and `Q5K`.
#[inline(always)]
fn scale_and_min(s: &[u8], t: usize) -> (f32, f32) {
    let (a, b) = match t {
        ..4 => (s[t] & 63, s[t + 4] & 63),
        _ => (s[t + 4] & 15 | s[t - 4] >> 6 << 4, s[t + 4] >> 4 | s[t] >> 6 << 4),
    };
    (f32::from(a), f32::from(b))
}

macro_rules! formats {
    ($($name:ident $bytes:literal $count:literal $has_offset:literal $has_halves:literal |$b:ident, $t:ident| $unpack:block)*) => { $(
        /// The blocks of [`QuantFormat`] with this name.
        #[derive(Clone, Copy)]
        pub(crate) struct $name;

        impl Unpack for $name {
            const HAS_OFFSET: bool = $has_offset;
            const HAS_HALVES: bool = $has_halves;

            inlined! {
                fn block_bytes(self) -> usize = $bytes;
                fn sub_blocks(self) -> usize = $count;
            }

            #[inline(always)]
            fn unpack<V: Lanes>(self, $b: &[u8], $t: usize) -> (V, Scales) {
                let $b = &$b[..$bytes];
                $unpack
            }
        }
    )* };
}

formats! {
    Q8_0 34 1 false false |b, _t| { (V::signed(&b[2..]), one(half::<V>(b, 0), 0.0)) }
    Q4_0 18 1 false false |b, _t| { (V::nibbles(&b[2..]).plus(-8), one(half::<V>(b, 0), 0.0)) }
    Q4_1 20 1 true false |b, _t| {
        let [scale, offset] = halves::<V>(b, 0);
        (V::nibbles(&b[4..]), one(scale, offset))
    }
    Q5_0 22 1 false false |b, _t| { (five_bits::<V>(&b[2..], &b[6..]).plus(-16), one(half::<V>(b, 0), 0.0)) }
    Q5_1 24 1 true false |b, _t| {
        let [scale, offset] = halves::<V>(b, 0);
        (five_bits(&b[4..], &b[8..]), one(scale, offset))
    }
    Q2K 84 8 true true |b, t| {
        let ([d, min], s) = (halves::<V>(b, 80), [b[2 * t], b[2 * t + 1]]);
        let scales =
            Scales { scale: s.map(|s| d * f32::from(s & 15)), offset: s.map(|s| -(min * f32::from(s >> 4))) };
        (V::bits(&b[16 + t / 4 * 32..], t % 4 * 2, 3), scales)
    }
    Q3K 110 8 false true |b, t| {
        let q = V::bits(&b[32 + t / 4 * 32..], t % 4 * 2, 3).add_shifted(V::bits(b, t, 1), 2).plus(-4);
        let (d, sc) = (half::<V>(b, 108), &b[96..108]);
        let scale = |s: usize| {
            let low = if s < 8 { sc[s] & 15 } else { sc[s - 8] >> 4 };
            d * f32::from(i16::from(low | (sc[8 + s % 4] >> (s / 4 * 2) & 3) << 4) - 32)
        };
        (q, Scales { scale: [scale(2 * t), scale(2 * t + 1)], offset: [0.0; 2] })
    }
    Q4K 144 8 true false |b, t| {
        let ([d, least], (scale, min)) = (halves::<V>(b, 0), scale_and_min(&b[4..16], t));
        let scales = one(d * scale, -(least * min));
        (V::bits(&b[16 + t / 2 * 32..], t % 2 * 4, 15), scales)
    }
    Q5K 176 8 true false |b, t| {
        let ([d, least], (scale, min)) = (halves::<V>(b, 0), scale_and_min(&b[4..16], t));
        let scales = one(d * scale, -(least * min));
        (V::bits(&b[48 + t / 2 * 32..], t % 2 * 4, 15).add_shifted(V::bits(&b[16..], t, 1), 4), scales)
    }
    Q6K 210 8 false true |b, t| {
        let low = V::bits(&b[t / 4 * 64 + t % 2 * 32..], t % 4 / 2 * 4, 15);
        let q = low.add_shifted(V::bits(&b[128 + t / 4 * 32..], t % 4 * 2, 3), 4).plus(-32);
        let (d, s) = (half::<V>(b, 208), [b[192 + 2 * t], b[193 + 2 * t]]);
        (q, Scales { scale: s.map(|s| d * f32::from(s as i8)), offset: [0.0; 2] })
    }
}

/// The groups of [`QuantFormat::Grouped`] with four bits (`FOUR`) or eight, and with a minimum (`MIN`) or without.
#[derive(Clone, Copy)]
pub(crate) struct Grouped<const FOUR: bool, const MIN: bool> {
    len: usize,
    offset: GroupOffset,
}

impl<const FOUR: bool, const MIN: bool> Grouped<FOUR, MIN> {
    pub(crate) fn new(format: QuantFormat, columns: usize, offset: GroupOffset) -> Self {
        Grouped { len: format.block_len(columns), offset }
    }
}

impl<const FOUR: bool, const MIN: bool> Unpack for Grouped<FOUR, MIN> {
    const HAS_OFFSET: bool = MIN;
    const HAS_HALVES: bool = false;

    inlined! {
        fn block_bytes(self) -> usize =
            (if self.offset == GroupOffset::None { 2 } else { 4 }) + if FOUR { self.len / 2 } else { self.len };
        fn sub_blocks(self) -> usize = self.len / 32;
    }

    #[inline(always)]
    fn unpack<V: Lanes>(self, b: &[u8], i: usize) -> (V, Scales) {
        let (head, signed) = if self.offset == GroupOffset::None { (2, true) } else { (4, false) };
        let q = match (FOUR, signed) {
            (true, true) => V::nibbles(&b[head + 16 * i..]).plus(-8),
            (true, false) => V::nibbles(&b[head + 16 * i..]),
            (false, true) => V::signed(&b[head + 32 * i..]),
            (false, false) => V::bits(&b[head + 32 * i..], 0, 255),
        };
        let zero = if self.offset == GroupOffset::Zero { i16::from_le_bytes([b[2], b[3]]) } else { 0 };
        let [scale, offset] = if MIN { halves::<V>(b, 0) } else { [half::<V>(b, 0), 0.0] };
        (q.plus(zero.wrapping_neg()), one(scale, offset))
    }
}

/// `with_unpacker!(format, columns, |blocks| expr)` evaluates `expr` with the [`Unpack`] of a format.
macro_rules! with_unpacker {
    ($format:expr, $columns:expr, |$blocks:ident| $e:expr) => {{
        use $crate::dtype::quant::{GroupOffset, QuantFormat, blocks};
        macro_rules! named {
            ($name:ident) => {{
                let $blocks = blocks::$name;
                $e
            }};
        }
        macro_rules! grouped {
            ($four:literal, $min:literal, $offset:expr) => {{
                let $blocks = blocks::Grouped::<$four, $min>::new($format, $columns, $offset);
                $e
            }};
        }
        match $format {
            QuantFormat::Q8_0 => named!(Q8_0),
            QuantFormat::Q4_0 => named!(Q4_0),
            QuantFormat::Q4_1 => named!(Q4_1),
            QuantFormat::Q5_0 => named!(Q5_0),
            QuantFormat::Q5_1 => named!(Q5_1),
            QuantFormat::Q2K => named!(Q2K),
            QuantFormat::Q3K => named!(Q3K),
            QuantFormat::Q4K => named!(Q4K),
            QuantFormat::Q5K => named!(Q5K),
            QuantFormat::Q6K => named!(Q6K),
            QuantFormat::Grouped { bits: 4, offset: GroupOffset::Min, .. } => grouped!(true, true, GroupOffset::Min),
            QuantFormat::Grouped { bits: 4, offset, .. } => grouped!(true, false, offset),
            QuantFormat::Grouped { offset: GroupOffset::Min, .. } => grouped!(false, true, GroupOffset::Min),
            QuantFormat::Grouped { offset, .. } => grouped!(false, false, offset),
        }
    }};
}
pub(crate) use with_unpacker;

/// Computes the elements of whole blocks.
#[inline(always)]
pub(crate) fn decode<U: Unpack>(unpacker: U, blocks: &[u8], out: &mut [f32]) {
    let len = 32 * unpacker.sub_blocks();
    for (block, out) in blocks.chunks_exact(unpacker.block_bytes()).zip(out.chunks_exact_mut(len)) {
        for (i, out) in out.chunks_exact_mut(32).enumerate() {
            let (q, scales) = unpacker.unpack::<[i16; 32]>(block, i);
            let halves = out.chunks_exact_mut(16).zip(q.chunks_exact(16));
            for ((out, q), (scale, offset)) in halves.zip(scales.scale.into_iter().zip(scales.offset)) {
                for (out, &q) in out.iter_mut().zip(q) {
                    let x = scale * f32::from(q);
                    *out = if U::HAS_OFFSET { x + offset } else { x };
                }
            }
        }
    }
}
