//! Quantised weights: elements and bytes against the Python package `gguf` (tests/data/quantized.py), and products against f64.

use claystone::nn::{Activation, Linear, Module, QuantizedEmbedding};
use claystone::quantized::{Group, GroupOffset, QuantFormat, QuantizedTensor};
use claystone::{DType, Device, Error, Tensor, autocast, io};
use half::f16;

use crate::common::{each_device, scattered, values};

const GGUF: [QuantFormat; 10] = [
    QuantFormat::Q8_0,
    QuantFormat::Q4_0,
    QuantFormat::Q4_1,
    QuantFormat::Q5_0,
    QuantFormat::Q5_1,
    QuantFormat::Q2K,
    QuantFormat::Q3K,
    QuantFormat::Q4K,
    QuantFormat::Q5K,
    QuantFormat::Q6K,
];

fn grouped() -> impl Iterator<Item = QuantFormat> {
    ["g4_32", "g4_64_zero", "g4_row_min", "g8_128", "g8_row_zero", "g8_32_min"].into_iter().map(|s| s.parse().unwrap())
}

/// Returns the sum of the sizes of the fields of a block, from the formats' descriptions.
fn bits(format: QuantFormat) -> f64 {
    match format {
        QuantFormat::Q8_0 => 8.5,
        QuantFormat::Q4_0 | QuantFormat::Q4K => 4.5,
        QuantFormat::Q4_1 => 5.0,
        QuantFormat::Q5_0 | QuantFormat::Q5K => 5.5,
        QuantFormat::Q5_1 => 6.0,
        QuantFormat::Q2K => 2.625,
        QuantFormat::Q3K => 3.4375,
        QuantFormat::Q6K => 6.5625,
        _ => format.bits_per_weight(),
    }
}

fn bits_of(t: &Tensor) -> Vec<u32> {
    t.to_vec::<f32>().unwrap().into_iter().map(f32::to_bits).collect()
}

/// A weight of `n` rows of `k` random elements; `Q2K` to `Q6K` from random bytes with scales of at most 2.
fn weight(format: QuantFormat, n: usize, k: usize, device: Device) -> QuantizedTensor {
    if let Ok(made) = QuantizedTensor::quantize(&scattered(&[n, k], 2.0, device), format) {
        return made;
    }
    let mut bytes: Vec<u8> = (0..n * format.row_bytes(k).unwrap()).map(|i| (i * 7919 % 1013) as u8).collect();
    let halves: &[usize] = match format {
        QuantFormat::Q2K => &[80, 82],
        QuantFormat::Q3K => &[108],
        QuantFormat::Q6K => &[208],
        _ => &[0, 2],
    };
    for (i, block) in bytes.chunks_exact_mut(format.block_bytes(k)).enumerate() {
        for at in halves {
            block[*at..][..2].copy_from_slice(&f16::from_f32((i % 7) as f32 / 300.0 - 0.01).to_le_bytes());
        }
    }
    QuantizedTensor::from_bytes(&bytes, [n, k], format, device).unwrap()
}

