//! Layers: fused launches, and gradients against f64 and finite differences. Modules: their names and states.

use claystone::autograd::gradcheck;
use claystone::device::{DeviceKind, count_launches};
use claystone::nn::init::{self, Fan};
use claystone::nn::{
    Activation, AdaptiveAvgPool2d, AvgPool2d, BatchNorm2d, Conv1d, Conv2d, ConvTranspose2d, Dropout, Dropout2d,
    Embedding, Flatten, GroupNorm, IncompatibleKeys, LayerNorm, Linear, MaxPool2d, Module, RmsNorm, Sequential,
    StateDict,
};
use claystone::optim::{Sgd, SgdConfig};
use claystone::{ConvOptions, ConvTransposeOptions, DType, Device, Result, Tensor};
use ndarray::{ArrayD, IxDyn};

use crate::common::{each_device, f64s};

/// Returns small whole numbers as an f64 tensor.
fn whole_numbers(shape: &[usize], device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| ((i * i + 3 * i) % 7) as f64 - 3.0).collect();
    Tensor::from_vec(values, shape, device).unwrap()
}

/// Returns pseudo-random numbers between -1/4 and 1/4.
fn random(rows: usize, cols: usize, seed: u64) -> ArrayD<f64> {
    let mut state = seed;
    ArrayD::from_shape_fn(IxDyn(&[rows, cols]), |_| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f64 / (1 << 23) as f64 - 1.0) / 4.0
    })
}

/// If a layer's result has a single consumer, the consumer multiplies its gradient by the layer's factor. The gradients must be exact.
#[test]
fn gradients_through_several_layers_are_exact() {
    each_device(|device| {
        if device != Device::Cpu && !device.info().unwrap().fp64 {
            return;
        }
        let leaf = |shape: &[usize]| Tensor::map(&[&whole_numbers(shape, device)], |x| &x[0] * 0.3).unwrap();
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

/// A layer's product, row sums and activation slope must share one launch. Results are compared with f64 on the host.
#[test]
fn each_gradient_of_a_layer_is_one_launch() {
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

/// A user-defined network with layers as fields, in a vector and in boxes.
struct Net {
    conv: Conv2d,
    norm: BatchNorm2d,
    blocks: Vec<Linear>,
    head: Option<Box<dyn Module>>,
    scale: Tensor,
}

impl Module for Net {
    claystone::parts!(conv, norm, blocks, head, scale);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward(&self.conv.forward(x)?)?.relu()?.flatten(1, -1)?;
        let x = self.blocks.iter().try_fold(x, |x, block| block.forward(&x)?.tanh())?;
        let x = self.head.iter().try_fold(x, |x, head| head.forward(&x))?;
        x.mul(&self.scale)
    }
}

fn net(options: (DType, Device)) -> Result<Net> {
    let head = Sequential::new().push(Dropout::new(0.5)?).push(Linear::new(6, 3, options)?.without_bias());
    Ok(Net {
        conv: Conv2d::new(2, 4, [3, 3], ConvOptions::default(), options)?,
        norm: BatchNorm2d::new(4, options)?,
        blocks: vec![Linear::new(16, 6, options)?, Linear::new(6, 6, options)?],
        head: Some(Box::new(head)),
        scale: Tensor::ones(3, options)?.requires_grad_(true)?,
    })
}

const PARAMETERS: [&str; 10] = [
    "conv.weight",
    "conv.bias",
    "norm.weight",
    "norm.bias",
    "blocks.0.weight",
    "blocks.0.bias",
    "blocks.1.weight",
    "blocks.1.bias",
    "head.1.weight",
    "scale",
];
const BUFFERS: [&str; 3] = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"];

#[test]
fn modules_name_their_tensors_like_pytorch() {
    let mut net = net((DType::F32, Device::Cpu)).unwrap();
    let names = |of: Vec<(String, &Tensor)>| of.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(net.named_parameters("")), PARAMETERS);
    assert_eq!(names(net.named_buffers("")), BUFFERS);
    assert_eq!(names(net.named_parameters("model"))[0], "model.conv.weight");
    assert_eq!(net.parameter_count(), 4 * 2 * 9 + 4 + 4 + 4 + 16 * 6 + 6 + 6 * 6 + 6 + 6 * 3 + 3);
    let shapes = |of: Vec<&Tensor>| of.iter().map(|t| t.shape().clone()).collect::<Vec<_>>();
    let before = shapes(net.parameters());
    assert_eq!(net.parameters_mut().iter().map(|t| t.shape().clone()).collect::<Vec<_>>(), before);
    let state: Vec<String> = net.state_dict().names().map(String::from).collect();
    assert_eq!(state[..4], ["conv.weight", "conv.bias", "norm.weight", "norm.bias"]);
    assert_eq!(state[4..7], BUFFERS);
    assert_eq!(state.len(), PARAMETERS.len() + BUFFERS.len());
}

/// A state saved on the CPU must give the same results on every device.
#[test]
fn states_move_between_modules_and_devices() {
    let source = net((DType::F32, Device::Cpu)).unwrap();
    let x = Tensor::randn(&[5, 2, 4, 4], Device::Cpu).unwrap();
    source.forward(&x).unwrap(); // changes the running statistics
    source.eval();
    let want = f64s(&source.forward(&x).unwrap());
    each_device(|device| {
        let mut target = net((DType::F32, device)).unwrap();
        // Loading must keep the tensors that an optimizer shares with the module.
        let _sgd = Sgd::new(target.parameters_mut(), SgdConfig::default()).unwrap();
        let keys = target.load_state_dict(&source.state_dict(), true).unwrap();
        assert_eq!(keys, IncompatibleKeys::default());
        target.eval();
        let got = f64s(&target.forward(&x.to_device(device).unwrap()).unwrap());
        assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 1e-5), "on {device}");
        assert!(target.parameters().iter().all(|p| p.requires_grad() && p.is_leaf()));

        let mut moved = net((DType::F32, Device::Cpu)).unwrap();
        moved.load_state_dict(&source.state_dict(), true).unwrap();
        moved.to_device(device).unwrap();
        moved.to_dtype(DType::BF16).unwrap();
        assert!(
            moved.parameters().iter().all(|p| p.device() == device && p.dtype() == DType::BF16 && p.requires_grad())
        );
        assert_eq!(moved.named_buffers("")[2].1.dtype(), DType::I64);
        moved.eval();
        let x = x.to_device(device).unwrap().to_dtype(DType::BF16).unwrap();
        let got = f64s(&moved.forward(&x).unwrap());
        assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() < 0.1), "in bf16 on {device}");
    });
}

