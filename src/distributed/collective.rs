//! The algorithms of the collectives, which treat tensors as bytes. A tensor is cut into slices. Each slice is copied to the host,
//! exchanged, reduced and copied back, so staging buffers for a few slices suffice. A [`Plan`] defines the exchange of a slice. If all
//! ranks are on one machine, several threads execute the plan concurrently.
//!
//! A *part* of a slice is the range of bytes that one rank reduces and then sends to all ranks.

use std::ops::Range;
use std::sync::Mutex;

use super::plan::{self, ALIGN_BYTES, PIECE_BYTES, Phase, Plan};
use super::reduce::ReduceOp;
use super::staging::{SlicePipeline, Staging};
use super::transport::{Call, Transport};
use crate::internal::lock;
use crate::{DType, Device, Error, Result, Stream, Tensor};

/// The ranks of a group, and the resources that this rank needs for the group's collectives.
pub(super) struct Membership {
    /// This rank's number in the group, from 0.
    pub rank: usize,
    /// The number in the job of each rank of the group.
    pub ranks: Vec<usize>,
    /// Distinguishes messages of this group from messages of other groups, like MPI's context id.
    pub context: u32,
    pub device: Device,
    /// The stream on which collectives copy. Its copies overlap work on other streams.
    pub stream: Stream,
    /// Whether each call is compared with the calls of the other ranks before it runs.
    pub debug: bool,
    buffers: SlicePipeline,
    /// The memory of scratch blocks, kept from one collective to the next to avoid allocations.
    scratch: Mutex<Vec<u64>>,
}

impl Membership {
    pub(super) fn new(rank: usize, ranks: Vec<usize>, context: u32, device: Device, debug: bool) -> Result<Membership> {
        let (stream, buffers, scratch) = (Stream::new(device)?, SlicePipeline::default(), Mutex::default());
        Ok(Membership { rank, ranks, context, device, stream, debug, buffers, scratch })
    }

    /// Runs one call of the group. If the call fails, this rank leaves the job, so that ranks waiting for its messages fail instead of hanging.
    pub(super) fn call<R>(
        &self,
        transport: &mut dyn Transport,
        op: &'static str,
        call: Option<String>,
        f: impl FnOnce(&mut Member) -> Result<R>,
    ) -> Result<R> {
        let mut m = Member { transport, membership: self, op };
        let compared = call.filter(|_| self.debug).map_or(Ok(()), |call| m.compare(&call));
        let result = compared.and_then(|()| f(&mut m));
        if let Err(e) = &result {
            transport.leave(&format!("failed in {e}"));
        }
        result
    }
}

/// This rank of a group, during one call.
pub(super) struct Member<'a> {
    transport: &'a mut dyn Transport,
    membership: &'a Membership,
    op: &'static str,
}

