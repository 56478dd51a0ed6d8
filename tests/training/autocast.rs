//! Mixed precision: which operations autocast runs in half precision or in f32, and its cached casts of weights.

use claystone::device::count_launches;
use claystone::{CrossEntropy, DType, Device, LossReduction, Result, Tensor, autocast, autocast_dtype, no_grad};

use crate::common::each_device;

fn leaf(values: &[f32], device: Device) -> Tensor {
    Tensor::from_slice(values, values.len(), device).unwrap().requires_grad_(true).unwrap()
}

/// Products must run in half precision and sums in f32. A weight must be cast once, and gradients must have the dtype of the leaves.
#[test]
fn autocast_runs_products_in_halves_and_sums_in_f32() {
    each_device(|d| {
        let (x, w) = (leaf(&[1.0, 2.0, 3.0, 0.3], d), leaf(&[0.5, -1.0, 0.25, 0.1], d));
        let x = x.reshape([2, 2]).unwrap().detach();
        let weight = w.reshape([2, 2]).unwrap().detach().requires_grad_(true).unwrap();
        let f64s = x.detach().to_dtype(DType::F64).unwrap();
        for half in [DType::BF16, DType::F16] {
            autocast(half, || {
                let dtypes = |t: Result<Tensor>| t.unwrap().dtype();
                assert_eq!(autocast_dtype(), Some(half));
                let (y, launches) = count_launches(|| x.matmul(&weight).unwrap());
                let (_, again) = count_launches(|| x.linear(&weight, None).unwrap());
                assert_eq!((y.dtype(), launches, again), (half, 3, 2), "the weight is cast once, x each time, on {d}");
                assert_eq!(dtypes(Tensor::einsum("ij,jk", &[&x, &weight])), half);
                assert_eq!(dtypes(y.softmax(1)), DType::F32);
                assert_eq!(dtypes(y.logsumexp(1, false)), DType::F32);
                assert_eq!(dtypes(y.mse_loss(&x)), DType::F32);
                assert_eq!(dtypes(y.sum((), false)), DType::F32);
                assert_eq!(dtypes(y.tanh()), half, "what is in no list stays");
                for wide in
                    [y.exp(), y.log1p(), y.pow_scalar(2), y.pow(&y), y.rpow_scalar(2), y.softplus(), y.cumsum(0)]
                {
                    assert_eq!(dtypes(wide), DType::F32);
                }
                let wide = [
                    y.cumprod(0),
                    y.vector_norm(f64::INFINITY, 0, false),
                    y.cdist(&y, 1.0),
                    y.normalize(2.0, 1, 1e-12),
                ];
                for wide in wide.into_iter().chain([y.cosine_similarity(&y, 1, 1e-8), y.rsqrt(), y.reciprocal()]) {
                    assert_eq!(dtypes(wide), DType::F32);
                }
                let own = y.detach().clone();
                assert_eq!(dtypes(own.exp_().map(Tensor::shallow_clone)), half, "in place there is no other dtype");
                assert_eq!(dtypes(f64s.matmul(&f64s)), DType::F64);
                assert_eq!(autocast(None, || dtypes(x.matmul(&weight))), DType::F32);
                weight.zero_grad();
                y.sum((), false).unwrap().backward().unwrap();
            });
            assert_eq!(weight.grad().unwrap().dtype(), DType::F32);
            assert_eq!(x.matmul(&weight).unwrap().dtype(), DType::F32);
        }
        // A weight changed inside the scope must be cast again. A cast made under no_grad must not be reused while recording.
        autocast(DType::BF16, || {
            let frozen = no_grad(|| x.matmul(&weight)).unwrap();
            let y = x.matmul(&weight).unwrap();
            assert!(!frozen.requires_grad() && y.requires_grad());
            no_grad(|| weight.fill_(1.0).map(drop)).unwrap();
            assert_eq!(x.matmul(&weight).unwrap().to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap()[0], 3.0);
        });
        let error = autocast(DType::I64, || x.matmul(&weight)).unwrap_err().to_string();
        assert!(error.contains("autocast"), "{error}");
    });
}

/// Losses with labels are in f32 without an f32 copy of the logits. Losses and gradients must equal those computed from such a copy.
#[test]
fn losses_of_halves_are_computed_in_f32() {
    each_device(|d| {
        let logits = Tensor::randn(&[37, 519], d).unwrap();
        let labels = Tensor::from_vec((0..37i64).map(|i| i * 14).collect(), 37, d).unwrap();
        for (half, reduction) in [(DType::BF16, LossReduction::Mean), (DType::F16, LossReduction::None)] {
            let options = CrossEntropy { reduction, ..CrossEntropy::default() };
            let loss = |x: &Tensor| x.cross_entropy_with(&labels, options).unwrap();
            let gradient = |x: &Tensor, loss: &Tensor| {
                loss.sum((), false).unwrap().backward().unwrap();
                x.grad().unwrap().to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap()
            };
            let x = logits.to_dtype(half).unwrap().detach().requires_grad_(true).unwrap();
            let (own, launches) = count_launches(|| autocast(half, || loss(&x)));
            let (_, of_halves) = count_launches(|| loss(&x));
            assert_eq!((own.dtype(), launches), (DType::F32, of_halves), "on {d}");
            let own_gradient = gradient(&x, &own);
            x.zero_grad();
            let copied = loss(&x.to_dtype(DType::F32).unwrap());
            assert_eq!(own.to_vec::<f32>().unwrap(), copied.to_vec::<f32>().unwrap(), "on {d}");
            assert_eq!(own_gradient, gradient(&x, &copied), "on {d}");
            // Weighted or smoothed losses are composed of other operations, on an f32 copy of the logits.
            let smoothed = CrossEntropy { label_smoothing: 0.1, ..options };
            assert_eq!(autocast(half, || x.cross_entropy_with(&labels, smoothed)).unwrap().dtype(), DType::F32);
        }
    });
}
