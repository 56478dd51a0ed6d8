//! Random programs: on the CPU, on every OpenCL device, and in an interpreter that knows nothing but positions in lists of
//! f64. 10,000 of them, or `PROPTEST_CASES`.
//!
//! Values are whole numbers of at most a thousand, clamped after every step, so that all three agree exactly. Kernels are
//! few, however many the programs: one operation a launch, shapes of up to three dims.

#[path = "../common/mod.rs"]
mod common;
mod interpreter;

use claystone::{DType, Device, Result, Tensor};
use common::{devices, f64s};
use interpreter::Value;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

/// Programs in all.
const CASES: u32 = 10_000;
/// Values stay within this.
const BOUND: f64 = 1000.0;
/// Elements of a value, at most.
const ELEMENTS: usize = 200;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Pair {
    Add,
    Sub,
    Mul,
    Maximum,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Single {
    Neg,
    Abs,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Fold {
    Sum,
    Max,
    Min,
}

/// A line of a program. Numbers are taken modulo what there is to choose from, so that every program means something.
#[derive(Debug, Clone)]
enum Step {
    /// Some numbers, different from seed to seed.
    New {
        shape: Vec<usize>,
        seed: u8,
    },
    Full {
        shape: Vec<usize>,
        value: i8,
    },
    Transpose {
        of: u8,
        a: u8,
        b: u8,
    },
    Narrow {
        of: u8,
        dim: u8,
        start: u8,
        len: u8,
    },
    Slice {
        of: u8,
        dim: u8,
        start: i8,
        end: i8,
        step: i8,
    },
    Select {
        of: u8,
        dim: u8,
        index: u8,
    },
    Unsqueeze {
        of: u8,
        dim: u8,
    },
    Squeeze {
        of: u8,
        dim: u8,
    },
    /// To more elements along dims of size 1, and by one dim in front.
    Expand {
        of: u8,
        size: u8,
        front: bool,
    },
    /// All dims as one: a view where elements lie in order, else a copy.
    Flatten {
        of: u8,
    },
    Clone {
        of: u8,
    },
    Pair {
        what: Pair,
        of: u8,
        with: u8,
    },
    Single {
        what: Single,
        of: u8,
    },
    /// The dims in the bits of `dims`.
    Fold {
        what: Fold,
        of: u8,
        dims: u8,
        keepdim: bool,
    },
    Fill {
        into: u8,
        value: i8,
    },
    Copy {
        into: u8,
        from: u8,
    },
    PairInPlace {
        what: Pair,
        into: u8,
        with: u8,
    },
    SingleInPlace {
        what: Single,
        into: u8,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let shape = || prop::collection::vec(prop_oneof![1 => Just(0usize), 4 => Just(1), 8 => 2usize..6], 0..4);
    let pair = || prop_oneof![Just(Pair::Add), Just(Pair::Sub), Just(Pair::Mul), Just(Pair::Maximum)];
    let single = || prop_oneof![Just(Single::Neg), Just(Single::Abs)];
    let fold = prop_oneof![Just(Fold::Sum), Just(Fold::Max), Just(Fold::Min)];
    // Later values more often than the first ones: 0 is the last.
    let t = || prop_oneof![2 => 0u8..3, 1 => any::<u8>()];
    let n = any::<u8>;
    prop_oneof![
        3 => (shape(), n()).prop_map(|(shape, seed)| Step::New { shape, seed }),
        1 => (shape(), -9i8..10).prop_map(|(shape, value)| Step::Full { shape, value }),
        3 => (t(), n(), n()).prop_map(|(of, a, b)| Step::Transpose { of, a, b }),
        2 => (t(), n(), n(), n()).prop_map(|(of, dim, start, len)| Step::Narrow { of, dim, start, len }),
        3 => (t(), n(), -7i8..7, -7i8..7, prop_oneof![Just(-2i8), Just(-1), Just(1), Just(2), Just(3)])
            .prop_map(|(of, dim, start, end, step)| Step::Slice { of, dim, start, end, step }),
        2 => (t(), n(), n()).prop_map(|(of, dim, index)| Step::Select { of, dim, index }),
        1 => (t(), n()).prop_map(|(of, dim)| Step::Unsqueeze { of, dim }),
        1 => (t(), n()).prop_map(|(of, dim)| Step::Squeeze { of, dim }),
        2 => (t(), 1u8..4, any::<bool>()).prop_map(|(of, size, front)| Step::Expand { of, size, front }),
        1 => t().prop_map(|of| Step::Flatten { of }),
        1 => t().prop_map(|of| Step::Clone { of }),
        5 => (pair(), t(), t()).prop_map(|(what, of, with)| Step::Pair { what, of, with }),
        1 => (single(), t()).prop_map(|(what, of)| Step::Single { what, of }),
        3 => (fold, t(), n(), any::<bool>())
            .prop_map(|(what, of, dims, keepdim)| Step::Fold { what, of, dims, keepdim }),
        1 => (t(), -9i8..10).prop_map(|(into, value)| Step::Fill { into, value }),
        2 => (t(), t()).prop_map(|(into, from)| Step::Copy { into, from }),
        4 => (pair(), t(), t()).prop_map(|(what, into, with)| Step::PairInPlace { what, into, with }),
        1 => (single(), t()).prop_map(|(what, into)| Step::SingleInPlace { what, into }),
    ]
}

/// The numbers of [`Step::New`].
fn numbers(n: usize, seed: u8) -> Vec<f64> {
    (0..n).map(|i| ((i * 7 + usize::from(seed) * 13) % 19) as f64 - 9.0).collect()
}

/// A program under way: each value in the interpreter and on every device, and a readable line for each step taken.
struct Run {
    devices: Vec<Device>,
    dtype: DType,
    values: Vec<Value>,
    /// By device.
    tensors: Vec<Vec<Tensor>>,
    log: Vec<String>,
}

impl Run {
    fn new(devices: &[Device], dtype: DType) -> Run {
        Run {
            devices: devices.to_vec(),
            dtype,
            values: Vec::new(),
            tensors: vec![Vec::new(); devices.len()],
            log: Vec::new(),
        }
    }

    /// Counted from the last value.
    fn at(&self, choice: u8) -> usize {
        self.values.len() - 1 - usize::from(choice) % self.values.len()
    }

    fn push(&mut self, line: String, value: Value, f: impl Fn(&[Tensor], Device) -> Result<Tensor>) {
        self.log.push(format!("t{} = {line}", self.values.len()));
        self.values.push(value);
        for (tensors, &device) in self.tensors.iter_mut().zip(&self.devices) {
            let made = f(tensors, device).unwrap_or_else(|e| panic!("{e} on {device}\n{}", self.log.join("\n")));
            tensors.push(made);
        }
    }

    fn change(&mut self, line: String, f: impl Fn(&[Tensor]) -> Result<()>) {
        self.log.push(line);
        for (tensors, device) in self.tensors.iter().zip(&self.devices) {
            f(tensors).unwrap_or_else(|e| panic!("{e} on {device}\n{}", self.log.join("\n")));
        }
    }

    /// Takes a step, unless there is nothing it could be done to.
    fn step(&mut self, step: &Step) {
        if let Step::New { shape, .. } | Step::Full { shape, .. } = step {
            return self.create(step, shape);
        }
        if self.values.is_empty() {
            return;
        }
        match *step {
            Step::Transpose { of, .. }
            | Step::Narrow { of, .. }
            | Step::Slice { of, .. }
            | Step::Select { of, .. }
            | Step::Unsqueeze { of, .. }
            | Step::Squeeze { of, .. }
            | Step::Expand { of, .. }
            | Step::Flatten { of }
            | Step::Clone { of } => self.view(step, self.at(of)),
            Step::Pair { what, of, with } => self.pair(what, self.at(of), self.at(with)),
            Step::Single { what, of } => {
                let i = self.at(of);
                let value = self.values[i].map(|x| single(what, x));
                self.push(format!("t{i}.{}()", name(what)), value, |t, _| tensor_single(what, &t[i]));
            }
            Step::Fold { what, of, dims, keepdim } => self.fold(what, self.at(of), dims, keepdim),
            _ => self.in_place(step),
        }
    }

    fn create(&mut self, step: &Step, shape: &[usize]) {
        let (n, dtype) = (shape.iter().product::<usize>(), self.dtype);
        match *step {
            Step::New { seed, .. } => {
                let list = numbers(n, seed);
                self.push(format!("numbers({shape:?}, {seed})"), Value::new(shape, list.clone()), |_, d| {
                    Tensor::from_slice(&list, shape, Device::Cpu)?.to_dtype(dtype)?.to_device(d)
                });
            }
            Step::Full { value, .. } => {
                let list = vec![f64::from(value); n];
                self.push(format!("full({shape:?}, {value})"), Value::new(shape, list), |_, d| {
                    Tensor::full(shape, f64::from(value), (dtype, d))
                });
            }
            _ => unreachable!("the caller looked"),
        }
    }

    fn view(&mut self, step: &Step, i: usize) {
        let value = self.values[i].clone();
        let rank = value.shape.len();
        let dim = |d: u8| usize::from(d) % rank.max(1);
        if rank == 0
            && !matches!(step, Step::Unsqueeze { .. } | Step::Expand { .. } | Step::Flatten { .. } | Step::Clone { .. })
        {
            return;
        }
        match *step {
            Step::Transpose { a, b, .. } => {
                let (a, b) = (dim(a), dim(b));
                self.push(format!("t{i}.transpose({a}, {b})"), value.transpose(a, b), |t, _| {
                    t[i].transpose(a as isize, b as isize)
                });
            }
            Step::Narrow { dim: d, start, len, .. } => {
                let d = dim(d);
                let start = usize::from(start) % (value.shape[d] + 1);
                let len = usize::from(len) % (value.shape[d] - start + 1);
                let picked: Vec<usize> = (start..start + len).collect();
                self.push(format!("t{i}.narrow({d}, {start}, {len})"), value.pick(d, &picked), |t, _| {
                    t[i].narrow(d as isize, start, len)
                });
            }
            Step::Slice { dim: d, start, end, step, .. } => {
                let d = dim(d);
                let (start, end, step) = (isize::from(start), isize::from(end), isize::from(step));
                let picked = interpreter::sliced(value.shape[d], start, end, step);
                self.push(format!("t{i}.slice({d}, {start}, {end}, {step})"), value.pick(d, &picked), |t, _| {
                    t[i].slice(d as isize, start, end, step)
                });
            }
            Step::Select { dim: d, index, .. } if value.shape[dim(d)] > 0 => {
                let d = dim(d);
                let index = usize::from(index) % value.shape[d];
                self.push(format!("t{i}.select({d}, {index})"), value.pick(d, &[index]).squeeze(d), |t, _| {
                    t[i].select(d as isize, index as isize)
                });
            }
            Step::Unsqueeze { dim: d, .. } if rank < 3 => {
                let d = usize::from(d) % (rank + 1);
                self.push(format!("t{i}.unsqueeze({d})"), value.unsqueeze(d), |t, _| t[i].unsqueeze(d as isize));
            }
            Step::Squeeze { dim: d, .. } => {
                let d = dim(d);
                let squeezed = if value.shape[d] == 1 { value.squeeze(d) } else { value };
                self.push(format!("t{i}.squeeze({d})"), squeezed, |t, _| t[i].squeeze(d as isize));
            }
            Step::Expand { size, front, .. } => {
                let size = usize::from(size);
                let mut shape: Vec<usize> = value.shape.iter().map(|&d| if d == 1 { size } else { d }).collect();
                if front && rank < 3 {
                    shape.insert(0, size);
                }
                if shape.iter().product::<usize>() <= ELEMENTS {
                    let wide = value.expand(&shape);
                    self.push(format!("t{i}.expand({shape:?})"), wide, |t, _| t[i].broadcast_to(&shape[..]));
                }
            }
            Step::Flatten { .. } => {
                // Other strides might do as well; whether they do is not for the interpreter to know.
                let view = value.in_order();
                let mut flat = if view { value } else { value.copied() };
                flat.shape = vec![flat.at.len()];
                let line = format!("t{i}.flatten(0, -1){}", if view { "" } else { ".clone()" });
                self.push(line, flat, |t, _| if view { t[i].flatten(0, -1) } else { t[i].flatten(0, -1)?.try_clone() });
            }
            Step::Clone { .. } => self.push(format!("t{i}.clone()"), value.copied(), |t, _| t[i].try_clone()),
            _ => {}
        }
    }

    /// With the sum of the other where the shapes do not go together.
    fn pair(&mut self, what: Pair, i: usize, j: usize) {
        let (a, b) = (self.values[i].clone(), self.values[j].clone());
        let shape = interpreter::broadcast(&a.shape, &b.shape);
        let Some(shape) = shape.filter(|s| s.len() <= 3 && s.iter().product::<usize>() <= ELEMENTS) else { return };
        let value = Value::zip(&a.expand(&shape), &b.expand(&shape), |x, y| pair(what, x, y));
        self.push(format!("clamp(t{i}.{}(t{j}))", name(what)), value, |t, _| {
            let (a, b) = (&t[i], &t[j]);
            let made = match what {
                Pair::Add => a.add(b),
                Pair::Sub => a.sub(b),
                Pair::Mul => a.mul(b),
                Pair::Maximum => a.maximum(b),
            };
            made?.clamp(-BOUND as i64, BOUND as i64)
        });
    }

    fn fold(&mut self, what: Fold, i: usize, dims: u8, keepdim: bool) {
        let value = &self.values[i];
        let dims: Vec<usize> = (0..value.shape.len()).filter(|d| dims >> d & 1 == 1).collect();
        let empty = value.at.is_empty();
        // Without dims everything is reduced in some libraries and nothing in others; of nothing there is no greatest.
        if dims.is_empty() || (empty && what != Fold::Sum) {
            return;
        }
        let value = value.fold(&dims, keepdim, |list| match what {
            Fold::Sum => list.iter().sum(),
            Fold::Max => list.iter().copied().fold(f64::NEG_INFINITY, f64::max),
            Fold::Min => list.iter().copied().fold(f64::INFINITY, f64::min),
        });
        let value = value.map(|x| x.clamp(-BOUND, BOUND));
        let dtype = self.dtype;
        let list: Vec<isize> = dims.iter().map(|&d| d as isize).collect();
        self.push(format!("clamp(t{i}.{}({dims:?}, {keepdim}))", name(what)), value, |t, _| {
            let made = match what {
                Fold::Sum => t[i].sum(&list[..], keepdim),
                Fold::Max => t[i].max(&list[..], keepdim),
                Fold::Min => t[i].min(&list[..], keepdim),
            };
            made?.to_dtype(dtype)?.clamp(-BOUND as i64, BOUND as i64)
        });
    }

    fn in_place(&mut self, step: &Step) {
        let into = match *step {
            Step::Fill { into, .. }
            | Step::Copy { into, .. }
            | Step::PairInPlace { into, .. }
            | Step::SingleInPlace { into, .. } => self.at(into),
            _ => unreachable!("the caller looked"),
        };
        let target = self.values[into].clone();
        if target.repeats() {
            return; // several elements are one: refused, which other tests see
        }
        let fits = |other: &Value| interpreter::broadcast(&target.shape, &other.shape).as_ref() == Some(&target.shape);
        match *step {
            Step::Fill { value, .. } => {
                target.write(|_| f64::from(value));
                self.change(format!("t{into}.fill_({value})"), |t| t[into].fill_(f64::from(value)).map(drop));
            }
            Step::SingleInPlace { what, .. } => {
                let new: Vec<f64> = target.read().iter().map(|&x| single(what, x)).collect();
                target.write(|k| new[k]);
                self.change(format!("t{into}.{}_()", name(what)), |t| match what {
                    Single::Neg => t[into].neg_().map(drop),
                    Single::Abs => t[into].abs_().map(drop),
                });
            }
            Step::Copy { from, .. } => {
                let from = self.at(from);
                let source = self.values[from].clone();
                if fits(&source) {
                    let new = source.expand(&target.shape).read();
                    target.write(|k| new[k]);
                    self.change(format!("t{into}.copy_(t{from})"), |t| t[into].copy_(&t[from]).map(drop));
                }
            }
            Step::PairInPlace { what, with, .. } => {
                let with = self.at(with);
                let other = self.values[with].clone();
                if fits(&other) {
                    let (old, other) = (target.read(), other.expand(&target.shape).read());
                    target.write(|k| pair(what, old[k], other[k]));
                    self.change(format!("clamp_(t{into}.{}_(t{with}))", name(what)), |t| {
                        let (a, b) = (&t[into], &t[with]);
                        match what {
                            Pair::Add => a.add_(b),
                            Pair::Sub => a.sub_(b),
                            Pair::Mul => a.mul_(b),
                            Pair::Maximum => a.maximum_(b),
                        }?;
                        a.clamp_(-BOUND as i64, BOUND as i64).map(drop)
                    });
                }
            }
            _ => unreachable!("the caller looked"),
        }
    }

    /// Compares every value with what the interpreter has.
    fn check(&self) {
        for (tensors, device) in self.tensors.iter().zip(&self.devices) {
            for (i, (t, value)) in tensors.iter().zip(&self.values).enumerate() {
                let program = || format!("t{i} on {device}, {}\n{}", self.dtype, self.log.join("\n"));
                assert_eq!(t.shape().dims(), &value.shape[..], "{}", program());
                let got: Vec<f64> = f64s(t).into_iter().collect();
                assert_eq!(got, value.read(), "{}", program());
            }
        }
    }
}

fn pair(what: Pair, x: f64, y: f64) -> f64 {
    let made = match what {
        Pair::Add => x + y,
        Pair::Sub => x - y,
        Pair::Mul => x * y,
        Pair::Maximum => x.max(y),
    };
    made.clamp(-BOUND, BOUND) + 0.0 // no negative zeros
}

fn single(what: Single, x: f64) -> f64 {
    match what {
        Single::Neg => 0.0 - x,
        Single::Abs => x.abs(),
    }
}

fn tensor_single(what: Single, x: &Tensor) -> Result<Tensor> {
    match what {
        Single::Neg => x.neg(),
        Single::Abs => x.abs(),
    }
}

fn name(what: impl std::fmt::Debug) -> String {
    format!("{what:?}").to_lowercase()
}

/// f32 half of the time, i32 the other half.
#[test]
fn random_programs_agree_with_an_interpreter_on_every_device() {
    let devices = devices();
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(CASES);
    let program = (prop_oneof![Just(DType::F32), Just(DType::I32)], prop::collection::vec(step(), 2..14));
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&program, |(dtype, steps)| {
        let mut run = Run::new(&devices, dtype);
        steps.iter().for_each(|step| run.step(step));
        run.check();
        Ok(())
    });
    if let Err(e) = outcome {
        panic!("{e}");
    }
}

/// The interpreter is right where it can be looked at.
#[test]
fn the_interpreter_shares_and_copies_as_it_should() {
    let mut run = Run::new(&devices(), DType::F32);
    for step in [
        Step::New { shape: vec![2, 3], seed: 0 },
        Step::Transpose { of: 0, a: 0, b: 1 },
        Step::Slice { of: 0, dim: 0, start: -1, end: -7, step: -2 },
        Step::Fill { into: 0, value: 4 },
        Step::Clone { of: 2 },
        Step::Fold { what: Fold::Sum, of: 0, dims: 2, keepdim: false },
    ] {
        run.step(&step);
    }
    run.check();
    assert_eq!(run.values[0].read(), [4.0, -2.0, 4.0, 4.0, 0.0, 4.0]);
    assert_eq!(run.values[4].read(), [6.0, 8.0]);
    assert_eq!(run.log[2], "t2 = t1.slice(0, -1, -7, -2)");
}
