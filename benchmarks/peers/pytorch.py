"""torch's own kernels. Only fp16 is compared with in words; none of them does the work of a family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from octofuse.ops.quantize import quantize_per_token
from peers.layer import E4M3, GROUP, Kernel, Layer

FP16 = "fp16 F.linear"


def load() -> None:
    """Always here."""


def kernels(family: str) -> list[Kernel]:
    found = [Kernel(FP16, "fp16", half_weight, lambda x, w: linear(x, w), compared=False)]
    if family == "w8a8":
        found += [
            Kernel("fp8 _scaled_mm by row", "e4m3", float8_weight, by_row, tolerance=4e-2, compared=False),
            Kernel(
                "fp8 _scaled_mm by tensor", "e4m3", float8_weight, by_tensor, tolerance=float("inf"), compared=False
            ),
        ]
    if family == "w4a16":
        found.append(Kernel("tinygemm, bf16", "bf16", tinygemm_weight, tinygemm, tolerance=1.5e-2, compared=False))
    return found


def half_weight(layer: Layer) -> tuple[Any, ...]:
    return (layer.dequantized(layer.half).half(),)


def float8_weight(layer: Layer) -> tuple[Any, ...]:
    codes, scale = quantize_per_token(layer.dequantized(layer.half).half(), E4M3)
    return codes, scale.view(1, -1), torch.ones((), device=codes.device)


def by_row(x: tuple[Tensor, Tensor], w: Tensor, scale: Tensor, _: Tensor) -> Tensor:
    return torch._scaled_mm(x[0], w.t(), x[1], scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def by_tensor(x: tuple[Tensor, Tensor], w: Tensor, _: Tensor, one: Tensor) -> Tensor:
    """Without the tokens' and the channels' scales, which it does not have: what comes out is not compared."""
    return torch._scaled_mm(x[0], w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def tinygemm_weight(layer: Layer) -> tuple[Any, ...]:
    pairs = (layer.codes[:, ::2] << 4 | layer.codes[:, 1::2]).contiguous()
    scales = torch.stack([layer.scale.t(), torch.zeros_like(layer.scale.t())], -1).bfloat16().contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs, 8), scales


def tinygemm(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
    if x.shape[0] > 256:
        raise NotImplementedError("for up to 256 tokens")
    return torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, scales)
