//! Attention over a cache of keys and values, compared with f64.

use claystone::nn::{KvCache, KvCacheOptions};
use claystone::ops::{CacheRows, CacheType, cache_store, cached_attention};
use claystone::{DType, Device, Error, Graph, Tensor};

use crate::common::{each_device, opencl, values};

/// Returns numbers between -1 and 1 in a scrambled order.
fn scattered(dims: [usize; 4], seed: usize, dtype: DType, device: Device) -> Tensor {
    let count = dims.iter().product::<usize>();
    let number = |i: usize| ((i + seed) as u32).wrapping_mul(2_654_435_761) as f64 / f64::from(1u32 << 31) - 1.0;
    let numbers: Vec<f32> = (0..count).map(|i| number(i) as f32).collect();
    Tensor::from_slice(&numbers, &dims[..], Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
}

/// Returns the stored values of all rows.
fn stored(rows: &CacheRows) -> Vec<f64> {
    let elements = values(rows.tensor());
    if rows.kind() != CacheType::Q8_0 {
        return elements;
    }
    let bytes: Vec<u8> = elements.iter().map(|&byte| byte as u8).collect();
    let block = |block: &[u8]| {
        let d = half::f16::from_le_bytes([block[0], block[1]]).to_f64();
        block[2..].iter().map(|&q| f64::from(q as i8) * d).collect::<Vec<_>>()
    };
    bytes.chunks(34).flat_map(block).collect()
}

/// Computes attention of one query for each head and sequence. `lengths` has the number of keys of each sequence.
fn right(q: &[f64], cache: [&[f64]; 2], sizes: [usize; 4], group: usize, lengths: &[usize]) -> Vec<f64> {
    let [batch, heads, capacity, width] = sizes;
    let mut all = Vec::new();
    for (row, head) in (0..batch * heads * group).map(|row| (row, row / group * capacity)) {
        let length = lengths[row / group / heads];
        let at = |rows: &'_ [f64], j: usize, c: usize| rows[(head + j) * width + c];
        let dot = |j: usize| (0..width).map(|c| q[row * width + c] * at(cache[0], j, c)).sum::<f64>();
        let scores: Vec<f64> = (0..length).map(|j| dot(j) / (width as f64).sqrt()).collect();
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - top).exp()).collect();
        let total: f64 = weights.iter().sum();
        let sum = |c: usize| weights.iter().enumerate().map(|(j, w)| w * at(cache[1], j, c)).sum::<f64>();
        all.extend((0..width).map(|c| sum(c) / total));
    }
    all
}

#[track_caller]
fn assert_near(got: &[f64], right: &[f64], allowed: f64, what: &str) {
    assert_eq!(got.len(), right.len(), "{what}");
    for (i, (x, y)) in got.iter().zip(right).enumerate() {
        assert!((x - y).abs() <= allowed, "{what}, element {i}: {x}, not {y}");
    }
}

#[test]
fn decoding_at_edges_of_parts() {
    use CacheType::{BF16, F16, F32, Q8_0};
    let cases = [
        (F16, DType::F32, 3, 64),
        (F32, DType::F32, 1, 80),
        (BF16, DType::F32, 8, 128),
        (Q8_0, DType::F32, 3, 64),
        (F16, DType::F16, 1, 128),
        (F16, DType::BF16, 8, 80),
    ];
    each_device(|device| {
        for (kind, dtype, group, width) in cases {
            let sizes = [2, 2, 1024, width];
            let [k, v] = [1, 2].map(|seed| scattered([2, 2, 1000, width], seed * 77_777, DType::F32, device));
            let new = |t: &Tensor| t.to_dtype(dtype).unwrap();
            let cache = [0, 1].map(|_| CacheRows::new(sizes, kind, device).unwrap());
            let position = Tensor::zeros(1, (DType::I64, device)).unwrap();
            cache_store([&new(&k), &new(&v)], cache.each_ref(), &position).unwrap();
            let [keys, rows] = cache.each_ref().map(stored);
            // Each kind keeps half a unit in the last place of a number up to 1, or half a step of 1 / 127.
            let step = [1e-7f64, 5e-4, 4e-3, 4.1e-3][kind as usize].max(if dtype == DType::BF16 { 4e-3 } else { 5e-4 });
            let kept = cache[0].tensor().narrow(2, 0, 1000).unwrap();
            if kind != Q8_0 {
                assert_near(&values(&kept), &values(&k), step, "keys");
            }
            let q = scattered([2, 2 * group, 1, width], 5, dtype, device);
            for length in [1, 255, 256, 257, 1000] {
                position.fill_(length as i64 - 1).unwrap();
                let [k, v] = [&k, &v].map(|t| new(&t.narrow(2, length - 1, 1).unwrap()));
                let y = cached_attention(&q, [&k, &v], cache.each_ref(), &position, None).unwrap();
                assert_eq!((y.shape(), y.dtype()), (q.shape(), dtype));
                let right = right(&values(&q), [&keys, &rows], sizes, group, &[length; 2]);
                let allowed =
                    [2e-6, 5e-4, 4e-3][[DType::F32, DType::F16, DType::BF16].iter().position(|&t| t == dtype).unwrap()];
                assert_near(&values(&y), &right, allowed, &format!("{kind:?}, {dtype}, {length} keys on {device}"));
            }
            assert_eq!(cache.each_ref().map(stored), [keys, rows], "the rows are stored again with the same bits");
        }
    });
}

