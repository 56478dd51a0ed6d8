//! Arguments that select one or several dims.

use smallvec::SmallVec;

use super::shape::{Dims, Shape, impl_from};
use crate::Result;

/// One bool for each dim of a shape: true if the dim is reduced.
pub(crate) type Mask = SmallVec<[bool; 6]>;

/// The dimensions to reduce: `()` for all, an integer, an array or a slice. Negative numbers count from the end.
/// An empty array reduces nothing.
///
/// ```
/// use claystone::{Device, Tensor};
/// let t = Tensor::ones(&[2, 3, 4], Device::Cpu)?;
/// assert_eq!(t.sum((), false)?.item::<f32>()?, 24.0);
/// assert_eq!(t.sum(-1, false)?.shape().dims(), [2, 3]);
/// assert_eq!(t.sum([0, 2], true)?.shape().dims(), [1, 3, 1]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReduceDims(Option<Dims<isize>>);

/// One or several dims: `-1`, `[0, 2]`, a slice or a `Vec`. Negative numbers count from the end.
///
/// ```
/// use claystone::{Device, Tensor};
/// let t = Tensor::ones(&[2, 3], Device::Cpu)?;
/// assert_eq!(t.unsqueeze(0)?.shape().dims(), [1, 2, 3]);
/// assert_eq!(t.unsqueeze([0, -1])?.shape().dims(), [1, 2, 3, 1]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DimList(pub(crate) Dims<isize>);

impl_from! { DimList:
    [] isize, dim => DimList::from([dim]);
    [] &[isize], dims => DimList(Dims::from_slice(dims));
    [] Vec<isize>, dims => DimList(Dims::from_vec(dims));
    [] &Vec<isize>, dims => DimList::from(&dims[..]);
    [const N: usize] [isize; N], dims => DimList::from(&dims[..]);
    [const N: usize] &[isize; N], dims => DimList::from(&dims[..]);
}

impl_from! { ReduceDims:
    [] (), () => ReduceDims(None);
    [] isize, dim => ReduceDims::from([dim]);
    [] &[isize], dims => ReduceDims(Some(Dims::from_slice(dims)));
    [] Vec<isize>, dims => ReduceDims(Some(Dims::from_vec(dims)));
    [] &Vec<isize>, dims => ReduceDims::from(&dims[..]);
    [const N: usize] [isize; N], dims => ReduceDims::from(&dims[..]);
    [const N: usize] &[isize; N], dims => ReduceDims::from(&dims[..]);
}

impl ReduceDims {
    /// Returns the dims as the caller passed them; `None` if all dims are reduced.
    pub(crate) fn given(&self) -> Option<&[isize]> {
        self.0.as_deref()
    }

    /// Returns, for each dim of `shape`, whether the dim is reduced.
    pub(crate) fn mask(&self, op: &'static str, shape: &Shape) -> Result<Mask> {
        let Some(dims) = &self.0 else { return Ok(SmallVec::from_elem(true, shape.rank())) };
        let mut mask: Mask = SmallVec::from_elem(false, shape.rank());
        for &dim in dims {
            // As in PyTorch, a scalar may be reduced over dim 0 or -1.
            if shape.rank() == 0 && matches!(dim, -1 | 0) {
                continue;
            }
            let d = shape.dim(op, dim)?;
            invalid!(op if std::mem::replace(&mut mask[d], true), "dimension {dim} is given twice in {dims:?}");
        }
        Ok(mask)
    }
}
