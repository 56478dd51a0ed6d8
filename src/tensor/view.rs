//! Views: the same storage with another shape, strides or offset.
//!
//! Creating a view takes no work on the device, and every view is differentiable. The gradient of a view that keeps every element once is
//! the inverse view. The gradient of a view that selects some elements is padded with zeros. The gradient of a view that
//! repeats elements ([`Tensor::expand`]) is a sum.

use smallvec::SmallVec;

use super::create::check_storage;
use super::{Layout, Shape};
use crate::autograd::{record_unary_differentiable, record_view};
use crate::layout::shape::{Dims, NewShape};
use crate::storage::Caller;
use crate::{DType, DimList, Error, ReduceDims, Result, Tensor};

/// Normalises negative dims and checks that they are in range and distinct.
fn distinct_dims(op: &'static str, dims: &[isize], rank: usize) -> Result<Dims> {
    let mut out = Dims::new();
    for &dim in dims {
        let d = if dim < 0 { dim + rank as isize } else { dim };
        if !(0..rank as isize).contains(&d) {
            return Err(Error::DimOutOfRange { op, dim, rank });
        }
        invalid!(op if out.contains(&(d as usize)), "{dims:?} names dimension {d} twice");
        out.push(d as usize);
    }
    Ok(out)
}

impl Tensor {
    /// Reinterprets the same bytes as another dtype (PyTorch's `view(dtype)`), outside the graph. If the element size changes, the
    /// size of the last dimension changes with it.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::from_slice(&[1.0f32, -2.0], 2, Device::Cpu)?;
    /// assert_eq!(x.view_dtype(DType::I32)?.to_vec::<i32>()?, [0x3f80_0000, 0xc000_0000u32 as i32]);
    /// assert_eq!(x.view_dtype(DType::U8)?.shape().dims(), [8]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if the last dimension is not contiguous, or if its bytes, an offset, a stride or the storage are not a
    /// whole number of elements; for bool from another dtype, because not every byte is a valid bool.
    pub fn view_dtype(&self, dtype: DType) -> Result<Tensor> {
        let (op, from, to) = ("view_dtype", self.dtype.size(), dtype.size());
        let mut view = self.detach();
        invalid!(op if dtype == DType::Bool && self.dtype != DType::Bool,
            "not every {} is a bool: compare with .ne(0)", self.dtype);
        view.dtype = dtype;
        if from == to {
            return Ok(view);
        }
        check_storage(op, &self.storage, dtype)?;
        let scaled = |elements: usize| (elements * from).is_multiple_of(to).then_some(elements * from / to);
        let Some(last) = self.rank().checked_sub(1).filter(|&last| self.strides()[last] == 1) else {
            invalid!(
                op,
                "a tensor of shape {} whose last stride is not 1 has no view with another element size: call \
                .contiguous() first, and give a scalar a dimension",
                self.shape()
            );
        };
        let scaled_layout = || -> Option<Layout> {
            let mut layout = self.layout.clone();
            let mut dims = layout.shape.dims().to_vec();
            dims[last] = scaled(dims[last])?;
            layout.shape = dims.into();
            layout.offset = scaled(layout.offset)?;
            for stride in &mut layout.strides[..last] {
                *stride = isize::try_from(scaled(stride.unsigned_abs())?).ok()? * stride.signum();
            }
            Some(layout)
        };
        let Some(layout) = scaled_layout() else {
            invalid!(op, "sizes, strides or the offset of {:?} are not whole elements of {dtype}", self.shape());
        };
        Ok(Tensor { layout, ..view })
    }

    /// Returns the view with the layout that `view_layout` makes of this tensor's layout, and records its gradient. The view has each
    /// element at most once; elements that are not in the view get a zero gradient.
    pub(crate) fn select_view(
        &self,
        op: &'static str,
        view_layout: impl Fn(&Layout) -> Result<Layout> + Clone + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let (layout, shape) = (view_layout(&self.layout)?, self.shape().clone());
        Ok(record_view(op, layout, self, move |grad| grad.scatter_into_zeros(op, &shape, view_layout.clone())))
    }