#[test]
fn sequences_with_positions_of_their_own() {
    each_device(|device| {
        let (sizes, positions) = ([3, 1, 300, 64], [0i64, 298, 17]);
        let cache = [0, 1].map(|_| CacheRows::new(sizes, CacheType::F16, device).unwrap());
        let [k, v] = [3, 4].map(|seed| scattered(sizes, seed * 7777, DType::F32, device));
        cache_store([&k, &v], cache.each_ref(), &Tensor::zeros(1, (DType::I64, device)).unwrap()).unwrap();
        let position = Tensor::from_slice(&positions, 3, device).unwrap();
        let new = |seed| scattered([3, 1, 1, 64], seed, DType::F32, device);
        let (q, rows) = (scattered([3, 4, 1, 64], 9, DType::F32, device), [new(10), new(11)]);
        let y = cached_attention(&q, rows.each_ref(), cache.each_ref(), &position, None).unwrap();
        let [keys, rows] = cache.each_ref().map(stored);
        let right = right(&values(&q), [&keys, &rows], sizes, 4, &[1, 299, 18]);
        assert_near(&values(&y), &right, 2e-6, "positions");
        // A row behind the last one is an error, which an OpenCL device reports at the next wait.
        let position = Tensor::from_slice(&[0i64, 300, 0], 3, device).unwrap();
        let made = cached_attention(&q, [&new(1), &new(2)], cache.each_ref(), &position, None);
        let error = made.and_then(|_| device.synchronize()).unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { index: 300, size: 300, .. }), "{error}");
    });
}

/// Returns a cache of one layer and the attention of `steps` steps of one token after a prompt of five.
fn decode(options: KvCacheOptions, steps: usize, device: Device) -> (KvCache, Vec<f64>) {
    let mut cache = KvCache::new([2, 2, 64], options, device).unwrap();
    let mut all = Vec::new();
    for (step, new) in std::iter::once(5).chain(std::iter::repeat_n(1, steps)).enumerate() {
        cache.reserve(new).unwrap();
        for layer in 0..2 {
            let x =
                |heads: usize, seed| scattered([1, heads, new, 64], step * 999 + layer * 77 + seed, DType::F32, device);
            all.extend(values(&cache.attend(layer, &x(6, 1), &x(2, 2), &x(2, 3)).unwrap()));
        }
        cache.advance(new).unwrap();
    }
    (cache, all)
}

#[test]
fn growth_changes_nothing() {
    let options = KvCacheOptions { capacity: 4, limit: 24, ..KvCacheOptions::default() };
    each_device(|device| {
        let (mut cache, grown) = decode(options, 15, device);
        assert_eq!((cache.len(), cache.capacity(), cache.nbytes()), (20, 24, 2 * 2 * 2 * 24 * 64 * 2));
        let (_, right) = decode(KvCacheOptions { capacity: 24, ..options }, 15, device);
        assert_near(&grown, &right, 1e-6, "growth");
        assert!(matches!(cache.reserve(5), Err(Error::Invalid { .. })));
        assert!(matches!(cache.advance(5), Err(Error::Invalid { .. })));
        cache.truncate(3).unwrap();
        assert_eq!((cache.len(), cache.position().item::<i64>().unwrap()), (3, 3));
    });
}

#[test]
fn a_later_turn_attends_to_earlier_rows() {
    each_device(|device| {
        let x = |heads, rows| scattered([1, heads, rows, 64], heads, DType::F32, device);
        let (q, k) = (x(6, 12), x(2, 12));
        let part = |t: &Tensor, first: usize, n: usize| t.narrow(2, first, n).unwrap();
        let options = KvCacheOptions { kind: CacheType::F32, ..KvCacheOptions::default() };
        let whole = KvCache::new([1, 2, 64], options, device).unwrap().attend(0, &q, &k, &k).unwrap();
        let cache = KvCache::new([1, 2, 64], options, device).unwrap();
        for (first, n) in [(0, 5), (5, 7)] {
            let k = part(&k, first, n);
            let y = cache.attend(0, &part(&q, first, n), &k, &k).unwrap();
            assert_near(&values(&y), &values(&part(&whole, first, n)), 2e-6, "turns");
            cache.advance(n).unwrap();
        }
    });
}

