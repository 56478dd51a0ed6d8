//! The values of tensors, and arithmetic on values: exact i64 if all operands are integers, f64 otherwise.

use std::cmp::Ordering;

use ndarray::{ArrayD, IxDyn};

use crate::layout::Layout;
use crate::{Compute, DType, Device, Result, Scalar, Shape, Tensor};

/// A copy of a tensor's storage in which single elements can be read and written.
pub(super) struct Memory {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Memory {
    pub(super) fn read(t: &Tensor) -> Result<Memory> {
        let mut bytes = vec![0; t.storage.nbytes()];
        t.storage.read(0, &mut bytes)?;
        Ok(Memory { dtype: t.dtype, bytes })
    }

    /// Returns the element at index `at` of the storage.
    pub(super) fn get(&self, at: isize) -> Scalar {
        let (at, size) = (at as usize, self.dtype.size());
        Scalar::decode(self.dtype, &self.bytes[at * size..][..size])
    }

    pub(super) fn set(&mut self, at: isize, value: Scalar) {
        let (at, size) = (at as usize, self.dtype.size());
        value.encode(self.dtype, &mut self.bytes[at * size..][..size]);
    }

    /// Writes the copied bytes back to the tensor's storage.
    pub(super) fn write_to(&self, t: &Tensor) -> Result<()> {
        t.storage.write(0, &self.bytes)
    }
}

/// Returns the position in the storage of the element with the given index.
pub(super) fn storage_index(layout: &Layout, index: &[usize]) -> isize {
    layout.offset as isize + index.iter().zip(&layout.strides).map(|(&i, &stride)| i as isize * stride).sum::<isize>()
}

/// Iterates over every index of a shape, in row-major order.
pub(super) fn indices(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    ndarray::indices(IxDyn(dims)).into_iter().map(|index| ndarray::Dimension::slice(&index).to_vec())
}

/// Reads the values of a tensor with any strides.
pub(super) fn read(t: &Tensor) -> Result<ArrayD<Scalar>> {
    let memory = Memory::read(t)?;
    let value = |index: IxDyn| memory.get(storage_index(&t.layout, ndarray::Dimension::slice(&index)));
    Ok(ArrayD::from_shape_fn(IxDyn(t.shape().dims()), value))
}

/// Like [`read`], after broadcasting the tensor to `shape`.
pub(super) fn read_as(t: &Tensor, shape: &Shape) -> Result<ArrayD<Scalar>> {
    read(&t.with_layout(t.layout.broadcast_to(shape)))
}

/// Like [`read`], with the values converted to f64.
pub(super) fn read_floats(t: &Tensor) -> Result<ArrayD<f64>> {
    Ok(read(t)?.mapv(Scalar::to_f64))
}

/// Writes `values` to the elements of the tensor, one value per element, in row-major order.
pub(super) fn write<V: Into<Scalar>>(t: &Tensor, values: impl IntoIterator<Item = V>) -> Result<()> {
    let mut memory = Memory::read(t)?;
    let mut values = values.into_iter();
    for index in indices(t.shape().dims()) {
        let value = values.next().expect("as many values as elements");
        memory.set(storage_index(&t.layout, &index), value.into());
    }
    assert!(values.next().is_none(), "more values than elements");
    memory.write_to(t)
}

pub(super) fn new_tensor<V: Copy + Into<Scalar>>(values: &ArrayD<V>, dtype: DType) -> Result<Tensor> {
    let out = Tensor::empty_with_shape(values.shape(), dtype, Device::Cpu)?;
    write(&out, values.iter().copied())?;
    Ok(out)
}

/// Returns the value converted to the compute type.
pub(super) fn converted(value: Scalar, compute: Compute) -> Scalar {
    match compute {
        Compute::I64 => Scalar::Int(value.to_i64()),
        _ => Scalar::Float(value.to_f64()),
    }
}

/// Applies `ints` if both operands are integers, otherwise `floats`.
pub(super) fn apply_typed(a: Scalar, b: Scalar, ints: fn(i64, i64) -> i64, floats: fn(f64, f64) -> f64) -> Scalar {
    match (a, b) {
        (Scalar::Int(a), Scalar::Int(b)) => Scalar::Int(ints(a, b)),
        _ => Scalar::Float(floats(a.to_f64(), b.to_f64())),
    }
}

pub(super) fn add(a: Scalar, b: Scalar) -> Scalar {
    apply_typed(a, b, i64::wrapping_add, |a, b| a + b)
}

pub(super) fn mul(a: Scalar, b: Scalar) -> Scalar {
    apply_typed(a, b, i64::wrapping_mul, |a, b| a * b)
}

pub(super) fn is_nan(a: Scalar) -> bool {
    a.to_f64().is_nan()
}

pub(super) fn is_true(a: Scalar) -> bool {
    a.to_f64() != 0.0
}

/// Returns the sort order of two values: NaN is greater than every number, and -0 equals 0.
pub(super) fn order(a: Scalar, b: Scalar) -> Ordering {
    match (a, b) {
        (Scalar::Int(a), Scalar::Int(b)) => a.cmp(&b),
        _ => a.to_f64().partial_cmp(&b.to_f64()).unwrap_or_else(|| is_nan(a).cmp(&is_nan(b))),
    }
}

/// Returns the larger value, or NaN if either is NaN.
pub(super) fn max(a: Scalar, b: Scalar) -> Scalar {
    if order(b, a) == Ordering::Greater { b } else { a }
}

/// Returns the smaller value, or NaN if either is NaN.
pub(super) fn min(a: Scalar, b: Scalar) -> Scalar {
    if is_nan(b) || (!is_nan(a) && order(b, a) == Ordering::Less) { b } else { a }
}
