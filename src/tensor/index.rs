//! Indexing with `.i(...)`.

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use smallvec::SmallVec;

use super::Layout;
use crate::layout::shape::conversions;
use crate::{Error, Result, Tensor};

/// What [`Tensor::i`] does with a dimension. Made from integers and ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// One index; the dimension goes. Negative indexes count from the end.
    At(isize),
    /// Indexes from `start` up to `end`, or to the last; negative ends count from the end.
    Range {
        /// The first index.
        start: isize,
        /// One past the last index.
        end: Option<isize>,
    },
    /// Indexes from `start` up to `end`, and of these every `step`-th from the first on; a negative step begins at the last
    /// one and walks backwards. [`Index::step`] makes it.
    Step {
        /// The first index.
        start: isize,
        /// One past the last index.
        end: Option<isize>,
        /// Not 0.
        step: isize,
    },
    /// A new dimension of size 1 (NumPy's `newaxis`).
    NewAxis,
    /// All dimensions that are not mentioned (Python's `...`). At the end it may be left out.
    Ellipsis,
}

impl Index {
    /// Every `step`-th index of a range, from its end backwards where the step is negative (ndarray's `s![range; step]`).
    ///
    /// ```
    /// use claystone::{Device, Index, Tensor};
    /// let a = Tensor::arange(0, 10, 1, Device::Cpu)?;
    /// assert_eq!(a.i(Index::step(1..7, 2))?.to_vec::<f32>()?, [1.0, 3.0, 5.0]);
    /// assert_eq!(a.i(Index::step(.., -4))?.to_vec::<f32>()?, [9.0, 5.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn step(range: impl Into<Index>, step: isize) -> Index {
        match range.into() {
            Index::Range { start, end } => Index::Step { start, end, step },
            other => other,
        }
    }
}

conversions! { Index:
    [] RangeFull, _ => Index::Range { start: 0, end: None };
}

/// What [`Tensor::i`] takes: an integer, a range, [`Index`], a tuple of up to six of them, an array or a slice.
pub trait Indices {
    /// One item for each dimension, outermost first.
    fn indices(self) -> SmallVec<[Index; 6]>;
}

macro_rules! integers {
    ($($t:ty),*) => { $(
        conversions! { Index:
            [] $t, i => Index::At(saturated(i));
            [] Range<$t>, r => Index::Range { start: saturated(r.start), end: Some(saturated(r.end)) };
            [] RangeFrom<$t>, r => Index::Range { start: saturated(r.start), end: None };
            [] RangeTo<$t>, r => Index::Range { start: 0, end: Some(saturated(r.end)) };
            [] RangeInclusive<$t>, r => Index::Range { start: saturated(*r.start()), end: after(saturated(*r.end())) };
            [] RangeToInclusive<$t>, r => Index::Range { start: 0, end: after(saturated(r.end)) };
        }

        single!($t, Range<$t>, RangeFrom<$t>, RangeTo<$t>, RangeInclusive<$t>, RangeToInclusive<$t>);
    )* };
}

macro_rules! single {
    ($($t:ty),*) => { $(
        impl Indices for $t {
            fn indices(self) -> SmallVec<[Index; 6]> {
                [self.into()].into_iter().collect()
            }
        }
    )* };
}

macro_rules! tuples {
    ($($t:ident)*) => {
        impl<$($t: Into<Index>),*> Indices for ($($t,)*) {
            #[allow(non_snake_case)]
            fn indices(self) -> SmallVec<[Index; 6]> {
                let ($($t,)*) = self;
                [$($t.into()),*].into_iter().collect()
            }
        }
    };
}

/// Any integer as an index: what does not fit saturates, and is out of range.
fn saturated<T: TryInto<isize>>(i: T) -> isize {
    i.try_into().unwrap_or(isize::MAX)
}

/// The exclusive end after an inclusive one; after the last element (-1) there is none.
fn after(end: isize) -> Option<isize> {
    if end == -1 { None } else { Some(end.saturating_add(1)) }
}

// i32 is what a bare literal becomes where several types would do.
integers!(usize, isize, i32, i64);
single!(RangeFull, Index);
tuples!(A);
tuples!(A B);
tuples!(A B C);
tuples!(A B C D);
tuples!(A B C D E);
tuples!(A B C D E F);

impl<T: Into<Index>, const N: usize> Indices for [T; N] {
    fn indices(self) -> SmallVec<[Index; 6]> {
        self.into_iter().map(Into::into).collect()
    }
}

impl Indices for &[Index] {
    fn indices(self) -> SmallVec<[Index; 6]> {
        SmallVec::from_slice(self)
    }
}

/// The layout of the elements that `items` choose, which are what [`Tensor::i`] is given.
pub(crate) fn indexed(op: &'static str, layout: &Layout, items: &[Index]) -> Result<Layout> {
    let rank = layout.shape.rank();
    let used = items.iter().filter(|i| matches!(i, Index::At(_) | Index::Range { .. } | Index::Step { .. })).count();
    let ellipses = items.iter().filter(|&&i| i == Index::Ellipsis).count();
    if used > rank || ellipses > 1 {
        let reason =
            format!("{used} indexes and {ellipses} ellipses do not go with a tensor of shape {}", layout.shape);
        return Err(Error::invalid(op, reason));
    }
    let mut layout = layout.clone();
    let mut dim = 0;
    for item in items {
        match *item {
            Index::At(i) => {
                layout = layout.select(op, dim, i)?;
                continue;
            }
            Index::Range { start, end } | Index::Step { start, end, .. } => {
                let size = layout.shape.dims()[dim];
                let from_front = |i: isize| if i < 0 { i.saturating_add_unsigned(size) } else { i };
                let (first, last) = (from_front(start), end.map_or(size as isize, from_front));
                if first < 0 || last < first || last as usize > size {
                    let end = end.map_or(String::new(), |e| e.to_string());
                    let reason = format!("the range {start}..{end} does not lie in dimension {dim} of size {size}");
                    return Err(Error::invalid(op, reason));
                }
                layout = layout.narrow(op, dim, first as usize, (last - first) as usize)?;
                if let Index::Step { step, .. } = *item {
                    layout = layout.slice(op, dim, (None, None), step)?;
                }
            }
            Index::NewAxis => layout = layout.insert(dim),
            Index::Ellipsis => {
                dim += rank - used;
                continue;
            }
        }
        dim += 1;
    }
    Ok(layout)
}

impl Tensor {
    /// A view by index, as Python's `[...]`: an integer takes one index of its dimension, a range some, `..` all;
    /// dimensions not mentioned are taken whole.
    ///
    /// ```
    /// use claystone::{Device, Index, Tensor};
    /// let a = Tensor::arange(0, 24, 1, Device::Cpu)?.reshape([2, 3, 4])?;
    /// assert_eq!(a.i(1)?.shape().dims(), &[3, 4]);
    /// assert_eq!(a.i((0, .., 1..3))?.shape().dims(), &[3, 2]);
    /// assert_eq!(a.i((Index::Ellipsis, -1))?.shape().dims(), &[2, 3]);
    /// assert_eq!(a.i((.., Index::NewAxis, ..=1))?.shape().dims(), &[2, 1, 2, 4]);
    /// assert_eq!(a.i([1, 2, 3])?.item::<f32>()?, 23.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::IndexOutOfRange`]; a range that does not lie in its dimension ([`Tensor::slice`] clamps, as Python does);
    /// more indexes than dimensions.
    pub fn i(&self, indices: impl Indices) -> Result<Tensor> {
        let items = indices.indices();
        self.picked("i", move |layout| indexed("i", layout, &items))
    }
}
