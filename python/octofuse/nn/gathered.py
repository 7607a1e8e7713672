"""Linears of a parallel model.

GatheredLinear: a rank has some of the outputs, and other ranks have the others. Every rank multiplies whole rows of the
input by its part of the weight. So an output is the sum that one device alone would make, whatever the number of ranks;
what is split between them by the linear in front is gathered first. SummedLinear: a rank has some of the inputs, and what
all ranks make of theirs is added: half as many exchanges, and sums whose order depends on the number of ranks.
"""

from __future__ import annotations

from torch import Tensor, nn

from octofuse.nn.floating import Fused, fused_layer
from octofuse.nn.norm import Norm, check_one_in_front
from octofuse.nn.parted import Joint, Parted, whole
from octofuse.ops.activations import Activation


class GatheredLinear(nn.Module):
    """y = gather(layer(gather(x))), `[..., K]` or a part of it -> `[..., N]`.

    layer: with this rank's outputs; own: which they are. gather_input: None where x is whole already.
    """

    def __init__(self, layer: nn.Module, own: range, gather_output: Joint, gather_input: Joint | None = None) -> None:
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
    """`fused` of a GatheredLinear, but that its result is gathered by who reads it."""

    def __init__(self, around: GatheredLinear, inner: Fused) -> None:
        self.around, self.inner = around, inner
        self.input_scale = inner.input_scale

    def fused(
        self,
        x: Tensor | Parted,
        *,
        norm: Norm | None = None,
        gate: Activation | None = None,
        activation: Activation | None = None,
        residual: Tensor | Parted | None = None,
        out_scale: Tensor | None = None,
    ) -> Parted:
        """As the layer's own; x is this rank's part where the input is gathered, with gate this rank's gates and values;
        residual is whole, or this layer's columns of it are this rank's part."""
        check_one_in_front(norm, gate)
        if (gather := self.around.gather_input) is not None:
            assert isinstance(x, Tensor)
            x, gate = Parted(x, gather, gate=gate), None
        y = self.inner.fused(
            x, norm=norm, gate=gate, activation=activation, residual=self._own(residual), out_scale=out_scale
        )
        return Parted(y, self.around.gather_output)

    def _own(self, residual: Tensor | Parted | None) -> Tensor | None:
        if isinstance(residual, Parted):
            if residual.joint == self.around.gather_output:
                return residual.part
            residual = residual.whole()
        own = self.around.own
        return None if residual is None else residual[..., own.start : own.stop].contiguous()


class SummedLinear(nn.Module):
    """y = the sum over all ranks of layer(x), `[..., this rank's part of K]` -> `[..., N]`.

    layer: with this rank's inputs, and on one rank alone the bias. is_first: of that rank, which adds a residual as well.
    """

    def __init__(self, layer: nn.Module, joint: Joint, *, is_first: bool) -> None:
        super().__init__()
        self.layer, self.joint, self.is_first = layer, joint, is_first

    def forward(self, x: Tensor) -> Tensor:
        return self.joint(self.layer(x))

    def with_verb(self, *, transposes: bool = False) -> SummedFused:
        """With `fused`, for the engine."""
        return SummedFused(self, fused_layer(self.layer, transposes=transposes))


PARALLEL = (GatheredLinear, SummedLinear)


class SummedFused:
    """`fused` of a SummedLinear, whose result is added up by who reads it."""

    input_scale: Tensor | None = None  # 8 bits of the layer in front would not say which dtype the sums have

    def __init__(self, around: SummedLinear, inner: Fused) -> None:
        self.around, self.inner = around, inner

    def fused(self, x: Tensor, *, gate: Activation | None = None, residual: Tensor | Parted | None = None) -> Parted:
        """As the layer's own; x is this rank's part, with gate this rank's gates and values; residual: whole."""
        added = None if residual is None else whole(residual)  # on every rank: it may have to be joined
        part = self.inner.fused(x, gate=gate, residual=added if self.around.is_first else None)
        return Parted(part, self.around.joint)


Exchanging = GatheredFused | SummedFused
AnyFused = Fused | Exchanging


def verb_of(layer: nn.Module, *, transposes: bool = False) -> AnyFused:
    """`fused_layer`, for parallel models too."""
    if isinstance(layer, PARALLEL):
        return layer.with_verb(transposes=transposes)
    return fused_layer(layer, transposes=transposes)


def inner_of(layer: AnyFused) -> Fused:
    """The layer itself, without what ranks exchange around it."""
    return layer.inner if isinstance(layer, (GatheredFused, SummedFused)) else layer
