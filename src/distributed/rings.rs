//! Messages between ranks on one machine, through shared memory. Each ordered pair of ranks has one ring buffer of 64-bit words per
//! lane, so that several threads of a rank can exchange parts of a slice concurrently.

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use crate::storage::SharedMemory;

/// The maximum number of words of all rings of a machine together (32 MiB).
const TOTAL_WORDS: usize = (32 << 20) / size_of::<u64>();

/// The minimum and maximum number of words of a ring. In a longer ring, words would have left the cache before they are read.
const RING_WORDS: std::ops::RangeInclusive<usize> = (1 << 13)..=(1 << 15);

/// The number of words of a ring's header. Word 0 counts written words, and word [`READ_COUNT_WORD`] read words, in separate cache lines.
const HEADER_WORDS: usize = 16;
const READ_COUNT_WORD: usize = 8;

/// The number of words copied before the counter is published. It is small, so that sender and receiver can copy at the same time.
const CHUNK_WORDS: usize = 1 << 12;

/// The rings between the ranks of a machine.
pub(super) struct Rings {
    memory: SharedMemory,
    ranks: usize,
    /// This process's rank among the ranks of the machine.
    rank: usize,
    /// The number of rings from one rank to another: one for each lane.
    pub lanes: usize,
}

impl Rings {
    /// Returns the number of lanes (at most `most`) and the words of all rings. `None` if rings of minimum length for all ranks are too large.
    pub(super) fn lanes(ranks: usize, most: usize) -> Option<(usize, usize)> {
        let pairs = ranks * ranks;
        let lanes = (TOTAL_WORDS / pairs / RING_WORDS.start()).min(most);
        (ranks > 1 && lanes > 0).then(|| {
            let ring = (TOTAL_WORDS / pairs / lanes).min(*RING_WORDS.end());
            (lanes, (HEADER_WORDS + ring / HEADER_WORDS * HEADER_WORDS) * pairs * lanes)
        })
    }

    /// Creates rings in shared memory, which has the size that [`lanes`](Self::lanes) returned.
    pub(super) fn new(memory: SharedMemory, ranks: usize, rank: usize, lanes: usize) -> Rings {
        Rings { memory, ranks, rank, lanes }
    }

    /// Returns a ring's header, its data, and the index in the shared memory of its first data word.
    fn ring(&self, from: usize, to: usize, lane: usize) -> (&[AtomicU64], &[AtomicU64], usize) {
        let words = self.memory.words();
        let each = words.len() / (self.ranks * self.ranks * self.lanes);
        let start = ((from * self.ranks + to) * self.lanes + lane) * each;
        let (header, data) = words[start..start + each].split_at(HEADER_WORDS);
        (header, data, start + HEADER_WORDS)
    }

    /// Writes as much of a message to another rank as the ring has room for. Returns whether anything was written.
    pub(super) fn send(&self, to: usize, lane: usize, context: u32, bytes: &[u8], progress: &mut Progress) -> bool {
        let (header, data, start) = self.ring(self.rank, to, lane);
        let (mut written, read) = (header[0].load(Relaxed), header[READ_COUNT_WORD].load(Acquire));
        let mut free = data.len() - (written - read) as usize;
        let before = written;
        if !progress.begun && free > 0 {
            data[written as usize % data.len()].store(first_word(context, bytes.len()), Relaxed);
            (progress.begun, written, free) = (true, written + 1, free - 1);
        }
        while progress.begun && free > 0 && progress.done < bytes.len() {
            let at = written as usize % data.len();
            let rest = &bytes[progress.done..];
            let words = free.min(data.len() - at).min(rest.len().div_ceil(8)).min(CHUNK_WORDS);
            let now = &rest[..rest.len().min(words * 8)];
            self.memory.write(start + at, now); // free words: the receiver has read them
            (progress.done, written, free) = (progress.done + now.len(), written + words as u64, free - words);
            header[0].store(written, Release); // the receiver copies these words while the next chunk is written
        }
        if written != before {
            header[0].store(written, Release); // only after progress, so that a waiting rank does not touch the cache line
        }
        written != before
    }

