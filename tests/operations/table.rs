//! Every row of the expression table on every device: values are compared with f64 and derivatives with central differences, for
//! contiguous, strided, reversed and broadcast operands. New rows are tested automatically.

use claystone::ops::{Accepts, Output, ROWS, Row};
use claystone::{DType, Device, Result, Scalar, Tensor};

use crate::common::{devices, each_device};

const HEIGHT: usize = 7;
const WIDTH: usize = 13;
const POINTS: usize = HEIGHT * WIDTH;

/// The memory layout of an operand. All layouts except `Contiguous` use the strided kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Layout {
    Contiguous,
    /// A transposed view with a gap after each row, from an odd offset.
    Strided,
    /// Columns in reverse order.
    Backwards,
    /// A single row that is broadcast to all rows.
    Broadcast,
}

/// Returns the operand's values after broadcasting, and the operand as a tensor.
fn operand(row: &Row, k: usize, lie: Layout, dtype: DType, device: Device) -> Result<(Vec<f64>, Tensor)> {
    let (low, high) = row.domain[k];
    // Low-discrepancy points that are exact in f32, with different values in each operand.
    let point = |i: usize| {
        let u = ((i + 1) as f64 * [0.618_033_988_749_895, 0.754_877_666_246_693, 0.569_840_290_998_053][k]).fract();
        let x = f64::from((low + u * (high - low)) as f32);
        if row.accepts == Accepts::Integer { x.floor() } else { x }
    };
    let seen: Vec<f64> =
        (0..POINTS).map(|i| if lie == Layout::Broadcast { point(i % WIDTH) } else { point(i) }).collect();
    let tensor = |values: &[f64], shape: &[usize]| Tensor::from_slice(values, shape, device)?.to_dtype(dtype);
    let t = match lie {
        Layout::Contiguous => tensor(&seen, &[HEIGHT, WIDTH])?,
        Layout::Strided => {
            let mut memory = vec![f64::NAN; (WIDTH + 1) * (HEIGHT + 2)];
            for (i, x) in seen.iter().enumerate() {
                memory[(1 + i % WIDTH) * (HEIGHT + 2) + 1 + i / WIDTH] = *x;
            }
            tensor(&memory, &[WIDTH + 1, HEIGHT + 2])?.narrow(0, 1, WIDTH)?.narrow(1, 1, HEIGHT)?.t()?
        }
        Layout::Backwards => {
            let memory: Vec<f64> = (0..POINTS).map(|i| seen[i / WIDTH * WIDTH + WIDTH - 1 - i % WIDTH]).collect();
            tensor(&memory, &[HEIGHT, WIDTH])?.flip(1)?
        }
        Layout::Broadcast => tensor(&seen[..WIDTH], &[WIDTH])?,
    };
    Ok((seen, t))
}

/// Returns the cases of a table row: all operands contiguous, then every other layout for each operand in turn. If all operands are
/// broadcast the result is contiguous, so that case is skipped.
fn cases(row: &Row) -> Vec<Vec<Layout>> {
    let lies = [Layout::Strided, Layout::Backwards, Layout::Broadcast];
    let mixed = (0..lies.len()).map(|v| (0..row.arity).map(|k| lies[(v + k) % lies.len()]).collect());
    std::iter::once(vec![Layout::Contiguous; row.arity])
        .chain(mixed)
        .filter(|case: &Vec<Layout>| case.iter().any(|&lie| lie != Layout::Broadcast))
        .collect()
}

fn at(columns: &[(Vec<f64>, Tensor)], i: usize) -> Vec<f64> {
    columns.iter().map(|(values, _)| values[i]).collect()
}

fn scalars(row: &Row) -> Vec<Scalar> {
    let whole = row.accepts == Accepts::Integer;
    row.samples.iter().map(|&s| if whole { Scalar::Int(s as i64) } else { s.into() }).collect()
}

fn check_values(row: &'static Row, device: Device) -> Result<()> {
    let dtype = if row.accepts == Accepts::Integer { DType::I64 } else { DType::F32 };
    for case in cases(row) {
        let operands = (0..row.arity).map(|k| operand(row, k, case[k], dtype, device)).collect::<Result<Vec<_>>>()?;
        let inputs: Vec<&Tensor> = operands.iter().map(|(_, t)| t).collect();
        let out = row.apply(&inputs, &scalars(row))?;
        assert_eq!(out.shape().dims(), [HEIGHT, WIDTH]);
        assert_eq!(out.dtype(), if row.output == Output::Bool { DType::Bool } else { dtype });
        let got = out.to_dtype(DType::F32)?.to_vec::<f32>()?;
        for (i, &got) in got.iter().enumerate() {
            let x = at(&operands, i);
            let right = (row.reference)(&x, row.samples);
            let near = (f64::from(got) - right).abs() <= 1e-5 * right.abs().max(1.0);
            assert!(near, "{} of {x:?} on {device}, {case:?}: {got} instead of {right}", row.name);
        }
    }
    Ok(())
}

