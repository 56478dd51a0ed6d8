//! Selecting, counting and generating sequences on the CPU, which splits the work into sections and between threads. Sizes are at the
//! edges of sections.

use claystone::{DType, Device, Tensor};
use ndarray::ArrayD;

use crate::common::{each_device, f64s, in_own_process};
use crate::sorting::{along, check as sorting_check, equal, numbers, sorted};

const CPU: Device = Device::Cpu;

/// Returns numbers with ties and, for floats, zeros of both signs, infinities and NaN.
fn special(shape: &[usize], dtype: DType, nans: usize) -> Tensor {
    let t = numbers(shape, dtype, CPU);
    if !dtype.is_float() {
        return t;
    }
    let values = f64s(&t).into_iter().enumerate().map(|(i, v)| match i % 97 {
        k if k < nans => f64::NAN,
        50 => -0.0,
        51 => f64::INFINITY,
        52 => f64::NEG_INFINITY,
        _ => v,
    });
    Tensor::from_slice(&values.collect::<Vec<_>>(), shape, CPU).unwrap().to_dtype(dtype).unwrap()
}

/// Checks the values and indices in `got` against the element at the rank that `place` returns for each line.
fn is_at(got: (Tensor, Tensor), x: &ArrayD<f64>, d: usize, place: impl Fn(&[f64]) -> usize, what: &str) {
    let index = |line: &[f64]| sorted(line, false)[place(line)];
    equal(&got.1, &along(x, d, |line| vec![index(line) as f64]), what);
    equal(&got.0, &along(x, d, |line| vec![line[index(line)]]), what);
}

fn check(t: &Tensor, counts: &[usize]) {
    let x = f64s(t);
    for d in 0..t.rank() {
        let n = t.shape().dims()[d];
        let dim = d as isize;
        for &k in counts.iter().filter(|&&k| k <= n) {
            for largest in [true, false] {
                let what =
                    &format!("the first {k} of {:?} {:?} {} along {d}, {largest}", t.shape(), t.strides(), t.dtype());
                let (values, indices) = t.topk(k, dim, largest).unwrap();
                let first = |line: &[f64]| sorted(line, largest)[..k].to_vec();
                equal(&indices, &along(&x, d, |line| first(line).iter().map(|&i| i as f64).collect()), what);
                equal(&values, &along(&x, d, |line| first(line).iter().map(|&i| line[i]).collect()), what);
            }
            is_at(t.kthvalue(k, dim, true).unwrap(), &x, d, |_| k - 1, "kthvalue");
        }
        let nans = |line: &[f64]| line.iter().filter(|v| v.is_nan()).count();
        let middle = |line: &[f64]| if nans(line) > 0 { n - nans(line) } else { (n - 1) / 2 };
        is_at(t.median(dim, true).unwrap(), &x, d, middle, "median");
        is_at(t.nanmedian(dim, true).unwrap(), &x, d, |line| (n - 1).saturating_sub(nans(line)) / 2, "nanmedian");
    }
}

#[test]
fn topk_and_kthvalue_match_a_sort() {
    for dtype in DType::ALL {
        for nans in [0, 3, 97] {
            check(&special(&[3, 200], dtype, nans), &[1, 2, 8, 31, 32, 33, 99, 100, 101, 199, 200]);
        }
    }
    let t = special(&[70, 90, 3], DType::F32, 1);
    for t in [&t, &t.permute(&[2, 0, 1]).unwrap(), &t.narrow(1, 7, 40).unwrap().flip(1).unwrap()] {
        check(t, &[1, 3, 40]);
    }
    for n in [1, 15, 16, 17, 2047, 2048, 2049, 16385, 100_003] {
        check(&special(&[n], DType::F32, 2), &[1, 8, 32, 33, 5000]);
        check(&special(&[n], DType::I64, 0), &[1, 33]);
    }
    // The elements descend: the selection of the smallest must admit every element, and the selection of the largest none after the
    // first three.
    let falling = Tensor::arange(100_000, 0, -1, CPU).unwrap();
    assert_eq!(falling.topk(3, 0, false).unwrap().1.to_vec::<i64>().unwrap(), [99_999, 99_998, 99_997]);
    assert_eq!(falling.topk(3, 0, true).unwrap().1.to_vec::<i64>().unwrap(), [0, 1, 2]);
    assert_eq!(falling.topk(0, 0, true).unwrap().0.numel(), 0);
    let ends = Tensor::from_slice(&[i64::MAX, i64::MIN, 0, i64::MIN + 1, i64::MAX - 1], 5, CPU).unwrap();
    assert_eq!(ends.topk(2, 0, true).unwrap().0.to_vec::<i64>().unwrap(), [i64::MAX, i64::MAX - 1]);
    assert_eq!(ends.median(0, false).unwrap().0.item::<i64>().unwrap(), 0);
}

