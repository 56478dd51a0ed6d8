//! The steps that the CPU interprets for a program: one linear list for all results.
//!
//! Equal subexpressions are computed once. Each step writes a tile of elements into a register or directly into a result. Operands are
//! read in place, so an input is never copied, and a register is reused once its value is dead.

use std::f64::consts::FRAC_1_SQRT_2;

use crate::backend::cpu::scalar::VectorFunction;
use crate::expr::program::Program;
use crate::expr::{Args, Binary, Dag, DagNode, GELU_CUBE, Leaf, Op, SQRT_2_OVER_PI, Unary};

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
    /// Copies an input, a scalar, a constant or another result to a result.
    Copy,
    /// The product of the first two arguments, combined with the third in one step. The first and the third argument may be multiplied by
    /// numbers, which follow the third argument: the indices, among these numbers, of the first and of the third argument's number.
    MultiplyAdd(ProductSum, [Option<usize>; 2]),
    /// A function such as gelu that has its own vector loop, and may be written as several primitives in the formula.
    Function(VectorFunction),
    /// [`Expr::clamp`](crate::ops::Expr::clamp) of the first operand between two constant bounds.
    Clamp,
    /// `x / (sqrt(y) * s + e)` of operands x and y and numbers e and s, the update of Adam; s is an operand if `true`, otherwise 1.
    RootQuotient(bool),
}

/// The combination of the product `a * b` with `c`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProductSum {
    Add,
    Sub,
    /// `c - a * b`.
    SubFrom,
}

/// One operation over a tile of elements.
#[derive(Debug)]
pub(crate) struct Step {
    pub(crate) action: Action,
    pub(crate) args: Args<Value>,
    /// The destination: a register or an output, and never one of `args`.
    pub(crate) dst: Value,
}

/// The steps of a program, and the number of registers.
#[derive(Debug)]
pub(crate) struct Steps {
    pub(crate) list: Vec<Step>,
    pub(crate) registers: usize,
}

impl Program {
    /// Returns the program's steps, compiled on first use.
    #[inline]
    pub(crate) fn steps(&self) -> &Steps {
        self.compiled(|| {
            let (list, registers) = schedule(&Dag::new(self.exprs()));
            Steps { list, registers }
        })
    }

    /// True if the program has intermediate results, each of which is stored in a tile.
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

/// Returns the action and operands of each node on which results depend. A sum is merged with a product that only the sum uses, and with the
/// multiplications by numbers of that product's factor and of the other summand.
fn node_actions(dag: &Dag) -> Vec<Option<(Action, Args<usize>)>> {
    let as_written = |i: usize| (Action::Compute(dag.nodes[i].expr.op()), dag.nodes[i].args.clone());
    let find = |i| recognise(&dag.nodes, i).unwrap_or_else(|| as_written(i));
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
            Some((Action::Compute(Op::Binary(Binary::Mul)), args)) if uses[a] == 1 => Some([args[0], args[1]]),
            _ => None,
        };
        // A product of a number and one other factor: the factor and the number.
        let multiple = |out: &[Option<(Action, Args<usize>)>], a: usize| {
            let [x, y] = product(out, a)?;
            [(x, y), (y, x)].into_iter().find(|&(x, y)| is_number(&dag.nodes, y) && !is_number(&dag.nodes, x))
        };
        let Some((Action::Compute(Op::Binary(op @ (Binary::Add | Binary::Sub))), args)) = &out[i] else { continue };
        let (op, args) = (*op, [args[0], args[1]]);
        if uses[i] == 0 {
            continue;
        }
        // The product is the summand of the form `number * a * b`; if there is none, `a * b`; otherwise `number * a`.
        let with_multiple = |out: &[_], a: usize| {
            let [p, q] = product(out, a)?;
            [(p, q), (q, p)].into_iter().find_map(|(p, q)| Some((p, multiple(out, p)?, q)))
        };
        let first = |fits: &dyn Fn(usize) -> bool| (0..2).find(|&k| fits(args[k]));
        let of_two = |a| product(&out, a).is_some() && multiple(&out, a).is_none();
        let chosen = first(&|a| with_multiple(&out, a).is_some()).or_else(|| first(&of_two));
        let Some(k) = chosen.or_else(|| first(&|a| product(&out, a).is_some())) else { continue };
        let (mut merged, mut numbers, mut of_summands) = (vec![args[k]], Args::new(), [None; 2]);
        let [a, b] = match (with_multiple(&out, args[k]), product(&out, args[k])) {
            (Some((factor, (a, number), b)), _) => {
                merged.push(factor);
                numbers.push(number);
                of_summands[0] = Some(0);
                [a, b]
            }
            (None, Some(factors)) => factors,
            (None, None) => continue,
        };
        let mut summand = args[1 - k];
        if let Some((x, number)) = multiple(&out, summand) {
            of_summands[1] = Some(numbers.len());
            merged.push(summand);
            numbers.push(number);
            summand = x;
        }
        let sum = match (op, k) {
            (Binary::Add, _) => ProductSum::Add,
            (_, 0) => ProductSum::Sub,
            _ => ProductSum::SubFrom,
        };
        merged.into_iter().for_each(|a| out[a] = None);
        let operands = [a, b, summand].into_iter().chain(numbers).collect();
        out[i] = Some((Action::MultiplyAdd(sum, of_summands), operands));
    }
    out.into_iter().zip(uses).map(|(node, uses)| node.filter(|_| uses > 0)).collect()
}

