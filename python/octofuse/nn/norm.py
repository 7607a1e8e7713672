"""A norm in front of a linear."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from octofuse import ops


class Norm(NamedTuple):
    """A norm over the last dimension; kind: "layer_norm" or "rms_norm"; weight and bias `[K]`, or None."""

    kind: str
    weight: Tensor | None
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: nn.Module) -> Norm:
        """The tensors of an nn.LayerNorm or nn.RMSNorm over one dimension, shared. Raises TypeError for other modules."""
        shape = getattr(module, "normalized_shape", ())
        if not isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or len(shape) != 1:
            raise TypeError(f"module: expected nn.LayerNorm or nn.RMSNorm over the last dimension, got {module}")
        weight, bias = module.weight, getattr(module, "bias", None)
        eps = module.eps
        if eps is None:  # as torch has it
            eps = torch.finfo(torch.float32 if weight is None else weight.dtype).eps
        kind = "layer_norm" if isinstance(module, nn.LayerNorm) else "rms_norm"
        return cls(kind, None if weight is None else weight.detach(), None if bias is None else bias.detach(), eps)

    def __call__(self, x: Tensor) -> Tensor:
        """The norm of x, floating point `[..., K]`, in its dtype; the same bits on every device.

        Raises TypeError or ValueError for an unknown kind, int8 x and other shapes.
        """
        if self.kind == "rms_norm":
            return ops.rms_norm(x, self.weight, self.eps)
        if self.kind == "layer_norm":
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        raise ValueError(f"norm: expected kind 'layer_norm' or 'rms_norm', got {self.kind!r}")

    def options(self) -> dict[str, Any]:
        """As `quantized_linear` and `woq_linear` take it."""
        return {"norm": self.kind, "norm_weight": self.weight, "norm_bias": self.bias, "eps": self.eps}


def check_is_norm(norm: Norm | None) -> None:
    """Raises TypeError for anything but a Norm and None."""
    if norm is not None and not isinstance(norm, Norm):
        raise TypeError(f"norm: expected octofuse.nn.Norm or None, got {type(norm).__name__}")


def in_front(norm: Norm | None) -> dict[str, Any]:
    """How an op is asked for the norm, if there is one."""
    check_is_norm(norm)
    return {} if norm is None else norm.options()
