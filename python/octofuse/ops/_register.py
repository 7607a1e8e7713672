"""Every op of this library as torch.library sees it: schema, CPU and CUDA implementation, fake implementation.

`Library.define/impl/register_fake` rather than `custom_op`: a third of its cost per call. Eager calls with plain tensors
do not come here at all; they go straight from `ops.gemm` and `ops.quantize` to `_C`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("octofuse", "DEF")

_LINEAR = (
    "Tensor x, Tensor w, Tensor x_scale, Tensor w_scale, Tensor? bias, str? activation, Tensor? residual, "
    "{extra}, str engine, Tensor? x_zero_point=None, Tensor? w_sum=None, bool constant_weight=False"
)
SCHEMAS = {
    "i8f16_linear": f"({_LINEAR.format(extra='ScalarType out_dtype')}) -> Tensor",
    "i8f16_linear_out": f"({_LINEAR.format(extra='ScalarType out_dtype')}, *, Tensor(a!) out) -> ()",
    "i8i8_linear": f"({_LINEAR.format(extra='Tensor out_scale')}) -> Tensor",
    "i8i8_linear_out": f"({_LINEAR.format(extra='Tensor out_scale')}, *, Tensor(a!) out) -> ()",
    "i8i32_matmul": "(Tensor x, Tensor w, str engine) -> Tensor",
    "i8i32_matmul_out": "(Tensor x, Tensor w, str engine, *, Tensor(a!) out) -> ()",
    "i8i8_matmul": "(Tensor x, Tensor w, float alpha, str engine) -> Tensor",
    "i8i8_matmul_out": "(Tensor x, Tensor w, float alpha, str engine, *, Tensor(a!) out) -> ()",
    "quantize_per_tensor": "(Tensor x, Tensor scale) -> Tensor",
    "quantize_per_token": "(Tensor x) -> (Tensor, Tensor)",
    "dequantize": "(Tensor q, Tensor scale, ScalarType out_dtype) -> Tensor",
    "rows": "(Tensor x, str op, Tensor? residual, Tensor? weight, Tensor? bias, float eps, str? activation, "
    "bool quantize, Tensor? scale) -> Tensor[]",
    "quantized_linear": "(Tensor x, Tensor w, Tensor w_scale, Tensor? bias, Tensor? x_scale, str? norm, "
    "Tensor? norm_weight, Tensor? norm_bias, float eps, str? activation, Tensor? residual, ScalarType out_dtype, "
    "Tensor? out_scale, bool constant_weight) -> Tensor",
    "lowbit_linear": "(Tensor x, Tensor? x_scale, Tensor packed, Tensor scale, Tensor? zero, Tensor? offset, "
    "Tensor? bias, str kind, int bits, int? group, str? activation, Tensor? residual, bool constant_weight) -> Tensor",
    "to_layout": "(Tensor matrix, str layout, SymInt size, str engine) -> Tensor",
    "from_layout": "(Tensor data, str layout, SymInt rows, SymInt cols, str engine) -> Tensor",
    "quantize_col32": "(Tensor x, Tensor? scale, SymInt size) -> Tensor[]",
    "dequantize_col32": "(Tensor q, SymInt rows, SymInt cols, Tensor scale, ScalarType out_dtype) -> Tensor",
    "linear_col32": "(Tensor x, Tensor w, SymInt[] sizes, Tensor? x_scale, Tensor? w_scale, Tensor? bias, "
    "str? activation, Tensor? residual, ScalarType out_dtype, Tensor? out_scale, str out_layout, SymInt size) -> Tensor",
    "matmul_ordered": "(Tensor x, Tensor w, SymInt[] sizes, str[] layouts, float? alpha, int algorithm, SymInt size) "
    "-> Tensor",
}


def _shape_like(x: Tensor, w: Tensor, floats: bool = False) -> list[int | torch.SymInt]:
    torch._check(x.dim() >= 1, lambda: f"x: expected at least one dimension, got shape {list(x.shape)}")
    torch._check(w.dim() == 2, lambda: f"w: expected two dimensions, [N, K], got shape {list(w.shape)}")
    torch._check(
        x.dtype == torch.int8 or (floats and x.dtype.is_floating_point),
        lambda: f"x: expected dtype int8{' or a floating-point one' if floats else ''}, got {x.dtype}",
    )
    torch._check(w.dtype == torch.int8, lambda: f"w: expected dtype int8, got {w.dtype}")
    torch._check(x.shape[-1] == w.shape[1], lambda: f"w: expected shape [N, {x.shape[-1]}], got {list(w.shape)}")
    return [*x.shape[:-1], w.shape[0]]


def _fake_linear(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(_shape_like(x, w), dtype=rest[5])


def _fake_linear_i8(x: Tensor, w: Tensor, *_: Any) -> Tensor:
    return x.new_empty(_shape_like(x, w), dtype=torch.int8)


def _fake_matmul(x: Tensor, w: Tensor, engine: str) -> Tensor:
    return x.new_empty(_shape_like(x, w), dtype=torch.int32)


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


def _fake_rows(x: Tensor, op: str, residual: Tensor | None, *rest: Any) -> list[Tensor]:
    quantize, scale = rest[-2:]
    shape = [*x.shape]
    if op == "gated_activation":
        shape[-1] = shape[-1] // 2
    y = torch.empty(shape, dtype=torch.int8 if quantize else x.dtype, device=x.device)
    scales = [_fake_quantize_per_token(x)[1]] if quantize and scale is None else []
    return [y, *scales, *([] if residual is None else [torch.empty(x.shape, dtype=x.dtype, device=x.device)])]


def _fake_quantized_linear(x: Tensor, w: Tensor, *rest: Any) -> Tensor:
    out_dtype, out_scale, _ = rest[-3:]
    return x.new_empty(_shape_like(x, w, floats=True), dtype=out_dtype if out_scale is None else torch.int8)


def _fake_lowbit_linear(x: Tensor, x_scale: Tensor | None, packed: Tensor, scale: Tensor, *_: Any) -> Tensor:
    dtype = x.dtype if x_scale is None else scale.dtype
    return x.new_empty([*x.shape[:-1], scale.shape[-1]], dtype=dtype)


def _fake_to_layout(matrix: Tensor, layout: str, size: int, engine: str) -> Tensor:
    return matrix.new_empty((size,))


def _fake_from_layout(data: Tensor, layout: str, rows: int, cols: int, engine: str) -> Tensor:
    return data.new_empty((rows, cols))


def _fake_quantize_col32(x: Tensor, scale: Tensor | None, size: int) -> list[Tensor]:
    scales = [] if scale is not None else [x.new_empty((x.shape[0], 1), dtype=torch.float32)]
    return [x.new_empty((size,), dtype=torch.int8), *scales]


def _fake_dequantize_col32(q: Tensor, rows: int, cols: int, scale: Tensor, out_dtype: torch.dtype) -> Tensor:
    return q.new_empty((rows, cols), dtype=out_dtype)


def _fake_linear_col32(x: Tensor, w: Tensor, sizes: list[int], *rest: Any) -> Tensor:
    return x.new_empty((rest[-1],), dtype=rest[5])


def _fake_matmul_ordered(x: Tensor, w: Tensor, sizes: list[int], layouts: list[str], *rest: Any) -> Tensor:
    alpha, _, size = rest
    return x.new_empty((size,), dtype=torch.int32 if alpha is None else torch.int8)


_FAKES: dict[str, Callable[..., Any]] = {
    "i8f16_linear": _fake_linear,
    "i8i8_linear": _fake_linear_i8,
    "i8i32_matmul": _fake_matmul,
    "i8i8_matmul": _fake_linear_i8,
    "quantize_per_tensor": _fake_quantize,
    "quantize_per_token": _fake_quantize_per_token,
    "dequantize": _fake_dequantize,
    "rows": _fake_rows,
    "quantized_linear": _fake_quantized_linear,
    "lowbit_linear": _fake_lowbit_linear,
    "to_layout": _fake_to_layout,
    "from_layout": _fake_from_layout,
    "quantize_col32": _fake_quantize_col32,
    "dequantize_col32": _fake_dequantize_col32,
    "linear_col32": _fake_linear_col32,
    "matmul_ordered": _fake_matmul_ordered,
}


def register(implementations: dict[str, Callable[..., Any]], cuda_only: Collection[str] = ()) -> None:
    """Define each op and give both devices its one implementation. A name with `_out` wraps the plain one."""
    for name, schema in SCHEMAS.items():
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        plain = name.removesuffix("_out")
        function = implementations[plain]
        if plain != name:
            function = _returning_nothing(function)
        for key in ("CUDA",) if name in cuda_only else ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, key)
        torch.library.register_fake(f"octofuse::{name}", _FAKES[name] if plain == name else _fake_out, lib=_LIBRARY)


def _returning_nothing(function: Callable[..., Any]) -> Callable[..., None]:
    def into_out(*args: Any, out: Tensor) -> None:
        function(*args, out=out)

    return into_out
