//! Gather, scatter-add and related operations, compared with plain loops.

use claystone::{DType, Device, Element, Error, Tensor, autograd::gradcheck};

use crate::common::{each_device, iota, vec};

fn index(values: &[i64], shape: &[usize], device: Device) -> Tensor {
    Tensor::from_slice(values, shape, device).unwrap()
}

/// Returns the multi-index of each element of `shape`, outermost dim first.
fn positions(shape: &[usize]) -> Vec<Vec<usize>> {
    let n: usize = shape.iter().product();
    let mut all = vec![vec![0; shape.len()]; n];
    for (i, p) in all.iter_mut().enumerate() {
        let mut rest = i;
        for (k, &d) in p.iter_mut().zip(shape).rev() {
            *k = rest % d;
            rest /= d;
        }
    }
    all
}

fn at(shape: &[usize], p: &[usize]) -> usize {
    p.iter().zip(shape).fold(0, |sum, (&i, &d)| sum * d + i)
}

/// Computes gather by its definition, and returns the values in row-major order.
fn gathered(x: &Tensor, d: usize, index: &Tensor) -> Vec<f32> {
    let (values, indices) = (vec(x), index.to_vec::<i64>().unwrap());
    let one = |(mut p, i): (Vec<usize>, &i64)| {
        p[d] = *i as usize;
        values[at(x.shape().dims(), &p)]
    };
    positions(index.shape().dims()).into_iter().zip(&indices).map(one).collect()
}

#[test]
fn index_select_supports_any_dim_and_strides() {
    each_device(|device| {
        let base = iota(&[4, 5, 6], device);
        for x in [
            base.shallow_clone(),
            base.permute(&[2, 0, 1]).unwrap(),
            base.narrow(1, 1, 3).unwrap(),
            base.narrow(0, 2, 1).unwrap().expand([4, 5, 6]).unwrap(),
        ] {
            for d in 0..3 {
                let size = x.shape().dims()[d] as i64;
                let picks = [size - 1, 0, 0, size / 2, size - 1, 1, 0];
                let i = index(&picks, &[7], device);
                let got = x.index_select(d as isize, &i).unwrap();
                let mut wide = [1; 3];
                wide[d] = 7;
                let mut shape = x.shape().dims().to_vec();
                shape[d] = 7;
                assert_eq!(got.shape().dims(), shape);
                let full = i.reshape(wide).unwrap().expand(&shape[..]).unwrap();
                assert_eq!(vec(&got), gathered(&x, d, &full));
                assert_eq!(vec(&x.gather(d as isize, &full).unwrap()), vec(&got));
            }
        }
    });
}

#[test]
fn gather_supports_indices_of_another_shape() {
    each_device(|device| {
        let x = iota(&[5, 7], device).t().unwrap();
        let values: Vec<i64> = (0..12).map(|i| i * 5 % 7).collect();
        let i = index(&values, &[4, 3], device);
        assert_eq!(vec(&x.gather(0, &i).unwrap()), gathered(&x, 0, &i));
        let i = index(&values, &[3, 4], device).t().unwrap();
        assert_eq!(vec(&x.gather(-2, &i).unwrap()), gathered(&x, 0, &i));
        let big: Vec<i64> = (0..50_000).map(|i| i * 31 % 1000).collect();
        let i = index(&big, &[50, 1000], device);
        let x = iota(&[50, 1000], device);
        assert_eq!(vec(&x.gather(1, &i).unwrap()), gathered(&x, 1, &i));
    });
}

