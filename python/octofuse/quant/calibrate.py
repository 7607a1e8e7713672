"""Observers that watch the inputs of layers while a model runs over sample batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class AmaxObserver:
    """Running maximum of |x| over everything that a layer was given (min/max calibration of a symmetric scale)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.amax: Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].detach()
        if x.numel() == 0:
            return
        amax = x.abs().amax().float()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)

    def result(self) -> Tensor:
        """fp32 []; ValueError naming the layer if it saw nothing or saw NaN or Inf."""
        if self.amax is None:
            raise ValueError(f"{self.name}: calibration never ran this layer; give batches that reach it")
        if not torch.isfinite(self.amax):
            raise ValueError(f"{self.name}: calibration saw NaN or Inf in this layer's input")
        return self.amax


@torch.no_grad()
def calibrate(layers: Mapping[str, nn.Module], batches: Iterable[Any], run: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Run every batch and return each layer's input amax (fp32 [], on the input's device).

    Args: layers by name; batches, any iterable; run, called with each batch (usually the model).
    Raises ValueError if there is no batch, or a layer saw nothing, NaN or Inf.
    """
    observers = {name: AmaxObserver(name) for name in layers}
    handles = [layer.register_forward_pre_hook(observers[name]) for name, layer in layers.items()]
    count = 0
    try:
        for batch in batches:
            run(batch)
            count += 1
    finally:
        for handle in handles:
            handle.remove()
    if count == 0:
        raise ValueError("calibration: expected at least one batch, got none")
    return {name: observer.result() for name, observer in observers.items()}
