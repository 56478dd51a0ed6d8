//! In every float dtype, random numbers stay within their interval, and drawn indices are distributed by weight.

use claystone::{DType, Device, Generator, Result, Tensor, manual_seed, nn::init, with_generator};
use half::{bf16, f16};

use crate::common::each_device;

const FLOATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

fn floats(device: Device) -> impl Iterator<Item = DType> {
    let doubles = device == Device::Cpu || device.info().unwrap().fp64;
    FLOATS.into_iter().filter(move |&t| doubles || t != DType::F64)
}

fn host(t: &Tensor) -> Vec<f64> {
    t.to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// Returns the distance between adjacent numbers of the dtype at x.
fn step(dtype: DType, x: f64) -> f64 {
    let digits = match dtype {
        DType::F16 => f16::MANTISSA_DIGITS,
        DType::BF16 => bf16::MANTISSA_DIGITS,
        DType::F32 => f32::MANTISSA_DIGITS,
        _ => f64::MANTISSA_DIGITS,
    };
    2f64.powi(x.abs().max(1e-30).log2().floor() as i32 + 1 - digits as i32)
}

type Draw = fn(&Tensor, f64, f64) -> Result<()>;

/// Numbers are in `from..to` after rounding, their mean is the middle of the interval, and their bits equal the host's.
#[test]
fn uniform_numbers_exclude_the_upper_bound() {
    const N: usize = 1 << 18;
    let draws: [Draw; 2] = [|x, from, to| x.uniform_(from, to).map(drop), init::uniform_];
    let intervals = [
        (2.0, 3.0),
        (-3.0, -2.0),
        (-1.0, 0.0),
        (0.1, 0.3),
        (1000.0, 1001.0),
        (0.0, 0.7),
        (-0.3, 0.1),
        (4e4, 5e4),
        (1e-3, 2e-3),
    ];
    each_device(|d| {
        for dtype in floats(d) {
            for (from, to) in intervals.into_iter().chain((dtype == DType::F64).then_some((1e12, 1e12 + 1.0))) {
                for draw in draws {
                    let drawn = |device| {
                        let x = Tensor::empty([N / 4, 4], (dtype, device)).unwrap();
                        with_generator(&Generator::new(9), || draw(&x, from, to)).unwrap();
                        x
                    };
                    let x = host(&drawn(d));
                    // If the dtype has no number in the interval except `from`, every result is `from`, rounded to the dtype.
                    let narrow = step(dtype, to) > to - from;
                    let outside = x.iter().filter(|x| !(from..to).contains(x)).count();
                    assert!(outside == 0 || narrow, "{outside} of {from}..{to} in {dtype} on {d}");
                    let mean = from + x.iter().map(|x| x - from).sum::<f64>() / N as f64;
                    // f16 and bf16 draw multiples of 2^-11 and 2^-8 of the interval's length, rounded down, so their mean is
                    // slightly lower.
                    let tolerance =
                        step(dtype, from.abs().max(to.abs())) + (to - from) * (5e-3 + 5.0 * 0.29 / (N as f64).sqrt());
                    assert!(
                        (mean - 0.5 * (from + to)).abs() < tolerance,
                        "{from}..{to} in {dtype} on {d}: mean {mean}"
                    );
                    assert_eq!(x, host(&drawn(Device::Cpu)), "{from}..{to} in {dtype} on {d}");
                }
            }
        }
    });
}

#[test]
fn exponential_numbers_are_positive_and_rand_is_below_one() {
    const N: usize = 1 << 20;
    each_device(|d| {
        for dtype in floats(d) {
            let x = Tensor::empty(N, (dtype, d)).unwrap();
            for rate in [1.0, 1000.0, 1e-2] {
                let drawn = host(x.exponential_(rate).unwrap());
                assert!(drawn.iter().all(|&x| x > 0.0), "rate {rate} in {dtype} on {d}");
                let mean = rate * drawn.iter().sum::<f64>() / N as f64;
                assert!((mean - 1.0).abs() < 0.01, "rate {rate} in {dtype} on {d}: {mean}");
            }
            assert!(
                host(&Tensor::rand(N, (dtype, d)).unwrap()).iter().all(|x| (0.0..1.0).contains(x)),
                "{dtype} on {d}"
            );
            let kept = Tensor::ones(N, (dtype, d)).unwrap().dropout(0.25).unwrap();
            let scale = host(&Tensor::full(1, 1.0 / 0.75, (dtype, d)).unwrap())[0];
            assert!(host(&kept).iter().all(|x| [0.0, scale].contains(x)), "{dtype} on {d}");
            for (low, high) in [(0, 2), (0, 4096), (-4099, -2050), (1 << 15, (1 << 15) + 1000), (-7, 4097)] {
                let drawn = host(&Tensor::randint(low, high, N, (dtype, d)).unwrap());
                let inside = |x: &f64| (low as f64..high as f64).contains(x) && x.fract() == 0.0;
                assert!(drawn.iter().all(inside), "{low}..{high} in {dtype} on {d}");
            }
            let wide = [(1 << 24) - 3, (1 << 24) + 9];
            if matches!(dtype, DType::F32 | DType::BF16) {
                let drawn = host(&Tensor::randint(wide[0], wide[1], N, (dtype, d)).unwrap());
                assert!(drawn.iter().all(|&x| x >= wide[0] as f64 && x < wide[1] as f64), "{dtype} on {d}");
            }
        }
    });
}

/// Returns the chi-squared statistic of n counts that are equally probable. Its expected value is about n.
fn chi_squared(counts: &[usize]) -> f64 {
    let mean = counts.iter().sum::<usize>() as f64 / counts.len() as f64;
    counts.iter().map(|&c| (c as f64 - mean).powi(2) / mean).sum()
}

#[test]
fn equal_small_weights_are_drawn_equally_often() {
    const N: usize = 1 << 20;
    each_device(|d| {
        for dtype in floats(d) {
            let heavy = if dtype == DType::F16 { 6e4 } else { 1e8 };
            let weights = Tensor::ones(N, (dtype, d)).unwrap();
            weights.narrow(0, 0, 1).unwrap().fill_(heavy).unwrap();
            manual_seed(1);
            let drawn = weights.multinomial(1 << 21, true).unwrap().to_vec::<i64>().unwrap();
            let light: Vec<usize> = drawn.iter().map(|&i| i as usize).filter(|&i| i > 0).collect();
            let share = light.len() as f64 / drawn.len() as f64;
            let right = (N - 1) as f64 / (heavy + (N - 1) as f64);
            assert!((share - right).abs() < 0.05 * right, "{share} of {right} in {dtype} on {d}");
            let (mut modulo, mut parts) = ([0; 8], [0; 8]);
            light.iter().for_each(|i| modulo[i % 8] += 1);
            light.iter().for_each(|i| parts[i * 8 / N] += 1);
            assert!(chi_squared(&modulo) < 40.0, "{modulo:?} in {dtype} on {d}");
            assert!(chi_squared(&parts) < 40.0, "{parts:?} in {dtype} on {d}");
        }
    });
}

#[test]
fn many_equal_weights_are_drawn_equally_often() {
    const N: usize = 1 << 24;
    each_device(|d| {
        let halves = [2.0, 1.0].map(|w| Tensor::full(N / 2, w, (DType::BF16, d)).unwrap());
        let weights = Tensor::cat(&halves, 0).unwrap();
        manual_seed(2);
        let drawn = weights.multinomial(1 << 17, true).unwrap().to_vec::<i64>().unwrap();
        let share = |f: &dyn Fn(i64) -> bool| drawn.iter().filter(|&&i| f(i)).count() as f64 / drawn.len() as f64;
        let (odd, first) = (share(&|i| i % 2 == 1), share(&|i| i < N as i64 / 2));
        assert!((odd - 0.5).abs() < 0.008 && (first - 2.0 / 3.0).abs() < 0.008, "{odd} {first} on {d}");
    });
}

#[test]
fn extreme_weights_are_drawn_correctly() {
    each_device(|d| {
        for dtype in floats(d) {
            let (most, least) = if dtype == DType::F16 { (6e4, 2e-6) } else { (3e38, 1e-36) };
            let row = |weights: &[f64]| {
                let t = Tensor::from_slice(&weights.iter().map(|&w| w as f32).collect::<Vec<_>>(), weights.len(), d)
                    .unwrap();
                t.to_dtype(dtype).unwrap()
            };
            manual_seed(3);
            let counts = |drawn: &Tensor| {
                let mut counts = [0.0; 3];
                let drawn = drawn.to_vec::<i64>().unwrap();
                drawn.iter().for_each(|&i| counts[i as usize] += 7.0 / drawn.len() as f64);
                counts
            };
            for scale in [most, least] {
                let weights = row(&[scale, scale / 3.0, scale]);
                let rows = weights.expand([7000, 3]).unwrap();
                for drawn in [weights.multinomial(7000, true), rows.multinomial(1, true), rows.multinomial(1, false)] {
                    let counts = counts(&drawn.unwrap());
                    let right = [3.0, 1.0, 3.0];
                    assert!(
                        counts.iter().zip(right).all(|(c, r)| (c - r).abs() < 0.25),
                        "{counts:?} in {dtype} on {d}"
                    );
                }
            }
            // Without replacement, even the smallest positive weight is drawn if no other positive weight is left.
            let drawn = row(&[least, 0.0, most]).multinomial(2, false).unwrap().to_vec::<i64>().unwrap();
            assert_eq!(drawn, [2, 0], "{dtype} on {d}");
        }
    });
}

#[test]
fn invalid_weights_are_errors() {
    each_device(|d| {
        for dtype in floats(d) {
            let matrix =
                |last: f32| Tensor::from_slice(&[1f32, 2.0, 3.0, last], [2, 2], d).unwrap().to_dtype(dtype).unwrap();
            for replacement in [true, false] {
                for last in [-1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                    let text = matrix(last).multinomial(1, replacement).unwrap_err().to_string();
                    assert!(text.starts_with("multinomial: weights from"), "{text}");
                }
                let zeros = Tensor::zeros([2, 2], (dtype, d)).unwrap();
                zeros.narrow(0, 0, 1).unwrap().fill_(1).unwrap();
                let text = zeros.multinomial(1, replacement).unwrap_err().to_string();
                assert_eq!(text, "multinomial: all weights are 0");
            }
            let text = matrix(0.0).multinomial(2, false).unwrap_err().to_string();
            assert_eq!(text, "multinomial: a row has fewer than 2 weights above 0");
            assert!(matrix(0.0).multinomial(2, true).is_ok() && matrix(0.0).multinomial(0, false).is_ok());
        }
    });
}

/// For weights whose quotients by the row's maximum are exact, every device draws the same indices.
#[test]
fn multinomial_agrees_on_every_device() {
    let drawn = |d: Device| {
        let weights = Tensor::from_slice(&[1f32, 0.0, 3.0, 4.0, 0.0, 2.0, 0.5, 2.0], [2, 4], d).unwrap();
        with_generator(&Generator::new(4), || weights.multinomial(10_000, true)).unwrap().to_vec::<i64>().unwrap()
    };
    let right = drawn(Device::Cpu);
    each_device(|d| assert_eq!(drawn(d), right, "on {d}"));
}

/// An element's random number depends only on its index, not on the size, strides or device.
#[test]
fn random_numbers_agree_with_the_host_for_every_size_and_stride() {
    let all = |d: Device, n: usize| -> Result<Vec<Vec<f64>>> {
        let x = Tensor::arange(0, 6 * n as i64, 1, d)?.reshape([n, 6])?;
        let part = x.narrow(1, 1, 3)?;
        let filled = Tensor::zeros([5, n + 2], d)?;
        filled.narrow(1, 1, n)?.t()?.normal_(1.0, 2.0)?;
        let all = [
            Tensor::rand(n, d)?,
            Tensor::randn([n, 3], d)?,
            Tensor::randn(n, (DType::BF16, d))?,
            Tensor::randint(-5, 900, n, (DType::I32, d))?,
            x.dropout(0.5)?,
            part.dropout(0.5)?,
            part.t()?.dropout(0.3)?,
            Tensor::normal(&part, &part.narrow(0, 0, 1)?)?,
            filled,
        ];
        Ok(all.iter().map(host).collect())
    };
    let drawn = |d, n| with_generator(&Generator::new(6), || all(d, n));
    for n in [1, 2, 3, 5, 63, 64, 65, 127, 128, 1000, 4099] {
        let right = drawn(Device::Cpu, n).unwrap();
        each_device(|d| {
            for (i, (got, right)) in drawn(d, n).unwrap().iter().zip(&right).enumerate() {
                assert_eq!(got, right, "result {i} of {n} on {d}");
            }
        });
    }
}
