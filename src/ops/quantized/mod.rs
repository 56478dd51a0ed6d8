//! Quantised weights: packed rows of small integers with scales, which products read as they are.
//!
//! A product of few rows reads the packed bytes once, if the backend has a kernel for it. Every other product dequantises a strip of rows at
//! a time, and multiplies by the strip with the usual kernels, which write a range of columns of the result.

mod encode;

use std::borrow::Cow;
use std::fmt;
use std::slice;

use crate::backend::problem::gemm::{EPILOGUES, Gemm};
use crate::backend::problem::quantized::{Dequantize, PackedRows, QuantizedGemm};
use crate::dtype::quant::QuantFormat;
use crate::expr::program::Program;
use crate::ops::check_index;
use crate::ops::dispatch::prelude::*;
use crate::storage::Storage;

/// A constant weight of two to eight bits an element, in memory of exactly its packed bytes. `Clone` makes another handle on the bytes.
///
/// A weight `[n, k]` has `n` rows of `k` elements, as the weight of [`nn::Linear`](crate::nn::Linear): [`matmul`](Self::matmul) maps
/// `[.., k]` to `[.., n]`. Elements are computed in f32, by the rules of the [`QuantFormat`], and products are accumulated in f32. The sum
/// over `k` terms differs from the exact one by at most `k * 2^-24` of the sum of the absolute values of the terms, and on the CPU, which
/// rounds activations to 16 bits in blocks of 32 for products of up to 8 rows, also by `2^-16` of the largest activation of a block times
/// the sum of the absolute weights of the block.
///
/// Gradients flow to the activations, but not to the weight.
///
/// ```
/// use claystone::quantized::{QuantFormat, QuantizedTensor};
/// use claystone::{DType, Device, Tensor};
/// let block = [&[0x00, 0x3c][..], &[1; 32]].concat(); // the scale 1 as f16, and 32 integers
/// let w = QuantizedTensor::from_bytes(&block, [1, 32], QuantFormat::Q8_0, Device::Cpu)?;
/// assert_eq!(w.dequantize(DType::F32)?.to_vec::<f32>()?, [1.0; 32]);
/// assert_eq!(w.matmul(&Tensor::ones([2, 32], Device::Cpu)?)?.to_vec::<f32>()?, [32.0; 2]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct QuantizedTensor {
    parts: SmallVec<[PackedRows; 1]>,
    shape: Shape,
}

impl Clone for QuantizedTensor {
    fn clone(&self) -> QuantizedTensor {
        let parts = self.parts.iter().map(|part| part.narrow(0, part.rows.len())).collect();
        QuantizedTensor { parts, shape: self.shape.clone() }
    }
}

impl fmt::Debug for QuantizedTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QuantizedTensor({}, {}, {})", self.shape, self.format(), self.device())
    }
}

impl QuantizedTensor {
    /// Creates a weight from blocks in the order of files: `shape` is `[.., n, k]`, and rows follow each other without gaps.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a scalar shape, for rows that are no multiple of the format's block, and for a wrong number of bytes;
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn from_bytes(
        bytes: &[u8],
        shape: impl Into<Shape>,
        format: QuantFormat,
        device: Device,
    ) -> Result<QuantizedTensor> {
        let _caller = Caller::enter();
        let (op, shape) = ("QuantizedTensor::from_bytes", shape.into());
        let [rows, row_bytes] = packed_size(op, &shape, format)?;
        invalid!(op if bytes.len() != rows * row_bytes, "{} bytes for {rows} rows of {row_bytes} bytes", bytes.len());
        let bytes = QuantizedTensor::arrange(bytes, shape.dims()[shape.rank() - 1], format, device)?;
        let storage = Storage::alloc_static(device, bytes.len())?;
        storage.write(0, &bytes)?;
        QuantizedTensor::from_storage(storage, 0, shape, format)
    }

