//! Writes snapshots as pickles, and reads pickles of plain data, as written by Python and PyTorch.
//!
//! As in PyTorch's pickles, frames shared by events are written once and then referred to by number. (The crate serde-pickle would
//! write them again for every event.)
//!
//! serde-pickle's reader counts how often the file refers to a shared value, and drops the value after the last reference. It does not
//! count that each use of a shared list refers to the list's items again. So it cannot load snapshots, whose entries share frames.
//!
//! By sharing, a short pickle can describe any amount of data. So call stacks, which many events share, are made once, and
//! the uses of other values are limited to about the number of bytes in the file.

mod stream;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io::BufRead;
use std::sync::Arc;
use std::{fmt, mem};

use indexmap::IndexSet;
use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{Deserialize, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

pub(super) use stream::read_file;
use stream::{Input, Trace};

use super::snapshot::{Frame, PyValue, Snapshot};

/// Returns a value's Python pickle, protocol 3, using only instructions that PyTorch's viewer supports.
pub(super) fn write(value: &PyValue<'_>) -> Result<Vec<u8>, String> {
    let mut writer = Writer { out: vec![0x80, 3], shared: HashMap::new() };
    writer.value(value)?;
    writer.out.push(b'.');
    Ok(writer.out)
}

/// The state of the code that writes a pickle.
struct Writer<'a> {
    out: Vec<u8>,
    /// The memo numbers of the frames that were already written.
    shared: HashMap<&'a [Frame], u32>,
}

/// Maximum number of items in a batch of a list or dict. PyTorch's viewer passes a batch as the arguments of one call.
const MAX_BATCH_ITEMS: usize = 1000;

impl<'a> Writer<'a> {
    fn value(&mut self, value: &PyValue<'a>) -> Result<(), String> {
        match value {
            PyValue::Bool(is) => self.out.push(if *is { 0x88 } else { 0x89 }),
            PyValue::Int(int) => self.int(i64::try_from(*int).map_err(|_| format!("{int} does not fit in 63 bits"))?),
            PyValue::Text(text) => self.text(text)?,
            PyValue::Pair((a, b)) => {
                self.out.push(b'(');
                self.int(*a);
                self.int(*b);
                self.out.push(b't');
            }
            PyValue::Frames(frames) => self.frames(frames)?,
            PyValue::List(items) => self.batches(b"]e", MAX_BATCH_ITEMS, items, Writer::value)?,
            PyValue::Dict(entries) => self.batches(b"}u", MAX_BATCH_ITEMS / 2, entries, |writer, (key, value)| {
                writer.text(key)?;
                writer.value(value)
            })?,
            PyValue::Other(value) => self.json(value.as_ref().map_err(String::clone)?)?,
        }
        Ok(())
    }