    /// Computes the gradient of [`select_view`](Tensor::select_view): returns zeros of `shape`, with this tensor copied to the elements
    /// that `view_layout` selects.
    pub(crate) fn scatter_into_zeros(
        &self,
        op: &'static str,
        shape: &Shape,
        view_layout: impl Fn(&Layout) -> Result<Layout> + Clone + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let zeros = Tensor::zeros(shape, self)?;
        zeros.with_layout(view_layout(&zeros.layout)?).copy_(&self.detach())?;
        Ok(record_unary_differentiable(op, zeros, self, move |grad| grad.select_view(op, view_layout.clone())))
    }

    /// Returns the elements in another shape, in the same row-major order (PyTorch's `reshape`). One size may be -1 and is then
    /// inferred. The result is a view if the strides allow it, otherwise a contiguous copy; see [`Tensor::shares_storage`]. Fails
    /// for sizes whose product is not the number of elements.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, -1])?;
    /// assert_eq!(a.shape().dims(), &[2, 3]);
    /// assert_eq!(a.t()?.reshape(6)?.to_vec::<f32>()?, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn reshape(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let shape = shape.into().resolve("reshape", &format_args!("shape {}", self.shape()), self.numel())?;
        match self.try_view("reshape", &shape) {
            Some(view) => Ok(view),
            None => self.contiguous()?.reshape(shape),
        }
    }

    /// Returns the elements in another shape like [`Tensor::reshape`], but always as a view (PyTorch's `view`). Fails for sizes whose
    /// product is not the number of elements, and for a shape that no strides can express for this memory.
    pub fn view(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        let shape = shape.into().resolve("view", &format_args!("shape {}", self.shape()), self.numel())?;
        let Some(view) = self.try_view("view", &shape) else {
            invalid!(
                "view",
                "a tensor of shape {} and strides {:?} cannot be viewed as {shape} without a copy: use .reshape()",
                self.shape(),
                self.strides()
            );
        };
        Ok(view)
    }

    fn try_view(&self, op: &'static str, shape: &Shape) -> Option<Tensor> {
        let old = self.shape().clone();
        Some(record_view(op, self.layout.reshape(shape)?, self, move |grad| grad.reshape(&old)))
    }

    /// Swaps dimensions `a` and `b` (PyTorch's `transpose`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let b = a.transpose(0, -1)?;
    /// assert_eq!((b.shape().dims(), b.strides()), (&[3, 2][..], &[1, 3][..]));
    /// assert!(b.shares_storage(&a));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn transpose(&self, a: isize, b: isize) -> Result<Tensor> {
        let op = "transpose";
        let (i, j) = (self.shape().dim(op, a)?, self.shape().dim(op, b)?);
        Ok(record_view(op, self.layout.transpose(i, j), self, move |grad| grad.transpose(a, b)))
    }

    /// Transposes a matrix; returns a vector or a scalar unchanged (PyTorch's `t`). Fails for more than two dimensions: use
    /// [`Tensor::transpose`].
    pub fn t(&self) -> Result<Tensor> {
        match self.rank() {
            0 | 1 => Ok(self.shallow_clone()),
            2 => self.transpose(0, 1),
            rank => Err(Error::invalid("t", format!("a tensor of rank {rank} is not a matrix: use .transpose(a, b)"))),
        }
    }

    /// Reorders the dimensions: dimension `dims[i]` becomes dimension `i` (PyTorch's `permute`). Fails for `dims` that do not name
    /// every dimension exactly once.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(a.permute(&[1, 0])?.shape().dims(), &[3, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn permute(&self, dims: &[isize]) -> Result<Tensor> {
        let op = "permute";
        let order = dims.iter().map(|&d| self.shape().dim(op, d)).collect::<Result<Dims>>()?;
        let mut back: Dims<isize> = SmallVec::from_elem(-1, self.rank());
        order.iter().enumerate().for_each(|(i, &d)| back[d] = i as isize);
        invalid!(op if order.len() != self.rank() || back.contains(&-1),
            "{dims:?} does not name each of the {} dimensions once", self.rank());
        Ok(record_view(op, self.layout.permute(&order), self, move |grad| grad.permute(&back)))
    }

    /// Moves dimensions `source` to positions `destination`; the other dimensions keep their order (PyTorch's `movedim`). Fails
    /// with [`Error::Invalid`] for a repeated dimension, or if `source` and `destination` differ in length.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::zeros([2, 3, 4], Device::Cpu)?;
    /// assert_eq!(a.movedim(0, -1)?.shape().dims(), [3, 4, 2]);
    /// assert_eq!(a.movedim([0, 1], [-1, -2])?.shape().dims(), [4, 3, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn movedim(&self, source: impl Into<DimList>, destination: impl Into<DimList>) -> Result<Tensor> {
        let op = "movedim";
        let (source, destination) = (source.into().0, destination.into().0);
        invalid!(op if source.len() != destination.len(), "{source:?} and {destination:?} differ in length");
        let (from, to) = (distinct_dims(op, &source, self.rank())?, distinct_dims(op, &destination, self.rank())?);
        let mut others = (0..self.rank()).filter(|d| !from.contains(d));
        let order: Dims<isize> = (0..self.rank())
            .filter_map(|d| match to.iter().position(|&t| t == d) {
                Some(i) => Some(from[i] as isize),
                None => others.next().map(|d| d as isize),
            })
            .collect();
        self.permute(&order)
    }

    /// Selects the indexes `start..start + len` of dimension `dim` (PyTorch's `narrow`). Fails for a range that does not fit in the
    /// dimension; [`Tensor::slice`] clamps instead.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(a.narrow(1, 1, 2)?.to_vec::<f32>()?, [1.0, 2.0, 4.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn narrow(&self, dim: isize, start: usize, len: usize) -> Result<Tensor> {
        let op = "narrow";
        let dim = self.shape().dim(op, dim)?;
        self.select_view(op, move |l| l.narrow(op, dim, start, len))
    }

    /// Selects Python's `[start:end:step]` in dimension `dim`. Negative ends count from the end, ends out of range are clamped, `None`
    /// means no limit at that end, and a negative step reverses the order. Fails for a step of zero.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 5, 1, Device::Cpu)?;
    /// assert_eq!(a.slice(0, -2, None, 1)?.to_vec::<f32>()?, [3.0, 4.0]);
    /// assert_eq!(a.slice(0, None, None, -2)?.to_vec::<f32>()?, [4.0, 2.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn slice(
        &self,
        dim: isize,
        start: impl Into<Option<isize>>,
        end: impl Into<Option<isize>>,
        step: isize,
    ) -> Result<Tensor> {
        let op = "slice";
        let (dim, ends) = (self.shape().dim(op, dim)?, (start.into(), end.into()));
        self.select_view(op, move |l| l.slice(op, dim, ends, step))
    }

    /// Selects index `index` of dimension `dim` and removes the dimension (PyTorch's `select`). Negative indexes count from the end.
    pub fn select(&self, dim: isize, index: isize) -> Result<Tensor> {
        let op = "select";
        let dim = self.shape().dim(op, dim)?;
        self.select_view(op, move |l| l.select(op, dim, index))
    }

    /// Removes dimension `dim` if its size is 1, otherwise returns the tensor unchanged (PyTorch's `squeeze`).
    pub fn squeeze(&self, dim: isize) -> Result<Tensor> {
        let d = self.shape().dim("squeeze", dim)?;
        if self.shape().dims()[d] != 1 {
            return Ok(self.shallow_clone());
        }
        Ok(record_view("squeeze", self.layout.remove(d), self, move |grad| grad.unsqueeze(d as isize)))
    }

    /// Removes all dimensions of size 1.
    pub fn squeeze_all(&self) -> Result<Tensor> {
        let kept: Shape = self.shape().dims().iter().copied().filter(|&d| d != 1).collect();
        self.view(kept)
    }

    /// Inserts dimensions of size 1 at positions `dims` of the result (PyTorch's `unsqueeze`, NumPy's `expand_dims`). Fails with
    /// [`Error::Invalid`] for a repeated dimension.
    pub fn unsqueeze(&self, dims: impl Into<DimList>) -> Result<Tensor> {
        let (op, dims) = ("unsqueeze", dims.into().0);
        let mut new = distinct_dims(op, &dims, self.rank() + dims.len())?;
        new.sort_unstable();
        let layout = new.iter().fold(self.layout.clone(), |layout, &d| layout.insert(d));
        let back: Dims<isize> = new.iter().map(|&d| d as isize).collect();
        Ok(record_view(op, layout, self, move |grad| grad.squeeze_dims(&back)))
    }

    /// Stretches dimensions of size 1 to `shape`, which may have more leading dimensions; a size of -1 keeps the existing size (PyTorch's
    /// `expand`). Repeated elements share memory. The gradient is the sum over the repetitions. Fails with [`Error::ShapeMismatch`] if a
    /// size other than 1 would change.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let b = a.unsqueeze(0)?.expand([4, -1, -1])?;
    /// assert_eq!((b.shape().dims(), b.strides()), (&[4, 2, 3][..], &[0, 3, 1][..]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn expand(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        self.expand_as_op("expand", &shape.into())
    }

    /// Expands like [`Tensor::expand`], under NumPy's name.
    pub fn broadcast_to(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        self.expand_as_op("broadcast_to", &shape.into())
    }

    /// Implements `expand` and `broadcast_to`. A size of -1 in `new` keeps the existing size.
    fn expand_as_op(&self, op: &'static str, new: &NewShape) -> Result<Tensor> {
        let old = self.shape().dims();
        // Returns the old size from which size `i` of the result is stretched; `None` for a new leading dimension.
        let source = |i: usize| (i + old.len()).checked_sub(new.sizes().len()).map(|j| old[j]);
        let size = |(i, &d): (usize, &isize)| match (d, source(i)) {
            (-1, Some(size)) => Some(size),
            (d, None | Some(1)) if d >= 0 => Some(d as usize),
            (d, Some(size)) if d >= 0 && d as usize == size => Some(size),
            _ => None,
        };
        let shape: Option<Shape> =
            new.sizes().iter().enumerate().map(size).collect::<Option<Dims>>().map(Shape::from_iter);
        let Some(shape) = shape.filter(|s| s.rank() >= self.rank()) else {
            let rhs = new.sizes().iter().map(|&d| d.max(0) as usize).collect();
            let hint = "aligned at the last dimension, only sizes of 1 can be stretched";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs, hint });
        };
        let (old, shape) = (self.shape().clone(), shape.checked(op)?);
        Ok(record_view(op, self.layout.broadcast_to(&shape), self, move |grad| grad.sum_to(&old)))
    }

    /// Joins dimensions `start` to `end`, both included (PyTorch's `flatten`); a scalar becomes `[1]`. The result is a view if
    /// the strides allow it, otherwise a copy.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(a.flatten(0, -1)?.shape().dims(), &[6]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn flatten(&self, start: isize, end: isize) -> Result<Tensor> {
        let op = "flatten";
        if self.rank() == 0 {
            return self.unsqueeze(0);
        }
        let (a, b) = (self.shape().dim(op, start)?, self.shape().dim(op, end)?);
        let dims = self.shape().dims();
        invalid!(op if a > b, "dimension {start} comes after dimension {end}");
        let joined = Shape::from(&dims[a..=b]).numel();
        self.reshape(dims[..a].iter().copied().chain([joined]).chain(dims[b + 1..].iter().copied()).collect::<Shape>())
    }

    /// Splits dimension `dim` into dimensions of the given sizes, one of which may be -1 (PyTorch's `unflatten`).
    pub fn unflatten(&self, dim: isize, sizes: impl Into<NewShape>) -> Result<Tensor> {
        let op = "unflatten";
        let d = self.shape().dim(op, dim)?;
        let dims = self.shape().dims();
        let inner = sizes.into().resolve(op, &format_args!("dimension {d}"), dims[d])?;
        self.view(dims[..d].iter().chain(inner.dims()).chain(&dims[d + 1..]).copied().collect::<Shape>())
    }

    /// Reverses the given dimensions, or all for `()`. Returns a view with negative strides (PyTorch's `flip` copies). Fails for a
    /// repeated dimension.
    pub fn flip(&self, dims: impl Into<ReduceDims>) -> Result<Tensor> {
        let op = "flip";
        let flipped = dims.into().mask(op, self.shape())?;
        let flip = move |layout: &Layout| {
            let dims = flipped.iter().enumerate().filter(|(_, flipped)| **flipped);
            dims.fold(layout.clone(), |layout, (d, _)| layout.flip(d))
        };
        self.record_flip(op, flip)
    }

    fn record_flip(
        &self,
        op: &'static str,
        flip: impl Fn(&Layout) -> Layout + Clone + Send + Sync + 'static,
    ) -> Result<Tensor> {
        Ok(record_view(op, flip(&self.layout), self, move |grad| grad.record_flip(op, flip.clone())))
    }

    /// Reverses dimension 1, the columns of a matrix (PyTorch's `fliplr`). Fails for fewer than two dimensions.
    pub fn fliplr(&self) -> Result<Tensor> {
        self.flip(1).map_err(|e| e.with_op("fliplr"))
    }

    /// Reverses dimension 0, the rows of a matrix (PyTorch's `flipud`). Fails for a scalar.
    pub fn flipud(&self) -> Result<Tensor> {
        self.shape().dim("flipud", 0)?;
        self.flip(0).map_err(|e| e.with_op("flipud"))
    }

    /// Returns the elements whose index in dimension `b` is `shift` larger than the index in dimension `a`, as a new last
    /// dimension that replaces both (PyTorch's `diagonal`).
    pub fn diagonal(&self, shift: isize, a: isize, b: isize) -> Result<Tensor> {
        let op = "diagonal";
        let (i, j) = (self.shape().dim(op, a)?, self.shape().dim(op, b)?);
        invalid!(op if i == j, "a diagonal needs two dimensions, and {a} and {b} are the same");
        self.select_view(op, move |l| Ok(l.diagonal(shift, i, j)))
    }
}

/// Returns the elements in the given shape, outside the graph: a view if the strides allow it, otherwise a copy.
pub(crate) fn reshape_detached(t: &Tensor, shape: &Shape) -> Result<Tensor> {
    match t.layout.reshape(shape) {
        Some(layout) => Ok(t.with_layout(layout)),
        None if t.numel() != shape.numel() => {
            let hint = "reshaping keeps the number of elements";
            Err(Error::ShapeMismatch { op: "reshape", lhs: t.shape().clone(), rhs: shape.clone(), hint })
        }
        None => Ok(t.cast(t.dtype)?.with_layout(Layout::contiguous(shape.clone()))),
    }
}

/// Returns a detached view, which is a vector of one element if `t` is a scalar.
pub(crate) fn detach_at_least_1d(t: &Tensor) -> Tensor {
    match t.rank() {
        0 => t.with_layout(Layout { shape: Shape::from(1), strides: Dims::from_slice(&[0]), offset: t.layout.offset }),
        _ => t.detach(),
    }
}
