//! Writes snapshots as pickles.
//!
//! As in PyTorch's pickles, frames shared by events are written once and then referred to by number; serde-pickle would repeat them.

use std::collections::HashMap;

use serde::Serialize;
use serde::de::value::Error;
use serde::ser::{self, Error as _, Impossible, Serializer};

use super::frames::SHARED_FRAMES;

/// Returns a value's Python pickle, protocol 3, using only instructions that PyTorch's viewer supports.
pub(super) fn write(value: &impl Serialize) -> Result<Vec<u8>, Error> {
    let mut pickler = Pickler { out: vec![0x80, 3], shared: HashMap::new() };
    value.serialize(&mut pickler)?;
    pickler.out.push(b'.');
    Ok(pickler.out)
}

/// The state of writing a pickle.
struct Pickler {
    out: Vec<u8>,
    /// The numbers of the frames already written, by their pickled bytes.
    shared: HashMap<Vec<u8>, u32>,
}

impl Pickler {
    fn instruction(&mut self, opcode: u8, argument: &[u8]) -> Result<(), Error> {
        self.out.push(opcode);
        self.out.extend_from_slice(argument);
        Ok(())
    }

    /// Writes a value, or a reference to its earlier copy.
    fn write_shared<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), Error> {
        let start = self.out.len();
        value.serialize(&mut *self)?;
        let pickle = self.out[start..].to_vec();
        let next = self.shared.len() as u32;
        if let Some(known) = self.shared.get(&pickle) {
            self.out.truncate(start);
            return self.instruction(b'j', &known.to_le_bytes()); // LONG_BINGET
        }
        self.shared.insert(pickle, next);
        self.instruction(b'r', &next.to_le_bytes()) // LONG_BINPUT
    }

    /// Starts a list or dict with the opcode `empty`; the opcode `add` appends items.
    fn start_items(&mut self, empty: u8, add: u8) -> Result<ItemWriter<'_>, Error> {
        self.out.push(empty);
        Ok(ItemWriter { pickler: self, add, count: 0 })
    }
}

/// Error text for types that snapshots do not contain.
const NOT_WRITTEN: &str = "snapshots have no value of this type";

impl<'a> Serializer for &'a mut Pickler {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = ItemWriter<'a>;
    type SerializeTuple = ItemWriter<'a>;
    type SerializeTupleStruct = Impossible<(), Error>;
    type SerializeTupleVariant = Impossible<(), Error>;
    type SerializeMap = ItemWriter<'a>;
    type SerializeStruct = ItemWriter<'a>;
    type SerializeStructVariant = Impossible<(), Error>;

    fn serialize_bool(self, is: bool) -> Result<(), Error> {
        self.instruction(if is { 0x88 } else { 0x89 }, &[])
    }

    fn serialize_i8(self, int: i8) -> Result<(), Error> {
        self.serialize_i64(int.into())
    }

    fn serialize_i16(self, int: i16) -> Result<(), Error> {
        self.serialize_i64(int.into())
    }

    fn serialize_i32(self, int: i32) -> Result<(), Error> {
        self.serialize_i64(int.into())
    }

    fn serialize_i64(self, int: i64) -> Result<(), Error> {
        match i32::try_from(int) {
            Ok(int) => self.instruction(b'J', &int.to_le_bytes()),
            Err(_) => {
                self.out.extend([0x8a, 8]); // LONG1
                self.out.extend(int.to_le_bytes());
                Ok(())
            }
        }
    }

    fn serialize_u8(self, int: u8) -> Result<(), Error> {
        self.serialize_i64(int.into())
    }

    fn serialize_u16(self, int: u16) -> Result<(), Error> {
        self.serialize_i64(int.into())
    }

    fn serialize_u32(self, int: u32) -> Result<(), Error> {
        self.serialize_i64(int.into())
    }

    fn serialize_u64(self, int: u64) -> Result<(), Error> {
        let int = i64::try_from(int).map_err(|_| Error::custom(format_args!("{int} does not fit in 63 bits")))?;
        self.serialize_i64(int)
    }

    fn serialize_f32(self, float: f32) -> Result<(), Error> {
        self.serialize_f64(float.into())
    }

    fn serialize_f64(self, float: f64) -> Result<(), Error> {
        self.instruction(b'G', &float.to_be_bytes())
    }

