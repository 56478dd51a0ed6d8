//! Tensor contractions over named dims: `einsum`, `tensordot`, `inner`.
//!
//! Operands are first reduced to one dim for each name: diagonals are taken, dims of size 1 that broadcast are dropped, and names
//! that occur in one operand only are summed. Then two operands at a time are contracted, those with the smallest result first.
//! Without a sum that is an elementwise product, otherwise one batched matrix product: shared names that are still needed are the
//! batch, shared names that are not are the inner dim, and the others are rows and columns. Dims that cannot be joined without a
//! copy become batch dims too, with stride 0 in the other operand.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use crate::error::Excerpt;
use crate::ops::dispatch::prelude::*;
use crate::{Result, Shape, Tensor};

/// A dim's name: a letter, or a number above all letters for the dims of an ellipsis.
type Name = u32;

/// The first of the names that an ellipsis stands for, those of the last dim coming last.
const ELLIPSIS: Name = 1 << 16;

/// A tensor with a name for each dim.
struct NamedTensor {
    t: Tensor,
    names: Vec<Name>,
}

impl NamedTensor {
    fn dim(&self, name: Name) -> Option<usize> {
        self.names.iter().position(|&n| n == name)
    }

    fn size(&self, name: Name) -> usize {
        self.dim(name).map_or(1, |d| self.t.shape().dims()[d])
    }

    /// The dims in the order of `names`, which are all there are; size 1 where this tensor has none of the name.
    fn arranged(&self, names: &[Name]) -> Result<Tensor> {
        let order: Vec<isize> = names.iter().filter_map(|&n| self.dim(n)).map(|d| d as isize).collect();
        let mut t = self.t.shallow_clone();
        if order.iter().enumerate().any(|(i, &d)| i as isize != d) {
            t = t.permute(&order)?;
        }
        for (i, _) in names.iter().enumerate().filter(|(_, n)| self.dim(**n).is_none()) {
            t = t.unsqueeze(i as isize)?;
        }
        Ok(t)
    }

    /// Names by how far apart their elements are, the farthest first: the order in which most dims can be joined.
    fn by_stride(&self, names: &[Name]) -> Vec<Name> {
        let mut names = names.to_vec();
        names.sort_by_key(|&n| std::cmp::Reverse(self.stride(n).unsigned_abs()));
        names
    }

    fn stride(&self, name: Name) -> isize {
        self.dim(name).map_or(0, |d| self.t.strides()[d])
    }

    /// How many of the last of these dims can be joined into one.
    fn joinable(&self, names: &[Name]) -> usize {
        let mut next: Option<isize> = None;
        let joins = names.iter().rev().take_while(|&&n| {
            let (size, stride) = (self.size(n), self.stride(n));
            let joins = size == 1 || next.is_none_or(|step| step == stride);
            if size != 1 {
                next = Some(stride * size as isize);
            }
            joins
        });
        joins.count()
    }
}

/// Whether the name is still needed: in the result or in another operand.
fn is_needed(name: Name, output: &[Name], others: &[NamedTensor]) -> bool {
    output.contains(&name) || others.iter().any(|o| o.names.contains(&name))
}

/// Names in the order of the result; what it does not have comes first.
fn in_order(mut names: Vec<Name>, output: &[Name]) -> Vec<Name> {
    names.sort_by_key(|n| output.iter().position(|o| o == n).map_or(0, |i| i + 1));
    names
}

