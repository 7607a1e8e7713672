"""This library's kernels: alone, chained (each may start while the one before it runs), and behind a quantisation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

import octofuse
from octofuse.quant.packing import pack
from peers.layer import GROUP, Kernel, Layer, has_int8_tokens


def load() -> None:
    """Always here."""


def kernels(family: str) -> list[Kernel]:
    if not has_int8_tokens(family):
        bits = int(family[1])
        return both(Kernel("octofuse", "fp16", grid_weight, woq(bits, GROUP)))
    prepare, call = {
        "w8a8": (int8_weight, int8_linear),
        "w4a8": (grid_weight, woq(4, None)),
        "w4a8-g128": (two_level_weight, two_level),
    }[family]

    def quantised(x: Tensor, *weight: Any) -> Tensor:
        return call(octofuse.quantize_per_token(x), *weight)

    plain = Kernel("octofuse", "int8", prepare, call, adds_bias=family == "w8a8")
    return both(plain) + both(replace(plain, name="octofuse quantised", takes="fp16", call=quantised, tolerance=2e-2))


def both(kernel: Kernel) -> list[Kernel]:
    return [kernel, replace(kernel, name=f"{kernel.name}, chained", chained=True)]


def int8_weight(layer: Layer) -> tuple[Any, ...]:
    return layer.codes, layer.scale.float().view(-1), layer.bias


def int8_linear(x: tuple[Tensor, Tensor], w: Tensor, w_scale: Tensor, bias: Tensor) -> Tensor:
    return octofuse.i8f16_linear(x[0], w, x[1], w_scale, bias, constant_weight=True)


def grid_weight(layer: Layer) -> tuple[Any, ...]:
    return pack(layer.codes, layer.bits), layer.scale.t().contiguous()


def woq(bits: int, group: int | None) -> Callable[..., Tensor]:
    more: dict[str, Any] = {"bits": bits, "group": group, "constant_weight": True}

    zero = 1 << bits - 1  # the others' too: beside weights with more digits or fewer zeros a product takes more power

    def call(x: Any, packed: Tensor, scale: Tensor) -> Tensor:
        if isinstance(x, Tensor):
            return octofuse.woq_linear(x, packed, scale, zero, **more)
        return octofuse.woq_linear(x[0], packed, scale, zero, x_scale=x[1], **more)

    return call


def two_level_weight(layer: Layer) -> tuple[Any, ...]:
    assert layer.steps is not None
    channel = (layer.scale[:, :1].float() / layer.steps[:, :1]).half()
    return pack(layer.codes, 4), channel.t().contiguous(), (layer.steps + 256 * 8).t().contiguous()


def two_level(x: tuple[Tensor, Tensor], packed: Tensor, scale: Tensor, groups: Tensor) -> Tensor:
    return octofuse.two_level_linear(x[0], packed, scale, groups, group=GROUP, x_scale=x[1], constant_weight=True)