#[test]
fn nonzero_of_sizes_around_blocks() {
    for shape in [&[1][..], &[255], &[256], &[257], &[16_384], &[16_385], &[50_001], &[1, 1], &[400, 300], &[20_000, 2]]
        .into_iter()
        .chain([&[3, 5000, 7][..], &[2, 3, 4, 5], &[33_000, 1, 2]])
    {
        for dtype in [DType::Bool, DType::F32, DType::U8, DType::I64] {
            let t = numbers(shape, dtype, CPU);
            let t = if dtype == DType::Bool { numbers(shape, DType::I64, CPU).gt_scalar(7).unwrap() } else { t };
            for t in [t.shallow_clone(), t.t().unwrap_or(t), Tensor::ones(shape, (dtype, CPU)).unwrap()] {
                let x = f64s(&t);
                let want: Vec<i64> = x
                    .indexed_iter()
                    .filter(|(_, v)| **v != 0.0)
                    .flat_map(|(at, _)| (0..t.rank()).map(|d| at[d] as i64).collect::<Vec<_>>())
                    .collect();
                let places = t.nonzero().unwrap();
                assert_eq!(places.to_vec::<i64>().unwrap(), want, "{shape:?} {dtype}");
                assert_eq!(places.shape().dims(), [want.len() / t.rank(), t.rank()]);
                let picked = t.masked_select(&t).unwrap().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
                assert_eq!(picked, x.iter().copied().filter(|v| *v != 0.0).collect::<Vec<_>>());
            }
        }
    }
    let flags = Tensor::from_slice(&[false, true, true, false, true], 5, CPU).unwrap();
    assert_eq!(flags.narrow(0, 2, 3).unwrap().nonzero().unwrap().to_vec::<i64>().unwrap(), [0, 2]);
    let x = Tensor::arange(0, 90_000, 1, CPU).unwrap().reshape([300, 300]).unwrap();
    let mask = flags.narrow(0, 1, 3).unwrap().repeat(&[100]).unwrap();
    let want: Vec<f32> = (0..90_000).filter(|i| i % 300 % 3 != 2).map(|i| i as f32).collect();
    assert_eq!(x.masked_select(&mask).unwrap().to_vec::<f32>().unwrap(), want);
}

#[test]
fn long_sequences_support_every_dtype() {
    for n in [8191, 8192, 8193, 65_537, 200_000i64] {
        for dtype in DType::ALL {
            let made = Tensor::arange(-5, 3 * n - 5, 3, (dtype, CPU));
            match dtype {
                DType::U8 | DType::I8 => assert!(made.is_err(), "{n} {dtype}"),
                DType::I16 if 3 * n > 32_768 => assert!(made.is_err(), "{n} {dtype}"),
                DType::F16 if 3 * n > 65_520 => assert!(made.is_err(), "{n} {dtype}"),
                _ => {
                    let want: Vec<i64> = (0..n).map(|i| 3 * i - 5).collect();
                    let want = Tensor::from_slice(&want, n as usize, CPU).unwrap().to_dtype(dtype).unwrap();
                    assert!(made.unwrap().equal(&want).unwrap(), "{n} {dtype}");
                }
            }
            let made = Tensor::linspace(0.0, 127.0, n as usize, (dtype, CPU)).unwrap();
            let step = 127.0 / (n - 1) as f64;
            let value = |i: i64| if 2 * i < n { step * i as f64 } else { 127.0 - step * (n - 1 - i) as f64 };
            let want: Vec<f64> = (0..n).map(value).collect();
            let want = Tensor::from_slice(&want, n as usize, CPU).unwrap().to_dtype(dtype).unwrap();
            assert!(made.equal(&want).unwrap(), "{n} {dtype}");
        }
    }
}

