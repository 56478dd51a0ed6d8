//! Launches on the CPU that need no plan. Most launches of small tensors are of these kinds, and planning takes longer than computing
//! them:
//!
//! - One primitive with contiguous, row-broadcast, column-broadcast or scalar operands of the result's dtype ([`FlatLaunch`]; [`SmallPrimitive`] for the smallest).
//! - One cheap primitive of f16 or bf16 ([`compute_halves`]), which reads, converts, computes and writes in one loop. In the tile
//!   interpreter, every element would be written to a tile of f32 and read again three times.
//! - Formulas over one or two bool tensors ([`try_run_masks`]). Every such formula is a polynomial over bits, which is evaluated on bytes.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::backend::cpu::dispatch::{Function, function, vectorised};
use crate::backend::cpu::interpreter::{Scratch, TILE, Tile, TileIn, compute, is_cheap};
use crate::backend::cpu::kernels::convert::{HalfOperand, map_halves};
use crate::backend::cpu::partition::job_len;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::steps::{Action, Value};
use crate::backend::problem::map::{Formulas, compute_type};
use crate::backend::problem::operand::OperandKind;
use crate::device::cpu::parallel;
use crate::expr::program::Program;
use crate::expr::{Binary, Op};
use crate::storage::{Storage, with_host, with_host_few};
use crate::{DType, Error, Result, Scalar, Tensor};

/// The number of elements that are updated in place at a time, so that the copy of their old values stays in the L1 cache.
const IN_PLACE_CHUNK_LEN: usize = 2048;
/// The maximum number of bytes of a result that fits in the L1 cache together with two operands.
const L1_RESULT_BYTES: usize = 12 << 10;
/// The number of bytes above which a result fits in no cache together with two operands.
const MAX_REVERSED_BYTES: usize = 8 << 20;
/// The number of pieces of a result that is computed from its end to its start. With few pieces, the first piece is still in the L1 cache
/// at the end.
const REVERSED_PIECES: usize = 3;
/// The minimum length of a broadcast row of halves. Shorter rows are left to the tile interpreter, whose tiles cover many rows.
const MIN_HALF_ROW_LEN: usize = 64;
/// The minimum length of rows to read a column without a plan, if the launch has more than one tile.
const MIN_COLUMN_ROW_LEN: usize = 8;

/// Computes `formulas` if they need no plan; returns false, without computing anything, otherwise. A shape mismatch also returns false.
pub(crate) fn try_run(formulas: &Formulas) -> Result<bool> {
    let Formulas { program, inputs, outputs: [out], params, .. } = formulas else { return Ok(false) };
    if params.seeds.is_empty() && try_run_primitive(formulas, out)? {
        return Ok(true);
    }
    if out.dtype == DType::Bool { try_run_masks(program, inputs, out) } else { Ok(false) }
}

/// Computes one primitive if its operands have the result's dtype and each is contiguous, one broadcast row or column, or one number.
/// Returns false otherwise.
fn try_run_primitive(formulas: &Formulas, out: &Tensor) -> Result<bool> {
    let Formulas { op, program, inputs, outputs, .. } = *formulas;
    let scalars = formulas.params.scalars;
    let [step] = &program.steps().list[..] else { return Ok(false) };
    let computes = !matches!(step.action, Action::Copy | Action::MultiplyAdd(..) | Action::Compute(Op::Leaf(_)));
    let count = out.numel();
    if !computes || count == 0 || !out.is_contiguous() {
        return Ok(false);
    }
    let mut kinds: SmallVec<[Option<OperandKind>; 3]> = SmallVec::new();
    for t in inputs {
        match OperandKind::classify(t, out) {
            OperandKind::Strided => return Ok(false),
            kind if t.dtype == out.dtype && !t.shares_storage(out) => kinds.push(Some(kind)),
            OperandKind::Contiguous if t.dtype == out.dtype && t.layout.offset == out.layout.offset => kinds.push(None),
            _ => return Ok(false),
        }
    }
    // The interpreter accepts a repeated row or column only as one operand of a binary primitive whose other operand is a slice. Long columns
    // of short rows are planned.
    let two = matches!(step.action, Action::Compute(Op::Binary(_)));
    let kind_of = |value: &Value| if let Value::Input(k) = *value { Some(kinds[k]) } else { None };
    let each = |value: &Value| matches!(kind_of(value), Some(Some(OperandKind::Contiguous) | None));
    let repeated = |value: &Value| match kind_of(value) {
        Some(Some(OperandKind::RowBroadcast(_))) => Some(true),
        Some(Some(OperandKind::ColumnBroadcast { row, .. })) => Some(row >= MIN_COLUMN_ROW_LEN || count <= TILE),
        _ => None,
    };
    let mut of_rows = step.args.iter().filter_map(repeated);
    if let Some(first) = of_rows.next()
        && !(first && of_rows.next().is_none() && two && step.args.iter().any(each))
    {
        return Ok(false);
    }
    let mut launch = FlatLaunch { program, inputs, kinds: &kinds, scalars, out, streamed: false };
    if matches!(out.dtype, DType::F16 | DType::BF16) {
        return launch.try_run_halves();
    }
    let bytes = inputs.iter().map(|t| t.numel()).sum::<usize>().saturating_add(count) * out.dtype.size();
    let column = kinds.iter().any(|kind| matches!(kind, Some(OperandKind::ColumnBroadcast { .. })));
    launch.streamed = !kinds.contains(&None) && program.should_bypass_cache(count * out.dtype.size(), bytes);
    if (launch.streamed && (column || !program.can_bypass_cache()))
        || compute_type(program, inputs, outputs).dtype() != out.dtype
    {
        return Ok(false);
    }
    let zero = match out.dtype {
        DType::F32 => launch.run::<f32>()?,
        DType::F64 => launch.run::<f64>()?,
        _ => launch.run::<i64>()?,
    };
    if zero { Err(Error::DivisionByZero { op }) } else { Ok(true) }
}