impl Member<'_> {
    fn rank(&self) -> usize {
        self.membership.rank
    }

    fn size(&self) -> usize {
        self.membership.ranks.len()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.size()).filter(move |&other| other != rank)
    }

    fn call(&self) -> Call {
        Call { op: self.op, context: self.membership.context }
    }

    /// Returns the address of a message to or from rank `p` of the group: that rank's number in the job, and the block's number.
    fn message(&self, p: usize, block: usize) -> (usize, usize) {
        (self.membership.ranks[p], block)
    }

    /// Reads, exchanges and writes each slice, through staging buffers of `buffer` bytes. `blocks` maps a slice to its blocks' ascending ranges.
    fn run_in_slices<R, W>(
        &mut self,
        device: Device,
        buffer: usize,
        slices: impl ExactSizeIterator<Item = Range<usize>> + Send + 'static,
        plan: &Plan,
        blocks: impl Fn(&Range<usize>) -> Vec<Range<usize>>,
        (read, write): (R, W),
    ) -> Result<()>
    where
        R: Fn(&mut Staging, Range<usize>) -> Result<()> + Send + 'static,
        W: Fn(&mut Staging, Range<usize>) -> Result<()> + Send + 'static,
    {
        let (membership, call) = (self.membership, self.call());
        let (lanes, piece) = match self.transport.lanes(&membership.ranks) {
            Some(lanes) => (lanes.count(), PIECE_BYTES),
            None => (1, usize::MAX),
        };
        let scratch = if plan.phases.iter().any(|phase| phase.reduces.is_some()) { self.size() - 1 } else { 0 };
        let mut words = lock(&membership.scratch);
        let exchange = |host: &mut [u8], slice: Range<usize>| {
            let blocks = split_blocks(host, blocks(&slice));
            let block = piece.min(blocks[plan.own].len()).next_multiple_of(ALIGN_BYTES).max(ALIGN_BYTES);
            if words.len() * 8 < block * scratch * lanes {
                *words = vec![0; block * scratch * lanes / 8];
            }
            let mut chunks = bytemuck::cast_slice_mut::<u64, u8>(&mut words).chunks_mut(block);
            let scratch = (0..lanes).map(|_| chunks.by_ref().take(scratch).collect()).collect();
            let lanes = plan::cut_into_lanes(blocks, piece, scratch);
            let exchanged = match self.transport.lanes(&membership.ranks) {
                Some(on_node) => on_node.exchange(call, plan, lanes),
                None => lanes.into_iter().try_for_each(|mut lane| {
                    while lane.phase(plan).is_some() {
                        let (sends, mut receives) = lane.messages(plan);
                        self.transport.exchange(call, &sends, &mut receives)?;
                        lane.end_phase(plan);
                    }
                    Ok(())
                }),
            };
            exchanged.map_err(|fault| fault.into_error(call.op))
        };
        membership.buffers.run_in_slices(device, buffer, slices, (read, exchange, write))
    }

    /// Gathers a few bytes from every rank, in the order of the ranks.
    fn all_gather_bytes<const N: usize>(&mut self, own: [u8; N]) -> Result<Vec<[u8; N]>> {
        let mut all = vec![own; self.size()];
        let (rank, ranks) = (self.rank(), &self.membership.ranks);
        let values = all.iter_mut().zip(ranks).enumerate().filter(|(other, _)| *other != rank);
        let mut receives: Vec<_> = values.map(|(_, (value, &from))| (from, value.as_mut_slice())).collect();
        let sends: Vec<_> = self.others().map(|other| (ranks[other], own.as_slice())).collect();
        let exchanged = self.transport.exchange(self.call(), &sends, &mut receives);
        exchanged.map_err(|fault| fault.into_error(self.op))?;
        Ok(all)
    }

    /// Returns an error unless all ranks have made the same call.
    fn compare(&mut self, call: &str) -> Result<()> {
        let mut text = [0; 120];
        for (to, from) in text.iter_mut().zip(call.bytes()) {
            *to = from;
        }
        let calls = self.all_gather_bytes(text)?;
        let shown = |text: &[u8; 120]| String::from_utf8_lossy(text).trim_end_matches('\0').to_string();
        match calls.iter().position(|other| *other != text) {
            None => Ok(()),
            Some(rank) => {
                let reason = format!("calls {}, this one ({}) {}", shown(&calls[rank]), self.rank(), shown(&text));
                Err(Error::Rank { op: self.op, rank, reason })
            }
        }
    }
}

/// Splits a group by color. Returns the ranks (numbers in the job) of this rank's new group, and the context of its messages. `None` without
/// a color. A new context is greater than all contexts in use by the ranks, so no two groups with a common rank have the same context.
pub(super) fn split(m: &mut Member, color: Option<u32>, key: i64) -> Result<Option<(Vec<usize>, u32)>> {
    let next = m.transport.position().next_context;
    let mut own = [0; 20];
    own[..8].copy_from_slice(&color.map_or(-1, i64::from).to_ne_bytes());
    own[8..16].copy_from_slice(&key.to_ne_bytes());
    own[16..].copy_from_slice(&next.to_ne_bytes());
    let i64_at = |bytes: &[u8; 20], at: usize| i64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let all = m.all_gather_bytes(own)?;
    let first = all.iter().map(|b| u32::from_ne_bytes([b[16], b[17], b[18], b[19]])).max().expect("this rank's");
    let mut colors: Vec<i64> = all.iter().map(|bytes| i64_at(bytes, 0)).filter(|&color| color >= 0).collect();
    colors.sort_unstable();
    colors.dedup();
    m.transport.position().next_context = first + colors.len() as u32;
    let Some(color) = color.map(i64::from) else { return Ok(None) };
    let mut members: Vec<(i64, usize)> =
        (0..all.len()).filter(|&r| i64_at(&all[r], 0) == color).map(|r| (i64_at(&all[r], 8), r)).collect();
    members.sort_unstable();
    let context = first + colors.iter().position(|&c| c == color).expect("one of them") as u32;
    Ok(Some((members.into_iter().map(|(_, r)| m.membership.ranks[r]).collect(), context)))
}

/// Divides `bytes` bytes into one aligned range for each rank.
fn rank_ranges(bytes: usize, ranks: usize) -> Vec<Range<usize>> {
    let share = bytes.div_ceil(ranks).next_multiple_of(ALIGN_BYTES);
    (0..ranks).map(|rank| (rank * share).min(bytes)..((rank + 1) * share).min(bytes)).collect()
}

