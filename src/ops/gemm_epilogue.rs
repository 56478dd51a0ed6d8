//! Epilogues of products on the CPU, evaluated where a piece of the product lies in the cache of the core that made it: it is
//! never written to memory, but the results are.

use std::sync::Arc;

use smallvec::SmallVec;

use super::cpu_flat::{Lies, place};
use super::elementwise::compute_type;
use super::gemm::{Gemm, Operand, Plan};
use super::gemm_cpu::floats;
use super::program::Program;
use super::tiles::{Scratch, TILE, Tile, TileIn};
use crate::device::count_launch;
use crate::device::cpu::gemm::{gemm_into, in_pieces};
use crate::storage::{Storage, with_host};
use crate::{Compute, DType, Result, Scalar, Shape, Tensor};

pub(super) struct Epilogue<'a> {
    program: Arc<Program>,
    extras: SmallVec<[Extra<'a>; 2]>,
    scalars: &'a [Scalar],
}

/// Where a further operand has the element of the result's element `i`.
enum Extra<'a> {
    /// At `i`.
    Each(&'a [f32]),
    /// At `i` modulo the length of a row, which is repeated for [`TILE`] elements and one row.
    Rows(Vec<f32>, usize),
    One(f32),
}

impl Epilogue<'_> {
    /// Runs a product of f32 and its epilogue if it is of this kind: one matrix, whose results are contiguous, and extras
    /// that lie as they do, are a row for all rows or a number, all of f32. Gives whether it was.
    pub(super) fn run(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
        let mut lies: SmallVec<[Lies; 2]> = SmallVec::new();
        for t in g.extras {
            match place(t, &outs[0]) {
                Some(lie) if t.dtype == DType::F32 && !outs.iter().any(|out| t.shares_storage(out)) => lies.push(lie),
                _ => return Ok(false),
            }
        }
        let plan = Plan::new(&g.a.layout, &g.b.layout, shape, &[&outs[0].layout]);
        let rows = Operand { row: plan.n as isize, col: 1, batch: SmallVec::new() };
        let straight = in_pieces((plan.m, plan.n, plan.k)) && plan.count() == 1 && plan.others[0] == rows;
        let program = Program::of(g.epilogue);
        let as_computed = |t: &Tensor| t.dtype == DType::F32 && t.is_contiguous();
        let operands: SmallVec<[&Tensor; 4]> = outs.iter().take(1).chain(g.extras.iter().copied()).collect();
        if !straight
            || !outs.iter().all(as_computed)
            || program.seeds() > 0
            || compute_type(&program, &operands, &outs.iter().collect::<SmallVec<[&Tensor; 2]>>()) != Compute::F32
        {
            return Ok(false);
        }
        let reads: SmallVec<[&Storage; 4]> = [g.a, g.b].iter().chain(g.extras).map(|t| &t.storage).collect();
        let writes: SmallVec<[&Storage; 2]> = outs.iter().map(|t| &t.storage).collect();
        with_host(&reads, &writes, |reads, writes| {
            let (mut made_a, mut made_b) = (Vec::new(), Vec::new());
            let (a, b) = (floats((g.a, reads[0]), &mut made_a), floats((g.b, reads[1]), &mut made_b));
            let extras = g.extras.iter().zip(&lies).zip(&reads[2..]);
            let epilogue = Epilogue {
                program,
                extras: extras.map(|((t, lies), bytes)| Extra::new(t, *lies, bytes)).collect(),
                scalars: g.scalars,
            };
            let results = outs.iter().zip(writes);
            let mut results: SmallVec<[&mut [f32]; 2]> = results
                .map(|(t, bytes)| &mut bytemuck::cast_slice_mut::<u8, f32>(bytes)[t.layout.offset..][..t.numel()])
                .collect();
            plan.places([a.offset, b.offset, 0]).try_for_each(|[at_a, at_b, _]| {
                let (a, b) = ((a.data, at_a), (b.data, at_b));
                gemm_into((plan.m, plan.n, plan.k), &mut results, a, b, |first, product, outs| {
                    epilogue.evaluate(first, product, outs);
                })
            })
        })??;
        count_launch();
        Ok(true)
    }

    /// The results of elements from `first` on.
    fn evaluate(&self, first: usize, product: &[f32], outs: &mut [&mut [f32]]) {
        let mut scratch = Scratch::new();
        for (i, product) in product.chunks(TILE).enumerate() {
            let (first, len) = (first + i * TILE, product.len());
            let mut inputs: SmallVec<[TileIn<f32>; 3]> = SmallVec::new();
            inputs.push(TileIn::Slice(product));
            inputs.extend(self.extras.iter().map(|extra| match extra {
                Extra::Each(elements) => TileIn::Slice(&elements[first..][..len]),
                Extra::Rows(repeated, row) => TileIn::Slice(&repeated[first % row..][..len]),
                Extra::One(x) => TileIn::Scalar(*x),
            }));
            let mut targets: SmallVec<[&mut [f32]; 2]> = SmallVec::new();
            outs.iter_mut().for_each(|out| targets.push(&mut out[i * TILE..][..len]));
            let tile = Tile { inputs: &inputs, scalars: self.scalars, seeds: &[], first: first as u64, len };
            self.program.eval_tile(&tile, &mut scratch, &mut targets);
        }
    }
}

