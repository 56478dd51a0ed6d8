//! Networks with channels-last images and weights must train like networks with row-major ones.

use claystone::device::count_launches;
use claystone::io::Stateful;
use claystone::nn::{
    Activation, AdaptiveAvgPool2d, BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, Module, Sequential,
};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::{ConvOptions, DType, Device, Generator, MemoryFormat, Result, Tensor, autocast, with_generator};

use crate::common::{each_device, scattered, values};

const LAST: MemoryFormat = MemoryFormat::ChannelsLast;

fn net(device: Device) -> Result<Sequential> {
    with_generator(&Generator::new(3), || build_net(device))
}

fn build_net(device: Device) -> Result<Sequential> {
    let conv = |from, to, options| Conv2d::new(from, to, [3, 3], options, device);
    let padded = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
    Ok(Sequential::new()
        .push(conv(3, 8, padded)?.without_bias())
        .push(BatchNorm2d::new(8, device)?)
        .push(Activation::Relu)
        .push(MaxPool2d::new([2, 2]))
        .push(conv(8, 16, ConvOptions { stride: [2, 2], ..padded })?)
        .push(BatchNorm2d::new(16, device)?)
        .push(Activation::Relu)
        .push(AdaptiveAvgPool2d([1, 1]))
        .push(Flatten::default())
        .push(Linear::new(16, 5, device)?))
}

fn data(device: Device) -> (Tensor, Tensor) {
    let labels = Tensor::arange(0, 6, 1, device).unwrap().to_dtype(DType::I64).unwrap().remainder_scalar(5).unwrap();
    (scattered(&[6, 3, 12, 10], 4.0, device), labels)
}

fn assert_close(what: &str, got: &[f64], right: &[f64]) {
    let far = got.iter().zip(right).find(|(a, b)| (**a - **b).abs() > 2e-3 * (1.0 + b.abs()));
    assert!(got.len() == right.len() && far.is_none(), "{what}: {far:?}");
}

/// Returns the losses of a few steps, the optimizer's state and the network. The network has the first format when the optimizer is
/// created, and the second format from the second step on.
fn learned<O: Optimizer + Stateful>(
    device: Device,
    formats: [MemoryFormat; 2],
    optimiser: impl Fn(Vec<&mut Tensor>) -> Result<O>,
) -> (Vec<f64>, Vec<Vec<f64>>, u64) {
    let ((x, labels), mut net) = (data(device), net(device).unwrap());
    net.to_memory_format(formats[0]).unwrap();
    let mut optimiser = optimiser(net.parameters_mut()).unwrap();
    let (mut losses, mut launches) = (Vec::new(), 0);
    for step in 0..4 {
        let format = formats[usize::from(step > 1)];
        net.to_memory_format(format).unwrap();
        let x = x.to_memory_format(format).unwrap();
        launches = count_launches(|| {
            let loss = net.forward(&x).unwrap().cross_entropy(&labels).unwrap();
            optimiser.zero_grad();
            loss.backward().unwrap();
            optimiser.step().unwrap();
            losses.extend(values(&loss.detach()));
        })
        .1;
    }
    let of_layers = Module::state_dict(&net);
    let of_optimiser = Stateful::state_dict(&optimiser).unwrap();
    let all = of_layers.iter().chain(of_optimiser.iter()).map(|(_, t)| values(t)).collect();
    assert_eq!(net.parameters()[0].memory_format(), formats[1]);
    (losses, all, launches)
}

#[test]
fn optimizers_train_in_any_memory_format() {
    let rows = MemoryFormat::Contiguous;
    let sgd = |p: Vec<&mut Tensor>| Sgd::new(p, SgdConfig { lr: 0.05, momentum: 0.9, ..SgdConfig::default() });
    let adam = |p: Vec<&mut Tensor>| AdamW::new(p, AdamWConfig { lr: 0.01, ..AdamWConfig::default() });
    each_device(|device| {
        let (losses, state, launches) = learned(device, [rows, rows], sgd);
        for formats in [[LAST, LAST], [rows, LAST], [LAST, rows]] {
            let (own_losses, own_state, own_launches) = learned(device, formats, sgd);
            assert_close(&format!("losses of {formats:?} on {device}"), &own_losses, &losses);
            own_state.iter().zip(&state).for_each(|(own, right)| assert_close("state", own, right));
            // A convolution may copy row-major images. Images in the same format as the weights must not be copied.
            assert!(formats[0] != formats[1] || own_launches <= launches + 8, "{own_launches}, row-major {launches}");
        }
        let (losses, state, _) = learned(device, [rows, rows], adam);
        for formats in [[LAST, LAST], [rows, LAST]] {
            let (own_losses, own_state, _) = learned(device, formats, adam);
            assert_close(&format!("losses of {formats:?} on {device}"), &own_losses, &losses);
            own_state.iter().zip(&state).for_each(|(own, right)| assert_close("state", own, right));
        }
    });
}