    fn json(&mut self, value: &Value) -> Result<(), String> {
        match value {
            Value::Null => self.out.push(b'N'),
            Value::Bool(is) => self.out.push(if *is { 0x88 } else { 0x89 }),
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(int), _) => self.int(int),
                (None, Some(float)) if number.is_f64() => {
                    self.out.push(b'G');
                    self.out.extend(float.to_be_bytes());
                }
                _ => return Err(format!("{number} does not fit in 63 bits")),
            },
            Value::String(text) => self.text(text)?,
            Value::Array(items) => self.batches(b"]e", MAX_BATCH_ITEMS, items, Writer::json)?,
            Value::Object(entries) => self.batches(b"}u", MAX_BATCH_ITEMS / 2, entries, |writer, (key, value)| {
                writer.text(key)?;
                writer.json(value)
            })?,
        }
        Ok(())
    }

    fn int(&mut self, int: i64) {
        match i32::try_from(int) {
            Ok(int) => {
                self.out.push(b'J');
                self.out.extend(int.to_le_bytes());
            }
            Err(_) => {
                self.out.extend([0x8a, 8]); // the instruction LONG1
                self.out.extend(int.to_le_bytes());
            }
        }
    }

    fn text(&mut self, text: &str) -> Result<(), String> {
        let length = u32::try_from(text.len()).map_err(|_| "a text has more than 4 GiB")?;
        self.out.push(b'X');
        self.out.extend(length.to_le_bytes());
        self.out.extend(text.as_bytes());
        Ok(())
    }

    /// Writes frames, or a reference to the same frames if they were written before.
    fn frames(&mut self, frames: &'a Arc<[Frame]>) -> Result<(), String> {
        let next = self.shared.len() as u32;
        if let Some(known) = self.shared.get(&**frames) {
            self.out.push(b'j'); // the instruction LONG_BINGET
            self.out.extend(known.to_le_bytes());
            return Ok(());
        }
        self.batches(b"]e", MAX_BATCH_ITEMS, frames.iter(), |writer, frame| {
            writer.out.extend(b"}(");
            writer.text("filename")?;
            writer.text(&frame.filename)?;
            writer.text("line")?;
            writer.int(frame.line.into());
            writer.text("name")?;
            writer.text(&frame.name)?;
            writer.out.push(b'u');
            Ok(())
        })?;
        self.shared.insert(frames, next);
        self.out.push(b'r'); // the instruction LONG_BINPUT
        self.out.extend(next.to_le_bytes());
        Ok(())
    }

    /// Writes a list or dict: an instruction that makes an empty list or dict, and then batches of items, each between a mark and
    /// the instruction that adds the batch.
    fn batches<T>(
        &mut self,
        [empty, add]: &[u8; 2],
        most: usize,
        items: impl IntoIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T) -> Result<(), String>,
    ) -> Result<(), String> {
        self.out.push(*empty);
        let mut count = 0;
        for item in items {
            if count % most == 0 {
                self.out.extend((count > 0).then_some(*add).into_iter().chain([b'(']));
            }
            count += 1;
            write(self, item)?;
        }
        self.out.extend((count > 0).then_some(*add));
        Ok(())
    }
}

/// The serde type name by which the reader of pickles recognises frames.
const SHARED_FRAMES: &str = "claystone frames";

/// Reads frames. serde can pass only plain data, so the reader passes a placeholder frame, whose line is the number of
/// the call stack. [`read`] replaces the placeholder.
pub(super) fn deserialize_frames<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Arc<[Frame]>, D::Error> {
    struct Frames;
    impl<'de> Visitor<'de> for Frames {
        type Value = Arc<[Frame]>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list of frames")
        }

        fn visit_newtype_struct<D: Deserializer<'de>>(self, deserializer: D) -> Result<Arc<[Frame]>, D::Error> {
            Vec::deserialize(deserializer).map(Into::into)
        }

        fn visit_u32<E>(self, stack: u32) -> Result<Arc<[Frame]>, E> {
            Ok([Frame { line: stack, ..Frame::default() }].into())
        }
    }
    deserializer.deserialize_newtype_struct(SHARED_FRAMES, Frames)
}

/// Returns the snapshot in the pickle. Only the instructions that PyTorch's viewer supports are accepted.
pub(super) fn read(bytes: &[u8]) -> Result<Snapshot, Error> {
    let mut pickle = Pickle::new(bytes.len());
    let root = pickle.run_instructions(&mut Input::new(bytes)).map_err(Error::custom)?;
    pickle.snapshot(root)
}

/// Maximum nesting depth; snapshots are nested six deep. Lists that contain themselves exceed this depth.
const MAX_DEPTH: usize = 32;
/// A pickle may have this many values, and more if the file is long (see [`BYTES_PER_EXTRA_VALUE`]).
const BASE_VALUE_LIMIT: usize = 100_000;
/// A file may have one value more than [`BASE_VALUE_LIMIT`] per this many of its bytes. Without sharing, a value takes at least two bytes.
const BYTES_PER_EXTRA_VALUE: usize = 2;
/// This many bytes of copied text count as one value.
const TEXT_BYTES_PER_VALUE: usize = 32;
/// All different frames together may have this many bytes, and more if the file is long (see [`FRAME_BYTES_PER_FILE_BYTE`]).
const BASE_FRAME_BYTES_LIMIT: usize = 16 << 20;
/// Per byte of the file, frames may have this many bytes in addition to [`BASE_FRAME_BYTES_LIMIT`]. A stack of shared frames lists
/// references of 2 to 5 bytes each.
const FRAME_BYTES_PER_FILE_BYTE: usize = 48;

