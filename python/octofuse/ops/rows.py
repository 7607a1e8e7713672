"""Norms and activations that hand their result over in 8 bits: one read, one write, no fp16 detour.

Every `*_quantize` function gives the bits of its parts: the plain function, whose result is rounded to x's dtype, and
behind it `quantize_per_token`, or `quantize_per_tensor` with the given scale. Sums run in a fixed order that depends on the
length of a row alone (`reference.row_sum`), so batch, stride and device do not change a bit of a norm; activations agree
within 1 ulp between devices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops._calls import LowbitCall, RowLinearCall, RowsCall, Scale, run
from octofuse.ops.activations import Activation


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    constants: bool = False,
    order: Tensor | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimension (Ba, Kiros and Hinton, 2016).

    Args:
        x: fp16, bf16 or fp32 `[..., K]`, dense in K.
        weight, bias: `[K]` in x's dtype or fp32, or None.
        eps: at least 0.
        constants: nothing in flight on the stream writes weight, bias or order: in a captured graph they may be read
            before earlier kernels have finished.
        order: as `reorder` takes it, of the result: with the bits of the two.

    Returns:
        `[..., K]` in x's dtype, computed in fp32.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> octofuse.layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    return _call("layer_norm", x, None, weight, bias, eps, constants=constants, order=order)[0]


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    constants: bool = False,
    order: Tensor | None = None,
) -> Tensor:
    """x / sqrt(mean of squares + eps) * weight over the last dimension (Zhang and Sennrich, 2019).

    Arguments, result and errors are those of `layer_norm`, without a bias.

    Examples:
        >>> octofuse.rms_norm(torch.tensor([[3.0, 3.0, 3.0]]), eps=0.0)
        tensor([[1., 1., 1.]])
    """
    return _call("rms_norm", x, None, weight, None, eps, constants=constants, order=order)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """h = x + residual, rounded to their dtype, and its layer norm, in one pass.

    Args:
        x, weight, bias, eps: as `layer_norm` takes them.
        residual: like x in shape and dtype.

    Returns:
        layer_norm(h) and h, both like x.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> y, h = octofuse.add_layer_norm(torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 2.0]]), eps=0.0)
        >>> y, h
        (tensor([[-1.,  1.]]), tensor([[1., 3.]]))
    """
    y, h = _call("layer_norm", x, residual, weight, bias, eps)
    return y, h


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` with `rms_norm` -> rms_norm(h) and h, both like x.

    Examples:
        >>> octofuse.add_rms_norm(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0]]), eps=0.0)
        (tensor([[1., 1.]]), tensor([[2., 2.]]))
    """
    y, h = _call("rms_norm", x, residual, weight, None, eps)
    return y, h


def activate(x: Tensor, activation: Activation) -> Tensor:
    """An activation of x -> x's dtype and shape, computed in fp32 and within 1 ulp of the exact function.

    Args:
        x: fp16, bf16 or fp32 `[..., K]`, dense in K.
        activation: "relu", "gelu" (erf), "gelu_tanh" (GPT-2's; Hendrycks and Gimpel, 2016) or "silu".

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> octofuse.activate(torch.tensor([-1.0, 2.0]), "relu")
        tensor([0., 2.])
    """
    return _call("activation", x, activation=activation)[0]


def gated_activation(
    x: Tensor, activation: Activation = "silu", *, constants: bool = False, order: Tensor | None = None
) -> Tensor:
    """activate(gates) * values of x `[..., 2K]`, gates first: the middle of a gated feed-forward (Shazeer, 2020).

    Arguments and errors are those of `activate`; constants, order: as in `layer_norm`. Returns `[..., K]`, each of the
    two steps rounded to x's dtype.

    Examples:
        >>> octofuse.gated_activation(torch.tensor([[2.0, -1.0, 10.0, 10.0]]), "relu")
        tensor([[20.,  0.]])
    """
    return _call("gated_activation", x, activation=activation, constants=constants, order=order)[0]


def reorder(x: Tensor, order: Tensor, *, constants: bool = False) -> Tensor:
    """Columns in another order: result[..., j] = x[..., order[j]], as linears with activation order read their input.

    Args:
        x: fp16, bf16 or fp32 `[..., K]`, dense in K.
        order: int32 `[K]`, on x's device, each column's number. Numbers outside of 0 to K - 1 read the last column: they
            are not looked at beforehand, which would take a synchronisation.
        constants: as in `layer_norm`, of order.

    Returns:
        `[..., K]`, like x.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> octofuse.reorder(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([2, 0, 1], dtype=torch.int32))
        tensor([[3., 1., 2.]])
    """
    return _call("reorder", x, constants=constants, order=order)[0]


def layer_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Scale | None = None,
    dtype: torch.dtype = torch.int8,
    block: bool = False,
) -> tuple[Tensor, Scale]:
    """`layer_norm`, quantised in the same pass.

    Args:
        x, weight, bias, eps: as `layer_norm` takes them.
        scale: fp32, one element, or a float above 0, for all rows; None: every row finds its own.
        dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2.
        block: every 128 columns of a row find a scale of their own; of float8, without `scale`.

    Returns:
        `dtype` like x; and the scale that was given, or fp32 `[M, 1]` for the M rows, with block
        `[M, ceil(K / 128)]`, dense in M. A value is q * scale.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> octofuse.layer_norm_quantize(torch.tensor([[1.0, 3.0]]), eps=0.0)
        (tensor([[-127,  127]], dtype=torch.int8), tensor([[0.0079]]))
    """
    q, used = _quantized("layer_norm", x, None, weight, bias, eps, scale=scale, q_dtype=dtype, q_block=block)
    return q, used


