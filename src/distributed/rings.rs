//! Messages between the ranks of one machine through memory that they share: rings of words for each pair and direction, one
//! for each lane, so that several threads of a rank exchange parts of a slice at once.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::storage::SharedMemory;

/// Words of all rings of a machine together.
const ALL: usize = (32 << 20) / size_of::<u64>();

/// The fewest words of a ring that are worth it, and the most: what is written is to be in a cache still when it is read.
const WORDS: std::ops::RangeInclusive<usize> = (1 << 13)..=(1 << 15);

/// Words before those of a ring: how many were written and how many read, each in a cache line of its own.
const HEAD: usize = 16;
const READ: usize = 8;

/// Words that are copied before the other rank is told of them: few, so that both copy at once.
const AT_A_TIME: usize = 1 << 12;

/// The rings between so many ranks.
pub(super) struct Rings {
    memory: SharedMemory,
    ranks: usize,
    /// This rank's number among them.
    rank: usize,
    /// How many rings a pair has in each direction.
    pub lanes: usize,
}

impl Rings {
    /// How many lanes so many ranks have, up to so many, and the words of memory for all; none where there are too many ranks for
    /// it to be worth it.
    pub(super) fn lanes(ranks: usize, most: usize) -> Option<(usize, usize)> {
        let pairs = ranks * ranks;
        let lanes = (ALL / pairs / WORDS.start()).min(most);
        (ranks > 1 && lanes > 0).then(|| {
            let ring = (ALL / pairs / lanes).min(*WORDS.end());
            (lanes, (HEAD + ring / HEAD * HEAD) * pairs * lanes)
        })
    }

    /// In memory of the words that so many [`lanes`](Self::lanes) need.
    pub(super) fn new(memory: SharedMemory, ranks: usize, rank: usize, lanes: usize) -> Rings {
        Rings { memory, ranks, rank, lanes }
    }

    /// The words before those of a ring, its words, and where these begin in the memory.
    fn ring(&self, from: usize, to: usize, lane: usize) -> (&[AtomicU64], &[AtomicU64], usize) {
        let words = self.memory.words();
        let each = words.len() / (self.ranks * self.ranks * self.lanes);
        let start = ((from * self.ranks + to) * self.lanes + lane) * each;
        let (head, data) = words[start..start + each].split_at(HEAD);
        (head, data, start + HEAD)
    }

    /// Writes what has room of a message to another rank: whether that was any.
    pub(super) fn send(&self, to: usize, lane: usize, context: u32, bytes: &[u8], progress: &mut Progress) -> bool {
        let (head, data, start) = self.ring(self.rank, to, lane);
        let (mut written, read) = (head[0].load(Relaxed), head[READ].load(Acquire));
        let mut room = data.len() - (written - read) as usize;
        let before = written;
        if !progress.begun && room > 0 {
            data[written as usize % data.len()].store(label(context, bytes.len()), Relaxed);
            (progress.begun, written, room) = (true, written + 1, room - 1);
        }
        while progress.begun && room > 0 && progress.done < bytes.len() {
            let at = written as usize % data.len();
            let rest = &bytes[progress.done..];
            let words = room.min(data.len() - at).min(rest.len().div_ceil(8)).min(AT_A_TIME);
            let now = &rest[..rest.len().min(words * 8)];
            self.memory.write(start + at, now); // these have been read: `room`
            (progress.done, written, room) = (progress.done + now.len(), written + words as u64, room - words);
            head[0].store(written, Release); // the other rank reads them while the next are written
        }
        if written != before {
            head[0].store(written, Release); // a rank that waits leaves the line to the one that writes
        }
        written != before
    }

