//! Collation: how the items of a batch are joined to one value.

use crate::{Device, Result, Tensor};

/// Joins the items of a batch (PyTorch's `default_collate`). Tensors are stacked, numbers become a tensor, and each field of a tuple
/// and each element of a vector is collated separately. Implement this trait for your own item type, or pass a function to
/// [`DataLoader::with_collate`](super::DataLoader::with_collate).
///
/// ```
/// use claystone::data::Collate;
/// use claystone::{Device, Tensor};
/// let item = |n: i64| Ok::<_, claystone::Error>((Tensor::zeros([3, 3], Device::Cpu)?, n));
/// let (images, labels) = Collate::collate(vec![item(4)?, item(5)?])?;
/// assert_eq!((images.shape().dims(), labels.to_vec::<i64>()?), (&[2, 3, 3][..], vec![4, 5]));
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Collate: Sized {
    /// The type of a batch.
    type Batch;

    /// Joins `items` (at least one) to a batch. Fails with [`crate::Error::ShapeMismatch`] for tensors of different shapes, and
    /// [`crate::Error::Invalid`] for vectors of different lengths.
    fn collate(items: Vec<Self>) -> Result<Self::Batch>;
}

impl Collate for Tensor {
    type Batch = Tensor;

    fn collate(items: Vec<Tensor>) -> Result<Tensor> {
        Tensor::stack(&items, 0)
    }
}

impl<T: Collate> Collate for Vec<T> {
    type Batch = Vec<T::Batch>;

    fn collate(items: Vec<Vec<T>>) -> Result<Vec<T::Batch>> {
        let lengths: Vec<usize> = items.iter().map(Vec::len).collect();
        invalid!("collate" if let Some(other) = lengths.iter().find(|n| **n != lengths[0]),
            "items have {} and {other} parts: give all the same number, or use with_collate", lengths[0]);
        let mut parts: Vec<_> = items.into_iter().map(Vec::into_iter).collect();
        let part = |_| T::collate(parts.iter_mut().filter_map(Iterator::next).collect());
        (0..lengths.first().copied().unwrap_or_default()).map(part).collect()
    }
}

impl<A: Collate, B: Collate> Collate for (A, B) {
    type Batch = (A::Batch, B::Batch);

    fn collate(items: Vec<(A, B)>) -> Result<Self::Batch> {
        let (a, b) = items.into_iter().unzip();
        Ok((A::collate(a)?, B::collate(b)?))
    }
}

impl<A: Collate, B: Collate, C: Collate> Collate for (A, B, C) {
    type Batch = (A::Batch, B::Batch, C::Batch);

    fn collate(items: Vec<(A, B, C)>) -> Result<Self::Batch> {
        let (ab, c): (Vec<_>, Vec<_>) = items.into_iter().map(|(a, b, c)| ((a, b), c)).unzip();
        let (a, b) = Collate::collate(ab)?;
        Ok((a, b, C::collate(c)?))
    }
}

macro_rules! numbers {
    ($($type:ty),*) => { $(
        /// The batch is a tensor with one number for each item.
        impl Collate for $type {
            type Batch = Tensor;

            fn collate(items: Vec<$type>) -> Result<Tensor> {
                Tensor::from_slice(&items, items.len(), Device::default())
            }
        }
    )* };
}

numbers!(f64, f32, i64, i32, i16, i8, u32, u8, bool);
