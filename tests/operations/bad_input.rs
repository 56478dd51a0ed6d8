//! For any arguments, every operation returns tensors or an error and does not panic: each case is changed at random until it is
//! mostly invalid. Sizes are either small or larger than any memory, so that nothing large is allocated. `CALLS=1000` sets the number
//! of calls per case, `DEVICE=opencl:0` the device, `CASE=name` selects an operation, and `-- --nocapture` then prints each call
//! before it is made.

use std::panic::{AssertUnwindSafe, catch_unwind};

use claystone::ops::{self, Argument, Kind};
use claystone::{DType, Device, Result, Tensor};

use crate::harness::{Case, case};

/// Number of calls for each case and for each row of the expression table.
const CALLS: usize = 24;

const SHAPES: [&[usize]; 13] = [
    &[],
    &[0],
    &[1],
    &[5],
    &[2, 3],
    &[3, 1],
    &[0, 3],
    &[4, 4],
    &[2, 0, 3],
    &[2, 3, 4],
    &[1, 2, 5, 4],
    &[1, 2, 1, 2, 1, 1, 2, 1, 1],
    &[0, 1 << 48],
];

const INTS: [i64; 12] = [
    i64::MIN,
    i64::MIN + 1,
    i64::MAX,
    i64::MAX - 1,
    1 << 62,
    -(1 << 62),
    (1 << 61) + 1,
    i64::MAX / 3 + 1,
    i64::MAX / 2,
    1 << 48,
    -(1 << 48),
    (1 << 56) - 1,
];

const FLOATS: [f64; 12] =
    [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, -1e300, 1e19, -1e-300, 5e-324, -0.0, 0.5, -1.5, 3.0];

const TEXTS: [&str; 8] = ["", "mean", "none", "reflect", "ij,jk->ik", "i->ii", "...a,b...->", "é, ↯"];

/// The SplitMix64 random number generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n as u64) as usize
    }

    fn of<T: Copy>(&mut self, items: &[T]) -> T {
        items[self.below(items.len())]
    }

    fn int(&mut self) -> i64 {
        if self.below(3) == 0 { self.of(&INTS) } else { self.below(11) as i64 - 4 }
    }

    fn argument(&mut self) -> Argument {
        match self.below(12) {
            0 => Argument::None,
            1 => Argument::Float(self.of(&FLOATS)),
            2 => Argument::Bool(self.below(2) == 0),
            3 => Argument::Floats((0..self.below(5)).map(|_| self.of(&FLOATS)).collect()),
            4 => Argument::Text(self.of(&TEXTS).into()),
            5 => Argument::DType(self.of(&DType::ALL)),
            6 | 7 => Argument::Int(self.int()),
            _ => Argument::Ints((0..self.below(6)).map(|_| self.int()).collect()),
        }
    }

    /// Returns another argument; with probability 4/5 an argument of the same kind.
    fn changed(&mut self, argument: &Argument) -> Argument {
        match argument {
            _ if self.below(5) == 0 => self.argument(),
            Argument::Int(_) => Argument::Int(self.int()),
            Argument::Float(_) => Argument::Float(self.of(&FLOATS)),
            Argument::Bool(x) => Argument::Bool(!x),
            Argument::DType(_) => Argument::DType(self.of(&DType::ALL)),
            Argument::Text(_) => Argument::Text(self.of(&TEXTS).into()),
            Argument::Ints(x) => {
                let mut x = x.clone();
                match self.below(4) {
                    0 => x.push(self.int()),
                    1 => drop(x.pop()),
                    _ if x.is_empty() => x.push(self.int()),
                    _ => {
                        let at = self.below(x.len());
                        x[at] = self.int();
                    }
                }
                Argument::Ints(x)
            }
            Argument::Floats(x) => Argument::Floats(x.iter().map(|_| self.of(&FLOATS)).collect()),
            _ => self.argument(),
        }
    }

    fn tensor(&mut self, device: Device) -> Result<Tensor> {
        let (shape, dtype) = (self.of(&SHAPES), self.of(&DType::ALL));
        let n: usize = shape.iter().product();
        let t = match dtype.is_float() {
            true => {
                let values: Vec<f64> = (0..n).map(|_| self.of(&FLOATS)).collect();
                Tensor::from_vec(values, shape, Device::Cpu)?.to_dtype(dtype)?
            }
            false => {
                let values: Vec<i64> = (0..n).map(|_| self.int()).collect();
                Tensor::from_vec(values, shape, Device::Cpu)?.to_dtype(dtype)?
            }
        };
        let t = t.to_device(device)?;
        match self.below(5) {
            0 if t.rank() > 1 => t.transpose(0, -1),
            3 if n == 0 => t.as_strided([0, 2], &[1 << 40, -3], 0),
            3 if n > 2 => t.as_strided([2, 2], &[1, 1], n - 3),
            1 if t.rank() > 0 => t.flip(-1),
            2 if t.rank() > 0 && t.shape().dims()[0] == 1 => {
                let mut wider = t.shape().dims().to_vec();
                wider[0] = 3;
                t.expand(wider)
            }
            _ => Ok(t),
        }
    }
}

