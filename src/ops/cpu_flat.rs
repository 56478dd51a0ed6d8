//! Launches on the CPU that need no plan: one primitive, of operands that lie as the result does, are one row for all of
//! its rows, or one number. Most launches of small tensors are, and planning would take longer than they do.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::cpu_map;
use super::elementwise::compute_type;
use super::expr::Op;
use super::lane::Lane;
use super::program::{Action, Program};
use super::tiles::{Scratch, Tile, TileIn};
use crate::device::count_launch;
use crate::device::cpu::parallel;
use crate::storage::{Storage, with_few, with_host};
use crate::{DType, Device, Error, Result, Scalar, Tensor};

/// Where an operand has the element of the result's element `i`.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Lies {
    /// At `i`.
    Each,
    /// At `i` modulo the length of a row.
    Rows(usize),
    /// At 0.
    One,
}

/// Runs the launch if it is of this kind; gives whether it was. Shapes are not checked: what does not fit is not of this kind.
pub(super) fn run(
    op: &'static str,
    program: &Program,
    inputs: &[&Tensor],
    scalars: &[Scalar],
    outputs: &[&Tensor],
) -> Result<bool> {
    let ([out], [step]) = (outputs, &program.steps[..]) else { return Ok(false) };
    let computes = match step.action {
        Action::Compute(op) => !matches!(op, Op::Leaf(_)),
        Action::Copy => false,
    };
    let count = out.numel();
    if !computes || count == 0 || out.device() != Device::Cpu || !out.is_contiguous() {
        return Ok(false);
    }
    let mut lies: SmallVec<[Lies; 3]> = SmallVec::new();
    for t in inputs {
        match place(t, out) {
            Some(place) if t.dtype == out.dtype && !t.shares_storage(out) => lies.push(place),
            _ => return Ok(false),
        }
    }
    // A row goes with an operand that has an element for each.
    let two = matches!(step.action, Action::Compute(Op::Binary(_)));
    if lies.iter().any(|l| matches!(l, Lies::Rows(_))) && !(two && lies.len() == 2 && lies.contains(&Lies::Each)) {
        return Ok(false);
    }
    let bytes = inputs.iter().map(|t| t.numel()).sum::<usize>().saturating_add(count) * out.dtype.size();
    let streamed = program.goes_past_cache(count * out.dtype.size(), bytes);
    if (streamed && !program.streams()) || compute_type(program, inputs, outputs).dtype() != out.dtype {
        return Ok(false);
    }
    let launch = Launch { program, inputs, lies: &lies, scalars, out, streamed };
    let zero = match out.dtype {
        DType::F32 => launch.run::<f32>()?,
        DType::F64 => launch.run::<f64>()?,
        _ => launch.run::<i64>()?,
    };
    if zero { Err(Error::DivisionByZero { op }) } else { Ok(true) }
}

/// Where `t`, broadcast to the shape of `out`, has its elements, if it is in one piece and its dimensions are the last ones.
pub(super) fn place(t: &Tensor, out: &Tensor) -> Option<Lies> {
    let (dims, all) = (t.shape().dims(), out.shape().dims());
    if t.layout.lies_like(&out.layout, 1) && t.device() == Device::Cpu {
        return out.is_contiguous().then_some(Lies::Each); // almost always
    }
    let ones = dims.iter().take_while(|&&d| d == 1).count();
    if t.device() != Device::Cpu || dims.len() > all.len() || !all.ends_with(&dims[ones..]) || !t.is_contiguous() {
        return None;
    }
    match t.numel() {
        n if n == out.numel() => Some(Lies::Each),
        1 => Some(Lies::One),
        n => Some(Lies::Rows(n)),
    }
}

struct Launch<'a> {
    program: &'a Program,
    inputs: &'a [&'a Tensor],
    lies: &'a [Lies],
    scalars: &'a [Scalar],
    out: &'a Tensor,
    streamed: bool,
}

