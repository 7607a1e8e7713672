"""Norms and activations that hand their result over as int8: one read, one write, no fp16 detour.

Every `*_quantize` function gives the bits of its parts: the plain function of this module, whose result is rounded to x's
dtype, and `quantize_per_token` (or, with `scale`, `quantize_per_tensor`) behind it. Sums have a fixed order that depends
on the length of a row alone (`reference.row_sum`), so batch, stride and device do not change a bit of a norm;
activations agree within 1 ulp between devices.

x is fp16, bf16 or fp32 `[..., K]`, dense in K; weight and bias are `[K]` in x's dtype or fp32. Bad arguments raise
TypeError or ValueError naming the argument. With `scale` (one fp32 element or a float above 0) that scale is used and
returned; else every row gets its own: `[M, 1]`, M being the product of the leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from octofuse import _C
from octofuse.ops._calls import LowbitCall, RowLinearCall, RowsCall, Scale, run
from octofuse.ops.activations import Activation


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension, in fp32 -> x's dtype."""
    return _call("layer_norm", x, None, weight, bias, eps)[0]


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight over the last dimension, in fp32 -> x's dtype."""
    return _call("rms_norm", x, None, weight, None, eps)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """h = x + residual, rounded to their dtype -> layer_norm(h), h."""
    y, h = _call("layer_norm", x, residual, weight, bias, eps)
    return y, h


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """h = x + residual, rounded to their dtype -> rms_norm(h), h."""
    y, h = _call("rms_norm", x, residual, weight, None, eps)
    return y, h


def activate(x: Tensor, activation: Activation) -> Tensor:
    """ "relu", "gelu" (erf), "gelu_tanh" or "silu" of x -> x's dtype."""
    return _call("activation", x, activation=activation)[0]


def gated_activation(x: Tensor, activation: Activation = "silu") -> Tensor:
    """x `[..., 2K]`, gates first -> activate(gates) * the rest, `[..., K]`, each step rounded to x's dtype."""
    return _call("gated_activation", x, activation=activation)[0]


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Scale | None = None,
) -> tuple[Tensor, Scale]:
    """`layer_norm`, quantised -> int8 like x, and its scale."""
    q, used = _quantized("layer_norm", x, None, weight, bias, eps, scale=scale)
    return q, used


def rms_norm_quantize(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, scale: Scale | None = None
) -> tuple[Tensor, Scale]:
    """`rms_norm`, quantised -> int8 like x, and its scale."""
    q, used = _quantized("rms_norm", x, None, weight, None, eps, scale=scale)
    return q, used


def add_layer_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Scale | None = None,
) -> tuple[Tensor, Scale, Tensor]:
    """`add_layer_norm`, quantised -> int8 like x, its scale, and h."""
    q, used, h = _quantized("layer_norm", x, residual, weight, bias, eps, scale=scale)
    return q, used, h


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, scale: Scale | None = None
) -> tuple[Tensor, Scale, Tensor]:
    """`add_rms_norm`, quantised -> int8 like x, its scale, and h."""
    q, used, h = _quantized("rms_norm", x, residual, weight, None, eps, scale=scale)
    return q, used, h


def activate_quantize(x: Tensor, activation: Activation, *, scale: Scale | None = None) -> tuple[Tensor, Scale]:
    """`activate`, quantised -> int8 like x, and its scale."""
    q, used = _quantized("activation", x, activation=activation, scale=scale)
    return q, used


def gated_activation_quantize(
    x: Tensor, activation: Activation = "silu", *, scale: Scale | None = None
) -> tuple[Tensor, Scale]:
    """`gated_activation` (SiLU-and-multiply by default), quantised -> int8 `[..., K]`, and its scale."""
    q, used = _quantized("gated_activation", x, activation=activation, scale=scale)
    return q, used


def _quantized(*arguments: Any, scale: Scale | None, **named: Any) -> Any:
    results = _call(*arguments, quantize=True, scale=scale, **named)
    return results if scale is None else (results[0], scale, *results[1:])


def _call(
    op: str,
    x: Tensor,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 0.0,
    *,
    activation: str | None = None,
    quantize: bool = False,
    scale: Scale | None = None,
) -> list[Tensor]:
    call = RowsCall(x, op, residual, weight, bias, eps, activation, quantize, scale)
    results: list[Tensor] = run("rows", op, call, _rows)
    return results


def _rows(call: RowsCall) -> list[Tensor]:
    return _C.rows(call)


def check_norm(norm: str | None, weight: Tensor | None, bias: Tensor | None) -> None:
    """ValueError for an unknown norm, and for a weight or bias that it does not have."""
    if norm not in (None, "layer_norm", "rms_norm"):
        raise ValueError(f"norm: expected None, 'layer_norm' or 'rms_norm', got {norm!r}")
    if norm != "layer_norm" and bias is not None:
        raise ValueError(f"norm_bias: expected None with norm={norm!r}, got a tensor")
    if norm is None and weight is not None:
        raise ValueError("norm_weight: expected None without a norm, got a tensor")


def normed(call: LowbitCall | RowLinearCall) -> Tensor:
    """The norm in front of a linear, as an op of its own."""
    return _rows(RowsCall(call.x, str(call.norm), None, call.norm_weight, call.norm_bias, call.eps, None, False, None))[
        0
    ]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"rows": _rows}
