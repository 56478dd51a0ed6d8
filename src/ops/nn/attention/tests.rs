//! Compares attention in very small blocks with its definition in f64, and its gradients with finite differences.

use std::cell::Cell;

use crate::autograd::{gradcheck, gradgradcheck};
use crate::backend::problem::attention::Blocking;
use crate::device::{DeviceKind, count_launches, opencl};
use crate::ops::nn::attention::*;
use crate::{Device, Result};

thread_local! {
    /// The limits of blocks in a test, which replace the device's limits.
    pub(crate) static BLOCK_LIMITS: Cell<Option<Blocking>> = const { Cell::new(None) };
}

/// Runs `f` with attention in blocks whose scores take at most `bytes` bytes, or that have one query if one query takes more.
fn in_blocks<R>(bytes: usize, f: impl FnOnce() -> R) -> R {
    BLOCK_LIMITS.set(Some(Blocking { unblocked_bytes: 0, block_bytes: bytes, min_queries: 1 }));
    let result = f();
    BLOCK_LIMITS.set(None);
    result
}

fn each_device(f: impl Fn(Device)) {
    assert!(opencl::count() > 0 || std::env::var_os("CLAYSTONE_REQUIRE_OPENCL").is_none(), "no OpenCL device");
    f(Device::Cpu);
    (0..opencl::count()).map(Device::OpenCL).for_each(f);
}

/// The arguments of attention: queries, keys and values, an additive mask, and whether attention is causal.
type Call<'a> = ([&'a Tensor; 3], Option<&'a Tensor>, bool);

/// Returns the elements in f64, with the dims before the last two broadcast to `batch`.
fn broadcast_values(t: &Tensor, batch: &[usize], [rows, columns]: [usize; 2]) -> Vec<f64> {
    let shape: Shape = batch.iter().copied().chain([rows, columns]).collect();
    let t = t.detach().to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    t.broadcast_to(shape).unwrap().to_vec().unwrap()
}

/// Computes attention by its definition, one element at a time.
fn attention_by_definition(([q, k, v], mask, causal): Call) -> Vec<f64> {
    let scores = product_shape("", q, &k.transpose(-1, -2).unwrap()).unwrap();
    let [batch @ .., rows, keys] = scores.dims() else { unreachable!("two dims") };
    let (rows, keys) = (*rows, *keys);
    let width = |t: &Tensor| t.shape().dims()[t.rank() - 1];
    let (e, w) = (width(q), width(v));
    let (q, k, v) = (
        broadcast_values(q, batch, [rows, e]),
        broadcast_values(k, batch, [keys, e]),
        broadcast_values(v, batch, [keys, w]),
    );
    let mask = mask.map(|mask| broadcast_values(mask, batch, [rows, keys]));
    let mut out = Vec::new();
    for row in 0..batch.iter().product::<usize>() * rows {
        let (first, i) = (row / rows * keys, row % rows);
        let seen = if causal { keys.min(i + 1) } else { keys };
        let score = |j: usize| {
            let dot: f64 = (0..e).map(|c| q[row * e + c] * k[(first + j) * e + c]).sum();
            dot / (e as f64).sqrt() + mask.as_ref().map_or(0.0, |mask| mask[row * keys + j])
        };
        let scores: Vec<f64> = (0..seen).map(score).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let power = |s: &f64| if most == f64::NEG_INFINITY { 0.0 } else { (s - most).exp() };
        let powers: Vec<f64> = scores.iter().map(power).collect();
        let sum = powers.iter().sum::<f64>().max(f64::MIN_POSITIVE);
        let total = |c: usize| powers.iter().enumerate().map(|(j, p)| p * v[(first + j) * w + c]).sum::<f64>();
        out.extend((0..w).map(|c| total(c) / sum));
    }
    out
}

fn options<'a>(attn_mask: Option<&'a Tensor>, is_causal: bool) -> Attention<'a> {
    Attention { attn_mask, is_causal, ..Attention::default() }
}

/// Shapes of queries, keys and values: broadcast dims, several heads in a block, lengths near the size of a block, and empty dims.
const SHAPES: [[&[usize]; 3]; 8] = [
    [&[17, 4], &[23, 4], &[23, 3]],
    [&[2, 3, 16, 5], &[2, 3, 16, 5], &[2, 3, 16, 5]],
    [&[2, 1, 9, 4], &[3, 31, 4], &[3, 31, 2]],
    [&[3, 2, 25, 2], &[1, 2, 24, 2], &[24, 3]],
    [&[5, 7, 3], &[5, 1, 3], &[5, 1, 3]],
    [&[1, 40, 3], &[1, 13, 3], &[1, 13, 1]],
    [&[2, 0, 4], &[2, 5, 4], &[2, 5, 4]],
    [&[2, 9, 4], &[2, 0, 4], &[2, 0, 4]],
];

