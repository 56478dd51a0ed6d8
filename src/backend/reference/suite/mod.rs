//! Compares the CPU and every OpenCL device with the reference, for each method of [`Backend`]. The cases have sizes just below and above tile
//! sizes, views with unusual strides, NaN and infinities, and problems that no operation creates.
//!
//! A case creates its tensors once, on the CPU, and every backend computes with copies of these tensors. The tolerance is given by [`allowed`].
//! On OpenCL devices, cases run for some dtypes only, because compilation takes nearly all of the time.

mod attention;
mod cached;
mod elements;
mod images;
mod lines;
mod matrices;
mod moves;
mod recurrence;
mod rows;

use std::fmt::Display;

use super::Reference;
use super::values::{read, write};
use crate::backend::{self, Backend};
use crate::layout::Layout;
use crate::storage::Storage;
use crate::{DType, Device, Result, Scalar, Shape, Tensor};

/// Defines a test for each case, and a list of the methods that the cases call.
macro_rules! cases {
    ($($module:ident: $($case:ident $(+ $method:ident)*),*;)*) => {
        const METHODS: &[&str] = &[$($(stringify!($case), $(stringify!($method),)*)*)*];
        $($(
            #[test]
            fn $case() {
                let mut suite = Suite::new(stringify!($case));
                $module::$case(&mut suite).unwrap();
                suite.finish();
            }
        )*)*
    };
}

cases! {
    attention: attention + has_attention + attention_backward, attention_blocking;
    cached: cached_attention;
    elements: map, sequence;
    matrices: gemm, quantized_gemm + dequantize, reduce, tril_triu, join;
    lines: scan, sort, searchsorted, topk, kth;
    moves: gather, scatter, linear_index, one_hot, nonzero, masked_select;
    recurrence: recurrence;
    rows: softmax, cross_entropy, norm + norm_forward + alloc_column_sums, normalise_channels, variance + has_variance;
    images: convolution, forward_convolution, im2col, col2im, pool, interpolate;
}

/// Fails if a method of [`Backend`] has no case. The names of the methods are read from the source of the trait.
#[test]
fn every_method_has_a_case() {
    let source = include_str!("../../mod.rs");
    let body = source.split_once("recorded_backend! {").expect("the methods").1.split_once("\n}\n").expect("its end").0;
    let names = body.lines().filter_map(|line| line.trim().strip_prefix("fn ")?.split('(').next());
    // Only OpenCL devices have images; `tests/operations/images.rs` tests them.
    let others = ["to_image", "read_image"];
    let mut methods: Vec<&str> = names.filter(|name| !others.contains(name)).collect();
    let mut cases = METHODS.to_vec();
    methods.sort_unstable();
    cases.sort_unstable();
    assert_eq!(methods, cases, "each method of `Backend` has its cases here");
}

/// A backend under test, and the device of its tensors.
struct Side {
    backend: &'static dyn Backend,
    device: Device,
}

impl Side {
    /// Copies the tensor's storage to this device and returns a tensor with the same layout.
    fn upload(&self, t: &Tensor) -> Result<Tensor> {
        let mut bytes = vec![0; t.storage.nbytes()];
        t.storage.read(0, &mut bytes)?;
        let storage = Storage::alloc(self.device, bytes.len())?;
        storage.write(0, &bytes)?;
        Ok(Tensor { storage, ..t.detach() })
    }

    /// Allocates a contiguous tensor, filled with a byte pattern that no result has, so that elements that were not written are detected.
    fn alloc_output(&self, dims: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let out = Tensor::empty_with_shape(dims, dtype, self.device)?;
        let byte = if dtype == DType::Bool { 1 } else { 0x77 };
        out.storage.write(0, &vec![byte; out.storage.nbytes()])?;
        Ok(out)
    }
}

/// How a tensor is laid out in its storage.
#[derive(Debug, Clone, Copy, PartialEq)]
enum View {
    Plain,
    /// Contiguous rows with gaps between the rows, and an offset.
    Gapped,
    /// Dims in reversed order, gaps between all elements, and a negative stride in the last dim.
    Odd,
}

const VIEWS: [View; 3] = [View::Plain, View::Gapped, View::Odd];

/// A generator of xorshift random numbers with a fixed seed.
struct Random(u64);

impl Random {
    fn next_below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % n
    }
}

/// Returns a multiple of 1/16 in -9..9, which all float dtypes represent exactly. Some elements are equal.
fn numbers(random: &mut Random) -> f64 {
    random.next_below(288) as f64 / 16.0 - 9.0
}

/// Returns a number greater than 0.5 and less than 2.
fn factors(random: &mut Random) -> f64 {
    (random.next_below(100) + 66) as f64 / 128.0
}

/// Like [`numbers`], but every fourth number is replaced by NaN, an infinity, or a zero of either sign.
fn specials(random: &mut Random) -> f64 {
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0];
    if random.next_below(4) == 0 { special[random.next_below(5)] } else { numbers(random) }
}

/// The cases for one method of [`Backend`], and their failures.
struct Suite {
    method: &'static str,
    sides: Vec<Side>,
    random: Random,
    /// Whether at least one backend has computed at least one case, instead of declining all cases.
    answered: bool,
    failures: Vec<String>,
    /// Whether the cases also run on OpenCL devices. Compiling a program takes as long as a hundred cases.
    runs_on_opencl: bool,
}

