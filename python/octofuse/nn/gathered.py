"""Linears of a parallel model: a rank has some of the outputs, and other ranks have the others.

Every rank multiplies whole rows of the input by its part of the weight. So an output is the sum that one device alone
would make, whatever the number of ranks; what is split between them by the linear in front is gathered first.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from octofuse.nn.floating import Fused, fused_layer
from octofuse.nn.linear import EightBitLinear
from octofuse.nn.norm import Norm, check_one_in_front
from octofuse.ops import gated_activation, gated_activation_quantize, quantize_per_tensor
from octofuse.ops.activations import Activation

Gather = Callable[[Tensor], Tensor]  # this rank's last dimension -> that of all, in the ranks' order


class GatheredLinear(nn.Module):
    """y = gather(layer(gather(x))), `[..., K]` or a part of it -> `[..., N]`.

    layer: with this rank's outputs; own: which they are. gather_input: None where x is whole already.
    """

    def __init__(self, layer: nn.Module, own: range, gather_output: Gather, gather_input: Gather | None = None) -> None:
        super().__init__()
        self.layer, self.own = layer, own
        self.gather_input, self.gather_output = gather_input, gather_output

    def forward(self, x: Tensor) -> Tensor:
        whole = x if self.gather_input is None else self.gather_input(x)
        return self.gather_output(self.layer(whole))

    def with_verb(self, *, transposes: bool = False) -> GatheredFused:
        """With `fused`, for the engine."""
        return GatheredFused(self, fused_layer(self.layer, transposes=transposes))


class GatheredFused:
    """`fused` of a GatheredLinear."""

    def __init__(self, around: GatheredLinear, inner: Fused) -> None:
        self.around, self.inner = around, inner
        self.input_scale = inner.input_scale

    def fused(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        gate: Activation | None = None,
        activation: Activation | None = None,
        residual: Tensor | None = None,
        out_scale: Tensor | None = None,
    ) -> Tensor:
        """As the layer's own; x is this rank's part where the input is gathered, with gate this rank's gates and values;
        residual is whole."""
        check_one_in_front(norm, gate)
        gather = self.around.gather_input
        if gather is not None:
            x, gate = gather(self._in_front(x, gate, residual)), None
        own = self.around.own
        part = None if residual is None else residual[..., own.start : own.stop].contiguous()
        y = self.inner.fused(x, norm=norm, gate=gate, activation=activation, residual=part, out_scale=out_scale)
        return self.around.gather_output(y)

    def _in_front(self, x: Tensor, gate: Activation | None, residual: Tensor | None) -> Tensor:
        """What is sent: of a layer with a static scale 8 bits, if the residual says which dtype its output has."""
        layer, scale = self.inner, self.input_scale
        if isinstance(layer, EightBitLinear) and scale is not None and residual is not None and x.dtype != layer.values:
            if gate is None:
                return quantize_per_tensor(x, scale, layer.values)
            return gated_activation_quantize(x, gate, scale=scale, constants=True, dtype=layer.values)[0]
        return x if gate is None else gated_activation(x, gate, constants=True)


AnyFused = Fused | GatheredFused


def verb_of(layer: nn.Module, *, transposes: bool = False) -> AnyFused:
    """`fused_layer`, for parallel models too."""
    if isinstance(layer, GatheredLinear):
        return layer.with_verb(transposes=transposes)
    return fused_layer(layer, transposes=transposes)


def inner_of(layer: AnyFused) -> Fused:
    """The layer itself, without what is gathered around it."""
    return layer.inner if isinstance(layer, GatheredFused) else layer
