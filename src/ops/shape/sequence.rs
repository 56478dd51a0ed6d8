//! Tensors whose elements are a function of the index: `arange`, `linspace`, `logspace`.

use pulp::{Arch, Simd, WithSimd};

use crate::backend::problem::sequence::Sequence;
use crate::device::cpu::parallel;
use crate::storage::{Caller, with_host};
use crate::tensor::TensorOptions;
use crate::{DType, Device, Error, Result, Scalar, Tensor, backend};

impl Tensor {
    /// Returns the numbers `start`, `start + step`, ... up to but not including `end`, as a vector (PyTorch's `arange`, with f32 as the
    /// default dtype). Each value is `start + i * step`, computed in f64, or in i64 if all three numbers are integers. Fails with
    /// [`Error::Invalid`] for a step that is zero or points away from `end`, for numbers that are not finite, and for values outside the
    /// dtype's range (as in [`Tensor::fill_`]).
    #[track_caller]
    pub fn arange(
        start: impl Into<Scalar>,
        end: impl Into<Scalar>,
        step: impl Into<Scalar>,
        options: impl Into<TensorOptions>,
    ) -> Result<Tensor> {
        let _caller = Caller::enter();
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
        Tensor::sequence(op, n, options.into(), Sequence::Float { start: a, step: s, middle: n, end: b, n })
    }

    /// Returns a vector of `n` evenly spaced values from `start` to `end`, both included (PyTorch's `linspace`). Fails with
    /// [`Error::Invalid`] for values outside the dtype's range.
    #[track_caller]
    pub fn linspace(start: f64, end: f64, n: usize, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        Tensor::sequence("linspace", n, options.into(), Sequence::evenly_spaced(start, end, n))
    }

    /// Returns `base` to the power of each value of [`Tensor::linspace`] (PyTorch's `logspace`, with a default base of 10). Fails with
    /// [`Error::Invalid`] for values outside the dtype's range.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// assert_eq!(Tensor::logspace(0.0, 3.0, 4, 2.0, Device::Cpu)?.to_vec::<f32>()?, [1.0, 2.0, 4.0, 8.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn logspace(start: f64, end: f64, n: usize, base: f64, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (op, power, options) = ("logspace", Sequence::evenly_spaced(start, end, n), options.into());
        let value = move |i| Scalar::Float(base.powf(power.value(i).to_f64()));
        check_first_and_last(op, options.dtype, n, value)?;
        let out = Tensor::empty_with_shape(n, options.dtype, options.device)?;
        Tensor::fill_on_host(op, out, value)
    }

    /// Creates a sequence on the device if possible, otherwise on the host.
    fn sequence(op: &'static str, n: usize, options: TensorOptions, values: Sequence) -> Result<Tensor> {
        check_first_and_last(op, options.dtype, n, |i| values.value(i))?;
        let out = Tensor::empty_with_shape(n, options.dtype, options.device)?;
        if n > 0 && backend::fill([&out], |b| b.sequence(values, &out))? {
            return Ok(out);
        }
        // Each variant has its own closure, so that the match is not inside the loop.
        match values {
            Sequence::Int { start, step } => {
                Tensor::fill_on_host(op, out, move |i| Sequence::Int { start, step }.value(i))
            }
            Sequence::Float { start, step, middle, end, n } => {
                Tensor::fill_on_host(op, out, move |i| Sequence::Float { start, step, middle, end, n }.value(i))
            }
        }
    }

    /// Fills `out`, a new tensor, with values computed on the host: in place on the CPU, otherwise by one transfer to the device.
    fn fill_on_host(op: &'static str, out: Tensor, value: impl Fn(usize) -> Scalar + Sync + Copy) -> Result<Tensor> {
        let dtype = out.dtype;
        if out.numel() > 0 && out.device().is_host() {
            with_host(&[], &[&out.storage], |_, to| write_values(dtype, to[0], value))?;
            return Ok(out);
        }
        let mut bytes = Vec::new();
        let size = out.storage.nbytes();
        bytes.try_reserve_exact(size).map_err(|_| Error::OutOfMemory {
            device: Device::HOST,
            requested: size,
            detail: format!("{op} computes its values on the host"),
        })?;
        bytes.resize(size, 0);
        write_values(dtype, &mut bytes, value);
        out.storage.write(0, &bytes)?;
        Ok(out)
    }
}

/// Returns an error if the first or the last value is outside the dtype's range. All other values are between these two.
fn check_first_and_last(op: &'static str, dtype: DType, n: usize, value: impl Fn(usize) -> Scalar) -> Result<()> {
    // Values of integer dtypes are truncated first.
    let whole = |i: usize| match value(i) {
        Scalar::Float(x) if !dtype.is_float() => Scalar::Float(x.trunc()),
        number => number,
    };
    if n > 0 { [0, n - 1].into_iter().try_for_each(|i| whole(i).stored(op, dtype).map(drop)) } else { Ok(()) }
}

/// Writes `value(i)` to each element i. Long sequences use all threads.
fn write_values(dtype: DType, out: &mut [u8], value: impl Fn(usize) -> Scalar + Sync + Copy) {
    /// The number of bytes that a thread computes at a time.
    const CHUNK_BYTES: usize = 1 << 16;
    let part = |first: usize, out: &mut [u8]| Arch::new().dispatch(WriteValues { dtype, first, out, value });
    if out.len() <= CHUNK_BYTES {
        return part(0, out);
    }
    parallel::for_each_chunk(out, CHUNK_BYTES, |i, out| part(i * (CHUNK_BYTES / dtype.size()), out));
}

/// Writes `value(first + i)` to each element i, in a loop compiled for the CPU's vectors. `value` captures its numbers by value: for
/// numbers behind a reference, the compiler would have to assume that the written bytes overlap them.
struct WriteValues<'a, F> {
    dtype: DType,
    first: usize,
    out: &'a mut [u8],
    value: F,
}

impl<F: Fn(usize) -> Scalar + Copy> WithSimd for WriteValues<'_, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        // In each arm the dtype is a constant, so that a separate loop is compiled for every dtype.
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
        each!(F32 F16 BF16 F64 I64 I32 U8 U32 Bool I8 I16);
    }
}
