//! Compares the CPU and every OpenCL device with the reference, method by method of the trait: sizes around those of tiles, views
//! of odd strides, NaN and infinities, problems that no operation makes.
//!
//! A case makes its tensors on the CPU once, and computes with copies of them on every side. The tolerance is that of
//! [`allowed`]. OpenCL devices have the cases of some dtypes: their compilers take nearly all
//! of the time.

mod attention;
mod elements;
mod images;
mod lines;
mod matrices;
mod moves;
mod rows;

use std::fmt::Display;

use super::Reference;
use super::values::{read, write};
use crate::backend::{self, Backend};
use crate::layout::Layout;
use crate::storage::Storage;
use crate::{DType, Device, Result, Scalar, Shape, Tensor};

/// Makes a test of each case, and the list of the methods that they call.
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
    attention: attention + has_attention + attention_backward, blocking;
    elements: map, sequence;
    matrices: gemm, reduce, zeroed, join;
    lines: scan, sort, search, first, nth;
    moves: gather, scatter, linear_index, one_hot, nonzero, masked_select;
    rows: softmax, cross_entropy, norm + norm_forward + norm_columns, normalise_channels, variance + has_variance;
    images: convolution, forward_convolution, unfold, fold, pool, interpolate;
}

/// The trait's methods, read from its source.
#[test]
fn every_method_has_a_case() {
    let source = include_str!("../../mod.rs");
    let body = source.split_once("trait Backend").expect("the trait").1.split_once("\n}\n").expect("its end").0;
    let names = body.lines().filter_map(|line| line.trim().strip_prefix("fn ")?.split('(').next());
    // Recording and tuning launches computes nothing, and only devices have images: `tests/operations/images.rs`.
    let others = ["record", "tuning", "to_image", "read_image"];
    let mut methods: Vec<&str> = names.filter(|name| !others.contains(name)).collect();
    let mut cases = METHODS.to_vec();
    methods.sort_unstable();
    cases.sort_unstable();
    assert_eq!(methods, cases, "each method of `Backend` has its cases here");
}

/// A backend with the device that its tensors are on.
struct Side {
    backend: &'static dyn Backend,
    device: Device,
}

impl Side {
    /// A copy of the tensor's storage here, walked in the same way.
    fn put(&self, t: &Tensor) -> Result<Tensor> {
        let mut bytes = vec![0; t.storage.nbytes()];
        t.storage.read(0, &mut bytes)?;
        let storage = Storage::alloc(self.device, bytes.len())?;
        storage.write(0, &bytes)?;
        Ok(Tensor { storage, ..t.detach() })
    }

    /// A new contiguous tensor, full of what no result has.
    fn room(&self, dims: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let out = Tensor::empty_like_shape(dims, dtype, self.device)?;
        let byte = if dtype == DType::Bool { 1 } else { 0x77 };
        out.storage.write(0, &vec![byte; out.storage.nbytes()])?;
        Ok(out)
    }
}

/// How a tensor is laid out in its storage.
#[derive(Debug, Clone, Copy, PartialEq)]
enum View {
    Plain,
    /// Rows in one piece, with gaps between them, behind an offset.
    Gapped,
    /// Dims the other way round, gaps between all elements, the last dim backwards.
    Odd,
}

const VIEWS: [View; 3] = [View::Plain, View::Gapped, View::Odd];

/// Random numbers: xorshift, from a fixed seed.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) as usize % n
    }
}

/// Sixteenths in -9..9, which all floats hold; some are equal.
fn numbers(random: &mut Random) -> f64 {
    random.below(288) as f64 / 16.0 - 9.0
}

/// Above 0.5 and below 2.
fn factors(random: &mut Random) -> f64 {
    (random.below(100) + 66) as f64 / 128.0
}

/// As [`numbers`], every fourth of them NaN, infinite or a zero of either sign.
fn specials(random: &mut Random) -> f64 {
    let special = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -0.0, 0.0];
    if random.below(4) == 0 { special[random.below(5)] } else { numbers(random) }
}

/// The cases of a method.
struct Suite {
    method: &'static str,
    sides: Vec<Side>,
    random: Random,
    /// Whether a backend has not declined all of them.
    answered: bool,
    failures: Vec<String>,
    /// Whether cases are for OpenCL devices as well: a program costs as much as a hundred cases.
    compiles: bool,
}

impl Suite {
    fn new(method: &'static str) -> Suite {
        let side = |device: Device| Side { backend: backend::of(device), device };
        let sides = Device::all().into_iter().map(side).collect();
        Suite { method, sides, random: Random(0x5eed), answered: false, failures: Vec::new(), compiles: true }
    }

    /// Where there is an OpenCL device, one backend at least has an answer; the variance is for GPUs alone.
    fn finish(self) {
        assert!(self.failures.is_empty(), "{}:\n{}", self.method, self.failures.join("\n"));
        let all = self.sides.len() > 1;
        assert!(self.answered || !all || self.method == "variance", "every backend declines {}", self.method);
    }

    /// A tensor on the CPU. Its gaps have numbers as well.
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
        let whole = Tensor::empty_like_shape(count, dtype, Device::Cpu)?;
        write(&whole, (0..count).map(|_| number(&mut self.random)).collect::<Vec<f64>>())?;
        Ok(whole.with_layout(layout))
    }

    /// Compares what `run` gives on every side with what it gives of the reference: equal where `n` is 0, else as [`allowed`].
    /// `dtype` is that of the problem.
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
            let skipped = side.device != Device::Cpu && !self.compiles;
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

/// The first element that is not what it should be.
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

/// How far a result may be from the right one: a unit in its last place, for it is rounded when it is stored, and for each of the
/// `n` terms that it is a sum of, or the steps of its formula, a unit in the last place of the greatest result, or of 1, in the
/// type that is computed in. Functions are good for a few units: n is taken as 16 at least. Nothing where n is 0.
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
