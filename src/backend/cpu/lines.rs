//! Lines of a tensor along one dim, for operations that see a whole line and give one as long: scans and sorts. Results are
//! contiguous, of the tensor's shape.

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Lane;
use crate::backend::problem::lines::Lines;
use crate::device::count_launch;
use crate::device::cpu::parallel;
use crate::storage::{Storage, with_host};
use crate::{Result, Tensor};

/// Elements a job of the pool has: enough to hide what handing it over costs.
const JOB: usize = 1 << 13;

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