/// Looks up and counts more elements than one block contains.
#[test]
fn isin_and_counts_of_many_elements() {
    each_device(|device| {
        let n = (1 << 21) + 77;
        let values: Vec<i64> = (0..n).map(|i: i64| i * 7919 % 251).collect();
        let t = Tensor::from_slice(&values, n as usize, device).unwrap();
        let mut counts = vec![0i64; 251];
        values.iter().for_each(|&x| counts[x as usize] += 1);
        for dtype in [DType::I64, DType::U8] {
            let t = t.to_dtype(dtype).unwrap();
            let some = Tensor::from_slice(&[3i64, 250, 77], 3, device).unwrap().to_dtype(dtype).unwrap();
            let found = t.isin(&some).unwrap().to_vec::<bool>().unwrap();
            assert!(
                found.iter().zip(&values).all(|(&found, x)| found == [3, 250, 77].contains(x)),
                "{dtype} on {device}"
            );
            assert_eq!(t.bincount(None, 0).unwrap().to_vec::<i64>().unwrap(), counts, "{dtype} on {device}");
            assert!(t.equal(&t.contiguous().unwrap()).unwrap());
            assert!(!t.equal(&t.flip(0).unwrap()).unwrap());
            assert!(t.allclose(&t, 0.0, 0.0, false).unwrap());
        }
        let parts = t.to_dtype(DType::F32).unwrap().histc(251, -0.5, 250.5).unwrap();
        assert!(f64s(&parts).iter().zip(&counts).all(|(&a, &b)| a == b as f64), "histc on {device}");
        // Integer products that wrap around. The CPU sums sections in 64 bits before it adds the bias.
        let x = t.narrow(0, 0, 1 << 21).unwrap().reshape([1 << 19, 4]).unwrap().to_dtype(DType::U8).unwrap();
        let w = x.narrow(0, 5, 9).unwrap();
        let bias = w.select(1, 0).unwrap();
        let made = x.linear(&w, Some(&bias)).unwrap().to_vec::<u8>().unwrap();
        let of = |i: usize, k: usize| values[i * 4 + k];
        let right = |i: usize| (0..4).map(|k| of(i / 9, k) * of(i % 9 + 5, k)).sum::<i64>() + of(i % 9 + 5, 0);
        assert!(made.iter().enumerate().all(|(i, &x)| x == right(i) as u8), "linear of u8 on {device}");
    });
}

/// Returns the value at a fractional rank, interpolated as by `quantile`.
fn between(line: &[f64], place: f64) -> f64 {
    let order = sorted(line, false);
    let [low, high] = [place.floor(), place.ceil()].map(|rank| line[order[rank as usize]]);
    if place.fract() == 0.0 { low } else { low + (high - low) * place.fract() }
}

