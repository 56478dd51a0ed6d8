//! Reads pickles that are larger than the memory.
//!
//! A first pass over the file counts the uses of each shared value, so that the second pass can forget a value after its last
//! use. The second pass takes each event that is appended to a list, and keeps the events of blocks in use at the trace's end or
//! peak.

use std::fs::File;
use std::io::{BufReader, Read, Seek};
use std::path::Path;

use super::super::setting::Setting;
use super::super::snapshot::EVENTS_READ;
use super::*;

/// Reads the snapshot in a file. Traces have only the events of blocks in use at their end or peak.
pub(in super::super) fn read_file(path: &Path) -> Result<Snapshot, Error> {
    let file = File::open(path).map_err(Error::custom)?;
    let len = file.metadata().map_err(Error::custom)?.len();
    let mut input = Input::new(BufReader::with_capacity(BUFFER_BYTES, file));
    let mut pickle = Pickle::new(usize::try_from(len).map_err(Error::custom)?);
    pickle.recalls = Some(count_recalls(&mut input).map_err(Error::custom)?);
    input.bytes.rewind().map_err(Error::custom)?;
    let root = pickle.run_instructions(&mut input).map_err(Error::custom)?;
    let counts = pickle.restore_events(root).map_err(Error::custom)?;
    let mut snapshot = pickle.snapshot(root)?;
    snapshot.allocator_settings.insert(EVENTS_READ.into(), Setting::List(counts));
    Ok(snapshot)
}

const BUFFER_BYTES: usize = 1 << 20;

/// Returns the number of uses of each shared value by its memo key; 255 for more than 254.
fn count_recalls(input: &mut Input<impl BufRead>) -> Result<Vec<u8>, String> {
    let mut recalls = Vec::new();
    loop {
        let (opcode, operand) = input.instruction()?;
        let key = operand as usize;
        match opcode {
            b'.' => return Ok(recalls),
            b'q' | b'r' if key > recalls.len() => return Err("its shared values are not in order".into()),
            b'q' | b'r' if key < recalls.len() => {}
            b'q' | b'r' | 0x94 => recalls.push(0),
            b'h' | b'j' => {
                let recalls: &mut u8 = recalls.get_mut(key).ok_or("a shared value is used before it is stored")?;
                *recalls = recalls.saturating_add(1);
            }
            _ => {}
        }
    }
}

/// The events of a trace that determine the blocks in use at its end and at its peak.
#[derive(Default)]
pub(super) struct Trace {
    /// The number of events of the trace.
    events: u64,
    /// The times of the first and the last event in microseconds.
    times_us: [u64; 2],
    /// The allocations of the blocks in use, by address.
    live: HashMap<u64, Event>,
    /// The bytes in use, relative to the beginning of the trace.
    bytes: i128,
    peak_bytes: i128,
    /// The number of events up to the peak.
    peak: u64,
    /// The allocations and frees of blocks that were in use at the peak and are freed since, and frees of older blocks.
    freed: Vec<Event>,
}

/// An event that a trace keeps.
struct Event {
    /// The number of events up to this one.
    number: u64,
    size: u64,
    /// The keys and values of the dict.
    items: Vec<Item>,
}

impl Trace {
    fn allocate(&mut self, addr: u64, event: Event) {
        self.bytes += i128::from(event.size);
        let old = self.live.insert(addr, event);
        self.freed.extend(old.filter(|old| old.number <= self.peak));
        if self.bytes > self.peak_bytes {
            (self.peak_bytes, self.peak) = (self.bytes, self.events);
            self.freed.clear();
        }
    }

    fn free(&mut self, addr: u64, event: Event) {
        let old = self.live.remove(&addr);
        self.bytes -= i128::from(old.as_ref().map_or(event.size, |old| old.size));
        if old.as_ref().is_none_or(|old| old.number <= self.peak) {
            self.freed.extend(old.into_iter().chain([event]));
        }
    }
}

