"""SmoothQuant on a model: which norm a linear reads, and the folding of its scales into both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from octofuse.nn.linear import is_conv1d, weight_of
from octofuse.quant import AmaxObserver, search_alpha, smoothing_scales


def scales_of(layer: nn.Module, observer: AmaxObserver, alpha: float | Literal["search"] | None) -> Tensor:
    """One scale, fp32 `[K]`, for each input channel of a linear whose inputs `observer` saw; None smooths nothing."""
    w, act_amax = weight_of(layer).float(), observer.result()
    if alpha is None:
        return torch.ones_like(act_amax)
    if alpha == "search":
        alpha = search_alpha(torch.cat(observer.samples), w, act_amax)
    return smoothing_scales(act_amax, w.abs().amax(dim=0), alpha)


@torch.no_grad()
def fold(norms: Mapping[str, nn.Module], layers: Mapping[str, nn.Module], scales: Mapping[str, Tensor]) -> None:
    """Divide each norm's weight and bias by its linear's scales and multiply the linear's input channels by them.

    The model computes the same function, within the rounding of its own dtype.
    """
    for name, s in scales.items():
        norm, layer = norms[name], layers[name]
        for parameter in norm.parameters():
            parameter.copy_(parameter.float() / s)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        weight.copy_(weight.float() * (s.unsqueeze(1) if is_conv1d(layer) else s))
