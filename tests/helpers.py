"""Operands for the linear ops, and the engines that this machine can run."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import octofuse

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass
class Operands:
    """One problem on one device; values keep |t| and |residual| below 16."""

    x: Tensor
    w: Tensor
    x_scale: Tensor
    w_scale: Tensor
    bias: Tensor
    residual: Tensor


def int8(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)


def operands(m: int, n: int, k: int, device: str = "cpu", seed: int = 0) -> Operands:
    g = torch.Generator().manual_seed(seed * 1000003 + m * 7919 + n * 104729 + k)
    # An accumulator's standard deviation is about 74^2 * sqrt(k): scales that make t about 2.
    spread = 2.0 / (74.0**2 * k**0.5)
    made = Operands(
        x=int8((m, k), g),
        w=int8((n, k), g),
        x_scale=torch.rand(m, 1, generator=g) + 0.25,
        w_scale=(torch.rand(n, generator=g) + 0.25) * spread,
        bias=torch.randn(n, generator=g),
        residual=torch.randn(m, n, generator=g).to(torch.float16),
    )
    return Operands(**{name: tensor.to(device) for name, tensor in vars(made).items()})


def served(call, engine: str):
    """call(engine), or None where the engine declines with its reason (never for another error)."""
    try:
        return call(engine)
    except ValueError as error:
        assert str(error).startswith("engine: expected one that can serve this call"), error
        return None


def engines(device: str) -> tuple[str, ...]:
    return octofuse.engines(device)
