//! Sorting on the CPU: std's sort of keys with their indices, lines shared out among the team's threads.

use crate::device::{count_launch, cpu::parallel};
use crate::ops::collapse::Walk;
use crate::ops::convert::load_tile;
use crate::ops::lane::Lane;
use crate::ops::lines::each;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{Compute, Result, Tensor};

/// Values that a job of the pool searches for.
const JOB: usize = 1 << 10;

pub(super) fn run(x: &Tensor, d: usize, descending: bool, values: &Tensor, places: &Tensor) -> Result<()> {
    match x.dtype.compute() {
        Compute::F32 => run_as::<f32>(x, d, descending, values, places),
        Compute::F64 => run_as::<f64>(x, d, descending, values, places),
        Compute::I64 => run_as::<i64>(x, d, descending, values, places),
    }
}

fn run_as<C: Lane>(x: &Tensor, d: usize, descending: bool, values: &Tensor, places: &Tensor) -> Result<()> {
    each::<C>(x, d, values, Some(places), |line, values, places| {
        let key = |v: C| if descending { !key(v) } else { key(v) };
        let mut keys: Vec<(u64, usize)> = line.iter().enumerate().map(|(i, &v)| (key(v), i)).collect();
        // The indices make equal keys different: this is stable.
        keys.sort_unstable();
        for ((value, place), (_, i)) in values.iter_mut().zip(places).zip(keys) {
            (*value, *place) = (line[i], i as i64);
        }
    })
}

/// An unsigned number that orders as the element does: -0 and 0 are equal, NaN is above everything.
fn key<C: Lane>(v: C) -> u64 {
    if C::COMPUTE == Compute::I64 {
        return v.to_i64() as u64 ^ 1 << 63;
    }
    let v = v.to_f64();
    match (v + 0.0).to_bits() {
        _ if v.is_nan() => u64::MAX,
        bits if bits >> 63 == 1 => !bits,
        bits => bits | 1 << 63,
    }
}

pub(super) fn search(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
    match x.dtype.compute() {
        Compute::F32 => search_as::<f32>(x, lines, step, v, right, out),
        Compute::F64 => search_as::<f64>(x, lines, step, v, right, out),
        Compute::I64 => search_as::<i64>(x, lines, step, v, right, out),
    }
}

fn search_as<C: Lane>(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
    count_launch();
    let n = x.shape().dims().last().copied().unwrap_or(1);
    let walk = Walk::new(v.shape(), [&lines.strides[..], v.strides()]);
    with_host(&[&x.storage, &v.storage], &[&out.storage], |reads, writes| {
        let one = |t: &Tensor, bytes: &[u8], at: isize| {
            let mut element = [C::from_i32(0)];
            load_tile(t.dtype, bytes, (t.layout.offset as isize + at) as usize, 0, &mut element);
            element[0]
        };
        let find = |p: usize| {
            let at = walk.offsets(p);
            let value = one(v, reads[1], at[1]);
            let (mut low, mut high) = (0, n);
            while low < high {
                let between = low + (high - low) / 2;
                let element = one(x, reads[0], at[0] + between as isize * step);
                let beyond = if right { element > value } else { element >= value };
                if beyond { high = between } else { low = between + 1 }
            }
            low as i64
        };
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..out.numel()];
        parallel::for_each_chunk(out, JOB, |i, out| {
            out.iter_mut().enumerate().for_each(|(k, o)| *o = find(i * JOB + k));
        });
    })
}
