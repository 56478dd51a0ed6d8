//! Symbolic derivatives, by forward differentiation over the numbered list of nodes: a shared node is differentiated once, and no formula
//! is built for a derivative that is zero everywhere. The conventions at kinks are PyTorch's: `abs'(0) = 0`, ties of `max` and `min`
//! split the gradient in half, and `select` passes the gradient to the selected branch. Rounding and comparisons have no gradient.

use crate::expr::{Binary, Dag, Expr, Leaf, Op, Unary};

impl Expr {
    /// The derivative with respect to the `input`-th operand.
    ///
    /// ```
    /// use claystone::ops::Expr;
    /// let x = Expr::input(0);
    /// assert_eq!(x.sin().diff(0), x.cos());
    /// assert_eq!(x.sin().diff(1), Expr::constant(0.0));
    /// ```
    pub fn diff(&self, input: usize) -> Expr {
        let dag = Dag::new(std::slice::from_ref(self));
        let mut derivatives: Vec<Option<Expr>> = Vec::with_capacity(dag.nodes.len());
        for node in &dag.nodes {
            let y = &node.expr;
            let d = |i: usize| derivatives[node.args[i]].as_ref();
            let derivative = match y.op() {
                Op::Leaf(Leaf::Input(i)) => (i == input).then(|| Expr::constant(1.0)),
                Op::Leaf(_) => None,
                Op::Unary(u) => d(0).and_then(|dx| Some(dx * unary(u, &y.args()[0], y)?)),
                Op::Binary(b) => binary(b, &y.args()[0], &y.args()[1], y, d(0), d(1)),
                Op::Select => match (d(1), d(2)) {
                    (None, None) => None,
                    (a, b) => Some(y.args()[0].select(or_zero(a), or_zero(b))),
                },
            };
            derivatives.push(derivative);
        }
        or_zero(derivatives[dag.roots[0]].as_ref())
    }
}

fn or_zero(d: Option<&Expr>) -> Expr {
    d.cloned().unwrap_or_else(|| Expr::constant(0.0))
}

/// Returns dy/dx of `y = op(x)`, or `None` if the derivative is zero almost everywhere.
fn unary(op: Unary, x: &Expr, y: &Expr) -> Option<Expr> {
    Some(match op {
        Unary::Floor | Unary::Ceil | Unary::Round | Unary::Trunc => return None,
        Unary::Neg => Expr::constant(-1.0),
        Unary::Abs => x.sign(),
        Unary::Sqrt => 0.5 / y,
        Unary::Exp => y.clone(),
        Unary::Log => x.recip(),
        Unary::Log2 => std::f64::consts::LOG2_E / x,
        Unary::Log10 => std::f64::consts::LOG10_E / x,
        Unary::Expm1 => y + 1.0,
        Unary::Log1p => (x + 1.0).recip(),
        Unary::Sin => x.cos(),
        Unary::Cos => -x.sin(),
        Unary::Tanh => 1.0 - y.square(),
        Unary::Erf => (-x.square()).exp() * std::f64::consts::FRAC_2_SQRT_PI,
        Unary::Erfc => (-x.square()).exp() * -std::f64::consts::FRAC_2_SQRT_PI,
        Unary::Lgamma => x.digamma(),
        Unary::Atan => (x.square() + 1.0).recip(),
        Unary::Sigmoid => y * (1.0 - y),
    })
}

/// Returns the derivative of `y = op(a, b)`, given the derivatives `da` and `db` of a and b. `None` is a derivative of zero.
fn binary(op: Binary, a: &Expr, b: &Expr, y: &Expr, da: Option<&Expr>, db: Option<&Expr>) -> Option<Expr> {
    let da_times = |f: &dyn Fn() -> Expr| da.map(|d| d * f());
    let db_times = |f: &dyn Fn() -> Expr| db.map(|d| d * f());
    match op {
        Binary::Lt | Binary::Le | Binary::Eq => None,
        Binary::And | Binary::Or | Binary::Xor | Binary::Shl | Binary::Shr | Binary::Gcd => None,
        Binary::Copysign => da_times(&|| a.eq(0.0).select(0.0, y / a)),
        Binary::Add => add_optional(da.cloned(), db.cloned()),
        Binary::Sub => add_optional(da.cloned(), db.map(|d| -d)),
        Binary::Mul => add_optional(da_times(&|| b.clone()), db_times(&|| a.clone())),
        Binary::Div => add_optional(da.map(|d| d / b), db_times(&|| -(y / b))),
        Binary::Rem => add_optional(da.cloned(), db_times(&|| -(a / b).trunc())),
        Binary::Pow => {
            // The derivative by the base is 0 if the exponent is 0, for every base. The derivative by the exponent is 0 if the base is 0.
            let by_base = || b.eq(0.0).select(0.0, b * a.pow(b - 1.0));
            let by_exponent = || (a.eq(0.0) * b.ge(0.0)).select(0.0, y * a.log());
            add_optional(da_times(&by_base), db_times(&by_exponent))
        }
        Binary::Max => select_gradient(&a.lt(b), &b.lt(a), da, db),
        Binary::Min => select_gradient(&b.lt(a), &a.lt(b), da, db),
    }
}

fn add_optional(a: Option<Expr>, b: Option<Expr>) -> Option<Expr> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a + b),
        (a, b) => a.or(b),
    }
}

/// Selects `db` where b was chosen, `da` where a was chosen, and the mean of `da` and `db` where a and b are equal.
fn select_gradient(chose_b: &Expr, chose_a: &Expr, da: Option<&Expr>, db: Option<&Expr>) -> Option<Expr> {
    let weight = |won: &Expr, lost: &Expr| 0.5 * (1.0 + won - lost);
    add_optional(da.map(|d| d * weight(chose_a, chose_b)), db.map(|d| d * weight(chose_b, chose_a)))
}
