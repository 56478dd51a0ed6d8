//! A toy allocator that produces every kind of trace entry.

use super::*;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;
/// The address of the reservation, far above 2^31 to test large addresses.
const RESERVATION: u64 = 1 << 45;

pub struct Toy {
    pub history: History,
    segments: Vec<SegmentInfo>,
    next_address: u64,
}

impl Toy {
    pub fn new(max_entries: usize) -> Result<Toy> {
        let history = History::new();
        // Under Miri no stacks are captured, because that is slow.
        history.record_memory_history(HistoryOptions { max_entries, stacks: !cfg!(miri), ..Default::default() })?;
        Ok(Toy { history, segments: Vec::new(), next_address: 0x7f00_0000_0000 })
    }

    /// Makes a toy allocator and performs these steps.
    pub fn after(max_entries: usize, steps: &[(u8, u32)]) -> Result<Toy> {
        let mut toy = Toy::new(max_entries)?;
        steps.iter().for_each(|&step| toy.step(step));
        Ok(toy)
    }

    /// Performs one action of an allocator; `value` selects the block and the size.
    pub fn step(&mut self, (kind, value): (u8, u32)) {
        let value = u64::from(value);
        match kind % 9 {
            0..=2 => self.alloc(value % (3 * MIB) + 1, value % 3),
            3 => self.free(value as usize, true),
            4 => self.free(value as usize, false),
            5 => self.complete(value as usize),
            6 => self.release(),
            7 if value % 2 == 0 => self.map(),
            7 => self.unmap(),
            _ if value % 2 == 0 => _ = self.history.record(TraceAction::Oom, 123 * MIB, value + 1, 0),
            _ => _ = self.history.record(TraceAction::Snapshot, 0, self.active(), 0),
        }
    }

    pub fn alloc(&mut self, requested: u64, stream: u64) {
        let size = requested.next_multiple_of(512);
        let fits = |b: &BlockInfo| b.state == BlockState::Inactive && b.size >= size;
        let segment = match self.segments.iter().position(|s| s.stream == stream && s.blocks.iter().any(fits)) {
            Some(index) => index,
            None => {
                let total = size.next_multiple_of(PAGE);
                self.history.record(TraceAction::SegmentAlloc, self.next_address, total, stream as u32);
                self.segments.push(segment(self.next_address, total, stream));
                self.next_address += total;
                self.segments.len() - 1
            }
        };
        let blocks = &mut self.segments[segment].blocks;
        let index = blocks.iter().position(fits).expect("as found");
        let rest = blocks[index].size - size;
        let address = blocks[index].address;
        let frames = self.history.record(TraceAction::Alloc, address, requested, stream as u32).frames();
        blocks[index] =
            BlockInfo { address, size, requested_size: requested, state: BlockState::ActiveAllocated, frames };
        if rest > 0 {
            blocks.insert(index + 1, free_block(address + size, rest));
        }
    }

    /// Returns the `n`th block in that state, where `n` is taken modulo the number of such blocks.
    fn find(&mut self, state: BlockState, n: usize) -> Option<(usize, usize)> {
        let all = self.segments.iter().enumerate();
        let all = all.flat_map(|(s, segment)| segment.blocks.iter().enumerate().map(move |(b, block)| (s, b, block)));
        let found: Vec<_> = all.filter(|(_, _, b)| b.state == state).map(|(s, b, _)| (s, b)).collect();
        found.get(n.checked_rem(found.len())?).copied()
    }

    pub fn free(&mut self, n: usize, at_once: bool) {
        if let Some((s, b)) = self.find(BlockState::ActiveAllocated, n) {
            let segment = &mut self.segments[s];
            let block = &mut segment.blocks[b];
            block.state = BlockState::ActivePendingFree;
            let (address, requested) = (block.address, block.requested_size);
            self.history.record(TraceAction::FreeRequested, address, requested, segment.stream as u32);
            if at_once {
                self.finish(s, b);
            }
        }
    }

    fn complete(&mut self, n: usize) {
        if let Some((s, b)) = self.find(BlockState::ActivePendingFree, n) {
            self.finish(s, b);
        }
    }

