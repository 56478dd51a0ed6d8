//! Translates formulas to OpenCL C.
//!
//! A program becomes one function of scalar values, which the elementwise kernel, a reduction or the epilogue of a matrix product
//! can call. Constants are printed so that the compiler reads exactly the same values.

use std::fmt::Write;

use crate::Compute;
use crate::expr::program::Program;
use crate::expr::{Args, Binary, Dag, Leaf, Op, Unary};

impl Program {
    /// Returns a function `void name(inputs, scalars, seeds, index, fault, outputs)` in OpenCL C (after `prelude.cl`):
    ///
    /// - `const C x0, ...` and `const C s0, ...`, with C = `long`, `float` or `double`;
    /// - if the program has seeds, `const ulong key0, const ulong stream0, ...` and then `const ulong index`, the index of the element;
    /// - if the program [can fault](Program::can_fault), `__global int* fault`;
    /// - `C* o0, ...`, private pointers to the results.
    pub(crate) fn emit(&self, compute: Compute, name: &str) -> String {
        let seeds = (0..self.seeds()).map(|i| format!("const ulong key{i}, const ulong stream{i}"));
        let index = (self.seeds() > 0).then(|| "const ulong index".into());
        self.emit_with(compute, name, seeds.chain(index), |kind, i| format!("random_{kind}(key{i}, stream{i}, index)"))
    }

    /// Like [`Program::emit`], but the function takes random numbers as arguments: `const {type} {kind}{seed}` for each of [`Program::draws`].
    pub(crate) fn emit_with_drawn_numbers(&self, compute: Compute, name: &str) -> String {
        let numbers = self.draws().into_iter().map(|(kind, i)| format!("const {} {kind}{i}", draw_type(kind)));
        self.emit_with(compute, name, numbers, |kind, i| format!("{kind}{i}"))
    }

    fn emit_with(
        &self,
        compute: Compute,
        name: &str,
        random: impl Iterator<Item = String>,
        drawn: impl Fn(&str, usize) -> String,
    ) -> String {
        let c = compute.cl_name();
        let mut params: Vec<String> = Vec::new();
        params.extend((0..self.inputs()).map(|i| format!("const {c} x{i}")));
        params.extend((0..self.scalars()).map(|i| format!("const {c} s{i}")));
        params.extend(random);
        params.extend(self.can_fault(compute).then(|| "__global int* fault".into()));
        params.extend((0..self.outputs()).map(|j| format!("{c}* o{j}")));

        let dag = Dag::new(self.exprs());
        let mut body = format!("static inline void {name}({})\n{{\n", params.join(", "));
        let mut names: Vec<String> = Vec::with_capacity(dag.nodes.len());
        for (i, node) in dag.nodes.iter().enumerate() {
            let args: Args<&str> = node.args.iter().map(|&a| &*names[a]).collect();
            let name = match node.expr.op() {
                Op::Leaf(Leaf::Input(k)) => format!("x{k}"),
                Op::Leaf(Leaf::Scalar(k) | Leaf::Number { index: k, .. }) => format!("s{k}"),
                Op::Leaf(Leaf::Const(value)) => literal(value, compute),
                Op::Leaf(leaf) => {
                    let (kind, seed) = leaf.draws().expect("the other leaves draw");
                    let _ = writeln!(body, "    const {c} v{i} = ({c}){};", drawn(kind, seed));
                    format!("v{i}")
                }
                op => {
                    let value = primitive_expression(op, &args, compute);
                    let _ = writeln!(body, "    const {c} v{i} = {value};");
                    format!("v{i}")
                }
            };
            drop(args);
            names.push(name);
        }
        for (j, &root) in dag.roots.iter().enumerate() {
            let _ = writeln!(body, "    *o{j} = {};", names[root]);
        }
        body + "}\n"
    }
}

/// Returns the OpenCL C type of random numbers of the given kind: bits, uniform or normal.
pub(crate) fn draw_type(kind: &str) -> &'static str {
    if kind == "bits" { "uint" } else { "float" }
}

/// Returns an OpenCL C literal for exactly this value.
fn literal(value: f64, compute: Compute) -> String {
    match compute {
        Compute::I64 => format!("({}L)", value as i64),
        _ if value.is_nan() => format!("({})NAN", compute.cl_name()),
        _ if value.is_infinite() => {
            format!("({}({})INFINITY)", if value < 0.0 { "-" } else { "" }, compute.cl_name())
        }
        Compute::F32 => match value as f32 {
            narrow if narrow.is_infinite() => literal(f64::from(narrow), compute),
            narrow => format!("({narrow:e}f)"),
        },
        Compute::F64 => format!("({value:e})"),
    }
}

