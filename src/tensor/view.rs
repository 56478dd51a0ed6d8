//! Views: the same storage with another shape, other strides, another offset.
//!
//! No view touches a device, and every one is differentiable. What gives each element once carries its gradient back by the
//! opposite view; what gives some of them fills the rest with zeros; what repeats them ([`Tensor::expand`]) sums.

use smallvec::SmallVec;

use super::create::check_storage;
use super::{Layout, Shape};
use crate::autograd::{record_unary_twice, record_view};
use crate::layout::shape::{Dims, NewShape};
use crate::storage::Caller;
use crate::{DType, DimList, Error, ReduceDims, Result, Tensor};

/// Dims of a tensor of this rank, each once.
fn distinct(op: &'static str, dims: &[isize], rank: usize) -> Result<Dims> {
    let mut out = Dims::new();
    for &dim in dims {
        let d = if dim < 0 { dim + rank as isize } else { dim };
        if !(0..rank as isize).contains(&d) {
            return Err(Error::DimOutOfRange { op, dim, rank });
        }
        if out.contains(&(d as usize)) {
            return Err(Error::invalid(op, format!("{dims:?} names dimension {d} twice")));
        }
        out.push(d as usize);
    }
    Ok(out)
}

impl Tensor {
    /// The view `layout`, which has every element once; `back` brings a gradient back to this tensor's shape.
    fn rearranged(
        &self,
        op: &'static str,
        layout: Layout,
        back: impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static,
    ) -> Tensor {
        record_view(op, layout, self, back)
    }

