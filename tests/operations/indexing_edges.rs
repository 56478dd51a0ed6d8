//! Edge cases of indexing: repeated indices, NaN, integers, errors, views.

use claystone::ops::ScatterReduce;
use claystone::{DType, Device, Error, Result, Tensor};

use crate::common::{each_device, f64s};

fn index(values: &[i64], device: Device) -> Tensor {
    Tensor::from_slice(values, values.len(), device).unwrap()
}

fn values(t: &Tensor) -> Vec<f64> {
    f64s(t).into_iter().collect()
}

#[test]
fn last_write_to_an_equal_index_wins() {
    each_device(|device| {
        let x = Tensor::zeros(&[4], device).unwrap();
        let (i, source) = (index(&[1, 1, 3, 1], device), Tensor::arange(1, 5, 1, device).unwrap());
        for t in [
            x.scatter(0, &i, &source).unwrap(),
            x.index_copy(0, &i, &source).unwrap(),
            x.index_put(&[Some(&i)], &source, false).unwrap(),
            x.put(&i, &source, false).unwrap(),
        ] {
            assert_eq!(values(&t), [0.0, 4.0, 0.0, 3.0]);
        }
    });
}

#[test]
fn integer_means_round_down() {
    each_device(|device| {
        for dtype in [DType::I64, DType::I32] {
            let x = Tensor::from_slice(&[3i64, -4], 2, device).unwrap().to_dtype(dtype).unwrap();
            let source = Tensor::from_slice(&[2i64, -3], 2, device).unwrap().to_dtype(dtype).unwrap();
            let mean = |include| {
                let t = x.scatter_reduce(0, &index(&[0, 1], device), &source, ScatterReduce::Mean, include).unwrap();
                assert_eq!(t.dtype(), dtype);
                values(&t)
            };
            assert_eq!((mean(true), mean(false)), (vec![2.0, -4.0], vec![2.0, -3.0]));
        }
    });
}

#[test]
fn extremes_handle_integer_limits_and_nan() {
    each_device(|device| {
        let i = index(&[0, 0], device);
        for (dtype, low, high) in [
            (DType::I64, i64::MIN, i64::MAX),
            (DType::I32, i32::MIN.into(), i32::MAX.into()),
            (DType::U32, 0, u32::MAX.into()),
            (DType::U8, 0, u8::MAX.into()),
            (DType::I16, i16::MIN.into(), i16::MAX.into()),
            (DType::I8, i8::MIN.into(), i8::MAX.into()),
        ] {
            let x = Tensor::full(&[2], 1, (dtype, device)).unwrap();
            let ends = Tensor::from_slice(&[low, high], 2, Device::Cpu).unwrap().to_dtype(dtype).unwrap();
            let ends = ends.to_device(device).unwrap();
            for (part, reduce) in [(0, ScatterReduce::Amax), (1, ScatterReduce::Amin)] {
                let one = ends.narrow(0, part, 1).unwrap().expand(2).unwrap();
                let got = x.scatter_reduce(0, &i, &one, reduce, false).unwrap();
                let got = got.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap();
                assert_eq!(got, [[low, high][part], 1], "{dtype}");
            }
        }
        let x = Tensor::ones(&[1], device).unwrap();
        let source = Tensor::from_slice(&[f32::NAN, 3.0], 2, device).unwrap();
        for reduce in [ScatterReduce::Amax, ScatterReduce::Amin, ScatterReduce::Sum, ScatterReduce::Prod] {
            assert!(x.scatter_reduce(0, &i, &source, reduce, true).unwrap().item::<f32>().unwrap().is_nan());
        }
    });
}

#[test]
fn errors_name_the_method() {
    each_device(|device| {
        let x = Tensor::zeros(&[3, 4], device).unwrap();
        let bad = index(&[0, 4], device);
        let wide = bad.reshape([1, 2]).unwrap();
        let two = Tensor::ones(&[1, 2], device).unwrap();
        // Makes one call at a time, because the device reports only the first of several errors.
        type Call<'a> = &'a dyn Fn() -> Result<Tensor>;
        let calls: [(&str, Call); 8] = [
            ("index_select", &|| x.index_select(1, &bad)),
            ("gather", &|| x.gather(1, &wide)),
            ("scatter_add", &|| x.scatter_add(1, &wide, &two)),
            ("scatter_value", &|| x.scatter_value(1, &wide, 1)),
            ("index_fill", &|| x.index_fill(1, &bad, 1)),
            ("embedding", &|| x.t()?.embedding(&bad)),
            ("index", &|| x.index(&[Some(&index(&[0, -1], device)), Some(&bad)])),
            ("index_put", &|| x.index_put(&[None, Some(&bad)], &two, true)),
        ];
        for (name, call) in calls {
            let error = call().and_then(|t| t.to_vec::<f32>()).unwrap_err();
            assert!(matches!(error, Error::IndexOutOfRange { op, index: 4, size: 4 } if op == name), "{name}: {error}");
        }
        let low = index(&[-5], device);
        let error = x.index(&[None, Some(&low)]).and_then(|t| t.to_vec::<f32>()).unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { op: "index", index: -5, size: 4 }), "{error}");
        let none = Tensor::zeros(&[0, 3], device).unwrap();
        let error = none.index(&[Some(&low), Some(&low)]).and_then(|t| t.to_vec::<f32>()).unwrap_err();
        assert!(matches!(error, Error::IndexOutOfRange { op: "index", index: -5, size: 0 }), "{error}");
    });
}

