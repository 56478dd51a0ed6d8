//! Interpolation of images on the CPU. Rows of the result are partitioned among threads, whole planes at a time if they are small. Each input
//! row is interpolated along its columns once; then rows are interpolated in vectors.

use bytemuck::Pod;

use crate::backend::cpu::convert::{read_or_convert, store_tile};
use crate::backend::cpu::dispatch::vectorised;
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::interpolation::{Interpolate, Resize, Samples};
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{Streaming, should_stream};
use crate::storage::with_host;
use crate::tensor::Tensor;
use crate::{Compute, Result};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 14;
/// The number of elements that are computed in a buffer before they are converted to the result's dtype or stored past the cache.
const BUFFER_LEN: usize = 2048;

/// Resizes the images of `x`. If `transposed`, applies the transposed linear map: each element of `x` is distributed, by its weights, to
/// the elements of `out` from which it was interpolated.
pub(crate) fn resize_images(i: &Interpolate) -> Result<()> {
    let &Interpolate { resize, x, out, transposed } = i;
    with_host(&[&x.storage], &[&out.storage], |reads, writes| {
        let rows = PlaneRows { x, bytes: reads[0], origin: 0 };
        let to = &mut writes[0][..out.numel() * out.dtype.size()];
        match (transposed || resize.is_linear(), out.dtype.compute(), out.dtype.size()) {
            (true, Compute::F64, _) => linear::<f64>(resize, rows, out, to, transposed),
            (true, ..) => linear::<f32>(resize, rows, out, to, transposed),
            (false, _, 2) => nearest::<u16>(resize, rows, out, to),
            (false, _, 4) => nearest::<u32>(resize, rows, out, to),
            (false, ..) => nearest::<u64>(resize, rows, out, to),
        }
    })
}

/// The rows of one plane of a tensor `[N, C, H, W]`.
#[derive(Clone, Copy)]
struct PlaneRows<'a> {
    x: &'a Tensor,
    bytes: &'a [u8],
    /// The offset of the plane's first element.
    origin: isize,
}

impl<'a> PlaneRows<'a> {
    /// Moves to another plane. Plane `i` is channel `i % C` of image `i / C`.
    fn enter_plane(&mut self, plane: usize) {
        let (channels, s) = (self.x.shape().dims()[1], self.x.strides());
        let [n, c] = [plane / channels, plane % channels].map(|i| i as isize);
        self.origin = self.x.layout.offset as isize + n * s[0] + c * s[1];
    }

    fn start(&self, row: usize) -> usize {
        (self.origin + row as isize * self.x.strides()[2]) as usize
    }

    fn len(&self) -> usize {
        self.x.shape().dims()[3]
    }

    /// Returns a row in place if it is contiguous and has the compute type, else `None`.
    fn in_place<C: Number>(&self, row: usize) -> Option<&'a [C]> {
        let in_place = self.x.strides()[3] == 1 && self.x.dtype == C::COMPUTE.dtype();
        in_place.then(|| &bytemuck::cast_slice(self.bytes)[self.start(row)..][..self.len()])
    }

    /// Returns a row, in place or converted into `buffer`.
    fn read<'b, C: Number>(&'b self, row: usize, buffer: &'b mut Vec<C>) -> &'b [C] {
        read_or_convert((self.x.dtype, self.bytes), self.start(row), self.x.strides()[3], self.len(), buffer)
    }
}

/// Splits the rows of `out` into jobs and calls `job(first, rows)` for each, on several threads if there is enough work.
fn partition_rows(x: &Tensor, out: &Tensor, to: &mut [u8], job: impl Fn(usize, &mut [u8]) + Sync) {
    let dims = out.shape().dims();
    let (height, work) = (dims[2], x.numel().max(out.numel()));
    let mut per_job = (JOB_ELEMENTS * (out.numel() / dims[3]) / work).max(1);
    if per_job > height {
        per_job -= per_job % height;
    }
    match work <= JOB_ELEMENTS {
        true => job(0, to),
        false => parallel::for_each_chunk(to, per_job * dims[3] * out.dtype.size(), |i, to| job(i * per_job, to)),
    }
}

