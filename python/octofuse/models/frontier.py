"""Mixed precision: a scheme for each kind of sub-layer, and the mixtures that nothing beats in size and perplexity."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from octofuse.models.evaluate import perplexity
from octofuse.models.quantize import quantize_, weight_bytes
from octofuse.nn import linear_layers, replace_module
from octofuse.quant import scheme_named

FLOAT = "float"  # a part that stays as it is
PARTS = {"attn": "*[aA]tt*", "mlp": "*"}  # attn, self_attn, attention, SelfAttention; and feed-forward


@dataclass(frozen=True)
class Mixture:
    """schemes: of each part. bytes: of the checkpoint. on_frontier: no other is as small and as good, and better in one."""

    schemes: Mapping[str, str]
    bytes: int
    perplexity: float
    on_frontier: bool = False

    @property
    def name(self) -> str:
        return ", ".join(f"{part} {scheme}" for part, scheme in self.schemes.items())


@torch.no_grad()
def frontier(
    model: nn.Module,
    tokens: Tensor,
    schemes: Sequence[str],
    *,
    context: int,
    stride: int | None = None,
    parts: Mapping[str, str] | None = None,
    calibration: Iterable[Any] | None = None,
    on_mixture: Callable[[int, int], None] | None = None,
) -> list[Mixture]:
    """Every mixture of `schemes` over `parts`, by size; the model stays as it is.

    Each layer is quantised once for each scheme, then len(schemes) ** len(parts) models are evaluated; a copy of the model
    and all of these layers are in memory at once.

    Args:
        model: a floating-point model that `quantize_` takes, in eval mode.
        tokens: int64 `[T]`; context, stride: as in `perplexity`.
        schemes: names that `quant.scheme_named` knows, without smoothing, or "float".
        parts: patterns of layer names by part; the first that matches counts, what none matches stays in floating point.
            None: attention and feed-forward.
        calibration: as in `quantize_`; read for every scheme that needs it.
        on_mixture: (done, all) reports progress.

    Raises:
        ValueError: for schemes or parts that cannot be mixed.
    """
    parts = dict(PARTS if parts is None else parts)
    layers = linear_layers(model)
    members = _members(layers, parts)
    _check(schemes)
    batches = None if calibration is None else list(calibration)
    built = {scheme: _layers_of(model, layers, members, scheme, batches) for scheme in schemes}
    mixed = copy.deepcopy(model)
    mixtures = []
    choices = list(itertools.product(schemes, repeat=len(parts)))
    for done, chosen in enumerate(choices):
        of_parts = dict(zip(parts, chosen, strict=True))
        for name, part in members.items():
            replace_module(mixed, name, built[of_parts[part]][name])
        found = perplexity(mixed, tokens, context=context, stride=stride)
        mixtures.append(Mixture(of_parts, weight_bytes(mixed), found))
        if on_mixture is not None:
            on_mixture(done + 1, len(choices))
    mixtures.sort(key=lambda one: (one.bytes, one.perplexity))
    return [replace(one, on_frontier=not any(_beats(other, one) for other in mixtures)) for one in mixtures]


def _beats(one: Mixture, other: Mixture) -> bool:
    """A perplexity that is NaN counts as infinite."""
    own, its = (math.inf if math.isnan(p) else p for p in (one.perplexity, other.perplexity))
    return one.bytes <= other.bytes and own <= its and (one.bytes < other.bytes or own < its)


def _members(layers: Mapping[str, nn.Module], parts: Mapping[str, str]) -> dict[str, str]:
    """The part of each layer that has one."""
    found = {}
    for name in layers:
        part = next((part for part, pattern in parts.items() if fnmatchcase(name, pattern)), None)
        if part is not None:
            found[name] = part
    empty = [f"{part}={pattern}" for part, pattern in parts.items() if part not in found.values()]
    if empty or not parts:
        raise ValueError(f"parts: expected patterns that match a layer, got {', '.join(empty) or 'none'}")
    return found


def _check(schemes: Sequence[str]) -> None:
    if isinstance(schemes, str) or not schemes or len(set(schemes)) != len(schemes):
        raise ValueError(f"schemes: expected different names, got {schemes!r}")
    for name in schemes:
        if name != FLOAT and scheme_named(name).smoothing is not None:
            raise ValueError(f"schemes: expected ones that leave the norms alone, got {name!r}")


def _layers_of(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    members: Mapping[str, str],
    scheme: str,
    batches: list[Any] | None,
) -> dict[str, nn.Module]:
    if scheme == FLOAT:
        return {name: layers[name] for name in members}
    others = {name: None for name in layers if name not in members}
    quantised = quantize_(copy.deepcopy(model), scheme, batches, exceptions=others, progress=False)
    return {name: quantised.get_submodule(name) for name in members}
