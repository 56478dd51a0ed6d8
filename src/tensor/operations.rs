//! What this room has in the catalogue of operations.

use super::{Index, PadMode};
use crate::error::Excerpt;
use crate::ops::arguments::Args;
use crate::ops::catalogue::{Dtypes, Gives, Kind, Operation};
use crate::{Error, Result, Shape, Tensor, TensorOptions};

type One = fn(&Args) -> Result<Tensor>;
type Several = fn(&Args) -> Result<Vec<Tensor>>;

const fn view(name: &'static str, torch: &'static str, call: One) -> Operation {
    Operation::new(name, torch, Kind::View, Dtypes::All, Gives::Same, call).differentiable()
}

const fn views(name: &'static str, torch: &'static str, call: Several) -> Operation {
    Operation::several(name, torch, Kind::View, Dtypes::All, Gives::Same, call).differentiable()
}

const fn joining(name: &'static str, torch: &'static str, call: One) -> Operation {
    Operation::new(name, torch, Kind::Joining, Dtypes::All, Gives::Same, call).differentiable()
}

const fn assigning(name: &'static str, torch: &'static str, call: One) -> Operation {
    Operation::new(name, torch, Kind::Indexing, Dtypes::All, Gives::Same, call).differentiable()
}

const fn creation(name: &'static str, torch: &'static str, takes: Dtypes, call: One) -> Operation {
    Operation::new(name, torch, Kind::Creation, takes, Gives::Same, call)
}

const fn indices(name: &'static str, torch: &'static str, call: One) -> Operation {
    Operation::new(name, torch, Kind::Creation, Dtypes::All, Gives::I64, call)
}

const fn in_place(name: &'static str, torch: &'static str, call: One) -> Operation {
    Operation::new(name, torch, Kind::InPlace, Dtypes::All, Gives::Same, call)
}

/// Where argument i may be left out.
fn maybe(a: &Args, i: usize) -> Result<Option<isize>> {
    if a.given(i) { a.int(i).map(Some) } else { Ok(None) }
}

/// Integers as indices, one for each dimension.
fn at(a: &Args, i: usize) -> Result<Vec<Index>> {
    Ok(a.ints(i)?.into_iter().map(Index::At).collect())
}

/// A dtype and a device from argument i on.
fn options(a: &Args, i: usize) -> Result<TensorOptions> {
    Ok((a.dtype(i)?, a.device(i + 1)?).into())
}

/// PyTorch's word for a mode, and the constant.
fn pad_mode(a: &Args) -> Result<PadMode> {
    match if a.given(1) { a.text(1)? } else { "constant" } {
        "constant" => Ok(if a.given(2) { PadMode::Constant(a.scalar(2)?) } else { PadMode::default() }),
        "reflect" => Ok(PadMode::Reflect),
        "replicate" => Ok(PadMode::Replicate),
        "circular" => Ok(PadMode::Circular),
        other => {
            Err(Error::invalid("pad", format!("'{}' is not constant, reflect, replicate or circular", Excerpt(other))))
        }
    }
}

fn shape(a: &Args, i: usize) -> Result<Shape> {
    Ok(a.sizes(i)?.into())
}

