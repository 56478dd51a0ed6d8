//! Attention over a cache of keys and values, whose position is in device memory.

use crate::{DType, Device, Result, Tensor};

/// How a cache stores its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CacheType {
    /// 4 bytes per element.
    F32,
    /// 2 bytes per element, with 11 significant bits.
    #[default]
    F16,
    /// 2 bytes per element, with 8 significant bits.
    BF16,
    /// 34 bytes per block of 32 elements, as GGUF's Q8_0: d in f16, then 32 signed bytes q. The values are `q * d`, with d = max|x| / 127.
    Q8_0,
}

impl CacheType {
    /// The number of elements and of bytes of a block of [`Q8_0`](CacheType::Q8_0).
    pub(crate) const BLOCK: (usize, usize) = (32, 34);

    /// Returns the dtype of the tensor that holds the rows.
    pub(crate) fn dtype(self) -> DType {
        [DType::F32, DType::F16, DType::BF16, DType::U8][self as usize]
    }

    /// Returns the number of elements of [`dtype`](CacheType::dtype) in a row of `width` values.
    pub(crate) fn row_len(self, width: usize) -> usize {
        if self == CacheType::Q8_0 { width / CacheType::BLOCK.0 * CacheType::BLOCK.1 } else { width }
    }
}

/// The keys or the values of a layer: for each head of each sequence of a batch, `capacity` rows of `width` elements.
///
/// ```
/// use claystone::ops::{CacheRows, CacheType};
/// let rows = CacheRows::new([1, 3, 256, 64], CacheType::Q8_0, claystone::Device::Cpu)?;
/// assert_eq!((rows.sizes(), rows.tensor().shape().dims()), ([1, 3, 256, 64], &[1, 3, 256, 68][..]));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct CacheRows {
    pub(crate) tensor: Tensor,
    pub(crate) kind: CacheType,
    width: usize,
}

impl CacheRows {
    /// Allocates rows of zeros for the sizes `[batch, heads, capacity, width]`. Fails with [`Error::Invalid`](crate::Error::Invalid) if
    /// `width` is not a multiple of 32 for [`CacheType::Q8_0`].
    #[track_caller]
    pub fn new([batch, heads, capacity, width]: [usize; 4], kind: CacheType, device: Device) -> Result<CacheRows> {
        invalid!("CacheRows::new" if kind == CacheType::Q8_0 && !width.is_multiple_of(CacheType::BLOCK.0),
            "rows of {width} elements are not a multiple of the 32 elements of a block");
        let tensor = Tensor::zeros([batch, heads, capacity, kind.row_len(width)], (kind.dtype(), device))?;
        Ok(CacheRows { tensor, kind, width })
    }

    /// Returns the tensor that holds the rows: `[batch, heads, capacity, width]`, or with [`CacheType::Q8_0`] bytes of the shape
    /// `[batch, heads, capacity, width / 32 * 34]`.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns how the elements are stored.
    pub fn kind(&self) -> CacheType {
        self.kind
    }

    /// Returns the sizes `[batch, heads, capacity, width]`.
    pub fn sizes(&self) -> [usize; 4] {
        let dims = self.tensor.shape().dims();
        [dims[0], dims[1], dims[2], self.width]
    }
}

/// Stores new rows in a cache, and computes attention of queries over the cache: query i of L attends to the rows 0 to `position + i`. No
/// tensor is empty. Tensors may have any strides, except that rows of the result are contiguous. A new row outside the cache is an error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CachedAttention<'a> {
    pub(crate) op: &'static str,
    /// The new keys and values, `[batch, heads, L, width]`, f32, f16 or bf16. Row i is stored at row `position + i`.
    pub(crate) rows: [&'a Tensor; 2],
    /// Keys and values, with the same sizes and type.
    pub(crate) cache: [&'a CacheRows; 2],
    /// i64 `[1]` or `[batch]`.
    pub(crate) position: &'a Tensor,
    /// The queries and the result, `[batch, query heads, L, width]`, of the dtype of the new rows; None to only store rows. Adjacent heads
    /// share a head of keys.
    pub(crate) attend: Option<[&'a Tensor; 2]>,
    pub(crate) scale: f64,
}

impl CachedAttention<'_> {
    /// Returns the number of new rows of a head, L.
    pub(crate) fn len(&self) -> usize {
        self.rows[0].shape().dims()[2]
    }

    /// Returns the number of query heads that share a head of keys.
    pub(crate) fn group(&self) -> usize {
        self.attend.map_or(1, |[q, _]| q.shape().dims()[1] / self.cache[0].sizes()[1])
    }

    /// Returns the distance between the positions of two sequences, in elements.
    pub(crate) fn position_step(&self) -> isize {
        if self.position.numel() == 1 { 0 } else { self.position.strides()[0] }
    }
}
