//! What this room has in the catalogue of operations.

use crate::error::Excerpt;
use crate::ops::PadMode;
use crate::ops::dispatch::arguments::Args;
use crate::ops::dispatch::operation::{ANY, Arity, Dtypes, Gives, Kind, Operation};
use crate::tensor::Index;
use crate::{Error, Result, Shape, Tensor, TensorOptions};

type One = fn(&Args) -> Result<Tensor>;
type Several = fn(&Args) -> Result<Vec<Tensor>>;

const fn view(name: &'static str, torch: &'static str, most: Arity, call: One) -> Operation {
    Operation::new(name, torch, Kind::View, Dtypes::All, Gives::Same, most, call).differentiable()
}

const fn views(name: &'static str, torch: &'static str, most: Arity, call: Several) -> Operation {
    Operation::several(name, torch, Kind::View, Dtypes::All, Gives::Same, most, call).differentiable()
}

const fn joining(name: &'static str, torch: &'static str, most: Arity, call: One) -> Operation {
    Operation::new(name, torch, Kind::Joining, Dtypes::All, Gives::Same, most, call).differentiable()
}

const fn assigning(name: &'static str, torch: &'static str, most: Arity, call: One) -> Operation {
    Operation::new(name, torch, Kind::Indexing, Dtypes::All, Gives::Same, most, call).differentiable()
}

const fn creation(name: &'static str, torch: &'static str, takes: Dtypes, most: Arity, call: One) -> Operation {
    Operation::new(name, torch, Kind::Creation, takes, Gives::Same, most, call)
}

const fn indices(name: &'static str, torch: &'static str, most: Arity, call: One) -> Operation {
    Operation::new(name, torch, Kind::Creation, Dtypes::All, Gives::I64, most, call)
}

