//! Tests of operations on lines along a dim: scans, sorts, searches and selections.

use super::{Random, Suite, VIEWS, View, factors, numbers, specials};
use crate::backend::problem::scan::{RunningReduction, Scan};
use crate::backend::problem::select::{RankQuery, RankedElement, Search, Selected, Sorting, TopK};
use crate::layout::Layout;
use crate::{DType, Device, Result, Tensor};

/// For each case: the view, the shape, and the dim of the lines.
const SHAPES: [(View, &[usize], usize); 6] = [
    (View::Plain, &[3, 65], 1),
    (View::Plain, &[4, 63, 5], 1),
    (View::Gapped, &[2, 9, 64], 2),
    (View::Odd, &[7, 2, 127], 2),
    (View::Odd, &[513, 1], 0),
    (View::Plain, &[1, 1], 1),
];

pub(super) fn scan(suite: &mut Suite) -> Result<()> {
    use DType::{F16, F32, F64, I32, I64};
    for (kind, dtype, to, number) in [
        (Scan::Sum, F32, F32, numbers as fn(&mut Random) -> f64),
        (Scan::Sum, F16, F16, numbers),
        (Scan::Prod, I32, I64, numbers),
        (Scan::Prod, F64, F64, factors),
        (Scan::Max, F32, F32, specials),
        (Scan::Min, I32, I32, numbers),
        (Scan::LogSumExp, F32, F32, numbers),
    ] {
        suite.runs_on_opencl = dtype == F32;
        let long: (View, &[usize], usize) = (View::Plain, &[2, 1031], 1);
        for (view, dims, d) in SHAPES.into_iter().chain([long]) {
            let x = suite.tensor(view, dims, dtype, number)?;
            let n = if kind.is_arg() || !to.is_float() { 0 } else { dims[d] };
            suite.compare(format!("{kind:?} of {view:?} {dims:?}, dim {d}"), dtype, n, |side| {
                let (x, values) = (side.upload(&x)?, side.alloc_output(dims, to)?);
                let indices = kind.is_arg().then(|| side.alloc_output(dims, I64)).transpose()?;
                let indices_or_none = indices.as_ref();
                side.backend.scan(&RunningReduction {
                    scan: kind,
                    x: &x,
                    d,
                    values: &values,
                    indices: indices_or_none,
                })?;
                Ok(Some([values].into_iter().chain(indices).collect()))
            })?;
        }
    }
    Ok(())
}

pub(super) fn sort(suite: &mut Suite) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::I64, DType::I8, DType::I16] {
        suite.runs_on_opencl = dtype == DType::F32;
        for (view, dims, d) in SHAPES {
            let x = suite.tensor(view, dims, dtype, specials)?;
            for descending in [false, true] {
                suite.compare(format!("{view:?} {dims:?}, dim {d}, {descending}"), dtype, 0, |side| {
                    let (values, indices) = (side.alloc_output(dims, dtype)?, side.alloc_output(dims, DType::I64)?);
                    let x = &side.upload(&x)?;
                    side.backend.sort(&Sorting { x, d, descending, values: &values, indices: &indices })?;
                    Ok(Some(vec![values, indices]))
                })?;
            }
        }
    }
    Ok(())
}

pub(super) fn searchsorted(suite: &mut Suite) -> Result<()> {
    for dtype in [DType::F32, DType::BF16, DType::I64] {
        suite.runs_on_opencl = dtype == DType::F32;
        for view in VIEWS {
            for (lines, n, values) in [(1, 64, 7), (3, 5, 13), (2, 0, 3), (5, 513, 1)] {
                // Sorted lines in which elements come in equal pairs.
                let x = suite.tensor(view, &[lines, n], dtype, |_| 0.0)?;
                let rising: Vec<f64> = (0..lines * n).map(|i| (i % n / 2) as f64 - 9.0).collect();
                super::write(&x, rising)?;
                let v = suite.tensor(view, &[lines, values], dtype, specials)?;
                for (right, to) in [(false, DType::I64), (true, DType::I64), (false, DType::Bool)] {
                    suite.compare(
                        format!("{values} values in {view:?} [{lines}, {n}], {right}, {to}"),
                        dtype,
                        0,
                        |side| {
                            let (x, v, out) =
                                (side.upload(&x)?, side.upload(&v)?, side.alloc_output([lines, values], to)?);
                            let strides = [x.strides()[0], 0].into_iter().collect();
                            let of_values = Layout { shape: v.shape().clone(), strides, offset: x.layout.offset };
                            let (sorted, lines, step, values) = (&x, &of_values, x.strides()[1], &v);
                            side.backend.searchsorted(&Search { sorted, lines, step, values, right, out: &out })?;
                            Ok(Some(vec![out]))
                        },
                    )?;
                }
            }
        }
    }
    Ok(())
}

/// Returns the indices, and the values if the backend computes values.
fn parts(chosen: Option<Selected>) -> Option<Vec<Tensor>> {
    chosen.map(|chosen| [Some(chosen.indices), chosen.values].into_iter().flatten().collect())
}

pub(super) fn topk(suite: &mut Suite) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::I64] {
        for (view, dims, d) in SHAPES {
            let x = suite.tensor(view, dims, dtype, specials)?;
            for k in [0, 1, 5, 40, dims[d]].into_iter().filter(|&k| k <= dims[d]) {
                for descending in [false, true] {
                    suite.compare(format!("{k} of {view:?} {dims:?}, dim {d}, {descending}"), dtype, 0, |side| {
                        Ok(parts(side.backend.topk(TopK { x: &side.upload(&x)?, d, k, descending })?))
                    })?;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn kth(suite: &mut Suite) -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::I64] {
        for (view, dims, d) in SHAPES {
            let x = suite.tensor(view, dims, dtype, specials)?;
            let last = dims[d] - 1;
            for nth in [
                RankQuery::Rank(0),
                RankQuery::Rank(dims[d] / 3),
                RankQuery::Rank(last),
                RankQuery::OrNan(last / 2),
                RankQuery::NanMedian,
            ] {
                suite.compare(format!("{nth:?} of {view:?} {dims:?}, dim {d}"), dtype, 0, |side| {
                    Ok(parts(side.backend.kth(RankedElement { x: &side.upload(&x)?, d, rank: nth })?))
                })?;
            }
            let lines = x.numel() / dims[d];
            let ranks: Vec<i64> = (0..lines).map(|line| (line * 7919 % dims[d]) as i64).collect();
            let ranks = Tensor::from_slice(&ranks, lines, Device::Cpu)?;
            suite.compare(format!("ranks of {view:?} {dims:?}, dim {d}"), dtype, 0, |side| {
                let (x, ranks) = (&side.upload(&x)?, &side.upload(&ranks)?);
                Ok(parts(side.backend.kth(RankedElement { x, d, rank: RankQuery::Ranks(ranks) })?))
            })?;
        }
    }
    Ok(())
}