/// Cuts tensors of `bytes` bytes, one for each rank, into slices. Also returns the distance in bytes between two ranks' blocks in a buffer.
fn cut_slices(
    m: &mut Member,
    bytes: usize,
    ranks: usize,
) -> (impl ExactSizeIterator<Item = Range<usize>> + Send + use<>, usize) {
    let slice = (m.transport.position().slice_bytes / ranks).next_multiple_of(ALIGN_BYTES);
    let slices = (0..bytes).step_by(slice).map(move |at| at..(at + slice).min(bytes));
    (slices, slice.min(bytes).next_multiple_of(ALIGN_BYTES))
}

/// Returns the range of a slice within part `p`, where parts of `bytes` bytes follow each other.
fn part_range(p: usize, bytes: usize, slice: &Range<usize>) -> Range<usize> {
    p * bytes + slice.start..p * bytes + slice.end
}

/// Splits a slice's buffer into blocks with these ranges, which must be in ascending order.
fn split_blocks(mut host: &mut [u8], ranges: Vec<Range<usize>>) -> Vec<&mut [u8]> {
    let mut at = 0;
    let mut one = |range: Range<usize>| {
        let (_, rest) = std::mem::take(&mut host).split_at_mut(range.start - at);
        let (this, rest) = rest.split_at_mut(range.len());
        (host, at) = (rest, range.end);
        this
    };
    ranges.into_iter().map(&mut one).collect()
}

/// Returns a function that maps a slice to the ranges of its blocks: `block` bytes apart, and each as long as the slice.
fn equal_blocks(block: usize, blocks: usize) -> impl Fn(&Range<usize>) -> Vec<Range<usize>> {
    move |slice| (0..blocks).map(|p| p * block..p * block + slice.len()).collect()
}

/// Sends every other rank that rank's part. Receives this rank's part from all other ranks, to be reduced.
fn scatter_phase(m: &Member, dtype: DType, op: ReduceOp) -> Phase {
    let sends = m.others().map(|p| m.message(p, p)).collect();
    let receives = m.others().enumerate().map(|(i, p)| m.message(p, m.size() + i)).collect();
    Phase { sends, receives, reduces: Some((dtype, op)) }
}

/// Sends this rank's reduced part to all other ranks, and receives their reduced parts.
fn gather_phase(m: &Member) -> Phase {
    let sends = m.others().map(|p| m.message(p, m.rank())).collect();
    Phase { sends, receives: m.others().map(|p| m.message(p, p)).collect(), reduces: None }
}

fn shallow_clones(tensors: &[Tensor]) -> Vec<Tensor> {
    tensors.iter().map(Tensor::shallow_clone).collect()
}

/// Every rank reduces its part of a slice and sends the result to all ranks, so that all ranks get the same bits. For each byte of a slice
/// a rank sends and receives fewer than two bytes, for any number of ranks.
pub(super) fn all_reduce(m: &mut Member, tensors: &[Tensor], dtype: DType, op: ReduceOp) -> Result<()> {
    let n = m.size();
    let (slices, buffer) = cut_slices(m, tensors.iter().map(Tensor::numel).sum(), 1);
    let plan = Plan { phases: vec![scatter_phase(m, dtype, op), gather_phase(m)], own: m.rank() };
    let (from, to) = (shallow_clones(tensors), shallow_clones(tensors));
    let read = move |staging: &mut Staging, slice| staging.read_all(&from, slice);
    let write = move |staging: &mut Staging, slice| staging.write_all(&to, slice);
    m.run_in_slices(tensors[0].device(), buffer, slices, &plan, |slice| rank_ranges(slice.len(), n), (read, write))
}

/// Exchanges tensors as one block, by these phases. Reads the block from the tensors if `reads`, and otherwise writes it to them.
fn relay(m: &mut Member, tensors: &[Tensor], phases: Vec<Phase>, reads: bool) -> Result<()> {
    let (slices, buffer) = cut_slices(m, tensors.iter().map(Tensor::numel).sum(), 1);
    let (from, to) = (shallow_clones(tensors), shallow_clones(tensors));
    let read = move |staging: &mut Staging, slice| if reads { staging.read_all(&from, slice) } else { Ok(()) };
    let write = move |staging: &mut Staging, slice| if reads { Ok(()) } else { staging.write_all(&to, slice) };
    let plan = Plan { phases, own: 0 };
    m.run_in_slices(tensors[0].device(), buffer, slices, &plan, equal_blocks(buffer, 1), (read, write))
}

