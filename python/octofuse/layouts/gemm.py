"""Products of matrices that stay in their layouts, with the bits of the row-major ops."""

from __future__ import annotations

import torch
from torch import Tensor

from octofuse import ops
from octofuse.layouts.convert import LaidOut, _expect_laid_out, _expect_layout, from_layout, is_col32, to_layout
from octofuse.layouts.maps import COL, COL4_4R2_8C, COL32, COL32_2R_4R4, ROW, Layout
from octofuse.ops import layouts as kernels
from octofuse.ops.activations import Activation

Scale = Tensor | float

# What cuBLASLt may be asked for: the orders of x [M, K], w [N, K] and the output. The names of the field speak of w^T:
# rows of w are its transpose's COL, so the first is ROW/COL/ROW.
COMBINATIONS = (
    (ROW, ROW, ROW),
    (ROW, ROW, COL),
    (COL, ROW, COL),
    (COL32, COL4_4R2_8C, COL32),
    (COL32, COL32_2R_4R4, COL32),
)


def linear(
    x: LaidOut,
    w: LaidOut,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    out_scale: Scale | None = None,
    out_layout: Layout = COL32,
) -> LaidOut:
    """`i8f16_linear`, or with out_scale `i8i8_linear`, on COL32 operands: one mma.sync kernel (sm_80 and later).

    Args:
        x: int8 [M, K] in COL32; w: int8 [N, K] in COL32.
        x_scale, w_scale, bias, activation, out_dtype, out_scale: as there.
        residual: [M, N] in rows.
        out_layout: COL32, so that the next linear can read it, or ROW.

    Returns:
        [M, N] in out_layout, int8 if out_scale is given.

    Raises:
        TypeError, ValueError: naming the argument; a layout that this op does not read is refused by its name.
    """
    sizes = _sizes(x, w)
    for operand, name in ((x, "x"), (w, "w")):
        _expect_col32(operand.layout, name)
    if out_layout != ROW:
        _expect_col32(out_layout, "out_layout")
    dtype = out_dtype if out_scale is None else torch.int8
    if dtype not in (torch.float16, torch.bfloat16, torch.float32) and out_scale is None:
        raise ValueError(f"out_dtype: expected torch dtype float16 or bfloat16 or float32, got {out_dtype}")
    if not x.data.is_cuda:
        rows = (from_layout(x), from_layout(w), x_scale, w_scale, bias)
        if out_scale is None:
            y = ops.i8f16_linear(*rows, activation=activation, residual=residual, out_dtype=out_dtype)
        else:
            y = ops.i8i8_linear(*rows, activation=activation, residual=residual, out_scale=out_scale)
        return to_layout(y, out_layout)
    size = out_layout.size(x.rows, w.rows)
    scales = (x_scale, w_scale, bias, activation, residual, dtype, out_scale)
    data = kernels.linear_col32(x.data, w.data, sizes, *scales, _kernel_name(out_layout), size)
    return LaidOut(data, out_layout, x.rows, w.rows)


