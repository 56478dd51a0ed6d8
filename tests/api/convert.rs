//! Conversions from and to slices, vectors and ndarray arrays, and copies between devices.

use claystone::{DType, Device, Element, Error, Result, Tensor, autograd::gradcheck};
use half::{bf16, f16};
use ndarray::{Array1, Array2, Axis, ShapeBuilder, array, s};

use crate::common::{each_device, iota, vec};

#[test]
fn creation_of_constants_and_sequences() {
    each_device(|device| {
        assert_eq!(vec(&Tensor::zeros([2, 2], device).unwrap()), [0.0; 4]);
        assert_eq!(vec(&Tensor::ones([3], device).unwrap()), [1.0; 3]);
        assert_eq!(vec(&Tensor::full((), -2.5, device).unwrap()), [-2.5]);
        assert_eq!(vec(&Tensor::eye(3, device).unwrap()), [1., 0., 0., 0., 1., 0., 0., 0., 1.]);
        assert_eq!(vec(&Tensor::arange(1.0, 2.0, 0.25, device).unwrap()), [1.0, 1.25, 1.5, 1.75]);
        assert_eq!(vec(&Tensor::arange(5, 0, -2, device).unwrap()), [5.0, 3.0, 1.0]);
        assert_eq!(Tensor::arange(3, 3, 1, device).unwrap().numel(), 0);
        assert_eq!(vec(&Tensor::linspace(0.0, 1.0, 5, device).unwrap()), [0.0, 0.25, 0.5, 0.75, 1.0]);
        assert_eq!(vec(&Tensor::linspace(3.0, 4.0, 1, device).unwrap()), [3.0]);
        assert_eq!(Tensor::linspace(3.0, 4.0, 0, device).unwrap().numel(), 0);
        let huge = Tensor::arange(i64::MAX - 2, i64::MAX, 1, (DType::I64, device)).unwrap();
        assert_eq!(huge.to_vec::<i64>().unwrap(), [i64::MAX - 2, i64::MAX - 1]);
        let tenth = Tensor::linspace(-0.1, 0.1, 7, (DType::F64, device));
        if let Ok(t) = tenth {
            assert_eq!((t.to_vec::<f64>().unwrap()[0], t.to_vec::<f64>().unwrap()[6]), (-0.1, 0.1));
        }
        for dtype in DType::ALL {
            let one = Tensor::ones([2], (dtype, device)).unwrap();
            assert_eq!((one.dtype(), one.device()), (dtype, device));
            assert!(one.zeros_like().unwrap().to_string().contains(if dtype == DType::Bool { "False" } else { "0" }));
            assert_eq!(one.full_like(0).unwrap().to_string(), one.zeros_like().unwrap().to_string());
            assert_eq!(one.ones_like().unwrap().to_string(), one.to_string());
            assert_eq!(Tensor::empty([2, 0], (dtype, device)).unwrap().numel(), 0);
            assert_eq!(one.empty_like().unwrap().shape(), one.shape());
        }
        assert!(Tensor::empty([100], (DType::Bool, device)).unwrap().to_vec::<bool>().is_ok());
    });
}

#[test]
fn invalid_constants_and_sequences_are_errors() {
    let cpu = Device::Cpu;
    for error in [
        Tensor::arange(0, 5, 0, cpu),
        Tensor::arange(0, 5, -1, cpu),
        Tensor::arange(0.0, f64::INFINITY, 1.0, cpu),
        Tensor::arange(0.0, f64::NAN, 1.0, cpu),
        Tensor::arange(0.0, 1.0, 0.0, cpu),
        Tensor::full([2], 0.5, (DType::I64, cpu)),
        Tensor::from_slice(&[1f32; 5], [2, 3], cpu),
        Tensor::from_vec(vec![1f32; 5], [2, 3], cpu),
    ] {
        assert!(matches!(error, Err(Error::Invalid { .. })), "{error:?}");
    }
    assert!(matches!(Tensor::zeros([usize::MAX, 3], cpu), Err(Error::OutOfMemory { .. })));
    assert!(matches!(Tensor::arange(0, i64::MAX, 1, cpu), Err(Error::OutOfMemory { .. })));
    assert!(matches!(Tensor::zeros([2], Device::OpenCL(99)), Err(Error::NoDevice { .. })));
}

fn round_trip<T: Element>(values: &[T], device: Device) {
    let t = match Tensor::from_slice(values, [values.len()], device) {
        Err(Error::UnsupportedDType { .. }) => return,
        t => t.unwrap(),
    };
    assert_eq!((t.dtype(), t.device()), (T::DTYPE, device));
    assert_eq!(t.to_vec::<T>().unwrap(), values);
    assert_eq!(t.narrow(0, 1, 1).unwrap().item::<T>().unwrap(), values[1]);
    assert_eq!(Tensor::from_vec(values.to_vec(), values.len(), device).unwrap().to_vec::<T>().unwrap(), values);
    let array = Array1::from_vec(values.to_vec());
    assert_eq!(Tensor::from_ndarray(array.clone(), device).unwrap().to_ndarray::<T>().unwrap(), array.into_dyn());
    let flipped: Vec<T> = values.iter().rev().copied().collect();
    assert_eq!(t.flip(0).unwrap().to_vec::<T>().unwrap(), flipped);
}