    /// Reads the part of a message that has arrived, and returns whether any had.
    ///
    /// # Errors
    /// What the other rank sends instead: another number of bytes, or the message of another group.
    pub(super) fn receive(
        &self,
        from: usize,
        lane: usize,
        context: u32,
        bytes: &mut [u8],
        progress: &mut Progress,
    ) -> Result<bool, String> {
        let (head, data, start) = self.ring(from, self.rank, lane);
        let (written, mut read) = (head[0].load(Acquire), head[READ].load(Relaxed));
        let before = read;
        if !progress.begun && written > read {
            let label = data[read as usize % data.len()].load(Relaxed);
            let expected = self::label(context, bytes.len());
            if label != expected {
                return Err(match label >> 40 == expected >> 40 {
                    true => format!("sends {} bytes where {} are expected", label & 0xff_ffff_ffff, bytes.len()),
                    false => "calls a collective of another group".into(),
                });
            }
            (progress.begun, read) = (true, read + 1);
        }
        while progress.begun && written > read && progress.done < bytes.len() {
            let at = read as usize % data.len();
            let there = ((written - read) as usize).min(AT_A_TIME);
            let rest = &mut bytes[progress.done..];
            let words = there.min(data.len() - at).min(rest.len().div_ceil(8));
            let now = rest.len().min(words * 8);
            self.memory.read(start + at, &mut rest[..now]); // these have been written: `there`
            (progress.done, read) = (progress.done + now, read + words as u64);
            head[READ].store(read, Release); // the other rank writes there while the next are read
        }
        if read != before {
            head[READ].store(read, Release);
        }
        Ok(read != before)
    }
}

/// A message's first word.
fn label(context: u32, bytes: usize) -> u64 {
    (u64::from(context) << 40) ^ bytes as u64
}

/// How far a message has come.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    /// Whether its first word is there.
    begun: bool,
    /// Its bytes that were copied.
    done: usize,
}

impl Progress {
    /// Whether all of so many bytes were copied; what is empty is not sent.
    pub(super) fn is_whole(self, bytes: usize) -> bool {
        self.done == bytes && (self.begun || bytes == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rings of two ranks, each as its process has them.
    fn two() -> [Rings; 2] {
        let (lanes, words) = Rings::lanes(2, 3).unwrap();
        let (memory, file) = SharedMemory::create(words).unwrap();
        let other = SharedMemory::open(file.path(), words).unwrap();
        [Rings::new(memory, 2, 0, lanes), Rings::new(other, 2, 1, lanes)]
    }

    #[test]
    fn messages_longer_than_a_ring_arrive_in_order_on_every_lane() {
        let [a, b] = two();
        let (a, b) = (&a, &b);
        let sizes = [1, 7, 8, 9, 100_003, 5_000_001, 64, 3];
        let message = |n: usize, lane: usize| (0..n).map(|i| (i * 7 + n + lane) as u8).collect::<Vec<u8>>();
        std::thread::scope(|scope| {
            for lane in 0..3 {
                scope.spawn(move || {
                    for n in sizes {
                        let (bytes, mut progress) = (message(n, lane), Progress::default());
                        while !progress.is_whole(n) {
                            a.send(1, lane, 3, &bytes, &mut progress);
                        }
                    }
                });
                scope.spawn(move || {
                    for n in sizes {
                        let (mut got, mut progress) = (vec![0; n], Progress::default());
                        while !progress.is_whole(n) {
                            b.receive(0, lane, 3, &mut got, &mut progress).unwrap();
                        }
                        assert!(got == message(n, lane), "{n} bytes");
                    }
                });
            }
        });
    }

    #[test]
    fn what_is_not_expected_is_told() {
        let [a, b] = two();
        assert!(a.send(1, 0, 3, &[0; 16], &mut Progress::default()));
        let receive = |context, bytes: &mut [u8]| b.receive(0, 0, context, bytes, &mut Progress::default());
        assert_eq!(receive(3, &mut [0; 8]).unwrap_err(), "sends 16 bytes where 8 are expected");
        assert!(receive(4, &mut [0; 16]).unwrap_err().contains("another group"));
    }

    #[test]
    fn many_ranks_have_fewer_lanes_or_none() {
        let lanes = |ranks| Rings::lanes(ranks, 8).map(|(lanes, _)| lanes);
        assert_eq!([1, 2, 8, 16, 1000].map(lanes), [None, Some(8), Some(8), Some(2), None]);
    }
}
