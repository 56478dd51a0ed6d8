//! Normalisation on the CPU: sums of rows, then one formula over all elements.

use super::{Rows, apart};
use crate::device::cpu::parallel;
use crate::ops::convert::load_tile;
use crate::ops::elementwise::{Params, apply_into};
use crate::ops::expr::Expr;
use crate::ops::fold::{Add, fold};
use crate::ops::lane::Lane;
use crate::storage::with_host;
use crate::{Compute, Result, Scalar, Tensor};

/// Elements that are worth a job of the pool.
const JOB: usize = 1 << 14;

pub(super) fn run(rows: &Rows) -> Result<()> {
    match rows.x.dtype.compute() {
        Compute::F64 => run_as::<f64>(rows),
        _ => run_as::<f32>(rows),
    }
}

/// Row r of a view of four dims, in the compute type.
fn row<C: Lane>(t: &Tensor, bytes: &[u8], r: usize) -> Vec<C> {
    let (dims, s) = (t.shape().dims(), t.strides());
    let start = t.layout.offset as isize + (r / dims[1]) as isize * s[0] + (r % dims[1]) as isize * s[1];
    let mut row = vec![C::from_i32(0); dims[2] * dims[3]];
    for (outer, run) in row.chunks_mut(dims[3]).enumerate() {
        load_tile(t.dtype, bytes, (start + outer as isize * s[2]) as _, s[3], run);
    }
    row
}

/// Two numbers for each row, the second ones after all first ones.
fn each_row<C: Lane>(to: &mut [u8], n: usize, f: impl Fn(usize) -> [C; 2] + Sync) {
    let to: &mut [C] = bytemuck::cast_slice_mut(to);
    let (first, second) = to.split_at_mut(to.len() / 2);
    let mut rows: Vec<(&mut C, &mut C)> = first.iter_mut().zip(second).collect();
    let fill = |r: usize, (first, second): &mut (&mut C, &mut C)| [**first, **second] = f(r);
    match rows.len() * n <= JOB {
        true => rows.iter_mut().enumerate().for_each(|(r, row)| fill(r, row)),
        false => parallel::for_each(&mut rows, fill),
    }
}

fn run_as<C: Lane>(rows: &Rows) -> Result<()> {
    let (count, n) = (rows.count(), C::from_i64(rows.len() as i64));
    let [mean, var] = &apart("norm", rows.statistics)?;
    let scalars = [Scalar::Float(rows.eps), Scalar::Float(1.0 / rows.len() as f64)];
    let params = Params { scalars: &scalars, seeds: &[] };
    let (x, root) = (Expr::input, |i: usize| (Expr::input(i) + Expr::scalar(0)).rsqrt());
    let Some(z) = rows.z else {
        with_host(&[&rows.x.storage], &[&rows.statistics.storage], |reads, writes| {
            each_row::<C>(&mut *writes[0], rows.len(), |r| {
                let mut row = row::<C>(rows.x, reads[0], r);
                let mean = if rows.rms { C::from_i32(0) } else { fold::<Add, C>(&row).div(n) };
                row.iter_mut().for_each(|x| *x = x.sub(mean).mul(x.sub(mean)));
                [mean, fold::<Add, C>(&row).div(n)]
            });
        })?;
        let mut inputs = vec![rows.x, mean, var];
        let mut result = (x(0) - x(1)) * root(2);
        if let Some(weight) = rows.weight {
            result = result * x(inputs.len());
            inputs.push(weight);
        }
        if let Some(bias) = rows.bias {
            result = result + x(inputs.len());
            inputs.push(bias);
        }
        // It counts itself as a launch: the statistics are part of it.
        return apply_into("norm", &inputs, params, &[result], &[rows.y]);
    };
    let (dims, device) = (rows.x.shape().dims(), rows.x.device());
    let own = match rows.sums {
        Some(sums) => sums.detach(),
        None => Tensor::empty_like_shape([2, dims[0], dims[1], 1, 1], C::COMPUTE.dtype(), device)?,
    };
    let nothing = Tensor::empty_like_shape(0, rows.x.dtype, device)?;
    let weight = rows.weight.filter(|_| rows.sums.is_none());
    let reads = [rows.x, z, rows.statistics, weight.unwrap_or(&nothing)].map(|t| &t.storage);
    with_host(&reads, &[&own.storage], |reads, writes| {
        let (means, vars) = bytemuck::cast_slice::<u8, C>(reads[2]).split_at(count);
        let eps = C::from_f64(rows.eps);
        each_row::<C>(&mut *writes[0], rows.len(), |r| {
            let (mut g, mut z) = (row::<C>(rows.x, reads[0], r), row::<C>(z, reads[1], r));
            if let Some(weight) = weight {
                let weight = row::<C>(weight, reads[3], r);
                g.iter_mut().zip(weight).for_each(|(g, w)| *g = g.mul(w));
            }
            let scale = C::from_i32(1).div(vars[r].add(eps).sqrt());
            z.iter_mut().zip(&g).for_each(|(z, g)| *z = z.sub(means[r]).mul(scale).mul(*g));
            [fold::<Add, C>(&g), fold::<Add, C>(&z)]
        });
    })?;
    let [sum, product] = &apart("norm", &own)?;
    let mut inputs = vec![rows.x, z, mean, var, sum, product];
    let mut grad = x(0);
    // The sums of rows with one weight each are without it.
    let mut factor = Expr::constant(1.0);
    if let Some(weight) = rows.weight {
        grad = grad * x(6);
        inputs.push(weight);
        if rows.sums.is_some() {
            factor = x(6);
        }
    }
    let normal = (x(1) - x(2)) * root(3);
    let share = Expr::scalar(1) * &factor;
    let less = if rows.rms { grad } else { grad - x(4) * &share };
    let result = (less - normal * x(5) * share) * root(3);
    apply_into("norm", &inputs, params, &[result], &[rows.y])
}
