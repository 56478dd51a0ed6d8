//! Rotary embeddings and sampling, on every device: against f64 closed forms and against the probabilities of the filters.

use claystone::device::count_launches;
use claystone::nn::{History, Rotary, RotaryOptions, RotaryPairs, RotaryScaling, Sampler};
use claystone::{DType, Device, Generator, Graph, Result, Tensor, with_generator};

use crate::common::{devices, opencl, scattered, values};

fn positions(of: &[i64], device: Device) -> Tensor {
    Tensor::from_slice(of, of.len(), device).unwrap()
}

/// Rotates heads on the host, by the angle `position * f(i)` for pair `i`. `x` is `[.., len, heads, width]`.
fn rotated(x: &Tensor, at: &[i64], dims: usize, pairs: RotaryPairs) -> Vec<f64> {
    let (shape, mut values) = (x.shape().dims().to_vec(), values(x));
    let [.., len, heads, width] = shape[..] else { panic!("three dims") };
    for (row, head) in values.chunks_mut(width).enumerate() {
        let position = at[row / heads % len] as f64;
        for i in 0..dims / 2 {
            let (sin, cos) = (position * 10_000f64.powf(-2.0 * i as f64 / dims as f64)).sin_cos();
            let (a, b) = if pairs == RotaryPairs::Adjacent { (2 * i, 2 * i + 1) } else { (i, i + dims / 2) };
            (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
        }
    }
    values
}

#[track_caller]
fn assert_close(got: &[f64], expected: &[f64], most: f64) {
    let error = got.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    assert!(got.len() == expected.len() && error <= most, "{error}");
}

#[test]
fn rotary_embeddings_match_the_closed_form() -> Result<()> {
    let at = [0, 1, 7, 300];
    for device in devices() {
        for (pairs, dims) in [(RotaryPairs::Adjacent, 16), (RotaryPairs::Halves, 16), (RotaryPairs::Halves, 12)] {
            let rotary = Rotary::new(dims, RotaryOptions { pairs, ..RotaryOptions::default() }, device)?;
            let angles = rotary.angles(&positions(&at, device))?;
            let x = scattered(&[2, 4, 3, 16], 2.0, device);
            let expected = rotated(&x, &at, dims, pairs);
            let y = rotary.apply(&x, &angles)?;
            assert_close(&values(&y), &expected, 1e-4);
            assert_close(&values(&rotary.inverse(&y, &angles)?), &values(&x), 1e-6);
            let transposed = x.transpose(1, 2)?.contiguous()?.transpose(1, 2)?; // [batch, heads, len, width] in memory
            assert_close(&values(&rotary.apply(&transposed, &angles)?), &expected, 1e-4);
            for (dtype, step) in [(DType::F16, 2e-3), (DType::BF16, 2e-2), (DType::F64, 1e-4)] {
                if dtype == DType::F64 && device != Device::Cpu && !device.info()?.fp64 {
                    continue;
                }
                let y = rotary.apply(&x.to_dtype(dtype)?, &angles)?;
                assert_eq!(y.dtype(), dtype);
                assert_close(&values(&y), &expected, step);
            }
            let leaf = x.detach().requires_grad_(true)?;
            let grad = scattered(&[2, 4, 3, 16], 1.0, device);
            rotary.apply(&leaf, &angles)?.backward_with(&grad)?;
            assert_close(&values(&leaf.grad().unwrap()), &values(&rotary.inverse(&grad, &angles)?), 1e-6);
            let launches = |dtype| {
                let x = x.to_dtype(dtype).unwrap();
                count_launches(|| rotary.apply(&x, &angles).unwrap()).1
            };
            assert!(dims < 16 || (launches(DType::F32), launches(DType::F16)) == (1, 1), "one launch on {device}");
        }
    }
    Ok(())
}

/// Positions of each sequence of a batch, and positions in device memory that change.
#[test]
fn sequences_have_their_own_positions() -> Result<()> {
    for device in devices() {
        let rotary = Rotary::new(8, RotaryOptions::default(), device)?;
        let at = Tensor::from_slice(&[3i64, 100_000], [2, 1], device)?;
        let x = scattered(&[2, 1, 2, 8], 2.0, device);
        let y = rotary.apply(&x, &rotary.angles(&at)?)?;
        for (batch, position, error) in [(0, 3, 1e-5), (1, 100_000, 0.02)] {
            let expected = rotated(&x.narrow(0, batch, 1)?, &[position], 8, RotaryPairs::Halves);
            assert_close(&values(&y.narrow(0, batch, 1)?), &expected, error);
        }
    }
    Ok(())
}

/// Returns the frequencies and the factor of sines and cosines, from rotated unit vectors.
fn frequencies(dims: usize, base: f64, scaling: RotaryScaling, device: Device) -> Result<(Vec<f64>, f64)> {
    let options = RotaryOptions { base, pairs: RotaryPairs::Adjacent, scaling };
    let rotary = Rotary::new(dims, options, device)?;
    let units = Tensor::from_slice(&[1f32, 0.0].repeat(dims / 2), [1, 1, dims], device)?;
    let y = values(&rotary.apply(&units, &rotary.angles(&positions(&[1], device))?)?);
    Ok((y.chunks(2).map(|pair| pair[1].atan2(pair[0])).collect(), y[0].hypot(y[1])))
}

/// Frequencies by the formulas of Hugging Face's `modeling_rope_utils.py` in f64.
#[test]
fn scaled_frequencies_match_published_formulas() -> Result<()> {
    let llama3 = RotaryScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, original: 8192 };
    let yarn =
        |ext| RotaryScaling::Yarn { factor: 16.0, original: 4096, beta_fast: 32.0, beta_slow: 1.0, ext, attn: 1.0 };
    let expected_llama3 = [
        (14, 0.003211445994752591),
        (15, 0.0013718935677611381),
        (16, 0.0005248461609929547),
        (17, 0.0001785078127679964),
        (18, 7.78465527393245e-05),
        (31, 3.767322690173964e-07),
    ];
    let expected_yarn = [
        (9, 0.07498942093324558),
        (12, 0.027061799207210167),
        (16, 0.005673076923076923),
        (20, 0.0008817889629315672),
        (24, 6.25e-05),
        (31, 8.334508951020775e-06),
    ];
    for device in devices() {
        let cases =
            [(5e5, llama3.clone(), &expected_llama3, 1.0), (1e4, yarn(1.0), &expected_yarn, 1.2772588722239782)];
        for (base, scaling, expected, factor) in cases {
            let (got, amplitude) = frequencies(64, base, scaling, device)?;
            assert!((amplitude - factor).abs() < 1e-6 && (got[0] - 1.0).abs() < 1e-6);
            for &(i, expected) in expected {
                assert!((got[i] / expected - 1.0).abs() < 1e-5, "frequency {i}: {} for {expected} on {device}", got[i]);
            }
        }
        let plain = frequencies(8, 1e4, RotaryScaling::None, device)?.0;
        let halved = frequencies(8, 1e4, RotaryScaling::Linear { factor: 2.0 }, device)?.0;
        let factors = frequencies(8, 1e4, RotaryScaling::Factors(vec![1.0, 2.0, 4.0, 8.0]), device)?.0;
        for i in 0..4 {
            assert!((halved[i] * 2.0 / plain[i] - 1.0).abs() < 1e-5);
            assert!((factors[i] * 2f64.powi(i as i32) / plain[i] - 1.0).abs() < 1e-5);
        }
        let divided = frequencies(64, 1e4, yarn(0.0), device)?;
        assert!((divided.0[9] * 16.0 / 0.07498942093324558 - 1.0).abs() < 1e-5 && (divided.1 - 1.0).abs() < 1e-6);
    }
    assert!(Rotary::new(7, RotaryOptions::default(), Device::Cpu).is_err());
    assert!(frequencies(8, 1e4, RotaryScaling::Factors(vec![1.0]), Device::Cpu).is_err());
    Ok(())
}