#[test]
fn gathers_support_every_dtype_of_elements_and_indices() {
    fn values<T: Element>(t: &Tensor) -> Vec<T> {
        t.to_vec::<T>().unwrap()
    }
    each_device(|device| {
        for dtype in DType::ALL {
            let x = iota(&[3, 4], device).to_dtype(dtype).unwrap();
            // Floats and other elements use different dtypes of indices, so that fewer kernels are built.
            let indices: &[DType] = if dtype.is_float() {
                &[DType::I64, DType::I16, DType::I8]
            } else {
                &[DType::I64, DType::I32, DType::U32, DType::U8]
            };
            for &of in indices {
                let i = index(&[2, 0, 2], &[3], device).to_dtype(of).unwrap();
                let got = x.index_select(0, &i).unwrap();
                assert_eq!(got.dtype(), dtype);
                let want: Vec<f64> = [8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11]
                    .map(|v| if dtype == DType::Bool { f64::from(u8::from(v != 0)) } else { f64::from(v) })
                    .to_vec();
                assert_eq!(values::<f64>(&got.to_dtype(DType::F64).unwrap()), want);
            }
        }
        let x = iota(&[3], device);
        for bad in [DType::F32, DType::Bool] {
            let i = index(&[1, 0], &[2], device).to_dtype(bad).unwrap();
            assert!(matches!(x.index_select(0, &i), Err(Error::UnsupportedDType { .. })));
        }
    });
}

#[test]
fn embedding_supports_empty_indices() {
    each_device(|device| {
        let table = iota(&[5, 3], device);
        let rows = table.embedding(&index(&[4, 0, 1, 1], &[2, 2], device)).unwrap();
        assert_eq!(rows.shape().dims(), [2, 2, 3]);
        assert_eq!(vec(&rows), [12., 13., 14., 0., 1., 2., 3., 4., 5., 3., 4., 5.]);
        assert_eq!(table.embedding(&index(&[2], &[], device)).unwrap().shape().dims(), [3]);
        let none = table.index_select(1, &index(&[], &[0], device)).unwrap();
        assert_eq!(none.shape().dims(), [5, 0]);
        let empty = Tensor::zeros([0, 3], device).unwrap();
        assert_eq!(empty.index_select(1, &index(&[2, 2], &[2], device)).unwrap().numel(), 0);
    });
}

#[test]
fn out_of_range_indices_are_errors_and_write_nothing() {
    each_device(|device| {
        let x = iota(&[3, 4], device);
        for bad in [4i64, -1, i64::MIN, i64::MAX] {
            let i = index(&[0, bad, 1], &[3], device);
            let error = x.index_select(1, &i).and_then(|t| t.to_vec::<f32>()).unwrap_err();
            assert!(matches!(error, Error::IndexOutOfRange { index, size: 4, .. } if index == bad), "{error}");
            let source = Tensor::ones([3, 3], device).unwrap();
            let error = x.index_add(1, &i, &source).and_then(|t| t.to_vec::<f32>()).unwrap_err();
            assert!(matches!(error, Error::IndexOutOfRange { index, size: 4, .. } if index == bad), "{error}");
            let error = i.one_hot(4).and_then(|t| t.to_vec::<i64>()).unwrap_err();
            assert!(matches!(error, Error::IndexOutOfRange { index, size: 4, .. } if index == bad), "{error}");
            assert_eq!(vec(&x), (0..12).map(|v| v as f32).collect::<Vec<_>>());
        }
    });
}

/// Computes scatter-add by its definition, and returns the values in row-major order.
fn scattered(x: &Tensor, d: usize, index: &Tensor, source: &Tensor) -> Vec<f32> {
    let (mut values, indices) = (vec(x), index.to_vec::<i64>().unwrap());
    let from = vec(source);
    for (mut p, i) in positions(index.shape().dims()).into_iter().zip(&indices) {
        let v = from[at(source.shape().dims(), &p)];
        p[d] = *i as usize;
        values[at(x.shape().dims(), &p)] += v;
    }
    values
}

