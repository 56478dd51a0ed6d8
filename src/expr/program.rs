//! Programs: one or several formulas that are computed together, with the number of their operands and the types that they require.

use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, OnceLock, RwLock};

use smallvec::SmallVec;

use crate::device::lru::Lru;
use crate::expr::{Binary, Dag, Expr, Leaf, Op, is_argument, is_integer, with_leaves};
use crate::sync;
use crate::{Compute, Scalar};

/// The number arguments of a program's formulas, in the order of their first use.
type Numbers = SmallVec<[f64; 4]>;

/// The maximum number of numbers that a program takes as arguments: OpenCL guarantees 1 KiB of arguments for a kernel.
const MAX_NUMBERS: usize = 48;
/// The maximum number of programs in the global cache. The cache is for formulas that are rebuilt for every call.
const MAX_PROGRAMS: usize = 1024;
/// The maximum number of cached programs with the same shape hash. Their formulas differ only in which of their numbers are equal.
const MAX_PROGRAMS_PER_SHAPE: usize = 8;
/// The maximum number of nodes that are compared one by one; the nodes of larger formulas are numbered first.
const MAX_COMPARED_NODES: u32 = 256;

/// One or several formulas that are computed together.
#[derive(Debug)]
pub(crate) struct Program {
    exprs: Box<[Expr]>,
    inputs: usize,
    scalars: usize,
    caller_scalars: usize,
    seeds: usize,
    needs_float: bool,
    uses_bits: bool,
    divides: bool,
    calls_functions: bool,
    compiled: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl Program {
    /// Builds a program whose `j`-th result is `exprs[j]`, with all constants in its code.
    pub(crate) fn new(exprs: &[Expr]) -> Program {
        let dag = Dag::new(exprs);
        let count =
            |f: fn(Leaf) -> Option<usize>| dag.leaves().filter_map(f).map(|i| i.saturating_add(1)).max().unwrap_or(0);
        let ops = || dag.nodes.iter().map(|n| n.expr.op());
        Program {
            exprs: exprs.iter().map(|e| e.with_program(None)).collect(),
            inputs: dag.arity(),
            scalars: count(|l| match l {
                Leaf::Scalar(i) | Leaf::Number { index: i, .. } => Some(i),
                _ => None,
            }),
            caller_scalars: count(|l| if let Leaf::Scalar(i) = l { Some(i) } else { None }),
            seeds: count(|l| match l {
                Leaf::Uniform(i) | Leaf::Normal(i) | Leaf::Bits(i) => Some(i),
                _ => None,
            }),
            needs_float: ops().any(op_needs_float),
            uses_bits: ops().any(|op| match op {
                Op::Leaf(l) => matches!(l, Leaf::Bits(_)),
                Op::Binary(b) => b.needs_integers(),
                _ => false,
            }),
            divides: ops().any(|op| matches!(op, Op::Binary(b) if b.divides())),
            calls_functions: ops().any(|op| match op {
                Op::Unary(u) => u.needs_float(),
                Op::Binary(b) => matches!(b, Binary::Pow | Binary::Gcd),
                Op::Leaf(l) => matches!(l, Leaf::Uniform(_) | Leaf::Normal(_) | Leaf::Bits(_)),
                Op::Select => false,
            }),
            compiled: OnceLock::new(),
        }
    }

    /// True unless the program only copies operands, scalars or constants.
    pub(crate) fn computes(&self) -> bool {
        let leaf = |e: &Expr| {
            matches!(e.op(), Op::Leaf(Leaf::Input(_) | Leaf::Scalar(_) | Leaf::Const(_) | Leaf::Number { .. }))
        };
        !self.exprs.iter().all(leaf)
    }

    /// Returns the shared program of these formulas, which takes their numbers as arguments. Each formula object caches its program.
    #[inline]
    pub(crate) fn shared(exprs: &[Expr]) -> Cow<'_, Arc<Program>> {
        if let [expr] = exprs
            && let Some(program) = expr.program().get_or_init(|| Some(Program::intern(exprs)))
        {
            return Cow::Borrowed(program);
        }
        Cow::Owned(Program::intern(exprs))
    }

