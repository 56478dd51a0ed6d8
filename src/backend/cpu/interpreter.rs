//! Interprets formulas on the CPU: runs a program over a tile of elements, one primitive at a time.
//!
//! A tile's registers stay in the L1 cache, and the loop for each primitive is compiled for the processor's vectors. Inputs are slices
//! that are read in place, or one scalar for the whole tile. Subexpressions of scalars only are computed once for each tile.

#[cfg(test)]
mod tests;

use std::ops::Range;

use crate::backend::cpu::dispatch::{Function, function, vectorised};
use crate::backend::cpu::scalar::{Number, VectorFunction};
use crate::backend::cpu::steps::{Action, ProductSum, Step, Value};
use crate::device::cpu::streaming::{LINE, Streaming, should_stream};
use crate::expr::philox::{Bits, Normal, Seed, Uniform};
use crate::expr::program::Program;
use crate::expr::{Binary, Leaf, Op, Unary};
use crate::{Compute, Scalar};

/// The number of elements in a tile: 4 KiB of f32, so that two operands and a result fit in the L1 cache.
pub(crate) const TILE: usize = 1024;

/// One operand of a tile.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TileIn<'a, C> {
    /// A slice with one element for each element of the tile.
    Slice(&'a [C]),
    /// One value for the whole tile.
    Scalar(C),
    /// A row that repeats, and the index within the row of the tile's first element. Only for a binary primitive whose other operand is a slice.
    Rows(&'a [C], usize),
    /// The elements of a column for the tile's rows, `step` apart. A row has `row` elements, and the tile begins with element `at` of its
    /// first row. Only for a binary primitive whose other operand is a slice.
    Columns { column: &'a [C], step: usize, row: usize, at: usize },
    /// The old contents of the result with this index. Requires [`Program::can_overwrite_input`], and that no result is stored past the
    /// cache.
    Output(usize),
}

/// The operands for running a program over one tile.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile<'a, C> {
    /// One operand for each input; slices have at least `len` elements.
    pub(crate) inputs: &'a [TileIn<'a, C>],
    pub(crate) scalars: &'a [Scalar],
    pub(crate) seeds: &'a [Seed],
    /// The index of the tile's first element in the launch. Random numbers depend on it.
    pub(crate) first: u64,
    /// The number of elements; at most [`TILE`] if the program has registers.
    pub(crate) len: usize,
}

/// The registers of the interpreter, reused from tile to tile.
pub(crate) struct Scratch<C> {
    /// Whether to write results with non-temporal stores, past the cache. Requires [`Program::can_bypass_cache`].
    pub(crate) streamed: bool,
    /// The program's registers, and one more register for copies of results that a step both reads and writes.
    registers: Vec<Register<C>>,
}

/// One intermediate value of a tile.
struct Register<C> {
    /// The elements, stored in the [aligned](aligned_range) part of the buffer.
    data: Vec<C>,
    /// The common value if all elements are known to be equal (then `data` is unused), else `None`.
    uniform: Option<C>,
}

impl<C: Number> Scratch<C> {
    pub(crate) fn new() -> Scratch<C> {
        Scratch { streamed: false, registers: Vec::new() }
    }

    /// Allocates registers until there are at least `registers`.
    fn reserve_registers(&mut self, registers: usize) {
        while self.registers.len() < registers {
            self.registers.push(Register { data: Vec::new(), uniform: None });
        }
    }

    /// Takes the buffer out of a register, grown to hold `len` elements.
    fn take_register(&mut self, register: usize, len: usize) -> Vec<C> {
        let mut data = std::mem::take(&mut self.registers[register].data);
        data.resize(data.len().max(len + MAX_ALIGN_SKIP), C::from_f64(0.0));
        data
    }
}

/// The maximum number of elements that alignment skips at the start of a register.
pub(crate) const MAX_ALIGN_SKIP: usize = 16;

/// Returns the first range of `len` elements that begins at a cache line, so that no vector straddles two cache lines.
pub(crate) fn aligned_range<C>(data: &[C], len: usize) -> Range<usize> {
    let first = data.as_ptr().align_offset(64).min(MAX_ALIGN_SKIP);
    first..first + len
}

