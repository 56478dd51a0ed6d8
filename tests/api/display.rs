//! Printed tensors, compared with PyTorch's output, in which the names of dtypes and devices are replaced by claystone's names.

use claystone::{DType, Device, Tensor, device};

use crate::common::{each_device, iota};

fn floats(values: &[f32]) -> String {
    Tensor::from_slice(values, values.len(), Device::Cpu).unwrap().to_string()
}

#[test]
fn notation_matches_pytorch() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    for (values, printed) in [
        (&[1.0, 2.0][..], "[1., 2.]"),
        (&[1.5, 2.0], "[1.5000, 2.0000]"),
        (&[-1.5, 10.0, 0.0], "[-1.5000, 10.0000,  0.0000]"),
        (&[0.5, 500.0], "[  0.5000, 500.0000]"),
        (&[0.1, 10.0, 1000.0], "[1.0000e-01, 1.0000e+01, 1.0000e+03]"),
        (&[1.0, 10000.0], "[1.0000e+00, 1.0000e+04]"),
        (&[-1.0, 1000.0], "[  -1., 1000.]"),
        (&[1e8], "[100000000.]"),
        (&[2e8], "[2.0000e+08]"),
        (&[1e-4], "[1.0000e-04]"), // the nearest f32 is slightly smaller than 1e-4
        (&[1e-5, 0.0], "[1.0000e-05, 0.0000e+00]"),
        (&[2e-4, 3e-4], "[0.0002, 0.0003]"),
        (&[-1e-5, 1.0], "[-1.0000e-05,  1.0000e+00]"),
        (&[1e-30, 1e30], "[1.0000e-30, 1.0000e+30]"),
        (&[0.0, 0.0], "[0., 0.]"),
        (&[-0.0, 1.0], "[-0., 1.]"),
        (&[nan, nan], "[nan, nan]"),
        (&[inf, -inf, 0.0], "[inf, -inf, 0.]"),
        (&[1.0, nan], "[1., nan]"),
        (&[1.5, nan, -inf], "[1.5000,    nan,   -inf]"),
        (&[1e10, nan, inf], "[1.0000e+10,        nan,        inf]"),
        (&[0.00005, 0.5], "[5.0000e-05, 5.0000e-01]"),
        (&[std::f32::consts::PI], "[3.1416]"),
        (&[0.12345, 0.00045], "[0.1235, 0.0004]"), // not ties: the f32 values are rounded, not the decimal numbers
        (&[0.99999], "[1.0000]"),
        (&[], "[]"),
    ] {
        assert_eq!(floats(values), format!("tensor({printed})"), "{values:?}");
    }
}

#[test]
fn scalars_print_with_the_set_precision() {
    let scalar = |x: f32| Tensor::from_slice(&[x], (), Device::Cpu).unwrap();
    assert_eq!(scalar(3.0).to_string(), "tensor(3.)");
    assert_eq!(scalar(0.5).to_string(), "tensor(0.5000)");
    assert_eq!(scalar(-1e9).to_string(), "tensor(-1.0000e+09)");
    assert_eq!(scalar(f32::NAN).to_string(), "tensor(nan)");
    assert_eq!(format!("{:.2}", scalar(0.126)), "tensor(0.13)");
    assert_eq!(format!("{:?}", scalar(3.0)), "tensor(3.)");
}

#[test]
fn matrices_are_aligned_and_blocks_separated() {
    each_device(|device| {
        let suffix = if device == Device::Cpu { String::new() } else { format!(", device={device}") };
        let print = |shape: &[usize]| iota(shape, device).to_string();
        assert_eq!(print(&[2, 2]), format!("tensor([[0., 1.],\n        [2., 3.]]{suffix})"));
        assert_eq!(
            print(&[2, 2, 3]),
            format!(
                "tensor([[[ 0.,  1.,  2.],\n         [ 3.,  4.,  5.]],\n\n        [[ 6.,  7.,  8.],\n         [ 9., 10., 11.]]]{suffix})"
            )
        );
        assert_eq!(
            iota(&[2, 3], device).t().unwrap().to_string(),
            format!("tensor([[0., 3.],\n        [1., 4.],\n        [2., 5.]]{suffix})")
        );
        assert_eq!(print(&[1, 1, 1, 1]), format!("tensor([[[[0.]]]]{suffix})"));
        assert_eq!(
            print(&[2, 1, 1, 1]),
            format!("tensor([[[[0.]]],\n\n\n        [[[1.]]]]{suffix})"),
            "as many line breaks as dimensions within"
        );
    });
}

#[test]
fn long_rows_are_wrapped_at_80_columns() {
    let ints = Tensor::arange(0, 30, 1, (DType::I64, Device::Cpu)).unwrap();
    assert_eq!(
        ints.to_string(),
        "tensor([ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n        \
         18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29])"
    );
    let rows = ints.reshape([1, 30]).unwrap();
    assert_eq!(
        rows.to_string(),
        "tensor([[ 0,  1,  2,  3,  4,  5,  6,  7,  8,  9, 10, 11, 12, 13, 14, 15, 16, 17,\n         \
         18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29]])"
    );
}

