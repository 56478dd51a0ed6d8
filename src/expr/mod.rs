//! Formulas as values. An elementwise operation is defined by its formula.
//!
//! An [`Expr`] is an immutable graph of leaves (tensor elements, run-time scalars, constants, random numbers) and about forty
//! primitives. Formulas are written with ordinary operators and methods, and compared by structure. A formula has three uses: the CPU
//! interprets it in tiles, the OpenCL backend prints it as OpenCL C, and autograd differentiates it.
//!
//! Comparisons return 1 and 0. A formula is evaluated in one type throughout: f32, f64, or i64 for integers. `max` and `min` return NaN
//! if either operand is NaN, as in PyTorch. `select` evaluates both of its branches.

pub(crate) mod derivative;
pub(crate) mod formulas;
pub(crate) mod philox;
pub(crate) mod polynomials;
pub(crate) mod primitives;
pub(crate) mod program;
pub(crate) mod rows;
pub(crate) mod special;
pub(crate) mod table;

use std::collections::HashMap;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, OnceLock};
use std::{fmt, ops};

use smallvec::{SmallVec, smallvec};

use crate::expr::program::Program;
use crate::layout::shape::impl_from;

pub(crate) use crate::expr::primitives::{Binary, GELU_CUBE, Leaf, Op, SQRT_2_OVER_PI, Unary, is_argument, is_integer};

/// A formula over tensor elements; see the [module](self).
///
/// ```
/// use claystone::ops::Expr;
/// let x = Expr::input(0);
/// let silu = &x * x.sigmoid();
/// assert_eq!(silu, Expr::input(0) * Expr::input(0).sigmoid()); // by structure
/// assert!(silu.uses_input(0) && !silu.uses_input(1));
/// ```
#[derive(Clone)]
pub struct Expr(Arc<Node>);

struct Node {
    hash: u64,
    /// Bit i: the formula reads operand i; the last bit covers operands 63 and up. Every launch tests this mask.
    reads: u64,
    op: Op,
    args: Args<Expr>,
    /// The hash of the formula without its number arguments; see [`is_argument`].
    shape_hash: u64,
    /// The cached program of this formula. Holds `None` in formulas that a program owns, because a reference cycle would keep the program
    /// alive.
    program: OnceLock<Option<Arc<Program>>>,
}

/// The operands of a node: at most three, and none for a leaf.
pub(crate) type Args<T> = SmallVec<[T; 3]>;

impl Expr {
    /// A constant. Formulas that differ only in such numbers share a program, which takes the numbers as arguments. The numbers 0, 1, 2, 3,
    /// 1/2, their negatives, infinities and NaN are part of the program's code.
    pub fn constant(c: f64) -> Expr {
        Expr::leaf(Leaf::Const(c))
    }

    fn leaf(leaf: Leaf) -> Expr {
        Expr::node(Op::Leaf(leaf), Args::new())
    }

    fn node(op: Op, args: Args<Expr>) -> Expr {
        let (tag, payload) = match op {
            Op::Leaf(l) => l.key(),
            Op::Unary(u) => (6, u as u64),
            Op::Binary(b) => (7, b as u64),
            Op::Select => (8, 0),
        };
        let own = hash_step(u64::from(tag) + 1, payload);
        let hash = args.iter().fold(own, |h, a| hash_step(h, a.0.hash));
        let shape_hash = match op {
            Op::Leaf(Leaf::Const(c)) if is_argument(c) => hash_step(0, is_integer(c).into()),
            Op::Leaf(Leaf::Number { whole, .. }) => hash_step(0, whole.into()),
            _ => args.iter().fold(own, |h, a| hash_step(h, a.0.shape_hash)),
        };
        let reads = match op {
            Op::Leaf(Leaf::Input(i)) => read_bit(i),
            _ => args.iter().fold(0, |reads, a| reads | a.0.reads),
        };
        Expr(Arc::new(Node { hash, shape_hash, reads, op, args, program: OnceLock::new() }))
    }

    /// The `index`-th number argument of a program. `whole` is true if the number is an integer.
    pub(crate) fn number_argument(index: usize, whole: bool) -> Expr {
        Expr::leaf(Leaf::Number { index, whole })
    }

    /// Attaches a program that has all constants in its code. Only for the formulas of tables, of which there is a fixed number.
    pub(crate) fn with_fixed_program(&self) -> Expr {
        self.with_program(Some(Arc::new(Program::new(std::slice::from_ref(self)))))
    }

