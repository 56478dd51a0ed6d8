//! Reading and adding through indices: `index_select`, `gather`, `embedding`, and their transposes, which are also their
//! gradients.
//!
//! All reads are one kernel: source and index are walked together over the result's shape, and a stride of zero says that
//! the index is the same along a dim. Adding is deterministic and uses no atomics: a work-item owns one column (a position
//! outside the indexed dim) and a range of destinations, and goes through the indices in order. That costs one pass over the
//! indices for each range, a few thousand at most, and gives the same bits on every run; atomics would be faster for
//! millions of indices into a single column, and never twice the same.

use smallvec::SmallVec;

use super::{same_device, same_dtype};
use crate::autograd;
use crate::tensor::{Dims, Layout};
use crate::{DType, Device, Error, Result, Shape, Tensor};

mod cpu;
mod opencl;

/// A read or an addition through indices. Layouts have one shape, that of the elements read or added.
struct Indexed<'a> {
    op: &'static str,
    /// Elements read from, or the source added: over the shape, with stride 0 along the indexed dim when read from.
    x: &'a Tensor,
    x_layout: Layout,
    index: &'a Tensor,
    index_layout: Layout,
    /// Size of the indexed dim, and the step along it in the tensor that the index points into.
    size: usize,
    step: isize,
}

/// The layout of t with the stride along d taken out, over `shape`.
fn without(t: &Tensor, d: usize, shape: &Shape) -> (Layout, isize) {
    let mut strides = t.layout.strides.clone();
    let step = std::mem::replace(&mut strides[d], 0);
    (Layout { shape: shape.clone(), strides, offset: t.layout.offset }, step)
}

fn check_index(op: &'static str, index: &Tensor) -> Result<()> {
    match index.dtype {
        DType::I64 | DType::I32 | DType::U32 | DType::U8 => Ok(()),
        dtype => Err(Error::UnsupportedDType { op, dtype, expected: "an integer index (i64, i32, u32, u8)" }),
    }
}

/// A vector as a view of `shape`, along dim d.
fn along(index: &Tensor, d: usize, shape: &Shape) -> Layout {
    let mut strides: Dims<isize> = SmallVec::from_elem(0, shape.rank());
    strides[d] = index.strides().first().copied().unwrap_or(0);
    Layout { shape: shape.clone(), strides, offset: index.layout.offset }
}

fn with_dim(shape: &Shape, d: usize, size: usize) -> Shape {
    shape.dims().iter().enumerate().map(|(i, &n)| if i == d { size } else { n }).collect()
}

impl Indexed<'_> {
    fn read(&self) -> Result<Tensor> {
        let out = Tensor::empty_like_shape(&self.x_layout.shape, self.x.dtype, self.x.device())?;
        if out.numel() > 0 {
            match out.device() {
                Device::Cpu => cpu::gather(self, &out)?,
                Device::OpenCL(_) if self.size == 0 => return Err(self.nowhere()?),
                Device::OpenCL(_) => opencl::gather(self, &out)?,
            }
            out.storage.bump_version();
        }
        Ok(out)
    }

    /// The error for an empty dim, which has no memory for a kernel to look at: the first index is out of range.
    fn nowhere(&self) -> Result<Error> {
        let indices = self.index.with_layout(self.index_layout.clone()).cast(DType::I64)?.to_vec::<i64>()?;
        Ok(Error::IndexOutOfRange { op: self.op, index: indices[0], size: 0 })
    }

    /// Adds to `target`, whose positions outside dim d are the shape's.
    fn add_to(&self, target: &Tensor, d: usize) -> Result<()> {
        if self.x_layout.numel() == 0 {
            return Ok(());
        }
        if target.layout.may_alias_itself() {
            let reason = "several elements of the tensor added to are one (an expanded view): add to a clone()";
            return Err(Error::invalid(self.op, reason));
        }
        let (layout, _) = without(target, d, &self.x_layout.shape);
        match target.device() {
            Device::Cpu => cpu::scatter_add(self, target, &layout)?,
            Device::OpenCL(_) if self.size == 0 => return Err(self.nowhere()?),
            Device::OpenCL(_) => opencl::scatter_add(self, target, &layout, d)?,
        }
        target.storage.bump_version();
        Ok(())
    }
}

