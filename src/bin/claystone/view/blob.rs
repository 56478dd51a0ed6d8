//! What a page shows, as columns in one block of bytes: a script reads a million events of it in a second, and whatever
//! names a file has, base64 cannot end the element that holds it.
//!
//! The block is the length of a JSON text (u32), that text, and the columns it lists, each at a multiple of 8 bytes from
//! the end of the text, which is padded to one; little-endian throughout, deflated, in base64.

use std::collections::HashMap;
use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use serde_json::{Map, Value, json};

/// The columns of a page, and what is said of them in JSON.
#[derive(Default)]
pub struct Blob {
    meta: Map<String, Value>,
    columns: Map<String, Value>,
    body: Vec<u8>,
}

/// An element of a column: the kinds of number that typed arrays have.
pub trait Number: Copy {
    /// As the script names it.
    const KIND: &'static str;

    fn put(self, out: &mut Vec<u8>);
}

macro_rules! number {
    ($($type:ty)*) => {$(
        impl Number for $type {
            const KIND: &'static str = stringify!($type);

            fn put(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

number!(u8 u32 i32 f64);

impl Blob {
    pub fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.meta.insert(key.to_owned(), value.into());
    }

    /// Adds a column.
    pub fn column<T: Number>(&mut self, name: &str, values: impl IntoIterator<Item = T>) {
        self.body.resize(self.body.len().next_multiple_of(8), 0);
        let (from, mut count) = (self.body.len(), 0u64);
        for value in values {
            value.put(&mut self.body);
            count += 1;
        }
        self.columns.insert(name.to_owned(), json!([T::KIND, from, count]));
    }

    /// Writes the block.
    ///
    /// # Errors
    /// When `out` fails, or the JSON text has 4 GiB.
    pub fn write(mut self, out: &mut impl Write) -> io::Result<()> {
        self.meta.insert("columns".to_owned(), Value::Object(self.columns));
        let mut text = serde_json::to_vec(&self.meta)?;
        text.resize((text.len() + 4).next_multiple_of(8) - 4, b' ');
        let length = u32::try_from(text.len()).map_err(|_| io::Error::other("it has more than 4 GiB of names"))?;
        let base64 = base64::write::EncoderWriter::new(out, &STANDARD);
        let mut deflate = DeflateEncoder::new(base64, Compression::fast());
        deflate.write_all(&length.to_le_bytes())?;
        deflate.write_all(&text)?;
        deflate.write_all(&self.body)?;
        deflate.finish()?.finish().map(drop)
    }
}

/// The base64 of a few bytes.
pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Texts by number, each kept once.
#[derive(Default)]
pub struct Texts(HashMap<String, u32>);

impl Texts {
    /// The number of a text.
    pub fn number(&mut self, text: &str) -> u32 {
        if let Some(&number) = self.0.get(text) {
            return number;
        }
        let number = self.0.len() as u32;
        self.0.insert(text.to_owned(), number);
        number
    }

    /// All of them, in the order of their numbers.
    pub fn into_json(self) -> Value {
        let mut texts: Vec<(u32, String)> = self.0.into_iter().map(|(text, number)| (number, text)).collect();
        texts.sort_unstable();
        texts.into_iter().map(|(_, text)| text).collect()
    }
}

#[cfg(test)]
impl Blob {
    /// A column's numbers.
    pub fn numbers(&self, name: &str) -> Vec<f64> {
        let place = &self.columns[name];
        let (from, count) = (place[1].as_u64().unwrap() as usize, place[2].as_u64().unwrap() as usize);
        let body = &self.body[from..];
        match place[0].as_str().unwrap() {
            "u8" => body[..count].iter().map(|&byte| byte.into()).collect(),
            "f64" => body[..8 * count].chunks(8).map(|c| f64::from_le_bytes(c.try_into().unwrap())).collect(),
            "u32" => body[..4 * count].chunks(4).map(|c| u32::from_le_bytes(c.try_into().unwrap()).into()).collect(),
            "i32" => body[..4 * count].chunks(4).map(|c| i32::from_le_bytes(c.try_into().unwrap()).into()).collect(),
            kind => unreachable!("no column is of {kind}"),
        }
    }

    /// What is said under a key.
    pub fn said(&self, key: &str) -> &Value {
        &self.meta[key]
    }
}
