"""Linears that stay in floating point, behind the verb of the quantised ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import linear

from octofuse.nn.linear import Int8Linear, weight_of
from octofuse.nn.norm import Norm
from octofuse.nn.weight_only import PackedLinear
from octofuse.ops import quantize_per_tensor
from octofuse.ops.activations import ACTIVATIONS


class FloatingLinear:
    """nn.Linear or Conv1D, in its own dtype, with `fused`: the parts one by one, in torch.

    The tensors are shared with the layer, unless `transposes`: a Conv1D's weight is then copied as `[N, K]`, once.
    """

    input_scale: Tensor | None = None

    def __init__(self, layer: nn.Module, *, transposes: bool = False) -> None:
        self.multiply: Callable[[Tensor], Tensor] = layer
        if transposes:
            bias = getattr(layer, "bias", None)
            self.weight = weight_of(layer).contiguous()
            self.multiply = partial(linear, weight=self.weight, bias=None if bias is None else bias.detach())

    def fused(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        activation: str | None = None,
        residual: Tensor | None = None,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        """act(norm(x) @ weight^T + bias) + residual; with out_scale quantised by it."""
        y = self.multiply(x if norm is None else norm(x))
        y = y if activation is None else ACTIVATIONS[activation](y)
        y = y if residual is None else y + residual
        return y if out_scale is None else quantize_per_tensor(y, out_scale)


Fused = Int8Linear | PackedLinear | FloatingLinear


def fused_layer(layer: nn.Module, *, transposes: bool = False) -> Fused:
    """The layer itself where it has the verb, else FloatingLinear around it."""
    if isinstance(layer, (Int8Linear, PackedLinear)):
        return layer
    return FloatingLinear(layer, transposes=transposes)
