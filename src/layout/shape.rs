//! Shapes and dimension sizes.

use std::fmt;

use smallvec::SmallVec;

use crate::{Error, Result};

/// A vector with one entry per dimension, without heap allocation up to rank 6.
pub(crate) type Dims<T = usize> = SmallVec<[T; 6]>;

/// Copies `dims`. Up to three entries are assembled in registers, because every tensor is moved soon after: storing entries one by one
/// and then loading them as a vector would stall on store forwarding.
#[inline(always)]
pub(crate) fn copy_dims<T: Copy + Default>(dims: &[T]) -> Dims<T> {
    let zero = T::default();
    let few = |first: [T; 3]| [first[0], first[1], first[2], zero, zero, zero];
    match *dims {
        [a] => SmallVec::from_buf_and_len(few([a, zero, zero]), 1),
        [a, b] => SmallVec::from_buf_and_len(few([a, b, zero]), 2),
        [a, b, c] => SmallVec::from_buf_and_len(few([a, b, c]), 3),
        _ => SmallVec::from_slice(dims),
    }
}

/// The size of each dimension, outermost first. `[]` is the shape of a scalar.
///
/// ```
/// use claystone::Shape;
/// let s = Shape::from([3, 4]);
/// assert_eq!((s.dims(), s.numel(), s.rank()), (&[3, 4][..], 12, 2));
/// assert_eq!(s.to_string(), "[3, 4]");
/// ```
#[derive(PartialEq, Eq, Hash, Default)]
pub struct Shape(Dims);

impl Clone for Shape {
    #[inline]
    fn clone(&self) -> Shape {
        Shape(copy_dims(&self.0)) // one vector copy; SmallVec's clone copies the sizes one by one
    }
}

impl Shape {
    /// Returns the size of each dimension, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    pub(crate) fn swap(&mut self, a: usize, b: usize) {
        self.0.swap(a, b);
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Returns the number of elements: the product of the sizes, or 1 for a scalar. On overflow the product saturates, and no device can
    /// allocate such a tensor.
    pub fn numel(&self) -> usize {
        if self.0.contains(&0) { 0 } else { self.0.iter().fold(1usize, |a, &d| a.saturating_mul(d)) }
    }

    /// Returns the product of the sizes, with every 0 counted as 1; `None` if strides and offsets would overflow isize.
    fn nonzero_product(&self) -> Option<usize> {
        let reach = self.0.iter().fold(1usize, |a, &d| a.saturating_mul(d.max(1)));
        isize::try_from(reach).is_ok().then_some(reach)
    }

    /// Returns this shape, or an error if its sizes are too large to compute strides.
    pub(crate) fn checked(self, op: &'static str) -> Result<Shape> {
        invalid!(op if self.nonzero_product().is_none(), "the sizes of shape {self} are too large for a tensor");
        Ok(self)
    }

    /// Returns the number of bytes of all elements, given `size` bytes for each; `usize::MAX` if the shape is too large to compute
    /// strides.
    pub(crate) fn bytes(&self, size: usize) -> usize {
        match self.nonzero_product() {
            None => usize::MAX,
            Some(_) if self.0.contains(&0) => 0,
            Some(reach) => reach.saturating_mul(size),
        }
    }

    /// Returns the row-major strides, in elements.
    #[inline(always)]
    pub(crate) fn contiguous_strides(&self) -> Dims<isize> {
        let step = |d: usize| d.max(1) as isize;
        match *self.dims() {
            [] => Dims::new(),
            [_] => copy_dims(&[1]),
            [_, b] => copy_dims(&[step(b), 1]),
            [_, b, c] => copy_dims(&[step(c).saturating_mul(step(b)), step(c), 1]),
            _ => self.strides_of_high_rank(),
        }
    }

    fn strides_of_high_rank(&self) -> Dims<isize> {
        let mut strides: Dims<isize> = SmallVec::from_elem(0, self.rank());
        let mut step = 1isize;
        for (s, &d) in strides.iter_mut().zip(self.0.iter()).rev() {
            *s = step;
            step = step.saturating_mul(d.max(1) as isize);
        }
        strides
    }

    /// Resolves `dim`, which counts from the end if negative, and checks its range.
    pub(crate) fn dim(&self, op: &'static str, dim: isize) -> Result<usize> {
        let rank = self.rank();
        let d = if dim < 0 { dim + rank as isize } else { dim };
        if (0..rank as isize).contains(&d) { Ok(d as usize) } else { Err(Error::DimOutOfRange { op, dim, rank }) }
    }

    /// Returns the shape to which both shapes broadcast, by NumPy's rule: dims are aligned at the last dim, and sizes of 1 are stretched.
    pub(crate) fn broadcast(&self, op: &'static str, other: &Shape) -> Result<Shape> {
        if self == other {
            return Ok(self.clone());
        }
        let rank = self.rank().max(other.rank());
        let at = |s: &Shape, i: usize| (i + s.rank()).checked_sub(rank).map_or(1, |j| s.0[j]);
        let dims = (0..rank).map(|i| match (at(self, i), at(other, i)) {
            (a, b) if a == b => Ok(a),
            (1, b) => Ok(b),
            (a, 1) => Ok(a),
            _ => Err(Error::ShapeMismatch {
                op,
                lhs: self.clone(),
                rhs: other.clone(),
                hint: "aligned at the last dimension, sizes must be equal or 1",
            }),
        });
        dims.collect::<Result<Dims>>().map(Shape)
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0).finish()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.0).finish()
    }
}

