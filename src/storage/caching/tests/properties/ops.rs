//! Random operations of a program on an allocator and its device.

/// One operation. Blocks are given by a number modulo the number of live blocks, so that any list of operations is valid.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Op {
    Allocate {
        bytes: usize,
        stream: u32,
        /// 0 means no private pool.
        pool: usize,
    },
    Free {
        block: usize,
    },
    /// A stream other than the block's own stream reads the block.
    Share {
        block: usize,
        stream: u32,
    },
    /// The block's own stream reads the block.
    Check {
        block: usize,
    },
    /// The program moves the block to the host.
    Evict {
        block: usize,
    },
    /// The device runs some of the queued work.
    Run {
        seed: u64,
    },
    Synchronize,
    EmptyCache,
    Trim {
        keep: u64,
    },
    Compact {
        budget: u64,
    },
    Limit {
        bytes: u64,
    },
    /// Other programs hold this much device memory from now on.
    Others {
        bytes: u64,
    },
    FailCreate {
        code: i32,
    },
    FailCommit {
        code: i32,
    },
    FailEnqueue {
        code: i32,
    },
    /// A call to record, query or wait for a marker, or to synchronize, fails.
    FailCall {
        kind: usize,
        code: i32,
    },
    ResetPeaks,
    ResetSums,
    MakePool {
        no_split: bool,
        use_on_oom: bool,
    },
    /// Drops the pool, with any live blocks in it.
    DropPool {
        pool: usize,
    },
    EmptyPool {
        pool: usize,
    },
    /// Records the locations of a pool's blocks, for `Restore`.
    Checkpoint {
        pool: usize,
    },
    /// Keeps some of the blocks that match the checkpoint, and frees the others of the pool.
    Restore {
        pool: usize,
        seed: u64,
    },
    /// Marks a block to be freed by a free-memory callback when memory runs short.
    MarkSpare {
        block: usize,
    },
}

impl Op {
    /// Returns the operation's name, without its arguments.
    pub(super) fn name(self) -> String {
        let text = format!("{self:?}");
        text.split(' ').next().unwrap_or_default().into()
    }
}

/// A splitmix64 random number generator.
#[derive(Debug, Clone)]
pub(in super::super) struct Random(pub(in super::super) u64);

impl Random {
    pub(in super::super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(in super::super) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// Returns a log-uniform random number from 1 to `most`.
    pub(in super::super) fn size(&mut self, most: usize) -> usize {
        let unit = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        ((most as f64).powf(unit) as usize).clamp(1, most)
    }
}

/// Generates `n` operations for a device of `capacity` bytes. Phases of mostly allocating and mostly freeing
/// alternate, so that the device runs full and empty many times.
pub(super) fn generate(seed: u64, n: usize, capacity: u64) -> Vec<Op> {
    let mut random = Random(seed);
    let favourites: Vec<usize> = (0..8).map(|_| random.size(1 << 18)).collect();
    let mut allocating = 50;
    let largest = if cfg!(miri) { 2 << 20 } else { 32 << 20 };
    (0..n)
        .map(|i| {
            if i % 256 == 0 {
                allocating = 30 + random.below(45);
            }
            let block = random.below(1 << 20) as usize;
            let stream = random.below(3) as u32;
            let pool = random.below(12) as usize;
            match random.below(1000) {
                0..620 if random.below(100) >= allocating => Op::Free { block },
                0..620 => {
                    let favourite = random.below(10) < 3;
                    let bytes = if favourite { favourites[block % 8] } else { random.size(largest) };
                    Op::Allocate { bytes, stream, pool: pool.saturating_sub(9) }
                }
                620..710 => Op::Share { block, stream },
                710..770 => Op::Check { block },
                770..780 => Op::Evict { block },
                780..880 => Op::Run { seed: random.next() },
                880..888 => Op::MakePool { no_split: random.below(3) == 0, use_on_oom: random.below(2) == 0 },
                888..893 => Op::DropPool { pool },
                893..900 => Op::EmptyPool { pool },
                900..907 => Op::Checkpoint { pool },
                907..917 => Op::Restore { pool, seed: random.next() },
                917..940 => Op::MarkSpare { block },
                940..943 => Op::Synchronize,
                943..946 => Op::EmptyCache,
                946..953 => Op::Trim { keep: random.below(capacity) },
                953..960 => Op::Compact { budget: random.size(capacity as usize) as u64 },
                960..965 => Op::Limit { bytes: capacity / 4 + random.below(capacity) },
                965..970 => Op::Others { bytes: random.below(3).saturating_sub(1) * random.below(capacity / 2) },
                970..980 => Op::FailCreate { code: -4 - random.below(3) as i32 },
                980..990 => Op::FailCommit { code: -4 - random.below(3) as i32 },
                990..993 => Op::FailEnqueue { code: -4 - random.below(3) as i32 },
                993..996 => Op::FailCall { kind: random.below(5) as usize, code: -4 - random.below(3) as i32 },
                996..998 => Op::ResetPeaks,
                _ => Op::ResetSums,
            }
        })
        .collect()
}

/// Shrinks the operations to the fewest for which `fails` still holds, by removing smaller and smaller parts of the list.
pub(super) fn shrink(mut ops: Vec<Op>, mut attempts: usize, fails: impl Fn(&[Op]) -> bool) -> Vec<Op> {
    let mut part = ops.len() / 2;
    while part > 0 {
        let (mut at, before) = (0, ops.len());
        while at < ops.len() && attempts > 0 {
            let end = (at + part).min(ops.len());
            let without: Vec<Op> = ops[..at].iter().chain(&ops[end..]).copied().collect();
            attempts -= 1;
            if fails(&without) {
                ops = without;
            } else {
                at = end;
            }
        }
        if part == 1 && (ops.len() == before || attempts == 0) {
            break;
        }
        part = (part / 2).max(1);
    }
    ops
}

#[test]
fn shrinking_keeps_the_needed_operations() {
    let ops: Vec<Op> = (0..1000).map(|block| Op::Free { block }).collect();
    let needed = [Op::Free { block: 17 }, Op::Free { block: 18 }, Op::Free { block: 700 }];
    let found = shrink(ops, 1000, |ops| needed.iter().all(|op| ops.contains(op)));
    assert_eq!(found, needed);
}