    /// Creates a weight `[.., n, k]` over bytes of a storage, which begin at byte `offset` and have been arranged by
    /// [`arrange`](Self::arrange) for the storage's device. The bytes must not change any more.
    ///
    /// # Errors
    /// [`Error::Invalid`] as [`from_bytes`](Self::from_bytes), and if the storage ends before the weight.
    pub fn from_storage(
        storage: Storage,
        offset: usize,
        shape: impl Into<Shape>,
        format: QuantFormat,
    ) -> Result<QuantizedTensor> {
        let (op, shape) = ("QuantizedTensor::from_storage", shape.into());
        let [rows, row_bytes] = packed_size(op, &shape, format)?;
        let end = offset.checked_add(rows * row_bytes);
        invalid!(op if end.is_none_or(|end| end > storage.nbytes()),
            "{rows} rows of {row_bytes} bytes from byte {offset} on do not fit in a storage of {} bytes", storage.nbytes());
        let layout = Layout { offset, ..Layout::contiguous([rows, row_bytes].into()) };
        let (bytes, columns) = (Tensor::new(storage, layout, DType::U8), shape.dims()[shape.rank() - 1]);
        Ok(QuantizedTensor {
            parts: SmallVec::from_iter([PackedRows { bytes, format, columns, rows: 0..rows }]),
            shape,
        })
    }