const fn in_place(name: &'static str, torch: &'static str, most: Arity, call: One) -> Operation {
    Operation::new(name, torch, Kind::InPlace, Dtypes::All, Gives::Same, most, call)
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
        mode if mode != "constant" && a.given(2) => Err(Error::invalid("pad", format!("'{mode}' takes no value"))),
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
    creation("empty", "empty", Dtypes::All, (0, 3), |a| Tensor::empty(shape(a, 0)?, options(a, 1)?)),
    creation("zeros", "zeros", Dtypes::All, (0, 3), |a| Tensor::zeros(shape(a, 0)?, options(a, 1)?)),
    creation("ones", "ones", Dtypes::All, (0, 3), |a| Tensor::ones(shape(a, 0)?, options(a, 1)?)),
    creation("full", "full", Dtypes::All, (0, 4), |a| Tensor::full(shape(a, 0)?, a.scalar(1)?, options(a, 2)?)),
    creation("arange", "arange", Dtypes::Numbers, (0, 5), |a| Tensor::arange(a.scalar(0)?, a.scalar(1)?, a.scalar(2)?, options(a, 3)?)),
    creation("linspace", "linspace", Dtypes::Numbers, (0, 5), |a| Tensor::linspace(a.float(0)?, a.float(1)?, a.size(2)?, options(a, 3)?)),
    creation("logspace", "logspace", Dtypes::Numbers, (0, 6), |a| Tensor::logspace(a.float(0)?, a.float(1)?, a.size(2)?, a.float(3)?, options(a, 4)?)),
    creation("eye", "eye", Dtypes::All, (0, 3), |a| Tensor::eye(a.size(0)?, options(a, 1)?)),
    indices("tril_indices", "tril_indices", (0, 4), |a| Tensor::tril_indices(a.size(0)?, a.size(1)?, a.int(2)?, a.device(3)?)),
    indices("triu_indices", "triu_indices", (0, 4), |a| Tensor::triu_indices(a.size(0)?, a.size(1)?, a.int(2)?, a.device(3)?)),
    creation("empty_like", "empty_like", Dtypes::All, (1, 0), |a| a.x(0)?.empty_like()),
    creation("zeros_like", "zeros_like", Dtypes::All, (1, 0), |a| a.x(0)?.zeros_like()),
    creation("ones_like", "ones_like", Dtypes::All, (1, 0), |a| a.x(0)?.ones_like()),
    creation("full_like", "full_like", Dtypes::All, (1, 1), |a| a.x(0)?.full_like(a.scalar(0)?)),

    Operation::new("detach", "detach", Kind::View, Dtypes::All, Gives::Same, (1, 0), |a| Ok(a.x(0)?.detach())),
    view("reshape", "reshape", (1, 1), |a| a.x(0)?.reshape(a.ints(0)?)),
    view("view", "view", (1, 1), |a| a.x(0)?.view(a.ints(0)?)),
    view("reshape_as", "reshape_as", (2, 0), |a| a.x(0)?.reshape_as(a.x(1)?)),
    view("ravel", "ravel", (1, 0), |a| a.x(0)?.ravel()),
    view("flatten", "flatten", (1, 2), |a| a.x(0)?.flatten(a.int(0)?, a.int(1)?)),
    view("unflatten", "unflatten", (1, 2), |a| a.x(0)?.unflatten(a.int(0)?, a.ints(1)?)),
    view("transpose", "transpose", (1, 2), |a| a.x(0)?.transpose(a.int(0)?, a.int(1)?)),
    view("t", "t", (1, 0), |a| a.x(0)?.t()),
    view("mt", "mT", (1, 0), |a| a.x(0)?.mt()),
    view("permute", "permute", (1, 1), |a| a.x(0)?.permute(&a.ints(0)?)),
    view("movedim", "movedim", (1, 2), |a| a.x(0)?.movedim(a.int(0)?, a.int(1)?)),
    view("narrow", "narrow", (1, 3), |a| a.x(0)?.narrow(a.int(0)?, a.size(1)?, a.size(2)?)),
    view("slice", "Tensor.__getitem__", (1, 4), |a| a.x(0)?.slice(a.int(0)?, maybe(a, 1)?, maybe(a, 2)?, a.int(3)?)),
    view("select", "select", (1, 2), |a| a.x(0)?.select(a.int(0)?, a.int(1)?)),
    view("i", "Tensor.__getitem__", (1, 1), |a| a.x(0)?.i(&at(a, 0)?[..])),
    view("squeeze", "squeeze", (1, 1), |a| a.x(0)?.squeeze(a.int(0)?)),
    view("squeeze_dims", "squeeze", (1, 1), |a| a.x(0)?.squeeze_dims(&a.ints(0)?)),
    view("squeeze_all", "squeeze", (1, 0), |a| a.x(0)?.squeeze_all()),
    view("unsqueeze", "unsqueeze", (1, 1), |a| a.x(0)?.unsqueeze(a.int(0)?)),
    view("expand", "expand", (1, 1), |a| a.x(0)?.expand(a.ints(0)?)),
    view("broadcast_to", "broadcast_to", (1, 1), |a| a.x(0)?.broadcast_to(a.ints(0)?)),
    view("expand_as", "expand_as", (2, 0), |a| a.x(0)?.expand_as(a.x(1)?)),
    view("flip", "flip", (1, 1), |a| a.x(0)?.flip(a.dims(0)?)),
    view("fliplr", "fliplr", (1, 0), |a| a.x(0)?.fliplr()),
    view("flipud", "flipud", (1, 0), |a| a.x(0)?.flipud()),
    view("rot90", "rot90", (1, 3), |a| a.x(0)?.rot90(a.int(0)?, a.int(1)?, a.int(2)?)),
    view("diagonal", "diagonal", (1, 3), |a| a.x(0)?.diagonal(a.int(0)?, a.int(1)?, a.int(2)?)),
    view("diag", "diag", (1, 1), |a| a.x(0)?.diag(a.int(0)?)),
    view("unfold", "Tensor.unfold", (1, 3), |a| a.x(0)?.unfold(a.int(0)?, a.size(1)?, a.size(2)?)),
    view("as_strided", "as_strided", (1, 3), |a| a.x(0)?.as_strided(shape(a, 0)?, &a.ints(1)?, maybe(a, 2)?.map(|i| i as usize))),
    view("atleast_1d", "atleast_1d", (1, 0), |a| a.x(0)?.atleast_1d()),
    view("atleast_2d", "atleast_2d", (1, 0), |a| a.x(0)?.atleast_2d()),
    view("atleast_3d", "atleast_3d", (1, 0), |a| a.x(0)?.atleast_3d()),
    views("unbind", "unbind", (1, 1), |a| a.x(0)?.unbind(a.int(0)?)),
    views("split", "split", (1, 2), |a| a.x(0)?.split(a.size(0)?, a.int(1)?)),
    views("split_with_sizes", "split_with_sizes", (1, 2), |a| a.x(0)?.split_with_sizes(&a.sizes(0)?, a.int(1)?)),
    views("chunk", "chunk", (1, 2), |a| a.x(0)?.chunk(a.size(0)?, a.int(1)?)),
    views("tensor_split", "tensor_split", (1, 2), |a| a.x(0)?.tensor_split(a.size(0)?, a.int(1)?)),
    views("tensor_split_at", "tensor_split", (1, 2), |a| a.x(0)?.tensor_split_at(&a.ints(0)?, a.int(1)?)),
    views("meshgrid", "meshgrid", (ANY, 0), |a| Tensor::meshgrid(a.xs())),

    joining("cat", "cat", (ANY, 1), |a| Tensor::cat(a.xs(), a.int(0)?)),
    joining("stack", "stack", (ANY, 1), |a| Tensor::stack(a.xs(), a.int(0)?)),
    joining("hstack", "hstack", (ANY, 0), |a| Tensor::hstack(a.xs())),
    joining("vstack", "vstack", (ANY, 0), |a| Tensor::vstack(a.xs())),
    joining("dstack", "dstack", (ANY, 0), |a| Tensor::dstack(a.xs())),
    joining("column_stack", "column_stack", (ANY, 0), |a| Tensor::column_stack(a.xs())),
    joining("block_diag", "block_diag", (ANY, 0), |a| Tensor::block_diag(a.xs())),
    joining("diag_embed", "diag_embed", (1, 3), |a| a.x(0)?.diag_embed(a.int(0)?, a.int(1)?, a.int(2)?)),
    joining("pad", "nn.functional.pad", (1, 3), |a| a.x(0)?.pad(&a.ints(0)?, pad_mode(a)?)),
    joining("repeat", "Tensor.repeat", (1, 1), |a| a.x(0)?.repeat(&a.sizes(0)?)),
    joining("tile", "tile", (1, 1), |a| a.x(0)?.tile(&a.sizes(0)?)),
    joining("repeat_interleave", "repeat_interleave", (1, 2), |a| a.x(0)?.repeat_interleave(a.size(0)?, maybe(a, 1)?)),
    joining("repeat_interleave_tensor", "repeat_interleave", (2, 1), |a| a.x(0)?.repeat_interleave_tensor(a.x(1)?, a.int(0)?)),
    joining("roll", "roll", (1, 2), |a| a.x(0)?.roll(&a.ints(0)?, &a.ints(1)?)),

    assigning("slice_assign", "Tensor.__setitem__", (2, 1), |a| a.x(0)?.slice_assign(&at(a, 0)?[..], a.x(1)?)),
    assigning("slice_scatter", "slice_scatter", (2, 4), |a| a.x(0)?.slice_scatter(a.x(1)?, a.int(0)?, maybe(a, 1)?, maybe(a, 2)?, a.int(3)?)),
    assigning("select_scatter", "select_scatter", (2, 2), |a| a.x(0)?.select_scatter(a.x(1)?, a.int(0)?, a.int(1)?)),
    assigning("diagonal_scatter", "diagonal_scatter", (2, 3), |a| a.x(0)?.diagonal_scatter(a.x(1)?, a.int(0)?, a.int(1)?, a.int(2)?)),
    assigning("tril", "tril", (1, 1), |a| a.x(0)?.tril(a.int(0)?)),
    assigning("triu", "triu", (1, 1), |a| a.x(0)?.triu(a.int(0)?)),

    in_place("slice_assign_", "Tensor.__setitem__", (2, 1), |a| a.x(0)?.slice_assign_(&at(a, 0)?[..], a.x(1)?).map(Tensor::shallow_clone)),
    in_place("tril_", "tril_", (1, 1), |a| a.x(0)?.tril_(a.int(0)?).map(Tensor::shallow_clone)),
    in_place("triu_", "triu_", (1, 1), |a| a.x(0)?.triu_(a.int(0)?).map(Tensor::shallow_clone)),
];
