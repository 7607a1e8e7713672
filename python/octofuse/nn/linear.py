"""Int8Linear: a linear layer whose weight and activations are int8 and whose epilogue is fused."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from octofuse.nn.frozen import FrozenLinear
from octofuse.nn.gradient import multiplied
from octofuse.nn.norm import Norm, check_one_in_front, in_front
from octofuse.ops import (
    gated_activation_quantize,
    i8f16_linear,
    quantize_per_tensor,
    quantize_per_token,
    quantized_linear,
)
from octofuse.ops._calls import Scale
from octofuse.ops.activations import Activation
from octofuse.quant.affine import Scheme, quantize_weight, tensor_scale


class Int8Linear(FrozenLinear):
    """y = act(x @ weight^T + bias) with int8 operands; its tensors are frozen, x may have a gradient.

    Parameters, without a gradient: weight int8 `[N, K]`; bias fp32, fp16 or bf16 `[N]` if there is one. Buffers:
    weight_scale fp32 `[N]` or `[1]`; input_scale fp32 `[]` for static activations. Input and output are fp16, bf16 or
    fp32 `[..., K]` and `[..., N]`, in the input's dtype. `engine` goes to `i8f16_linear` unchanged.
    """

    weight: Tensor
    weight_scale: Tensor
    input_scale: Tensor | None
    bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        scheme: Scheme | None = None,
        activation: Activation | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.scheme = scheme or Scheme()
        self.activation = activation
        self.engine = "auto"
        scales = out_features if self.scheme.weights == "channel" else 1
        static = self.scheme.is_static
        self._register_frozen("weight", torch.zeros(out_features, in_features, dtype=torch.int8, device=device))
        # Named: inside transformers' from_pretrained the default dtype is the model's.
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.register_buffer("weight_scale", torch.ones(scales, **fp32))
        self.register_buffer("input_scale", torch.ones((), **fp32) if static else None)
        self._register_frozen("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_float(cls, layer: nn.Module, scheme: Scheme | None = None, input_amax: Tensor | None = None) -> Int8Linear:
        """Quantise an nn.Linear (weight `[N, K]`) or a transformers Conv1D (weight `[K, N]`, transposed once here).

        input_amax: fp32 `[]`, the calibrated max |x|; needed by static schemes alone.
        Raises TypeError for other layers, ValueError for missing or non-finite calibration and for non-finite weights.
        """
        scheme = scheme or Scheme()
        w = weight_of(layer)
        bias = getattr(layer, "bias", None)
        n, k = w.shape
        result = cls(k, n, bias=bias is not None, scheme=scheme, dtype=w.dtype, device=w.device)
        result.weight, result.weight_scale = quantize_weight(w, scheme)
        if scheme.is_static:
            if input_amax is None:
                raise ValueError("input_amax: expected a calibrated value for static activations, got None")
            if not torch.isfinite(input_amax):
                raise ValueError(f"input_amax: expected a finite value, got {float(input_amax)}")
            result.input_scale = tensor_scale(input_amax.to(w.device))
        if bias is not None:
            result.bias = bias.detach().clone()
        result.train(layer.training)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """Of an x that requires it, with the gradient with respect to x (rounding counts as the identity)."""
        if self.activation is not None and x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"x: expected a tensor that needs no gradient beside activation {self.activation!r}")
        return multiplied(self, x)

    def input_gradient(self, dy: Tensor) -> Tensor:
        """dy `[..., N]` -> `[..., K]` in its dtype: (dy * weight_scale) @ weight."""
        scaled = (dy * self.weight_scale).to(dy.dtype)
        return scaled @ self.weight.to(dy.dtype)

    def product(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.engine == "auto":
            return self.fused(x, activation=self.activation)
        if self.input_scale is None:
            q, scale = quantize_per_token(x)
        else:
            q, scale = quantize_per_tensor(x, self.input_scale), self.input_scale
        return i8f16_linear(
            q, self.weight, scale, self.weight_scale, self.bias,
            activation=self.activation, out_dtype=x.dtype, engine=self.engine, constant_weight=True,
        )  # fmt: skip

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
        """act(norm(x) @ weight^T * scales + bias) + residual: `ops.quantized_linear` with this layer's tensors.

        Args:
            x: floating point `[..., K]`, dense in K; or int8, which the layer before has written with this one's
                input_scale.
            norm: in front.
            gate: an activation of the first half of x, `[..., 2K]`, that multiplies the other half: `gated_activation` in
                front, for which there is no norm.
            activation: None, "relu", "gelu", "gelu_tanh" or "silu"; the layer's own, and its engine, belong to forward().
            residual: floating point `[..., N]`.
            out_scale: fp32 `[]`: int8 output, for a layer that has it as its input_scale.

        Returns:
            `[..., N]` in x's dtype; for int8 x in the residual's, else the bias's, else fp16; int8 with out_scale.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        out_dtype = x.dtype
        if out_dtype == torch.int8:
            like = residual if residual is not None else self.bias
            out_dtype = torch.float16 if like is None else like.dtype
        scale: Scale | None = self.input_scale
        if gate is not None:
            check_one_in_front(norm, gate)
            x, scale = gated_activation_quantize(x, gate, scale=scale, constants=True)
        return quantized_linear(
            x, self.weight, self.weight_scale, self.bias, x_scale=scale, activation=activation, residual=residual,
            out_dtype=out_dtype, out_scale=out_scale, constant_weight=True, **in_front(norm),
        )  # fmt: skip

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """model.half() and model.to(dtype) reach the bias alone: the scales are fp32 by definition."""
        scales = {"weight_scale": self.weight_scale, "input_scale": self.input_scale}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, before in scales.items():
            after = getattr(self, name)
            if after is not None and after.dtype != torch.float32 and before is not None:
                setattr(self, name, before.to(after.device))
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme.name}"


def is_conv1d(layer: nn.Module) -> bool:
    """transformers' Conv1D, known by its name so that transformers need not be imported."""
    return type(layer).__name__ == "Conv1D" and type(layer).__module__.startswith("transformers.")


def weight_of(layer: nn.Module) -> Tensor:
    """The weight of nn.Linear or Conv1D as `[N, K]`; TypeError for other layers."""
    if not (isinstance(layer, nn.Linear) or is_conv1d(layer)):
        raise TypeError(f"layer: expected nn.Linear or transformers Conv1D, got {type(layer).__name__}")
    weight: Tensor = layer.weight.detach()  # type: ignore[assignment,operator]
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"weight: expected dtype float16, bfloat16 or float32, got {weight.dtype}")
    return weight if isinstance(layer, nn.Linear) else weight.t().contiguous()
