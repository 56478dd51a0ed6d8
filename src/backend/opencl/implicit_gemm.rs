//! Implicit GEMM: convolutions on tensor cores as products of the weight and a matrix of windows that is never stored. `kernels/gemm_mma.cl` reads
//! the elements of windows from channels-last images, or from channels-last copies. Both gradients are computed as such products as well.
//!
//! Results are channels-last if the images or the weight are channels-last. In that case windows are rows of the left matrix, otherwise
//! columns of the right matrix.

mod blocks;
mod channels_last;
#[cfg(test)]
pub(crate) mod tests;

use std::slice;

use crate::backend::opencl::conv_small;
use crate::backend::opencl::gemm::{ChosenKernel, GemmKernel};
use crate::backend::opencl::gemm_mma::{Mma, WINDOW_PARAMETERS, WindowsOperand, planes};
use crate::backend::opencl::implicit_gemm::blocks::Blocks;
use crate::backend::opencl::implicit_gemm::channels_last::{ChannelsLast, MAX_IMAGE_BYTES, Matrix, Strided, WholeRows};
use crate::backend::opencl::implicit_gemm::channels_last::{channels_last, empty_result, is_channels_last, matrix};
use crate::backend::opencl::prelude::*;
use crate::backend::opencl::window;
use crate::backend::profiled::{describe, describe_convolution};
use crate::device::profiler::operation;

/// The maximum rows and columns of taps for which the kernel handles padding. For more taps, images are copied with their padding.
const MAX_TAPS_WITH_PADDING: usize = 16;

/// The size in bytes of one asynchronous copy. Channels are padded to a multiple of this size.
const PIECE_BYTES: usize = 16;

/// The maximum factor by which padding may increase the number of channels. With a larger factor, im2col takes less memory.
const MAX_PADDING_FACTOR: usize = 3;

/// The maximum number of phases of a strided convolution's image gradient, each of up to two launches. For more phases, im2col is used.
const MAX_PHASES: usize = 4;
/// The minimum number of taps of a phase, unless channels are innermost. With fewer taps, the im2col matrix is hardly larger than the images.
const MIN_TAPS_PER_PHASE: usize = 2;

/// A convolution that is computed by implicit GEMM.
pub(crate) struct ImplicitGemm {
    windows: Windows,
    groups: usize,
    /// The batch size.
    n: usize,
    /// The number of input channels of a group.
    inner: usize,
    /// The number of output channels of a group.
    outer: usize,
    whole_rows: Option<WholeRows>,
    /// Whether images or the weight are channels-last, and whether only the weight is channels-last.
    nhwc: [bool; 2],
    dtype: DType,
    /// The number of bf16 planes of an element, by the precision setting when the convolution was created.
    planes: usize,
    device: &'static ClDevice,
}

/// Windows over images. The distances between windows and between taps are in pixels.
#[derive(Clone, Copy)]
struct Steps {
    kernel: [usize; 2],
    grid: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    /// The number of pixels between the start of the first window and the start of the image; negative if the window starts inside.
    padding: [isize; 2],
}

impl Steps {
    /// Returns the number of rows and columns that all windows together read, including padding.
    fn read_extent(&self) -> [usize; 2] {
        [0, 1].map(|d| (self.grid[d] - 1) * self.stride[d] + (self.kernel[d] - 1) * self.dilation[d] + 1)
    }
}

/// A phase of the image gradient: the rows (or columns) of an image that are a stride apart. All rows of a phase are read by the
/// same taps, so the gradient of these rows is a convolution over the output's gradient.
#[derive(Clone, Copy)]
struct Phase {
    /// The first row of the phase, and the number of its rows.
    first: usize,
    count: usize,
    /// The first tap of the phase, the distance between taps, and the number of taps.
    tap: usize,
    apart: usize,
    taps: usize,
    /// The window whose last tap reads the first row, and the distance to the window whose preceding tap reads the first row.
    start: isize,
    step: usize,
}

