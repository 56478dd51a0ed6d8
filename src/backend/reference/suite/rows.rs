//! Tests of operations on whole rows: softmax, cross-entropy and normalisation.

use super::{Suite, VIEWS, View, factors, numbers, read, specials, write};
use crate::backend::problem::cross_entropy::{CrossEntropy, LabelEntropy, LossReduction};
use crate::backend::problem::norm::{NormForward, Normalisation, RowGrouping, Variance, broadcast_view};
use crate::backend::problem::softmax::{MaskKind, RowOp, Softmax, SoftmaxMask};
use crate::{DType, Device, Result, Tensor};

pub(super) fn softmax(suite: &mut Suite) -> Result<()> {
    use DType::{Bool, F16, F32, F64};
    let mask = |kind, causal, first| SoftmaxMask { kind, causal, first };
    let none = SoftmaxMask::default();
    for (kind, dtype, z_dtype, mask) in [
        (RowOp::Softmax, F32, F32, none),
        (RowOp::Softmax, F16, F16, none),
        (RowOp::LogSoftmax, F32, F32, none),
        (RowOp::LogSumExp, F64, F64, none),
        (RowOp::SoftmaxGrad, F32, F32, none),
        (RowOp::LogSoftmaxGrad, F32, F32, none),
        (RowOp::MaskedSoftmax, F32, Bool, mask(MaskKind::Keep, 0, 0)),
        (RowOp::MaskedSoftmax, F32, F32, mask(MaskKind::Add, 0, 0)),
        (RowOp::MaskedSoftmax, F32, F32, mask(MaskKind::None, 5, 2)),
    ] {
        suite.runs_on_opencl = dtype == F32;
        let masked = kind == RowOp::MaskedSoftmax;
        let two = mask.kind != MaskKind::None || matches!(kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad);
        for (view, dims, d) in [
            (View::Plain, &[7, 1][..], 1),
            (View::Plain, &[3, 5, 31], 2),
            (View::Plain, &[2, 10, 513], 2),
            (View::Gapped, &[2, 65, 9], 1),
            (View::Odd, &[2, 5, 64], 2),
        ] {
            if masked && d + 1 != dims.len() {
                continue;
            }
            let number = if matches!(kind, RowOp::Softmax | RowOp::LogSumExp) { specials } else { numbers };
            let x = suite.tensor(view, dims, dtype, number)?;
            let z = suite.tensor(view, dims, z_dtype, |r| {
                if z_dtype == Bool { r.next_below(2) as f64 } else { numbers(r) / 8.0 }
            })?;
            suite.compare(format!("{kind:?} of {view:?} {dims:?}, dim {d}, {mask:?}"), dtype, dims[d], |side| {
                let (x, z) = (side.upload(&x)?, if two { side.upload(&z)? } else { side.upload(&x)? });
                let mut result = dims.to_vec();
                result[d] = if kind == RowOp::LogSumExp { 1 } else { result[d] };
                let out = side.alloc_output(result, dtype)?;
                side.backend.softmax(&Softmax { kind, x: &x, z: &z, out: &out, d, mask })?;
                Ok(Some(vec![out]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn cross_entropy(suite: &mut Suite) -> Result<()> {
    use LossReduction::{Mean, None, Sum};
    for (dtype, loss_dtype, reduction, of_grad) in [
        (DType::F32, DType::F32, Mean, true),
        (DType::F16, DType::F16, Sum, true),
        (DType::BF16, DType::F32, Mean, true),
        (DType::F16, DType::F32, None, true),
        (DType::F32, DType::F32, None, false),
        (DType::F64, DType::F64, Mean, false),
    ] {
        suite.runs_on_opencl = dtype == DType::F32;
        for (view, n, classes) in
            [(View::Plain, 1, 1), (View::Plain, 65, 10), (View::Gapped, 7, 513), (View::Odd, 129, 3)]
        {
            let logits = suite.tensor(view, &[n, classes], dtype, numbers)?;
            let labels = suite.tensor(view, &[n], DType::I64, |r| {
                if r.next_below(5) == 0 { -100.0 } else { r.next_below(classes) as f64 }
            })?;
            let count = read(&labels)?.iter().filter(|label| label.to_i64() != -100).count() as i64;
            suite.compare(
                format!("{reduction:?} of {view:?} [{n}, {classes}] in {loss_dtype}"),
                dtype,
                classes.max(n),
                |side| {
                    let (x, labels) = (side.upload(&logits)?, side.upload(&labels)?);
                    let grad = of_grad.then(|| side.alloc_output([n, classes], dtype)).transpose()?;
                    let options = CrossEntropy { reduction, ..CrossEntropy::default() };
                    let count = || side.upload(&Tensor::from_slice(&[count], (), Device::Cpu)?);
                    let entropy = LabelEntropy {
                        logits: &x,
                        labels: &labels,
                        options,
                        dtype: loss_dtype,
                        grad: grad.as_ref(),
                        count: &count,
                    };
                    let parts = side.backend.cross_entropy(&entropy)?;
                    let loss = side.alloc_output(if reduction == None { vec![n] } else { vec![] }, loss_dtype)?;
                    match reduction {
                        None => write(&loss, read(&parts)?)?,
                        _ => write(&loss, [read(&parts)?.iter().map(|part| part.to_f64()).sum::<f64>()])?,
                    }
                    Ok(Some([loss].into_iter().chain(grad).collect()))
                },
            )?;
        }
    }
    Ok(())
}

/// Compares layer, group and batch norms of `[first, second, outer, inner]`, where the last two dims form a row.
pub(super) fn norm(suite: &mut Suite) -> Result<()> {
    use DType::{F16, F32, F64};
    let (layer, group, batch) = ([false, false, false, true], [false, true, true, false], [false, true, false, false]);
    for (view, dims, dtype, own, rms) in [
        (View::Plain, [5, 1, 1, 65], F32, layer, false),
        (View::Gapped, [37, 1, 1, 513], F32, layer, true),
        (View::Odd, [3, 1, 1, 31], F16, layer, false),
        (View::Plain, [2, 3, 4, 17], F32, group, false),
        (View::Plain, [1, 5, 2, 64], F64, batch, false),
        (View::Odd, [1, 3, 7, 11], F32, batch, false),
    ] {
        suite.runs_on_opencl = dtype == F32;
        let of_weight = dims.iter().zip(own).map(|(&n, own)| if own { n } else { 1 }).product();
        let mut tensor = |view, dims: &[usize]| suite.tensor(view, dims, dtype, numbers);
        let (z, g) = (tensor(view, &dims)?, tensor(view, &dims)?);
        let (weight, bias) = (tensor(View::Plain, &[of_weight])?, tensor(View::Plain, &[of_weight])?);
        let n = dims.iter().product();
        suite.compare(format!("{view:?} {dims:?}, weight along {own:?}, rms {rms}"), dtype, n, |side| {
            let (z, g) = (side.upload(&z)?, side.upload(&g)?);
            let weight = broadcast_view(&side.upload(&weight)?, z.shape(), own)?;
            let bias = broadcast_view(&side.upload(&bias)?, z.shape(), own)?;
            let (acc, [first, second, _, inner]) = (dtype.compute().dtype(), dims);
            // The result of a batch norm has the same strides as the batch.
            let room = || match own == batch {
                true => side.alloc_output([2, 1, 3, 0].map(|d: usize| dims[d]), dtype)?.permute(&[3, 1, 0, 2]),
                false => side.alloc_output(dims, dtype),
            };
            let numbers = |count| side.alloc_output([count, first, second, 1, 1], acc);
            let (y, of_views, again, dz, statistics, sums) =
                (room()?, room()?, room()?, room()?, numbers(3)?, numbers(2)?);

            // The forward pass, three times: once directly, and twice through `norm_forward`.
            let (weight, eps) = (Some(&weight), 0.5);
            let forward = Normalisation {
                x: &z,
                y: &y,
                z: None,
                weight,
                bias: Some(&bias),
                statistics: &statistics,
                sums: None,
                columns: None,
                eps,
                rms,
                variance: None,
            };
            side.backend.norm(&forward)?;
            // The second of these launches uses the plan that the first has cached.
            for y in [&of_views, &again] {
                let given = Normalisation { y, ..forward };
                let views = || Ok((z.detach(), y.detach(), weight.map(Tensor::detach), Some(bias.detach())));
                let grouping = &RowGrouping::Last(n);
                side.backend.norm_forward(&NormForward { given, grouping, dims: own, views: &views })?;
            }

            // The backward pass. Sums over rows are computed if each row has one weight, and sums over columns if each column has one.
            let columns = if own[3] { side.backend.alloc_column_sums(&g, first * second, inner)? } else { None };
            let of_rows = (!own[2] && !own[3]).then_some(&sums);
            side.backend.norm(&Normalisation {
                x: &g,
                y: &dz,
                z: Some(&z),
                bias: None,
                sums: of_rows,
                columns: columns.as_ref(),
                ..forward
            })?;
            let mut results = vec![y.detach(), of_views.detach(), again.detach(), statistics.detach(), dz.detach()];
            results.extend(of_rows.map(Tensor::detach));
            if let Some(parts) = columns {
                // The number of parts depends on the backend, so only the sum of all parts is compared.
                let total = read(&parts)?.mapv(|x| x.to_f64()).sum_axis(ndarray::Axis(0));
                let sums = side.alloc_output([2, inner], acc)?;
                write(&sums, total)?;
                results.push(sums);
            }
            Ok(Some(results))
        })?;
    }
    Ok(())
}

pub(super) fn normalise_channels(suite: &mut Suite) -> Result<()> {
    for (view, dims, dtype) in [
        (View::Plain, &[3, 5, 17][..], DType::F32),
        (View::Plain, &[2, 7, 4, 65], DType::F64),
        (View::Odd, &[2, 3, 16], DType::F32),
    ] {
        let x = suite.tensor(view, dims, dtype, numbers)?;
        let mut each = |number: fn(&mut _) -> f64| suite.tensor(View::Gapped, &dims[1..2], dtype, number);
        let (mean, var, weight, bias) = (each(numbers)?, each(factors)?, each(numbers)?, each(numbers)?);
        for whole in [true, false] {
            suite.compare(format!("{view:?} {dims:?}, {whole}"), dtype, 4, |side| {
                let [x, mean, var, weight, bias] = [&x, &mean, &var, &weight, &bias].map(|t| side.upload(t));
                let (mean, var, weight, bias) = (mean?, var?, weight?, bias?);
                let numbers = [Some(&mean), Some(&var), whole.then_some(&weight), whole.then_some(&bias)];
                Ok(side.backend.normalise_channels(&x?, numbers, 1e-5)?.map(|out| vec![out]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn variance(suite: &mut Suite) -> Result<()> {
    for view in VIEWS {
        for (dims, dtype) in [([1, 1, 1, 65], DType::F32), ([2, 3, 5, 17], DType::F16), ([1, 2, 1, 20_011], DType::F32)]
        {
            let x = suite.tensor(view, &dims, dtype, specials)?;
            for root in [false, true] {
                suite.compare(format!("{view:?} {dims:?}, {root}"), dtype, dims[2] * dims[3], |side| {
                    let (x, out) = (side.upload(&x)?, side.alloc_output([dims[0], dims[1]], dtype)?);
                    let freedom = (dims[2] * dims[3] - 1) as f64;
                    let made = side.backend.variance(&Variance { x: &x, out: &out, freedom, root })?;
                    assert!(!made || side.backend.has_variance());
                    Ok(made.then_some(vec![out]))
                })?;
            }
        }
    }
    Ok(())
}
