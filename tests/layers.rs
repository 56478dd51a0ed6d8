//! Gradients of fully connected layers: what is fused into products, against f64 and against differences.

mod common;

use claystone::autograd::gradcheck;
use claystone::device::{DeviceKind, count_launches};
use claystone::{DType, Device, Result, Tensor};
use common::{each_device, f64s};
use ndarray::{ArrayD, IxDyn};

/// Small whole numbers in f64.
fn whole(shape: &[usize], device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| ((i * i + 3 * i) % 7) as f64 - 3.0).collect();
    Tensor::from_vec(values, shape, device).unwrap()
}

/// In -1/4..1/4.
fn random(rows: usize, cols: usize, seed: u64) -> ArrayD<f64> {
    let mut state = seed;
    ArrayD::from_shape_fn(IxDyn(&[rows, cols]), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f64 / (1 << 23) as f64 - 1.0) / 4.0
    })
}

/// What a layer's gradient is multiplied by is left to the layer behind it, if that is the only one.
#[test]
fn gradients_through_several_layers() {
    each_device(|device| {
        if device != Device::Cpu && !device.info().unwrap().fp64 {
            return;
        }
        let leaf = |shape: &[usize]| Tensor::map(&[&whole(shape, device)], |x| &x[0] * 0.3).unwrap();
        let inputs = [leaf(&[3, 4]), leaf(&[5, 4]), leaf(&[5]), leaf(&[2, 5]), leaf(&[2])];
        let hidden = |x: &[Tensor]| x[0].linear_map(&x[1], Some(&x[2]), |z| z.tanh());
        let layer = |h: &Tensor, x: &[Tensor]| h.linear_map(&x[3], Some(&x[4]), |z| z.sigmoid());
        let weighted = |t: Tensor| -> Result<Tensor> { t.mul(&t)?.sum((), false) };
        gradcheck(|x| weighted(layer(&hidden(x)?, x)?), &inputs, 1e-6).unwrap();
        let twice = |x: &[Tensor]| {
            let h = hidden(x)?;
            layer(&h, x)?.add(&layer(&h, x)?)
        };
        gradcheck(|x| weighted(twice(x)?), &inputs, 1e-6).unwrap();
        let beside = |x: &[Tensor]| {
            let h = hidden(x)?;
            weighted(layer(&h, x)?)?.add(&weighted(h)?)
        };
        gradcheck(beside, &inputs, 1e-6).unwrap();
        let dropped = |x: &[Tensor]| {
            let h = hidden(x)?;
            let _unused = layer(&h, x)?;
            weighted(layer(&h, x)?)
        };
        gradcheck(dropped, &inputs, 1e-6).unwrap();
        let reshaped = |x: &[Tensor]| weighted(layer(&hidden(x)?.reshape([1, 3, 5])?, x)?);
        gradcheck(reshaped, &inputs, 1e-6).unwrap();
    });
}

/// Products, sums of rows and slopes in the same launches, against f64 on the host.
#[test]
fn a_layer_s_gradients_are_a_launch_each() {
    each_device(|device| {
        for (rows, wide, tall, classes) in [(640, 130, 72, 10), (64, 256, 128, 10), (1000, 40, 136, 33), (33, 8, 31, 5)]
        {
            let shapes = [vec![rows, wide], vec![tall, wide], vec![tall], vec![classes, tall], vec![classes]];
            let values: Vec<ArrayD<f64>> = (0..5)
                .map(|i| {
                    let (r, c) = (shapes[i][0], shapes[i].get(1).copied().unwrap_or(1));
                    let values = random(r, c, 11 + i as u64);
                    values.into_shape_with_order(IxDyn(&shapes[i])).unwrap()
                })
                .collect();
            let run = |device, dtype| {
                let on = |v: &ArrayD<f64>| {
                    let host = Tensor::from_ndarray_view(v, Device::Cpu).unwrap();
                    host.to_dtype(dtype).unwrap().to_device(device).unwrap().requires_grad_(true).unwrap()
                };
                let t: Vec<Tensor> = values.iter().map(on).collect();
                let h = t[0].linear_map(&t[1], Some(&t[2]), |z| z.tanh()).unwrap();
                let y = h.linear(&t[3], Some(&t[4])).unwrap();
                let grad = y.cos().unwrap().detach();
                let launches = count_launches(|| y.backward_with(&grad).unwrap()).1;
                (t.iter().map(|t| f64s(&t.grad().unwrap())).collect::<Vec<_>>(), launches)
            };
            let (want, _) = run(Device::Cpu, DType::F64);
            let (got, launches) = run(device, DType::F32);
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                let most = want.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
                let error = got.iter().zip(want).fold(0.0, |m: f64, (g, w)| m.max((g - w).abs()));
                assert!(error <= 1e-5 * most, "{rows} rows, gradient {i} on {device}: {error} of {most}");
            }
            let gpu = device != Device::Cpu
                && matches!(device.info().unwrap().kind, DeviceKind::DiscreteGpu | DeviceKind::IntegratedGpu);
            assert!(!gpu || launches == 4, "{launches} launches on {device}");
        }
    });
}
