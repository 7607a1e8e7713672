"""int8 linear layers with a fused epilogue: the public functional API.

Every function takes x [..., K] int8 and w [N, K] int8, both dense in K, on one device, and computes
`testing.reference`'s formula. CUDA tensors go to `_C` (cuBLASLt, CUTLASS or the naive kernel), CPU tensors to oneDNN or
plain torch. Bad arguments raise TypeError or ValueError naming the argument before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import cpu
from octofuse.ops._guard import as_int_tensor, as_tensor, dtype_name, goes_direct, refuse_gradients
from octofuse.testing import reference

Scale = Tensor | float
ZeroPoint = Tensor | int


def i8f16_linear(
    x: Tensor,
    w: Tensor,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    engine: str = "auto",
    out: Tensor | None = None,
    x_zero_point: ZeroPoint | None = None,
    w_sum: Tensor | None = None,
    constant_weight: bool = False,
) -> Tensor:
    """act((x @ w^T) * w_scale * x_scale + bias) + residual, in one kernel, as fp16, bf16 or fp32.

    Args:
        x: int8 `[..., K]`, 1 <= K <= 131071; M is the product of the leading dimensions and may be 0.
        w: int8 `[N, K]`.
        x_scale: fp32, one element, or `[M]` or `[M, 1]`; or a float.
        w_scale: fp32, one element, or `[N]` or `[N, 1]`; or a float.
        bias: fp32, fp16 or bf16 `[N]`.
        activation: None, "relu", "gelu" (erf), "gelu_tanh" or "silu".
        residual: fp16, bf16 or fp32, shaped like the output; may be `out` itself.
        out_dtype: torch.float16, torch.bfloat16 or torch.float32.
        engine: "auto", or a name of `octofuse.engines()` or its part before "/". Never falls back in silence.
        out: where to write, shaped `[..., N]` in `out_dtype`, with dense rows; must not overlap x, w or bias.
        x_zero_point: asymmetric activations, x standing for x - x_zero_point: an int in [-128, 127], or int32 with one
            element, `[M]` or `[M, 1]`. Needs w_sum, and K <= 65793.
        w_sum: int32 `[N]`, `octofuse.weight_sums(w)`, computed once for a weight.
        constant_weight: promises that nothing in flight on the stream writes w, w_scale, bias or w_sum. In a captured
            graph the kernel then reads weights before its predecessor has finished.

    Returns:
        `[..., N]` in `out_dtype`; `out` if it was given.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if goes_direct(x, w, x_scale, w_scale, bias, residual, out, x_zero_point, w_sum):
        return _linear(
            x,
            w,
            x_scale,
            w_scale,
            bias,
            activation,
            residual,
            out_dtype,
            engine,
            x_zero_point,
            w_sum,
            constant_weight,
            out,
        )
    # Tracing detaches what it records, so a lost gradient has to be refused here as well.
    refuse_gradients("this op", bias=bias, residual=residual, x_scale=x_scale, w_scale=w_scale, out=out)
    scales = (as_tensor("x_scale", x_scale, x), as_tensor("w_scale", w_scale, x))
    zero = (as_int_tensor("x_zero_point", x_zero_point, x), w_sum, constant_weight)
    return _dispatch("i8f16_linear", (x, w, *scales, bias, activation, residual, out_dtype, engine, *zero), out)


def i8i8_linear(
    x: Tensor,
    w: Tensor,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    out_scale: Scale,
    activation: str | None = None,
    residual: Tensor | None = None,
    engine: str = "auto",
    out: Tensor | None = None,
    x_zero_point: ZeroPoint | None = None,
    w_sum: Tensor | None = None,
    constant_weight: bool = False,
) -> Tensor:
    """`i8f16_linear` requantised to int8 in the same kernel: clamp(rne(t * (1 / out_scale)), -127, 127).

    out_scale is one fp32 element or a float; the other arguments are those of `i8f16_linear`.
    """
    if goes_direct(x, w, x_scale, w_scale, bias, residual, out_scale, out, x_zero_point, w_sum):
        return _linear_i8(
            x,
            w,
            x_scale,
            w_scale,
            bias,
            activation,
            residual,
            out_scale,
            engine,
            x_zero_point,
            w_sum,
            constant_weight,
            out,
        )
    refuse_gradients("this op", bias=bias, residual=residual, x_scale=x_scale, w_scale=w_scale, out=out)
    scales = (as_tensor("x_scale", x_scale, x), as_tensor("w_scale", w_scale, x))
    zero = (as_int_tensor("x_zero_point", x_zero_point, x), w_sum, constant_weight)
    out_scale = as_tensor("out_scale", out_scale, x)
    return _dispatch("i8i8_linear", (x, w, *scales, bias, activation, residual, out_scale, engine, *zero), out)


