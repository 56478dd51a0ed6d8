//! Every form of padding in convolutions, transposed convolutions, pools and unfold: one number, one number per dim, one per side,
//! or a name such as "same".

use claystone::ops::{self, Argument};
use claystone::{AvgPoolOptions, ConvOptions, ConvTransposeOptions, Device, MaxPoolOptions, Padding, Tensor};
use ndarray::ArrayD;

use crate::harness::{Case, case};
use crate::volumes::{ConvParams, PRODUCTS, conv, conv_transpose, max_pool, mean, plain, pool};

/// Returns a convolution or pool with this padding and stride 1.
fn padded<const D: usize>(padding: [(usize, usize); D]) -> ConvParams<D> {
    ConvParams { padding, ..plain() }
}

fn convolution<const D: usize>(name: &str, x: &[usize], w: &[usize], given: impl Into<Argument>, m: ConvParams<D>) -> Case {
    let made = case(name).input(x).input(w).tolerance(PRODUCTS).arg(&m.stride).arg(given).arg(&m.dilation);
    made.arg(m.groups).with_reference(move |x| vec![conv(x, m)])
}

fn transposed<const D: usize>(name: &str, x: &[usize], w: &[usize], given: impl Into<Argument>, m: ConvParams<D>) -> Case {
    let made = case(name).input(x).input(w).tolerance(PRODUCTS).arg(&m.stride).arg(given).arg(&[0; D]).arg(m.groups);
    made.arg(&m.dilation).with_reference(move |x| vec![conv_transpose(x, m, [0; D])])
}

/// Returns cases of max pools with indices, and of average pools that count or do not count the padding.
fn pools<const D: usize>(
    x: &[usize],
    kernel: [usize; D],
    given: impl Into<Argument> + Clone,
    m: ConvParams<D>,
    ceil: bool,
) -> Vec<Case> {
    let name = |kind: &str, end: &str| format!("{kind}_pool{D}d{end}");
    let made = case(&name("max", "_with_indices")).distinct(x).arg(&kernel).arg(&m.stride).arg(given.clone());
    let mut cases = vec![made.arg(&m.dilation).arg(ceil).with_reference(move |x| max_pool(&x[0], kernel, m, ceil))];
    for include in [true, false] {
        let made = case(&name("avg", "")).input(x).arg(&kernel).arg(&m.stride).arg(given.clone()).arg(ceil);
        let by = move |e: &[(usize, f64)], size| if include { size } else { e.len() };
        let f = move |x: &ArrayD<f64>| pool(x, kernel, m, ceil, |e, size| mean(e, by(e, size) as f64));
        cases.push(made.arg(include).with_reference(move |x| vec![f(&x[0])]));
    }
    cases
}

