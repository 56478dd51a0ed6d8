//! Reads pickles that are larger than the memory.
//!
//! A first pass over the file counts the uses of each shared value, so that the second pass can forget a value after its last
//! use. The second pass takes each event out of its trace when the event is complete, and keeps the events of blocks in use at
//! the trace's end or peak.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{BufReader, Seek};
use std::path::Path;

use indexmap::IndexSet;
use serde::de::value::StrDeserializer;

use super::super::setting::Setting;
use super::super::snapshot::{EVENTS_READ, NO_CONTEXT, TraceAction, TraceEntry};
use super::*;

/// Reads the snapshot in a file. Traces have only the events of blocks in use at their end or peak.
pub(in super::super) fn read_file(path: &Path) -> Result<Snapshot, Error> {
    let mut file = File::open(path).map_err(Error::custom)?;
    let len = usize::try_from(file.metadata().map_err(Error::custom)?.len()).map_err(Error::custom)?;
    let scan = Scan::of(&file).map_err(Error::custom)?;
    file.rewind().map_err(Error::custom)?;
    let input = Input::File { file: BufReader::with_capacity(BUFFER_BYTES, file), texts: &scan.texts };
    let stream = Stream { recalls: scan.recalls, stack_bytes: max_frame_bytes(len), ..Stream::default() };
    read_input(input, len, Some(stream))
}

const BUFFER_BYTES: usize = 1 << 20;
/// All different texts of a file together may have this many bytes.
const MAX_TEXT_BYTES: usize = 256 << 20;
/// The error of an instruction that appends to another value.
pub(super) const NO_CONTAINER: &str = "an instruction appends to a value that is neither a list nor a dict";
const CUT_SHORT: &str = "it is cut short";

/// The bytes of a pickle, in memory or in a file whose texts are known.
pub(super) enum Input<'a> {
    Memory(&'a [u8]),
    File { file: BufReader<File>, texts: &'a HashSet<Box<str>> },
}

impl<'a> Input<'a> {
    pub(super) fn fill(&mut self, to: &mut [u8]) -> Result<(), &'static str> {
        match self {
            Input::Memory(bytes) => bytes.read_exact(to).map_err(|_| CUT_SHORT),
            Input::File { file, .. } => file.read_exact(to).map_err(|_| CUT_SHORT),
        }
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let mut bytes = [0; N];
        self.fill(&mut bytes).map(|()| bytes)
    }

    /// Reads a little-endian number of up to four bytes.
    pub(super) fn size(&mut self, n: usize) -> Result<u32, &'static str> {
        let mut bytes = [0; 4];
        self.fill(&mut bytes[..n]).map(|()| u32::from_le_bytes(bytes))
    }

    pub(super) fn text(&mut self, n: usize) -> Result<&'a str, String> {
        match self {
            Input::Memory(bytes) => {
                let (text, rest) = bytes.split_at_checked(n).ok_or(CUT_SHORT)?;
                *bytes = rest;
                std::str::from_utf8(text).map_err(|e| e.to_string())
            }
            Input::File { file, texts } => {
                let text = read_text(file, n)?;
                texts.get(&*text).map(|text| &**text).ok_or_else(|| "the file has changed".into())
            }
        }
    }
}

fn read_text(file: &mut impl Read, n: usize) -> Result<String, String> {
    if n > MAX_TEXT_BYTES {
        return Err("a text is too long".into());
    }
    let mut text = String::new();
    let read = file.take(n as u64).read_to_string(&mut text).map_err(|e| e.to_string())?;
    if read == n { Ok(text) } else { Err(CUT_SHORT.into()) }
}

/// The different texts of a pickle, and the number of uses of each shared value by its memo key, up to 255.
#[derive(Default)]
struct Scan {
    texts: HashSet<Box<str>>,
    recalls: Vec<u8>,
}

