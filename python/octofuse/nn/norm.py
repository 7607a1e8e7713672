"""A norm in front of a linear."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octofuse import ops
from octofuse.nn.parted import Parted
from octofuse.ops.activations import Activation

_UNKNOWN = "norm: expected kind 'layer_norm' or 'rms_norm', got {!r}"


class Norm(NamedTuple):
    """A norm over the last dimension; kind: "layer_norm" or "rms_norm"; weight and bias `[K]`, or None."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module, offset: float = 0.0) -> Norm:
        """The tensors of a norm over the last dimension, shared: nn.LayerNorm, nn.RMSNorm, one of transformers' RMSNorms.

        offset: what the module adds to its weight; the sum is then a copy in fp32. Raises TypeError for other modules.
        """
        transformers_own = type(module).__name__.endswith("RMSNorm") and isinstance(module.weight, Tensor)
        rms = isinstance(module, nn.RMSNorm) or transformers_own
        layer = isinstance(module, nn.LayerNorm)
        if not (rms or layer) or len(getattr(module, "normalized_shape", (0,))) != 1:
            raise TypeError(f"module: expected nn.LayerNorm or an RMSNorm over the last dimension, got {module}")
        weight: Any = module.weight
        bias: Any = getattr(module, "bias", None)
        if offset != 0.0:
            weight = weight.detach().float() + offset
        eps: Any = getattr(module, "variance_epsilon", None) or module.eps
        if eps is None:  # as torch has it
            eps = torch.finfo(torch.float32 if weight is None else weight.dtype).eps
        kind = "layer_norm" if layer else "rms_norm"
        return cls(kind, None if weight is None else weight.detach(), None if bias is None else bias.detach(), eps)

    def __call__(self, x: Tensor, *, constants: bool = False, order: Tensor | None = None) -> Tensor:
        """The norm of x, floating point `[..., K]`, in its dtype; the same bits on every device.

        constants: nothing in flight writes its tensors; order: of the result's columns (`ops.layer_norm` has both).

        Raises TypeError or ValueError for an unknown kind, int8 x and other shapes.
        """
        if self.kind == "rms_norm":
            return ops.rms_norm(x, self.weight, self.eps, constants=constants, order=order)
        if self.kind == "layer_norm":
            return ops.layer_norm(x, self.weight, self.bias, self.eps, constants=constants, order=order)
        raise ValueError(_UNKNOWN.format(self.kind))

    def in_int8(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm of x as int8 `[..., K]`, and the scale of each token, fp32 `[M, 1]`; raises what the norm does."""
        found: Any
        if self.kind == "rms_norm":
            found = ops.rms_norm_quantize(x, self.weight, self.eps)
        elif self.kind == "layer_norm":
            found = ops.layer_norm_quantize(x, self.weight, self.bias, self.eps)
        else:
            raise ValueError(_UNKNOWN.format(self.kind))
        return found  # type: ignore[no-any-return]

    def options(self) -> dict[str, Any]:
        """As `quantized_linear` and `woq_linear` take it."""
        return {"norm": self.kind, "norm_weight": self.weight, "norm_bias": self.bias, "eps": self.eps}


def check_is_norm(norm: Norm | None) -> None:
    """Raises TypeError for anything but a Norm and None."""
    if norm is not None and not isinstance(norm, Norm):
        raise TypeError(f"norm: expected octofuse.nn.Norm or None, got {type(norm).__name__}")


def check_one_in_front(norm: Norm | None, gate: str | None) -> None:
    if norm is not None and gate is not None:
        raise ValueError(f"gate: expected None beside a norm, got {gate!r}")


def in_floating_point(
    x: Tensor | Parted, norm: Norm | None, gate: Activation | None, order: Tensor | None = None
) -> Tensor:
    """What stands in front of a linear, as an op of its own. Its tensors must not change under a call.

    order: int32 `[K]` or None, of the result's columns (`ops.reorder`).
    """
    check_is_norm(norm)
    check_one_in_front(norm, gate)
    if isinstance(x, Parted):
        x, norm = x.floating(norm) if order is None else (x.whole(), norm)
    if gate is not None:
        return ops.gated_activation(x, gate, constants=True, order=order)
    if norm is not None:
        return norm(x, constants=True, order=order)
    return x if order is None else ops.reorder(x, order, constants=True)


def in_int8(
    x: Tensor | Parted, norm: Norm | None, gate: Activation | None, order: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`in_floating_point` as int8, and the scale of each token, fp32 `[M, 1]`."""
    check_is_norm(norm)
    check_one_in_front(norm, gate)
    if order is not None:  # of the columns: scales are the same in any
        x, norm, gate = in_floating_point(x, norm, gate, order), None, None
    if isinstance(x, Parted):
        if (found := x.quantised(norm, None, torch.int8)) is not None:
            return found  # type: ignore[return-value]
        x = x.whole()
    if gate is not None:
        return ops.gated_activation_quantize(x, gate, constants=True)  # type: ignore[return-value]
    return ops.quantize_per_token(x) if norm is None else norm.in_int8(x)


def in_front(norm: Norm | None) -> dict[str, Any]:
    """How an op is asked for the norm, if there is one."""
    check_is_norm(norm)
    return {} if norm is None else norm.options()
