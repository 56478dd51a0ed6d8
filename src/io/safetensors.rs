//! The safetensors format of Hugging Face: a JSON header, then the elements.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::io::{BufReader, Read, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::value::StrDeserializer;
use serde::de::{Deserializer, Error as _, IntoDeserializer, MapAccess, Visitor};

use super::{StateDict, checked_shape, create, file_error, finish, open, read_elements, tensor_error, with_location};
use crate::internal::Excerpt;
use crate::storage::{Caller, MappedFile};
use crate::{DType, Device, Result, Shape, Tensor};

/// The maximum header length in bytes, the same as in the safetensors library.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Reads the tensors of a safetensors file to `device`, in the file's order. To read single tensors, use [`SafeTensors`]. Fails with
/// [`crate::Error::Invalid`], with the names of the file and the tensor, if the file does not exist or is damaged, and with
/// [`crate::Error::OutOfMemory`].
#[track_caller]
pub fn read_safetensors(path: impl AsRef<Path>, device: Device) -> Result<StateDict> {
    let _caller = Caller::enter();
    let (op, path) = ("read_safetensors", path.as_ref());
    let (file, size) = open(op, path)?;
    let size = size.ok_or_else(|| file_error(op, path, "it is not a regular file"))?;
    let mut file = BufReader::new(file);
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| file_error(op, path, TOO_SHORT))?;
    let length = header_length(length, size).map_err(|e| file_error(op, path, e))?;
    let mut header = Vec::new();
    file.by_ref().take(length).read_to_end(&mut header).map_err(|e| file_error(op, path, e))?;
    let header = parse_header(&header, size - 8 - length).map_err(|e| file_error(op, path, e))?;
    // `parse_header` has checked that tensors in the order of their offsets have no gaps between them.
    let read = |name: String| {
        let info = header.info(&name).expect("a name of its own");
        let tensor = readable_type(info)
            .and_then(|(dtype, shape)| read_elements(&mut file, Some(data_bytes(info)), shape, dtype, device, 0));
        Ok((name.clone(), tensor.map_err(|e| with_location(e, op, path, Some(&name)))?))
    };
    header.offset_keys().into_iter().map(read).collect()
}

const TOO_SHORT: &str = "it is too short for a safetensors file";

/// Returns the length of the header in a file of `size` bytes. `bytes` are the first bytes of the file.
fn header_length(bytes: [u8; 8], size: u64) -> Result<u64, String> {
    let length = u64::from_le_bytes(bytes);
    match size.checked_sub(8) {
        Some(rest) if length <= rest.min(MAX_HEADER_BYTES) => Ok(length),
        _ => Err(format!("a header of {length} bytes does not fit in a file of {size}")),
    }
}

/// Parses the header. Returns an error unless it describes all `available` bytes of elements.
fn parse_header(json: &[u8], available: u64) -> Result<Metadata, String> {
    let HeaderEntries(tensors) = serde_json::from_slice(json).map_err(|e| e.to_string())?;
    let mut tensors: Vec<(String, TensorInfo)> = tensors.into_iter().collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let header = Metadata::new(None, tensors).map_err(|e| e.to_string())?;
    match header.data_len() as u64 {
        told if told == available => Ok(header),
        told => Err(format!("its header describes {told} bytes of elements, but the file has {available}")),
    }
}

fn data_bytes(info: &TensorInfo) -> u64 {
    (info.data_offsets.1 - info.data_offsets.0) as u64
}

/// A tensor in the header. The dtype is any text.
#[derive(Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (usize, usize),
}

impl HeaderEntry {
    /// Converts to the type of the safetensors library. A dtype that the library does not know becomes bytes.
    fn into_tensor_info(self) -> TensorInfo {
        let (start, end) = self.data_offsets;
        let name: StrDeserializer<'_, serde::de::value::Error> = self.dtype.as_str().into_deserializer();
        let (dtype, shape) = match Dtype::deserialize(name) {
            Ok(dtype) => (dtype, self.shape),
            Err(_) => (Dtype::U8, vec![end.saturating_sub(start)]),
        };
        TensorInfo { dtype, shape, data_offsets: self.data_offsets }
    }
}

/// The tensors of a header by name. The safetensors library would first build a structure many times larger than the header.
struct HeaderEntries(HashMap<String, TensorInfo>);