#[test]
fn elements_and_bytes_equal_those_of_gguf() {
    each_device(|device| {
        let all = io::load("tests/data/quantized.npz", Device::Cpu).unwrap();
        let get = |format: QuantFormat, what: &str| all.get(&format!("{format}.{what}")).unwrap();
        for format in GGUF {
            let (blocks, expected) = (get(format, "blocks").to_vec::<u8>().unwrap(), get(format, "values"));
            let k = expected.shape().dims()[1];
            let w = QuantizedTensor::from_bytes(&blocks, [12, k], format, device).unwrap();
            assert_eq!(w.to_bytes().unwrap(), blocks, "{format}");
            assert_eq!((w.nbytes(), w.storage().nbytes()), (blocks.len(), blocks.len()), "{format}");
            assert_eq!(blocks.len() as f64 * 8.0 / (12 * k) as f64, bits(format), "{format}");
            assert_eq!(bits_of(&w.dequantize(DType::F32).unwrap()), bits_of(expected), "{format}");
            let half = w.dequantize(DType::F16).unwrap().to_vec::<f16>().unwrap();
            let rounded = expected.to_dtype(DType::F16).unwrap().to_vec::<f16>().unwrap();
            assert!(half.iter().zip(&rounded).all(|(a, b)| a.to_bits() == b.to_bits()), "{format}");
            let index = [11i64, 0, 5, 5, 3, 11];
            let rows = w.rows(&Tensor::from_slice(&index, [2, 3], device).unwrap(), DType::F32).unwrap();
            assert_eq!(rows.shape().dims(), [2, 3, k]);
            let index = Tensor::from_slice(&index, 6, Device::Cpu).unwrap();
            assert_eq!(bits_of(&rows), bits_of(&expected.index_select(0, &index).unwrap()), "rows of {format}");
        }
        let x = all.get("x").unwrap().to_device(device).unwrap();
        for format in &GGUF[..5] {
            let w = QuantizedTensor::quantize(&x, *format).unwrap();
            assert_eq!(w.to_bytes().unwrap(), get(*format, "quantized").to_vec::<u8>().unwrap(), "{format}");
        }
        assert!(
            QuantizedTensor::quantize(&x, QuantFormat::Q6K).unwrap_err().to_string().contains("read them from a GGUF")
        );
    });
}

#[test]
fn quantised_groups_are_within_half_a_step() {
    each_device(|device| {
        let x = scattered(&[5, 256], 3.0, device).add_scalar(0.5).unwrap();
        for format in grouped() {
            let w = QuantizedTensor::quantize(&x, format).unwrap();
            assert_eq!(w.nbytes(), 5 * format.row_bytes(256).unwrap(), "{format}");
            let far = w.dequantize(DType::F32).unwrap().sub(&x).unwrap().abs().unwrap().max((), false).unwrap();
            // Elements are in -1..2. Groups of four bits without offset have the asymmetric range -8..7.
            let step = match format {
                QuantFormat::Grouped { bits: 4, offset: GroupOffset::None, .. } => 2.0 * 2.0 / 8.0,
                QuantFormat::Grouped { bits: 4, .. } => 3.0 / 15.0,
                QuantFormat::Grouped { offset: GroupOffset::None, .. } => 2.0 / 127.0,
                _ => 2.0 * 3.0 / 255.0, // the zero point is also rounded
            };
            assert!(far.item::<f32>().unwrap() <= 0.51 * step + 0.002, "{format}: {far}");
        }
    });
}

/// Checks `x wᵀ + bias` against f64, within the bound that the documentation states.
fn check_product(w: &QuantizedTensor, x: &Tensor, bias: Option<&Tensor>, what: &str) {
    let got = w.linear(x, bias).unwrap();
    let (n, k) = (w.shape().dims()[0], w.shape().dims()[1]);
    let m = x.numel() / k;
    assert_eq!((got.dtype(), got.numel()), (x.dtype(), m * n), "{what}");
    let unit = match x.dtype() {
        DType::F32 => 2f64.powi(-24),
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-8),
    };
    let (got, x, w) = (values(&got), values(x), values(&w.dequantize(DType::F32).unwrap()));
    let bias = bias.map_or(vec![0.0; n], values);
    for i in 0..m {
        for j in 0..n {
            let (x, w) = (&x[i * k..][..k], &w[j * k..][..k]);
            let terms = || x.iter().zip(w).map(|(x, w)| x * w);
            let right = terms().sum::<f64>() + bias[j];
            let sizes: f64 = terms().map(f64::abs).sum::<f64>() + bias[j].abs();
            let blocks = x.chunks(32).zip(w.chunks(32));
            let rounding = |(x, w): (&[f64], &[f64])| {
                let max = x.iter().fold(0f64, |max, x| max.max(x.abs()));
                max / 65534.0 * w.iter().map(|w| w.abs()).sum::<f64>()
            };
            // More rows are multiplied in the dtype of x, to which the weight is rounded.
            let weight = if m > 8 { unit * sizes } else { 0.0 };
            let bound = blocks.map(rounding).sum::<f64>() * 1.01 + (k + 2) as f64 * 2f64.powi(-24) * sizes;
            let off = (got[i * n + j] - right).abs();
            assert!(off <= bound + weight + unit * right.abs(), "{what}: row {i}, column {j}: {off} off {right}");
        }
    }
}

