//! Reads the pickles that Python and PyTorch write of plain data.
//!
//! serde-pickle's reader forgets a shared value after as many uses as it counted, but each use of a shared list uses
//! what is shared inside it once more: snapshots, whose entries share their frames, then fail to load.

use std::collections::HashMap;

use serde_json::{Map, Number, Value};

/// The value that the pickle holds, with tuples as lists. Of the instructions, those that PyTorch's viewer knows.
pub(super) fn read(bytes: &[u8]) -> Result<Value, String> {
    let mut reader = Reader { bytes, nodes: Vec::new(), stack: Vec::new(), marks: Vec::new(), memo: HashMap::new() };
    let root = reader.run()?;
    reader.value(root, MAX_DEPTH, &mut MAX_VALUES.clone())
}

/// Snapshots nest six deep. The bound keeps lists that contain themselves from going on for ever.
const MAX_DEPTH: usize = 32;
/// With sharing, a short pickle may stand for more values than there is memory for.
const MAX_VALUES: usize = 1 << 28;

/// Where a value is among the reader's nodes.
type Id = usize;

enum Node {
    Leaf(Value),
    List(Vec<Id>),
    /// Keys and values in turn.
    Dict(Vec<Id>),
}

struct Reader<'a> {
    bytes: &'a [u8],
    nodes: Vec<Node>,
    stack: Vec<Id>,
    marks: Vec<usize>,
    memo: HashMap<usize, Id>,
}

impl<'a> Reader<'a> {
    fn run(&mut self) -> Result<Id, String> {
        loop {
            let opcode = self.take(1)?[0];
            match opcode {
                b'.' => return self.pop(),
                0x80 => _ = self.take(1)?, // PROTO
                0x95 => _ = self.take(8)?, // FRAME
                b'(' => self.marks.push(self.stack.len()),
                b'N' => self.leaf(Value::Null),
                0x88 => self.leaf(true),
                0x89 => self.leaf(false),
                b'J' => self.int(4, true)?,
                b'K' => self.int(1, false)?,
                b'M' => self.int(2, false)?,
                0x8a => {
                    let n = self.size(1)?;
                    self.int(n, true)?
                }
                b'G' => {
                    let float = f64::from_be_bytes(self.take(8)?.try_into().map_err(|_| "cut short")?);
                    self.leaf(Number::from_f64(float).map_or(Value::Null, Value::Number));
                }
                b'X' => self.text(4)?,
                0x8c => self.text(1)?,
                b']' | b')' => self.push(Node::List(Vec::new())),
                b'}' => self.push(Node::Dict(Vec::new())),
                b'l' | b't' => {
                    let items = self.marked()?;
                    self.push(Node::List(items));
                }
                b'd' => {
                    let items = self.marked()?;
                    self.push(Node::Dict(items));
                }
                0x85..=0x87 => {
                    let items = self.last(usize::from(opcode - 0x84))?;
                    self.push(Node::List(items));
                }
                b'a' => {
                    let items = self.last(1)?;
                    self.extend(items)?;
                }
                b's' => {
                    let items = self.last(2)?;
                    self.extend(items)?;
                }
                b'e' | b'u' => {
                    let items = self.marked()?;
                    self.extend(items)?;
                }
                b'q' => {
                    let id = self.size(1)?;
                    self.memoize(id)?;
                }
                b'r' => {
                    let id = self.size(4)?;
                    self.memoize(id)?;
                }
                0x94 => self.memoize(self.memo.len())?,
                b'h' => {
                    let id = self.size(1)?;
                    self.recall(id)?;
                }
                b'j' => {
                    let id = self.size(4)?;
                    self.recall(id)?;
                }
                _ => return Err(format!("the instruction {opcode:#x} is not one of plain data")),
            }
        }
    }

    fn take(&mut self, n: usize) -> Result<&'a [u8], String> {
        let (head, tail) = self.bytes.split_at_checked(n).ok_or("it is cut short")?;
        self.bytes = tail;
        Ok(head)
    }

    fn size(&mut self, n: usize) -> Result<usize, String> {
        Ok(self.take(n)?.iter().rev().fold(0, |size, byte| size << 8 | usize::from(*byte)))
    }

    fn int(&mut self, n: usize, signed: bool) -> Result<(), String> {
        let bytes = self.take(n)?;
        let negative = signed && bytes.last().is_some_and(|b| *b >= 0x80);
        let mut wide = [if negative { 0xff } else { 0 }; 16];
        wide.get_mut(..n).ok_or("an integer has more than 16 bytes")?.copy_from_slice(bytes);
        let value = i64::try_from(i128::from_le_bytes(wide)).map_err(|_| "an integer does not fit in 64 bits")?;
        self.leaf(value);
        Ok(())
    }

    fn text(&mut self, n: usize) -> Result<(), String> {
        let n = self.size(n)?;
        let text = std::str::from_utf8(self.take(n)?).map_err(|e| e.to_string())?;
        self.leaf(text);
        Ok(())
    }

    fn push(&mut self, node: Node) {
        self.stack.push(self.nodes.len());
        self.nodes.push(node);
    }

    fn leaf(&mut self, value: impl Into<Value>) {
        self.push(Node::Leaf(value.into()));
    }

    fn pop(&mut self) -> Result<Id, String> {
        self.stack.pop().ok_or_else(|| "an instruction finds nothing on the stack".into())
    }

    fn last(&mut self, n: usize) -> Result<Vec<Id>, String> {
        let rest = self.stack.len().checked_sub(n).ok_or("an instruction finds too little on the stack")?;
        Ok(self.stack.split_off(rest))
    }

    fn marked(&mut self) -> Result<Vec<Id>, String> {
        let mark = self.marks.pop().filter(|m| *m <= self.stack.len()).ok_or("an instruction finds no mark")?;
        Ok(self.stack.split_off(mark))
    }

    /// Adds to the list or dict on top of the stack.
    fn extend(&mut self, items: Vec<Id>) -> Result<(), String> {
        match self.stack.last().map(|id| &mut self.nodes[*id]) {
            Some(Node::List(list) | Node::Dict(list)) => list.extend(items),
            _ => return Err("what is added to is neither list nor dict".into()),
        }
        Ok(())
    }

    fn memoize(&mut self, key: usize) -> Result<(), String> {
        let top = *self.stack.last().ok_or("an instruction finds nothing on the stack")?;
        self.memo.insert(key, top);
        Ok(())
    }

    fn recall(&mut self, key: usize) -> Result<(), String> {
        self.stack.push(*self.memo.get(&key).ok_or("a shared value is used before it is there")?);
        Ok(())
    }

    fn value(&self, id: Id, depth: usize, budget: &mut usize) -> Result<Value, String> {
        *budget = budget.checked_sub(1).ok_or("it holds too many values")?;
        let depth = depth.checked_sub(1).ok_or("it is nested too deep")?;
        match &self.nodes[id] {
            Node::Leaf(value) => Ok(value.clone()),
            Node::List(items) => items.iter().map(|item| self.value(*item, depth, budget)).collect(),
            Node::Dict(items) => {
                let mut map = Map::new();
                for pair in items.chunks_exact(2) {
                    let value = self.value(pair[1], depth, budget)?;
                    match &self.nodes[pair[0]] {
                        Node::Leaf(Value::String(key)) => map.insert(key.clone(), value),
                        Node::Leaf(key) => map.insert(key.to_string(), value),
                        _ => return Err("a dict has a key that is no text".into()),
                    };
                }
                Ok(Value::Object(map))
            }
        }
    }
}