#[test]
fn padding_rows_get_no_gradient() {
    each_device(|device| {
        let table = Tensor::ones(&[3, 2], device).unwrap().requires_grad_(true).unwrap();
        for padding in [1, -2] {
            table.zero_grad();
            let rows = table.embedding_with(&index(&[1, 0, 1, 2, 2], device), padding).unwrap();
            rows.sum((), false).unwrap().backward().unwrap();
            assert_eq!(values(&table.grad().unwrap()), [1.0, 1.0, 0.0, 0.0, 2.0, 2.0]);
        }
        assert!(matches!(table.embedding_with(&index(&[0], device), 3), Err(Error::IndexOutOfRange { .. })));
    });
}

#[test]
fn masked_scatter_supports_scalars() {
    each_device(|device| {
        let (five, seven) = (Tensor::full((), 5, device).unwrap(), Tensor::full(2, 7, device).unwrap());
        let yes = Tensor::full((), 1, (DType::Bool, device)).unwrap();
        let no = yes.logical_not().unwrap();
        let x = five.shallow_clone().requires_grad_(true).unwrap();
        let y = x.masked_scatter(&yes, &seven).unwrap();
        assert_eq!((y.rank(), values(&y)), (0, vec![7.0]));
        y.backward().unwrap();
        assert_eq!(values(&x.grad().unwrap()), [0.0]);
        assert_eq!(values(&five.masked_scatter(&no, &seven).unwrap()), [5.0]);
        // The mask and the source are both broadcast.
        let mask = Tensor::from_slice(&[true, false, true], 3, device).unwrap();
        assert_eq!(values(&five.masked_scatter(&mask, &seven).unwrap()), [7.0, 5.0, 7.0]);
        five.masked_scatter_(&yes, &seven).unwrap();
        assert_eq!(values(&five), [7.0]);
        assert!(five.masked_scatter_(&mask, &seven).is_err());
    });
}

#[test]
fn index_add_factors_of_integers_must_be_integers() {
    each_device(|device| {
        let x = Tensor::zeros(2, (DType::U8, device)).unwrap();
        let (i, source) = (index(&[1, 1], device), Tensor::full(2, 100, (DType::U8, device)).unwrap());
        let y = x.index_add_alpha(0, &i, &source, 2.0).unwrap();
        assert_eq!((y.dtype(), values(&y)), (DType::U8, vec![0.0, 144.0]));
        assert!(matches!(x.index_add_alpha(0, &i, &source, 0.5), Err(Error::Invalid { .. })));
        assert!(matches!(x.index_add_alpha_(0, &i, &source, 0.5), Err(Error::Invalid { .. })));
    });
}

#[test]
fn empty_expanded_views_can_be_written() {
    each_device(|device| {
        let none = Tensor::zeros([1, 0], device).unwrap().expand([3, 0]).unwrap();
        none.fill_(1.0).unwrap().add_scalar_(2).unwrap();
        assert_eq!(none.index_fill_(0, &index(&[0], device), 1).unwrap().numel(), 0);
    });
}

#[test]
fn writes_work_into_views_and_from_the_same_tensor() {
    each_device(|device| {
        let base = Tensor::arange(0, 12, 1, device).unwrap().reshape([3, 4]).unwrap();
        let view = base.t().unwrap().flip(0).unwrap();
        view.index_put_(
            &[Some(&index(&[0, 3], device)), Some(&index(&[1, -1], device))],
            &view.i((0, 0)).unwrap(),
            false,
        )
        .unwrap();
        assert_eq!(values(&base), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 3.0, 3.0, 9.0, 10.0, 11.0]);
        base.put_(&index(&[0, -1], device), &index(&[7, 8], device).to_dtype(DType::F32).unwrap(), false).unwrap();
        base.t().unwrap().put_(&index(&[1], device), &Tensor::ones(&[1], device).unwrap(), true).unwrap();
        assert_eq!(values(&base), [7.0, 1.0, 2.0, 3.0, 5.0, 5.0, 6.0, 3.0, 3.0, 9.0, 10.0, 8.0]);
        let expanded = Tensor::zeros(&[1, 3], device).unwrap().expand([2, 3]).unwrap();
        let i = index(&[0], device);
        assert!(matches!(expanded.index_fill_(1, &i, 1), Err(Error::Invalid { op: "index_fill_", .. })));
        assert!(matches!(base.index(&[]), Err(Error::Invalid { op: "index", .. })));
        assert!(matches!(base.index(&[Some(&i), None, None]), Err(Error::Invalid { .. })));
    });
}