/// Draws one token for each of `draws` rows with the same logits, and returns the number of draws of each token.
fn counts(sampler: Sampler, logits: &[f32], draws: usize, device: Device) -> Result<Vec<f64>> {
    let rows = Tensor::from_slice(logits, [1, logits.len()], device)?.expand([draws, logits.len()])?;
    let drawn = with_generator(&Generator::new(11), || sampler.sample(&rows, None))?;
    let mut counts = vec![0.0; logits.len()];
    drawn.to_vec::<i64>()?.into_iter().for_each(|token| counts[token as usize] += 1.0);
    Ok(counts)
}

const LOGITS: [f32; 8] = [0.5, 2.0, -1.0, 1.5, 0.0, 1.0, -3.0, 1.2];

const ALL: Sampler = Sampler { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition: 1.0 };

/// Returns the probabilities of the tokens that are kept.
fn probabilities(temperature: f64, kept: &[usize]) -> Vec<f64> {
    let weight = |i: usize| if kept.contains(&i) { (f64::from(LOGITS[i]) / temperature).exp() } else { 0.0 };
    let sum: f64 = (0..8).map(weight).sum();
    (0..8).map(|i| weight(i) / sum).collect()
}

#[test]
fn tokens_are_drawn_by_their_probabilities() -> Result<()> {
    // Probabilities of the sorted tokens 1, 3, 7, 5, 0, 4, 2, 6: 0.369, 0.224, 0.166, 0.136, 0.082, 0.05, 0.018, 0.002.
    let cases = [
        (ALL, &[0, 1, 2, 3, 4, 5, 6, 7][..]),
        (Sampler { temperature: 0.5, ..ALL }, &[0, 1, 2, 3, 4, 5, 6, 7]),
        (Sampler { top_k: 3, temperature: 2.0, ..ALL }, &[1, 3, 7]),
        (Sampler { top_p: 0.7, ..ALL }, &[1, 3, 7]),
        (Sampler { top_p: 0.7, temperature: 5.0, ..ALL }, &[1, 3, 7]),
        (Sampler { min_p: 0.3, ..ALL }, &[1, 3, 5, 7]),
        (Sampler { top_k: 4, top_p: 0.8, min_p: 0.1, ..ALL }, &[1, 3, 7]), // without top_k, top_p would keep token 5
        (Sampler { top_p: 1e-9, ..ALL }, &[1]),
    ];
    let draws = 100_000;
    for device in devices() {
        for (sampler, kept) in cases {
            let counts = counts(sampler, &LOGITS, draws, device)?;
            let expected = probabilities(sampler.temperature, kept);
            let mut chi_squared = 0.0;
            for (i, (count, p)) in counts.iter().zip(&expected).enumerate() {
                let mean = p * draws as f64;
                assert!(*p > 0.0 || *count == 0.0, "token {i} of {sampler:?} on {device}");
                chi_squared += if *p > 0.0 { (count - mean).powi(2) / mean } else { 0.0 };
            }
            assert!(chi_squared < 30.0, "{chi_squared} for {sampler:?} on {device}: {counts:?}");
        }
    }
    Ok(())
}

