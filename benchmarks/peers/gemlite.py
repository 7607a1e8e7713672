"""gemlite's Triton kernels (0.6.0.post2), with its own results of tuning for the H100, at the shapes that those have."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peers.layer import GROUP, Kernel, Layer

TUNED = {(4096, 4096), (4096, 14336), (6144, 4096), (28672, 4096)}
MOST_TOKENS = 2048


def load() -> None:
    import gemlite

    gemlite.load_config(str(Path(gemlite.__file__).parent / "configs/h100.json"))


def kernels(family: str) -> list[Kernel]:
    if family == "w8a8":
        return [Kernel("gemlite quantised", "fp16", int8_weight, call, tolerance=2e-2, adds_bias=True)]
    if family == "w4a16":
        return [Kernel("gemlite", "fp16", int4_weight, call)]
    return []


def check(layer: Layer) -> None:
    if (layer.n, layer.k) not in TUNED:
        raise NotImplementedError("not among its tuned shapes; it would tune itself for seconds")


def int8_weight(layer: Layer) -> tuple[Any, ...]:
    from gemlite.helper import A8W8_INT8_dynamic

    check(layer)
    make = A8W8_INT8_dynamic(device="cuda", dtype=torch.float16)
    return (Module(make.from_weights(layer.codes.clone(), layer.bias, layer.scale.float().clone())),)


def int4_weight(layer: Layer) -> tuple[Any, ...]:
    from gemlite.helper import A16Wn

    check(layer)
    groups = layer.scale.reshape(-1, 1)
    zeros = torch.full_like(groups, layer.half)
    return (Module(A16Wn(device="cuda").from_weights(layer.codes.clone(), groups.clone(), zeros, 4, GROUP)),)


class Module:
    """A layer of gemlite's that can be copied as a tensor is, and never tunes itself."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.forward = layer.forward_auto_no_warmup

    def clone(self) -> Module:
        layer = copy.copy(self.layer)
        own = {name: torch.nn.Parameter(value.data.clone(), requires_grad=False)
               for name, value in self.layer._parameters.items() if value is not None}  # fmt: skip
        layer._parameters = dict(self.layer._parameters) | own
        return Module(layer)


def call(x: Tensor, module: Module) -> Tensor:
    if x.shape[0] > MOST_TOKENS:
        raise NotImplementedError(f"tuned for up to {MOST_TOKENS} tokens")
    return module.forward(x)
