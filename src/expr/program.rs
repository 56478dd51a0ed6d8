//! Formulas computed together, and what is known about them: how many operands they take and which types they need.

use std::any::Any;
use std::collections::BTreeSet;
use std::sync::{Arc, LazyLock, OnceLock, PoisonError, RwLock};

use crate::Compute;
use crate::expr::key_map::KeyMap;
use crate::expr::{Binary, Dag, Expr, Leaf, Op};

/// One formula or several.
#[derive(Debug)]
pub(crate) struct Program {
    exprs: Box<[Expr]>,
    inputs: usize,
    scalars: usize,
    seeds: usize,
    needs_float: bool,
    uses_bits: bool,
    divides: bool,
    calls_functions: bool,
    compiled: OnceLock<Box<dyn Any + Send + Sync>>,
}

impl Program {
    /// A program whose `j`-th result is `exprs[j]`.
    pub(crate) fn new(exprs: &[Expr]) -> Program {
        let dag = Dag::new(exprs);
        let count =
            |f: fn(Leaf) -> Option<usize>| dag.leaves().filter_map(f).map(|i| i.saturating_add(1)).max().unwrap_or(0);
        let ops = || dag.nodes.iter().map(|n| n.expr.op());
        Program {
            exprs: exprs.into(),
            inputs: dag.arity(),
            scalars: count(|l| if let Leaf::Scalar(i) = l { Some(i) } else { None }),
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

    /// Whether there is more to do than to copy.
    pub(crate) fn computes(&self) -> bool {
        let leaf = |e: &Expr| matches!(e.op(), Op::Leaf(Leaf::Input(_) | Leaf::Scalar(_) | Leaf::Const(_)));
        !self.exprs.iter().all(leaf)
    }

    /// The program of these formulas, scheduled once a process. Formulas are few: numbers that change are scalars.
    pub(crate) fn of(exprs: &[Expr]) -> Arc<Program> {
        Arc::clone(Program::kept(exprs))
    }

    /// [`of`](Program::of), without counting a reference: programs are kept for good. That of one formula which is used again
    /// and again is found in it.
    #[inline]
    pub(crate) fn kept(exprs: &[Expr]) -> &'static Arc<Program> {
        match exprs {
            [expr] => expr.program().get_or_init(|| Program::looked_up(exprs)),
            _ => Program::looked_up(exprs),
        }
    }

    fn looked_up(exprs: &[Expr]) -> &'static Arc<Program> {
        type Cache = RwLock<KeyMap<Box<[Expr]>, &'static Arc<Program>>>;
        static CACHE: LazyLock<Cache> = LazyLock::new(Cache::default);
        if let Some(program) = CACHE.read().unwrap_or_else(PoisonError::into_inner).get(exprs) {
            return program;
        }
        let mut cache = CACHE.write().unwrap_or_else(PoisonError::into_inner);
        cache.entry(exprs.into()).or_insert_with(|| Box::leak(Box::new(Arc::new(Program::new(exprs)))))
    }

    /// What an interpreter makes of the program, once: there is one interpreter a process.
    #[inline]
    pub(crate) fn compiled<T: Send + Sync + 'static>(&self, compile: impl FnOnce() -> T) -> &T {
        let compiled = self.compiled.get_or_init(|| Box::new(compile()));
        compiled.downcast_ref().expect("a process has one interpreter of formulas")
    }

    /// The formulas it computes. Those of [`Program::of`] are one set of objects a process: comparing them is free.
    pub(crate) fn exprs(&self) -> &[Expr] {
        &self.exprs
    }

    /// How many operands, scalar arguments, seeds and results it has.
    pub(crate) fn inputs(&self) -> usize {
        self.inputs
    }
    pub(crate) fn scalars(&self) -> usize {
        self.scalars
    }
    pub(crate) fn seeds(&self) -> usize {
        self.seeds
    }
    /// Whether it is the first input, as it is.
    pub(crate) fn is_identity(&self) -> bool {
        matches!(&self.exprs[..], [e] if e.op() == Op::Leaf(Leaf::Input(0)))
    }
    pub(crate) fn outputs(&self) -> usize {
        self.exprs.len()
    }

    /// Whether integer operands have to be converted to floats first: it takes roots, exponentials and the like, draws
    /// uniform or normal numbers, or has a constant that is no integer.
    pub(crate) fn needs_float(&self) -> bool {
        self.needs_float
    }

    /// The random numbers that it draws for each element: their kinds and seeds, in order.
    pub(crate) fn draws(&self) -> BTreeSet<(&'static str, usize)> {
        Dag::new(self.exprs()).leaves().filter_map(Leaf::draws).collect()
    }

    /// Whether it draws raw random bits, which only integers hold, or works on the bits of integers.
    pub(crate) fn uses_bits(&self) -> bool {
        self.uses_bits
    }

    /// Whether it takes exponentials, powers, random numbers and the like: many instructions an element.
    pub(crate) fn calls_functions(&self) -> bool {
        self.calls_functions
    }

    /// Whether an integer may be divided by another.
    pub(crate) fn divides(&self) -> bool {
        self.divides
    }

    /// Whether a run in this type can meet an integer division by zero.
    pub(crate) fn can_fault(&self, compute: Compute) -> bool {
        self.divides && compute == Compute::I64
    }
}

fn op_needs_float(op: Op) -> bool {
    match op {
        Op::Unary(u) => u.needs_float(),
        Op::Binary(b) => b == Binary::Copysign,
        Op::Leaf(Leaf::Const(c)) => c.trunc() != c || c.abs() > 9e15,
        Op::Leaf(Leaf::Uniform(_) | Leaf::Normal(_)) => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_integers_need() {
        let (a, b) = (Expr::input(0), Expr::input(1));
        assert!(!Program::new(&[a.floor_divide(&b)]).needs_float());
        assert!(Program::new(&[a.floor_divide(&b)]).can_fault(Compute::I64));
        assert!(!Program::new(&[a.floor_divide(&b)]).can_fault(Compute::F32));
        assert!(Program::new(&[&a * 0.5]).needs_float());
        assert!(Program::new(&[a.exp()]).needs_float());
        assert!(!Program::new(&[Expr::bits(0)]).needs_float());
        assert!(Program::new(&[a.is_inf()]).needs_float());
    }
}
