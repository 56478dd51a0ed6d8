//! Operations that join, pad, repeat and assign, compared with index arithmetic.

use claystone::device::count_launches;
use claystone::{DType, Device, Error, Result, Tensor};
use ndarray::{ArrayD, Axis, arr1};

use crate::common::{each_device, f64s, iota, vec};
use crate::harness::{Case, case};
use crate::views::{built, reshaped};

fn joined(x: &[ArrayD<f64>], d: usize) -> Vec<ArrayD<f64>> {
    let views: Vec<_> = x.iter().map(|x| x.view()).collect();
    vec![ndarray::concatenate(Axis(d), &views).expect("they fit")]
}

fn seen_as(x: &[ArrayD<f64>], shape: impl Fn(&[usize]) -> Vec<usize>) -> Vec<ArrayD<f64>> {
    x.iter().map(|x| reshaped(x, &shape(x.shape()))).collect()
}

fn joins() -> Vec<Case> {
    let mut cases = Vec::new();
    for n in [4, 1, 0] {
        cases.push(case("cat").input(&[2, n]).input(&[2, 3]).input(&[2, 1]).arg(1).with_reference(|x| joined(x, 1)));
        cases.push(case("cat").input(&[n, 3]).input(&[2, 3]).arg(-2).with_reference(|x| joined(x, 0)));
        cases.push(case("stack").input(&[2, n]).input(&[2, n]).arg(1).with_reference(|x| {
            joined(&seen_as(x, |s| vec![s[0], 1, s[1]]), 1)
        }));
        cases.push(case("hstack").input(&[n]).input(&[2]).with_reference(|x| joined(x, 0)));
        cases.push(case("hstack").input(&[2, n]).input(&[2, 2]).with_reference(|x| joined(x, 1)));
        cases.push(case("vstack").input(&[n]).input(&[n]).with_reference(|x| joined(&seen_as(x, |s| vec![1, s[0]]), 0)));
        cases.push(case("dstack").input(&[n, 2]).input(&[n, 2]).with_reference(|x| {
            joined(&seen_as(x, |s| vec![s[0], s[1], 1]), 2)
        }));
        cases.push(case("column_stack").input(&[n]).input(&[n, 2]).with_reference(|x| {
            joined(&seen_as(x, |s| vec![s[0], s.get(1).copied().unwrap_or(1)]), 1)
        }));
        cases.push(case("block_diag").input(&[2, n]).input(&[3]).with_reference(move |x| {
            vec![built(&[3, n + 3], |i| match (i[0], i[1]) {
                (r, c) if r < 2 && c < n => x[0][[r, c]],
                (2, c) if c >= n => x[1][[c - n]],
                _ => 0.0,
            })]
        }));
    }
    cases
}

fn repetitions() -> Vec<Case> {
    let mut cases = Vec::new();
    for n in [3, 1, 0] {
        for repeats in [[2, 3], [1, 1], [0, 2], [4, 1]] {
            let [a, b] = repeats;
            let times = move |x: &[ArrayD<f64>]| vec![built(&[2 * a, n * b], |i| x[0][[i[0] % 2, i[1] % n]])];
            cases.push(case("repeat").input(&[2, n]).arg(&repeats).with_reference(times));
            cases.push(case("tile").input(&[2, n]).arg(&repeats).with_reference(times));
        }
        cases.push(case("repeat").input(&[n]).arg(&[2, 2]).with_reference(move |x| {
            vec![built(&[2, 2 * n], |i| x[0][[i[1] % n]])]
        }));
        cases.push(case("tile").input(&[2, n]).arg(&[2]).with_reference(move |x| {
            vec![built(&[2, 2 * n], |i| x[0][[i[0], i[1] % n]])]
        }));
        let interleaved = move |x: &[ArrayD<f64>]| vec![built(&[2, n * 3], |i| x[0][[i[0], i[1] / 3]])];
        cases.push(case("repeat_interleave").input(&[2, n]).arg(3).arg(-1).with_reference(interleaved));
        cases.push(case("repeat_interleave").input(&[2, n]).arg(2).with_reference(move |x| {
            vec![built(&[4 * n], |i| x[0][[i[0] / 2 / n, i[0] / 2 % n]])]
        }));
        let shift = |k: usize, size: usize, by: usize| (k + size - by % size) % size;
        cases.push(case("roll").input(&[4, n]).arg(&[5, -1]).arg(&[0, 1]).with_reference(move |x| {
            vec![built(&[4, n], |i| x[0][[shift(i[0], 4, 1), (i[1] + 1) % n]])]
        }));
        cases.push(case("roll").input(&[4, n]).arg(2).arg(&[0i32; 0]).with_reference(move |x| {
            let place = move |i: &[usize]| shift(i[0] * n + i[1], 4 * n, 2);
            vec![built(&[4, n], |i| x[0][[place(i) / n, place(i) % n]])]
        }));
    }
    let repeats = arr1(&[2.0, 0.0, 1.0, 3.0]).into_dyn();
    for rows in [2, 0] {
        let tensor = case("repeat_interleave_tensor").input(&[rows, 4]).fixed(repeats.clone(), DType::I64).arg(1);
        cases.push(tensor.with_reference(move |x| vec![built(&[rows, 6], |i| x[0][[i[0], [0, 0, 2, 3, 3, 3][i[1]]]])]));
    }
    cases
}