    /// Returns the bytes of a whole weight, rows of `columns` elements, in the order in which `device` stores them: unchanged on the CPU,
    /// and with the fields of all blocks apart from each other on OpenCL devices.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `columns` is no multiple of the format's block, and if the last row is incomplete.
    pub fn arrange(bytes: &[u8], columns: usize, format: QuantFormat, device: Device) -> Result<Cow<'_, [u8]>> {
        let (op, row_bytes) = ("QuantizedTensor::arrange", format.row_bytes(columns)?);
        invalid!(op if row_bytes == 0 || !bytes.len().is_multiple_of(row_bytes),
            "{} bytes are no multiple of rows of {row_bytes} bytes", bytes.len());
        if !backend::stores_planes(device) {
            return Ok(Cow::Borrowed(bytes));
        }
        let mut planes = vec![0; bytes.len()];
        format.to_planes(columns, bytes, &mut planes);
        Ok(Cow::Owned(planes))
    }

    /// Returns the shape of the elements, `[.., n, k]`.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// Returns the format of the first row. Rows joined by [`join_rows`](Self::join_rows) may have other formats.
    pub fn format(&self) -> QuantFormat {
        self.parts[0].format
    }

    /// Returns the device that holds the bytes.
    pub fn device(&self) -> Device {
        self.storage().device()
    }

    /// Returns the size of the packed rows in bytes.
    pub fn nbytes(&self) -> usize {
        self.parts.iter().map(PackedRows::nbytes).sum()
    }

    /// Returns the storage of the first row.
    pub fn storage(&self) -> &Storage {
        self.parts[0].bytes.storage()
    }

    /// Copies the blocks to the host, in the order of files. Waits for the device.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let planes = backend::stores_planes(self.device());
        Ok(self.parts.iter().map(|part| part.read_blocks(planes)).collect::<Result<Vec<_>>>()?.concat())
    }

    /// Copies the weight to a device; returns another handle if the weight is there already. Fails with [`Error::NoDevice`] and
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn to_device(&self, device: Device) -> Result<QuantizedTensor> {
        let _caller = Caller::enter();
        if device == self.device() {
            return Ok(self.clone());
        }
        let planes = backend::stores_planes(self.device());
        let moved = self.parts.iter().map(|part| {
            let shape = [part.rows.len(), part.columns];
            QuantizedTensor::from_bytes(&part.read_blocks(planes)?, shape, part.format, device)
        });
        let moved = moved.collect::<Result<Vec<_>>>()?;
        let parts = moved.into_iter().flat_map(|weight| weight.parts).collect();
        Ok(QuantizedTensor { parts, shape: self.shape.clone() })
    }

    /// Computes all elements as f32, and converts them to f32, f16 or bf16. Fails with [`Error::UnsupportedDType`] for other dtypes and
    /// with [`Error::OutOfMemory`].
    #[track_caller]
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "dequantize";
        check_dtype(op, dtype)?;
        let out = Tensor::empty_with_shape(self.shape(), dtype, self.device())?;
        let rows = out.with_layout(Layout::contiguous([self.rows_count(), self.columns()].into()));
        let mut start = 0;
        for part in self.parts.iter().filter(|_| out.numel() > 0) {
            dequantize_into(op, part, None, &narrow(&rows, 0, start, part.rows.len())?)?;
            start += part.rows.len();
        }
        Ok(out)
    }

    /// Returns the rows of a weight `[n, k]` that the indices select, converted to `dtype`: `[.., k]` for an index of shape `[..]`, as
    /// [`Tensor::embedding`] does.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for an index that is not of integers and for a `dtype` other than f32, f16 and bf16;
    /// [`Error::IndexOutOfRange`] for a negative or too large index (as [`Tensor::index_select`] on OpenCL devices); [`Error::Invalid`] for
    /// a weight of another rank, and for joined rows that are in several storages.
    ///
    /// ```
    /// use claystone::quantized::{QuantFormat, QuantizedTensor};
    /// use claystone::{DType, Device, Tensor};
    /// let table = QuantizedTensor::from_bytes(&[0; 3 * 34], [3, 32], QuantFormat::Q8_0, Device::Cpu)?;
    /// let words = Tensor::from_slice(&[2i64, 0], 2, Device::Cpu)?;
    /// assert_eq!(table.rows(&words, DType::F32)?.shape().dims(), [2, 32]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn rows(&self, index: &Tensor, dtype: DType) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "QuantizedTensor::rows";
        check_dtype(op, dtype)?;
        check_index(op, index)?;
        self.check_matrix(op)?;
        let (device, [n, k]) = (self.device(), [self.rows_count(), self.columns()]);
        invalid!(op if self.parts.len() > 1, "the rows are in {} storages: join weights of one format", self.parts.len());
        if index.device() != device {
            return Err(Error::DeviceMismatch { op, lhs: device, rhs: index.device() });
        }
        let shape: Shape = index.shape().dims().iter().copied().chain([k]).collect();
        let out = Tensor::empty_with_shape(shape, dtype, device)?;
        if out.numel() > 0 {
            let index = index.detach().reshape(index.numel())?.contiguous()?;
            invalid!(op if n == 0, "the weight has no rows");
            let rows = out.with_layout(Layout::contiguous([index.numel(), k].into()));
            dequantize_into(op, &self.parts[0], Some(&index), &rows)?;
        }
        Ok(out)
    }

    /// Computes `x wᵀ` for a weight `w` of shape `[n, k]` and `x` of f32, f16 or bf16: `[.., k]` to `[.., n]`, in the dtype of `x`.
    /// Differentiable with respect to `x`.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for other dtypes, [`Error::Invalid`] for a weight of another rank, [`Error::ShapeMismatch`] if the last
    /// dims differ, and [`Error::DeviceMismatch`].
    #[track_caller]
    pub fn matmul(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.layer("QuantizedTensor::matmul", x, None, None)
    }

    /// Computes `x wᵀ + bias` like [`matmul`](Self::matmul), in one launch, with a bias `[n]` of the dtype of `x`. Also differentiable with
    /// respect to the bias. Fails as [`matmul`](Self::matmul) does, and with [`Error::DTypeMismatch`].
    #[track_caller]
    pub fn linear(&self, x: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.check_bias("QuantizedTensor::linear", bias)?;
        self.layer("QuantizedTensor::linear", x, bias, None)
    }

    /// Computes `f(x wᵀ + bias)` in one launch, like [`Tensor::linear_map`]. If gradients are recorded, the formula is a launch of its own.
    /// Fails as [`linear`](Self::linear) does, and with [`Error::Invalid`] if `f` reads anything except its argument.
    #[track_caller]
    pub fn linear_map(&self, x: &Tensor, bias: Option<&Tensor>, f: impl Fn(&Expr) -> Expr) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "QuantizedTensor::linear_map";
        self.check_bias(op, bias)?;
        let formula = [f(&Expr::input(0))];
        let plain = Program::shared(&formula);
        invalid!(op if plain.inputs() > 1 || plain.caller_scalars() > 0 || plain.seeds() > 0,
            "the formula reads more than its argument");
        self.layer(op, x, bias, Some(&f))
    }

    /// Computes `x wᵀ + residual` in one launch, with a residual of the shape and dtype of the result. Also differentiable with respect to
    /// the residual. Fails as [`linear`](Self::linear) does.
    #[track_caller]
    pub fn linear_add(&self, x: &Tensor, residual: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "QuantizedTensor::linear_add";
        mismatch!(op if x.rank() != residual.rank() || x.rank() == 0, x, residual, "the residual has the shape of the result");
        let outer = x.rank() - 1;
        let fits = x.shape().dims()[..outer] == residual.shape().dims()[..outer];
        mismatch!(op if !fits || residual.shape().dims()[outer] != self.rows_count(), x, residual,
            "the residual has the shape of the result");
        self.layer(op, x, Some(residual), None)
    }

    /// Joins the rows of several weights, so that one product computes the columns of all: query, key and value, or gate and up projections.
    /// On OpenCL devices, neighbours of one format are copied to one storage; otherwise the result has handles on the weights.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty list and for weights of other ranks than 2 or different row lengths; [`Error::DeviceMismatch`];
    /// [`Error::OutOfMemory`].
    #[track_caller]
    pub fn join_rows(weights: &[&QuantizedTensor]) -> Result<QuantizedTensor> {
        let _caller = Caller::enter();
        let op = "QuantizedTensor::join_rows";
        let Some(first) = weights.first() else { invalid!(op, "there are no weights") };
        let (device, k) = (first.device(), first.columns());
        for weight in weights {
            weight.check_matrix(op)?;
            invalid!(op if weight.columns() != k, "rows of {k} and {} elements", weight.columns());
            if weight.device() != device {
                return Err(Error::DeviceMismatch { op, lhs: device, rhs: weight.device() });
            }
        }
        let all: Vec<&PackedRows> = weights.iter().flat_map(|weight| &weight.parts).collect();
        let planes = backend::stores_planes(device);
        let joined = all.chunk_by(|a, b| planes && a.format == b.format);
        let parts = joined.map(join_planes).collect::<Result<SmallVec<[PackedRows; 1]>>>()?;
        let rows: usize = parts.iter().map(|part| part.rows.len()).sum();
        Ok(QuantizedTensor { parts, shape: [rows, k].into() })
    }

    /// Returns a weight of `len` rows of a weight `[n, k]`, from row `start` on, over the same bytes. Fails with [`Error::Invalid`] for rows
    /// that do not exist and for a weight of another rank.
    pub fn narrow_rows(&self, start: usize, len: usize) -> Result<QuantizedTensor> {
        let (op, n) = ("QuantizedTensor::narrow_rows", self.rows_count());
        self.check_matrix(op)?;
        invalid!(op if start.checked_add(len).is_none_or(|end| end > n), "rows {start} to {start} + {len} of {n}");
        let mut first = 0;
        let mut parts: SmallVec<[PackedRows; 1]> = SmallVec::new();
        for part in &self.parts {
            let (from, to) = (start.max(first), (start + len).min(first + part.rows.len()));
            if from < to || (len == 0 && parts.is_empty()) {
                parts.push(part.narrow(from.saturating_sub(first).min(part.rows.len()), to.saturating_sub(from)));
            }
            first += part.rows.len();
        }
        Ok(QuantizedTensor { parts, shape: [len, self.columns()].into() })
    }

    /// Returns the number of elements of a row.
    fn columns(&self) -> usize {
        self.parts[0].columns
    }

    fn rows_count(&self) -> usize {
        self.parts.iter().map(|part| part.rows.len()).sum()
    }

    fn check_matrix(&self, op: &'static str) -> Result<()> {
        invalid!(op if self.shape.rank() != 2, "the weight has shape {}, not [n, k]", self.shape);
        Ok(())
    }

    fn check_bias(&self, op: &'static str, bias: Option<&Tensor>) -> Result<()> {
        invalid!(op if let Some(bias) = bias.filter(|bias| bias.shape().dims() != [self.rows_count()]),
            "the bias has shape {}, and the weight {} rows", bias.shape(), self.rows_count());
        Ok(())
    }

    /// Computes and records `f(x wᵀ + extra)`, where `extra` is a bias or has the shape of the result.
    fn layer(
        &self,
        op: &'static str,
        x: &Tensor,
        extra: Option<&Tensor>,
        f: Option<&dyn Fn(&Expr) -> Expr>,
    ) -> Result<Tensor> {
        let inputs: SmallVec<[&Tensor; 2]> = [x].into_iter().chain(extra).collect();
        cast_first!(autocast_inputs(op, &inputs)?, |x| self.layer(op, &x[0], x.get(1), f));
        check_dtype(op, same_dtype(op, &inputs)?)?;
        self.check_matrix(op)?;
        let device = same_device(op, &inputs)?;
        if device != self.device() {
            return Err(Error::DeviceMismatch { op, lhs: device, rhs: self.device() });
        }
        if x.shape().dims().last() != Some(&self.columns()) {
            let hint = "the input is [.., k] and the weight [n, k]";
            return Err(Error::ShapeMismatch { op, lhs: x.shape().clone(), rhs: self.shape.clone(), hint });
        }
        if autograd::is_tracked(&inputs) {
            let weight = self.clone();
            let product = self.multiply(op, x, &EPILOGUES.product, None)?;
            let y = record_gradients(op, product, &[x], move |_, grad| weight.multiply_transposed(grad));
            let y = extra.map_or(Ok(y.shallow_clone()), |extra| y.add(extra))?;
            return f.map_or(Ok(y.shallow_clone()), |f| Tensor::map(&[&y], |z| f(&z[0])));
        }
        let sum = if extra.is_some() { &EPILOGUES.biased } else { &EPILOGUES.product };
        match f {
            None => self.multiply(op, x, sum, extra),
            Some(f) => {
                let made = f(sum);
                // An equal static formula has a cached program.
                let known = EPILOGUES.relu.iter().find(|known| **known == made);
                self.multiply(op, x, known.unwrap_or(&made), extra)
            }
        }
    }

    /// Computes `x wᵀ` with an epilogue of the product and `extra`.
    fn multiply(&self, op: &'static str, x: &Tensor, epilogue: &Expr, extra: Option<&Tensor>) -> Result<Tensor> {
        let (k, n, device) = (self.columns(), self.rows_count(), self.device());
        let shape: Shape = x.shape().dims()[..x.rank() - 1].iter().copied().chain([n]).collect();
        let out = Tensor::empty_with_shape(shape, x.dtype, device)?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let m = out.numel() / n;
        let x = x.detach().reshape([m, k])?;
        let extra =
            extra.map(|t| if t.rank() > 1 { t.detach().reshape([m, n]) } else { Ok(t.detach()) }).transpose()?;
        let extras: SmallVec<[&Tensor; 1]> = extra.iter().collect();
        let (rows, epilogue) = (out.with_layout(Layout::contiguous([m, n].into())), slice::from_ref(epilogue));
        let program = Program::shared(epilogue);
        let formula = if program.scalars() == 0 { epilogue } else { program.exprs() };
        let launched = program.with_arguments(epilogue, &[], |scalars| {
            let (extras, parts) = (&extras[..], &self.parts[..]);
            let product = QuantizedGemm { op, x: &x, parts, epilogue: formula, extras, scalars };
            backend::launch([&rows], |b| b.quantized_gemm(&product, slice::from_ref(&rows)))
        })?;
        if !launched {
            self.for_each_strip(op, x.dtype, |first, strip| {
                let len = strip.shape().dims()[0];
                let extra = extra.as_ref().map(|t| narrow(t, t.rank() - 1, first, len)).transpose()?;
                let (columns, extras) =
                    (narrow(&rows, 1, first, len)?, extra.iter().collect::<SmallVec<[&Tensor; 1]>>());
                let w = strip.with_layout(strip.layout.transpose(0, 1));
                let plain = Gemm::plain(op, &x, &w, epilogue, &x.dtype);
                Gemm { extras: &extras, out: Some(columns), ..plain }.compute_one().map(|_| ())
            })?;
        }
        Ok(out)
    }

    /// Computes `grad w` for the gradient of the product, in f32. The operations are recorded.
    fn multiply_transposed(&self, grad: &Tensor) -> Result<Tensor> {
        let (dims, wide) = (grad.shape().dims(), grad.to_dtype(DType::F32)?);
        let mut sum: Option<Tensor> = None;
        self.for_each_strip("QuantizedTensor::matmul", DType::F32, |first, strip| {
            // A recorded product keeps its operands, but the strip's memory is overwritten.
            let strip = if autograd::is_tracked(&[&wide]) { strip.try_clone()? } else { strip.shallow_clone() };
            let part = wide.narrow(-1, first, strip.shape().dims()[0])?.matmul(&strip)?;
            sum = Some(sum.take().map_or(Ok(part.shallow_clone()), |sum| sum.add(&part))?);
            Ok(())
        })?;
        let shape: Shape = dims[..dims.len() - 1].iter().copied().chain([self.columns()]).collect();
        sum.map_or_else(|| Tensor::zeros(&shape, (DType::F32, grad.device())), Ok)?.to_dtype(grad.dtype)
    }

    /// Calls `f` with the number of the first row and the elements of one strip of rows after another. All strips are in the same memory.
    fn for_each_strip(
        &self,
        op: &'static str,
        dtype: DType,
        mut f: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        let (k, device) = (self.columns(), self.device());
        let longest = self.parts.iter().map(|part| part.rows.len()).max().unwrap_or(0);
        let packed = self.parts.iter().map(PackedRows::nbytes).max().unwrap_or(0);
        let step = backend::strip_rows(device, k * dtype.size(), packed);
        let memory = Tensor::empty_with_shape([longest.min(step), k], dtype, device)?;
        let mut first = 0;
        for part in &self.parts {
            for start in (0..part.rows.len()).step_by(step) {
                let rows = part.narrow(start, step.min(part.rows.len() - start));
                let strip = narrow(&memory, 0, 0, rows.rows.len())?;
                if k > 0 {
                    dequantize_into(op, &rows, None, &strip)?;
                }
                f(first + start, &strip)?;
            }
            first += part.rows.len();
        }
        Ok(())
    }
}