impl<'de> Deserialize<'de> for HeaderEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<HeaderEntries, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = HeaderEntries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tensors by name")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderEntries, A::Error> {
                let mut tensors = HashMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<Option<HashMap<String, String>>>()?;
                        continue;
                    }
                    match tensors.entry(name) {
                        Entry::Vacant(entry) => _ = entry.insert(map.next_value::<HeaderEntry>()?.into_tensor_info()),
                        Entry::Occupied(entry) => {
                            let name = Excerpt(entry.key());
                            return Err(A::Error::custom(format_args!("tensor {name} occurs twice")));
                        }
                    }
                }
                Ok(HeaderEntries(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Writes tensors as a safetensors file. Dtypes with larger elements come first, so that all elements are aligned. Fails with
/// [`crate::Error::Invalid`], with the file's name, if writing fails.
pub fn write_safetensors(path: impl AsRef<Path>, tensors: &StateDict) -> Result<()> {
    let (op, path) = ("write_safetensors", path.as_ref());
    let mut order: Vec<(&str, &Tensor)> = tensors.iter().collect();
    order.sort_by_key(|(_, tensor)| std::cmp::Reverse(tensor.dtype().size()));
    let mut end = 0;
    let info = |(name, tensor): &(&str, &Tensor)| {
        let start = end;
        end = tensor.numel().saturating_mul(tensor.dtype().size()).saturating_add(end);
        let (_, dtype) =
            DTYPES.into_iter().find(|(own, _)| *own == tensor.dtype()).expect("all dtypes are in the table");
        (name.to_string(), TensorInfo { dtype, shape: tensor.shape().dims().to_vec(), data_offsets: (start, end) })
    };
    let header = Metadata::new(None, order.iter().map(info).collect()).map_err(|e| file_error(op, path, e))?;
    let mut header = serde_json::to_vec(&header).map_err(|e| file_error(op, path, e))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = create(op, path)?;
    let begun = file.write_all(&(header.len() as u64).to_le_bytes()).and_then(|()| file.write_all(&header));
    begun.map_err(|e| file_error(op, path, e))?;
    for (name, tensor) in order {
        tensor.write_to(&mut file).map_err(|e| with_location(e, op, path, Some(name)))?;
    }
    finish(op, path, file)
}

/// The safetensors name of each dtype.
const DTYPES: [(DType, Dtype); 11] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::F16, Dtype::F16),
    (DType::BF16, Dtype::BF16),
    (DType::I64, Dtype::I64),
    (DType::I32, Dtype::I32),
    (DType::U32, Dtype::U32),
    (DType::U8, Dtype::U8),
    (DType::I16, Dtype::I16),
    (DType::I8, Dtype::I8),
    (DType::Bool, Dtype::BOOL),
];

/// Returns the dtype and shape with which to read a tensor. If claystone lacks the dtype, these are bytes with one more dim.
fn readable_type(info: &TensorInfo) -> Result<(DType, Shape)> {
    let sizes: Vec<u64> = info.shape.iter().map(|&d| d as u64).collect();
    let (dtype, sizes) = match DTYPES.iter().find(|(_, in_file)| *in_file == info.dtype) {
        Some(&(own, _)) => (own, sizes),
        None if info.dtype.bitsize().is_multiple_of(8) => {
            (DType::U8, sizes.into_iter().chain([info.dtype.bitsize() as u64 / 8]).collect())
        }
        None => (DType::U8, vec![data_bytes(info)]),
    };
    Ok((dtype, checked_shape(sizes.into_iter())?))
}

/// The tensors of a memory-mapped safetensors file. Only requested tensors are read; each is copied from the file's pages directly to
/// the device. See [`MappedFile::open`].
pub struct SafeTensors<'a> {
    file: &'a MappedFile,
    /// The offset of the elements in the file, in bytes.
    start: usize,
    names: Vec<String>,
    header: Metadata,
}

impl<'a> SafeTensors<'a> {
    /// Reads the header. Fails with [`crate::Error::Invalid`], with the file's name, if the file is not a complete safetensors file.
    pub fn new(file: &'a MappedFile) -> Result<SafeTensors<'a>> {
        let read = || {
            let (length, rest) = file.bytes().split_first_chunk::<8>().ok_or(TOO_SHORT)?;
            let length = header_length(*length, file.bytes().len() as u64)? as usize;
            let header = parse_header(&rest[..length], (rest.len() - length) as u64)?;
            Ok((8 + length, header))
        };
        let (start, header) = read().map_err(|e: String| file_error("SafeTensors::new", file.path(), e))?;
        Ok(SafeTensors { file, start, names: header.offset_keys(), header })
    }

    /// Returns the names of the tensors, in the file's order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(|n| &n[..])
    }

    /// Copies the tensor with this name to `device`. Fails with [`crate::Error::Invalid`], with the names of the file and the tensor, if
    /// the tensor does not exist, and with [`crate::Error::OutOfMemory`].
    #[track_caller]
    pub fn get(&self, name: &str, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (op, path) = ("SafeTensors::get", self.file.path());
        let info =
            self.header.info(name).ok_or_else(|| tensor_error(op, path, name, "there is no tensor of this name"))?;
        let (from, to) = info.data_offsets;
        let bytes = &self.file.bytes()[self.start..][from..to];
        let tensor = readable_type(info).and_then(|(dtype, shape)| Tensor::from_bytes(bytes, shape, (dtype, device)));
        tensor.map_err(|e| with_location(e, op, path, Some(name)))
    }
}