/// Computes nearest-neighbour interpolation. Elements are only copied, as values of type `T`, which has the size of the dtype.
fn nearest<T: Pod + Send + Sync>(resize: &Resize, rows: PlaneRows, out: &Tensor, to: &mut [u8]) {
    let dims = out.shape().dims();
    let (height, width, step) = (dims[2], dims[3], rows.x.strides()[3]);
    let [down, across] = [(resize.rows, height), (resize.columns, width)].map(|(samples, n)| -> Vec<usize> {
        (0..n).map(|o| samples.map_or(o, |samples| samples.source(o).0)).collect()
    });
    // Whether each element of a row appears twice in succession, as for images of twice the width.
    let doubled = width == 2 * rows.len() && across.iter().enumerate().all(|(o, &at)| at == o / 2);
    let from: &[T] = bytemuck::cast_slice(rows.bytes);
    partition_rows(rows.x, out, to, |first, to| {
        let to: &mut [T] = bytemuck::cast_slice_mut(to);
        let (mut rows, mut last) = (rows, None);
        for r in 0..to.len() / width {
            let (plane, o) = ((first + r) / height, (first + r) % height);
            let (before, now) = to.split_at_mut(r * width);
            let now = &mut now[..width];
            if last.replace((plane, down[o])) == Some((plane, down[o])) {
                now.copy_from_slice(&before[before.len() - width..]);
                continue;
            }
            rows.enter_plane(plane);
            let start = rows.start(down[o]);
            if step == 1 && doubled {
                now.as_chunks_mut().0.iter_mut().zip(&from[start..]).for_each(|(pair, &x)| *pair = [x; 2]);
            } else if step == 1 {
                let from = &from[start..][..rows.len()];
                now.iter_mut().zip(&across).for_each(|(y, &at)| *y = from[at]);
            } else {
                let place = |at: usize| (start as isize + at as isize * step) as usize;
                now.iter_mut().zip(&across).for_each(|(y, &at)| *y = from[place(at)]);
            }
        }
    });
}

/// Computes linear interpolation or, if `transposed`, its transposed map.
fn linear<C: Number>(resize: &Resize, rows: PlaneRows, out: &Tensor, to: &mut [u8], transposed: bool) {
    let streamed = should_stream(to.len(), to.len() + rows.x.numel() * rows.x.dtype.size());
    let (height, width) = (out.shape().dims()[2], out.shape().dims()[3]);
    let in_place = out.dtype == C::COMPUTE.dtype() && !streamed;
    let (zero, size) = (C::from_i32(0), out.dtype.size());
    // The number of elements that a job computes before it stores them.
    let group = if in_place { 0 } else { BUFFER_LEN.div_ceil(width) * width };
    let pieces = |first: usize, to: &mut [u8], mut job: InterpolationJob<'_, C>| {
        let streaming = streamed.then(Streaming::new);
        let per_job = if in_place { to.len() } else { group * size };
        let mut buffer = vec![zero; group];
        for (i, to) in to.chunks_mut(per_job).enumerate() {
            let (first, len) = (first + i * (per_job / size / width), to.len() / size);
            let made = if in_place { bytemuck::cast_slice_mut(to) } else { &mut buffer[..len] };
            piece(&mut job, first, made);
            match &streaming {
                _ if in_place => {}
                Some(streaming) if size == size_of::<C>() => {
                    streaming.copy(bytemuck::cast_slice_mut(to), &buffer[..len]);
                }
                _ => store_tile(out.dtype, &buffer[..len], to, 0, 1),
            }
        }
    };
    let line = || vec![zero; rows.len()];
    if transposed {
        let [down, across] =
            [resize.rows, resize.columns].map(|samples| samples.map(|samples| InputWeights::new(&samples)));
        partition_rows(rows.x, out, to, |first, to| {
            let job = TransposedJob { rows, height, down: &down, across: &across, line: line(), sums: line() };
            pieces(first, to, InterpolationJob::Transposed(job));
        });
    } else {
        let [down, across] = [resize.rows, resize.columns].map(|samples| samples.map(|samples| LerpTap::all(&samples)));
        partition_rows(rows.x, out, to, |first, to| {
            let (line, held) = (line(), [0; 2].map(|_| (None, vec![zero; width])));
            let job = ForwardJob { rows, height, down: &down, across: &across, line, plane: None, held };
            pieces(first, to, InterpolationJob::Forward(job));
        });
    }
}

