//! Tests the GPU kernel for attention: values and gradients for all options against the CPU in f64, memory use, and numbers of
//! launches. Without a GPU, an OpenCL CPU device runs the kernel: each test restarts itself with `CLAYSTONE_KERNELS=gpu`.

use claystone::device::count_launches;
use claystone::ops::Attention;
use claystone::{DType, Device, Tensor, manual_seed};

use crate::common::f64s;
use crate::common::gpus::{assert_same, gpus, is_gpu, thinned_cases, upload};

/// Returns pseudo-random numbers between -1 and 1 that repeat only after a long period.
fn numbers(n: usize, seed: usize) -> Vec<f64> {
    (0..n).map(|i| ((i * 7919 + i / 241 + seed * 613) % 241) as f64 / 120.0 - 1.0).collect()
}

/// Returns a leaf whose first element is not the first of its storage, and whose rows have gaps between them.
fn leaf(shape: &[usize], seed: usize, dtype: DType, device: Device) -> Tensor {
    let mut wide = shape.to_vec();
    let last = wide.len() - 1;
    wide[last] += 3;
    let t = upload(&numbers(wide.iter().product(), seed), &wide, dtype, device);
    t.narrow(-1, 1, shape[last]).unwrap().detach().requires_grad_(true).unwrap()
}

fn values(t: &Tensor) -> Vec<f64> {
    f64s(&t.detach()).iter().copied().collect()
}

/// Runs backward and returns the values of the result, followed by the gradients of the leaves.
fn with_gradients(y: Tensor, leaves: &[Tensor]) -> Vec<f64> {
    let weights = upload(&numbers(y.numel(), 5), y.shape().dims(), y.dtype(), y.device());
    y.backward_with(&weights).unwrap();
    let gradients = leaves.iter().flat_map(|leaf| values(&leaf.grad().unwrap()));
    values(&y).into_iter().chain(gradients).collect()
}

/// Shapes of queries, keys and values: grouped heads (declared with an option or implied by broadcasting), and broadcast batches.
const CALL_SHAPES: [[&[usize]; 3]; 6] = [
    [&[2, 6, 9, 8], &[2, 2, 37, 8], &[2, 2, 37, 4]],
    [&[3, 33, 8], &[17, 8], &[17, 8]],
    [&[2, 1, 39, 8], &[3, 31, 8], &[3, 31, 8]],
    [&[1, 2, 35, 8], &[3, 1, 7, 8], &[3, 1, 7, 8]],
    [&[40, 8], &[23, 8], &[23, 8]],
    [&[2, 3, 65, 8], &[2, 3, 65, 8], &[2, 3, 65, 8]],
];

#[test]
fn values_and_gradients_match_the_cpu() {
    for device in gpus("attention::values_and_gradients_match_the_cpu") {
        let calls = (0..CALL_SHAPES.len()).map(|i| (i, DType::F32, 2e-5)).chain([(0, DType::F16, 4e-3)]);
        for (i, dtype, tolerance) in calls {
            let call = |to: DType, device: Device| {
                // Both devices use inputs with the same bits: the leaf is made on the CPU and copied.
                let made = |k: usize| {
                    let t = leaf(CALL_SHAPES[i][k], k, dtype, Device::Cpu).detach().to_dtype(to).unwrap();
                    t.to_device(device).unwrap().requires_grad_(true).unwrap()
                };
                let leaves = [made(0), made(1), made(2)];
                // The first call has a mask of bools, every second call is causal, and the last call uses dropout.
                let mask = leaf(&[2, 6, 1, 37], 3, dtype, device).detach().gt_scalar(-0.6).unwrap();
                let options = Attention {
                    attn_mask: (i == 0).then_some(&mask),
                    dropout_p: if i == 5 { 0.25 } else { 0.0 },
                    is_causal: i % 2 == 0,
                    enable_gqa: i == 0,
                    scale: Some(0.7),
                };
                manual_seed(11);
                let [q, k, v] = leaves.each_ref();
                with_gradients(q.scaled_dot_product_attention(k, v, options).unwrap(), &leaves)
            };
            let (got, want) = (call(dtype, device), call(DType::F64, Device::Cpu));
            assert_same(&got, &want, tolerance, &format!("call {i} of {dtype}"));
        }
    }
}

