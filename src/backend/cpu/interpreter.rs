//! Interprets formulas on the CPU: runs a program over a tile of elements, one primitive at a time.
//!
//! A tile's registers stay in the L1 cache, and the loop for each primitive is compiled for the processor's vectors. Inputs are slices
//! that are read in place, or one scalar for the whole tile. Subexpressions of scalars only are computed once for each tile.

#[cfg(test)]
mod tests;

use std::marker::PhantomData;
use std::ops::Range;

use pulp::{Arch, Simd, WithSimd};

use crate::backend::cpu::in_place::{binary_in_place, is_cheap};
use crate::backend::cpu::multiply_add::multiply_add;
use crate::backend::cpu::scalar::{Number, VectorFunction};
use crate::backend::cpu::steps::Action;
use crate::backend::cpu::steps::Step;
use crate::backend::cpu::steps::Value;
use crate::backend::cpu::vectorised::{Function, function};
use crate::backend::cpu::{fused_functions, nontemporal};
use crate::device::cpu::streaming;
use crate::expr::philox::{Bits, Normal, Seed, Uniform};
use crate::expr::program::Program;
use crate::expr::{Binary, Leaf, Op, Unary};
use crate::{Compute, Scalar};

/// The number of elements in a tile: 4 KiB of f32, so that two operands and a result fit in the L1 cache.
pub(crate) const TILE: usize = 1024;

/// One operand of a tile.
#[derive(Debug, Clone, Copy)]
pub(crate) enum TileIn<'a, C> {
    /// One element for each element of the tile.
    Slice(&'a [C]),
    /// One value for the whole tile.
    Scalar(C),
    /// A row that repeats, beginning at this element of the row. Only for a binary primitive whose other operand is a slice.
    Rows(&'a [C], usize),
    /// The old contents of this result. Requires [`Program::can_overwrite_input`], and that no result is stored past the cache.
    Output(usize),
}

/// The operands of one run of a program.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tile<'a, C> {
    /// One operand for each input; slices have at least `len` elements.
    pub(crate) inputs: &'a [TileIn<'a, C>],
    pub(crate) scalars: &'a [Scalar],
    pub(crate) seeds: &'a [Seed],
    /// The index of the tile's first element, on which random numbers depend.
    pub(crate) first: u64,
    /// At most [`TILE`] if the program has registers.
    pub(crate) len: usize,
}

/// The registers of the interpreter, reused from tile to tile.
pub(crate) struct Scratch<C> {
    arch: Arch,
    /// Whether to store results past the cache. Requires [`Program::can_bypass_cache`].
    pub(crate) streamed: bool,
    /// The program's registers, and one more for copies of results that a step both reads and writes.
    registers: Vec<Register<C>>,
}

/// One intermediate value of a tile.
struct Register<C> {
    /// The elements, stored in the [aligned](aligned_range) part of the buffer.
    data: Vec<C>,
    /// The value of all elements, if they are known to be equal; `data` is then unused.
    uniform: Option<C>,
}

impl<C: Number> Scratch<C> {
    pub(crate) fn new() -> Scratch<C> {
        Scratch { arch: Arch::new(), streamed: false, registers: Vec::new() }
    }

    /// Allocates registers up to this number.
    fn reserve_registers(&mut self, registers: usize) {
        while self.registers.len() < registers {
            self.registers.push(Register { data: Vec::new(), uniform: None });
        }
    }

    /// Takes the buffer of a register, grown to hold `len` elements.
    fn take_register(&mut self, register: usize, len: usize) -> Vec<C> {
        let mut data = std::mem::take(&mut self.registers[register].data);
        data.resize(data.len().max(len + MAX_ALIGN_SKIP), C::from_f64(0.0));
        data
    }
}

/// The number of elements that alignment may skip at the start of a register.
pub(crate) const MAX_ALIGN_SKIP: usize = 16;

/// The range of the first `len` elements that begins at a cache line, so that no vector straddles two lines.
pub(crate) fn aligned_range<C>(data: &[C], len: usize) -> Range<usize> {
    let first = data.as_ptr().align_offset(64).min(MAX_ALIGN_SKIP);
    first..first + len
}

impl Program {
    /// True if results can be stored past the cache as they are computed.
    pub(crate) fn can_bypass_cache(&self) -> bool {
        let cheap = |action: &Action| matches!(action, Action::Compute(Op::Binary(op)) if is_cheap(*op));
        !self.has_registers() && self.steps().list.iter().all(|step| cheap(&step.action))
    }