/// Computes all elements on this thread by calls of `part(index of the first element, range of out)`. For a result too large for the L1
/// cache, successive calls alternate between ascending and descending order, to begin where the cache still holds the last call's
/// elements.
fn compute_alternating<C>(out: &mut [C], mut part: impl FnMut(usize, &mut [C])) {
    if size_of_val(out) <= L1_RESULT_BYTES || !parallel::alternate_direction() {
        return part(0, out);
    }
    let piece = out.len().div_ceil(REVERSED_PIECES).next_multiple_of(16);
    out.chunks_mut(piece).enumerate().rev().for_each(|(i, elements)| part(i * piece, elements));
}

/// One primitive of one or two tensors with the result's layout, or of a tensor and a number. All operands are f32 or all are f64, and
/// small enough for one thread. For such small tensors, the more general check of [`try_run`] takes longer than the operation.
pub(crate) struct SmallPrimitive<'a> {
    action: Action,
    args: &'a [Value],
    inputs: &'a [&'a Tensor],
    scalars: &'a [Scalar],
}

impl<'a> SmallPrimitive<'a> {
    /// Returns the launch if [`SmallPrimitive`] supports it, else `None`. The result has dtype `dtype` and the first operand's shape.
    #[inline]
    pub(crate) fn try_new(
        inputs: &'a [&'a Tensor],
        scalars: &'a [Scalar],
        program: &'a Program,
        dtype: DType,
    ) -> Option<SmallPrimitive<'a>> {
        let first = *inputs.first()?;
        let fits = |t: &&Tensor| t.dtype == dtype && t.device() == first.device();
        let alike = matches!(dtype, DType::F32 | DType::F64) && inputs.iter().all(fits);
        let [step] = &program.steps().list[..] else { return None };
        let action @ (Action::Compute(Op::Unary(_) | Op::Binary(_)) | Action::Function(_) | Action::Clamp) =
            step.action
        else {
            return None;
        };
        let tensors = step.args.iter().filter(|arg| matches!(arg, Value::Input(_))).count();
        let count = first.numel();
        (alike
            && tensors > 0
            && !program.uses_bits()
            && inputs.len() <= 2
            && (1..=job_len(0)).contains(&count)
            && inputs[1..].iter().all(|t| t.layout.same_layout(&first.layout, 1))
            && first.is_contiguous())
        .then_some(SmallPrimitive { action, args: &step.args, inputs, scalars })
    }

    /// Computes the elements of `out`, a new contiguous tensor.
    pub(crate) fn fill(&self, out: &Tensor) -> Result<()> {
        match out.dtype {
            DType::F32 => self.fill_as::<f32>(out),
            _ => self.fill_as::<f64>(out),
        }
    }

    /// Returns the elements of operand `k` in `range`.
    fn operand<'b, C: Number>(&self, k: usize, elements: &'b [C], range: Range<usize>) -> TileIn<'b, C> {
        match self.args[k] {
            Value::Scalar(i) => TileIn::Scalar(C::from_scalar(self.scalars[i])),
            Value::Const(c) => TileIn::Scalar(C::from_f64(c)),
            _ => TileIn::Slice(&elements[range]),
        }
    }

    fn fill_as<C: Number>(&self, out: &Tensor) -> Result<()> {
        let (count, to) = (out.numel(), &out.storage);
        let fill = |a: &[C], b: &[C], write: &mut [u8]| {
            compute_alternating(bytemuck::cast_slice_mut(write), |first, part| {
                let range = first..first + part.len();
                let operand = |k: usize| self.operand(k, if k == 0 { a } else { b }, range.clone());
                let uniform = compute(self.action, operand, false, part);
                debug_assert!(uniform.is_none(), "an operand is a tensor");
            });
        };
        fn all<'b, C: Number>(t: &Tensor, bytes: &'b [u8], count: usize) -> &'b [C] {
            &bytemuck::cast_slice(bytes)[t.layout.offset..][..count]
        }
        let tensor = |k: usize| match self.args.get(k) {
            Some(&Value::Input(i)) => Some(self.inputs[i]),
            _ => None,
        };
        match (tensor(0), tensor(1)) {
            (Some(x), Some(y)) => with_host_few([&x.storage, &y.storage], to, |[a, b], write| {
                fill(all(x, a, count), all(y, b, count), write);
            }),
            (Some(x), None) => with_host_few([&x.storage], to, |[a], write| fill(all(x, a, count), &[], write)),
            (None, Some(y)) => with_host_few([&y.storage], to, |[b], write| fill(&[], all(y, b, count), write)),
            (None, None) => unreachable!("an operand is a tensor"),
        }
    }
}

