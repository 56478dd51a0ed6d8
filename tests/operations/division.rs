//! Division and square roots in f32, compared with the CPU's own instructions.

use claystone::{DType, Tensor};

use crate::common::each_device;

#[test]
fn division_and_square_roots_are_correctly_rounded() {
    each_device(|device| {
        let single = device.capabilities().unwrap().single.unwrap();
        if !single.correct_division {
            return;
        }
        let mut state = 1u64;
        let mut number = || loop {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let x = f32::from_bits((state >> 32) as u32);
            if x.is_normal() || x.is_subnormal() && single.denormals {
                return x;
            }
        };
        let same = |got: &Tensor, want: &dyn Fn(usize) -> f32, of: &str| {
            for (i, got) in got.to_vec::<f32>().unwrap().into_iter().enumerate() {
                let want = want(i);
                let flushed = want.is_subnormal() && !single.denormals;
                assert!(got == want || flushed || got.is_nan() && want.is_nan(), "{of} {i}: {got:e}, not {want:e}");
            }
        };
        let (a, b): (Vec<f32>, Vec<f32>) = (0..8192).map(|_| (number(), number())).unzip();
        let near: Vec<f32> = (0..8192).map(|i| (i + 1) as f32).collect();
        let [x, y, near_x] = [&a, &b, &near].map(|t| Tensor::from_slice(t, 8192, device).unwrap());
        same(&x.div(&y).unwrap(), &|i| a[i] / b[i], "quotient");
        same(&near_x.div(&near_x.flip(&[0]).unwrap()).unwrap(), &|i| near[i] / near[8191 - i], "quotient of integers");
        same(&x.abs().unwrap().sqrt().unwrap(), &|i| a[i].abs().sqrt(), "root");
        let strided = Tensor::map(&[&x.flip(&[0]).unwrap(), &y], |e| &e[0] / &e[1]).unwrap();
        same(&strided, &|i| a[8191 - i] / b[i], "quotient of a view");
        let bytes = |n: u8| Tensor::from_slice(&[n; 3], 3, device).unwrap().to_dtype(DType::F32).unwrap();
        same(&bytes(200).div(&bytes(150).mul_scalar(2).unwrap()).unwrap(), &|_| 200.0 / 300.0, "200 / 300");
        let shifted = near_x.shallow_clone();
        shifted.narrow(0, 1, 8191).unwrap().div_(&shifted.narrow(0, 0, 8191).unwrap().clone()).unwrap();
        same(&shifted, &|i| if i == 0 { 1.0 } else { near[i] / near[i - 1] }, "quotient of neighbours");
    });
}
