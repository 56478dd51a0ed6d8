//! Writes snapshots as pickles, and reads pickles of plain data, as written by Python and PyTorch.
//!
//! As in PyTorch's pickles, frames shared by events are written once and then referred to by number. (The crate serde-pickle would
//! write them again for every event.)
//!
//! serde-pickle's reader counts how often the file refers to a shared value, and drops the value after the last reference. It does not
//! count that each use of a shared list refers to the list's items again. So it cannot load snapshots, whose entries share frames.
//!
//! By sharing, a short pickle can describe any amount of data. So frames, which many events share, are made once, and
//! the uses of other values are limited to about the number of bytes in the file.

mod stream;

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::io::Read;
use std::sync::Arc;

use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{Deserialize, Deserializer, Error as _, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

pub(super) use stream::read_file;
use stream::{Input, NO_CONTAINER, Stream};

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
/// the list that holds the frames. [`read`] replaces the placeholder.
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

        fn visit_u32<E>(self, list: u32) -> Result<Arc<[Frame]>, E> {
            Ok([Frame { line: list, ..Frame::default() }].into())
        }
    }
    deserializer.deserialize_newtype_struct(SHARED_FRAMES, Frames)
}

/// Returns the snapshot in the pickle. Only the instructions that PyTorch's viewer supports are accepted.
pub(super) fn read(bytes: &[u8]) -> Result<Snapshot, Error> {
    read_input(Input::Memory(bytes), bytes.len(), None)
}

/// Returns the snapshot in the `len` bytes of `input`. With a `stream`, the traces hold only the events that the stream keeps.
fn read_input<'a>(input: Input<'a>, len: usize, stream: Option<Stream<'a>>) -> Result<Snapshot, Error> {
    let most_values = BASE_VALUE_LIMIT + len / BYTES_PER_EXTRA_VALUE;
    let mut reader = Reader {
        input,
        values: most_values,
        lists: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
        memoized: 0,
        stream,
    };
    let root = reader.run_instructions().map_err(Error::custom)?;
    let pickle = Pickle {
        lists: &reader.lists,
        values: Cell::new(most_values),
        frame_bytes: Cell::new(max_frame_bytes(len)),
        frames: RefCell::default(),
        stacks: RefCell::default(),
        stream: reader.stream.as_ref(),
    };
    let root = PickleValue { pickle: &pickle, item: root, depth: MAX_DEPTH };
    let mut snapshot = Snapshot::deserialize(root)?;
    for frames in snapshot.frames_mut() {
        // Frames are empty if the pickle does not contain them, and otherwise a placeholder.
        if let Some(placeholder) = frames.first() {
            *frames = root.stack(placeholder.line)?;
        }
    }
    root.add_kept_events(&mut snapshot)?;
    Ok(snapshot)
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

/// Returns the number of bytes that the frames of a file of `len` bytes may have.
fn max_frame_bytes(len: usize) -> usize {
    BASE_FRAME_BYTES_LIMIT.saturating_add(len.saturating_mul(FRAME_BYTES_PER_FILE_BYTE))
}

/// A value of the pickle. For a list or dict, the index in the reader's `lists` of the list that holds the items.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Item<'a> {
    Null,
    Bool(bool),
    Int(i64),
    /// The bits of a float.
    Float(u64),
    Text(&'a str),
    List(u32),
    /// The index of the list in which the dict's keys and values alternate.
    Dict(u32),
    /// A frame, by its number in the [`Stream`].
    Frame(u32),
    /// A call stack, by its number in the [`Stream`].
    Stack(u32),
    /// An event of a trace, which the [`Stream`] has taken.
    Event,
}

/// The state of the code that reads a pickle. A pickle is a program for a stack machine.
struct Reader<'a> {
    input: Input<'a>,
    /// The number of values that the pickle may still make before it exceeds the limit.
    values: usize,
    lists: Vec<Vec<Item<'a>>>,
    stack: Vec<Item<'a>>,
    marks: Vec<usize>,
    memo: HashMap<u32, Item<'a>>,
    /// The number of different keys that were stored in `memo`.
    memoized: u32,
    /// Takes the events while the pickle is read, if the pickle may be larger than the memory.
    stream: Option<Stream<'a>>,
}