    /// Reads as much of a message as has arrived. Returns whether anything was read. Fails if the other rank has sent another number of
    /// bytes, or a message of another group.
    pub(super) fn receive(
        &self,
        from: usize,
        lane: usize,
        context: u32,
        bytes: &mut [u8],
        progress: &mut Progress,
    ) -> Result<bool, String> {
        let (header, data, start) = self.ring(from, self.rank, lane);
        let (written, mut read) = (header[0].load(Acquire), header[READ_COUNT_WORD].load(Relaxed));
        let before = read;
        if !progress.begun && written > read {
            let first_word = data[read as usize % data.len()].load(Relaxed);
            let expected = self::first_word(context, bytes.len());
            if first_word != expected {
                return Err(match first_word >> 40 == expected >> 40 {
                    true => format!("sends {} bytes where {} are expected", first_word & 0xff_ffff_ffff, bytes.len()),
                    false => "calls a collective of another group".into(),
                });
            }
            (progress.begun, read) = (true, read + 1);
        }
        while progress.begun && written > read && progress.done < bytes.len() {
            let at = read as usize % data.len();
            let available = ((written - read) as usize).min(CHUNK_WORDS);
            let rest = &mut bytes[progress.done..];
            let words = available.min(data.len() - at).min(rest.len().div_ceil(8));
            let now = rest.len().min(words * 8);
            self.memory.read(start + at, &mut rest[..now]); // published words: the sender does not change them
            (progress.done, read) = (progress.done + now, read + words as u64);
            header[READ_COUNT_WORD].store(read, Release); // the sender overwrites these words while the next chunk is read
        }
        if read != before {
            header[READ_COUNT_WORD].store(read, Release);
        }
        Ok(read != before)
    }
}

/// Returns the first word of a message: the context in the upper 24 bits, and the number of bytes in the lower bits.
fn first_word(context: u32, bytes: usize) -> u64 {
    (u64::from(context) << 40) ^ bytes as u64
}

/// The progress of a message.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Progress {
    /// Whether the first word of the message was copied.
    begun: bool,
    /// The number of bytes that were copied so far.
    done: usize,
}

impl Progress {
    /// True if all bytes of the message were copied. Empty messages are never sent.
    pub(super) fn is_complete(self, bytes: usize) -> bool {
        self.done == bytes && (self.begun || bytes == 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the rings of two ranks. Each rank has its own mapping of the same memory.
    fn two_ranks() -> [Rings; 2] {
        let (lanes, words) = Rings::lanes(2, 3).unwrap();
        let (memory, file) = SharedMemory::create(words).unwrap();
        let other = SharedMemory::open(file.path(), words).unwrap();
        [Rings::new(memory, 2, 0, lanes), Rings::new(other, 2, 1, lanes)]
    }

    #[test]
    fn messages_longer_than_a_ring_arrive_in_order_on_every_lane() {
        let [a, b] = two_ranks();
        let (a, b) = (&a, &b);
        let sizes = [1, 7, 8, 9, 100_003, 5_000_001, 64, 3];
        let message = |n: usize, lane: usize| (0..n).map(|i| (i * 7 + n + lane) as u8).collect::<Vec<u8>>();
        std::thread::scope(|scope| {
            for lane in 0..3 {
                scope.spawn(move || {
                    for n in sizes {
                        let (bytes, mut progress) = (message(n, lane), Progress::default());
                        while !progress.is_complete(n) {
                            a.send(1, lane, 3, &bytes, &mut progress);
                        }
                    }
                });
                scope.spawn(move || {
                    for n in sizes {
                        let (mut got, mut progress) = (vec![0; n], Progress::default());
                        while !progress.is_complete(n) {
                            b.receive(0, lane, 3, &mut got, &mut progress).unwrap();
                        }
                        assert!(got == message(n, lane), "{n} bytes");
                    }
                });
            }
        });
    }

    #[test]
    fn mismatched_messages_are_errors() {
        let [a, b] = two_ranks();
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
