//! Tensor contractions over named dims: `einsum`, `tensordot`, `inner`.
//!
//! Operands are first reduced to one dim for each name: diagonals are taken, dims of size 1 that broadcast are dropped, and names
//! that occur in only one operand are summed. Then operands are contracted in pairs, the pair with the smallest result first.
//!
//! A pair without a sum is an elementwise product, and any other pair is one batched matrix product. Names in both operands that are
//! needed later become the batch; names in both operands that are not needed later become the inner dim. All other names become rows and
//! columns. Dims that cannot be merged without a copy become batch dims too, with stride 0 in the other operand.

use std::borrow::Borrow;
use std::collections::BTreeMap;

use crate::error::Excerpt;
use crate::layout::shape::impl_from;
use crate::ops::dispatch::prelude::*;

/// The name of a dim: the code of a letter or, for a dim of an ellipsis, a number above the codes of all letters.
type DimName = u32;

/// The smallest name of a dim of an ellipsis. The last dim of an ellipsis has the largest name.
const ELLIPSIS: DimName = 1 << 16;

/// A tensor with a name for each dim.
struct NamedTensor {
    t: Tensor,
    names: Vec<DimName>,
}

impl NamedTensor {
    fn dim(&self, name: DimName) -> Option<usize> {
        self.names.iter().position(|&n| n == name)
    }

    fn size(&self, name: DimName) -> usize {
        self.dim(name).map_or(1, |d| self.t.shape().dims()[d])
    }