    /// Copies the root node, and attaches `program` to the copy, or no program if `None`.
    pub(crate) fn with_program(&self, program: Option<Arc<Program>>) -> Expr {
        let Node { hash, shape_hash, reads, op, ref args, .. } = *self.0;
        Expr(Arc::new(Node { hash, shape_hash, reads, op, args: args.clone(), program: OnceLock::from(program) }))
    }
}

/// Returns the bit for operand i in [`Node::reads`].
fn read_bit(i: usize) -> u64 {
    1 << i.min(63)
}

/// Mixes x into the hash h with the finaliser of splitmix64. The result is the same in every process.
fn hash_step(h: u64, x: u64) -> u64 {
    let z = h.rotate_left(17).wrapping_add(x).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Constructors, which simplify formulas without changing values (except that `-0 + 0` stays -0): constant folding in f64, `x + 0`,
/// `x * 1`, `x - 0`, `x / 1`, `-(-x)`, `pow` by 0, 1, 2, 3 and 1/2, and selections between equal branches. `x * 0` is kept, because NaN
/// and infinity must propagate.
impl Expr {
    pub(crate) fn unary(op: Unary, x: Expr) -> Expr {
        if let Some(c) = x.as_const() {
            return Expr::constant(op.eval(c));
        }
        match (op, x.op()) {
            (Unary::Neg, Op::Unary(Unary::Neg)) => x.args()[0].clone(),
            _ => Expr::node(Op::Unary(op), smallvec![x]),
        }
    }

    pub(crate) fn binary(op: Binary, a: Expr, b: Expr) -> Expr {
        match (op, a.as_const(), b.as_const()) {
            (_, Some(x), Some(y)) => Expr::constant(op.eval(x, y)),
            (Binary::Add, Some(0.0), _) | (Binary::Mul, Some(1.0), _) => b,
            (Binary::Add | Binary::Sub, _, Some(0.0)) => a,
            (Binary::Mul | Binary::Div | Binary::Pow, _, Some(1.0)) => a,
            (Binary::Mul, Some(-1.0), _) => -b,
            (Binary::Mul | Binary::Div, _, Some(-1.0)) => -a,
            (Binary::Pow, _, Some(0.0)) => Expr::constant(1.0),
            (Binary::Pow, _, Some(2.0)) => a.square(),
            (Binary::Pow, _, Some(3.0)) => a.square() * a,
            (Binary::Pow, _, Some(0.5)) => a.sqrt(),
            _ => Expr::node(Op::Binary(op), smallvec![a, b]),
        }
    }

    /// `a` where this formula is not zero, else `b`. Both formulas are evaluated.
    pub fn select(&self, a: impl Into<Expr>, b: impl Into<Expr>) -> Expr {
        let (a, b) = (a.into(), b.into());
        match self.as_const() {
            Some(0.0) => b,
            Some(_) => a,
            None if a == b => a,
            None => Expr::node(Op::Select, smallvec![self.clone(), a, b]),
        }
    }

    /// Returns the cache for the formula's program.
    pub(crate) fn program(&self) -> &OnceLock<Option<Arc<Program>>> {
        &self.0.program
    }

    /// Returns the hash of the formula without its number arguments.
    pub(crate) fn shape_hash(&self) -> u64 {
        self.0.shape_hash
    }

    /// Returns the hash of the formula's structure, which was computed when the formula was built.
    pub(crate) fn hash_value(&self) -> u64 {
        self.0.hash
    }

    /// True if both formulas are the same object in memory.
    pub(crate) fn is_same(&self, other: &Expr) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub(crate) fn op(&self) -> Op {
        self.0.op
    }

    pub(crate) fn args(&self) -> &[Expr] {
        &self.0.args
    }

    /// Returns the value if the formula is a constant, else `None`.
    pub fn as_const(&self) -> Option<f64> {
        match self.0.op {
            Op::Leaf(Leaf::Const(c)) => Some(c),
            _ => None,
        }
    }
}

/// Properties of a formula.
impl Expr {
    /// True if the formula reads its `i`-th operand.
    pub fn uses_input(&self, i: usize) -> bool {
        let may = self.0.reads & read_bit(i) != 0;
        may && (i < 63 || Dag::new(std::slice::from_ref(self)).leaves().any(|l| l == Leaf::Input(i)))
    }

    /// True if the formula draws random numbers from the `i`-th seed.
    pub fn uses_seed(&self, i: usize) -> bool {
        Dag::new(std::slice::from_ref(self))
            .leaves()
            .any(|l| matches!(l, Leaf::Uniform(j) | Leaf::Normal(j) | Leaf::Bits(j) if i == j))
    }

    /// The number of operands: one more than the greatest index of an input.
    pub fn arity(&self) -> usize {
        Dag::new(std::slice::from_ref(self)).arity()
    }
}

/// Formulas as one numbered list of distinct nodes, in which operands precede their users. Equal nodes get the same number. The list is
/// built without recursion, in time linear in the number of node objects.
pub(crate) struct Dag {
    pub(crate) nodes: Vec<DagNode>,
    pub(crate) roots: Vec<usize>,
}

pub(crate) struct DagNode {
    pub(crate) expr: Expr,
    pub(crate) args: Args<usize>,
}

impl Dag {
    pub(crate) fn new(roots: &[Expr]) -> Dag {
        let mut nodes: Vec<DagNode> = Vec::new();
        let mut by_address: HashMap<*const Node, usize> = HashMap::new();
        let mut by_structure: HashMap<(Op, Args<usize>), usize> = HashMap::new();
        let mut stack: Vec<(&Expr, usize)> = roots.iter().rev().map(|r| (r, 0)).collect();
        while let Some((expr, visited)) = stack.pop() {
            let address = Arc::as_ptr(&expr.0);
            if by_address.contains_key(&address) {
                continue;
            }
            if let Some(arg) = expr.args().get(visited) {
                stack.push((expr, visited + 1));
                stack.push((arg, 0));
                continue;
            }
            let args: Args<usize> = expr.args().iter().map(|a| by_address[&Arc::as_ptr(&a.0)]).collect();
            let number = *by_structure.entry((expr.op(), args)).or_insert_with_key(|(_, args)| {
                nodes.push(DagNode { expr: expr.clone(), args: args.clone() });
                nodes.len() - 1
            });
            by_address.insert(address, number);
        }
        let roots = roots.iter().map(|r| by_address[&Arc::as_ptr(&r.0)]).collect();
        Dag { nodes, roots }
    }

    pub(crate) fn leaves(&self) -> impl Iterator<Item = Leaf> + '_ {
        self.nodes.iter().filter_map(|n| match n.expr.op() {
            Op::Leaf(l) => Some(l),
            _ => None,
        })
    }

    /// The number of operands: one more than the greatest index of an input.
    pub(crate) fn arity(&self) -> usize {
        self.leaves()
            .filter_map(|l| if let Leaf::Input(i) = l { Some(i.saturating_add(1)) } else { None })
            .max()
            .unwrap_or(0)
    }
}

