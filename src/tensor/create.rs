//! New tensors: constants, sequences and the host's values. (Random ones are in `ops::random`.)

use ndarray::{Array, ArrayBase, Data, Dimension};
use pulp::{Arch, Simd, WithSimd};

use super::Layout;
use super::options::TensorOptions;
use crate::backend::opencl::sequence::Sequence;
use crate::device::cpu::parallel;
use crate::storage::{Storage, with_host};
use crate::{DType, Device, Element, Error, Result, Scalar, Shape, Tensor};

/// Constants and sequences.
impl Tensor {
    /// Elements whose values nobody has chosen (PyTorch's `empty`): to be written before they are read.
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::OutOfMemory`].
    pub fn empty(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let options = options.into();
        match options.dtype {
            // Not every byte is a bool.
            DType::Bool => Tensor::zeros(shape, options),
            dtype => Tensor::empty_like_shape(shape, dtype, options.device),
        }
    }

    /// Zeros (PyTorch's `zeros`); `false` for bool.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let a = Tensor::zeros(&[3, 4], Device::Cpu)?; // f32 unless said
    /// let b = Tensor::zeros(&[3, 4], (DType::F16, Device::Cpu))?;
    /// assert_eq!((a.storage().nbytes(), b.storage().nbytes()), (48, 24));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::OutOfMemory`].
    pub fn zeros(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let TensorOptions { dtype, device } = options.into();
        let layout = Layout::contiguous(shape.into());
        let storage = Storage::alloc_zeroed(device, layout.shape.bytes(dtype.size()))?;
        Ok(Tensor { storage, layout, dtype, node: None })
    }

    /// Ones (PyTorch's `ones`); `true` for bool.
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::OutOfMemory`].
    pub fn ones(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        Tensor::full(shape, 1, options)
    }

    /// `value` everywhere (PyTorch's `full`, but f32 unless said).
    ///
    /// Converted to the dtype as Rust's `as` does: floats too large for an integer saturate, integers wrap.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let a = Tensor::full(&[2, 2], 7, (DType::I64, Device::Cpu))?;
    /// assert_eq!(a.to_vec::<i64>()?, [7; 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a value that is not whole in a dtype of integers, [`Error::NoDevice`], [`Error::OutOfMemory`].
    pub fn full(
        shape: impl Into<Shape>,
        value: impl Into<Scalar>,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let TensorOptions { dtype, device } = options.into();
        let value = value.into();
        value.check_whole("full", dtype)?;
        let out = Tensor::empty_like_shape(shape, dtype, device)?;
        let mut pattern = [0; 8];
        let pattern = &mut pattern[..dtype.size()];
        value.encode(dtype, pattern);
        out.storage.fill(0, out.storage.nbytes(), pattern)?;
        Ok(out)
    }

    /// `start`, `start + step`, ... up to but not including `end`, in one dimension (PyTorch's `arange`, but f32 unless
    /// said). Each value is `start + i * step`, computed in f64, or in i64 where all three are integers.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a step that is zero or points away from `end` and for numbers that are not finite;
    /// [`Error::NoDevice`], [`Error::OutOfMemory`].
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let (start, end, step) = (start.into(), end.into(), step.into());
        let op = "arange";
        let error = || {
            let [a, b, s] = [start, end, step].map(Scalar::to_f64);
            Error::invalid(op, format!("no steps of {s} lead from {a} to {b}"))
        };
        if let (Scalar::Int(a), Scalar::Int(b), Scalar::Int(s)) = (start, end, step) {
            let span = i128::from(b) - i128::from(a);
            if s == 0 || span.signum() * i128::from(s.signum()) < 0 {
                return Err(error());
            }
            let count = span.unsigned_abs().div_ceil(u128::from(s.unsigned_abs()));
            let count = usize::try_from(count).unwrap_or(usize::MAX);
            return Tensor::sequence(op, count, options.into(), Sequence::Int { start: a, step: s });
        }
        let [a, b, s] = [start, end, step].map(Scalar::to_f64);
        let steps = (b - a) / s;
        if !(s.is_finite() && steps.is_finite() && steps >= 0.0) {
            return Err(error());
        }
        let n = steps.ceil() as usize;
        Tensor::sequence(op, n, options.into(), Sequence::Float { start: a, step: s, turn: n, end: b, n })
    }

    /// `n` values evenly from `start` to `end`, both included, in one dimension (PyTorch's `linspace`).
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::OutOfMemory`].
    pub fn linspace(start: f64, end: f64, n: usize, options: impl Into<TensorOptions>) -> Result<Tensor> {
        Tensor::sequence("linspace", n, options.into(), Sequence::between(start, end, n))
    }

    /// `base` to the powers that [`Tensor::linspace`] gives (PyTorch's `logspace`, whose base is 10 where nothing is said).
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// assert_eq!(Tensor::logspace(0.0, 3.0, 4, 2.0, Device::Cpu)?.to_vec::<f32>()?, [1.0, 2.0, 4.0, 8.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::OutOfMemory`].
    pub fn logspace(start: f64, end: f64, n: usize, base: f64, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let power = Sequence::between(start, end, n);
        Tensor::computed("logspace", n, options.into(), move |i| Scalar::Float(base.powf(power.at(i).to_f64())))
    }

    /// The identity matrix of `n` rows (PyTorch's `eye`).
    ///
    /// # Errors
    /// [`Error::NoDevice`] and [`Error::OutOfMemory`].
    pub fn eye(n: usize, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let out = Tensor::zeros([n, n], options)?;
        out.diagonal(0, 0, 1)?.fill_(1)?;
        Ok(out)
    }

    /// The device writes them where it can.
    fn sequence(op: &'static str, n: usize, options: TensorOptions, values: Sequence) -> Result<Tensor> {
        if n > 0 && values.is_for(options.dtype, options.device)? {
            let out = Tensor::empty_like_shape(n, options.dtype, options.device)?;
            values.launch(&out)?;
            out.storage.filled();
            return Ok(out);
        }
        // A closure for each kind: neither asks for every element which it is.
        match values {
            Sequence::Int { start, step } => {
                Tensor::computed(op, n, options, move |i| Sequence::Int { start, step }.at(i))
            }
            Sequence::Float { start, step, turn, end, n } => {
                Tensor::computed(op, n, options, move |i| Sequence::Float { start, step, turn, end, n }.at(i))
            }
        }
    }

    /// Values computed on the host: in place on the CPU, else written in one go.
    fn computed(
        op: &'static str,
        n: usize,
        TensorOptions { dtype, device }: TensorOptions,
        value: impl Fn(usize) -> Scalar + Sync + Copy,
    ) -> Result<Tensor> {
        let out = Tensor::empty_like_shape(n, dtype, device)?;
        if n > 0 && device == Device::Cpu {
            with_host(&[], &[&out.storage], |_, to| values(dtype, to[0], value))?;
            return Ok(out);
        }
        let mut bytes = Vec::new();
        let size = out.storage.nbytes();
        bytes.try_reserve_exact(size).map_err(|_| Error::OutOfMemory {
            device: Device::Cpu,
            requested: size,
            detail: format!("{op} computes its values on the host"),
        })?;
        bytes.resize(size, 0);
        values(dtype, &mut bytes, value);
        out.storage.write(0, &bytes)?;
        Ok(out)
    }

    /// [`Tensor::empty`] of this tensor's shape, dtype and device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn empty_like(&self) -> Result<Tensor> {
        Tensor::empty(self.shape(), self)
    }

    /// [`Tensor::zeros`] of this tensor's shape, dtype and device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn zeros_like(&self) -> Result<Tensor> {
        Tensor::zeros(self.shape(), self)
    }

    /// [`Tensor::ones`] of this tensor's shape, dtype and device.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn ones_like(&self) -> Result<Tensor> {
        Tensor::ones(self.shape(), self)
    }

    /// [`Tensor::full`] of this tensor's shape, dtype and device.
    ///
    /// # Errors
    /// As [`Tensor::full`].
    pub fn full_like(&self, value: impl Into<Scalar>) -> Result<Tensor> {
        Tensor::full(self.shape(), value, self)
    }
}