#[test]
fn selections_from_long_lines_agree_on_every_device() {
    each_device(|device| {
        for dtype in DType::ALL {
            check(&special(&[40_003], dtype, 2).to_device(device).unwrap(), &[1, 600, 9000]);
        }
        for n in [4095, 4097, 16_384] {
            check(&special(&[n], DType::F32, 2).to_device(device).unwrap(), &[1, 8, 9, 32, 33, n / 5, n]);
        }
        check(&special(&[2, 17_000], DType::F16, 97).to_device(device).unwrap(), &[1, 33]);
        // Many lines, lines that are interleaved in memory, and lines that are reversed or strided.
        let t = special(&[20, 300, 3], DType::F32, 1).to_device(device).unwrap();
        check(&t, &[1, 32, 300]);
        check(&t.permute(&[2, 0, 1]).unwrap().narrow(2, 7, 200).unwrap().flip(2).unwrap(), &[2, 40]);
        let t = special(&[16_500, 3], DType::F16, 1).to_device(device).unwrap();
        check(&t, &[1, 33, 4000]);
        check(&t.narrow(0, 1, 16_400).unwrap().flip(0).unwrap(), &[5, 600]);
        // All elements are equal, or all except one.
        let mut values = vec![7.0f32; 50_000];
        check(&Tensor::from_slice(&values, 50_000, device).unwrap(), &[1, 32, 33, 12_000]);
        values[49_999] = -1.0;
        check(&Tensor::from_slice(&values, 50_000, device).unwrap(), &[1, 32, 33, 12_000]);
        let ends = [i64::MAX, i64::MIN, 0, i64::MIN + 1, i64::MAX - 1, -1, 1].map(|v| vec![v; 3000]).concat();
        let (values, at) = Tensor::from_slice(&ends, 21_000, device).unwrap().kthvalue(3001, 0, false).unwrap();
        assert_eq!((values.item::<i64>().unwrap(), at.item::<i64>().unwrap()), (i64::MIN + 1, 9000));
    });
}

#[test]
fn quantiles_match_a_sort() {
    each_device(|device| {
        for dtype in [DType::F32, DType::F64, DType::F16] {
            for (shape, nans) in [(&[9][..], 0), (&[5, 70], 2), (&[3, 70], 0), (&[70_001], 0), (&[2, 17_000], 97)] {
                let t = special(shape, dtype, nans).to_device(device).unwrap();
                let finite = t.clamp(-60.0, 60.0).unwrap();
                let x = f64s(&finite);
                let d = shape.len() - 1;
                let last = (shape[d] - 1) as f64;
                for q in [0.0, 0.25, 0.5, 1.0] {
                    let got = f64s(&finite.quantile(q, -1, true).unwrap());
                    let nan = |line: &[f64]| line.iter().any(|v| v.is_nan());
                    let of_line = |line: &[f64]| if nan(line) { f64::NAN } else { between(line, q * last) };
                    let want = along(&x, d, |line| vec![of_line(line)]);
                    let left = |line: &[f64]| line.iter().copied().filter(|v| !v.is_nan()).collect::<Vec<_>>();
                    let of_rest = |line: Vec<f64>| match line.len() {
                        0 => f64::NAN,
                        n => between(&line, q * (n - 1) as f64),
                    };
                    let without = along(&x, d, |line| vec![of_rest(left(line))]);
                    let same = |a: f64, b: f64| a == b || (a.is_nan() && b.is_nan()) || (a - b).abs() < 0.03 * b.abs();
                    let nan_got = f64s(&finite.nanquantile(q, -1, true).unwrap());
                    for ((got, want), what) in [((got, want), "quantile"), ((nan_got, without), "nanquantile")] {
                        let all = got.iter().zip(&want).all(|(&a, &b)| same(a, b));
                        assert!(all, "{what} {q} of {shape:?} {dtype} on {device}: {got} instead of {want}");
                    }
                }
            }
        }
    });
}

#[test]
fn selections_do_not_copy_their_input() {
    if !in_own_process("selection::selections_do_not_copy_their_input") {
        return;
    }
    each_device(|device| {
        let n = 1 << 22;
        for dtype in [DType::U8, DType::F32] {
            let x = numbers(&[n], dtype, device);
            let float = dtype.is_float();
            let among = numbers(&[1000], dtype, device);
            let measured = |what: &str, most: usize, f: &dyn Fn() -> claystone::Result<()>| {
                f().unwrap();
                device.synchronize().unwrap();
                device.reset_peak_stats().unwrap();
                let before = device.memory_stats().unwrap().allocated_bytes.current;
                f().unwrap();
                device.synchronize().unwrap();
                let bytes = device.memory_stats().unwrap().allocated_bytes.peak - before;
                assert!(bytes <= most as u64, "{what} of {dtype} on {device} takes {bytes} bytes");
            };
            let few = 1 << 21;
            measured("topk", few, &|| x.topk(4, 0, true).map(drop));
            measured("topk of 100", few, &|| x.topk(100, 0, false).map(drop));
            measured("kthvalue", few, &|| x.kthvalue(n / 3, 0, false).map(drop));
            measured("median", few, &|| x.median(0, false).map(drop));
            measured("nanmedian", few, &|| x.nanmedian(0, false).map(drop));
            measured("isin", n + few, &|| x.isin(&among).map(drop));
            if float {
                measured("quantile", few, &|| x.quantile(0.3, 0, false).map(drop));
                measured("nanquantile", few, &|| x.nanquantile(0.3, 0, false).map(drop));
            }
        }
    });
}