impl<'a> Reader<'a> {
    /// Runs the pickle's instructions and returns the value on top of the stack at the end.
    fn run_instructions(&mut self) -> Result<Item<'a>, String> {
        loop {
            let [opcode] = self.input.array()?;
            let items = match opcode {
                b'l' | b't' | b'd' | b'e' | b'u' => self.take_marked_items()?,
                0x85..=0x87 => self.take_last(usize::from(opcode - 0x84))?,
                b'a' => self.take_last(1)?,
                b's' => self.take_last(2)?,
                _ => Vec::new(),
            };
            let number = match opcode {
                0x8a | b'q' | b'h' => self.input.size(1)?,
                b'r' | b'j' => self.input.size(4)?,
                _ => self.memoized,
            };
            match opcode {
                b'.' => return self.pop(),
                0x80 => _ = self.input.array::<1>()?, // the instruction PROTO
                0x95 => _ = self.input.array::<8>()?, // the instruction FRAME
                b'(' => {
                    self.count_value()?;
                    self.marks.push(self.stack.len());
                }
                b'N' => self.push(Item::Null)?,
                0x88 => self.push(Item::Bool(true))?,
                0x89 => self.push(Item::Bool(false))?,
                b'J' => self.int(4, true)?,
                b'K' => self.int(1, false)?,
                b'M' => self.int(2, false)?,
                0x8a => self.int(number as usize, true)?,
                b'G' => {
                    let float = u64::from_be_bytes(self.input.array()?);
                    self.push(Item::Float(float))?;
                }
                b'X' => self.text(4)?,
                0x8c => self.text(1)?,
                b']' | b')' | b'l' | b't' | 0x85..=0x87 => self.list(items, Item::List)?,
                b'}' | b'd' => self.list(items, Item::Dict)?,
                b'a' | b's' | b'e' | b'u' => self.extend(items)?,
                b'q' | b'r' | 0x94 => self.memoize(number)?,
                b'h' | b'j' => self.recall(number)?,
                _ => return Err(format!("the instruction {opcode:#x} is not one of plain data")),
            }
        }
    }

    /// Reads a little-endian integer. Integers from 2^63 to 2^64 - 1, such as addresses, become their two's complement.
    fn int(&mut self, n: usize, signed: bool) -> Result<(), String> {
        let mut wide = [0; 16];
        self.input.fill(wide.get_mut(..n).ok_or("an integer has more than 16 bytes")?)?;
        if signed && n > 0 && wide[n - 1] >= 0x80 {
            wide[n..].fill(0xff);
        }
        let value = i128::from_le_bytes(wide);
        let fits = i64::try_from(value).or(u64::try_from(value).map(u64::cast_signed));
        self.push(Item::Int(fits.map_err(|_| "an integer does not fit in 64 bits")?))
    }

    fn text(&mut self, n: usize) -> Result<(), String> {
        let n = self.input.size(n)?;
        let text = self.input.text(n as usize)?;
        self.push(Item::Text(text))
    }

    fn count_value(&mut self) -> Result<(), String> {
        self.values = self.values.checked_sub(1).ok_or(TOO_MANY)?;
        Ok(())
    }

    fn push(&mut self, item: Item<'a>) -> Result<(), String> {
        self.count_value()?;
        self.stack.push(item);
        Ok(())
    }

    fn list(&mut self, items: Vec<Item<'a>>, kind: fn(u32) -> Item<'a>) -> Result<(), String> {
        let id = match self.stream.as_mut().and_then(Stream::reuse_list) {
            Some(id) => id,
            None => {
                let id = u32::try_from(self.lists.len()).ok().filter(|id| *id < STREAMED).ok_or(TOO_MANY)?;
                self.lists.push(Vec::new());
                id
            }
        };
        self.push(kind(id))?;
        self.extend(items)
    }

    fn pop(&mut self) -> Result<Item<'a>, String> {
        self.stack.pop().ok_or_else(|| "an instruction finds nothing on the stack".into())
    }

    fn take_last(&mut self, n: usize) -> Result<Vec<Item<'a>>, String> {
        let rest = self.stack.len().checked_sub(n).ok_or("an instruction finds too little on the stack")?;
        Ok(self.stack.split_off(rest))
    }

    /// Pops the items above the topmost mark from the stack.
    fn take_marked_items(&mut self) -> Result<Vec<Item<'a>>, String> {
        let mark = self.marks.pop().filter(|m| *m <= self.stack.len()).ok_or("an instruction finds no mark")?;
        Ok(self.stack.split_off(mark))
    }

    /// Appends to the list or dict on top of the stack.
    fn extend(&mut self, items: Vec<Item<'a>>) -> Result<(), String> {
        match (self.stack.last_mut(), &mut self.stream) {
            (Some(top), Some(stream)) => *top = stream.extend(*top, items, &mut self.lists, &mut self.memo)?,
            (Some(Item::List(id) | Item::Dict(id)), None) => self.lists[*id as usize].extend(items),
            _ => return Err(NO_CONTAINER.into()),
        }
        Ok(())
    }

    fn memoize(&mut self, key: u32) -> Result<(), String> {
        self.count_value()?;
        let top = *self.stack.last().ok_or("an instruction finds nothing on the stack")?;
        let is_used = self.stream.as_mut().is_none_or(|stream| stream.is_recalled(key, top));
        let is_new = !is_used || self.memo.insert(key, top).is_none();
        self.memoized += u32::from(is_new);
        Ok(())
    }

    fn recall(&mut self, key: u32) -> Result<(), String> {
        let item = *self.memo.get(&key).ok_or("a shared value is used before it is stored")?;
        if self.stream.as_mut().is_some_and(|stream| stream.is_last_recall(key, item)) {
            self.memo.remove(&key);
        }
        self.push(item)
    }
}