/// Shapes around the tiles of tensor cores (64 or 128 queries, 32 or 64 keys). Some head sizes are multiples of the tile size and
/// some are not.
const TILE_SHAPES: [[&[usize]; 3]; 9] = [
    [&[1, 2, 65, 32], &[1, 2, 33, 32], &[1, 2, 33, 32]],
    [&[1, 2, 64, 64], &[1, 2, 64, 64], &[1, 2, 64, 64]],
    [&[2, 1, 129, 64], &[2, 1, 127, 64], &[2, 1, 127, 64]],
    [&[1, 3, 17, 128], &[1, 3, 129, 128], &[1, 3, 129, 128]],
    [&[1, 1, 257, 128], &[1, 1, 257, 128], &[1, 1, 257, 128]],
    [&[1, 2, 131, 40], &[1, 2, 97, 40], &[1, 2, 97, 72]],
    [&[1, 2, 130, 34], &[1, 2, 66, 34], &[1, 2, 66, 34]],
    [&[1, 6, 65, 64], &[1, 2, 193, 64], &[1, 2, 193, 64]],
    [&[5, 1, 513, 80], &[5, 1, 511, 80], &[5, 1, 511, 80]],
];

#[test]
fn tensor_cores_match_the_cpu() {
    for device in gpus("attention::tensor_cores_match_the_cpu") {
        let calls = [None, Some(DType::Bool), Some(DType::F32)].map(|mask| [(mask, false), (mask, true)]);
        let calls = [(DType::F16, 3e-3), (DType::BF16, 2e-2), (DType::F32, 2e-5)]
            .map(|of| calls.as_flattened().iter().map(move |&call| (of, call)));
        let calls = calls.into_iter().flatten().enumerate();
        // An OpenCL CPU device compiles each kernel variant for seconds, so it runs only one variant.
        for (i, ((dtype, tolerance), (mask, is_causal))) in calls.filter(|&(i, _)| is_gpu(device) || i == 4) {
            for shapes in thinned_cases(&TILE_SHAPES, TILE_SHAPES.len(), device) {
                // f32 kernels use tensor cores only if there are at least as many work-groups as compute units, so the batch is
                // large.
                let batch = if dtype == DType::F32 && is_gpu(device) { 70 } else { shapes[0][0] };
                let [of_q, of_k, of_v] = shapes.map(|of| [&[batch], &of[1..]].concat());
                let (heads, queries, keys) = (of_q[1], of_q[2], of_k[2]);
                let call = |to: DType, device: Device| {
                    // The gap between rows is chosen so that the rows stay aligned to 16, 8 or 4 bytes.
                    let made = |of: &[usize], k: usize| {
                        let gap = [8, 4, 2][i % 3];
                        let wide: Vec<usize> = of[..3].iter().copied().chain([of[3] + gap]).collect();
                        let t = upload(&numbers(wide.iter().product(), k), &wide, dtype, Device::Cpu);
                        let t = t.to_dtype(to).unwrap().to_device(device).unwrap().narrow(-1, gap, of[3]).unwrap();
                        t.detach().requires_grad_(true).unwrap()
                    };
                    let leaves = [made(&of_q, 0), made(&of_k, 1), made(&of_v, 2)];
                    let shown = |dtype: DType| {
                        let t = upload(&numbers(heads * keys, 3), &[1, heads, 1, keys], DType::F64, Device::Cpu);
                        let t = if dtype == DType::Bool { t.gt_scalar(-0.6).unwrap() } else { t.to_dtype(to).unwrap() };
                        t.to_device(device).unwrap()
                    };
                    let mask = mask.map(shown);
                    let dropout_p = if i % 5 == 4 && queries < 100 { 0.25 } else { 0.0 };
                    let enable_gqa = of_q[1] != of_k[1];
                    let options = Attention { attn_mask: mask.as_ref(), dropout_p, is_causal, enable_gqa, scale: None };
                    manual_seed(11);
                    let [q, k, v] = leaves.each_ref();
                    with_gradients(q.scaled_dot_product_attention(k, v, options).unwrap(), &leaves)
                };
                let (got, want) = (call(dtype, device), call(DType::F64, Device::Cpu));
                let what = format!("{of_q:?} of {dtype}, mask {mask:?}, causal {is_causal}");
                assert_same(&got, &want, tolerance, &what);
            }
        }
    }
}