    fn finish(&mut self, s: usize, b: usize) {
        let segment = &mut self.segments[s];
        let block = &segment.blocks[b];
        self.history.record(TraceAction::FreeCompleted, block.address, block.requested_size, segment.stream as u32);
        segment.blocks[b] = free_block(block.address, block.size);
        segment.blocks.dedup_by(|next, block| {
            let both_free = block.state == BlockState::Inactive && next.state == BlockState::Inactive;
            block.size += if both_free { next.size } else { 0 };
            both_free
        });
    }

    fn release(&mut self) {
        let history = &self.history;
        self.segments.retain(|s| {
            let keep = s.is_expandable || s.active_size() > 0;
            if !keep {
                history.record(TraceAction::SegmentFree, s.address, s.total_size, s.stream as u32);
            }
            keep
        });
    }

    fn map(&mut self) {
        let index = self.segments.iter().position(|s| s.is_expandable).unwrap_or_else(|| {
            self.segments.push(SegmentInfo { is_expandable: true, blocks: vec![], ..segment(RESERVATION, 0, 0) });
            self.segments.len() - 1
        });
        let reservation = &mut self.segments[index];
        let end = reservation.address + reservation.total_size;
        self.history.record(TraceAction::SegmentMap, end, PAGE, 0);
        reservation.total_size += PAGE;
        match reservation.blocks.last_mut() {
            Some(last) if last.state == BlockState::Inactive => last.size += PAGE,
            _ => reservation.blocks.push(free_block(end, PAGE)),
        }
    }

    fn unmap(&mut self) {
        let Some(index) = self.segments.iter().position(|s| s.is_expandable) else { return };
        let reservation = &mut self.segments[index];
        let last = reservation.blocks.last_mut().expect("segments have blocks");
        if last.state == BlockState::Inactive && last.size >= PAGE {
            reservation.total_size -= PAGE;
            last.size -= PAGE;
            if last.size == 0 {
                reservation.blocks.pop();
            }
            let end = reservation.address + reservation.total_size;
            self.history.record(TraceAction::SegmentUnmap, end, PAGE, 0);
            if reservation.total_size == 0 {
                self.segments.remove(index);
            }
        }
    }

    fn active(&self) -> u64 {
        self.segments.iter().map(SegmentInfo::active_size).sum()
    }

    pub fn snapshot(&self) -> Snapshot {
        let powers = BTreeMap::from([("1".to_owned(), Setting::Int(0)), ("64".to_owned(), Setting::Int(8))]);
        let settings = [
            ("CLAYSTONE_ALLOC_CONF", Setting::Text("max_split_size_mb:64".into())),
            ("max_split_size", Setting::Int(i64::MAX)),
            ("garbage_collection_threshold", Setting::Float(0.8)),
            ("expandable_segments", Setting::Bool(true)),
            ("roundup_power2_divisions", Setting::Map(powers)),
            ("per_stream", Setting::List(vec![Setting::Int(-1), Setting::None])),
            ("trace_alloc_max_entries", Setting::Int(self.history.max_entries() as i64)),
            ("trace_alloc_overflowed", Setting::Bool(self.history.overwritten() > 0)),
        ];
        Snapshot {
            segments: self.segments.clone(),
            device_traces: vec![self.history.entries()],
            allocator_settings: settings.map(|(key, value)| (key.to_owned(), value)).into(),
            external_annotations: annotations(0),
            ..Snapshot::default()
        }
    }
}

fn segment(address: u64, total_size: u64, stream: u64) -> SegmentInfo {
    SegmentInfo {
        device: 0,
        address,
        total_size,
        stream,
        segment_type: if total_size == PAGE { SegmentType::Small } else { SegmentType::Large },
        segment_pool_id: (0, stream as i64 % 2),
        is_expandable: false,
        frames: [].into(),
        blocks: vec![free_block(address, total_size)],
    }
}

fn free_block(address: u64, size: u64) -> BlockInfo {
    BlockInfo { address, size, requested_size: 0, state: BlockState::Inactive, frames: [].into() }
}
