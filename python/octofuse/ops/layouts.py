"""Tiled orders on the GPU: `_C`'s conversions and COL32 products on plain tensors. `octofuse.layouts` is their public face.

A matrix in a tiled order is a 1-D tensor here, with its sides beside it; `size` is its number of elements, which traced
calls need. Orders go by name. CPU tensors never come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops._calls import Col32Call, Scale, run
from octofuse.ops._guard import as_tensor, goes_direct, refuse_gradients
from octofuse.ops.activations import Activation


def to_layout(matrix: Tensor, layout: str, size: int, engine: str) -> Tensor:
    """[rows, cols] -> its `size` elements in `layout`."""
    return _call("to_layout", (matrix,), matrix, layout, size, engine)


def from_layout(data: Tensor, layout: str, rows: int, cols: int, engine: str) -> Tensor:
    """The inverse -> [rows, cols]."""
    return _call("from_layout", (data,), data, layout, rows, cols, engine)


def quantize_col32(x: Tensor, scale: Scale | None, size: int) -> tuple[Tensor, Scale]:
    """fp16, bf16 or fp32 [rows, cols] -> int8 in COL32 and its scale: `scale`, or [rows, 1] of its own."""
    refuse_gradients("quantize", x=x, scale=scale)
    if goes_direct(x, scale):
        found = _quantize_col32(x, scale, size)
    else:
        given = None if scale is None else as_tensor("scale", scale, x)
        found = torch.ops.octofuse.quantize_col32(x, given, size)
    return found[0], found[1] if scale is None else scale


def dequantize_col32(q: Tensor, rows: int, cols: int, scale: Scale, out_dtype: torch.dtype) -> Tensor:
    """int8 or int32 in COL32 -> [rows, cols] in `out_dtype`."""
    refuse_gradients("dequantize", scale=scale)
    if not goes_direct(q, scale):
        scale = as_tensor("scale", scale, q)
    return _call("dequantize_col32", (q, scale), q, rows, cols, scale, out_dtype)


def linear_col32(
    x: Tensor,
    w: Tensor,
    sizes: Sequence[int],
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None,
    activation: Activation | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    out_scale: Scale | None,
    out_layout: str,
    size: int,
) -> Tensor:
    """The formula of `i8f16_linear` on COL32 operands; int32: the accumulators; int8 without out_scale: down to -128."""
    call = Col32Call(
        x, w, list(sizes), x_scale, w_scale, bias, activation, residual, out_dtype, out_scale, out_layout, size
    )  # fmt: skip
    result: Tensor = run("linear_col32", "this op", call, _linear_col32)
    return result


def matmul_ordered(
    x: Tensor, w: Tensor, sizes: Sequence[int], layouts: Sequence[str], alpha: float | None, algorithm: int, size: int
) -> Tensor:
    """x w^T through cuBLASLt, each matrix in its own order (of x, w and the output)."""
    return _call("matmul_ordered", (x, w), x, w, list(sizes), list(layouts), alpha, algorithm, size)


def cublaslt_algorithms(sizes: Sequence[int], layouts: Sequence[str], int8_output: bool, device: int) -> int:
    """How many algorithms cuBLASLt has for such a product there, or minus the status with which it declines."""
    return _C.cublaslt_algorithms(list(sizes), list(layouts), int8_output, device)


def _call(op: str, tensors: tuple[Any, ...], *arguments: Any) -> Tensor:
    if goes_direct(*tensors):
        result: Tensor = IMPLEMENTATIONS[op](*arguments)
        return result
    traced: Tensor = getattr(torch.ops.octofuse, op)(*arguments)
    return traced


def _to_layout(matrix: Tensor, layout: str, size: int, engine: str) -> Tensor:
    return _C.to_layout(matrix, layout, engine)


def _from_layout(data: Tensor, layout: str, rows: int, cols: int, engine: str) -> Tensor:
    return _C.from_layout(data, layout, rows, cols, engine)


def _quantize_col32(x: Tensor, scale: Scale | None, size: int) -> list[Tensor]:
    return [tensor for tensor in _C.quantize_col32(x, scale) if tensor is not None]


def _dequantize_col32(q: Tensor, rows: int, cols: int, scale: Scale, out_dtype: torch.dtype) -> Tensor:
    return _C.dequantize_col32(q, rows, cols, scale, out_dtype)


def _linear_col32(call: Col32Call) -> Tensor:
    return _C.linear_col32(call)


def _matmul_ordered(
    x: Tensor, w: Tensor, sizes: list[int], layouts: list[str], alpha: float | None, algorithm: int, size: int
) -> Tensor:
    return _C.matmul_ordered(x, w, sizes, layouts, alpha, algorithm)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "to_layout": _to_layout,
    "from_layout": _from_layout,
    "quantize_col32": _quantize_col32,
    "dequantize_col32": _dequantize_col32,
    "linear_col32": _linear_col32,
    "matmul_ordered": _matmul_ordered,
}