impl Program {
    /// True if results can be stored past the cache, by non-temporal stores, as they are computed.
    pub(crate) fn can_bypass_cache(&self) -> bool {
        let cheap = |action: &Action| matches!(action, Action::Compute(Op::Binary(op)) if is_cheap(*op));
        !self.has_registers() && self.steps().list.iter().all(|step| cheap(&step.action))
    }

    /// True if a result of `bytes` bytes should be stored past the cache; `all` is the number of bytes of the result and the operands
    /// together. False for programs with functions: their computation hides the memory reads that ordinary stores cause.
    pub(crate) fn should_bypass_cache(&self, bytes: usize, all: usize) -> bool {
        !self.calls_functions() && should_stream(bytes, all)
    }

    /// True if the step reads the old contents of its result and cannot overwrite them in place.
    fn needs_copy<C: Number>(&self, step: &Step, inputs: &[TileIn<'_, C>]) -> bool {
        let is_dst = |arg: &&Value| match **arg {
            Value::Input(k) => matches!(inputs[k], TileIn::Output(j) if step.dst == Value::Output(j)),
            _ => false,
        };
        match (step.action, step.args.iter().filter(is_dst).count()) {
            (_, 0) => false,
            (Action::Compute(Op::Binary(op)), 1) => !is_cheap(op),
            (Action::MultiplyAdd(..), 1) => false,
            _ => true,
        }
    }

    /// Runs the program over a tile. The `j`-th result is written to `outs[j]`, of length `len`. Returns true if an integer was divided
    /// by zero; such elements are 0. If `C` is i64, the program must not need floats.
    pub(crate) fn eval_tile<C: Number>(
        &self,
        tile: &Tile<'_, C>,
        scratch: &mut Scratch<C>,
        outs: &mut [&mut [C]],
    ) -> bool {
        debug_assert!(C::COMPUTE != Compute::I64 || !self.needs_float());
        debug_assert!((tile.len <= TILE || !self.has_registers()) && outs.len() == self.outputs());
        let mut divided_by_zero = false;
        let in_place = tile.inputs.iter().any(|input| matches!(input, TileIn::Output(_)));
        scratch.reserve_registers(self.steps().registers);
        for step in &self.steps().list {
            // The destination is moved out, so that the operands can be borrowed at the same time.
            let (mut register, output): (Vec<C>, &mut [C]) = match step.dst {
                Value::Register(r) => (scratch.take_register(r, tile.len), &mut []),
                Value::Output(j) => (Vec::new(), std::mem::take(&mut outs[j])),
                _ => unreachable!("steps write registers and outputs"),
            };
            let dst = match step.dst {
                Value::Output(_) => &mut output[..tile.len],
                _ => {
                    let held = aligned_range(&register, tile.len);
                    &mut register[held]
                }
            };
            let copied = in_place && self.needs_copy(step, tile.inputs);
            if copied {
                scratch.reserve_registers(self.steps().registers + 1);
                let mut data = scratch.take_register(self.steps().registers, tile.len);
                let held = aligned_range(&data, tile.len);
                data[held].copy_from_slice(dst);
                scratch.registers[self.steps().registers].data = data;
            }

            let registers = &scratch.registers;
            let held = |r: usize| &registers[r].data[aligned_range(&registers[r].data, tile.len)];
            let operand = |i: usize| match step.args[i] {
                Value::Input(k) => match tile.inputs[k] {
                    TileIn::Slice(s) => TileIn::Slice(&s[..tile.len]),
                    TileIn::Output(j) if step.dst != Value::Output(j) => TileIn::Slice(&outs[j][..tile.len]),
                    TileIn::Output(_) if copied => TileIn::Slice(held(self.steps().registers)),
                    other => other,
                },
                Value::Scalar(k) => TileIn::Scalar(C::from_scalar(tile.scalars[k])),
                Value::Const(c) => TileIn::Scalar(C::from_f64(c)),
                Value::Register(r) => match registers[r].uniform {
                    Some(x) => TileIn::Scalar(x),
                    None => TileIn::Slice(held(r)),
                },
                Value::Output(j) => TileIn::Slice(&outs[j][..tile.len]),
            };
            if let Action::Compute(Op::Binary(op)) = step.action {
                divided_by_zero |= op.divides() && C::COMPUTE == Compute::I64 && contains_zero(operand(1));
            }
            let uniform = match step.action {
                Action::Compute(Op::Leaf(leaf)) => random(leaf, tile.seeds, tile.first, dst),
                action => compute(action, operand, scratch.streamed, dst),
            };
            match step.dst {
                Value::Output(j) => {
                    if let Some(x) = uniform {
                        dst.fill(x);
                    }
                    outs[j] = output;
                }
                Value::Register(r) => scratch.registers[r] = Register { data: register, uniform },
                _ => {}
            }
        }
        divided_by_zero
    }
}

/// True for the primitives that can store results past the cache, or overwrite an operand.
pub(crate) fn is_cheap(op: Binary) -> bool {
    matches!(op, Binary::Add | Binary::Sub | Binary::Mul | Binary::Max | Binary::Min)
}

fn contains_zero<C: Number>(x: TileIn<'_, C>) -> bool {
    match x {
        TileIn::Slice(s) | TileIn::Rows(s, _) => s.iter().any(|&x| !x.is_true()),
        TileIn::Columns { column, step, .. } => column.iter().step_by(step).any(|&x| !x.is_true()),
        TileIn::Scalar(x) => !x.is_true(),
        TileIn::Output(_) => unreachable!("what is divided by is copied"),
    }
}

// Each of the following functions either fills `dst` and returns `None`, or returns the one value that all elements have.

/// Computes a step that has operands.
#[inline]
pub(crate) fn compute<'a, C: Number>(
    action: Action,
    operand: impl Fn(usize) -> TileIn<'a, C>,
    streamed: bool,
    dst: &mut [C],
) -> Option<C> {
    match action {
        Action::Copy => copy(operand(0), dst),
        Action::Compute(Op::Unary(op)) => unary(op, operand(0), dst),
        Action::Compute(Op::Binary(op)) => binary(op, operand(0), operand(1), streamed, dst),
        Action::Compute(Op::Select) => select(operand(0), operand(1), operand(2), dst),
        Action::Compute(Op::Leaf(_)) => unreachable!("leaves are operands or random numbers"),
        Action::MultiplyAdd(sum, numbers) => {
            let number = |k: usize| match numbers[k].map(|i| operand(3 + i)) {
                Some(TileIn::Scalar(x)) => x,
                Some(_) => unreachable!("these operands are numbers"),
                None => C::from_i32(1),
            };
            multiply_add(sum, [operand(0), operand(1), operand(2)], [number(0), number(1)], dst)
        }
        Action::Function(function) => vector_function(function, operand(0), dst),
        Action::Clamp => clamp(operand(0), operand(1), operand(2), dst),
        Action::RootQuotient(scaled) => {
            let s = if scaled { operand(3) } else { TileIn::Scalar(C::from_i32(1)) };
            root_quotient([operand(0), operand(1)], [operand(2), s], dst)
        }
    }
}

