"""The engine "dequantized" of the low-bit ops, which every device has: the weight is written to memory for the call."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from octofuse import _C
from octofuse.ops import gemm, rows
from octofuse.ops._calls import LinearCall, LowbitCall, Scale
from octofuse.ops.activations import activation_named
from octofuse.ops.quantize import _per_tensor
from octofuse.quant import bcq, codebook, grid, sparse, two_level
from octofuse.quant.packing import unpack, unpack_pairs


def dequantize_lowbit(
    packed: Tensor,
    scale: Tensor,
    zero: Tensor | int | None,
    offset: Tensor | None,
    kind: str,
    bits: int,
    group: int | None,
    columns: int,
    levels: list[float] | None = None,
    group_scale: Tensor | None = None,
) -> Tensor:
    """The weight, `[N, columns]` in the scale's dtype; kind: as in `_calls.LowbitCall`."""
    if offset is None:
        w = _C.lowbit_dequantize(packed, scale, *split_zero(zero), kind, bits, group, levels, group_scale, columns)
        if w is not None:
            return w
    rows = scale.shape[-1]
    if group_scale is not None:
        whole = two_level.packed_integers(packed, group_scale, rows, columns, group)
        return (whole.float() * scale.float().view(-1, 1)).to(scale.dtype)
    if kind == "sparse12":
        return sparse.dequantize(unpack_pairs(packed, rows, columns), scale.t(), columns, group)
    codes = unpack(packed, bits, rows, columns, planes=kind == "planes", codebook=kind == "codebook")
    if kind == "float8" or levels is not None:
        return codebook.dequantize(codes, scale.t(), levels or codebook.E4M3, group)
    if kind == "planes":
        return bcq.dequantize(codes, scale.permute(2, 0, 1), None if offset is None else offset.t(), group)
    return grid.dequantize(codes, scale.t(), zero.t() if isinstance(zero, Tensor) else zero, bits, group)


def split_zero(zero: Tensor | int | None) -> tuple[Tensor | None, int | None]:
    """A zero of each group and one for all, of which one is None."""
    return (None, zero) if type(zero) is int else (zero, None)  # type: ignore[return-value]  # _C refuses a bool


def dequantized_linear(call: LowbitCall) -> Tensor:
    """The engine "dequantized", which every device has; `call` has no gate."""
    if call.x.dtype == torch.int8 and _C.lowbit_explain(call)["is_integer"]:
        return _integer_linear(call)
    x, scale = call.x, call.scale
    if call.norm is not None:
        x = rows.normed(call)
    if call.x_scale is not None:
        x = _in_floating_point(x, call.x_scale).to(scale.dtype)
    zero = call.zero if call.zero_point is None else call.zero_point
    stored = (call.packed, scale, zero, call.offset, call.kind, call.bits, call.group)
    w = dequantize_lowbit(*stored, x.shape[-1], call.levels, call.group_scale)
    y = linear(x, w.to(x.dtype), None if call.bias is None else call.bias.to(x.dtype))
    y = activation_named(call.activation)(y)
    y = y if call.residual is None else (y + call.residual).to(y.dtype)
    return y if call.out_scale is None else _per_tensor(y, call.out_scale)


def _integer_linear(call: LowbitCall) -> Tensor:
    """`linear` of int8 with the integers as its weight: exact."""
    k = call.x.shape[-1]
    ones = torch.ones_like(call.scale, dtype=torch.float16)
    # Of them fp16 keeps every bit.
    stored = (call.packed, ones, call.zero_point, None, call.kind, call.bits, call.group)
    w = dequantize_lowbit(*stored, k, None, call.group_scale).to(torch.int8)
    assert call.x_scale is not None  # check_call()
    return gemm.linear(
        LinearCall(
            call.x.contiguous(), w, call.x_scale, call.scale.float().view(-1), call.bias, call.activation, call.residual,
            call.scale.dtype, call.out_scale, "auto", None, None, False,
        )
    )  # fmt: skip


def _in_floating_point(x: Tensor, x_scale: Scale) -> Tensor:
    tokens = x.reshape(-1, x.shape[-1])
    if isinstance(x_scale, Tensor):
        if x_scale.numel() not in (1, tokens.shape[0]):
            raise ValueError(f"x_scale: expected 1 or {tokens.shape[0]} elements, got shape {list(x_scale.shape)}")
        x_scale = x_scale.view(-1, 1)
    return (tokens * x_scale).view(x.shape)
