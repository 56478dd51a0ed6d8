//! Lines of a tensor along one dim, for operations that see a whole line and give one as long: scans and sorts. Results are
//! contiguous, of the tensor's shape.

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Lane;
use crate::device::count_launch;
use crate::device::cpu::parallel;
use crate::layout::collapse::Walk;
use crate::storage::{Storage, with_host};
use crate::tensor::{Dims, Layout, Shape};
use crate::{Result, Tensor};

/// Elements a job of the pool has: enough to hide what handing it over costs.
const JOB: usize = 1 << 13;

/// Where the lines of a tensor along a dim lie.
#[derive(Debug)]
pub(crate) struct Lines {
    /// Where each line starts, from the tensor's first element on.
    pub(crate) walk: Walk,
    pub(crate) count: usize,
    /// Elements of a line, and the step from one to the next.
    pub(crate) n: usize,
    pub(crate) step: isize,
    /// Elements after the dim: the step along a line of a result.
    pub(crate) inner: usize,
}

impl Lines {
    pub(crate) fn new(x: &Tensor, d: usize) -> Lines {
        let dims = || x.shape().dims().iter().zip(x.strides()).enumerate().filter(|(i, _)| *i != d).map(|(_, d)| d);
        let (shape, strides): (Shape, Dims<isize>) = (dims().map(|d| *d.0).collect(), dims().map(|d| *d.1).collect());
        Lines {
            walk: Walk::new(&shape, [&strides[..]]),
            count: shape.numel(),
            n: x.shape().dims()[d],
            step: x.strides()[d],
            inner: x.shape().dims()[d + 1..].iter().product(),
        }
    }

    /// Whether neighbouring lines lie closer together in memory than the elements of one.
    pub(crate) fn side_by_side(&self) -> bool {
        let across = self.walk.strides[0].last().copied().unwrap_or(0).unsigned_abs();
        self.count > 1 && across != 0 && across < self.step.unsigned_abs()
    }

    pub(crate) fn rank(&self) -> usize {
        self.walk.dims.len().max(1)
    }

    /// The walk as `kernels/walk.cl` has it: sizes, then strides.
    pub(crate) fn words(&self) -> SmallVec<[i64; 16]> {
        match self.walk.dims.is_empty() {
            true => SmallVec::from_slice(&[1, 0]),
            false => {
                let sizes = self.walk.dims.iter().map(|&n| n as i64);
                sizes.chain(self.walk.strides[0].iter().map(|&s| s as i64)).collect()
            }
        }
    }
}

/// A scalar is a line of one element.
pub(crate) fn at_least_1d(t: &Tensor) -> Tensor {
    match t.rank() {
        0 => t.with_layout(Layout { shape: Shape::from(1), strides: Dims::from_slice(&[0]), offset: t.layout.offset }),
        _ => t.detach(),
    }
}

/// On the CPU: `f(line, values, places)` for every line of `x` along d; lines are shared out among the team's threads.
pub(crate) fn each<C: Lane>(
    x: &Tensor,
    d: usize,
    values: &Tensor,
    places: Option<&Tensor>,
    f: impl Fn(&[C], &mut [C], &mut [i64]) + Sync,
) -> Result<()> {
    count_launch();
    let lines = Lines::new(x, d);
    let stretch = lines.inner * lines.n;
    let least = JOB.div_ceil(stretch);
    let (size, numel) = (values.dtype.size(), values.numel());
    let results: SmallVec<[&Storage; 2]> = [values].into_iter().chain(places).map(|t| &t.storage).collect();
    with_host(&[&x.storage], &results, |reads, writes| {
        let part = |first: usize, values_to: &mut [u8], mut places_to: Option<&mut [i64]>| {
            let zero = C::from_i32(0);
            let (mut line, mut made, mut found) = (vec![zero; lines.n], vec![zero; lines.n], vec![0i64; lines.n]);
            for i in 0..values_to.len() / size / lines.n {
                let start = x.layout.offset as isize + lines.walk.offsets(first + i)[0];
                load_tile(x.dtype, reads[0], start as usize, lines.step, &mut line);
                f(&line, &mut made, &mut found);
                let to = i / lines.inner * stretch + i % lines.inner;
                store_tile(values.dtype, &made, values_to, to, lines.inner as isize);
                if let Some(places) = &mut places_to {
                    let places = places[to..].iter_mut().step_by(lines.inner);
                    places.zip(&found).for_each(|(place, &index)| *place = index);
                }
            }
        };
        let mut writes = writes.iter_mut();
        let pieces = writes
            .next()
            .map(|v| &mut v[..numel * size])
            .into_iter()
            .flat_map(|v| v.chunks_mut(stretch * least * size));
        let mut work: Vec<(&mut [u8], Option<&mut [i64]>)> = match writes.next() {
            Some(p) => {
                let p: &mut [i64] = &mut bytemuck::cast_slice_mut(p)[..numel];
                pieces.zip(p.chunks_mut(stretch * least).map(Some)).collect()
            }
            None => pieces.map(|v| (v, None)).collect(),
        };
        parallel::for_each(&mut work, |i, (values, places)| {
            part(i * least * lines.inner, values, places.as_deref_mut())
        });
    })
}