impl Launch<'_> {
    /// Gives whether an integer was divided by zero.
    fn run<C: Lane>(&self) -> Result<bool> {
        count_launch();
        let out = &self.out.storage;
        match *self.inputs {
            [x] => with_few([&x.storage], out, |reads, write| self.all::<C>(&reads, write)),
            [x, y] => with_few([&x.storage, &y.storage], out, |reads, write| self.all::<C>(&reads, write)),
            _ => {
                let reads: SmallVec<[&Storage; 3]> = self.inputs.iter().map(|t| &t.storage).collect();
                with_host(&reads, &[out], |reads, writes| self.all::<C>(reads, writes[0]))
            }
        }
    }

    fn all<C: Lane>(&self, reads: &[&[u8]], write: &mut [u8]) -> bool {
        let (count, first) = (self.out.numel(), self.out.layout.offset);
        let out: &mut [C] = &mut bytemuck::cast_slice_mut(write)[first..first + count];
        let step = cpu_map::step(count);
        if count <= step {
            return self.part(reads, 0, out);
        }
        let zero = AtomicBool::new(false);
        parallel::for_each_chunk(out, step, |i, part| {
            if self.part(reads, i * step, part) {
                zero.store(true, Ordering::Relaxed);
            }
        });
        zero.into_inner()
    }

    /// Elements from `first` on, as many as `out` has.
    fn part<C: Lane>(&self, reads: &[&[u8]], first: usize, out: &mut [C]) -> bool {
        let len = out.len();
        let mut inputs: SmallVec<[TileIn<C>; 3]> = SmallVec::new();
        for ((t, lies), bytes) in self.inputs.iter().zip(self.lies).zip(reads) {
            let elements: &[C] = &bytemuck::cast_slice(bytes)[t.layout.offset..];
            inputs.push(match *lies {
                Lies::Each => TileIn::Slice(&elements[first..first + len]),
                Lies::Rows(n) => TileIn::Rows(&elements[..n], first % n),
                Lies::One => TileIn::Scalar(elements[0]),
            });
        }
        let mut scratch = Scratch::new();
        scratch.streamed = self.streamed;
        let tile = Tile { inputs: &inputs, scalars: self.scalars, seeds: &[], first: first as u64, len };
        self.program.eval_tile(&tile, &mut scratch, &mut [out])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Expr;
    use crate::ops::elementwise::{Params, apply_into};

    /// The launch as it is planned otherwise, of operands that do not lie as the result does: from the end on.
    fn planned(expr: &Expr, inputs: &[&Tensor], out: &Tensor) -> Vec<f32> {
        let flipped: Vec<Tensor> = inputs.iter().map(|t| t.flip_view()).collect();
        let flipped: Vec<&Tensor> = flipped.iter().collect();
        let to = out.zeros_like().unwrap().flip_view();
        apply_into("test", &flipped, Params::default(), std::slice::from_ref(expr), &[&to]).unwrap();
        to.flip_view().contiguous().unwrap().to_vec().unwrap()
    }

    impl Tensor {
        fn flip_view(&self) -> Tensor {
            let mut layout = self.layout.clone();
            for d in 0..self.rank() {
                layout.offset =
                    layout.offset.wrapping_add_signed(layout.strides[d] * (self.shape().dims()[d] as isize - 1));
                layout.strides[d] = -layout.strides[d];
            }
            self.with_layout(layout)
        }
    }

    #[test]
    fn the_same_as_planned() {
        let number = |n: usize, seed: usize| -> Tensor {
            let values: Vec<f32> = (0..n + 1).map(|i| (i * 7919 + seed) as f32 % 201.0 - 100.0).collect();
            Tensor::from_slice(&values, n + 1, Device::Cpu).unwrap().narrow(0, 1, n).unwrap()
        };
        let (x, y) = (Expr::input(0), Expr::input(1));
        for (rows, columns) in [(1, 1), (1, 7), (7, 1), (3, 5), (40, 1000), (3000, 17)] {
            let (n, shape) = (rows * columns, [rows, columns]);
            let (full, other) = (number(n, 1).reshape(shape).unwrap(), number(n, 2).reshape(shape).unwrap());
            let (row, one) = (number(columns, 3), number(1, 4));
            let flat_row = row.reshape([1, columns]).unwrap();
            let column = number(rows, 5).reshape([rows, 1]).unwrap();
            let out = full.zeros_like().unwrap();
            let sum = &x - &y;
            for (inputs, flat) in [
                ([&full, &other], true),
                ([&full, &row], true),
                ([&flat_row, &full], true),
                ([&full, &one], true),
                ([&one, &other], true),
                ([&full, &column], columns == 1 || rows == 1),
                ([&row, &row], rows == 1 || columns == 1),
            ] {
                let got = run("test", &Program::of(std::slice::from_ref(&sum)), &inputs, &[], &[&out]).unwrap();
                assert_eq!(got, flat, "{:?} {:?}", inputs[0].shape(), inputs[1].shape());
                if flat {
                    assert_eq!(out.to_vec::<f32>().unwrap(), planned(&sum, &inputs, &out));
                }
            }
            for refused in [x.clone(), &x * 2.0 + &y] {
                assert!(!run("test", &Program::of(&[refused]), &[&full, &other], &[], &[&out]).unwrap());
            }
            assert!(
                !run("test", &Program::of(std::slice::from_ref(&sum)), &[&out, &other], &[], &[&out]).unwrap(),
                "in place"
            );
        }
    }
}