/// A launch of one primitive.
struct FlatLaunch<'a> {
    program: &'a Program,
    inputs: &'a [&'a Tensor],
    /// How each input is indexed; `None` for the input that the launch overwrites.
    kinds: &'a [Option<OperandKind>],
    scalars: &'a [Scalar],
    out: &'a Tensor,
    /// Whether to store the result with non-temporal stores, past the cache.
    streamed: bool,
}

impl FlatLaunch<'_> {
    /// Runs the launch; returns whether an integer was divided by zero.
    fn run<C: Number>(&self) -> Result<bool> {
        let out = &self.out.storage;
        let mut reads: SmallVec<[&Storage; 3]> = SmallVec::new();
        for (t, _) in self.inputs.iter().zip(self.kinds).filter(|(_, kind)| kind.is_some()) {
            reads.push(&t.storage);
        }
        match *reads {
            [x] => with_host_few([x], out, |reads, write| self.compute_all::<C>(&reads, write)),
            [x, y] => with_host_few([x, y], out, |reads, write| self.compute_all::<C>(&reads, write)),
            _ => with_host(&reads, &[out], |reads, writes| self.compute_all::<C>(reads, writes[0])),
        }
    }

    /// Computes all elements, on several threads if there are many.
    fn compute_all<C: Number>(&self, reads: &[&[u8]], write: &mut [u8]) -> bool {
        let (count, first) = (self.out.numel(), self.out.layout.offset);
        let out: &mut [C] = &mut bytemuck::cast_slice_mut(write)[first..first + count];
        let step = job_len(count);
        if count <= step {
            let mut zero = false;
            compute_alternating(out, |first, part| zero |= self.compute_range(reads, first, part));
            return zero;
        }
        let zero = AtomicBool::new(false);
        let reverse = size_of_val(out) <= MAX_REVERSED_BYTES && parallel::alternate_direction();
        parallel::for_each_chunk_from(out, step, reverse, |i, part| {
            if self.compute_range(reads, i * step, part) {
                zero.store(true, Ordering::Relaxed);
            }
        });
        zero.into_inner()
    }

    /// Computes `out`, whose first element has index `first` in the result. Returns whether an integer was divided by zero.
    fn compute_range<C: Number>(&self, reads: &[&[u8]], first: usize, out: &mut [C]) -> bool {
        // A cheap binary primitive can overwrite one operand without a copy.
        let other = matches!(
            self.kinds,
            [None, Some(OperandKind::Contiguous | OperandKind::Scalar)]
                | [Some(OperandKind::Contiguous | OperandKind::Scalar), None]
        );
        let in_place =
            other && matches!(self.program.steps().list[0].action, Action::Compute(Op::Binary(op)) if is_cheap(op));
        if self.kinds.contains(&None) && !in_place {
            return self.compute_through_copy(reads, first, out);
        }
        let mut scratch = Scratch::new();
        scratch.streamed = self.streamed;
        self.compute_tile(&mut scratch, reads, TileIn::Output(0), first, out)
    }

    /// Computes a range like [`compute_range`](Self::compute_range), for a result that is also an operand: the old values are copied
    /// first.
    #[inline(never)] // keeps the buffer off the caller's stack frame
    fn compute_through_copy<C: Number>(&self, reads: &[&[u8]], first: usize, out: &mut [C]) -> bool {
        let mut scratch = Scratch::new();
        let mut before: SmallVec<[C; IN_PLACE_CHUNK_LEN]> = SmallVec::new();
        let mut zero = false;
        for (i, piece) in out.chunks_mut(IN_PLACE_CHUNK_LEN).enumerate() {
            before.clear();
            before.extend_from_slice(piece);
            zero |=
                self.compute_tile(&mut scratch, reads, TileIn::Slice(&before), first + i * IN_PLACE_CHUNK_LEN, piece);
        }
        zero
    }

    /// Computes one tile. `before` holds the old contents of the result.
    fn compute_tile<C: Number>(
        &self,
        scratch: &mut Scratch<C>,
        reads: &[&[u8]],
        before: TileIn<'_, C>,
        first: usize,
        out: &mut [C],
    ) -> bool {
        let (len, mut reads) = (out.len(), reads.iter());
        let mut inputs: SmallVec<[TileIn<C>; 3]> = SmallVec::new();
        for (t, kind) in self.inputs.iter().zip(self.kinds) {
            let mut elements = || -> &[C] {
                let bytes = reads.next().expect("one for each operand that is not changed");
                &bytemuck::cast_slice(bytes)[t.layout.offset..]
            };
            inputs.push(match *kind {
                Some(OperandKind::Contiguous) => TileIn::Slice(&elements()[first..first + len]),
                Some(OperandKind::RowBroadcast(n)) => TileIn::Rows(&elements()[..n], first % n),
                Some(OperandKind::ColumnBroadcast { row, step }) => {
                    let (at, first) = (first % row, first / row * step);
                    let last = first + (at + len - 1) / row * step;
                    TileIn::Columns { column: &elements()[first..=last], step, row, at }
                }
                Some(OperandKind::Scalar) => TileIn::Scalar(elements()[0]),
                Some(OperandKind::Strided) => unreachable!("such a launch is planned"),
                None => before,
            });
        }
        let tile = Tile { inputs: &inputs, scalars: self.scalars, seeds: &[], first: first as u64, len };
        self.program.eval_tile(&tile, scratch, &mut [out])
    }

    /// Computes one cheap binary primitive of f16 or bf16. Returns false, without computing anything, for any other launch.
    fn try_run_halves(&self) -> Result<bool> {
        let FlatLaunch { program, inputs, kinds, scalars, out, .. } = *self;
        let [step] = &program.steps().list[..] else { return Ok(false) };
        let Action::Compute(Op::Binary(op)) = step.action else { return Ok(false) };
        let fits = |kind: &Option<OperandKind>| match *kind {
            Some(OperandKind::RowBroadcast(n)) => n >= MIN_HALF_ROW_LEN,
            Some(OperandKind::ColumnBroadcast { .. }) | None => false,
            Some(_) => true,
        };
        let has_loop = is_cheap(op) || op == Binary::Div;
        if !has_loop || !kinds.iter().all(fits) || !kinds.contains(&Some(OperandKind::Contiguous)) {
            return Ok(false);
        }
        let reads: SmallVec<[&Storage; 2]> = inputs.iter().map(|t| &t.storage).collect();
        with_host(&reads, &[&out.storage], |reads, writes| {
            let operand = |value: Value| match value {
                Value::Input(k) => {
                    let elements: &[u16] = &bytemuck::cast_slice(reads[k])[inputs[k].layout.offset..];
                    match kinds[k] {
                        Some(OperandKind::RowBroadcast(n)) => HalfSource::Elements(elements, n),
                        Some(OperandKind::Contiguous) => HalfSource::Elements(elements, usize::MAX),
                        _ => HalfSource::Scalar(match out.dtype {
                            DType::F16 => half::f16::from_bits(elements[0]).to_f32(),
                            _ => half::bf16::from_bits(elements[0]).to_f32(),
                        }),
                    }
                }
                Value::Scalar(k) => HalfSource::Scalar(f32::from_scalar(scalars[k])),
                Value::Const(c) => HalfSource::Scalar(f32::from_f64(c)),
                Value::Register(_) | Value::Output(_) => unreachable!("the one step reads operands"),
            };
            let (a, b) = (operand(step.args[0]), operand(step.args[1]));
            let (count, first) = (out.numel(), out.layout.offset);
            let to = &mut bytemuck::cast_slice_mut(writes[0])[first..first + count];
            let size = job_len(count);
            match count <= size {
                true => compute_halves(op, out.dtype, a, b, 0, to),
                false => parallel::for_each_chunk(to, size, |i, to| compute_halves(op, out.dtype, a, b, i * size, to)),
            }
        })?;
        Ok(true)
    }
}

