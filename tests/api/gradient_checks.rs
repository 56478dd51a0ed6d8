//! Tests of `gradcheck` and `gradgradcheck`.

use claystone::autograd::{gradcheck, gradgradcheck};
use claystone::{DType, Device, Tensor};

use crate::common::each_device;

/// `gradcheck` compares results of any shape element by element, and the error names the element whose gradient is wrong.
#[test]
fn gradients_of_results_of_any_shape_are_checked() {
    each_device(|d| {
        if d != Device::Cpu && !d.info().unwrap().fp64 {
            return;
        }
        let x = Tensor::from_slice(&[0.3f64, -0.6, 1.2, 0.1, 2.0, -1.0], [2, 3], d).unwrap();
        let w = Tensor::from_slice(&[1.0f64, 2.0, -1.0], 3, d).unwrap();
        let inputs = [x.t().unwrap(), w];
        let f = |x: &[Tensor]| x[0].t()?.mul(&x[1])?.softmax(-1);
        gradcheck(f, &inputs, 1e-6).unwrap();
        gradgradcheck(f, &inputs, 1e-6).unwrap();
        gradcheck(|x| x[0].narrow(0, 0, 0), &inputs, 1e-6).unwrap();
        gradcheck(|x| x[1].exp()?.reshape([1, 3, 1]), &inputs, 1e-6).unwrap();
        // The function detaches the third element, so that its gradient is missing.
        let wrong =
            |x: &[Tensor]| Tensor::cat(&[&x[1].narrow(0, 0, 2)?.exp()?, &x[1].narrow(0, 2, 1)?.detach().exp()?], 0);
        let text = gradcheck(wrong, &inputs, 1e-6).unwrap_err().to_string();
        assert!(text.contains("element 2 of input 1: backward gives 0 for element 2 of the result"), "{text}");
        let text = gradcheck(|x| x[0].to_dtype(DType::F32), &inputs, 1e-6).unwrap_err().to_string();
        assert!(text.starts_with("gradcheck: dtype f32"), "{text}");
    });
}