#[test]
fn mismatched_states_change_nothing() {
    let net = net((DType::F32, Device::Cpu)).unwrap();
    let before = f64s(net.parameters()[0]);
    let mut state: StateDict = net.state_dict().into_iter().filter(|(name, _)| name != "scale").collect();
    state.insert("other", Tensor::zeros(1, Device::Cpu).unwrap());
    let message = net.load_state_dict(&state, true).unwrap_err().to_string();
    assert!(message.contains("scale") && message.contains("other"), "{message}");
    let keys = net.load_state_dict(&state, false).unwrap();
    assert_eq!((keys.missing_keys, keys.unexpected_keys), (vec!["scale".to_string()], vec!["other".to_string()]));
    state.insert("conv.weight", Tensor::zeros(&[4, 2, 3, 2], Device::Cpu).unwrap());
    assert!(net.load_state_dict(&state, false).is_err());
    assert_eq!(f64s(net.parameters()[0]), before);
}

/// Evaluation must not drop elements or change running statistics. Training must count batches.
#[test]
fn modules_switch_between_training_and_evaluation() {
    each_device(|device| {
        let net = net((DType::F32, device)).unwrap();
        let x = Tensor::randn(&[6, 2, 4, 4], device).unwrap();
        net.eval();
        let (a, b) = (net.forward(&x).unwrap(), net.forward(&x).unwrap());
        assert_eq!(f64s(&a), f64s(&b));
        let tracked = |net: &Net| f64s(net.named_buffers("")[2].1).sum();
        assert_eq!(tracked(&net), 0.0);
        net.train();
        let (a, b) = (net.forward(&x).unwrap(), net.forward(&x).unwrap());
        assert_ne!(f64s(&a), f64s(&b), "dropout draws again");
        assert_eq!(tracked(&net), 2.0);
    });
}