/// The contraction of two operands over the names that both have and that are not needed later.
fn contract_pair(a: &NamedTensor, b: &NamedTensor, output: &[Name], others: &[NamedTensor]) -> Result<NamedTensor> {
    let common = |n: &Name| b.names.contains(n);
    let (shared, left): (Vec<Name>, Vec<Name>) = a.names.iter().partition(|n| common(n));
    let right: Vec<Name> = b.names.iter().copied().filter(|n| !a.names.contains(n)).collect();
    let (batch, summed): (Vec<Name>, Vec<Name>) = shared.into_iter().partition(|&n| is_needed(n, output, others));
    if summed.is_empty() {
        let names = in_order(batch.into_iter().chain(left).chain(right).collect(), output);
        return Ok(NamedTensor { t: a.arranged(&names)?.mul(&b.arranged(&names)?)?, names });
    }
    let mut batch = in_order(batch, output);
    let rows = outer_dims(a, left, output, &mut batch);
    let columns = outer_dims(b, right, output, &mut batch);
    let summed = inner_dims(a, b, summed);

    let names: Vec<Name> = batch.iter().chain(&rows).chain(&columns).copied().collect();
    let size = |n: &Name| if a.names.contains(n) { a.size(*n) } else { b.size(*n) };
    let sizes = |names: &[Name]| names.iter().map(size).product::<usize>();
    let matrices = |t: &NamedTensor, ends: [&[Name]; 2]| -> Result<Tensor> {
        let all: Vec<Name> = batch.iter().chain(ends[0]).chain(ends[1]).copied().collect();
        let shape = batch.iter().map(|&n| t.size(n)).chain(ends.map(sizes)).collect::<Shape>();
        let t = t.arranged(&all)?;
        if *t.shape() == shape { Ok(t) } else { t.reshape(shape) }
    };
    let product = matrices(a, [&rows, &summed])?.matmul(&matrices(b, [&summed, &columns])?)?;
    let shape: Shape = names.iter().map(size).collect();
    let t = if *product.shape() == shape { product } else { product.reshape(shape)? };
    Ok(NamedTensor { t, names })
}

/// The rows (or columns) of an operand: those of its own dims that one stride walks through, as the result has them if
/// possible. The others join the batch.
fn outer_dims(t: &NamedTensor, own: Vec<Name>, output: &[Name], batch: &mut Vec<Name>) -> Vec<Name> {
    let wanted = in_order(own, output);
    if t.joinable(&wanted) == wanted.len() {
        return wanted;
    }
    let mut sorted = t.by_stride(&wanted);
    let rows = sorted.split_off(sorted.len() - t.joinable(&sorted));
    batch.extend(sorted);
    rows
}

/// The inner dims in the order in which they can be joined in both operands; else in the larger, and the other is copied.
fn inner_dims(a: &NamedTensor, b: &NamedTensor, summed: Vec<Name>) -> Vec<Name> {
    let orders = [a.by_stride(&summed), b.by_stride(&summed)];
    let both = |order: &&Vec<Name>| [a, b].iter().all(|t| t.joinable(order) == order.len());
    let larger = usize::from(a.t.numel() < b.t.numel());
    orders.iter().find(both).unwrap_or(&orders[larger]).clone()
}

/// The sum of the products of operands whose dims have names, over all names that `output` does not have.
fn contract(op: &'static str, operands: Vec<NamedTensor>, output: &[Name]) -> Result<Tensor> {
    let tensors: Vec<&Tensor> = operands.iter().map(|o| &o.t).collect();
    same_dtype(op, &tensors)?;
    same_device(op, &tensors)?;
    let mut sizes: BTreeMap<Name, usize> = BTreeMap::new();
    for o in &operands {
        for (&name, &size) in o.names.iter().zip(o.t.shape().dims()) {
            let known = sizes.entry(name).or_insert(size);
            if *known == 1 {
                *known = size;
            } else if size != 1 && size != *known {
                let reason = format!("{} has sizes {known} and {size} in different places", display_name(name));
                return Err(Error::invalid(op, reason));
            }
        }
    }
    let mut left = operands.into_iter().map(|o| simplified(o, &sizes)).collect::<Result<Vec<NamedTensor>>>()?;
    for i in 0..left.len() {
        let mut lone = left[i].names.clone();
        lone.retain(|&n| !output.contains(&n) && left.iter().filter(|o| o.names.contains(&n)).count() == 1);
        left[i] = sum_names(&left[i], &lone)?;
    }
    while left.len() > 1 {
        let (i, j) = best_pair(&left, output);
        let (b, a) = (left.remove(j), left.remove(i));
        let made = contract_pair(&a, &b, output, &left)?;
        left.push(made);
    }
    left.remove(0).arranged(output)
}

/// One dim a name, none of size 1 that stands for a larger one.
fn simplified(mut o: NamedTensor, sizes: &BTreeMap<Name, usize>) -> Result<NamedTensor> {
    for d in (0..o.names.len()).rev() {
        if o.t.shape().dims()[d] == 1 && sizes[&o.names[d]] != 1 {
            o.t = o.t.squeeze(d as isize)?;
            o.names.remove(d);
        }
    }
    while let Some((i, j)) = repeated_name(&o.names) {
        // The diagonal comes last.
        o.t = o.t.diagonal(0, i as isize, j as isize)?;
        let name = o.names.remove(j);
        o.names.remove(i);
        o.names.push(name);
    }
    Ok(o)
}