/// The two directions of interpolation.
enum InterpolationJob<'a, C> {
    Forward(ForwardJob<'a, C>),
    Transposed(TransposedJob<'a, C>),
}

vectorised! {
    /// Computes rows of a result, beginning with row `first`.
    fn piece<'j, 'a, C: Number>(_simd: S, job: &'j mut InterpolationJob<'a, C>, first: usize, made: &'j mut [C]) {
        match job {
            InterpolationJob::Forward(job) => job.run(first, made),
            InterpolationJob::Transposed(job) => job.run(first, made),
        }
    }
}

/// An interpolation between two input elements: the result is `near + weight * (far - near)` with `weight` at most 1/2. Exact at both
/// ends, like [`lerp`](crate::ops::Expr::lerp).
#[derive(Clone, Copy)]
struct LerpTap<C> {
    near: usize,
    far: usize,
    weight: C,
}

impl<C: Number> LerpTap<C> {
    fn new(samples: &Samples, o: usize) -> LerpTap<C> {
        let (low, high, weight) = samples.source(o);
        let weight = C::from_f64(weight);
        match weight < C::from_f64(0.5) {
            true => LerpTap { near: low, far: high, weight },
            false => LerpTap { near: high, far: low, weight: C::from_i32(1).sub(weight) },
        }
    }

    fn all(samples: &Samples) -> Vec<LerpTap<C>> {
        (0..samples.to).map(|o| LerpTap::new(samples, o)).collect()
    }

    #[inline(always)]
    fn lerp(&self, near: C, far: C) -> C {
        near.add(self.weight.mul(far.sub(near)))
    }
}

/// Interpolates images to another size.
struct ForwardJob<'a, C> {
    rows: PlaneRows<'a>,
    /// The number of rows in a plane of the result.
    height: usize,
    down: &'a Option<Vec<LerpTap<C>>>,
    across: &'a Option<Vec<LerpTap<C>>>,
    line: Vec<C>,
    plane: Option<usize>,
    /// Input rows that are already interpolated along columns, at the index row % 2: a result row needs two adjacent input rows.
    held: [(Option<usize>, Vec<C>); 2],
}

impl<C: Number> ForwardJob<'_, C> {
    #[inline(always)]
    fn run(&mut self, first: usize, made: &mut [C]) {
        let width = self.held[0].1.len();
        for (r, to) in made.chunks_exact_mut(width).enumerate() {
            let (plane, o) = ((first + r) / self.height, (first + r) % self.height);
            if self.plane.replace(plane) != Some(plane) {
                self.rows.enter_plane(plane);
                self.held.iter_mut().for_each(|held| held.0 = None);
            }
            let Some(down) = self.down else {
                self.interpolate_columns(o, to);
                continue;
            };
            let tap = &down[o];
            self.hold_row(tap.near);
            self.hold_row(tap.far);
            for ((y, a), b) in to.iter_mut().zip(self.held(tap.near)).zip(self.held(tap.far)) {
                *y = tap.lerp(*a, *b);
            }
        }
    }

    /// Interpolates one input row along its columns, and writes the result to `to`.
    #[inline(always)]
    fn interpolate_columns(&mut self, row: usize, to: &mut [C]) {
        let from = self.rows.read(row, &mut self.line);
        match self.across {
            None => to.copy_from_slice(from),
            Some(across) => {
                // Four elements are computed at a time, so that the arithmetic is vectorised.
                let ((to, last), (across, rest)) = (to.as_chunks_mut::<4>(), across.as_chunks::<4>());
                for (to, taps) in to.iter_mut().zip(across) {
                    for (y, tap) in to.iter_mut().zip(taps) {
                        *y = tap.lerp(from[tap.near], from[tap.far]);
                    }
                }
                last.iter_mut().zip(rest).for_each(|(y, tap)| *y = tap.lerp(from[tap.near], from[tap.far]));
            }
        }
    }

    /// Interpolates an input row along its columns into `held`, unless the row can be read in place or is already there.
    #[inline(always)]
    fn hold_row(&mut self, row: usize) {
        let in_place = self.across.is_none() && self.rows.in_place::<C>(row).is_some();
        if !in_place && self.held[row % 2].0.replace(row) != Some(row) {
            let mut to = std::mem::take(&mut self.held[row % 2].1);
            self.interpolate_columns(row, &mut to);
            self.held[row % 2].1 = to;
        }
    }

    /// Returns the row that [`hold_row`](Self::hold_row) prepared.
    #[inline(always)]
    fn held(&self, row: usize) -> &[C] {
        let in_place = if self.across.is_none() { self.rows.in_place(row) } else { None };
        in_place.unwrap_or(&self.held[row % 2].1)
    }
}