#[test]
fn scatter_add_accumulates_equal_indices() {
    each_device(|device| {
        for (rows, columns, many) in [(3, 5, 9), (1, 1, 300), (40, 70, 5), (7, 257, 64), (2, 16, 1)] {
            let x = iota(&[rows, columns], device);
            let source = iota(&[rows, many + 1], device);
            let values: Vec<i64> = (0..rows * many).map(|i| (i * 31 % columns) as i64).collect();
            let i = index(&values, &[rows, many], device);
            let got = x.scatter_add(1, &i, &source).unwrap();
            assert_eq!(vec(&got), scattered(&x, 1, &i, &source));
            assert_eq!(vec(&got), vec(&x.scatter_add(1, &i, &source).unwrap()), "the same bits again");
            let transposed = x.t().unwrap().scatter_add(0, &i.t().unwrap(), &source.t().unwrap()).unwrap();
            assert_eq!(vec(&transposed.t().unwrap()), vec(&got));
        }
    });
}

/// Computes scatter-add by adding every element of `source` in row-major order.
fn added<T: Element + std::ops::AddAssign>(x: &Tensor, d: usize, index: &Tensor, source: &Tensor) -> Vec<T> {
    let (mut values, indices) =
        (x.to_vec::<T>().unwrap(), index.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap());
    let from = source.to_vec::<T>().unwrap();
    for (mut p, i) in positions(index.shape().dims()).into_iter().zip(&indices) {
        let v = from[at(source.shape().dims(), &p)];
        p[d] = *i as usize;
        values[at(x.shape().dims(), &p)] += v;
    }
    values
}

/// Returns indices below `size`, with many repetitions.
fn some_indices(shape: &[usize], size: usize, device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<i64> = (0..n).map(|i| (i * 7919 % 1009 * 31 % size) as i64).collect();
    index(&values, shape, device)
}

/// For shapes whose work is split between threads by rows, by columns, or not at all, elements are added in the same order.
#[test]
fn scatter_add_order_does_not_depend_on_the_partition() {
    let shapes: [(&[usize], &[usize]); 6] = [
        (&[300, 200], &[290, 190]),
        (&[3, 500, 50], &[3, 480, 47]),
        (&[50, 3, 300], &[50, 9, 300]),
        (&[7, 40000], &[7, 39999]),
        (&[90000], &[40001]),
        (&[1, 33000, 1], &[1, 33000, 1]),
    ];
    let fractions = |shape: &[usize]| {
        let n: usize = shape.iter().product();
        let values: Vec<f32> = (0..n).map(|i| (i * 131 % 1013) as f32 * 0.37 - 150.1).collect();
        Tensor::from_slice(&values, shape, Device::Cpu).unwrap()
    };
    for (shape, places) in shapes {
        for d in 0..shape.len() {
            let mut of = places.to_vec();
            of.iter_mut().zip(shape).enumerate().filter(|(i, _)| *i != d).for_each(|(_, (n, most))| *n = *most.min(n));
            let (x, source) = (fractions(shape), fractions(&of));
            let i = some_indices(&of, shape[d], Device::Cpu);
            let want = added::<f32>(&x, d, &i, &source);
            let dim = d as isize;
            assert_eq!(x.scatter_add(dim, &i, &source).unwrap().to_vec::<f32>().unwrap(), want, "{shape:?} {d}");
            let narrow = i.to_dtype(DType::I32).unwrap();
            assert_eq!(x.scatter_add(dim, &narrow, &source).unwrap().to_vec::<f32>().unwrap(), want);
            assert_eq!(vec(&x.gather(dim, &i).unwrap()), gathered(&x, d, &i));
            assert_eq!(vec(&x.gather(dim, &narrow).unwrap()), gathered(&x, d, &i));
            let back: Vec<isize> = (0..shape.len() as isize).rev().collect();
            let turned = |t: &Tensor| t.permute(&back).unwrap();
            let (far, flipped) = (shape.len() as isize - 1 - dim, turned(&x).contiguous().unwrap());
            let got = flipped.scatter_add(far, &turned(&i), &turned(&source)).unwrap();
            let (wide, deep) = (turned(&i).contiguous().unwrap(), turned(&source).contiguous().unwrap());
            let turned_want = added::<f32>(&flipped, far as usize, &wide, &deep);
            assert_eq!(got.to_vec::<f32>().unwrap(), turned_want);
            assert_eq!(vec(&turned(&x).gather(far, &turned(&i)).unwrap()), gathered(&flipped, far as usize, &wide));
            // Adds into a view with gaps. The elements around the view must not change.
            let mut larger = shape.to_vec();
            larger.iter_mut().for_each(|n| *n += 3);
            let base = fractions(&larger);
            let mut view = base.shallow_clone();
            for (k, &n) in shape.iter().enumerate() {
                view = view.narrow(k as isize, 2, n).unwrap();
            }
            let before = view.contiguous().unwrap().try_clone().unwrap(); // `contiguous` returns a vector itself, so it is cloned
            let outside = base.try_clone().unwrap();
            view.scatter_add_(dim, &i, &source).unwrap();
            assert_eq!(view.contiguous().unwrap().to_vec::<f32>().unwrap(), added::<f32>(&before, d, &i, &source));
            view.copy_(&before).unwrap();
            assert_eq!(vec(&base), vec(&outside));
        }
    }
}