impl Scan {
    fn of(file: &File) -> Result<Scan, String> {
        let mut file = BufReader::with_capacity(BUFFER_BYTES, file);
        let (mut scan, mut text_bytes) = (Scan::default(), 0);
        loop {
            let mut operand = [0; 8];
            file.read_exact(&mut operand[..1]).map_err(|_| CUT_SHORT)?;
            let [opcode, ..] = std::mem::take(&mut operand);
            let bytes = match opcode {
                b'K' | b'q' | b'h' | 0x80 | 0x8a | 0x8c => 1,
                b'M' => 2,
                b'J' | b'X' | b'r' | b'j' => 4,
                b'G' | 0x95 => 8,
                _ => 0,
            };
            file.read_exact(&mut operand[..bytes]).map_err(|_| CUT_SHORT)?;
            let operand = u64::from_le_bytes(operand) as usize;
            match opcode {
                b'.' => return Ok(scan),
                0x8a => file.seek_relative(operand as i64).map_err(|e| e.to_string())?,
                b'X' | 0x8c => {
                    let text = read_text(&mut file, operand)?;
                    if !scan.texts.contains(&*text) {
                        text_bytes += text.len();
                        scan.texts.insert(text.into());
                    }
                    if text_bytes > MAX_TEXT_BYTES {
                        return Err("it has too many different texts".into());
                    }
                }
                b'q' | b'r' if operand > scan.recalls.len() => return Err("its shared values are not in order".into()),
                b'q' | b'r' if operand < scan.recalls.len() => {}
                b'q' | b'r' | 0x94 => scan.recalls.push(0),
                b'h' | b'j' => {
                    let recalls = scan.recalls.get_mut(operand).ok_or("a shared value is used before it is stored")?;
                    *recalls = recalls.saturating_add(1);
                }
                _ => {}
            }
        }
    }
}

/// The state of a reader that takes events out of the traces.
#[derive(Default)]
pub(super) struct Stream<'a> {
    /// The number of uses left of each shared value, by its memo key; 255 for more than 254.
    recalls: Vec<u8>,
    /// The memo keys of the lists and dicts that are used again.
    shared: HashMap<u32, u32>,
    /// The empty lists that nothing refers to.
    free: Vec<u32>,
    /// The file, line and name of each frame.
    frames: IndexSet<(&'a str, u32, &'a str)>,
    /// The numbers of the frames of each stack.
    stacks: IndexSet<Vec<u32>>,
    /// The number of bytes that `stacks` may still grow by. Each extension of a stack counts the whole stack, which bounds the time.
    stack_bytes: usize,
    /// The number of the last stack, if only the list that made the stack and the memo under `last_stack_key` refer to the stack.
    /// An extension replaces this stack.
    open_stack: Option<u32>,
    /// The memo key of the list that became a stack last, which may be extended by more frames.
    last_stack_key: Option<u32>,
    /// The complete events that are not in a trace yet.
    pending: Vec<Event<'a>>,
    /// The events of each trace, by the id of its list.
    traces: HashMap<u32, KeptEvents<'a>>,
}

/// An event, whose frames are the number of a stack.
#[derive(Clone, Copy)]
struct Event<'a> {
    action: TraceAction,
    addr: u64,
    size: u64,
    stream: u64,
    time_us: u64,
    stack: Option<u32>,
    context: &'a str,
}

