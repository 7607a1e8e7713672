"""Linears that stay in floating point, behind the verb of the quantised ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from octofuse.nn.linear import EightBitLinear, weight_of
from octofuse.nn.norm import Norm, in_floating_point
from octofuse.nn.parted import Parted
from octofuse.nn.weight_only import PackedLinear
from octofuse.ops import quantize_per_tensor
from octofuse.ops.activations import Activation, activation_named


class FloatingLinear:
    """nn.Linear or Conv1D, in its own dtype, with `fused`: the parts one by one, in torch.

    The tensors are shared with the layer, unless `transposes`: a Conv1D's weight is then copied as `[N, K]`, once.
    """

    input_scale: Tensor | None = None

    def __init__(self, layer: nn.Module, *, transposes: bool = False) -> None:
        self.multiply: Callable[[Tensor], Tensor] = layer
        bias: Tensor | None = getattr(layer, "bias", None)
        self.bias = None if bias is None else bias.detach()
        if transposes:
            self.weight = weight_of(layer).contiguous()
            self.multiply = partial(linear, weight=self.weight, bias=self.bias)

    def fused(
        self,
        x: Tensor | Parted,
        *,
        norm: Norm | None = None,
        gate: Activation | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        """act(norm(x) @ weight^T + bias) + residual.

        Args:
            x: `[..., K]` in the layer's dtype.
            norm: in front.
            gate: an activation of the first half of x, `[..., 2K]`, that multiplies the other half: `gated_activation` in
                front, for which there is no norm.
            activation: None, "relu", "gelu", "gelu_tanh" or "silu".
            residual: floating point `[..., N]`.
            out_scale: fp32 `[]`: int8 output, for a layer that has it as its input_scale.

        Returns:
            `[..., N]` in x's dtype; int8 with out_scale.

        Raises:
            TypeError, ValueError: naming the argument; x of another K raises torch's own error.
        """
        activate = activation_named(activation)
        if not x.dtype.is_floating_point:
            raise TypeError(f"x: expected floating point, got dtype {x.dtype}")
        x = in_floating_point(x, norm, gate)
        if residual is not None and self._adds(x, residual, activation):
            y = torch.addmm(residual, x, self.weight.t())
        else:
            y = activate(self.multiply(x))
            if residual is not None:
                if residual.shape != y.shape:
                    raise ValueError(f"residual: expected shape {list(y.shape)}, got {list(residual.shape)}")
                y = (y + residual).to(y.dtype)
        return y if out_scale is None else quantize_per_tensor(y, out_scale)

    def _adds(self, x: Tensor, residual: Tensor, activation: Activation | None) -> bool:
        """Whether the product itself can add the residual."""
        if self.bias is not None or activation is not None or x.dim() != 2 or not hasattr(self, "weight"):
            return False
        return residual.dtype == x.dtype and residual.shape == (x.shape[0], self.weight.shape[0])


Fused = EightBitLinear | PackedLinear | FloatingLinear


def fused_layer(layer: nn.Module, *, transposes: bool = False) -> Fused:
    """The layer itself where it has the verb, else FloatingLinear around it."""
    if isinstance(layer, (EightBitLinear, PackedLinear)):
        return layer
    return FloatingLinear(layer, transposes=transposes)
