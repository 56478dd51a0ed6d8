//! Convolutional layers and pools, with PyTorch's weights and expected values. tests/data/windows.py wrote these values.

use claystone::nn::{
    AdaptiveAvgPool1d, AdaptiveAvgPool3d, AdaptiveMaxPool1d, AdaptiveMaxPool2d, AdaptiveMaxPool3d, AvgPool1d,
    AvgPool2d, AvgPool3d, Conv3d, ConvTranspose1d, ConvTranspose3d, MaxPool1d, MaxPool2d, MaxPool3d, Module,
};
use claystone::{AvgPoolOptions, ConvOptions, ConvTransposeOptions, Device, MaxPoolOptions, Padding, Result, Tensor};

use crate::common::each_device;
use crate::pytorch_layers::Values;

fn on(device: Device) -> Values {
    Values::read("tests/data/windows.npz", device)
}

fn check(all: &Values, name: &str, mut layer: impl Module, x: &str) {
    all.load(name, &mut layer);
    all.check(name, &layer, &layer.forward(&all.get(x)).unwrap());
}

/// Checks the result of `f`, and the gradient of its input.
fn check_input(all: &Values, name: &str, x: &str, f: impl Fn(&Tensor) -> Result<Tensor>) {
    let x = all.get(x).detach().requires_grad_(true).unwrap();
    let result = f(&x).unwrap();
    all.near(&format!("{name}.result"), &result);
    result.square().unwrap().sum((), false).unwrap().backward().unwrap();
    all.near(&format!("{name}.grad"), &x.grad().unwrap());
}

#[test]
fn convolutional_layers_match_pytorch() {
    each_device(|device| {
        let all = on(device);
        let (stride, padding, dilation) = ([1, 2, 1], [1, 0, 1].into(), [2, 1, 1]);
        let options = ConvOptions { stride, padding, dilation, groups: 2 };
        check(&all, "conv3d", Conv3d::new(4, 6, [2, 3, 2], options, device).unwrap(), "x3");
        let same = ConvOptions { padding: Padding::Same, ..ConvOptions::default() };
        check(&all, "conv3d_same", Conv3d::new(4, 3, [2, 3, 4], same, device).unwrap(), "x3");
        let options =
            ConvTransposeOptions { stride: [2], padding: 1.into(), output_padding: [1], dilation: [1], groups: 2 };
        check(&all, "conv_transpose1d", ConvTranspose1d::new(4, 6, [3], options, device).unwrap(), "x1");
        let (stride, padding, output_padding) = ([2, 1, 2], [1, 0, 1].into(), [1, 0, 0]);
        let options = ConvTransposeOptions { stride, padding, output_padding, dilation: [1, 2, 1], groups: 2 };
        check(&all, "conv_transpose3d", ConvTranspose3d::new(4, 2, [3, 2, 3], options, device).unwrap(), "x3");
    });
}

#[test]
fn pools_match_pytorch() {
    let (stride, padding) = (Some([2, 2, 1]), [1, 1, 0].into());
    let max =
        MaxPool1d { options: MaxPoolOptions { stride: Some([2]), padding: 1.into(), ..Default::default() }, kernel: 3 };
    let mean =
        AvgPool1d { options: AvgPoolOptions { stride: Some([2]), padding: 1.into(), ..Default::default() }, kernel: 3 };
    let max3 = MaxPoolOptions { stride, padding, dilation: [1, 2, 1], ceil_mode: true };
    let mean3 = AvgPoolOptions { stride, padding, ceil_mode: true, count_include_pad: false, divisor_override: None };
    let layers: [(&str, &dyn Module, &str); 9] = [
        ("max_pool1d", &max, "x1"),
        ("avg_pool1d", &mean, "x1"),
        ("adaptive_avg_pool1d", &AdaptiveAvgPool1d(4), "x1"),
        ("adaptive_max_pool1d", &AdaptiveMaxPool1d(4), "x1"),
        ("adaptive_max_pool2d", &AdaptiveMaxPool2d([4, 3]), "x2"),
        ("max_pool3d", &MaxPool3d { kernel: [2, 3, 2], options: max3 }, "x3"),
        ("avg_pool3d", &AvgPool3d { kernel: [2, 3, 2], options: mean3 }, "x3"),
        ("adaptive_avg_pool3d", &AdaptiveAvgPool3d([2, 4, 3]), "x3"),
        ("adaptive_max_pool3d", &AdaptiveMaxPool3d([2, 4, 3]), "x3"),
    ];
    each_device(|device| {
        let all = on(device);
        for (name, layer, x) in layers {
            check_input(&all, name, x, |x| layer.forward(x));
        }
        let (_, index) = all.get("x3").max_pool3d_with_indices([2; 3], MaxPoolOptions::default()).unwrap();
        assert!(index.equal(&all.get("max_pool3d.index")).unwrap());
    });
}

/// The padding is one row above, two rows below, and one column on the right.
#[test]
fn asymmetric_paddings_match_pytorch() {
    let padding = [(1, 2), (0, 1)].into();
    each_device(|device| {
        let all = on(device);
        let weight = all.get("uneven.weight");
        let conv = ConvOptions { padding, ..ConvOptions::default() };
        let transposed = ConvTransposeOptions { padding, stride: [2, 2], ..ConvTransposeOptions::default() };
        let swapped = weight.transpose(0, 1).unwrap();
        let max = MaxPool2d { kernel: [4, 2], options: MaxPoolOptions { padding, ..Default::default() } };
        let mean = AvgPool2d { kernel: [4, 2], options: AvgPoolOptions { padding, ..Default::default() } };
        type Operation<'a> = &'a dyn Fn(&Tensor) -> Result<Tensor>;
        let operations: [(&str, Operation); 4] = [
            ("conv2d", &|x| x.conv2d(&weight, None, conv)),
            ("conv_transpose2d", &|x| x.conv_transpose2d(&swapped, None, transposed)),
            ("max_pool2d", &|x| max.forward(x)),
            ("avg_pool2d", &|x| mean.forward(x)),
        ];
        for (name, f) in operations {
            check_input(&all, &format!("uneven.{name}"), "x2", f);
        }
    });
}