fn repeated_name(names: &[Name]) -> Option<(usize, usize)> {
    (0..names.len()).find_map(|j| names[..j].iter().position(|n| *n == names[j]).map(|i| (i, j)))
}

fn sum_names(o: &NamedTensor, lone: &[Name]) -> Result<NamedTensor> {
    let dims: Vec<isize> = lone.iter().filter_map(|&n| o.dim(n)).map(|d| d as isize).collect();
    if dims.is_empty() {
        return Ok(NamedTensor { t: o.t.shallow_clone(), names: o.names.clone() });
    }
    let t = o.t.sum(&dims[..], false)?.to_dtype(o.t.dtype())?;
    Ok(NamedTensor { t, names: o.names.iter().copied().filter(|n| !lone.contains(n)).collect() })
}

/// Which two to contract next: those whose result is smallest beside what they are now.
fn best_pair(left: &[NamedTensor], output: &[Name]) -> (usize, usize) {
    let cost = |&(i, j): &(usize, usize)| {
        let (a, b) = (&left[i], &left[j]);
        let needed = |n: &Name| {
            output.contains(n) || left.iter().enumerate().any(|(k, o)| k != i && k != j && o.names.contains(n))
        };
        let alone = |n: &&Name| !a.names.contains(n);
        let kept = a
            .names
            .iter()
            .chain(b.names.iter().filter(alone))
            .filter(|n| needed(n) || !(a.names.contains(n) && b.names.contains(n)));
        let result: f64 = kept.map(|&n| a.size(n).max(b.size(n)) as f64).product();
        result - a.t.numel() as f64 - b.t.numel() as f64
    };
    let pairs = (0..left.len()).flat_map(|j| (0..j).map(move |i| (i, j)));
    pairs.min_by(|x, y| cost(x).total_cmp(&cost(y))).expect("two are left")
}

fn display_name(name: Name) -> String {
    char::from_u32(name).filter(|_| name < ELLIPSIS).map_or("a dim of '...'".into(), |c| format!("'{c}'"))
}

/// The names of an operand or of the result; None stands for an ellipsis.
fn names_of(text: &str) -> Result<Vec<Option<Name>>> {
    let op = "einsum";
    let mut names = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if let Some(after) = rest.strip_prefix("...") {
            invalid!(op if names.contains(&None), "'{}' has more than one '...'", Excerpt(text));
            names.push(None);
            rest = after;
            continue;
        }
        invalid!(op if !c.is_ascii_alphabetic(),
            "'{c}' in '{}' is no letter: dims are named by letters", Excerpt(text));
        names.push(Some(c as Name));
        rest = &rest[1..];
    }
    Ok(names)
}

/// An equation read for operands of these ranks: the names of each operand's dims, and of the result's.
fn parse(equation: &str, ranks: &[usize]) -> Result<(Vec<Vec<Name>>, Vec<Name>)> {
    let op = "einsum";
    let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (inputs, output) = match equation.split_once("->") {
        Some((inputs, output)) => (inputs, Some(names_of(output)?)),
        None => (&equation[..], None),
    };
    let inputs = inputs.split(',').map(names_of).collect::<Result<Vec<_>>>()?;
    let (about, given) = (inputs.len(), ranks.len());
    invalid!(op if about != given, "'{}' is about {about} operands, and {given} are given", Excerpt(&equation));
    let mut most = 0;
    for (names, &rank) in inputs.iter().zip(ranks) {
        let letters = names.iter().flatten().count();
        match names.contains(&None) {
            true if letters <= rank => most = most.max(rank - letters),
            false if letters == rank => {}
            _ => {
                let reason = format!("'{}' names {letters} dims of an operand that has {rank}", Excerpt(&equation));
                return Err(Error::invalid(op, reason));
            }
        }
    }
    // The last dims of all ellipses are the same.
    let ellipsis = |count: usize| (most - count..most).map(|i| ELLIPSIS + i as Name);
    let with_ellipsis = |names: &[Option<Name>], count: usize| -> Vec<Name> {
        names.iter().flat_map(|n| n.map_or_else(|| ellipsis(count).collect::<Vec<Name>>(), |n| vec![n])).collect()
    };
    let count = |names: &[Option<Name>], rank: usize| rank - names.iter().flatten().count();
    let named = inputs.iter().zip(ranks).map(|(names, &rank)| with_ellipsis(names, count(names, rank)));
    let named: Vec<Vec<Name>> = named.collect();
    let output = match output {
        Some(names) => {
            let names = with_ellipsis(&names, most);
            invalid!(op if let Some((_, j)) = repeated_name(&names),
                "the result of '{}' has {} twice", Excerpt(&equation), display_name(names[j]));
            invalid!(op if let Some(&n) = names.iter().find(|n| !named.iter().any(|o| o.contains(n))),
                "no operand of '{}' has {}", Excerpt(&equation), display_name(n));
            names
        }
        None => {
            let mut once: Vec<Name> = named.concat();
            once.sort_unstable();
            let all = once.clone();
            once.retain(|&n| n < ELLIPSIS && all.iter().filter(|&&m| m == n).count() == 1);
            ellipsis(most).chain(once).collect()
        }
    };
    Ok((named, output))
}

