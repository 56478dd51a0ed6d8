//! The values of tensors, and arithmetic on them: exact i64 where all operands are integers, f64 otherwise.

use std::cmp::Ordering;

use ndarray::{ArrayD, IxDyn};

use crate::layout::Layout;
use crate::{Compute, DType, Device, Result, Scalar, Shape, Tensor};

/// A copy of a tensor's storage, with the values of single elements.
pub(super) struct Memory {
    dtype: DType,
    bytes: Vec<u8>,
}

impl Memory {
    pub(super) fn of(t: &Tensor) -> Result<Memory> {
        let mut bytes = vec![0; t.storage.nbytes()];
        t.storage.read(0, &mut bytes)?;
        Ok(Memory { dtype: t.dtype, bytes })
    }

    /// The element so many elements behind the storage's first.
    pub(super) fn get(&self, at: isize) -> Scalar {
        let (at, size) = (at as usize, self.dtype.size());
        Scalar::decode(self.dtype, &self.bytes[at * size..][..size])
    }

    pub(super) fn set(&mut self, at: isize, value: Scalar) {
        let (at, size) = (at as usize, self.dtype.size());
        value.encode(self.dtype, &mut self.bytes[at * size..][..size]);
    }

    /// Puts the bytes back where they came from.
    pub(super) fn write_to(&self, t: &Tensor) -> Result<()> {
        t.storage.write(0, &self.bytes)
    }
}

/// Where a layout has the element of this index.
pub(super) fn position(layout: &Layout, index: &[usize]) -> isize {
    layout.offset as isize + index.iter().zip(&layout.strides).map(|(&i, &stride)| i as isize * stride).sum::<isize>()
}

/// Every index of a shape, in row-major order.
pub(super) fn indices(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> + use<> {
    ndarray::indices(IxDyn(dims)).into_iter().map(|index| ndarray::Dimension::slice(&index).to_vec())
}

/// The values of a tensor of any strides.
pub(super) fn read(t: &Tensor) -> Result<ArrayD<Scalar>> {
    let memory = Memory::of(t)?;
    let value = |index: IxDyn| memory.get(position(&t.layout, ndarray::Dimension::slice(&index)));
    Ok(ArrayD::from_shape_fn(IxDyn(t.shape().dims()), value))
}

/// As [`read`], broadcast.
pub(super) fn read_as(t: &Tensor, shape: &Shape) -> Result<ArrayD<Scalar>> {
    read(&t.with_layout(t.layout.broadcast_to(shape)))
}

/// As [`read`], in f64.
pub(super) fn read_floats(t: &Tensor) -> Result<ArrayD<f64>> {
    Ok(read(t)?.mapv(Scalar::to_f64))
}

/// Writes as many values as the tensor has elements, in row-major order.
pub(super) fn write<V: Into<Scalar>>(t: &Tensor, values: impl IntoIterator<Item = V>) -> Result<()> {
    let mut memory = Memory::of(t)?;
    let mut values = values.into_iter();
    for index in indices(t.shape().dims()) {
        let value = values.next().expect("as many values as elements");
        memory.set(position(&t.layout, &index), value.into());
    }
    assert!(values.next().is_none(), "more values than elements");
    memory.write_to(t)
}

/// A new tensor of these values.
pub(super) fn tensor<V: Copy + Into<Scalar>>(values: &ArrayD<V>, dtype: DType) -> Result<Tensor> {
    let out = Tensor::empty_like_shape(values.shape(), dtype, Device::Cpu)?;
    write(&out, values.iter().copied())?;
    Ok(out)
}

/// The value as computations of this type see it.
pub(super) fn converted(value: Scalar, compute: Compute) -> Scalar {
    match compute {
        Compute::I64 => Scalar::Int(value.to_i64()),
        _ => Scalar::Float(value.to_f64()),
    }
}

/// Applies `ints` to two integers, `floats` to all else.
pub(super) fn both(a: Scalar, b: Scalar, ints: fn(i64, i64) -> i64, floats: fn(f64, f64) -> f64) -> Scalar {
    match (a, b) {
        (Scalar::Int(a), Scalar::Int(b)) => Scalar::Int(ints(a, b)),
        _ => Scalar::Float(floats(a.to_f64(), b.to_f64())),
    }
}

pub(super) fn add(a: Scalar, b: Scalar) -> Scalar {
    both(a, b, i64::wrapping_add, |a, b| a + b)
}

pub(super) fn mul(a: Scalar, b: Scalar) -> Scalar {
    both(a, b, i64::wrapping_mul, |a, b| a * b)
}

pub(super) fn is_nan(a: Scalar) -> bool {
    a.to_f64().is_nan()
}

pub(super) fn is_true(a: Scalar) -> bool {
    a.to_f64() != 0.0
}

/// The order of sorts: NaN is above everything, -0 equals 0.
pub(super) fn order(a: Scalar, b: Scalar) -> Ordering {
    match (a, b) {
        (Scalar::Int(a), Scalar::Int(b)) => a.cmp(&b),
        _ => a.to_f64().partial_cmp(&b.to_f64()).unwrap_or_else(|| is_nan(a).cmp(&is_nan(b))),
    }
}

/// The greater one; NaN if one is NaN.
pub(super) fn max(a: Scalar, b: Scalar) -> Scalar {
    if order(b, a) == Ordering::Greater { b } else { a }
}

/// The lesser one; NaN if one is NaN.
pub(super) fn min(a: Scalar, b: Scalar) -> Scalar {
    if is_nan(b) || (!is_nan(a) && order(b, a) == Ordering::Less) { b } else { a }
}
