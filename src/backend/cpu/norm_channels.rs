//! Normalisation of a batch's channels on the CPU with known statistics, in one pass over all elements in memory order.

use smallvec::SmallVec;

use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::dispatch::for_float;
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::norm::{Channels, RowGrouping, broadcast_view};
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{Streaming, should_stream};
use crate::storage::with_host;
use crate::{Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 14;
/// The minimum number of contiguous elements of a channel for this method.
const MIN_RUN_LEN: usize = 16;

/// Computes `y = (x - mean) * scale + shift`. The mean is given as the sum of two numbers, for more digits.
#[inline(always)]
pub(crate) fn shift_simd<C: Number>(x: &[C], y: &mut [C], [mean, low]: [C; 2], scale: C, shift: Option<C>) {
    match shift {
        Some(shift) => y.iter_mut().zip(x).for_each(|(y, x)| *y = x.sub(mean).sub(low).mul(scale).add(shift)),
        None => y.iter_mut().zip(x).for_each(|(y, x)| *y = x.sub(mean).sub(low).mul(scale)),
    }
}

vectorised! {
    /// Computes [`shift_simd`] with the processor's vectors.
    fn shift<'a, C: Number>(_simd: S, x: &'a [C], y: &'a mut [C], mean: C, scale: C, shift: Option<C>) {
        shift_simd(x, y, [mean, C::from_i32(0)], scale, shift);
    }
}

