//! Products with quantised weights, and their elements.

use std::ops::Range;

use crate::dtype::quant::QuantFormat;
use crate::expr::Expr;
use crate::{Result, Scalar, Tensor};

/// Rows of a quantised weight in the memory of a device.
#[derive(Debug)]
pub(crate) struct PackedRows {
    /// The bytes of a whole weight, u8 `[rows of the whole weight, bytes of a row]`: blocks in the order of files, or planes if
    /// [`stores_planes`](crate::backend::stores_planes) is true for the device. Then plane `p` of [`QuantFormat::planes`] begins at byte
    /// `n * p.before` after the tensor's offset, where `n` is the number of blocks of the whole weight.
    pub(crate) bytes: Tensor,
    pub(crate) format: QuantFormat,
    /// The number of elements of a row.
    pub(crate) columns: usize,
    /// The rows of the whole weight that belong to this part.
    pub(crate) rows: Range<usize>,
}

impl PackedRows {
    /// Returns the part of these rows that begins with row `start`.
    pub(crate) fn narrow(&self, start: usize, len: usize) -> PackedRows {
        let first = self.rows.start + start;
        PackedRows { bytes: self.bytes.shallow_clone(), rows: first..first + len, ..*self }
    }

    /// Returns the number of rows of the whole weight.
    pub(crate) fn total_rows(&self) -> usize {
        self.bytes.shape().dims()[0]
    }

    /// Returns the size of a row in bytes.
    pub(crate) fn row_bytes(&self) -> usize {
        self.bytes.shape().dims()[1]
    }

    /// Returns the size of these rows in bytes.
    pub(crate) fn nbytes(&self) -> usize {
        self.rows.len() * self.row_bytes()
    }

    /// Returns the number of blocks of a row.
    pub(crate) fn row_blocks(&self) -> usize {
        self.columns / self.format.block_len(self.columns)
    }

    /// Copies the blocks of these rows to the host, in the order of files. `planes` tells how the device stores them.
    pub(crate) fn read_blocks(&self, planes: bool) -> Result<Vec<u8>> {
        let (row_bytes, offset) = (self.row_bytes(), self.bytes.layout.offset);
        if !planes {
            return self.bytes.storage.read_vec(offset + self.rows.start * row_bytes, self.nbytes());
        }
        let (weight, mut blocks) =
            (self.bytes.storage.read_vec::<u8>(offset, self.bytes.numel())?, vec![0; self.nbytes()]);
        self.format.undo_planes(self.columns, &weight, self.rows.start * self.row_blocks(), &mut blocks);
        Ok(blocks)
    }
}

/// A product `x wᵀ` with an epilogue, where the rows of the weight `w` are the rows of all parts, one part after another.
pub(crate) struct QuantizedGemm<'a> {
    pub(crate) op: &'static str,
    /// The left matrix `[m, k]`, of f32, f16 or bf16.
    pub(crate) x: &'a Tensor,
    pub(crate) parts: &'a [PackedRows],
    /// As in [`Gemm`](super::gemm::Gemm): one expression for each result, where input 0 is the product, and inputs 1.. are `extras`.
    pub(crate) epilogue: &'a [Expr],
    /// Operands of the epilogue, broadcast to the shape of the results, `[m, n]`.
    pub(crate) extras: &'a [&'a Tensor],
    pub(crate) scalars: &'a [Scalar],
}

/// Reads the elements of rows of a quantised weight, converted to the dtype of the result.
pub(crate) struct Dequantize<'a> {
    pub(crate) op: &'static str,
    pub(crate) weight: &'a PackedRows,
    /// A contiguous vector of row numbers below the number of rows of `weight`, in any integer dtype: row `i` of the result is row `index[i]`
    /// of the weight. `None` for all rows.
    pub(crate) index: Option<&'a Tensor>,
}
