"""Scales for a linear's input channels that a low-bit weight rounds best with (AWQ, Lin et al. 2023, arXiv:2306.00978).

Channels in which activations are large matter more: their columns of the weight are multiplied by more than 1 before they
are rounded, and what produces the activations is divided by as much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octofuse.quant.grid import quantize_rows

POWERS = tuple(i / 20 for i in range(21))  # of the mean magnitude of a channel; 0 scales nothing


@torch.no_grad()
def awq_scales(
    x: Tensor, w: Tensor, bits: int, group: int | None, *, zero_points: bool = False, zero: int | None = None
) -> Tensor:
    """The scales, fp32 `[K]`, of the power that loses least in x @ w^T; no worse on x than none at all.

    Args:
        x: `[M, K]`, inputs of the layer. w: `[N, K]`. bits, group, zero_points, zero: as in `quant.grid.quantize_rows`.

    Raises:
        ValueError: for x and w of different K, or x that is not finite.
    """
    if x.dim() != 2 or x.shape[1] != w.shape[1] or not torch.isfinite(x).all():
        raise ValueError(f"x: expected finite [M, {w.shape[1]}], got shape {list(x.shape)}")
    rows, weight = x.float(), w.float()
    magnitude = rows.abs().mean(0).clamp(min=1e-5)
    best, least = torch.ones_like(magnitude), float("inf")
    for power in POWERS:
        scales = magnitude**power
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        found = quantize_rows(weight * scales, bits, group, zero_points=zero_points, zero=zero, search=True)
        loss = float((rows @ (found.dequantized() / scales - weight).t()).square().mean())
        if loss < least:
            best, least = scales, loss
    return best
