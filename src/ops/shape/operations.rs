//! The catalogue entries of creation, views and joining.

use crate::error::Excerpt;
use crate::ops::PadMode;
use crate::ops::dispatch::prelude::*;
use crate::ops::index::assign::read_indices;

/// Reads the padding mode, given by PyTorch's name, and the constant.
fn pad_mode(a: &Args) -> Result<PadMode> {
    let value = a.read_optional(2, Args::scalar)?;
    match a.text(1)? {
        mode if mode != "constant" && value.is_some() => fail!("pad", "'{mode}' takes no value"),
        "constant" => Ok(value.map_or(PadMode::default(), PadMode::Constant)),
        "reflect" => Ok(PadMode::Reflect),
        "replicate" => Ok(PadMode::Replicate),
        "circular" => Ok(PadMode::Circular),
        other => fail!("pad", "'{}' is not constant, reflect, replicate or circular", Excerpt(other)),
    }
}

operations! {
    empty(size: sizes, options): Creation, All -> Same;
    zeros(size: sizes, options): Creation, All -> Same;
    ones(size: sizes, options): Creation, All -> Same;
    full(size: sizes, fill_value: scalar, options): Creation, All -> Same;
    arange(start: scalar = 0, end: scalar, step: scalar = 1, options): Creation, Numbers -> Same;
    linspace(start: float, end: float, steps: size, options): Creation, Numbers -> Same;
    logspace(start: float, end: float, steps: size, base: float = 10, options): Creation, Numbers -> Same;
    eye(size: sizes, options): Creation, All -> Same;
    tril_indices(row: size, col: size, offset: int = 0, device: device): Creation, All -> I64;
    triu_indices(row: size, col: size, offset: int = 0, device: device): Creation, All -> I64;
    empty_like(input: x): Creation, All -> Same;
    zeros_like(input: x): Creation, All -> Same;
    ones_like(input: x): Creation, All -> Same;
    full_like(input: x, fill_value: scalar): Creation, All -> Same;
    detach(input: x): View, All -> Same => |a| Ok(a.tensor(0)?.detach());
    reshape(input: x, shape: ints): View, All -> Same, differentiable;
    view(input: x, size: ints): View, All -> Same, differentiable;
    reshape_as(input: x, other: x): View, All -> Same, differentiable;
    ravel(input: x): View, All -> Same, differentiable;
    flatten(input: x, start_dim: int = 0, end_dim: int = -1): View, All -> Same, differentiable;
    unflatten(input: x, dim: int, sizes: ints): View, All -> Same, differentiable;
    transpose(input: x, dim0: int, dim1: int): View, All -> Same, differentiable;
    t(input: x): View, All -> Same, differentiable;
    mt(input: x) "mT": View, All -> Same, differentiable;
    permute(input: x, dims: &ints): View, All -> Same, differentiable;
    movedim(input: x, source: ints, destination: ints): View, All -> Same, differentiable;
    narrow(input: x, dim: int, start: size, length: size): View, All -> Same, differentiable;
    slice(input: x, dim: int = 0, start: int?, end: int?, step: int = 1) "Tensor.__getitem__": View, All -> Same, differentiable;
    select(input: x, dim: int, index: int): View, All -> Same, differentiable;
    i(input: x, indices: ints) "Tensor.__getitem__": View, All -> Same, differentiable => |a| a.tensor(0)?.i(&read_indices(a, 0)?[..]);
    squeeze(input: x, dim: int): View, All -> Same, differentiable;
    squeeze_dims(input: x, dim: &ints) "squeeze": View, All -> Same, differentiable;
    squeeze_all(input: x) "squeeze": View, All -> Same, differentiable;
    unsqueeze(input: x, dim: ints): View, All -> Same, differentiable;
    expand(input: x, size: ints): View, All -> Same, differentiable;
    broadcast_to(input: x, size: ints): View, All -> Same, differentiable;
    expand_as(input: x, other: x): View, All -> Same, differentiable;
    flip(input: x, dims: dims): View, All -> Same, differentiable;
    fliplr(input: x): View, All -> Same, differentiable;
    flipud(input: x): View, All -> Same, differentiable;
    rot90(input: x, k: int = 1, dim0: int = 0, dim1: int = 1): View, All -> Same, differentiable;
    diagonal(input: x, offset: int = 0, dim1: int = 0, dim2: int = 1): View, All -> Same, differentiable;
    diag(input: x, diagonal: int = 0): View, All -> Same, differentiable;
    unfold(input: x, dimension: int, size: size, step: size) "Tensor.unfold": View, All -> Same, differentiable;
    as_strided(input: x, size: sizes, stride: &ints, storage_offset: size?): View, All -> Same, differentiable;
    atleast_1d(input: x): View, All -> Same, differentiable;
    atleast_2d(input: x): View, All -> Same, differentiable;
    atleast_3d(input: x): View, All -> Same, differentiable;
    unbind(input: x, dim: int = 0): View, All -> Same, differentiable;
    split(input: x, split_size: size, dim: int = 0): View, All -> Same, differentiable;
    split_with_sizes(input: x, split_sizes: &sizes, dim: int = 0): View, All -> Same, differentiable;
    chunk(input: x, chunks: size, dim: int = 0): View, All -> Same, differentiable;
    tensor_split(input: x, sections: size, dim: int = 0): View, All -> Same, differentiable;
    tensor_split_at(input: x, indices: &ints, dim: int = 0) "tensor_split": View, All -> Same, differentiable;
    meshgrid(tensors: xs): View, All -> Same, differentiable;
    meshgrid_xy(tensors: xs) "meshgrid": View, All -> Same, differentiable;
    cat(tensors: xs, dim: int = 0): Joining, All -> Same, differentiable;
    stack(tensors: xs, dim: int = 0): Joining, All -> Same, differentiable;
    hstack(tensors: xs): Joining, All -> Same, differentiable;
    vstack(tensors: xs): Joining, All -> Same, differentiable;
    dstack(tensors: xs): Joining, All -> Same, differentiable;
    column_stack(tensors: xs): Joining, All -> Same, differentiable;
    block_diag(tensors: xs): Joining, All -> Same, differentiable;
    diag_embed(input: x, offset: int = 0, dim1: int = -2, dim2: int = -1): Joining, All -> Same, differentiable;
    pad(input: x, pad: ints, mode: text = "constant", value: scalar?) functional: Joining, All -> Same, differentiable
        => |a| a.tensor(0)?.pad(&a.ints(0)?, pad_mode(a)?);
}