/// Returns the source index for index `i` of a padded dim. Negative pads first remove elements from the ends of the dim.
fn source(mode: &str, i: usize, (before, after): (isize, isize), size: usize) -> Option<usize> {
    let (cut, n) = (-before.min(0), size as isize + before.min(0) + after.min(0));
    let at = i as isize - before.max(0);
    let place = match mode {
        "constant" if !(0..n).contains(&at) => return None,
        "reflect" if at < 0 => -at,
        "reflect" if at >= n => 2 * (n - 1) - at,
        "replicate" => at.clamp(0, n - 1),
        "circular" => at.rem_euclid(n),
        _ => at,
    };
    Some((place + cut) as usize)
}

fn pads() -> Vec<Case> {
    let mut cases = Vec::new();
    for mode in ["constant", "reflect", "replicate", "circular"] {
        for pads in [[1, 2, 0, 0], [2, 0, 1, 1], [-1, 2, 0, -2], [0, 0, 0, 0]] {
            for rows in [3usize, 0] {
                if rows == 0 && (pads[2..] != [0, 0]) {
                    continue;
                }
                let [left, right, top, bottom] = pads.map(|p: i32| p as isize);
                let padded = case("pad").input(&[2, rows, 5]).arg(&pads).arg(mode);
                let padded = if mode == "constant" { padded.arg(1) } else { padded };
                let grown = |size: usize, ends: isize| size.saturating_add_signed(ends);
                let shape = [2, grown(rows, top + bottom), grown(5, left + right)];
                cases.push(padded.with_reference(move |x| {
                    vec![built(&shape, |i| {
                        match (source(mode, i[1], (top, bottom), rows), source(mode, i[2], (left, right), 5)) {
                            (Some(r), Some(c)) => x[0][[i[0], r, c]],
                            _ => 1.0,
                        }
                    })]
                }));
            }
        }
    }
    cases
}

fn assignments() -> Vec<Case> {
    let mut cases = Vec::new();
    for n in [4, 0] {
        let row = move |x: &[ArrayD<f64>]| vec![built(&[3, n], |i| if i[0] == 2 { x[1][[i[1]]] } else { x[0][[i[0], i[1]]] })];
        cases.push(case("slice_assign").input(&[3, n]).input(&[n]).arg(&[-1]).with_reference(row));
        cases.push(case("slice_assign_").input(&[3, n]).input(&[n]).arg(&[-1]).with_reference(row));
        cases.push(case("select_scatter").input(&[3, n]).input(&[n]).arg(0).arg(2).with_reference(row));
        let slice = case("slice_scatter").input(&[5, n]).input(&[2, n]).arg(0).arg(1).arg(Some(4)).arg(2);
        cases.push(slice.with_reference(move |x| {
            vec![built(&[5, n], |i| if i[0] == 1 || i[0] == 3 { x[1][[i[0] / 2, i[1]]] } else { x[0][[i[0], i[1]]] })]
        }));
        let len = n.saturating_sub(1).min(3);
        let diagonal = case("diagonal_scatter").input(&[3, n]).input(&[len]).arg(1).arg(0).arg(1);
        cases.push(diagonal.with_reference(move |x| {
            vec![built(&[3, n], |i| if i[1] == i[0] + 1 { x[1][[i[0]]] } else { x[0][[i[0], i[1]]] })]
        }));
        for (offset, a, b) in [(0i32, -2, -1), (1, 0, 2), (-2, 1, 0)] {
            let (d1, d2) = ((a as isize).rem_euclid(3) as usize, (b as isize).rem_euclid(3) as usize);
            let side = n + offset.unsigned_abs() as usize;
            let rest = 3 - d1 - d2;
            let mut shape = [side; 3];
            shape[rest] = 2;
            cases.push(case("diag_embed").input(&[2, n]).arg(offset).arg(a).arg(b).with_reference(move |x| {
                let (top, left) = (offset.min(0).unsigned_abs() as usize, offset.max(0) as usize);
                vec![built(&shape, |i| {
                    let on = i[d1] >= top && i[d2] >= left && i[d1] - top == i[d2] - left;
                    if on { x[0][[i[rest], i[d1] - top]] } else { 0.0 }
                })]
            }));
        }
        for k in [-1i32, 0, 2] {
            let lower = move |x: &[ArrayD<f64>]| {
                let kept = |i: &[usize]| i[2] as i32 - i[1] as i32 <= k;
                vec![built(x[0].shape(), |i| if kept(i) { x[0][i] } else { 0.0 })]
            };
            let upper = move |x: &[ArrayD<f64>]| {
                let kept = |i: &[usize]| i[2] as i32 - i[1] as i32 >= k;
                vec![built(x[0].shape(), |i| if kept(i) { x[0][i] } else { 0.0 })]
            };
            cases.push(case("tril").input(&[2, 3, n]).arg(k).with_reference(lower));
            cases.push(case("tril_").input(&[2, 3, n]).arg(k).with_reference(lower));
            cases.push(case("triu").input(&[2, 3, n]).arg(k).with_reference(upper));
            cases.push(case("triu_").input(&[2, 3, n]).arg(k).with_reference(upper));
        }
    }
    cases
}