/// Returns the plan of `groups` products of the sizes `[m, n, k]`. `steps` holds the strides of both matrices and of the result, each
/// along rows, columns and groups.
fn plan([m, n, k]: [usize; 3], groups: usize, steps: [[isize; 3]; 3]) -> GemmPlan {
    let batch: Dims = (groups > 1).then_some(groups).into_iter().collect();
    let operand =
        |[row, col, group]: [isize; 3]| GemmOperand { row, col, batch: batch.iter().map(|_| group).collect() };
    let [a, b, out] = steps.map(operand);
    GemmPlan { batch, m, n, k, a, b, others: SmallVec::from_iter([out]) }
}

impl ImplicitGemm {
    /// Returns None if other kernels or im2col are faster, or if the device has no tensor cores.
    pub(crate) fn new(conv: &Conv2d) -> Option<ImplicitGemm> {
        let &Conv2d { windows: w, x, weight, groups, single, .. } = conv;
        let ([n, ..], [outer, inner, kh, kw]) = (sizes_4d(x), sizes_4d(weight));
        let (dtype, size) = (x.dtype, x.dtype.size());
        let nhwc = [is_channels_last(x) || is_channels_last(weight), is_channels_last(weight)];
        // For single-pixel windows, row-major images are already the im2col matrix. They need no copy if aligned for asynchronous copies.
        let is_aligned = (w.image[0] * w.image[1] * size).is_multiple_of(4);
        if x.numel() * weight.numel() == 0
            || single && is_aligned && !nhwc[0]
            || !matches!(size, 2 | 4)
            || !window::fits_32_bits(&w)
        {
            return None;
        }
        let outer = outer / groups;
        let [o, filled] = [outer, inner].map(|channels| channels.next_multiple_of(PIECE_BYTES / size));
        let whole_rows = (groups == 1).then(|| WholeRows::new(&w, inner, size)).flatten();
        let (c, k) = whole_rows.map_or((filled, kh * kw * filled), |rows| (rows.pixel, kh * rows.row));
        let along =
            |d: usize| w.image[d] + w.padding[d] + w.padding_after[d] + 2 * (w.dilation[d] * w.kernel[d] + w.stride[d]);
        let bytes = [n, groups, o.max(c), along(0), along(1), size].into_iter().try_fold(1, usize::checked_mul)?;
        if o > MAX_PADDING_FACTOR * outer || c > MAX_PADDING_FACTOR * inner || bytes >= MAX_IMAGE_BYTES {
            return None;
        }
        let device = x.cl_device().ok()?;
        let planes = planes(dtype);
        let made = ImplicitGemm { windows: w, groups, n, inner, outer, whole_rows, nhwc, dtype, planes, device };
        let windows = n * w.grid[0] * w.grid[1];
        made.choose([outer, windows, k], WindowsOperand::Columns, true)?;
        made.choose([outer, k, windows], WindowsOperand::Rows, false)?;
        Some(made)
    }

    fn choose(&self, sizes: [usize; 3], windows: WindowsOperand, along_k: bool) -> Option<Mma> {
        let cores = || self.device.tensor_cores();
        #[cfg(test)]
        let cores = || tests::PRETENDED_CORES.get().unwrap_or_else(cores);
        let plan = plan(sizes, self.groups, [[0; 3]; 3]);
        let device = (self.device.info().compute_units, self.device.tuned(TuningParameter::MmaColumns));
        // Under the current precision setting, this product's k may be too small. In that case the precision of the forward pass is used.
        let of = |planes| Mma::choose_for_windows(&plan, (self.dtype, planes), (windows, along_k), device, cores);
        of(planes(self.dtype)).or_else(|| of(self.planes))
    }

