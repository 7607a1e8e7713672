"""torch's own kernels: fp16, fp8, and its 4-bit one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from peers.layer import GROUP, Kernel, Layer


def load() -> None:
    """Always here."""


def kernels(family: str) -> list[Kernel]:
    found = [Kernel("fp16 F.linear", "fp16", half_weight, linear, compared=False)]
    if family == "w8a8":
        any_error = float("inf")
        found += [
            Kernel("fp8 _scaled_mm by row", "e4m3", row_weight, by_row, 4e-2, adds_bias=True, compared=False),
            Kernel("fp8 _scaled_mm by tensor", "e4m3", tensor_weight, by_tensor, any_error, compared=False),
        ]
    if family == "w4a16":
        found.append(Kernel("tinygemm, bf16", "bf16", tinygemm_weight, tinygemm, tolerance=1.5e-2))
    return found


def half_weight(layer: Layer) -> tuple[Any, ...]:
    return (layer.dequantized().half(),)


def row_weight(layer: Layer) -> tuple[Any, ...]:
    assert layer.bias is not None
    codes, scale = layer.float8()
    return codes, scale.view(1, -1), layer.bias.bfloat16()


def by_row(x: tuple[Tensor, Tensor], w: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return torch._scaled_mm(x[0], w.t(), x[1], scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True)


def tensor_weight(layer: Layer) -> tuple[Any, ...]:
    codes, _ = layer.float8()
    return codes, torch.ones((), device=codes.device)


def by_tensor(x: tuple[Tensor, Tensor], w: Tensor, one: Tensor) -> Tensor:
    """Without the tokens' and the channels' scales and the bias, which it does not take: its result is not compared."""
    return torch._scaled_mm(x[0], w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def tinygemm_weight(layer: Layer) -> tuple[Any, ...]:
    pairs = (layer.codes[:, ::2] << 4 | layer.codes[:, 1::2]).contiguous()
    scales = torch.stack([layer.scale.t(), torch.zeros_like(layer.scale.t())], -1).bfloat16().contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8), scales


def tinygemm(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    if x.shape[0] > 256:
        raise NotImplementedError("for up to 256 tokens")
    return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)
