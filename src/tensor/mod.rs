//! Tensors: shape, strides and an offset over a [`Storage`] that views share.
//!
//! A [`Tensor`] is a small handle: which bytes (`storage`), how they are indexed (shape, strides, offset in elements), what they
//! mean (`dtype`) and, while a graph is recorded, which node made it. Views ([`Tensor::transpose`], [`Tensor::narrow`],
//! [`Tensor::i`], ...) make a new handle on the same storage and touch no device. [`Clone`] copies the elements;
//! [`Tensor::shallow_clone`] copies the handle.
//!
//! One file a subject: `shape` and `layout` are pure arithmetic, `create` makes tensors, `view` and `index` look at them
//! differently, `convert` moves them between devices and to ndarray, `bytes` to and from streams, `host` shows them to the host
//! without a lock, `display` prints them.

pub(crate) mod bytes;
mod convert;
mod create;
mod display;
#[cfg(feature = "dlpack")]
mod dlpack;
mod host;
pub(crate) mod index;
mod operators;
mod options;
mod pieces;
pub(crate) mod view;
pub(crate) mod window;

use std::sync::Arc;

use crate::autograd::{Group, Node};
use crate::storage::{Storage, is_uninit_scope};
use crate::{DType, Device, MemoryFormat, Result, Stream};

pub(crate) use crate::layout::Layout;
pub(crate) use crate::layout::memory_format::result_layout;
pub(crate) use crate::layout::shape::Dims;
pub use crate::layout::shape::{NewShape, Shape};
pub use host::HostArray;
pub use index::{Index, Indices};
pub use options::TensorOptions;

/// A multi-dimensional array on a device.
///
/// `Send + Sync`; methods take `&self`, in-place ones too (their names end in `_`): a tensor is a view of shared storage.
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
    /// The node of the operation that made it: [`Tensor::node`] is the one it has now.
    pub(crate) made_by: Option<Arc<Node>>,
    /// Of a handle without a node: which others become part of the graph with it.
    pub(crate) group: Group,
}

impl Tensor {
    /// A new contiguous tensor whose elements are whatever the memory held; every caller writes them all.
    pub(crate) fn empty_like_shape(shape: impl Into<Shape>, dtype: DType, device: Device) -> Result<Tensor> {
        let shape = shape.into();
        let storage = Storage::alloc(device, shape.bytes(dtype.size()))?;
        Ok(Tensor::new(storage, Layout::contiguous(shape), dtype))
    }

    /// As [`Tensor::empty_like_layout`]; within [`nn::uninit`](crate::nn::uninit) a tensor without memory.
    pub(crate) fn factory(layout: Layout, dtype: DType, device: Device) -> Result<Tensor> {
        match Storage::uninit(device, layout.shape.bytes(dtype.size()))? {
            Some(storage) => Ok(Tensor::new(storage, layout, dtype)),
            None => Tensor::empty_like_layout(layout, dtype, device),
        }
    }

    /// True while writes to the tensor are to do nothing: it has no memory, and `nn::uninit` has not returned.
    #[inline]
    pub(crate) fn skips_writes(&self) -> bool {
        is_uninit_scope() && self.storage.is_uninit()
    }

    /// As [`Tensor::empty_like_shape`], with a dense layout from the start of the storage.
    pub(crate) fn empty_like_layout(layout: Layout, dtype: DType, device: Device) -> Result<Tensor> {
        let storage = Storage::alloc(device, layout.shape.bytes(dtype.size()))?;
        Ok(Tensor::new(storage, layout, dtype))
    }

    /// The only tensor so far on this storage.
    #[inline]
    pub(crate) fn new(storage: Storage, layout: Layout, dtype: DType) -> Tensor {
        Tensor { storage, layout, dtype, made_by: None, group: Group::default() }
    }

    /// Another handle on the same storage and the same place in the graph (tch's word). Free.
    pub fn shallow_clone(&self) -> Tensor {
        let (made_by, group) = (self.made_by.clone(), self.group);
        Tensor { storage: self.storage.clone(), layout: self.layout.clone(), dtype: self.dtype, made_by, group }
    }

    /// The same storage outside the graph: changes are shared, gradients do not flow (PyTorch's `detach`).
    pub fn detach(&self) -> Tensor {
        let group = Group::detached(&self.storage);
        Tensor { storage: self.storage.clone(), layout: self.layout.clone(), dtype: self.dtype, made_by: None, group }
    }

    /// The same storage with another layout, outside the graph: a view of what is detached where this tensor is tracked.
    pub(crate) fn with_layout(&self, layout: Layout) -> Tensor {
        let group = if self.requires_grad() { Group::detached(&self.storage) } else { self.group };
        Tensor { storage: self.storage.clone(), layout, dtype: self.dtype, made_by: None, group }
    }

    /// The sizes of the dimensions.
    pub fn shape(&self) -> &Shape {
        &self.layout.shape
    }

    /// Elements to step over for one step along each dimension; zero where broadcast, negative where flipped.
    pub fn strides(&self) -> &[isize] {
        &self.layout.strides
    }

    /// Elements of the storage before the first one.
    pub fn offset(&self) -> usize {
        self.layout.offset
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Where the storage is.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// How many elements: the product of the shape.
    pub fn numel(&self) -> usize {
        self.layout.numel()
    }

    /// How many dimensions.
    pub fn rank(&self) -> usize {
        self.layout.shape.rank()
    }

    /// Whether the elements lie one after another in row-major order.
    pub fn is_contiguous(&self) -> bool {
        self.layout.is_contiguous()
    }

    /// Whether the elements lie one after another in this order (PyTorch's `is_contiguous(memory_format=...)`). Dims of one element have
    /// no order, so that a tensor may be contiguous in several formats.
    ///
    /// ```
    /// use claystone::{Device, MemoryFormat, Tensor};
    /// let images = Tensor::zeros([2, 8, 8, 3], Device::Cpu)?.permute(&[0, 3, 1, 2])?; // as image files have them
    /// assert!(images.is_contiguous_in(MemoryFormat::ChannelsLast) && !images.is_contiguous());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn is_contiguous_in(&self, format: MemoryFormat) -> bool {
        self.layout.is_in(format)
    }

    /// The memory format of this tensor, and so of the results of operations on it: channels-last where its strides are those of that
    /// format and not row-major, else [`MemoryFormat::Contiguous`], whatever its strides are.
    pub fn memory_format(&self) -> MemoryFormat {
        self.layout.format()
    }

    /// True where the tensor was made in [`nn::uninit`](crate::nn::uninit) and has no values yet: it has a shape, a dtype and a
    /// device, no memory, and reading it is an error (PyTorch's `is_meta`).
    pub fn is_uninit(&self) -> bool {
        self.storage.is_uninit()
    }

    /// The bytes beneath, which views share.
    pub fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Announces that work on `stream`, not the one the tensor was made on, uses it: its memory is not given to another
    /// tensor before what was submitted to `stream` until the last handle was dropped is done.
    /// `torch.Tensor.record_stream`; see [`Storage::record_stream`].
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
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`](crate::Error::DeviceMismatch) for a stream of another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<()> {
        self.storage.record_stream(stream)
    }

    /// Whether a change of one may be seen through the other: both are views of the same allocation.
    /// Empty tensors share nothing.
    pub fn shares_storage(&self, other: &Tensor) -> bool {
        self.storage.ptr_eq(&other.storage)
    }
}