/// Replaces each leaf for which `leaf` returns a formula by that formula. Nothing is simplified, so every other operation stays as it is.
pub(crate) fn with_leaves(exprs: &[Expr], leaf: impl Fn(Leaf) -> Option<Expr>) -> Vec<Expr> {
    let dag = Dag::new(exprs);
    let mut made: Vec<Expr> = Vec::with_capacity(dag.nodes.len());
    for node in &dag.nodes {
        let new = match node.expr.op() {
            Op::Leaf(of) => leaf(of).unwrap_or_else(|| node.expr.clone()),
            op => Expr::node(op, node.args.iter().map(|&a| made[a].clone()).collect()),
        };
        made.push(new);
    }
    dag.roots.iter().map(|&root| made[root].clone()).collect()
}

impl PartialEq for Expr {
    /// Every launch looks up kernels by formula, so small formulas are compared node by node. A formula with many shared nodes has too
    /// many paths for that; its nodes are numbered first.
    fn eq(&self, other: &Expr) -> bool {
        equal_within(self, other, &mut 64).unwrap_or_else(|| {
            let dag = Dag::new(&[self.clone(), other.clone()]);
            dag.roots[0] == dag.roots[1]
        })
    }
}

/// Compares two formulas. Returns `None` if comparing `budget` nodes does not decide.
fn equal_within(a: &Expr, b: &Expr, budget: &mut u32) -> Option<bool> {
    if Arc::ptr_eq(&a.0, &b.0) {
        return Some(true);
    }
    if a.0.hash != b.0.hash || a.0.op != b.0.op {
        return Some(false);
    }
    *budget = budget.checked_sub(1)?;
    for (a, b) in a.args().iter().zip(b.args()) {
        if !equal_within(a, b, budget)? {
            return Some(false);
        }
    }
    Some(true)
}

impl Eq for Expr {}

impl Hash for Expr {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.0.hash);
    }
}

impl Drop for Node {
    /// Frees long chains in a loop: the default drop would recurse once per node and could overflow the stack.
    fn drop(&mut self) {
        let mut orphans = std::mem::take(&mut self.args).into_vec();
        while let Some(Expr(node)) = orphans.pop() {
            if let Some(mut node) = Arc::into_inner(node) {
                orphans.extend(std::mem::take(&mut node.args));
            }
        }
    }
}

