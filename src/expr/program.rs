//! Formulas made ready to run: one straight list of steps for one or several results.
//!
//! Equal parts are computed once. For the CPU each step writes a tile of elements into a register or straight into a
//! result; operands are named in place, so an input is never copied, and a register is used again as soon as its value
//! is dead. The OpenCL reader ([`source`](crate::backend::opencl::source)) leaves registers to its compiler.

use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use crate::Compute;
use crate::backend::cpu::fused_functions as idioms;
use crate::backend::cpu::fused_functions::Idiom;
use crate::backend::cpu::multiply_add::Sum;
use crate::backend::opencl::kernels::KeyMap;
use crate::expr::{Args, Binary, Dag, Expr, Leaf, Op};

/// Where a step finds an operand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Input(usize),
    Scalar(usize),
    Const(f64),
    Register(usize),
    Output(usize),
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Action {
    /// Of a formula: a primitive, or random numbers (never an input, a scalar or a constant).
    Compute(Op),
    /// A result that is a leaf, or the same as another result.
    Copy,
    /// Of the first two arguments and the third: a step where there were two.
    MultiplyAdd(Sum),
    /// A formula of several primitives.
    Idiom(Idiom),
}

/// One primitive over a tile of elements.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) args: Args<Value>,
    /// A register or an output, never one of `args`.
    pub(crate) dst: Value,
}

/// Formulas ready to run.
#[derive(Debug)]
pub(crate) struct Program {
    exprs: Box<[Expr]>,
    pub(crate) steps: Vec<Step>,
    pub(crate) registers: usize,
    inputs: usize,
    scalars: usize,
    seeds: usize,
    needs_float: bool,
    uses_bits: bool,
    divides: bool,
    calls_functions: bool,
}

impl Program {
    /// A program whose `j`-th result is `exprs[j]`.
    pub(crate) fn new(exprs: &[Expr]) -> Program {
        let dag = Dag::new(exprs);
        let count =
            |f: fn(Leaf) -> Option<usize>| dag.leaves().filter_map(f).map(|i| i.saturating_add(1)).max().unwrap_or(0);
        let ops = || dag.nodes.iter().map(|n| n.expr.op());
        let (steps, registers) = schedule(&dag);
        Program {
            exprs: exprs.into(),
            steps,
            registers,
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
        }
    }

    /// Whether there is more to do than to copy.
    pub(crate) fn computes(&self) -> bool {
        self.steps.iter().any(|step| step.action != Action::Copy)
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
        matches!(&self.steps[..], [Step { action: Action::Copy, args, dst: Value::Output(0) }] if args[0] == Value::Input(0))
    }
    /// Whether it keeps intermediate results, a tile of each.
    pub(crate) fn has_registers(&self) -> bool {
        self.registers > 0
    }

    /// Whether the input is read by no step after the one that writes the result: it may be what the result held before.
    pub(crate) fn reads_before(&self, input: usize, output: usize) -> bool {
        let writes = |step: &Step| step.dst == Value::Output(output);
        let after = self.steps.iter().skip_while(|step| !writes(step)).skip(1);
        after.flat_map(|step| &step.args).all(|&arg| arg != Value::Input(input))
    }

    pub(crate) fn outputs(&self) -> usize {
        self.exprs.len()
    }

