//! Runs a random program step by step in the interpreter and on every device.

use claystone::{DType, Device, Result, Tensor};

use super::interpreter::{self, Value};
use super::steps::{Fold, Pair, Single, Step, numbers, pair, single};
use super::{BOUND, ELEMENTS};

use crate::common::f64s;

/// A running program: its values in the interpreter and on every device, and a log with a readable line for each step.
pub struct Run {
    devices: Vec<Device>,
    dtype: DType,
    pub values: Vec<Value>,
    /// The tensors of the program on each device.
    tensors: Vec<Vec<Tensor>>,
    pub log: Vec<String>,
}

impl Run {
    pub fn new(devices: &[Device], dtype: DType) -> Run {
        Run {
            devices: devices.to_vec(),
            dtype,
            values: Vec::new(),
            tensors: vec![Vec::new(); devices.len()],
            log: Vec::new(),
        }
    }

    /// Returns the index of the chosen value; choice 0 is the last value.
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

    /// Runs a step. Does nothing if no value exists that the step could use.
    pub fn step(&mut self, step: &Step) {
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
                // Other strides may allow a view too, but the interpreter only recognises elements in row-major order.
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

    /// Combines two values with an operation. Does nothing if the shapes do not broadcast.
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
        // Skips reductions over no dims, which libraries treat as over all or over none, and maxima of empty tensors, which do not
        // exist.
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
            return; // several elements share memory, so writes are refused, as other tests check
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

    /// Compares every tensor with the interpreter's value, on every device.
    pub fn check(&self) {
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

fn tensor_single(what: Single, x: &Tensor) -> Result<Tensor> {
    match what {
        Single::Neg => x.neg(),
        Single::Abs => x.abs(),
    }
}

fn name(what: impl std::fmt::Debug) -> String {
    format!("{what:?}").to_lowercase()
}