#[test]
fn products_are_within_their_bound() {
    each_device(|device| {
        for format in GGUF.into_iter().chain(grouped()) {
            let large = format.block_len(128) > 32;
            let (widths, n): (&[usize], &[usize]) =
                if large { (&[256, 768][..], &[1, 65][..]) } else { (&[32, 96, 288][..], &[1, 7, 33][..]) };
            for &k in widths.iter().filter(|&&k| format.row_bytes(k).is_ok()) {
                for &n in n {
                    let w = weight(format, n, k, device);
                    let bias = scattered(&[n], 1.0, device);
                    for m in [1, 2, 3, 8, 9] {
                        let x = scattered(&[m, k], 4.0, device);
                        check_product(&w, &x, (m != 2).then_some(&bias), &format!("{m} x {k} x {n}, {format}"));
                    }
                }
            }
        }
        for (dtype, format) in [(DType::F16, QuantFormat::Q4_1), (DType::BF16, QuantFormat::Q8_0)] {
            for m in [1, 4, 33] {
                let w = weight(format, 300, 64, device);
                let x = scattered(&[2, m, 128], 4.0, device).to_dtype(dtype).unwrap().slice(2, 0, 128, 2).unwrap();
                check_product(&w, &x, None, &format!("{m} strided rows of {dtype}"));
            }
        }
    });
}

#[test]
fn epilogues_joined_rows_and_views() {
    each_device(|device| {
        let (q, k, v) = (
            weight(QuantFormat::Q4_1, 40, 96, device),
            weight(QuantFormat::Q4_1, 8, 96, device),
            weight(QuantFormat::Q8_0, 9, 96, device),
        );
        let all = QuantizedTensor::join_rows(&[&q, &k.narrow_rows(1, 7).unwrap(), &v]).unwrap();
        assert_eq!((all.shape().dims(), all.nbytes()), (&[56, 96][..], q.nbytes() + k.nbytes() * 7 / 8 + v.nbytes()));
        let bytes =
            [q.to_bytes().unwrap(), k.to_bytes().unwrap()[k.nbytes() / 8..].to_vec(), v.to_bytes().unwrap()].concat();
        assert_eq!(all.to_bytes().unwrap(), bytes);
        let there = all.to_device(Device::Cpu).unwrap().to_device(device).unwrap();
        assert_eq!(there.to_bytes().unwrap(), bytes);
        let middle = all.narrow_rows(30, 20).unwrap();
        let elements = all.dequantize(DType::F32).unwrap();
        let expected = elements.narrow(0, 30, 20).unwrap().contiguous().unwrap();
        assert_eq!(bits_of(&middle.dequantize(DType::F32).unwrap()), bits_of(&expected));
        for m in [1, 5, 20] {
            let x = scattered(&[m, 96], 2.0, device);
            check_product(&all, &x, Some(&scattered(&[56], 1.0, device)), "joined");
            check_product(&middle, &x, None, "narrow");
            let (bias, residual) = (scattered(&[56], 1.0, device), scattered(&[m, 56], 3.0, device));
            let near = |got: &Tensor, want: &Tensor, what: &str| {
                assert_eq!(got.shape(), want.shape());
                let off = got.sub(want).unwrap().abs().unwrap().max((), false).unwrap().item::<f32>().unwrap();
                assert!(off < 3e-3, "{what} of {m} rows: {off}");
            };
            let plain = x.linear(&elements, Some(&bias)).unwrap();
            let silu = all.linear_map(&x, Some(&bias), |z| z.silu()).unwrap();
            near(&silu, &plain.silu().unwrap(), "silu");
            near(&all.linear_map(&x, Some(&bias), |z| z.relu()).unwrap(), &plain.relu().unwrap(), "relu");
            let added = all.linear_add(&x, &residual).unwrap();
            near(&added, &x.linear(&elements, None).unwrap().add(&residual).unwrap(), "residual");
        }
    });
}