/// Computes the batch norm of `[N, C, ..]` from the channels' statistics. Returns `None` if [`normalise_into`] does not support the
/// layout.
pub(crate) fn normalise_batch(x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> {
    if !x.is_contiguous() || x.numel() == 0 {
        return Ok(None);
    }
    let view = RowGrouping::Batch;
    let from = view.as_rows(&x.detach())?;
    let own = |t: Option<&Tensor>| t.map(|t| broadcast_view(&t.detach(), from.shape(), view.weight_dims())).transpose();
    let [mean, var, weight, bias] = numbers;
    let own = [own(mean)?, own(var)?, own(weight)?, own(bias)?];
    let out = Tensor::empty_with_shape(x.shape(), x.dtype, x.device())?;
    let done = normalise_into(&from, &view.as_rows(&out)?, own.each_ref().map(Option::as_ref), eps, false)?;
    Ok(done.then_some(out))
}

/// Normalises x, a four-dim view, by mean, variance (with `rstd`, the inverse standard deviation instead of the variance), weight and
/// bias. Returns false, without any effect, unless x and y are contiguous batches of the compute type.
pub(crate) fn normalise_into(x: &Tensor, y: &Tensor, numbers: Channels, eps: f64, rstd: bool) -> Result<bool> {
    for_float!(x.dtype.compute(), C => normalise_into_as::<C>(x, y, numbers, eps, rstd))
}

fn normalise_into_as<C: Number>(x: &Tensor, y: &Tensor, numbers: Channels, eps: f64, rstd: bool) -> Result<bool> {
    let [_, channels, batch, n] = *x.shape().dims() else { unreachable!("views of four dims") };
    let has_batch_layout = |t: &Tensor| {
        let (s, same) = (t.strides(), |count: usize, s: isize, step: usize| count == 1 || s == step as isize);
        t.dtype == C::COMPUTE.dtype() && same(channels, s[1], n) && same(batch, s[2], channels * n) && same(n, s[3], 1)
    };
    if n < MIN_RUN_LEN || !has_batch_layout(x) || !has_batch_layout(y) {
        return Ok(false);
    }
    let mut read: SmallVec<[_; 5]> = SmallVec::from_slice(&[&x.storage]);
    read.extend(numbers.iter().map(|t| &t.unwrap_or(x).storage));
    let (count, bytes) = (x.numel(), x.numel() * x.dtype.size());
    let streamed = should_stream(bytes, 2 * bytes);
    with_host(&read, &[&y.storage], |reads, writes| {
        // Reads operand `k`, which has one number for each channel.
        let each = |k: usize| {
            numbers[k].map(|t| {
                let mut all = vec![C::from_i32(0); channels];
                load_tile(t.dtype, reads[1 + k], t.layout.offset, t.strides()[1], &mut all);
                all
            })
        };
        let (mean, mut scale, shifts) = (each(0).expect("there is one"), each(1).expect("there is one"), each(3));
        let eps = C::from_f64(eps);
        if !rstd {
            scale.iter_mut().for_each(|s| *s = C::from_i32(1).div(s.add(eps).sqrt()));
        }
        each(2).iter().for_each(|weight| scale.iter_mut().zip(weight).for_each(|(s, w)| *s = s.mul(*w)));
        let from = &bytemuck::cast_slice::<u8, C>(reads[0])[x.layout.offset..][..count];
        let to = &mut bytemuck::cast_slice_mut::<u8, C>(&mut *writes[0])[y.layout.offset..][..count];
        parallel::for_each_chunk(to, JOB_ELEMENTS, |i, part| {
            let streaming = streamed.then(Streaming::new);
            let mut tile = [C::from_i32(0); TILE];
            let (mut at, mut rest) = (i * JOB_ELEMENTS, part);
            while !rest.is_empty() {
                let most = if streamed { TILE } else { n };
                let (run, more) = rest.split_at_mut(most.min(n - at % n).min(rest.len()));
                let (c, x) = (at / n % channels, &from[at..][..run.len()]);
                let shift_to = |y: &mut [C]| shift(x, y, mean[c], scale[c], shifts.as_ref().map(|s| s[c]));
                match &streaming {
                    Some(streaming) => {
                        let tile = &mut tile[..run.len()];
                        shift_to(&mut *tile);
                        streaming.copy(run, tile);
                    }
                    None => shift_to(run),
                }
                at += x.len();
                rest = more;
            }
        });
    })?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BatchNormOptions;
    use crate::Device;

    /// Batch norm equals its definition for channels of every length, for whole and partial jobs, and for results written with
    /// non-temporal stores.
    #[test]
    fn batch_norm_equals_its_definition() -> Result<()> {
        let shapes =
            [[2, 3, 15], [2, 3, 16], [1, 1, 17], [5, 1, 40], [1, 4, 33], [3, 2, JOB_ELEMENTS + 7], [40, 5, 300]];
        for [batch, channels, n] in shapes.into_iter().chain([[2, 3, 1_100_003]]) {
            let of = |count: usize, f: &dyn Fn(usize) -> f64| (0..count).map(f).collect::<Vec<f64>>();
            let x = of(batch * channels * n, &|i| (i * 7919 % 1009) as f64 / 100.0 - 5.0);
            let [mean, var, weight, bias] = [0.3, 0.5, -0.7, 1.1].map(|by| of(channels, &|c| by + c as f64));
            for (dtype, within) in [(crate::DType::F32, 1e-6), (crate::DType::F64, 1e-14)] {
                let vector = |t: &[f64]| Tensor::from_slice(t, channels, Device::Cpu)?.to_dtype(dtype);
                let given = Tensor::from_slice(&x, [batch, channels, n], Device::Cpu)?.to_dtype(dtype)?;
                let [m, v, w, b] = [vector(&mean)?, vector(&var)?, vector(&weight)?, vector(&bias)?];
                for (weighted, shifted) in [(true, true), (true, false), (false, true), (false, false)] {
                    let (weight_of, bias_of) = (weighted.then_some(&w), shifted.then_some(&b));
                    let options = BatchNormOptions {
                        running_mean: Some(&m),
                        running_var: Some(&v),
                        weight: weight_of,
                        bias: bias_of,
                        ..BatchNormOptions::default()
                    };
                    let numbers = [Some(&m), Some(&v), weight_of, bias_of];
                    assert_eq!(normalise_batch(&given, numbers, options.eps)?.is_some(), n >= MIN_RUN_LEN);
                    let got = given.batch_norm(options)?.to_dtype(crate::DType::F64)?.to_vec::<f64>()?;
                    for (i, (got, x)) in got.iter().zip(&x).enumerate() {
                        let c = i / n % channels;
                        let w = if weighted { weight[c] } else { 1.0 };
                        let b = if shifted { bias[c] } else { 0.0 };
                        let right = (x - mean[c]) / (var[c] + options.eps).sqrt() * w + b;
                        let size = 6.0 * (x.abs() + mean[c].abs()) * w.abs() + b.abs();
                        assert!((got - right).abs() <= within * size, "{dtype} {i} of {batch} x {channels} x {n}");
                    }
                }
            }
        }
        Ok(())
    }
}
