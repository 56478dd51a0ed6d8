use ndarray::{ArrayD, ArrayViewD, Axis, Slice};
use proptest::prelude::*;

use crate::layout::*;

/// Returns the storage index of every element, in row-major order of the layout.
fn storage_indices(layout: &Layout) -> Vec<usize> {
    let mut out = vec![layout.offset as isize];
    for (d, s) in layout.axes() {
        out = out.iter().flat_map(|&o| (0..d as isize).map(move |i| o + i * s)).collect();
    }
    out.into_iter().map(|o| o as usize).collect()
}

/// Returns an ndarray in which each element is its own storage index, so that views of the array show the storage indices of a layout.
fn model(shape: &[usize]) -> ArrayD<usize> {
    let n = shape.iter().product();
    ArrayD::from_shape_vec(shape, (0..n).collect()).unwrap()
}

fn same(layout: &Layout, array: &ArrayViewD<usize>) {
    assert_eq!(layout.shape.dims(), array.shape());
    assert_eq!(storage_indices(layout), array.iter().copied().collect::<Vec<_>>());
}

/// A view operation that the test applies both to a layout and to an ndarray.
#[derive(Debug, Clone)]
enum View {
    Transpose(usize, usize),
    Narrow(usize, usize, usize),
    Slice(usize, Option<isize>, Option<isize>, isize),
    Select(usize, usize),
    Flip(usize),
    Insert(usize),
    Broadcast(usize),
}

fn view() -> impl Strategy<Value = View> {
    let end = || prop::option::of(-9isize..9);
    prop_oneof![
        (0usize..9, 0usize..9).prop_map(|(a, b)| View::Transpose(a, b)),
        (0usize..9, 0usize..9, 0usize..9).prop_map(|(d, a, n)| View::Narrow(d, a, n)),
        (0usize..9, end(), end(), -4isize..4).prop_map(|(d, a, b, s)| View::Slice(d, a, b, s)),
        (0usize..9, 0usize..9).prop_map(|(d, i)| View::Select(d, i)),
        (0usize..9).prop_map(View::Flip),
        (0usize..9).prop_map(View::Insert),
        (2usize..4).prop_map(View::Broadcast),
    ]
}

/// Applies `view` to a layout and to an ndarray. The arguments of `view` are arbitrary numbers, which are first reduced to valid ranges.
fn apply<'a>(view: View, layout: Layout, mut array: ArrayViewD<'a, usize>) -> (Layout, ArrayViewD<'a, usize>) {
    let rank = layout.shape.rank();
    if rank == 0 && !matches!(view, View::Insert(_)) {
        return (layout, array);
    }
    let size = |d: usize| layout.shape.dims()[d];
    match view {
        View::Transpose(a, b) => {
            array.swap_axes(a % rank, b % rank);
            (layout.transpose(a % rank, b % rank), array)
        }
        View::Narrow(d, start, len) => {
            let d = d % rank;
            let start = start % (size(d) + 1);
            let len = len % (size(d) - start + 1);
            array.slice_axis_inplace(Axis(d), Slice::from(start..start + len));
            (layout.narrow("narrow", d, start, len).unwrap(), array)
        }
        View::Slice(d, start, end, step) => {
            let (d, step) = (d % rank, if step == 0 { 1 } else { step });
            let picked = layout.slice("slice", d, (start, end), step).unwrap();
            // Unlike Python, ndarray slices first and then steps backwards from the end of the slice, so the test computes the indices
            // itself.
            let n = size(d) as isize;
            let fix = |i: isize| if i < 0 { i + n } else { i };
            let (mut i, stop) = match step > 0 {
                true => (start.map_or(0, |i| fix(i).max(0)), end.map_or(n, |i| fix(i).min(n))),
                false => (start.map_or(n - 1, |i| fix(i).min(n - 1)), end.map_or(-1, |i| fix(i).max(-1))),
            };
            let mut wanted = vec![];
            while if step > 0 { i < stop } else { i > stop } {
                wanted.push(i as usize);
                i += step;
            }
            let parts: Vec<usize> =
                wanted.iter().flat_map(|&i| storage_indices(&layout.slice_dim(d, i, 1, 1))).collect();
            let mut got: Vec<usize> = vec![];
            for i in 0..picked.shape.dims()[d] {
                got.extend(storage_indices(&picked.slice_dim(d, i, 1, 1)));
            }
            assert_eq!((picked.shape.dims()[d], got), (wanted.len(), parts));
            (layout, array)
        }
        View::Select(d, i) if size(d % rank) > 0 => {
            let (d, i) = (d % rank, i % size(d % rank));
            (layout.select("select", d, i as isize).unwrap(), array.index_axis_move(Axis(d), i))
        }
        View::Select(..) => (layout, array),
        View::Flip(d) => {
            array.invert_axis(Axis(d % rank));
            (layout.flip(d % rank), array)
        }
        View::Insert(d) => (layout.insert(d % (rank + 1)), array.insert_axis(Axis(d % (rank + 1)))),
        View::Broadcast(n) => {
            if rank > 5 {
                return (layout, array);
            }
            let shape: Vec<usize> = std::iter::once(n).chain(layout.shape.dims().iter().copied()).collect();
            let wide = layout.broadcast_to(&Shape::from(&shape[..]));
            // An ndarray broadcast borrows its owner, so the broadcast is compared here, and the test continues with the original.
            same(&wide, &array.broadcast(shape).unwrap());
            (layout, array)
        }
    }
}

