//! Tests of gather, scatter and other operations on indices.

use super::{Suite, VIEWS, View, numbers, specials};
use crate::backend::problem::index::{Combine, IndexTerm, Indexed, Scatter};
use crate::layout::Layout;
use crate::{DType, Result, Tensor};

/// Returns the layout of `t` with stride 0 and the size `size` along dim d, and the stride that `t` has along d.
fn without(t: &Tensor, d: usize, size: usize) -> (Layout, isize) {
    let (mut dims, mut strides) = (t.shape().dims().to_vec(), t.layout.strides.clone());
    let step = std::mem::replace(&mut strides[d], 0);
    dims[d] = size;
    (Layout { shape: dims.into(), strides, offset: t.layout.offset }, step)
}

/// Creates a tensor of `count` indices along dim d: the same indices for all lines, or, with `each`, different indices for each line.
fn index(
    suite: &mut Suite,
    (view, dtype): (View, DType),
    (dims, d, count): (&[usize], usize, usize),
    each: bool,
    wraps: bool,
) -> Result<Tensor> {
    let (size, mut shape) = (dims[d], if each { dims.to_vec() } else { vec![1; dims.len()] });
    shape[d] = count;
    let below = if wraps { size as f64 } else { 0.0 };
    let index = suite.tensor(view, &shape, dtype, |r| r.next_below(size + below as usize) as f64 - below)?;
    shape = dims.to_vec();
    shape[d] = count;
    Ok(index.with_layout(index.layout.broadcast_to(&shape.into())))
}

/// For each case: the view, the shape, the indexed dim, and the number of indices.
const SHAPES: [(View, &[usize], usize, usize); 5] = [
    (View::Plain, &[11, 64], 0, 7),
    (View::Plain, &[5, 33], 1, 65),
    (View::Gapped, &[3, 17, 5], 1, 31),
    (View::Odd, &[4, 2, 13], 2, 1),
    (View::Odd, &[7, 9], 0, 129),
];

pub(super) fn gather(suite: &mut Suite) -> Result<()> {
    for (dtype, of) in
        [(DType::F32, DType::I64), (DType::F16, DType::I32), (DType::U8, DType::I64), (DType::F64, DType::I64)]
    {
        suite.runs_on_opencl = of == DType::I32 || dtype == DType::F32;
        for (view, dims, d, count) in SHAPES {
            for (each, wraps) in [(true, false), (false, true)] {
                let x = suite.tensor(view, dims, dtype, specials)?;
                let index = index(suite, (view, of), (dims, d, count), each, wraps)?;
                suite.compare(format!("{view:?} {dims:?}, dim {d}, {count}, {each}"), dtype, 0, |side| {
                    let (x, index) = (side.upload(&x)?, side.upload(&index)?);
                    let (x_layout, step) = without(&x, d, count);
                    let out = side.alloc_output(&x_layout.shape, dtype)?;
                    let index_layout = index.layout.clone();
                    let size = dims[d];
                    let g = Indexed { op: "gather", x: &x, x_layout, index: &index, index_layout, size, step, wraps };
                    side.backend.gather(&g, &out)?;
                    Ok(Some(vec![out]))
                })?;
            }
        }
    }
    Ok(())
}

pub(super) fn scatter(suite: &mut Suite) -> Result<()> {
    use Combine::{Add, Max, Min, Multiply, Set};
    use DType::{Bool, F16, F32, I8, I32, I64};
    for (combine, dtype) in [
        (Set, F32),
        (Set, F16),
        (Add, F32),
        (Multiply, I64),
        (Max, F32),
        (Min, I32),
        (Add, I8),
        (Max, F16),
        (Add, Bool),
    ] {
        suite.runs_on_opencl = matches!((combine, dtype), (Set | Add | Max, F32) | (Add, Bool));
        for (view, dims, d, count) in SHAPES {
            for each in [true, false] {
                let number = if combine == Add { numbers } else { specials };
                let mut from = dims.to_vec();
                from[d] = count;
                let (x, target) = (suite.tensor(view, &from, dtype, number)?, suite.tensor(view, dims, dtype, number)?);
                let index = index(suite, (view, I64), (dims, d, count), each, false)?;
                let n = if combine == Add { count } else { 0 };
                suite.compare(
                    format!("{combine:?} {view:?} {dims:?}, dim {d}, {count}, {each}"),
                    dtype,
                    n,
                    |side| {
                        let (x, index, target) = (side.upload(&x)?, side.upload(&index)?, side.upload(&target)?);
                        let (layout, step) = without(&target, d, count);
                        let (x_layout, index_layout) = (x.layout.clone(), index.layout.clone());
                        let (size, wraps) = (dims[d], false);
                        let moved =
                            &Indexed { op: "scatter", x: &x, x_layout, index: &index, index_layout, size, step, wraps };
                        side.backend.scatter(&Scatter { moved, combine, target: &target, layout: &layout, d })?;
                        Ok(Some(vec![target]))
                    },
                )?;
            }
        }
    }
    Ok(())
}

