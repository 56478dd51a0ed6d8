//! A map of bounded size with least-recently-used eviction.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hash, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A map of at most `capacity` entries. Every launch looks up a key, so the hash is only a rotation and a multiplication
/// per 8-byte word.
pub(crate) struct Lru<K, V> {
    entries: HashMap<K, Entry<V>, BuildHasherDefault<KeyHasher>>,
    capacity: usize,
    /// The number of insertions so far: the clock of [`Entry::used`].
    inserted: u64,
}

/// A value, and the number of insertions at the value's last use.
struct Entry<V> {
    value: V,
    used: AtomicU64,
}

impl<K: Hash + Eq + Clone, V> Lru<K, V> {
    pub(crate) fn new(capacity: usize) -> Lru<K, V> {
        Lru { entries: HashMap::default(), capacity, inserted: 0 }
    }

    /// Returns the value of a key and marks the key as used.
    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        let entry = self.entries.get(key)?;
        if entry.used.load(Relaxed) != self.inserted {
            entry.used.store(self.inserted, Relaxed); // stores only a changed number, because threads share the cache line
        }
        Some(&entry.value)
    }

    /// Returns the value of a key, made if absent, and the evicted values, which the caller should drop after it releases its lock.
    pub(crate) fn get_or_insert(&mut self, key: K, make: impl FnOnce() -> V) -> (&mut V, Vec<V>) {
        let full = self.entries.len() >= self.capacity && !self.entries.contains_key(&key);
        let evicted = if full { self.evict() } else { Vec::new() };
        let entry = self.entries.entry(key).or_insert_with(|| Entry { value: make(), used: AtomicU64::new(0) });
        entry.used = AtomicU64::new(self.inserted);
        self.inserted += 1; // later uses store a larger number
        (&mut entry.value, evicted)
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        let entry = self.entries.get_mut(key)?;
        entry.used = AtomicU64::new(self.inserted);
        Some(&mut entry.value)
    }

    pub(crate) fn remove(&mut self, key: &K) {
        self.entries.remove(key);
    }

    /// Evicts the least recently used sixteenth of the entries at once, because finding them scans all entries.
    fn evict(&mut self) -> Vec<V> {
        let excess = self.entries.len() + 1 - self.capacity.max(1);
        let count = excess.max(self.capacity / 16).min(self.entries.len());
        let mut ages: Vec<(u64, &K)> = self.entries.iter().map(|(key, e)| (e.used.load(Relaxed), key)).collect();
        if count < ages.len() {
            ages.select_nth_unstable_by_key(count, |&(used, _)| used);
        }
        let keys: Vec<K> = ages[..count].iter().map(|&(_, key)| key.clone()).collect();
        keys.iter().filter_map(|key| self.entries.remove(key)).map(|entry| entry.value).collect()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, entry)| (key, &entry.value))
    }

    /// Changes the bound for later insertions and returns the previous bound.
    #[cfg(test)]
    pub(crate) fn set_capacity(&mut self, capacity: usize) -> usize {
        std::mem::replace(&mut self.capacity, capacity)
    }
}

/// The hash function of rustc's FxHasher.
#[derive(Default)]
struct KeyHasher(u64);

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
        // The map takes its bucket from the low bits, which the multiplication mixes least, so the high bits are added.
        self.0 ^ (self.0 >> 32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_recently_used_entries_are_evicted_first() {
        for capacity in [1, 2, 7, 32, 100] {
            let mut lru = Lru::new(capacity);
            let (mut made, mut gone) = (0, 0);
            for i in 0..1000u64 {
                // Entry 0 is used in every iteration, so it must never be evicted, except at capacity 1.
                let kept = lru.get(&0).is_some();
                assert!(kept || i == 0 || capacity == 1, "{i} of {capacity}");
                let (value, evicted) = lru.get_or_insert(i, || {
                    made += 1;
                    i
                });
                assert_eq!(*value, i);
                gone += evicted.len();
                assert!(lru.iter().count() <= capacity && made == gone + lru.iter().count());
            }
            let recent = 1000 - (capacity - capacity / 16) as u64 + 1;
            assert!((recent..1000).all(|i| lru.get(&i).is_some()), "{capacity}");
        }
    }

    #[test]
    fn values_are_made_once_and_a_smaller_capacity_evicts() {
        let mut lru = Lru::new(40);
        (0..40).for_each(|i| drop(lru.get_or_insert(i, || i)));
        let (value, evicted) = lru.get_or_insert(39, || unreachable!("it is there"));
        assert_eq!((*value, evicted.len()), (39, 0));
        assert_eq!(lru.set_capacity(4), 40);
        assert_eq!(lru.get_or_insert(40, || 40).1.len(), 37);
        assert!([38, 39, 40].iter().all(|i| lru.get(i).is_some()) && lru.iter().count() == 4);
    }
}
