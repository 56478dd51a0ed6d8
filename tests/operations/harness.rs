//! The checks for every operation: each case runs on every device in several dtypes and layouts, and its results are compared with a
//! reference in f64. Gradients are compared with central differences of the reference.

use claystone::autograd::gradgradcheck;
use claystone::ops::{self, Argument, Dtypes, Kind, Operation, ResultDType};
use claystone::{DType, Device, Error, Result, Tensor};
use ndarray::{ArrayD, IxDyn};

use crate::common::{devices, f64s};
use crate::rounding::{rounded, rounded_result, tolerance};

/// A placeholder for the tested device in a case's arguments.
pub const TESTED_DEVICE: Argument = Argument::Device(Device::Cpu);

/// Tolerance of a gradient against central differences in f64, relative to the gradient's magnitude.
const GRADIENT_TOLERANCE: f64 = 2e-6;
/// Tolerance of second derivatives, larger because finite differences of gradients are less exact.
const SECOND_GRADIENT_TOLERANCE: f64 = 1e-4;
/// Cases with more elements have no gradient check, because finite differences call the reference several times per element.
const GRADIENT_ELEMENTS: usize = 400;

#[derive(Clone, Debug)]
enum Values {
    Between(f64, f64),
    /// Distinct integers around 0, in scrambled order.
    Distinct,
    /// i64 indices below this bound.
    Index(usize),
    Mask,
    Given(ArrayD<f64>, DType),
}

#[derive(Clone, Debug)]
struct Operand {
    shape: Vec<usize>,
    values: Values,
}

type Reference = dyn Fn(&[ArrayD<f64>]) -> Vec<ArrayD<f64>> + Send + Sync;

/// An operation on operands of given shapes, with a reference for its results. [`case`] creates it.
pub struct Case {
    pub op: &'static Operation,
    operands: Vec<Operand>,
    /// The positions of optional tensors that are omitted although later tensors are given.
    left_out: Vec<usize>,
    arguments: Vec<Argument>,
    dtypes: Dtypes,
    tolerance: f64,
    gradient: bool,
    reference: Option<Box<Reference>>,
}

/// Starts a case for the operation `name` of the catalogue.
pub fn case(name: &str) -> Case {
    let op = ops::operations().iter().find(|op| op.name == name);
    let op = op.unwrap_or_else(|| panic!("{name} is not in the catalogue"));
    let (operands, left_out, arguments) = (Vec::new(), Vec::new(), Vec::new());
    Case { op, operands, left_out, arguments, dtypes: op.takes, tolerance: 1.0, gradient: true, reference: None }
}

#[allow(dead_code)] // for operation families to come
impl Case {
    fn operand(mut self, shape: &[usize], values: Values) -> Case {
        self.operands.push(Operand { shape: shape.to_vec(), values });
        self
    }

    /// Adds a tensor of the tested dtype with values between -2 and 2.
    pub fn input(self, shape: &[usize]) -> Case {
        self.operand(shape, Values::Between(-2.0, 2.0))
    }

    /// Adds a tensor of the tested dtype, with values in a range.
    pub fn input_in(self, shape: &[usize], range: std::ops::Range<f64>) -> Case {
        self.operand(shape, Values::Between(range.start, range.end))
    }

    /// Adds a tensor with distinct elements (at most 200 elements in 8 bits).
    pub fn distinct(self, shape: &[usize]) -> Case {
        self.operand(shape, Values::Distinct)
    }

    /// Adds a tensor of i64 indices below `below`.
    pub fn index(self, shape: &[usize], below: usize) -> Case {
        self.operand(shape, Values::Index(below))
    }

    /// Adds a bool tensor.
    pub fn mask(self, shape: &[usize]) -> Case {
        self.operand(shape, Values::Mask)
    }

    /// Adds a tensor of these values, in this dtype whatever the tested dtype is.
    pub fn fixed(self, values: ArrayD<f64>, dtype: DType) -> Case {
        let shape = values.shape().to_vec();
        self.operand(&shape, Values::Given(values, dtype))
    }

