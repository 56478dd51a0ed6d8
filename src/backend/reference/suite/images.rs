//! Tests of windows over images: convolution, im2col and col2im, pooling and interpolation.

use super::{Reference, Suite, VIEWS, View, numbers, specials};
use crate::backend::Backend;
use crate::backend::opencl::gemm::tests::PRETEND_GPU;
use crate::backend::problem::conv::Conv2d;
use crate::backend::problem::interpolation::{Interpolate, Interpolation, Resize, Samples};
use crate::backend::problem::windows::{Divisor, Im2col, PoolTask, Pooling, Windows};
use crate::storage::{MemoryMode, with_memory_mode};
use crate::{DType, Result};

/// Returns windows with this kernel, stride and dilation, and the same padding on both sides of the image.
fn windows(
    image: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
) -> Windows {
    let grid = [0, 1].map(|d| (image[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) / stride[d] + 1);
    Windows { image, kernel, grid, stride, padding, padding_after: padding, dilation, adaptive: false }
}

/// Returns window geometries that cover the special cases.
fn all_windows() -> [Windows; 5] {
    [
        windows([1, 1], [1, 1], [1, 1], [0, 0], [1, 1]),
        windows([7, 9], [3, 3], [1, 1], [1, 1], [1, 1]),
        windows([5, 17], [2, 3], [2, 1], [0, 2], [1, 2]),
        windows([1, 65], [1, 4], [1, 3], [0, 1], [1, 1]),
        windows([13, 6], [3, 2], [3, 2], [1, 0], [2, 3]),
    ]
}

pub(super) fn convolution(suite: &mut Suite) -> Result<()> {
    for (dtype, groups, [inner, outer]) in [
        (DType::F32, 1, [3, 5]),
        (DType::F32, 4, [1, 2]),
        (DType::F16, 2, [2, 3]),
        (DType::F64, 3, [1, 1]),
        (DType::F32, 1, [17, 33]),
    ] {
        for (w, view) in all_windows().into_iter().zip([View::Plain, View::Gapped, View::Odd, View::Plain, View::Odd]) {
            let ([h, v], [kh, kw], [oh, ow]) = (w.image, w.kernel, w.grid);
            let x = suite.tensor(view, &[2, groups * inner, h, v], dtype, numbers)?;
            let y = suite.tensor(view, &[2, groups * outer, oh, ow], dtype, numbers)?;
            let weight = suite.tensor(view, &[groups * outer, inner, kh, kw], dtype, numbers)?;
            let bias = suite.tensor(View::Plain, &[groups * outer], dtype, numbers)?;
            let terms = (inner * kh * kw).max(outer * kh * kw).max(2 * oh * ow);
            suite.compare(format!("{w:?} of {view:?}, {groups} groups, {inner} -> {outer}"), dtype, terms, |side| {
                let (x, y, weight, bias) =
                    (side.upload(&x)?, side.upload(&y)?, side.upload(&weight)?, side.upload(&bias)?);
                let conv = Conv2d { windows: w, x: &x, weight: &weight, bias: None, groups, single: false };
                let Some(c) = side.backend.convolution(&conv) else { return Ok(None) };
                let slot = side.alloc_output(weight.shape(), dtype)?;
                Ok(Some(vec![
                    c.forward(&x, &weight, Some(&bias))?,
                    c.transposed(&y, &weight, None)?,
                    c.weight_gradient(&x, &y, None)?,
                    c.weight_gradient(&x, &y, Some(slot))?,
                ]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn forward_convolution(suite: &mut Suite) -> Result<()> {
    for (dtype, groups, [inner, outer], mode) in [
        (DType::F32, 1, [3, 5], MemoryMode::Image),
        (DType::F32, 5, [1, 1], MemoryMode::Image),
        (DType::BF16, 1, [4, 4], MemoryMode::Image),
        (DType::F16, 1, [17, 6], MemoryMode::Image),
        (DType::F32, 1, [3, 5], MemoryMode::Buffer), // on a GPU
    ] {
        PRETEND_GPU.set(mode == MemoryMode::Buffer);
        for (w, view) in all_windows().into_iter().zip([View::Plain, View::Gapped, View::Odd, View::Plain, View::Odd]) {
            let ([h, v], [kh, kw]) = (w.image, w.kernel);
            let x = suite.tensor(view, &[2, groups * inner, h, v], dtype, numbers)?;
            let weight = suite.tensor(view, &[groups * outer, inner, kh, kw], dtype, numbers)?;
            let bias = suite.tensor(View::Gapped, &[groups * outer], dtype, numbers)?;
            let what = format!("{w:?} of {view:?}, {groups} groups, {inner} -> {outer}");
            suite.compare(what, dtype, inner * kh * kw, |side| {
                let (x, weight, bias) = (side.upload(&x)?, side.upload(&weight)?, side.upload(&bias)?);
                let conv = Conv2d { windows: w, x: &x, weight: &weight, bias: Some(&bias), groups, single: false };
                let convolve = || side.backend.forward_convolution(&conv);
                Ok(with_memory_mode(mode, convolve)?.map(|out| vec![out]))
            })?;
        }
    }
    PRETEND_GPU.set(false);
    Ok(())
}

pub(super) fn im2col(suite: &mut Suite) -> Result<()> {
    for (dtype, view) in
        [(DType::F32, View::Plain), (DType::F16, View::Odd), (DType::U8, View::Gapped), (DType::I64, View::Odd)]
    {
        suite.runs_on_opencl = dtype == DType::F32 || dtype == DType::U8;
        for w in all_windows() {
            let x = suite.tensor(view, &[2, 3, w.image[0], w.image[1]], dtype, specials)?;
            for inside in [false, true] {
                suite.compare(format!("{w:?} of {view:?}, {inside}"), dtype, 0, |side| {
                    let ([kh, kw], [oh, ow]) = (w.kernel, w.grid);
                    let dims = if inside { [3, kh, kw, 2, oh, ow] } else { [2, 3, kh, kw, oh, ow] };
                    let out = side.alloc_output(dims, dtype)?;
                    side.backend.im2col(&Im2col { windows: &w, x: &side.upload(&x)?, out: &out, inside })?;
                    Ok(Some(vec![out]))
                })?;
            }
        }
    }
    Ok(())
}

pub(super) fn col2im(suite: &mut Suite) -> Result<()> {
    for (dtype, view) in [(DType::F32, View::Plain), (DType::F16, View::Odd), (DType::F64, View::Gapped)] {
        suite.runs_on_opencl = dtype == DType::F32 || dtype == DType::U8;
        for w in all_windows() {
            let dims = [2, 3, w.kernel[0], w.kernel[1], w.grid[0], w.grid[1]];
            let columns = suite.tensor(view, &dims, dtype, numbers)?;
            suite.compare(format!("{w:?} of {view:?}"), dtype, w.kernel[0] * w.kernel[1], |side| {
                let out = side.alloc_output([2, 3, w.image[0], w.image[1]], dtype)?;
                side.backend.col2im(&w, &side.upload(&columns)?, &out)?;
                Ok(Some(vec![out]))
            })?;
        }
    }
    Ok(())
}

pub(super) fn pool(suite: &mut Suite) -> Result<()> {
    let one = [1; 2];
    let adaptive = |image, grid| Windows::adaptive(image, grid);
    // Padding of one more element in front of the image or two more behind it, which an additional window reads.
    let uneven = windows([6, 9], [2, 4], [2, 2], [1, 1], one);
    let shapes = [
        Windows { padding: [0, 1], padding_after: [1, 3], grid: [3, 5], ..uneven },
        Windows { padding: [1, 2], padding_after: [0, 1], grid: [3, 5], ..uneven },
        windows([7, 9], [3, 2], [2, 2], [1, 1], one),
        windows([5, 17], [2, 3], [1, 3], [0, 1], one),
        windows([1, 65], [1, 4], [1, 4], [0, 0], one),
        adaptive([7, 13], [3, 5]),
        adaptive([2, 3], [4, 3]),
    ];
    let by = [Divisor::Window, Divisor::InsideImage, Divisor::Number(7)];
    let means = by.into_iter().flat_map(|by| [PoolTask::Mean(by), PoolTask::MeanBackward(by)]);
    for task in [PoolTask::Max, PoolTask::MaxBackward].into_iter().chain(means) {
        for (dtype, view) in [(DType::F32, View::Plain), (DType::F32, View::Odd), (DType::F16, View::Gapped)] {
            suite.runs_on_opencl = dtype == DType::F32;
            for w in shapes {
                let (image, grid) = ([2, 3, w.image[0], w.image[1]], [2, 3, w.grid[0], w.grid[1]]);
                let (from, to) =
                    if matches!(task, PoolTask::Max | PoolTask::Mean(_)) { (image, grid) } else { (grid, image) };
                let x = suite.tensor(view, &from, dtype, if task == PoolTask::Max { specials } else { numbers })?;
                // Each window has the index of an element inside that window.
                let index = suite.tensor(View::Plain, &grid, DType::I64, numbers)?;
                let (like, values) =
                    (suite.tensor(view, &image, dtype, numbers)?, suite.tensor(view, &grid, dtype, numbers)?);
                let (windows, task_of_index) = (&w, PoolTask::Max);
                Reference.pool(&Pooling { windows, task: task_of_index, x: &like, index: &index, out: &values })?;
                let n = if task == PoolTask::Max { 0 } else { 2 * w.grid[0] * w.grid[1] };
                suite.compare(format!("{task:?} of {view:?}, {w:?}"), dtype, n, |side| {
                    let (x, index, out) = (side.upload(&x)?, side.upload(&index)?, side.alloc_output(to, dtype)?);
                    let of_max = matches!(task, PoolTask::Max | PoolTask::MaxBackward);
                    let read = if of_max { &index } else { &x };
                    side.backend.pool(&Pooling { windows: &w, task, x: &x, index: read, out: &out })?;
                    Ok(Some(vec![out, index]))
                })?;
            }
        }
    }
    Ok(())
}

pub(super) fn interpolate(suite: &mut Suite) -> Result<()> {
    let linear = |align_corners| Interpolation::Linear { align_corners };
    for mode in [Interpolation::Nearest, Interpolation::NearestExact, linear(false), linear(true)] {
        for (view, dtype) in VIEWS.into_iter().zip([DType::F32, DType::F16, DType::F32]) {
            suite.runs_on_opencl = dtype == DType::F32
                && matches!(mode, Interpolation::Nearest | Interpolation::Linear { align_corners: false });
            for ([h, w], [to_h, to_w]) in [([1, 1], [3, 5]), ([7, 5], [13, 2]), ([4, 65], [4, 31])] {
                let samples = |from, to| Samples::new("interpolate", mode, from, to);
                let resize = Resize {
                    rows: (h != to_h).then(|| samples(h, to_h)).transpose()?,
                    columns: Some(samples(w, to_w)?),
                };
                for transposed in [false, true] {
                    let (small, large) = ([2, 3, h, w], [2, 3, to_h, to_w]);
                    let (from, to) = if transposed { (large, small) } else { (small, large) };
                    let x = suite.tensor(view, &from, dtype, numbers)?;
                    suite.compare(format!("{mode:?} {from:?} -> {to:?}, {view:?}"), dtype, 64, |side| {
                        let out = side.alloc_output(to, dtype)?;
                        let (x, out) = (&side.upload(&x)?, &out);
                        side.backend.interpolate(&Interpolate { resize: &resize, x, out, transposed })?;
                        Ok(Some(vec![out.detach()]))
                    })?;
                }
            }
        }
    }
    Ok(())
}
