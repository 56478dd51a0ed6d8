//! The page of a memory snapshot. The history is undone from the final state to find when and where each block was live.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use claystone::storage::{BlockState, Frame, SegmentInfo, Setting, Snapshot, Stage, TraceAction, TraceEntry};
use serde_json::{Value, json};

use super::blob::{Blob, TextTable};

/// The start of a block or extent that existed before the first event, whose index is 0.
const BEFORE_HISTORY: i32 = -1;

/// Maximum number of events of a device: indices of events are i32.
const MAX_EVENTS: usize = i32::MAX as usize;

/// Builds the columns of a snapshot's page. `clock` is false if the times of the events are meaningless.
///
/// # Errors
/// The snapshot has neither events nor segments, or more than 2^31 events.
pub fn blob(snapshot: &Snapshot, clock: bool) -> Result<Blob, String> {
    let mut by_device: BTreeMap<u32, (Vec<&SegmentInfo>, &[TraceEntry])> = BTreeMap::new();
    for segment in &snapshot.segments {
        by_device.entry(segment.device).or_default().0.push(segment);
    }
    for (device, trace) in (0..).zip(&snapshot.device_traces).filter(|(_, trace)| !trace.is_empty()) {
        by_device.entry(device).or_default().1 = trace;
    }
    if by_device.is_empty() {
        return Err("the snapshot has neither events nor segments".to_owned());
    }
    if by_device.values().any(|(_, trace)| trace.len() > MAX_EVENTS) {
        return Err("the snapshot has more than 2^31 events of one device".to_owned());
    }
    let (mut blob, mut sites) = (Blob::default(), Sites::default());
    let mut devices = Vec::new();
    for (&device, (segments, trace)) in &by_device {
        devices.push(device_json(snapshot, device, trace));
        let memory = Memory::from_history(segments, trace, &mut sites);
        memory.columns(&mut blob, device, trace, clock);
    }
    blob.set("kind", "memory");
    blob.set("devices", devices);
    sites.columns(&mut blob);
    Ok(blob)
}

/// Returns the metadata of a device: spans of annotations, settings, and how much history was lost.
fn device_json(snapshot: &Snapshot, device: u32, trace: &[TraceEntry]) -> Value {
    let start = trace.first().map_or(0, |entry| entry.time_us);
    let mut open: HashMap<&str, Vec<u64>> = HashMap::new();
    let mut spans = Vec::new();
    for annotation in snapshot.external_annotations.iter().filter(|a| a.device == device) {
        let at = annotation.time_us;
        match annotation.stage {
            Stage::Start => open.entry(&annotation.name).or_default().push(at),
            // A span whose start is lost began before the first event.
            Stage::End => {
                let from = open.get_mut(&*annotation.name).and_then(Vec::pop).unwrap_or(start);
                spans.push((&*annotation.name, from, at));
            }
        }
    }
    let since = |at: u64| at as f64 - start as f64;
    let spans: Vec<Value> = spans.into_iter().map(|(name, from, to)| json!([name, since(from), since(to)])).collect();
    let setting = |key: &str| match snapshot.allocator_settings.get(key) {
        Some(Setting::Int(number)) => Value::from(*number),
        Some(Setting::Text(text)) => Value::from(&**text),
        _ => Value::Null,
    };
    json!({
        "device": device,
        "start_us": start,
        "spans": spans,
        "lost": setting("trace_alloc_overflowed"),
        "config": setting("CLAYSTONE_ALLOC_CONF"),
    })
}

/// The sites of allocations and frees: a context and a call stack. Each site is stored once.
#[derive(Default)]
struct Sites {
    texts: TextTable,
    /// Frame numbers by name, file and line.
    frames: HashMap<(u32, u32, u32), u32>,
    /// Site numbers by context and the numbers of the frames.
    sites: HashMap<(u32, Vec<u32>), u32>,
    /// Site numbers by context and the address of the stack, to look up fewer frames: many events have the same stack in memory.
    site_of_stack: HashMap<(u32, *const Frame), u32>,
}

impl Sites {
    /// Returns the number of the site with this context and stack, and adds the site if it is new.
    fn number(&mut self, context: &str, frames: &Arc<[Frame]>) -> u32 {
        let context = self.texts.number(context);
        if let Some(&site) = self.site_of_stack.get(&(context, frames.as_ptr())) {
            return site;
        }
        let mut numbers = Vec::with_capacity(frames.len());
        for frame in &**frames {
            let frame = (self.texts.number(&frame.name), self.texts.number(&frame.filename), frame.line);
            let next = self.frames.len() as u32;
            numbers.push(*self.frames.entry(frame).or_insert(next));
        }
        let next = self.sites.len() as u32;
        let site = *self.sites.entry((context, numbers)).or_insert(next);
        // An empty stack may have the address of another stack, so empty stacks are not stored.
        if !frames.is_empty() {
            self.site_of_stack.insert((context, frames.as_ptr()), site);
        }
        site
    }