impl Suite {
    fn new(method: &'static str) -> Suite {
        let side = |device: Device| Side { backend: backend::of_device(device).0, device };
        let sides = Device::all().into_iter().map(side).collect();
        Suite { method, sides, random: Random(0x5eed), answered: false, failures: Vec::new(), runs_on_opencl: true }
    }

    /// Fails if a comparison failed. With an OpenCL device, also fails if every backend declined, except for the variance, which needs a GPU.
    fn finish(self) {
        assert!(self.failures.is_empty(), "{}:\n{}", self.method, self.failures.join("\n"));
        let all = self.sides.len() > 1;
        assert!(self.answered || !all || self.method == "variance", "every backend declines {}", self.method);
    }

    /// Creates a tensor on the CPU. The gaps in its storage hold numbers as well, so that a wrong stride gives a wrong result.
    fn tensor(
        &mut self,
        view: View,
        dims: &[usize],
        dtype: DType,
        number: impl Fn(&mut Random) -> f64,
    ) -> Result<Tensor> {
        let mut layout = Layout::contiguous(dims.into());
        let last = dims.len().wrapping_sub(1);
        match view {
            _ if dims.is_empty() => layout.offset = 5,
            View::Plain => {}
            View::Gapped => {
                layout.offset = 3;
                let mut step = 1;
                for d in (0..dims.len()).rev() {
                    layout.strides[d] = step;
                    step = step * dims[d].max(1) as isize + if d == last { 2 } else { 0 };
                }
            }
            View::Odd => {
                let mut step = 2;
                for (stride, &size) in layout.strides.iter_mut().zip(dims) {
                    *stride = step;
                    step = step * size.max(1) as isize + 1;
                }
                layout.offset = 1 + (dims[last].max(1) - 1) * layout.strides[last] as usize;
                layout.strides[last] = -layout.strides[last];
            }
        }
        let count = layout.bounds().map_or(0, |(_, last)| last + 3);
        let whole = Tensor::empty_with_shape(count, dtype, Device::Cpu)?;
        write(&whole, (0..count).map(|_| number(&mut self.random)).collect::<Vec<f64>>())?;
        Ok(whole.with_layout(layout))
    }

    /// Compares the results of `run` on every side with the reference: exactly if `n` is 0, otherwise within [`allowed`]. `dtype` is the problem's
    /// dtype.
    fn compare(
        &mut self,
        what: impl Display,
        dtype: DType,
        n: usize,
        run: impl Fn(&Side) -> Result<Option<Vec<Tensor>>>,
    ) -> Result<()> {
        let reference = Side { backend: &Reference, device: Device::Cpu };
        let right = run(&reference)?.expect("the reference declines nothing");
        for side in &self.sides {
            let skipped = side.device != Device::Cpu && !self.runs_on_opencl;
            if skipped || dtype == DType::F64 && !side.device.info()?.fp64 {
                continue;
            }
            let Some(results) = run(side)? else { continue };
            self.answered = true;
            for (k, (got, right)) in results.iter().zip(&right).enumerate() {
                if let Some(difference) = difference(got, right, n)? {
                    self.failures.push(format!("{what}, {dtype}, on {}: result {k} {difference}", side.device));
                }
            }
        }
        Ok(())
    }
}

/// Describes the first element that differs by more than allowed, or returns `None`.
fn difference(got: &Tensor, right: &Tensor, n: usize) -> Result<Option<String>> {
    if (got.shape(), got.dtype) != (right.shape(), right.dtype) {
        return Ok(Some(format!("is {got:?}, not {right:?}")));
    }
    let (dtype, values, right) = (got.dtype, read(got)?, read(right)?);
    let sizes = right.iter().map(|x| x.to_f64().abs()).filter(|x| x.is_finite());
    let greatest = sizes.fold(1.0, f64::max);
    let mut pairs = values.indexed_iter().zip(&right);
    let wrong = pairs.find(|((_, value), right)| !is_near(**value, **right, |x| allowed(dtype, n, x, greatest)));
    Ok(wrong.map(|((index, value), right)| format!("has at {index:?} {value:?}, not {right:?}")))
}

fn is_near(value: Scalar, right: Scalar, allowed: impl Fn(f64) -> f64) -> bool {
    let (x, y) = (value.to_f64(), right.to_f64());
    match (value, right) {
        (Scalar::Int(a), Scalar::Int(b)) => a == b,
        _ => x == y || (x.is_nan() && y.is_nan()) || (y.is_finite() && (x - y).abs() <= allowed(y)),
    }
}

/// Returns the tolerance of a result: one unit in its last place for the final rounding, plus `n` units in the last place of the largest
/// result (at least 1) in the compute type. `n` is the number of terms of a sum or of steps of a formula. It counts as at least 16, because
/// functions are off by a few units. If `n` is 0, the result must be exact.
fn allowed(dtype: DType, n: usize, right: f64, greatest: f64) -> f64 {
    let unit = |dtype: DType| match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        DType::BF16 => 2f64.powi(-7),
        _ => 0.0,
    };
    match n {
        0 => 0.0,
        _ => unit(dtype) * right.abs() + n.max(16) as f64 * unit(dtype.compute().dtype()) * greatest,
    }
}