/// Implements `From` for a type. Each entry has the generics and the type of a source, a pattern and the conversion.
macro_rules! impl_from {
    ($to:ty: $([$($generics:tt)*] $from:ty, $x:pat => $e:expr;)*) => { $(
        impl<$($generics)*> From<$from> for $to {
            fn from($x: $from) -> $to {
                $e
            }
        }
    )* };
}
pub(crate) use impl_from;

impl_from! { Shape:
    [] &[usize], dims => Shape(copy_dims(dims));
    [] Dims, dims => Shape(dims);
    [] &Shape, shape => shape.clone();
    [] Vec<usize>, dims => Shape(SmallVec::from_vec(dims));
    [] &Vec<usize>, dims => Shape(copy_dims(dims));
    [] (), () => Shape::default();
    [] usize, dim => Shape::from([dim]);
    [const N: usize] [usize; N], dims => Shape(copy_dims(&dims));
    [const N: usize] &[usize; N], dims => Shape(copy_dims(dims));
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(dims: I) -> Shape {
        Shape(dims.into_iter().collect())
    }
}

/// Sizes for [`Tensor::reshape`](crate::Tensor::reshape) and similar methods. One size may be -1 and is then inferred. Slices and arrays
/// of signed integers, and everything that converts to a [`Shape`], convert to a `NewShape`.
///
/// ```
/// use claystone::{Device, Tensor};
/// let a = Tensor::zeros(&[6, 4], Device::Cpu)?;
/// assert_eq!(a.reshape([-1, 8])?.shape().dims(), &[3, 8]);
/// assert_eq!(a.reshape(a.numel())?.shape().dims(), &[24]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NewShape(Dims<isize>);

impl NewShape {
    pub(crate) fn sizes(&self) -> &[isize] {
        &self.0
    }

    /// Infers the size given as -1, and returns the shape, which must have `numel` elements; otherwise returns an error.
    pub(crate) fn resolve(&self, op: &'static str, from: &dyn fmt::Display, numel: usize) -> Result<Shape> {
        let known: Shape = self.0.iter().filter(|&&d| d != -1).map(|&d| d.max(0) as usize).collect();
        let holes = self.0.len() - known.rank();
        invalid!(op if self.0.iter().any(|&d| d < -1) || holes > 1, "only one of the sizes {:?} may be -1", self.0);
        let rest = match (holes, known.numel()) {
            (0, n) if n == numel => 1,
            (1, n) if n > 0 && numel.is_multiple_of(n) => numel / n,
            _ => invalid!(op, "{from} holds {numel} elements, which do not fill the sizes {:?}", self.0),
        };
        self.0.iter().map(|&d| if d == -1 { rest } else { d as usize }).collect::<Shape>().checked(op)
    }
}

/// Converts an integer to a size. Values that do not fit saturate, which is safe because no tensor has a dimension of `isize::MAX`.
fn saturating_size<T: TryInto<isize>>(d: T) -> isize {
    d.try_into().unwrap_or(isize::MAX)
}

impl_from! { NewShape:
    [] &Shape, shape => NewShape(shape.0.iter().map(|&d| saturating_size(d)).collect());
    [] Shape, shape => NewShape::from(&shape);
    [] (), () => NewShape(Dims::new());
}

macro_rules! new_shapes {
    ($($t:ty),*) => { $(
        impl_from! { NewShape:
            [] $t, d => NewShape([saturating_size(d)].into_iter().collect());
            [] &[$t], dims => NewShape(dims.iter().map(|&d| saturating_size(d)).collect());
            [] Vec<$t>, dims => NewShape::from(&dims[..]);
            [const N: usize] [$t; N], dims => NewShape::from(&dims[..]);
            [const N: usize] &[$t; N], dims => NewShape::from(&dims[..]);
        }
    )* };
}

// i32 is included because it is the type of an unsuffixed literal if several types match.
new_shapes!(usize, isize, i32, i64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_size_may_be_inferred() {
        let resolve = |dims: &[isize], numel| {
            NewShape::from(dims).resolve("reshape", &"a test", numel).map(|s| s.dims().to_vec())
        };
        assert_eq!(resolve(&[2, -1], 6).unwrap(), [2, 3]);
        assert_eq!(resolve(&[-1], 0).unwrap(), [0]);
        assert_eq!(resolve(&[-1, 3], 0).unwrap(), [0, 3]);
        assert_eq!(resolve(&[], 1).unwrap(), [0usize; 0]);
        for (dims, numel) in [
            (&[-1, -1][..], 4),
            (&[-2, 2], 4),
            (&[4, -1], 6),
            (&[0, -1], 0),
            (&[3], 4),
            (&[], 0),
            (&[isize::MAX, isize::MAX], 1),
        ] {
            assert!(resolve(dims, numel).is_err(), "{dims:?} {numel}");
        }
    }
}
