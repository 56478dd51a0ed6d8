//! GGUF, the file format of llama.cpp: metadata by key, then tensors with plain or quantised elements.

use std::collections::BTreeMap;
use std::ops::Range;
use std::{fmt, str};

use super::{checked_shape, content_error, tensor_error, with_location};
use crate::internal::Excerpt;
use crate::quantized::{QuantFormat, QuantizedTensor};
use crate::storage::{Caller, SharedFile};
use crate::{DType, Device, Error, Result, Shape, Tensor};

/// The maximum number of keys, and of tensors.
const MAX_ENTRIES: u64 = 1 << 16;

/// The smallest length of a key with its value, in bytes.
const MIN_PAIR_BYTES: u64 = 13;

/// The smallest length of a tensor's description, in bytes.
const MIN_INFO_BYTES: u64 = 24;

/// The maximum number of dims of a tensor, as in ggml.
const MAX_RANK: u32 = 4;

/// A GGUF file. Only requested tensors are read. On the CPU device they use the file's pages without a copy; changing a plain tensor
/// in place does not change the file. To other devices they are copied.
///
/// ```
/// use claystone::io::gguf::{Gguf, Weight};
/// use claystone::{Device, storage::SharedFile};
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("model.gguf");
/// # let text = |s: &str| [&(s.len() as u64).to_le_bytes()[..], s.as_bytes()].concat();
/// # let head = [&b"GGUF\x03\0\0\0"[..], &[1u64, 1].map(u64::to_le_bytes).concat()].concat();
/// # let pair = [&text("llama.block_count")[..], &[4, 0, 0, 0, 30, 0, 0, 0]].concat();
/// # let info = [&text("output_norm.weight")[..], &[1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0], &[0; 12]].concat();
/// # let mut file = [head, pair, info].concat();
/// # file.resize(file.len().next_multiple_of(32), 0);
/// # file.extend([0, 0, 128, 63, 0, 0, 0, 64]);
/// # std::fs::write(&path, file).unwrap();
/// // SAFETY: no process writes to the file meanwhile.
/// let model = Gguf::new(unsafe { SharedFile::open(&path)? })?;
/// assert_eq!(model.u32("llama.block_count")?, 30);
/// let norm = model.tensor("output_norm.weight", Device::best())?;
/// assert_eq!(norm.to_vec::<f32>()?, [1.0, 2.0]);
/// assert!(matches!(model.weight("output_norm.weight", Device::Cpu)?, Weight::Plain(_)));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct Gguf {
    file: SharedFile,
    /// The range in bytes of the type and the value of each key.
    pairs: BTreeMap<String, Range<usize>>,
    tensors: BTreeMap<String, TensorInfo>,
}

/// The description of a tensor in a GGUF file.
#[derive(Debug)]
pub struct TensorInfo {
    /// The row-major shape. The file has its sizes in the reverse order.
    pub shape: Shape,
    /// The type of the elements.
    pub kind: GgufType,
    /// The number of bytes of the elements.
    pub nbytes: usize,
    /// The offset of the elements in the file, in bytes.
    offset: usize,
}

/// The type of the elements of a tensor in a GGUF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GgufType {
    /// Elements of a dtype.
    Plain(DType),
    /// Blocks of quantised elements.
    Quantized(QuantFormat),
}

/// A tensor of a GGUF file as it is stored.
#[derive(Debug)]
pub enum Weight {
    /// A tensor with elements of a dtype.
    Plain(Tensor),
    /// A tensor with quantised elements.
    Quantized(QuantizedTensor),
}

/// A value of the metadata.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum MetaValue<'a> {
    /// An integer of any of the format's eight integer types.
    Int(i128),
    /// A float of 32 or 64 bits.
    Float(f64),
    /// A bool.
    Bool(bool),
    /// A text.
    Str(&'a str),
    /// An array.
    Array(MetaArray<'a>),
}

/// An array of the metadata. All elements have one type, which is not an array.
#[derive(Clone, Copy, PartialEq)]
pub struct MetaArray<'a> {
    /// The format's number of the element type.
    kind: u32,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> MetaArray<'a> {
    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the elements, which are decoded one by one.
    pub fn iter(&self) -> impl Iterator<Item = MetaValue<'a>> + use<'a> {
        let (kind, mut reader) = (self.kind, Reader { bytes: self.bytes, at: 0 });
        (0..self.len).map_while(move |_| reader.value(kind).ok())
    }
}

impl fmt::Debug for MetaArray<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "array of {} elements", self.len)
    }
}