fn copy<C: Number>(a: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    match a {
        TileIn::Slice(a) => dst.copy_from_slice(a),
        TileIn::Scalar(x) => return Some(x),
        _ => unreachable!("operands of a primitive of two"),
    }
    None
}

fn random<C: Number>(leaf: Leaf, seeds: &[Seed], first: u64, dst: &mut [C]) -> Option<C> {
    match leaf {
        Leaf::Uniform(i) => seeds[i].fill::<Uniform, C>(first, dst, C::from_f32),
        Leaf::Normal(i) => seeds[i].fill::<Normal, C>(first, dst, C::from_f32),
        Leaf::Bits(i) => seeds[i].fill::<Bits, C>(first, dst, C::from_u32),
        _ => unreachable!("other leaves are operands"),
    }
    None
}

vectorised! {
    /// Fills `dst` with the function's result for each item of `args`.
    fn fill<'a, C: Number, I: Iterator, F: Function<I::Item, C>>(_simd: S, dst: &'a mut [C], args: I) {
        for (d, x) in dst.iter_mut().zip(args) {
            *d = F::call(x);
        }
    }
}

vectorised! {
    /// Replaces each element of `dst` by the function's result for the element and an item of `others`.
    fn overwrite<'a, C: Number, I: Iterator, F: Function<(C, I::Item), C>>(_simd: S, dst: &'a mut [C], others: I) {
        for (d, x) in dst.iter_mut().zip(others) {
            *d = F::call((*d, x));
        }
    }
}

