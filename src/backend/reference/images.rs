//! Windows over images: convolution, im2col and col2im, pooling and interpolation.

use ndarray::{ArrayD, IxDyn};

use super::values::{indices, is_nan, new_tensor, read, read_floats, write};
use crate::backend::problem::conv;
use crate::backend::problem::interpolation::{Resize, Samples};
use crate::backend::problem::windows::{Divisor, PoolTask, Windows};
use crate::{Result, Scalar, Tensor};

/// Returns the taps of window o along dim d that are inside the image, each with the row or column that the tap reads.
fn taps(w: &Windows, d: usize, o: usize) -> Vec<(usize, usize)> {
    let (image, grid) = (w.image[d], w.grid[d]);
    if w.adaptive {
        return (o * image / grid..((o + 1) * image).div_ceil(grid)).enumerate().collect();
    }
    let sees = |k: usize| (o * w.stride[d] + k * w.dilation[d]).checked_sub(w.padding[d]).filter(|&i| i < image);
    (0..w.kernel[d]).filter_map(|k| Some((k, sees(k)?))).collect()
}

/// Calls `f(window, tap, position in the image)` for every tap inside the image of every window, in row-major order.
fn each_tap(w: &Windows, mut f: impl FnMut([usize; 2], [usize; 2], [usize; 2])) {
    for window in indices(&w.grid) {
        let o = [window[0], window[1]];
        for (k, i) in taps(w, 0, o[0]) {
            taps(w, 1, o[1]).into_iter().for_each(|(l, j)| f(o, [k, l], [i, j]));
        }
    }
}

/// A convolution: `y[n, o, window] = bias[o] + sum of x[n, group of o and c, position] * weight[o, c, tap]`. From any two of x, weight and
/// y (the others may be gradients), the third is computed.
pub(super) struct Convolution {
    pub(super) windows: Windows,
    pub(super) groups: usize,
}

impl Convolution {
    /// Calls `f(index in x, index in weight, index in y)` for every product of the sum.
    fn each_product(&self, n: usize, weight: &[usize], mut f: impl FnMut([usize; 4], [usize; 4], [usize; 4])) {
        let (outer, inner) = (weight[0] / self.groups, weight[1]);
        for index in indices(&[n, weight[0], inner]) {
            let [n, o, c] = index[..] else { unreachable!("three dims") };
            each_tap(&self.windows, |[oh, ow], [k, l], [i, j]| {
                f([n, o / outer * inner + c, i, j], [o, c, k, l], [n, o, oh, ow]);
            });
        }
    }

    fn with_bias(dims: [usize; 4], bias: Option<&Tensor>) -> Result<ArrayD<f64>> {
        let bias = bias.map(read_floats).transpose()?;
        Ok(ArrayD::from_shape_fn(&dims[..], |index| bias.as_ref().map_or(0.0, |bias| bias[index[1]])))
    }
}

impl conv::Convolution for Convolution {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (images, w) = (read_floats(x)?, read_floats(weight)?);
        let (n, [rows, columns]) = (images.shape()[0], self.windows.grid);
        let mut y = Convolution::with_bias([n, w.shape()[0], rows, columns], bias)?;
        self.each_product(n, w.shape(), |at_x, at_w, at_y| y[&at_y[..]] += images[&at_x[..]] * w[&at_w[..]]);
        new_tensor(&y, x.dtype)
    }

    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (grads, w) = (read_floats(y)?, read_floats(weight)?);
        let (n, [rows, columns]) = (grads.shape()[0], self.windows.image);
        let mut x = Convolution::with_bias([n, w.shape()[1] * self.groups, rows, columns], bias)?;
        self.each_product(n, w.shape(), |at_x, at_w, at_y| x[&at_x[..]] += grads[&at_y[..]] * w[&at_w[..]]);
        new_tensor(&x, y.dtype)
    }

    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let (images, grads) = (read_floats(x)?, read_floats(y)?);
        let (outer, inner, [rows, columns]) = (grads.shape()[1], images.shape()[1] / self.groups, self.windows.kernel);
        let mut w = ArrayD::<f64>::zeros(&[outer, inner, rows, columns][..]);
        self.each_product(images.shape()[0], &[outer, inner], |at_x, at_w, at_y| {
            w[&at_w[..]] += images[&at_x[..]] * grads[&at_y[..]];
        });
        match slot {
            Some(slot) => write(&slot, w).map(|()| slot),
            None => new_tensor(&w, x.dtype),
        }
    }
}

