//! Attention, compared with its definition.

use claystone::device::{DeviceKind, count_launches};
use claystone::nn::{AttentionMasks, Module, MultiheadAttention};
use claystone::ops::Attention;
use claystone::{DType, Error, Tensor};
use ndarray::{ArrayD, Axis, Dimension, IxDyn};

use crate::common::{each_device, f64s, reference};
use crate::harness::{Case, case};

fn transposed(x: &ArrayD<f64>) -> ArrayD<f64> {
    let mut x = x.clone();
    x.swap_axes(x.ndim() - 2, x.ndim() - 1);
    x
}

/// The effect of a mask on an attention score.
#[derive(Clone, Copy, PartialEq)]
enum Mask {
    None,
    Keep,
    Add,
}

fn attention(
    [q, k, v]: [&ArrayD<f64>; 3],
    mask: Option<(&ArrayD<f64>, Mask)>,
    causal: bool,
    scale: Option<f64>,
) -> ArrayD<f64> {
    reference(&weights(q, k, mask, causal, scale), v)
}

fn weights(
    q: &ArrayD<f64>,
    k: &ArrayD<f64>,
    mask: Option<(&ArrayD<f64>, Mask)>,
    causal: bool,
    scale: Option<f64>,
) -> ArrayD<f64> {
    let scale = scale.unwrap_or(1.0 / (q.shape()[q.ndim() - 1] as f64).sqrt());
    let mut scores = reference(q, &transposed(k)) * scale;
    let rank = scores.ndim();
    if let Some((mask, kind)) = mask {
        let mask = mask.broadcast(scores.raw_dim()).unwrap();
        scores.zip_mut_with(&mask, |s, &m| match kind {
            Mask::Add => *s += m,
            _ if m == 0.0 => *s = f64::NEG_INFINITY,
            _ => {}
        });
    }
    for (_, s) in scores.indexed_iter_mut().filter(|(p, _)| causal && p[rank - 1] > p[rank - 2]) {
        *s = f64::NEG_INFINITY;
    }
    for mut row in scores.lanes_mut(Axis(rank - 1)) {
        let most = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        row.mapv_inplace(|s| if most == f64::NEG_INFINITY { 0.0 } else { (s - most).exp() });
        let sum = row.sum();
        row.mapv_inplace(|s| if sum == 0.0 { 0.0 } else { s / sum });
    }
    scores
}

/// Repeats each key or value head `times` times, for grouped queries.
fn repeated(x: &ArrayD<f64>, times: usize) -> ArrayD<f64> {
    let heads: Vec<usize> = (0..x.shape()[1] * times).map(|h| h / times).collect();
    x.select(Axis(1), &heads)
}

/// Splits a packed projection `[.., L, 3 E]` into three tensors `[.., heads, L, E / heads]`.
fn parts(x: &ArrayD<f64>, heads: usize) -> [ArrayD<f64>; 3] {
    let (rank, all) = (x.ndim(), x.shape()[x.ndim() - 1]);
    let width = all / 3 / heads;
    [0, 1, 2].map(|i| {
        let mut shape = x.shape().to_vec();
        shape[rank - 1] = heads;
        shape.push(width);
        let mut t = ArrayD::from_shape_fn(IxDyn(&shape), |p| {
            let mut at = p.slice()[..rank].to_vec();
            at[rank - 1] = (i * heads + p[rank - 1]) * width + p[rank];
            x[&at[..]]
        });
        t.swap_axes(rank - 2, rank - 1);
        t
    })
}