vectorised! {
    /// Fills `dst` with the function's results for the elements of `each` and of a row that repeats, beginning with the row's element
    /// `at`.
    fn fill_from_rows<'a, C: Number, F: Function<(C, C), C>>(
        _simd: S, dst: &'a mut [C], each: &'a [C], row: &'a [C], at: usize
    ) {
        let (mut dst, mut each, mut rest) = (dst, each, &row[at..]);
        while !dst.is_empty() {
            let n = rest.len().min(dst.len());
            let (now, then) = dst.split_at_mut(n);
            for ((d, &x), &y) in now.iter_mut().zip(each).zip(rest) {
                *d = F::call((x, y));
            }
            (dst, each, rest) = (then, &each[n..], row);
        }
    }
}

vectorised! {
    /// Fills `dst` with the function's results for the elements of `each` and of a column: see [`TileIn::Columns`].
    fn fill_from_columns<'a, C: Number, F: Function<(C, C), C>>(
        _simd: S, dst: &'a mut [C], each: &'a [C], column: &'a [C], step: usize, row: usize, at: usize
    ) {
        let (mut dst, mut each, mut left) = (dst, each, row - at);
        for &y in column.iter().step_by(step) {
            let n = left.min(dst.len());
            let (now, then) = dst.split_at_mut(n);
            now.iter_mut().zip(each).for_each(|(d, &x)| *d = F::call((x, y)));
            (dst, each, left) = (then, &each[n..], row);
        }
    }
}

/// An operand of [`fill_past_cache`], read one element or one cache line at a time.
trait ElementSource<C> {
    fn next_element(&mut self) -> C;
    fn next_line(&mut self) -> [C; LINE];
}

/// A repeating row, and the rest of the current repetition. A slice that is as long as the result is a row of one repetition.
struct RowSource<'a, C>(&'a [C], &'a [C]);
/// One value, repeated.
struct ScalarSource<C>([C; LINE]);

impl<C: Number> ElementSource<C> for RowSource<'_, C> {
    #[inline(always)]
    fn next_element(&mut self) -> C {
        if self.1.is_empty() {
            self.1 = self.0;
        }
        let one = self.1[0];
        self.1 = &self.1[1..];
        one
    }

    #[inline(always)]
    fn next_line(&mut self) -> [C; LINE] {
        if let Some((line, rest)) = self.1.split_first_chunk() {
            self.1 = rest;
            return *line;
        }
        let mut line = [self.next_element(); LINE];
        for x in &mut line[1..] {
            *x = self.next_element();
        }
        line
    }
}

impl<C: Number> ElementSource<C> for ScalarSource<C> {
    #[inline(always)]
    fn next_element(&mut self) -> C {
        self.0[0]
    }

    #[inline(always)]
    fn next_line(&mut self) -> [C; LINE] {
        self.0
    }
}

vectorised! {
    /// Fills `dst` with the function's results for the elements of both operands, by non-temporal stores past the cache. Cheap formulas
    /// are limited by memory bandwidth; a buffer before the store would take a quarter of the time.
    fn fill_past_cache<'a, C: Number, B: ElementSource<C>, F: Function<(C, C), C>>(
        _simd: S, dst: &'a mut [C], a: RowSource<'a, C>, b: B
    ) {
        let ((mut a, mut b), streaming) = ((a, b), Streaming::new());
        // The elements before the first cache line are stored normally. Elements are aligned to their size, so a cache line starts at an
        // element.
        let head = dst.as_ptr().align_offset(64).min(dst.len());
        let (head, lines) = dst.split_at_mut(head);
        let (lines, tail) = lines.as_chunks_mut::<LINE>();
        for d in head {
            *d = F::call((a.next_element(), b.next_element()));
        }
        for to in lines {
            let (a, b) = (a.next_line(), b.next_line());
            streaming.line(to, std::array::from_fn(|i| F::call((a[i], b[i]))));
        }
        for d in tail {
            *d = F::call((a.next_element(), b.next_element()));
        }
    }
}

