"""bitsandbytes' int8 linear (0.50.2): quantises the tokens itself; torch's product; a pass for the scales."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peers.layer import Kernel, Layer


def load() -> None:
    import bitsandbytes  # noqa: F401


def kernels(family: str) -> list[Kernel]:
    if family != "w8a8":
        return []
    return [Kernel("bitsandbytes quantised", "fp16", prepare, call, tolerance=2e-2, adds_bias=True)]


def prepare(layer: Layer) -> tuple[Any, ...]:
    return layer.codes, 127 * layer.scale.float().view(-1), layer.bias


def call(x: Tensor, w: Tensor, magnitude: Tensor, bias: Tensor) -> Tensor:
    from bitsandbytes.functional import int8_vectorwise_quant

    codes, of_tokens, _ = int8_vectorwise_quant(x)
    return torch.ops.bitsandbytes.int8_scaled_mm(codes, w, of_tokens, magnitude, bias=bias, dtype=torch.float16)