#[test]
fn repeated_tokens_are_penalised_within_the_window() -> Result<()> {
    for device in devices() {
        let logits = Tensor::from_slice(&[2.0f32, 1.9, -1.0, 1.8], [1, 4], device)?;
        let greedy = Sampler { temperature: 0.0, repetition: 1.2, ..Sampler::default() };
        let history = History::new(&Tensor::from_slice(&[2i64, 0], [1, 2], device)?, 3)?;
        let mut drawn = Vec::new();
        for _ in 0..6 {
            let token = greedy.sample(&logits, Some(&history))?;
            history.push(&token)?;
            drawn.push(token.item::<i64>()?);
        }
        // The window after each draw: 2 0 1 | 0 1 3 | 1 3 0 | 3 0 1 | 0 1 3.
        assert_eq!(drawn, [1, 3, 0, 0, 1, 3], "on {device}");
    }
    Ok(())
}

/// One seed gives the same tokens on all devices, also if a captured graph draws them.
#[test]
fn seeds_give_the_same_tokens_on_all_devices_and_in_replays() -> Result<()> {
    let sampler = Sampler { repetition: 1.1, ..Sampler::default() };
    let prompt = |device| Tensor::from_slice(&[5i64, 6, 7, 900, 901, 5], [2, 3], device);
    let step = |logits: &Tensor, history: &History| {
        let tokens = sampler.sample(logits, Some(history))?;
        history.push(&tokens)?;
        Ok(tokens)
    };
    let drawn = |device| {
        let (logits, history) = (scattered(&[2, 1000], 8.0, device), History::new(&prompt(device)?, 16)?);
        let draw = || (0..20).map(|_| step(&logits, &history)?.to_vec::<i64>()).collect::<Result<Vec<_>>>();
        with_generator(&Generator::new(3), draw)
    };
    let expected = drawn(Device::Cpu)?;
    for device in opencl() {
        assert_eq!(drawn(device)?, expected, "on {device}");
        let (logits, history) = (scattered(&[2, 1000], 8.0, device), History::new(&prompt(device)?, 16)?);
        let capture = || Graph::capture(device, || step(&logits, &history));
        let (graph, tokens) = with_generator(&Generator::new(3), capture)?;
        for expected in &expected {
            graph.replay()?;
            assert_eq!(&tokens.to_vec::<i64>()?, expected, "in a replay on {device}");
        }
    }
    Ok(())
}

#[test]
fn wrong_samplers_are_errors() {
    let logits = Tensor::ones([1, 4], Device::Cpu).unwrap();
    let wrong = |sampler: Sampler| sampler.sample(&logits, None).unwrap_err().to_string();
    assert!(wrong(Sampler { temperature: -1.0, ..ALL }).contains("temperature: -1.0"));
    assert!(wrong(Sampler { top_p: f64::NAN, ..ALL }).contains("out of range"));
    assert!(wrong(Sampler { min_p: 1.5, ..ALL }).contains("out of range"));
    assert!(wrong(Sampler { repetition: 0.0, ..ALL }).contains("out of range"));
    assert!(ALL.sample(&Tensor::ones([4], Device::Cpu).unwrap(), None).is_err());
    assert!(History::new(&Tensor::zeros([1, 0], (DType::I64, Device::Cpu)).unwrap(), 4).is_err());
}
