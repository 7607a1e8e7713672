"""Linear layers whose weight and activations have 8 bits, int8 or float8, and whose epilogue is fused."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from octofuse.nn.frozen import FrozenLinear
from octofuse.nn.gradient import multiplied
from octofuse.nn.norm import Norm, check_one_in_front, in_front
from octofuse.nn.parted import Parted
from octofuse.ops import (
    gated_activation_quantize,
    linear,
    quantize_per_block,
    quantize_per_tensor,
    quantize_per_token,
    quantized_linear,
)
from octofuse.ops._calls import Scale
from octofuse.ops.activations import Activation
from octofuse.quant.affine import BLOCK, Scheme, quantize_weight, spread_blocks, tensor_scale

Layer = TypeVar("Layer", bound="EightBitLinear")


class EightBitLinear(FrozenLinear):
    """y = act(x @ weight^T + bias) with 8-bit operands; its tensors are frozen, x may have a gradient.

    Parameters, without a gradient: weight `[N, K]` in `values`; bias fp32, fp16 or bf16 `[N]` if there is one. Buffers:
    weight_scale fp32 `[N]`, `[1]` or of blocks `[ceil(N / 128), ceil(K / 128)]`; input_scale fp32 `[]` for static
    activations. Input and output are fp16, bf16 or fp32 `[..., K]` and `[..., N]`, in the input's dtype. `engine` goes to
    `linear` unchanged.
    """

    values: ClassVar[torch.dtype]
    fast_accumulate = False

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
        self.scheme = scheme or type(self).default_scheme()
        if self.scheme.dtype != self.values:
            raise ValueError(f"scheme: expected one of {self.values}, got {self.scheme.name}")
        self.activation = activation
        self.engine = "auto"
        blocks = (-(-out_features // BLOCK), -(-in_features // BLOCK))
        scales = {"channel": (out_features,), "tensor": (1,), "block": blocks}[self.scheme.weights]
        static = self.scheme.is_static
        self._register_frozen("weight", torch.zeros(out_features, in_features, dtype=self.values, device=device))
        # Named: inside transformers' from_pretrained the default dtype is the model's.
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.register_buffer("weight_scale", torch.ones(scales, **fp32))
        self.register_buffer("input_scale", torch.ones((), **fp32) if static else None)
        self._register_frozen("bias", torch.zeros(out_features, dtype=dtype, device=device) if bias else None)

    @classmethod
    @abstractmethod
    def default_scheme(cls) -> Scheme: ...

    @classmethod
    def from_float(
        cls: type[Layer], layer: nn.Module, scheme: Scheme | None = None, input_amax: Tensor | None = None
    ) -> Layer:
        """Quantise an nn.Linear (weight `[N, K]`) or a transformers Conv1D (weight `[K, N]`, transposed once here).

        input_amax: fp32 `[]`, the calibrated max |x|; needed by static schemes alone.
        Raises TypeError for other layers, ValueError for missing or non-finite calibration and for non-finite weights.
        """
        scheme = scheme or cls.default_scheme()
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
            result.input_scale = tensor_scale(input_amax.to(w.device), cls.values)
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
        if self.weight_scale.dim() == 2:
            spread = spread_blocks(self.weight_scale, self.out_features, self.in_features)
            return dy @ (self.weight.float() * spread).to(dy.dtype)
        scaled = (dy * self.weight_scale).to(dy.dtype)
        return scaled @ self.weight.to(dy.dtype)

    def product(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self.engine == "auto":
            return self.fused(x, activation=self.activation)
        scale: Any = self.input_scale
        if self.weight_scale.dim() == 2:
            q, scale = quantize_per_block(x, self.values)
        elif scale is None:
            q, scale = quantize_per_token(x, self.values)
        else:
            q = quantize_per_tensor(x, scale, self.values)
        return linear(
            q, self.weight, scale, self.weight_scale, self.bias, activation=self.activation, out_dtype=x.dtype,
            engine=self.engine, fast_accumulate=self.fast_accumulate, constant_weight=True,
        )  # fmt: skip

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
        """act(norm(x) @ weight^T * scales + bias) + residual: `ops.quantized_linear` with this layer's tensors.

        Args:
            x: floating point `[..., K]`, dense in K; or this layer's 8 bits, which the layer before has written with its
                input_scale.
            norm: in front.
            gate: an activation of the first half of x, `[..., 2K]`, that multiplies the other half: `gated_activation` in
                front, for which there is no norm.
            activation: None, "relu", "gelu", "gelu_tanh" or "silu"; the layer's own, and its engine, belong to forward().
            residual: floating point `[..., N]`.
            out_scale: fp32 `[]`: output in this layer's 8 bits, for a layer of the same that has it as its input_scale.

        Returns:
            `[..., N]` in x's dtype; for 8-bit x in the residual's, else the bias's, else fp16; in 8 bits with out_scale.

        Raises:
            TypeError, ValueError: naming the argument.
        """
        out_dtype = x.dtype
        if out_dtype == self.values:
            like = residual if residual is not None else self.bias
            out_dtype = torch.float16 if like is None else like.dtype
        scale: Scale | None = self.input_scale
        blocks = self.weight_scale.dim() == 2
        if isinstance(x, Parted):
            found = None if blocks else x.quantised(norm, scale, self.values)
            if found is None:
                x = x.whole()
            else:
                (x, scale), norm = found, None
        if gate is not None:
            check_one_in_front(norm, gate)
            x, scale = gated_activation_quantize(x, gate, scale=scale, constants=True, dtype=self.values, block=blocks)
        if out_scale is not None:
            out_dtype = self.values if self.values != torch.int8 else out_dtype
        return quantized_linear(
            x, self.weight, self.weight_scale, self.bias, x_scale=scale, activation=activation, residual=residual,
            out_dtype=out_dtype, out_scale=out_scale, constant_weight=True, fast_accumulate=self.fast_accumulate,
            **in_front(norm),
        )  # fmt: skip

    def _apply(self, fn, recurse=True):  # type: ignore[no-untyped-def]
        """model.half() and model.to(dtype) reach the bias alone: scales are fp32 by definition, the weight has 8 bits."""
        scales = {"weight_scale": self.weight_scale, "input_scale": self.input_scale}
        if self.weight.is_floating_point():
            self.weight = self.weight.detach().view(torch.int8)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:  # what fails half-way must not leave numbers that mean something else
            if self.weight.dtype != self.values:
                self.weight = self.weight.detach().view(self.values)
        for name, before in scales.items():
            after = getattr(self, name)
            if after is not None and after.dtype != torch.float32 and before is not None:
                setattr(self, name, before.to(after.device))
        return self

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme.name}"


class Int8Linear(EightBitLinear):
    """int8 operands: exact sums, so that every engine, batch and device gives the same bits."""

    values = torch.int8

    @classmethod
    def default_scheme(cls) -> Scheme:
        """w8a8-dynamic."""
        return Scheme()


class Float8Linear(EightBitLinear):
    """e4m3 operands. fast_accumulate: of `linear`; set False for sums in fp32, which scales of blocks always have."""

    values = torch.float8_e4m3fn

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.fast_accumulate = self.scheme.weights != "block"

    @classmethod
    def default_scheme(cls) -> Scheme:
        """fp8-dynamic."""
        return Scheme(values="float8")


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