vectorised! {
    /// Fills `dst` with the results of a function that has its own vector loop.
    fn fill_with_function<'a, C: Number>(_simd: S, function: VectorFunction, dst: &'a mut [C], from: &'a [C]) {
        C::apply_function(function, dst, from);
    }
}

fn vector_function<C: Number>(function: VectorFunction, a: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    match a {
        TileIn::Slice(from) => {
            fill_with_function(function, dst, from);
            None
        }
        TileIn::Scalar(x) => {
            let mut one = [x];
            C::apply_function(function, &mut one, &[x]);
            Some(one[0])
        }
        _ => unreachable!("operands of a primitive of two"),
    }
}

#[inline(always)]
fn map_unary<C: Number, F: Function<C, C>>(a: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    match a {
        TileIn::Slice(a) => fill::<C, _, F>(dst, a.iter().copied()),
        TileIn::Scalar(x) => return Some(F::call(x)),
        _ => unreachable!("operands of a primitive of two"),
    }
    None
}

fn unary<C: Number>(op: Unary, a: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    macro_rules! each {
        ($method:ident) => {{
            function!(F, x: C => x.$method());
            map_unary::<C, F>(a, dst)
        }};
    }
    match op {
        Unary::Neg => each!(neg),
        Unary::Abs => each!(abs),
        Unary::Floor => each!(floor),
        Unary::Ceil => each!(ceil),
        Unary::Round => each!(round),
        Unary::Trunc => each!(trunc),
        Unary::Sqrt => each!(sqrt),
        Unary::Exp => vector_function(VectorFunction::Exp, a, dst),
        Unary::Log => each!(log),
        Unary::Log2 => each!(log2),
        Unary::Log10 => each!(log10),
        Unary::Expm1 => each!(expm1),
        Unary::Log1p => each!(log1p),
        Unary::Sin => fix_large_angles(each!(sin), a, dst, f64::sin),
        Unary::Cos => fix_large_angles(each!(cos), a, dst, f64::cos),
        Unary::Tanh => vector_function(VectorFunction::Tanh, a, dst),
        Unary::Erf => vector_function(VectorFunction::Erf, a, dst),
        Unary::Erfc => each!(erfc),
        Unary::Lgamma => each!(lgamma),
        Unary::Atan => each!(atan),
        Unary::Sigmoid => vector_function(VectorFunction::Sigmoid, a, dst),
    }
}

/// Recomputes `sin` or `cos` in f64 for arguments that are too large for the vectorised functions.
fn fix_large_angles<C: Number>(made: Option<C>, a: TileIn<'_, C>, dst: &mut [C], exact: fn(f64) -> f64) -> Option<C> {
    let exactly = |x: C| C::from_f64(exact(x.to_f64()));
    match a {
        TileIn::Scalar(x) if x.is_huge_angle() => return Some(exactly(x)),
        TileIn::Slice(a) if a.iter().any(|x| x.is_huge_angle()) => {
            dst.iter_mut().zip(a).filter(|(_, x)| x.is_huge_angle()).for_each(|(d, &x)| *d = exactly(x));
        }
        _ => {}
    }
    made
}

/// Computes a function of two operands; `Swapped` is the function with its arguments swapped.
#[inline(always)]
fn map_binary<C: Number, F: Function<(C, C), C>, Swapped: Function<(C, C), C>>(
    a: TileIn<'_, C>,
    b: TileIn<'_, C>,
    dst: &mut [C],
) -> Option<C> {
    use TileIn::{Columns, Rows, Scalar, Slice};
    match (a, b) {
        (Slice(a), Slice(b)) => fill::<C, _, F>(dst, a.iter().copied().zip(b.iter().copied())),
        (Slice(a), Scalar(y)) => fill::<C, _, F>(dst, a.iter().map(|&x| (x, y))),
        (Scalar(x), Slice(b)) => fill::<C, _, F>(dst, b.iter().map(|&y| (x, y))),
        (Scalar(x), Scalar(y)) => return Some(F::call((x, y))),
        (Slice(each), Rows(row, at)) => fill_from_rows::<C, F>(dst, each, row, at),
        (Rows(row, at), Slice(each)) => fill_from_rows::<C, Swapped>(dst, each, row, at),
        (Slice(each), Columns { column, step, row, at }) => fill_from_columns::<C, F>(dst, each, column, step, row, at),
        (Columns { column, step, row, at }, Slice(each)) => {
            fill_from_columns::<C, Swapped>(dst, each, column, step, row, at)
        }
        _ => unreachable!("rows go with a slice"),
    }
    None
}