/// A value of the pickle. Lists and dicts are indices into [`Pickle::lists`], texts into [`Pickle::texts`], and so on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Item {
    Null,
    Bool(bool),
    Int(i64),
    /// The bits of a float.
    Float(u64),
    Text(u32),
    List(u32),
    /// The list in which the dict's keys and values alternate.
    Dict(u32),
    /// The frame that a dict was. This is the dict's only item.
    Frame(u32),
    /// The call stack that a list was. This is the list's only item, and the value of the key `frames` instead of the list.
    Stack(u32),
}

/// A list or dict.
#[derive(Default)]
struct List {
    items: Vec<Item>,
    /// The number of references from the stack, the memo and other lists. The list is freed when the last reference ends.
    uses: u64,
    /// The events that were appended to the list, if the pickle is read as a stream.
    trace: Option<Box<Trace>>,
}

/// The state of the code that reads a pickle, and then the values that were read. A pickle is a program for a stack machine.
#[derive(Default)]
struct Pickle {
    /// The number of values that the pickle may still make before it exceeds the limit.
    values: usize,
    /// The number of values that the snapshot may still have.
    converted: Cell<usize>,
    /// The number of bytes that all frames may still have.
    frame_bytes: Cell<usize>,
    texts: IndexSet<Box<str>>,
    lists: Vec<List>,
    /// The indices of unused lists.
    free: Vec<u32>,
    /// The file, line and name of each frame.
    frames: IndexSet<(u32, u32, u32)>,
    /// The frames of each call stack.
    stacks: IndexSet<Box<[u32]>>,
    /// The call stacks that the snapshot contains.
    made: RefCell<HashMap<u32, Arc<[Frame]>>>,
    stack: Vec<Item>,
    marks: Vec<usize>,
    memo: HashMap<u32, Item>,
    /// The key of the next value that the instruction `MEMOIZE` stores.
    memoized: u32,
    /// The number of uses left of each shared value by its memo key, 255 for more than 254, if the pickle is read as a stream.
    recalls: Option<Vec<u8>>,
}

impl Pickle {
    /// Makes a reader for a pickle of `len` bytes.
    fn new(len: usize) -> Pickle {
        let values = BASE_VALUE_LIMIT + len / BYTES_PER_EXTRA_VALUE;
        let frame_bytes = BASE_FRAME_BYTES_LIMIT.saturating_add(len.saturating_mul(FRAME_BYTES_PER_FILE_BYTE));
        let (converted, frame_bytes) = (Cell::new(values), Cell::new(frame_bytes));
        Pickle { values, converted, frame_bytes, ..Pickle::default() }
    }

    /// Runs the pickle's instructions and returns the value on top of the stack at the end.
    fn run_instructions(&mut self, input: &mut Input<impl BufRead>) -> Result<Item, String> {
        loop {
            let (opcode, operand) = input.instruction()?;
            let items = match opcode {
                b'l' | b't' | b'd' | b'e' | b'u' => self.take_marked_items()?,
                0x85..=0x87 => self.take_last(usize::from(opcode - 0x84))?,
                b'a' => self.take_last(1)?,
                b's' => self.take_last(2)?,
                _ => Vec::new(),
            };
            match opcode {
                b'.' => return self.stack.pop().ok_or_else(|| TOO_LITTLE.into()),
                0x80 | 0x95 => {} // the instructions PROTO and FRAME
                b'(' => {
                    self.count_value()?;
                    self.marks.push(self.stack.len());
                }
                b'N' => self.push(Item::Null)?,
                0x88 => self.push(Item::Bool(true))?,
                0x89 => self.push(Item::Bool(false))?,
                b'J' | b'K' | b'M' | 0x8a => {
                    // Integers from 2^63 to 2^64 - 1, such as addresses, become their two's complement.
                    let int = i64::try_from(operand).or(u64::try_from(operand).map(u64::cast_signed));
                    self.push(Item::Int(int.map_err(|_| "an integer does not fit in 64 bits")?))?;
                }
                b'G' => self.push(Item::Float((operand as u64).swap_bytes()))?,
                b'X' | 0x8c => {
                    let text = self.intern(std::str::from_utf8(&input.text).map_err(|e| e.to_string())?);
                    self.push(text)?;
                }
                b']' | b')' | b'l' | b't' | 0x85..=0x87 => self.push_list(items, Item::List)?,
                b'}' | b'd' => self.push_list(items, Item::Dict)?,
                b'a' | b's' | b'e' | b'u' => self.extend(items)?,
                b'q' | b'r' => self.memoize(operand as u32)?,
                0x94 => self.memoize(self.memoized)?,
                b'h' | b'j' => self.recall(operand as u32)?,
                _ => return Err(format!("the instruction {opcode:#x} is not one of plain data")),
            }
        }
    }

