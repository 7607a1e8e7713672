"""LLM.int8() as a layer."""

from __future__ import annotations

from torch import Tensor

from octofuse.nn.linear import Int8Linear
from octofuse.nn.norm import Norm, in_floating_point
from octofuse.nn.parted import Parted
from octofuse.ops import llm_int8_linear, quantize_per_tensor
from octofuse.ops.activations import Activation
from octofuse.quant.affine import OUTLIERS, Scheme


class LLMInt8Linear(Int8Linear):
    """int8 operands but for the columns of x with an outlier: `ops.llm_int8_linear` with this layer's tensors."""

    @classmethod
    def default_scheme(cls) -> Scheme:
        """llm-int8."""
        return Scheme(outliers=OUTLIERS)

    def product(self, x: Tensor) -> Tensor:
        if self.engine != "auto":
            raise ValueError(f"engine: expected 'auto' for llm-int8, got {self.engine!r}")
        return self.fused(x.contiguous(), activation=self.activation)

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
        """As `Int8Linear.fused`; norm, gate and activation are ops of their own."""
        y = llm_int8_linear(
            in_floating_point(x, norm, gate), self.weight, self.weight_scale, self.bias,
            threshold=self.scheme.outliers or OUTLIERS, activation=activation, residual=residual, constant_weight=True,
        )  # fmt: skip
        return y if out_scale is None else quantize_per_tensor(y, out_scale)
