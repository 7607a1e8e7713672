"""A norm in front of a linear."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import layer_norm

from octofuse import ops


class Norm(NamedTuple):
    """kind: "layer_norm"; weight and bias `[K]`."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        """An nn.LayerNorm's tensors, shared."""
        return cls("layer_norm", module.weight.detach(), module.bias.detach(), module.eps)

    def __call__(self, x: Tensor) -> Tensor:
        """On the CPU torch's own norm, as in the float model: `ops.layer_norm`, with a GPU's bits, would take a third of a
        decoding step there."""
        if x.is_cuda:
            return ops.layer_norm(x, self.weight, self.bias, self.eps)
        return layer_norm(x, (x.shape[-1],), self.weight, self.bias, self.eps)

    def options(self) -> dict[str, Any]:
        """As `quantized_linear` and `woq_linear` take it."""
        return {"norm": self.kind, "norm_weight": self.weight, "norm_bias": self.bias, "eps": self.eps}