    fn intern(&mut self, text: &str) -> Item {
        let known = self.texts.get_index_of(text);
        Item::Text(known.unwrap_or_else(|| self.texts.insert_full(text.into()).0) as u32)
    }

    fn count_value(&mut self) -> Result<(), String> {
        self.values = self.values.checked_sub(1).ok_or(TOO_MANY)?;
        Ok(())
    }

    fn push(&mut self, item: Item) -> Result<(), String> {
        self.count_value()?;
        self.stack.push(item);
        Ok(())
    }

    /// Adds a list or dict without items, which has one use.
    fn add_list(&mut self) -> Result<u32, String> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                self.count_value()?; // a list takes as much memory as two other values
                self.lists.push(List::default());
                u32::try_from(self.lists.len() - 1).map_err(|_| TOO_MANY)?
            }
        };
        self.lists[id as usize].uses = 1;
        Ok(id)
    }

    fn push_list(&mut self, items: Vec<Item>, kind: fn(u32) -> Item) -> Result<(), String> {
        let id = self.add_list()?;
        self.push(kind(id))?;
        self.extend(items)
    }

    fn take_last(&mut self, n: usize) -> Result<Vec<Item>, String> {
        let rest = self.stack.len().checked_sub(n).ok_or(TOO_LITTLE)?;
        Ok(self.stack.split_off(rest))
    }

    /// Pops the items above the topmost mark from the stack.
    fn take_marked_items(&mut self) -> Result<Vec<Item>, String> {
        let mark = self.marks.pop().filter(|m| *m <= self.stack.len()).ok_or("an instruction finds no mark")?;
        Ok(self.stack.split_off(mark))
    }

    /// Appends to the list or dict on top of the stack. A stream takes the events that are appended to a list.
    fn extend(&mut self, mut items: Vec<Item>) -> Result<(), String> {
        let id = match self.stack.last() {
            Some(&Item::Dict(id)) => {
                for pair in items.chunks_exact_mut(2) {
                    if self.is_text(pair[0], "frames") {
                        pair[1] = self.intern_stack(pair[1])?;
                    }
                }
                id
            }
            Some(&Item::List(id)) if self.recalls.is_some() => {
                items.retain(|item| !self.take_event(id, *item));
                id
            }
            Some(&Item::List(id)) => id,
            _ => return Err("an instruction appends to a value that is neither a list nor a dict".into()),
        };
        self.lists[id as usize].items.append(&mut items);
        Ok(())
    }

    fn is_text(&self, item: Item, text: &str) -> bool {
        matches!(item, Item::Text(id) if *self.texts[id as usize] == *text)
    }

    /// Returns the value of a dict's key.
    fn value(&self, dict: Item, key: &str) -> Option<Item> {
        let Item::Dict(id) = dict else { return None };
        let mut pairs = self.lists[id as usize].items.chunks_exact(2);
        pairs.find(|pair| self.is_text(pair[0], key)).map(|pair| pair[1])
    }

    /// Converts a list of frames into a call stack, of which equal ones have the same number. Returns other values unchanged.
    fn intern_stack(&mut self, list: Item) -> Result<Item, String> {
        let Item::List(id) = list else { return Ok(list) };
        let stack = match self.lists[id as usize].items[..] {
            [stack @ Item::Stack(_)] => stack,
            _ => {
                let first = self.lists[id as usize].items.first().copied();
                if first.and_then(|first| self.intern_frame(first)).is_none() {
                    return Ok(list);
                }
                let items = mem::take(&mut self.lists[id as usize].items);
                #[cfg(test)]
                ITEMS_EXAMINED.set(ITEMS_EXAMINED.get() + items.len());
                let frames: Option<Box<[u32]>> = items.iter().map(|item| self.intern_frame(*item)).collect();
                let frames = frames.ok_or("a frame is not a dict with a file, a line and a name")?;
                self.release(items);
                Item::Stack(self.stacks.insert_full(frames).0 as u32)
            }
        };
        self.lists[id as usize].items = vec![stack];
        self.release(vec![list]);
        Ok(stack)
    }

    /// Returns the number of the frame in a dict; `None` if the value is not a frame.
    fn intern_frame(&mut self, dict: Item) -> Option<u32> {
        let Item::Dict(id) = dict else { return None };
        if let [Item::Frame(frame)] = self.lists[id as usize].items[..] {
            return Some(frame);
        }
        let [file, line, name] = ["filename", "line", "name"].map(|key| self.value(dict, key));
        let (Item::Text(file), Item::Int(line), Item::Text(name)) = (file?, line?, name?) else { return None };
        let frame = self.frames.insert_full((file, line.try_into().ok()?, name)).0 as u32;
        let items = mem::replace(&mut self.lists[id as usize].items, vec![Item::Frame(frame)]);
        self.release(items);
        Some(frame)
    }

    /// Ends a use of each of the values. Lists and dicts without another use are freed.
    fn release(&mut self, mut items: Vec<Item>) {
        while let Some(item) = items.pop() {
            if let Item::List(id) | Item::Dict(id) = item {
                let list = &mut self.lists[id as usize];
                list.uses -= 1;
                if list.uses == 0 {
                    items.append(&mut mem::take(list).items);
                    self.free.push(id);
                }
            }
        }
    }

    /// Counts a further use of a value.
    fn retain(&mut self, item: Item) {
        if let Item::List(id) | Item::Dict(id) = item {
            self.lists[id as usize].uses += 1;
        }
    }

    fn memoize(&mut self, key: u32) -> Result<(), String> {
        self.count_value()?;
        let top = *self.stack.last().ok_or(TOO_LITTLE)?;
        self.memoized = self.memoized.max(key.saturating_add(1));
        let recalled = |recalls: &Vec<u8>| recalls.get(key as usize).is_some_and(|recalls| *recalls > 0);
        if self.recalls.as_ref().is_none_or(recalled) {
            self.retain(top);
            let old = self.memo.insert(key, top);
            self.release(Vec::from_iter(old));
        }
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), String> {
        let item = *self.memo.get(&key).ok_or("a shared value is used before it is stored")?;
        self.push(item)?;
        self.retain(item);
        if let Some(recalls @ 1..=254) = self.recalls.as_mut().and_then(|recalls| recalls.get_mut(key as usize)) {
            *recalls -= 1;
            if *recalls == 0 {
                self.memo.remove(&key);
                self.release(vec![item]);
            }
        }
        Ok(())
    }

    /// Returns the snapshot that the value `root` describes.
    fn snapshot(&self, root: Item) -> Result<Snapshot, Error> {
        let mut snapshot = Snapshot::deserialize(PickleValue { pickle: self, item: root, depth: MAX_DEPTH })?;
        for frames in snapshot.frames_mut() {
            // Frames are empty if the pickle does not contain them, and otherwise a placeholder.
            if let Some(placeholder) = frames.first() {
                *frames = self.make_stack(placeholder.line)?;
            }
        }
        Ok(snapshot)
    }

    /// Returns the frames of a call stack. They are made when the call stack is first used.
    fn make_stack(&self, stack: u32) -> Result<Arc<[Frame]>, Error> {
        count_values(&self.converted, 1)?;
        if let Some(known) = self.made.borrow().get(&stack) {
            return Ok(Arc::clone(known));
        }
        let frames = self.stacks[stack as usize].iter().map(|frame| {
            let (file, line, name) = self.frames[*frame as usize];
            let [filename, name] = [file, name].map(|text| self.texts[text as usize].to_string());
            count_values(&self.frame_bytes, size_of::<Frame>() + filename.len() + name.len())?;
            Ok(Frame { filename, line, name })
        });
        let frames: Arc<[Frame]> = frames.collect::<Result<_, Error>>()?;
        self.made.borrow_mut().insert(stack, Arc::clone(&frames));
        Ok(frames)
    }
}