    /// Omits the next tensor, which must be optional.
    pub fn none(mut self) -> Case {
        self.left_out.push(self.operands.len() + self.left_out.len());
        self
    }

    /// Adds an argument. A dtype argument is replaced by the tested dtype, [`TESTED_DEVICE`] by the tested device.
    pub fn arg(mut self, argument: impl Into<Argument>) -> Case {
        self.arguments.push(argument.into());
        self
    }

    /// Restricts the case to float dtypes.
    pub fn floats(self) -> Case {
        Case { dtypes: Dtypes::Floats, ..self }
    }

    /// Restricts the case to integer dtypes.
    pub fn integers(self) -> Case {
        Case { dtypes: Dtypes::IntegersOnly, ..self }
    }

    /// Multiplies the dtype's tolerance by `factor`. A comment at the call must say why.
    pub fn tolerance(self, factor: f64) -> Case {
        Case { tolerance: factor, ..self }
    }

    /// Disables the gradient check. A comment at the call must say why.
    pub fn no_gradient(self) -> Case {
        Case { gradient: false, ..self }
    }

    /// Sets the reference, which computes the expected results in f64 from the operands' values after rounding to their dtypes.
    pub fn with_reference(self, f: impl Fn(&[ArrayD<f64>]) -> Vec<ArrayD<f64>> + Send + Sync + 'static) -> Case {
        Case { reference: Some(Box::new(f)), ..self }
    }

    /// Whether the case has an operand without elements.
    pub fn is_empty(&self) -> bool {
        self.operands.iter().any(|o| o.shape.contains(&0))
    }

    /// Whether a tensor is omitted although later tensors are given.
    pub fn has_gaps(&self) -> bool {
        !self.left_out.is_empty()
    }

    /// Whether the case has a tensor operand.
    pub fn has_operands(&self) -> bool {
        !self.operands.is_empty()
    }

    /// Returns the tensors and arguments of a valid call. `choice` selects a dtype and a memory layout.
    pub fn parts(&self, choice: usize, device: Device) -> Result<(Vec<Tensor>, Vec<Argument>)> {
        let contained = |t: &DType| self.op.takes.contains(*t) && self.dtypes.contains(*t);
        let dtypes: Vec<DType> = DType::ALL.into_iter().filter(contained).collect();
        let (dtype, lie) =
            (dtypes[choice % dtypes.len()], [Layout::Contiguous, Layout::Strided, Layout::Backwards][choice % 3]);
        let made = |(k, o): (usize, &Operand)| o.tensor(&o.array(k, dtype, lie), dtype, device, lie);
        let tensors = self.operands.iter().enumerate().map(made).collect::<Result<Vec<_>>>()?;
        Ok((tensors, self.arguments(dtype, device)))
    }

    /// Returns the tensor arguments of the call, with `None` for omitted tensors.
    pub fn slots<'a>(&self, tensors: &'a [Tensor]) -> Vec<Option<&'a Tensor>> {
        let mut slots: Vec<_> = tensors.iter().map(Some).collect();
        self.left_out.iter().for_each(|&at| slots.insert(at.min(slots.len()), None));
        slots
    }

    fn right(&self, x: &[ArrayD<f64>]) -> Vec<ArrayD<f64>> {
        self.reference.as_ref().unwrap_or_else(|| panic!("{}: the case has no reference", self.op.name))(x)
    }

    fn arguments(&self, dtype: DType, device: Device) -> Vec<Argument> {
        let place = |a: &Argument| match a {
            Argument::Device(_) => Argument::Device(device),
            Argument::DType(_) if self.op.kind <= Kind::Random => Argument::DType(dtype),
            other => other.clone(),
        };
        self.arguments.iter().map(place).collect()
    }
}

/// The memory layout of operands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Layout {
    Contiguous,
    /// Dims in reverse memory order, gaps in each dim, and an odd offset.
    Strided,
    /// A negative stride in the last dim.
    Backwards,
    /// A stride of 0 in the first dim.
    Expanded,
}

