//! Writes snapshots as pickles.
//!
//! As in PyTorch's, frames that events have in common are written once and referred to by number: serde-pickle would write
//! the stack of each event in full.

use std::collections::HashMap;

use serde::Serialize;
use serde::de::value::Error;
use serde::ser::{self, Error as _, Impossible, Serializer};

use super::frames::SHARED;

/// Python's pickle of a value, protocol 3, in instructions that PyTorch's viewer knows.
pub(super) fn write(value: &impl Serialize) -> Result<Vec<u8>, Error> {
    let mut pickler = Pickler { out: vec![0x80, 3], shared: HashMap::new() };
    value.serialize(&mut pickler)?;
    pickler.out.push(b'.');
    Ok(pickler.out)
}

struct Pickler {
    out: Vec<u8>,
    /// The numbers of frames that were written, by their pickle.
    shared: HashMap<Vec<u8>, u32>,
}

impl Pickler {
    fn instruction(&mut self, opcode: u8, argument: &[u8]) -> Result<(), Error> {
        self.out.push(opcode);
        self.out.extend_from_slice(argument);
        Ok(())
    }

    fn share<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), Error> {
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

    /// Begins a list or dict, `empty`, to which `add` adds.
    fn items(&mut self, empty: u8, add: u8) -> Result<Items<'_>, Error> {
        self.out.push(empty);
        Ok(Items { pickler: self, add, count: 0 })
    }
}

const NOT_WRITTEN: &str = "snapshots have no value of this type";

impl<'a> Serializer for &'a mut Pickler {
    type Ok = ();
    type Error = Error;
    type SerializeSeq = Items<'a>;
    type SerializeTuple = Items<'a>;
    type SerializeTupleStruct = Impossible<(), Error>;
    type SerializeTupleVariant = Impossible<(), Error>;
    type SerializeMap = Items<'a>;
    type SerializeStruct = Items<'a>;
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
        if name == SHARED { self.share(value) } else { value.serialize(self) }
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

    fn serialize_seq(self, _: Option<usize>) -> Result<Items<'a>, Error> {
        self.items(b']', b'e')
    }

    fn serialize_tuple(self, _: usize) -> Result<Items<'a>, Error> {
        Ok(Items { pickler: self, add: b't', count: 0 })
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

    fn serialize_map(self, _: Option<usize>) -> Result<Items<'a>, Error> {
        self.items(b'}', b'u')
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Items<'a>, Error> {
        self.items(b'}', b'u')
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

/// Of a list or dict: added in batches, each between a mark and an instruction. A tuple's are one batch, which makes it.
struct Items<'a> {
    pickler: &'a mut Pickler,
    add: u8,
    /// Keys and values count as one each.
    count: usize,
}

/// The viewer passes a batch as the arguments of one call.
const BATCH: usize = 1000;

impl Items<'_> {
    fn item<T: ?Sized + Serialize>(&mut self, value: &T) -> Result<(), Error> {
        if self.count.is_multiple_of(BATCH) {
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

macro_rules! lists {
    ($($list:ident)*) => { $(
        impl ser::$list for Items<'_> {
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

lists! { SerializeSeq SerializeTuple }

impl ser::SerializeMap for Items<'_> {
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

impl ser::SerializeStruct for Items<'_> {
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