impl<'a> Extra<'a> {
    fn new(t: &Tensor, lies: Lies, bytes: &'a [u8]) -> Extra<'a> {
        let elements: &[f32] = &bytemuck::cast_slice(bytes)[t.layout.offset..];
        match lies {
            Lies::Each => Extra::Each(elements),
            Lies::Rows(row) => Extra::Rows(elements[..row].repeat(TILE.div_ceil(row) + 1), row),
            Lies::One => Extra::One(elements[0]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;
    use crate::ops::elementwise::{Params, apply};
    use crate::{Device, Expr};

    fn tensor(shape: [usize; 2], seed: usize) -> Tensor {
        let n: usize = shape.iter().product();
        // In memory that starts in the middle of a vector.
        let values: Vec<f32> = (0..n + 1).map(|i| ((i * 7919 + seed) % 1009) as f32 / 1009.0 - 0.5).collect();
        Tensor::from_slice(&values, n + 1, Device::Cpu).unwrap().narrow(0, 1, n).unwrap().reshape(shape).unwrap()
    }

    /// The results beside those of the product and the formula one after the other, and whether they were computed in pieces.
    fn check(a: &Tensor, b: &Tensor, extras: &[&Tensor], epilogue: &[Expr], in_pieces: bool) {
        let dtypes: Vec<DType> = epilogue.iter().map(|_| DType::F32).collect();
        let g = Gemm {
            extras,
            scalars: &[Scalar::Float(0.25)],
            dtypes: &dtypes,
            ..Gemm::plain("test", a, b, epilogue, &DType::F32)
        };
        let product = a.matmul(b).unwrap();
        let shape = product.shape();
        let outs: Vec<Tensor> = epilogue.iter().map(|_| Tensor::full(shape, f32::NAN, Device::Cpu).unwrap()).collect();
        assert_eq!(Epilogue::run(&g, shape, &outs).unwrap(), in_pieces, "{a:?} {b:?}");
        let inputs: Vec<&Tensor> = std::iter::once(&product).chain(extras.iter().copied()).collect();
        let params = Params { scalars: &[Scalar::Float(0.25)], seeds: &[] };
        let want = apply("test", &inputs, params, epilogue, &dtypes).unwrap();
        let got = g.run().unwrap();
        for (i, want) in want.iter().enumerate() {
            let want = want.to_vec::<f32>().unwrap();
            assert_eq!(got[i].to_vec::<f32>().unwrap(), want, "result {i} of {shape:?}");
            assert!(!in_pieces || outs[i].to_vec::<f32>().unwrap() == want, "result {i} of {shape:?}, in pieces");
        }
    }

    /// At sizes around tiles of the product, of the formula and of what is handed over, on one thread and on all.
    #[test]
    fn the_same_as_one_after_the_other() {
        let x = |i| Expr::input(i);
        let sum = x(0) + x(1);
        let sizes =
            [(8, 8, 8), (9, 10, 300), (65, 33, 17), (1030, 10, 128), (600, 256, 300), (64, 1100, 513), (2600, 47, 300)];
        for (m, n, k) in sizes {
            let (a, b, bt) = (tensor([m, k], 1), tensor([k, n], 2), tensor([n, k], 3).t().unwrap());
            let (each, row, one) = (tensor([m, n], 4), tensor([1, n], 5), tensor([1, 1], 6));
            check(&a, &b, &[&row], &[sum.relu(), sum.clone()], true);
            check(&a, &bt, &[&row.reshape(n).unwrap()], from_ref(&sum), true);
            check(&a, &b, &[&each], &[x(0) * x(1).gt(0.0)], true);
            check(&a, &b, &[&one, &row, &each], &[x(0) * Expr::scalar(0) + (x(1) - x(2)) * x(3)], true);
            check(&a, &b, &[], &[x(0).sigmoid()], true);
            check(&a, &b, &[&tensor([m, 1], 7)], from_ref(&sum), false);
            check(&a, &b, &[&tensor([n, m], 8).t().unwrap()], from_ref(&sum), false);
        }
    }

    #[test]
    fn products_that_do_not_come_in_pieces() {
        let sum = Expr::input(0) + Expr::input(1);
        for (m, n, k) in [(7, 9, 8), (8, 8, 2100)] {
            check(&tensor([m, k], 1), &tensor([k, n], 2), &[&tensor([1, n], 3)], from_ref(&sum), false);
        }
        let batch = |shape: [usize; 2], seed| tensor(shape, seed).reshape([2, shape[0] / 2, shape[1]]).unwrap();
        check(&batch([18, 8], 1), &batch([16, 10], 2), &[&tensor([1, 10], 3)], &[sum], false);
    }
}
