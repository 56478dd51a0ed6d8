//! Every operation that stores a number refuses numbers that the dtype cannot represent, and accepts the numbers at the dtype's
//! limits.

use claystone::{DType, Device, Error, PadMode, Result, Scalar, Tensor};

use crate::common::each_device;

const INF: f64 = f64::INFINITY;

/// Whether the device supports the dtype. f64 needs the OpenCL feature fp64.
fn has(device: Device, dtype: DType) -> bool {
    dtype != DType::F64 || device == Device::Cpu || device.info().unwrap().fp64
}

/// Returns numbers that the dtype can store, each with the element that is stored, and numbers that the dtype cannot store.
fn numbers(dtype: DType) -> (Vec<(Scalar, Scalar)>, Vec<Scalar>) {
    let ints = |all: &[(i64, i64)]| all.iter().map(|&(a, b)| (a.into(), b.into())).collect::<Vec<(Scalar, Scalar)>>();
    let mixed = |all: &[(f64, i64)]| all.iter().map(|&(a, b)| (a.into(), b.into())).collect::<Vec<(Scalar, Scalar)>>();
    let floats = |all: &[(f64, f64)]| all.iter().map(|&(a, b)| (a.into(), b.into())).collect::<Vec<(Scalar, Scalar)>>();
    let refused = |whole: &[i64], fractions: &[f64]| {
        whole.iter().map(|&i| i.into()).chain(fractions.iter().map(|&x| x.into())).collect::<Vec<Scalar>>()
    };
    let never = [f64::NAN, INF, -INF, 1e20, -1e20, 2f64.powi(63)];
    let never = |more: &[f64]| [&never[..], more].concat();
    let exact = (1 << 53) + 1;
    match dtype {
        DType::U8 => (
            [ints(&[(255, 255), (-1, 255), (-255, 1)]), mixed(&[(255.0, 255), (7.0, 7), (-0.0, 0)])].concat(),
            refused(&[256, -256, i64::MAX, i64::MIN], &never(&[256.0, -1.0, -1.5, 255.5, 7.5, -0.5])),
        ),
        DType::U32 => (
            [ints(&[(u32::MAX.into(), u32::MAX.into()), (-1, u32::MAX.into())]), mixed(&[(4294967295.0, 4294967295)])]
                .concat(),
            refused(&[1 << 32, -1 << 32, i64::MAX], &never(&[4294967296.0, -1.0])),
        ),
        DType::I8 => (
            [ints(&[(127, 127), (-128, -128)]), mixed(&[(127.0, 127), (-128.0, -128), (-0.0, 0)])].concat(),
            refused(&[128, -129, i64::MAX], &never(&[128.0, -129.0, 127.5, -1.5])),
        ),
        DType::I16 => (
            [ints(&[(32_767, 32_767)]), mixed(&[(-32_768.0, -32_768)])].concat(),
            refused(&[32_768, -32_769], &never(&[32_768.0, -32_769.0, 0.5])),
        ),
        DType::I32 => (
            [
                ints(&[(i32::MAX.into(), i32::MAX.into()), (i32::MIN.into(), i32::MIN.into())]),
                mixed(&[(2147483647.0, 2147483647), (-2147483648.0, -2147483648)]),
            ]
            .concat(),
            refused(&[1 << 31, -(1 << 31) - 1, i64::MAX], &never(&[2147483648.0, -2147483649.0, 2147483647.5, -1.5])),
        ),
        DType::I64 => (
            [ints(&[(i64::MAX, i64::MAX), (i64::MIN, i64::MIN), (exact, exact)]), mixed(&[(-2f64.powi(63), i64::MIN)])]
                .concat(),
            refused(&[], &never(&[-1.1e19])).into_iter().chain([Scalar::from(u64::MAX)]).collect(),
        ),
        DType::Bool => (mixed(&[(f64::NAN, 1), (INF, 1), (-3.0, 1), (0.0, 0), (1e300, 1)]), refused(&[], &[0.5])),
        DType::F16 => (
            floats(&[(65504.0, 65504.0), (65519.0, 65504.0), (INF, INF), (-INF, -INF), (0.1, 0.0999755859375)]),
            refused(&[65520, -1 << 40], &[65520.0, 7e4, -1e5, 1e300]),
        ),
        DType::BF16 => (floats(&[(3.38e38, 3.376_243_709_9e38), (-INF, -INF)]), refused(&[], &[3.4e38, -1e39, 1e300])),
        DType::F32 => {
            (floats(&[(3.4028235e38, f64::from(f32::MAX)), (INF, INF)]), refused(&[], &[3.5e38, -1e39, 1e300]))
        }
        DType::F64 => (floats(&[(1.5e308, 1.5e308), (-INF, -INF)]), Vec::new()),
        _ => unreachable!("all dtypes are above"),
    }
}

type Store = fn(&Tensor, Scalar) -> Result<Tensor>;