/// An operand of a launch whose elements are f16 or bf16.
#[derive(Clone, Copy)]
enum HalfSource<'a> {
    /// The elements, which repeat with the period given by the second field.
    Elements(&'a [u16], usize),
    Scalar(f32),
}

/// Computes `to`, whose first element has index `first` in the result. The range is split at the ends of broadcast rows.
fn compute_halves(op: Binary, dtype: DType, a: HalfSource, b: HalfSource, mut first: usize, mut to: &mut [u16]) {
    macro_rules! each {
        ($a:expr, $b:expr, $to:expr, $method:ident) => {{
            function!(F, (x, y): (C, C) => x.$method(y));
            map_halves::<F>(dtype, $a, $b, $to)
        }};
    }
    while !to.is_empty() {
        let left = |source| match source {
            HalfSource::Elements(_, period) => period - first % period,
            HalfSource::Scalar(_) => usize::MAX,
        };
        let n = to.len().min(left(a)).min(left(b));
        let side = |source| match source {
            HalfSource::Elements(elements, period) => HalfOperand::Each(&elements[first % period..][..n]),
            HalfSource::Scalar(x) => HalfOperand::One(x),
        };
        let (now, rest) = to.split_at_mut(n);
        match op {
            Binary::Add => each!(side(a), side(b), now, add),
            Binary::Sub => each!(side(a), side(b), now, sub),
            Binary::Mul => each!(side(a), side(b), now, mul),
            Binary::Div => each!(side(a), side(b), now, div),
            Binary::Max => each!(side(a), side(b), now, max),
            Binary::Min => each!(side(a), side(b), now, min),
            _ => unreachable!("other primitives have no loop over halves"),
        }
        (first, to) = (first + n, rest);
    }
}

