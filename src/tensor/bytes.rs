//! Tensors from bytes and to bytes, for readers and writers of files.

use std::io::{Read, Write};

use super::Layout;
use crate::storage::{Caller, Storage};
use crate::{DType, Error, Result, Shape, Tensor, TensorOptions};

/// The number of bytes that are transferred at a time between a stream and a device.
const PIECE_BYTES: usize = 4 << 20;

/// Conversions of elements from and to bytes, in row-major order and the host's byte order. Streams are buffered in pieces of at most 4
/// MiB.
impl Tensor {
    /// Copies elements given as bytes (PyTorch's `frombuffer`). Fails with [`Error::Invalid`] for a number of bytes that does not
    /// match the shape, and for bools other than 0 and 1.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let bytes: Vec<u8> = [1i32, -2].iter().flat_map(|x| x.to_ne_bytes()).collect();
    /// let x = Tensor::from_bytes(&bytes, 2, (DType::I32, Device::Cpu))?;
    /// assert_eq!(x.to_vec::<i32>()?, [1, -2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
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

    /// Reads the next elements of `from` into a new tensor (NumPy's `fromfile`). Allocates device memory only after the first 4 MiB have
    /// been read. Fails with [`Error::Invalid`] if `from` fails or ends early, and for bools other than 0 and 1.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let mut stream: &[u8] = &[1, 2, 3, 4, 5];
    /// let x = Tensor::read_from(&mut stream, [2, 2], (DType::U8, Device::Cpu))?;
    /// assert_eq!((x.to_vec::<u8>()?, stream), (vec![1, 2, 3, 4], &[5][..]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
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
        let mut piece = vec![0u8; bytes.min(PIECE_BYTES)];
        let mut read = |part: &mut [u8]| from.read_exact(part).map_err(|e| Error::invalid(op, e.to_string()));
        // The first piece is read before the allocation, so that an unreadable stream allocates no device memory.
        read(&mut piece)?;
        let storage = Storage::alloc(device, bytes)?;
        for at in (0..bytes).step_by(PIECE_BYTES) {
            let part = &mut piece[..PIECE_BYTES.min(bytes - at)];
            if at > 0 {
                read(part)?;
            }
            check_bools(op, part, dtype)?;
            storage.write(at, part)?;
        }
        Ok(Tensor::new(storage, Layout::contiguous(shape), dtype))
    }

    /// Copies the elements as bytes to `out`, which must have exactly the size in bytes of all elements. Waits for the device. Fails with
    /// [`Error::Invalid`] for another number of bytes.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1u8, 2, 3, 4], [2, 2], Device::Cpu)?;
    /// let mut bytes = [0; 4];
    /// x.t()?.read_bytes(&mut bytes)?;
    /// assert_eq!(bytes, [1, 3, 2, 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn read_bytes(&self, out: &mut [u8]) -> Result<()> {
        check_length("read_bytes", out.len(), self.shape(), self.dtype)?;
        let source = self.detach().contiguous()?;
        source.storage.read(source.layout.offset * self.dtype.size(), out)
    }

    /// Writes the elements to `to` (NumPy's `tofile`). Waits for the device. Fails with [`Error::Invalid`] if `to` fails.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::arange(0, 6, 1, (DType::U8, Device::Cpu))?.reshape([2, 3])?;
    /// let mut bytes = Vec::new();
    /// x.t()?.write_to(&mut bytes)?;
    /// assert_eq!(bytes, [0, 3, 1, 4, 2, 5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn write_to(&self, to: &mut dyn Write) -> Result<()> {
        let source = self.detach().contiguous()?;
        let (start, bytes) = (source.layout.offset * source.dtype.size(), source.numel() * source.dtype.size());
        let mut piece = vec![0u8; bytes.min(PIECE_BYTES)];
        for at in (0..bytes).step_by(PIECE_BYTES) {
            let part = &mut piece[..PIECE_BYTES.min(bytes - at)];
            source.storage.read(start + at, part)?;
            to.write_all(part).map_err(|e| Error::invalid("write_to", e.to_string()))?;
        }
        Ok(())
    }
}

/// Checks that `bytes` has the size of a tensor of this shape and dtype, and that every byte is a valid bool if the dtype is bool.
pub(crate) fn check_bytes(op: &'static str, bytes: &[u8], shape: &Shape, dtype: DType) -> Result<()> {
    check_length(op, bytes.len(), shape, dtype)?;
    check_bools(op, bytes, dtype)
}

fn check_length(op: &'static str, given: usize, shape: &Shape, dtype: DType) -> Result<()> {
    let wanted = shape.bytes(dtype.size());
    invalid!(op if wanted != given, "shape {shape} of {dtype} takes {wanted} bytes, not {given}");
    Ok(())
}

fn check_bools(op: &'static str, bytes: &[u8], dtype: DType) -> Result<()> {
    invalid!(op if let Some(byte) = bytes.iter().find(|b| dtype == DType::Bool && **b > 1),
        "a bool must be 0 or 1, not {byte}");
    Ok(())
}