/// For each input element, the range of outputs that are interpolated from it, and their weights.
struct InputWeights<C> {
    /// For each input element: the first output, and the end of the element's weights in `weights`.
    outputs: Vec<(usize, usize)>,
    weights: Vec<C>,
}

impl<C: Number> InputWeights<C> {
    fn new(samples: &Samples) -> InputWeights<C> {
        let mut weights = Vec::new();
        let outputs = (0..samples.from).map(|j| {
            let (first, last) = samples.outputs_reading(j);
            weights.extend((first..last).map(|o| {
                let (tap, one) = (LerpTap::<C>::new(samples, o), C::from_i32(1));
                match (tap.near == j, tap.far == j) {
                    (true, true) => one,
                    (true, false) => one.sub(tap.weight),
                    _ => tap.weight,
                }
            }));
            (first, weights.len())
        });
        InputWeights { outputs: outputs.collect(), weights }
    }

    /// Returns the first output that depends on input element j, and the weights of that output and of the following outputs.
    #[inline(always)]
    fn of_input(&self, j: usize) -> (usize, &[C]) {
        let start = if j == 0 { 0 } else { self.outputs[j - 1].1 };
        (self.outputs[j].0, &self.weights[start..self.outputs[j].1])
    }
}

/// Computes the transposed map: each element of the result is a weighted sum of the outputs that depend on it, in order.
struct TransposedJob<'a, C> {
    rows: PlaneRows<'a>,
    /// The number of rows in a plane of the result.
    height: usize,
    down: &'a Option<InputWeights<C>>,
    across: &'a Option<InputWeights<C>>,
    line: Vec<C>,
    sums: Vec<C>,
}

impl<C: Number> TransposedJob<'_, C> {
    #[inline(always)]
    fn run(&mut self, first: usize, made: &mut [C]) {
        let width = self.across.as_ref().map_or(self.rows.len(), |across| across.outputs.len());
        let zero = C::from_i32(0);
        for (r, to) in made.chunks_exact_mut(width).enumerate() {
            let (plane, o) = ((first + r) / self.height, (first + r) % self.height);
            self.rows.enter_plane(plane);
            let sums: &[C] = match self.down {
                None => self.rows.read(o, &mut self.line),
                Some(down) => {
                    let (from, weights) = down.of_input(o);
                    self.sums.fill(zero);
                    for (k, weight) in weights.iter().enumerate() {
                        let line = self.rows.read(from + k, &mut self.line);
                        self.sums.iter_mut().zip(line).for_each(|(sum, x)| *sum = sum.add(weight.mul(*x)));
                    }
                    &self.sums
                }
            };
            let Some(across) = self.across else {
                to.copy_from_slice(sums);
                continue;
            };
            for (j, y) in to.iter_mut().enumerate() {
                let (from, weights) = across.of_input(j);
                let given = &sums[from..][..weights.len()];
                *y = given.iter().zip(weights).fold(zero, |sum, (x, weight)| sum.add(weight.mul(*x)));
            }
        }
    }
}