    fn intern(exprs: &[Expr]) -> Arc<Program> {
        type Alike = SmallVec<[Arc<Program>; 1]>;
        static PROGRAMS: LazyLock<RwLock<Lru<u64, Alike>>> = LazyLock::new(|| RwLock::new(Lru::new(MAX_PROGRAMS)));
        let shape = exprs.iter().fold(exprs.len() as u64, |h, e| h.rotate_left(7) ^ e.shape_hash());
        let fits = |program: &&Arc<Program>| program.numbers_of(exprs).is_some();
        let programs = sync::read(&PROGRAMS);
        if let Some(program) = programs.get(&shape).and_then(|alike| alike.iter().find(fits)) {
            return Arc::clone(program);
        }
        drop(programs);
        let made = Arc::new(Program::with_numbers_as_arguments(exprs));
        let mut programs = sync::write(&PROGRAMS);
        let (alike, evicted) = programs.get_or_insert(shape, Alike::new);
        if alike.len() == MAX_PROGRAMS_PER_SHAPE {
            alike.remove(0);
        }
        alike.push(Arc::clone(&made));
        drop(programs);
        drop(evicted);
        made
    }

    fn with_numbers_as_arguments(exprs: &[Expr]) -> Program {
        let plain = Program::new(exprs);
        let mut numbers = Numbers::new();
        let number = |leaf: Leaf| if let Leaf::Const(c) = leaf { Some(c).filter(|&c| is_argument(c)) } else { None };
        for c in Dag::new(exprs).leaves().filter_map(number) {
            if !numbers.contains(&c) {
                numbers.push(c);
            }
        }
        if numbers.is_empty() || numbers.len() > MAX_NUMBERS {
            return plain;
        }
        let index = |c: f64| plain.scalars + numbers.iter().position(|&n| n == c).unwrap_or(0);
        Program::new(&with_leaves(exprs, |leaf| number(leaf).map(|c| Expr::number_argument(index(c), is_integer(c)))))
    }

    /// Returns the numbers in `exprs` that are the program's number arguments, or `None` if the formulas differ from the program's in
    /// anything else.
    fn numbers_of(&self, exprs: &[Expr]) -> Option<Numbers> {
        let (mut numbers, mut budget) = (Numbers::new(), MAX_COMPARED_NODES);
        if exprs.len() != self.exprs.len() {
            return None;
        }
        let mut formulas = exprs.iter().zip(&self.exprs);
        match formulas
            .try_fold(true, |same, (e, own)| Some(same && self.same_shape(e, own, &mut numbers, &mut budget)?))
        {
            Some(same) => same.then_some(numbers),
            None => self.numbers_of_large(exprs),
        }
    }

    /// Returns the numbers like [`numbers_of`](Self::numbers_of), for large formulas, by comparing numbered lists of nodes.
    fn numbers_of_large(&self, exprs: &[Expr]) -> Option<Numbers> {
        let (dag, own, mut numbers) = (Dag::new(exprs), Dag::new(&self.exprs), Numbers::new());
        let mut nodes = dag.nodes.iter().zip(&own.nodes);
        let same = (dag.nodes.len(), &dag.roots) == (own.nodes.len(), &own.roots)
            && nodes.all(|(a, b)| a.args == b.args && self.matches_node(a.expr.op(), b.expr.op(), &mut numbers));
        same.then_some(numbers)
    }

    /// True if `expr` equals the program's formula `own` except for numbers, which are collected. Returns `None` if comparing `budget`
    /// nodes does not decide.
    fn same_shape(&self, expr: &Expr, own: &Expr, numbers: &mut Numbers, budget: &mut u32) -> Option<bool> {
        if expr.is_same(own) {
            return Some(true);
        }
        if expr.shape_hash() != own.shape_hash() || !self.matches_node(expr.op(), own.op(), numbers) {
            return Some(false);
        }
        *budget = budget.checked_sub(1)?;
        for (expr, own) in expr.args().iter().zip(own.args()) {
            if !self.same_shape(expr, own, numbers, budget)? {
                return Some(false);
            }
        }
        Some(true)
    }

    /// True if a node equals the program's own node, or is a number for an argument that is unset or already has this value.
    fn matches_node(&self, op: Op, own: Op, numbers: &mut Numbers) -> bool {
        let (Op::Leaf(Leaf::Const(c)), Op::Leaf(Leaf::Number { index, whole })) = (op, own) else { return op == own };
        let Some(place) = index.checked_sub(self.caller_scalars).filter(|_| is_argument(c) && is_integer(c) == whole)
        else {
            return false;
        };
        if place == numbers.len() {
            numbers.push(c);
        }
        numbers.get(place) == Some(&c)
    }

