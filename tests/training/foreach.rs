//! Elementwise operations and formulas on lists of tensors.

use claystone::device::count_launches;
use claystone::ops::{self, TensorSet, map_each};
use claystone::{Device, Tensor};

use crate::common::{each_device, values};

#[test]
fn overlapping_tensors_are_written_in_order() {
    each_device(|device| {
        let x = Tensor::ones(6, device).unwrap();
        let (a, b) = (x.narrow(0, 0, 3).unwrap(), x.narrow(0, 3, 3).unwrap());
        let y = Tensor::ones(3, device).unwrap();
        let each = [&a, &y, &b, &a];
        ops::foreach_into("add_scalar", &[&each], &[1.0.into()], &each).unwrap();
        assert_eq!((values(&x), values(&y)), (vec![3.0, 3.0, 3.0, 2.0, 2.0, 2.0], vec![2.0; 3]));
        let many: Vec<Tensor> = (0..40).map(|_| Tensor::ones(3, device).unwrap()).collect();
        let refs: Vec<&Tensor> = many.iter().collect();
        let ((), launches) = count_launches(|| ops::foreach_into("mul", &[&refs, &[&y]], &[], &refs).unwrap());
        assert!(many.iter().all(|t| values(t) == [2.0; 3]));
        assert_eq!(launches, 4, "of 10 each on {device}");
    });
}

#[test]
fn mismatched_tensors_are_errors() {
    let x = Tensor::ones(3, Device::Cpu).unwrap();
    let fails = |done: claystone::Result<()>, part: &str| {
        let message = done.unwrap_err().to_string();
        assert!(message.contains(part), "{message}");
    };
    fails(ops::foreach_into("matmul", &[&[&x]], &[], &[&x]), "is not an elementwise operation");
    fails(ops::foreach_into("add", &[&[&x]], &[], &[&x]), "add takes 2 lists");
    fails(
        ops::foreach_into("add", &[&[&x, &x, &x], &[&x, &x]], &[], &[&x]),
        "each with one tensor or one for each output",
    );
    let sets = [TensorSet::default(), TensorSet { inputs: [&x].into_iter().collect(), ..Default::default() }];
    fails(map_each("shrink", &sets, &[], &[], |x, _| x.to_vec()), "shrink");
}