/// Returns element `i` of the `n` elements of operand `k`, before rounding to a dtype.
fn value(values: &Values, k: usize, i: usize, n: usize) -> f64 {
    // Low-discrepancy points, with different values in each operand.
    let u = ((i + 1) as f64 * [0.618_033_988_749_895, 0.754_877_666_246_693, 0.569_840_290_998_053][k % 3]
        + k as f64 * 0.137)
        .fract();
    match values {
        Values::Between(low, high) => low + u * (high - low),
        // Multiplies by a number coprime to n (101, or 103 if 101 divides n), which gives n distinct remainders.
        Values::Distinct => ((i * if n.is_multiple_of(101) { 103 } else { 101 }) % n) as f64 - (n / 2) as f64,
        Values::Index(below) => (u * *below as f64).floor(),
        Values::Mask => f64::from(u < 0.5),
        Values::Given(array, _) => array.iter().nth(i).copied().unwrap_or_default(),
    }
}

impl Operand {
    fn dtype(&self, tested: DType) -> DType {
        match &self.values {
            Values::Index(_) => DType::I64,
            Values::Mask => DType::Bool,
            Values::Given(_, dtype) => *dtype,
            _ => tested,
        }
    }

    fn is_tested(&self) -> bool {
        matches!(self.values, Values::Between(..) | Values::Distinct)
    }

    /// Returns the values that the operation reads, rounded to the dtype.
    fn array(&self, k: usize, dtype: DType, lie: Layout) -> ArrayD<f64> {
        let dtype = self.dtype(dtype);
        let n: usize = self.shape.iter().product();
        let rest: usize = self.shape.iter().skip(1).product();
        let mut i = 0;
        ArrayD::from_shape_simple_fn(IxDyn(&self.shape), || {
            let at = if lie == Layout::Expanded && self.expands() { i % rest } else { i };
            i += 1;
            let x = value(&self.values, k, at, n);
            if matches!(self.values, Values::Between(..)) && !dtype.is_float() && dtype != DType::Bool {
                return rounded(if dtype == DType::U8 || dtype == DType::U32 { x.abs() } else { x }, dtype);
            }
            rounded(x, dtype)
        })
    }

    /// Whether the operand may be expanded: not if its elements must be distinct, or if the case gives them.
    fn expands(&self) -> bool {
        self.shape.first().is_some_and(|&d| d > 1) && matches!(self.values, Values::Between(..) | Values::Mask)
    }

    fn tensor(&self, array: &ArrayD<f64>, dtype: DType, device: Device, lie: Layout) -> Result<Tensor> {
        let dtype = self.dtype(dtype);
        let made = |values: Vec<f64>, shape: &[usize]| {
            if dtype.is_float() {
                return Tensor::from_vec(values, shape, Device::Cpu)?.to_dtype(dtype)?.to_device(device);
            }
            let whole: Vec<i64> = values.iter().map(|&x| x as i64).collect();
            Tensor::from_vec(whole, shape, Device::Cpu)?.to_dtype(dtype)?.to_device(device)
        };
        let rank = self.shape.len();
        match lie {
            _ if rank == 0 => made(array.iter().copied().collect(), &[]),
            Layout::Contiguous => made(array.iter().copied().collect(), &self.shape),
            Layout::Strided => {
                let turned = array.view().reversed_axes();
                let memory: Vec<usize> = turned.shape().iter().map(|d| d + 2).collect();
                let mut filled = ArrayD::from_elem(IxDyn(&memory), 1.0);
                let inside = turned.shape().to_vec();
                filled.slice_each_axis_mut(|axis| (1..1 + inside[axis.axis.index()]).into()).assign(&turned);
                let mut t = made(filled.iter().copied().collect(), &memory)?;
                for (d, &len) in inside.iter().enumerate() {
                    t = t.narrow(d as isize, 1, len)?;
                }
                t.permute(&(0..rank as isize).rev().collect::<Vec<_>>())
            }
            Layout::Backwards => {
                let mut turned = array.clone();
                turned.invert_axis(ndarray::Axis(rank - 1));
                made(turned.iter().copied().collect(), &self.shape)?.flip(-1)
            }
            Layout::Expanded if self.expands() => {
                let rest: usize = self.shape[1..].iter().product();
                let mut shape = self.shape.clone();
                shape[0] = 1;
                made(array.iter().take(rest).copied().collect(), &shape)?.expand(&self.shape[..])
            }
            Layout::Expanded => made(array.iter().copied().collect(), &self.shape),
        }
    }
}