    /// Calls `f` with all scalar arguments of the program: first the scalars that the caller passed, then the numbers of `exprs`.
    #[inline(always)]
    pub(crate) fn with_arguments<R>(&self, exprs: &[Expr], given: &[Scalar], f: impl FnOnce(&[Scalar]) -> R) -> R {
        match self.scalars == self.caller_scalars {
            true => f(given),
            false => f(&self.arguments(exprs, given)),
        }
    }

    #[inline(never)]
    fn arguments(&self, exprs: &[Expr], given: &[Scalar]) -> SmallVec<[Scalar; 12]> {
        let numbers = self.numbers_of(exprs).unwrap_or_default();
        // If the formulas already take their numbers as arguments, `given` contains these numbers after the caller's scalars.
        let given = if numbers.is_empty() { given } else { &given[..self.caller_scalars] };
        let mut arguments = SmallVec::new();
        given.iter().for_each(|&s| arguments.push(s));
        numbers.iter().for_each(|&c| arguments.push(Scalar::Float(c)));
        arguments
    }

    /// Returns the interpreter's compiled form of the program, compiled on the first call. There is only one interpreter, so one form is
    /// kept.
    #[inline]
    pub(crate) fn compiled<T: Send + Sync + 'static>(&self, compile: impl FnOnce() -> T) -> &T {
        let compiled = self.compiled.get_or_init(|| Box::new(compile()));
        compiled.downcast_ref().expect("a process has one interpreter of formulas")
    }

    /// Returns the formulas, with arguments in place of numbers. All users of a program get these same objects, so comparing them only
    /// compares pointers.
    pub(crate) fn exprs(&self) -> &[Expr] {
        &self.exprs
    }

    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }
    /// Returns the number of scalar arguments, including the arguments for numbers.
    pub(crate) fn scalars(&self) -> usize {
        self.scalars
    }
    /// Returns the number of scalars that the caller passes, without the arguments for numbers.
    pub(crate) fn caller_scalars(&self) -> usize {
        self.caller_scalars
    }
    pub(crate) fn seeds(&self) -> usize {
        self.seeds
    }
    /// True if the program only copies its first input.
    pub(crate) fn is_identity(&self) -> bool {
        matches!(&self.exprs[..], [e] if e.op() == Op::Leaf(Leaf::Input(0)))
    }
    pub(crate) fn outputs(&self) -> usize {
        self.exprs.len()
    }

    /// True if integer operands must be converted to floats first: the program computes functions such as roots or exponentials, draws
    /// uniform or normal numbers, or has a constant that is not an integer.
    pub(crate) fn needs_float(&self) -> bool {
        self.needs_float
    }

    /// Returns the random numbers that are drawn for each element, as pairs of kind and seed index, in order.
    pub(crate) fn draws(&self) -> BTreeSet<(&'static str, usize)> {
        Dag::new(self.exprs()).leaves().filter_map(Leaf::draws).collect()
    }

    /// True if the program draws raw random bits, which only integers hold, or works on the bits of integers.
    pub(crate) fn uses_bits(&self) -> bool {
        self.uses_bits
    }

    /// True if the program computes functions such as exponentials, powers or random numbers, which take many instructions per element.
    pub(crate) fn calls_functions(&self) -> bool {
        self.calls_functions
    }

    /// True if the program may divide integers.
    pub(crate) fn divides(&self) -> bool {
        self.divides
    }

    /// True if running the program in the type `compute` can divide an integer by zero.
    pub(crate) fn can_fault(&self, compute: Compute) -> bool {
        self.divides && compute == Compute::I64
    }
}

