//! Images of other sizes on the CPU. Rows of the result are partitioned among threads, planes of them together where they are
//! small. Columns are mixed once for each row of the input, then rows in vectors.

use bytemuck::Pod;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::interpolation::{Resize, Samples};
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{Streaming, is_worth_it};
use crate::storage::with_host;
use crate::tensor::Tensor;
use crate::{Compute, Result};

/// Elements a job of the pool has.
const JOB: usize = 1 << 14;
/// Elements that are put together before they are written, where they cannot be computed in their place.
const GROUP: usize = 2048;

/// The images of `x` in other sizes, or where `transposed` what elements of those sizes give to the elements that they are of.
pub(crate) fn run(resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()> {
    with_host(&[&x.storage], &[&out.storage], |reads, writes| {
        let rows = PlaneRows { x, bytes: reads[0], origin: 0 };
        let to = &mut writes[0][..out.numel() * out.dtype.size()];
        match (transposed || resize.is_linear(), out.dtype.compute(), out.dtype.size()) {
            (true, Compute::F64, _) => computed::<f64>(resize, rows, out, to, transposed),
            (true, ..) => computed::<f32>(resize, rows, out, to, transposed),
            (false, _, 2) => picked::<u16>(resize, rows, out, to),
            (false, _, 4) => picked::<u32>(resize, rows, out, to),
            (false, ..) => picked::<u64>(resize, rows, out, to),
        }
    })
}

/// The rows of a plane of `[N, C, H, W]`.
#[derive(Clone, Copy)]
struct PlaneRows<'a> {
    pub(crate) x: &'a Tensor,
    bytes: &'a [u8],
    /// Where the plane's first element is.
    origin: isize,
}

impl<'a> PlaneRows<'a> {
    /// Goes to a plane, of those of all images.
    fn enter(&mut self, plane: usize) {
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

    /// A row where it lies, if it can be read there.
    fn in_place<C: Number>(&self, row: usize) -> Option<&'a [C]> {
        let in_place = self.x.strides()[3] == 1 && self.x.dtype == C::COMPUTE.dtype();
        in_place.then(|| &bytemuck::cast_slice(self.bytes)[self.start(row)..][..self.len()])
    }

    /// A row, in `buffer` if need be.
    fn read<'b, C: Number>(&self, row: usize, buffer: &'b mut [C]) -> &'b [C]
    where
        'a: 'b,
    {
        self.in_place(row).unwrap_or_else(|| {
            load_tile(self.x.dtype, self.bytes, self.start(row), self.x.strides()[3], buffer);
            buffer
        })
    }
}

/// Calls `job(first, rows)` for rows of `out` that together are all, on as many threads as they are worth.
fn partition(x: &Tensor, out: &Tensor, to: &mut [u8], job: impl Fn(usize, &mut [u8]) + Sync) {
    let dims = out.shape().dims();
    let (height, work) = (dims[2], x.numel().max(out.numel()));
    let mut per_job = (JOB * (out.numel() / dims[3]) / work).max(1);
    if per_job > height {
        per_job -= per_job % height;
    }
    match work <= JOB {
        true => job(0, to),
        false => parallel::for_each_chunk(to, per_job * dims[3] * out.dtype.size(), |i, to| job(i * per_job, to)),
    }
}

/// Elements as bits of their size, picked.
fn picked<T: Pod + Send + Sync>(resize: &Resize, rows: PlaneRows, out: &Tensor, to: &mut [u8]) {
    let dims = out.shape().dims();
    let (height, width, step) = (dims[2], dims[3], rows.x.strides()[3]);
    let [down, across] = [(resize.rows, height), (resize.columns, width)].map(|(samples, n)| -> Vec<usize> {
        (0..n).map(|o| samples.map_or(o, |samples| samples.source(o).0)).collect()
    });
    let from: &[T] = bytemuck::cast_slice(rows.bytes);
    partition(rows.x, out, to, |first, to| {
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
            rows.enter(plane);
            let start = rows.start(down[o]);
            if step == 1 {
                let from = &from[start..][..rows.len()];
                now.iter_mut().zip(&across).for_each(|(y, &at)| *y = from[at]);
            } else {
                let place = |at: usize| (start as isize + at as isize * step) as usize;
                now.iter_mut().zip(&across).for_each(|(y, &at)| *y = from[place(at)]);
            }
        }
    });
}

