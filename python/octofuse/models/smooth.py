"""SmoothQuant and AWQ on a model: the scales of a linear, and their folding into it and into what produces its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from octofuse.nn.linear import is_conv1d, weight_of
from octofuse.quant import AmaxObserver, AnyScheme, Scheme, awq_scales, search_alpha, smoothing_scales


def scales_of(layer: nn.Module, observer: AmaxObserver, alpha: float | Literal["search"] | None) -> Tensor:
    """One scale, fp32 `[K]`, for each input channel of a linear whose inputs `observer` saw; None smooths nothing."""
    w, act_amax = weight_of(layer).float(), observer.result()
    if alpha is None:
        return torch.ones_like(act_amax)
    if alpha == "search":
        alpha = search_alpha(torch.cat(observer.samples), w, act_amax)
    return smoothing_scales(act_amax, w.abs().amax(dim=0), alpha)


def scales_for(layer: nn.Module, observer: AmaxObserver, scheme: AnyScheme) -> Tensor:
    """The same, as a scheme asks for them."""
    if isinstance(scheme, Scheme):
        return scales_of(layer, observer, scheme.smoothing)
    samples, w = torch.cat(observer.samples), weight_of(layer)
    return awq_scales(samples, w, scheme.bits, scheme.group, zero_points=scheme.zero_points)


@torch.no_grad()
def fold(
    producers: Mapping[str, Sequence[Tensor]], layers: Mapping[str, nn.Module], scales: Mapping[str, Tensor]
) -> None:
    """Divide what produces each linear's input by its scales and multiply the linear's input channels by them.

    The model computes the same function, within the rounding of its own dtype.
    """
    for name, s in scales.items():
        for tensor in producers[name]:
            tensor.copy_(tensor.float() / s)
        layer = layers[name]
        weight: Tensor = layer.weight  # type: ignore[assignment]
        weight.copy_(weight.float() * (s.unsqueeze(1) if is_conv1d(layer) else s))