/// Returns the OpenCL C expression of one primitive. Operands are names or parenthesised literals.
fn primitive_expression(op: Op, args: &[&str], compute: Compute) -> String {
    let c = compute.cl_name();
    let int = compute == Compute::I64;
    let call = |f: &str| format!("{f}({})", args.join(", "));
    let call_typed = |f: &str| format!("{f}_{c}({})", args.join(", "));
    let infix = |sign: &str, f: &str| {
        if int { call_typed(f) } else { format!("{} {sign} {}", args[0], args[1]) }
    };
    let truth = |sign: &str| format!("({c})({} {sign} {})", args[0], args[1]);
    let rounding = |f: &str| if int { args[0].to_string() } else { call(f) };
    match op {
        Op::Leaf(_) => unreachable!("other leaves have names"),
        Op::Unary(op) => match op {
            Unary::Neg if int => call_typed("neg"),
            Unary::Neg => format!("-{}", args[0]),
            Unary::Abs if int => call_typed("abs"),
            Unary::Abs => call("fabs"),
            Unary::Floor => rounding("floor"),
            Unary::Ceil => rounding("ceil"),
            Unary::Round => rounding("rint"),
            Unary::Trunc => rounding("trunc"),
            Unary::Sigmoid => call_typed("sigmoid"),
            // OpenCL has a function with the name of every other primitive.
            op => call(&format!("{op:?}").to_lowercase()),
        },
        Op::Binary(op) => match op {
            Binary::Add => infix("+", "add"),
            Binary::Sub => infix("-", "sub"),
            Binary::Mul => infix("*", "mul"),
            Binary::Div if int => format!("div_long({}, {}, fault)", args[0], args[1]),
            Binary::Div => infix("/", "div"),
            Binary::Rem if int => format!("rem_long({}, {}, fault)", args[0], args[1]),
            Binary::Rem => call("fmod"),
            Binary::Pow if int => call_typed("pow"),
            Binary::Pow => call("pow"),
            Binary::Max => call_typed("max"),
            Binary::Min => call_typed("min"),
            Binary::Lt => truth("<"),
            Binary::Le => truth("<="),
            Binary::Eq => truth("=="),
            Binary::Copysign => call("copysign"),
            Binary::And => format!("{} & {}", args[0], args[1]),
            Binary::Or => format!("{} | {}", args[0], args[1]),
            Binary::Xor => format!("{} ^ {}", args[0], args[1]),
            Binary::Shl => call_typed("shl"),
            Binary::Shr => call_typed("shr"),
            Binary::Gcd => call_typed("gcd"),
        },
        Op::Select => format!("{} != 0 ? {} : {}", args[0], args[1], args[2]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Expr;

    #[test]
    fn literals_read_back_exactly() {
        for x in [0.1, -0.0, 1e-45, 3.4e38, 1.0 / 3.0, 123_456_789.0, -2.5] {
            let text = literal(x, Compute::F32);
            let digits = text.trim_start_matches('(').trim_end_matches("f)");
            assert_eq!(digits.parse::<f32>().unwrap().to_bits(), (x as f32).to_bits(), "{text}");
            let text = literal(x, Compute::F64);
            assert_eq!(text.trim_matches(['(', ')']).parse::<f64>().unwrap().to_bits(), x.to_bits(), "{text}");
        }
        assert_eq!(literal(-7.0, Compute::I64), "(-7L)");
        assert_eq!(literal(1e300, Compute::F32), "((float)INFINITY)");
        assert_eq!(literal(f64::NEG_INFINITY, Compute::F64), "(-(double)INFINITY)");
    }

    #[test]
    fn emit_orders_arguments_and_shares_subexpressions() {
        let (x, y) = (Expr::input(0), Expr::input(1));
        let text = Program::new(&[(&x / &y) * Expr::scalar(0) + Expr::bits(0)]).emit(Compute::I64, "f");
        let head = "static inline void f(const long x0, const long x1, const long s0, const ulong key0, const ulong stream0, \
                    const ulong index, __global int* fault, long* o0)";
        assert!(text.starts_with(head), "{text}");
        assert!(text.contains("div_long(x0, x1, fault)") && text.contains("*o0 = "), "{text}");
        let text = Program::new(&[x.exp() + x.exp()]).emit(Compute::F32, "g");
        assert_eq!(text.matches("exp(x0)").count(), 1, "{text}");
    }
}