/// Joins heads into one dim: `[.., heads, L, width]` to `[.., L, E]`.
fn joined(mut x: ArrayD<f64>) -> ArrayD<f64> {
    let rank = x.ndim();
    x.swap_axes(rank - 3, rank - 2);
    let (outer, inner) = x.shape().split_at(rank - 2);
    let shape = [outer, &[inner.iter().product()]].concat();
    ArrayD::from_shape_vec(IxDyn(&shape), x.iter().copied().collect()).unwrap()
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // The tolerance is larger because f16 and bf16 round the scores and the weights before the result.
    let name = "scaled_dot_product_attention";
    let whole = |q: &[usize], k: &[usize], v: &[usize]| case(name).input(q).input(k).input(v).tolerance(4.0);
    for (q, k, v) in [
        (&[3, 4][..], &[5, 4][..], &[5, 2][..]),
        (&[2, 3, 5, 4], &[2, 3, 5, 4], &[2, 3, 5, 4]),
        (&[2, 1, 3, 4], &[3, 6, 4], &[3, 6, 4]),
        (&[1, 17, 3], &[1, 33, 3], &[1, 33, 2]),
        (&[2, 0, 4], &[2, 5, 4], &[2, 5, 4]),
        (&[2, 3, 4], &[2, 0, 4], &[2, 0, 4]),
    ] {
        for causal in [false, true] {
            cases.push(
                (whole(q, k, v).arg(0.0).arg(causal))
                    .with_reference(move |x| vec![attention([&x[0], &x[1], &x[2]], None, causal, None)]),
            );
        }
    }
    for (shape, causal) in [(&[2, 3, 5, 4][..], false), (&[2, 3, 5, 4], true), (&[0, 5, 4], false)] {
        let made = case("scaled_dot_product_attention_math").input(shape).input(shape).input(shape).tolerance(4.0);
        cases.push(made.arg(0.0).arg(causal).with_reference(move |x| {
            let weights = weights(&x[0], &x[1], None, causal, None);
            vec![reference(&weights, &x[2]), weights]
        }));
    }
    for mask in [&[3, 5][..], &[2, 1, 5], &[1], &[2, 2, 3, 5]] {
        for (kind, causal) in [(Mask::Keep, false), (Mask::Keep, true), (Mask::Add, false), (Mask::Add, true)] {
            let whole = whole(&[2, 2, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 3]);
            let whole = if kind == Mask::Keep { whole.mask(mask) } else { whole.input(mask) };
            let mask_of = move |x: &[ArrayD<f64>]| attention([&x[0], &x[1], &x[2]], Some((&x[3], kind)), causal, None);
            cases.push(whole.arg(0.0).arg(causal).with_reference(move |x| vec![mask_of(x)]));
        }
    }
    cases.push(
        (whole(&[3, 4], &[5, 4], &[5, 4]).arg(0.0).arg(false).arg(0.3))
            .with_reference(|x| vec![attention([&x[0], &x[1], &x[2]], None, false, Some(0.3))]),
    );
    let grouped = whole(&[2, 6, 3, 4], &[2, 2, 5, 4], &[2, 2, 5, 4]).arg(0.0).arg(true).arg(0.5).arg(true);
    cases.push(
        grouped.with_reference(|x| vec![attention([&x[0], &repeated(&x[1], 3), &repeated(&x[2], 3)], None, true, Some(0.5))]),
    );
    let grouped = whole(&[2, 4, 3, 2], &[2, 2, 3, 2], &[2, 2, 3, 2]).mask(&[2, 4, 1, 3]);
    cases.push(grouped.arg(0.0).arg(false).arg(1).arg(true).with_reference(|x| {
        let (k, v) = (repeated(&x[1], 2), repeated(&x[2], 2));
        vec![attention([&x[0], &k, &v], Some((&x[3], Mask::Keep)), false, Some(1.0))]
    }));
    for (shape, heads) in [(&[2, 5, 24][..], 2), (&[3, 6], 1), (&[2, 2, 3, 12], 4), (&[0, 5, 12], 2), (&[2, 17, 6], 2)]
    {
        for causal in [false, true] {
            cases.push((case("packed_attention").input(shape).arg(heads).arg(0.0).arg(causal).tolerance(4.0)).with_reference(
                move |x| {
                    let [q, k, v] = parts(&x[0], heads);
                    vec![joined(attention([&q, &k, &v], None, causal, None))]
                },
            ));
        }
    }
    let masked =
        case("packed_attention").input(&[2, 5, 12]).mask(&[2, 1, 1, 5]).arg(2).arg(0.0).arg(true).tolerance(4.0);
    cases.push(masked.with_reference(|x| {
        let [q, k, v] = parts(&x[0], 2);
        vec![joined(attention([&q, &k, &v], Some((&x[1], Mask::Keep)), true, None))]
    }));
    cases
}

#[test]
fn fully_masked_queries_give_zeros() {
    each_device(|device| {
        for dtype in [DType::F32, DType::F16] {
            let x = Tensor::ones(&[2, 3, 4], (dtype, device)).unwrap().requires_grad_(true).unwrap();
            let low = Tensor::full(&[3, 3], f64::NEG_INFINITY, (dtype, device)).unwrap();
            let nothing = Tensor::zeros(&[3, 3], (DType::Bool, device)).unwrap();
            for mask in [&low, &nothing] {
                x.zero_grad();
                let options = Attention { attn_mask: Some(mask), ..Attention::default() };
                let y = x.scaled_dot_product_attention(&x, &x, options).unwrap();
                assert!(f64s(&y.detach()).iter().all(|&y| y == 0.0));
                y.sum((), false).unwrap().backward().unwrap();
                assert!(f64s(&x.grad().unwrap()).iter().all(|&g| g == 0.0));
            }
        }
    });
}