/// Adds `source` (over `shape`) to `target` through `index`. Halves are added up in f32 and rounded once.
fn scatter(
    op: &'static str,
    target: &Tensor,
    d: usize,
    index: (&Tensor, Layout),
    source: (&Tensor, Layout),
) -> Result<()> {
    if matches!(target.dtype, DType::F16 | DType::BF16) {
        let (wide, from) = (target.cast(DType::F32)?, source.0.with_layout(source.1).cast(DType::F32)?);
        scatter(op, &wide, d, index, (&from, from.layout.clone()))?;
        target.detach().copy_(&wide)?;
        return Ok(());
    }
    // The CPU locks a storage either for reading or for writing.
    let copies = [index.0, source.0].map(|t| t.shares_storage(target));
    let copy = |t: &Tensor, layout: Layout| t.with_layout(layout).cast(t.dtype);
    let index = match copies[0] {
        true => copy(index.0, index.1)?,
        false => index.0.with_layout(index.1),
    };
    let source = match copies[1] {
        true => copy(source.0, source.1)?,
        false => source.0.with_layout(source.1),
    };
    let (size, step) = (target.shape().dims()[d], target.strides()[d]);
    let (x_layout, index_layout) = (source.layout.clone(), index.layout.clone());
    Indexed { op, x: &source, x_layout, index: &index, index_layout, size, step }.add_to(target, d)
}

/// The gradient of a read: `grad` added into zeros of `shape` through the index.
fn unread(op: &'static str, shape: &Shape, d: usize, index: (&Tensor, Layout), grad: &Tensor) -> Result<Tensor> {
    let halves = matches!(grad.dtype, DType::F16 | DType::BF16);
    let dtype = if halves { DType::F32 } else { grad.dtype };
    let total = Tensor::zeros(shape, (dtype, grad.device()))?;
    let grad_as = if halves { grad.cast(dtype)? } else { grad.detach() };
    scatter(op, &total, d, index, (&grad_as, grad_as.layout.clone()))?;
    if halves { total.cast(grad.dtype) } else { Ok(total) }
}

impl Tensor {
    /// The slices of this tensor along `dim` that a vector of indices names, in its order (PyTorch's `index_select`). Any
    /// integer dtype but bool indexes. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let index = Tensor::from_slice(&[2i64, 0, 2], 3, Device::Cpu)?;
    /// assert_eq!(t.index_select(1, &index)?.to_vec::<f32>()?, [2.0, 0.0, 2.0, 5.0, 3.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`], [`Error::UnsupportedDType`], [`Error::DeviceMismatch`]; [`Error::Invalid`] where `index` is
    /// no vector. [`Error::IndexOutOfRange`] for a negative or too large index: on the CPU at once; on OpenCL from the next
    /// call of this thread that waits for the device, until which the elements are 0.
    pub fn index_select(&self, dim: isize, index: &Tensor) -> Result<Tensor> {
        let op = "index_select";
        let d = self.shape().dim(op, dim)?;
        self.check_vector(op, index)?;
        let shape = with_dim(self.shape(), d, index.numel());
        let (x_layout, step) = without(self, d, &shape);
        let index_layout = along(index, d, &shape);
        let size = self.shape().dims()[d];
        let read = Indexed { op, x: self, x_layout, index, index_layout: index_layout.clone(), size, step };
        self.read_through(op, d, read)
    }

    fn check_vector(&self, op: &'static str, index: &Tensor) -> Result<()> {
        check_index(op, index)?;
        same_device(op, &[self, index])?;
        match index.rank() {
            1 => Ok(()),
            _ => Err(Error::invalid(op, format!("the index is a vector, this one has shape {}", index.shape()))),
        }
    }

    fn read_through(&self, op: &'static str, d: usize, read: Indexed) -> Result<Tensor> {
        let out = read.read()?;
        if !autograd::is_tracked(&[self]) {
            return Ok(out);
        }
        let (saved, layout) = (autograd::Saved::new(read.index), read.index_layout.clone());
        let shape = self.shape().clone();
        Ok(autograd::record_unary(op, out, self, move |grad| {
            unread(op, &shape, d, (saved.get(op)?, layout.clone()), &grad)
        }))
    }

