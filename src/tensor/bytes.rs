//! Elements as bytes: what readers and writers of files are made of.

use std::io::{Read, Write};

use super::Layout;
use crate::storage::{Caller, Storage};
use crate::{DType, Error, Result, Shape, Tensor, TensorOptions};

/// Elements go between a stream and a device in pieces of this size.
const PIECE: usize = 4 << 20;

/// Elements as bytes, in row-major order and the byte order of the host. The host is asked for 4 MiB at most.
impl Tensor {
    /// A copy of elements that are given as bytes (PyTorch's `frombuffer`).
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let bytes: Vec<u8> = [1i32, -2].iter().flat_map(|x| x.to_ne_bytes()).collect();
    /// let x = Tensor::from_bytes(&bytes, 2, (DType::I32, Device::Cpu))?;
    /// assert_eq!(x.to_vec::<i32>()?, [1, -2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a shape of another number of bytes and for bools other than 0 and 1; [`Error::NoDevice`],
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn from_bytes(bytes: &[u8], shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (op, TensorOptions { dtype, device }) = ("from_bytes", options.into());
        let shape = shape.into().checked(op)?;
        check_bytes(op, bytes, &shape, dtype)?;
        let storage = Storage::alloc(device, bytes.len())?;
        storage.write(0, bytes)?;
        Ok(Tensor::new(storage, Layout::contiguous(shape), dtype))
    }

    /// A tensor of the elements that `from` gives next (NumPy's `fromfile`). Memory of the device is asked for once the
    /// first 4 MiB are there.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let mut stream: &[u8] = &[1, 2, 3, 4, 5];
    /// let x = Tensor::read_from(&mut stream, [2, 2], (DType::U8, Device::Cpu))?;
    /// assert_eq!((x.to_vec::<u8>()?, stream), (vec![1, 2, 3, 4], &[5][..]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] where `from` fails or ends early, and for bools other than 0 and 1; [`Error::NoDevice`],
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn read_from(
        from: &mut dyn Read,
        shape: impl Into<Shape>,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (op, TensorOptions { dtype, device }) = ("read_from", options.into());
        let shape = shape.into().checked(op)?;
        let bytes = shape.bytes(dtype.size());
        let mut piece = vec![0u8; bytes.min(PIECE)];
        let mut read = |part: &mut [u8]| from.read_exact(part).map_err(|e| Error::invalid(op, e.to_string()));
        // Read first: a stream that cannot be read asks for no memory of the device.
        read(&mut piece)?;
        let storage = Storage::alloc(device, bytes)?;
        for at in (0..bytes).step_by(PIECE) {
            let part = &mut piece[..PIECE.min(bytes - at)];
            if at > 0 {
                read(part)?;
            }
            write_piece(op, &storage, at, part, dtype)?;
        }
        Ok(Tensor::new(storage, Layout::contiguous(shape), dtype))
    }

    /// The bytes of the elements into `out`, which has just their size. Waits for the device.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1u8, 2, 3, 4], [2, 2], Device::Cpu)?;
    /// let mut bytes = [0; 4];
    /// x.t()?.read_bytes(&mut bytes)?;
    /// assert_eq!(bytes, [1, 3, 2, 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for another number of bytes; [`Error::OutOfMemory`] and device failures.
    pub fn read_bytes(&self, out: &mut [u8]) -> Result<()> {
        check_length("read_bytes", out.len(), self.shape(), self.dtype)?;
        let source = self.detach().contiguous()?;
        source.storage.read(source.layout.offset * self.dtype.size(), out)
    }

    /// Writes the elements to `to` (NumPy's `tofile`). Waits for the device.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::arange(0, 6, 1, (DType::U8, Device::Cpu))?.reshape([2, 3])?;
    /// let mut bytes = Vec::new();
    /// x.t()?.write_to(&mut bytes)?;
    /// assert_eq!(bytes, [0, 3, 1, 4, 2, 5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] where `to` fails; [`Error::OutOfMemory`] and device failures.
    pub fn write_to(&self, to: &mut dyn Write) -> Result<()> {
        let source = self.detach().contiguous()?;
        let (start, bytes) = (source.layout.offset * source.dtype.size(), source.numel() * source.dtype.size());
        let mut piece = vec![0u8; bytes.min(PIECE)];
        for at in (0..bytes).step_by(PIECE) {
            let part = &mut piece[..PIECE.min(bytes - at)];
            source.storage.read(start + at, part)?;
            to.write_all(part).map_err(|e| Error::invalid("write_to", e.to_string()))?;
        }
        Ok(())
    }
}

/// Bytes of elements into a storage, unless they are none of this dtype.
fn write_piece(op: &'static str, storage: &Storage, at: usize, bytes: &[u8], dtype: DType) -> Result<()> {
    check_bools(op, bytes, dtype)?;
    storage.write(at, bytes)
}

/// An error where these are not the bytes of elements of this shape and dtype.
pub(crate) fn check_bytes(op: &'static str, bytes: &[u8], shape: &Shape, dtype: DType) -> Result<()> {
    check_length(op, bytes.len(), shape, dtype)?;
    check_bools(op, bytes, dtype)
}

fn check_length(op: &'static str, given: usize, shape: &Shape, dtype: DType) -> Result<()> {
    let wanted = shape.bytes(dtype.size());
    if wanted == given {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{given} bytes are not those of shape {shape} in {dtype}, which takes {wanted}")))
}

fn check_bools(op: &'static str, bytes: &[u8], dtype: DType) -> Result<()> {
    match bytes.iter().find(|b| dtype == DType::Bool && **b > 1) {
        Some(byte) => Err(Error::invalid(op, format!("a bool is neither 0 nor 1 but {byte}"))),
        None => Ok(()),
    }
}
