//! Shapes and dimensions: pure numbers, no storage.

use std::fmt;

use smallvec::SmallVec;

use crate::{Error, Result};

/// Small vectors of dimensions: no heap up to rank 6.
pub(crate) type Dims<T = usize> = SmallVec<[T; 6]>;

/// The size of each dimension, outermost first; `[]` is a scalar.
///
/// ```
/// use claystone::Shape;
/// let s = Shape::from([3, 4]);
/// assert_eq!((s.dims(), s.numel(), s.rank()), (&[3, 4][..], 12, 2));
/// assert_eq!(s.to_string(), "[3, 4]");
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Default)]
pub struct Shape(Dims);

impl Shape {
    /// The sizes.
    pub fn dims(&self) -> &[usize] {
        &self.0
    }

    /// How many dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// How many elements: the product of the sizes, 1 for a scalar.
    /// A product that overflows saturates, which no device can allocate.
    pub fn numel(&self) -> usize {
        if self.0.contains(&0) { 0 } else { self.0.iter().fold(1usize, |a, &d| a.saturating_mul(d)) }
    }

    /// Row-major strides in elements.
    pub(crate) fn contiguous_strides(&self) -> Dims<isize> {
        let mut strides: Dims<isize> = SmallVec::from_elem(0, self.rank());
        let mut step = 1isize;
        for (s, &d) in strides.iter_mut().zip(self.0.iter()).rev() {
            *s = step;
            step = step.saturating_mul(d.max(1) as isize);
        }
        strides
    }

    /// `dim` counted from the end when negative, checked.
    pub(crate) fn dim(&self, op: &'static str, dim: isize) -> Result<usize> {
        let rank = self.rank();
        let d = if dim < 0 { dim + rank as isize } else { dim };
        if (0..rank as isize).contains(&d) { Ok(d as usize) } else { Err(Error::DimOutOfRange { op, dim, rank }) }
    }

    /// The shape both broadcast to (NumPy's rule: align at the end, 1 stretches).
    pub(crate) fn broadcast(&self, op: &'static str, other: &Shape) -> Result<Shape> {
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

impl From<&[usize]> for Shape {
    fn from(dims: &[usize]) -> Shape {
        Shape(SmallVec::from_slice(dims))
    }
}

impl From<&Shape> for Shape {
    fn from(shape: &Shape) -> Shape {
        shape.clone()
    }
}

impl From<Vec<usize>> for Shape {
    fn from(dims: Vec<usize>) -> Shape {
        Shape(SmallVec::from_vec(dims))
    }
}

impl From<()> for Shape {
    fn from(_: ()) -> Shape {
        Shape::default()
    }
}

impl From<usize> for Shape {
    fn from(dim: usize) -> Shape {
        Shape::from([dim])
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(dims: [usize; N]) -> Shape {
        Shape(SmallVec::from_slice(&dims))
    }
}

impl<const N: usize> From<&[usize; N]> for Shape {
    fn from(dims: &[usize; N]) -> Shape {
        Shape(SmallVec::from_slice(dims))
    }
}

impl FromIterator<usize> for Shape {
    fn from_iter<I: IntoIterator<Item = usize>>(dims: I) -> Shape {
        Shape(dims.into_iter().collect())
    }
}