impl<'a> Stream<'a> {
    pub(super) fn reuse_list(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// True if the item that is stored under `key` is used again.
    pub(super) fn is_recalled(&mut self, key: u32, item: Item<'a>) -> bool {
        let is_recalled = self.recalls.get(key as usize).is_some_and(|recalls| *recalls > 0);
        match item {
            Item::List(id) | Item::Dict(id) if is_recalled => _ = self.shared.insert(id, key),
            Item::Stack(_) => self.open_stack = None,
            _ => {}
        }
        is_recalled
    }

    /// Counts a use of the item that is stored under `key`. Returns true if the use was the last.
    pub(super) fn is_last_recall(&mut self, key: u32, item: Item<'a>) -> bool {
        if let Item::Stack(_) = item {
            self.open_stack = None;
        }
        let Some(recalls @ 1..=254) = self.recalls.get_mut(key as usize) else { return false };
        *recalls -= 1;
        *recalls == 0
    }

    /// Adds items to a list or dict, and returns the value that the list or dict becomes: a frame, a stack, an event, or itself.
    pub(super) fn extend(
        &mut self,
        top: Item<'a>,
        items: Vec<Item<'a>>,
        lists: &mut [Vec<Item<'a>>],
        memo: &mut HashMap<u32, Item<'a>>,
    ) -> Result<Item<'a>, String> {
        let id = match top {
            Item::Stack(number) => return self.extend_stack(number, &items, memo),
            Item::List(id) | Item::Dict(id) => id,
            _ => return Err(NO_CONTAINER.into()),
        };
        let is_list = matches!(top, Item::List(_));
        let first = self.pending.len().saturating_sub(items.iter().filter(|item| **item == Item::Event).count());
        if is_list {
            self.pending.drain(first..).for_each(|event| self.traces.entry(id).or_default().push(event));
        } else {
            self.pending.truncate(first); // an event that is the value of a dict is in no trace
        }
        let made = if lists[id as usize].is_empty() { self.make(top, &items)? } else { None };
        let Some(made) = made else {
            lists[id as usize].extend(items.into_iter().filter(|item| !is_list || *item != Item::Event));
            return Ok(top);
        };
        let key = self.shared.remove(&id);
        if let Item::Stack(_) = made {
            self.last_stack_key = key;
        }
        if let Some(key) = key {
            if made == Item::Event {
                return Err("an event is used twice".into());
            }
            memo.insert(key, made);
        }
        self.traces.remove(&id);
        self.free.push(id);
        self.free_lists(items, lists);
        Ok(made)
    }

    /// Makes the frame, stack or event that an empty list or dict becomes with these items, if any.
    fn make(&mut self, top: Item<'a>, items: &[Item<'a>]) -> Result<Option<Item<'a>>, String> {
        let value = |key| items.chunks_exact(2).find(|pair| pair[0] == Item::Text(key)).map(|pair| pair[1]);
        match (top, value("action"), value("filename"), value("line"), value("name")) {
            (Item::Dict(_), Some(Item::Text(action)), ..) => {
                self.pending.push(Event::new(action, items)?);
                Ok(Some(Item::Event))
            }
            (Item::Dict(_), _, Some(Item::Text(file)), Some(Item::Int(line)), Some(Item::Text(name))) => {
                let line = line.try_into().map_err(|_| "a line is out of range")?;
                Ok(Some(Item::Frame(self.frames.insert_full((file, line, name)).0 as u32)))
            }
            (Item::List(_), ..) if !items.is_empty() => {
                let frames = items.iter().map(|item| if let Item::Frame(number) = item { Some(*number) } else { None });
                let stack: Option<Vec<u32>> = frames.collect();
                stack.map(|stack| self.insert_stack(stack)).transpose()
            }
            _ => Ok(None),
        }
    }

    /// Returns the stack that consists of the frames of the stack `number` and the frames in `items`.
    fn extend_stack(
        &mut self,
        number: u32,
        items: &[Item<'a>],
        memo: &mut HashMap<u32, Item<'a>>,
    ) -> Result<Item<'a>, String> {
        let removed = if self.open_stack == Some(number) { self.stacks.pop() } else { None };
        let mut stack = removed.unwrap_or_else(|| self.stacks[number as usize].clone());
        for item in items {
            let Item::Frame(frame) = item else { return Err("a frame is not a dict".into()) };
            stack.push(*frame);
        }
        let longer = self.insert_stack(stack)?;
        let stored = self.last_stack_key.and_then(|key| memo.get_mut(&key));
        if let Some(stored) = stored.filter(|stored| **stored == Item::Stack(number)) {
            *stored = longer;
        }
        Ok(longer)
    }

    /// Returns the stack that consists of these frames. Equal stacks are stored once.
    fn insert_stack(&mut self, stack: Vec<u32>) -> Result<Item<'a>, String> {
        self.stack_bytes = self.stack_bytes.checked_sub(size_of_val(&*stack)).ok_or(TOO_MANY)?;
        let (number, is_new) = self.stacks.insert_full(stack);
        self.open_stack = is_new.then_some(number as u32);
        Ok(Item::Stack(number as u32))
    }

    /// Frees the lists and dicts among the items, and all lists and dicts inside, except shared ones.
    fn free_lists(&mut self, mut items: Vec<Item<'a>>, lists: &mut [Vec<Item<'a>>]) {
        while let Some(item) = items.pop() {
            if let Item::List(id) | Item::Dict(id) = item
                && !self.shared.contains_key(&id)
            {
                items.extend(std::mem::take(&mut lists[id as usize]));
                self.traces.remove(&id);
                self.free.push(id);
            }
        }
    }

    /// Returns copies of a stack's frames, and subtracts the bytes of the copies from the budget.
    pub(super) fn frames(&self, stack: u32, budget: &Cell<usize>) -> Result<Arc<[Frame]>, Error> {
        let frames = self.stacks[stack as usize].iter().map(|number| self.frames[*number as usize]);
        let frames = frames.map(|(file, line, name)| {
            count_values(budget, size_of::<Frame>() + file.len() + name.len())?;
            Ok(Frame { filename: file.to_owned(), line, name: name.to_owned() })
        });
        frames.collect()
    }
}