def weight_sums(w: Tensor) -> Tensor:
    """w int8 `[N, K]` -> the sums of its rows, int32 `[N]`: what `x_zero_point` needs, once for each weight."""
    if w.dtype != torch.int8 or w.dim() != 2:
        raise TypeError(f"w: expected an int8 tensor [N, K], got {w.dtype} {list(w.shape)}")
    sums: Tensor = w.sum(1, dtype=torch.int32)
    return sums


def i8i32_matmul(x: Tensor, w: Tensor, *, engine: str = "auto", out: Tensor | None = None) -> Tensor:
    """x [..., K] int8, w [N, K] int8 -> x @ w^T as int32 [..., N], exact."""
    if goes_direct(x, w, out):
        return _matmul(x, w, engine, out)
    return _dispatch("i8i32_matmul", (x, w, engine), out)


def i8i8_matmul(x: Tensor, w: Tensor, alpha: float, *, engine: str = "auto", out: Tensor | None = None) -> Tensor:
    """clamp(rne(float(x @ w^T) * alpha), -128, 127) as int8 [..., N]: cuBLASLt's own requantisation.

    alpha is one float above 0 for the whole product; there is no bias and no activation, and the range includes -128
    (`i8i8_linear` clamps at -127).
    """
    if goes_direct(x, w, out):
        return _matmul_i8(x, w, alpha, engine, out)
    return _dispatch("i8i8_matmul", (x, w, alpha, engine), out)


def _dispatch(op: str, arguments: tuple[Any, ...], out: Tensor | None) -> Tensor:
    """The call as torch's dispatcher has to see it; with `out` the op that declares what it writes."""
    if out is None:
        result: Tensor = getattr(torch.ops.octofuse, op)(*arguments)
        return result
    getattr(torch.ops.octofuse, op + "_out")(*arguments, out=out)
    return out


# What both the direct path and the dispatcher run. `_C` checks everything and, for CPU tensors, returns None.


def _linear(
    x: Tensor,
    w: Tensor,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    engine: str,
    x_zero_point: ZeroPoint | None = None,
    w_sum: Tensor | None = None,
    constant_weight: bool = False,
    out: Tensor | None = None,
    out_scale: Scale | None = None,
) -> Tensor:
    """Both linears: `out_scale` makes the output int8, else it is `out_dtype`."""
    if torch.is_grad_enabled():
        refuse_gradients("this op", bias=bias, residual=residual, x_scale=x_scale, w_scale=w_scale, out=out)
    name = dtype_name(out_dtype)
    result = _C.linear(
        x,
        w,
        x_scale,
        w_scale,
        bias,
        activation,
        residual,
        name,
        out_scale,
        engine,
        out,
        x_zero_point,
        w_sum,
        constant_weight,
    )
    if result is not None:
        return result
    flat = x.reshape(-1, x.shape[-1])
    if x_zero_point is None or w_sum is None:
        acc = cpu.accumulate(flat, w, engine)
    else:
        cpu.select_raw(engine)  # oneDNN's products are rounded to fp32: nothing could be subtracted from them exactly
        acc = reference.subtract_zero_point(reference.accumulate(flat, w), x_zero_point, w_sum)
    flat_residual = None if residual is None else residual.reshape(acc.shape)
    t = reference.finish(acc, x_scale, w_scale, bias, activation, flat_residual, out_dtype, out_scale)
    return _deliver(t, x, w, out)


def _linear_i8(
    x: Tensor,
    w: Tensor,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None,
    activation: str | None,
    residual: Tensor | None,
    out_scale: Scale,
    engine: str,
    x_zero_point: ZeroPoint | None = None,
    w_sum: Tensor | None = None,
    constant_weight: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    if out_scale is None:
        raise TypeError("out_scale: expected float or torch.Tensor, got NoneType")
    zero = (x_zero_point, w_sum, constant_weight)
    return _linear(x, w, x_scale, w_scale, bias, activation, residual, torch.int8, engine, *zero, out, out_scale)


def _matmul(x: Tensor, w: Tensor, engine: str, out: Tensor | None = None) -> Tensor:
    result = _C.matmul(x, w, None, engine, out)
    if result is not None:
        return result
    cpu.select_raw(engine)
    return _deliver(reference.accumulate(x.reshape(-1, x.shape[-1]), w), x, w, out)


def _matmul_i8(x: Tensor, w: Tensor, alpha: float, engine: str, out: Tensor | None = None) -> Tensor:
    result = _C.matmul(x, w, alpha, engine, out)
    if result is not None:
        return result
    t = cpu.accumulate(x.reshape(-1, x.shape[-1]), w, engine).float() * torch.tensor(alpha, dtype=torch.float32)
    return _deliver(reference.requantize(t, 1.0, low=-128), x, w, out)


def _deliver(flat: Tensor, x: Tensor, w: Tensor, out: Tensor | None) -> Tensor:
    result = flat.reshape(*x.shape[:-1], w.shape[0])
    return result if out is None else out.copy_(result)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "i8f16_linear": _linear,
    "i8i8_linear": _linear_i8,
    "i8i32_matmul": _matmul,
    "i8i8_matmul": _matmul_i8,
}
