//! Tensors: shape, strides and an offset over a [`Storage`] that views share.
//!
//! A [`Tensor`] is a small handle that consists of a storage, a layout (shape, strides and offset in elements), a dtype and, while a
//! graph is recorded, the autograd node that produced the tensor. Views ([`Tensor::transpose`], [`Tensor::narrow`], [`Tensor::i`], ...)
//! create a new handle on the same storage without any device work. [`Clone`] copies the elements; [`Tensor::shallow_clone`] copies the
//! handle.
//!
//! Submodules: `create` makes tensors; `view`, `index`, `pieces` and `window` make views; `convert` copies to other devices and to
//! ndarray; `bytes` reads and writes byte streams; `host` gives the host access without a copy; `display` prints.

pub(crate) mod bytes;
mod convert;
mod create;
mod display;
#[cfg(feature = "dlpack")]
mod dlpack;
mod host;
pub(crate) mod index;
mod operators;
mod pieces;
pub(crate) mod view;
pub(crate) mod window;

use std::sync::Arc;

use crate::autograd::{DetachedGroup, Node};
use crate::storage::{Storage, is_uninit_scope};
use crate::{DType, Device, MemoryFormat, Result, Stream};

pub(crate) use crate::layout::Layout;
pub(crate) use crate::layout::memory_format::result_layout;
pub(crate) use crate::layout::shape::Dims;
pub use crate::layout::shape::{NewShape, Shape};
pub use create::TensorOptions;
pub use host::HostArray;
pub use index::{Index, Indices};

/// A multi-dimensional array on a device.
///
/// A tensor is `Send + Sync`. All methods take `&self`, even in-place methods (names ending in `_`), because several handles may use one
/// storage.
///
/// The documentation of a method names only the errors that are particular to the method. All methods also fail with
/// - [`Error::ShapeMismatch`](crate::Error::ShapeMismatch) for shapes other than described, and shapes that do not broadcast;
/// - [`Error::UnsupportedDType`](crate::Error::UnsupportedDType) for dtypes other than described; "floats" are f32, f16, bf16 and f64;
/// - [`Error::DTypeMismatch`](crate::Error::DTypeMismatch) for tensors of different dtypes, unless the method promotes or converts
///   them, as elementwise methods do;
/// - [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for tensors on different devices;
/// - [`Error::DimOutOfRange`](crate::Error::DimOutOfRange) for a dim that the tensor does not have;
/// - [`Error::NoDevice`](crate::Error::NoDevice), [`Error::OutOfMemory`](crate::Error::OutOfMemory), and failures of the device.
///
/// In-place methods also fail with [`Error::Autograd`](crate::Error::Autograd) for a leaf that requires a gradient, or a view of such a
/// leaf, outside [`no_grad`](crate::no_grad), and with [`Error::Invalid`](crate::Error::Invalid) for an expanded view.
///
/// ```
/// use claystone::{Device, Tensor};
/// let a = Tensor::zeros(&[3, 4], Device::Cpu)?;
/// let row = a.narrow(0, 1, 1)?; // a view: no copy
/// row.fill_(2.0)?;
/// assert_eq!(a.sum((), false)?.item::<f32>()?, 8.0);
/// assert!(a.shares_storage(&row) && !a.shares_storage(&a.clone()));
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Tensor {
    pub(crate) storage: Storage,
    pub(crate) layout: Layout,
    pub(crate) dtype: DType,
    /// The node of the operation that created this handle. After in-place operations the current node may differ; [`Tensor::node`]
    /// returns it.
    pub(crate) made_by: Option<Arc<Node>>,
    /// Views that become tracked together when one of them is changed in place. Unused if the handle has a node.
    pub(crate) group: DetachedGroup,
}

impl Tensor {
    /// Creates a contiguous tensor with uninitialised elements. The caller must write all of them.
    pub(crate) fn empty_with_shape(shape: impl Into<Shape>, dtype: DType, device: Device) -> Result<Tensor> {
        let shape = shape.into();
        let storage = Storage::alloc(device, shape.bytes(dtype.size()))?;
        Ok(Tensor::new(storage, Layout::contiguous(shape), dtype))
    }

    /// Creates a tensor like [`Tensor::empty_with_layout`], but without memory within [`nn::uninit`](crate::nn::uninit).
    pub(crate) fn empty_or_uninit(layout: Layout, dtype: DType, device: Device) -> Result<Tensor> {
        match Storage::uninit(device, layout.shape.bytes(dtype.size()))? {
            Some(storage) => Ok(Tensor::new(storage, layout, dtype)),
            None => Tensor::empty_with_layout(layout, dtype, device),
        }
    }

    /// True if writes to this tensor are ignored, because it has no memory and the thread is within `nn::uninit`.
    #[inline]
    pub(crate) fn skips_writes(&self) -> bool {
        is_uninit_scope() && self.storage.is_uninit()
    }

