use claystone::DType;
use ndarray::ArrayD;

use crate::harness::{Case, case};

pub fn cases() -> Vec<Case> {
    let same = |x: &[ArrayD<f64>]| vec![x[0].clone()];
    let mut cases = Vec::new();
    for shape in [&[][..], &[0, 3], &[5], &[3, 7], &[2, 3, 5]] {
        cases.push(case("clone").input(shape).with_reference(same));
        cases.push(case("contiguous").input(shape).with_reference(same));
        cases.push(case("zero_").input(shape).with_reference(|x| vec![x[0].mapv(|_| 0.0)]));
        cases.push(case("fill_").input(shape).arg(1).with_reference(|x| vec![x[0].mapv(|_| 1.0)]));
    }
    for shape in [&[5, 3][..], &[0, 3]] {
        // The gradient is also rounded to f32, too coarse for finite differences. tests/api/convert.rs checks the gradient instead.
        cases.push(case("to_dtype").input(shape).floats().arg(DType::F32).no_gradient().with_reference(same));
        for name in ["copy_", "copy_non_blocking_"] {
            cases.push(case(name).input(shape).input(&shape[1..]).with_reference(|x| {
                vec![x[1].broadcast(x[0].raw_dim()).expect("the source broadcasts").to_owned()]
            }));
        }
    }
    cases
}