def rms_norm_quantize(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: Scale | None = None,
    dtype: torch.dtype = torch.int8,
    block: bool = False,
) -> tuple[Tensor, Scale]:
    """`rms_norm`, quantised in the same pass: `layer_norm_quantize` without a bias.

    Examples:
        >>> octofuse.rms_norm_quantize(torch.tensor([[2.0, -2.0]]), eps=0.0, scale=0.5)
        (tensor([[ 2, -2]], dtype=torch.int8), 0.5)
    """
    q, used = _quantized("rms_norm", x, None, weight, None, eps, scale=scale, q_dtype=dtype, q_block=block)
    return q, used


def add_layer_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Scale | None = None,
    dtype: torch.dtype = torch.int8,
    block: bool = False,
) -> tuple[Tensor, Scale, Tensor]:
    """`add_layer_norm`, quantised in the same pass -> `dtype` like x, its scale as in `layer_norm_quantize`, and h.

    Examples:
        >>> q, scale, h = octofuse.add_layer_norm_quantize(torch.ones(1, 2), torch.tensor([[0.0, 2.0]]), eps=0.0)
        >>> q, h
        (tensor([[-127,  127]], dtype=torch.int8), tensor([[1., 3.]]))
    """
    q, used, h = _quantized("layer_norm", x, residual, weight, bias, eps, scale=scale, q_dtype=dtype, q_block=block)
    return q, used, h


def add_rms_norm_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    *,
    scale: Scale | None = None,
    dtype: torch.dtype = torch.int8,
    block: bool = False,
) -> tuple[Tensor, Scale, Tensor]:
    """`add_rms_norm`, quantised in the same pass -> `dtype` like x, its scale as in `layer_norm_quantize`, and h.

    Examples:
        >>> q, scale, h = octofuse.add_rms_norm_quantize(torch.ones(1, 2), torch.ones(1, 2), eps=0.0)
        >>> q, h
        (tensor([[127, 127]], dtype=torch.int8), tensor([[2., 2.]]))
    """
    q, used, h = _quantized("rms_norm", x, residual, weight, None, eps, scale=scale, q_dtype=dtype, q_block=block)
    return q, used, h


def activate_quantize(
    x: Tensor,
    activation: Activation,
    *,
    scale: Scale | None = None,
    dtype: torch.dtype = torch.int8,
    block: bool = False,
) -> tuple[Tensor, Scale]:
    """`activate`, quantised in the same pass -> `dtype` like x, and its scale as in `layer_norm_quantize`.

    Examples:
        >>> octofuse.activate_quantize(torch.tensor([[-4.0, 2.0]]), "relu", scale=1.0)
        (tensor([[0, 2]], dtype=torch.int8), 1.0)
    """
    q, used = _quantized("activation", x, activation=activation, scale=scale, q_dtype=dtype, q_block=block)
    return q, used


def gated_activation_quantize(
    x: Tensor,
    activation: Activation = "silu",
    *,
    scale: Scale | None = None,
    dtype: torch.dtype = torch.int8,
    block: bool = False,
    constants: bool = False,
) -> tuple[Tensor, Scale]:
    """`gated_activation`, quantised in the same pass -> `dtype` `[..., K]`, and its scale as in `layer_norm_quantize`.

    constants: as in `layer_norm`, of a scale that is given.

    Examples:
        >>> octofuse.gated_activation_quantize(torch.tensor([[2.0, 3.0]]), "relu", scale=1.0)
        (tensor([[6]], dtype=torch.int8), 1.0)
    """
    q, used = _quantized(
        "gated_activation", x, activation=activation, scale=scale, q_dtype=dtype, q_block=block, constants=constants
    )
    return q, used


def quantized(x: Tensor, scale: Scale | None, dtype: torch.dtype, *, block: bool = False) -> Any:
    """Plain quantisation to any 8-bit type -> q, and the scales that it found or was given."""
    return _quantized("copy", x, scale=scale, q_dtype=dtype, q_block=block)


def _quantized(*arguments: Any, scale: Scale | None, **named: Any) -> Any:
    results = _call(*arguments, quantize=True, scale=scale, **named)
    if named.get("q_block"):
        results = [results[0], results[1].t(), *results[2:]]
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
    constants: bool = False,
    order: Tensor | None = None,
    q_dtype: torch.dtype = torch.int8,
    q_block: bool = False,
) -> list[Tensor]:
    call = RowsCall(x, op, residual, weight, bias, eps, activation, quantize, scale, constants, order, q_dtype, q_block)
    return by_call(call)


def by_call(call: RowsCall) -> list[Tensor]:
    """Of any of these functions: the result, scales that were found, and x + residual."""
    results: list[Tensor] = run("rows", call.op, call, _rows)
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
    affine = (call.norm_weight, call.norm_bias, call.eps)
    return _rows(RowsCall(call.x, str(call.norm), None, *affine, None, False, None, call.constant_weight))[0]


def gated(y: Tensor, activation: str | None, scale: Scale | None, *, constants: bool) -> Tensor:
    """Behind a linear, as an op of its own; int8 with a scale."""
    quantize = scale is not None
    return _rows(RowsCall(y, "gated_activation", None, None, None, 0.0, activation, quantize, scale, constants))[0]


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"rows": _rows}