    /// Creates an uninitialised tensor like [`Tensor::empty_with_shape`], for a dense layout with offset 0.
    pub(crate) fn empty_with_layout(layout: Layout, dtype: DType, device: Device) -> Result<Tensor> {
        let storage = Storage::alloc(device, layout.shape.bytes(dtype.size()))?;
        Ok(Tensor::new(storage, layout, dtype))
    }

    /// Creates the first tensor on a storage, outside the graph.
    #[inline]
    pub(crate) fn new(storage: Storage, layout: Layout, dtype: DType) -> Tensor {
        Tensor { storage, layout, dtype, made_by: None, group: DetachedGroup::default() }
    }

    /// Returns another handle on the same storage and the same autograd node (the name is from the crate tch). Copies no elements.
    pub fn shallow_clone(&self) -> Tensor {
        let (made_by, group) = (self.made_by.clone(), self.group);
        Tensor { storage: self.storage.clone(), layout: self.layout.clone(), dtype: self.dtype, made_by, group }
    }

    /// Returns a handle on the same storage outside the graph: changes of elements are visible in both tensors, but gradients do not flow
    /// (PyTorch's `detach`).
    pub fn detach(&self) -> Tensor {
        let group = DetachedGroup::detached(&self.storage);
        Tensor { storage: self.storage.clone(), layout: self.layout.clone(), dtype: self.dtype, made_by: None, group }
    }

    /// Returns an unrecorded view with another layout. If this tensor requires a gradient, the view is detached from the graph.
    pub(crate) fn with_layout(&self, layout: Layout) -> Tensor {
        let group = if self.requires_grad() { DetachedGroup::detached(&self.storage) } else { self.group };
        Tensor { storage: self.storage.clone(), layout, dtype: self.dtype, made_by: None, group }
    }

    /// Returns the sizes of the dimensions.
    pub fn shape(&self) -> &Shape {
        &self.layout.shape
    }

    /// Returns the stride of each dimension in elements: zero in a broadcast dimension, negative in a flipped one.
    pub fn strides(&self) -> &[isize] {
        &self.layout.strides
    }

    /// Returns the index, in elements, of the tensor's first element in the storage.
    pub fn offset(&self) -> usize {
        self.layout.offset
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the device that holds the storage.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// Returns the number of elements: the product of the shape.
    pub fn numel(&self) -> usize {
        self.layout.numel()
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.layout.shape.rank()
    }

    /// True if the elements are adjacent in memory in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// True if the elements are adjacent in memory in the order of `format` (PyTorch's `is_contiguous(memory_format=...)`).
    /// Dimensions of size 1 have no order, so a tensor may be contiguous in several formats.
    ///
    /// ```
    /// use claystone::{Device, MemoryFormat, Tensor};
    /// let images = Tensor::zeros([2, 8, 8, 3], Device::Cpu)?.permute(&[0, 3, 1, 2])?; // as image files have them
    /// assert!(images.is_contiguous_in(MemoryFormat::ChannelsLast) && !images.is_contiguous());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn is_contiguous_in(&self, format: MemoryFormat) -> bool {
        self.layout.has_format(format)
    }

    /// Returns the memory format of this tensor, which results of operations on it inherit: channels-last if the strides are
    /// channels-last and not also row-major, otherwise [`MemoryFormat::Contiguous`].
    pub fn memory_format(&self) -> MemoryFormat {
        self.layout.format()
    }

    /// True if the tensor was created within [`nn::uninit`](crate::nn::uninit) and has no memory yet: it has a shape, a dtype and
    /// a device, and reading its elements is an error (PyTorch's `is_meta`).
    pub fn is_uninit(&self) -> bool {
        self.storage.is_uninit()
    }

    /// Returns the storage that this tensor and its views share.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Tells the allocator that work on `stream`, other than the stream the tensor was created on, uses this tensor. After the last
    /// handle is dropped, the memory is reused only once the work submitted to `stream` so far is done. See [`Storage::record_stream`]
    /// (PyTorch's `record_stream`).
    ///
    /// ```
    /// use claystone::{Device, Stream, Tensor, with_stream};
    /// let device = Device::best();
    /// let side = Stream::new(device)?;
    /// let x = Tensor::full(&[1000], 3.0, device)?;
    /// side.wait_stream(&Stream::current(device)?)?;
    /// let y = with_stream(&side, || x.mul(&x))?;
    /// x.record_stream(&side)?;
    /// drop(x); // the side stream may still be reading it
    /// Stream::current(device)?.wait_stream(&side)?;
    /// assert_eq!(y.to_vec::<f32>()?, [9.0; 1000]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn record_stream(&self, stream: &Stream) -> Result<()> {
        self.storage.record_stream(stream)
    }

    /// True if both tensors are views of the same allocation, so that changes of one may be visible in the other. False for empty tensors.
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        self.storage.ptr_eq(&other.storage)
    }
}