fn check_derivatives(row: &'static Row, device: Device) -> Result<()> {
    let fp64 = device.info()?.fp64;
    let (dtype, tolerance) = if fp64 { (DType::F64, 1e-6) } else { (DType::F32, 1e-3) };
    for case in cases(row) {
        let operands = (0..row.arity).map(|k| operand(row, k, case[k], dtype, device)).collect::<Result<Vec<_>>>()?;
        // Slopes of the reference. If two step sizes disagree, there is a kink nearby, and the point gets the output gradient 0, which
        // excludes it.
        let mut slopes = vec![vec![0.0; POINTS]; row.arity];
        let mut upstream = vec![1.0; POINTS];
        for i in 0..POINTS {
            for (k, slopes) in slopes.iter_mut().enumerate() {
                let slope = |h: f64| {
                    let mut x = at(&operands, i);
                    let middle = x[k];
                    x[k] = middle + h;
                    let up = (row.reference)(&x, row.samples);
                    x[k] = middle - h;
                    (up - (row.reference)(&x, row.samples)) / (2.0 * h)
                };
                slopes[i] = slope(1e-5);
                if (slopes[i] - slope(3e-6)).abs() > 1e-7 * slopes[i].abs().max(1.0) {
                    upstream[i] = 0.0;
                }
            }
        }
        assert!(upstream.iter().filter(|&&u| u == 0.0).count() <= 3, "{}: too many kinks", row.name);
        let leaves = operands.iter().map(|(_, t)| t.detach().requires_grad_(true)).collect::<Result<Vec<_>>>()?;
        let out = row.apply(&leaves.iter().collect::<Vec<_>>(), &scalars(row))?;
        if row.output == Output::Bool {
            assert!(!out.requires_grad(), "{}: a bool has no gradient", row.name);
            continue;
        }
        let shape = [HEIGHT, WIDTH];
        out.backward_with(&Tensor::from_slice(&upstream, shape, device)?.to_dtype(dtype)?)?;
        for (k, leaf) in leaves.iter().enumerate() {
            let columns = if case[k] == Layout::Broadcast { WIDTH } else { POINTS };
            let mut right = vec![0.0; columns];
            (0..POINTS).for_each(|i| right[i % columns] += upstream[i] * slopes[k][i]);
            let got = match leaf.grad() {
                Some(grad) => grad.to_dtype(DType::F64)?.to_vec::<f64>()?,
                None => vec![0.0; columns],
            };
            for (i, (got, right)) in got.iter().zip(&right).enumerate() {
                let near = (got - right).abs() <= tolerance * right.abs().max(1.0);
                let x = at(&operands, i);
                assert!(near, "d {} / d {k} at {x:?} on {device}, {case:?}: {got} instead of {right}", row.name);
            }
        }
    }
    Ok(())
}

/// Checks every second row, starting at `part` (0 or 1), so that two tests compile kernels in parallel. `ROW=erf,erfc` selects
/// rows.
fn check(part: usize) {
    let only = std::env::var("ROW").ok();
    let wanted = |row: &&&Row| only.as_deref().is_none_or(|names| names.split(',').any(|name| name == row.name));
    for device in devices() {
        for row in ROWS.iter().skip(part).step_by(2).filter(wanted) {
            check_values(row, device).unwrap_or_else(|e| panic!("{}: {e}", row.name));
            if row.accepts == Accepts::Integer {
                continue;
            }
            check_derivatives(row, device).unwrap_or_else(|e| panic!("{}: {e}", row.name));
        }
    }
}

#[test]
fn even_rows_of_the_table() {
    check(0);
}

#[test]
fn odd_rows_of_the_table() {
    check(1);
}

#[test]
fn where_with_float_masks_keeps_integers_exact() {
    each_device(|d| {
        let odd = (1i64 << 53) + 1; // an integer that f64 cannot represent
        let a = Tensor::full(&[2], odd, (DType::I64, d)).unwrap();
        let mask = Tensor::from_slice(&[0.25f32, 0.0], 2, d).unwrap();
        assert_eq!(mask.where_cond(&a, &a.neg().unwrap()).unwrap().to_vec::<i64>().unwrap(), [odd, -odd]);
        assert_eq!(a.masked_fill(&mask, 3).unwrap().to_vec::<i64>().unwrap(), [3, odd]);
        a.masked_fill_(&mask, 3).unwrap();
        assert_eq!(a.to_vec::<i64>().unwrap(), [3, odd]);
    });
}
