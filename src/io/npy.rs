//! The npy format. A file has one array: a header (a Python literal), then the elements.

use std::io::{BufReader, Read, Write};
use std::path::Path;

use super::{checked_shape, content_error, create, finish, open, read_elements, read_error, with_location};
use crate::internal::Excerpt;
use crate::storage::Caller;
use crate::{DType, Device, Result, Shape, Tensor};

/// Reads the tensor of an npy file to `device` (NumPy's `load`). Supports big-endian elements and Fortran order (which gives strides).
/// Fails with [`crate::Error::Invalid`], with the file's name, if the file does not exist or is not npy, and with
/// [`crate::Error::OutOfMemory`].
///
/// ```
/// use claystone::{DType, Device, Tensor, io};
/// # let folder = tempfile::tempdir().unwrap();
/// let path = folder.path().join("x.npy");
/// let x = Tensor::linspace(0.0, 1.0, 6, Device::Cpu)?.reshape([2, 3])?.to_dtype(DType::BF16)?;
/// io::write_npy(&path, &x.t()?)?;
/// let y = io::read_npy(&path, Device::Cpu)?;
/// assert_eq!((y.shape().dims(), y.dtype()), (&[3, 2][..], DType::BF16));
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn read_npy(path: impl AsRef<Path>, device: Device) -> Result<Tensor> {
    let _caller = Caller::enter();
    let (op, path) = ("read_npy", path.as_ref());
    let (file, available) = open(op, path)?;
    from_reader(BufReader::new(file), available, device).map_err(|e| with_location(e, op, path, None))
}

/// Writes the tensor as an npy file (NumPy's `save`). Fails with [`crate::Error::Invalid`], with the file's name, if writing fails.
pub fn write_npy(path: impl AsRef<Path>, tensor: &Tensor) -> Result<()> {
    let (op, path) = ("write_npy", path.as_ref());
    let mut file = create(op, path)?;
    to_writer(tensor, &mut file).map_err(|e| with_location(e, op, path, None))?;
    finish(op, path, file)
}

/// Reads a tensor from npy data. `available` is the number of bytes in `from`, if known.
pub(super) fn from_reader(mut from: impl Read, available: Option<u64>, device: Device) -> Result<Tensor> {
    let (text, length) = header_text(&mut from)?;
    let available = available.map(|available| available.saturating_sub(length));
    let Header { descr, fortran, mut sizes } = Header::parse(&text)?;
    let Some(ElementFormat { dtype, bytes, swap_unit }) = ElementFormat::parse(descr) else {
        // Arrays of objects are pickled, and records have fields; for these dtypes the raw bytes are returned.
        let unsupported = || content_error(format!("its dtype '{}' is not supported", Excerpt(descr)));
        let all = available.ok_or_else(unsupported)?;
        return read_elements(&mut from, available, checked_shape([all].into_iter())?, DType::U8, device, 0);
    };
    if fortran {
        sizes.reverse();
    }
    let rank = sizes.len() as isize;
    sizes.extend(bytes);
    let read = read_elements(&mut from, available, checked_shape(sizes.into_iter())?, dtype, device, swap_unit)?;
    if !fortran {
        return Ok(read);
    }
    let dims: Vec<isize> = (0..rank).rev().chain(rank..read.rank() as isize).collect();
    read.permute(&dims)
}

/// The maximum header length in bytes. It is the limit of version 1 of the format; a dtype and a shape need no more in later versions.
const MAX_HEADER_BYTES: u32 = u16::MAX as u32;

/// Reads the header's Python literal, which comes before the elements. Also returns the offset of the elements.
fn header_text(from: &mut impl Read) -> Result<(String, u64)> {
    let mut start = [0; 8];
    from.read_exact(&mut start).map_err(read_error)?;
    let [magic @ .., version, _] = start;
    if &magic != b"\x93NUMPY" || !(1..=3).contains(&version) {
        return Err(content_error("it is not an npy file of version 1, 2 or 3"));
    }
    // From version 2 of the format on, the length of the header takes four bytes.
    let mut length = [0; 4];
    let width = if version == 1 { 2 } else { 4 };
    from.read_exact(&mut length[..width]).map_err(read_error)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_HEADER_BYTES {
        return Err(content_error(format!("its header of {length} bytes is too long for an array")));
    }
    let mut text = vec![0; length as usize];
    from.read_exact(&mut text).map_err(read_error)?;
    let text = String::from_utf8(text).map_err(|_| content_error("its header is not UTF-8"))?;
    Ok((text, (start.len() + width) as u64 + u64::from(length)))
}

/// NumPy's name for each dtype, without the byte order.
const DTYPE_NAMES: [(DType, &str); 11] = [
    (DType::F64, "f8"),
    (DType::F32, "f4"),
    (DType::F16, "f2"),
    (DType::BF16, "V2"),
    (DType::I64, "i8"),
    (DType::I32, "i4"),
    (DType::U32, "u4"),
    (DType::U8, "u1"),
    (DType::I16, "i2"),
    (DType::I8, "i1"),
    (DType::Bool, "b1"),
];

/// The form in which the elements of an array are read.
struct ElementFormat {
    dtype: DType,
    /// The size of an element in bytes, if claystone lacks the dtype; the bytes become one more dim. `None` for claystone's dtypes.
    bytes: Option<u64>,
    /// The number of bytes in each group to reverse, for big-endian elements. 0 if no bytes are reversed.
    swap_unit: usize,
}