/// Computes a function that [`is_cheap`], like [`map_binary`]. The function may also overwrite an operand, or store past the cache if
/// `streamed`.
#[inline(always)]
fn map_cheap<C: Number, F: Function<(C, C), C>, Swapped: Function<(C, C), C>>(
    a: TileIn<'_, C>,
    b: TileIn<'_, C>,
    streamed: bool,
    dst: &mut [C],
) -> Option<C> {
    use TileIn::{Output, Rows, Scalar, Slice};
    let count = dst.len();
    let rows = |row, at: usize| RowSource(row, &row[at..]);
    match (a, b) {
        (Output(_), Slice(s)) => overwrite::<C, _, F>(dst, s.iter().copied()),
        (Slice(s), Output(_)) => overwrite::<C, _, Swapped>(dst, s.iter().copied()),
        (Output(_), Scalar(x)) => overwrite::<C, _, F>(dst, std::iter::repeat_n(x, count)),
        (Scalar(x), Output(_)) => overwrite::<C, _, Swapped>(dst, std::iter::repeat_n(x, count)),
        _ if !streamed => return map_binary::<C, F, Swapped>(a, b, dst),
        (Slice(a), Slice(b)) => fill_past_cache::<C, _, F>(dst, rows(a, 0), rows(b, 0)),
        (Slice(a), Scalar(y)) => fill_past_cache::<C, _, F>(dst, rows(a, 0), ScalarSource([y; LINE])),
        (Scalar(x), Slice(b)) => fill_past_cache::<C, _, Swapped>(dst, rows(b, 0), ScalarSource([x; LINE])),
        (Scalar(x), Scalar(y)) => return Some(F::call((x, y))),
        (Slice(a), Rows(row, at)) => fill_past_cache::<C, _, F>(dst, rows(a, 0), rows(row, at)),
        (Rows(row, at), Slice(b)) => fill_past_cache::<C, _, F>(dst, rows(row, at), rows(b, 0)),
        _ => unreachable!("rows go with a slice"),
    }
    None
}

/// Computes a primitive of two operands. Only a primitive that [`is_cheap`] may be `streamed`, or have an operand that is [`TileIn::Output`].
fn binary<C: Number>(op: Binary, a: TileIn<'_, C>, b: TileIn<'_, C>, streamed: bool, dst: &mut [C]) -> Option<C> {
    macro_rules! each {
        ($map:ident($x:ident, $y:ident => $e:expr) $($streamed:ident)?) => {{
            function!(F, ($x, $y): (C, C) => $e);
            function!(Swapped, ($y, $x): (C, C) => $e);
            $map::<C, F, Swapped>(a, b, $($streamed,)? dst)
        }};
        ($x:ident, $y:ident => $e:expr) => { each!(map_binary($x, $y => $e)) };
    }
    macro_rules! cheap {
        ($method:ident) => { each!(map_cheap(x, y => x.$method(y)) streamed) };
    }
    // As in PyTorch's `pow`: powers such as squares are computed as products, which are much faster and may differ from `pow` in the last
    // bit.
    if let (Binary::Pow, TileIn::Scalar(y)) = (op, b)
        && y == C::from_i32(2)
        && !matches!(a, TileIn::Rows(..) | TileIn::Columns { .. })
    {
        return binary(Binary::Mul, a, a, streamed, dst);
    }
    match op {
        Binary::Add => cheap!(add),
        Binary::Sub => cheap!(sub),
        Binary::Mul => cheap!(mul),
        Binary::Max => cheap!(max),
        Binary::Min => cheap!(min),
        Binary::Div => each!(x, y => x.div(y)),
        Binary::Rem => each!(x, y => x.rem(y)),
        Binary::Pow => each!(x, y => x.pow(y)),
        Binary::Lt => each!(x, y => C::from_bool(x < y)),
        Binary::Le => each!(x, y => C::from_bool(x <= y)),
        Binary::Eq => each!(x, y => C::from_bool(x == y)),
        Binary::Copysign => each!(x, y => x.copysign(y)),
        Binary::And => each!(x, y => x.and(y)),
        Binary::Or => each!(x, y => x.or(y)),
        Binary::Xor => each!(x, y => x.xor(y)),
        Binary::Shl => each!(x, y => x.shl(y)),
        Binary::Shr => each!(x, y => x.shr(y)),
        Binary::Gcd => each!(x, y => x.gcd(y)),
    }
}

