"""The gradient of a frozen linear with respect to its input: for training beside quantised layers, as LoRA does."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor


class Frozen(Protocol):
    """A layer whose tensors never change."""

    def product(self, x: Tensor) -> Tensor:
        """The layer's outputs, without a gradient."""

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dy `[..., N]` -> `[..., K]`, as if the layer multiplied by the weight that its codes stand for."""


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Frozen) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        return layer.product(x)

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.layer.input_gradient(dy), None


def multiplied(layer: Frozen, x: Tensor) -> Tensor:
    """layer.product(x), with a gradient where x asks for one."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return layer.product(x)
    y: Tensor = _Product.apply(x, layer)  # type: ignore[no-untyped-call]
    return y
