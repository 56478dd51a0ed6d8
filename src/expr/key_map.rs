//! A map for keys made of formulas and numbers.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// A map that is asked on every launch: its hash is a rotation and a multiplication a word.
pub(crate) type KeyMap<K, V> = HashMap<K, V, BuildHasherDefault<KeyHasher>>;

#[derive(Default)]
pub(crate) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|w| self.write_u64(u64::from_le_bytes(*w)));
        rest.iter().for_each(|b| self.write_u64((*b).into()));
    }

    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0.rotate_left(5) ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn write_usize(&mut self, x: usize) {
        self.write_u64(x as u64);
    }

    fn finish(&self) -> u64 {
        // The map takes its bucket from the low bits, which depend on little.
        self.0 ^ (self.0 >> 32)
    }
}