/// Computes a bool result from one or two bool tensors with the result's layout. Returns false, without computing anything, for any other
/// formula.
fn try_run_masks(program: &Program, inputs: &[&Tensor], out: &Tensor) -> Result<bool> {
    let alike = |t: &&Tensor| {
        t.dtype == DType::Bool
            && t.layout.same_layout(&out.layout, 1)
            && t.device() == out.device()
            && !t.shares_storage(out)
    };
    if !out.is_contiguous()
        || out.numel() == 0
        || !inputs.iter().all(alike)
        || program.needs_float()
        || program.scalars() + program.seeds() > 0
        || program.divides()
    {
        return Ok(false);
    }
    let (count, to) = (out.numel(), &out.storage);
    let all = |t: &Tensor| t.layout.offset..t.layout.offset + count;
    let fill = |x: &[u8], y: &[u8], write: &mut [u8]| {
        let (step, polynomial) = (job_len(count), polynomial(program, inputs.len()));
        parallel::for_each_chunk(&mut write[all(out)], step, |i, out| {
            let part = i * step..i * step + out.len();
            evaluate(polynomial, &x[part.clone()], &y[part], out);
        });
    };
    match *inputs {
        [x] => with_host_few([&x.storage], to, |[a], write| fill(&a[all(x)], &a[all(x)], write))?,
        [x, y] => with_host_few([&x.storage, &y.storage], to, |[a, b], write| fill(&a[all(x)], &b[all(y)], write))?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Returns the coefficients p0 to p3, each 0 or 1, of the formula written as the polynomial `p0 ^ p1 x ^ p2 y ^ p3 x y`.
fn polynomial(program: &Program, inputs: usize) -> [u8; 4] {
    let columns = [TileIn::Slice(&[0i64, 1, 0, 1]), TileIn::Slice(&[0, 0, 1, 1])];
    let tile = Tile { inputs: &columns[..inputs], scalars: &[], seeds: &[], first: 0, len: 4 };
    let mut values = [0i64; 4];
    program.eval_tile(&tile, &mut Scratch::new(), &mut [&mut values]);
    let [none, x, y, both] = values.map(|value| u8::from(value != 0));
    [none, none ^ x, none ^ y, none ^ x ^ y ^ both]
}

vectorised! {
    /// Evaluates a [`polynomial`] over bool tensors.
    fn evaluate<'a>(_simd: S, polynomial: [u8; 4], x: &'a [u8], y: &'a [u8], out: &'a mut [u8]) {
        let [p0, p1, p2, p3] = polynomial;
        for (out, (a, b)) in out.iter_mut().zip(x.iter().zip(y)) {
            let (a, b) = (u8::from(*a != 0), u8::from(*b != 0));
            *out = p0 ^ (p1 & a) ^ (p2 & b) ^ (p3 & a & b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;
    use crate::Expr;
    use crate::backend::problem::map::Params;
    use crate::ops::elementwise::apply_into;

    fn try_run(
        op: &'static str,
        program: &Program,
        inputs: &[&Tensor],
        scalars: &[Scalar],
        outputs: &[&Tensor],
    ) -> Result<bool> {
        super::try_run(&Formulas { op, inputs, params: Params::from_scalars(scalars), program, outputs })
    }

    /// Computes the formula through the planner: operands in reversed memory order are not accepted by the fast path.
    fn planned(expr: &Expr, inputs: &[&Tensor], out: &Tensor) -> Vec<f32> {
        planned_with(expr, inputs, Params::default(), out)
    }

    fn planned_with(expr: &Expr, inputs: &[&Tensor], params: Params, out: &Tensor) -> Vec<f32> {
        let flipped: Vec<Tensor> = inputs.iter().map(|t| t.flip_view()).collect();
        let flipped: Vec<&Tensor> = flipped.iter().collect();
        let to = out.zeros_like().unwrap().flip_view();
        apply_into("test", &flipped, params, std::slice::from_ref(expr), &[&to]).unwrap();
        to.flip_view().contiguous().unwrap().to_vec().unwrap()
    }

    impl Tensor {
        fn flip_view(&self) -> Tensor {
            let mut layout = self.layout.clone();
            for d in 0..self.rank() {
                layout.offset =
                    layout.offset.wrapping_add_signed(layout.strides[d] * (self.shape().dims()[d] as isize - 1));
                layout.strides[d] = -layout.strides[d];
            }
            self.with_layout(layout)
        }
    }

    #[test]
    fn unplanned_launches_equal_planned_ones() {
        let number = |n: usize, seed: usize| -> Tensor {
            let values: Vec<f32> = (0..n + 1).map(|i| (i * 7919 + seed) as f32 % 201.0 - 100.0).collect();
            Tensor::from_slice(&values, n + 1, Device::Cpu).unwrap().narrow(0, 1, n).unwrap()
        };
        let (x, y) = (Expr::input(0), Expr::input(1));
        for (rows, columns) in [(1, 1), (1, 7), (7, 1), (3, 5), (3, 1367), (10, 1000), (40, 1000), (3000, 17)] {
            let (n, shape) = (rows * columns, [rows, columns]);
            let (full, other) = (number(n, 1).reshape(shape).unwrap(), number(n, 2).reshape(shape).unwrap());
            let (row, one) = (number(columns, 3), number(1, 4));
            let flat_row = row.reshape([1, columns]).unwrap();
            let column = number(rows, 5).reshape([rows, 1]).unwrap();
            let out = full.zeros_like().unwrap();
            let sum = &x - &y;
            for (inputs, flat) in [
                ([&full, &other], true),
                ([&full, &row], true),
                ([&flat_row, &full], true),
                ([&full, &one], true),
                ([&one, &other], true),
                ([&full, &column], true),
                ([&column, &other], true),
                ([&row, &row], rows == 1 || columns == 1),
            ] {
                let got = try_run("test", &Program::shared(std::slice::from_ref(&sum)), &inputs, &[], &[&out]).unwrap();
                assert_eq!(got, flat, "{:?} {:?}", inputs[0].shape(), inputs[1].shape());
                if flat {
                    let right = planned(&sum, &inputs, &out);
                    assert_eq!(out.to_vec::<f32>().unwrap(), right);
                    // The next call runs in the opposite direction.
                    out.fill_(0).unwrap();
                    assert!(
                        try_run("test", &Program::shared(std::slice::from_ref(&sum)), &inputs, &[], &[&out]).unwrap()
                    );
                    assert_eq!(out.to_vec::<f32>().unwrap(), right);
                }
            }
            // Formulas that do not read the operand of the result's shape.
            for (formula, other) in [(&y * &y, &column), (&y * 2.0, &column), (y.max(0.0), &row), (&y * &y, &row)] {
                let inputs = [&full, other];
                let program = Program::shared(std::slice::from_ref(&formula));
                if try_run("test", &program, &inputs, &[], &[&out]).unwrap() {
                    assert_eq!(out.to_vec::<f32>().unwrap(), planned(&formula, &inputs, &out));
                }
            }
            for refused in [x.clone(), &x * 2.0 + &y] {
                assert!(!try_run("test", &Program::new(&[refused]), &[&full, &other], &[], &[&out]).unwrap());
            }
            // In place: the result equals that of a launch on a copy of the overwritten operand, whichever operand (or both) is
            // overwritten.
            let program = Program::shared(std::slice::from_ref(&sum));
            for other in [&other, &row, &one] {
                let copy = full.clone();
                for (inputs, right) in [
                    ([&out, other], planned(&sum, &[&copy, other], &out)),
                    ([other, &out], planned(&sum, &[other, &copy], &out)),
                    ([&out, &out], vec![0.0; n]),
                ] {
                    out.copy_(&full).unwrap();
                    assert!(try_run("test", &program, &inputs, &[], &[&out]).unwrap());
                    assert_eq!(out.to_vec::<f32>().unwrap(), right);
                }
            }
            let long = number(n + 1, 6);
            let (from, to) = (long.narrow(0, 0, n).unwrap(), long.narrow(0, 1, n).unwrap());
            assert!(
                !try_run("test", &program, &[&from, &other.flatten(0, -1).unwrap()], &[], &[&to]).unwrap(),
                "overlapping"
            );
        }
    }

    #[test]
    fn primitives_over_equal_layouts_equal_planned_launches() {
        let number = |n: usize, at: usize, seed: usize| -> Tensor {
            let values =
                (0..n + at).map(|i| if i % 97 == 3 { f32::NAN } else { (i * 7919 + seed) as f32 % 201.0 - 100.0 });
            let values: Vec<f32> = values.collect();
            Tensor::from_slice(&values, n + at, Device::Cpu).unwrap().narrow(0, at, n).unwrap()
        };
        let (x, y, s) = (Expr::input(0), Expr::input(1), Expr::scalar(0));
        let few = job_len(0);
        for n in [1, 2, 15, 16, 17, 97, L1_RESULT_BYTES / 4, L1_RESULT_BYTES / 4 + 1, 5003, few] {
            let (a, b) = (number(n, 1, 1), number(n, 5, 2));
            for expr in [
                &x - &y,
                &y / &x,
                x.max(&y),
                &x * &x,
                x.exp(),
                x.sin(),
                &x * 0.5,
                &s - &x,
                x.max(0.0),
                x.lt(&y),
                x.gelu(),
                x.silu(),
                x.clamp(-1.0, &s),
            ] {
                let inputs: &[&Tensor] = if expr.uses_input(1) { &[&a, &b] } else { &[&a] };
                let scalars = [Scalar::Float(2.5)];
                let program = Program::new(std::slice::from_ref(&expr));
                let alike =
                    SmallPrimitive::try_new(inputs, &scalars, &program, DType::F32).expect("it is of this kind");
                for _ in 0..2 {
                    // The results are the same whether elements are computed in ascending or descending order.
                    let out = a.zeros_like().unwrap();
                    alike.fill(&out).unwrap();
                    let right = Params::from_scalars(&scalars);
                    let bits = |v: Vec<f32>| v.into_iter().map(f32::to_bits).collect::<Vec<u32>>();
                    let planned = planned_with(&expr, inputs, right, &out);
                    assert_eq!(bits(out.to_vec().unwrap()), bits(planned), "{expr:?} {n}");
                }
            }
        }
        let (a, rows) = (number(12, 0, 1), number(12, 0, 2).reshape([3, 4]).unwrap());
        let whole = a.to_dtype(DType::I64).unwrap();
        let long = number(few + 1, 0, 1);
        let refused: [(&[&Tensor], Expr, DType); 9] = [
            (&[&a, &rows], &x + &y, DType::F32),
            (&[&rows.t().unwrap()], x.exp(), DType::F32),
            (&[&a, &a.to_dtype(DType::F64).unwrap()], &x + &y, DType::F32),
            (&[&a, &a], &x + &y, DType::F64),
            (&[&whole, &whole], &x + &y, DType::I64),
            (&[&long], x.exp(), DType::F32),
            (&[&a.narrow(0, 0, 0).unwrap()], x.exp(), DType::F32),
            (&[&a, &a], &x * 2.0 + &y, DType::F32),
            (&[&a], x.clone(), DType::F32),
        ];
        for (inputs, expr, dtype) in &refused {
            let program = Program::new(std::slice::from_ref(expr));
            assert!(
                SmallPrimitive::try_new(inputs, &[], &program, *dtype).is_none(),
                "{expr:?} of {} {dtype}",
                inputs[0].shape()
            );
        }
    }

    #[test]
    fn halves_are_computed_in_f32_and_rounded_once() {
        let number = |n: usize, seed: usize| -> Tensor {
            let value = |i: usize| match (i + seed) % 97 {
                3 => f32::NAN,
                5 => f32::INFINITY,
                _ => (i * 7919 + seed) as f32 % 201.0 * 0.37 - 30.0,
            };
            let values: Vec<f32> = (0..n + 1).map(value).collect();
            Tensor::from_slice(&values, n + 1, Device::Cpu).unwrap().narrow(0, 1, n).unwrap()
        };
        let (x, y, s) = (Expr::input(0), Expr::input(1), Expr::scalar(0));
        let of_two = [&x + &y, &x - &y, &x * &y, &x / &y, x.max(&y), x.min(&y)];
        let of_one = [&x * &s, &s - &x, x.relu(), &x / 3.0];
        for (rows, columns) in [(1, 1), (3, 5), (7, 64), (5, 1367), (40, 1000)] {
            let full = number(rows * columns, 1).reshape([rows, columns]).unwrap();
            let others = [
                number(rows * columns, 2).reshape([rows, columns]).unwrap(),
                number(columns, 3),
                number(1, 4),
                full.shallow_clone(),
            ];
            for dtype in [DType::F16, DType::BF16] {
                let cast = |t: &Tensor| t.to_dtype(dtype).unwrap();
                let half = cast(&full);
                let check = |e: &Expr, inputs: &[&Tensor], flat: bool| {
                    let scalars = [Scalar::Float(0.1)];
                    let out = half.zeros_like().unwrap();
                    let program = Program::shared(std::slice::from_ref(e));
                    let ran = try_run("test", &program, inputs, &scalars, &[&out]).unwrap();
                    assert_eq!(ran, flat, "{e:?} {rows} {columns}");
                    let wide: Vec<Tensor> = inputs.iter().map(|t| t.to_dtype(DType::F32).unwrap()).collect();
                    let wide: Vec<&Tensor> = wide.iter().collect();
                    let right = full.zeros_like().unwrap();
                    let params = Params::from_scalars(&scalars);
                    apply_into("test", &wide, params, std::slice::from_ref(e), &[&right]).unwrap();
                    let bits = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
                    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    assert!(!ran || bits(&out).iter().zip(&bits(&cast(&right))).all(same), "{e:?} {rows} {columns}");
                };
                for other in &others {
                    let flat = !(2..MIN_HALF_ROW_LEN).contains(&other.numel()) || other.numel() == full.numel();
                    let other = cast(other);
                    of_two.iter().for_each(|e| check(e, &[&half, &other], flat));
                    of_two.iter().for_each(|e| check(e, &[&other, &half], flat));
                }
                of_one.iter().for_each(|e| check(e, &[&half], true));
                check(&x.exp(), &[&half], false);
                check(&(&x * &y + 1.0), &[&half, &half], false);
            }
        }
    }

    #[test]
    fn every_truth_table_of_one_or_two_masks() {
        let n = 3 * job_len(0) + 7;
        let mask = |at: usize, k: usize| {
            let values: Vec<bool> = (0..n + at).map(|i| (i * 7919 + k) % 5 < 2).collect();
            Tensor::from_slice(&values, n + at, Device::Cpu).unwrap().narrow(0, at, n).unwrap()
        };
        let (x, y) = (mask(1, 0), mask(6, 3));
        let [a, b] = [&x, &y].map(|t| t.to_vec::<bool>().unwrap());
        type Of = fn(bool, bool) -> bool;
        let operations: [(Result<Tensor>, Of); 9] = [
            (x.logical_and(&y), |a, b| a & b),
            (x.logical_or(&y), |a, b| a | b),
            (x.logical_xor(&y), |a, b| a ^ b),
            (x.logical_not(), |a, _| !a),
            (x.eq(&y), |a, b| a == b),
            (x.ne(&y), |a, b| a != b),
            (x.lt(&y), |a, b| !a & b),
            (x.ge(&y), |a, b| a | !b),
            (x.maximum(&y), |a, b| a | b),
        ];
        for (k, (got, of)) in operations.into_iter().enumerate() {
            let want: Vec<bool> = a.iter().zip(&b).map(|(&a, &b)| of(a, b)).collect();
            assert_eq!(got.unwrap().to_vec::<bool>().unwrap(), want, "operation {k}");
        }
        // A formula of three bool inputs is not computed by `try_run_masks`.
        let chosen = x.where_cond(&y, &x.logical_not().unwrap()).unwrap().to_vec::<bool>().unwrap();
        assert!(chosen.iter().zip(a.iter().zip(&b)).all(|(&got, (&a, &b))| got == if a { b } else { !a }));
        let all = Tensor::map(&[&x, &y, &x], |m| &m[0] * &m[1] * &m[2]).unwrap().to_vec::<bool>().unwrap();
        assert!(all.iter().zip(a.iter().zip(&b)).all(|(&got, (&a, &b))| got == (a & b)));
    }
}