/// The host's values. The dtype is that of the elements.
impl Tensor {
    /// A copy of `values`, in row-major order.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], &[2, 2], Device::Cpu)?;
    /// assert_eq!(a.i((1, 0))?.item::<f32>()?, 3.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for a shape of another number of elements, [`Error::NoDevice`], [`Error::OutOfMemory`].
    pub fn from_slice<T: Element>(values: &[T], shape: impl Into<Shape>, device: Device) -> Result<Tensor> {
        let shape = fits("from_slice", values.len(), shape.into())?;
        let out = Tensor::empty_like_shape(shape, T::DTYPE, device)?;
        out.storage.write(0, bytemuck::cast_slice(values))?;
        Ok(out)
    }

    /// `values` in row-major order; on [`Device::Cpu`] the tensor owns the vector, nothing is copied.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a shape of another number of elements, [`Error::NoDevice`], [`Error::OutOfMemory`].
    pub fn from_vec<T: Element>(values: Vec<T>, shape: impl Into<Shape>, device: Device) -> Result<Tensor> {
        match device {
            Device::Cpu => {
                let layout = Layout::contiguous(fits("from_vec", values.len(), shape.into())?);
                Ok(Tensor { storage: Storage::adopt(values), layout, dtype: T::DTYPE, node: None })
            }
            _ => Tensor::from_slice(&values, shape, device),
        }
    }

