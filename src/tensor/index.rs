//! Indexing with `.i(...)`.

use std::ops::{Range, RangeFrom, RangeFull, RangeInclusive, RangeTo, RangeToInclusive};

use smallvec::SmallVec;

use super::Layout;
use crate::layout::shape::impl_from;
use crate::{Result, Tensor};

/// One item of the argument of [`Tensor::i`]. Integers and ranges convert to an `Index`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Index {
    /// Selects one index and removes the dimension. Negative indexes count from the end.
    At(isize),
    /// Selects the indexes `start..end`, or up to the end of the dimension if `end` is `None`. Negative numbers count from the end.
    Range {
        /// The first index.
        start: isize,
        /// One past the last index; `None` for the end of the dimension.
        end: Option<isize>,
    },
    /// Selects every `step`-th index of `start..end`; a negative step starts at the last index and goes backwards. Made by
    /// [`Index::step`].
    Step {
        /// The lowest index of the range; a negative number counts from the end.
        start: isize,
        /// One past the highest index of the range; `None` for the end of the dimension.
        end: Option<isize>,
        /// The distance between indexes; not 0.
        step: isize,
    },
    /// Inserts a dimension of size 1 (NumPy's `newaxis`).
    NewAxis,
    /// Selects all dimensions that no other item names (Python's `...`). Optional at the end.
    Ellipsis,
}

impl Index {
    /// Selects every `step`-th index of a range, backwards from its end if the step is negative (ndarray's `s![range; step]`).
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

impl_from! { Index:
    [] RangeFull, _ => Index::Range { start: 0, end: None };
}

/// Arguments of [`Tensor::i`]: an integer, a range, an [`Index`], a tuple of up to six of these, an array or a slice.
pub trait Indices {
    /// Returns one item for each dimension, outermost first.
    fn indices(self) -> SmallVec<[Index; 6]>;
}

macro_rules! impl_integer_indices {
    ($($t:ty),*) => { $(
        impl_from! { Index:
            [] $t, i => Index::At(saturating_index(i));
            [] Range<$t>, r => Index::Range { start: saturating_index(r.start), end: Some(saturating_index(r.end)) };
            [] RangeFrom<$t>, r => Index::Range { start: saturating_index(r.start), end: None };
            [] RangeTo<$t>, r => Index::Range { start: 0, end: Some(saturating_index(r.end)) };
            [] RangeInclusive<$t>, r => Index::Range { start: saturating_index(*r.start()), end: exclusive_end(saturating_index(*r.end())) };
            [] RangeToInclusive<$t>, r => Index::Range { start: 0, end: exclusive_end(saturating_index(r.end)) };
        }

        impl_indices!($t, Range<$t>, RangeFrom<$t>, RangeTo<$t>, RangeInclusive<$t>, RangeToInclusive<$t>);
    )* };
}

macro_rules! impl_indices {
    ($($t:ty),*) => { $(
        impl Indices for $t {
            fn indices(self) -> SmallVec<[Index; 6]> {
                [self.into()].into_iter().collect()
            }
        }
    )* };
}

macro_rules! impl_tuple_indices {
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

/// Converts any integer to an index. Values that do not fit saturate, and are out of range for every dimension.
fn saturating_index<T: TryInto<isize>>(i: T) -> isize {
    i.try_into().unwrap_or(isize::MAX)
}

/// Converts an inclusive end to an exclusive end: -1, which is the last element, becomes `None`.
fn exclusive_end(end: isize) -> Option<isize> {
    if end == -1 { None } else { Some(end.saturating_add(1)) }
}

// i32 is included because it is the type of an unsuffixed literal if several types match.
impl_integer_indices!(usize, isize, i32, i64);
impl_indices!(RangeFull, Index);
impl_tuple_indices!(A);
impl_tuple_indices!(A B);
impl_tuple_indices!(A B C);
impl_tuple_indices!(A B C D);
impl_tuple_indices!(A B C D E);
impl_tuple_indices!(A B C D E F);

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

/// Applies the items of [`Tensor::i`] to a layout.
pub(crate) fn index_layout(op: &'static str, layout: &Layout, items: &[Index]) -> Result<Layout> {
    let rank = layout.shape.rank();
    let used = items.iter().filter(|i| matches!(i, Index::At(_) | Index::Range { .. } | Index::Step { .. })).count();
    let ellipses = items.iter().filter(|&&i| i == Index::Ellipsis).count();
    invalid!(op if used > rank || ellipses > 1,
        "{used} indexes and {ellipses} ellipses do not match a tensor of shape {}", layout.shape);
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
                invalid!(op if first < 0 || last < first || last as usize > size,
                    "the range {start}..{} is not within dimension {dim} of size {size}",
                    end.map_or(String::new(), |e| e.to_string()));
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
    /// Returns a view by index, like Python's `[...]`: an integer selects one index of a dimension and removes the dimension, a range
    /// selects several indexes, and `..` all. Dimensions without an item are selected in full.
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
    /// Returns [`crate::Error::IndexOutOfRange`] for an index out of range. Also fails for a range that is not within its dimension
    /// ([`Tensor::slice`] clamps instead, as Python does), and for more indexes than dimensions.
    pub fn i(&self, indices: impl Indices) -> Result<Tensor> {
        let items = indices.indices();
        self.select_view("i", move |layout| index_layout("i", layout, &items))
    }
}