#[test]
fn index_add_is_ordered_and_index_copy_keeps_the_last() {
    each_device(|device| {
        for (rows, columns, many) in [(1, 40000, 1), (30, 100, 500), (500, 17, 3000), (40000, 1, 40000)] {
            for dtype in [DType::F32, DType::I64, DType::I8, DType::BF16] {
                let values: Vec<i64> = (0..rows * columns).map(|i| (i % 3) as i64).collect();
                let x = index(&values, &[rows, columns], device).to_dtype(dtype).unwrap();
                let values: Vec<i64> = (0..many * columns).map(|i| (i % 4 / 3) as i64).collect();
                let source = index(&values, &[many, columns], device).to_dtype(dtype).unwrap();
                let i = some_indices(&[many], rows, device);
                let all = i.reshape([many, 1]).unwrap().expand([many, columns]).unwrap();
                let wide = |t: &Tensor| t.to_dtype(DType::I64).unwrap();
                let want = added::<i64>(&wide(&x), 0, &all, &wide(&source));
                let want: Vec<i64> = match dtype {
                    DType::I8 => want.into_iter().map(|v| i64::from(v as i8)).collect(),
                    _ => want,
                };
                assert_eq!(wide(&x.index_add(0, &i, &source).unwrap()).to_vec::<i64>().unwrap(), want);
                let (turned, from) = (x.t().unwrap().contiguous().unwrap(), source.t().unwrap());
                let got = turned.index_add(1, &i, &from).unwrap().t().unwrap().contiguous().unwrap();
                assert_eq!(wide(&got).to_vec::<i64>().unwrap(), want);
                let (mut last, picks) = (wide(&x).to_vec::<i64>().unwrap(), i.to_vec::<i64>().unwrap());
                for (k, &row) in picks.iter().enumerate() {
                    let to = &mut last[row as usize * columns..][..columns];
                    to.copy_from_slice(&values[k * columns..][..columns]);
                }
                assert_eq!(wide(&x.index_copy(0, &i, &source).unwrap()).to_vec::<i64>().unwrap(), last);
                let greatest = x.scatter_reduce(0, &all, &source, claystone::ops::ScatterReduce::Amax, true).unwrap();
                let mut want = wide(&x).to_vec::<i64>().unwrap();
                for (k, &row) in picks.iter().enumerate() {
                    for c in 0..columns {
                        let to = &mut want[row as usize * columns + c];
                        *to = values[k * columns + c].max(*to);
                    }
                }
                assert_eq!(wide(&greatest).to_vec::<i64>().unwrap(), want);
            }
        }
    });
}