pub fn cases() -> Vec<Case> {
    let (uneven, volume) = ([(1, 2), (0, 1)], [(1, 0), (0, 2), (1, 1)]);
    let strided = ConvParams { stride: [2, 1], ..padded(uneven) };
    let mut cases = vec![
        convolution("conv1d", &[2, 3, 5], &[4, 3, 2], &[2, 0], ConvParams { dilation: [2], ..padded([(2, 0)]) }),
        convolution("conv1d", &[2, 3, 5], &[4, 3, 4], "same", padded([(1, 2)])),
        convolution("conv2d", &[1, 2, 4, 5], &[3, 2, 3, 2], &[1, 2, 0, 1], strided),
        convolution("conv2d", &[1, 2, 4, 5], &[3, 2, 3, 2], 1, padded([(1, 1); 2])),
        convolution("conv2d", &[2, 3, 4, 5], &[3, 1, 3, 3], &[1, 2, 0, 1], ConvParams { groups: 3, ..padded(uneven) }),
        convolution("conv2d", &[2, 3, 2, 3], &[4, 3, 1, 1], &[0, 1, 0, 0], padded([(0, 1), (0, 0)])),
        convolution("conv3d", &[1, 2, 3, 3, 2], &[2, 2, 2, 2, 2], &[1, 0, 0, 2, 1, 1], padded(volume)),
        transposed("conv_transpose1d", &[2, 3, 4], &[3, 2, 3], &[1, 0], ConvParams { stride: [2], ..padded([(1, 0)]) }),
        transposed("conv_transpose1d", &[2, 3, 4], &[3, 2, 4], "same", padded([(1, 2)])),
        transposed("conv_transpose2d", &[1, 2, 3, 4], &[2, 3, 3, 2], &[1, 2, 0, 1], strided),
        transposed("conv_transpose2d", &[1, 2, 3, 4], &[2, 3, 3, 3], 1, padded([(1, 1); 2])),
        transposed("conv_transpose3d", &[1, 2, 2, 3, 2], &[2, 2, 3, 2, 2], &[1, 0, 0, 2, 1, 1], padded(volume)),
    ];
    cases.extend(pools(&[2, 3, 7], [3], &[1, 0], ConvParams { stride: [2], ..padded([(1, 0)]) }, true));
    cases.extend(pools(&[2, 3, 7], [4], "same", padded([(1, 2)]), false));
    cases.extend(pools(&[1, 2, 4, 6], [4, 2], &[1, 2, 0, 1], ConvParams { stride: [2, 2], ..padded(uneven) }, true));
    cases.extend(pools(&[1, 2, 4, 6], [4, 2], &[1, 2, 0, 1], strided, false));
    cases.extend(pools(&[1, 2, 3, 4], [3, 2], 1, ConvParams { stride: [2, 2], ..padded([(1, 1); 2]) }, false));
    cases.extend(pools(&[1, 2, 4, 3, 5], [2, 4, 3], &[1, 0, 0, 2, 1, 1], padded(volume), true));
    // In the reference of unfold, each tap of each window is one element of the result.
    let (kernel, grid) = ([2, 3], strided.grid([3, 4], [2, 3], false));
    let windows = grid[0] * grid[1];
    let made = case("unfold2d").input(&[2, 1, 3, 4]).arg(&kernel).arg(&[1, 1]).arg(&[1, 2, 0, 1]).arg(&[2, 1]);
    cases.push(made.with_reference(move |x| {
        let mut out = ArrayD::zeros(&[2, 6, windows][..]);
        strided.products(2, [3, 4], &[1, 1, 2, 3], grid, |i, k, o| {
            out[[o[0], k[2] * 3 + k[3], o[2] * grid[1] + o[3]]] = x[0][i];
        });
        vec![out]
    }));
    let made = case("fold").input(&[2, 6, windows]).arg(&[3, 4]).arg(&kernel).arg(&[1, 1]);
    cases.push(made.arg(&[1, 2, 0, 1]).arg(&[2, 1]).with_reference(move |x| {
        let mut out = ArrayD::zeros(&[2, 1, 3, 4][..]);
        strided.products(2, [3, 4], &[1, 1, 2, 3], grid, |i, k, o| {
            out[i] += x[0][[o[0], k[2] * 3 + k[3], o[2] * grid[1] + o[3]]];
        });
        vec![out]
    }));
    cases
}

#[test]
fn short_forms_of_padding_equal_explicit_forms() {
    let all = Padding::Explicit([(1, 1), (1, 1)]);
    assert!(Padding::from(1) == all && Padding::from([1, 1]) == all && Padding::from([(1, 1); 2]) == all);
    assert_eq!(Padding::from((2, 0)), Padding::Explicit([(2, 0)]));
    assert_eq!(Argument::from(Padding::from([1, 2])), Argument::Ints(vec![1, 2]));
    assert_eq!(Argument::from(Padding::from([(1, 2), (0, 0)])), Argument::Ints(vec![1, 2, 0, 0]));
}

#[test]
fn errors_of_padding_name_the_problem() {
    let says = |text: &str, made: claystone::Result<Tensor>| {
        let message = made.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    let (x, w) = (Tensor::ones(&[1, 1, 4, 4], Device::Cpu).unwrap(), Tensor::ones(&[1, 1, 2, 2], Device::Cpu).unwrap());
    let same = Padding::Same;
    says("strides of 1, not [2, 2]", x.max_pool2d([2, 2], MaxPoolOptions { padding: same, ..Default::default() }));
    let strided = ConvTransposeOptions { padding: same, stride: [2, 1], ..Default::default() };
    says("strides of 1, not [2, 1]", x.conv_transpose2d(&w, None, strided));
    let behind = [(0, 2), (0, 0)].into();
    says("half", x.avg_pool2d([2, 2], AvgPoolOptions { padding: behind, ..Default::default() }));
    let all = ConvTransposeOptions { padding: [(2, 3), (0, 0)].into(), ..Default::default() };
    says("removes all 5 elements", x.conv_transpose2d(&w, None, all));
    says("2^30", x.conv2d(&w, None, ConvOptions { padding: [(0, 0), (0, 1 << 40)].into(), ..Default::default() }));
    let call = |padding: Argument| ops::call("conv2d", &[&x, &w], &[Argument::None, padding]).map(|mut y| y.remove(0));
    assert_eq!(call(Argument::from(&[0, 1, 2, 0])).unwrap().shape().dims(), [1, 1, 4, 5]);
    for wrong in [Argument::from(&[1, 2, 3]), Argument::from(&[-1, 1]), "full".into(), 0.5.into()] {
        says("a padding", call(wrong));
    }
}