/// Assigns a register or an output to each node, in order. Returns the steps and the number of registers.
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
            values.push(Value::Const(0.0)); // placeholder, never read
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
                // Registers are released after `dst` was chosen, so that a step never writes a register that it reads.
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

/// Returns the action and operands if node `i` is the root of a formula that one step computes, else `None`. Separate steps would read
/// and write all elements of a tile for each primitive.
fn recognise(nodes: &[DagNode], i: usize) -> Option<(Action, Args<usize>)> {
    let function = |function, x: usize| Some((Action::Function(function), Args::from_slice(&[x])));
    match node_op(nodes, i) {
        Op::Binary(Binary::Mul) => {
            let (a, b) = (nodes[i].args[0], nodes[i].args[1]);
            let either = [(a, b), (b, a)];
            if let Some(x) = either.into_iter().find_map(|(half, rest)| match_gelu(nodes, half, rest)) {
                return function(VectorFunction::Gelu, x);
            }
            if let Some(x) = either.into_iter().find_map(|(half, rest)| match_gelu_tanh(nodes, half, rest)) {
                return function(VectorFunction::GeluTanh, x);
            }
            let (x, _) = either.into_iter().find(|&(x, y)| unary_operand(nodes, y, Unary::Sigmoid) == Some(x))?;
            function(VectorFunction::Silu, x)
        }
        Op::Binary(Binary::Div) => {
            let operands = match_root_quotient(nodes, i)?;
            Some((Action::RootQuotient(operands.len() > 3), operands))
        }
        Op::Select => {
            if let Some(args) = match_clamp(nodes, i) {
                return Some((Action::Clamp, Args::from_slice(&args)));
            }
            // `select(x <= c, c, x)` is `max(x, c)`, for NaN and -0 too.
            let (condition, c, x) = (nodes[i].args[0], nodes[i].args[1], nodes[i].args[2]);
            let number = match node_op(nodes, c) {
                Op::Leaf(Leaf::Const(c)) => !c.is_nan(),
                other => matches!(other, Op::Leaf(Leaf::Number { .. })),
            };
            let max = (Action::Compute(Op::Binary(Binary::Max)), Args::from_slice(&[x, c]));
            (number && is_binary(nodes, condition, Binary::Le, [x, c])).then_some(max)
        }
        _ => None,
    }
}

fn node_op(nodes: &[DagNode], i: usize) -> Op {
    nodes[i].expr.op()
}

/// True if node `i` is a number that is the same for all elements of a launch.
fn is_number(nodes: &[DagNode], i: usize) -> bool {
    matches!(node_op(nodes, i), Op::Leaf(Leaf::Const(_) | Leaf::Scalar(_) | Leaf::Number { .. }))
}

/// True if node `i` is the primitive `binary` with operands `args`.
fn is_binary(nodes: &[DagNode], i: usize, binary: Binary, args: [usize; 2]) -> bool {
    node_op(nodes, i) == Op::Binary(binary) && nodes[i].args[..] == args
}

/// Returns the operand if node `i` is the primitive `unary`, else `None`.
fn unary_operand(nodes: &[DagNode], i: usize, unary: Unary) -> Option<usize> {
    (node_op(nodes, i) == Op::Unary(unary)).then(|| nodes[i].args[0])
}

/// Returns the operand that is not `number` if node `i` is the commutative primitive `binary` of an operand and the constant `number`;
/// else `None`.
fn other_operand(nodes: &[DagNode], i: usize, binary: Binary, number: f64) -> Option<usize> {
    let [a, b] = nodes[i].args[..] else { return None };
    let is_number = |&(n, _): &(usize, usize)| matches!(node_op(nodes, n), Op::Leaf(Leaf::Const(c)) if c == number);
    let found = [(a, b), (b, a)].into_iter().find(is_number)?;
    (node_op(nodes, i) == Op::Binary(binary)).then_some(found.1)
}

/// Returns x if node `half` is `x / 2` and node `rest` is `1 + erf(x / sqrt(2))`, else `None`.
fn match_gelu(nodes: &[DagNode], half: usize, rest: usize) -> Option<usize> {
    let x = other_operand(nodes, half, Binary::Mul, 0.5)?;
    let erf = other_operand(nodes, rest, Binary::Add, 1.0)?;
    let of = other_operand(nodes, unary_operand(nodes, erf, Unary::Erf)?, Binary::Mul, FRAC_1_SQRT_2)?;
    (of == x).then_some(x)
}