/// Returns the dtypes and layouts to run on a device: all on the CPU, fewer on the first OpenCL device, which compiles a kernel for each
/// combination, and one on other devices.
fn variants(case: &Case, device: Device) -> Result<Vec<(DType, Layout)>> {
    use Layout::*;
    // The destination of an in-place operation cannot be expanded, because its elements would overlap.
    let last = if case.op.kind == Kind::InPlace { Backwards } else { Expanded };
    let all = [Contiguous, Strided, Backwards, last];
    let fp64 = device.info()?.fp64;
    let dtypes: Vec<DType> = DType::ALL
        .into_iter()
        .filter(|&t| case.op.takes.contains(t) && case.dtypes.contains(t) && (fp64 || t != DType::F64))
        .collect();
    let main = if dtypes.contains(&DType::F32) { DType::F32 } else { dtypes[0] };
    let mut variants: Vec<(DType, Layout)> = match device {
        Device::OpenCL(i) if i > 0 => return Ok(vec![(main, Contiguous)]),
        _ => all.map(|lie| (main, lie)).into(),
    };
    for (i, &dtype) in dtypes.iter().enumerate().filter(|(_, t)| **t != main) {
        let often = device == Device::Cpu || matches!(dtype, DType::F16 | DType::I64 | DType::Bool);
        if often || case.op.kind != Kind::Elementwise {
            variants.push((dtype, if device == Device::Cpu { all[i % 4] } else { Strided }));
        }
        if device == Device::Cpu {
            variants.push((dtype, Contiguous));
        }
    }
    Ok(variants)
}

fn close(got: f64, right: f64, tolerance: f64) -> bool {
    got == right || (got.is_nan() && right.is_nan()) || (got - right).abs() <= tolerance * right.abs().max(1.0)
}

fn compare(what: &str, got: &Tensor, right: &ArrayD<f64>, tolerance: f64) {
    assert_eq!(got.shape().dims(), right.shape(), "{what}: shape");
    for (i, (got, right)) in f64s(got).iter().zip(right).enumerate() {
        assert!(close(*got, *right, tolerance), "{what}: element {i} is {got} instead of {right}");
    }
}

fn check_values(case: &Case, device: Device, dtype: DType, lie: Layout) -> Result<()> {
    let what = format!("{} {:?} on {device} in {dtype}, {lie:?}", case.op.name, case.arguments);
    let arrays: Vec<_> = case.operands.iter().enumerate().map(|(k, o)| o.array(k, dtype, lie)).collect();
    let zipped = case.operands.iter().zip(&arrays);
    let tensors = zipped.map(|(o, a)| o.tensor(a, dtype, device, lie)).collect::<Result<Vec<_>>>()?;
    let outs = ops::call(case.op.name, &case.slots(&tensors), &case.arguments(dtype, device))?;
    let right = case.right(&arrays);
    assert_eq!(outs.len(), right.len(), "{what}: number of results");
    let asked = case.arguments.iter().find_map(|a| if let Argument::DType(t) = a { Some(*t) } else { None });
    let operand = if case.op.gives == ResultDType::Asked { asked.unwrap_or(dtype) } else { dtype };
    assert_eq!(outs[0].dtype(), case.op.gives.resolve(operand), "{what}: dtype of the result");
    for (out, right) in outs.iter().zip(&right) {
        assert_eq!(out.device(), device, "{what}: device of the result");
        let right = right.mapv(|x| if out.dtype().is_float() { x } else { rounded_result(x, out.dtype()) });
        let factor = case.tolerance * tolerance(if out.dtype().is_float() { out.dtype() } else { DType::I64 });
        compare(&what, out, &right, factor);
    }
    // In-place operations may change only their first tensor; other operations may change none.
    for (k, (t, a)) in tensors.iter().zip(&arrays).enumerate().skip(usize::from(case.op.kind == Kind::InPlace)) {
        compare(&format!("{what}: operand {k} afterwards"), t, a, 0.0);
    }
    Ok(())
}