impl<'a> Event<'a> {
    /// Makes the event with these keys and values.
    fn new(action: &str, items: &[Item<'a>]) -> Result<Event<'a>, String> {
        let action = TraceAction::deserialize(StrDeserializer::<Error>::new(action)).map_err(|e| e.to_string())?;
        let mut event = Event { action, addr: 0, size: 0, stream: 0, time_us: 0, stack: None, context: "" };
        for pair in items.chunks_exact(2) {
            match (pair[0], pair[1]) {
                (Item::Text("addr"), Item::Int(addr)) => event.addr = addr.cast_unsigned(),
                (Item::Text("size"), Item::Int(size)) => event.size = size.cast_unsigned(),
                (Item::Text("stream"), Item::Int(stream)) => event.stream = stream.cast_unsigned(),
                (Item::Text("time_us"), Item::Int(time)) => event.time_us = time.cast_unsigned(),
                (Item::Text("frames"), Item::Stack(stack)) => event.stack = Some(stack),
                (Item::Text("compile_context"), Item::Text(context)) if context != NO_CONTEXT => {
                    event.context = context
                }
                _ => {}
            }
        }
        Ok(event)
    }
}

/// The events of a trace that determine the blocks in use at its end and at its peak.
#[derive(Default)]
struct KeptEvents<'a> {
    /// The number of events of the trace.
    events: u64,
    /// The times of the first and the last event in microseconds.
    times_us: [u64; 2],
    /// The allocations of the blocks in use, by address, with the numbers of the events.
    live: HashMap<u64, (u64, Event<'a>)>,
    /// The bytes in use, relative to the beginning of the trace.
    bytes: i128,
    peak_bytes: i128,
    /// The number of events up to the peak.
    peak: u64,
    /// The allocations and frees of blocks that were in use at the peak and are freed since, and frees of older blocks.
    freed: Vec<(u64, Event<'a>)>,
}

impl<'a> KeptEvents<'a> {
    fn push(&mut self, event: Event<'a>) {
        self.events += 1;
        self.times_us = [if self.events == 1 { event.time_us } else { self.times_us[0] }, event.time_us];
        let old = match event.action {
            TraceAction::Alloc => {
                self.bytes += i128::from(event.size);
                self.live.insert(event.addr, (self.events, event))
            }
            TraceAction::FreeCompleted => {
                let old = self.live.remove(&event.addr);
                self.bytes -= i128::from(old.map_or(event.size, |(_, block)| block.size));
                self.freed.extend(old.is_none_or(|(number, _)| number <= self.peak).then_some((self.events, event)));
                old
            }
            _ => return,
        };
        self.freed.extend(old.filter(|(number, _)| *number <= self.peak));
        if self.bytes > self.peak_bytes {
            (self.peak_bytes, self.peak) = (self.bytes, self.events);
            self.freed.clear();
        }
    }

    /// Returns the kept events, and an event each at the times of the trace's begin and end.
    fn entries(&self, frames: impl Fn(u32) -> Result<Arc<[Frame]>, Error>) -> Result<Vec<TraceEntry>, Error> {
        let mut kept: Vec<_> = self.live.values().chain(&self.freed).collect();
        kept.sort_unstable_by_key(|(number, _)| *number);
        let [begin, end] =
            self.times_us.map(|time_us| TraceEntry { time_us, ..TraceEntry::new(TraceAction::Snapshot, 0, 0) });
        let mut entries = vec![begin];
        for (_, event) in kept {
            entries.push(TraceEntry {
                stream: event.stream,
                time_us: event.time_us,
                frames: event.stack.map_or(Ok(Arc::default()), &frames)?,
                compile_context: event.context.to_owned(),
                ..TraceEntry::new(event.action, event.addr, event.size)
            });
        }
        entries.push(end);
        Ok(entries)
    }
}

impl PickleValue<'_, '_> {
    /// Adds the events that a stream kept to the snapshot, whose traces are empty otherwise.
    pub(super) fn add_kept_events(self, snapshot: &mut Snapshot) -> Result<(), Error> {
        let (Some(stream), Item::Dict(root)) = (self.pickle.stream, self.item) else { return Ok(()) };
        let mut counts = Vec::new();
        for pair in self.pickle.lists[root as usize].chunks_exact(2) {
            let (Item::Text(key), Item::List(list)) = (pair[0], pair[1]) else { continue };
            let traces = match key {
                "device_traces" => snapshot.device_traces.iter_mut().zip(&self.pickle.lists[list as usize]).collect(),
                "host_traces" => vec![(&mut snapshot.host_traces, &pair[1])],
                _ => continue,
            };
            for (trace, item) in traces {
                let kept = if let Item::List(id) = item { stream.traces.get(id) } else { None };
                if let Some(kept) = kept {
                    *trace = kept.entries(|stack| self.stack(STREAMED + stack))?;
                }
                counts.push(Setting::Int(kept.map_or(0, |kept| kept.events as i64)));
            }
        }
        snapshot.allocator_settings.insert(EVENTS_READ.into(), Setting::List(counts));
        Ok(())
    }
}
