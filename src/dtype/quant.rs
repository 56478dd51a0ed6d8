//! Formats of quantised weights: the blocks of GGUF files, and groups with a scale and an offset.
//!
//! A row of a weight is a sequence of blocks, and a block holds small integers and their scales. The CPU device stores blocks as files do.
//! OpenCL devices store the fields of all blocks separately, as *planes*, because blocks of 18 or 34 bytes would prevent aligned loads.

pub(crate) mod blocks;

use std::fmt;
use std::str::FromStr;

use smallvec::{SmallVec, smallvec};

use crate::error::Excerpt;
use crate::{Error, Result};

/// The format of a quantised weight: how many bits an element has, and which elements share a scale.
///
/// The first ten formats are GGUF's, with blocks of 32 or 256 elements. An element with the integer `q` is `d * q` in `Q8_0`, `Q4_0`,
/// `Q5_0`, `Q3K` and `Q6K`, and `d * q + m` in the other formats, where the scale `d` and the offset `m` belong to the block or, in the
/// formats of 256 elements, to 16 or 32 elements of the block.
///
/// ```
/// use claystone::quantized::{Group, GroupOffset, QuantFormat};
/// assert_eq!(QuantFormat::Q4_0.row_bytes(4096)?, 4096 / 32 * 18);
/// assert_eq!("q6_k".parse::<QuantFormat>()?, QuantFormat::Q6K);
/// let gptq = QuantFormat::Grouped { bits: 4, group: Group::N128, offset: GroupOffset::Zero };
/// assert_eq!((gptq.to_string().as_str(), gptq.row_bytes(4096)?), ("g4_128_zero", 4096 / 2 + 4096 / 128 * 4));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QuantFormat {
    /// 8 bits, blocks of 32 with a scale.
    Q8_0,
    /// 4 bits, blocks of 32 with a scale.
    Q4_0,
    /// 4 bits, blocks of 32 with a scale and a minimum.
    Q4_1,
    /// 5 bits, blocks of 32 with a scale.
    Q5_0,
    /// 5 bits, blocks of 32 with a scale and a minimum.
    Q5_1,
    /// 2 bits, blocks of 256 with scales and minimums of 4 bits for each 16 elements.
    Q2K,
    /// 3 bits, blocks of 256 with scales of 6 bits for each 16 elements.
    Q3K,
    /// 4 bits, blocks of 256 with scales and minimums of 6 bits for each 32 elements.
    Q4K,
    /// 5 bits, blocks of 256 with scales and minimums of 6 bits for each 32 elements.
    Q5K,
    /// 6 bits, blocks of 256 with scales of 8 bits for each 16 elements.
    Q6K,
    /// Groups of a row with an f16 scale `d`, as in files of GPTQ, AWQ and MNN.
    Grouped {
        /// The bits of an element: 4 or 8.
        bits: u8,
        /// The elements that share a scale.
        group: Group,
        /// The offset of a group.
        offset: GroupOffset,
    },
}

/// The elements of a row that share a scale in [`QuantFormat::Grouped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Group {
    /// The whole row, which must be a multiple of 32 elements.
    Row,
    /// 32 elements.
    N32,
    /// 64 elements.
    N64,
    /// 128 elements.
    N128,
}

/// The offset of the elements of a group in [`QuantFormat::Grouped`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupOffset {
    /// No offset: elements are `d * (q - 8)` for 4 bits, and `d * q` with a signed `q` for 8 bits.
    None,
    /// An integer zero point `z` of 16 bits: elements are `d * (q - z)`.
    Zero,
    /// An f16 minimum `m`: elements are `d * q + m`.
    Min,
}

/// One field of all blocks of a weight, as OpenCL devices store it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Plane {
    /// The offset of the field in a block, in bytes.
    pub(crate) at: usize,
    /// The size of the field in a block, in bytes.
    pub(crate) bytes: usize,
    /// The bytes of a block in the planes before this one. For a weight of `n` blocks, the plane begins at byte `n * before`.
    pub(crate) before: usize,
}

/// The facts about each of GGUF's formats.
struct Facts {
    format: QuantFormat,
    name: &'static str,
    /// The number of the format in GGUF files.
    ggml: u32,
    /// The number of elements of a block.
    len: usize,
    /// The fields of a block, as pairs of offset and size in bytes, in the order of the planes: fields that are read in 16 bytes come
    /// first, so that each of them begins at a multiple of 16 bytes for any number of blocks.
    fields: &'static [(usize, usize)],
}

macro_rules! facts {
    ($($format:ident $name:literal $ggml:literal $len:literal: $($field:expr),+;)*) => {
        [$(Facts { format: QuantFormat::$format, name: $name, ggml: $ggml, len: $len, fields: &[$($field),+] }),*]
    };
}