/// Broadcasts along a binomial tree, in about log2(ranks) steps.
pub(super) fn broadcast(m: &mut Member, tensors: &[Tensor], root: usize) -> Result<()> {
    let n = m.size();
    let rank = (m.rank() + n - root) % n;
    let at = |rank: usize| m.message((rank + root) % n, 0);
    // In the binomial tree, a rank's parent is its number without the lowest set bit; its children are its number plus each lower bit.
    let lowest = if rank == 0 { n.next_power_of_two() } else { 1 << rank.trailing_zeros() };
    let receives = if rank == 0 { Vec::new() } else { vec![at(rank - lowest)] };
    let bits = std::iter::successors(Some(lowest / 2), |bit| Some(bit / 2)).take_while(|&bit| bit > 0);
    let sends = bits.map(|bit| rank + bit).filter(|&to| to < n).map(at).collect();
    let phases = vec![Phase { receives, ..Phase::default() }, Phase { sends, ..Phase::default() }];
    relay(m, tensors, phases, rank == 0)
}

/// Concatenates the tensors `own` of all ranks, in the order of the ranks, and writes the result to `to`.
pub(super) fn all_gather(m: &mut Member, own: &Tensor, to: &Tensor) -> Result<()> {
    let (rank, n, bytes) = (m.rank(), m.size(), own.numel());
    let (slices, block) = cut_slices(m, bytes, n);
    let plan = Plan { phases: vec![gather_phase(m)], own: rank };
    let (from, to) = (own.shallow_clone(), to.shallow_clone());
    let read = move |staging: &mut Staging, slice| staging.read(rank * block, &from, slice);
    let write = move |staging: &mut Staging, slice: Range<usize>| {
        (0..n).try_for_each(|p| staging.write(p * block, &to, part_range(p, bytes, &slice)))
    };
    m.run_in_slices(own.device(), n * block, slices, &plan, equal_blocks(block, n), (read, write))
}

/// Reduces the tensors `from` of all ranks, and writes this rank's part of the result to `to`.
pub(super) fn reduce_scatter(m: &mut Member, from: &Tensor, to: &Tensor, dtype: DType, op: ReduceOp) -> Result<()> {
    let (rank, n, bytes) = (m.rank(), m.size(), to.numel());
    let (slices, block) = cut_slices(m, bytes, n);
    let plan = Plan { phases: vec![scatter_phase(m, dtype, op)], own: rank };
    let (device, from, to) = (from.device(), from.shallow_clone(), to.shallow_clone());
    let read = move |staging: &mut Staging, slice: Range<usize>| {
        (0..n).try_for_each(|p| staging.read(p * block, &from, part_range(p, bytes, &slice)))
    };
    let write = move |staging: &mut Staging, slice| staging.write(rank * block, &to, slice);
    m.run_in_slices(device, n * block, slices, &plan, equal_blocks(block, n), (read, write))
}

/// Sends part p of `from` to rank p. Receives part p of `to` from rank p.
pub(super) fn all_to_all(m: &mut Member, from: &Tensor, to: &Tensor) -> Result<()> {
    let (rank, n) = (m.rank(), m.size());
    let bytes = from.numel() / n;
    let (slices, block) = cut_slices(m, bytes, n);
    // Blocks 0 to n - 1 are sent, and blocks n to 2 n - 1 are received. This rank's own part is not sent: it is read from its sent block.
    let sends = m.others().map(|p| m.message(p, p)).collect();
    let phase = Phase { sends, receives: m.others().map(|p| m.message(p, n + p)).collect(), reduces: None };
    let (device, from, to) = (from.device(), from.shallow_clone(), to.shallow_clone());
    let read = move |staging: &mut Staging, slice: Range<usize>| {
        (0..n).try_for_each(|p| staging.read(p * block, &from, part_range(p, bytes, &slice)))
    };
    let write = move |staging: &mut Staging, slice: Range<usize>| {
        let at = |p: usize| if p == rank { p } else { n + p };
        (0..n).try_for_each(|p| staging.write(at(p) * block, &to, part_range(p, bytes, &slice)))
    };
    let plan = Plan { phases: vec![phase], own: rank };
    m.run_in_slices(device, 2 * n * block, slices, &plan, equal_blocks(block, 2 * n), (read, write))
}

pub(super) fn send(m: &mut Member, bytes: &[Tensor], to: usize) -> Result<()> {
    let phase = Phase { sends: vec![m.message(to, 0)], ..Phase::default() };
    relay(m, bytes, vec![phase], true)
}

pub(super) fn recv(m: &mut Member, bytes: &[Tensor], from: usize) -> Result<()> {
    let phase = Phase { receives: vec![m.message(from, 0)], ..Phase::default() };
    relay(m, bytes, vec![phase], false)
}