    fn serialize_char(self, char: char) -> Result<(), Error> {
        self.serialize_str(char.encode_utf8(&mut [0; 4]))
    }

    fn serialize_str(self, text: &str) -> Result<(), Error> {
        let length = u32::try_from(text.len()).map_err(|_| Error::custom("a text has more than 4 GiB"))?;
        self.instruction(b'X', &length.to_le_bytes())?;
        self.out.extend_from_slice(text.as_bytes());
        Ok(())
    }

    fn serialize_bytes(self, _: &[u8]) -> Result<(), Error> {
        Err(Error::custom(NOT_WRITTEN))
    }

    fn serialize_none(self) -> Result<(), Error> {
        self.instruction(b'N', &[])
    }

    fn serialize_some<T: ?Sized + Serialize>(self, value: &T) -> Result<(), Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<(), Error> {
        self.serialize_none()
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<(), Error> {
        self.serialize_none()
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<(), Error> {
        self.serialize_str(variant)
    }

    fn serialize_newtype_struct<T: ?Sized + Serialize>(self, name: &'static str, value: &T) -> Result<(), Error> {
        if name == SHARED_FRAMES { self.write_shared(value) } else { value.serialize(self) }
    }

    fn serialize_newtype_variant<T: ?Sized + Serialize>(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: &T,
    ) -> Result<(), Error> {
        Err(Error::custom(NOT_WRITTEN))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<ItemWriter<'a>, Error> {
        self.start_items(b']', b'e')
    }

    fn serialize_tuple(self, _: usize) -> Result<ItemWriter<'a>, Error> {
        Ok(ItemWriter { pickler: self, add: b't', count: 0 })
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Impossible<(), Error>, Error> {
        Err(Error::custom(NOT_WRITTEN))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Impossible<(), Error>, Error> {
        Err(Error::custom(NOT_WRITTEN))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<ItemWriter<'a>, Error> {
        self.start_items(b'}', b'u')
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<ItemWriter<'a>, Error> {
        self.start_items(b'}', b'u')
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        _: &'static str,
        _: usize,
    ) -> Result<Impossible<(), Error>, Error> {
        Err(Error::custom(NOT_WRITTEN))
    }
}

/// Writes a list or dict in batches of items, each between a mark and the instruction `add`. A tuple is one batch, created by `add`.
struct ItemWriter<'a> {
    pickler: &'a mut Pickler,
    add: u8,
    /// The number of keys and values written.
    count: usize,
}

/// The most items in a batch: the viewer passes a batch as the arguments of one call.
const MAX_BATCH_ITEMS: usize = 1000;

impl ItemWriter<'_> {
    fn item<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), Error> {
        if self.count.is_multiple_of(MAX_BATCH_ITEMS) {
            self.finish();
            self.pickler.out.push(b'(');
        }
        self.count += 1;
        value.serialize(&mut *self.pickler)
    }

    fn finish(&mut self) {
        if self.count > 0 {
            self.pickler.out.push(self.add);
        }
    }
}

/// Implements serde's traits for sequences.
macro_rules! impl_sequence_writers {
    ($($list:ident)*) => { $(
        impl ser::$list for ItemWriter<'_> {
            type Ok = ();
            type Error = Error;

            fn serialize_element<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), Error> {
                self.item(value)
            }

            fn end(mut self) -> Result<(), Error> {
                self.finish();
                Ok(())
            }
        }
    )* };
}

impl_sequence_writers! { SerializeSeq SerializeTuple }

impl ser::SerializeMap for ItemWriter<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_key<T: ?Sized + Serialize>(&mut self, key: &T) -> Result<(), Error> {
        self.item(key)
    }

    fn serialize_value<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), Error> {
        self.item(value)
    }

    fn end(mut self) -> Result<(), Error> {
        self.finish();
        Ok(())
    }
}

impl ser::SerializeStruct for ItemWriter<'_> {
    type Ok = ();
    type Error = Error;

    fn serialize_field<T: ?Sized + Serialize>(&mut self, key: &'static str, value: &T) -> Result<(), Error> {
        self.item(key)?;
        self.item(value)
    }

    fn end(mut self) -> Result<(), Error> {
        self.finish();
        Ok(())
    }
}