    /// True if a result of `bytes` bytes should be stored past the cache; `all` also counts the operands' bytes. Never with functions: while they
    /// compute, the reads that ordinary stores cause are hidden anyway.
    pub(crate) fn should_bypass_cache(&self, bytes: usize, all: usize) -> bool {
        !self.calls_functions() && streaming::should_stream(bytes, all)
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
            (Action::MultiplyAdd(_), 1) => false,
            _ => true,
        }
    }

    /// Runs the program over a tile. `outs[j]`, of length `len`, receives the `j`-th result. Returns whether an integer was divided by zero;
    /// such elements are 0. The program must not need floats if `C` is i64.
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
            let arch = scratch.arch;
            let uniform = match step.action {
                Action::Copy => copy(operand(0), dst),
                Action::Compute(Op::Leaf(leaf)) => random(leaf, tile.seeds, tile.first, dst),
                Action::Compute(Op::Unary(op)) => unary(arch, op, operand(0), dst),
                Action::Compute(Op::Binary(op)) => {
                    let (a, b) = (operand(0), operand(1));
                    divided_by_zero |= op.divides() && C::COMPUTE == Compute::I64 && contains_zero(b);
                    match scratch.streamed {
                        true => nontemporal::binary(arch, op, a, b, dst),
                        false => binary(arch, op, a, b, dst),
                    }
                }
                Action::MultiplyAdd(sum) => multiply_add(arch, sum, [operand(0), operand(1), operand(2)], dst),
                Action::Fused(fused) => fused_functions::run_fused(arch, fused, operand, dst),
                Action::Compute(Op::Select) => select(arch, operand(0), operand(1), operand(2), dst),
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

fn contains_zero<C: Number>(x: TileIn<'_, C>) -> bool {
    match x {
        TileIn::Slice(s) | TileIn::Rows(s, _) => s.iter().any(|&x| !x.is_true()),
        TileIn::Scalar(x) => !x.is_true(),
        TileIn::Output(_) => unreachable!("what is divided by is copied"),
    }
}

// Each of the following functions fills `dst`, or returns one value for all elements instead.

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

/// A loop that calls `F` for each item, for dispatch to the processor's vectors.
struct Loop<'a, C, I, F> {
    dst: &'a mut [C],
    args: I,
    function: PhantomData<F>,
}

impl<C, I: Iterator, F: Function<I::Item, C>> WithSimd for Loop<'_, C, I, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        for (d, x) in self.dst.iter_mut().zip(self.args) {
            *d = F::call(x);
        }
    }
}

/// Fills `dst` with the function's result for each item of `args`.
#[inline(always)]
pub(crate) fn run_loop<C, I: Iterator, F: Function<I::Item, C>>(arch: Arch, dst: &mut [C], args: I) -> Option<C> {
    arch.dispatch(Loop::<C, I, F> { dst, args, function: PhantomData });
    None
}

#[inline(always)]
fn map_unary<C: Number, F: Function<C, C>>(arch: Arch, a: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    match a {
        TileIn::Slice(a) => run_loop::<C, _, F>(arch, dst, a.iter().copied()),
        TileIn::Scalar(x) => Some(F::call(x)),
        _ => unreachable!("operands of a primitive of two"),
    }
}

#[inline(always)]
fn map_binary<C: Number, F: Function<(C, C), C>>(
    arch: Arch,
    a: TileIn<'_, C>,
    b: TileIn<'_, C>,
    dst: &mut [C],
) -> Option<C> {
    use TileIn::{Rows, Scalar, Slice};
    let function = PhantomData::<F>;
    match (a, b) {
        (Slice(a), Slice(b)) => return run_loop::<C, _, F>(arch, dst, a.iter().copied().zip(b.iter().copied())),
        (Slice(a), Scalar(y)) => return run_loop::<C, _, F>(arch, dst, a.iter().map(|&x| (x, y))),
        (Scalar(x), Slice(b)) => return run_loop::<C, _, F>(arch, dst, b.iter().map(|&y| (x, y))),
        (Scalar(x), Scalar(y)) => return Some(F::call((x, y))),
        (Slice(each), Rows(row, at)) => arch.dispatch(RowLoop::<C, F, true> { dst, each, row, at, function }),
        (Rows(row, at), Slice(each)) => arch.dispatch(RowLoop::<C, F, false> { dst, each, row, at, function }),
        _ => unreachable!("rows go with a slice"),
    }
    None
}

/// A loop over elements and a row that repeats. The row is the right operand if `RIGHT`, else the left one.
struct RowLoop<'a, C, F, const RIGHT: bool> {
    dst: &'a mut [C],
    each: &'a [C],
    row: &'a [C],
    at: usize,
    function: PhantomData<F>,
}

impl<C: Number, F: Function<(C, C), C>, const RIGHT: bool> WithSimd for RowLoop<'_, C, F, RIGHT> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let (mut dst, mut each, mut row) = (self.dst, self.each, &self.row[self.at..]);
        while !dst.is_empty() {
            let n = row.len().min(dst.len());
            let (now, then) = dst.split_at_mut(n);
            for ((d, &x), &y) in now.iter_mut().zip(each).zip(row) {
                *d = if RIGHT { F::call((x, y)) } else { F::call((y, x)) };
            }
            (dst, each, row) = (then, &each[n..], self.row);
        }
    }
}