/// Infinities in f32 follow IEEE arithmetic, although tensor cores split each f32 number into a sum of parts before they multiply.
#[test]
fn infinities_follow_ieee_arithmetic() {
    /// Number of heads, large enough that the kernel uses tensor cores.
    const HEADS: usize = 50;
    for device in gpus("attention::infinities_follow_ieee_arithmetic") {
        let call = |dtype: DType, device: Device| {
            let numbers = |seed: usize, at: usize, value: f64| {
                let mut numbers = numbers(HEADS * 130 * 64, seed);
                numbers[at] = value;
                numbers
            };
            // One key of the first head has -inf at one position. All queries are positive at that position, so this key's weight
            // is 0.
            let positive = (0..HEADS * 130 * 64).map(|i| if i % 64 == 3 { 0.5 } else { (i % 37) as f64 / 37.0 - 0.4 });
            let made = |numbers: &[f64]| {
                let t = upload(numbers, &[HEADS, 130, 64], DType::F32, Device::Cpu).to_dtype(dtype).unwrap();
                t.to_device(device).unwrap().requires_grad_(true).unwrap()
            };
            let (k, v) = (numbers(1, 40 * 64 + 3, f64::NEG_INFINITY), numbers(2, (130 + 7) * 64 + 5, f64::INFINITY));
            let [q, k, v] = [made(&positive.collect::<Vec<_>>()), made(&k), made(&v)];
            let y = q.scaled_dot_product_attention(&k, &v, Attention::default()).unwrap();
            let weights = upload(&self::numbers(y.numel(), 5), &[HEADS, 130, 64], dtype, device);
            y.backward_with(&weights).unwrap();
            // In the second head, every gradient of queries and keys contains inf - inf, which is NaN, so only the first head is
            // compared.
            let of_first = |t: &Tensor| values(&t.narrow(0, 0, 1).unwrap());
            [values(&y), of_first(&q.grad().unwrap()), of_first(&k.grad().unwrap()), values(&v.grad().unwrap())]
                .concat()
        };
        let want = call(DType::F64, Device::Cpu);
        assert!(want.iter().any(|x| x.is_infinite()) && want.iter().any(|x| x.is_nan()));
        assert_same(&call(DType::F32, device), &want, 2e-5, "infinities");
    }
}

#[test]
fn packed_attention_matches_the_cpu() {
    for device in gpus("attention::packed_attention_matches_the_cpu") {
        for (is_causal, dropout_p) in [(true, 0.0), (false, 0.5)] {
            let call = |dtype: DType, device: Device| {
                let x = leaf(&[2, 19, 3 * 4 * 8], 1, DType::F32, Device::Cpu).detach().to_dtype(dtype).unwrap();
                let x = x.to_device(device).unwrap().requires_grad_(true).unwrap();
                manual_seed(5);
                let options = Attention { is_causal, dropout_p, ..Attention::default() };
                let (y, forward) = count_launches(|| x.packed_attention(4, options).unwrap());
                assert!(y.is_contiguous());
                let grad = upload(&numbers(y.numel(), 5), y.shape().dims(), dtype, device);
                let ((), backward) = count_launches(|| y.backward_with(&grad).unwrap());
                assert!(device == Device::Cpu || (forward, backward) == (1, 2), "{forward}, {backward}");
                [values(&y), values(&x.grad().unwrap())].concat()
            };
            assert_same(
                &call(DType::F32, device),
                &call(DType::F64, Device::Cpu),
                2e-5,
                &format!("causal {is_causal}"),
            );
        }
    }
}