    /// Returns the channels-last images that windows are read from, and the steps of the windows over these images.
    fn input(&self, x: &Tensor) -> Result<(ChannelsLast, Steps)> {
        let w = self.windows;
        let padding = w.padding.map(|p| p as isize);
        let steps = Steps { kernel: w.kernel, grid: w.grid, stride: w.stride, dilation: w.dilation, padding };
        if let Some(rows) = self.whole_rows {
            return rows.images(x, steps);
        }
        let images = Strided::images(x, self.groups);
        let single = w.kernel == [1, 1] && w.padding == [0, 0] && w.stride != [1, 1];
        match images.subsampled(x, &w).filter(|_| single) {
            Some(pixels) => Ok((channels_last(x, pixels, [0, 0], w.grid)?, Steps { stride: [1, 1], ..steps })),
            None => images_for_taps(x, images, steps),
        }
    }

    /// Returns the blocks of pixels from which the image gradient is assembled. None if the images have enough channels for a product by phases.
    fn blocks(&self) -> Option<Blocks> {
        (self.groups == 1).then(|| Blocks::new(&self.windows, self.inner)).flatten()
    }

    /// Returns the phases of the rows (d = 0) or columns (d = 1) of images.
    fn phases(&self, d: usize) -> Vec<Phase> {
        let Windows { image, kernel, stride, padding, dilation, .. } = self.windows;
        let (stride, dilation) = (stride[d], dilation[d]);
        let phase = |first: usize| {
            let padded = first + padding[d];
            let mut taps = (0..kernel[d]).filter(|tap| tap * dilation % stride == padded % stride);
            let (first_tap, next, rest) = (taps.next(), taps.next(), taps.count());
            let tap = first_tap.unwrap_or(0);
            let taps = usize::from(first_tap.is_some()) + usize::from(next.is_some()) + rest;
            let apart = next.map_or(1, |next| next - tap);
            let step = apart * dilation / stride;
            let before = taps.saturating_sub(1) * step;
            let start = (padded as isize - (tap * dilation) as isize) / stride as isize - before as isize;
            Phase { first, count: (image[d] - first).div_ceil(stride), tap, apart, taps, start, step }
        };
        (0..stride.min(image[d])).map(phase).collect()
    }

    /// Returns the phases of rows and columns that have taps, and whether all phases have taps.
    fn phases_with_taps(&self) -> (Vec<[Phase; 2]>, bool) {
        let [rows, columns] = [0, 1].map(|d| self.phases(d));
        let all = rows.iter().flat_map(|&row| columns.iter().map(move |&column| [row, column]));
        let reached: Vec<_> = all.filter(|phases| phases.iter().all(|phase| phase.taps > 0)).collect();
        let whole = reached.len() == rows.len() * columns.len();
        (reached, whole)
    }

    /// Returns the weight as a matrix, for channels-last (`last`) or row-major results. With `last`, rows may be contiguous instead of channels.
    fn matrix(&self, weight: &Tensor, view: Strided, last: bool) -> Result<Matrix> {
        // TF32 is fastest if the matrix is contiguous along k.
        matrix(weight, view, last && (self.dtype != DType::F32 || planes(self.dtype) > 1))
    }

