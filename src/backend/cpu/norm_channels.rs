//! Normalisation of the channels of a batch on the CPU by known statistics: one pass over all elements in memory order.

use smallvec::SmallVec;

use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::interpreter::TILE;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::norm::{Channels, View, broadcast_view};
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{Streaming, is_worth_it};
use crate::storage::with_host;
use crate::{Compute, Result, Tensor};

/// Elements that are worth a job of the pool.
const JOB: usize = 1 << 14;
/// Elements of a channel that lie side by side, at least.
const RUN: usize = 16;

/// `y = (x - mean) * scale + shift`, by a mean that is the sum of two numbers.
#[inline(always)]
pub(crate) fn shift_in<C: Number>(x: &[C], y: &mut [C], [mean, low]: [C; 2], scale: C, shift: Option<C>) {
    match shift {
        Some(shift) => y.iter_mut().zip(x).for_each(|(y, x)| *y = x.sub(mean).sub(low).mul(scale).add(shift)),
        None => y.iter_mut().zip(x).for_each(|(y, x)| *y = x.sub(mean).sub(low).mul(scale)),
    }
}

vectorised! {
    /// [`shift_in`] with the vectors that the processor has.
    fn shift<'a, C: Number>(_simd: S, x: &'a [C], y: &'a mut [C], mean: C, scale: C, shift: Option<C>) {
        shift_in(x, y, [mean, C::from_i32(0)], scale, shift);
    }
}

/// The factor of a channel, from its variance or, with `rstd`, as it is.
fn scale_of<C: Number>(spread: C, eps: C, rstd: bool) -> C {
    if rstd { spread } else { C::from_i32(1).div(spread.add(eps).sqrt()) }
}

/// The batch norm of `[N, C, ..]` by such numbers; None where it does not lie for [`into`].
pub(crate) fn normalised(x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> {
    if !x.is_contiguous() || x.numel() == 0 {
        return Ok(None);
    }
    let view = View::Batch;
    let from = view.of(&x.detach())?;
    let own = |t: Option<&Tensor>| t.map(|t| broadcast_view(&t.detach(), from.shape(), view.weighted())).transpose();
    let [mean, var, weight, bias] = numbers;
    let own = [own(mean)?, own(var)?, own(weight)?, own(bias)?];
    let out = Tensor::empty_like_shape(x.shape(), x.dtype, x.device())?;
    let done = into(&from, &view.of(&out)?, own.each_ref().map(Option::as_ref), eps, false)?;
    Ok(done.then_some(out))
}

/// Normalises x, of four dims, by mean, variance (with `rstd` its inverse root), weight and bias. False, and nothing is done, unless x and y
/// are contiguous batches of the type that is computed in.
pub(crate) fn into(x: &Tensor, y: &Tensor, numbers: Channels, eps: f64, rstd: bool) -> Result<bool> {
    match x.dtype.compute() {
        Compute::F64 => into_as::<f64>(x, y, numbers, eps, rstd),
        _ => into_as::<f32>(x, y, numbers, eps, rstd),
    }
}

fn into_as<C: Number>(x: &Tensor, y: &Tensor, numbers: Channels, eps: f64, rstd: bool) -> Result<bool> {
    let [_, channels, batch, n] = *x.shape().dims() else { unreachable!("views of four dims") };
    let lies = |t: &Tensor| {
        let (s, same) = (t.strides(), |count: usize, s: isize, step: usize| count == 1 || s == step as isize);
        t.dtype == C::COMPUTE.dtype() && same(channels, s[1], n) && same(batch, s[2], channels * n) && same(n, s[3], 1)
    };
    if n < RUN || !lies(x) || !lies(y) {
        return Ok(false);
    }
    let mut read: SmallVec<[_; 5]> = SmallVec::from_slice(&[&x.storage]);
    read.extend(numbers.iter().map(|t| &t.unwrap_or(x).storage));
    let (count, bytes) = (x.numel(), x.numel() * x.dtype.size());
    let streamed = is_worth_it(bytes, 2 * bytes);
    with_host(&read, &[&y.storage], |reads, writes| {
        // An element for each channel.
        let each = |k: usize| {
            numbers[k].map(|t| {
                let mut all = vec![C::from_i32(0); channels];
                load_tile(t.dtype, reads[1 + k], t.layout.offset, t.strides()[1], &mut all);
                all
            })
        };
        let (mean, mut scale, shifts) = (each(0).expect("there is one"), each(1).expect("there is one"), each(3));
        let eps = C::from_f64(eps);
        scale.iter_mut().for_each(|s| *s = scale_of(*s, eps, rstd));
        each(2).iter().for_each(|weight| scale.iter_mut().zip(weight).for_each(|(s, w)| *s = s.mul(*w)));
        let from = &bytemuck::cast_slice::<u8, C>(reads[0])[x.layout.offset..][..count];
        let to = &mut bytemuck::cast_slice_mut::<u8, C>(&mut *writes[0])[y.layout.offset..][..count];
        parallel::for_each_chunk(to, JOB, |i, part| {
            let streaming = streamed.then(Streaming::new);
            let mut tile = [C::from_i32(0); TILE];
            let (mut at, mut rest) = (i * JOB, part);
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

    /// Every length of runs, whole jobs and parts of them, and what is streamed, against the definition.
    #[test]
    fn as_defined() -> Result<()> {
        let shapes = [[2, 3, 15], [2, 3, 16], [1, 1, 17], [5, 1, 40], [1, 4, 33], [3, 2, JOB + 7], [40, 5, 300]];
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
                    assert_eq!(normalised(&given, numbers, options.eps)?.is_some(), n >= RUN);
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
