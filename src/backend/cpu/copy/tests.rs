//! Compares copies, conversions and formulas between views of every kind with plain loops over the elements.

use crate::{DType, Device, Expr, PadMode, Result, Tensor};

/// A view of a storage: the offset of its first element, and the size and stride of each dim.
#[derive(Clone, Debug)]
struct View(usize, Vec<(usize, isize)>);

impl View {
    /// Returns the storage index of each element, in row-major order.
    fn places(&self) -> Vec<usize> {
        self.1.iter().fold(vec![self.0], |places, &(n, stride)| {
            places.iter().flat_map(|&p| (0..n as isize).map(move |i| p.wrapping_add_signed(i * stride))).collect()
        })
    }

    fn of(&self, whole: &Tensor) -> Tensor {
        let mut layout = whole.layout.clone();
        layout.offset = self.0;
        layout.shape = self.1.iter().map(|d| d.0).collect();
        layout.strides = self.1.iter().map(|d| d.1).collect();
        whole.with_layout(layout)
    }
}

/// Returns a number that every dtype can hold; bool holds only its lowest bit.
fn number(i: usize, seed: usize) -> f64 {
    ((i * 31 + seed) % 120) as f64
}

fn whole(room: usize, seed: usize, dtype: DType) -> Result<Tensor> {
    let all: Vec<f64> = (0..room).map(|i| number(i, seed)).collect();
    let all = match dtype {
        DType::Bool => all.iter().map(|x| x % 2.0).collect(),
        _ => all,
    };
    Tensor::from_slice(&all, room, Device::Cpu)?.to_dtype(dtype)
}

fn values(t: &Tensor) -> Result<Vec<f64>> {
    t.to_dtype(DType::F64)?.to_vec()
}

/// Returns the minimum storage size, and views of `rows` x `columns` elements that fit in it. No view has two elements at one address.
fn views(rows: usize, columns: usize) -> (usize, Vec<View>) {
    let (r, c) = (rows as isize, columns as isize);
    let room = 3 * (rows + 2) * (columns + 9);
    let at = |row: usize, column: usize, row_step: isize, step: isize| {
        let start = 5 + row as isize * row_step.abs() + column as isize * step.abs();
        View(start as usize, vec![(rows, row_step), (columns, step)])
    };
    let (last_row, last) = (rows.saturating_sub(1), columns.saturating_sub(1));
    let all = vec![
        at(0, 0, c, 1),
        at(0, 0, c + 3, 1),
        at(0, 0, 2 * c + 1, 2),
        at(0, 0, 3 * c, 3),
        at(0, 0, 1, r),
        at(0, 0, 1, r + 2),
        at(0, 0, 2, 2 * r + 1),
        at(last_row, 0, -(c + 1), 1),
        at(0, last, c + 1, -1),
        at(last_row, last, -c, -1),
        at(0, last, 1, -(r + 1)),
    ];
    (room, all)
}

const SHAPES: [(usize, usize); 16] = [
    (0, 3),
    (1, 1),
    (1, 7),
    (7, 1),
    (2, 3),
    (3, 15),
    (3, 16),
    (5, 17),
    (4, 63),
    (4, 64),
    (9, 65),
    (65, 9),
    (130, 64),
    (3, 20_000),
    (20_000, 3),
    (300, 170),
];

#[test]
fn copies_between_views_of_every_kind() -> Result<()> {
    for (rows, columns) in SHAPES {
        let (room, views) = views(rows, columns);
        let n = views.len();
        for i in 0..n * n {
            let (from, to) = (&views[i / n], &views[i % n]);
            // The dtypes vary from view to view, so pairs of dtypes of the same size and of different sizes are tested.
            let dtypes = [(0, 0), (1, 1), (5, 5), (3, 3), (0, 1), (1, 0), (2, 0), (0, 4), (4, 6), (8, 8), (1, 2)];
            let (a, b) = dtypes[(i + i / n) % dtypes.len()];
            let (a, b) = (DType::ALL[a % DType::ALL.len()], DType::ALL[b % DType::ALL.len()]);
            let (source, target) = (whole(room, 1, a)?, whole(room, 2, b)?);
            let (before, mut want) = (values(&source.to_dtype(b)?)?, values(&target)?);
            from.places().iter().zip(to.places()).for_each(|(&f, t)| want[t] = before[f]);
            to.of(&target).copy_(&from.of(&source))?;
            assert!(values(&target)? == want, "copy_ {a} {b} {from:?} {to:?}");
            let got = values(&from.of(&source).to_dtype(b)?.contiguous()?)?;
            assert!(got.iter().zip(from.places()).all(|(&x, f)| x == before[f]), "to_dtype {a} {b} {from:?}");
        }
    }
    Ok(())
}

