//! The steps that the CPU interprets for a program: one linear list for all results.
//!
//! Equal subexpressions are computed once. Each step writes a tile of elements into a register or directly into a result. Operands are
//! read in place, so an input is never copied, and a register is reused once its value is dead.

use crate::backend::cpu::fused_functions::{self, FusedFunction};
use crate::backend::cpu::multiply_add::ProductSum;
use crate::expr::program::Program;
use crate::expr::{Args, Binary, Dag, Leaf, Op};

/// The location of an operand or a destination of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Value {
    Input(usize),
    Scalar(usize),
    Const(f64),
    Register(usize),
    Output(usize),
}

/// The operation of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Action {
    /// A primitive, or random numbers (never an input, a scalar or a constant).
    Compute(Op),
    /// Copies a leaf, or another result, to a result.
    Copy,
    /// The product of the first two arguments, combined with the third in one step.
    MultiplyAdd(ProductSum),
    /// A formula of several primitives, computed in one step.
    Fused(FusedFunction),
}

/// One operation over a tile of elements.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) args: Args<Value>,
    /// A register or an output; never one of `args`.
    pub(crate) dst: Value,
}

/// The steps of a program, and the number of registers.
#[derive(Debug)]
pub(crate) struct Steps {
    pub(crate) list: Vec<Step>,
    pub(crate) registers: usize,
}

impl Program {
    /// The program's steps, compiled on first use.
    #[inline]
    pub(crate) fn steps(&self) -> &Steps {
        self.compiled(|| {
            let (list, registers) = schedule(&Dag::new(self.exprs()));
            Steps { list, registers }
        })
    }

    /// True if the program has intermediate results, each of which takes a tile.
    pub(crate) fn has_registers(&self) -> bool {
        self.steps().registers > 0
    }

    /// True if no step reads the input after the step that writes the output, so that the output may overwrite the input.
    pub(crate) fn can_overwrite_input(&self, input: usize, output: usize) -> bool {
        let writes = |step: &Step| step.dst == Value::Output(output);
        let after = self.steps().list.iter().skip_while(|step| !writes(step)).skip(1);
        after.flat_map(|step| &step.args).all(|&arg| arg != Value::Input(input))
    }
}

/// The action and operands of each node that results depend on. A product that is used only by one sum is merged into that sum.
fn node_actions(dag: &Dag) -> Vec<Option<(Action, Args<usize>)>> {
    let as_written = |i: usize| (Action::Compute(dag.nodes[i].expr.op()), dag.nodes[i].args.clone());
    let find = |i| fused_functions::recognise(&dag.nodes, i).unwrap_or_else(|| as_written(i));
    let nodes: Vec<(Action, Args<usize>)> = (0..dag.nodes.len()).map(find).collect();
    let mut uses = vec![0; nodes.len()];
    dag.roots.iter().for_each(|&root| uses[root] += 2); // a root is never merged into its user
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
            (Binary::Add, _) => ProductSum::Add,
            (_, 0) => ProductSum::Sub,
            _ => ProductSum::SubFrom,
        };
        factors.push(args[1 - k]);
        (out[i], out[args[k]]) = (Some((Action::MultiplyAdd(sum), factors)), None);
    }
    out.into_iter().zip(uses).map(|(node, uses)| node.filter(|_| uses > 0)).collect()
}

/// Assigns a register or an output to each node, in order; returns the steps and the number of registers.
fn schedule(dag: &Dag) -> (Vec<Step>, usize) {
    let nodes = node_actions(dag);
    let mut last_use = vec![0; nodes.len()];
    for (i, (_, args)) in nodes.iter().enumerate().filter_map(|(i, node)| Some((i, node.as_ref()?))) {
        args.iter().for_each(|&a| last_use[a] = i);
    }

    let mut steps = Vec::new();
    let mut values: Vec<Value> = Vec::with_capacity(dag.nodes.len());
    let (mut free, mut registers) = (Vec::new(), 0);
    for (i, node) in nodes.iter().enumerate() {
        let Some((action, args)) = node else {
            values.push(Value::Const(0.0)); // unused
            continue;
        };
        let value = match *action {
            Action::Compute(Op::Leaf(Leaf::Input(k))) => Value::Input(k),
            Action::Compute(Op::Leaf(Leaf::Scalar(k) | Leaf::Number { index: k, .. })) => Value::Scalar(k),
            Action::Compute(Op::Leaf(Leaf::Const(c))) => Value::Const(c),
            _ => {
                let dst = match dag.roots.iter().position(|&r| r == i) {
                    Some(j) => Value::Output(j),
                    None => Value::Register(free.pop().unwrap_or_else(|| {
                        registers += 1;
                        registers - 1
                    })),
                };
                let operands = args.iter().map(|&a| values[a]).collect();
                steps.push(Step { action: *action, args: operands, dst });
                // After `dst` was chosen, so that a step never writes a register that it reads.
                for (k, &a) in args.iter().enumerate() {
                    if let Value::Register(r) = values[a]
                        && last_use[a] == i
                        && !args[..k].contains(&a)
                    {
                        free.push(r);
                    }
                }
                dst
            }
        };
        values.push(value);
    }
    for (j, &root) in dag.roots.iter().enumerate() {
        if values[root] != Value::Output(j) {
            steps.push(Step {
                action: Action::Copy,
                args: [values[root]].into_iter().collect(),
                dst: Value::Output(j),
            });
        }
    }
    (steps, registers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::expr::Expr;

    #[test]
    fn dead_registers_are_reused() {
        let x = Expr::input(0);
        let mut e = x.clone();
        for i in 0..50 {
            e = (&e + (i as f64 + 0.5)).sin() * &x;
        }
        let p = Program::new(&[e]);
        assert_eq!(p.steps().list.len(), 101); // every sum except the first is merged with the product before it
        assert!(p.steps().registers <= 2, "{}", p.steps().registers);
        for s in &p.steps().list {
            assert!(!s.args.contains(&s.dst));
        }
    }

    #[test]
    fn common_subexpressions_are_computed_once() {
        let (a, b) = (Expr::input(0), Expr::input(1));
        let p = Program::new(&[(&a + &b).exp(), (&a + &b).exp() * 2.0, b.clone(), (&a + &b).exp()]);
        assert_eq!(p.steps().list.len(), 5); // add, exp, mul and two copies
        assert_eq!((p.inputs(), p.outputs(), p.scalars(), p.seeds()), (2, 4, 0, 0));
    }

    #[test]
    fn a_product_is_merged_into_the_sum_that_uses_it() {
        let (a, b, c) = (Expr::input(0), Expr::input(1), Expr::input(2));
        let steps = |exprs: &[Expr]| {
            let p = Program::new(exprs);
            (p.steps().list.len(), p.steps().registers)
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
}
