//! The messages with which ranks exchange a slice, and the division of the slice among lanes (one thread each).

use super::reduce::ReduceOp;
use crate::DType;

/// The alignment, in bytes, of pieces and of the ranks' parts. A multiple of the size of every dtype.
pub(super) const ALIGN_BYTES: usize = 64;

/// The maximum number of bytes of a block that a lane exchanges at a time. Pieces of this size stay in the L2 cache between phases.
pub(super) const PIECE_BYTES: usize = 1 << 17;

/// The minimum number of bytes of a block that a lane must get. Smaller blocks use fewer lanes.
const MIN_LANE_BYTES: usize = 1 << 14;

/// The phases in which a slice is exchanged, in order. A phase may send data that the previous phase has received.
///
/// A *block* is a section of the slice's buffer, or a scratch block. A scratch block receives another rank's values of this rank's own
/// block, to be reduced. Scratch blocks are numbered after the blocks of the buffer. All blocks are cut into pieces at the same
/// offsets, because the reduction of a piece needs the same bytes of every scratch block.
pub(super) struct Plan {
    pub phases: Vec<Phase>,
    /// The number of the block that this rank reduces: its rank in the group. Scratch blocks are in the order of the other ranks.
    pub own: usize,
}

#[cfg(feature = "mpi")]
impl Plan {
    /// Returns the same plan in which each rank is replaced by `number(rank)`.
    pub(super) fn map_ranks(&self, number: impl Fn(usize) -> usize) -> Plan {
        let all = |messages: &[(usize, usize)]| messages.iter().map(|&(rank, block)| (number(rank), block)).collect();
        let phase = |phase: &Phase| Phase { sends: all(&phase.sends), receives: all(&phase.receives), ..*phase };
        Plan { phases: self.phases.iter().map(phase).collect(), own: self.own }
    }
}

/// Messages that are sent and received concurrently. Each has the peer's rank in the job and the number of a block.
#[derive(Default)]
pub(super) struct Phase {
    pub sends: Vec<(usize, usize)>,
    pub receives: Vec<(usize, usize)>,
    /// The reduction that follows the messages. It combines all ranks' values of the own block, in the order of the ranks.
    pub reduces: Option<(DType, ReduceOp)>,
}

/// The pieces of a slice that one thread exchanges one after another.
pub(super) struct Lane<'a> {
    /// For each piece, the bytes of the piece in every block of the buffer.
    pieces: Vec<Vec<&'a mut [u8]>>,
    /// The scratch blocks, reused for every piece.
    scratch: Vec<&'a mut [u8]>,
    piece: usize,
    phase: usize,
}

/// Cuts blocks into pieces of at most `piece` bytes, and divides the pieces among lanes. Each lane needs one of the `scratch` sets.
pub(super) fn cut_into_lanes<'a>(
    blocks: Vec<&'a mut [u8]>,
    piece: usize,
    scratch: Vec<Vec<&'a mut [u8]>>,
) -> Vec<Lane<'a>> {
    let longest = blocks.iter().map(|block| block.len()).max().unwrap_or(0);
    let piece = piece.min(longest.div_ceil(scratch.len()).max(MIN_LANE_BYTES).next_multiple_of(ALIGN_BYTES));
    let pieces = longest.div_ceil(piece);
    let mut rest: Vec<_> = blocks.into_iter().map(|block| block.chunks_mut(piece)).collect();
    let count = scratch.len().min(pieces);
    let mut lanes = Vec::with_capacity(count);
    for (i, scratch) in scratch.into_iter().take(count).enumerate() {
        let of_lane = i * pieces / count..(i + 1) * pieces / count;
        let pieces = of_lane.map(|_| rest.iter_mut().map(|block| block.next().unwrap_or_default()).collect());
        lanes.push(Lane { pieces: pieces.collect(), scratch, piece: 0, phase: 0 });
    }
    lanes
}

/// The messages to send and the messages to receive, each with the peer's rank.
pub(super) type Messages<'a> = (Vec<(usize, &'a [u8])>, Vec<(usize, &'a mut [u8])>);

impl Lane<'_> {
    /// Returns the current phase, or `None` if the lane is done.
    pub(super) fn phase<'p>(&self, plan: &'p Plan) -> Option<&'p Phase> {
        (self.piece < self.pieces.len()).then(|| &plan.phases[self.phase])
    }

    /// Returns the bytes of the current piece in this block.
    #[cfg(feature = "mpi")]
    pub(super) fn block(&mut self, plan: &Plan, block: usize) -> &mut [u8] {
        let piece = &mut self.pieces[self.piece];
        match block.checked_sub(piece.len()) {
            None => piece[block],
            Some(scratch) => &mut self.scratch[scratch][..piece[plan.own].len()],
        }
    }

    /// Returns the messages of the current phase, except empty messages.
    pub(super) fn messages(&mut self, plan: &Plan) -> Messages<'_> {
        let (phase, piece) = (&plan.phases[self.phase], &mut self.pieces[self.piece]);
        let own = piece[plan.own].len();
        let scratch = self.scratch.iter_mut().map(|block| &mut block[..own]);
        let blocks = piece.iter_mut().map(|block| &mut **block).chain(scratch);
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

    /// Ends the current phase, whose messages are complete: performs its reduction.
    pub(super) fn end_phase(&mut self, plan: &Plan) {
        let own = &mut self.pieces[self.piece][plan.own];
        if let Some((dtype, op)) = plan.phases[self.phase].reduces.filter(|_| !own.is_empty()) {
            let scratch: Vec<&[u8]> = self.scratch.iter().map(|block| &block[..own.len()]).collect();
            let (before, after) = scratch.split_at(plan.own);
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

    /// A byte that is in no piece, or in two, would be lost or reduced twice. Each piece must have the same byte range in every block.
    #[test]
    fn lanes_contain_every_byte_once() {
        for (longest, count, expected) in [(0, 3, 0), (1, 3, 1), (1 << 15, 3, 2), (3 << 17, 2, 2), (5 << 20, 8, 8)] {
            let mut blocks = [vec![0u8; longest], vec![0; longest.saturating_sub(100)]];
            let scratch = (0..count).map(|_| Vec::new()).collect();
            let mut lanes = cut_into_lanes(blocks.iter_mut().map(Vec::as_mut_slice).collect(), PIECE_BYTES, scratch);
            assert_eq!(lanes.len(), expected, "{longest} bytes in {count} lanes");
            let pieces = lanes.iter_mut().flat_map(|lane| &mut lane.pieces);
            for (i, piece) in pieces.enumerate() {
                assert!(piece[0].len() <= PIECE_BYTES && piece[1].len() <= piece[0].len());
                piece.iter_mut().for_each(|block| block.iter_mut().for_each(|byte| *byte += 1 + i as u8));
            }
            for block in blocks {
                assert!(block.iter().all(|&byte| byte > 0) && block.is_sorted(), "{longest} bytes in {count} lanes");
            }
        }
    }
}