/// Checks the gradients of all parameters in a network that has every kind of layer.
#[test]
fn gradients_through_every_layer_match_differences() {
    each_device(|device| {
        if device != Device::Cpu && !device.info().unwrap().fp64 {
            return;
        }
        let options = (DType::F64, device);
        let make = || -> Result<Sequential> {
            let up = ConvTransposeOptions { stride: [2, 2], ..ConvTransposeOptions::default() };
            let same = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
            Ok(Sequential::new()
                .push(Conv2d::new(2, 4, [3, 3], same, options)?)
                .push(GroupNorm::new(2, 4, options)?)
                .push(Activation::Silu)
                .push(ConvTranspose2d::new(4, 3, [2, 2], up, options)?)
                .push(AvgPool2d::new([2, 2]))
                .push(BatchNorm2d::new(3, options)?)
                .push(MaxPool2d::new([2, 2]))
                .push(AdaptiveAvgPool2d([1, 2]))
                .push(Flatten(2, -1))
                .push(Conv1d::new(3, 4, [2], ConvOptions::default(), options)?)
                .push(Flatten::default())
                .push(LayerNorm::new(&[4], options)?)
                .push(RmsNorm::new(&[4], options)?)
                .push(Linear::new(4, 3, options)?))
        };
        let (net, x) = claystone::with_generator(&claystone::Generator::new(5), || {
            (make().unwrap(), Tensor::randn(&[3, 2, 4, 4], options).unwrap())
        });
        let loss = |net: &Sequential| net.forward(&x).unwrap().tanh().unwrap().sum((), false).unwrap();
        loss(&net).backward().unwrap();
        for (name, p) in net.named_parameters("") {
            let grad = p.grad().unwrap_or_else(|| panic!("{name} has no gradient")).to_vec::<f64>().unwrap();
            let values = p.to_vec::<f64>().unwrap();
            let i = values.len() / 2;
            let at = |by: f64| {
                let mut moved = values.clone();
                moved[i] += by;
                let moved = Tensor::from_slice(&moved, p.shape(), device).unwrap();
                claystone::no_grad(|| {
                    p.copy_(&moved).unwrap();
                    loss(&net).item::<f64>().unwrap()
                })
            };
            let numeric = (at(1e-6) - at(-1e-6)) / 2e-6;
            at(0.0);
            assert!((numeric - grad[i]).abs() < 1e-5, "{name}: {} instead of {numeric} on {device}", grad[i]);
        }
    });
}

