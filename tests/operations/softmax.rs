use ndarray::{ArrayD, Axis};

use crate::harness::{Case, case};

fn log_softmax(x: &ArrayD<f64>, dim: usize) -> ArrayD<f64> {
    let mut out = x.clone();
    for mut lane in out.lanes_mut(Axis(dim)) {
        let sum: f64 = lane.iter().map(|v| v.exp()).sum();
        lane.mapv_inplace(|v| v - sum.ln());
    }
    out
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, dim) in [(&[4, 7][..], 1isize), (&[4, 7], 0), (&[3, 0], 1), (&[0, 3], 1), (&[2, 3, 5], -2), (&[2, 129], 1)] {
        let axis = if dim < 0 { shape.len() - dim.unsigned_abs() } else { dim as usize };
        cases.push(case("softmax").input(shape).arg(dim).with_reference(move |x| vec![log_softmax(&x[0], axis).mapv(f64::exp)]));
        cases.push(case("log_softmax").input(shape).arg(dim).with_reference(move |x| vec![log_softmax(&x[0], axis)]));
        cases.push(case("softmin").input(shape).arg(dim).with_reference(move |x| vec![log_softmax(&-&x[0], axis).mapv(f64::exp)]));
        cases.push(case("softmax_backward").input(shape).input_in(shape, 0.0..1.0).arg(dim).with_reference(move |x| {
            let product = &x[0] * &x[1];
            let sums = product.sum_axis(Axis(axis)).insert_axis(Axis(axis));
            vec![product - &x[1] * &sums]
        }));
        cases.push(case("log_softmax_backward").input(shape).input_in(shape, -2.0..0.0).arg(dim).with_reference(move |x| {
            let sums = x[0].sum_axis(Axis(axis)).insert_axis(Axis(axis));
            vec![&x[0] - x[1].mapv(f64::exp) * &sums]
        }));
    }
    cases
}
