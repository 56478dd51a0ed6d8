"""Operators composed of PyTorch's own. On tensors of this device autograd differentiates the composition, not the operator."""

import itertools
import math

import torch

# PyTorch's numbers of padding modes, interpolation modes and reductions of bags.
_ZEROS, _BORDER, _REFLECTION = range(3)
_BILINEAR, _NEAREST, _BICUBIC = range(3)
_SUM, _MEAN, _MAX = range(3)


def _wide(tensor):
    """Converts 16-bit floats to f32 for computations of several steps."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def _cubic(x):
    """The four cubic convolution weights, with a = -0.75, of a position `x` past the second tap."""
    inner = lambda x: (1.25 * x - 2.25) * x * x + 1
    outer = lambda x: ((-0.75 * x + 3.75) * x - 6) * x + 3
    return outer(x + 1), inner(x), inner(1 - x), outer(2 - x)


def grid_sampler(input, grid, interpolation_mode, padding_mode, align_corners):
    """Samples `input`, of two or three spatial dims, at the coordinates of `grid`: each tap selects rows of all channels."""
    batch, channels, *sizes = input.shape

    def padded(x, size):
        if padding_mode == _REFLECTION:
            low, span = (0, size - 1) if align_corners else (-0.5, size)
            distance = (x - low).abs()
            rest = torch.fmod(distance, span) if span else distance * 0
            odd = torch.fmod(torch.floor(distance / max(span, 1)), 2) != 0
            x = torch.where(odd, low + span - rest, low + rest)
        return x if padding_mode == _ZEROS else x.clamp(0, size - 1)

    def taps(x, size):
        """Pairs of an index along a dim and its weight, which is 0 outside of the input."""
        x = (x + 1) * ((size - 1) / 2) if align_corners else ((x + 1) * size - 1) / 2
        x = x if interpolation_mode == _BICUBIC else padded(x, size)
        if interpolation_mode == _NEAREST:
            position = torch.round(x)
            pairs = [(position, position - position + 1)]  # `grid` has a gradient of 0
        elif interpolation_mode == _BILINEAR:
            position = torch.floor(x)
            pairs = [(position, position + 1 - x), (position + 1, x - position)]
        else:
            position = torch.floor(x)
            pairs = [(padded(position + i - 1, size), weight) for i, weight in enumerate(_cubic(x - position))]
        for position, weight in pairs:
            inside = (position >= 0) & (position <= size - 1)
            yield torch.where(inside, position, 0).long(), torch.where(inside, weight, 0)

    coordinates = _wide(grid).flatten(1, -2).unbind(-1)[::-1]  # the last spatial dim comes first in `grid`
    rows = _wide(input).movedim(1, -1).reshape(batch * math.prod(sizes), channels)
    first = torch.arange(batch, device=input.device).unsqueeze(1) * math.prod(sizes)
    result = 0
    for corner in itertools.product(*(list(taps(x, size)) for x, size in zip(coordinates, sizes))):
        index = sum((position * math.prod(sizes[dim + 1 :]) for dim, (position, _) in enumerate(corner)), first)
        weight = math.prod(weight for _, weight in corner)
        result = result + rows.index_select(0, index.flatten()) * weight.reshape(-1, 1)
    return result.view(batch, *grid.shape[1:-1], channels).movedim(-1, 1).contiguous().to(input.dtype)


def embedding_bag(
    weight, indices, offsets, scale_grad_by_freq=False, mode=_SUM, sparse=False, per_sample_weights=None, include_last_offset=False, padding_idx=-1
):
    """Reduces the rows of each bag. The gradient of `weight` is dense, also if `sparse` is true."""
    indices, offsets = indices.long(), offsets.long()
    count, bags = indices.numel(), offsets.numel() - include_last_offset
    places = torch.arange(count, device=indices.device)
    bag = torch.bucketize(places, offsets[:bags], right=True) - 1
    kept = indices != padding_idx
    bag_sizes = torch.zeros_like(offsets[:bags]).index_add(0, bag, kept.long())
    rows = _wide(weight.index_select(0, indices))
    if scale_grad_by_freq:
        scaled = rows / torch.bincount(indices, minlength=weight.shape[0])[indices].unsqueeze(1)
        rows = rows.detach() + (scaled - scaled.detach())
    rows = rows.masked_fill(~kept.unsqueeze(1), 0)
    maxima = torch.zeros_like(bag_sizes)
    if mode == _MAX:
        found = rows.detach().masked_fill(~kept.unsqueeze(1), -math.inf)
        top = found.new_full((bags, weight.shape[1]), -math.inf).index_reduce(0, bag, found, "amax")
        first = kept.unsqueeze(1) & ((found == top.index_select(0, bag)) | found.isnan())
        # The position of each bag's first maximum; an empty bag selects a row of zeros after the last one.
        position = torch.full_like(top, count, dtype=torch.int64)
        position = position.index_reduce(0, bag, torch.where(first, places.unsqueeze(1), count), "amin")
        output = torch.cat([rows, rows.new_zeros(1, weight.shape[1])]).gather(0, position)
        maxima = torch.cat([indices, indices.new_zeros(1)])[position]
    else:
        rows = rows if per_sample_weights is None else rows * per_sample_weights.unsqueeze(1)
        output = rows.new_zeros(bags, weight.shape[1]).index_add(0, bag, rows)
        output = output / bag_sizes.clamp(min=1).unsqueeze(1) if mode == _MEAN else output
    return output.to(weight.dtype), bag, bag_sizes, maxima


COMPOSED = {
    "_embedding_bag": embedding_bag,
    "_embedding_bag_forward_only": embedding_bag,
    "grid_sampler_2d": grid_sampler,
    "grid_sampler_3d": grid_sampler,
}

_library = torch.library.Library("aten", "IMPL")


def install():
    """Registers the compositions for this device."""
    # Under `torch.inference_mode` the dispatcher skips the autograd keys.
    for name, function in COMPOSED.items():
        for key in ("AutogradPrivateUse1", "PrivateUse1"):
            _library.impl(name, function, key)