    /// Whether integer operands have to be converted to floats first: it takes roots, exponentials and the like, draws
    /// uniform or normal numbers, or has a constant that is no integer.
    pub(crate) fn needs_float(&self) -> bool {
        self.needs_float
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

/// The nodes that results need, what each does and the nodes that it reads. A product that one sum alone reads is part of it.
fn operations(dag: &Dag) -> Vec<Option<(Action, Args<usize>)>> {
    let as_written = |i: usize| (Action::Compute(dag.nodes[i].expr.op()), dag.nodes[i].args.clone());
    let find = |i| idioms::find(&dag.nodes, i).unwrap_or_else(|| as_written(i));
    let nodes: Vec<(Action, Args<usize>)> = (0..dag.nodes.len()).map(find).collect();
    let mut uses = vec![0; nodes.len()];
    dag.roots.iter().for_each(|&root| uses[root] += 2); // by nobody alone
    for i in (0..nodes.len()).rev() {
        if uses[i] > 0 {
            nodes[i].1.iter().for_each(|&a| uses[a] += 1);
        }
    }
    let mut out: Vec<_> = nodes.into_iter().map(Some).collect();
    for i in 0..out.len() {
        let product = |out: &[Option<(Action, Args<usize>)>], a: usize| match &out[a] {
            Some((Action::Compute(Op::Binary(Binary::Mul)), args)) if uses[a] == 1 => Some(args.clone()),
            _ => None,
        };
        let Some((Action::Compute(Op::Binary(op @ (Binary::Add | Binary::Sub))), args)) = &out[i] else { continue };
        let (op, args) = (*op, args.clone());
        if uses[i] == 0 {
            continue;
        }
        let Some((k, mut factors)) = (0..2).find_map(|k| Some((k, product(&out, args[k])?))) else { continue };
        let sum = match (op, k) {
            (Binary::Add, _) => Sum::Plus,
            (_, 0) => Sum::Less,
            _ => Sum::Rest,
        };
        factors.push(args[1 - k]);
        (out[i], out[args[k]]) = (Some((Action::MultiplyAdd(sum), factors)), None);
    }
    out.into_iter().zip(uses).map(|(node, uses)| node.filter(|_| uses > 0)).collect()
}

/// Puts the nodes in order and gives each a place; returns the number of registers too.
fn schedule(dag: &Dag) -> (Vec<Step>, usize) {
    let nodes = operations(dag);
    let mut last_use = vec![0; nodes.len()];
    for (i, (_, args)) in nodes.iter().enumerate().filter_map(|(i, node)| Some((i, node.as_ref()?))) {
        args.iter().for_each(|&a| last_use[a] = i);
    }

    let mut steps = Vec::new();
    let mut places: Vec<Value> = Vec::with_capacity(dag.nodes.len());
    let (mut free, mut registers) = (Vec::new(), 0);
    for (i, node) in nodes.iter().enumerate() {
        let Some((action, args)) = node else {
            places.push(Value::Const(0.0)); // nobody looks
            continue;
        };
        let place = match *action {
            Action::Compute(Op::Leaf(Leaf::Input(k))) => Value::Input(k),
            Action::Compute(Op::Leaf(Leaf::Scalar(k))) => Value::Scalar(k),
            Action::Compute(Op::Leaf(Leaf::Const(c))) => Value::Const(c),
            _ => {
                let dst = match dag.roots.iter().position(|&r| r == i) {
                    Some(j) => Value::Output(j),
                    None => Value::Register(free.pop().unwrap_or_else(|| {
                        registers += 1;
                        registers - 1
                    })),
                };
                let operands = args.iter().map(|&a| places[a]).collect();
                steps.push(Step { action: *action, args: operands, dst });
                // after `dst` was chosen: a step never writes where it reads
                for (k, &a) in args.iter().enumerate() {
                    if let Value::Register(r) = places[a]
                        && last_use[a] == i
                        && !args[..k].contains(&a)
                    {
                        free.push(r);
                    }
                }
                dst
            }
        };
        places.push(place);
    }
    for (j, &root) in dag.roots.iter().enumerate() {
        if places[root] != Value::Output(j) {
            steps.push(Step {
                action: Action::Copy,
                args: [places[root]].into_iter().collect(),
                dst: Value::Output(j),
            });
        }
    }
    (steps, registers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_are_used_again() {
        let x = Expr::input(0);
        let mut e = x.clone();
        for i in 0..50 {
            e = (&e + (i as f64 + 0.5)).sin() * &x;
        }
        let p = Program::new(&[e]);
        assert_eq!(p.steps.len(), 101); // sums but the first are one with the product before
        assert!(p.registers <= 2, "{}", p.registers);
        for s in &p.steps {
            assert!(!s.args.contains(&s.dst));
        }
    }

    #[test]
    fn common_parts_and_results_that_are_leaves() {
        let (a, b) = (Expr::input(0), Expr::input(1));
        let p = Program::new(&[(&a + &b).exp(), (&a + &b).exp() * 2.0, b.clone(), (&a + &b).exp()]);
        assert_eq!(p.steps.len(), 5); // add, exp, mul and two copies
        assert_eq!((p.inputs(), p.outputs(), p.scalars(), p.seeds()), (2, 4, 0, 0));
    }

    #[test]
    fn products_and_sums_are_one_step() {
        let (a, b, c) = (Expr::input(0), Expr::input(1), Expr::input(2));
        let steps = |exprs: &[Expr]| {
            let p = Program::new(exprs);
            (p.steps.len(), p.registers)
        };
        assert_eq!(steps(&[&a * &b + &c]), (1, 0));
        assert_eq!(steps(&[&c - &a * &b]), (1, 0));
        assert_eq!(steps(&[&a * &b - &c]), (1, 0));
        assert_eq!(steps(&[&a * &b + &c * 2.0]), (2, 1));
        let product = &a * &b;
        assert_eq!(steps(&[&product + &product]), (2, 1), "read twice");
        assert_eq!(steps(&[(&product + &c) * &product]), (3, 2), "read later");
        assert_eq!(steps(&[&product + &c, product.clone()]), (2, 0), "a result");
        let momentum = &a * 0.9 + &b;
        assert_eq!(steps(&[&c - &momentum * 0.1, momentum]), (2, 0), "SGD");
    }

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