#[test]
fn causal_masking_ignores_later_keys() {
    each_device(|device| {
        // The values of masked keys must not affect the result, even NaN and infinity.
        let k = Tensor::from_slice(&[1f32, f32::NAN, f32::INFINITY], [3, 1], device).unwrap();
        let (q, v) =
            (Tensor::ones(&[3, 1], device).unwrap(), Tensor::from_slice(&[7f32, 8.0, 9.0], [3, 1], device).unwrap());
        let y = q.scaled_dot_product_attention(&k, &v, Attention { is_causal: true, ..Attention::default() }).unwrap();
        let y = f64s(&y);
        assert!(y[[0, 0]] == 7.0 && y[[1, 0]].is_nan() && y[[2, 0]].is_nan(), "{y}");
    });
}

#[test]
fn long_rows_match_the_definition() {
    each_device(|device| {
        for n in [63, 257, 1030] {
            let scores = |rows: usize, by: usize| {
                let values: Vec<f32> = (0..rows * n).map(|i| ((i * by % 101) as f32 - 50.0) / 25.0).collect();
                Tensor::from_slice(&values, [rows, n], device).unwrap()
            };
            let (q, k, v) =
                (Tensor::ones(&[3, 1], device).unwrap(), scores(1, 7).t().unwrap(), scores(2, 13).t().unwrap());
            let (add, keep) = (scores(3, 29), scores(3, 31).gt_scalar(0).unwrap());
            for (mask, kind) in [(None, Mask::None), (Some(&add), Mask::Add), (Some(&keep), Mask::Keep)] {
                for is_causal in [false, true] {
                    let options = Attention { attn_mask: mask, is_causal, ..Attention::default() };
                    let got = f64s(&q.scaled_dot_product_attention(&k, &v, options).unwrap());
                    let mask = mask.map(|m| (f64s(m), kind));
                    let mask = mask.as_ref().map(|(m, kind)| (m, *kind));
                    let right = attention([&f64s(&q), &f64s(&k), &f64s(&v)], mask, is_causal, None);
                    for (got, right) in got.iter().zip(&right) {
                        assert!((got - right).abs() < 1e-5, "{n} keys on {device}: {got} {right}");
                    }
                }
            }
        }
    });
}

#[test]
fn dropout_scales_the_kept_weights() {
    each_device(|device| {
        let (x, v) = (Tensor::zeros(&[4, 8], device).unwrap(), Tensor::ones(&[64, 1], device).unwrap());
        let k = Tensor::zeros(&[64, 8], device).unwrap();
        let options = Attention { dropout_p: 0.5, ..Attention::default() };
        let sums = f64s(&x.scaled_dot_product_attention(&k, &v, options).unwrap());
        // Each row sum is the number of kept weights among 64, times 2 (the dropout scale), divided by 64.
        assert!(sums.iter().all(|s| (s * 32.0).fract() == 0.0 && (0.3..1.7).contains(s)), "{sums}");
        assert!(sums.iter().any(|&s| s != sums[[0, 0]]));
        let wrong = Attention { dropout_p: 1.5, ..Attention::default() };
        assert!(matches!(x.scaled_dot_product_attention(&k, &v, wrong), Err(Error::Invalid { .. })));
    });
}

#[test]
fn attention_takes_few_launches_and_no_copies() {
    each_device(|device| {
        let projected = Tensor::ones(&[2, 16, 3 * 32], device).unwrap().requires_grad_(true).unwrap();
        let options = Attention { is_causal: true, ..Attention::default() };
        let (y, forward) = count_launches(|| projected.packed_attention(4, options).unwrap());
        assert!(y.is_contiguous());
        let grad = Tensor::ones(y.shape(), device).unwrap();
        let ((), backward) = count_launches(|| y.backward_with(&grad).unwrap());
        // GPUs run one fused kernel forward and two backward; CPU devices run matrix products and a softmax.
        let fused = device.info().unwrap().kind != DeviceKind::Cpu;
        assert_eq!((forward, backward), if fused { (1, 2) } else { (3, 5) }, "on {device}");
    });
}