/// Returns a tensor whose rows are strided, and whose offset is one element.
fn strided_tensor(shape: &[usize], dtype: DType, device: Device) -> Tensor {
    let mut dims = shape.to_vec();
    let last = dims.len() - 1;
    dims.swap(last, last - 1);
    dims[last] += 1;
    let t = Tensor::randn(&dims[..], (dtype, device)).unwrap();
    t.narrow(-1, 1, dims[last] - 1).unwrap().transpose(-1, -2).unwrap()
}

#[test]
fn blocked_attention_matches_its_definition() {
    each_device(|device| {
        for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::F16, 4e-3), (DType::BF16, 3e-2)] {
            for (i, shapes) in SHAPES.into_iter().enumerate() {
                let inputs = shapes.map(|shape| strided_tensor(shape, dtype, device));
                let [q, k, v] = inputs.each_ref();
                let (rows, keys) = (shapes[0][shapes[0].len() - 2], shapes[1][shapes[1].len() - 2]);
                let mask = Tensor::randn(&[rows, keys], (dtype, device)).unwrap();
                let seen = mask.gt_scalar(-0.5).unwrap();
                let hidden = Tensor::zeros(&[rows, keys], (dtype, device)).unwrap();
                let hidden = hidden.masked_fill(&seen.logical_not().unwrap(), f64::NEG_INFINITY).unwrap();
                for (given, added) in [(None, None), (Some(&mask), Some(&mask)), (Some(&seen), Some(&hidden))] {
                    for (causal, bytes) in [(false, 0), (true, 0), (false, 3000), (true, 3000)] {
                        let out = in_blocks(bytes, || q.scaled_dot_product_attention(k, v, options(given, causal)));
                        let out = out.unwrap();
                        let right = attention_by_definition(([q, k, v], added, causal));
                        let got: Vec<f64> = out.to_dtype(DType::F64).unwrap().to_vec().unwrap();
                        assert_eq!(got.len(), right.len());
                        for (at, (got, right)) in got.iter().zip(&right).enumerate() {
                            let off = (got - right).abs();
                            assert!(
                                off <= tolerance * right.abs().max(1.0),
                                "shapes {i} of {dtype} on {device}, causal {causal}, mask {}, element {at}: {got} for {right}",
                                given.is_some()
                            );
                        }
                    }
                }
            }
        }
    });
}

/// Gradients in blocks are correct for a broadcast batch, for grouped heads, and for queries, keys and values that are parts of one
/// tensor.
#[test]
fn blocked_gradients_match_finite_differences() {
    each_device(|device| {
        if !device.info().unwrap().fp64 {
            return;
        }
        let made = |shape: &[usize]| Tensor::randn(shape, (DType::F64, device)).unwrap();
        let weighed = |y: Tensor| -> Result<Tensor> {
            let weights = Tensor::linspace(-1.0, 2.0, y.numel(), (DType::F64, device))?.reshape(y.shape())?;
            y.mul(&weights)?.sum((), false)
        };
        let mask = made(&[11, 9]);
        for [q, k, v] in [
            [&[2, 1, 11, 2][..], &[2, 9, 2], &[2, 9, 3]],
            [&[11, 2], &[9, 2], &[9, 2]],
            [&[1, 2, 11, 2], &[2, 2, 9, 2], &[9, 1]],
        ] {
            for (causal, bytes, mask) in [(false, 0, None), (true, 0, Some(&mask)), (true, 3000, None)] {
                let f = |x: &[Tensor]| {
                    in_blocks(bytes, || {
                        weighed(x[0].scaled_dot_product_attention(&x[1], &x[2], options(mask, causal))?)
                    })
                };
                let inputs = [made(q), made(k), made(v)];
                in_blocks(bytes, || gradcheck(f, &inputs, 1e-6)).unwrap();
            }
        }
        let inputs = [made(&[10, 2]), made(&[9, 2]), made(&[9, 1])];
        let f = |x: &[Tensor]| weighed(x[0].scaled_dot_product_attention(&x[1], &x[2], options(None, true))?);
        in_blocks(0, || gradgradcheck(f, &inputs, 1e-5)).unwrap();
        let grouped = Attention { enable_gqa: true, is_causal: true, ..Attention::default() };
        let f = |x: &[Tensor]| weighed(x[0].scaled_dot_product_attention(&x[1], &x[2], grouped)?);
        in_blocks(0, || gradcheck(f, &[made(&[4, 9, 2]), made(&[2, 9, 2]), made(&[2, 9, 2])], 1e-6)).unwrap();
        for causal in [false, true] {
            let f = |x: &[Tensor]| weighed(x[0].packed_attention(2, options(None, causal))?);
            in_blocks(0, || gradcheck(f, &[made(&[2, 11, 12])], 1e-6)).unwrap();
            in_blocks(0, || gradgradcheck(f, &[made(&[9, 6])], 1e-5)).unwrap();
        }
    });
}

