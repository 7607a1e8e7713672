"""A norm in front of a linear."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

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
        """The norm of x, floating point `[..., K]`, in its dtype.

        On the CPU torch's own, as in the float model: `ops.layer_norm`, with a GPU's bits, would take a third of a
        decoding step there. Raises TypeError or ValueError for an unknown kind, int8 x and other shapes.
        """
        if self.kind not in ("layer_norm", "rms_norm"):
            raise ValueError(f"norm: expected kind 'layer_norm' or 'rms_norm', got {self.kind!r}")
        if x.is_cuda:
            if self.kind == "rms_norm":
                return ops.rms_norm(x, self.weight, self.eps)
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        if not x.is_floating_point():
            raise TypeError(f"x: expected floating point in front of a norm, got dtype {x.dtype}")
        for name, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None and tensor.shape != x.shape[-1:]:
                raise ValueError(f"norm: expected {name} of shape {list(x.shape[-1:])}, got {list(tensor.shape)}")
        if self.kind == "rms_norm":
            return functional.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def options(self) -> dict[str, Any]:
        """As `quantized_linear` and `woq_linear` take it."""
        return {"norm": self.kind, "norm_weight": self.weight, "norm_bias": self.bias, "eps": self.eps}


def check_is_norm(norm: Norm | None) -> None:
    """Raises TypeError for anything but a Norm and None."""
    if norm is not None and not isinstance(norm, Norm):
        raise TypeError(f"norm: expected octofuse.nn.Norm or None, got {type(norm).__name__}")


def in_front(norm: Norm | None, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """x, and how an op is asked for the norm: on the CPU it is a pass of its own, which has been done to x."""
    check_is_norm(norm)
    if norm is None:
        return x, {}
    return (x, norm.options()) if x.is_cuda else (norm(x), {})