static FACTS: [Facts; 10] = facts! {
    Q8_0 "q8_0" 8 32: (2, 32), (0, 2);
    Q4_0 "q4_0" 2 32: (2, 16), (0, 2);
    Q4_1 "q4_1" 3 32: (4, 16), (0, 4);
    Q5_0 "q5_0" 6 32: (6, 16), (2, 4), (0, 2);
    Q5_1 "q5_1" 7 32: (8, 16), (0, 4), (4, 4);
    Q2K "q2_k" 10 256: (16, 64), (0, 16), (80, 4);
    Q3K "q3_k" 11 256: (32, 64), (0, 32), (96, 12), (108, 2);
    Q4K "q4_k" 12 256: (16, 128), (4, 12), (0, 4);
    Q5K "q5_k" 13 256: (48, 128), (16, 32), (4, 12), (0, 4);
    Q6K "q6_k" 14 256: (0, 128), (128, 64), (192, 16), (208, 2);
};

impl QuantFormat {
    /// Returns the row of the table, or `None` for a grouped format.
    fn facts(self) -> Option<&'static Facts> {
        FACTS.iter().find(|facts| facts.format == self)
    }

    /// Returns the format with this number in GGUF files; `None` if the number belongs to no quantised format, or to one that claystone
    /// does not have.
    pub fn from_ggml(number: u32) -> Option<QuantFormat> {
        FACTS.iter().find(|facts| facts.ggml == number).map(|facts| facts.format)
    }

    /// Returns the format's number in GGUF files; `None` for grouped formats.
    pub fn ggml(self) -> Option<u32> {
        self.facts().map(|facts| facts.ggml)
    }

    /// Returns the number of elements of a block in rows of `columns` elements.
    pub fn block_len(self, columns: usize) -> usize {
        match self {
            QuantFormat::Grouped { group, .. } => match group {
                Group::Row => columns.max(1),
                Group::N32 => 32,
                Group::N64 => 64,
                Group::N128 => 128,
            },
            _ => self.facts().map_or(1, |facts| facts.len),
        }
    }

    /// Returns the size of a block in bytes, in rows of `columns` elements.
    pub fn block_bytes(self, columns: usize) -> usize {
        self.planes(columns).iter().map(|plane| plane.bytes).sum()
    }

    /// Returns the size of a row of `columns` elements in bytes. Fails with [`Error::Invalid`] if `columns` is no multiple of the block, or
    /// if a grouped format has neither 4 nor 8 bits.
    pub fn row_bytes(self, columns: usize) -> Result<usize> {
        let (op, len) = ("QuantFormat::row_bytes", self.block_len(columns));
        if let QuantFormat::Grouped { bits, .. } = self {
            invalid!(op if bits != 4 && bits != 8, "{bits} bits: give 4 or 8");
        }
        let multiple = if len == columns { 32 } else { len };
        invalid!(op if !columns.is_multiple_of(multiple),
            "rows of {columns} elements are no multiple of {multiple}, the block of {self}");
        let bytes = (columns / len).checked_mul(self.block_bytes(columns));
        bytes.ok_or_else(|| Error::invalid(op, format!("rows of {columns} elements are too long")))
    }

    /// Returns the number of bits of an element with its part of the scales, which rows of a [`Group::Row`] do not count.
    pub fn bits_per_weight(self) -> f64 {
        match self {
            QuantFormat::Grouped { bits, group: Group::Row, .. } => f64::from(bits),
            _ => (8 * self.block_bytes(0)) as f64 / self.block_len(0) as f64,
        }
    }

    /// Returns the planes of a weight with rows of `columns` elements, in order.
    pub(crate) fn planes(self, columns: usize) -> SmallVec<[Plane; 4]> {
        let fields: SmallVec<[(usize, usize); 4]> = match (self, self.facts()) {
            (QuantFormat::Grouped { bits, offset, .. }, _) => {
                let head = if offset == GroupOffset::None { 2 } else { 4 };
                smallvec![(head, self.block_len(columns) / 8 * usize::from(bits)), (0, head)]
            }
            (_, Some(facts)) => SmallVec::from_slice(facts.fields),
            (_, None) => SmallVec::new(),
        };
        let mut before = 0;
        let plane = |(at, bytes)| {
            before += bytes;
            Plane { at, bytes, before: before - bytes }
        };
        fields.into_iter().map(plane).collect()
    }

    /// Copies the blocks of a weight, in the order of files, to `planes`, in the order of OpenCL devices. Both have the size of all rows of
    /// the weight.
    pub(crate) fn to_planes(self, columns: usize, blocks: &[u8], planes: &mut [u8]) {
        let block = self.block_bytes(columns);
        let n = blocks.len() / block;
        for plane in self.planes(columns) {
            let to = planes[plane.before * n..][..plane.bytes * n].chunks_exact_mut(plane.bytes);
            for (to, from) in to.zip(blocks.chunks_exact(block)) {
                to.copy_from_slice(&from[plane.at..][..plane.bytes]);
            }
        }
    }

    /// Copies blocks from block number `first` on back from `planes`, which are the planes of a whole weight, until `blocks` is full.
    pub(crate) fn undo_planes(self, columns: usize, planes: &[u8], first: usize, blocks: &mut [u8]) {
        let block = self.block_bytes(columns);
        let n = planes.len() / block;
        for plane in self.planes(columns) {
            let from = planes[plane.before * n + first * plane.bytes..].chunks_exact(plane.bytes);
            for (to, from) in blocks.chunks_exact_mut(block).zip(from) {
                to[plane.at..][..plane.bytes].copy_from_slice(from);
            }
        }
    }
}