#[rustfmt::skip]
pub(crate) static OPERATIONS: &[Operation] = &[
    creation("empty", "empty", Dtypes::All, |a| Tensor::empty(shape(a, 0)?, options(a, 1)?)),
    creation("zeros", "zeros", Dtypes::All, |a| Tensor::zeros(shape(a, 0)?, options(a, 1)?)),
    creation("ones", "ones", Dtypes::All, |a| Tensor::ones(shape(a, 0)?, options(a, 1)?)),
    creation("full", "full", Dtypes::All, |a| Tensor::full(shape(a, 0)?, a.scalar(1)?, options(a, 2)?)),
    creation("arange", "arange", Dtypes::Numbers, |a| Tensor::arange(a.scalar(0)?, a.scalar(1)?, a.scalar(2)?, options(a, 3)?)),
    creation("linspace", "linspace", Dtypes::Numbers, |a| Tensor::linspace(a.float(0)?, a.float(1)?, a.size(2)?, options(a, 3)?)),
    creation("logspace", "logspace", Dtypes::Numbers, |a| Tensor::logspace(a.float(0)?, a.float(1)?, a.size(2)?, a.float(3)?, options(a, 4)?)),
    creation("eye", "eye", Dtypes::All, |a| Tensor::eye(a.size(0)?, options(a, 1)?)),
    indices("tril_indices", "tril_indices", |a| Tensor::tril_indices(a.size(0)?, a.size(1)?, a.int(2)?, a.device(3)?)),
    indices("triu_indices", "triu_indices", |a| Tensor::triu_indices(a.size(0)?, a.size(1)?, a.int(2)?, a.device(3)?)),
    creation("empty_like", "empty_like", Dtypes::All, |a| a.x(0)?.empty_like()),
    creation("zeros_like", "zeros_like", Dtypes::All, |a| a.x(0)?.zeros_like()),
    creation("ones_like", "ones_like", Dtypes::All, |a| a.x(0)?.ones_like()),
    creation("full_like", "full_like", Dtypes::All, |a| a.x(0)?.full_like(a.scalar(0)?)),

    Operation::new("detach", "detach", Kind::View, Dtypes::All, Gives::Same, |a| Ok(a.x(0)?.detach())),
    view("reshape", "reshape", |a| a.x(0)?.reshape(a.ints(0)?)),
    view("view", "view", |a| a.x(0)?.view(a.ints(0)?)),
    view("reshape_as", "reshape_as", |a| a.x(0)?.reshape_as(a.x(1)?)),
    view("ravel", "ravel", |a| a.x(0)?.ravel()),
    view("flatten", "flatten", |a| a.x(0)?.flatten(a.int(0)?, a.int(1)?)),
    view("unflatten", "unflatten", |a| a.x(0)?.unflatten(a.int(0)?, a.ints(1)?)),
    view("transpose", "transpose", |a| a.x(0)?.transpose(a.int(0)?, a.int(1)?)),
    view("t", "t", |a| a.x(0)?.t()),
    view("mt", "mT", |a| a.x(0)?.mt()),
    view("permute", "permute", |a| a.x(0)?.permute(&a.ints(0)?)),
    view("movedim", "movedim", |a| a.x(0)?.movedim(a.int(0)?, a.int(1)?)),
    view("narrow", "narrow", |a| a.x(0)?.narrow(a.int(0)?, a.size(1)?, a.size(2)?)),
    view("slice", "Tensor.__getitem__", |a| a.x(0)?.slice(a.int(0)?, maybe(a, 1)?, maybe(a, 2)?, a.int(3)?)),
    view("select", "select", |a| a.x(0)?.select(a.int(0)?, a.int(1)?)),
    view("i", "Tensor.__getitem__", |a| a.x(0)?.i(&at(a, 0)?[..])),
    view("squeeze", "squeeze", |a| a.x(0)?.squeeze(a.int(0)?)),
    view("squeeze_dims", "squeeze", |a| a.x(0)?.squeeze_dims(&a.ints(0)?)),
    view("squeeze_all", "squeeze", |a| a.x(0)?.squeeze_all()),
    view("unsqueeze", "unsqueeze", |a| a.x(0)?.unsqueeze(a.int(0)?)),
    view("expand", "expand", |a| a.x(0)?.expand(a.ints(0)?)),
    view("broadcast_to", "broadcast_to", |a| a.x(0)?.broadcast_to(a.ints(0)?)),
    view("expand_as", "expand_as", |a| a.x(0)?.expand_as(a.x(1)?)),
    view("flip", "flip", |a| a.x(0)?.flip(a.dims(0)?)),
    view("fliplr", "fliplr", |a| a.x(0)?.fliplr()),
    view("flipud", "flipud", |a| a.x(0)?.flipud()),
    view("rot90", "rot90", |a| a.x(0)?.rot90(a.int(0)?, a.int(1)?, a.int(2)?)),
    view("diagonal", "diagonal", |a| a.x(0)?.diagonal(a.int(0)?, a.int(1)?, a.int(2)?)),
    view("diag", "diag", |a| a.x(0)?.diag(a.int(0)?)),
    view("unfold", "Tensor.unfold", |a| a.x(0)?.unfold(a.int(0)?, a.size(1)?, a.size(2)?)),
    view("as_strided", "as_strided", |a| a.x(0)?.as_strided(shape(a, 0)?, &a.ints(1)?, maybe(a, 2)?.map(|i| i as usize))),
    view("atleast_1d", "atleast_1d", |a| a.x(0)?.atleast_1d()),
    view("atleast_2d", "atleast_2d", |a| a.x(0)?.atleast_2d()),
    view("atleast_3d", "atleast_3d", |a| a.x(0)?.atleast_3d()),
    views("unbind", "unbind", |a| a.x(0)?.unbind(a.int(0)?)),
    views("split", "split", |a| a.x(0)?.split(a.size(0)?, a.int(1)?)),
    views("split_with_sizes", "split_with_sizes", |a| a.x(0)?.split_with_sizes(&a.sizes(0)?, a.int(1)?)),
    views("chunk", "chunk", |a| a.x(0)?.chunk(a.size(0)?, a.int(1)?)),
    views("tensor_split", "tensor_split", |a| a.x(0)?.tensor_split(a.size(0)?, a.int(1)?)),
    views("tensor_split_at", "tensor_split", |a| a.x(0)?.tensor_split_at(&a.ints(0)?, a.int(1)?)),
    views("meshgrid", "meshgrid", |a| Tensor::meshgrid(a.xs())),

    joining("cat", "cat", |a| Tensor::cat(a.xs(), a.int(0)?)),
    joining("stack", "stack", |a| Tensor::stack(a.xs(), a.int(0)?)),
    joining("hstack", "hstack", |a| Tensor::hstack(a.xs())),
    joining("vstack", "vstack", |a| Tensor::vstack(a.xs())),
    joining("dstack", "dstack", |a| Tensor::dstack(a.xs())),
    joining("column_stack", "column_stack", |a| Tensor::column_stack(a.xs())),
    joining("block_diag", "block_diag", |a| Tensor::block_diag(a.xs())),
    joining("diag_embed", "diag_embed", |a| a.x(0)?.diag_embed(a.int(0)?, a.int(1)?, a.int(2)?)),
    joining("pad", "nn.functional.pad", |a| a.x(0)?.pad(&a.ints(0)?, pad_mode(a)?)),
    joining("repeat", "Tensor.repeat", |a| a.x(0)?.repeat(&a.sizes(0)?)),
    joining("tile", "tile", |a| a.x(0)?.tile(&a.sizes(0)?)),
    joining("repeat_interleave", "repeat_interleave", |a| a.x(0)?.repeat_interleave(a.size(0)?, maybe(a, 1)?)),
    joining("repeat_interleave_tensor", "repeat_interleave", |a| a.x(0)?.repeat_interleave_tensor(a.x(1)?, a.int(0)?)),
    joining("roll", "roll", |a| a.x(0)?.roll(&a.ints(0)?, &a.ints(1)?)),

    assigning("slice_assign", "Tensor.__setitem__", |a| a.x(0)?.slice_assign(&at(a, 0)?[..], a.x(1)?)),
    assigning("slice_scatter", "slice_scatter", |a| a.x(0)?.slice_scatter(a.x(1)?, a.int(0)?, maybe(a, 1)?, maybe(a, 2)?, a.int(3)?)),
    assigning("select_scatter", "select_scatter", |a| a.x(0)?.select_scatter(a.x(1)?, a.int(0)?, a.int(1)?)),
    assigning("diagonal_scatter", "diagonal_scatter", |a| a.x(0)?.diagonal_scatter(a.x(1)?, a.int(0)?, a.int(1)?, a.int(2)?)),
    assigning("tril", "tril", |a| a.x(0)?.tril(a.int(0)?)),
    assigning("triu", "triu", |a| a.x(0)?.triu(a.int(0)?)),

    in_place("slice_assign_", "Tensor.__setitem__", |a| a.x(0)?.slice_assign_(&at(a, 0)?[..], a.x(1)?).map(Tensor::shallow_clone)),
    in_place("tril_", "tril_", |a| a.x(0)?.tril_(a.int(0)?).map(Tensor::shallow_clone)),
    in_place("triu_", "triu_", |a| a.x(0)?.triu_(a.int(0)?).map(Tensor::shallow_clone)),
];