impl fmt::Debug for Expr {
    /// Prints one assignment for each distinct node, so that shared nodes are printed once.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dag = Dag::new(std::slice::from_ref(self));
        for (i, n) in dag.nodes.iter().enumerate() {
            let sep = if i == 0 { "" } else { "; " };
            match n.expr.op() {
                Op::Leaf(l) => write!(f, "{sep}v{i} = {l:?}")?,
                Op::Unary(u) => write!(f, "{sep}v{i} = {u:?}(v{})", n.args[0])?,
                Op::Binary(b) => write!(f, "{sep}v{i} = {b:?}(v{}, v{})", n.args[0], n.args[1])?,
                Op::Select => write!(f, "{sep}v{i} = v{} ? v{} : v{}", n.args[0], n.args[1], n.args[2])?,
            }
        }
        Ok(())
    }
}

impl_from! { Expr:
    [] f64, c => Expr::constant(c);
    [] &Expr, e => e.clone();
}

macro_rules! operators {
    ($($trait:ident $method:ident => $op:ident;)*) => { $(
        operators!(@ $trait $method $op, Expr, Expr);
        operators!(@ $trait $method $op, Expr, &Expr);
        operators!(@ $trait $method $op, &Expr, Expr);
        operators!(@ $trait $method $op, &Expr, &Expr);
        operators!(@ $trait $method $op, Expr, f64);
        operators!(@ $trait $method $op, &Expr, f64);
        operators!(@ $trait $method $op, f64, Expr);
        operators!(@ $trait $method $op, f64, &Expr);
    )* };
    (@ $trait:ident $method:ident $op:ident, $lhs:ty, $rhs:ty) => {
        impl ops::$trait<$rhs> for $lhs {
            type Output = Expr;
            fn $method(self, rhs: $rhs) -> Expr {
                Expr::binary(Binary::$op, self.into(), rhs.into())
            }
        }
    };
}

operators! {
    Add add => Add;
    Sub sub => Sub;
    Mul mul => Mul;
    Div div => Div;
    Rem rem => Rem;
}

impl ops::Neg for Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        Expr::unary(Unary::Neg, self)
    }
}
impl ops::Neg for &Expr {
    type Output = Expr;
    fn neg(self) -> Expr {
        -self.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equality_is_structural_and_hashes_agree() {
        let f = |x: Expr| (&x * 2.0 + 1.0).exp() / x;
        let (a, b) = (f(Expr::input(0)), f(Expr::input(0)));
        assert_eq!(a, b);
        assert_eq!(a.0.hash, b.0.hash);
        assert_ne!(a, f(Expr::input(1)));
        assert_ne!(Expr::constant(0.0), Expr::constant(-0.0));
        assert_eq!(Expr::constant(f64::NAN), Expr::constant(-f64::NAN));
    }

    #[test]
    fn shared_and_deep_formulas_are_linear() {
        let doubled = |mut e: Expr| {
            for _ in 0..200 {
                e = (&e + &e).sin(); // 2^200 paths through 401 nodes: only the numbered list is fast
            }
            e
        };
        let (a, b) = (doubled(Expr::input(0)), doubled(Expr::input(0)));
        assert_eq!(a, b);
        assert_eq!(Dag::new(&[a, b]).nodes.len(), 401);

        let mut deep = Expr::input(3);
        for _ in 0..300_000 {
            deep = deep.sin();
        }
        assert_eq!(deep.arity(), 4);
        drop(deep); // must not overflow the stack
    }

    #[test]
    fn simplifications() {
        let x = Expr::input(0);
        for e in [&x + 0.0, 0.0 + &x, &x - 0.0, &x * 1.0, 1.0 * &x, &x / 1.0, -(-&x), x.pow(1.0)] {
            assert_eq!(e, x);
        }
        assert_eq!(x.pow(2.0), &x * &x);
        assert_eq!(Expr::constant(2.0) * 3.0 + 1.0, Expr::constant(7.0));
        assert_eq!(x.lt(0.0).select(&x, &x), x);
        assert_ne!(&x * 0.0, Expr::constant(0.0)); // NaN must propagate
    }

    #[test]
    fn questions() {
        let e = Expr::input(2) + Expr::uniform(1);
        assert_eq!(e.arity(), 3);
        assert!(e.uses_input(2) && !e.uses_input(0));
        let far = Expr::input(70).exp() * Expr::input(62);
        assert!(far.uses_input(70) && far.uses_input(62) && !far.uses_input(63) && !far.uses_input(71));
        assert!(e.uses_seed(1) && !e.uses_seed(0));
        assert_eq!(Expr::constant(1.0).arity(), 0);
    }
}