#[test]
fn formulas_of_views_into_views() -> Result<()> {
    for (rows, columns) in SHAPES {
        let (room, views) = views(rows, columns);
        for (i, to) in views.iter().enumerate() {
            for (k, from) in views.iter().enumerate() {
                let dtype = [DType::F32, DType::F64, DType::I64, DType::F16, DType::BF16, DType::I32][(i + k) % 6];
                let (x, y) = (whole(room, 3, dtype)?, whole(room, 4, dtype)?);
                let other = &views[(i + 2 * k + 1) % views.len()];
                let row = whole(columns, 5, dtype)?;
                let (xs, ys) = (values(&x)?, values(&y)?);
                // The sum goes to a new result, over one operand, and to two results of one launch.
                let sum = values(&from.of(&x).sub(&other.of(&y))?)?;
                let places = || from.places().into_iter().zip(other.places());
                assert!(sum.iter().zip(places()).all(|(&s, (f, o))| s == xs[f] - ys[o]), "{dtype} {from:?} {other:?}");
                to.of(&x).sub_(&other.of(&y))?;
                let mut want = xs.clone();
                to.places().iter().zip(other.places()).for_each(|(&t, o)| want[t] = xs[t] - ys[o]);
                assert!(values(&x)? == want, "in place {dtype} {to:?} {other:?}");
                to.of(&x).sub_(&row)?;
                to.places().iter().enumerate().for_each(|(i, &t)| want[t] -= number(i % columns, 5));
                assert!(values(&x)? == want, "in place by a row {dtype} {to:?}");
                if dtype != DType::F16 && dtype != DType::BF16 {
                    let out = whole(room, 6, dtype)?;
                    let step = |x: &[Expr], _: &[Expr]| vec![&x[0] + &x[1] * 2.0, &x[0] - &x[1]];
                    let (before, mut other_want) = (want.clone(), values(&out)?);
                    Tensor::map_into(&[&to.of(&x), &other.of(&y)], &[], &[&to.of(&x), &from.of(&out)], step)?;
                    for ((t, o), f) in to.places().into_iter().zip(other.places()).zip(from.places()) {
                        (want[t], other_want[f]) = (before[t] + ys[o] * 2.0, before[t] - ys[o]);
                    }
                    assert!(values(&x)? == want && values(&out)? == other_want, "two {dtype} {to:?} {from:?}");
                }
                to.of(&y).fill_(9)?;
                let mut want = ys.clone();
                to.places().iter().for_each(|&t| want[t] = 9.0);
                assert!(values(&y)? == want, "fill_ {dtype} {to:?}");
            }
        }
    }
    Ok(())
}

#[test]
fn joined_along_every_dimension() -> Result<()> {
    for dtype in DType::ALL {
        for (rows, columns) in SHAPES.into_iter().filter(|s| s.0 > 0) {
            let (room, views) = views(rows, columns);
            for (i, first) in views.iter().enumerate() {
                let (x, y) = (whole(room, 3, dtype)?, whole(room, 4, dtype)?);
                let second = &views[(3 * i + 1) % views.len()];
                let (a, b) = (first.of(&x), second.of(&y));
                let (left, right) = (values(&a)?, values(&b)?);
                let empty = b.narrow(1, 0, 0)?;
                let wide = values(&Tensor::cat(&[&a, &empty, &b, &a], 1)?)?;
                let (at, n) = (|i: usize| i / columns % 3, |i: usize| i / (3 * columns) * columns + i % columns);
                let want = |i: usize| if at(i) == 1 { right[n(i)] } else { left[n(i)] };
                assert!((0..wide.len()).all(|i| wide[i] == want(i)), "cat 1 {dtype} {first:?} {second:?}");
                let tall = values(&Tensor::cat(&[&a, &b], 0)?)?;
                assert_eq!(tall, [&left[..], &right].concat(), "cat 0 {dtype} {first:?} {second:?}");
                for n in 2..=5 {
                    let all: Vec<&Tensor> = [&a, &b].into_iter().cycle().take(n).collect();
                    let cards = values(&Tensor::stack(&all, 2)?)?;
                    let want = |i: usize| if (i % n).is_multiple_of(2) { left[i / n] } else { right[i / n] };
                    assert!((0..cards.len()).all(|i| cards[i] == want(i)), "stack {n} {dtype} {first:?} {second:?}");
                }
                let permuted = values(&a.roll(&[1], &[1])?)?;
                let want = |i: usize| left[i / columns * columns + (i % columns + columns - 1) % columns];
                assert!((0..permuted.len()).all(|i| permuted[i] == want(i)), "roll {dtype} {first:?}");
                let twice = values(&a.repeat(&[2, 3])?)?;
                let want = |i: usize| left[i / (3 * columns) % rows * columns + i % columns];
                assert!((0..twice.len()).all(|i| twice[i] == want(i)), "repeat {dtype} {first:?}");
            }
        }
    }
    let x = whole(6, 1, DType::F32)?.reshape([2, 3])?;
    let padded = values(&x.pad(&[1, 0, 0, 1], PadMode::default())?)?;
    let v = values(&x)?;
    assert_eq!(padded, [0.0, v[0], v[1], v[2], 0.0, v[3], v[4], v[5], 0.0, 0.0, 0.0, 0.0]);
    Ok(())
}