/// Error text for a pickle that exceeds a limit.
const TOO_MANY: &str = "it holds too many values for its size";

/// The values that were read, and the number of values that conversions may still make.
struct Pickle<'r, 'a> {
    lists: &'r [Vec<Item<'a>>],
    values: Cell<usize>,
    frame_bytes: Cell<usize>,
    /// The call stacks that were already made, by the items of their lists.
    frames: RefCell<HashMap<&'r [Item<'a>], Arc<[Frame]>>>,
    /// The same stacks by the id of their list, because a list may be used any number of times.
    stacks: RefCell<HashMap<u32, Arc<[Frame]>>>,
    stream: Option<&'r Stream<'a>>,
}

/// Added to the number of a call stack of the [`Stream`], to tell the number from the id of a list.
const STREAMED: u32 = 1 << 31;

/// Subtracts `n` values from a budget, or returns an error if fewer are left.
fn count_values(budget: &Cell<usize>, n: usize) -> Result<(), Error> {
    budget.set(budget.get().checked_sub(n).ok_or_else(|| Error::custom(TOO_MANY))?);
    Ok(())
}

/// A value of a pickle, as a serde deserialiser.
#[derive(Clone, Copy)]
struct PickleValue<'r, 'a> {
    pickle: &'r Pickle<'r, 'a>,
    item: Item<'a>,
    depth: usize,
}

impl<'r, 'a> PickleValue<'r, 'a> {
    fn items(self, id: u32) -> Result<(&'r [Item<'a>], impl Fn(Item<'a>) -> PickleValue<'r, 'a>), Error> {
        let depth = self.depth.checked_sub(1).ok_or_else(|| Error::custom("it is nested too deep"))?;
        Ok((&self.pickle.lists[id as usize], move |item| PickleValue { item, depth, ..self }))
    }

    /// Converts the value into a dict's key.
    fn key(self) -> Result<String, Error> {
        let key = match self.item {
            Item::Text(text) => text.to_owned(),
            Item::Int(int) => int.to_string(),
            Item::Float(bits) => f64::from_bits(bits).to_string(),
            Item::Bool(is) => is.to_string(),
            Item::Null => "null".to_owned(),
            _ => return Err(Error::custom("a dict has a list or a dict as a key")),
        };
        count_values(&self.pickle.values, 1 + key.len() / TEXT_BYTES_PER_VALUE)?;
        Ok(key)
    }