    /// The elements of an ndarray array; on [`Device::Cpu`] the tensor owns them, nothing is copied, whatever the strides.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_ndarray(ndarray::array![[1i64, 2], [3, 4]], Device::Cpu)?;
    /// assert_eq!(a.shape().dims(), &[2, 2]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn from_ndarray<T: Element, D: Dimension>(array: Array<T, D>, device: Device) -> Result<Tensor> {
        if device != Device::Cpu || array.is_empty() {
            return Tensor::from_ndarray_view(&array, device);
        }
        let (shape, strides) = (Shape::from(array.shape()), array.strides().iter().copied().collect());
        let (values, offset) = array.into_raw_vec_and_offset();
        let layout = Layout { shape, strides, offset: offset.unwrap_or(0) };
        Ok(Tensor { storage: Storage::adopt(values), layout, dtype: T::DTYPE, node: None })
    }

    /// A copy of the elements of any ndarray array or view.
    pub fn from_ndarray_view<T, S, D>(array: &ArrayBase<S, D>, device: Device) -> Result<Tensor>
    where
        T: Element,
        S: Data<Elem = T>,
        D: Dimension,
    {
        match array.as_slice() {
            Some(values) => Tensor::from_slice(values, array.shape(), device),
            None => Tensor::from_vec(array.iter().copied().collect(), array.shape(), device),
        }
    }
}

/// `value(i)` as the i-th element; long sequences with all threads of the team.
fn values(dtype: DType, out: &mut [u8], value: impl Fn(usize) -> Scalar + Sync + Copy) {
    /// Bytes a thread computes at a time.
    const PIECE: usize = 1 << 16;
    let part = |first: usize, out: &mut [u8]| Arch::new().dispatch(Values { dtype, first, out, value });
    if out.len() <= PIECE {
        return part(0, out);
    }
    parallel::for_each_chunk(out, PIECE, |i, out| part(i * (PIECE / dtype.size()), out));
}

/// `value(first + i)` as the i-th element, compiled for the processor's vectors. The function has its numbers in itself: those
/// that it were to read elsewhere could be among the bytes that are written.
struct Values<'a, F> {
    dtype: DType,
    first: usize,
    out: &'a mut [u8],
    value: F,
}

impl<F: Fn(usize) -> Scalar + Copy> WithSimd for Values<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // The dtype is a constant in each: the loop is one of its own type.
        macro_rules! each {
            ($($dtype:ident)*) => {
                match self.dtype {
                    $(DType::$dtype => {
                        let elements = self.out.chunks_exact_mut(DType::$dtype.size()).enumerate();
                        elements.for_each(|(i, element)| (self.value)(self.first + i).encode(DType::$dtype, element));
                    })*
                }
            };
        }
        each!(F32 F16 BF16 F64 I64 I32 U8 U32 Bool);
    }
}

fn fits(op: &'static str, given: usize, shape: Shape) -> Result<Shape> {
    if shape.numel() == given {
        return shape.checked(op);
    }
    Err(Error::invalid(op, format!("{given} values were given for shape {shape}, which has {}", shape.numel())))
}
