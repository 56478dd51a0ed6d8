//! Recurrent layers on GPUs, where a pass takes one launch, compared with the CPU device, which computes a pass step by step.

use claystone::nn::{Gru, Lstm, Module, Rnn, RnnOptions, pack_padded_sequence};
use claystone::{DType, Device, Tensor, manual_seed};

use crate::common::f64s;
use crate::common::gpus::{assert_same, gpus};

/// Returns the hidden states for sequences of these lengths, and the gradients of the input and of all parameters.
macro_rules! results {
    ($layer:expr, $x:expr, $lengths:expr) => {{
        let x = $x.detach().requires_grad_(true).unwrap();
        let packed = pack_padded_sequence(&x, $lengths, false, true).unwrap();
        let out = $layer.run_packed(&packed, None).unwrap().0.data().shallow_clone();
        out.mul(&out).unwrap().sum((), false).unwrap().backward().unwrap();
        let gradients = [&x].into_iter().chain($layer.parameters()).map(|t| t.grad().expect("each tensor took part"));
        [out.detach()].into_iter().chain(gradients).map(|t| f64s(&t).into_iter().collect()).collect::<Vec<Vec<f64>>>()
    }};
}

macro_rules! compare {
    ($layer:ident, $device:expr) => {
        for (dtype, tolerance) in [(DType::F32, 2e-5), (DType::F16, 2e-2)] {
            for (hidden, lengths) in [(20, &[4, 4, 4][..]), (40, &[5, 3, 3, 1])] {
                manual_seed(7);
                let options = RnnOptions { num_layers: 2, bidirectional: true, ..RnnOptions::default() };
                let x = Tensor::randn(&[lengths[0], lengths.len(), 6], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
                let right = $layer::new(6, hidden, options, (dtype, Device::Cpu)).unwrap();
                let layer = $layer::new(6, hidden, options, (dtype, $device)).unwrap();
                layer.load_state_dict(&right.state_dict(), true).unwrap();
                let want = results!(right, x, lengths);
                let got = results!(layer, x.to_device($device).unwrap(), lengths);
                for (k, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format!("result {k} of {} with {hidden} features of {dtype}", stringify!($layer));
                    assert_same(got, want, tolerance, &what);
                }
            }
        }
    };
}

#[test]
fn recurrent_layers_match_the_cpu_device() {
    for device in gpus("recurrent::recurrent_layers_match_the_cpu_device") {
        compare!(Lstm, device);
        compare!(Gru, device);
        compare!(Rnn, device);
    }
}