/// With few queries, work-groups split the keys and a second launch combines the partial results. All sums have a fixed order.
#[test]
fn decoding_with_a_long_cache_takes_two_launches() {
    for device in gpus("attention::decoding_with_a_long_cache_takes_two_launches") {
        let (q, cache) = (leaf(&[1, 8, 1, 32], 0, DType::F32, device), leaf(&[1, 2, 2000, 32], 1, DType::F32, device));
        let options = Attention { enable_gqa: true, ..Attention::default() };
        let call = |q: &Tensor, cache: &Tensor| {
            count_launches(|| {
                q.detach().scaled_dot_product_attention(&cache.detach(), &cache.detach(), options).unwrap()
            })
        };
        let (y, launches) = call(&q, &cache);
        assert_eq!(launches, 2);
        let on_cpu = |t: &Tensor| t.detach().to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
        assert_same(&values(&y), &values(&call(&on_cpu(&q), &on_cpu(&cache)).0), 1e-5, "decoding");
        assert_eq!(values(&y), values(&call(&q, &cache).0));
    }
}

#[test]
fn memory_is_linear_in_the_sequence_length() {
    for device in gpus("attention::memory_is_linear_in_the_sequence_length") {
        // A GPU needs this many heads to be fully used. With fewer heads, work-groups would split the keys and need extra memory.
        let heads = if is_gpu(device) { 64 } else { 2 };
        let bytes = |length: usize| {
            let x = leaf(&[1, heads, length, 16], 1, DType::F32, device);
            device.synchronize().unwrap();
            let before = device.memory_stats().unwrap().allocated_bytes.current;
            device.reset_peak_stats().unwrap();
            let options = Attention { is_causal: true, ..Attention::default() };
            let y = x.scaled_dot_product_attention(&x, &x, options).unwrap();
            y.backward_with(&y.detach()).unwrap();
            device.memory_stats().unwrap().allocated_bytes.peak - before
        };
        let (short, long) = (bytes(1024), bytes(4096));
        // The scores of 4,096 positions would take 64 MiB per head. Each operand takes only 0.25 MiB, so memory must grow in
        // proportion to the length.
        let limit = (4 * short + (1 << 16), (heads as u64) << 22);
        assert!(long <= limit.0 && long < limit.1, "{short} bytes, and {long} of four times the length");
    }
}

/// Repeated runs give the same bits, because all sums have a fixed order.
#[test]
fn repeated_runs_give_the_same_bits() {
    for device in gpus("attention::repeated_runs_give_the_same_bits") {
        let call = || {
            let leaves = [0, 1, 2].map(|k| leaf(&[2, 2, 33, 8], k, DType::F32, device));
            let [q, k, v] = leaves.each_ref();
            with_gradients(q.scaled_dot_product_attention(k, v, Attention::default()).unwrap(), &leaves)
        };
        assert_eq!(call(), call());
    }
}

/// Calls that the kernel does not support use several other operations: a mask that requires a gradient, and heads that are too
/// wide.
#[test]
fn unsupported_cases_are_composed() {
    for device in gpus("attention::unsupported_cases_are_composed") {
        let x = leaf(&[2, 5, 8], 1, DType::F32, device);
        let mask = leaf(&[5, 5], 2, DType::F32, device);
        let options = Attention { attn_mask: Some(&mask), ..Attention::default() };
        let (y, launches) = count_launches(|| x.scaled_dot_product_attention(&x, &x, options).unwrap());
        assert_eq!(launches, 3);
        y.sum((), false).unwrap().backward().unwrap();
        assert_eq!(mask.grad().unwrap().shape().dims(), [5, 5]);
        let wide = leaf(&[3, 300], 1, DType::F32, device);
        let (_, launches) =
            count_launches(|| wide.scaled_dot_product_attention(&wide, &wide, Attention::default()).unwrap());
        assert_eq!(launches, 3);
    }
}
