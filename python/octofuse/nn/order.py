"""Activation order folded away: the layers in front of a linear give their channels in the order that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.nn.linear import EightBitLinear
from octofuse.nn.weight_only import PackedLinear, WeightOnlyLinear
from octofuse.quant.packing import pack, row_parts, unpack


@torch.inference_mode(False)  # else their tensors could never be loaded into again
@torch.no_grad()
def fold_order_(before: Sequence[nn.Module], layer: nn.Module) -> None:
    """Exchange output channels of `before` in place, so that `layer` reads its input as it comes.

    What lies between must treat channels alike. A linear of twice as many channels holds two halves. Where a layer's kind
    does not allow it, everything stays as it is. The sums, and so the bits, are the same.
    """
    if not isinstance(layer, PackedLinear) or layer.order is None:
        return
    width, layers = layer.in_features, [_exchangeable(one) for one in before]
    if any(one is None or one.out_features not in (width, 2 * width) for one in layers):
        return
    for one in layers:
        halves = one.out_features // width
        _exchange(one, torch.cat([layer.order + half * width for half in range(halves)]))
    layer.order = None


def _exchangeable(layer: Any) -> Any:
    """The layer, or None."""
    if isinstance(layer, EightBitLinear) and layer.weight_scale.dim() == 2:
        return None  # channels of a block share a scale
    return layer if isinstance(layer, (WeightOnlyLinear, EightBitLinear)) or type(layer) is nn.Linear else None


def _exchange(layer: Any, order: Tensor) -> None:
    if type(layer) is nn.Linear:
        for parameter in layer.parameters():
            parameter.data = parameter.data[order]
        return
    if layer.bias is not None:
        layer.bias = layer.bias[order]
    if isinstance(layer, EightBitLinear):
        layer.weight = layer.weight.view(torch.int8)[order].view(layer.values)
        if layer.weight_scale.numel() > 1:
            layer.weight_scale = layer.weight_scale[order]
        return
    bits = layer.scheme.bits
    codes = unpack(layer.packed, bits, layer.out_features, layer.in_features)[order]
    layer.packed = torch.cat([pack(part, bits) for part in row_parts(codes)])
    layer.scale = layer.scale.index_select(1, order)
    if layer.zero is not None:
        layer.zero = layer.zero.index_select(1, order)
