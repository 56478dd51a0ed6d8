//! Convolutions on tensor cores as products of the weight and of windows that are not in memory: implicit GEMM. A kernel of
//! `kernels/gemm_mma.cl` reads the elements of windows from a channels-last copy of the images, with their padding
//! (`kernels/channels_last.cl`); the other gradients are such products too.

#[cfg(test)]
pub(crate) mod tests;

use std::slice;

use smallvec::SmallVec;

use crate::backend::opencl::gemm::{Chosen, Variant};
use crate::backend::opencl::gemm_mma::{Mma, WindowsAs};
use crate::backend::opencl::geometry::{bits_type, flag};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache::{Key, OpKind};
use crate::backend::opencl::{launch_cache, window};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::gemm::{BIASED, GemmOperand, GemmPlan, PRODUCT};
use crate::backend::problem::map::Params;
use crate::backend::problem::windows::{Windows, four};
use crate::backend::profiled::{describe, of_convolution};
use crate::backend::written;
use crate::device::opencl::{Arg, ClDevice};
use crate::device::profiler::operation;
use crate::tensor::{Dims, Layout};
use crate::{DType, Error, Result, Shape, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/channels_last.cl");

/// Sizes of windows that the kernel is given.
pub(crate) const NUMBERS: usize = 12;

/// Bytes that are copied at once: channels are filled up to as many.
const PIECE: usize = 16;
/// Work-items of a group that copies, channels of its tile, and pixels of its tile: fewer for small images.
const GROUP: usize = 256;
const CHANNELS: usize = 64;
const PIXELS: [usize; 2] = [64, 16];

/// Filling up may multiply the number of channels by at most this; beyond it, columns take less memory.
const FILLED: usize = 3;

/// The image gradient of a strided convolution uses columns above this many phases, each of which takes up to two launches, or with fewer
/// taps a phase than `TAPS`: columns are hardly larger than the images then.
const PHASES: usize = 4;
const TAPS: usize = 2;

/// The convolution of some windows, and the kernels of the forward pass and of the weight's gradient.
pub(crate) struct ImplicitGemm {
    windows: Windows,
    groups: usize,
    forward: Mma,
    weight: Mma,
    /// Images, and channels of a group, of images and of windows as they are copied.
    n: usize,
    inner: usize,
    filled: usize,
    dtype: DType,
    device: &'static ClDevice,
}

/// Images, `[N, groups, channels, rows, columns]`, as they are found: elements after the first of their tensor, and strides.
#[derive(Clone, Copy)]
struct Found {
    skip: isize,
    dims: [usize; 5],
    strides: [isize; 5],
}

/// Images whose channels are next to each other, those of a group in whole pieces of 16 bytes.
struct ChannelsLast {
    tensor: Tensor,
    /// Of a group.
    channels: usize,
    /// Elements from one image, row and place to the next.
    image: usize,
    row: usize,
    place: usize,
}

/// Distances between windows and between taps in padded images.
#[derive(Clone, Copy)]
struct Steps {
    kernel: [usize; 2],
    grid: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
}

/// Of rows or columns of an image those that are a stride apart: windows of the windows that they are in, which have the same taps.
#[derive(Clone, Copy)]
struct Phase {
    /// The first of them, and how many.
    first: usize,
    count: usize,
    /// The first of the taps, how far they are apart, and how many.
    tap: usize,
    apart: usize,
    taps: usize,
    /// The window whose last tap reads the first element, and the distance from there to the window whose tap before does.
    start: isize,
    step: usize,
}

impl Found {
    /// `[N, groups * channels, rows, columns]`.
    fn images(t: &Tensor, groups: usize) -> Found {
        let ([n, c, rows, columns], s) = (four(t), t.strides());
        let each = c / groups;
        Found {
            skip: 0,
            dims: [n, groups, each, rows, columns],
            strides: [s[0], s[1] * each as isize, s[1], s[2], s[3]],
        }
    }

    /// The pixels of them that windows of a single element see.
    fn seen(mut self, w: &Windows) -> Found {
        for d in 0..2 {
            self.strides[3 + d] *= w.stride[d] as isize;
            self.dims[3 + d] = w.grid[d];
        }
        self
    }

    /// A weight `[groups * rows, channels, kernel]`, each row an image.
    fn weight(t: &Tensor, groups: usize) -> Found {
        let ([outer, c, kh, kw], s) = (four(t), t.strides());
        let rows = outer / groups;
        Found { skip: 0, dims: [rows, groups, c, kh, kw], strides: [s[0], s[0] * rows as isize, s[1], s[2], s[3]] }
    }

    /// The weight that the gradient of a phase of images is multiplied by: rows and channels are exchanged, and taps are reversed.
    fn reversed(self, phases: [Phase; 2]) -> Found {
        let Found { dims: [rows, groups, c, ..], strides: [row, group, channel, ..], mut skip } = self;
        let mut strides = [channel, group, row, 0, 0];
        for (d, phase) in phases.into_iter().enumerate() {
            skip += self.strides[3 + d] * (phase.tap + (phase.taps - 1) * phase.apart) as isize;
            strides[3 + d] = -self.strides[3 + d] * phase.apart as isize;
        }
        Found { skip, dims: [c, groups, rows, phases[0].taps, phases[1].taps], strides }
    }

    /// Whether products can read it as it is: in pieces of 16 bytes.
    fn is_channels_last(&self, t: &Tensor) -> bool {
        let Found { skip, dims: [n, groups, each, rows, columns], strides: [image, group, channel, row, place] } =
            *self;
        let piece = PIECE / t.dtype.size();
        let in_pieces =
            |count: usize, stride: isize| count == 1 || stride > 0 && (stride as usize).is_multiple_of(piece);
        (channel == 1 || each == 1)
            && each.is_multiple_of(piece)
            && (groups == 1 || group == each as isize)
            && skip == 0
            && t.layout.offset.is_multiple_of(piece)
            && [(n, image), (rows, row), (columns, place)].into_iter().all(|(count, stride)| in_pieces(count, stride))
            && (rows == 1 || columns == 1 || row == columns as isize * place)
            && (n == 1 || rows * columns == 1 || image == (rows * columns) as isize * place)
    }
}

/// `[N, size, groups, channels]` of images, with so many zeros before the first row and column, or more of them cut off.
fn channels_last(t: &Tensor, found: Found, before: [isize; 2], size: [usize; 2]) -> Result<ChannelsLast> {
    let [n, groups, each, rows, columns] = found.dims;
    if before == [0, 0] && size == [rows, columns] && found.is_channels_last(t) {
        let [image, _, _, row, place] = found.strides.map(isize::unsigned_abs);
        return Ok(ChannelsLast { tensor: t.shallow_clone(), channels: each, image, row, place });
    }
    let channels = each.next_multiple_of(PIECE / t.dtype.size());
    let place = groups * channels;
    let (row, image) = (size[1] * place, size[0] * size[1] * place);
    let tensor = Tensor::empty_like_shape([n, size[0], size[1], place], t.dtype, t.device())?;
    copy(t, found, before, size, &tensor, [image, channels, place])?;
    Ok(ChannelsLast { tensor, channels, image, row, place })
}

/// `[groups, rows, kernel, channels]` of a weight.
fn matrices(weight: &Tensor, found: Found) -> Result<Tensor> {
    let [rows, groups, each, kh, kw] = found.dims;
    let channels = each.next_multiple_of(PIECE / weight.dtype.size());
    let tensor = Tensor::empty_like_shape([groups, rows, kh * kw, channels], weight.dtype, weight.device())?;
    let row = kh * kw * channels;
    copy(weight, found, [0, 0], [kh, kw], &tensor, [row, rows * row, channels])?;
    Ok(tensor)
}

/// The launch of `kernels/channels_last.cl`; `to` are the strides of the copy: of images, groups and pixels.
fn copy(t: &Tensor, found: Found, before: [isize; 2], size: [usize; 2], out: &Tensor, to: [usize; 3]) -> Result<()> {
    let (device, bytes) = (t.cl_device()?, t.dtype.size());
    let [n, groups, each, rows, columns] = found.dims;
    let (piece, filled) = (PIECE / bytes, each.next_multiple_of(PIECE / bytes));
    let (pixels, contiguous) = (size[0] * size[1], found.strides[2] == 1 && each > 1);
    let channels = filled.next_power_of_two().min(CHANNELS);
    let tile = if pixels < PIXELS[0] { PIXELS[1] } else { PIXELS[0] };
    // A work-item has something to read at least.
    let tile = tile.max(GROUP / channels);
    let params = [bytes, channels, tile, contiguous as usize].map(|n| n as u64);
    let kernel = kernel(device, KernelKey::new("channels_last", &params), "channels_last", || {
        let contiguous = flag(contiguous, "CONTIGUOUS");
        format!(
            "#define V {}\n#define EACH {piece}\n#define CHANNELS {channels}\n#define TILE {tile}\n{contiguous}{TEMPLATE}",
            bits_type(bytes)
        )
    })?;
    let numbers = [size[0] as isize, size[1] as isize, before[0], before[1]].into_iter();
    let numbers = numbers.chain([rows, columns, groups, each, filled, 0].map(|n| n as isize)).map(|n| n as i32);
    let mut words: SmallVec<[i32; 32]> = numbers.collect();
    let strides = found.strides.into_iter().chain(to.map(|n| n as isize)).map(|n| n as i64);
    words.extend(strides.flat_map(bytemuck::cast::<i64, [i32; 2]>));
    let (from, into) = (t.device_view()?, out.device_view()?);
    let first = from.first_element().wrapping_add_signed(found.skip) as u64;
    let args = [from.buffer(), Arg::U64(first), into.buffer(), into.offset(), Arg::Bytes(bytemuck::cast_slice(&words))];
    let items = pixels.div_ceil(tile) * filled.div_ceil(channels) * groups * n;
    device.launch(&kernel, &args, &[items * GROUP], &[GROUP])
}

/// `groups` products `[m, n, k]`; of the matrices and the result the steps along rows, columns and groups.
fn plan([m, n, k]: [usize; 3], groups: usize, steps: [[usize; 3]; 3]) -> GemmPlan {
    let batch: Dims = (groups > 1).then_some(groups).into_iter().collect();
    let [a, b, out] = steps.map(|[row, col, group]| GemmOperand {
        row: row as isize,
        col: col as isize,
        batch: batch.iter().map(|_| group as isize).collect(),
    });
    GemmPlan { batch, m, n, k, a, b, others: SmallVec::from_iter([out]) }
}

impl ImplicitGemm {
    /// None where other kernels or columns are better, or there are no tensor cores.
    pub(crate) fn new(w: Windows, x: &Tensor, weight: &Tensor, groups: usize, single: bool) -> Option<ImplicitGemm> {
        let ([n, ..], [outer, inner, kh, kw]) = (four(x), four(weight));
        let (dtype, size) = (x.dtype, x.dtype.size());
        // Images that are their own columns need no copy, unless nothing can be copied from where their rows begin.
        let rows_begin_well = (w.image[0] * w.image[1] * size).is_multiple_of(4);
        if x.numel() * weight.numel() == 0
            || single && rows_begin_well
            || !matches!(size, 2 | 4)
            || !window::is_near(&w)
        {
            return None;
        }
        let outer = outer / groups;
        let [o, c] = [outer, inner].map(|channels| channels.next_multiple_of(PIECE / size));
        // Offsets in the copies, in bytes, are counted in 32 bits.
        let along = |d: usize| w.image[d] + w.padding[d] + w.behind[d] + 2 * w.dilation[d] * w.kernel[d];
        let bytes = [n, groups, o.max(c), along(0), along(1), size].into_iter().try_fold(1, usize::checked_mul)?;
        if o > FILLED * outer || c > FILLED * inner || bytes >= 1 << 31 {
            return None;
        }
        let device = x.cl_device().ok()?;
        let grid = w.grid[0] * w.grid[1];
        let choose = |sizes, windows| choose(&plan(sizes, groups, [[0; 3]; 3]), dtype, windows, device);
        Some(ImplicitGemm {
            windows: w,
            groups,
            forward: choose([outer, n * grid, kh * kw * c], WindowsAs::Columns)?,
            weight: choose([outer, kh * kw * c, n * grid], WindowsAs::Rows)?,
            n,
            inner,
            filled: o,
            dtype,
            device,
        })
    }

    /// Images that windows are read from, and where these lie in them.
    fn padded(&self, x: &Tensor) -> Result<(ChannelsLast, Steps)> {
        let w = self.windows;
        let found = Found::images(x, self.groups);
        let (kernel, grid, dilation) = (w.kernel, w.grid, w.dilation);
        if kernel == [1, 1] && w.padding == [0, 0] {
            let steps = Steps { kernel, grid, stride: [1, 1], dilation };
            return Ok((channels_last(x, found.seen(&w), [0, 0], grid)?, steps));
        }
        let size = [0, 1].map(|d| w.padding[d] + w.image[d] + w.behind[d]);
        let images = channels_last(x, found, w.padding.map(|p| p as isize), size)?;
        Ok((images, Steps { kernel, grid, stride: w.stride, dilation }))
    }

    /// The phases of the rows of images, or of the columns.
    fn phases(&self, d: usize) -> Vec<Phase> {
        let Windows { image, kernel, stride, padding, dilation, .. } = self.windows;
        let (stride, dilation) = (stride[d], dilation[d]);
        let phase = |first: usize| {
            let place = first + padding[d];
            let mut taps = (0..kernel[d]).filter(|tap| tap * dilation % stride == place % stride);
            let (tap, next, rest) = (taps.next().unwrap_or(0), taps.next(), taps.count());
            let (apart, taps) = (next.map_or(1, |next| next - tap), 1 + usize::from(next.is_some()) + rest);
            let step = apart * dilation / stride;
            let start = (place as isize - (tap * dilation) as isize) / stride as isize - ((taps - 1) * step) as isize;
            Phase { first, count: (image[d] - first).div_ceil(stride), tap, apart, taps, start, step }
        };
        (0..stride.min(image[d])).map(phase).collect()
    }

    /// The kernel for phases of images.
    fn images_kernel(&self, phases: [Phase; 2]) -> Option<Mma> {
        let [rows, columns] = phases;
        let sizes = [self.inner, self.n * rows.count * columns.count, rows.taps * columns.taps * self.filled];
        let windows = if self.windows.stride == [1, 1] { WindowsAs::Columns } else { WindowsAs::ColumnsApart };
        choose(&plan(sizes, self.groups, [[0; 3]; 3]), self.dtype, windows, self.device)
    }
}

/// Each group of matrices `[groups, rows, kernel, channels]` times the windows of its channels, plus a bias, in the place of `out`,
/// `[N, groups * rows, grid]`.
fn multiply(
    mma: Mma,
    matrices: &Tensor,
    (images, steps): (&ChannelsLast, Steps),
    bias: Option<&Tensor>,
    out: &Tensor,
) -> Result<()> {
    let ([groups, rows, taps, channels], [n, ..], [height, width]) = (four(matrices), four(out), steps.grid);
    let [of_image, of_row, down, right] = [0, 1, 2, 3].map(|d| out.strides()[d].unsigned_abs());
    let k = taps * channels;
    let lie = [[k, 1, rows * k], [1, 0, channels], [of_row, right, rows * of_row]];
    let mut plan = plan([rows, n * height * width, k], groups, lie);
    if let Some(bias) = bias {
        let row = bias.strides()[0];
        let batch = plan.batch.iter().map(|_| row * rows as isize).collect();
        plan.others.push(GemmOperand { row, col: 0, batch });
    }
    let tensors: SmallVec<[&Tensor; 4]> = [matrices, &images.tensor, out].into_iter().chain(bias).collect();
    let apart = [of_image, down, right];
    // Going over all pixels of an image has already moved by height * width: only the rest is added.
    let after = if mma.windows == Some(WindowsAs::Columns) { [of_image - height * width, 0, 0] } else { apart };
    launch(mma, plan, &tensors, images, steps, after)
}

fn choose(plan: &GemmPlan, dtype: DType, windows: WindowsAs, device: &'static ClDevice) -> Option<Mma> {
    let cores = || device.tensor_cores();
    #[cfg(test)]
    let cores = || tests::PRETEND.get().unwrap_or_else(cores);
    Mma::of_windows(plan, dtype, windows, device.info().compute_units, cores)
}

/// The product of `tensors`, the left matrix, images, the result and perhaps a bias.
fn launch(
    mma: Mma,
    plan: GemmPlan,
    tensors: &[&Tensor],
    images: &ChannelsLast,
    steps: Steps,
    after: [usize; 3],
) -> Result<()> {
    let Steps { kernel, grid, stride, dilation } = steps;
    let &ChannelsLast { channels, image, row, place, .. } = images;
    let windows: [usize; NUMBERS] = [
        channels,
        kernel[1],
        dilation[1] * place,
        dilation[0] * row,
        grid[0] * grid[1],
        grid[1],
        stride[1] * place,
        stride[0] * row,
        image,
        after[0],
        after[1],
        after[2],
    ];
    let device = tensors[0].cl_device()?;
    let epilogue = slice::from_ref(if tensors.len() > 3 { &*BIASED } else { &*PRODUCT });
    let numbers: SmallVec<[u64; 16]> =
        [mma.key(), plan.m, plan.n, plan.k].iter().chain(&windows).map(|&n| n as u64).collect();
    let key =
        Key { of: OpKind::ImplicitGemm, device: tensors[0].device(), numbers: &numbers, exprs: epilogue, tensors };
    let compute = tensors[0].dtype.compute();
    let prepare = || {
        let (plan, variant) = (plan.clone(), Variant::Mma(mma));
        Chosen {
            plan,
            variant,
            order: [0, 1],
            operands: tensors,
            outs: 1,
            epilogue,
            compute,
            sums: None,
            asked: false,
            windows: &windows,
        }
        .prepare(device)
    };
    launch_cache::launch(&key, Params::default(), prepare).map(drop)
}

impl Convolution for ImplicitGemm {
    fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| of_convolution("conv2d", &self.windows, x, weight));
        let ([n, ..], [o, ..], [rows, columns]) = (four(x), four(weight), self.windows.grid);
        let matrices = matrices(weight, Found::weight(weight, self.groups))?;
        let (images, steps) = self.padded(x)?;
        let out = Tensor::empty_like_shape([n, o, rows, columns], x.dtype, x.device())?;
        multiply(self.forward, &matrices, (&images, steps), bias, &out)?;
        Ok(written(out))
    }

    /// Of windows that are a stride apart each phase is a launch or two, and has to have something to add up.
    fn makes_images(&self) -> bool {
        let Windows { kernel, dilation, stride, padding, .. } = self.windows;
        let count = stride[0] * stride[1];
        if count > PHASES || count > 1 && kernel[0] * kernel[1] < TAPS * count {
            return false;
        }
        let [rows, columns] = [0, 1].map(|d| self.phases(d));
        let has = |d: usize, p: &Phase| (p.first + padding[d]) % stride[d] == p.tap * dilation[d] % stride[d];
        let covered = rows.iter().all(|r| has(0, r)) && columns.iter().all(|c| has(1, c));
        covered && rows.iter().all(|&r| columns.iter().all(|&c| self.images_kernel([r, c]).is_some()))
    }

    /// Of each phase, a convolution of windows that are next to each other: with the padding that brings every element to the windows it
    /// is in, and the taps that it has there.
    fn images(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| of_convolution("conv_transpose2d", &self.windows, y, weight));
        let phases = [0, 1].map(|d| self.phases(d));
        let before = [0, 1].map(|d| phases[d].iter().map(|p| -p.start).max().unwrap_or(0));
        let end = |p: &Phase| p.start + ((p.taps - 1) * p.step + p.count) as isize;
        let size = [0, 1].map(|d| (before[d] + phases[d].iter().map(end).max().unwrap_or(0)).unsigned_abs());
        let padded = channels_last(y, Found::images(y, self.groups), before, size)?;
        let ([n, ..], [h, w], stride) = (four(y), self.windows.image, self.windows.stride);
        let out = Tensor::empty_like_shape([n, self.groups * self.inner, h, w], y.dtype, y.device())?;
        for (&rows, &columns) in phases[0].iter().flat_map(|rows| phases[1].iter().map(move |columns| (rows, columns)))
        {
            let without = || Error::invalid("conv2d", "images are made of columns here");
            let mma = self.images_kernel([rows, columns]).ok_or_else(without)?;
            let matrices = matrices(weight, Found::weight(weight, self.groups).reversed([rows, columns]))?;
            let [down, right] = [rows.start + before[0], columns.start + before[1]].map(isize::unsigned_abs);
            let first = padded.tensor.layout.offset + down * padded.row + right * padded.place;
            let tensor = padded.tensor.with_layout(Layout { offset: first, ..padded.tensor.layout.clone() });
            let images = ChannelsLast { tensor, ..padded };
            let steps = Steps {
                kernel: [rows.taps, columns.taps],
                grid: [rows.count, columns.count],
                stride: [1, 1],
                dilation: [rows.step, columns.step],
            };
            let mut place = out.layout.clone();
            place.offset += rows.first * w + columns.first;
            place.shape = Shape::from([n, self.groups * self.inner, rows.count, columns.count]);
            place.strides[2] *= stride[0] as isize;
            place.strides[3] *= stride[1] as isize;
            multiply(mma, &matrices, (&images, steps), bias, &out.with_layout(place))?;
        }
        Ok(written(out))
    }

    /// The sum over all pixels of an element of the windows' gradient times all of the window.
    fn weight(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe("conv2d weight gradient", [x, y]));
        let ([n, o, rows, columns], [_, c, ..], groups) = (four(y), four(x), self.groups);
        let ([kh, kw], inner, outer) = (self.windows.kernel, c / groups, o / groups);
        let out = match slot {
            Some(slot) => slot,
            None => Tensor::empty_like_shape([o, inner, kh, kw], x.dtype, x.device())?,
        };
        let left = channels_last(y, Found::images(y, groups), [0, 0], [rows, columns])?;
        let (images, steps) = self.padded(x)?;
        let (taps, depth) = (kh * kw, n * rows * columns);
        let lie = [[1, left.place, left.channels], [0, 0, images.channels], [inner * taps, taps, outer * inner * taps]];
        let plan = plan([outer, taps * images.channels, depth], groups, lie);
        launch(self.weight, plan, &[&left.tensor, &images.tensor, &out], &images, steps, [taps, inner, 0])?;
        Ok(written(out))
    }
}
