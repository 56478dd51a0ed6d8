//! Lines of a tensor along one dim, for operations that map a whole line to a line of the same length: scans and sorts. Results are
//! contiguous and have the tensor's shape.

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::lines::Lines;
use crate::device::cpu::parallel;
use crate::storage::{Storage, with_host};
use crate::{Result, Tensor};

/// The number of elements in a job of the thread pool: enough to hide the cost of handing the job over.
const JOB_ELEMENTS: usize = 1 << 13;

/// The number of elements of short lines that are loaded and stored at a time.
const TILE_LEN: usize = 1 << 10;

/// Calls `f(line, values, indices)` for every line of `x` along dim `d`, on all threads.
pub(crate) fn for_each_line<C: Number>(
    x: &Tensor,
    d: usize,
    values: &Tensor,
    indices: Option<&Tensor>,
    f: impl Fn(&[C], &mut [C], &mut [i64]) + Sync,
) -> Result<()> {
    let lines = Lines::new(x, d);
    let stretch = lines.inner * lines.n;
    let least = JOB_ELEMENTS.div_ceil(stretch);
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
            let (n, inner, count) = (lines.n, lines.inner, values_to.len() / size);
            let start = |line: usize| (x.layout.offset as isize + lines.strided.offsets(line)[0]) as usize;
            // Short lines of a contiguous tensor are loaded and stored many at a time.
            let tile = if x.is_contiguous() && stretch <= TILE_LEN { TILE_LEN / stretch * stretch } else { n };
            let (mut loaded, mut made, mut found) = (vec![zero; tile], vec![zero; tile], vec![0i64; tile]);
            let mut line_buffers = (vec![zero; n], vec![zero; n], vec![0i64; n]);
            for at in (0..count).step_by(tile) {
                let len = tile.min(count - at);
                if tile == n && stretch != n {
                    // This line is interleaved with others in the result.
                    let line = at / n;
                    load_tile(x.dtype, reads[0], start(first + line), lines.step, &mut loaded);
                    f(&loaded, &mut made, &mut found);
                    let at = line / inner * stretch + line % inner;
                    store_tile(values.dtype, &made, values_to, at, inner as isize);
                    if let Some(indices) = &mut indices_to {
                        indices[at..].iter_mut().step_by(inner).zip(&found).for_each(|(to, &index)| *to = index);
                    }
                    continue;
                }
                let step = if tile == n { lines.step } else { 1 };
                load_tile(x.dtype, reads[0], start(first + at / n), step, &mut loaded[..len]);
                for from in (0..len).step_by(stretch) {
                    let all = from..from + stretch;
                    let (loaded, made, found) = (&loaded[all.clone()], &mut made[all.clone()], &mut found[all]);
                    if inner == 1 {
                        f(loaded, made, found);
                        continue;
                    }
                    let (line, values, indices) = &mut line_buffers;
                    for j in 0..inner {
                        line.iter_mut().zip(loaded[j..].iter().step_by(inner)).for_each(|(to, from)| *to = *from);
                        f(line, values, indices);
                        made[j..].iter_mut().step_by(inner).zip(&*values).for_each(|(to, from)| *to = *from);
                        found[j..].iter_mut().step_by(inner).zip(&*indices).for_each(|(to, from)| *to = *from);
                    }
                }
                store_tile(values.dtype, &made[..len], values_to, at, 1);
                if let Some(indices) = &mut indices_to {
                    indices[at..at + len].copy_from_slice(&found[..len]);
                }
            }
        });
    })
}