fn select<C: Number>(c: TileIn<'_, C>, a: TileIn<'_, C>, b: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    use TileIn::{Scalar, Slice};
    function!(F, (c, x, y): (C, C, C) => if c.is_true() { x } else { y });
    let c = match c {
        Slice(c) => c.iter().copied(),
        Scalar(c) => return copy(if c.is_true() { a } else { b }, dst),
        _ => unreachable!("operands of a primitive of two"),
    };
    match (a, b) {
        (Slice(a), Slice(b)) => {
            fill::<C, _, F>(dst, c.zip(a.iter().copied()).zip(b.iter().copied()).map(|((c, x), y)| (c, x, y)))
        }
        (Slice(a), Scalar(y)) => fill::<C, _, F>(dst, c.zip(a.iter().copied()).map(|(c, x)| (c, x, y))),
        (Scalar(x), Slice(b)) => fill::<C, _, F>(dst, c.zip(b.iter().copied()).map(|(c, y)| (c, x, y))),
        (Scalar(x), Scalar(y)) => fill::<C, _, F>(dst, c.map(|c| (c, x, y))),
        _ => unreachable!("operands of a primitive of two"),
    }
    None
}

fn clamp<C: Number>(x: TileIn<'_, C>, low: TileIn<'_, C>, high: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    function!(F, (x, low, high): (C, C, C) => {
        let raised = if x < low { low } else { x };
        if high < raised { high } else { raised }
    });
    let (TileIn::Scalar(low), TileIn::Scalar(high)) = (low, high) else { unreachable!("the bounds are numbers") };
    match x {
        TileIn::Slice(x) => fill::<C, _, F>(dst, x.iter().map(|&x| (x, low, high))),
        TileIn::Scalar(x) => return Some(F::call((x, low, high))),
        _ => unreachable!("operands of a primitive of two"),
    }
    None
}

/// Computes [`Action::RootQuotient`], whose roundings are those of separate passes.
fn root_quotient<C: Number>([x, y]: [TileIn<'_, C>; 2], numbers: [TileIn<'_, C>; 2], dst: &mut [C]) -> Option<C> {
    use TileIn::{Scalar, Slice};
    function!(F, (x, y, e, s): (C, C, C, C) => x.div(y.sqrt().mul(s).add(e)));
    let [Scalar(e), Scalar(s)] = numbers else { unreachable!("these operands are numbers") };
    match (x, y) {
        (Slice(x), Slice(y)) => fill::<C, _, F>(dst, x.iter().zip(y).map(|(x, y)| (*x, *y, e, s))),
        (Slice(x), Scalar(y)) => fill::<C, _, F>(dst, x.iter().map(|x| (*x, y, e, s))),
        (Scalar(x), Slice(y)) => fill::<C, _, F>(dst, y.iter().map(|y| (x, *y, e, s))),
        (Scalar(x), Scalar(y)) => return Some(F::call((x, y, e, s))),
        _ => unreachable!("operands of a primitive of two"),
    }
    None
}

