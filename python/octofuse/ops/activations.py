"""Activations by torch, in the tensor's own dtype: for layers in floating point, which run no kernel of this library."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_tanh": lambda y: gelu(y, approximate="tanh"),
    "silu": silu,
}


def activation_named(name: str | None) -> Callable[[Tensor], Tensor]:
    """The function, which for None changes nothing. Raises ValueError for other names."""
    if name is None:
        return lambda y: y
    if not isinstance(name, str) or name not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation: expected None, {known}, got {name!r}")
    return ACTIVATIONS[name]
