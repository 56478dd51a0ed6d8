//! Messages between the ranks of one machine through memory that they share: a ring of words for each pair and direction.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::device::cpu::{parallel, threads};
use crate::storage::SharedMemory;

/// Words of all rings of a machine together.
const ALL: usize = (32 << 20) / size_of::<u64>();

/// The fewest words of a ring that are worth it, and the most.
const WORDS: std::ops::RangeInclusive<usize> = (1 << 13)..=(1 << 18);

/// Words before those of a ring: how many were written and how many read, each in a cache line of its own.
const HEAD: usize = 16;
const READ: usize = 8;

/// Bytes that a thread copies at a time.
const PIECE: usize = 1 << 16;

/// The rings between so many ranks.
pub(super) struct Rings {
    memory: SharedMemory,
    ranks: usize,
    /// This rank's number among them.
    rank: usize,
}

impl Rings {
    /// Words of memory for so many ranks; none where there are too many for it to be worth it.
    pub(super) fn words(ranks: usize) -> Option<usize> {
        let ring = (ALL / (ranks * ranks)).min(*WORDS.end());
        (ranks > 1 && WORDS.contains(&ring)).then_some((HEAD + ring / HEAD * HEAD) * ranks * ranks)
    }

    /// In memory of so many [`words`](Self::words).
    pub(super) fn new(memory: SharedMemory, ranks: usize, rank: usize) -> Rings {
        Rings { memory, ranks, rank }
    }

    fn ring(&self, from: usize, to: usize) -> &[AtomicU64] {
        let words = self.memory.words();
        let each = words.len() / (self.ranks * self.ranks);
        &words[(from * self.ranks + to) * each..][..each]
    }

    /// What brings a message to another rank, a part at each [`step`](Sending::step).
    pub(super) fn send<'a>(&'a self, to: usize, context: u32, bytes: &'a [u8]) -> Sending<'a> {
        Sending { ring: self.ring(self.rank, to), context, bytes, begun: false }
    }

    /// What takes one from there, a part at each [`step`](Receiving::step).
    pub(super) fn receive<'a>(&'a self, from: usize, context: u32, bytes: &'a mut [u8]) -> Receiving<'a> {
        Receiving { ring: self.ring(from, self.rank), context, bytes, begun: false }
    }
}

/// A message's first word.
fn label(context: u32, bytes: usize) -> u64 {
    (u64::from(context) << 40) ^ bytes as u64
}

/// A message on its way into a ring.
pub(super) struct Sending<'a> {
    ring: &'a [AtomicU64],
    context: u32,
    /// Those that are not there yet.
    bytes: &'a [u8],
    /// Whether its first word is there.
    begun: bool,
}

impl Sending<'_> {
    /// Writes what has room: whether that was any, and whether the message is whole.
    pub(super) fn step(&mut self) -> (bool, bool) {
        let (head, data) = self.ring.split_at(HEAD);
        let (mut written, read) = (head[0].load(Relaxed), head[READ].load(Acquire));
        let mut room = data.len() - (written - read) as usize;
        let before = written;
        if !self.begun && room > 0 {
            data[written as usize % data.len()].store(label(self.context, self.bytes.len()), Relaxed);
            (self.begun, written, room) = (true, written + 1, room - 1);
        }
        while self.begun && room > 0 && !self.bytes.is_empty() {
            let at = written as usize % data.len();
            let words = room.min(data.len() - at).min(self.bytes.len().div_ceil(8)).min(at_a_time());
            let (now, later) = self.bytes.split_at(self.bytes.len().min(words * 8));
            write(now, &data[at..at + words]);
            (self.bytes, written, room) = (later, written + words as u64, room - words);
            head[0].store(written, Release); // the other rank reads them while the next are written
        }
        if written != before {
            head[0].store(written, Release); // a rank that waits leaves the line to the one that writes
        }
        (written != before, self.begun && self.bytes.is_empty())
    }
}

/// A message on its way out of a ring.
pub(super) struct Receiving<'a> {
    ring: &'a [AtomicU64],
    context: u32,
    /// Those that have not come yet.
    bytes: &'a mut [u8],
    /// Whether its first word was read.
    begun: bool,
}