#[test]
fn multihead_layer_agrees_with_and_without_masks() {
    each_device(|device| {
        let layer = MultiheadAttention::new(8, 2, device).unwrap();
        let names: Vec<String> = layer.named_parameters("").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]);
        let x = Tensor::randn(&[3, 5, 8], device).unwrap();
        let close = |a: &Tensor, b: &Tensor| {
            let (a, b) = (f64s(&a.detach()), f64s(&b.detach()));
            assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{a} {b}");
        };
        let attend = |layer: &MultiheadAttention, masks| {
            let (y, none) = layer.attend(&x, &x, &x, masks).unwrap();
            assert!(none.is_none());
            let (z, weights) = layer.attend(&x, &x, &x, AttentionMasks { need_weights: true, ..masks }).unwrap();
            close(&y, &z);
            let weights = weights.unwrap();
            assert_eq!(weights.shape().dims(), [3, 5, 5]);
            close(&weights.sum(-1, false).unwrap(), &Tensor::ones(&[3, 5], device).unwrap());
            y
        };
        close(&layer.forward(&x).unwrap(), &attend(&layer, AttentionMasks::default()));

        // Combines a causal mask and a padding mask, given as bools and as floats.
        let later = Tensor::ones(&[5, 5], (DType::Bool, device)).unwrap().triu(1).unwrap();
        let low = |mask: &Tensor| Tensor::zeros((), device).unwrap().masked_fill(mask, f64::NEG_INFINITY).unwrap();
        let lengths = Tensor::from_slice(&[5i64, 3, 1], [3, 1], device).unwrap();
        let padding = Tensor::arange(0, 5, 1, (DType::I64, device)).unwrap().ge(&lengths).unwrap();
        let (later_low, padding_low) = (low(&later), low(&padding));
        let all_heads = later.expand([6, 5, 5]).unwrap();
        let only = |attn_mask| attend(&layer, AttentionMasks { attn_mask, ..AttentionMasks::default() });
        let causal = only(Some(&later));
        close(&causal, &only(Some(&later_low)));
        close(&causal, &only(Some(&all_heads)));
        let both = |attn_mask, padding| {
            attend(&layer, AttentionMasks { attn_mask, key_padding_mask: padding, ..AttentionMasks::default() })
        };
        let right = both(Some(&later), Some(&padding));
        close(&right, &both(Some(&later_low), Some(&padding)));
        close(&right, &both(Some(&later_low), Some(&padding_low)));
        // With causal attention, positions before the end of a sequence do not depend on later positions.
        close(&right.i((1, ..3)).unwrap(), &causal.i((1, ..3)).unwrap());
        let layer = layer.with_causal();
        close(&causal, &layer.forward(&x).unwrap());
        close(&causal, &attend(&layer, AttentionMasks::default()));
        let padded = attend(&layer, AttentionMasks { key_padding_mask: Some(&padding), ..AttentionMasks::default() });
        close(&right, &padded);
        let one = x.i(0).unwrap();
        close(&layer.forward(&one).unwrap(), &causal.i(0).unwrap());
        assert!(matches!(MultiheadAttention::new(8, 3, device), Err(Error::Invalid { .. })));
    });
}