/// Returns the peak resident memory of this process in bytes; `None` if the system does not report it.
fn most_resident() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(1024 * line.trim().trim_end_matches("kB").trim().parse::<u64>().ok()?)
}

#[test]
fn cpu_temporaries_come_from_the_allocator() {
    if !in_own_process("selection::cpu_temporaries_come_from_the_allocator") {
        return;
    }
    let n = 1 << 24;
    let x = Tensor::zeros(n, (DType::U8, CPU)).unwrap();
    let pairs = x.reshape([n / 2, 2]).unwrap();
    let wide = Tensor::zeros(1 << 22, (DType::F64, CPU)).unwrap();
    type Run<'a> = &'a dyn Fn() -> claystone::Result<()>;
    let runs: [(&str, Run<'_>); 11] = [
        ("kthvalue", &|| x.kthvalue(n / 2, 0, false).map(drop)),
        ("median", &|| x.median(0, false).map(drop)),
        ("topk", &|| x.topk(4, 0, true).map(drop)),
        ("sort", &|| x.sort(0, false).map(drop)),
        ("sort of f64", &|| wide.sort(0, false).map(drop)),
        ("sort of columns", &|| pairs.sort(0, false).map(drop)),
        ("sum of pairs", &|| pairs.sum(1, false).map(drop)),
        ("any of pairs", &|| pairs.any(1, false).map(drop)),
        ("argmax of pairs", &|| pairs.argmax(1, false).map(drop)),
        ("max of pairs", &|| pairs.max_dim(1, false).map(drop)),
        ("cumsum of pairs", &|| pairs.cumsum(1).map(drop)),
    ];
    for (what, run) in runs {
        let Some(before) = most_resident() else { return };
        let counted = CPU.memory_stats().unwrap().reserved_bytes.peak;
        run().unwrap();
        let counted = CPU.memory_stats().unwrap().reserved_bytes.peak - counted;
        let resident = most_resident().unwrap() - before;
        assert!(resident <= counted + (24 << 20), "{what}: {resident} bytes, of which {counted} are counted");
    }
}

/// More boundaries and values than the kernel converts at a time.
#[test]
fn searchsorted_on_long_lines() {
    each_device(|device| {
        let line = numbers(&[70_000], DType::F16, device).sort(0, false).unwrap().0;
        let v = numbers(&[3001], DType::F16, device).mul_scalar(1.5).unwrap();
        let below = |e: f64| f64s(&line).iter().filter(|&&v| v < e).count() as i64;
        let want: Vec<i64> = f64s(&v).iter().take(40).map(|&e| below(e)).collect();
        let got = line.searchsorted(&v, false).unwrap().to_vec::<i64>().unwrap();
        assert_eq!((&got[..40], got.len()), (&want[..], 3001));
    });
}

#[test]
fn long_sorts_support_every_dtype() {
    each_device(|device| {
        for dtype in DType::ALL {
            sorting_check(&special(&[70_001], dtype, 3).to_device(device).unwrap());
        }
        for dtype in [DType::U8, DType::F32, DType::F64] {
            let t = special(&[66_000, 3], dtype, 2).to_device(device).unwrap();
            sorting_check(&t.narrow(0, 3, 65_900).unwrap().flip(0).unwrap());
        }
    });
}