impl Receiving<'_> {
    /// Reads what is there: whether that was any, and whether the message is whole.
    ///
    /// # Errors
    /// What the other rank sends instead: another number of bytes, or the message of another group.
    pub(super) fn step(&mut self) -> Result<(bool, bool), String> {
        let (head, data) = self.ring.split_at(HEAD);
        let (written, mut read) = (head[0].load(Acquire), head[READ].load(Relaxed));
        let before = read;
        if !self.begun && written > read {
            let label = data[read as usize % data.len()].load(Relaxed);
            let expected = self::label(self.context, self.bytes.len());
            if label != expected {
                return Err(match label >> 40 == expected >> 40 {
                    true => format!("sends {} bytes where {} are expected", label & 0xff_ffff_ffff, self.bytes.len()),
                    false => "calls a collective of another group".into(),
                });
            }
            (self.begun, read) = (true, read + 1);
        }
        while self.begun && written > read && !self.bytes.is_empty() {
            let at = read as usize % data.len();
            let there = ((written - read) as usize).min(at_a_time());
            let words = there.min(data.len() - at).min(self.bytes.len().div_ceil(8));
            let bytes = std::mem::take(&mut self.bytes);
            let (now, later) = bytes.split_at_mut(bytes.len().min(words * 8));
            read_into(now, &data[at..at + words]);
            (self.bytes, read) = (later, read + words as u64);
            head[READ].store(read, Release); // the other rank writes there while the next are read
        }
        if read != before {
            head[READ].store(read, Release);
        }
        Ok((read != before, self.begun && self.bytes.is_empty()))
    }
}

/// Words that are copied before the other rank is told of them: few enough that both copy at once, enough for all threads.
fn at_a_time() -> usize {
    if threads() == 1 { 1 << 14 } else { 1 << 16 }
}

/// Bytes into as many words as they need.
fn write(bytes: &[u8], words: &[AtomicU64]) {
    parallel::for_each_index(bytes.len().div_ceil(PIECE), |i| {
        let bytes = &bytes[i * PIECE..bytes.len().min((i + 1) * PIECE)];
        let words = &words[i * PIECE / 8..];
        let whole = bytes.chunks_exact(8);
        if let (last @ [_, ..], Some(word)) = (whole.remainder(), words.get(bytes.len() / 8)) {
            let mut padded = [0; 8];
            padded[..last.len()].copy_from_slice(last);
            word.store(u64::from_ne_bytes(padded), Relaxed);
        }
        for (bytes, word) in whole.zip(words) {
            word.store(u64::from_ne_bytes(bytes.try_into().expect("eight bytes")), Relaxed);
        }
    });
}

/// Bytes out of as many words as they need.
fn read_into(bytes: &mut [u8], words: &[AtomicU64]) {
    parallel::for_each_chunk(bytes, PIECE, |i, bytes| {
        let words = &words[i * PIECE / 8..];
        let last_word = words.get(bytes.len() / 8);
        let mut whole = bytes.chunks_exact_mut(8);
        for (bytes, word) in whole.by_ref().zip(words) {
            bytes.copy_from_slice(&word.load(Relaxed).to_ne_bytes());
        }
        if let (last @ [_, ..], Some(word)) = (whole.into_remainder(), last_word) {
            let padded = word.load(Relaxed).to_ne_bytes();
            last.copy_from_slice(&padded[..last.len()]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rings of two ranks, each as its process has them.
    fn two() -> [Rings; 2] {
        let words = Rings::words(2).unwrap();
        let (memory, file) = SharedMemory::create(words).unwrap();
        let other = SharedMemory::open(file.path(), words).unwrap();
        [Rings::new(memory, 2, 0), Rings::new(other, 2, 1)]
    }

    #[test]
    fn messages_longer_than_a_ring_arrive_in_order() {
        let [a, b] = two();
        let sizes = [1, 7, 8, 9, 0, 100_003, 5_000_001, 64, 3];
        let message = |n: usize| (0..n).map(|i| (i * 7 + n) as u8).collect::<Vec<u8>>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for n in sizes {
                    let bytes = message(n);
                    let mut sending = a.send(1, 3, &bytes);
                    while !sending.step().1 {}
                }
            });
            for n in sizes {
                let mut got = vec![0; n];
                let mut receiving = b.receive(0, 3, &mut got);
                while !receiving.step().unwrap().1 {}
                assert!(got == message(n), "{n} bytes");
            }
        });
    }

    #[test]
    fn what_is_not_expected_is_told() {
        let [a, b] = two();
        assert!(a.send(1, 3, &[0; 16]).step().1);
        assert_eq!(b.receive(0, 3, &mut [0; 8]).step().unwrap_err(), "sends 16 bytes where 8 are expected");
        assert!(b.receive(0, 4, &mut [0; 16]).step().unwrap_err().contains("another group"));
    }

    #[test]
    fn many_ranks_have_none() {
        assert!(Rings::words(1).is_none() && Rings::words(16).is_some() && Rings::words(1000).is_none());
    }
}