    /// Adds the frames, sites and texts to the page, in the order of their numbers.
    fn columns(self, blob: &mut Blob) {
        let mut frames: Vec<(u32, (u32, u32, u32))> = self.frames.into_iter().map(|(frame, at)| (at, frame)).collect();
        frames.sort_unstable();
        blob.column("frame.name", frames.iter().map(|(_, (name, ..))| *name));
        blob.column("frame.file", frames.iter().map(|(_, (_, file, _))| *file));
        blob.column("frame.line", frames.iter().map(|(_, (.., line))| *line));
        let mut sites: Vec<(u32, u32, Vec<u32>)> =
            self.sites.into_iter().map(|((context, frames), number)| (number, context, frames)).collect();
        sites.sort_unstable_by_key(|(number, ..)| *number);
        blob.column("site.context", sites.iter().map(|(_, context, _)| *context));
        let ends = sites.iter().scan(0, |end, (_, _, frames)| {
            *end += frames.len() as u32;
            Some(*end)
        });
        blob.column("site.end", ends);
        blob.column("site.frames", sites.iter().flat_map(|(_, _, frames)| frames.iter().copied()));
        blob.set("texts", self.texts.into_json());
    }
}

/// A block from its allocation until it is free. Times are indices of events; the number of events means "never".
#[derive(Clone, Copy)]
struct Block {
    addr: u64,
    size: u64,
    stream: u64,
    start: i32,
    /// The event that requested the free, then (`done`) the event after which no stream used the block.
    requested: u32,
    done: u32,
    site: u32,
    /// The site that freed the block.
    freed: u32,
}

/// A range of memory that the driver provided, during a time in which its bounds do not change.
#[derive(Clone, Copy)]
struct Extent {
    addr: u64,
    size: u64,
    stream: u64,
    start: i32,
    end: u32,
    /// Whether the range is part of a segment that grows and shrinks by pages.
    pages: bool,
}

impl Extent {
    fn end_addr(&self) -> u64 {
        self.addr.saturating_add(self.size)
    }
}

/// A device's blocks and extents over time. The maps have the blocks and extents that exist at the current event of the walk.
#[derive(Default)]
struct Memory {
    blocks: Vec<Block>,
    extents: Vec<Extent>,
    live: HashMap<u64, Block>,
    held: BTreeMap<u64, Extent>,
    /// The number of events, which as a time means "never".
    never: u32,
    /// The site of allocations and frees of unknown origin.
    unknown_site: u32,
}

impl Memory {
    /// Walks from the last event to the first. A missing block or extent (the file is damaged, or has no segments) is assumed to have existed
    /// from the event to the end.
    fn from_history(segments: &[&SegmentInfo], trace: &[TraceEntry], sites: &mut Sites) -> Memory {
        let (never, unknown_site) = (trace.len() as u32, sites.number("", &[].into()));
        let mut memory = Memory { never, unknown_site, ..Memory::default() };
        for segment in segments {
            let SegmentInfo { address: addr, total_size: size, stream, is_expandable: pages, .. } = **segment;
            memory.held.insert(addr, Extent { addr, size, stream, start: BEFORE_HISTORY, end: never, pages });
            for block in segment.blocks.iter().filter(|block| block.state != BlockState::Inactive) {
                let site = sites.number("", &block.frames);
                let mut live = memory.unknown_block(block.address, block.requested_size, stream, site);
                if block.state == BlockState::ActivePendingFree {
                    live.requested = 0; // unknown, unless the history has the request
                }
                memory.live.insert(block.address, live);
            }
        }
        for (event, entry) in trace.iter().enumerate().rev() {
            let site = sites.number(&entry.compile_context, &entry.frames);
            memory.undo(event as u32, entry, site);
        }
        memory.blocks.extend(memory.live.drain().map(|(_, block)| block));
        memory.extents.extend(std::mem::take(&mut memory.held).into_values());
        memory.blocks.sort_unstable_by_key(|block| (block.start, block.addr));
        memory.extents.sort_unstable_by_key(|extent| (extent.start, extent.addr));
        memory
    }

    /// Returns a block that exists at the current event, with unknown start, end and sites.
    fn unknown_block(&self, addr: u64, size: u64, stream: u64, site: u32) -> Block {
        let Memory { never, unknown_site, .. } = *self;
        Block { addr, size, stream, start: BEFORE_HISTORY, requested: never, done: never, site, freed: unknown_site }
    }