    /// The same bytes as elements of another dtype (PyTorch's `view(dtype)`), outside the graph. Of another size, the last
    /// dimension has as many elements as its bytes make.
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
    /// [`Error::Invalid`] where the last dimension is not contiguous or its bytes, an offset, a stride or the storage are no whole
    /// elements; for bools from anything else, since not every byte is one.
    pub fn view_dtype(&self, dtype: DType) -> Result<Tensor> {
        let (op, from, to) = ("view_dtype", self.dtype.size(), dtype.size());
        let mut view = self.detach();
        if dtype == DType::Bool && self.dtype != DType::Bool {
            return Err(Error::invalid(op, format!("not every {} is a bool: compare with .ne(0)", self.dtype)));
        }
        view.dtype = dtype;
        if from == to {
            return Ok(view);
        }
        check_storage(op, &self.storage, dtype)?;
        let scaled = |elements: usize| (elements * from).is_multiple_of(to).then_some(elements * from / to);
        let Some(last) = self.rank().checked_sub(1).filter(|&last| self.strides()[last] == 1) else {
            let reason =
                format!("a tensor of shape {} whose last stride is not 1 has no view of another size", self.shape());
            return Err(Error::invalid(op, reason + ": call .contiguous() first, with a dimension"));
        };
        let whole = || -> Option<Layout> {
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
        let reason = || format!("sizes, strides or the offset of {:?} are no whole elements of {dtype}", self.shape());
        view.layout = whole().ok_or_else(|| Error::invalid(op, reason()))?;
        Ok(view)
    }

    /// The view that `pick` makes of this layout, which has each element at most once: the gradient of the others is zero.
    pub(crate) fn picked(
        &self,
        op: &'static str,
        pick: impl Fn(&Layout) -> Result<Layout> + Clone + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let (layout, shape) = (pick(&self.layout)?, self.shape().clone());
        Ok(record_view(op, layout, self, move |grad| grad.placed(op, &shape, pick.clone())))
    }

    /// Zeros of `shape` with this tensor where `pick` says: the opposite of [`picked`](Tensor::picked).
    pub(crate) fn placed(
        &self,
        op: &'static str,
        shape: &Shape,
        pick: impl Fn(&Layout) -> Result<Layout> + Clone + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let whole = Tensor::zeros(shape, self)?;
        whole.with_layout(pick(&whole.layout)?).copy_(&self.detach())?;
        Ok(record_unary_twice(op, whole, self, move |grad| grad.picked(op, pick.clone())))
    }

    /// The elements in another shape, in the same row-major order (PyTorch's `reshape`). One size may be -1: whatever is
    /// left. A view where the strides can express it, otherwise a contiguous copy; [`Tensor::shares_storage`] tells.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, -1])?;
    /// assert_eq!(a.shape().dims(), &[2, 3]);
    /// assert_eq!(a.t()?.reshape(6)?.to_vec::<f32>()?, [0.0, 3.0, 1.0, 4.0, 2.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Sizes whose product is not the number of elements.
    #[track_caller]
    pub fn reshape(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let shape = shape.into().resolve("reshape", &format_args!("shape {}", self.shape()), self.numel())?;
        match self.viewed("reshape", &shape) {
            Some(view) => Ok(view),
            None => self.contiguous()?.reshape(shape),
        }
    }

    /// As [`Tensor::reshape`], but always a view (PyTorch's `view`).
    ///
    /// # Errors
    /// Sizes whose product is not the number of elements, or that these strides cannot express.
    pub fn view(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        let shape = shape.into().resolve("view", &format_args!("shape {}", self.shape()), self.numel())?;
        self.viewed("view", &shape).ok_or_else(|| {
            let reason = format!(
                "a tensor of shape {} and strides {:?} cannot be seen as {shape} without a copy: use .reshape()",
                self.shape(),
                self.strides()
            );
            Error::invalid("view", reason)
        })
    }

    fn viewed(&self, op: &'static str, shape: &Shape) -> Option<Tensor> {
        let old = self.shape().clone();
        Some(self.rearranged(op, self.layout.reshape(shape)?, move |grad| grad.reshape(&old)))
    }

    /// Dimensions `a` and `b` exchanged (PyTorch's `transpose`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let b = a.transpose(0, -1)?;
    /// assert_eq!((b.shape().dims(), b.strides()), (&[3, 2][..], &[1, 3][..]));
    /// assert!(b.shares_storage(&a));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`].
    pub fn transpose(&self, a: isize, b: isize) -> Result<Tensor> {
        let op = "transpose";
        let (i, j) = (self.shape().dim(op, a)?, self.shape().dim(op, b)?);
        Ok(self.rearranged(op, self.layout.transpose(i, j), move |grad| grad.transpose(a, b)))
    }

    /// A matrix transposed; a vector or a scalar as it is (PyTorch's `t`).
    ///
    /// # Errors
    /// More than two dimensions: say which with [`Tensor::transpose`].
    pub fn t(&self) -> Result<Tensor> {
        match self.rank() {
            0 | 1 => Ok(self.shallow_clone()),
            2 => self.transpose(0, 1),
            rank => Err(Error::invalid("t", format!("a tensor of rank {rank} is no matrix: use .transpose(a, b)"))),
        }
    }

    /// The dimensions in another order: dimension `dims[i]` becomes dimension `i` (PyTorch's `permute`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(a.permute(&[1, 0])?.shape().dims(), &[3, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// `dims` that do not name every dimension once.
    pub fn permute(&self, dims: &[isize]) -> Result<Tensor> {
        let op = "permute";
        let order = dims.iter().map(|&d| self.shape().dim(op, d)).collect::<Result<Dims>>()?;
        let mut back: Dims<isize> = SmallVec::from_elem(-1, self.rank());
        order.iter().enumerate().for_each(|(i, &d)| back[d] = i as isize);
        if order.len() != self.rank() || back.contains(&-1) {
            let reason = format!("{dims:?} does not name each of the {} dimensions once", self.rank());
            return Err(Error::invalid(op, reason));
        }
        Ok(self.rearranged(op, self.layout.permute(&order), move |grad| grad.permute(&back)))
    }

    /// Dimensions `source` moved to positions `destination`, one or several, the others in their order (PyTorch's `movedim`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::zeros([2, 3, 4], Device::Cpu)?;
    /// assert_eq!(a.movedim(0, -1)?.shape().dims(), [3, 4, 2]);
    /// assert_eq!(a.movedim([0, 1], [-1, -2])?.shape().dims(), [4, 3, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`]; [`Error::Invalid`] for a dimension that is named twice, or more of one than of the other.
    pub fn movedim(&self, source: impl Into<DimList>, destination: impl Into<DimList>) -> Result<Tensor> {
        let op = "movedim";
        let (source, destination) = (source.into().0, destination.into().0);
        if source.len() != destination.len() {
            let reason = format!("{source:?} and {destination:?} are not as many dimensions");
            return Err(Error::invalid(op, reason));
        }
        let (from, to) = (distinct(op, &source, self.rank())?, distinct(op, &destination, self.rank())?);
        let mut others = (0..self.rank()).filter(|d| !from.contains(d));
        let order: Dims<isize> = (0..self.rank())
            .filter_map(|d| match to.iter().position(|&t| t == d) {
                Some(i) => Some(from[i] as isize),
                None => others.next().map(|d| d as isize),
            })
            .collect();
        self.permute(&order)
    }

    /// Indexes `start..start + len` of dimension `dim` (PyTorch's `narrow`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(a.narrow(1, 1, 2)?.to_vec::<f32>()?, [1.0, 2.0, 4.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// A range that does not fit in the dimension; [`Tensor::slice`] clamps instead.
    pub fn narrow(&self, dim: isize, start: usize, len: usize) -> Result<Tensor> {
        let op = "narrow";
        let dim = self.shape().dim(op, dim)?;
        self.picked(op, move |l| l.narrow(op, dim, start, len))
    }

    /// Python's `[start:end:step]` in dimension `dim`: negative ends count from the end, ends beyond it are clamped, None
    /// is all the way, a negative step walks backwards.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 5, 1, Device::Cpu)?;
    /// assert_eq!(a.slice(0, -2, None, 1)?.to_vec::<f32>()?, [3.0, 4.0]);
    /// assert_eq!(a.slice(0, None, None, -2)?.to_vec::<f32>()?, [4.0, 2.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// A step of zero.
    pub fn slice(
        &self,
        dim: isize,
        start: impl Into<Option<isize>>,
        end: impl Into<Option<isize>>,
        step: isize,
    ) -> Result<Tensor> {
        let op = "slice";
        let (dim, ends) = (self.shape().dim(op, dim)?, (start.into(), end.into()));
        self.picked(op, move |l| l.slice(op, dim, ends, step))
    }

    /// Index `index` of dimension `dim`, which goes (PyTorch's `select`). Negative indexes count from the end.
    pub fn select(&self, dim: isize, index: isize) -> Result<Tensor> {
        let op = "select";
        let dim = self.shape().dim(op, dim)?;
        self.picked(op, move |l| l.select(op, dim, index))
    }

    /// Without dimension `dim` if its size is 1, otherwise as it is (PyTorch's `squeeze`).
    pub fn squeeze(&self, dim: isize) -> Result<Tensor> {
        let d = self.shape().dim("squeeze", dim)?;
        if self.shape().dims()[d] != 1 {
            return Ok(self.shallow_clone());
        }
        Ok(self.rearranged("squeeze", self.layout.remove(d), move |grad| grad.unsqueeze(d as isize)))
    }

    /// Without all dimensions of size 1.
    pub fn squeeze_all(&self) -> Result<Tensor> {
        let kept: Shape = self.shape().dims().iter().copied().filter(|&d| d != 1).collect();
        self.view(kept)
    }

    /// With a dimension of size 1 in place `dims` of the result, one or several (PyTorch's `unsqueeze`, NumPy's `expand_dims`).
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`]; [`Error::Invalid`] for a dimension that is named twice.
    pub fn unsqueeze(&self, dims: impl Into<DimList>) -> Result<Tensor> {
        let (op, dims) = ("unsqueeze", dims.into().0);
        let mut new = distinct(op, &dims, self.rank() + dims.len())?;
        new.sort_unstable();
        let layout = new.iter().fold(self.layout.clone(), |layout, &d| layout.insert(d));
        let back: Dims<isize> = new.iter().map(|&d| d as isize).collect();
        Ok(self.rearranged(op, layout, move |grad| grad.squeeze_dims(&back)))
    }

    /// Dimensions of size 1 stretched to `shape`, which may have more dimensions in front; -1 keeps a size (PyTorch's
    /// `expand`). The repeated elements are the same bytes. The gradient is the sum over the repetitions.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let b = a.unsqueeze(0)?.expand([4, -1, -1])?;
    /// assert_eq!((b.shape().dims(), b.strides()), (&[4, 2, 3][..], &[0, 3, 1][..]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] where another size than 1 would change.
    pub fn expand(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        self.expanded("expand", &shape.into())
    }

    /// [`Tensor::expand`] by NumPy's name.
    pub fn broadcast_to(&self, shape: impl Into<NewShape>) -> Result<Tensor> {
        self.expanded("broadcast_to", &shape.into())
    }

    fn expanded(&self, op: &'static str, new: &NewShape) -> Result<Tensor> {
        let old = self.shape().dims();
        // The size that size `i` of the result is stretched from, if there is one.
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

    /// Dimensions `start` to `end`, both included, as one (PyTorch's `flatten`); a scalar becomes `[1]`. A view where the
    /// strides can express it, otherwise a copy.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(a.flatten(0, -1)?.shape().dims(), &[6]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`].
    #[track_caller]
    pub fn flatten(&self, start: isize, end: isize) -> Result<Tensor> {
        let op = "flatten";
        if self.rank() == 0 {
            return self.unsqueeze(0);
        }
        let (a, b) = (self.shape().dim(op, start)?, self.shape().dim(op, end)?);
        let dims = self.shape().dims();
        if a > b {
            return Err(Error::invalid(op, format!("dimension {start} comes after dimension {end}")));
        }
        let joined = Shape::from(&dims[a..=b]).numel();
        self.reshape(dims[..a].iter().copied().chain([joined]).chain(dims[b + 1..].iter().copied()).collect::<Shape>())
    }