    /// Writes to `out`, `[N, channels, grid]`, the product of each group's weight and the windows over that group's channels, plus a
    /// bias. `apart` is true if adjacent results are not contiguous, and `last` if channels are innermost in `out`.
    fn multiply(
        &self,
        (images, steps): (ChannelsLast, Steps),
        matrix: Matrix,
        bias: Option<&Tensor>,
        (out, apart, last): (&Tensor, bool, bool),
    ) -> Result<()> {
        let (groups, [n, channels, height, width]) = (self.groups, sizes_4d(out));
        let (count, windows, k) =
            (channels / groups, n * height * width, steps.kernel[0] * steps.kernel[1] * matrix.channels);
        let [of_image, of_row, down, right] = [0, 1, 2, 3].map(|d| out.strides()[d]);
        let &Matrix { channel, row, group, taps, .. } = &matrix;
        // The column stride of the result decides whether a work-item stores several results at once.
        let pixel = if last && apart { channels as isize } else { right };
        let of_matrix = [row, channel, group];
        let of_images = [0, 0, images.channels as isize];
        let of_out = [of_row, pixel, of_row * count as isize];
        let (windows_as, sizes, [a, b, of_out]) = if last {
            let flip = |[row, col, group]: [isize; 3]| [col, row, group];
            let windows_as = if apart { WindowsOperand::LeftApart } else { WindowsOperand::Left };
            (windows_as, [windows, count, k], [of_images, flip(of_matrix), flip(of_out)])
        } else {
            let windows_as = if apart { WindowsOperand::ColumnsApart } else { WindowsOperand::Columns };
            (windows_as, [count, windows, k], [of_matrix, of_images, of_out])
        };
        let mut plan = plan(sizes, groups, [a, b, of_out]);
        if let Some(bias) = bias {
            let step = bias.strides()[0];
            let batch = plan.batch.iter().map(|_| step * count as isize).collect();
            let (row, col) = if last { (0, step) } else { (step, 0) };
            plan.others.push(GemmOperand { row, col, batch });
        }
        let mma = self.choose(sizes, windows_as, channel == 1).ok_or_else(unsupported_error)?;
        // The pixels of an image are contiguous, so from the last pixel the kernel advances only by the distance to the next image.
        let after = if windows_as == WindowsOperand::Columns { of_image - (height * width) as isize } else { of_image };
        let left_right = if last { [&images.tensor, &matrix.tensor] } else { [&matrix.tensor, &images.tensor] };
        let tensors: SmallVec<[&Tensor; 4]> = left_right.into_iter().chain([out]).chain(bias).collect();
        launch(mma, plan, &tensors, &images, steps, [after, down, right, taps[0], taps[1]])
    }
}

/// Returns the images that windows are read from. If windows have more than [`MAX_TAPS_WITH_PADDING`] rows or columns, this is a copy with padding.
fn images_for_taps(t: &Tensor, strided: Strided, steps: Steps) -> Result<(ChannelsLast, Steps)> {
    let [.., rows, columns] = sizes_4d(t);
    if steps.kernel.iter().all(|&taps| taps <= MAX_TAPS_WITH_PADDING) {
        return Ok((channels_last(t, strided, [0, 0], [rows, columns])?, steps));
    }
    Ok((channels_last(t, strided, steps.padding, steps.read_extent())?, Steps { padding: [0, 0], ..steps }))
}

fn unsupported_error() -> Error {
    Error::invalid("conv2d", "no tensor-core kernel fits this convolution any more")
}

/// Launches the product of `tensors`: the left matrix, the right matrix, the result and optionally a bias. `strides` holds the parameters AFTER
/// and following of `kernels/windows_mma.cl`: strides of the result and of the weight's taps.
fn launch(
    mma: Mma,
    plan: GemmPlan,
    tensors: &[&Tensor],
    images: &ChannelsLast,
    steps: Steps,
    strides: [isize; 5],
) -> Result<()> {
    let Steps { kernel, grid, stride, dilation, padding } = steps;
    let &ChannelsLast { channels, inside, size: [rows, columns], pixel, .. } = images;
    let pairs = [kernel, dilation, stride].into_iter().flatten().map(|n| n as isize).chain(padding);
    let sizes = [rows, columns, grid[0] * grid[1], grid[1], rows * columns * pixel, columns * pixel, pixel];
    let numbers = std::iter::once(channels as isize)
        .chain(pairs)
        .chain(sizes.map(|n| n as isize))
        .chain(strides)
        .chain([inside as isize]);
    let windows: SmallVec<[isize; WINDOW_PARAMETERS]> = numbers.collect();
    let device = tensors[0].cl_device()?;
    let epilogue = slice::from_ref(if tensors.len() > 3 { &EPILOGUES.biased } else { &EPILOGUES.product });
    let mut numbers: SmallVec<[u64; 64]> = hashed_values(&mma).into_iter().collect();
    numbers.extend([plan.m, plan.n, plan.k].map(|n| n as u64).into_iter().chain(windows.iter().map(|&n| n as u64)));
    let key = Key { kind: OpKind::ImplicitGemm, numbers: &numbers, exprs: epilogue, tensors };
    let compute = tensors[0].dtype.compute();
    let prepare = || {
        let (plan, variant) = (plan.clone(), GemmKernel::Mma(mma));
        ChosenKernel {
            plan,
            variant,
            order: [0, 1],
            operands: tensors,
            outs: 1,
            epilogue,
            compute,
            sums: None,
            has_sums_tensor: false,
            windows: &windows,
        }
        .make_plan(device)
    };
    launch_cache::launch_cached(&key, Params::default(), prepare).map(drop)
}

