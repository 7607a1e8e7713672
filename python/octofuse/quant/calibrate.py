"""Observers that watch the inputs of layers while a model runs over sample batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.quant.histogram import Histogram


class AmaxObserver:
    """Running maximum of |x| over everything that a layer was given (min/max calibration of a symmetric scale).

    per_channel: one maximum for each element of the last dimension. samples: rows to keep, a quarter of them from one
    input at most. histogram: count magnitudes as well. moments: the sum of x x^T, fp32 [K, K], too.
    """

    def __init__(
        self,
        name: str,
        *,
        per_channel: bool = False,
        samples: int = 0,
        histogram: bool = False,
        moments: bool = False,
    ) -> None:
        self.name = name
        self.keeps_moments = moments
        self.moments: Tensor | None = None
        self.per_channel = per_channel
        self.histogram = Histogram() if histogram else None
        self.amax: Tensor | None = None
        self.wanted, self.at_once = samples, -(-samples // 4)
        self.samples: list[Tensor] = []

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0].detach()
        if x.numel() == 0:
            return
        rows = x.reshape(-1, x.shape[-1])
        amax = (rows.abs().amax(dim=0) if self.per_channel else x.abs().amax()).float()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        if self.keeps_moments:
            values = rows.float()
            products = values.t() @ values
            self.moments = products if self.moments is None else self.moments.add_(products)
        if self.histogram is not None and bool(torch.isfinite(amax).all()):  # result() reports what is not
            self.histogram.add(rows)
        if self.wanted > 0:
            count = min(self.wanted, self.at_once, rows.shape[0])
            self.samples.append(rows[:: rows.shape[0] // count][:count].clone())
            self.wanted -= count

    def result(self) -> Tensor:
        """fp32 [], or [K] per channel; ValueError naming the layer if it saw nothing or saw NaN or Inf."""
        if self.amax is None:
            raise ValueError(f"{self.name}: calibration never ran this layer; give batches that reach it")
        if not torch.isfinite(self.amax).all():
            raise ValueError(f"{self.name}: calibration saw NaN or Inf in this layer's input")
        return self.amax


@torch.no_grad()
def observe(
    layers: Mapping[str, nn.Module],
    batches: Iterable[Any],
    run: Callable[[Any], Any],
    *,
    per_channel: bool = False,
    samples: int = 0,
    histogram: bool = False,
    moments: Collection[str] = (),
) -> dict[str, AmaxObserver]:
    """Run every batch, once, and return each layer's observer.

    Args: layers by name; batches, any iterable; run, called with each batch (usually the model); per_channel, samples
    and histogram as AmaxObserver takes them; moments: the layers that keep them.
    Raises ValueError if there is no batch.
    """
    observers = {
        name: AmaxObserver(name, per_channel=per_channel, samples=samples, histogram=histogram, moments=name in moments)
        for name in layers
    }
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
    return observers


CLIPS = tuple(i / 20 for i in range(4, 21))  # of the calibrated maximum, what clipped_amax tries


@torch.no_grad()
def clipped_amax(x: Tensor, w: Tensor, amax: Tensor) -> Tensor:
    """The part of amax, fp32 [], that loses least when it is the int8 range of a layer's input.

    Args: x [M, K], sample inputs of the layer; w [N, K], its weight; amax [], the calibrated max |x|.
    The loss is the mean squared error of x @ w^T: an outlier that the weight hardly reads may be clipped.
    """
    losses = range_losses(x, w, [amax * clip for clip in CLIPS])
    return amax * CLIPS[int(torch.stack(losses).argmin())]


def range_losses(x: Tensor, w: Tensor, ranges: Sequence[Tensor]) -> list[Tensor]:
    """The mean squared error of x @ w^T, x [M, K] and w [N, K], with each of these fp32 [] as x's int8 range."""
    rows, weight = x.float(), w.float()
    want = rows @ weight.t()
    losses = []
    for most in ranges:
        step = (most / 127).clamp(min=1e-20)
        losses.append(((rows / step).round_().clamp_(-127, 127).mul_(step) @ weight.t()).sub_(want).square_().mean())
    return losses


def calibrate(layers: Mapping[str, nn.Module], batches: Iterable[Any], run: Callable[[Any], Any]) -> dict[str, Tensor]:
    """Each layer's input amax (fp32 [], on the input's device) over all batches.

    Raises ValueError if there is no batch, or a layer saw nothing, NaN or Inf.
    """
    return {name: observer.result() for name, observer in observe(layers, batches, run).items()}