/// Operations that store a number in the last of three elements of a copy of the vector.
const STORES: [(&str, Store); 12] = [
    ("fill_", |x, s| {
        let x = x.try_clone()?;
        x.narrow(0, 2, 1)?.fill_(s)?;
        Ok(x)
    }),
    ("slice_assign_", |x, s| {
        let x = x.try_clone()?;
        x.slice_assign_(2, s)?;
        Ok(x)
    }),
    ("full", |x, s| Tensor::cat(&[&x.narrow(0, 0, 2)?, &Tensor::full(1, s, x)?], 0)),
    ("full", |x, s| Tensor::cat(&[&x.narrow(0, 0, 2)?, &x.narrow(0, 2, 1)?.full_like(s)?], 0)),
    ("masked_fill", |x, s| x.masked_fill(&last(x)?, s)),
    ("masked_fill", |x, s| {
        let x = x.try_clone()?;
        x.masked_fill_(&last(&x)?, s)?;
        Ok(x)
    }),
    ("index_fill", |x, s| x.index_fill(0, &Tensor::full(1, 2, (DType::I64, x.device()))?, s)),
    ("index_fill_", |x, s| {
        let x = x.try_clone()?;
        x.index_fill_(0, &Tensor::full(1, 2, (DType::I64, x.device()))?, s)?;
        Ok(x)
    }),
    ("scatter_value", |x, s| x.scatter_value(0, &Tensor::full(1, 2, (DType::I64, x.device()))?, s)),
    ("pad", |x, s| x.narrow(0, 0, 2)?.pad(&[0, 1], PadMode::Constant(s))),
    ("full", |x, s| {
        let short = [x.narrow(0, 0, 2)?, x.narrow(0, 0, 3)?];
        let padded = claystone::nn::pad_sequence(&short, true, s)?.select(0, 0)?;
        Ok(padded)
    }),
    ("fill_", |x, s| {
        let x = x.try_clone()?;
        claystone::nn::init::constant_(&x.narrow(0, 2, 1)?, s)?;
        Ok(x)
    }),
];

/// Returns a mask that selects the last of three elements.
fn last(x: &Tensor) -> Result<Tensor> {
    Tensor::arange(0, 3, 1, (DType::I64, x.device()))?.eq_scalar(2)
}

fn is_refused<T: std::fmt::Debug>(made: Result<T>, op: &str) {
    let Err(Error::Invalid { .. }) = made else { panic!("{op}: {made:?}") };
    let text = made.unwrap_err().to_string();
    assert!(
        text.starts_with(&format!("{op}: "))
            && (text.contains("out of the range of") || text.contains("not an integer")),
        "{text}"
    );
}

#[test]
fn unrepresentable_numbers_are_refused_by_every_operation() {
    each_device(|d| {
        for dtype in DType::ALL.into_iter().filter(|&t| has(d, t)) {
            let x = Tensor::ones(3, (dtype, d)).unwrap();
            let (held, refused) = numbers(dtype);
            for (op, store) in STORES {
                for &(number, right) in &held {
                    let out = store(&x, number).unwrap();
                    assert_eq!(out.dtype(), dtype);
                    let right = Tensor::cat(
                        &[&Tensor::ones(2, Device::Cpu).unwrap().to_dtype(dtype).unwrap(), &element(dtype, right)],
                        0,
                    )
                    .unwrap();
                    let out = out.to_device(Device::Cpu).unwrap();
                    assert!(out.equal(&right).unwrap(), "{op} of {number:?} in {dtype} on {d}: {out} for {right}");
                }
                refused.iter().for_each(|&number| is_refused(store(&x, number), op));
                assert_eq!(x.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap(), [1.0; 3], "{op} changed a tensor");
            }
        }
    });
}

/// Returns a one-element tensor, made from a host value of the dtype's own type.
fn element(dtype: DType, value: Scalar) -> Tensor {
    let (x, i) = (value.to_f64(), value.to_i64());
    let host = Device::Cpu;
    match dtype {
        DType::F64 => Tensor::from_slice(&[x], 1, host),
        DType::F32 => Tensor::from_slice(&[x as f32], 1, host),
        DType::F16 => Tensor::from_slice(&[half::f16::from_f64(x)], 1, host),
        DType::BF16 => Tensor::from_slice(&[half::bf16::from_f64(x)], 1, host),
        DType::I64 => Tensor::from_slice(&[i], 1, host),
        DType::I32 => Tensor::from_slice(&[i32::try_from(i).unwrap()], 1, host),
        DType::U32 => Tensor::from_slice(&[u32::try_from(i).unwrap()], 1, host),
        DType::I16 => Tensor::from_slice(&[i16::try_from(i).unwrap()], 1, host),
        DType::I8 => Tensor::from_slice(&[i8::try_from(i).unwrap()], 1, host),
        DType::U8 => Tensor::from_slice(&[u8::try_from(i).unwrap()], 1, host),
        _ => Tensor::from_slice(&[i != 0], 1, host),
    }
    .unwrap()
}