/// Error text for a pickle that exceeds a limit.
const TOO_MANY: &str = "it holds too many values for its size";

/// The error of an instruction that takes more values than the stack has.
const TOO_LITTLE: &str = "an instruction finds too little on the stack";

/// Subtracts `n` values from a budget, or returns an error if fewer are left.
fn count_values(budget: &Cell<usize>, n: usize) -> Result<(), Error> {
    budget.set(budget.get().checked_sub(n).ok_or_else(|| Error::custom(TOO_MANY))?);
    Ok(())
}

/// A value of a pickle, as a serde deserialiser.
#[derive(Clone, Copy)]
struct PickleValue<'a> {
    pickle: &'a Pickle,
    item: Item,
    depth: usize,
}

impl<'a> PickleValue<'a> {
    fn items(self, id: u32) -> Result<(&'a [Item], impl Fn(Item) -> PickleValue<'a>), Error> {
        let depth = self.depth.checked_sub(1).ok_or_else(|| Error::custom("it is nested too deep"))?;
        Ok((&self.pickle.lists[id as usize].items, move |item| PickleValue { item, depth, ..self }))
    }

    fn text(self, id: u32) -> &'a str {
        &self.pickle.texts[id as usize]
    }

    /// Converts the value into a dict's key.
    fn key(self) -> Result<String, Error> {
        let key = match self.item {
            Item::Text(id) => self.text(id).to_owned(),
            Item::Int(int) => int.to_string(),
            Item::Float(bits) => f64::from_bits(bits).to_string(),
            Item::Bool(is) => is.to_string(),
            Item::Null => "null".to_owned(),
            _ => return Err(Error::custom("a dict has a list or a dict as a key")),
        };
        count_values(&self.pickle.converted, 1 + key.len() / TEXT_BYTES_PER_VALUE)?;
        Ok(key)
    }
}