    /// Permutes the dims into the order of `names`, which includes all names of this tensor, and inserts dims of size 1 for names that
    /// this tensor lacks.
    fn permuted_to(&self, names: &[DimName]) -> Result<Tensor> {
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

    /// Sorts names by descending stride. In this order most dims can be merged.
    fn sorted_by_stride(&self, names: &[DimName]) -> Vec<DimName> {
        let mut names = names.to_vec();
        names.sort_by_key(|&n| std::cmp::Reverse(self.stride(n).unsigned_abs()));
        names
    }

    fn stride(&self, name: DimName) -> isize {
        self.dim(name).map_or(0, |d| self.t.strides()[d])
    }

    /// Returns the number of dims at the end of `names` that can be merged into one dim without a copy.
    fn mergeable_count(&self, names: &[DimName]) -> usize {
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

/// Sorts names into the order of the result. Names that the result lacks come first.
fn sort_as_output(mut names: Vec<DimName>, output: &[DimName]) -> Vec<DimName> {
    names.sort_by_key(|n| output.iter().position(|o| o == n).map_or(0, |i| i + 1));
    names
}

/// Contracts two operands over the names that both operands have and that are not needed later.
fn contract_pair(a: &NamedTensor, b: &NamedTensor, output: &[DimName], others: &[NamedTensor]) -> Result<NamedTensor> {
    let common = |n: &DimName| b.names.contains(n);
    let (shared, left): (Vec<DimName>, Vec<DimName>) = a.names.iter().partition(|n| common(n));
    let right: Vec<DimName> = b.names.iter().copied().filter(|n| !a.names.contains(n)).collect();
    // Names in the result or in another operand are kept.
    let is_needed = |n: &DimName| output.contains(n) || others.iter().any(|o| o.names.contains(n));
    let (batch, summed): (Vec<DimName>, Vec<DimName>) = shared.into_iter().partition(is_needed);
    if summed.is_empty() {
        let names = sort_as_output(batch.into_iter().chain(left).chain(right).collect(), output);
        return Ok(NamedTensor { t: a.permuted_to(&names)?.mul(&b.permuted_to(&names)?)?, names });
    }
    let mut batch = sort_as_output(batch, output);
    let rows = outer_dims(a, left, output, &mut batch);
    let columns = outer_dims(b, right, output, &mut batch);
    let summed = inner_dims(a, b, summed);

    let names: Vec<DimName> = batch.iter().chain(&rows).chain(&columns).copied().collect();
    let size = |n: &DimName| if a.names.contains(n) { a.size(*n) } else { b.size(*n) };
    let sizes = |names: &[DimName]| names.iter().map(size).product::<usize>();
    let matrices = |t: &NamedTensor, ends: [&[DimName]; 2]| -> Result<Tensor> {
        let all: Vec<DimName> = batch.iter().chain(ends[0]).chain(ends[1]).copied().collect();
        let shape = batch.iter().map(|&n| t.size(n)).chain(ends.map(sizes)).collect::<Shape>();
        let t = t.permuted_to(&all)?;
        if *t.shape() == shape { Ok(t) } else { t.reshape(shape) }
    };
    let product = matrices(a, [&rows, &summed])?.matmul(&matrices(b, [&summed, &columns])?)?;
    let shape: Shape = names.iter().map(size).collect();
    let t = if *product.shape() == shape { product } else { product.reshape(shape)? };
    Ok(NamedTensor { t, names })
}

/// Returns the names of `own` that merge into one dim without a copy, which becomes the rows or columns of the operand. The names are in
/// the order of the result if possible. Adds the remaining names to `batch`.
fn outer_dims(t: &NamedTensor, own: Vec<DimName>, output: &[DimName], batch: &mut Vec<DimName>) -> Vec<DimName> {
    let wanted = sort_as_output(own, output);
    if t.mergeable_count(&wanted) == wanted.len() {
        return wanted;
    }
    let mut sorted = t.sorted_by_stride(&wanted);
    let rows = sorted.split_off(sorted.len() - t.mergeable_count(&sorted));
    batch.extend(sorted);
    rows
}

/// Returns the summed names in an order that can be merged into one dim without a copy in both operands or, if there is none, in the
/// larger operand.
fn inner_dims(a: &NamedTensor, b: &NamedTensor, summed: Vec<DimName>) -> Vec<DimName> {
    let orders = [a.sorted_by_stride(&summed), b.sorted_by_stride(&summed)];
    let both = |order: &&Vec<DimName>| [a, b].iter().all(|t| t.mergeable_count(order) == order.len());
    let larger = usize::from(a.t.numel() < b.t.numel());
    orders.iter().find(both).unwrap_or(&orders[larger]).clone()
}

/// Sums the products of operands with named dims over all names that are not in `output`.
fn contract(op: &'static str, operands: Vec<NamedTensor>, output: &[DimName]) -> Result<Tensor> {
    let tensors: Vec<&Tensor> = operands.iter().map(|o| &o.t).collect();
    same_dtype(op, &tensors)?;
    same_device(op, &tensors)?;
    let mut sizes: BTreeMap<DimName, usize> = BTreeMap::new();
    for o in &operands {
        for (&name, &size) in o.names.iter().zip(o.t.shape().dims()) {
            let known = sizes.entry(name).or_insert(size);
            if *known == 1 {
                *known = size;
            } else if size != 1 && size != *known {
                fail!(op, "{} has two different sizes, {known} and {size}", display_name(name));
            }
        }
    }
    let mut left = operands.into_iter().map(|o| simplify_operand(o, &sizes)).collect::<Result<Vec<NamedTensor>>>()?;
    for i in 0..left.len() {
        let mut unshared = left[i].names.clone();
        unshared.retain(|&n| !output.contains(&n) && left.iter().filter(|o| o.names.contains(&n)).count() == 1);
        left[i] = sum_names(&left[i], &unshared)?;
    }
    while left.len() > 1 {
        let (i, j) = best_pair(&left, output);
        let (b, a) = (left.remove(j), left.remove(i));
        let made = contract_pair(&a, &b, output, &left)?;
        left.push(made);
    }
    left.remove(0).permuted_to(output)
}

/// Reduces an operand to one dim for each name, and removes dims of size 1 that are broadcast.
fn simplify_operand(mut o: NamedTensor, sizes: &BTreeMap<DimName, usize>) -> Result<NamedTensor> {
    for d in (0..o.names.len()).rev() {
        if o.t.shape().dims()[d] == 1 && sizes[&o.names[d]] != 1 {
            o.t = o.t.squeeze(d as isize)?;
            o.names.remove(d);
        }
    }
    while let Some((i, j)) = repeated_name(&o.names) {
        // `diagonal` appends the diagonal as the last dim.
        o.t = o.t.diagonal(0, i as isize, j as isize)?;
        let name = o.names.remove(j);
        o.names.remove(i);
        o.names.push(name);
    }
    Ok(o)
}

fn repeated_name(names: &[DimName]) -> Option<(usize, usize)> {
    (0..names.len()).find_map(|j| names[..j].iter().position(|n| *n == names[j]).map(|i| (i, j)))
}

fn sum_names(o: &NamedTensor, unshared: &[DimName]) -> Result<NamedTensor> {
    let dims: Vec<isize> = unshared.iter().filter_map(|&n| o.dim(n)).map(|d| d as isize).collect();
    if dims.is_empty() {
        return Ok(NamedTensor { t: o.t.shallow_clone(), names: o.names.clone() });
    }
    let t = o.t.sum(&dims[..], false)?.to_dtype(o.t.dtype())?;
    Ok(NamedTensor { t, names: o.names.iter().copied().filter(|n| !unshared.contains(n)).collect() })
}

/// Chooses the two operands to contract next: the pair for which the size of the result minus the sizes of the operands is smallest.
fn best_pair(left: &[NamedTensor], output: &[DimName]) -> (usize, usize) {
    let cost = |&(i, j): &(usize, usize)| {
        let (a, b) = (&left[i], &left[j]);
        let needed = |n: &DimName| {
            output.contains(n) || left.iter().enumerate().any(|(k, o)| k != i && k != j && o.names.contains(n))
        };
        let alone = |n: &&DimName| !a.names.contains(n);
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

fn display_name(name: DimName) -> String {
    char::from_u32(name).filter(|_| name < ELLIPSIS).map_or("a dim of '...'".into(), |c| format!("'{c}'"))
}

/// Parses the names of an operand or of the result. An ellipsis is `None`.
fn parse_names(text: &str) -> Result<Vec<Option<DimName>>> {
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
            "'{c}' in '{}' is not a letter: dims are named by letters", Excerpt(text));
        names.push(Some(c as DimName));
        rest = &rest[1..];
    }
    Ok(names)
}

/// Parses an equation; `ranks` has the number of dims of each operand. Returns the names of each operand's dims and of the result's dims.
fn parse(equation: &str, ranks: &[usize]) -> Result<(Vec<Vec<DimName>>, Vec<DimName>)> {
    let op = "einsum";
    let equation: String = equation.chars().filter(|c| !c.is_whitespace()).collect();
    let (inputs, output) = match equation.split_once("->") {
        Some((inputs, output)) => (inputs, Some(parse_names(output)?)),
        None => (&equation[..], None),
    };
    let inputs = inputs.split(',').map(parse_names).collect::<Result<Vec<_>>>()?;
    let (about, given) = (inputs.len(), ranks.len());
    invalid!(op if about != given, "'{}' has {about} operands, and {given} are given", Excerpt(&equation));
    let mut most = 0;
    for (names, &rank) in inputs.iter().zip(ranks) {
        let letters = names.iter().flatten().count();
        match names.contains(&None) {
            true if letters <= rank => most = most.max(rank - letters),
            false if letters == rank => {}
            _ => fail!(op, "'{}' names {letters} dims of an operand that has {rank}", Excerpt(&equation)),
        }
    }
    // Ellipses of different lengths are aligned at the last dim, so their last dims have the same names.
    let ellipsis = |count: usize| (most - count..most).map(|i| ELLIPSIS + i as DimName);
    let with_ellipsis = |names: &[Option<DimName>], count: usize| -> Vec<DimName> {
        names.iter().flat_map(|n| n.map_or_else(|| ellipsis(count).collect::<Vec<DimName>>(), |n| vec![n])).collect()
    };
    let count = |names: &[Option<DimName>], rank: usize| rank - names.iter().flatten().count();
    let named = inputs.iter().zip(ranks).map(|(names, &rank)| with_ellipsis(names, count(names, rank)));
    let named: Vec<Vec<DimName>> = named.collect();
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
            let mut once: Vec<DimName> = named.concat();
            once.sort_unstable();
            let all = once.clone();
            once.retain(|&n| n < ELLIPSIS && all.iter().filter(|&&m| m == n).count() == 1);
            ellipsis(most).chain(once).collect()
        }
    };
    Ok((named, output))
}

/// The dims over which [`Tensor::tensordot`] sums: either the last n dims of the left tensor with the first n dims of the right tensor,
/// or one list of dims for each tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TensordotDims {
    /// The number n of dims, the last n of the left tensor and the first n of the right tensor.
    Count(usize),
    /// The dims of the left tensor, and the corresponding dims of the right tensor.
    Lists(Vec<isize>, Vec<isize>),
}