pub fn cases() -> Vec<Case> {
    [joins(), repetitions(), pads(), assignments()].into_iter().flatten().collect()
}

#[test]
fn cat_promotes_dtypes_and_keeps_them_in_gradients() {
    each_device(|d| {
        let half = Tensor::ones(2, (DType::F16, d)).unwrap().requires_grad_(true).unwrap();
        let whole = Tensor::from_slice(&[3i64], 1, d).unwrap();
        let all = Tensor::cat(&[&half, &whole, &Tensor::zeros(0, d).unwrap()], 0).unwrap();
        assert_eq!((all.dtype(), f64s(&all).into_raw_vec_and_offset().0), (DType::F32, vec![1.0, 1.0, 3.0]));
        all.square().unwrap().sum((), false).unwrap().backward().unwrap();
        let grad = half.grad().unwrap();
        assert_eq!((grad.dtype(), f64s(&grad).into_raw_vec_and_offset().0), (DType::F16, vec![2.0, 2.0]));
        // As in PyTorch, `cat` ignores empty vectors, whatever the shape of the other tensors is.
        let matrix = iota(&[2, 2], d);
        assert_eq!(vec(&Tensor::cat(&[&Tensor::zeros(0, d).unwrap(), &matrix], 1).unwrap()), [0., 1., 2., 3.]);
    });
}

#[test]
fn slice_assignment_supports_every_kind_of_index() {
    use claystone::Index;
    each_device(|d| {
        let x = Tensor::zeros([3, 4], d).unwrap();
        x.slice_assign_((.., Index::step(.., 2)), 1.5).unwrap().slice_assign_((1, 1..3), &iota(&[2], d)).unwrap();
        assert_eq!(vec(&x), [1.5, 0., 1.5, 0., 1.5, 0., 1., 0., 1.5, 0., 1.5, 0.]);
        assert_eq!(vec(&x.i((2, Index::step(1.., -2))).unwrap()), [0.0, 0.0]);
        let y = x.slice_assign((Index::Ellipsis, -1), &Tensor::full((), 9, d).unwrap()).unwrap();
        assert_eq!(vec(&y.i((.., 3)).unwrap()), [9.0; 3]);
        assert_eq!(vec(&x.i((.., 3)).unwrap()), [0.0; 3], "out of place");
        assert!(x.slice_assign_((0, 9), 1).is_err() && x.slice_assign_(0, &iota(&[3], d)).is_err());
        assert!(x.i(Index::step(.., 0)).is_err());
    });
}

#[test]
fn negative_pads_match_pytorch() {
    use claystone::PadMode;
    each_device(|d| {
        let x = iota(&[4], d);
        let of = |pads: [isize; 2], mode: PadMode| vec(&x.pad(&pads, mode).unwrap());
        assert_eq!(of([-1, 3], PadMode::Reflect), [1., 2., 3., 2., 1., 0.]);
        assert_eq!(of([2, -3], PadMode::Reflect), [2., 1., 0.]);
        assert_eq!(of([-4, 2], PadMode::Replicate), [3., 3.]);
        assert_eq!(of([1, -1], PadMode::Circular), [2., 0., 1., 2.]);
        assert_eq!(of([-1, 1], PadMode::Constant(9.into())), [1., 2., 3., 9.]);
        // In every mode, the result is contiguous and has its own memory.
        for mode in [PadMode::Reflect, PadMode::Replicate, PadMode::Circular, PadMode::default()] {
            let leaf = iota(&[2, 4], d).requires_grad_(true).unwrap();
            let cut = leaf.pad(&[-1, -1], mode).unwrap();
            assert!(!cut.shares_storage(&leaf) && cut.is_contiguous(), "{mode:?}");
            cut.sum((), false).unwrap().backward().unwrap();
            assert_eq!(vec(&leaf.grad().unwrap()), [0., 1., 1., 0., 0., 1., 1., 0.], "{mode:?}");
        }
    });
}