#[test]
fn initial_values_have_the_expected_distribution() {
    each_device(|device| {
        let t = Tensor::zeros(&[64, 16, 3, 3], device).unwrap();
        let spread = |t: &Tensor| {
            let values = f64s(t);
            let mean = values.mean().unwrap();
            (
                mean,
                values.mapv(|v| (v - mean).powi(2)).mean().unwrap().sqrt(),
                values.iter().fold(0.0, |m: f64, v| m.max(v.abs())),
            )
        };
        let check = |what: &str, std: f64, most: f64| {
            let (mean, got, greatest) = spread(&t);
            assert!(mean.abs() < 0.05 * std && (got / std - 1.0).abs() < 0.05, "{what} on {device}: {mean} {got}");
            assert!(greatest <= most, "{what}: {greatest}");
        };
        let (fan_in, fan_out) = (16f64 * 9.0, 64f64 * 9.0);
        let uniform = |std: f64| 3f64.sqrt() * std * 1.0001;
        init::kaiming_uniform_(&t, 0.0, Fan::In).unwrap();
        check("kaiming_uniform_", (2.0 / fan_in).sqrt(), uniform((2.0 / fan_in).sqrt()));
        init::kaiming_normal_(&t, 1.0, Fan::Out).unwrap();
        check("kaiming_normal_", (1.0 / fan_out).sqrt(), f64::INFINITY);
        let xavier = (2.0 / (fan_in + fan_out)).sqrt();
        init::xavier_uniform_(&t, 2.0).unwrap();
        check("xavier_uniform_", 2.0 * xavier, uniform(2.0 * xavier));
        init::xavier_normal_(&t, 1.0).unwrap();
        check("xavier_normal_", xavier, f64::INFINITY);
        init::trunc_normal_(&t, 0.0, 1.0, -1.0, 1.0).unwrap();
        check("trunc_normal_", 0.5396, 1.0);
        init::constant_(&t, 0.5).unwrap();
        assert_eq!(spread(&t), (0.5, 0.0, 0.5));
        // Rows (or columns) must be orthonormal, times the gain, for every dtype and for strided tensors.
        for (shape, count) in
            [([6, 3, 5, 2], 6), ([40, 2, 3, 1], 6), ([7, 7, 1, 1], 7), ([1, 1, 1, 1], 1), ([0, 3, 1, 1], 0)]
        {
            for (dtype, tolerance) in [(DType::F32, 1e-6), (DType::BF16, 2e-2)] {
                let t =
                    Tensor::zeros(&shape, (dtype, device)).unwrap().transpose(2, 3).unwrap().transpose(2, 3).unwrap();
                init::orthogonal_(&t, 2.0).unwrap();
                let rows = f64s(&t).into_shape_with_order((shape[0], shape[1] * shape[2] * shape[3])).unwrap();
                let rows = if shape[0] > count { rows.reversed_axes() } else { rows };
                let squares = rows.dot(&rows.t()) - ndarray::Array2::<f64>::eye(count) * 4.0;
                assert!(squares.iter().all(|v| v.abs() <= 4.0 * tolerance), "{shape:?} {dtype} on {device}");
            }
        }
        assert!(init::orthogonal_(&Tensor::zeros(3, device).unwrap(), 1.0).is_err());
        assert!(init::xavier_normal_(&Tensor::zeros(3, device).unwrap(), 1.0).is_err());
        assert!(init::trunc_normal_(&t, 0.0, 1.0, 9.0, 10.0).is_err());
        let leaf = Linear::new(3, 2, device).unwrap();
        init::uniform_(leaf.weight(), 2.0, 3.0).unwrap();
        assert!(f64s(leaf.weight()).iter().all(|w| (2.0..3.0).contains(w)));
    });
}

#[test]
fn dropout_drops_whole_channels_and_padding_stays_zero() {
    each_device(|device| {
        let x = Tensor::ones(&[8, 16, 2, 3], device).unwrap();
        let dropout = Dropout2d::new(0.5).unwrap();
        let kept = f64s(&dropout.forward(&x).unwrap()).into_shape_with_order((128, 6)).unwrap();
        let whole = kept.rows().into_iter().filter(|row| row.iter().all(|&v| v == 2.0)).count();
        let none = kept.rows().into_iter().filter(|row| row.iter().all(|&v| v == 0.0)).count();
        assert!(whole + none == 128 && (32..96).contains(&whole), "{whole} and {none} of 128 on {device}");
        dropout.eval();
        assert!(dropout.forward(&x).unwrap().shares_storage(&x));
        assert!(Dropout2d::new(-0.1).is_err() && x.flatten(0, -1).unwrap().dropout2d(0.5).is_err());
        assert_eq!(f64s(&Dropout::new(1.0).unwrap().forward(&x).unwrap()).sum(), 0.0);

        let table = Embedding::new(5, 3, device).unwrap().with_padding_idx(2).unwrap();
        let words = Tensor::from_slice(&[2i64, 4, 2], 3, device).unwrap();
        let rows = table.forward(&words).unwrap();
        assert_eq!(f64s(&rows.select(0, 0).unwrap()).sum(), 0.0);
        rows.sum((), false).unwrap().backward().unwrap();
        let grad = f64s(&table.weight().grad().unwrap());
        assert_eq!((grad[[2, 0]], grad[[4, 0]]), (0.0, 1.0));
        assert!(Embedding::new(5, 3, device).unwrap().with_padding_idx(5).is_err());
    });
}
