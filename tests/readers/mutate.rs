//! Mutates inputs: makes a few random edits that keep most of a file. The random generator is seeded.

/// Returns the number of mutations per kind of input: the environment variable `CLAYSTONE_MUTATIONS`, or `usual` without the
/// variable.
pub fn count(usual: u64) -> u64 {
    std::env::var("CLAYSTONE_MUTATIONS").map_or(usual, |n| n.parse().unwrap())
}

/// The SplitMix64 random number generator.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number below `n`, which must be positive.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Limits of the integer types that formats use for lengths and sizes, and numbers next to these limits.
const EDGE_NUMBERS: [u64; 14] = [
    0,
    1,
    0x7f,
    0xff,
    0x7fff,
    0xffff,
    1 << 20,
    100_000_000,
    0x7fff_ffff,
    0xffff_fffe,
    0xffff_ffff,
    1 << 40,
    i64::MAX as u64,
    u64::MAX,
];

/// Separators of text formats, and bytes that are not valid text.
const SEPARATORS: &[u8] = b"()[]{},:'\"->.0 \n#-\x00\x80\xff";

/// Maximum length of mutated inputs in bytes. Without a maximum, repeated duplication would let inputs grow without limit.
const MAX_BYTES: usize = 1 << 17;

/// Returns one of the valid inputs with one to six edits.
pub fn mutated(random: &mut Random, whole: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = whole[random.below(whole.len())].clone();
    for _ in 0..=random.below(6) {
        edit(random, &mut bytes, whole);
    }
    bytes.truncate(MAX_BYTES);
    bytes
}

fn edit(random: &mut Random, bytes: &mut Vec<u8>, whole: &[Vec<u8>]) {
    if bytes.is_empty() {
        bytes.push(random.next() as u8);
    }
    // Every second edit is near the start or the end, where formats have headers and directories.
    let near = bytes.len().min(200);
    let at = match random.below(4) {
        0 => random.below(near),
        1 => bytes.len() - 1 - random.below(near),
        _ => random.below(bytes.len()),
    };
    let len = 1 + random.below((bytes.len() - at).min(64));
    match random.below(9) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.next() as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(at..at + len)),
        4 => {
            let part = bytes[at..at + len].repeat(1 + random.below(8));
            bytes.splice(at..at, part);
        }
        5 => {
            let other = &whole[random.below(whole.len())];
            let from = random.below(other.len());
            let part = &other[from..other.len().min(from + len)];
            bytes.splice(at..at + len, part.iter().copied());
        }
        6 => {
            let edge = EDGE_NUMBERS[random.below(EDGE_NUMBERS.len())].to_le_bytes();
            let width = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&edge[..width]);
            if random.below(4) == 0 {
                bytes[at..at + width].reverse();
            }
        }
        7 => {
            // Replaces the next decimal number of a text.
            let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|i| at + i) else { return };
            let end = bytes[start..].iter().position(|b| !b.is_ascii_digit()).map_or(bytes.len(), |i| start + i);
            let number =
                EDGE_NUMBERS[random.below(EDGE_NUMBERS.len())].wrapping_add(random.below(2) as u64).to_string();
            bytes.splice(start..end, number.into_bytes());
        }
        _ => {
            bytes.insert(at, SEPARATORS[random.below(SEPARATORS.len())]);
        }
    }
}