/// Computes `(x s) y` and `z t`, of factors x and y, a summand z and numbers s and t, and their sum, in one pass. Each is rounded, as in
/// several passes. At most one operand is [`TileIn::Output`], the old contents of `dst`.
fn multiply_add<C: Number>(sum: ProductSum, operands: [TileIn<'_, C>; 3], [s, t]: [C; 2], dst: &mut [C]) -> Option<C> {
    use TileIn::{Output, Scalar, Slice};
    // The factors commute, so they are ordered: a number becomes the second factor, and an overwritten operand the first.
    // The numbers of both factors and of the summand are reordered with them.
    let one = C::from_i32(1);
    let ([a, b, c], n) = match operands {
        [a @ Scalar(_), b @ (Slice(_) | Output(_)), c] | [a @ Slice(_), b @ Output(_), c] => ([b, a, c], [one, s, t]),
        _ => (operands, [s, one, t]),
    };
    macro_rules! each {
        ($x:ident, $y:ident, $z:ident, $n:ident => $e:expr) => {{
            function!(F, ($x, $y, $z, $n): (C, C, C, [C; 3]) => $e);
            // The result overwrites the first factor, or the summand.
            function!(OverFactor, (x, (y, z, n)): (C, (C, C, [C; 3])) => F::call((x, y, z, n)));
            function!(OverSummand, (z, (x, y, n)): (C, (C, C, [C; 3])) => F::call((x, y, z, n)));
            let count = dst.len();
            match (a, b, c) {
                (Slice(a), Slice(b), Slice(c)) => {
                    fill::<C, _, F>(dst, a.iter().zip(b).zip(c).map(|((x, y), z)| (*x, *y, *z, n)));
                }
                (Slice(a), Scalar(y), Slice(c)) => {
                    fill::<C, _, F>(dst, a.iter().zip(c).map(|(x, z)| (*x, y, *z, n)));
                }
                (Slice(a), Slice(b), Scalar(z)) => {
                    fill::<C, _, F>(dst, a.iter().zip(b).map(|(x, y)| (*x, *y, z, n)));
                }
                (Slice(a), Scalar(y), Scalar(z)) => fill::<C, _, F>(dst, a.iter().map(|x| (*x, y, z, n))),
                (Slice(a), Slice(b), Output(_)) => {
                    overwrite::<C, _, OverSummand>(dst, a.iter().zip(b).map(|(x, y)| (*x, *y, n)));
                }
                (Slice(a), Scalar(y), Output(_)) => {
                    overwrite::<C, _, OverSummand>(dst, a.iter().map(|x| (*x, y, n)));
                }
                (Output(_), Scalar(y), Slice(c)) => {
                    overwrite::<C, _, OverFactor>(dst, c.iter().map(|z| (y, *z, n)));
                }
                (Output(_), Slice(b), Slice(c)) => {
                    overwrite::<C, _, OverFactor>(dst, b.iter().zip(c).map(|(y, z)| (*y, *z, n)));
                }
                (Output(_), Slice(b), Scalar(z)) => {
                    overwrite::<C, _, OverFactor>(dst, b.iter().map(|y| (*y, z, n)));
                }
                (Output(_), Scalar(y), Scalar(z)) => {
                    overwrite::<C, _, OverFactor>(dst, std::iter::repeat_n((y, z, n), count));
                }
                (Scalar(x), Scalar(y), Slice(c)) => fill::<C, _, F>(dst, c.iter().map(|z| (x, y, *z, n))),
                (Scalar(x), Scalar(y), Output(_)) => {
                    overwrite::<C, _, OverSummand>(dst, std::iter::repeat_n((x, y, n), count));
                }
                (Scalar(x), Scalar(y), Scalar(z)) => return Some(F::call((x, y, z, n))),
                _ => unreachable!("operands of a primitive of two, or two overwritten operands"),
            }
            None
        }};
    }
    match (sum, s == one && t == one) {
        (ProductSum::Add, true) => each!(x, y, z, _n => x.mul(y).add(z)),
        (ProductSum::Sub, true) => each!(x, y, z, _n => x.mul(y).sub(z)),
        (ProductSum::SubFrom, true) => each!(x, y, z, _n => z.sub(x.mul(y))),
        (ProductSum::Add, false) => each!(x, y, z, n => x.mul(n[0]).mul(y.mul(n[1])).add(z.mul(n[2]))),
        (ProductSum::Sub, false) => each!(x, y, z, n => x.mul(n[0]).mul(y.mul(n[1])).sub(z.mul(n[2]))),
        (ProductSum::SubFrom, false) => each!(x, y, z, n => z.mul(n[2]).sub(x.mul(n[0]).mul(y.mul(n[1])))),
    }
}