#[test]
fn dtype_device_and_gradient_suffixes() {
    let cpu = Device::Cpu;
    let of = |dtype| Tensor::eye(2, (dtype, cpu)).unwrap().to_string();
    assert_eq!(of(DType::F16), "tensor([[1., 0.],\n        [0., 1.]], dtype=f16)");
    assert_eq!(of(DType::F64), "tensor([[1., 0.],\n        [0., 1.]], dtype=f64)");
    assert_eq!(of(DType::I64), "tensor([[1, 0],\n        [0, 1]])");
    assert_eq!(of(DType::U8), "tensor([[1, 0],\n        [0, 1]], dtype=u8)");
    assert_eq!(of(DType::I8), "tensor([[1, 0],\n        [0, 1]], dtype=i8)");
    assert_eq!(of(DType::Bool), "tensor([[ True, False],\n        [False,  True]])");
    let empty = |shape: &[usize], dtype| Tensor::zeros(shape, (dtype, cpu)).unwrap().to_string();
    assert_eq!(empty(&[0], DType::F32), "tensor([])");
    assert_eq!(empty(&[0], DType::I64), "tensor([], dtype=i64)");
    assert_eq!(empty(&[2, 0], DType::F32), "tensor([], size=(2, 0))");
    assert_eq!(empty(&[0, 3], DType::Bool), "tensor([], size=(0, 3), dtype=bool)");
    let i64s = Tensor::from_slice(&[i64::MIN, 0, i64::MAX], 3, cpu).unwrap();
    assert_eq!(i64s.to_string(), "tensor([-9223372036854775808,                    0,  9223372036854775807])");
    let halves = Tensor::full([9], 0.1, (DType::F16, cpu)).unwrap();
    assert_eq!(
        halves.to_string(),
        "tensor([0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000, 0.1000],\n       dtype=f16)",
        "a suffix that does not fit goes to the next line"
    );
    let leaf = Tensor::ones([1], cpu).unwrap().requires_grad_(true).unwrap();
    assert_eq!(leaf.to_string(), "tensor([1.], requires_grad=True)");
    assert_eq!(leaf.reshape(()).unwrap().to_string(), "tensor(1., grad_fn=<reshape>)");
}

#[test]
fn large_tensors_show_their_edges() {
    let print = |n| Tensor::arange(0, n, 1, Device::Cpu).unwrap().to_string();
    assert!(print(1000).lines().count() > 50);
    assert_eq!(print(1001), "tensor([   0.,    1.,    2.,  ...,  998.,  999., 1000.])");
    assert_eq!(
        print(10000),
        "tensor([0.0000e+00, 1.0000e+00, 2.0000e+00,  ..., 9.9970e+03, 9.9980e+03,\n        9.9990e+03])"
    );
    let row = "[0., 0., 0.,  ..., 0., 0., 0.]";
    assert_eq!(
        Tensor::zeros([1000, 1000], Device::Cpu).unwrap().to_string(),
        format!(
            "tensor([{row_},\n        {row},\n        {row},\n        ...,\n        {row},\n        {row},\n        {row}])",
            row_ = format_args!("[{}", &row[1..])
        )
    );
    // In a summarized tensor, a dim of six elements is printed completely, and a dim of seven is abbreviated.
    let tall = iota(&[200, 6], Device::Cpu).narrow(0, 0, 200).unwrap();
    assert_eq!(
        tall.to_string().lines().next().unwrap(),
        "tensor([[0.0000e+00, 1.0000e+00, 2.0000e+00, 3.0000e+00, 4.0000e+00, 5.0000e+00],"
    );
    let wide = iota(&[2, 501], Device::Cpu);
    assert_eq!(
        wide.to_string(),
        "tensor([[0.0000e+00, 1.0000e+00, 2.0000e+00,  ..., 4.9800e+02, 4.9900e+02,\n         5.0000e+02],\n        \
         [5.0100e+02, 5.0200e+02, 5.0300e+02,  ..., 9.9900e+02, 1.0000e+03,\n         1.0010e+03]])"
    );
    let blocks = Tensor::ones([7, 1, 200], Device::Cpu).unwrap();
    let ones = "[[1., 1., 1.,  ..., 1., 1., 1.]]";
    let three = [ones; 3].join(",\n\n        ");
    assert_eq!(blocks.to_string(), format!("tensor([{three},\n\n        ...,\n\n        {three}])"));
}

#[test]
fn printing_reads_only_the_edges() {
    each_device(|device| {
        // An expanded tensor of 4 EiB, of which printing reads only 36 elements.
        let vast = Tensor::ones((), device).unwrap().expand([1usize << 40, 1 << 20]).unwrap();
        let (text, launches) = device::count_launches(|| vast.to_string());
        assert_eq!(text.lines().count(), 7);
        assert!(text.starts_with("tensor([[1., 1., 1.,  ..., 1., 1., 1.],\n"));
        assert_eq!(launches, 1, "one gather of all edges");
    });
}
