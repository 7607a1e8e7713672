"""One linear for every 8-bit element type: int8, and float8 with scales of tensors, tokens, channels or blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from octofuse.ops._calls import LinearCall, Scale, ZeroPoint, run
from octofuse.ops.activations import Activation
from octofuse.ops.gemm import linear as _linear

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
_OUTPUTS = {torch.int8: (*_FLOATS, torch.int8), torch.float8_e4m3fn: (*_FLOATS, torch.int8, torch.float8_e4m3fn)}


def linear(
    x: Tensor,
    w: Tensor,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    out_scale: Scale | None = None,
    engine: str = "auto",
    out: Tensor | None = None,
    x_zero_point: ZeroPoint | None = None,
    w_sum: Tensor | None = None,
    fast_accumulate: bool = False,
    constant_weight: bool = False,
) -> Tensor:
    """act((x @ w^T) * w_scale * x_scale + bias) + residual, in one kernel, for 8-bit x and w.

    int8 operands give `i8f16_linear` and `i8i8_linear`, bit by bit. The sums of float8 operands are not integers, so they
    have a contract of their own: K is added up in one order that depends on nothing else, so that a row's bits depend on
    neither M nor the other rows nor the kernel; 128 columns at a time are summed by the tensor cores, which keep about 14
    bits, and these sums are added in fp32. GPUs of compute capability 9.0 have the kernels. On others from 8.9 on cuBLASLt
    serves what it can (N a multiple of 16, no scales of blocks) and keeps no such promise. CPUs have an order of their own.

    Args:
        x: `[..., K]`: int8, or torch.float8_e4m3fn or torch.float8_e5m2.
        w: `[N, K]`: int8 beside int8, torch.float8_e4m3fn beside float8.
        x_scale, w_scale: fp32: one element, or of every token `[M]` or `[M, 1]` and of every channel `[N]` or `[N, 1]`; or
            floats. For float8 also of blocks: x_scale `[M, ceil(K / 128)]` and w_scale `[ceil(N / 128), ceil(K / 128)]`, in
            any strides (`quantize_per_block` makes the first): then every 128 columns' sums are multiplied by both before
            they are added.
        bias, activation, residual, engine, out, constant_weight: as in `i8f16_linear`.
        out_dtype: torch.float16, torch.bfloat16 or torch.float32; with out_scale torch.int8 or, of float8 operands,
            torch.float8_e4m3fn.
        out_scale: fp32, one element, or a float: the output is t * (1 / out_scale), rounded to even; at most 127, or 448.
        x_zero_point, w_sum: of int8, as in `i8f16_linear`.
        fast_accumulate: lets the tensor cores add up all of K: the same contract but for the fp32 sums. Of float8, and
            not beside scales of blocks; e5m2 is added up in fp32 all the same.

    Returns:
        `[..., N]` in `out_dtype`; `out` if it was given.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Examples:
        >>> x = torch.tensor([[0.5, 2.0]]).to(torch.float8_e4m3fn)
        >>> w = torch.tensor([[1.0, 1.5], [4.0, -1.0]]).to(torch.float8_e4m3fn)
        >>> octofuse.linear(x, w, 1.0, torch.tensor([1.0, 2.0]), activation="relu")
        tensor([[3.5000, 0.0000]], dtype=torch.float16)
    """
    check_output(w, out_dtype, out_scale)
    if fast_accumulate and w.dtype == torch.int8:
        raise ValueError("fast_accumulate: expected False for int8, whose sums are exact, got True")
    call = LinearCall(
        x, w, x_scale, w_scale, bias, activation, residual, out_dtype, out_scale, engine, x_zero_point, w_sum,
        constant_weight, fast_accumulate,
    )  # fmt: skip
    result: Tensor = run("linear", "this op", call, _linear, out)
    return result


def check_output(w: Tensor, out_dtype: torch.dtype, out_scale: Scale | None) -> None:
    """What `_C` would not see: there, a scale alone makes the output int8."""
    if not isinstance(w, Tensor) or w.dtype not in _OUTPUTS:
        got = f"dtype {w.dtype}" if isinstance(w, Tensor) else type(w).__name__
        raise TypeError(f"w: expected a tensor in int8 or float8_e4m3fn, got {got}")
    allowed = _OUTPUTS[w.dtype]
    if out_dtype not in allowed:
        expected = ", ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"out_dtype: expected one of {expected}, got {out_dtype}")
    if (out_scale is None) != (out_dtype in _FLOATS):
        expected, got = ("one", "None") if out_scale is None else ("None", "one")
        raise ValueError(f"out_scale: expected {expected} beside out_dtype={out_dtype}, got {got}")