/// A clamp bound that the dtype cannot represent is refused if it would replace all elements. If no element can reach the bound, it
/// has no effect and is accepted.
#[test]
fn clamp_bounds_and_factors_are_checked_only_if_used() {
    each_device(|d| {
        let bytes = Tensor::from_slice(&[5u8, 200], 2, d).unwrap();
        let of = |t: Tensor| t.to_vec::<u8>().unwrap();
        assert_eq!(of(bytes.clamp(-1, 300).unwrap()), [5, 200]);
        assert_eq!(of(bytes.hardtanh(-300, 1i64 << 40).unwrap()), [5, 200]);
        assert_eq!(of(bytes.clamp_min(-7).unwrap()), [5, 200]);
        is_refused(bytes.clamp_min(256), "clamp_min");
        is_refused(bytes.clamp_max(-1), "clamp_max");
        is_refused(bytes.clamp(0, -1), "clamp");
        is_refused(bytes.clamp_(256, 300), "clamp");
        is_refused(bytes.threshold(3, 256), "threshold");
        is_refused(bytes.add_alpha(&bytes, 256), "add_alpha");
        is_refused(bytes.addcmul(&bytes, &bytes, 1 << 20), "addcmul");
        is_refused(
            bytes.index_add_alpha(0, &Tensor::zeros(2, (DType::I64, d)).unwrap(), &bytes, 300),
            "index_add_alpha",
        );
        let square = Tensor::ones([2, 2], (DType::U8, d)).unwrap();
        is_refused(square.addmm(&square, &square, 1, 256), "addmm");
        assert!(square.addmm(&square, &square, 1, 1.5).unwrap_err().to_string().contains("not an integer"));
        // Integer arithmetic wraps around, and comparisons are exact.
        assert_eq!(of(bytes.add_scalar(300).unwrap()), [49, 244]);
        assert_eq!(bytes.gt_scalar(300).unwrap().to_vec::<bool>().unwrap(), [false, false]);
        assert_eq!(bytes.gt_scalar(-1).unwrap().to_vec::<bool>().unwrap(), [true, true]);

        let halves = Tensor::full(2, 0.1, (DType::F16, d)).unwrap();
        assert_eq!(
            halves.eq_scalar(0.1).unwrap().to_vec::<bool>().unwrap(),
            [true; 2],
            "0.1 is rounded as the elements are"
        );
        assert_eq!(halves.lt_scalar(1e6).unwrap().to_vec::<bool>().unwrap(), [true; 2]);
        assert!(halves.clamp(-1e9, 1e9).unwrap().equal(&halves).unwrap());
        is_refused(halves.clamp_min(1e9), "clamp_min");
        is_refused(halves.nan_to_num(0.0, 1e6, -1.0), "nan_to_num");
        assert!(halves.nan_to_num(f64::NAN, INF, -INF).is_ok());

        is_refused(Tensor::arange(0, 257, 1, (DType::U8, d)), "arange");
        assert_eq!(
            Tensor::arange(0, 256, 51, (DType::U8, d)).unwrap().to_vec::<u8>().unwrap(),
            [0, 51, 102, 153, 204, 255]
        );
        is_refused(Tensor::arange(69_998, 70_000, 1, (DType::F16, d)), "arange");
        is_refused(Tensor::linspace(0.0, 3e9, 4, (DType::I32, d)), "linspace");
        is_refused(Tensor::linspace(f64::NAN, 1.0, 4, (DType::I32, d)), "linspace");
        is_refused(Tensor::logspace(0.0, 10.0, 3, 10.0, (DType::F16, d)), "logspace");
        is_refused(Tensor::randint(0, 257, 4, (DType::U8, d)), "randint");
        is_refused(Tensor::randint(-1, 3, 4, (DType::U8, d)), "randint");
        is_refused(Tensor::randint(0, 70_000, 4, (DType::F16, d)), "randint");
        assert!(Tensor::randint(0, 256, 4, (DType::U8, d)).is_ok());
        is_refused(halves.uniform_(0.0, 1e6), "uniform_");
        is_refused(Tensor::zeros(2, d).unwrap().uniform_(-3e38, 3e38), "uniform_");
        assert!(halves.equal(&Tensor::full(2, 0.1, (DType::F16, d)).unwrap()).unwrap(), "nothing was written");
    });
}

/// Formulas on integer operands compute in i64, whatever the dtype of the result is.
#[test]
fn integer_formulas_take_numbers_of_i64() {
    each_device(|d| {
        let (x, out) =
            (Tensor::from_slice(&[1 << 40, 5i64], 2, d).unwrap(), Tensor::zeros(2, (DType::Bool, d)).unwrap());
        let above = |number: Scalar| Tensor::map_into(&[&x], &[number], &[&out], |e, s| vec![e[0].gt(&s[0])]);
        above((1i64 << 39).into()).unwrap();
        assert_eq!(out.to_vec::<bool>().unwrap(), [true, false]);
        is_refused(above(1e20.into()), "map_into");
        is_refused(above(f64::NAN.into()), "map_into");
        assert!(above(0.5.into()).unwrap_err().to_string().contains("not an integer"));
    });
}