impl<'de> Deserializer<'de> for PickleValue<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let text = if let Item::Text(id) = self.item { self.text(id).len() } else { 0 };
        count_values(&self.pickle.converted, 1 + text / TEXT_BYTES_PER_VALUE)?;
        match self.item {
            Item::Null | Item::Frame(_) | Item::Stack(_) => visitor.visit_unit(),
            Item::Bool(is) => visitor.visit_bool(is),
            Item::Int(int) => visitor.visit_i64(int),
            Item::Float(bits) if f64::from_bits(bits).is_finite() => visitor.visit_f64(f64::from_bits(bits)),
            Item::Float(_) => visitor.visit_unit(),
            Item::Text(id) => visitor.visit_borrowed_str(self.text(id)),
            Item::List(id) => {
                let (items, at) = self.items(id)?;
                let mut items = SeqDeserializer::new(items.iter().map(|item| at(*item)));
                let value = visitor.visit_seq(&mut items)?;
                items.end()?;
                Ok(value)
            }
            Item::Dict(id) => {
                let (items, at) = self.items(id)?;
                let mut wrong = None;
                let pairs = items.chunks_exact(2).map_while(|pair| match at(pair[0]).key() {
                    Ok(key) => Some((key, at(pair[1]))),
                    Err(e) => {
                        wrong = Some(e);
                        None
                    }
                });
                let value = visitor.visit_map(MapDeserializer::new(pairs));
                match wrong {
                    Some(e) => Err(e),
                    None => value,
                }
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.item {
            Item::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        count_values(&self.pickle.converted, 1)?;
        match self.item {
            Item::Text(id) => visitor.visit_enum(self.text(id).into_deserializer()),
            _ => Err(Error::custom("a name is not text")),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Error> {
        if name != SHARED_FRAMES {
            return visitor.visit_newtype_struct(self);
        }
        match self.item {
            Item::Stack(stack) => visitor.visit_u32(stack),
            Item::List(id) if self.pickle.lists[id as usize].items.is_empty() => visitor.visit_newtype_struct(self),
            _ => Err(Error::custom("the frames are not a list of frames")),
        }
    }

    /// Skips a value that belongs to no field, without decoding the value.
    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier
    }
}

impl<'a> IntoDeserializer<'a> for PickleValue<'a> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

// Counts the items of stacks that this thread has decoded.
#[cfg(test)]
thread_local!(pub(super) static ITEMS_EXAMINED: Cell<usize> = const { Cell::new(0) });