#[test]
fn broadcast_and_large_copies() -> Result<()> {
    let (rows, columns) = (7, (24 << 20) / 4 / 7 + 5);
    let row = whole(columns, 1, DType::F32)?;
    let wide = row.expand([rows, columns])?;
    let flat = wide.contiguous()?.to_vec::<f32>()?;
    assert!((0..flat.len()).all(|i| f64::from(flat[i]) == number(i % columns, 1)));
    let narrow = Tensor::zeros(&[rows, columns + 2], Device::Cpu)?;
    narrow.narrow(1, 1, columns)?.copy_(&wide)?;
    let all = narrow.to_vec::<f32>()?;
    let want = |i: usize| match i % (columns + 2) {
        0 => 0.0,
        c if c > columns => 0.0,
        c => number(c - 1, 1),
    };
    assert!((0..all.len()).all(|i| f64::from(all[i]) == want(i)));
    let joined = Tensor::cat(&[&wide, &row.reshape([1, columns])?.expand([rows, columns])?], 1)?.to_vec::<f32>()?;
    assert!((0..joined.len()).all(|i| f64::from(joined[i]) == number(i % columns, 1)));
    // A copy of one row in reverse order.
    let back = View(columns - 1, vec![(2, 0), (columns, -1)]).of(&row).contiguous()?.to_vec::<f32>()?;
    assert!((0..back.len()).all(|i| f64::from(back[i]) == number(columns - 1 - i % columns, 1)));
    let column = whole(300, 1, DType::F16)?.reshape([300, 1])?.expand([300, 70])?.contiguous()?;
    assert!(values(&column)?.iter().enumerate().all(|(i, &x)| x == number(i / 70, 1)));
    Ok(())
}

/// Transposed copies whose rows are shorter than a block, for every element size, with runs of columns, and with non-temporal stores.
#[test]
fn transposed_copies_with_short_rows() -> Result<()> {
    for (dtype, shape) in [
        (DType::U8, [3, 40, 2, 300]),
        (DType::F16, [3, 9, 5, 301]),
        (DType::F32, [2, 16, 1, 5000]),
        (DType::F32, [2, 3, 21, 257]),
        (DType::F32, [2, 17, 4, 50_001]),
        (DType::F64, [5, 64, 1, 129]),
    ] {
        let [a, b, c, d] = shape;
        let all = whole(shape.iter().product(), 1, dtype)?.reshape(shape)?;
        for order in [[0, 3, 1, 2], [0, 3, 2, 1], [3, 0, 2, 1]] {
            let got = values(&all.permute(&order)?.contiguous()?)?;
            let (sizes, steps) = ([a, b, c, d], [b * c * d, c * d, d, 1]);
            let of = |k: usize| order[k] as usize;
            let view = View(0, (0..4).map(|k| (sizes[of(k)], steps[of(k)] as isize)).collect());
            let right = values(&all.flatten(0, -1)?)?;
            assert!(got.iter().zip(view.places()).all(|(&x, f)| x == right[f]), "{dtype} {shape:?} {order:?}");
        }
    }
    Ok(())
}