#[test]
fn first_out_of_range_index_is_reported_and_nothing_is_written() {
    let (rows, columns) = (400, 300);
    let x = iota(&[rows, columns], Device::Cpu);
    for (d, size) in [(0, rows), (1, columns)] {
        for bad in [size as i64, -1, i64::MIN, i64::MAX] {
            let mut values = some_indices(&[rows * columns], size, Device::Cpu).to_vec::<i64>().unwrap();
            (values[70_001], values[110_000]) = (bad, -7);
            let i = index(&values, &[rows, columns], Device::Cpu);
            let is_named = |error: Error| {
                assert!(
                    matches!(error, Error::IndexOutOfRange { index, size: n, .. } if (index, n) == (bad, size)),
                    "{error}"
                );
            };
            is_named(x.gather(d, &i).unwrap_err());
            is_named(x.scatter_add_(d, &i, &x.try_clone().unwrap()).unwrap_err());
            is_named(x.scatter_(d, &i, &x.try_clone().unwrap()).unwrap_err());
            assert_eq!(vec(&x), vec(&iota(&[rows, columns], Device::Cpu)));
        }
        let fits = index(&[-1, -(size as i64), size as i64 - 1], &[3], Device::Cpu);
        let filled = x.index_fill(d, &fits, -5).unwrap();
        for k in [size - 1, 0] {
            assert!(vec(&filled.select(d, k as isize).unwrap()).iter().all(|&v| v == -5.0));
        }
        assert!(x.index_fill(d, &index(&[-(size as i64) - 1], &[1], Device::Cpu), 0).is_err());
    }
}

#[test]
fn in_place_index_operations_work_through_views() {
    each_device(|device| {
        let base = iota(&[4, 6], device);
        let view = base.t().unwrap().narrow(0, 1, 4).unwrap();
        let i = index(&[3, 0, 3], &[3], device);
        let source = Tensor::ones([3, 4], device).unwrap();
        let want = view.index_add(0, &i, &source).unwrap();
        view.index_add_(0, &i, &source).unwrap();
        assert_eq!(vec(&view), vec(&want));
        assert_eq!(vec(&base)[..6], [0.0, 2.0, 2.0, 3.0, 6.0, 5.0]);
        // The tensor is also the source, so it must be copied before it changes.
        let x = iota(&[3], device);
        x.index_add_(0, &index(&[0, 0, 1], &[3], device), &x).unwrap();
        assert_eq!(vec(&x), [1.0, 3.0, 2.0]);
        let expanded = iota(&[1, 3], device).expand([2, 3]).unwrap();
        let error = expanded.scatter_add_(1, &index(&[0, 1], &[2, 1], device), &Tensor::ones([2, 1], device).unwrap());
        assert!(matches!(error, Err(Error::Invalid { .. })));
    });
}

#[test]
fn sums_in_other_dtypes_round_once() {
    each_device(|device| {
        let ones = index(&[0; 3000], &[3000], device);
        for dtype in [DType::F16, DType::BF16, DType::F64, DType::I64, DType::I32, DType::U32] {
            let x = Tensor::zeros([2], (dtype, device)).unwrap();
            let source = Tensor::ones([3000], (dtype, device)).unwrap();
            let got = x.index_add(0, &ones, &source).unwrap().to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap();
            assert!((got[0] - 3000.0).abs() <= 8.0 && got[1] == 0.0, "{dtype}: {got:?}");
        }
    });
}

#[test]
fn gradients() {
    each_device(|device| {
        let x = Tensor::from_slice(&(0..12).map(|i| f64::from(i * 5 % 12) / 7.0).collect::<Vec<_>>(), [3, 4], device)
            .unwrap();
        let i = index(&[1, 1, 3, 0, 1], &[5], device);
        let square = |t: Tensor| t.mul(&t)?.sum((), false);
        gradcheck(|x| square(x[0].index_select(1, &i)?), &[x.shallow_clone()], 1e-6).unwrap();
        gradcheck(|x| square(x[0].t()?.index_select(0, &i)?), &[x.shallow_clone()], 1e-6).unwrap();
        let g = index(&[2, 0, 1, 2, 2, 2], &[2, 3], device);
        gradcheck(|x| square(x[0].gather(1, &g)?), &[x.shallow_clone()], 1e-6).unwrap();
        gradcheck(|x| square(x[0].gather(0, &g)?), &[x.shallow_clone()], 1e-6).unwrap();
        let words = index(&[2, 0, 2, 1], &[2, 2], device);
        gradcheck(|x| square(x[0].embedding(&words)?), &[x.shallow_clone()], 1e-6).unwrap();
        let source = Tensor::from_slice(&[0.5f64, 1.5, -1.0, 2.0, 0.25, 3.0, 1.0, 1.0], [2, 4], device).unwrap();
        let both = [x, source];
        gradcheck(|x| square(x[0].scatter_add(1, &g, &x[1])?), &both, 1e-6).unwrap();
        let rows = index(&[2, 2], &[2], device);
        gradcheck(|x| square(x[0].index_add(0, &rows, &x[1])?), &both, 1e-6).unwrap();
    });
}