/// A function with its own vector loop, for dispatch to the processor's vectors.
struct VectorFunctionLoop<'a, C> {
    function: VectorFunction,
    dst: &'a mut [C],
    from: &'a [C],
}

impl<C: Number> WithSimd for VectorFunctionLoop<'_, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        C::apply_function(self.function, self.dst, self.from);
    }
}

pub(crate) fn apply_vector_function<C: Number>(
    arch: Arch,
    function: VectorFunction,
    a: TileIn<'_, C>,
    dst: &mut [C],
) -> Option<C> {
    match a {
        TileIn::Slice(from) => {
            arch.dispatch(VectorFunctionLoop { function, dst, from });
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

pub(crate) fn unary<C: Number>(arch: Arch, op: Unary, a: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    macro_rules! each {
        ($method:ident) => {{
            function!(F, x: C => x.$method());
            map_unary::<C, F>(arch, a, dst)
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
        Unary::Exp => apply_vector_function(arch, VectorFunction::Exp, a, dst),
        Unary::Log => each!(log),
        Unary::Log2 => each!(log2),
        Unary::Log10 => each!(log10),
        Unary::Expm1 => each!(expm1),
        Unary::Log1p => each!(log1p),
        Unary::Sin => fix_large_angles(each!(sin), a, dst, f64::sin),
        Unary::Cos => fix_large_angles(each!(cos), a, dst, f64::cos),
        Unary::Tanh => apply_vector_function(arch, VectorFunction::Tanh, a, dst),
        Unary::Erf => apply_vector_function(arch, VectorFunction::Erf, a, dst),
        Unary::Erfc => each!(erfc),
        Unary::Lgamma => each!(lgamma),
        Unary::Atan => each!(atan),
        Unary::Sigmoid => apply_vector_function(arch, VectorFunction::Sigmoid, a, dst),
    }
}

/// Recomputes `sin` or `cos` in f64 for arguments that are too large for the vector code.
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

pub(crate) fn binary<C: Number>(
    arch: Arch,
    op: Binary,
    a: TileIn<'_, C>,
    b: TileIn<'_, C>,
    dst: &mut [C],
) -> Option<C> {
    macro_rules! each {
        ($x:ident, $y:ident => $e:expr) => {{
            function!(F, ($x, $y): (C, C) => $e);
            map_binary::<C, F>(arch, a, b, dst)
        }};
    }
    if let (TileIn::Output(_), other) | (other, TileIn::Output(_)) = (a, b) {
        binary_in_place(arch, op, matches!(a, TileIn::Output(_)), other, dst);
        return None;
    }
    // As in PyTorch's `pow`: a product is much faster than a power, and may differ from it in the last bit.
    if let (Binary::Pow, TileIn::Scalar(y)) = (op, b)
        && y == C::from_i32(2)
        && !matches!(a, TileIn::Rows(..))
    {
        return binary(arch, Binary::Mul, a, a, dst);
    }
    match op {
        Binary::Add => each!(x, y => x.add(y)),
        Binary::Sub => each!(x, y => x.sub(y)),
        Binary::Mul => each!(x, y => x.mul(y)),
        Binary::Div => each!(x, y => x.div(y)),
        Binary::Rem => each!(x, y => x.rem(y)),
        Binary::Pow => each!(x, y => x.pow(y)),
        Binary::Max => each!(x, y => x.max(y)),
        Binary::Min => each!(x, y => x.min(y)),
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

fn select<C: Number>(arch: Arch, c: TileIn<'_, C>, a: TileIn<'_, C>, b: TileIn<'_, C>, dst: &mut [C]) -> Option<C> {
    use TileIn::{Scalar, Slice};
    function!(F, (c, x, y): (C, C, C) => if c.is_true() { x } else { y });
    let c = match c {
        Slice(c) => c.iter().copied(),
        Scalar(c) => return copy(if c.is_true() { a } else { b }, dst),
        _ => unreachable!("operands of a primitive of two"),
    };
    match (a, b) {
        (Slice(a), Slice(b)) => {
            run_loop::<C, _, F>(arch, dst, c.zip(a.iter().copied()).zip(b.iter().copied()).map(|((c, x), y)| (c, x, y)))
        }
        (Slice(a), Scalar(y)) => run_loop::<C, _, F>(arch, dst, c.zip(a.iter().copied()).map(|(c, x)| (c, x, y))),
        (Scalar(x), Slice(b)) => run_loop::<C, _, F>(arch, dst, c.zip(b.iter().copied()).map(|(c, y)| (c, x, y))),
        (Scalar(x), Scalar(y)) => run_loop::<C, _, F>(arch, dst, c.map(|c| (c, x, y))),
        _ => unreachable!("operands of a primitive of two"),
    }
}