impl Convolution for ImplicitGemm {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe_convolution("conv2d", &self.windows, x, weight));
        let ([n, ..], [o, ..], [rows, columns]) = (sizes_4d(x), sizes_4d(weight), self.windows.grid);
        let last = self.nhwc[0] || is_channels_last(x);
        if let Some(made) = conv_small::forward(&self.windows, x, weight, bias, last)? {
            return Ok(made);
        }
        let out = empty_result([n, o, rows, columns], last, false, x)?;
        let matrix = match self.whole_rows {
            Some(rows) => rows.matrix(weight)?,
            None => self.matrix(weight, Strided::weight(weight, self.groups), last)?,
        };
        self.multiply(self.input(x)?, matrix, bias, (&out, false, last))?;
        Ok(mark_written(out))
    }

    /// Each phase of strided windows takes one or two launches, and pixels that no window reads are filled with zeros first. Returns false
    /// if im2col is faster.
    fn has_transposed(&self, biased: bool) -> bool {
        let Windows { kernel, stride, .. } = self.windows;
        let (count, last) = (stride[0] * stride[1], self.nhwc[0]);
        let filled = self.outer.next_multiple_of(PIECE_BYTES / self.dtype.size());
        if count > MAX_PHASES || !last && count > 1 && kernel[0] * kernel[1] < MIN_TAPS_PER_PHASE * count {
            return false;
        }
        let has_kernel = |[rows, columns]: &[Phase; 2]| {
            let (windows, k) = (self.n * rows.count * columns.count, rows.taps * columns.taps * filled);
            self.choose([self.inner, windows, k], WindowsOperand::Columns, true).is_some()
        };
        let (phases, whole) = self.phases_with_taps();
        (whole || last && !biased) && phases.iter().all(has_kernel)
    }

    /// Computes each phase as a convolution over `y` with a stride of one pixel. The window of an image pixel covers the elements of `y` whose
    /// windows contain that pixel, and the taps are the weights of that pixel in these windows.
    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe_convolution("conv_transpose2d", &self.windows, y, weight));
        let ([n, ..], [h, w], stride) = (sizes_4d(y), self.windows.image, self.windows.stride);
        let (channels, last) = (self.groups * self.inner, self.nhwc[0] || is_channels_last(y));
        let (phases, whole) = self.phases_with_taps();
        let out = empty_result([n, channels, h, w], last, !whole, y)?;
        let step = |d: usize| out.strides()[d].unsigned_abs();
        // All phases read the same images, so the images are copied at most once.
        let strided = Strided::images(y, self.groups);
        let narrow = phases.iter().flatten().all(|phase| phase.taps <= MAX_TAPS_WITH_PADDING);
        let shared = narrow.then(|| channels_last(y, strided, [0, 0], self.windows.grid)).transpose()?;
        for [rows, columns] in phases {
            let steps = Steps {
                kernel: [rows.taps, columns.taps],
                grid: [rows.count, columns.count],
                stride: [1, 1],
                dilation: [rows.step, columns.step],
                padding: [-rows.start, -columns.start],
            };
            let mut part = out.layout.clone();
            part.offset += rows.first * step(2) + columns.first * step(3);
            part.shape = Shape::from([n, channels, rows.count, columns.count]);
            part.strides[2] *= stride[0] as isize;
            part.strides[3] *= stride[1] as isize;
            let windows = match &shared {
                Some(images) => (images.shallow_clone(), steps),
                None => images_for_taps(y, strided, steps)?,
            };
            let matrix = self.matrix(weight, Strided::weight(weight, self.groups).reversed([rows, columns]), last)?;
            self.multiply(windows, matrix, bias, (&out.with_layout(part), stride != [1, 1], last))?;
        }
        Ok(mark_written(out))
    }

    fn image_gradient(&self, y: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let Some(blocks) = self.blocks() else { return self.transposed(y, weight, None) };
        let _recorded = operation(|| describe_convolution("conv_transpose2d", &self.windows, y, weight));
        let ([n, ..], last) = (sizes_4d(y), self.nhwc[0] || is_channels_last(y));
        let (windows, matrix) = (images_for_taps(y, Strided::images(y, 1), blocks.steps())?, blocks.matrix(weight)?);
        let [rows, columns] = windows.1.grid;
        let out = empty_result([n, blocks.sizes(n, self.inner, 1)[1], rows, columns], true, false, y)?;
        self.multiply(windows, matrix, None, (&out, false, true))?;
        blocks.images(&out, self.windows.image, last).map(mark_written)
    }

    fn has_image_gradient(&self) -> bool {
        let filled = self.outer.next_multiple_of(PIECE_BYTES / self.dtype.size());
        match self.blocks() {
            Some(blocks) => self.choose(blocks.sizes(self.n, self.inner, filled), WindowsOperand::Left, true).is_some(),
            None => self.has_transposed(false),
        }
    }

    fn accepts(&self, slot: &Tensor) -> bool {
        slot.is_contiguous() || slot.is_contiguous_in(MemoryFormat::ChannelsLast)
    }

    /// Multiplies the transposed gradient of the output by the windows, which gives sums over all pixels.
    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe("conv2d weight gradient", [x, y]));
        let ([n, o, rows, columns], groups, inner, outer) = (sizes_4d(y), self.groups, self.inner, self.outer);
        let [kh, kw] = self.windows.kernel;
        let last = slot.as_ref().map_or(self.nhwc[1], is_channels_last);
        let out = match slot {
            Some(slot) => slot,
            None => empty_result([o, inner, kh, kw], last, false, x)?,
        };
        let left = channels_last(y, Strided::images(y, groups), [0, 0], [rows, columns])?;
        let (images, steps) = self.input(x)?;
        let (taps, depth) = (kh * kw, n * rows * columns);
        let [channel, tap] = if last { [1, inner] } else { [taps, 1] };
        let in_order = images.channels == inner && (last || taps == 1);
        let row = inner * taps;
        // The number of elements of a pixel, and the number of padding columns of taps.
        let (pixel, filler) =
            self.whole_rows.map_or((images.channels, 0), |rows| (rows.pixel, rows.row / rows.pixel - kw));
        let operand_strides = [[1, left.pixel, left.channels], [0, 0, images.channels], [row, 1, outer * row]];
        let sizes = [outer, steps.kernel[0] * steps.kernel[1] * images.channels, depth];
        let plan = plan(sizes, groups, operand_strides.map(|steps| steps.map(|step| step as isize)));
        let mma = self.choose(sizes, if in_order { WindowsOperand::Rows } else { WindowsOperand::RowsApart }, false);
        let mma = mma.ok_or_else(unsupported_error)?;
        let strides = [channel, inner, tap, pixel, filler].map(|step| step as isize);
        launch(mma, plan, &[&left.tensor, &images.tensor, &out], &images, steps, strides)?;
        Ok(mark_written(out))
    }
}