struct Call<'a> {
    case: &'a Case,
    tensors: Vec<Tensor>,
    arguments: Vec<Argument>,
}

impl Call<'_> {
    fn change(&mut self, random: &mut Random, device: Device) -> Result<()> {
        let (tensors, arguments) = (self.tensors.len(), self.arguments.len());
        match random.below(12) {
            0 if tensors > 0 => drop(self.tensors.pop()),
            1 if arguments > 0 => drop(self.arguments.pop()),
            2 => self.tensors.push(random.tensor(device)?),
            3 => self.arguments.push(random.argument()),
            4 if tensors > 1 => {
                self.tensors[random.below(tensors)] = self.tensors[random.below(tensors)].shallow_clone()
            }
            5 if tensors > 0 => {
                let at = random.below(tensors);
                self.tensors[at] = self.tensors[at].to_dtype(random.of(&DType::ALL))?;
            }
            6 if tensors > 0 => {
                let at = random.below(tensors);
                self.tensors[at] = self.tensors[at].unsqueeze(0)?;
            }
            7 | 8 if tensors > 0 => self.tensors[random.below(tensors)] = random.tensor(device)?,
            _ if arguments > 0 => {
                let at = random.below(arguments);
                self.arguments[at] = random.changed(&self.arguments[at]);
            }
            _ => self.arguments.push(random.argument()),
        }
        Ok(())
    }

    /// Makes the call and computes the gradients of its inputs.
    fn run(&self) -> Result<()> {
        let tracked = |t: &Tensor| match t.dtype().is_float() && self.case.op.kind != Kind::InPlace {
            true => t.detach().requires_grad_(true),
            false => Ok(t.shallow_clone()),
        };
        let tensors = self.tensors.iter().map(tracked).collect::<Result<Vec<_>>>()?;
        let outs = ops::call(self.case.op.name, &self.case.slots(&tensors), &self.arguments)?;
        for out in outs {
            // Results that were expanded to a huge size are not read, because reading would take too long.
            if out.numel() < 1 << 16 {
                out.to_dtype(DType::F64)?.to_vec::<f64>()?;
                if out.requires_grad() {
                    out.backward_with(&out.ones_like()?)?;
                }
            }
        }
        Ok(())
    }

    fn describe(&self) -> String {
        let shapes: Vec<String> = (self.tensors.iter())
            .map(|t| format!("{} {} {:?} + {}", t.dtype(), t.shape(), t.strides(), t.offset()))
            .collect();
        format!("{}({}; {:?})", self.case.op.name, shapes.join(", "), self.arguments)
    }
}

/// Returns a case for each row of the expression table and for its in-place form.
pub fn rows() -> impl Iterator<Item = Case> {
    let rows = ops::operations().iter().filter_map(|op| op.row().map(|row| (op, row)));
    rows.map(|(op, row)| {
        let case = (0..row.arity).fold(case(op.name), |case, _| case.input(&[2, 3]));
        row.samples.iter().fold(case, |case, &x| case.arg(x))
    })
}

/// Makes random calls on a device. Returns the calls that panicked, and the numbers of calls that failed and succeeded.
fn provoke(cases: Vec<Case>, device: Device, calls: usize) -> (Vec<String>, usize, usize) {
    let (mut panics, mut refused, mut answered) = (Vec::new(), 0, 0);
    let cases: Vec<Case> = cases.into_iter().chain(rows()).collect();
    let only = std::env::var("CASE").ok();
    for case in cases.iter().filter(|case| only.as_deref().is_none_or(|name| name == case.op.name)) {
        let mut random = Random(case.op.name.bytes().fold(7, |seed, b| (seed * 31 + u64::from(b)) & 0xffff_ffff));
        for _ in 0..calls {
            let (tensors, arguments) = case.parts(random.below(60), device).expect("a right call");
            let mut call = Call { case, tensors, arguments };
            for _ in 0..=random.below(3) {
                call.change(&mut random, device).unwrap_or_else(|e| panic!("{}: {e}", call.describe()));
            }
            if only.is_some() {
                println!("{}", call.describe());
            }
            match catch_unwind(AssertUnwindSafe(|| call.run())) {
                Ok(Ok(())) => answered += 1,
                Ok(Err(_)) => refused += 1,
                Err(_) => panics.push(call.describe()),
            }
        }
    }
    (panics, refused, answered)
}

#[test]
fn bad_input_never_panics() {
    let calls = std::env::var("CALLS").map_or(CALLS, |n| n.parse().expect("a number"));
    let device = std::env::var("DEVICE").map_or(Device::Cpu, |d| d.parse().expect("a device"));
    let (panics, refused, answered) = provoke(crate::all_cases(), device, calls);
    assert!(panics.is_empty(), "{} calls panic, {} do not:\n{}", panics.len(), refused + answered, panics.join("\n"));
    // The random changes must leave some calls valid and make others invalid.
    assert!(refused > 0 && answered > 0, "{refused} calls are refused, {answered} answered");
}