#[test]
fn mismatched_shapes_are_errors() {
    let t = |shape: &[usize]| Tensor::zeros(shape, claystone::Device::Cpu).unwrap();
    let (q, k, v, mask) = (t(&[2, 3, 4]), t(&[2, 5, 4]), t(&[2, 5, 4]), t(&[3, 4]));
    fn attend(q: &Tensor, k: &Tensor, v: &Tensor, options: Attention<'_>) -> Result<(), Error> {
        q.scaled_dot_product_attention(k, v, options).map(drop)
    }
    let mismatch = |r: Result<(), Error>| assert!(matches!(r, Err(Error::ShapeMismatch { .. })), "{r:?}");
    mismatch(attend(&q, &t(&[2, 5, 3]), &v, Attention::default()));
    mismatch(attend(&q, &k, &t(&[2, 4, 4]), Attention::default()));
    mismatch(attend(&q, &k, &v, Attention { attn_mask: Some(&mask), ..Attention::default() }));
    let grouped = Attention { enable_gqa: true, ..Attention::default() };
    mismatch(attend(&t(&[1, 3, 3, 4]), &t(&[1, 2, 3, 4]), &t(&[1, 2, 3, 4]), grouped));
    // Errors name the given shapes and the shapes that the call expects.
    fn told(q: &Tensor, k: &Tensor, v: &Tensor, options: Attention<'_>) -> (String, String, &'static str) {
        match attend(q, k, v, options) {
            Err(Error::ShapeMismatch { lhs, rhs, hint, .. }) => (lhs.to_string(), rhs.to_string(), hint),
            other => panic!("{other:?}"),
        }
    }
    let (heads, few, more) = (t(&[2, 8, 5, 16]), t(&[2, 2, 7, 16]), t(&[3, 2, 7, 16]));
    let (lhs, rhs, hint) = told(&heads, &few, &few, Attention::default());
    assert_eq!((lhs.as_str(), rhs.as_str()), ("[2, 8, 5, 16]", "[2, 2, 7, 16]"));
    assert!(hint.contains("enable_gqa"), "{hint}");
    let (lhs, rhs, hint) = told(&heads, &more, &more, Attention::default());
    assert_eq!((lhs.as_str(), rhs.as_str()), ("[2, 8, 5, 16]", "[3, 2, 7, 16]"));
    assert!(hint.contains("broadcast"), "{hint}");
    for (k, v, other) in [(&more, &more, "[3, 2, 7, 16]"), (&few, &more, "[3, 2, 7, 16]")] {
        let (lhs, rhs, hint) = told(&heads, k, v, grouped);
        assert_eq!((lhs.as_str(), rhs.as_str()), ("[2, 8, 5, 16]", other));
        assert!(hint.contains("broadcast"), "{hint}");
    }
    for shape in [&[8, 7, 5][..], &[2, 8, 5, 8], &[3, 1, 5, 7], &[1, 2, 8, 5, 7]] {
        let mask = t(shape);
        let (lhs, rhs, _) = told(&heads, &few, &few, Attention { attn_mask: Some(&mask), ..grouped });
        assert_eq!((lhs, rhs), ("[2, 8, 5, 16]".into(), mask.shape().to_string()));
        let packed = t(&[2, 5, 3 * 16]);
        match packed.packed_attention(8, Attention { attn_mask: Some(&mask), ..Attention::default() }) {
            Err(Error::ShapeMismatch { lhs, rhs, .. }) => assert_eq!((&lhs, &rhs), (packed.shape(), mask.shape())),
            other => panic!("{other:?}"),
        }
    }
    for shape in [&[5, 7][..], &[8, 1, 7], &[2, 1, 5, 1], &[7]] {
        let mask = t(shape);
        attend(&heads, &few, &few, Attention { attn_mask: Some(&mask), ..grouped }).unwrap();
    }
    let layer = MultiheadAttention::new(8, 2, claystone::Device::Cpu).unwrap();
    let (x, y, z, many) = (t(&[2, 5, 8]), t(&[2, 7, 8]), t(&[2, 6, 8]), t(&[3, 7, 8]));
    let (padding, pairs) = (t(&[2, 5]), t(&[7, 5]));
    for need_weights in [false, true] {
        for (k, v, key_padding_mask, attn_mask, shapes) in [
            (&y, &z, None, None, [&y, &z]),
            (&many, &many, None, None, [&x, &many]),
            (&y, &y, Some(&padding), None, [&y, &padding]),
            (&y, &y, None, Some(&pairs), [&x, &pairs]),
        ] {
            let masks = AttentionMasks { key_padding_mask, attn_mask, need_weights };
            match layer.attend(&x, k, v, masks) {
                Err(Error::ShapeMismatch { lhs, rhs, .. }) => assert_eq!([&lhs, &rhs], shapes.map(Tensor::shape)),
                other => panic!("{other:?}"),
            }
        }
    }
    match Tensor::multi_dot(&[&t(&[2, 3]), &t(&[3, 4]), &t(&[5, 6])]) {
        Err(Error::ShapeMismatch { lhs, rhs, .. }) => assert_eq!((lhs.dims(), rhs.dims()), (&[3, 4][..], &[5, 6][..])),
        other => panic!("{other:?}"),
    }
    assert!(matches!(t(&[2, 5, 10]).packed_attention(2, Attention::default()), Err(Error::Invalid { .. })));
    let whole = q.to_dtype(DType::I64).unwrap();
    assert!(matches!(attend(&whole, &whole, &whole, Attention::default()), Err(Error::UnsupportedDType { .. })));
}