/// Copies windows to columns `[N, C, kernel, grid]`, or `[C, kernel, N, grid]` if `inside`, with 0 for the padding.
pub(super) fn im2col(w: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()> {
    let images = read(x)?;
    let mut columns = ArrayD::from_elem(out.shape().dims(), Scalar::Int(0));
    for planes in indices(&images.shape()[..2]) {
        let [n, c] = planes[..] else { unreachable!("two dims") };
        each_tap(w, |[oh, ow], [k, l], [i, j]| {
            let to = if inside { [c, k, l, n, oh, ow] } else { [n, c, k, l, oh, ow] };
            columns[&to[..]] = images[&[n, c, i, j][..]];
        });
    }
    write(out, columns)
}

pub(super) fn col2im(w: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> {
    let columns = read(columns)?;
    let mut images = ArrayD::from_elem(out.shape().dims(), Scalar::Int(0));
    for planes in indices(&columns.shape()[..2]) {
        let [n, c] = planes[..] else { unreachable!("two dims") };
        each_tap(w, |[oh, ow], [k, l], [i, j]| {
            let sum = &mut images[&[n, c, i, j][..]];
            *sum = super::values::add(*sum, columns[&[n, c, k, l, oh, ow][..]]);
        });
    }
    write(out, images)
}

/// Returns the image elements that window `[oh, ow]` reads, in row-major order.
fn window_elements(w: &Windows, [oh, ow]: [usize; 2]) -> Vec<[usize; 2]> {
    let columns = taps(w, 1, ow);
    taps(w, 0, oh).into_iter().flat_map(|(_, i)| columns.iter().map(move |&(_, j)| [i, j])).collect()
}

/// Returns the divisor of a window's mean.
fn divisor(w: &Windows, o: [usize; 2], divisor: Divisor) -> f64 {
    let padded = |d: usize| {
        let start = o[d] * w.stride[d];
        (start + w.kernel[d]).min(w.image[d] + w.padding[d] + w.padding_after[d]) - start
    };
    let count = match divisor {
        Divisor::Number(n) => n,
        Divisor::Window if !w.adaptive => padded(0) * padded(1),
        _ => window_elements(w, o).len(),
    };
    count as f64
}

/// `Max` computes the largest element of each window, or the last NaN, and its position in the image. `MaxBackward` adds each window's
/// gradient to the element at that position. Each of `Mean` and `MeanBackward` is the gradient of the other.
pub(super) fn pool(w: &Windows, task: PoolTask, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> {
    let (x, mut results) = (read(x)?, ArrayD::from_elem(out.shape().dims(), Scalar::Int(0)));
    let mut chosen = read(index)?;
    for position in indices(&[x.shape()[0], x.shape()[1], w.grid[0], w.grid[1]]) {
        let [n, c, oh, ow] = position[..] else { unreachable!("four dims") };
        let (window, window_elements) = (&position[..], window_elements(w, [oh, ow]));
        let image = |[i, j]: [usize; 2]| [n, c, i, j];
        let mut give = |at: [usize; 2], share: f64| {
            let sum = &mut results[&image(at)[..]];
            *sum = Scalar::Float(sum.to_f64() + share);
        };
        match task {
            PoolTask::Max => {
                let better = |best: [usize; 2], new: [usize; 2]| {
                    let [a, b] = [best, new].map(|at| x[&image(at)[..]]);
                    if is_nan(b) || super::values::order(b, a).is_gt() { new } else { best }
                };
                let best = window_elements.iter().copied().reduce(better).expect("an element in the image");
                results[window] = x[&image(best)[..]];
                chosen[window] = Scalar::Int((best[0] * w.image[1] + best[1]) as i64);
            }
            PoolTask::MaxBackward => {
                let at = chosen[window].to_i64() as usize;
                give([at / w.image[1], at % w.image[1]], x[window].to_f64());
            }
            PoolTask::Mean(by) => {
                let sum: f64 = window_elements.iter().map(|&at| x[&image(at)[..]].to_f64()).sum();
                results[window] = Scalar::Float(sum / divisor(w, [oh, ow], by));
            }
            PoolTask::MeanBackward(by) => {
                let share = x[window].to_f64() / divisor(w, [oh, ow], by);
                window_elements.into_iter().for_each(|at| give(at, share));
            }
        }
    }
    if task == PoolTask::Max {
        write(index, chosen)?;
    }
    write(out, results)
}

/// Returns the input elements that output o of a resized dim depends on, and their weights.
fn source_weights(samples: Option<Samples>, o: usize) -> Vec<(usize, f64)> {
    match samples.map(|samples| (samples.linear, samples.source(o))) {
        None => vec![(o, 1.0)],
        Some((false, (at, ..))) => vec![(at, 1.0)],
        Some((true, (low, high, share))) => vec![(low, 1.0 - share), (high, share)],
    }
}

/// Computes `out[i, j] = sum of weight * x[k, l]`. If `transposed`, adds `weight * x[i, j]` to each `out[k, l]` instead.
pub(super) fn interpolate(resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()> {
    let (x, mut results) = (read_floats(x)?, ArrayD::<f64>::zeros(IxDyn(out.shape().dims())));
    let large = if transposed { x.shape() } else { out.shape().dims() }.to_vec();
    for index in indices(&large) {
        let [n, c, i, j] = index[..] else { unreachable!("four dims") };
        for (k, row_share) in source_weights(resize.rows, i) {
            for (l, column_share) in source_weights(resize.columns, j) {
                let (share, small) = (row_share * column_share, [n, c, k, l]);
                match transposed {
                    true => results[&small[..]] += share * x[&index[..]],
                    false => results[&index[..]] += share * x[&small[..]],
                }
            }
        }
    }
    write(out, results)
}