#[test]
fn half_precision_trains_in_any_memory_format() {
    each_device(|device| {
        let run = |format: MemoryFormat| {
            let ((x, labels), mut net) = (data(device), net(device).unwrap());
            net.to_dtype(DType::BF16).unwrap();
            net.to_memory_format(format).unwrap();
            let config = SgdConfig { lr: 0.05, momentum: 0.9, ..SgdConfig::default() };
            let mut sgd = Sgd::new(net.parameters_mut(), config).unwrap();
            let x = x.to_dtype(DType::BF16).unwrap().to_memory_format(format).unwrap();
            let step = |sgd: &mut Sgd| {
                let loss = net.forward(&x).unwrap().cross_entropy(&labels).unwrap();
                sgd.zero_grad();
                loss.backward().unwrap();
                sgd.step().unwrap();
                loss.to_dtype(DType::F32).unwrap().item::<f32>().unwrap()
            };
            (0..3).map(|_| step(&mut sgd)).collect::<Vec<f32>>()
        };
        for (own, right) in run(LAST).iter().zip(run(MemoryFormat::Contiguous)) {
            assert!((own - right).abs() < 0.05, "{own} {right} on {device}");
        }
    });
}

/// Steps that are too small for half precision accumulate in the f32 master weights, which a format conversion must keep.
#[test]
fn format_conversions_keep_the_f32_weights() {
    each_device(|device| {
        let run = |converted: bool| {
            let mut net =
                with_generator(&Generator::new(5), || Conv2d::new(4, 4, [3, 3], ConvOptions::default(), device))
                    .unwrap();
            net.to_dtype(DType::BF16).unwrap();
            let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { lr: 1e-4, ..SgdConfig::default() }).unwrap();
            for step in 0..100 {
                if converted && step % 7 == 3 {
                    net.to_memory_format(if step % 2 == 0 { LAST } else { MemoryFormat::Contiguous }).unwrap();
                }
                sgd.zero_grad();
                let weights: Vec<&Tensor> = net.parameters();
                weights.iter().for_each(|w| w.sum((), false).unwrap().backward().unwrap());
                sgd.step().unwrap();
            }
            net.parameters().into_iter().map(values).collect::<Vec<_>>()
        };
        assert_eq!(run(true), run(false), "on {device}");
    });
}

#[test]
fn autocast_trains_in_any_memory_format() {
    each_device(|device| {
        let losses = |format: MemoryFormat| {
            let ((x, labels), mut net) = (data(device), net(device).unwrap());
            net.to_memory_format(format).unwrap();
            let x = x.to_memory_format(format).unwrap();
            let mut sgd = Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.05, ..SgdConfig::default() }).unwrap();
            let step = |sgd: &mut Sgd| {
                let loss = autocast(DType::BF16, || net.forward(&x)?.cross_entropy(&labels)).unwrap();
                sgd.zero_grad();
                loss.backward().unwrap();
                sgd.step().unwrap();
                loss.item::<f32>().unwrap()
            };
            (0..3).map(|_| step(&mut sgd)).collect::<Vec<f32>>()
        };
        for (own, right) in losses(LAST).iter().zip(losses(MemoryFormat::Contiguous)) {
            assert!((own - right).abs() < 0.05, "{own} {right} on {device}");
        }
    });
}

/// Saved values must have row-major order in any memory format.
#[test]
fn saved_values_do_not_depend_on_the_memory_format() {
    let device = Device::Cpu;
    let (rows, mut last) = (net(device).unwrap(), net(device).unwrap());
    last.to_memory_format(LAST).unwrap();
    let path = std::env::temp_dir().join(format!("memory_formats_{}.safetensors", std::process::id()));
    claystone::io::save(&path, &Module::state_dict(&last)).unwrap();
    let loaded = claystone::io::load(&path, device).unwrap();
    std::fs::remove_file(&path).unwrap();
    for (name, t) in Module::state_dict(&rows).iter() {
        assert_eq!(values(loaded.get(name).unwrap()), values(t), "{name}");
    }
    Module::load_state_dict(&last, &loaded, true).unwrap();
    let x = data(device).0;
    [&rows as &dyn Module, &last].iter().for_each(|net| net.eval());
    assert_close(
        "evaluation",
        &values(&last.forward(&x).unwrap().detach()),
        &values(&rows.forward(&x).unwrap().detach()),
    );
    assert!(last.parameters()[0].is_contiguous_in(LAST));
}