/// Returns the number of rows and the bytes of a row of a weight.
fn packed_size(op: &'static str, shape: &Shape, format: QuantFormat) -> Result<[usize; 2]> {
    let [outer @ .., columns] = shape.dims() else { invalid!(op, "a weight has at least one dimension") };
    let row_bytes = format.row_bytes(*columns).with_op(op)?;
    let rows = outer
        .iter()
        .try_fold(1usize, |rows, &n| rows.checked_mul(n))
        .filter(|rows| rows.checked_mul(row_bytes.max(*columns)).is_some_and(|all| isize::try_from(all).is_ok()));
    invalid!(op if *columns == 0, "rows have no elements");
    Ok([rows.ok_or_else(|| Error::invalid(op, format!("the sizes of shape {shape} are too large")))?, row_bytes])
}

fn check_dtype(op: &'static str, dtype: DType) -> Result<()> {
    unsupported!(op if !matches!(dtype, DType::F32 | DType::F16 | DType::BF16), dtype, "f32, f16 or bf16");
    Ok(())
}

/// Returns a part of a tensor outside the graph.
fn narrow(t: &Tensor, dim: usize, start: usize, len: usize) -> Result<Tensor> {
    t.layout.narrow("narrow", dim, start, len).map(|layout| t.with_layout(layout))
}

