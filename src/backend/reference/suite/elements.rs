//! Tests of formulas and sequences.

use super::{Suite, VIEWS, View, numbers, specials};
use crate::backend::problem::map::{Formulas, Params};
use crate::backend::problem::sequence::Sequence;
use crate::expr::Expr;
use crate::expr::philox::Seed;
use crate::expr::primitives::Binary;
use crate::expr::program::Program;
use crate::{DType, Result, Scalar, Tensor};

/// Compares formulas over these inputs. The results are written to tensors with the layout `view`.
fn compare_formulas(
    suite: &mut Suite,
    (view, dims): (View, &[usize]),
    inputs: &[Tensor],
    exprs: &[Expr],
    dtypes: &[DType],
    n: usize,
) -> Result<()> {
    let outs = dtypes.iter().map(|&t| suite.tensor(view, dims, t, |_| 1.0)).collect::<Result<Vec<Tensor>>>()?;
    let shapes: Vec<_> = inputs.iter().map(|t| (t.shape(), t.strides())).collect();
    let what = format!("{exprs:?} over {shapes:?}, {view:?}");
    let dtype = if inputs.iter().chain(&outs).any(|t| t.dtype == DType::F64) { DType::F64 } else { dtypes[0] };
    suite.compare(what, dtype, n, |side| {
        let inputs = inputs.iter().map(|t| side.upload(t)).collect::<Result<Vec<_>>>()?;
        let outs = outs.iter().map(|t| side.upload(t)).collect::<Result<Vec<_>>>()?;
        let (scalars, seeds) = ([Scalar::Float(0.5), Scalar::Int(3)], [Seed { key: 7, stream: 1 }; 3]);
        let params = Params { scalars: &scalars, seeds: &seeds, base: None };
        let (inputs, outputs): (Vec<_>, Vec<_>) = (inputs.iter().collect(), outs.iter().collect());
        let program = &Program::new(exprs);
        side.backend.map(&Formulas { op: "map", inputs: &inputs, params, program, outputs: &outputs })?;
        Ok(Some(outs))
    })
}

pub(super) fn map(suite: &mut Suite) -> Result<()> {
    use DType::{BF16, Bool, F16, F32, F64, I8, I16, I32, I64, U8};
    let (x, y) = (Expr::input(0), Expr::input(1));
    // Broadcast operands, with sizes just below and above the size of a tile.
    let formula = [(&x * Expr::scalar(0) + &y).relu()];
    for (dtype, number) in
        [(F32, specials as fn(&mut _) -> f64), (F16, numbers), (BF16, numbers), (F64, specials), (I32, numbers)]
    {
        for view in VIEWS {
            suite.runs_on_opencl = dtype == F32 || view == View::Odd;
            for n in [0, 1, 2, 17, 511, 512, 513] {
                let inputs =
                    [suite.tensor(view, &[3, 1, n], dtype, number)?, suite.tensor(view, &[2, n], dtype, number)?];
                compare_formulas(suite, (view, &[3, 2, n]), &inputs, &formula, &[dtype], 2)?;
            }
        }
    }
    suite.runs_on_opencl = true;
    // Functions, in formulas with several results.
    let functions = [(x.exp() / (1.0 + y.square())).tanh(), x.sigmoid() - y.is_nan().select(0.0, y.sin())];
    let inputs =
        [suite.tensor(View::Gapped, &[5, 131], F32, specials)?, suite.tensor(View::Odd, &[5, 131], F32, numbers)?];
    compare_formulas(suite, (View::Odd, &[5, 131]), &inputs, &functions, &[F32, F16], 4)?;
    // Integer arithmetic that wraps, and bit operations.
    let (a, b) = (Expr::input(0), Expr::input(1));
    let bits = |op, a: &Expr, b: &Expr| Expr::binary(op, a.clone(), b.clone());
    let whole =
        [bits(Binary::Shl, &a, &b) - bits(Binary::Gcd, &a, &b), bits(Binary::Pow, &a, &bits(Binary::And, &a, &b))];
    let inputs = [suite.tensor(View::Odd, &[7, 37], I64, numbers)?, suite.tensor(View::Plain, &[37], U8, numbers)?];
    compare_formulas(suite, (View::Gapped, &[7, 37]), &inputs, &whole, &[I64, U8], 0)?;
    // Conversions between dtypes.
    for (from, to) in [(F32, I32), (F32, I8), (F64, F16), (F32, I16), (I64, F32), (F16, Bool), (I8, BF16)] {
        suite.runs_on_opencl = matches!(to, I8 | F16 | Bool);
        let x = [suite.tensor(View::Odd, &[3, 85], from, specials)?];
        compare_formulas(suite, (View::Plain, &[3, 85]), &x, &[Expr::input(0)], &[to], 0)?;
    }
    suite.runs_on_opencl = true;
    // Random numbers, which depend on the element's index. Normal numbers are computed in f32.
    let random = [Expr::uniform(0), Expr::normal(1)];
    compare_formulas(suite, (View::Odd, &[3, 43]), &[], &random, &[F32, F64], 0)?;
    // In-place formulas. With a shift, they would overwrite elements that are not yet read, so the input must be copied first.
    let whole = suite.tensor(View::Plain, &[200], F32, numbers)?;
    for shift in [0, 1, 3] {
        suite.compare(format!("in place, shifted by {shift}"), F32, 2, |side| {
            let whole = side.upload(&whole)?;
            let part = |start| whole.layout.narrow("map", 0, start, 190).map(|layout| whole.with_layout(layout));
            let (from, to) = (part(3)?, part(3 + shift)?);
            let program = &Program::new(&[Expr::input(0) * 2.0 + 1.0]);
            let params = Params::default();
            side.backend.map(&Formulas { op: "map", inputs: &[&from], params, program, outputs: &[&to] })?;
            Ok(Some(vec![whole]))
        })?;
    }
    Ok(())
}

pub(super) fn sequence(suite: &mut Suite) -> Result<()> {
    let values = [
        Sequence::Int { start: -3, step: 7 },
        Sequence::evenly_spaced(-1.0, 2.5, 65),
        Sequence::evenly_spaced(3.0, 3.5, 513),
    ];
    for dtype in [DType::F32, DType::F16, DType::I64, DType::U8] {
        for values in values {
            let counts = if let Sequence::Float { n, .. } = values { vec![n] } else { vec![1, 63, 64, 65, 1031] };
            for n in counts {
                suite.compare(format!("{n} numbers of {values:?}"), dtype, 0, |side| {
                    let out = side.alloc_output(n, dtype)?;
                    Ok(side.backend.sequence(values, &out)?.then_some(vec![out]))
                })?;
            }
        }
    }
    Ok(())
}