#[test]
fn gathers_have_gradients_in_16_bit_floats() {
    each_device(|device| {
        for dtype in [DType::F16, DType::BF16] {
            let x = Tensor::zeros([3, 2], (dtype, device)).unwrap().requires_grad_(true).unwrap();
            let rows = x.embedding(&index(&[1, 1, 2], &[3], device)).unwrap();
            rows.sum((), false).unwrap().backward().unwrap();
            let grad = x.grad().unwrap();
            assert_eq!(grad.dtype(), dtype);
            assert_eq!(vec(&grad.to_dtype(DType::F32).unwrap()), [0., 0., 2., 2., 1., 1.]);
        }
    });
}

#[test]
fn one_hot_matches_its_definition() {
    each_device(|device| {
        let t = index(&[1, 0, 2, 2, 1, 1], &[2, 3], device).t().unwrap();
        let hot = t.one_hot(3).unwrap();
        assert_eq!(hot.shape().dims(), [3, 2, 3]);
        assert_eq!(hot.to_vec::<i64>().unwrap(), [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 1, 0]);
        assert_eq!(hot.argmax(-1, false).unwrap().to_vec::<i64>().unwrap(), t.to_vec::<i64>().unwrap());
        assert_eq!(index(&[], &[0], device).one_hot(0).unwrap().numel(), 0);
        assert!(matches!(index(&[0], &[1], device).one_hot(0), Err(Error::Invalid { .. })));
    });
}

#[test]
fn mismatched_shapes_are_errors() {
    let x = iota(&[3, 4], Device::Cpu);
    let i = index(&[0, 1], &[2], Device::Cpu);
    assert!(matches!(x.gather(1, &i), Err(Error::ShapeMismatch { .. })));
    assert!(matches!(x.index_select(2, &i), Err(Error::DimOutOfRange { .. })));
    assert!(matches!(x.index_select(0, &i.reshape([2, 1]).unwrap()), Err(Error::Invalid { .. })));
    assert!(matches!(x.index_add(0, &i, &x), Err(Error::ShapeMismatch { .. })));
    let two = index(&[0, 1], &[2, 1], Device::Cpu);
    assert!(matches!(x.scatter_add(1, &two, &iota(&[1, 1], Device::Cpu)), Err(Error::ShapeMismatch { .. })));
    let doubles = iota(&[2, 4], Device::Cpu).to_dtype(DType::F64).unwrap();
    assert!(matches!(x.index_add(0, &i, &doubles), Err(Error::DTypeMismatch { .. })));
}

#[test]
fn indices_into_an_empty_dim_are_errors() {
    each_device(|d| {
        let table = Tensor::zeros(&[0, 3], d).unwrap();
        let index = Tensor::from_slice(&[7i64, 1], 2, d).unwrap();
        let out_of_range = |r: claystone::Result<Tensor>| {
            assert!(matches!(r, Err(claystone::Error::IndexOutOfRange { index: 7, size: 0, .. })), "on {d}");
        };
        out_of_range(table.index_select(0, &index));
        out_of_range(table.index_add(0, &index, &Tensor::ones(&[2, 3], d).unwrap()));
    });
}