    /// Returns the frames in a list. They are made when the list is first used.
    fn stack(self, id: u32) -> Result<Arc<[Frame]>, Error> {
        count_values(&self.pickle.values, 1)?;
        if let Some(known) = self.pickle.stacks.borrow().get(&id) {
            return Ok(Arc::clone(known));
        }
        let frames = match self.pickle.stream.filter(|_| id >= STREAMED) {
            Some(stream) => stream.frames(id - STREAMED, &self.pickle.frame_bytes)?,
            None => self.frames(id)?,
        };
        self.pickle.stacks.borrow_mut().insert(id, Arc::clone(&frames));
        Ok(frames)
    }

    /// Makes the frames in a list that is used for the first time.
    fn frames(self, id: u32) -> Result<Arc<[Frame]>, Error> {
        let (items, at) = self.items(id)?;
        #[cfg(test)]
        ITEMS_EXAMINED.set(ITEMS_EXAMINED.get() + items.len());
        let is_frame =
            |item: &Item| matches!(item, Item::Dict(id) if self.pickle.lists[*id as usize].len() <= MAX_FRAME_ITEMS);
        if !items.iter().all(is_frame) {
            return Err(Error::custom("a frame is not a dict, or has too many entries"));
        }
        if let Some(known) = self.pickle.frames.borrow().get(items) {
            return Ok(Arc::clone(known));
        }
        // Shared frames are not counted as values, but by their bytes.
        let values = self.pickle.values.get();
        let mut frames = Vec::new();
        for item in items {
            self.pickle.values.set(MAX_FRAME_VALUES);
            let frame = Frame::deserialize(at(*item))?;
            count_values(&self.pickle.frame_bytes, size_of::<Frame>() + frame.filename.len() + frame.name.len())?;
            frames.push(frame);
        }
        self.pickle.values.set(values);
        let frames: Arc<[Frame]> = frames.into();
        self.pickle.frames.borrow_mut().insert(items, Arc::clone(&frames));
        Ok(frames)
    }
}

/// Maximum number of a frame's keys and values: three keys and three values, and more that some versions of PyTorch add.
const MAX_FRAME_ITEMS: usize = 64;
/// Maximum number of values that one frame may count as: its keys and values, and a mebibyte of text.
const MAX_FRAME_VALUES: usize = (1 << 20) / TEXT_BYTES_PER_VALUE + MAX_FRAME_ITEMS;

impl<'de> Deserializer<'de> for PickleValue<'_, 'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        let text = if let Item::Text(text) = self.item { text.len() } else { 0 };
        count_values(&self.pickle.values, 1 + text / TEXT_BYTES_PER_VALUE)?;
        match self.item {
            Item::Null | Item::Frame(_) | Item::Stack(_) | Item::Event => visitor.visit_unit(),
            Item::Bool(is) => visitor.visit_bool(is),
            Item::Int(int) => visitor.visit_i64(int),
            Item::Float(bits) if f64::from_bits(bits).is_finite() => visitor.visit_f64(f64::from_bits(bits)),
            Item::Float(_) => visitor.visit_unit(),
            Item::Text(text) => visitor.visit_borrowed_str(text),
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
        count_values(&self.pickle.values, 1)?;
        match self.item {
            Item::Text(text) => visitor.visit_enum(text.into_deserializer()),
            _ => Err(Error::custom("a name is not text")),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, name: &'static str, visitor: V) -> Result<V::Value, Error> {
        if name != SHARED_FRAMES {
            return visitor.visit_newtype_struct(self);
        }
        match self.item {
            Item::List(list) => visitor.visit_u32(list),
            Item::Stack(stack) => visitor.visit_u32(STREAMED + stack),
            _ => Err(Error::custom("the frames are not a list")),
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

impl<'a> IntoDeserializer<'a> for PickleValue<'_, 'a> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

// Counts the items of stacks that this thread has decoded.
#[cfg(test)]
thread_local!(pub(super) static ITEMS_EXAMINED: Cell<usize> = const { Cell::new(0) });
