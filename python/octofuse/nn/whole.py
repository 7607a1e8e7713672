"""The inverse of `nn.rows`: one layer of those that have some of its outputs each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.nn.linear import EightBitLinear
from octofuse.nn.rows import blocks_of, codes_of, has_whole_tiles, packed_of
from octofuse.nn.weight_only import PackedLinear
from octofuse.quant.affine import BLOCK
from octofuse.quant.packing import packed_rows

Runs = Sequence[Sequence[range]]  # of each part: whose outputs it has, in its order


def whole_of(parts: Sequence[Any], runs: Runs) -> nn.Module:
    """The layer of which each part is `rows_of(layer, runs)`; together they have all of its outputs, some perhaps twice.

    Raises TypeError for other layers than `rows_of` makes.
    """
    first, count = parts[0], max(run.stop for own in runs for run in own)
    if isinstance(first, nn.Linear):
        made = _of_floats(parts, runs, count)
    elif isinstance(first, EightBitLinear):
        made = _of_eight_bits(parts, runs, count)
    elif isinstance(first, PackedLinear):
        made = _of_packed(parts, runs, count)
    else:
        raise TypeError(f"parts: expected linears of `rows_of`, got {type(first).__name__}")
    if first.bias is not None:
        made.bias = nn.Parameter(_placed([part.bias for part in parts], runs, count), requires_grad=False)
    return made.train(first.training)  # type: ignore[no-any-return]


def _placed(tensors: Sequence[Tensor], runs: Runs, count: int, dim: int = 0) -> Tensor:
    first = tensors[0].detach()
    shape = list(first.shape)
    shape[dim] = count
    whole = torch.empty(shape, dtype=first.dtype, device=first.device)
    seen = whole.view(torch.int8) if first.element_size() == 1 else whole  # not every torch copies float8
    for tensor, own in zip(tensors, runs, strict=True):
        source, at = tensor.detach().view(seen.dtype), 0
        for run in own:
            seen.narrow(dim, run.start, len(run)).copy_(source.narrow(dim, at, len(run)))
            at += len(run)
    return whole


def _of_floats(parts: Sequence[Any], runs: Runs, count: int) -> Any:
    weight, source = _placed([part.weight for part in parts], runs, count), parts[0].source
    if source is nn.Linear:
        made = nn.Linear(weight.shape[1], count, bias=False, device="meta")
    else:
        with torch.device("meta"):  # it would draw random numbers
            made = source(count, weight.shape[1])
        made.bias, weight = None, weight.t().contiguous()
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def _of_eight_bits(parts: Sequence[Any], runs: Runs, count: int) -> Any:
    first = parts[0]
    made: Any = type(first)(
        first.in_features, count, bias=False, scheme=first.scheme, activation=first.activation, device="meta"
    )
    made.engine, made.fast_accumulate = first.engine, first.fast_accumulate
    made.is_conv1d = first.is_conv1d
    made.weight = _placed([part.weight for part in parts], runs, count)
    scales = [part.weight_scale for part in parts]
    if first.scheme.weights == "block" and count > BLOCK:
        blocks = [blocks_of(own, count) for own in runs]
        made.weight_scale = _placed(scales, blocks, max(run.stop for own in blocks for run in own))
    elif first.scheme.weights == "channel":
        made.weight_scale = _placed(scales, runs, count)
    else:
        made.weight_scale = scales[0].clone()
    made.input_scale = first.input_scale
    if hasattr(first, "amax_history"):
        made.amax_history = first.amax_history.clone()
    return made


def _of_packed(parts: Sequence[Any], runs: Runs, count: int) -> Any:
    first = parts[0]
    made: Any = type(first)(first.in_features, count, bias=False, scheme=first.scheme, device="meta")
    made.is_conv1d = first.is_conv1d
    if all(has_whole_tiles(own, count) for own in runs):
        tiles = [[range(run.start, packed_rows(run.stop)) for run in own] for own in runs]
        made.packed = _placed([part.packed for part in parts], tiles, packed_rows(count))
    else:
        made.packed = packed_of(first, _placed([codes_of(part) for part in parts], runs, count))
    for name, tensor in first.named_buffers(recurse=False):
        if name != "order" and tensor is not None:
            dim = tensor.dim() - 1
            setattr(made, name, _placed([getattr(part, name) for part in parts], runs, count, dim))
    made.order = first.order
    return made