    /// `out[i][j] = self[index[i][j]][j]` and so on along `dim`: an element for each index, other positions staying put
    /// (PyTorch's `gather`). `index` has this tensor's rank and is nowhere larger outside `dim`. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let index = Tensor::from_slice(&[2i64, 0], [2, 1], Device::Cpu)?;
    /// assert_eq!(t.gather(1, &index)?.to_vec::<f32>()?, [2.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::index_select`]; [`Error::ShapeMismatch`].
    pub fn gather(&self, dim: isize, index: &Tensor) -> Result<Tensor> {
        let op = "gather";
        let d = self.shape().dim(op, dim)?;
        check_index(op, index)?;
        same_device(op, &[self, index])?;
        fits(op, index.shape(), self.shape(), d)?;
        let (x_layout, step) = without(self, d, index.shape());
        let size = self.shape().dims()[d];
        let read = Indexed { op, x: self, x_layout, index, index_layout: index.layout.clone(), size, step };
        self.read_through(op, d, read)
    }

    /// The rows of this table that `index` (any shape) names: shape `index.shape() + self.shape()[1..]` (PyTorch's
    /// `embedding`). Differentiable in the table.
    ///
    /// # Errors
    /// As [`Tensor::index_select`]; [`Error::Invalid`] for a scalar table.
    pub fn embedding(&self, index: &Tensor) -> Result<Tensor> {
        let op = "embedding";
        check_index(op, index)?;
        if self.rank() == 0 {
            return Err(Error::invalid(op, "the table is a scalar: it has no rows"));
        }
        let rows = self.index_select(0, &index.detach().reshape([index.numel()])?).map_err(|e| e.of(op))?;
        let shape: Shape = index.shape().dims().iter().chain(&self.shape().dims()[1..]).copied().collect();
        rows.reshape(shape)
    }

    /// A copy of this tensor with `source[i][j]` added at `[index[i][j]][j]` and so on along `dim` (PyTorch's
    /// `scatter_add`); equal indices add up. The same bits on every run. Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::gather`]; [`Error::DTypeMismatch`].
    pub fn scatter_add(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        let op = "scatter_add";
        let d = self.check_scatter(op, dim, index, source)?;
        let layout = Layout { shape: index.shape().clone(), ..source.layout.clone() };
        let out = self.cast(self.dtype)?;
        scatter(op, &out, d, (index, index.layout.clone()), (source, layout))?;
        self.record_add(op, out, d, (index, index.layout.clone()), source)
    }

    /// [`Tensor::scatter_add`] in place.
    ///
    /// # Errors
    /// As [`Tensor::scatter_add`]; [`Error::Autograd`] where a tensor is tracked; [`Error::Invalid`] into an expanded view.
    pub fn scatter_add_(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<&Tensor> {
        let op = "scatter_add_";
        let d = self.check_scatter(op, dim, index, source)?;
        autograd::check_in_place(op, self, &[source])?;
        let layout = Layout { shape: index.shape().clone(), ..source.layout.clone() };
        scatter(op, self, d, (index, index.layout.clone()), (source, layout))?;
        Ok(self)
    }

    /// A copy of this tensor with slice i of `source` added to slice `index[i]` along `dim` (PyTorch's `index_add`); equal
    /// indices add up. The same bits on every run. Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::index_select`]; [`Error::ShapeMismatch`], [`Error::DTypeMismatch`].
    pub fn index_add(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        let op = "index_add";
        let d = self.check_index_add(op, dim, index, source)?;
        let layout = along(index, d, source.shape());
        let out = self.cast(self.dtype)?;
        scatter(op, &out, d, (index, layout.clone()), (source, source.layout.clone()))?;
        self.record_add(op, out, d, (index, layout), source)
    }

    /// [`Tensor::index_add`] in place.
    ///
    /// # Errors
    /// As [`Tensor::index_add`]; [`Error::Autograd`] where a tensor is tracked; [`Error::Invalid`] into an expanded view.
    pub fn index_add_(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<&Tensor> {
        let op = "index_add_";
        let d = self.check_index_add(op, dim, index, source)?;
        autograd::check_in_place(op, self, &[source])?;
        scatter(op, self, d, (index, along(index, d, source.shape())), (source, source.layout.clone()))?;
        Ok(self)
    }

    fn check_scatter(&self, op: &'static str, dim: isize, index: &Tensor, source: &Tensor) -> Result<usize> {
        let d = self.shape().dim(op, dim)?;
        check_index(op, index)?;
        same_device(op, &[self, index, source])?;
        same_dtype(op, &[self, source])?;
        fits(op, index.shape(), self.shape(), d)?;
        let small = index.rank() == source.rank()
            && index.shape().dims().iter().zip(source.shape().dims()).all(|(i, s)| i <= s);
        match small {
            true => Ok(d),
            false => {
                let hint = "the index is nowhere larger than the source";
                Err(Error::ShapeMismatch { op, lhs: index.shape().clone(), rhs: source.shape().clone(), hint })
            }
        }
    }

    fn check_index_add(&self, op: &'static str, dim: isize, index: &Tensor, source: &Tensor) -> Result<usize> {
        let d = self.shape().dim(op, dim)?;
        self.check_vector(op, index)?;
        same_device(op, &[self, source])?;
        same_dtype(op, &[self, source])?;
        if source.shape() != &with_dim(self.shape(), d, index.numel()) {
            let hint = "the source has a slice for each index and this tensor's shape otherwise";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: source.shape().clone(), hint });
        }
        Ok(d)
    }