#[test]
fn every_dtype_survives_a_round_trip() {
    each_device(|device| {
        round_trip(&[1.5f32, -0.0, f32::MAX, f32::INFINITY, f32::MIN_POSITIVE / 8.0], device);
        round_trip(&[1.5f64, -0.0, f64::MAX], device);
        round_trip(&[f16::ONE, f16::MAX, f16::MIN_POSITIVE_SUBNORMAL], device);
        round_trip(&[bf16::ONE, bf16::MAX, bf16::NEG_INFINITY], device);
        round_trip(&[i64::MIN, 0, i64::MAX], device);
        round_trip(&[i32::MIN, 0, i32::MAX], device);
        round_trip(&[0u32, 1, u32::MAX], device);
        round_trip(&[0u8, 7, 255], device);
        round_trip(&[i16::MIN, -1, i16::MAX], device);
        round_trip(&[i8::MIN, -1, i8::MAX], device);
        round_trip(&[true, false, true, true], device);
    });
}

#[test]
fn ndarrays_of_any_layout_can_be_converted() {
    each_device(|device| {
        let a = Array2::from_shape_fn((3, 4), |(i, j)| (i * 4 + j) as f32);
        let same = |t: Tensor, a: ndarray::ArrayView2<f32>| {
            assert_eq!(t.to_ndarray::<f32>().unwrap(), a.to_owned().into_dyn());
        };
        let take = |a: Array2<f32>| Tensor::from_ndarray(a, device).unwrap();
        same(take(a.clone()), a.view());
        same(take(a.clone().reversed_axes()), a.t());
        let fortran = Array2::from_shape_vec((4, 3).f(), (0..12).map(|i| i as f32).collect()).unwrap();
        same(take(fortran.clone()), fortran.view());
        same(take(a.clone().slice_move(s![1.., ..;-2])), a.slice(s![1.., ..;-2]));
        let mut inverted = a.clone();
        inverted.invert_axis(Axis(0));
        same(take(inverted.clone()), inverted.view());
        same(Tensor::from_ndarray_view(&a.slice(s![.., 1..;2]), device).unwrap(), a.slice(s![.., 1..;2]));
        same(Tensor::from_ndarray_view(&a.view(), device).unwrap(), a.view());
        assert_eq!(take(Array2::zeros((0, 3))).shape().dims(), [0, 3]);
        assert_eq!(Tensor::from_ndarray(ndarray::arr0(2.5f32), device).unwrap().item::<f32>().unwrap(), 2.5);
    });
    // `to_ndarray` returns arrays in standard (row-major) layout, even if the tensor was made from another layout.
    let t = Tensor::from_ndarray(array![[1i64, 2], [3, 4]].reversed_axes(), Device::Cpu).unwrap();
    assert!(t.to_ndarray::<i64>().unwrap().is_standard_layout());
}

#[test]
fn type_mismatches_name_both_types() {
    let t = iota(&[2], Device::Cpu);
    for error in [t.to_vec::<i64>().err(), t.to_ndarray::<i64>().err(), t.narrow(0, 0, 1).unwrap().item::<i64>().err()]
    {
        let message = error.unwrap().to_string();
        assert!(message.contains("f32") && message.contains("i64"), "{message}");
    }
    let message = t.item::<f32>().unwrap_err().to_string();
    assert!(message.contains("[2]") && message.starts_with("item"), "{message}");
}

#[test]
fn copies_between_devices() {
    each_device(|from| {
        each_device(|to| {
            let a = iota(&[5, 7], from);
            let b = a.t().unwrap().narrow(0, 2, 3).unwrap().to_device(to).unwrap();
            assert_eq!((b.device(), b.shape().dims()), (to, &[3, 5][..]));
            assert_eq!(vec(&b), vec(&a.t().unwrap().narrow(0, 2, 3).unwrap()));
            assert_eq!(a.to_device(to).unwrap().shares_storage(&a), from == to);
            let narrow = a.to(DType::U8, to).unwrap();
            assert_eq!((narrow.dtype(), narrow.device()), (DType::U8, to));
            assert_eq!(narrow.to_vec::<u8>().unwrap(), (0..35).collect::<Vec<u8>>());
            assert_eq!(narrow.to(DType::I32, from).unwrap().to_vec::<i32>().unwrap(), (0..35).collect::<Vec<i32>>());
            assert_eq!(Tensor::zeros([0, 2], from).unwrap().to_device(to).unwrap().shape().dims(), [0, 2]);
            let leaf = iota(&[3], from).requires_grad_(true).unwrap();
            let there = leaf.to_device(to).unwrap();
            there.mul(&there).unwrap().sum((), false).unwrap().backward().unwrap();
            let grad = leaf.grad().unwrap();
            assert_eq!((grad.device(), vec(&grad)), (from, vec![0.0, 2.0, 4.0]));
        });
    });
    assert!(matches!(iota(&[2], Device::Cpu).to_device(Device::OpenCL(99)), Err(Error::NoDevice { .. })));
}

