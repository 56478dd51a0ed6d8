//! The rows of creation, views, joining and assignment in the catalogue.

use crate::error::Excerpt;
use crate::ops::PadMode;
use crate::ops::dispatch::arguments::Args;
use crate::ops::dispatch::prelude::*;
use crate::tensor::Index;
use crate::{Result, Tensor};

/// Integers as indices, one for each dimension.
fn at(a: &Args, i: usize) -> Result<Vec<Index>> {
    Ok(a.ints(i)?.into_iter().map(Index::At).collect())
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

operations! {
    empty(sizes, options): Creation, All -> Same;
    zeros(sizes, options): Creation, All -> Same;
    ones(sizes, options): Creation, All -> Same;
    full(sizes, scalar, options): Creation, All -> Same;
    arange(scalar, scalar, scalar, options): Creation, Numbers -> Same;
    linspace(float, float, size, options): Creation, Numbers -> Same;
    logspace(float, float, size, float, options): Creation, Numbers -> Same;
    eye(sizes, options): Creation, All -> Same;
    tril_indices(size, size, int, device): Creation, All -> I64;
    triu_indices(size, size, int, device): Creation, All -> I64;
    empty_like(x): Creation, All -> Same;
    zeros_like(x): Creation, All -> Same;
    ones_like(x): Creation, All -> Same;
    full_like(x, scalar): Creation, All -> Same;
    detach(1, 0): View, All -> Same => |a| Ok(a.x(0)?.detach());
    reshape(x, ints): View, All -> Same, differentiable;
    view(x, ints): View, All -> Same, differentiable;
    reshape_as(x, x): View, All -> Same, differentiable;
    ravel(x): View, All -> Same, differentiable;
    flatten(x, int, int): View, All -> Same, differentiable;
    unflatten(x, int, ints): View, All -> Same, differentiable;
    transpose(x, int, int): View, All -> Same, differentiable;
    t(x): View, All -> Same, differentiable;
    mt(x) "mT": View, All -> Same, differentiable;
    permute(x, &ints): View, All -> Same, differentiable;
    movedim(x, ints, ints): View, All -> Same, differentiable;
    narrow(x, int, size, size): View, All -> Same, differentiable;
    slice(x, int, int?, int?, int) "Tensor.__getitem__": View, All -> Same, differentiable;
    select(x, int, int): View, All -> Same, differentiable;
    i(1, 1) "Tensor.__getitem__": View, All -> Same, differentiable => |a| a.x(0)?.i(&at(a, 0)?[..]);
    squeeze(x, int): View, All -> Same, differentiable;
    squeeze_dims(x, &ints) "squeeze": View, All -> Same, differentiable;
    squeeze_all(x) "squeeze": View, All -> Same, differentiable;
    unsqueeze(x, ints): View, All -> Same, differentiable;
    expand(x, ints): View, All -> Same, differentiable;
    broadcast_to(x, ints): View, All -> Same, differentiable;
    expand_as(x, x): View, All -> Same, differentiable;
    flip(x, dims): View, All -> Same, differentiable;
    fliplr(x): View, All -> Same, differentiable;
    flipud(x): View, All -> Same, differentiable;
    rot90(x, int, int, int): View, All -> Same, differentiable;
    diagonal(x, int, int, int): View, All -> Same, differentiable;
    diag(x, int): View, All -> Same, differentiable;
    unfold(x, int, size, size) "Tensor.unfold": View, All -> Same, differentiable;
    as_strided(1, 3): View, All -> Same, differentiable
        => |a| a.x(0)?.as_strided(a.sizes(0)?, &a.ints(1)?, if a.given(2) { Some(a.int(2)? as usize) } else { None });
    atleast_1d(x): View, All -> Same, differentiable;
    atleast_2d(x): View, All -> Same, differentiable;
    atleast_3d(x): View, All -> Same, differentiable;
    unbind(x, int): View, All -> Same, differentiable;
    split(x, size, int): View, All -> Same, differentiable;
    split_with_sizes(x, &sizes, int): View, All -> Same, differentiable;
    chunk(x, size, int): View, All -> Same, differentiable;
    tensor_split(x, size, int): View, All -> Same, differentiable;
    tensor_split_at(x, &ints, int) "tensor_split": View, All -> Same, differentiable;
    meshgrid(xs): View, All -> Same, differentiable;
    meshgrid_xy(xs) "meshgrid": View, All -> Same, differentiable;
    cat(xs, int): Joining, All -> Same, differentiable;
    stack(xs, int): Joining, All -> Same, differentiable;
    hstack(xs): Joining, All -> Same, differentiable;
    vstack(xs): Joining, All -> Same, differentiable;
    dstack(xs): Joining, All -> Same, differentiable;
    column_stack(xs): Joining, All -> Same, differentiable;
    block_diag(xs): Joining, All -> Same, differentiable;
    diag_embed(x, int, int, int): Joining, All -> Same, differentiable;
    pad(1, 3) functional: Joining, All -> Same, differentiable => |a| a.x(0)?.pad(&a.ints(0)?, pad_mode(a)?);
    repeat(x, &sizes) "Tensor.repeat": Joining, All -> Same, differentiable;
    tile(x, &sizes): Joining, All -> Same, differentiable;
    repeat_interleave(x, size, int?): Joining, All -> Same, differentiable;
    repeat_interleave_tensor(x, x, int) "repeat_interleave": Joining, All -> Same, differentiable;
    roll(x, &ints, &ints): Joining, All -> Same, differentiable;
    slice_assign(2, 1) "Tensor.__setitem__": Indexing, All -> Same, differentiable
        => |a| a.x(0)?.slice_assign(&at(a, 0)?[..], a.x(1)?);
    slice_assign_(2, 1) "Tensor.__setitem__": InPlace, All -> Same
        => |a| a.x(0)?.slice_assign_(&at(a, 0)?[..], a.x(1)?).map(Tensor::shallow_clone);
    slice_scatter(x, x, int, int?, int?, int): Indexing, All -> Same, differentiable;
    select_scatter(x, x, int, int): Indexing, All -> Same, differentiable;
    diagonal_scatter(x, x, int, int, int): Indexing, All -> Same, differentiable;
    tril / tril_ (x, int): Indexing, All -> Same, differentiable;
    triu / triu_ (x, int): Indexing, All -> Same, differentiable;
}
