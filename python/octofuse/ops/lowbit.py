"""Linears whose weights have 1 to 8 bits and whose activations are in floating point, or int8 with a scale each.

fp16 and bf16 run kernels that read the packed weight. Up to 4 tokens, compute capability 8.0 and later: a token's 128
columns share a power of two and become 16-bit integers, whose products with the codes are exact; sums of groups are in
fp32. That changes a value by at most 2^-14 of the largest of its 128, where fp16 itself rounds that one by up to 2^-12.
Up to N * K / 2^17 tokens, but at least 256 and at most 1,024, compute capability 9.0: weights are rounded once to x's
dtype and multiplied on its tensor cores (planes: half as many, at most 512; 128 where N <= 1,920 and K > 1,920). That
needs N to be a multiple of 8, with zero points of 16; it is free where a row is one group (of one plane). x is copied
where its rows do not start at multiples of 16 bytes.

int8 activations: up to 4 tokens as they are, exactly; more as numbers of the scale's dtype, which hold them (a copy).

More tokens, fp32 activations, other chips, and groups other than 32, 64 and 128 times a power of two multiply a weight
that is dequantised for the call; on the CPU all of it is torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from octofuse import _C
from octofuse.ops._guard import as_tensor, goes_direct, refuse_gradients
from octofuse.ops.quantize import Scale
from octofuse.quant import bcq, grid, sparse
from octofuse.quant.packing import unpack, unpack_pairs

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": gelu,
    "gelu_tanh": lambda y: gelu(y, approximate="tanh"),
    "silu": silu,
}


def woq_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    bits: int,
    group: int | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
) -> Tensor:
    """act(x @ w^T + bias) + residual with w = scale * (code - zero); for int8 x, x_scale * (x @ w^T) in its place.

    Args:
        x: fp16, bf16, fp32 or int8 `[..., K]`, dense in K.
        packed: int32, `quant.packing.pack` of codes `[N, K]` of `bits` bits.
        scale: fp16, bf16 or fp32 `[G, N]`, for each group of `group` columns; None: a row is one group.
        zero: uint8 `[G, N]`; None: the grid's middle (`quant.grid`).
        bias: `[N]`. activation: None, "relu", "gelu", "gelu_tanh" or "silu". residual: `[..., N]`.
        constant_weight: nothing in flight writes packed, scale or zero; as in `i8f16_linear`.
        x_scale: of an int8 x and only of one: fp32 `[M]` or `[M, 1]` for its M rows (`quantize_per_token` gives both), one
            element, or a float.

    Returns:
        `[..., N]` in x's dtype, for int8 in the scale's. By the kernels a token's bits are the same whatever else is in x:
        those of up to 4 tokens, or those of more.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    weight = (packed, scale, zero, None)
    return _call(x, x_scale, weight, bias, "uniform", bits, group, activation, residual, constant_weight)


def bcq_linear(
    x: Tensor,
    packed: Tensor,
    alpha: Tensor,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    group: int | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
) -> Tensor:
    """`woq_linear` with w = offset + sum of alpha[i] * (+1 where bit i of the code is set, else -1).

    packed: int32, `pack(codes, q, planes=True)`; alpha: floating point `[G, q, N]`; offset: `[G, N]` (no kernel) or None.
    """
    if alpha.dim() != 3:
        raise ValueError(f"alpha: expected [G, q, N], got shape {list(alpha.shape)}")
    weight = (packed, alpha, None, offset)
    return _call(x, x_scale, weight, bias, "planes", alpha.shape[1], group, activation, residual, constant_weight)


def sparse12_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    group: int | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    constant_weight: bool = False,
    x_scale: Scale | None = None,
) -> Tensor:
    """`woq_linear` with one of every two columns of w (`quant.sparse`).

    packed: int32, `pack_pairs` of codes `[N, ceil(K / 2)]`; scale: floating point `[G, N]`.
    """
    weight = (packed, scale, None, None)
    return _call(x, x_scale, weight, bias, "sparse12", 8, group, activation, residual, constant_weight)