    fn record_add(
        &self,
        op: &'static str,
        out: Tensor,
        d: usize,
        index: (&Tensor, Layout),
        source: &Tensor,
    ) -> Result<Tensor> {
        if !autograd::is_tracked(&[self, source]) {
            return Ok(out);
        }
        let (saved, index_layout) = (autograd::Saved::new(index.0), index.1);
        let source_shape = source.shape().clone();
        Ok(autograd::record(op, out, &[self, source], move |ctx| {
            let grad = ctx.grad()?;
            let mut gradients: autograd::Gradients = SmallVec::new();
            gradients.push(ctx.needs(0).then(|| grad.shallow_clone()));
            gradients.push(match ctx.needs(1) {
                false => None,
                true => {
                    let (index, index_layout) = (saved.get(op)?, index_layout.clone());
                    let (x_layout, step) = without(&grad, d, &index_layout.shape);
                    let size = grad.shape().dims()[d];
                    let read = Indexed { op, x: &grad, x_layout, index, index_layout, size, step }.read()?;
                    // Elements of the source beyond the index were not added.
                    if read.shape() == &source_shape {
                        Some(read)
                    } else {
                        let all = Tensor::zeros(&source_shape, (grad.dtype, grad.device()))?;
                        let layout = Layout { shape: read.shape().clone(), ..all.layout.clone() };
                        all.with_layout(layout).copy_(&read)?;
                        Some(all)
                    }
                }
            });
            Ok(gradients)
        }))
    }

    /// For class numbers of any shape, vectors with 1 at the class and 0 elsewhere, as i64: shape `self.shape() + [classes]`
    /// (PyTorch's `one_hot`).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[2i64, 0], 2, Device::Cpu)?;
    /// assert_eq!(t.one_hot(3)?.to_vec::<i64>()?, [0, 0, 1, 1, 0, 0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`]; [`Error::IndexOutOfRange`] as [`Tensor::index_select`] gives it.
    pub fn one_hot(&self, classes: usize) -> Result<Tensor> {
        let op = "one_hot";
        check_index(op, self)?;
        let shape: Shape = self.shape().dims().iter().copied().chain([classes]).collect();
        if classes == 0 && self.numel() > 0 {
            return Err(Error::invalid(op, "there are no classes (0), but elements"));
        }
        let out = Tensor::empty_like_shape(shape, DType::I64, self.device())?;
        if out.numel() > 0 {
            match self.device() {
                Device::Cpu => cpu::one_hot(op, self, &out, classes)?,
                Device::OpenCL(_) => opencl::one_hot(self, &out, classes)?,
            }
            out.storage.bump_version();
        }
        Ok(out)
    }
}

/// Whether an index of shape `index` goes with a tensor of shape `of` along d.
fn fits(op: &'static str, index: &Shape, of: &Shape, d: usize) -> Result<()> {
    let small =
        index.rank() == of.rank() && index.dims().iter().zip(of.dims()).enumerate().all(|(i, (a, b))| i == d || a <= b);
    if small {
        return Ok(());
    }
    let hint = "the index has the tensor's rank and is nowhere larger outside the dim";
    Err(Error::ShapeMismatch { op, lhs: of.clone(), rhs: index.clone(), hint })
}