/// Returns x if node `half` is `x / 2` and node `rest` is `1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x² * x))`, else `None`.
fn match_gelu_tanh(nodes: &[DagNode], half: usize, rest: usize) -> Option<usize> {
    let x = other_operand(nodes, half, Binary::Mul, 0.5)?;
    let tanh = other_operand(nodes, rest, Binary::Add, 1.0)?;
    let sum = other_operand(nodes, unary_operand(nodes, tanh, Unary::Tanh)?, Binary::Mul, SQRT_2_OVER_PI)?;
    let [_, cube] = nodes[sum].args[..] else { return None };
    let scaled = *nodes[cube].args.first()?;
    let square = other_operand(nodes, scaled, Binary::Mul, GELU_CUBE)?;
    let fits = is_binary(nodes, sum, Binary::Add, [x, cube]) && is_binary(nodes, cube, Binary::Mul, [scaled, x]);
    (fits && is_binary(nodes, square, Binary::Mul, [x, x])).then_some(x)
}

/// Returns x, low and high if node `i` is `raised > high ? high : raised` with `raised = x < low ? low : x` and constant bounds, else
/// `None`.
fn match_clamp(nodes: &[DagNode], i: usize) -> Option<[usize; 3]> {
    let select = |i: usize| match (node_op(nodes, i), &nodes[i].args[..]) {
        (Op::Select, &[condition, a, b]) => Some((condition, a, b)),
        _ => None,
    };
    let (above, high, raised) = select(i)?;
    let (below, low, x) = select(raised)?;
    let fits = is_binary(nodes, above, Binary::Lt, [high, raised]) && is_binary(nodes, below, Binary::Lt, [x, low]);
    (fits && is_number(nodes, low) && is_number(nodes, high)).then_some([x, low, high])
}