/// Writes elements of a weight to `out`, which is not empty.
fn dequantize_into(op: &'static str, weight: &PackedRows, index: Option<&Tensor>, out: &Tensor) -> Result<()> {
    backend::launch([out], |b| b.dequantize(&Dequantize { op, weight, index }, out))
}

/// Joins parts of one format on a device that stores planes: each plane of the result has the planes of all parts.
fn join_planes(parts: &[&PackedRows]) -> Result<PackedRows> {
    let [first, others @ ..] = parts else { unreachable!("`chunk_by` has no empty chunks") };
    if others.is_empty() {
        return Ok(first.narrow(0, first.rows.len()));
    }
    let (format, columns, row_bytes) = (first.format, first.columns, first.row_bytes());
    let rows: usize = parts.iter().map(|part| part.rows.len()).sum();
    let bytes = Tensor::empty_with_shape([rows, row_bytes], DType::U8, first.bytes.device())?;
    let flat = |t: &Tensor| t.with_layout(Layout { offset: t.layout.offset, ..Layout::contiguous(t.numel().into()) });
    let row_blocks = first.row_blocks();
    for plane in format.planes(columns) {
        let at = |total: usize, row: usize| row_blocks * (total * plane.before + row * plane.bytes);
        let mut to = 0;
        for part in parts {
            let len = part.rows.len() * row_blocks * plane.bytes;
            let from = narrow(&flat(&part.bytes), 0, at(part.total_rows(), part.rows.start), len)?;
            narrow(&flat(&bytes), 0, at(rows, to), len)?.copy_(&from)?;
            to += part.rows.len();
        }
    }
    Ok(PackedRows { bytes, format, columns, rows: 0..rows })
}