fn op_needs_float(op: Op) -> bool {
    match op {
        Op::Unary(u) => u.needs_float(),
        Op::Binary(b) => b == Binary::Copysign,
        Op::Leaf(Leaf::Const(c)) => !is_integer(c),
        Op::Leaf(Leaf::Uniform(_) | Leaf::Normal(_) | Leaf::Number { whole: false, .. }) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn float_functions_need_floats_and_integer_ones_do_not() {
        let (a, b) = (Expr::input(0), Expr::input(1));
        assert!(!Program::new(&[a.floor_divide(&b)]).needs_float());
        assert!(Program::new(&[a.floor_divide(&b)]).can_fault(Compute::I64));
        assert!(!Program::new(&[a.floor_divide(&b)]).can_fault(Compute::F32));
        assert!(Program::new(&[&a * 0.5]).needs_float());
        assert!(Program::new(&[a.exp()]).needs_float());
        assert!(!Program::new(&[Expr::bits(0)]).needs_float());
        assert!(Program::new(&[a.is_inf()]).needs_float());
    }

    #[test]
    fn formulas_that_differ_in_numbers_share_a_program() {
        let (x, y, s) = (Expr::input(0), Expr::input(1), Expr::scalar(0));
        type Of<'a> = &'a dyn Fn(f64, f64) -> Expr;
        let formulas: [(Of, usize); 6] = [
            (&|a, _| &x * a, 1),
            (&|a, b| (&x * a + &y * b).exp() * a, 2),
            (&|a, b| x.clamp(-a, b) + &s, 2),
            (&|a, _| (&x + 1.0) * 0.5 - x.pow(a), 1),
            (&|a, b| (&x * a).gelu() / b, 2),
            (&|a, _| x.le(a).select(a, &x), 1),
        ];
        for (formula, numbers) in formulas {
            let first = [formula(0.1, 7.25)];
            let program = Program::shared(&first);
            assert_eq!((program.scalars() - program.caller_scalars(), program.needs_float()), (numbers, true));
            for (a, b) in [(1e-9, 4.5), (1e300, 0.3), (-2.5, 1.0 / 3.0)] {
                let (other, literal) = ([formula(a, b)], Program::new(&[formula(a, b)]));
                assert!(Arc::ptr_eq(&program, &Program::shared(&other)), "{other:?}");
                program.with_arguments(&other, &[Scalar::Int(9); 2], |scalars| {
                    let numbers: Vec<f64> = scalars[program.caller_scalars()..].iter().map(|s| s.to_f64()).collect();
                    // Substituting the numbers gives the original formula.
                    let back = with_leaves(program.exprs(), |leaf| match leaf {
                        Leaf::Number { index, .. } => Some(Expr::constant(numbers[index - program.caller_scalars()])),
                        _ => None,
                    });
                    assert_eq!((&back[..], scalars.len()), (literal.exprs(), program.scalars()));
                });
            }
        }
        // Integers do not force float arithmetic, and constants on which the code depends are not arguments.
        assert!(!Program::shared(&[&x * 7.0]).needs_float());
        assert!(!Arc::ptr_eq(&Program::shared(&[&x * 7.0]), &Program::shared(&[&x * 7.5])));
        assert!(Arc::ptr_eq(&Program::shared(&[&x * 7.0]), &Program::shared(&[&x * 19.0])));
        for code in [0.5, 2.0, f64::INFINITY, f64::NAN] {
            assert_eq!(Program::shared(&[x.max(code)]).scalars(), 0);
        }
        assert_eq!(Program::shared(&[Expr::input(0).erfinv().with_fixed_program()]).scalars(), 0);
    }

    #[test]
    fn large_and_shared_formulas_with_numbers() {
        let deep = |a: f64| {
            let mut e = Expr::input(0);
            for i in 0..500 {
                e = (&e + &e * a).sin() + f64::from(i % 5) * 1.25;
            }
            e
        };
        let (a, b) = ([deep(0.3)], [deep(0.7)]);
        assert!(Arc::ptr_eq(&Program::shared(&a), &Program::shared(&b)));
        Program::shared(&b).with_arguments(&b, &[], |s| assert_eq!(s[0], Scalar::Float(0.7)));
        // Beyond the argument limit, numbers become part of the code.
        let long = (0..100).fold(Expr::input(0), |e, i| e * (f64::from(i) + 0.25));
        assert_eq!(Program::shared(&[long]).scalars(), 0);
    }

    #[test]
    fn a_program_lives_as_long_as_its_formula_or_is_evicted() {
        let x = Expr::input(0);
        let nth =
            |n: usize| (0..usize::BITS).fold(x.clone(), |e, bit| if n >> bit & 1 == 1 { e.sin() } else { e.cos() });
        let kept = [nth(0)];
        let program = Arc::downgrade(&Program::shared(&kept));
        let first = Arc::downgrade(&Program::shared(&[nth(1)]));
        (2..3 * MAX_PROGRAMS).for_each(|n| drop(Program::shared(&[nth(n)])));
        assert_eq!((program.strong_count(), first.strong_count()), (1, 0));
        drop(kept);
        assert_eq!(program.strong_count(), 0);
    }
}
