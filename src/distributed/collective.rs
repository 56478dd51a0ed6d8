//! How collectives go over a transport, on the bytes of tensors: in slices, each brought to the host, exchanged, reduced and
//! brought back, so that no more of the host's memory is needed than for a few.
//!
//! A *part* of a slice is what one rank reduces and then gives to all; the others' values of it are received in *rooms* of one
//! size, which begin where elements of every dtype may.

use std::ops::Range;

use super::reduce::ReduceOp;
use super::staging::{Buffers, Staging, Steps};
use super::transport::{Call, Transport};
use crate::{DType, Device, Error, Result, Stream, Tensor};

/// Ranks' parts of a slice begin at multiples of this, where elements of every dtype may.
const ALIGN: usize = 64;

/// Which ranks of the job a group has, and this one's part in it.
pub(super) struct Membership {
    /// This rank's number in the group.
    pub rank: usize,
    /// The group's ranks as those of the job.
    pub ranks: Vec<usize>,
    /// What tells the group's messages from others'.
    pub context: u32,
    pub device: Device,
    /// What the collectives' copies run on, beside the work of others.
    pub stream: Stream,
    /// Whether calls are compared with the other ranks'.
    pub debug: bool,
    buffers: Buffers,
}

impl Membership {
    pub(super) fn new(rank: usize, ranks: Vec<usize>, context: u32, device: Device, debug: bool) -> Result<Membership> {
        let (stream, buffers) = (Stream::new(device)?, Buffers::default());
        Ok(Membership { rank, ranks, context, device, stream, debug, buffers })
    }
}

impl Membership {
    /// Does one call of the group's. Where it fails this rank leaves the job, for the others wait for it.
    pub(super) fn call<R>(
        &self,
        transport: &mut dyn Transport,
        op: &'static str,
        call: Option<String>,
        f: impl FnOnce(&mut Member) -> Result<R>,
    ) -> Result<R> {
        let mut m = Member { transport, of: self, op };
        let compared = call.filter(|_| self.debug).map_or(Ok(()), |call| m.compare(&call));
        let result = compared.and_then(|()| f(&mut m));
        if let Err(e) = &result {
            transport.leave(&format!("failed in {e}"));
        }
        result
    }
}

/// This rank in a group, for one call.
pub(super) struct Member<'a> {
    transport: &'a mut dyn Transport,
    of: &'a Membership,
    op: &'static str,
}

