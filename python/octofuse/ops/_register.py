"""Every op of this library as torch.library sees it: schema, CPU and CUDA implementation, fake implementation.

`Library.define/impl/register_fake` rather than `custom_op`: a third of its cost per call. Eager calls with plain tensors
do not come here at all; they go straight from `ops.gemm` and the like to `_C`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from octofuse.ops._calls import (
    CALLS,
    Col32Call,
    LinearCall,
    LowbitCall,
    OutlierCall,
    RowLinearCall,
    RowsCall,
    schema_of,
)

_LIBRARY = torch.library.Library("octofuse", "DEF")

# An op's arguments and what it returns, as torch.library declares them.
SCHEMAS: dict[str, tuple[str, str]] = {
    "linear": (schema_of("linear"), "Tensor"),
    "quantized_linear": (schema_of("quantized_linear"), "Tensor"),
    "lowbit_linear": (schema_of("lowbit_linear"), "Tensor"),
    "outlier_linear": (schema_of("outlier_linear"), "Tensor"),
    "rows": (schema_of("rows"), "Tensor[]"),
    "linear_col32": (schema_of("linear_col32"), "Tensor"),
    "i8i32_matmul": ("Tensor x, Tensor w, str engine", "Tensor"),
    "i8i8_matmul": ("Tensor x, Tensor w, float alpha, str engine", "Tensor"),
    "quantize_per_tensor": ("Tensor x, Tensor scale", "Tensor"),
    "quantize_per_token": ("Tensor x", "(Tensor, Tensor)"),
    "dequantize": ("Tensor q, Tensor scale, ScalarType out_dtype", "Tensor"),
    "to_layout": ("Tensor matrix, str layout, SymInt size, str engine", "Tensor"),
    "from_layout": ("Tensor data, str layout, SymInt rows, SymInt cols, str engine", "Tensor"),
    "quantize_col32": ("Tensor x, Tensor? scale, SymInt size", "Tensor[]"),
    "dequantize_col32": ("Tensor q, SymInt rows, SymInt cols, Tensor scale, ScalarType out_dtype", "Tensor"),
    "matmul_ordered": (
        "Tensor x, Tensor w, SymInt[] sizes, str[] layouts, float? alpha, int algorithm, SymInt size",
        "Tensor",
    ),
    # k, v [B, P, T, D] into keys, values [B, P, C, D] and scales [B, P, C] at positions `first`, int64, and up.
    "cache_append": (
        "Tensor k, Tensor v, Tensor(a!) keys, Tensor(b!) values, Tensor(c!) key_scales, Tensor(d!) value_scales, "
        "Tensor first",
        "()",
    ),
    # q [B, H, 1, D] -> [B, 1, H, D]; seen: int64 [2, B], each sequence's first and last position that counts.
    "cache_attend": (
        "Tensor q, Tensor keys, Tensor values, Tensor key_scales, Tensor value_scales, Tensor seen, float scaling, "
        "float? softcap",
        "Tensor",
    ),
}
WITH_OUT = ("linear", "i8i32_matmul", "i8i8_matmul")  # <op>_out writes into `out`


def _shape_like(x: Tensor, w: Tensor, floats: bool = False) -> list[int | torch.SymInt]:
    torch._check(x.dim() >= 1, lambda: f"x: expected at least one dimension, got shape {list(x.shape)}")
    torch._check(w.dim() == 2, lambda: f"w: expected two dimensions, [N, K], got shape {list(w.shape)}")
    eight_bits = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
    torch._check(
        x.dtype in eight_bits or (floats and x.dtype.is_floating_point),
        lambda: f"x: expected dtype int8 or float8{', or a wider float' if floats else ''}, got {x.dtype}",
    )
    torch._check(w.dtype in eight_bits[:2], lambda: f"w: expected dtype int8 or float8_e4m3fn, got {w.dtype}")
    torch._check(x.shape[-1] == w.shape[1], lambda: f"w: expected shape [N, {x.shape[-1]}], got {list(w.shape)}")
    return [*x.shape[:-1], w.shape[0]]


def _output_of(call: LinearCall | RowLinearCall) -> torch.dtype:
    if call.out_scale is None or (call.out_dtype == call.w.dtype == torch.float8_e4m3fn):
        return call.out_dtype
    return torch.int8


def _fake_linear(call: LinearCall) -> Tensor:
    return call.x.new_empty(_shape_like(call.x, call.w), dtype=_output_of(call))


def _fake_matmul(x: Tensor, w: Tensor, engine: str) -> Tensor:
    return x.new_empty(_shape_like(x, w), dtype=torch.int32)


def _fake_matmul_i8(x: Tensor, w: Tensor, alpha: float, engine: str) -> Tensor:
    return x.new_empty(_shape_like(x, w), dtype=torch.int8)


def _fake_out(*_: Any, out: Tensor) -> None:
    return None


def _fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.int8, device=x.device)


def _fake_quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    rows: int | torch.SymInt = 1
    for extent in x.shape[:-1]:
        rows = rows * extent
    return _fake_quantize(x, x), x.new_empty((rows, 1), dtype=torch.float32)


def _fake_dequantize(q: Tensor, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.empty(q.shape, dtype=out_dtype, device=q.device)


def _fake_rows(call: RowsCall) -> list[Tensor]:
    x = call.x
    shape = [*x.shape]
    if call.op == "gated_activation":
        shape[-1] = shape[-1] // 2
    y = torch.empty(shape, dtype=call.q_dtype if call.quantize else x.dtype, device=x.device)
    scales = [_fake_quantize_per_token(x)[1]] if call.quantize and call.scale is None else []
    if call.q_block and scales:
        scales = [x.new_empty((-(-shape[-1] // 128), scales[0].shape[0]), dtype=torch.float32)]
    added = [] if call.residual is None else [torch.empty(x.shape, dtype=x.dtype, device=x.device)]
    return [y, *scales, *added]


def _fake_quantized_linear(call: RowLinearCall) -> Tensor:
    return call.x.new_empty(_shape_like(call.x, call.w, floats=True), dtype=_output_of(call))


def _fake_outlier_linear(call: OutlierCall) -> Tensor:
    return call.x.new_empty(_shape_like(call.x, call.w, floats=True))


def _fake_lowbit_linear(call: LowbitCall) -> Tensor:
    dtype = call.x.dtype if call.x_scale is None else call.scale.dtype
    dtype = dtype if call.out_scale is None else torch.int8
    columns = call.scale.shape[-1] // (2 if call.gated else 1)
    return call.x.new_empty([*call.x.shape[:-1], columns], dtype=dtype)


def _fake_to_layout(matrix: Tensor, layout: str, size: int, engine: str) -> Tensor:
    return matrix.new_empty((size,))


def _fake_from_layout(data: Tensor, layout: str, rows: int, cols: int, engine: str) -> Tensor:
    return data.new_empty((rows, cols))


def _fake_quantize_col32(x: Tensor, scale: Tensor | None, size: int) -> list[Tensor]:
    scales = [] if scale is not None else [x.new_empty((x.shape[0], 1), dtype=torch.float32)]
    return [x.new_empty((size,), dtype=torch.int8), *scales]


def _fake_dequantize_col32(q: Tensor, rows: int, cols: int, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty((rows, cols), dtype=out_dtype)


def _fake_linear_col32(call: Col32Call) -> Tensor:
    return call.x.new_empty((call.size,), dtype=call.out_dtype)


def _fake_matmul_ordered(
    x: Tensor, w: Tensor, sizes: list[int], layouts: list[str], alpha: float | None, algorithm: int, size: int
) -> Tensor:
    return x.new_empty((size,), dtype=torch.int32 if alpha is None else torch.int8)


def _fake_cache_append(*_: Any) -> None:
    return None


def _fake_cache_attend(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty((q.shape[0], 1, q.shape[1], q.shape[3]))


_FAKES: dict[str, Callable[..., Any]] = {
    "linear": _fake_linear,
    "quantized_linear": _fake_quantized_linear,
    "lowbit_linear": _fake_lowbit_linear,
    "rows": _fake_rows,
    "linear_col32": _fake_linear_col32,
    "i8i32_matmul": _fake_matmul,
    "i8i8_matmul": _fake_matmul_i8,
    "quantize_per_tensor": _fake_quantize,
    "quantize_per_token": _fake_quantize_per_token,
    "dequantize": _fake_dequantize,
    "outlier_linear": _fake_outlier_linear,
    "to_layout": _fake_to_layout,
    "from_layout": _fake_from_layout,
    "quantize_col32": _fake_quantize_col32,
    "dequantize_col32": _fake_dequantize_col32,
    "matmul_ordered": _fake_matmul_ordered,
    "cache_append": _fake_cache_append,
    "cache_attend": _fake_cache_attend,
}


def register(implementations: dict[str, Callable[..., Any]], cuda_only: Collection[str] = ()) -> None:
    """Define each op, and <op>_out where there is one, and give both devices its one implementation."""
    for name, (arguments, returned) in SCHEMAS.items():
        function, fake = implementations[name], _FAKES[name]
        if name in CALLS:
            function, fake = _unpacked(function, CALLS[name]), _unpacked(fake, CALLS[name])
        keys = ("CUDA",) if name in cuda_only else ("CPU", "CUDA")
        _define(name, f"({arguments}) -> {returned}", function, fake, keys)
        if name in WITH_OUT:
            into = _returning_nothing(function)
            _define(name + "_out", f"({arguments}, *, Tensor(a!) out) -> ()", into, _fake_out, keys)


def _define(name: str, schema: str, function: Any, fake: Any, keys: Collection[str]) -> None:
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key in keys:
        _LIBRARY.impl(name, function, key)
    torch.library.register_fake(f"octofuse::{name}", fake, lib=_LIBRARY)


def _unpacked(function: Callable[..., Any], call: Any) -> Callable[..., Any]:
    """From the dispatcher's arguments, one by one, to the struct that our functions take."""

    def with_struct(*arguments: Any, **out: Tensor) -> Any:
        return function(call(*arguments), **out)

    return with_struct


def _returning_nothing(function: Callable[..., Any]) -> Callable[..., None]:
    def into_out(*arguments: Any, out: Tensor) -> None:
        function(*arguments, out=out)

    return into_out
