//! Moving elements: concatenation, `tril` and `triu`, gather and scatter.

use super::values::{Memory, add, indices, is_true, max, min, mul, new_tensor, read, storage_index, write};
use crate::backend::problem::index::{Combine, Indexed};
use crate::backend::problem::sequence::Sequence;
use crate::layout::Layout;
use crate::{DType, Device, Error, Result, Scalar, Tensor};

pub(super) fn sequence(values: Sequence, out: &Tensor) -> Result<()> {
    write(out, (0..out.numel()).map(|i| values.value(i)))
}

pub(super) fn join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<()> {
    let mut start = 0;
    for t in tensors {
        let n = t.shape().dims()[d];
        write(&out.with_layout(out.layout.narrow("join", d, start, n)?), read(t)?)?;
        start += n;
    }
    Ok(())
}

pub(super) fn tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Tensor> {
    let mut values = read(x)?;
    for (index, value) in values.indexed_iter_mut() {
        let [.., row, column] = *ndarray::Dimension::slice(&index) else { unreachable!("matrices") };
        if (from..to).contains(&(column as isize - row as isize)) {
            *value = Scalar::Int(0);
        }
    }
    new_tensor(&values, x.dtype)
}

/// Converts an index to a position along a dim of the given size. If `wraps`, negative indices count from the end.
fn checked(op: &'static str, index: Scalar, size: usize, wraps: bool) -> Result<isize> {
    let index = index.to_i64();
    let position = if wraps && index < 0 { index + size as i64 } else { index };
    let inside = (0..size as i64).contains(&position);
    inside.then_some(position as isize).ok_or(Error::IndexOutOfRange { op, index, size })
}

/// Calls `f(index, offset along the indexed dim)` for every element of the index tensor, in row-major order.
fn for_each_index(g: &Indexed, mut f: impl FnMut(&[usize], isize)) -> Result<()> {
    let index = Memory::read(g.index)?;
    for i in indices(g.x_layout.shape.dims()) {
        let position = checked(g.op, index.get(storage_index(&g.index_layout, &i)), g.size, g.wraps)?;
        f(&i, position * g.step);
    }
    Ok(())
}

pub(super) fn gather(g: &Indexed, out: &Tensor) -> Result<()> {
    let (x, mut values) = (Memory::read(g.x)?, Vec::new());
    for_each_index(g, |i, along| values.push(x.get(storage_index(&g.x_layout, i) + along)))?;
    write(out, values)
}

/// Scatters elements in the order of the indices, so that later elements overwrite earlier ones.
pub(super) fn scatter(g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout) -> Result<()> {
    let (x, mut to) = (Memory::read(g.x)?, Memory::read(target)?);
    for_each_index(g, |i, along| {
        let (new, at) = (x.get(storage_index(&g.x_layout, i)), storage_index(layout, i) + along);
        let old = to.get(at);
        to.set(
            at,
            match combine {
                Combine::Set => new,
                Combine::Add => add(old, new),
                Combine::Multiply => mul(old, new),
                Combine::Max => max(old, new),
                Combine::Min => min(old, new),
            },
        );
    })?;
    to.write_to(target)
}

pub(super) fn linear_index(
    op: &'static str,
    index: &Tensor,
    out: &Tensor,
    (size, step): (usize, isize),
    base: Option<i64>,
) -> Result<()> {
    let index = read(index)?;
    let indices = index.iter().map(|&i| checked(op, i, size, true)).collect::<Result<Vec<isize>>>()?;
    let before = read(out)?;
    write(out, before.iter().zip(indices).map(|(old, index)| base.unwrap_or(old.to_i64()) + (index * step) as i64))
}

pub(super) fn one_hot(op: &'static str, x: &Tensor, out: &Tensor, classes: usize) -> Result<()> {
    let x = read(x)?;
    let indices = x.iter().map(|&i| checked(op, i, classes, false)).collect::<Result<Vec<isize>>>()?;
    write(out, indices.iter().flat_map(|&index| (0..classes).map(move |class| class as isize == index)))
}

pub(super) fn nonzero(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let values = read(x)?;
    let found = values.iter().zip(indices(dims)).filter(|(value, _)| is_true(**value)).map(|(_, index)| index);
    let found: Vec<Vec<usize>> = found.collect();
    let out = Tensor::empty_with_shape([found.len(), dims.len()], DType::I64, Device::Cpu)?;
    write(&out, found.iter().flatten().map(|&i| i as i64))?;
    Ok(out)
}

pub(super) fn masked_select(x: &Tensor, mask: &Tensor) -> Result<Tensor> {
    let (values, mask) = (read(x)?, read(mask)?);
    let found = values.iter().zip(&mask).filter(|(_, on)| is_true(**on)).map(|(value, _)| *value);
    let found: Vec<Scalar> = found.collect();
    let out = Tensor::empty_with_shape(found.len(), x.dtype, Device::Cpu)?;
    write(&out, found)?;
    Ok(out)
}