    /// Dimension `dim` as several of the given sizes, one of which may be -1 (PyTorch's `unflatten`).
    pub fn unflatten(&self, dim: isize, sizes: impl Into<NewShape>) -> Result<Tensor> {
        let op = "unflatten";
        let d = self.shape().dim(op, dim)?;
        let dims = self.shape().dims();
        let inner = sizes.into().resolve(op, &format_args!("dimension {d}"), dims[d])?;
        self.view(dims[..d].iter().chain(inner.dims()).chain(&dims[d + 1..]).copied().collect::<Shape>())
    }

    /// These dimensions backwards, `()` for all: a view with negative strides (PyTorch's `flip` copies).
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`]; a dimension named twice.
    pub fn flip(&self, dims: impl Into<ReduceDims>) -> Result<Tensor> {
        let op = "flip";
        let flipped = dims.into().mask(op, self.shape())?;
        let flip = move |layout: &Layout| {
            let dims = flipped.iter().enumerate().filter(|(_, flipped)| **flipped);
            dims.fold(layout.clone(), |layout, (d, _)| layout.flip(d))
        };
        self.flipped(op, flip)
    }

    fn flipped(
        &self,
        op: &'static str,
        flip: impl Fn(&Layout) -> Layout + Clone + Send + Sync + 'static,
    ) -> Result<Tensor> {
        Ok(record_view(op, flip(&self.layout), self, move |grad| grad.flipped(op, flip.clone())))
    }

    /// The columns of each matrix backwards: dimension 1 flipped (PyTorch's `fliplr`).
    ///
    /// # Errors
    /// Fewer than two dimensions.
    pub fn fliplr(&self) -> Result<Tensor> {
        self.flip(1).map_err(|e| e.of("fliplr"))
    }

    /// The rows backwards: dimension 0 flipped (PyTorch's `flipud`).
    ///
    /// # Errors
    /// A scalar.
    pub fn flipud(&self) -> Result<Tensor> {
        self.shape().dim("flipud", 0)?;
        self.flip(0).map_err(|e| e.of("flipud"))
    }

    /// The elements whose index in dimension `b` is `shift` above the one in dimension `a`, as a new last dimension in
    /// place of both (PyTorch's `diagonal`).
    pub fn diagonal(&self, shift: isize, a: isize, b: isize) -> Result<Tensor> {
        let op = "diagonal";
        let (i, j) = (self.shape().dim(op, a)?, self.shape().dim(op, b)?);
        if i == j {
            return Err(Error::invalid(op, format!("a diagonal needs two dimensions, and {a} and {b} are one")));
        }
        self.picked(op, move |l| Ok(l.diagonal(shift, i, j)))
    }
}

/// A view of `shape` where the strides can express it, otherwise a copy, outside the graph.
pub(crate) fn reshaped(t: &Tensor, shape: &Shape) -> Result<Tensor> {
    match t.layout.reshape(shape) {
        Some(layout) => Ok(t.with_layout(layout)),
        None if t.numel() != shape.numel() => {
            let hint = "a tensor is reshaped to as many elements";
            Err(Error::ShapeMismatch { op: "reshape", lhs: t.shape().clone(), rhs: shape.clone(), hint })
        }
        None => Ok(t.cast(t.dtype)?.with_layout(Layout::contiguous(shape.clone()))),
    }
}

/// A scalar is a line of one element.
pub(crate) fn at_least_1d(t: &Tensor) -> Tensor {
    match t.rank() {
        0 => t.with_layout(Layout { shape: Shape::from(1), strides: Dims::from_slice(&[0]), offset: t.layout.offset }),
        _ => t.detach(),
    }
}