#[test]
fn activations_that_are_not_finite_stay_so() {
    each_device(|device| {
        let w = weight(QuantFormat::Q4_0, 3, 64, device);
        let mut x = vec![1f32; 64];
        x[40] = f32::NAN;
        let y = w.matmul(&Tensor::from_slice(&x, 64, device).unwrap()).unwrap();
        assert!(y.to_vec::<f32>().unwrap().iter().all(|y| y.is_nan()));
        x[40] = f32::INFINITY;
        let y = w.matmul(&Tensor::from_slice(&x, 64, device).unwrap()).unwrap();
        assert!(y.to_vec::<f32>().unwrap().iter().all(|y| !y.is_finite()));
        let tiny = w.matmul(&Tensor::full(&[1, 64], 1e-38f32, device).unwrap()).unwrap();
        assert!(tiny.to_vec::<f32>().unwrap().iter().all(|y| y.abs() < 1e-34));
    });
}

#[test]
fn gradients_reach_activations_bias_and_residual() {
    each_device(|device| {
        let w = weight(QuantFormat::Q8_0, 300, 64, device);
        let (x, bias) = (scattered(&[2, 5, 64], 1.0, device), scattered(&[300], 1.0, device));
        let gradients = |f: &dyn Fn(&Tensor, &Tensor) -> Tensor| {
            let leaf = |t: &Tensor| t.detach().requires_grad_(true).unwrap();
            let (x, bias) = (leaf(&x), leaf(&bias));
            f(&x, &bias).square().unwrap().sum((), false).unwrap().backward().unwrap();
            (values(&x.grad().unwrap()), values(&bias.grad().unwrap()))
        };
        let elements = w.dequantize(DType::F32).unwrap();
        let got = gradients(&|x, bias| w.linear_map(x, Some(bias), |z| z.silu()).unwrap());
        let want = gradients(&|x, bias| x.linear(&elements, Some(bias)).unwrap().silu().unwrap());
        for (got, want) in [(got.0, want.0), (got.1, want.1)] {
            let most = want.iter().fold(0f64, |most, x| most.max(x.abs()));
            assert!(got.iter().zip(&want).all(|(a, b)| (a - b).abs() <= 1e-3 * most));
        }
        let half = autocast(DType::F16, || w.matmul(&x)).unwrap();
        assert_eq!(half.dtype(), DType::F16);
    });
}

#[test]
fn layers() {
    each_device(|device| {
        let layer = Linear::new(64, 48, device).unwrap().with_activation(Activation::Gelu);
        let small = layer.quantize(QuantFormat::Q8_0).unwrap();
        let names: Vec<String> = small.named_parameters("").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["bias"]);
        let x = scattered(&[3, 64], 2.0, device);
        let off = small.forward(&x).unwrap().sub(&layer.forward(&x).unwrap()).unwrap().abs().unwrap();
        assert!(off.max((), false).unwrap().item::<f32>().unwrap() < 0.02);
        let mut moved = small.shallow_clone();
        moved.to_device(Device::Cpu).unwrap();
        assert_eq!((moved.weight().device(), moved.bias().unwrap().device()), (Device::Cpu, Device::Cpu));
        let table = QuantizedEmbedding::new(small.weight().clone(), DType::BF16);
        let y = table.forward(&Tensor::from_slice(&[47i32, 0], [1, 2], device).unwrap()).unwrap();
        assert_eq!((y.shape().dims(), y.dtype()), (&[1, 2, 64][..], DType::BF16));
    });
}