pub(super) fn linear_index(suite: &mut Suite) -> Result<()> {
    for view in VIEWS {
        let dims = [5, 13];
        let index = suite.tensor(view, &dims, DType::I64, |r| r.next_below(14) as f64 - 7.0)?;
        for (step, base) in [(1, Some(0)), (-3, Some(18)), (65, None)] {
            suite.compare(format!("{view:?}, step {step}, {base:?}"), DType::I64, 0, |side| {
                let (index, out) = (side.upload(&index)?, side.alloc_output(dims, DType::I64)?);
                for (step, base) in [(2, Some(5)), (step, base)] {
                    let (op, size) = ("index", 7);
                    side.backend.linear_index(&IndexTerm { op, index: &index, size, step, base, out: &out })?;
                }
                Ok(Some(vec![out]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn one_hot(suite: &mut Suite) -> Result<()> {
    for view in VIEWS {
        for (dims, classes) in [(&[1][..], 1), (&[7, 9], 13), (&[2, 3, 5], 65)] {
            let x = suite.tensor(view, dims, DType::I64, |r| r.next_below(classes) as f64)?;
            suite.compare(format!("{view:?} {dims:?}, {classes}"), DType::I64, 0, |side| {
                let out = side.alloc_output([dims, &[classes]].concat(), DType::I64)?;
                side.backend.one_hot("one_hot", &side.upload(&x)?, &out)?;
                Ok(Some(vec![out]))
            })?;
        }
    }
    Ok(())
}

/// The shape of each mask, and k if one in k elements is nonzero: all elements, some, or none.
const MASKS: [(&[usize], usize); 5] = [(&[1], 1), (&[3, 65], 3), (&[2, 9, 31], 50), (&[5003], 2), (&[4, 8], 1_000_000)];

pub(super) fn nonzero(suite: &mut Suite) -> Result<()> {
    for (dims, rare) in MASKS {
        for (view, dtype) in [(View::Plain, DType::F32), (View::Odd, DType::Bool), (View::Gapped, DType::Bool)] {
            let x = suite.tensor(view, dims, dtype, |r| f64::from(r.next_below(rare) == 0))?;
            let mask = suite.tensor(View::Plain, dims, DType::Bool, |_| 0.0)?;
            super::write(&mask, super::read(&x)?)?;
            suite.compare(format!("{view:?} {dims:?}, one of {rare}"), dtype, 0, |side| {
                let (x, mask) = (side.upload(&x)?, side.upload(&mask)?);
                Ok(Some(vec![side.backend.nonzero(&x, &|| Ok(mask.detach()), dims)?]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn masked_select(suite: &mut Suite) -> Result<()> {
    for (dims, rare) in MASKS {
        for view in [View::Plain, View::Odd] {
            let mask = suite.tensor(view, dims, DType::Bool, |r| f64::from(r.next_below(rare) == 0))?;
            let x = suite.tensor(View::Gapped, dims, DType::F32, specials)?;
            suite.compare(format!("{view:?} {dims:?}, one of {rare}"), DType::F32, 0, |side| {
                Ok(side.backend.masked_select(&side.upload(&x)?, &side.upload(&mask)?)?.map(|out| vec![out]))
            })?;
        }
    }
    Ok(())
}