proptest! {
    #[test]
    fn views_agree_with_ndarray(
        shape in prop::collection::vec(0usize..6, 0..5),
        views in prop::collection::vec(view(), 0..8),
    ) {
        let owner = model(&shape);
        let mut layout = Layout::contiguous(Shape::from(&shape[..]));
        let mut array = owner.view();
        for view in views {
            (layout, array) = apply(view, layout, array);
            same(&layout, &array);
            if let Some((lo, hi)) = layout.bounds() {
                prop_assert_eq!(lo, *array.iter().min().unwrap());
                prop_assert_eq!(hi, *array.iter().max().unwrap());
            }
            prop_assert!(!layout.is_contiguous() || array.is_standard_layout());
            let distinct: std::collections::HashSet<_> = storage_indices(&layout).into_iter().collect();
            prop_assert!(distinct.len() == layout.numel() || layout.may_alias_itself());
        }
    }

    #[test]
    fn reshape_keeps_the_elements(
        shape in prop::collection::vec(1usize..5, 0..5),
        views in prop::collection::vec(view(), 0..4),
        cuts in prop::collection::vec(1usize..7, 0..5),
    ) {
        let owner = model(&shape);
        let (mut layout, mut array) = (Layout::contiguous(Shape::from(&shape[..])), owner.view());
        for view in views {
            (layout, array) = apply(view, layout, array);
        }
        // Builds a shape with the same number of elements: each cut that divides the rest is a size, and the remainder is the last size.
        let mut rest = layout.numel();
        let mut dims = vec![];
        for cut in cuts {
            if rest % cut == 0 {
                dims.push(cut);
                rest /= cut;
            }
        }
        dims.push(rest);
        if let Some(new) = layout.reshape(&Shape::from(&dims[..])) {
            prop_assert_eq!(new.shape.dims(), &dims[..]);
            prop_assert_eq!(storage_indices(&new), storage_indices(&layout));
        } else {
            prop_assert!(!layout.is_contiguous());
        }
        // Adding a dimension of size 1 is always possible.
        let mut with_one = layout.shape.dims().to_vec();
        with_one.insert(layout.shape.rank() / 2, 1);
        prop_assert!(layout.reshape(&Shape::from(with_one)).is_some());
    }
}

#[test]
fn reshape_splits_and_joins_strided_dimensions() {
    let base = Layout::contiguous(Shape::from([4, 6]));
    let t = base.transpose(0, 1); // [6, 4], strides [1, 6]
    assert_eq!(t.reshape(&Shape::from([2, 3, 4])).unwrap().strides[..], [3, 1, 6]);
    assert_eq!(t.reshape(&Shape::from([24])), None);
    let every_other = base.slice("slice", 1, (None, None), 2).unwrap(); // [4, 3], strides [6, 2]
    assert_eq!(every_other.reshape(&Shape::from(12)).unwrap().strides[..], [2]);
    let wide = Layout::contiguous(Shape::from(())).broadcast_to(&Shape::from([3, 4]));
    assert_eq!(wide.reshape(&Shape::from([2, 6])).unwrap().strides[..], [0, 0]);
    assert_eq!(base.flip(0).flip(1).reshape(&Shape::from(24)).unwrap().strides[..], [-1]);
}

#[test]
fn diagonals() {
    let l = Layout::contiguous(Shape::from([2, 3, 4]));
    assert_eq!(storage_indices(&l.diagonal(0, 1, 2)), [0, 5, 10, 12, 17, 22]);
    assert_eq!(storage_indices(&l.diagonal(2, 1, 2)), [2, 7, 14, 19]);
    assert_eq!(storage_indices(&l.diagonal(-2, 1, 2)), [8, 20]);
    assert_eq!(l.diagonal(1, 0, 2).shape.dims(), [3, 2]);
    assert_eq!(storage_indices(&l.diagonal(1, 0, 2)), [1, 14, 5, 18, 9, 22]);
    assert_eq!(l.diagonal(9, 1, 2).shape.dims(), [2, 0]);
    assert_eq!(l.diagonal(isize::MIN, 1, 2).numel(), 0);
}

#[test]
fn extreme_numbers_do_not_overflow() {
    let l = Layout::contiguous(Shape::from([5, 3]));
    let all = (Some(isize::MIN + 5), Some(isize::MAX));
    assert_eq!(l.slice("slice", 0, all, isize::MAX).unwrap().shape.dims(), [1, 3]);
    assert_eq!(l.slice("slice", 0, (None, None), isize::MIN).unwrap().offset, 12);
    assert!(l.narrow("narrow", 0, usize::MAX, 2).is_err());
    assert!(l.select("select", 0, isize::MIN).is_err());
}

#[test]
fn edges_hold_what_a_summary_prints() {
    let l = Layout::contiguous(Shape::from([100, 6])).edges(3);
    assert_eq!((l.shape.dims(), l.numel()), (&[2, 3, 1, 6][..], 36));
    assert_eq!(storage_indices(&l)[..7], [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(storage_indices(&l)[18], 97 * 6);
}