/// The dims that [`Tensor::tensordot`] sums over: the last n of the left tensor with the first n of the right one, or a list
/// for each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensordotDims {
    /// The last so many of the left tensor with the first of the right one.
    Count(usize),
    /// Dims of the left tensor, and those of the right one that they go with.
    Lists(Vec<isize>, Vec<isize>),
}

impl From<usize> for TensordotDims {
    fn from(n: usize) -> TensordotDims {
        TensordotDims::Count(n)
    }
}

impl From<(&[isize], &[isize])> for TensordotDims {
    fn from((a, b): (&[isize], &[isize])) -> TensordotDims {
        TensordotDims::Lists(a.to_vec(), b.to_vec())
    }
}

impl<const N: usize> From<([isize; N], [isize; N])> for TensordotDims {
    fn from((a, b): ([isize; N], [isize; N])) -> TensordotDims {
        TensordotDims::Lists(a.to_vec(), b.to_vec())
    }
}

operations! {
    einsum(equation: text, operands: xs): LinearAlgebra, Numbers -> Same, differentiable;
    tensordot(a: x, b: x, dims: ints = 2, dims_b: ints?): LinearAlgebra, Numbers -> Same, differentiable => |a| {
        let dims = match a.maybe(1, Args::ints)? {
            Some(of_b) => TensordotDims::Lists(a.ints(0)?, of_b),
            None => TensordotDims::Count(a.size(0)?),
        };
        a.x(0)?.tensordot(a.x(1)?, dims)
    };
    inner(input: x, other: x): LinearAlgebra, Numbers -> Same, differentiable;
}