    /// Undoes an event, so that the maps hold the blocks and extents before the event.
    fn undo(&mut self, event: u32, entry: &TraceEntry, site: u32) {
        let TraceEntry { addr, size, stream, .. } = *entry;
        let known = self.unknown_block(addr, size, stream, site);
        match entry.action {
            TraceAction::Alloc => {
                let block = self.live.remove(&addr).unwrap_or(known);
                self.blocks.push(Block { start: event as i32, size, stream, site, ..block });
            }
            TraceAction::FreeRequested => {
                let block = self.live.entry(addr).or_insert(Block { site: self.unknown_site, ..known });
                (block.requested, block.freed) = (event, site);
            }
            TraceAction::FreeCompleted => {
                let block = Block { requested: event, done: event, freed: site, site: self.unknown_site, ..known };
                self.blocks.extend(self.live.insert(addr, block));
            }
            TraceAction::SegmentAlloc => self.undo_creation(event, addr, size, stream, false),
            TraceAction::SegmentMap => self.undo_creation(event, addr, size, stream, true),
            TraceAction::SegmentFree | TraceAction::SegmentUnmap => {
                let pages = entry.action == TraceAction::SegmentUnmap;
                let extent = Extent { addr, size, stream, start: BEFORE_HISTORY, end: event, pages };
                self.extents.extend(self.held.insert(addr, extent));
            }
            _ => {}
        }
    }

    /// Undoes the creation of memory at `event`: marks the extents in this range as starting at the event.
    fn undo_creation(&mut self, event: u32, start: u64, size: u64, stream: u64, pages: bool) {
        let end = start.saturating_add(size);
        let mut overlaps = false;
        while let Some((&addr, &extent)) = self.held.range(..end).next_back().filter(|(_, e)| e.end_addr() > start) {
            overlaps = true;
            self.held.remove(&addr);
            let mut rest = |from: u64, to: u64| {
                if from < to {
                    self.held.insert(from, Extent { addr: from, size: to - from, ..extent });
                }
            };
            rest(addr, start);
            rest(end, extent.end_addr());
            let (from, to) = (addr.max(start), extent.end_addr().min(end));
            self.extents.push(Extent { addr: from, size: to - from, start: event as i32, ..extent });
        }
        if !overlaps {
            self.extents.push(Extent { addr: start, size, stream, start: event as i32, end: self.never, pages });
        }
    }

    /// Adds the columns of a device; their names begin with `d0.` and so on.
    fn columns(&self, blob: &mut Blob, device: u32, trace: &[TraceEntry], clock: bool) {
        let mut add = Columns { blob, device };
        let first = trace.first().map_or(0, |entry| entry.time_us);
        if clock {
            // Threads may read the clock in a different order than they record events.
            let times = trace.iter().scan(0.0, |last, entry| {
                *last = f64::max(*last, entry.time_us as f64 - first as f64);
                Some(*last)
            });
            add.column("event.time", times);
        }
        add.column("event.action", trace.iter().map(|entry| entry.action as u8));
        let oom = || (0u32..).zip(trace).filter(|(_, entry)| entry.action == TraceAction::Oom);
        add.column("oom.event", oom().map(|(event, _)| event));
        add.column("oom.size", oom().map(|(_, entry)| entry.size as f64));
        add.column("block.addr", self.blocks.iter().map(|block| block.addr as f64));
        add.column("block.size", self.blocks.iter().map(|block| block.size as f64));
        add.column("block.stream", self.blocks.iter().map(|block| block.stream as f64));
        add.column("block.start", self.blocks.iter().map(|block| block.start));
        add.column("block.requested", self.blocks.iter().map(|block| block.requested));
        add.column("block.done", self.blocks.iter().map(|block| block.done));
        add.column("block.site", self.blocks.iter().map(|block| block.site));
        add.column("block.freed", self.blocks.iter().map(|block| block.freed));
        add.column("extent.addr", self.extents.iter().map(|extent| extent.addr as f64));
        add.column("extent.size", self.extents.iter().map(|extent| extent.size as f64));
        add.column("extent.stream", self.extents.iter().map(|extent| extent.stream as f64));
        add.column("extent.start", self.extents.iter().map(|extent| extent.start));
        add.column("extent.end", self.extents.iter().map(|extent| extent.end));
        add.column("extent.pages", self.extents.iter().map(|extent| u8::from(extent.pages)));
    }
}

/// Adds columns whose names begin with the device's number.
struct Columns<'a> {
    blob: &'a mut Blob,
    device: u32,
}

impl Columns<'_> {
    fn column<T: super::blob::Number>(&mut self, name: &str, values: impl Iterator<Item = T>) {
        self.blob.column(&format!("d{}.{name}", self.device), values);
    }
}