/// Compares the gradients that backward computes with central differences of the reference. The loss is the sum of the results with
/// fixed weights.
fn check_gradient(case: &Case, device: Device, lie: Layout) -> Result<()> {
    let what = format!("gradient of {} {:?} on {device}, {lie:?}", case.op.name, case.arguments);
    let arrays: Vec<_> = case.operands.iter().enumerate().map(|(k, o)| o.array(k, DType::F64, lie)).collect();
    let leaves = (case.operands.iter().zip(&arrays))
        .map(|(o, a)| o.tensor(a, DType::F64, device, lie)?.requires_grad_(o.is_tested()))
        .collect::<Result<Vec<_>>>()?;
    let outs = ops::call(case.op.name, &case.slots(&leaves), &case.arguments(DType::F64, device))?;
    let weight = |o: usize, i: usize| 0.5 + ((i * 7 + o * 3 + 1) as f64 * 0.618_033_988_749_895).fract();
    for (o, out) in outs.iter().enumerate().filter(|(_, out)| out.requires_grad()) {
        let weights: Vec<f64> = (0..out.numel()).map(|i| weight(o, i)).collect();
        out.backward_with(&Tensor::from_vec(weights, out.shape(), device)?)?;
    }
    assert!(outs.iter().any(Tensor::requires_grad), "{what}: no result is in the graph");
    let loss = |x: &[ArrayD<f64>]| -> f64 {
        let weighted = |(o, right): (usize, &ArrayD<f64>)| -> f64 {
            let tracked = outs[o].requires_grad();
            right.iter().enumerate().map(|(i, r)| if tracked { r * weight(o, i) } else { 0.0 }).sum()
        };
        case.right(x).iter().enumerate().map(weighted).sum()
    };
    for (k, leaf) in leaves.iter().enumerate().filter(|(k, _)| case.operands[*k].is_tested()) {
        let got = match leaf.grad() {
            Some(grad) => {
                assert_eq!(grad.shape(), leaf.shape(), "{what}: shape");
                f64s(&grad)
            }
            None => ArrayD::zeros(IxDyn(leaf.shape().dims())),
        };
        let mut kinks = 0;
        for (i, got) in got.iter().enumerate() {
            let slope = |h: f64| {
                let mut x = arrays.clone();
                let mut at = |by: f64| {
                    *x[k].iter_mut().nth(i).expect("an element") += by;
                    loss(&x)
                };
                let up = at(h);
                (up - at(-2.0 * h)) / (2.0 * h)
            };
            // If two step sizes give different slopes, there is a kink or a jump nearby, and the element is skipped.
            let (right, other) = (slope(1e-5), slope(3e-6));
            if !close(right, other, GRADIENT_TOLERANCE / 2.0) {
                kinks += 1;
                continue;
            }
            assert!(close(*got, right, GRADIENT_TOLERANCE), "{what}: by element {i} of {k}: {got} instead of {right}");
        }
        assert!(kinks <= 3 + got.len() / 10, "{what}: {kinks} kinks");
    }
    Ok(())
}

/// Returns the number of elements with a derivative in a second-derivative check; 0 if the case does not support the check.
pub fn differentiable_elements(case: &Case) -> usize {
    let checked = case.op.is_differentiable() && case.gradient && case.dtypes.contains(DType::F64);
    let elements = case.operands.iter().filter(|o| o.is_tested()).map(|o| o.shape.iter().product::<usize>()).sum();
    if checked && !case.is_empty() { elements } else { 0 }
}

