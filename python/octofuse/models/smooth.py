"""SmoothQuant and AWQ on a model: the scales of linears, and their folding into them and into what produces their input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from octofuse.models.blocks import Source
from octofuse.nn.linear import is_conv1d
from octofuse.quant import AmaxObserver, AnyScheme, Scheme, awq_scales, search_alpha, smoothing_scales


def scales_of(w: Tensor, observer: AmaxObserver, alpha: float | Literal["search"] | None) -> Tensor:
    """One scale, fp32 `[K]`, for each input channel that `observer` saw; None smooths nothing.

    w: `[N, K]`, the weights of all linears that read this input.
    """
    w, act_amax = w.float(), observer.result()
    if alpha is None:
        return torch.ones_like(act_amax)
    if alpha == "search":
        alpha = search_alpha(torch.cat(observer.samples), w, act_amax)
    return smoothing_scales(act_amax, w.abs().amax(dim=0), alpha)


def scales_for(w: Tensor, observer: AmaxObserver, scheme: AnyScheme) -> Tensor:
    """The same, as a scheme asks for them."""
    if isinstance(scheme, Scheme):
        return scales_of(w, observer, scheme.smoothing)
    samples = torch.cat(observer.samples)
    return awq_scales(samples, w, scheme.bits, scheme.group, zero_points=scheme.zero_points, zero=scheme.zero)


def folded(model: nn.Module, sources: Sequence[Source]) -> list[Tensor]:
    """The parameters, or views of them, that `fold` changes."""
    linears = [model.get_submodule(name) for source in sources for name in source.linears]
    weights: list[Tensor] = [layer.weight for layer in linears]  # type: ignore[misc]
    return [*(t for source in sources for t in source.tensors), *weights]


@torch.no_grad()
def fold(model: nn.Module, sources: Sequence[Source], scales: Sequence[Tensor]) -> None:
    """Divide what each source produces by its scales and multiply the input channels of its linears by them.

    The model computes the same function, within the rounding of its own dtype.
    """
    for source, s in zip(sources, scales, strict=True):
        for i, tensor in enumerate(source.tensors):
            offset = source.offset if i == 0 else 0.0
            tensor.copy_((tensor.float() + offset) / s - offset)
        for name in source.linears:
            layer = model.get_submodule(name)
            weight: Tensor = layer.weight  # type: ignore[assignment]
            weight.copy_(weight.float() * (s.unsqueeze(1) if is_conv1d(layer) else s))
