//! Views: their elements, storage, gradients and errors.

use claystone::{DType, Device, Error, Index, PadMode, Result, Tensor, autograd::gradcheck};
use ndarray::Dimension as _;

use crate::common::{each_device, iota, vec};

/// A view of a `[2, 3, 4]` tensor with the elements 0, 1, 2, ... in row-major order, and the view's shape as text.
type View = (&'static str, fn(&Tensor) -> Result<Tensor>);

const VIEWS: &[View] = &[
    ("[24]", |t| t.reshape(-1)),
    ("[4, 6]", |t| t.view([4, 6])),
    ("[6, 2, 2]", |t| t.unflatten(2, [2, -1])?.flatten(0, 1)),
    ("[4, 3, 2]", |t| t.transpose(0, -1)),
    ("[3, 4, 2]", |t| t.permute(&[1, 2, 0])),
    ("[3, 4, 2]", |t| t.movedim(0, -1)),
    ("[2, 2, 4]", |t| t.narrow(1, 1, 2)),
    ("[2, 3, 2]", |t| t.slice(-1, 1, None, 2)),
    ("[2, 3, 2]", |t| t.slice(2, -1, 0, -2)),
    ("[2, 0, 4]", |t| t.slice(1, 2, 1, 1)),
    ("[3, 4]", |t| t.select(0, -1)),
    ("[2, 1, 3, 4]", |t| t.unsqueeze(1)),
    ("[2, 3, 4, 1]", |t| t.unsqueeze(-1)),
    ("[2, 4]", |t| t.narrow(1, 2, 1)?.squeeze(1)),
    ("[4]", |t| t.narrow(0, 1, 1)?.narrow(1, 0, 1)?.squeeze_all()),
    ("[2, 3, 4]", |t| t.flip(1)),
    ("[2, 3]", |t| t.diagonal(1, 1, 2)),
    ("[3, 2]", |t| t.diagonal(0, 0, 2)),
    ("[5, 2, 3, 4]", |t| t.expand([5, -1, 3, 4])),
    ("[2, 3, 4]", |t| t.narrow(2, 1, 1)?.broadcast_to([2, 3, 4])),
    ("[3]", |t| t.i((0, .., 2))),
    ("[2, 2]", |t| t.i((.., -1, 1..3))),
    ("[2, 3, 1, 1]", |t| t.i((Index::Ellipsis, Index::NewAxis, 3..))),
    ("[1, 4]", |t| t.i((1, ..=-3))),
    ("[2, 1, 3]", |t| t.i((.., 1..=1, ..-1))),
    ("[]", |t| t.i([1, 2, 3])),
    ("[2, 3, 2, 2]", |t| t.unfold(2, 2, 2)),
    ("[2, 2, 4, 2]", |t| t.unfold(1, 2, 1)),
    ("[2, 3, 1, 4]", |t| t.unfold(-1, 4, 9)),
    ("[2, 3, 2, 3]", |t| t.transpose(0, 2)?.unfold(0, 3, 1)?.transpose(0, 2)),
    ("[3, 2, 2]", |t| t.as_strided([3, 2, 2], &[4, 7, 1], 2)),
    ("[4, 3]", |t| t.narrow(0, 1, 1)?.as_strided([4, 3], &[-2, -1], 20)),
    ("[5, 4, 3]", |t| t.as_strided([5, 4, 3], &[2, 3, 0], None)),
];

#[test]
fn views_share_storage_and_agree_with_their_copies() {
    each_device(|device| {
        let t = iota(&[2, 3, 4], device);
        for (i, (shape, view)) in VIEWS.iter().enumerate() {
            let v = view(&t).unwrap();
            assert_eq!(v.shape().to_string(), *shape, "view {i}");
            assert!(v.shares_storage(&t), "view {i}");
            let copy = v.clone();
            assert!(!copy.shares_storage(&t) && copy.is_contiguous(), "view {i}");
            assert_eq!(vec(&copy), vec(&v), "view {i}");
            // The base's elements equal their positions in the storage, so each element must equal the position that the view's
            // strides give.
            let place = |index: Vec<usize>| {
                v.offset() as isize + index.iter().zip(v.strides()).map(|(&i, s)| i as isize * s).sum::<isize>()
            };
            let expected: Vec<f32> = ndarray::indices(v.shape().dims())
                .into_iter()
                .map(|index| place(index.slice().to_vec()) as f32)
                .collect();
            assert_eq!(vec(&v), expected, "view {i}");
        }
    });
}

#[test]
fn gradients_flow_back_through_views() {
    each_device(|device| {
        // The views are taken of a strided view with an offset, so that the gradient has another layout than its tensor.
        let Ok(x) = iota(&[2, 4, 5], device).to_dtype(DType::F64) else { return };
        let x = x.transpose(1, 2).unwrap().narrow(1, 1, 4).unwrap().narrow(2, 0, 3).unwrap().transpose(1, 2).unwrap();
        for (i, (_, view)) in VIEWS.iter().enumerate() {
            let loss = |x: &[Tensor]| {
                let y = view(&x[0].mul(&x[0])?)?;
                let n = y.numel() as i64;
                y.mul(&Tensor::arange(1, n + 1, 1, (DType::F64, y.device()))?.reshape(y.shape())?)?.sum((), false)
            };
            gradcheck(loss, std::slice::from_ref(&x), 1e-4).unwrap_or_else(|e| panic!("view {i}: {e}"));
        }
        // A reshape that has to copy, because the strides do not allow a view.
        gradcheck(|x| x[0].transpose(0, 2)?.reshape([-1])?.narrow(0, 3, 5)?.sum((), false), &[x], 1e-6).unwrap();
    });
}

#[test]
fn split_and_chunk_return_all_pieces() {
    each_device(|device| {
        let t = iota(&[7, 2], device);
        let sizes = |v: Vec<Tensor>| v.iter().map(|t| t.shape().dims()[0]).collect::<Vec<_>>();
        assert_eq!(sizes(t.split(3, 0).unwrap()), [3, 3, 1]);
        assert_eq!(sizes(t.split(7, 0).unwrap()), [7]);
        assert_eq!(sizes(t.split(100, 0).unwrap()), [7]);
        assert_eq!(sizes(t.chunk(3, 0).unwrap()), [3, 3, 1]);
        assert_eq!(sizes(t.chunk(4, 0).unwrap()), [2, 2, 2, 1]);
        assert_eq!(sizes(t.chunk(9, 0).unwrap()), [1; 7]);
        assert_eq!(sizes(Tensor::zeros([0, 2], device).unwrap().chunk(3, 0).unwrap()), [0]);
        let columns = t.unbind(1).unwrap();
        assert_eq!(vec(&columns[1]), [1., 3., 5., 7., 9., 11., 13.]);
        assert!(columns[1].shares_storage(&t));
    });
}

#[test]
fn writes_through_a_view_are_visible_through_other_views() {
    each_device(|device| {
        let base = Tensor::zeros([4, 6], device).unwrap();
        let (left, column) = (base.narrow(1, 0, 3).unwrap(), base.t().unwrap().select(0, 2).unwrap());
        left.fill_(1).unwrap();
        assert_eq!(vec(&column), [1.0; 4]);
        column.flip(0).unwrap().copy_(&iota(&[4], device)).unwrap();
        assert_eq!(vec(&base.i((.., 1..4)).unwrap()), [1., 3., 0., 1., 2., 0., 1., 1., 0., 1., 0., 0.]);
        drop(base);
        assert_eq!(vec(&column), [3., 2., 1., 0.], "a view keeps the storage alive");
    });
}

#[test]
fn reshape_copies_only_if_necessary() {
    let t = iota(&[4, 6], Device::Cpu);
    let columns = t.t().unwrap();
    assert!(columns.reshape([2, 3, 4]).unwrap().shares_storage(&t));
    let copied = columns.reshape(24).unwrap();
    assert!(!copied.shares_storage(&t));
    assert_eq!(vec(&copied)[..5], [0., 6., 12., 18., 1.]);
    let message = columns.view(24).unwrap_err().to_string();
    assert!(message.contains("[6, 4]") && message.contains("[1, 6]") && message.contains(".reshape()"), "{message}");
    assert!(t.t().unwrap().t().unwrap().is_contiguous());
    assert!(columns.contiguous().unwrap().is_contiguous());
    let scalar = Tensor::ones((), Device::Cpu).unwrap();
    assert_eq!(scalar.flatten(0, -1).unwrap().shape().dims(), [1]);
    assert_eq!(scalar.t().unwrap().rank(), 0);
    assert_eq!(Tensor::zeros([0, 3], Device::Cpu).unwrap().reshape([3, -1]).unwrap().shape().dims(), [3, 0]);
}

#[test]
fn slices_match_python() {
    let t = iota(&[5], Device::Cpu);
    let slice = |start: Option<isize>, end: Option<isize>, step| vec(&t.slice(0, start, end, step).unwrap());
    assert_eq!(slice(Some(-3), Some(-1), 1), [2., 3.]);
    assert_eq!(slice(Some(-99), Some(99), 2), [0., 2., 4.]);
    assert_eq!(slice(Some(4), Some(1), 1), [0f32; 0]);
    assert_eq!(slice(None, None, -1), [4., 3., 2., 1., 0.]);
    assert_eq!(slice(Some(3), Some(0), -2), [3., 1.]);
    assert_eq!(slice(Some(99), Some(-99), -3), [4., 1.]);
    assert_eq!(slice(Some(isize::MIN), Some(isize::MAX), isize::MAX), [0.]);
    assert_eq!(vec(&t.flip(0).unwrap().slice(0, 1, 4, 2).unwrap()), [3., 1.]);
}

#[test]
fn out_of_range_views_are_errors() {
    let t = iota(&[2, 3], Device::Cpu);
    let dim = |r: Result<Tensor>| assert!(matches!(r, Err(Error::DimOutOfRange { rank: 2, .. })), "{r:?}");
    dim(t.transpose(0, 2));
    dim(t.narrow(-3, 0, 1));
    dim(t.select(isize::MAX, 0));
    dim(t.squeeze(2));
    dim(t.flip(isize::MIN));
    dim(t.permute(&[0, 5]));
    assert!(matches!(t.unsqueeze(3), Err(Error::DimOutOfRange { rank: 3, .. })));
    assert!(matches!(t.unsqueeze([0, 4]), Err(Error::DimOutOfRange { dim: 4, rank: 4, .. })));
    let index = |r: Result<Tensor>| assert!(matches!(r, Err(Error::IndexOutOfRange { size: 3, .. })), "{r:?}");
    index(t.select(1, 3));
    index(t.select(1, -4));
    index(t.i((.., 3)));
    index(t.i((0, usize::MAX)));
    let invalid = |r: Result<Tensor>| assert!(matches!(r, Err(Error::Invalid { .. })), "{r:?}");
    invalid(t.narrow(1, 2, 2));
    invalid(t.narrow(1, usize::MAX, 2));
    invalid(t.slice(0, None, None, 0));
    invalid(t.i((0, 0, 0)));
    invalid(t.i((.., 1..5)));
    #[allow(clippy::reversed_empty_ranges)]
    invalid(t.i((.., 2..1)));
    invalid(t.i((Index::Ellipsis, Index::Ellipsis)));
    invalid(t.permute(&[0]));
    invalid(t.permute(&[0, 0]));
    invalid(t.reshape([4, -1]));
    invalid(t.reshape([7]));
    invalid(t.view([-1, -1]));
    invalid(t.diagonal(0, 1, -1));
    invalid(t.unsqueeze(0).unwrap().t());
    invalid(t.unsqueeze([0, -4]));
    invalid(t.movedim([0, 0], [0, 1]));
    invalid(t.movedim(vec![0, 1], 0));
    invalid(Tensor::eye([1, 2, 3], Device::Cpu));
    invalid(t.unfold(1, 4, 1));
    invalid(t.unfold(1, 2, 0));
    // Unfolding this expanded element would overflow the element count: about 2^62 windows of 2^40 elements.
    invalid(t.i((0, 0)).unwrap().expand([1usize << 62]).unwrap().unfold(0, 1 << 40, 1));
    invalid(t.as_strided([3, 3], &[2, 1], 0));
    invalid(t.as_strided([2], &[-1], 0));
    invalid(t.as_strided([2], &[isize::MAX], 0));
    invalid(t.as_strided([2], &[1, 1], 0));
    invalid(t.pad(&[1], PadMode::default()));
    invalid(t.pad(&[1; 6], PadMode::default()));
    invalid(t.pad(&[-2, -2], PadMode::default()));
    invalid(t.pad(&[3, 0], PadMode::Reflect));
    invalid(t.pad(&[0, 4], PadMode::Circular));
    invalid(t.select(0, 0).unwrap().tril(0));
    assert!(matches!(t.split(0, 0), Err(Error::Invalid { .. })));
    assert!(matches!(t.chunk(0, 0), Err(Error::Invalid { .. })));
    let shape = |r: Result<Tensor>| assert!(matches!(r, Err(Error::ShapeMismatch { .. })), "{r:?}");
    shape(t.expand([2, 4]));
    shape(t.expand([3]));
    shape(t.expand([-1, 2, 3]));
    shape(t.broadcast_to([1, 3]));
    assert_eq!(vec(&t), [0., 1., 2., 3., 4., 5.]);
}

#[test]
fn empty_views_have_no_elements() {
    each_device(|d| {
        let rows = Tensor::zeros(&[0, 5], d).unwrap();
        for view in [rows.select(1, 4), rows.flip(1), rows.narrow(1, 3, 2), rows.slice(1, 2, None, 2)] {
            assert_eq!(view.unwrap().try_clone().unwrap().to_vec::<f32>().unwrap(), [0f32; 0]);
        }
        let diagonal = Tensor::zeros(&[3, 3, 0], d).unwrap().diagonal(1, 0, 1).unwrap();
        assert_eq!(diagonal.to_vec::<f32>().unwrap(), [0f32; 0]);
    });
}

#[test]
fn gradients_of_overlapping_f16_windows_round_once() {
    each_device(|d| {
        let x = Tensor::ones([40], (DType::F16, d)).unwrap().requires_grad_(true).unwrap();
        let windows = x.unfold(0, 20, 1).unwrap();
        windows.backward_with(&Tensor::full(windows.shape(), 0.1, (DType::F16, d)).unwrap()).unwrap();
        let grad = x.grad().unwrap().to_dtype(DType::F32).unwrap();
        let (tenth, middle) = (f64::from(half::f16::from_f32(0.1)), vec(&grad)[20]);
        assert_eq!(middle, half::f16::from_f64(20.0 * tenth).to_f32());
        assert_eq!(Tensor::ones((), d).unwrap().unfold(0, 1, 5).unwrap().shape().dims(), [1]);
        assert_eq!(Tensor::ones(3, d).unwrap().unfold(0, 0, 1).unwrap().shape().dims(), [4, 0]);
        assert_eq!(Tensor::ones([0, 3], d).unwrap().unfold(1, 2, 1).unwrap().shape().dims(), [0, 2, 2]);
    });
}

#[test]
fn padding_matches_pytorch() {
    each_device(|d| {
        let x = iota(&[3], d);
        let padded = |pads: &[isize], mode| vec(&x.pad(pads, mode).unwrap());
        assert_eq!(padded(&[1, 2], PadMode::Constant(7.into())), [7., 0., 1., 2., 7., 7.]);
        assert_eq!(padded(&[-1, 2], PadMode::default()), [1., 2., 0., 0.]);
        assert_eq!(padded(&[2, 2], PadMode::Reflect), [2., 1., 0., 1., 2., 1., 0.]);
        assert_eq!(padded(&[0, 4], PadMode::Replicate), [0., 1., 2., 2., 2., 2., 2.]);
        assert_eq!(padded(&[3, 1], PadMode::Circular), [0., 1., 2., 0., 1., 2., 0.]);
        assert_eq!(padded(&[1, -1], PadMode::Circular), [1., 0., 1.]);
        assert_eq!(padded(&[], PadMode::Circular), [0., 1., 2.]);
        let m = iota(&[2, 2], d).t().unwrap();
        let corners = m.pad(&[1, 0, 0, 1], PadMode::default()).unwrap();
        assert_eq!(vec(&corners), [0., 0., 2., 0., 1., 3., 0., 0., 0.]);
        assert_eq!(
            vec(&m.pad(&[1, 1, 1, 0], PadMode::Reflect).unwrap()),
            [3., 1., 3., 1., 2., 0., 2., 0., 3., 1., 3., 1.]
        );
        let none = Tensor::zeros([0, 2], d).unwrap();
        assert_eq!(none.pad(&[0, 0, 1, 1], PadMode::default()).unwrap().shape().dims(), [2, 2]);
        assert!(none.pad(&[0, 0, 1, 1], PadMode::Replicate).is_err());

        let Ok(x) = iota(&[3, 4], d).to_dtype(DType::F64) else { return };
        for mode in [PadMode::default(), PadMode::Reflect, PadMode::Replicate, PadMode::Circular] {
            let loss = |x: &[Tensor]| {
                let y = x[0].t()?.pad(&[1, 2, -1, 2], mode)?;
                y.mul(&y)?.mul(&Tensor::arange(1, 31, 1, (DType::F64, d))?.reshape([5, 6])?)?.sum((), false)
            };
            gradcheck(loss, std::slice::from_ref(&x), 1e-5).unwrap_or_else(|e| panic!("{mode:?}: {e}"));
        }
    });
}

#[test]
fn tril_triu_and_diagonal() {
    each_device(|d| {
        let m = iota(&[3, 4], d).add_scalar(1).unwrap();
        let kept = |t: Tensor| vec(&t).iter().map(|&x| u8::from(x != 0.0)).collect::<Vec<_>>();
        for (k, lower) in [
            (-9, [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
            (-1, [0, 0, 0, 0, 1, 0, 0, 0, 1, 1, 0, 0]),
            (0, [1, 0, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0]),
            (2, [1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1]),
            (isize::MAX, [1; 12]),
        ] {
            assert_eq!(kept(m.tril(k).unwrap()), lower, "{k}");
            let upper: Vec<u8> = lower.iter().map(|x| 1 - x).collect();
            assert_eq!(kept(m.triu(k.saturating_add(1)).unwrap())[..11], upper[..11], "{k}");
        }
        let batch = iota(&[2, 2, 3], d).transpose(0, 2).unwrap(); // [3, 2, 2]
        assert_eq!(vec(&batch.tril(0).unwrap()), [0., 0., 3., 9., 1., 0., 4., 10., 2., 0., 5., 11.]);
        let nan = Tensor::full([2, 2], f64::NAN, d).unwrap();
        nan.triu_(1).unwrap().tril_(0).unwrap();
        assert_eq!(vec(&nan), [0.0; 4]);
        assert_eq!(Tensor::zeros([0, 3], d).unwrap().tril(0).unwrap().shape().dims(), [0, 3]);

        let indices = |t: Tensor| t.to_ndarray::<i64>().unwrap();
        let lower = indices(Tensor::tril_indices(3, 2, 0, d).unwrap());
        assert_eq!(lower, ndarray::array![[0, 1, 1, 2, 2], [0, 0, 1, 0, 1]].into_dyn());
        let upper = indices(Tensor::triu_indices(2, 3, -1, d).unwrap());
        assert_eq!(upper, ndarray::array![[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]].into_dyn());
        assert_eq!(indices(Tensor::tril_indices(3, 3, -7, d).unwrap()).shape(), [2, 0]);

        let v = iota(&[2, 2], d).add_scalar(1).unwrap();
        let embedded = v.diag_embed(1, 0, -1).unwrap();
        assert_eq!(embedded.shape().dims(), [3, 2, 3]);
        assert_eq!(embedded.diagonal(1, 0, -1).unwrap().to_vec::<f32>().unwrap(), [1., 2., 3., 4.]);
        assert_eq!(embedded.sum((), false).unwrap().item::<f32>().unwrap(), 10.0);
        assert_eq!(vec(&v.diag_embed(-1, 1, 0).unwrap().diagonal(1, 0, 1).unwrap()), [1., 2., 3., 4.]);
        let Ok(x) = iota(&[3], d).to_dtype(DType::F64) else { return };
        let loss = |x: &[Tensor]| x[0].diag(1)?.tril(2)?.exp()?.sum((), false);
        gradcheck(loss, std::slice::from_ref(&x), 1e-5).unwrap();
    });
}