#[test]
fn layouts_of_gptq_and_awq() {
    each_device(|device| {
        let (n, k, group) = (16, 64, 32);
        let q = |row: usize, column: usize, bits: usize| ((row * 31 + column * 7) % (1 << bits)) as i32;
        let zero = |row: usize, g: usize| ((row + 3 * g) % 7 + 1) as i32;
        let scale = |row: usize, g: usize| f16::from_f32((row + 1) as f32 / 8.0 + g as f32);
        let words = |shape: [usize; 2], per_word: usize, f: &dyn Fn(usize, usize, usize) -> i32| {
            let bits = 32 / per_word;
            let word = |i: usize, j: usize| (0..per_word).fold(0, |word, p| word | f(i, j, p) << (bits * p));
            let all: Vec<i32> =
                (0..shape[0]).flat_map(|i| (0..shape[1]).map(move |j| (i, j))).map(|(i, j)| word(i, j)).collect();
            Tensor::from_slice(&all, shape, device).unwrap()
        };
        let scales: Vec<f16> = (0..k / group).flat_map(|g| (0..n).map(move |row| scale(row, g))).collect();
        let scales = Tensor::from_slice(&scales, [k / group, n], device).unwrap();
        let check = |w: QuantizedTensor, bits: usize| {
            assert_eq!(
                w.format(),
                QuantFormat::Grouped { bits: bits as u8, group: Group::N32, offset: GroupOffset::Zero }
            );
            let got = values(&w.dequantize(DType::F32).unwrap());
            for (row, column) in (0..n).flat_map(|row| (0..k).map(move |column| (row, column))) {
                let g = column / group;
                let want = f64::from(q(row, column, bits) - zero(row, g)) * scale(row, g).to_f64();
                assert_eq!(got[row * k + column], want, "{bits} bits, row {row}, column {column}");
            }
        };
        for bits in [4, 8] {
            let per = 32 / bits;
            let qweight = words([k / per, n], per, &|i, row, p| q(row, i * per + p, bits));
            let qzeros = words([k / group, n / per], per, &|g, j, p| zero(j * per + p, g) - 1);
            check(QuantizedTensor::from_gptq(&qweight, &qzeros, &scales, group).unwrap(), bits);
            assert!(matches!(QuantizedTensor::from_gptq(&qweight, &qzeros, &scales, 64), Err(Error::Invalid { .. })));
        }
        const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
        let qweight = words([k, n / 8], 8, &|column, j, p| q(j * 8 + ORDER[p], column, 4));
        let qzeros = words([k / group, n / 8], 8, &|g, j, p| zero(j * 8 + ORDER[p], g));
        check(QuantizedTensor::from_awq(&qweight, &qzeros, &scales, group).unwrap(), 4);
    });
}

#[test]
fn wrong_arguments_are_errors() {
    let cpu = Device::Cpu;
    let w = weight(QuantFormat::Q8_0, 4, 64, cpu);
    let message = |e: claystone::Result<QuantizedTensor>| e.unwrap_err().to_string();
    assert!(message(QuantizedTensor::from_bytes(&[0; 33], [1, 32], QuantFormat::Q8_0, cpu)).contains("33 bytes"));
    assert!(message(QuantizedTensor::from_bytes(&[], [0, 31], QuantFormat::Q8_0, cpu)).contains("multiple of 32"));
    assert!(QuantizedTensor::from_bytes(&[], [usize::MAX, 32, 0], QuantFormat::Q8_0, cpu).is_err());
    assert!(QuantizedTensor::from_bytes(&[], [usize::MAX, 32], QuantFormat::Q8_0, cpu).is_err());
    assert!(
        message(QuantizedTensor::quantize(&Tensor::full(&[32], f32::NAN, cpu).unwrap(), QuantFormat::Q4_0))
            .contains("finite")
    );
    assert!(message(w.narrow_rows(3, 2)).contains("rows 3"));
    assert!(QuantizedTensor::join_rows(&[]).is_err());
    assert!(matches!(w.matmul(&Tensor::ones([2, 32], cpu).unwrap()), Err(Error::ShapeMismatch { .. })));
    assert!(matches!(
        w.matmul(&Tensor::ones([2, 64], (DType::F64, cpu)).unwrap()),
        Err(Error::UnsupportedDType { .. })
    ));
    let index = Tensor::from_slice(&[4i64], 1, cpu).unwrap();
    assert!(matches!(w.rows(&index, DType::F32), Err(Error::IndexOutOfRange { index: 4, size: 4, .. })));
    assert_eq!(w.matmul(&Tensor::ones([0, 64], cpu).unwrap()).unwrap().shape().dims(), [0, 4]);
    let none = QuantizedTensor::from_bytes(&[], [0, 64], QuantFormat::Q8_0, cpu).unwrap();
    assert_eq!(none.matmul(&Tensor::ones([3, 64], cpu).unwrap()).unwrap().shape().dims(), [3, 0]);
}