/// On the CPU, compares second derivatives of the squared, weighted results with central differences of the first derivatives.
pub fn check_second_gradient(case: &Case) {
    let operands = || case.operands.iter().enumerate();
    let made = |(k, o): (usize, &Operand)| {
        o.tensor(&o.array(k, DType::F64, Layout::Contiguous), DType::F64, Device::Cpu, Layout::Contiguous)
    };
    let tensors = named(case, operands().map(made).collect::<Result<Vec<_>>>());
    let tested: Vec<usize> = operands().filter(|(_, o)| o.is_tested()).map(|(k, _)| k).collect();
    let inputs: Vec<Tensor> = tested.iter().map(|&k| tensors[k].detach()).collect();
    let loss = |x: &[Tensor]| {
        let mut all: Vec<Tensor> = tensors.iter().map(Tensor::shallow_clone).collect();
        tested.iter().zip(x).for_each(|(&k, x)| all[k] = x.shallow_clone());
        let outs = ops::call(case.op.name, &case.slots(&all), &case.arguments(DType::F64, Device::Cpu))?;
        let mut total = Tensor::zeros((), (DType::F64, Device::Cpu))?;
        for out in outs.iter().filter(|out| out.dtype().is_float()) {
            let weights = Tensor::arange(1, out.numel() as i64 + 1, 1, &total)?.reshape(out.shape())?.sqrt()?;
            total = total.add(&out.square()?.mul(&weights)?.sum((), false)?)?;
        }
        Ok(total)
    };
    named(case, gradgradcheck(loss, &inputs, SECOND_GRADIENT_TOLERANCE));
}

fn named<T>(case: &Case, result: Result<T, Error>) -> T {
    result.unwrap_or_else(|e| panic!("{} {:?}: {e}", case.op.name, case.arguments))
}

/// Runs every case, or only the cases of the operation that the environment variable `CASE` names.
pub fn check(cases: Vec<Case>) {
    let only = std::env::var("CASE").ok();
    for case in cases.iter().filter(|case| only.as_deref().is_none_or(|name| name == case.op.name)) {
        for device in devices() {
            for (dtype, lie) in named(case, variants(case, device)) {
                named(case, check_values(case, device, dtype, lie));
            }
            let elements: usize = case.operands.iter().map(|o| o.shape.iter().product::<usize>()).sum();
            let differentiated = case.op.is_differentiable() && case.gradient && case.dtypes.contains(DType::F64);
            let second = matches!(device, Device::OpenCL(i) if i > 0);
            if differentiated && elements <= GRADIENT_ELEMENTS && !second && named(case, device.info()).fp64 {
                let lies = if device == Device::Cpu {
                    &[Layout::Contiguous, Layout::Expanded][..]
                } else {
                    &[Layout::Strided]
                };
                lies.iter().for_each(|&lie| named(case, check_gradient(case, device, lie)));
            }
        }
    }
}

/// Runs a case on the CPU while its operation is replaced by an implementation that counts calls and forwards to the built-in one.
/// The results must not change.
pub fn check_replaced(case: &Case) {
    use claystone::ops::{Backend, Implementation, register};
    use std::sync::atomic::{AtomicUsize, Ordering};
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let name = case.op.name;
    let counting = Implementation::with_optional(move |x, arguments| {
        CALLS.fetch_add(1, Ordering::Relaxed);
        ops::call(name, x, arguments)
    });
    let _kept = named(case, register(name, Backend::Cpu, counting));
    let before = CALLS.load(Ordering::Relaxed);
    let dtype = named(case, variants(case, Device::Cpu))[0].0;
    named(case, check_values(case, Device::Cpu, dtype, Layout::Contiguous));
    assert!(CALLS.load(Ordering::Relaxed) > before, "{name}: the method does not ask the registry");
    if case.op.is_differentiable() && case.gradient && case.dtypes.contains(DType::F64) && !case.is_empty() {
        named(case, check_gradient(case, Device::Cpu, Layout::Contiguous));
    }
}