impl Gguf {
    /// Reads the metadata and the descriptions of the tensors, of versions 2 and 3.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the file's name if the file is not a complete GGUF file, has more than 65,536 keys or tensors, an array
    /// of arrays, a name twice, overlapping tensors, or a tensor of a type that is not supported, such as IQ4_XS.
    pub fn new(file: SharedFile) -> Result<Gguf> {
        let header = read_header(file.bytes());
        let (pairs, tensors) = header.map_err(|e| with_location(e, "Gguf::new", file.path(), None))?;
        Ok(Gguf { file, pairs, tensors })
    }

    /// Returns the keys and their values, sorted by key.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, MetaValue<'_>)> {
        self.pairs.keys().filter_map(|key| Some((&key[..], self.get(key)?)))
    }

    /// Returns the value of a key, or `None` if there is no such key.
    pub fn get(&self, key: &str) -> Option<MetaValue<'_>> {
        let bytes = &self.file.bytes()[self.pairs.get(key)?.clone()];
        Reader { bytes, at: 0 }.typed_value().ok()
    }

    /// Returns an integer of any type that is in the range of u32. Fails with [`Error::Invalid`] for another value and without the key.
    pub fn u32(&self, key: &str) -> Result<u32> {
        self.typed(key, "a u32", |value| if let MetaValue::Int(n) = value { n.try_into().ok() } else { None })
    }

    /// Returns a float or an integer, rounded to f32. Fails with [`Error::Invalid`] for another value and without the key.
    pub fn f32(&self, key: &str) -> Result<f32> {
        self.typed(key, "a number", |value| match value {
            MetaValue::Float(x) => Some(x as f32),
            MetaValue::Int(n) => Some(n as f32),
            _ => None,
        })
    }

    /// Returns a text. Fails with [`Error::Invalid`] for another value and without the key.
    pub fn str(&self, key: &str) -> Result<&str> {
        self.typed(key, "a text", |value| if let MetaValue::Str(text) = value { Some(text) } else { None })
    }

    /// Returns a bool. Fails with [`Error::Invalid`] for another value and without the key.
    pub fn bool(&self, key: &str) -> Result<bool> {
        self.typed(key, "a bool", |value| if let MetaValue::Bool(value) = value { Some(value) } else { None })
    }

    /// Returns an array. Fails with [`Error::Invalid`] for another value and without the key.
    pub fn array(&self, key: &str) -> Result<MetaArray<'_>> {
        self.typed(key, "an array", |value| if let MetaValue::Array(array) = value { Some(array) } else { None })
    }

    fn typed<'a, T>(&'a self, key: &str, kind: &str, to: impl FnOnce(MetaValue<'a>) -> Option<T>) -> Result<T> {
        let reason = match self.get(key).map(to) {
            Some(Some(value)) => return Ok(value),
            Some(None) => format!("the value of key {} is not {kind}", Excerpt(key)),
            None => format!("there is no key {}", Excerpt(key)),
        };
        Err(with_location(content_error(reason), "Gguf::get", self.file.path(), None))
    }

    /// Returns the names and descriptions of the tensors, sorted by name.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = (&str, &TensorInfo)> {
        self.tensors.iter().map(|(name, info)| (&name[..], info))
    }

    /// Returns a tensor with plain elements. Fails with [`Error::Invalid`] if there is no such tensor or if it is quantised, and with
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn tensor(&self, name: &str, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        match self.load("Gguf::tensor", name, device)? {
            Weight::Plain(tensor) => Ok(tensor),
            Weight::Quantized(_) => Err(self.error("Gguf::tensor", name, "it is quantised: use Gguf::quantized")),
        }
    }

    /// Returns a tensor with quantised elements. Fails with [`Error::Invalid`] if there is no such tensor or if it is plain, and with
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn quantized(&self, name: &str, device: Device) -> Result<QuantizedTensor> {
        let _caller = Caller::enter();
        match self.load("Gguf::quantized", name, device)? {
            Weight::Quantized(tensor) => Ok(tensor),
            Weight::Plain(_) => Err(self.error("Gguf::quantized", name, "it is not quantised: use Gguf::tensor")),
        }
    }

    /// Returns a tensor, plain or quantised. Fails with [`Error::Invalid`] if there is no such tensor, and with [`Error::OutOfMemory`].
    #[track_caller]
    pub fn weight(&self, name: &str, device: Device) -> Result<Weight> {
        let _caller = Caller::enter();
        self.load("Gguf::weight", name, device)
    }

    fn error(&self, op: &'static str, name: &str, cause: &str) -> Error {
        tensor_error(op, self.file.path(), name, cause)
    }

    fn load(&self, op: &'static str, name: &str, device: Device) -> Result<Weight> {
        let info = self.tensors.get(name).ok_or_else(|| self.error(op, name, "there is no tensor of this name"))?;
        let bytes = &self.file.bytes()[info.offset..][..info.nbytes];
        let (shape, mapped) = (info.shape.clone(), self.file.map_storage(info.offset, info.nbytes, device));
        let weight = mapped.and_then(|mapped| match (info.kind, mapped) {
            (GgufType::Plain(dtype), Some(storage)) => Tensor::from_storage(storage, shape, dtype).map(Weight::Plain),
            (GgufType::Plain(dtype), None) => Tensor::from_bytes(bytes, shape, (dtype, device)).map(Weight::Plain),
            (GgufType::Quantized(format), Some(storage)) => {
                QuantizedTensor::from_storage(storage, 0, shape, format).map(Weight::Quantized)
            }
            (GgufType::Quantized(format), None) => {
                QuantizedTensor::from_bytes(bytes, shape, format, device).map(Weight::Quantized)
            }
        });
        weight.map_err(|e| with_location(e, op, self.file.path(), Some(name)))
    }
}

