"""Two models beside each other: what quantisation costs, and in which layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div

from octofuse.models.evaluate import scored_windows
from octofuse.nn import QUANTISED


@dataclass(frozen=True)
class Comparison:
    """Over the same tokens: both perplexities, agreement, divergence, and the error of every quantised layer.

    Attributes:
        perplexity, reference_perplexity: of the model and of the reference.
        top1: share of positions where both find the same token likeliest.
        kl: mean KL divergence of the model's distribution from the reference's, in nats a position.
        sqnr: dB by layer name, in the model's order: signal over noise of the layer's output in the running model, so
            it holds what earlier layers have added. A layer far below its neighbours is a bad one; inf: equal outputs.
    """

    perplexity: float
    reference_perplexity: float
    top1: float
    kl: float
    sqnr: dict[str, float]

    @property
    def cost(self) -> float:
        """What quantisation adds to the perplexity, as a share of it."""
        return self.perplexity / self.reference_perplexity - 1


@torch.no_grad()
def compare(
    model: nn.Module,
    reference: nn.Module,
    tokens: Tensor,
    *,
    context: int,
    stride: int | None = None,
    batch: int = 4,
    layers: bool = True,
    on_window: Callable[[int, int], None] | None = None,
) -> Comparison:
    """Run both models over `scored_windows` of tokens, int64 [T], once.

    Args:
        model: a causal language model that `quantize_` has changed.
        reference: the one it was made of, on any device.
        layers: without them any two models of one vocabulary may be compared, and there is no sqnr.

    Raises ValueError if they are not made alike, or nothing is quantised.
    """
    pairs = _pairs(model, reference) if layers else {}
    devices = [next(iter(m.parameters())).device for m in (model, reference)]
    sums = {name: [0.0, 0.0] for name in pairs}
    totals = [0.0] * 4  # negative log likelihoods of both, KL, agreeing positions
    count = 0
    batches = scored_windows(tokens, context, stride, batch)
    for index, (window, first) in enumerate(batches):
        with _outputs({name: pair[0] for name, pair in pairs.items()}) as found:
            logits = model(window.to(devices[0])).logits[:, first - 1 : -1].float().flatten(0, 1)
        with _outputs({name: pair[1] for name, pair in pairs.items()}) as wanted:
            other = reference(window.to(devices[1])).logits[:, first - 1 : -1].float().flatten(0, 1)
        for name, pair in sums.items():
            want = wanted[name].float()
            pair[0] += float(want.square().sum())
            pair[1] += float((found[name].to(want.device).float() - want).square().sum())
        targets = window[:, first:].flatten()
        logits = logits.to(other.device)
        for place, value in enumerate(_terms(logits, other, targets.to(other.device))):
            totals[place] += value
        count += targets.numel()
        if on_window is not None:
            on_window(index + 1, len(batches))
    mine, theirs, kl, agreeing = (total / count for total in totals)
    return Comparison(math.exp(mine), math.exp(theirs), agreeing, kl, {n: _decibels(*pair) for n, pair in sums.items()})


def _terms(logits: Tensor, other: Tensor, targets: Tensor) -> tuple[float, float, float, float]:
    return (
        float(cross_entropy(logits, targets, reduction="sum")),
        float(cross_entropy(other, targets, reduction="sum")),
        float(kl_div(logits.log_softmax(-1), other.log_softmax(-1), reduction="sum", log_target=True)),
        float((logits.argmax(-1) == other.argmax(-1)).sum()),
    )


def _decibels(signal: float, noise: float) -> float:
    if noise == 0.0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def _pairs(model: nn.Module, reference: nn.Module) -> dict[str, tuple[nn.Module, nn.Module]]:
    modules = dict(reference.named_modules())
    pairs = {name: (m, modules.get(name)) for name, m in model.named_modules() if isinstance(m, QUANTISED)}
    if not pairs:
        raise ValueError("model: expected a model that quantize_ has changed, got one without quantised layers")
    for name, (_, other) in pairs.items():
        if other is None or isinstance(other, QUANTISED):
            got = "no such layer" if other is None else "one that is quantised too"
            raise ValueError(f"reference: expected a floating-point layer {name}, got {got}")
    return pairs  # type: ignore[return-value]


@contextmanager
def _outputs(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """What each layer gives while the context lasts."""
    found: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, inputs: Any, output: Tensor) -> None:
            found[name] = output

        return keep

    handles = [layer.register_forward_hook(keeper(name)) for name, layer in layers.items()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
