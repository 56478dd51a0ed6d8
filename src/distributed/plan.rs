//! What ranks send each other of a slice, and how it is cut so that several threads exchange it at once.

use super::reduce::ReduceOp;
use crate::DType;

/// Pieces and ranks' parts begin at multiples of this, where elements of every dtype may.
pub(super) const ALIGN: usize = 64;

/// Bytes of a block that a lane exchanges at a time: they stay in the second-level cache from when they arrive until they are sent on.
pub(super) const PIECE: usize = 1 << 17;

/// The fewest bytes of a block that are worth a lane.
const LEAST: usize = 1 << 14;

/// The phases of the exchange of a slice, one after another; each may need what the one before has brought.
///
/// They are about *blocks*: parts of the slice's buffer that are cut alike into pieces, for a piece needs the same bytes of each.
/// After those of the buffer come blocks beside it, where other ranks' values of the own block arrive, which are only reduced.
pub(super) struct Plan {
    pub phases: Vec<Phase>,
    /// This rank's block where its values are reduced, which is also how many ranks come before it. The blocks beside the buffer
    /// have the values of the other ranks, in their order.
    pub own: usize,
}

#[cfg(feature = "mpi")]
impl Plan {
    /// The same between ranks of other numbers.
    pub(super) fn between(&self, number: impl Fn(usize) -> usize) -> Plan {
        let all = |messages: &[(usize, usize)]| messages.iter().map(|&(rank, block)| (number(rank), block)).collect();
        let phase = |phase: &Phase| Phase { sends: all(&phase.sends), receives: all(&phase.receives), ..*phase };
        Plan { phases: self.phases.iter().map(phase).collect(), own: self.own }
    }
}

/// What is sent and received at once: the rank of the job, and the number of the block.
#[derive(Default)]
pub(super) struct Phase {
    pub sends: Vec<(usize, usize)>,
    pub receives: Vec<(usize, usize)>,
    /// What then becomes of all ranks' values of the own block, in the order of the ranks.
    pub reduces: Option<(DType, ReduceOp)>,
}

/// Pieces of a slice that one thread exchanges, one after another.
pub(super) struct Lane<'a> {
    /// What each has of the buffer's blocks.
    pieces: Vec<Vec<&'a mut [u8]>>,
    /// The blocks beside the buffer.
    beside: Vec<&'a mut [u8]>,
    piece: usize,
    phase: usize,
}

/// Cuts blocks into pieces of so many bytes at most, and these into lanes, one at most for each set of blocks beside the buffer.
pub(super) fn lanes<'a>(blocks: Vec<&'a mut [u8]>, piece: usize, beside: Vec<Vec<&'a mut [u8]>>) -> Vec<Lane<'a>> {
    let longest = blocks.iter().map(|block| block.len()).max().unwrap_or(0);
    let piece = piece.min(longest.div_ceil(beside.len()).max(LEAST).next_multiple_of(ALIGN));
    let pieces = longest.div_ceil(piece);
    let mut rest: Vec<_> = blocks.into_iter().map(|block| block.chunks_mut(piece)).collect();
    let count = beside.len().min(pieces);
    let mut lanes = Vec::with_capacity(count);
    for (i, beside) in beside.into_iter().take(count).enumerate() {
        let of_lane = i * pieces / count..(i + 1) * pieces / count;
        let pieces = of_lane.map(|_| rest.iter_mut().map(|block| block.next().unwrap_or_default()).collect());
        lanes.push(Lane { pieces: pieces.collect(), beside, piece: 0, phase: 0 });
    }
    lanes
}

/// What is sent, and what is received, each with its rank.
pub(super) type Messages<'a> = (Vec<(usize, &'a [u8])>, Vec<(usize, &'a mut [u8])>);

impl Lane<'_> {
    /// The phase that it is in; none when it is through.
    pub(super) fn phase<'p>(&self, plan: &'p Plan) -> Option<&'p Phase> {
        (self.piece < self.pieces.len()).then(|| &plan.phases[self.phase])
    }

    /// A block of the current piece.
    #[cfg(feature = "mpi")]
    pub(super) fn block(&mut self, plan: &Plan, block: usize) -> &mut [u8] {
        let piece = &mut self.pieces[self.piece];
        match block.checked_sub(piece.len()) {
            None => piece[block],
            Some(beside) => &mut self.beside[beside][..piece[plan.own].len()],
        }
    }

    /// The messages of the current phase; what is empty is not sent.
    pub(super) fn messages(&mut self, plan: &Plan) -> Messages<'_> {
        let (phase, piece) = (&plan.phases[self.phase], &mut self.pieces[self.piece]);
        let own = piece[plan.own].len();
        let beside = self.beside.iter_mut().map(|block| &mut block[..own]);
        let blocks = piece.iter_mut().map(|block| &mut **block).chain(beside);
        let (mut sends, mut receives) = (Vec::new(), Vec::new());
        for (i, block) in blocks.enumerate().filter(|(_, block)| !block.is_empty()) {
            match phase.receives.iter().find(|(_, into)| *into == i) {
                Some((from, _)) => receives.push((*from, block)),
                None => {
                    let block: &[u8] = block;
                    sends.extend(phase.sends.iter().filter(|(_, of)| *of == i).map(|(to, _)| (*to, block)));
                }
            }
        }
        (sends, receives)
    }

    /// Ends the current phase, whose messages have all gone and come.
    pub(super) fn end_phase(&mut self, plan: &Plan) {
        let own = &mut self.pieces[self.piece][plan.own];
        if let Some((dtype, op)) = plan.phases[self.phase].reduces.filter(|_| !own.is_empty()) {
            let beside: Vec<&[u8]> = self.beside.iter().map(|block| &block[..own.len()]).collect();
            let (before, after) = beside.split_at(plan.own);
            op.reduce(dtype, before, own, after);
        }
        self.phase += 1;
        if self.phase == plan.phases.len() {
            (self.piece, self.phase) = (self.piece + 1, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every byte of every block is once in a piece, in order, and pieces have the same bytes of each block.
    #[test]
    fn lanes_have_every_byte_once() {
        for (longest, count, expected) in [(0, 3, 0), (1, 3, 1), (1 << 15, 3, 2), (3 << 17, 2, 2), (5 << 20, 8, 8)] {
            let mut blocks = [vec![0u8; longest], vec![0; longest.saturating_sub(100)]];
            let beside = (0..count).map(|_| Vec::new()).collect();
            let mut lanes = lanes(blocks.iter_mut().map(Vec::as_mut_slice).collect(), PIECE, beside);
            assert_eq!(lanes.len(), expected, "{longest} bytes in {count} lanes");
            let pieces = lanes.iter_mut().flat_map(|lane| &mut lane.pieces);
            for (i, piece) in pieces.enumerate() {
                assert!(piece[0].len() <= PIECE && piece[1].len() <= piece[0].len());
                piece.iter_mut().for_each(|block| block.iter_mut().for_each(|byte| *byte += 1 + i as u8));
            }
            for block in blocks {
                assert!(block.iter().all(|&byte| byte > 0) && block.is_sorted(), "{longest} bytes in {count} lanes");
            }
        }
    }
}
