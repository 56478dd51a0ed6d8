//! Formulas over bool tensors on the CPU. Every such formula is a polynomial over bits, which is evaluated on bytes instead of numbers.

use crate::backend::cpu::interpreter::{Scratch, Tile, TileIn};
use crate::backend::cpu::map;
use crate::backend::cpu::vectorised::vectorised;
use crate::device::cpu::parallel;
use crate::expr::program::Program;
use crate::storage::with_host_few;
use crate::{DType, Result, Tensor};

/// Runs the launch if it computes a bool result from one or two bool tensors with the result's layout, and returns whether it did.
pub(crate) fn try_run(program: &Program, inputs: &[&Tensor], outputs: &[&Tensor]) -> Result<bool> {
    let [out] = outputs else { return Ok(false) };
    let alike = |t: &&Tensor| {
        t.dtype == DType::Bool
            && t.layout.same_layout(&out.layout, 1)
            && t.device() == outputs[0].device()
            && !t.shares_storage(out)
    };
    let fits = out.dtype == DType::Bool && out.is_contiguous() && out.numel() > 0 && inputs.iter().all(alike);
    if !fits
        || !(1..=2).contains(&inputs.len())
        || program.needs_float()
        || program.scalars() + program.seeds() > 0
        || program.divides()
    {
        return Ok(false);
    }
    let (count, to) = (out.numel(), &out.storage);
    let all = |t: &Tensor| t.layout.offset..t.layout.offset + count;
    let polynomial = polynomial(program, inputs.len());
    let compute = |x: &[u8], y: &[u8], write: &mut [u8]| {
        let step = map::job_len(count);
        parallel::for_each_chunk(&mut write[all(out)], step, |i, out| {
            let part = i * step..i * step + out.len();
            evaluate(polynomial, &x[part.clone()], &y[part], out);
        });
    };
    match *inputs {
        [x] => with_host_few([&x.storage], to, |[a], write| compute(&a[all(x)], &a[all(x)], write))?,
        [x, y] => with_host_few([&x.storage, &y.storage], to, |[a, b], write| compute(&a[all(x)], &b[all(y)], write))?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Returns the coefficients of the formula as `p0 ^ p1 x ^ p2 y ^ p3 x y`, each 0 or 1.
fn polynomial(program: &Program, inputs: usize) -> [u8; 4] {
    let columns = [TileIn::Slice(&[0i64, 1, 0, 1]), TileIn::Slice(&[0, 0, 1, 1])];
    let tile = Tile { inputs: &columns[..inputs], scalars: &[], seeds: &[], first: 0, len: 4 };
    let mut values = [0i64; 4];
    program.eval_tile(&tile, &mut Scratch::new(), &mut [&mut values]);
    let [none, x, y, both] = values.map(|value| u8::from(value != 0));
    [none, none ^ x, none ^ y, none ^ x ^ y ^ both]
}

vectorised! {
    /// Evaluates a [`polynomial`] over bool tensors.
    fn evaluate<'a>(_simd: S, polynomial: [u8; 4], x: &'a [u8], y: &'a [u8], out: &'a mut [u8]) {
        let [p0, p1, p2, p3] = polynomial;
        for (out, (a, b)) in out.iter_mut().zip(x.iter().zip(y)) {
            let (a, b) = (u8::from(*a != 0), u8::from(*b != 0));
            *out = p0 ^ (p1 & a) ^ (p2 & b) ^ (p3 & a & b);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Device;

    #[test]
    fn every_truth_table_of_one_or_two_masks() {
        let n = 3 * map::job_len(0) + 7;
        let mask = |at: usize, k: usize| {
            let values: Vec<bool> = (0..n + at).map(|i| (i * 7919 + k) % 5 < 2).collect();
            Tensor::from_slice(&values, n + at, Device::Cpu).unwrap().narrow(0, at, n).unwrap()
        };
        let (x, y) = (mask(1, 0), mask(6, 3));
        let [a, b] = [&x, &y].map(|t| t.to_vec::<bool>().unwrap());
        type Of = fn(bool, bool) -> bool;
        let operations: [(Result<Tensor>, Of); 9] = [
            (x.logical_and(&y), |a, b| a & b),
            (x.logical_or(&y), |a, b| a | b),
            (x.logical_xor(&y), |a, b| a ^ b),
            (x.logical_not(), |a, _| !a),
            (x.eq(&y), |a, b| a == b),
            (x.ne(&y), |a, b| a != b),
            (x.lt(&y), |a, b| !a & b),
            (x.ge(&y), |a, b| a | !b),
            (x.maximum(&y), |a, b| a | b),
        ];
        for (k, (got, of)) in operations.into_iter().enumerate() {
            let want: Vec<bool> = a.iter().zip(&b).map(|(&a, &b)| of(a, b)).collect();
            assert_eq!(got.unwrap().to_vec::<bool>().unwrap(), want, "operation {k}");
        }
        // Three bool inputs take another path.
        let chosen = x.where_cond(&y, &x.logical_not().unwrap()).unwrap().to_vec::<bool>().unwrap();
        assert!(chosen.iter().zip(a.iter().zip(&b)).all(|(&got, (&a, &b))| got == if a { b } else { !a }));
        let all = Tensor::map(&[&x, &y, &x], |m| &m[0] * &m[1] * &m[2]).unwrap().to_vec::<bool>().unwrap();
        assert!(all.iter().zip(a.iter().zip(&b)).all(|(&got, (&a, &b))| got == (a & b)));
    }
}