impl Pickle {
    /// Takes the item for the trace of a list, if the item is an event; otherwise returns false.
    pub(super) fn take_event(&mut self, list: u32, item: Item) -> bool {
        let (Item::Dict(dict), Some(action)) = (item, self.value(item, "action")) else { return false };
        let [addr, size, time_us] = ["addr", "size", "time_us"].map(|key| match self.value(item, key) {
            Some(Item::Int(int)) => int.cast_unsigned(),
            _ => 0,
        });
        let [is_alloc, is_free] = ["alloc", "free_completed"].map(|text| self.is_text(action, text));
        let is_plain = |pair: &&[Item]| !matches!(pair[1], Item::List(_) | Item::Dict(_));
        let plain = self.lists[dict as usize].items.chunks_exact(2).filter(is_plain);
        let items = if is_alloc || is_free { plain.flatten().copied().collect() } else { Vec::new() };
        let trace = self.lists[list as usize].trace.get_or_insert_default();
        trace.events += 1;
        trace.times_us = [if trace.events == 1 { time_us } else { trace.times_us[0] }, time_us];
        let event = Event { number: trace.events, size, items };
        if is_alloc {
            trace.allocate(addr, event);
        } else if is_free {
            trace.free(addr, event);
        }
        self.release(vec![item]);
        true
    }

    /// Adds the kept events to their traces, and an event each at the times of a trace's begin and end. Returns the number of events that
    /// each trace had.
    fn restore_events(&mut self, root: Item) -> Result<Vec<Setting>, String> {
        let mut traces = match self.value(root, "device_traces") {
            Some(Item::List(id)) => self.lists[id as usize].items.clone(),
            _ => Vec::new(),
        };
        traces.extend(self.value(root, "host_traces"));
        let mut counts = Vec::new();
        for list in traces {
            let Item::List(list) = list else { continue };
            let trace = self.lists[list as usize].trace.take();
            counts.push(Setting::Int(trace.as_ref().map_or(0, |trace| trace.events as i64)));
            let Some(Trace { times_us, live, mut freed, .. }) = trace.map(|trace| *trace) else { continue };
            freed.extend(live.into_values());
            freed.sort_unstable_by_key(|event| event.number);
            let [action, snapshot, time] = ["action", "snapshot", "time_us"].map(|text| self.intern(text));
            let [begin, end] = times_us.map(|us| vec![action, snapshot, time, Item::Int(us.cast_signed())]);
            for items in [begin].into_iter().chain(freed.into_iter().map(|event| event.items)).chain([end]) {
                let id = self.add_list()?;
                self.lists[id as usize].items = items;
                self.lists[list as usize].items.push(Item::Dict(id));
            }
        }
        Ok(counts)
    }
}

/// The bytes of a pickle.
pub(super) struct Input<R> {
    bytes: R,
    /// The text of the latest instruction that has a text.
    pub(super) text: Vec<u8>,
}

impl<R: BufRead> Input<R> {
    pub(super) fn new(bytes: R) -> Input<R> {
        Input { bytes, text: Vec::new() }
    }

    /// Reads an instruction. Returns its code and its operand: an integer, a memo key, a length, or the bits of a float in the wrong
    /// byte order.
    pub(super) fn instruction(&mut self) -> Result<(u8, i128), String> {
        let ([mut opcode], mut operand) = ([0], [0; 16]);
        self.fill(std::slice::from_mut(&mut opcode))?;
        let mut len = match opcode {
            b'K' | b'q' | b'h' | 0x80 | 0x8a | 0x8c => 1,
            b'M' => 2,
            b'J' | b'X' | b'r' | b'j' => 4,
            b'G' | 0x95 => 8,
            _ => 0,
        };
        self.fill(&mut operand[..len])?;
        if opcode == 0x8a {
            len = usize::from(operand[0]);
            operand[0] = 0;
            self.fill(operand.get_mut(..len).ok_or("an integer has more than 16 bytes")?)?;
        }
        if matches!(opcode, b'J' | 0x8a) && len > 0 && operand[len - 1] >= 0x80 {
            operand[len..].fill(0xff);
        }
        let operand = i128::from_le_bytes(operand);
        if matches!(opcode, b'X' | 0x8c) {
            self.text.clear();
            let read =
                self.bytes.by_ref().take(operand as u64).read_to_end(&mut self.text).map_err(|e| e.to_string())?;
            if read < operand as usize {
                return Err(CUT_SHORT.into());
            }
        }
        Ok((opcode, operand))
    }

    fn fill(&mut self, to: &mut [u8]) -> Result<(), &'static str> {
        self.bytes.read_exact(to).map_err(|_| CUT_SHORT)
    }
}

const CUT_SHORT: &str = "it is cut short";