impl_from! { TensordotDims:
    [] usize, n => TensordotDims::Count(n);
    [] (&[isize], &[isize]), (a, b) => TensordotDims::Lists(a.to_vec(), b.to_vec());
    [const N: usize] ([isize; N], [isize; N]), (a, b) => TensordotDims::Lists(a.to_vec(), b.to_vec());
}

operations! {
    einsum(equation: text, operands: xs): LinearAlgebra, Numbers -> Same, differentiable;
    tensordot(a: x, b: x, dims: ints = 2, dims_b: ints?): LinearAlgebra, Numbers -> Same, differentiable => |a| {
        let dims = match a.read_optional(1, Args::ints)? {
            Some(of_b) => TensordotDims::Lists(a.ints(0)?, of_b),
            None => TensordotDims::Count(a.size(0)?),
        };
        a.tensor(0)?.tensordot(a.tensor(1)?, dims)
    };
    /// Returns the dot products of all rows of this tensor with all rows of `other`, along the last dim (PyTorch's `inner`). If either is
    /// a scalar, returns the elementwise product. Differentiable. Fails as [`Tensor::matmul`] does, and with
    /// [`Error::ShapeMismatch`] if the last dims differ.
    inner(input: x, other: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, other| {
        if self.rank() == 0 || other.rank() == 0 {
            return self.mul(other).with_op(op);
        }
        mismatch!(op if self.shape().dims().last() != other.shape().dims().last(),
            self, other, "the last dims have one size");
        self.contract_dims(op, other, TensordotDims::Lists(vec![-1], vec![-1]))
    };
}

impl Tensor {
    /// Sums products as an equation in Einstein's notation describes (PyTorch's `einsum`). Differentiable.
    ///
    /// Each letter names a dim. Commas separate the operands, and the names of the result follow `->`. Without `->`, the result has the
    /// letters that occur once, in alphabetical order. A letter that occurs twice in one operand selects the diagonal of those two dims.
    /// `...` matches any number of dims, which are broadcast. Names that are not in the result are summed.
    ///
    /// Two operands take one matrix product, or one elementwise product if nothing is summed. More operands are contracted in pairs, the
    /// pair with the smallest result first. Operands are read through their strides, and copied only if the summed dims cannot be merged.
    /// Fails with [`Error::Invalid`] for an equation that does not match the operands, and for a letter with two sizes (size 1 broadcasts).
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
    #[track_caller]
    pub fn einsum<T: Borrow<Tensor>>(equation: &str, operands: &[T]) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "einsum";
        let tensors: Vec<&Tensor> = operands.iter().map(Borrow::borrow).collect();
        cast_first!(autocast_inputs(op, &tensors)?, |x| Tensor::einsum(equation, x));
        return_replacement!(op, tensors, equation);
        let ranks: Vec<usize> = tensors.iter().map(|t| t.rank()).collect();
        let (names, output) = parse(equation, &ranks)?;
        let named = tensors.iter().zip(names).map(|(t, names)| NamedTensor { t: t.shallow_clone(), names }).collect();
        contract(op, named, &output).with_op(op)
    }

    /// Sums products over pairs of dims (PyTorch's `tensordot`): the last `n` dims of this tensor with the first `n` of `other`, or two
    /// lists of dims. The result has the remaining dims of this tensor, then the remaining dims of `other`. Differentiable.
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
    /// [`Error::ShapeMismatch`] if the sizes of a pair differ and neither is 1; [`Error::Invalid`] for lists of different
    /// lengths, repeated dims, and more dims than a tensor has; otherwise the errors of [`Tensor::matmul`].
    #[track_caller]
    pub fn tensordot(&self, other: &Tensor, dims: impl Into<TensordotDims>) -> Result<Tensor> {
        let dims = dims.into();
        let arguments = || match &dims {
            TensordotDims::Count(n) => vec![(*n).into()],
            TensordotDims::Lists(a, b) => vec![a[..].into(), b[..].into()],
        };
        return_replacement!(op = "tensordot", [self, other]; arguments);
        self.contract_dims(op, other, dims)
    }

    fn contract_dims(&self, op: &'static str, other: &Tensor, dims: TensordotDims) -> Result<Tensor> {
        let (a, b) = match dims {
            TensordotDims::Count(n) if n <= self.rank().min(other.rank()) => {
                ((self.rank() - n..self.rank()).collect::<Vec<_>>(), (0..n).collect())
            }
            TensordotDims::Count(n) => {
                fail!(op, "{n} dims are more than shapes {} and {} have", self.shape(), other.shape())
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
            "dims {a:?} and {b:?} must have the same length and no repetitions");
        let size = |t: &Tensor, d: usize| t.shape().dims()[d];
        let fits = |(&i, &j): (&usize, &usize)| {
            let (m, n) = (size(self, i), size(other, j));
            m == n || m == 1 || n == 1
        };
        mismatch!(op if !a.iter().zip(&b).all(fits), self, other, "the dims summed over have equal sizes, or 1");
        let left: Vec<DimName> = (0..self.rank() as DimName).collect();
        let new = |d: usize| (self.rank() + d) as DimName;
        let right: Vec<DimName> =
            (0..other.rank()).map(|d| b.iter().position(|&j| j == d).map_or(new(d), |i| a[i] as DimName)).collect();
        let output: Vec<DimName> = (left.iter().filter(|n| !a.contains(&(**n as usize))))
            .chain(right.iter().filter(|n| **n >= self.rank() as DimName))
            .copied()
            .collect();
        let named = vec![
            NamedTensor { t: self.shallow_clone(), names: left },
            NamedTensor { t: other.shallow_clone(), names: right },
        ];
        contract(op, named, &output).with_op(op)
    }
}