/// Writes the name: `q4_k`, or for groups the bits, the elements that share a scale and the offset, as in `g4_128_zero` and `g8_row`.
impl fmt::Display for QuantFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, self.facts()) {
            (QuantFormat::Grouped { bits, group, offset }, _) => {
                let group = match group {
                    Group::Row => "row",
                    Group::N32 => "32",
                    Group::N64 => "64",
                    Group::N128 => "128",
                };
                let offset = match offset {
                    GroupOffset::None => "",
                    GroupOffset::Zero => "_zero",
                    GroupOffset::Min => "_min",
                };
                f.pad(&format!("g{bits}_{group}{offset}"))
            }
            (_, facts) => f.pad(facts.map_or("", |facts| facts.name)),
        }
    }
}

impl FromStr for QuantFormat {
    type Err = Error;

    fn from_str(s: &str) -> Result<QuantFormat> {
        let groups = [Group::Row, Group::N32, Group::N64, Group::N128];
        let offsets = [GroupOffset::None, GroupOffset::Zero, GroupOffset::Min];
        let grouped = [4, 8]
            .into_iter()
            .flat_map(|bits| groups.map(|group| (bits, group)))
            .flat_map(|(bits, group)| offsets.map(|offset| QuantFormat::Grouped { bits, group, offset }));
        let mut all = FACTS.iter().map(|facts| facts.format).chain(grouped);
        all.find(|format| format.to_string() == s).ok_or_else(|| {
            Error::invalid("QuantFormat", format!("'{}' is no format such as q4_0, q4_k or g4_128_zero", Excerpt(s)))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_cover_their_blocks_and_wide_planes_are_aligned() {
        for facts in &FACTS {
            let mut fields = facts.fields.to_vec();
            fields.sort_unstable();
            let end = fields.iter().fold(0, |at, &(start, len)| (start == at).then_some(at + len).expect("no gap"));
            assert_eq!(end, facts.format.block_bytes(facts.len));
            for plane in facts.format.planes(facts.len) {
                let load = [16, 4, 2].into_iter().find(|load| plane.bytes.is_multiple_of(*load)).unwrap();
                assert!(plane.before.is_multiple_of(load), "{}", facts.name);
            }
            assert_eq!(facts.name.parse::<QuantFormat>().unwrap(), facts.format);
            assert_eq!(QuantFormat::from_ggml(facts.ggml), Some(facts.format));
        }
    }

    #[test]
    fn planes_are_undone() {
        for name in ["q8_0", "q5_1", "q3_k", "g8_64_min", "g4_row"] {
            let format: QuantFormat = name.parse().unwrap();
            let row = format.row_bytes(512).unwrap();
            let blocks: Vec<u8> = (0..3 * row).map(|i| (i * 31 % 251) as u8).collect();
            let (mut planes, mut back) = (vec![0; 3 * row], vec![0; 2 * row]);
            format.to_planes(512, &blocks, &mut planes);
            format.undo_planes(512, &planes, 512 / format.block_len(512), &mut back);
            assert_eq!(back, blocks[row..], "{name}");
        }
    }

    #[test]
    fn wrong_rows_are_errors() {
        let message = |format: &str, k| format.parse::<QuantFormat>().unwrap().row_bytes(k).unwrap_err().to_string();
        assert!(message("q4_k", 576).contains("576 elements are no multiple of 256"));
        assert!(message("g4_row", 40).contains("no multiple of 32"));
        assert!("q4".parse::<QuantFormat>().is_err());
    }
}
