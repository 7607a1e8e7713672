"""Linears that read the same input as one layer, whose weight theirs are views of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.nn.linear import EightBitLinear
from octofuse.nn.weight_only import PackedLinear
from octofuse.quant.affine import BLOCK
from octofuse.quant.packing import TILE_ROWS


def joined(layers: Sequence[nn.Module]) -> nn.Module | None:
    """One layer that gives the outputs of all side by side; None where their kinds or schemes do not allow it.

    The large tensors (weight, or packed codes) are put behind each other once and every layer gets its own back as a view,
    so that nothing lies in memory twice; joining the same layers again copies nothing. Scales and biases are copied.

    Args:
        layers: nn.Linear, EightBitLinear or PackedLinear, with the same in_features.
    """
    first: Any = layers[0]
    if any(type(layer) is not type(first) for layer in layers):
        return None
    if type(first) is nn.Linear:
        return _joined_floats(layers)
    if not isinstance(first, (EightBitLinear, PackedLinear)):
        return None
    if any(layer.scheme.name != first.scheme.name or layer.in_features != first.in_features for layer in layers):  # type: ignore[union-attr]
        return None
    return _joined_eight_bits(layers) if isinstance(first, EightBitLinear) else _joined_packed(layers)


def _joined_floats(layers: Sequence[Any]) -> nn.Module | None:
    first = layers[0]
    if any(layer.weight.dtype != first.weight.dtype for layer in layers):
        return None
    one = nn.Linear(first.in_features, sum(layer.out_features for layer in layers), bias=False, device="meta")
    one.weight = nn.Parameter(_stacked(layers, "weight"), requires_grad=False)
    bias = _joined_bias(layers)
    one.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)  # type: ignore[assignment]
    return one.train(first.training)


def _joined_eight_bits(layers: Sequence[Any]) -> nn.Module | None:
    first = layers[0]
    settings = {(layer.activation, layer.engine, layer.fast_accumulate) for layer in layers}
    if len(settings) > 1:
        return None
    if first.input_scale is not None and any(not torch.equal(layer.input_scale, first.input_scale) for layer in layers):
        return None  # of one input, but with ranges of their own
    history = getattr(first, "amax_history", None)  # of one input: they have seen the same
    if history is not None and any(not torch.equal(layer.amax_history, history) for layer in layers):
        return None
    blocks = first.scheme.weights == "block"
    if blocks and any(layer.out_features % BLOCK != 0 for layer in layers[:-1]):
        return None  # the next one would begin inside a block
    if blocks and any(layer.weight_scale.numel() == 1 for layer in layers):
        return None  # one scale for all is multiplied elsewhere than those of blocks
    one: EightBitLinear = type(first)(
        first.in_features, sum(layer.out_features for layer in layers), bias=False, scheme=first.scheme,
        activation=first.activation, device="meta",
    )  # fmt: skip
    one.engine, one.fast_accumulate = first.engine, first.fast_accumulate
    one.weight = _stacked(layers, "weight")
    one.weight_scale = torch.cat(
        [layer.weight_scale if blocks else layer.weight_scale.expand(layer.out_features) for layer in layers]
    )
    one.input_scale, one.bias = first.input_scale, _joined_bias(layers)
    if history is not None:
        one.amax_history = history.clone()
    return one.train(first.training)


def _joined_packed(layers: Sequence[Any]) -> nn.Module | None:
    if any(layer.out_features % TILE_ROWS != 0 for layer in layers[:-1]):
        return None  # the rows of the next one would begin inside a tile
    first = layers[0]
    if any(not _equal(layer.order, first.order) for layer in layers):
        return None
    one: nn.Module = type(first)(
        first.in_features, sum(layer.out_features for layer in layers), bias=False, scheme=first.scheme, device="meta"
    )
    for name, tensor in first.named_buffers(recurse=False):
        if name not in ("packed", "bias", "order") and tensor is not None:
            setattr(one, name, torch.cat([getattr(layer, name) for layer in layers], -1))
    one.packed, one.bias = _stacked(layers, "packed"), _joined_bias(layers)  # type: ignore[assignment]
    one.order = first.order
    return one.train(first.training)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _stacked(layers: Sequence[Any], name: str) -> Tensor:
    """The layers' tensors behind each other in memory, and views of that given to them."""
    tensors = [getattr(layer, name).detach() for layer in layers]
    sizes = [tensor.shape[0] for tensor in tensors]
    first: Tensor = tensors[0]
    if _follow_each_other(tensors):
        return first.as_strided((sum(sizes), first.shape[1]), first.stride())
    with torch.inference_mode(False), torch.no_grad():  # a tensor of inference mode could never be trained again
        eights = [tensor.view(torch.int8) if tensor.element_size() == 1 else tensor for tensor in tensors]
        whole = torch.cat(eights).view(first.dtype)  # not every torch joins float8
    for layer, tensor in zip(layers, whole.split(sizes), strict=True):
        own = getattr(layer, name)
        if not isinstance(own, nn.Parameter):
            setattr(layer, name, tensor)
        elif own.is_inference():
            setattr(layer, name, nn.Parameter(tensor, own.requires_grad))
        else:
            own.data = tensor  # it stays the one that an optimizer knows
    return whole


def _follow_each_other(tensors: Sequence[Tensor]) -> bool:
    storage = tensors[0].untyped_storage().data_ptr()
    at = tensors[0].storage_offset()
    for tensor in tensors:
        if (
            tensor.untyped_storage().data_ptr() != storage
            or tensor.storage_offset() != at
            or not tensor.is_contiguous()
        ):
            return False
        at += tensor.numel()
    return True


def _joined_bias(layers: Sequence[Any]) -> Tensor | None:
    biases = [layer.bias for layer in layers]
    given = next((bias for bias in biases if bias is not None), None)
    if given is None:
        return None
    rows = zip(layers, biases, strict=True)
    return torch.cat([given.new_zeros(layer.out_features) if bias is None else bias.detach() for layer, bias in rows])