#[test]
fn mismatched_shapes_are_errors() {
    let x = iota(&[2, 3], Device::Cpu);
    let invalid = |r: Result<Tensor>| assert!(matches!(r, Err(Error::Invalid { .. })), "{r:?}");
    invalid(x.repeat(&[2]));
    invalid(x.roll(&[1, 2], &[0]));
    invalid(x.rot90(1, 0, 0));
    invalid(Tensor::hstack::<Tensor>(&[]));
    invalid(Tensor::block_diag(&[Tensor::zeros([1, 1, 1], Device::Cpu).unwrap()]));
    invalid(x.repeat_interleave_tensor(&Tensor::from_slice(&[1i64, -1], 2, Device::Cpu).unwrap(), 0));
    assert!(matches!(x.split_with_sizes(&[1, 1], 1), Err(Error::Invalid { .. })));
    let shape = |r: Result<Tensor>| assert!(matches!(r, Err(Error::ShapeMismatch { .. })), "{r:?}");
    shape(Tensor::vstack(&[&x, &iota(&[2], Device::Cpu)]));
    shape(x.select_scatter(&iota(&[2], Device::Cpu), 0, 0));
    shape(x.slice_assign(0, &iota(&[2], Device::Cpu)));
}

/// Joins strided rows with an odd number of elements and an odd offset, for every element size; also more tensors than one launch
/// can take, and empty tensors.
#[test]
fn cat_takes_one_launch() {
    each_device(|device| {
        let most = |launches: u64, most: u64| assert!(device == Device::Cpu || launches <= most, "{launches} on {device}");
        for dtype in [DType::U8, DType::F16, DType::F32, DType::F64] {
            let all = iota(&[6, 40], device).to_dtype(dtype).unwrap();
            let parts = [(3, 7), (0, 0), (16, 16), (1, 1)].map(|(first, n)| all.narrow(1, first, n).unwrap());
            let of_host = |tensors: &[Tensor], d: usize| {
                let all: Vec<ArrayD<f64>> = tensors.iter().map(f64s).collect();
                joined(&all, d).remove(0)
            };
            let (made, launches) = count_launches(|| Tensor::cat(&parts, 1).unwrap());
            assert_eq!(f64s(&made), of_host(&parts, 1), "{dtype} on {device}");
            most(launches, 1);
            for shift in [1, 16] {
                let (rolled, launches) = count_launches(|| all.roll(&[shift as isize], &[1]).unwrap());
                let ends = [all.narrow(1, 40 - shift, shift).unwrap(), all.narrow(1, 0, 40 - shift).unwrap()];
                assert_eq!(f64s(&rolled), of_host(&ends, 1), "{dtype} on {device}");
                most(launches, 1);
            }
            let rows: Vec<Tensor> = (0..50).map(|i| all.narrow(0, i % 6, 1).unwrap().narrow(1, 1, 39).unwrap()).collect();
            let (made, launches) = count_launches(|| Tensor::cat(&rows, 0).unwrap());
            assert_eq!(f64s(&made), of_host(&rows, 0), "{dtype} on {device}");
            most(launches, 3);
            let columns: Vec<Tensor> = rows.iter().map(|row| row.t().unwrap()).collect();
            let (made, launches) = count_launches(|| Tensor::cat(&columns, 1).unwrap());
            assert_eq!(f64s(&made), of_host(&columns, 1), "{dtype} on {device}");
            most(launches, 3);
        }
    });
}

#[test]
fn stacking_many_scalars_takes_few_launches() {
    each_device(|device| {
        let x = iota(&[70], device).requires_grad_(true).unwrap();
        let numbers: Vec<Tensor> = (0..70).map(|i| x.select(0, 69 - i).unwrap()).collect();
        let (joined, launches) = count_launches(|| Tensor::stack(&numbers, 0).unwrap());
        let want: Vec<f32> = vec(&x).into_iter().rev().collect();
        assert_eq!(vec(&joined), want, "{device}");
        assert!(launches <= 3, "{launches} launches on {device}");
        joined.mul(&joined).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(vec(&x.grad().unwrap()), vec(&x).into_iter().map(|v| 2.0 * v).collect::<Vec<_>>());
    });
}
