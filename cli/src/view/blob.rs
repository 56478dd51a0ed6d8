//! The data of a page, as columns in one block of bytes, from which a script reads a million events in a second. Because of
//! base64, no name in a file can end the HTML element that holds the data.
//!
//! The block consists of the length of a JSON text (u32), that text, and the columns that the text lists. The text is padded to a
//! multiple of 8 bytes, and each column begins at a multiple of 8 bytes after it. Little-endian, deflated, in base64.

use std::collections::HashMap;
use std::io::{self, Write};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use flate2::Compression;
use flate2::write::DeflateEncoder;
use serde_json::{Map, Value, json};

/// The columns of a page, and its metadata as JSON.
#[derive(Default)]
pub struct Blob {
    meta: Map<String, Value>,
    columns: Map<String, Value>,
    body: Vec<u8>,
}

/// An element of a column: a number type that JavaScript's typed arrays have.
pub trait Number: Copy {
    /// The name of the type in the page's script.
    const KIND: &'static str;

    /// Appends the number in little-endian order.
    fn write_le(self, out: &mut Vec<u8>);
}

macro_rules! number {
    ($($type:ty)*) => {$(
        impl Number for $type {
            const KIND: &'static str = stringify!($type);

            fn write_le(self, out: &mut Vec<u8>) {
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

    pub fn column<T: Number>(&mut self, name: &str, values: impl IntoIterator<Item = T>) {
        self.body.resize(self.body.len().next_multiple_of(8), 0);
        let (from, mut count) = (self.body.len(), 0u64);
        for value in values {
            value.write_le(&mut self.body);
            count += 1;
        }
        self.columns.insert(name.to_owned(), json!([T::KIND, from, count]));
    }

    /// Writes the block to `out`.
    ///
    /// # Errors
    /// Errors of `out`; a JSON text of 4 GiB or more.
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

pub fn base64(bytes: &[u8]) -> String {
    STANDARD.encode(bytes)
}

/// Assigns a number to each distinct text.
#[derive(Default)]
pub struct TextTable(HashMap<String, u32>);

impl TextTable {
    /// Returns the number of a text, and adds the text if it is new.
    pub fn number(&mut self, text: &str) -> u32 {
        if let Some(&number) = self.0.get(text) {
            return number;
        }
        let number = self.0.len() as u32;
        self.0.insert(text.to_owned(), number);
        number
    }

    /// Returns all texts in the order of their numbers.
    pub fn into_json(self) -> Value {
        let mut texts: Vec<(u32, String)> = self.0.into_iter().map(|(text, number)| (number, text)).collect();
        texts.sort_unstable();
        texts.into_iter().map(|(_, text)| text).collect()
    }
}

#[cfg(test)]
impl Blob {
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

    pub fn metadata(&self, key: &str) -> &Value {
        &self.meta[key]
    }
}