/// Returns the operands of [`Action::RootQuotient`] if node `i` is such a formula, else `None`.
fn match_root_quotient(nodes: &[DagNode], i: usize) -> Option<Args<usize>> {
    // Returns the other operand and the number if the node is the commutative primitive `binary` of an operand and a number.
    let with_number = |i: usize, binary| {
        let [a, b] = nodes[i].args[..] else { return None };
        let found = [(a, b), (b, a)].into_iter().find(|&(_, number)| is_number(nodes, number))?;
        (node_op(nodes, i) == Op::Binary(binary)).then_some(found)
    };
    let [x, sum] = nodes[i].args[..] else { return None };
    let (scaled, e) = with_number(sum, Binary::Add)?;
    let (root, s) = with_number(scaled, Binary::Mul).map_or((scaled, None), |(root, s)| (root, Some(s)));
    let y = unary_operand(nodes, root, Unary::Sqrt)?;
    Some([x, y, e].into_iter().chain(s).collect())
}

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use super::*;
    use crate::Scalar;
    use crate::backend::cpu::interpreter::{Scratch, Tile, TileIn};
    use crate::backend::cpu::scalar::Number;
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
        assert_eq!(steps(&[&a * &b + &c * 2.0]), (1, 0));
        assert_eq!(steps(&[&c - 0.5 * &a * &b]), (1, 0));
        assert_eq!(steps(&[&c - 0.5 * (&a * &b)]), (2, 1));
        assert_eq!(steps(&[&a * &b + &c * &a]), (2, 1));
        let product = &a * &b;
        assert_eq!(steps(&[&product + &product]), (2, 1), "read twice");
        assert_eq!(steps(&[(&product + &c) * &product]), (3, 2), "read later");
        assert_eq!(steps(&[&product + &c, product.clone()]), (2, 0), "a result");
        let momentum = &a * 0.9 + &b;
        assert_eq!(steps(&[&c - &momentum * 0.1, momentum]), (2, 0), "SGD");
        let (s, v) = (Expr::scalar, Expr::input(3));
        let (mean, square) = (s(0) * &b + s(1) * &c, s(2) * &v + s(3) * &c * &c);
        let step = s(4) * (&mean / (square.sqrt() * s(5) + s(6)));
        assert_eq!(steps(&[&a * s(7) - step, mean, square]).0, 4, "AdamW");
    }

    #[test]
    fn recognises_fused_functions() {
        let (x, y, s) = (Expr::input(0), Expr::input(1), Expr::scalar(0));
        let steps = |e: &Expr| Program::new(std::slice::from_ref(e)).steps().list.len();
        for e in [
            x.gelu(),
            x.gelu_tanh(),
            x.silu(),
            x.sigmoid() * &x,
            x.clamp(0.0, 1.0),
            x.clamp(&s, 6.0),
            x.relu(),
            &y / (x.sqrt() + 0.5),
            &y / (&s + x.sqrt() * 0.7),
        ] {
            assert_eq!(steps(&e), 1, "{e:?}");
        }
        // These formulas resemble fused formulas, but must not be fused, because they give other results.
        for e in [
            0.5 * &x * (1.0 + (&y * FRAC_1_SQRT_2).erf()),
            0.5 * &x * (1.0 + (&x * 0.7).erf()),
            0.5 * &x * (1.0 + (&x * 0.7).tanh()),
            &y * x.sigmoid(),
            x.clamp(&y, 1.0),
            x.hardtanh(0.0, 1.0),
            &x / (x.sqrt() + &y),
            &x / (x.sqrt() * &y + 0.5),
            x.le(0.0).select(1.0, &x),
            x.lt(0.0).select(0.0, &x),
        ] {
            assert!(steps(&e) > 1, "{e:?}");
        }
        let both = Program::new(&[x.relu(), x.le(0.0)]);
        assert_eq!((both.steps().list.len(), both.steps().registers), (2, 0));
    }

    /// Computes one formula of one input. `form` selects how the input is given: as a slice, as a number, or as the old contents of the
    /// result.
    fn compute<C: Number>(e: &Expr, x: &[C], scalars: &[Scalar], form: usize) -> Vec<C> {
        let mut out = x.to_vec();
        let inputs = [[TileIn::Slice(x), TileIn::Scalar(x[0]), TileIn::Output(0)][form]];
        let tile = Tile { inputs: &inputs, scalars, seeds: &[], first: 0, len: x.len() };
        Program::new(std::slice::from_ref(e)).eval_tile(&tile, &mut Scratch::new(), &mut [&mut out]);
        out
    }

    #[test]
    fn fused_clamp_equals_its_formula() {
        let special = [f64::NAN, -0.0, 0.0, 0.5, -0.5, 1.0, f64::INFINITY, f64::NEG_INFINITY, 0.25, 7.0];
        let x: Vec<f64> = (0..300).map(|i| special[i * 7 % 10] + (i / 10) as f64 * 0.01).collect();
        let (narrow, whole): (Vec<f32>, Vec<i64>) = x.iter().map(|&x| (x as f32, x as i64)).unzip();
        for bounds in [(-0.25, 0.5), (0.0, -0.0), (-0.0, 3.0), (1.0, -1.0), (f64::NAN, 0.5), (0.5, f64::NAN)] {
            let scalars = [Scalar::Float(bounds.0), Scalar::Float(bounds.1)];
            let e = Expr::input(0).clamp(Expr::scalar(0), Expr::scalar(1));
            macro_rules! check {
                ($x:expr, $t:ty) => {
                    for form in 0..3 {
                        let (low, high) = (bounds.0 as $t, bounds.1 as $t);
                        for (i, got) in compute(&e, &$x, &scalars, form).into_iter().enumerate() {
                            let x = $x[if form == 1 { 0 } else { i }];
                            let raised = if x < low { low } else { x };
                            let want = if high < raised { high } else { raised };
                            assert_eq!(got.to_ne_bytes(), want.to_ne_bytes(), "{x} {bounds:?} {form}");
                        }
                    }
                };
            }
            check!(x, f64);
            check!(narrow, f32);
            if !bounds.0.is_nan() && !bounds.1.is_nan() {
                check!(whole, i64);
            }
        }
    }

    #[test]
    fn fused_functions_equal_their_formulas() {
        let phi = |x: f64| 0.5 * (1.0 + libm::erf(x * FRAC_1_SQRT_2));
        let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
        let inner = |x: f64| (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
        let by_tanh = |x: f64| 0.5 * (1.0 + inner(x).tanh());
        type Of<'a> = &'a dyn Fn(f64) -> f64;
        let x: Vec<f64> = (0..700).map(|i| (i * 37 % 700) as f64 * 0.02 - 7.0).collect();
        let narrow: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        let input = Expr::input(0);
        for (e, of) in [(input.gelu(), &phi as Of), (input.gelu_tanh(), &by_tanh), (input.silu(), &logistic)] {
            for form in 0..3 {
                let (wide, single) = (compute(&e, &x, &[], form), compute(&e, &narrow, &[], form));
                for i in 0..x.len() {
                    let at = if form == 1 { 0 } else { i };
                    let (right, near) = (x[at] * of(x[at]), f64::from(narrow[at]));
                    assert!((wide[i] - right).abs() <= 1e-15 * x[at].abs(), "{e:?} of {}: {}", x[at], wide[i]);
                    let error = (f64::from(single[i]) - near * of(near)).abs();
                    assert!(error <= 2e-7 * near.abs(), "{e:?} of {near}: {}", single[i]);
                }
            }
        }
    }
}
