"""Linears whose weights have 1 to 8 bits and whose activations are in floating point.

There are no kernels for them yet: each call unpacks the weight and multiplies in torch. That gives the accuracy, and the
memory at rest, not the speed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

from octofuse.quant import bcq, grid, sparse
from octofuse.quant.packing import unpack

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
) -> Tensor:
    """act(x @ w^T + bias) + residual with w = scale * (code - zero).

    Args:
        x: fp16, bf16 or fp32 `[..., K]`.
        packed: int32 `[N, words]`, `quant.packing.pack` of codes `[N, K]` of `bits` bits.
        scale: floating point `[N, G]`, for each group of `group` columns; None: a row is one group.
        zero: uint8 `[N, G]`; None: the grid's middle (`quant.grid`).
        bias: `[N]`. activation: None, "relu", "gelu", "gelu_tanh" or "silu". residual: `[..., N]`.

    Returns:
        `[..., N]` in x's dtype.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    columns = _checked(x, scale, "scale", group, packed)
    if zero is not None and (zero.shape != scale.shape or zero.dtype != torch.uint8):
        raise ValueError(
            f"zero: expected uint8 of shape {list(scale.shape)}, got {zero.dtype} of shape {list(zero.shape)}"
        )
    w = grid.dequantize(unpack(packed, bits, columns), scale, zero, bits, group)
    return _finished(x, w, bias, activation, residual)


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
) -> Tensor:
    """`woq_linear` with w = offset + sum of alpha[i] * (+1 where bit i of the code is set, else -1).

    packed: int32 `[N, words]`, `pack(codes, q, planes=True)`; alpha: floating point `[N, G, q]`; offset: `[N, G]` or None.
    """
    if alpha.dim() != 3:
        raise ValueError(f"alpha: expected [N, G, q], got shape {list(alpha.shape)}")
    columns = _checked(x, alpha[..., 0], "alpha", group, packed)
    if offset is not None and offset.shape != alpha.shape[:2]:
        raise ValueError(f"offset: expected shape {list(alpha.shape[:2])}, got {list(offset.shape)}")
    w = bcq.dequantize(unpack(packed, alpha.shape[2], columns, planes=True), alpha, offset, group)
    return _finished(x, w, bias, activation, residual)


def sparse12_linear(
    x: Tensor,
    packed: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    group: int | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`woq_linear` with one of every two columns of w (`quant.sparse`).

    packed: int32 `[N, words]`, `pack(codes, 8)` of codes `[N, ceil(K / 2)]`; scale: floating point `[N, G]`.
    """
    columns = _checked(x, scale, "scale", group, packed)
    w = sparse.dequantize(unpack(packed, 8, -(-columns // 2)), scale, columns, group)
    return _finished(x, w, bias, activation, residual)


def _checked(x: Tensor, of_groups: Tensor, name: str, group: int | None, packed: Tensor) -> int:
    """K, once x and what stands for each group of the weight go with each other."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise TypeError(f"x: expected dtype float16, bfloat16 or float32, got {x.dtype}")
    if x.dim() < 1:
        raise ValueError("x: expected at least one dimension, got shape []")
    columns = x.shape[-1]
    want = [packed.shape[0], grid.groups_of(columns, group)]
    if list(of_groups.shape) != want:
        raise ValueError(f"{name}: expected {want} rows and groups, got {list(of_groups.shape)}")
    return columns


def _finished(x: Tensor, w: Tensor, bias: Tensor | None, activation: str | None, residual: Tensor | None) -> Tensor:
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation: expected None, {', '.join(ACTIVATIONS)}, got {activation!r}")
    if bias is not None and bias.shape != (w.shape[0],):
        raise ValueError(f"bias: expected shape [{w.shape[0]}], got {list(bias.shape)}")
    y = linear(x, w.to(x.dtype), None if bias is None else bias.to(x.dtype))
    if residual is not None and residual.shape != y.shape:
        raise ValueError(f"residual: expected the output's shape {list(y.shape)}, got {list(residual.shape)}")
    y = y if activation is None else ACTIVATIONS[activation](y)
    return y if residual is None else y + residual
