"""A linear with some of its inputs alone: a summand of what the whole one gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.nn.linear import EightBitLinear, is_conv1d, weight_of
from octofuse.nn.rows import codes_of, packed_of
from octofuse.nn.weight_only import PackedLinear, Sparse12Linear
from octofuse.quant.affine import BLOCK


def cuts_columns(layer: nn.Module, columns: Sequence[range]) -> bool:
    """Whether every one of these runs of inputs can be a layer: none begins inside a group or block that shares a scale,
    and the layer wants its inputs in no order of its own."""
    if isinstance(layer, PackedLinear) and layer.order is not None:
        return False
    unit, count = _unit(layer), _inputs(layer)
    return all(run.start % unit == 0 and (run.stop % unit == 0 or run.stop == count) for run in columns)


def columns_of(layer: nn.Module, columns: range, *, bias: bool) -> nn.Module:
    """A layer of the same kind that multiplies these inputs alone, with the bias or without.

    layer: nn.Linear, Conv1D (which becomes an nn.Linear), EightBitLinear or PackedLinear; raises TypeError for others, and
    wants `cuts_columns`.
    """
    if isinstance(layer, nn.Linear) or is_conv1d(layer):
        made = _of_floats(layer, columns)
    elif isinstance(layer, EightBitLinear):
        made = _of_eight_bits(layer, columns)
    elif isinstance(layer, PackedLinear):
        made = _of_packed(layer, columns)
    else:
        raise TypeError(f"layer: expected a linear in floating point or of this library, got {type(layer).__name__}")
    given: Any = layer.bias
    made.bias = nn.Parameter(given.detach().clone(), requires_grad=False) if bias and given is not None else None
    return made.train(layer.training)  # type: ignore[no-any-return]


def _inputs(layer: Any) -> int:
    return layer.weight.shape[0] if is_conv1d(layer) else layer.in_features  # type: ignore[no-any-return]


def _unit(layer: Any) -> int:
    """Inputs that share something."""
    if isinstance(layer, EightBitLinear):
        return BLOCK if layer.weight_scale.dim() == 2 else 1
    if not isinstance(layer, PackedLinear):
        return 1
    pair = 2 if isinstance(layer, Sparse12Linear) else 1
    return math.lcm(layer.scheme.group or 1, pair)


def _taken(tensor: Tensor, columns: range, dim: int = 1) -> Tensor:
    """A copy: the whole must not stay in memory for it."""
    one_byte = tensor.element_size() == 1
    source = tensor.detach().view(torch.int8) if one_byte else tensor.detach()
    return source.narrow(dim, columns.start, len(columns)).contiguous().clone().view(tensor.dtype)


def _of_floats(layer: Any, columns: range) -> Any:
    weight = weight_of(layer)
    made = nn.Linear(len(columns), weight.shape[0], bias=False, device="meta")
    made.weight = nn.Parameter(_taken(weight, columns), requires_grad=False)
    return made


def _of_eight_bits(layer: Any, columns: range) -> Any:
    made: Any = type(layer)(
        len(columns), layer.out_features, bias=False, scheme=layer.scheme, activation=layer.activation, device="meta"
    )
    made.engine, made.fast_accumulate = layer.engine, layer.fast_accumulate
    made.weight = _taken(layer.weight, columns)
    scale = layer.weight_scale
    blocks = range(columns.start // BLOCK, -(-columns.stop // BLOCK))
    made.weight_scale = _taken(scale, blocks) if scale.dim() == 2 else scale.clone()
    made.input_scale = layer.input_scale
    if hasattr(layer, "amax_history"):
        made.amax_history = layer.amax_history.clone()
    return made


def _of_packed(layer: Any, columns: range) -> Any:
    made: Any = type(layer)(len(columns), layer.out_features, bias=False, scheme=layer.scheme, device="meta")
    of_code = 2 if isinstance(layer, Sparse12Linear) else 1  # columns
    codes = _taken(codes_of(layer), range(columns.start // of_code, -(-columns.stop // of_code)))
    made.packed = packed_of(layer, codes)
    group = layer.scheme.group
    for name, tensor in layer.named_buffers(recurse=False):
        if name == "order" or tensor is None:
            continue
        of_groups = group is not None and tensor.shape[0] == layer.groups
        groups = range(columns.start // group, -(-columns.stop // group)) if of_groups else None
        setattr(made, name, tensor.clone() if groups is None else _taken(tensor, groups, 0))
    return made