type Header = (BTreeMap<String, Range<usize>>, BTreeMap<String, TensorInfo>);

/// Reads everything before the elements.
fn read_header(bytes: &[u8]) -> Result<Header> {
    let mut reader = Reader { bytes, at: 0 };
    if bytes.get(..4) != Some(b"GGUF") {
        return Err(content_error("it is not a GGUF file"));
    }
    reader.at = 4;
    match reader.u32()? {
        2 | 3 => {}
        version if version.swap_bytes() < 1 << 16 => return Err(content_error("its numbers are big-endian")),
        version => return Err(content_error(format!("version {version} of the format is not supported"))),
    }
    let (tensor_count, pair_count) = (reader.u64()?, reader.u64()?);
    let rest = (bytes.len() - reader.at) as u64;
    if tensor_count > MAX_ENTRIES.min(rest / MIN_INFO_BYTES) || pair_count > MAX_ENTRIES.min(rest / MIN_PAIR_BYTES) {
        return Err(content_error(format!("{pair_count} keys and {tensor_count} tensors are too many")));
    }
    let (mut alignment, mut pairs, mut tensors) = (32, BTreeMap::new(), BTreeMap::new());
    for _ in 0..pair_count {
        let (key, start) = (reader.text()?, reader.at);
        let value = reader.typed_value().map_err(|e| within(e, "key", key))?;
        if key == "general.alignment" {
            let number = if let MetaValue::Int(n) = value { usize::try_from(n).ok() } else { None };
            let valid = number.filter(|n| n.is_power_of_two() && *n <= bytes.len());
            alignment = valid.ok_or_else(|| content_error(format!("key {key}: the value is not a power of two")))?;
        }
        if pairs.insert(key.to_owned(), start..reader.at).is_some() {
            return Err(content_error(format!("key {} occurs twice", Excerpt(key))));
        }
    }
    for _ in 0..tensor_count {
        let name = reader.text()?;
        let info = reader.tensor_info().map_err(|e| within(e, "tensor", name))?;
        if tensors.insert(name.to_owned(), info).is_some() {
            return Err(content_error(format!("tensor {} occurs twice", Excerpt(name))));
        }
    }
    let start = reader.at.next_multiple_of(alignment);
    for (name, info) in &mut tensors {
        let end = |at: usize| at.checked_add(info.nbytes).is_some_and(|end| end <= bytes.len());
        let at = start.checked_add(info.offset).filter(|&at| at.is_multiple_of(alignment) && end(at));
        let wrong = || format!("{} bytes at {} are not inside the file or not aligned", info.nbytes, info.offset);
        info.offset = at.ok_or_else(|| within(content_error(wrong()), "tensor", name))?;
    }
    let mut ranges: Vec<_> = tensors.iter().filter(|(_, info)| info.nbytes > 0).collect();
    ranges.sort_by_key(|(_, info)| info.offset);
    match ranges.windows(2).find(|two| two[0].1.offset + two[0].1.nbytes > two[1].1.offset) {
        Some(two) => Err(content_error(format!("tensors {} and {} overlap", Excerpt(two[0].0), Excerpt(two[1].0)))),
        None => Ok((pairs, tensors)),
    }
}

/// Adds the name of a key or a tensor to an error.
fn within(error: Error, what: &str, name: &str) -> Error {
    match error {
        Error::Invalid { reason, .. } => content_error(format!("{what} {}: {reason}", Excerpt(name))),
        error => error,
    }
}

