//! Lines of a tensor along one dim, for operations that need a whole line and give one as long: scans and sorts. Results are
//! contiguous and have the tensor's shape.

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::lines::Lines;
use crate::device::cpu::parallel;
use crate::storage::{Storage, with_host};
use crate::{Result, Tensor};

/// Elements a job of the pool has: enough to hide what handing it over costs.
const JOB: usize = 1 << 13;

/// On the CPU: `f(line, values, indices)` for every line of `x` along d; lines are shared out among the team's threads.
pub(crate) fn each<C: Number>(
    x: &Tensor,
    d: usize,
    values: &Tensor,
    indices: Option<&Tensor>,
    f: impl Fn(&[C], &mut [C], &mut [i64]) + Sync,
) -> Result<()> {
    let lines = Lines::new(x, d);
    let stretch = lines.inner * lines.n;
    let least = JOB.div_ceil(stretch);
    let (size, numel) = (values.dtype.size(), values.numel());
    let results: SmallVec<[&Storage; 2]> = [values].into_iter().chain(indices).map(|t| &t.storage).collect();
    with_host(&[&x.storage], &results, |reads, writes| {
        let sizes = [size, size_of::<i64>()].map(|size| stretch * least * size);
        let mut results: SmallVec<[&mut [u8]; 2]> = SmallVec::new();
        let bytes = [size, size_of::<i64>()].map(|size| numel * size);
        writes.iter_mut().zip(bytes).for_each(|(bytes_of, n)| results.push(&mut bytes_of[..n]));
        let count = results.len();
        parallel::for_each_chunks(&mut results, &sizes[..count], |job, parts| {
            let (values_to, indices_to) = parts.split_first_mut().expect("the values");
            let mut indices_to = indices_to.first_mut().map(|bytes| bytemuck::cast_slice_mut::<u8, i64>(bytes));
            let (first, zero) = (job * least * lines.inner, C::from_i32(0));
            let (mut line, mut made, mut found) = (vec![zero; lines.n], vec![zero; lines.n], vec![0i64; lines.n]);
            for i in 0..values_to.len() / size / lines.n {
                let start = x.layout.offset as isize + lines.strided.offsets(first + i)[0];
                load_tile(x.dtype, reads[0], start as usize, lines.step, &mut line);
                f(&line, &mut made, &mut found);
                let at = i / lines.inner * stretch + i % lines.inner;
                store_tile(values.dtype, &made, values_to, at, lines.inner as isize);
                if let Some(indices) = &mut indices_to {
                    let indices = indices[at..].iter_mut().step_by(lines.inner);
                    indices.zip(&found).for_each(|(to, &index)| *to = index);
                }
            }
        });
    })
}