def matmul(
    x: LaidOut,
    w: LaidOut,
    *,
    alpha: float | None = None,
    out_layout: Layout | None = None,
    engine: str = "auto",
    algorithm: int = 0,
) -> LaidOut:
    """x w^T: int32 [M, N], or with alpha int8, clamp(rne(float(acc) * alpha), -128, 127).

    Args:
        x: int8 [M, K], w: int8 [N, K], each in a layout that the engine reads.
        alpha: one float above 0.
        out_layout: default: x's.
        engine: "cutlass" (COL32 operands, COL32 or ROW output), "cublaslt" (what `support` lists for the device), or
            "auto": "cutlass" where it can, else "cublaslt".
        algorithm: which of cuBLASLt's algorithms, its best guess first.

    Raises:
        TypeError, ValueError: naming the argument; with what to use instead where the device does not support a layout.
    """
    sizes = _sizes(x, w)
    out = x.layout if out_layout is None else out_layout
    _expect_layout(out)
    if engine not in ("auto", "cutlass", "cublaslt"):
        raise ValueError(f"engine: expected 'auto', 'cutlass' or 'cublaslt', got {engine!r}")
    _check_alpha(alpha)
    readable = is_col32(x.layout) and is_col32(w.layout) and (out == ROW or is_col32(out))
    if engine == "cutlass" and not readable:
        names = f"{x.layout.name} x {w.layout.name} -> {out.name}"
        raise ValueError(f"engine: expected one that can multiply {names}, got 'cutlass': it reads COL32 operands")
    if not x.data.is_cuda:
        rows = (from_layout(x), from_layout(w))
        return to_layout(ops.i8i32_matmul(*rows) if alpha is None else ops.i8i8_matmul(*rows, alpha), out)
    size = out.size(x.rows, w.rows)
    if readable and engine != "cublaslt":
        dtype = torch.int32 if alpha is None else torch.int8
        scales = (1.0, 1.0 if alpha is None else alpha, None, None, None, dtype, None)
        data = kernels.linear_col32(x.data, w.data, sizes, *scales, _kernel_name(out), size)
    else:
        orders = [layout.name for layout in (x.layout, w.layout, out)]
        data = kernels.matmul_ordered(x.data, w.data, sizes, orders, alpha, algorithm, size)
    return LaidOut(data, out, x.rows, w.rows)


def support(
    m: int, n: int, k: int, *, int8_output: bool = False, device: torch.device | str | int | None = None
) -> dict[str, int]:
    """What cuBLASLt offers on a CUDA device for (M, N, K), each at least 1, in each of the layouts' combinations.

    Returns:
        "x / w / output" -> how many algorithms; 0 or less: none, minus the status with which it declines (15: not
        supported).

    Raises:
        ValueError: a size below 1, or no CUDA device.
        RuntimeError: no GPU, or no cuBLASLt.
    """
    for name, size in (("m", m), ("n", n), ("k", k)):
        if size < 1:
            raise ValueError(f"{name}: expected at least 1, got {size}")
    where = torch.device(device if device is not None else "cuda")
    if where.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, got {where}")
    if not torch.cuda.is_available():
        raise RuntimeError("support: needs a CUDA device")
    index = torch.cuda.current_device() if where.index is None else where.index
    found = {}
    for combination in COMBINATIONS:
        names = [layout.name for layout in combination]
        found[" / ".join(names)] = kernels.cublaslt_algorithms((m, n, k), names, int8_output, index)
    return found


def _kernel_name(layout: Layout) -> str:
    return "ROW" if layout == ROW else "COL32"


def _expect_col32(layout: Layout, name: str) -> None:
    _expect_layout(layout)
    if not is_col32(layout):
        hint = "to_layout converts; matmul(engine='cublaslt') reads the orders of Turing and Ampere where the chip does"
        raise ValueError(f"{name}: expected layout COL32, got {layout.name} ({hint})")


def _check_alpha(alpha: float | None) -> None:
    if alpha is None:
        return
    if not isinstance(alpha, float):
        raise TypeError(f"alpha: expected float, got {type(alpha).__name__}")
    if not 0 < alpha <= torch.finfo(torch.float32).max:
        raise ValueError(f"alpha: expected a finite number above 0, got {alpha}")


def _sizes(x: LaidOut, w: LaidOut) -> tuple[int, int, int]:
    for operand, name in ((x, "x"), (w, "w")):
        _expect_laid_out(operand, name)
        if operand.data.dtype != torch.int8:
            raise TypeError(f"{name}: expected dtype int8, got {operand.data.dtype}")
    if x.cols != w.cols:
        raise ValueError(f"w: expected [N, {x.cols}] (x has K = {x.cols}), got [{w.rows}, {w.cols}]")
    if x.data.device != w.data.device:
        raise ValueError(f"w: expected a tensor on {x.data.device} like x, got {w.data.device}")
    return x.rows, w.rows, x.cols