fn computed<C: Number>(resize: &Resize, rows: PlaneRows, out: &Tensor, to: &mut [u8], transposed: bool) {
    let streamed = is_worth_it(to.len(), to.len() + rows.x.numel() * rows.x.dtype.size());
    let (height, width) = (out.shape().dims()[2], out.shape().dims()[3]);
    let in_place = out.dtype == C::COMPUTE.dtype() && !streamed;
    let (zero, size) = (C::from_i32(0), out.dtype.size());
    // A piece of what a job has at a time.
    let group = if in_place { 0 } else { GROUP.div_ceil(width) * width };
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
        let [down, across] = [resize.rows, resize.columns].map(|samples| samples.map(|samples| Shares::new(&samples)));
        partition(rows.x, out, to, |first, to| {
            let job = Gather { rows, height, down: &down, across: &across, line: line(), sums: line() };
            pieces(first, to, InterpolationJob::Gather(job));
        });
    } else {
        let [down, across] = [resize.rows, resize.columns].map(|samples| samples.map(|samples| Mix::all(&samples)));
        partition(rows.x, out, to, |first, to| {
            let held = [0; 2].map(|_| (None, vec![zero; width]));
            pieces(
                first,
                to,
                InterpolationJob::Mix(Mixing {
                    rows,
                    height,
                    down: &down,
                    across: &across,
                    line: line(),
                    plane: None,
                    held,
                }),
            );
        });
    }
}

enum InterpolationJob<'a, C> {
    Mix(Mixing<'a, C>),
    Gather(Gather<'a, C>),
}

vectorised! {
    /// Rows of a result, from row `first` on.
    fn piece<'j, 'a, C: Number>(_simd: S, job: &'j mut InterpolationJob<'a, C>, first: usize, made: &'j mut [C]) {
        match job {
            InterpolationJob::Mix(job) => job.run(first, made),
            InterpolationJob::Gather(job) => job.run(first, made),
        }
    }
}

/// An element of a result: a share, at most a half, of the way from the element that is nearer to the other. Both ends are
/// exact, as [`lerp`](crate::ops::Expr::lerp)'s are.
#[derive(Clone, Copy)]
struct Mix<C> {
    near: usize,
    other: usize,
    share: C,
}

impl<C: Number> Mix<C> {
    fn new(samples: &Samples, o: usize) -> Mix<C> {
        let (low, high, share) = samples.source(o);
        let share = C::from_f64(share);
        match share < C::from_f64(0.5) {
            true => Mix { near: low, other: high, share },
            false => Mix { near: high, other: low, share: C::from_i32(1).sub(share) },
        }
    }

    fn all(samples: &Samples) -> Vec<Mix<C>> {
        (0..samples.to).map(|o| Mix::new(samples, o)).collect()
    }

    #[inline(always)]
    fn of(&self, near: C, other: C) -> C {
        near.add(self.share.mul(other.sub(near)))
    }
}

/// Images in other sizes.
struct Mixing<'a, C> {
    rows: PlaneRows<'a>,
    /// Rows that a plane of the result has.
    height: usize,
    down: &'a Option<Vec<Mix<C>>>,
    across: &'a Option<Vec<Mix<C>>>,
    line: Vec<C>,
    plane: Option<usize>,
    /// Rows of its input with mixed columns, each in the place of its last bit: the two that a row is of are neighbours.
    held: [(Option<usize>, Vec<C>); 2],
}

