"""Quantisation and dequantisation: s = amax / 127, r = 1 / s, q = clamp(rne(float(x) * r), -127, 127), real = s * q.

To float8: s = amax / 448 (e5m2: 57344), q = x * r rounded to even, at most that; NaN stays NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import rows
from octofuse.ops._calls import Scale
from octofuse.ops._guard import as_tensor, goes_direct, refuse_gradients


def quantize_per_tensor(x: Tensor, scale: Scale, dtype: torch.dtype = torch.int8) -> Tensor:
    """x fp16, bf16 or fp32 `[..., K]` and one scale (fp32 element or float above 0) -> `dtype` of the same shape.

    dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2.

    Values beyond 127 * scale (448, 57344) saturate, infinities too; NaN becomes 0, in float8 it stays NaN.
    Raises TypeError or ValueError.

    Examples:
        >>> octofuse.quantize_per_tensor(torch.tensor([0.0, 1.0, -99.0]), 0.5)
        tensor([   0,    2, -127], dtype=torch.int8)
    """
    if dtype != torch.int8:
        q: Tensor = rows.quantized(_in_rows(x), scale, dtype)[0]
        return q.view(x.shape) if isinstance(x, Tensor) else q
    if goes_direct(x, scale):
        return _per_tensor(x, scale)
    refuse_gradients("quantize_per_tensor", x=x, scale=scale)
    result: Tensor = torch.ops.octofuse.quantize_per_tensor(x, as_tensor("scale", scale, x))
    return result


def quantize_per_token(x: Tensor, dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """x fp16, bf16 or fp32 `[..., K]` -> `dtype` of the same shape and fp32 scales `[M, 1]`, one per row of K.

    dtype: torch.int8, torch.float8_e4m3fn or torch.float8_e5m2.

    A row of zeros gets scale 1. A row that holds NaN or Inf gets a NaN or Inf scale, so its dequantised values are NaN,
    and no other row is touched. Raises TypeError or ValueError.

    Examples:
        >>> q, scales = octofuse.quantize_per_token(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
        >>> q.tolist(), scales.shape
        ([[64, -127], [0, 0]], torch.Size([2, 1]))
    """
    if dtype != torch.int8:
        q, found = rows.quantized(x, None, dtype)
        return q, found
    if goes_direct(x):
        return _per_token(x)
    refuse_gradients("quantize_per_token", x=x)
    result: tuple[Tensor, Tensor] = torch.ops.octofuse.quantize_per_token(x)
    return result


def quantize_per_block(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """x fp16, bf16 or fp32 `[..., K]` -> float8 of the same shape and fp32 scales `[M, ceil(K / 128)]`, dense in M.

    Every 128 columns of a row share a scale, as `linear` takes it beside a weight's scales of 128 x 128 blocks. Zeros get
    scale 1; NaN and Inf stay in their block. dtype: torch.float8_e4m3fn or torch.float8_e5m2. Raises TypeError or
    ValueError.

    Examples:
        >>> q, scales = octofuse.quantize_per_block(torch.ones(2, 256))
        >>> q.dtype, scales.shape
        (torch.float8_e4m3fn, torch.Size([2, 2]))
    """
    q, scales = rows.quantized(x, None, dtype, block=True)
    return q, scales


def dequantize(q: Tensor, scale: Scale, *, out_dtype: torch.dtype = torch.float16) -> Tensor:
    """q int8, int32 or float8 `[..., K]` * scale (one element, `[M]` or `[M, 1]`, or a float) -> `out_dtype`, rounded once.

    out_dtype: torch.float16, torch.bfloat16 or torch.float32. Raises TypeError or ValueError.

    Examples:
        >>> octofuse.dequantize(torch.tensor([[2, -3]], dtype=torch.int8), 0.5)
        tensor([[ 1.0000, -1.5000]], dtype=torch.float16)
    """
    if goes_direct(q, scale):
        return _dequantize(q, scale, out_dtype)
    refuse_gradients("dequantize", scale=scale)
    result: Tensor = torch.ops.octofuse.dequantize(q, as_tensor("scale", scale, q), out_dtype)
    return result


def _in_rows(x: Tensor, length: int = 4096) -> Tensor:
    """With one scale for all, a contiguous tensor's rows may be cut anywhere: into lengths that fill a GPU."""
    is_long = isinstance(x, Tensor) and x.dim() > 0 and x.shape[-1] > length and x.numel() % length == 0
    return x.view(-1, length) if is_long and x.is_contiguous() else x


def _per_tensor(x: Tensor, scale: Scale) -> Tensor:
    refuse_gradients("quantize_per_tensor", x=x, scale=scale)
    return _C.quantize_per_tensor(x, scale)


def _per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    refuse_gradients("quantize_per_token", x=x)
    return _C.quantize_per_token(x)


def _dequantize(q: Tensor, scale: Scale, out_dtype: torch.dtype) -> Tensor:
    refuse_gradients("dequantize", scale=scale)
    return _C.dequantize(q, scale, out_dtype)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "quantize_per_tensor": _per_tensor,
    "quantize_per_token": _per_token,
    "dequantize": _dequantize,
}
