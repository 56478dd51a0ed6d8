//! npy: one array, a header that is a Python literal, and the elements.

use std::io::{BufReader, Read, Write};
use std::path::Path;

use npyz::{Endianness, NpyHeader, Order, TypeChar};

use super::{Cause, create, open, read_elements, shape_of, write_elements};
use crate::{DType, Device, Result, Shape, Tensor};

/// The tensor in an npy file, on `device` (NumPy's `load`). Big-endian files too; one in Fortran's order gives a tensor with
/// such strides.
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
///
/// # Errors
/// [`crate::Error::Invalid`] with the file's name: one that is not there, or no npy, or of a dtype that claystone does not
/// have; [`crate::Error::OutOfMemory`].
pub fn read_npy(path: impl AsRef<Path>, device: Device) -> Result<Tensor> {
    let (op, path) = ("read_npy", path.as_ref());
    let mut file = BufReader::new(open(op, path)?);
    from_reader(&mut file, device).map_err(|e| e.of(op, path, None))
}

/// Writes the tensor as an npy file (NumPy's `save`).
///
/// # Errors
/// [`crate::Error::Invalid`] with the file's name where it cannot be written.
pub fn write_npy(path: impl AsRef<Path>, tensor: &Tensor) -> Result<()> {
    let (op, path) = ("write_npy", path.as_ref());
    let mut file = create(op, path)?;
    to_writer(tensor, &mut file).and_then(|()| Ok(file.flush()?)).map_err(|e| e.of(op, path, None))
}

pub(super) fn from_reader(mut from: impl Read, device: Device) -> Result<Tensor, Cause> {
    let start = start_of(&mut from)?;
    let header = NpyHeader::from_reader(&start[..])?;
    let unknown = || Cause::File(format!("its dtype {} is none of claystone's", header.dtype().descr()));
    let npyz::DType::Plain(element) = header.dtype() else { return Err(unknown()) };
    let dtype = match (element.type_char(), element.size_field()) {
        (TypeChar::Float, 8) => DType::F64,
        (TypeChar::Float, 4) => DType::F32,
        (TypeChar::Float, 2) => DType::F16,
        (TypeChar::RawData, 2) => DType::BF16,
        (TypeChar::Int, 8) => DType::I64,
        (TypeChar::Int, 4) => DType::I32,
        (TypeChar::Uint, 4) => DType::U32,
        (TypeChar::Uint, 1) => DType::U8,
        (TypeChar::Bool, 1) => DType::Bool,
        _ => return Err(unknown()),
    };
    let swapped = element.endianness() == Endianness::Big;
    let sizes = header.shape().iter().copied();
    match header.order() {
        Order::C => read_elements(&mut from, shape_of(sizes)?, dtype, device, swapped),
        Order::Fortran => {
            let turned = read_elements(&mut from, shape_of(sizes.rev())?, dtype, device, swapped)?;
            let dims: Vec<isize> = (0..turned.rank() as isize).rev().collect();
            Ok(turned.permute(&dims)?)
        }
    }
}

/// The file up to its first element, with sizes that can be multiplied: npyz does so unchecked.
fn start_of(from: &mut impl Read) -> Result<Vec<u8>, Cause> {
    let mut start = vec![0; 10];
    from.read_exact(&mut start)?;
    let mut length = usize::from(u16::from_le_bytes([start[8], start[9]]));
    if start[6] > 1 {
        // From version 2 on the length of the header has four bytes.
        start.resize(12, 0);
        from.read_exact(&mut start[10..])?;
        length |= usize::from(u16::from_le_bytes([start[10], start[11]])) << 16;
    }
    let text = start.len();
    from.take(length as u64).read_to_end(&mut start)?;
    let header = String::from_utf8_lossy(&start[text..]);
    let sizes = header.split_once("'shape'").and_then(|(_, rest)| rest.split_once('(')?.1.split_once(')'));
    let sizes = sizes.map_or("", |(sizes, _)| sizes).split(',').filter_map(|size| size.trim().parse::<u64>().ok());
    shape_of(sizes)?;
    Ok(start)
}

pub(super) fn to_writer(tensor: &Tensor, to: &mut dyn Write) -> Result<(), Cause> {
    to.write_all(&header(tensor.shape(), tensor.dtype()))?;
    write_elements(tensor, to)
}

/// Version 1.0: magic, length, a literal filled up with spaces so that elements begin at a multiple of 64.
fn header(shape: &Shape, dtype: DType) -> Vec<u8> {
    let descr = match dtype {
        DType::F64 => "<f8",
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::BF16 => "<V2",
        DType::I64 => "<i8",
        DType::I32 => "<i4",
        DType::U32 => "<u4",
        DType::U8 => "|u1",
        DType::Bool => "|b1",
    };
    let sizes: String = shape.dims().iter().map(|d| format!("{d},")).collect();
    let literal = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({sizes}), }}");
    let length = (10 + literal.len() + 1).next_multiple_of(64) - 10;
    let mut header = b"\x93NUMPY\x01\x00".to_vec();
    header.extend((length as u16).to_le_bytes());
    header.extend(literal.as_bytes());
    header.resize(10 + length - 1, b' ');
    header.push(b'\n');
    header
}