impl Member<'_> {
    fn rank(&self) -> usize {
        self.of.rank
    }

    fn size(&self) -> usize {
        self.of.ranks.len()
    }

    fn others(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank();
        (0..self.size()).filter(move |&other| other != rank)
    }

    /// Between ranks of the group; what is empty is not sent.
    fn exchange<'b>(
        &mut self,
        sends: impl IntoIterator<Item = (usize, &'b [u8])>,
        receives: impl IntoIterator<Item = (usize, &'b mut [u8])>,
    ) -> Result<()> {
        let ranks = &self.of.ranks;
        let sends: Vec<_> = sends.into_iter().filter(|(_, b)| !b.is_empty()).map(|(to, b)| (ranks[to], b)).collect();
        let receives = receives.into_iter().filter(|(_, b)| !b.is_empty());
        let mut receives: Vec<_> = receives.map(|(from, b)| (ranks[from], b)).collect();
        let call = Call { op: self.op, context: self.of.context };
        self.transport.exchange(call, &sends, &mut receives).map_err(|fault| fault.into_error(self.op))
    }

    /// What every rank gives, in the order of the ranks; all give as many bytes.
    fn all<const N: usize>(&mut self, own: [u8; N]) -> Result<Vec<[u8; N]>> {
        let mut all = vec![own; self.size()];
        let rank = self.rank();
        let receives = all.iter_mut().map(<[u8; N]>::as_mut_slice).enumerate().filter(|(other, _)| *other != rank);
        self.exchange(self.others().map(|other| (other, own.as_slice())), receives)?;
        Ok(all)
    }

    /// Fails where the ranks do not all make this call.
    fn compare(&mut self, call: &str) -> Result<()> {
        let mut text = [0; 120];
        for (to, from) in text.iter_mut().zip(call.bytes()) {
            *to = from;
        }
        let calls = self.all(text)?;
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

/// The ranks of the job in this rank's new group, and the context of its messages; none without a color. Contexts are one more
/// than any that a rank of the group has had, so that groups that share a rank differ in theirs.
pub(super) fn split(m: &mut Member, color: Option<u32>, key: i64) -> Result<Option<(Vec<usize>, u32)>> {
    let next = *m.transport.next_context();
    let mut own = [0; 20];
    own[..8].copy_from_slice(&color.map_or(-1, i64::from).to_ne_bytes());
    own[8..16].copy_from_slice(&key.to_ne_bytes());
    own[16..].copy_from_slice(&next.to_ne_bytes());
    let i64_at = |bytes: &[u8; 20], at: usize| i64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let all = m.all(own)?;
    let first = all.iter().map(|b| u32::from_ne_bytes([b[16], b[17], b[18], b[19]])).max().expect("this rank's");
    let mut colors: Vec<i64> = all.iter().map(|bytes| i64_at(bytes, 0)).filter(|&color| color >= 0).collect();
    colors.sort_unstable();
    colors.dedup();
    *m.transport.next_context() = first + colors.len() as u32;
    let Some(color) = color.map(i64::from) else { return Ok(None) };
    let mut members: Vec<(i64, usize)> =
        (0..all.len()).filter(|&r| i64_at(&all[r], 0) == color).map(|r| (i64_at(&all[r], 8), r)).collect();
    members.sort_unstable();
    let context = first + colors.iter().position(|&c| c == color).expect("one of them") as u32;
    Ok(Some((members.into_iter().map(|(_, r)| m.of.ranks[r]).collect(), context)))
}

/// The ranks' parts of so many bytes.
fn parts(bytes: usize, ranks: usize) -> Vec<Range<usize>> {
    let share = bytes.div_ceil(ranks).next_multiple_of(ALIGN);
    (0..ranks).map(|rank| (rank * share).min(bytes)..((rank + 1) * share).min(bytes)).collect()
}

/// Slices of a part of so many bytes that each of the ranks has, and the distance from a rank's part of a slice to the next
/// rank's.
fn cut(
    m: &Member,
    bytes: usize,
    ranks: usize,
) -> (impl ExactSizeIterator<Item = Range<usize>> + Clone + Send + use<>, usize) {
    let slice = (m.transport.slice() / ranks).next_multiple_of(ALIGN);
    let slices = (0..bytes).step_by(slice).map(move |at| at..(at + slice).min(bytes));
    (slices, slice.min(bytes).next_multiple_of(ALIGN))
}

/// A slice of the parts of so many bytes as bytes of part p.
fn of_part(p: usize, bytes: usize, slice: &Range<usize>) -> Range<usize> {
    p * bytes + slice.start..p * bytes + slice.end
}

/// Bytes that begin where elements of every dtype may.
struct Aligned {
    words: Vec<u64>,
    bytes: usize,
}

impl Aligned {
    fn new(bytes: usize) -> Aligned {
        Aligned { words: vec![0; bytes.div_ceil(8)], bytes }
    }

    fn get(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.bytes]
    }
}

/// All ranks' values of this rank's part, reduced into `result`: `own` and what is in `others`, in the order of the ranks.
fn reduce_part(rank: usize, own: &[u8], others: &[u8], (dtype, op): (DType, ReduceOp), result: &mut [u8]) {
    if own.is_empty() {
        return;
    }
    let mut values: Vec<&[u8]> = others.chunks(own.len().next_multiple_of(ALIGN)).map(|v| &v[..own.len()]).collect();
    values.insert(rank, own);
    op.reduce(dtype, &values, result);
}

/// Where the others' values of a part of so many bytes are received.
fn rooms(others: &mut [u8], bytes: usize) -> impl Iterator<Item = &mut [u8]> {
    others.chunks_mut(bytes.next_multiple_of(ALIGN).max(1)).map(move |room| &mut room[..bytes])
}

/// Every rank reduces its part of a slice, in the order of the ranks, and all receive it from there: two of the slice's bytes
/// go out and come in for each of its bytes, however many ranks there are, and all have the same bits.
pub(super) fn all_reduce(m: &mut Member, tensors: &[Tensor], dtype: DType, op: ReduceOp) -> Result<()> {
    let (rank, n) = (m.rank(), m.size());
    let (slices, buffer) = cut(m, tensors.iter().map(Tensor::numel).sum(), 1);
    let buffers = &m.of.buffers;
    let room = parts(buffer, n)[0].len().next_multiple_of(ALIGN);
    let (mut others, mut reduced) = (Aligned::new(room * (n - 1)), Aligned::new(room));
    let exchange = |host: &mut [u8], slice: Range<usize>| {
        let parts = parts(slice.len(), n);
        let own = parts[rank].clone();
        let values = &mut others.get()[..own.len().next_multiple_of(ALIGN) * (n - 1)];
        m.exchange(m.others().map(|p| (p, &host[parts[p].clone()])), m.others().zip(rooms(values, own.len())))?;
        let reduced = &mut reduced.get()[..own.len()];
        reduce_part(rank, &host[own.clone()], values, (dtype, op), reduced);
        host[own].copy_from_slice(reduced);
        let mut rest = host;
        let mut receives = Vec::with_capacity(n);
        for (p, part) in parts.iter().enumerate() {
            let (this, after) = rest.split_at_mut(part.len());
            rest = after;
            if p != rank {
                receives.push((p, this));
            }
        }
        m.exchange(m.others().map(|p| (p, &*reduced)), receives)
    };
    let read = |staging: &mut Staging, slice| staging.read_all(tensors, slice);
    let write = |staging: &mut Staging, slice| staging.write_all(tensors, slice);
    buffers.in_slices(tensors[0].device(), buffer, slices, Steps { read, exchange, write })
}

/// Along a binomial tree whose root is the root.
pub(super) fn broadcast(m: &mut Member, tensors: &[Tensor], root: usize) -> Result<()> {
    let (slices, buffer) = cut(m, tensors.iter().map(Tensor::numel).sum(), 1);
    let buffers = &m.of.buffers;
    let n = m.size();
    let rank = (m.rank() + n - root) % n;
    let of_group = |rank: usize| (rank + root) % n;
    // A rank has its bytes from the one without its lowest bit, and gives them to those with one lower bit set.
    let lowest = if rank == 0 { n.next_power_of_two() } else { 1 << rank.trailing_zeros() };
    let exchange = |host: &mut [u8], slice: Range<usize>| {
        if rank != 0 {
            m.exchange([], [(of_group(rank - lowest), &mut host[..slice.len()])])?;
        }
        let host = &host[..slice.len()];
        let bits = std::iter::successors(Some(lowest / 2), |bit| Some(bit / 2)).take_while(|&bit| bit > 0);
        m.exchange(bits.map(|bit| rank + bit).filter(|&to| to < n).map(|to| (of_group(to), host)), [])
    };
    let read = |staging: &mut Staging, slice| if rank == 0 { staging.read_all(tensors, slice) } else { Ok(()) };
    let write = |staging: &mut Staging, slice| if rank != 0 { staging.write_all(tensors, slice) } else { Ok(()) };
    buffers.in_slices(tensors[0].device(), buffer, slices, Steps { read, exchange, write })
}

/// `own` of every rank to `to`, in the order of the ranks.
pub(super) fn all_gather(m: &mut Member, own: &Tensor, to: &Tensor) -> Result<()> {
    let (rank, n, bytes) = (m.rank(), m.size(), own.numel());
    let (slices, room) = cut(m, bytes, n);
    let buffers = &m.of.buffers;
    let read = |staging: &mut Staging, slice| staging.read(rank * room, own, slice);
    let exchange = |host: &mut [u8], slice: Range<usize>| {
        let mut sent: &[u8] = &[];
        let mut receives = Vec::with_capacity(n);
        for (p, part) in host.chunks_mut(room).enumerate() {
            match p == rank {
                true => sent = &part[..slice.len()],
                false => receives.push((p, &mut part[..slice.len()])),
            }
        }
        m.exchange(m.others().map(|p| (p, sent)), receives)
    };
    let write = |staging: &mut Staging, slice: Range<usize>| {
        (0..n).try_for_each(|p| staging.write(p * room, to, of_part(p, bytes, &slice)))
    };
    buffers.in_slices(own.device(), n * room, slices, Steps { read, exchange, write })
}

/// To `to` this rank's part of what becomes of all ranks' `from`, in the order of the ranks.
pub(super) fn reduce_scatter(m: &mut Member, from: &Tensor, to: &Tensor, dtype: DType, op: ReduceOp) -> Result<()> {
    let (rank, n, bytes) = (m.rank(), m.size(), to.numel());
    let (slices, room) = cut(m, bytes, n);
    let buffers = &m.of.buffers;
    let (mut others, mut reduced) = (Aligned::new(room * (n - 1)), Aligned::new(room));
    let read = |staging: &mut Staging, slice: Range<usize>| {
        (0..n).try_for_each(|p| staging.read(p * room, from, of_part(p, bytes, &slice)))
    };
    let exchange = |host: &mut [u8], slice: Range<usize>| {
        let values = &mut others.get()[..slice.len().next_multiple_of(ALIGN) * (n - 1)];
        let sends = m.others().map(|p| (p, &host[p * room..][..slice.len()]));
        m.exchange(sends, m.others().zip(rooms(values, slice.len())))?;
        let reduced = &mut reduced.get()[..slice.len()];
        reduce_part(rank, &host[rank * room..][..slice.len()], values, (dtype, op), reduced);
        host[..slice.len()].copy_from_slice(reduced);
        Ok(())
    };
    let write = |staging: &mut Staging, slice| staging.write(0, to, slice);
    buffers.in_slices(from.device(), n * room, slices, Steps { read, exchange, write })
}

/// Part p of `from` to rank p; from there to part p of `to`.
pub(super) fn all_to_all(m: &mut Member, from: &Tensor, to: &Tensor) -> Result<()> {
    let (rank, n) = (m.rank(), m.size());
    let bytes = from.numel() / n;
    let (slices, room) = cut(m, bytes, n);
    let buffers = &m.of.buffers;
    let read = |staging: &mut Staging, slice: Range<usize>| {
        (0..n).try_for_each(|p| staging.read(p * room, from, of_part(p, bytes, &slice)))
    };
    // What is received is behind what is sent.
    let exchange = |host: &mut [u8], slice: Range<usize>| {
        let (out, received) = host.split_at_mut(n * room);
        received[rank * room..][..slice.len()].copy_from_slice(&out[rank * room..][..slice.len()]);
        let receives = received.chunks_mut(room).map(|part| &mut part[..slice.len()]).enumerate();
        let sends = m.others().map(|p| (p, &out[p * room..][..slice.len()]));
        m.exchange(sends, receives.filter(|(p, _)| *p != rank))
    };
    let write = |staging: &mut Staging, slice: Range<usize>| {
        (0..n).try_for_each(|p| staging.write((n + p) * room, to, of_part(p, bytes, &slice)))
    };
    buffers.in_slices(from.device(), 2 * n * room, slices, Steps { read, exchange, write })
}

pub(super) fn send(m: &mut Member, bytes: &Tensor, to: usize) -> Result<()> {
    let (slices, buffer) = cut(m, bytes.numel(), 1);
    let buffers = &m.of.buffers;
    let read = |staging: &mut Staging, slice| staging.read(0, bytes, slice);
    let exchange = |host: &mut [u8], slice: Range<usize>| m.exchange([(to, &host[..slice.len()])], []);
    buffers.in_slices(bytes.device(), buffer, slices, Steps { read, exchange, write: |_: &mut Staging, _| Ok(()) })
}

pub(super) fn recv(m: &mut Member, bytes: &Tensor, from: usize) -> Result<()> {
    let (slices, buffer) = cut(m, bytes.numel(), 1);
    let buffers = &m.of.buffers;
    let exchange = |host: &mut [u8], slice: Range<usize>| m.exchange([], [(from, &mut host[..slice.len()])]);
    let write = |staging: &mut Staging, slice| staging.write(0, bytes, slice);
    buffers.in_slices(bytes.device(), buffer, slices, Steps { read: |_: &mut Staging, _| Ok(()), exchange, write })
}