/// Gradients of halves are summed over the blocks in f32: in f16, rounding after each block would give wrong sums.
#[test]
fn blocked_gradients_of_halves_match_f64() {
    each_device(|device| {
        let shape = [2, 70, 8];
        let made = || Tensor::randn(&shape[..], (DType::F16, device)).unwrap();
        let inputs = [made(), made(), made()];
        let gradients = |dtype: DType, device: Device| -> Vec<Vec<f64>> {
            let leaf = |t: &Tensor| t.to_device(device)?.to_dtype(dtype)?.detach().requires_grad_(true);
            let leaves = inputs.each_ref().map(|t| leaf(t).unwrap());
            let y = leaves[0].scaled_dot_product_attention(&leaves[1], &leaves[2], options(None, true)).unwrap();
            y.backward_with(&y.ones_like().unwrap()).unwrap();
            leaves.map(|t| t.grad().unwrap().to_dtype(DType::F64).unwrap().to_vec().unwrap()).to_vec()
        };
        let got = in_blocks(0, || gradients(DType::F16, device));
        let right = gradients(DType::F64, Device::Cpu);
        for (got, right) in got.iter().flatten().zip(right.iter().flatten()) {
            assert!((got - right).abs() <= 1e-2 * right.abs().max(1.0), "{got} for {right} on {device}");
        }
        // Each of 512 blocks adds 0.8. In f16, an addition would round to 0.75 once the sum reaches 256.
        let of = |shape: &[usize], x: f64| Tensor::full(shape, x, (DType::F16, device)).unwrap();
        let (q, one) = (of(&[4096, 2], 1.0), of(&[1, 2], 1.0));
        let v = of(&[1, 2], 1.0).requires_grad_(true).unwrap();
        in_blocks(0, || {
            let y = q.scaled_dot_product_attention(&one, &v, options(None, false)).unwrap();
            y.backward_with(&of(&[4096, 2], 0.1)).unwrap();
        });
        let sum = v.grad().unwrap().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
        assert!(sum.iter().all(|sum| (sum - 409.6).abs() < 0.5), "{sum:?} on {device}");
    });
}

/// Each block takes three launches, like attention that computes all scores at once. In f64, the CPU has no other way without gradients.
#[test]
fn each_block_takes_three_launches() {
    each_device(|device| {
        if device.info().unwrap().kind != DeviceKind::Cpu {
            return; // a GPU uses one fused kernel instead of blocks
        }
        let dtype = if device == Device::Cpu { DType::F64 } else { DType::F32 };
        let [q, k] = [24, 30].map(|n| Tensor::randn(&[2, n, 4], (dtype, device)).unwrap());
        let call = |causal| q.scaled_dot_product_attention(&k, &k, options(None, causal)).unwrap();
        assert_eq!(count_launches(|| drop(call(true))).1, 3);
        // The byte limits give blocks of eight queries of one head, of all queries of one head, and of all queries and heads.
        let size = dtype.size();
        for (bytes, blocks) in [(0, 6), (24 * 30 * size, 2), (2 * 24 * 30 * size, 1)] {
            assert_eq!(in_blocks(bytes, || count_launches(|| drop(call(false))).1), 3 * blocks, "{bytes} bytes");
        }
    });
}

/// On processors with kernels of products, f32 attention takes one launch, also if the backward pass computes the scores again.
#[cfg(target_arch = "x86_64")]
#[test]
fn attention_on_the_cpu_takes_one_launch() {
    if !(is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")) {
        return;
    }
    let q = Tensor::randn(&[2, 24, 4], Device::Cpu).unwrap();
    for q in [q.detach(), q.detach().requires_grad_(true).unwrap()] {
        let call = || drop(q.scaled_dot_product_attention(&q, &q, options(None, true)).unwrap());
        assert_eq!(in_blocks(0, || count_launches(call).1), 1);
    }
}

#[test]
fn shape_errors_do_not_depend_on_blocks() {
    let of = |shape: &[usize]| Tensor::ones(shape, Device::Cpu).unwrap();
    let (q, k) = (of(&[2, 9, 4]), of(&[2, 10, 4]));
    for (v, mask) in [(of(&[3, 10, 4]), None), (of(&[2, 11, 4]), None), (of(&[2, 10, 4]), Some(of(&[3, 9, 10])))] {
        let call = || q.scaled_dot_product_attention(&k, &v, options(mask.as_ref(), false)).unwrap_err().to_string();
        assert_eq!(in_blocks(0, call), call());
    }
}