impl ElementFormat {
    /// Parses a `descr` such as `<f4`. `None` if the text does not determine the number of bytes of an element.
    fn parse(descr: &str) -> Option<ElementFormat> {
        let (order, element) =
            descr.split_at_checked(1).filter(|(order, _)| matches!(*order, "<" | ">" | "|" | "="))?;
        let swap_unit = |unit: usize| if order == ">" { unit } else { 0 };
        if let Some(&(dtype, _)) = DTYPE_NAMES.iter().find(|(_, name)| *name == element) {
            return Some(ElementFormat { dtype, bytes: None, swap_unit: swap_unit(dtype.size()) });
        }
        let (kind, size) = element.split_at_checked(1)?;
        let size: u64 = size.split('[').next()?.parse().ok()?; // the unit of dates follows in brackets
        let (bytes, unit) = match kind {
            "U" => (size.checked_mul(4)?, 4), // characters of four bytes
            "c" => (size, size / 2),
            "i" | "u" | "f" | "M" | "m" => (size, size),
            _ => (size, 0),
        };
        let unit = swap_unit(usize::try_from(unit).ok().filter(|&unit| unit <= 16)?);
        let fits = unit == 0 || unit.is_power_of_two(); // a power of two, so that no element crosses from one piece of the stream to the next
        fits.then_some(ElementFormat { dtype: DType::U8, bytes: Some(bytes), swap_unit: unit })
    }
}

/// The parsed header of an npy file.
struct Header<'a> {
    descr: &'a str,
    /// Whether the first dim is contiguous (Fortran order).
    fortran: bool,
    sizes: Vec<u64>,
}

impl Header<'_> {
    /// Parses a dict with the keys `descr`, `fortran_order` and `shape`, in any order.
    fn parse(text: &str) -> Result<Header<'_>> {
        let malformed = || content_error(format!("its header does not describe an array: {}", Excerpt(text.trim())));
        let (mut descr, mut fortran, mut sizes) = (None, None, None);
        let mut rest =
            text.trim().strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).ok_or_else(malformed)?.trim();
        while !rest.is_empty() {
            let (key, value) = parse_string(rest).ok_or_else(malformed)?;
            let value = value.trim_start().strip_prefix(':').ok_or_else(malformed)?.trim_start();
            let after = match key {
                // The value is a list of fields with their dtypes, which may contain commas. The rest of the header is not needed.
                "descr" if value.starts_with('[') => {
                    return Ok(Header { descr: value, fortran: false, sizes: Vec::new() });
                }
                "descr" => parse_string(value).map(|(name, after)| (descr = Some(name), after).1),
                "fortran_order" => parse_boolean(value).map(|(is, after)| (fortran = Some(is), after).1),
                "shape" => parse_tuple(value).map(|(list, after)| (sizes = Some(list), after).1),
                _ => None,
            };
            let after = after.ok_or_else(malformed)?.trim_start();
            rest = match after.strip_prefix(',') {
                Some(next) => next.trim_start(),
                None if after.is_empty() => after,
                None => return Err(malformed()),
            };
        }
        let (Some(descr), Some(fortran), Some(sizes)) = (descr, fortran, sizes) else { return Err(malformed()) };
        Ok(Header { descr, fortran, sizes })
    }
}

/// Parses a quoted string. Returns the string and the remaining text.
fn parse_string(text: &str) -> Option<(&str, &str)> {
    let quote = text.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    text[1..].split_once(quote)
}

fn parse_boolean(text: &str) -> Option<(bool, &str)> {
    let is = |word, value| text.strip_prefix(word).map(|after| (value, after));
    is("True", true).or_else(|| is("False", false))
}

/// Parses a tuple of sizes. Returns the sizes and the remaining text. Python 2 wrote long integers with an L at the end.
fn parse_tuple(text: &str) -> Option<(Vec<u64>, &str)> {
    let (list, after) = text.strip_prefix('(')?.split_once(')')?;
    let sizes = list.split_terminator(',').map(str::trim);
    let sizes = sizes.filter(|size| !size.is_empty()).map(|size| size.strip_suffix('L').unwrap_or(size).parse().ok());
    Some((sizes.collect::<Option<_>>()?, after))
}

pub(super) fn to_writer(tensor: &Tensor, to: &mut dyn Write) -> Result<()> {
    to.write_all(&encode_header(tensor.shape(), tensor.dtype())).map_err(read_error)?;
    tensor.write_to(to)
}

/// Creates a header of version 1.0: magic, length, and a literal padded with spaces so that elements start at a multiple of 64 bytes.
fn encode_header(shape: &Shape, dtype: DType) -> Vec<u8> {
    let order = if dtype.size() == 1 { '|' } else { '<' };
    let element = DTYPE_NAMES.iter().find(|(known, _)| *known == dtype).map_or("", |(_, name)| name);
    let sizes: String = shape.dims().iter().map(|d| format!("{d},")).collect();
    let literal = format!("{{'descr': '{order}{element}', 'fortran_order': False, 'shape': ({sizes}), }}");
    let length = (10 + literal.len() + 1).next_multiple_of(64) - 10;
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((length as u16).to_le_bytes());
    header.extend(literal.as_bytes());
    header.resize(10 + length - 1, b' ');
    header.push(b'\n');
    header
}