impl Tensor {
    /// The sum of products that an equation in Einstein's notation describes (PyTorch's `einsum`): a letter a dim, operands
    /// parted by commas, the result's after `->`. Without that it has the letters that occur once, in alphabetical order. A
    /// letter twice in one operand is its diagonal, `...` stands for any number of dims, which broadcast; what the result
    /// does not have is summed. Differentiable.
    ///
    /// Two operands are one matrix product, or one elementwise product where nothing is summed; more are taken two at a time,
    /// those first that leave the least behind. Operands are walked by their strides and copied only where these cannot
    /// join the dims that are summed.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(Tensor::einsum("ij->ji", &[&a])?.shape().dims(), [3, 2]);
    /// assert_eq!(Tensor::einsum("ij,kj", &[&a, &a])?.to_vec::<f32>()?, [5.0, 14.0, 14.0, 50.0]);
    /// let weights = Tensor::ones(&[5, 7, 2], Device::Cpu)?;
    /// assert_eq!(Tensor::einsum("...i,ij->...j", &[&weights, &a])?.shape().dims(), [5, 7, 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for an equation that does not go with the operands, and for a letter with two sizes (1 stretches);
    /// [`Error::DTypeMismatch`], [`Error::DeviceMismatch`], [`Error::OutOfMemory`].
    #[track_caller]
    pub fn einsum<T: Borrow<Tensor>>(equation: &str, operands: &[T]) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "einsum";
        let tensors: Vec<&Tensor> = operands.iter().map(Borrow::borrow).collect();
        cast_first!(lowered(op, &tensors)?, |x| Tensor::einsum(equation, x));
        replaced!(op, tensors, equation);
        let ranks: Vec<usize> = tensors.iter().map(|t| t.rank()).collect();
        let (names, output) = parse(equation, &ranks)?;
        let named = tensors.iter().zip(names).map(|(t, names)| NamedTensor { t: t.shallow_clone(), names }).collect();
        contract(op, named, &output).named(op)
    }

    /// The sum of products over pairs of dims (PyTorch's `tensordot`): the last `n` of this tensor with the first `n` of the
    /// other, or two lists of dims. The result has the other dims of this tensor, then those of the other. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let (a, b) = (Tensor::ones(&[2, 3, 4], Device::Cpu)?, Tensor::ones(&[4, 3, 5], Device::Cpu)?);
    /// assert_eq!(a.tensordot(&b, ([1, 2], [1, 0]))?.to_vec::<f32>()?, [12.0; 10]);
    /// assert_eq!(a.tensordot(&b, 1)?.shape().dims(), [2, 3, 3, 5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] where the sizes of a pair differ and none is 1; [`Error::Invalid`] for lists of different
    /// lengths, dims given twice, and more dims than there are; otherwise as [`Tensor::matmul`].
    #[track_caller]
    pub fn tensordot(&self, other: &Tensor, dims: impl Into<TensordotDims>) -> Result<Tensor> {
        let dims = dims.into();
        let arguments = || match &dims {
            TensordotDims::Count(n) => vec![(*n).into()],
            TensordotDims::Lists(a, b) => vec![a[..].into(), b[..].into()],
        };
        replaced!(op = "tensordot", [self, other]; arguments);
        self.contract_dims(op, other, dims)
    }

    fn contract_dims(&self, op: &'static str, other: &Tensor, dims: TensordotDims) -> Result<Tensor> {
        let (a, b) = match dims {
            TensordotDims::Count(n) if n <= self.rank().min(other.rank()) => {
                ((self.rank() - n..self.rank()).collect::<Vec<_>>(), (0..n).collect())
            }
            TensordotDims::Count(n) => {
                let reason = format!("{n} dims are more than shapes {} and {} have", self.shape(), other.shape());
                return Err(Error::invalid(op, reason));
            }
            TensordotDims::Lists(a, b) => {
                let checked = |t: &Tensor, dims: &[isize]| -> Result<Vec<usize>> {
                    dims.iter().map(|&d| t.shape().dim(op, d)).collect()
                };
                (checked(self, &a)?, checked(other, &b)?)
            }
        };
        let twice = |dims: &[usize]| (1..dims.len()).any(|i| dims[..i].contains(&dims[i]));
        invalid!(op if a.len() != b.len() || twice(&a) || twice(&b),
            "dims {a:?} and {b:?} are not as many of each tensor, each once");
        let size = |t: &Tensor, d: usize| t.shape().dims()[d];
        let fits = |(&i, &j): (&usize, &usize)| {
            let (m, n) = (size(self, i), size(other, j));
            m == n || m == 1 || n == 1
        };
        mismatch!(op if !a.iter().zip(&b).all(fits), self, other, "the dims summed over have equal sizes, or 1");
        let left: Vec<Name> = (0..self.rank() as Name).collect();
        let new = |d: usize| (self.rank() + d) as Name;
        let right: Vec<Name> =
            (0..other.rank()).map(|d| b.iter().position(|&j| j == d).map_or(new(d), |i| a[i] as Name)).collect();
        let output: Vec<Name> = (left.iter().filter(|n| !a.contains(&(**n as usize))))
            .chain(right.iter().filter(|n| **n >= self.rank() as Name))
            .copied()
            .collect();
        let named = vec![
            NamedTensor { t: self.shallow_clone(), names: left },
            NamedTensor { t: other.shallow_clone(), names: right },
        ];
        contract(op, named, &output).named(op)
    }

    /// The scalar products of this tensor's rows with the other's, rows along the last dim (PyTorch's `inner`); with a scalar
    /// on either side the elementwise product. Differentiable.
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] where the last dims differ; otherwise as [`Tensor::matmul`].
    #[track_caller]
    pub fn inner(&self, other: &Tensor) -> Result<Tensor> {
        replaced!(op = "inner", [self, other]);
        if self.rank() == 0 || other.rank() == 0 {
            return self.mul(other).named(op);
        }
        mismatch!(op if self.shape().dims().last() != other.shape().dims().last(),
            self, other, "the last dims have one size");
        self.contract_dims(op, other, TensordotDims::Lists(vec![-1], vec![-1]))
    }
}