#[test]
fn cat_and_stack() -> Result<()> {
    let (a, b) = (iota(&[2, 3], Device::Cpu), iota(&[2, 1], Device::Cpu));
    each_device(|device| {
        let (a, b) = (a.to_device(device).unwrap(), b.to_device(device).unwrap());
        let c = Tensor::cat(&[&a, &b, &a.flip(1).unwrap()], -1).unwrap();
        assert_eq!(vec(&c), [0., 1., 2., 0., 2., 1., 0., 3., 4., 5., 1., 5., 4., 3.]);
        let s = Tensor::stack(&[a.shallow_clone(), a.flip(0).unwrap()], 1).unwrap();
        assert_eq!(s.shape().dims(), [2, 2, 3]);
        assert_eq!(vec(&s), [0., 1., 2., 3., 4., 5., 3., 4., 5., 0., 1., 2.]);
        assert_eq!(Tensor::stack(&[&a, &a], -1).unwrap().shape().dims(), [2, 3, 2]);
        assert_eq!(Tensor::cat(&[&a, &Tensor::zeros([2, 0], device).unwrap()], 1).unwrap().shape().dims(), [2, 3]);
    });
    assert!(matches!(Tensor::cat(&[&a, &b], 0), Err(Error::ShapeMismatch { op: "cat", .. })));
    assert!(matches!(Tensor::stack(&[&a, &b], 0), Err(Error::ShapeMismatch { op: "stack", .. })));
    assert!(matches!(Tensor::cat(&[&a, &b], 2), Err(Error::DimOutOfRange { .. })));
    assert_eq!(Tensor::cat(&[&a, &a.to_dtype(DType::I64)?], 0)?.dtype(), a.dtype());
    assert!(matches!(Tensor::cat::<Tensor>(&[], 0), Err(Error::Invalid { .. })));
    let f64s = |t: &Tensor| t.to_dtype(DType::F64);
    let weights = f64s(&iota(&[2, 4], Device::Cpu))?;
    gradcheck(|x| Tensor::cat(x, 1)?.mul(&weights)?.sum((), false), &[f64s(&a)?, f64s(&b)?], 1e-6)?;
    let weights = f64s(&iota(&[2, 2, 3], Device::Cpu))?;
    gradcheck(|x| Tensor::stack(x, 1)?.mul(&weights)?.sum((), false), &[f64s(&a)?, f64s(&a)?], 1e-6)
}

/// The tensors are large enough for the CPU's blocked copy and for several work-groups; sizes are at block edges.
#[test]
fn transposed_copies_match_index_arithmetic() {
    each_device(|device| {
        for shape in [[31usize, 4, 67], [65, 33, 32], [2, 129, 63], [5, 1, 1000]] {
            let n: usize = shape.iter().product();
            for dtype in [DType::F32, DType::U8, DType::BF16, DType::I64] {
                let values: Vec<i64> = (0..n as i64).map(|i| i * 7 % 251).collect();
                let padded = Tensor::zeros([n + 3], (dtype, device)).unwrap();
                let values_t = Tensor::from_slice(&values, n, device).unwrap();
                padded.narrow(0, 3, n).unwrap().copy_(&values_t).unwrap();
                let whole = padded.narrow(0, 3, n).unwrap().view(shape).unwrap();
                let reference = ndarray::ArrayD::from_shape_vec(&shape[..], values).unwrap();
                for order in [[0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
                    let axes = order.map(|d: usize| d as isize);
                    let copy = whole.permute(&axes).unwrap().flip(0).unwrap().contiguous().unwrap();
                    let got = copy.to_dtype(DType::I64).unwrap().to_vec::<i64>().unwrap();
                    let mut want = reference.view().permuted_axes(&order[..]);
                    want.invert_axis(ndarray::Axis(0));
                    assert_eq!(
                        got,
                        want.iter().copied().collect::<Vec<_>>(),
                        "{dtype} {shape:?} {order:?} on {device}"
                    );
                }
            }
        }
    });
}

/// The tensors are large enough that a transfer is split into pieces or between all threads. Also tests transfers after pending
/// work, and from an offset.
#[test]
fn large_transfers_are_complete() {
    each_device(|device| {
        let n = (4 << 20) / size_of::<f32>() + 5;
        let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
        let t = Tensor::from_slice(&values, [n], device).unwrap();
        assert!(t.to_vec::<f32>().unwrap() == values);
        assert!(t.narrow(0, 3, n - 3).unwrap().to_vec::<f32>().unwrap() == values[3..]);
        let twice = t.add(&t).unwrap();
        assert!(twice.to_vec::<f32>().unwrap().iter().zip(&values).all(|(got, x)| *got == 2.0 * x));
        assert!(twice.try_clone().unwrap().to_vec::<f32>().unwrap()[n - 1] == 2.0 * values[n - 1]);
    });
}
