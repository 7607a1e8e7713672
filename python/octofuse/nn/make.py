"""From a scheme to its layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octofuse.nn.delayed import DelayedFloat8Linear
from octofuse.nn.frozen import FrozenLinear
from octofuse.nn.linear import EightBitLinear, Float8Linear, Int8Linear, is_conv1d
from octofuse.nn.outliers import LLMInt8Linear
from octofuse.nn.two_level import TwoLevelLinear
from octofuse.nn.weight_only import BCQLinear, CodebookLinear, PackedLinear, Sparse12Linear, WeightOnlyLinear
from octofuse.quant import Scheme, WeightOnly

QUANTISED = (EightBitLinear, PackedLinear)
_PACKED: dict[str, Any] = {
    "grid": WeightOnlyLinear, "bcq": BCQLinear, "sparse12": Sparse12Linear, "nf4": CodebookLinear, "fp4": CodebookLinear,
    "e4m3": CodebookLinear, "two_level": TwoLevelLinear,
}  # fmt: skip


def eight_bit_class(scheme: Scheme) -> type[EightBitLinear]:
    """The layer of a scheme."""
    if scheme.outliers is not None:
        return LLMInt8Linear
    if scheme.activations == "history":
        return DelayedFloat8Linear
    return Int8Linear if scheme.values == "int8" else Float8Linear


def quantised_layer(
    layer: nn.Module, scheme: Scheme | WeightOnly, *, amax: Tensor | None = None, moments: Tensor | None = None
) -> nn.Module:
    """The layer that stands for an nn.Linear or Conv1D; amax and moments: what calibration found, where it is needed."""
    made: FrozenLinear
    if isinstance(scheme, Scheme):
        made = eight_bit_class(scheme).from_float(layer, scheme, amax)
    else:
        made = _PACKED[scheme.code].from_float(layer, scheme, moments)
    made.is_conv1d = is_conv1d(layer)
    return made


def empty_layer(
    in_features: int, out_features: int, *, bias: bool, scheme: Scheme | WeightOnly, dtype: torch.dtype
) -> nn.Module:
    """A layer of this scheme whose tensors are yet to be filled."""
    if isinstance(scheme, Scheme):
        return eight_bit_class(scheme)(in_features, out_features, bias=bias, scheme=scheme, dtype=dtype)
    made: nn.Module = _PACKED[scheme.code](in_features, out_features, bias=bias, scheme=scheme, dtype=dtype)
    return made
