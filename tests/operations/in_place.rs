//! In-place forms of elementwise operations: the result is written to the first tensor, whatever its strides are.

use claystone::ops::{self, Accepts, Kind, ROWS};
use claystone::{Result, Scalar, Tensor};

use crate::common::{each_device, f64s};

fn check_in_place_row(row: &'static ops::Row, name: &str, device: claystone::Device) -> Result<()> {
    let shape = [5, 3];
    let operand = |k: usize| {
        let (low, high) = row.domain[k];
        let points = (0..15).map(|i| low + ((i + 1) as f64 * 0.618 + k as f64 * 0.3).fract() * (high - low));
        if row.accepts == Accepts::Integer {
            return Tensor::from_vec(points.map(|x| x as i64).collect(), &shape, device);
        }
        Tensor::from_vec(points.map(|x| x as f32).collect(), &shape, device)
    };
    let operands = (0..row.arity).map(operand).collect::<Result<Vec<_>>>()?;
    let scalars: Vec<Scalar> = row
        .samples
        .iter()
        .map(|&s| if row.accepts == Accepts::Integer { Scalar::Int(s as i64) } else { s.into() })
        .collect();
    let right = row.apply(&operands.iter().collect::<Vec<_>>(), &scalars)?;
    let dtype = operands[0].dtype();
    let memory = Tensor::full(&[4, 7], 999, (dtype, device))?;
    let target = memory.narrow(0, 1, 3)?.narrow(1, 1, 5)?.t()?;
    target.copy_(&operands[0])?;
    let mut tensors: Vec<&Tensor> = operands.iter().collect();
    tensors[0] = &target;
    let out = ops::call(name, &tensors, &arguments(&scalars))?.remove(0);
    assert!(out.shares_storage(&memory));
    assert_eq!(f64s(&target), f64s(&right), "{name} on {device}");
    let outside = f64s(&memory).iter().filter(|&&x| x == 999.0).count();
    assert!(outside >= 4 * 7 - 15, "{name} on {device} wrote outside its view");
    Ok(())
}

fn arguments(scalars: &[Scalar]) -> Vec<ops::Argument> {
    scalars.iter().map(|&s| s.into()).collect()
}

#[test]
fn in_place_rows_match_out_of_place_rows() {
    each_device(|device| {
        for row in ROWS {
            let Some(name) = row.in_place else { continue };
            check_in_place_row(row, name, device).unwrap_or_else(|e| panic!("{name} on {device}: {e}"));
            assert!(ops::operations().iter().any(|op| op.name == name && op.kind == Kind::InPlace));
        }
    });
}