def dequantize_lowbit(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    kind: str,
    bits: int,
    group: int | None,
    columns: int,
) -> Tensor:
    """The weight, `[N, columns]` in the scale's dtype; kind: "uniform", "planes" or "sparse12"."""
    if offset is None:
        w = _C.lowbit_dequantize(packed, scale, zero, kind, bits, group, columns)
        if w is not None:
            return w
    rows = scale.shape[-1]
    if kind == "sparse12":
        return sparse.dequantize(unpack_pairs(packed, rows, columns), scale.t(), columns, group)
    codes = unpack(packed, bits, rows, columns, planes=kind == "planes")
    if kind == "planes":
        return bcq.dequantize(codes, scale.permute(2, 0, 1), None if offset is None else offset.t(), group)
    return grid.dequantize(codes, scale.t(), None if zero is None else zero.t(), bits, group)


def _call(
    x: Tensor,
    x_scale: Scale | None,
    weight: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    _, bits, group, activation, residual, _ = rest
    for name, value in (("bits", bits), ("group", group)):
        if value is not None and type(value) is not int:
            raise TypeError(f"{name}: expected int{' or None' * (name == 'group')}, got {type(value).__name__}")
    if activation is not None and activation not in ACTIVATIONS:
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"activation: expected None, {known}, got {activation!r}")
    if (x_scale is not None) != (x.dtype == torch.int8):
        got = "None" if x_scale is None else "one"
        raise ValueError(f"x_scale: expected one for int8 x and None for others, got {got} for {x.dtype}")
    if goes_direct(x, x_scale, *weight, bias, residual):
        return _lowbit_linear(x, x_scale, *weight, bias, *rest)
    refuse_gradients("lowbit_linear", x=x, bias=bias, residual=residual)
    x_scale = None if x_scale is None else as_tensor("x_scale", x_scale, x)
    result: Tensor = torch.ops.octofuse.lowbit_linear(x, x_scale, *weight, bias, *rest)
    return result


def _lowbit_linear(
    x: Tensor,
    x_scale: Scale | None,
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    offset: Tensor | None,
    bias: Tensor | None,
    kind: str,
    bits: int,
    group: int | None,
    activation: str | None,
    residual: Tensor | None,
    constant_weight: bool,
) -> Tensor:
    if torch.is_grad_enabled():
        refuse_gradients("lowbit_linear", x=x, bias=bias, residual=residual)
    if offset is None:
        rest = (x_scale, packed, scale, zero, bias, kind, bits, group, activation, residual, constant_weight)
        y = _C.lowbit_linear(x, *rest)
        if y is None and x.is_cuda and (copy := _copy_for_kernels(x, scale.dtype)) is not None:
            y = _C.lowbit_linear(copy, *rest)
        if y is not None:
            return y
    elif offset.shape != (scale.shape[0], scale.shape[2]):
        raise ValueError(f"offset: expected shape {[scale.shape[0], scale.shape[2]]}, got {list(offset.shape)}")
    if x_scale is not None:
        x = _in_floating_point(x, x_scale).to(scale.dtype)
    w = dequantize_lowbit(packed, scale, zero, offset, kind, bits, group, x.shape[-1])
    y = linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
    y = y if activation is None else ACTIVATIONS[activation](y)
    return y if residual is None else y + residual


def _copy_for_kernels(x: Tensor, dtype: torch.dtype) -> Tensor | None:
    """x as those for more than 4 tokens read it: no int8, rows that start at multiples of 16 bytes; None where it is."""
    aligned = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in x.stride()[:-1])
    if x.dtype not in (dtype, torch.int8) or (x.dtype == dtype and aligned):
        return None
    columns = x.shape[-1]
    rows = torch.empty((*x.shape[:-1], -(-columns // 8) * 8), dtype=dtype, device=x.device)
    return rows[..., :columns].copy_(x)


def _in_floating_point(x: Tensor, x_scale: Scale) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(x_scale, Tensor):
        if x_scale.numel() not in (1, rows.shape[0]):
            raise ValueError(f"x_scale: expected 1 or {rows.shape[0]} elements, got shape {list(x_scale.shape)}")
        x_scale = x_scale.view(-1, 1)
    return (rows * x_scale).view(x.shape)


IMPLEMENTATIONS = {"lowbit_linear": _lowbit_linear}