#[test]
fn a_captured_step_advances() {
    for device in opencl() {
        let options = KvCacheOptions { capacity: 8, ..KvCacheOptions::default() };
        let mut cache = KvCache::new([2, 2, 64], options, device).unwrap();
        let (_, right) = decode(options, 3, device);
        let x = |heads: usize, new: usize, seed| scattered([1, heads, new, 64], seed, DType::F32, device);
        for layer in 0..2 {
            let seed = layer * 77;
            cache.attend(layer, &x(6, 5, seed + 1), &x(2, 5, seed + 2), &x(2, 5, seed + 3)).unwrap();
        }
        cache.advance(5).unwrap();
        let inputs = [0, 1].map(|_| [6, 2, 2].map(|heads| Tensor::zeros([1, heads, 1, 64], device).unwrap()));
        let (graph, results) = Graph::capture(device, || {
            let each = |(layer, [q, k, v]): (usize, &[Tensor; 3])| cache.attend(layer, q, k, v);
            let results = inputs.iter().enumerate().map(each).collect::<claystone::Result<Vec<_>>>()?;
            cache.advance(1)?;
            Ok(results)
        })
        .unwrap();
        assert_eq!((graph.commands(), cache.len()), (3, 5), "one command for each layer, and one for the position");
        let mut got = Vec::new();
        for step in 1..4 {
            for (layer, inputs) in inputs.iter().enumerate() {
                for (i, t) in inputs.iter().enumerate() {
                    t.copy_(&x([6, 2, 2][i], 1, step * 999 + layer * 77 + i + 1)).unwrap();
                }
            }
            graph.replay().unwrap();
            results.iter().for_each(|y| got.extend(values(y)));
        }
        assert_eq!((cache.len(), cache.position().item::<i64>().unwrap()), (8, 8));
        assert_near(&got, &right[right.len() - got.len()..], 1e-6, "replays");
        assert!(graph.replay().unwrap_err().to_string().contains("do not fit"));
        assert!(cache.reserve(1).unwrap());
        assert!(graph.replay().unwrap_err().to_string().contains("has grown"));
    }
}

#[test]
fn operands_that_do_not_fit_are_errors() {
    let cache = |kind| CacheRows::new([1, 2, 16, 32], kind, Device::Cpu).unwrap();
    let (k, v, half) = (cache(CacheType::F32), cache(CacheType::F32), cache(CacheType::F16));
    let x = |heads| Tensor::zeros([1, heads, 1, 32], Device::Cpu).unwrap();
    let position = Tensor::zeros(1, (DType::I64, Device::Cpu)).unwrap();
    let attend = |q: &Tensor, rows: &Tensor, cache: [&CacheRows; 2], position: &Tensor| {
        cached_attention(q, [rows, rows], cache, position, None).unwrap_err()
    };
    assert!(matches!(attend(&x(3), &x(2), [&k, &v], &position), Error::ShapeMismatch { .. }));
    assert!(matches!(attend(&x(2), &x(1), [&k, &v], &position), Error::ShapeMismatch { .. }));
    assert!(matches!(attend(&x(2), &x(2), [&k, &half], &position), Error::ShapeMismatch { .. }));
    assert!(matches!(attend(&x(2), &x(2), [&k, &v], &x(1).flatten(0, -1).unwrap()), Error::UnsupportedDType { .. }));
    let f64s = x(2).to_dtype(DType::F64).unwrap();
    assert!(matches!(attend(&f64s, &f64s, [&k, &v], &position), Error::UnsupportedDType { .. }));
    assert!(matches!(attend(&f64s, &x(2), [&k, &v], &position), Error::DTypeMismatch { .. }));
    assert!(matches!(CacheRows::new([1, 1, 1, 48], CacheType::Q8_0, Device::Cpu), Err(Error::Invalid { .. })));
    let empty = Tensor::zeros([1, 2, 0, 32], Device::Cpu).unwrap();
    assert_eq!(cached_attention(&empty, [&empty, &empty], [&k, &v], &position, None).unwrap().numel(), 0);
    let cache = KvCache::new([1, 2, 32], KvCacheOptions { capacity: 1, ..Default::default() }, Device::Cpu).unwrap();
    assert!(matches!(cache.attend(1, &x(2), &x(2), &x(2)), Err(Error::Invalid { .. })));
    let two = x(4).reshape([1, 2, 2, 32]).unwrap();
    assert!(cache.attend(0, &two, &two, &two).unwrap_err().to_string().contains("call reserve first"));
}