impl<C: Number> Mixing<'_, C> {
    #[inline(always)]
    fn run(&mut self, first: usize, made: &mut [C]) {
        let width = self.held[0].1.len();
        for (r, to) in made.chunks_exact_mut(width).enumerate() {
            let (plane, o) = ((first + r) / self.height, (first + r) % self.height);
            if self.plane.replace(plane) != Some(plane) {
                self.rows.enter(plane);
                self.held.iter_mut().for_each(|held| held.0 = None);
            }
            let Some(down) = self.down else {
                self.mixed(o, to);
                continue;
            };
            let mix = &down[o];
            self.hold(mix.near);
            self.hold(mix.other);
            for ((y, a), b) in to.iter_mut().zip(self.held(mix.near)).zip(self.held(mix.other)) {
                *y = mix.of(*a, *b);
            }
        }
    }

    /// A row of the input with mixed columns.
    #[inline(always)]
    fn mixed(&mut self, row: usize, to: &mut [C]) {
        let from = self.rows.read(row, &mut self.line);
        match self.across {
            None => to.copy_from_slice(from),
            Some(across) => {
                // Four at a time: what is computed of them is a vector's.
                let ((to, last), (across, rest)) = (to.as_chunks_mut::<4>(), across.as_chunks::<4>());
                for (to, mixes) in to.iter_mut().zip(across) {
                    for (y, mix) in to.iter_mut().zip(mixes) {
                        *y = mix.of(from[mix.near], from[mix.other]);
                    }
                }
                last.iter_mut().zip(rest).for_each(|(y, mix)| *y = mix.of(from[mix.near], from[mix.other]));
            }
        }
    }

    #[inline(always)]
    fn hold(&mut self, row: usize) {
        let in_place = self.across.is_none() && self.rows.in_place::<C>(row).is_some();
        if !in_place && self.held[row % 2].0.replace(row) != Some(row) {
            let mut to = std::mem::take(&mut self.held[row % 2].1);
            self.mixed(row, &mut to);
            self.held[row % 2].1 = to;
        }
    }

    /// What [`hold`](Self::hold) holds.
    #[inline(always)]
    fn held(&self, row: usize) -> &[C] {
        let in_place = if self.across.is_none() { self.rows.in_place(row) } else { None };
        in_place.unwrap_or(&self.held[row % 2].1)
    }
}

/// Which elements of a result each element of an input has a share of, and the shares.
struct Shares<C> {
    /// The first such element of the result, and the end of the shares.
    outputs: Vec<(usize, usize)>,
    shares: Vec<C>,
}

impl<C: Number> Shares<C> {
    fn new(samples: &Samples) -> Shares<C> {
        let mut shares = Vec::new();
        let outputs = (0..samples.from).map(|j| {
            let (first, last) = samples.outputs_of(j);
            shares.extend((first..last).map(|o| {
                let (mix, one) = (Mix::<C>::new(samples, o), C::from_i32(1));
                match (mix.near == j, mix.other == j) {
                    (true, true) => one,
                    (true, false) => one.sub(mix.share),
                    _ => mix.share,
                }
            }));
            (first, shares.len())
        });
        Shares { outputs: outputs.collect(), shares }
    }

    /// The first element of the result that element j has a share of, and the shares of it and of those behind it.
    #[inline(always)]
    fn of(&self, j: usize) -> (usize, &[C]) {
        let start = if j == 0 { 0 } else { self.outputs[j - 1].1 };
        (self.outputs[j].0, &self.shares[start..self.outputs[j].1])
    }
}

/// What elements of a result give to those that they are of: each of these adds up its shares, in order.
struct Gather<'a, C> {
    rows: PlaneRows<'a>,
    /// Rows that a plane of what is made has.
    height: usize,
    down: &'a Option<Shares<C>>,
    across: &'a Option<Shares<C>>,
    line: Vec<C>,
    sums: Vec<C>,
}

impl<C: Number> Gather<'_, C> {
    #[inline(always)]
    fn run(&mut self, first: usize, made: &mut [C]) {
        let width = self.across.as_ref().map_or(self.rows.len(), |across| across.outputs.len());
        let zero = C::from_i32(0);
        for (r, to) in made.chunks_exact_mut(width).enumerate() {
            let (plane, o) = ((first + r) / self.height, (first + r) % self.height);
            self.rows.enter(plane);
            let sums: &[C] = match self.down {
                None => self.rows.read(o, &mut self.line),
                Some(down) => {
                    let (from, shares) = down.of(o);
                    self.sums.fill(zero);
                    for (k, share) in shares.iter().enumerate() {
                        let line = self.rows.read(from + k, &mut self.line);
                        self.sums.iter_mut().zip(line).for_each(|(sum, x)| *sum = sum.add(share.mul(*x)));
                    }
                    &self.sums
                }
            };
            let Some(across) = self.across else {
                to.copy_from_slice(sums);
                continue;
            };
            for (j, y) in to.iter_mut().enumerate() {
                let (from, shares) = across.of(j);
                let given = &sums[from..][..shares.len()];
                *y = given.iter().zip(shares).fold(zero, |sum, (x, share)| sum.add(share.mul(*x)));
            }
        }
    }
}