/// Reads numbers and texts from bytes.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn take(&mut self, count: u64) -> Result<&'a [u8]> {
        let taken = usize::try_from(count).ok().and_then(|n| self.bytes[self.at..].get(..n));
        let taken = taken.ok_or_else(|| content_error(format!("the file ends before byte {} + {count}", self.at)))?;
        self.at += taken.len();
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        Ok(self.take(N as u64)?.try_into().expect("the slice has N bytes"))
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn text(&mut self) -> Result<&'a str> {
        let count = self.u64()?;
        let bytes = self.take(count)?;
        str::from_utf8(bytes).map_err(|_| content_error(format!("the text before byte {} is not UTF-8", self.at)))
    }

    /// Reads the number of a type and a value of that type.
    fn typed_value(&mut self) -> Result<MetaValue<'a>> {
        match self.u32()? {
            ARRAY => self.meta_array().map(MetaValue::Array),
            kind => self.value(kind),
        }
    }

    /// Reads a value other than an array.
    fn value(&mut self, kind: u32) -> Result<MetaValue<'a>> {
        Ok(match kind {
            0 => MetaValue::Int(u8::from_le_bytes(self.array()?).into()),
            1 => MetaValue::Int(i8::from_le_bytes(self.array()?).into()),
            2 => MetaValue::Int(u16::from_le_bytes(self.array()?).into()),
            3 => MetaValue::Int(i16::from_le_bytes(self.array()?).into()),
            4 => MetaValue::Int(self.u32()?.into()),
            5 => MetaValue::Int(i32::from_le_bytes(self.array()?).into()),
            6 => MetaValue::Float(f32::from_le_bytes(self.array()?).into()),
            7 => MetaValue::Bool(self.array()? != [0]),
            8 => MetaValue::Str(self.text()?),
            ARRAY => return Err(content_error("an array of arrays is not supported")),
            10 => MetaValue::Int(self.u64()?.into()),
            11 => MetaValue::Int(i64::from_le_bytes(self.array()?).into()),
            12 => MetaValue::Float(f64::from_le_bytes(self.array()?)),
            _ => return Err(content_error(format!("there is no value type {kind}"))),
        })
    }

    /// Reads an array's element type and length, and checks its elements.
    fn meta_array(&mut self) -> Result<MetaArray<'a>> {
        let (kind, count, start) = (self.u32()?, self.u64()?, self.at);
        for _ in 0..count {
            self.value(kind)?; // at least one byte
        }
        Ok(MetaArray { kind, len: count as usize, bytes: &self.bytes[start..self.at] })
    }

    /// Reads a tensor's description. The offset is from the start of the elements of all tensors.
    fn tensor_info(&mut self) -> Result<TensorInfo> {
        let rank = self.u32()?;
        if rank > MAX_RANK {
            return Err(content_error(format!("{rank} dims are more than the maximum of {MAX_RANK}")));
        }
        let mut sizes = (0..rank).map(|_| self.u64()).collect::<Result<Vec<u64>>>()?;
        sizes.reverse();
        let shape = checked_shape(sizes.into_iter())?;
        let (kind, offset) = (GgufType::from_number(self.u32()?)?, self.u64()?);
        let nbytes = match kind {
            GgufType::Plain(dtype) => shape.numel() * dtype.size(),
            GgufType::Quantized(format) => {
                let columns = shape.dims().last().copied().unwrap_or(1);
                format.row_bytes(columns)? * (shape.numel() / columns.max(1))
            }
        };
        let offset = usize::try_from(offset).unwrap_or(usize::MAX); // which is beyond every file
        Ok(TensorInfo { shape, kind, nbytes, offset })
    }
}

/// The number of the value type of arrays.
const ARRAY: u32 = 9;

/// ggml's names of element types, by their numbers.
const TYPE_NAMES: &str = "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS \
    IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 \
    IQ4_NL_4_4 IQ4_NL_4_8 IQ4_NL_8_8 MXFP4 NVFP4";

impl GgufType {
    /// Returns the type with ggml's number.
    fn from_number(number: u32) -> Result<GgufType> {
        let name = TYPE_NAMES.split_ascii_whitespace().nth(number as usize).unwrap_or("unknown");
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.to_string().eq_ignore_ascii_case(name));
        let quantized = || QuantFormat::from_ggml(number).map(GgufType::Quantized);
        let unsupported = || content_error(format!("elements of type {number} ({name}) are not supported"));
        dtype.map(GgufType::Plain).or_else(quantized).ok_or_else(unsupported)
    }
}
