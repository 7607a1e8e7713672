"""int8 linear layers with a fused epilogue: the public functional API.

Every function takes x [..., K] int8 and w [N, K] int8, both dense in K, on one device, and computes
`reference`'s formula. All tensors go to `_C`, which has kernels for GPUs and CPUs; on CPUs with AMX many rows go to
oneDNN. Bad arguments raise TypeError or ValueError naming the argument before anything is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse import _C, reference
from octofuse.ops import cpu
from octofuse.ops._calls import LinearCall, Scale, ZeroPoint, run
from octofuse.ops._guard import goes_direct
from octofuse.ops.activations import Activation


def i8f16_linear(
    x: Tensor,
    w: Tensor,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    activation: Activation | None = None,
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

    Examples:
        >>> x, w = torch.ones(1, 4, dtype=torch.int8), torch.full((2, 4), 3, dtype=torch.int8)
        >>> octofuse.i8f16_linear(x, w, 0.5, torch.tensor([1.0, -1.0]), activation="relu")
        tensor([[6., 0.]], dtype=torch.float16)
    """
    call = LinearCall(
        x, w, x_scale, w_scale, bias, activation, residual, out_dtype, None, engine, x_zero_point, w_sum, constant_weight
    )  # fmt: skip
    result: Tensor = run("linear", "this op", call, linear, out)
    return result


def i8i8_linear(
    x: Tensor,
    w: Tensor,
    x_scale: Scale,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    out_scale: Scale,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    engine: str = "auto",
    out: Tensor | None = None,
    x_zero_point: ZeroPoint | None = None,
    w_sum: Tensor | None = None,
    constant_weight: bool = False,
) -> Tensor:
    """`i8f16_linear` requantised to int8 in the same kernel: clamp(rne(t * (1 / out_scale)), -127, 127).

    Args:
        out_scale: fp32, one element, or a float above 0: what one step of the output stands for.
        x, w, x_scale, w_scale, bias, activation, residual, engine, x_zero_point, w_sum, constant_weight: as `i8f16_linear`
            takes them.
        out: where to write, int8 `[..., N]`.

    Returns:
        int8 `[..., N]`; `out` if it was given.

    Raises:
        TypeError, ValueError: naming the argument.

    Examples:
        >>> x, w = torch.ones(1, 4, dtype=torch.int8), torch.full((2, 4), 3, dtype=torch.int8)
        >>> octofuse.i8i8_linear(x, w, 0.5, 1.0, out_scale=2.0)
        tensor([[3, 3]], dtype=torch.int8)
    """
    if out_scale is None:
        raise TypeError("out_scale: expected float or torch.Tensor, got NoneType")
    call = LinearCall(
        x, w, x_scale, w_scale, bias, activation, residual, torch.int8, out_scale, engine, x_zero_point, w_sum,
        constant_weight,
    )  # fmt: skip
    result: Tensor = run("linear", "this op", call, linear, out)
    return result


def weight_sums(w: Tensor) -> Tensor:
    """w int8 `[N, K]` -> the sums of its rows, int32 `[N]`: what `x_zero_point` needs, once for each weight.

    Raises TypeError for anything else.

    Examples:
        >>> octofuse.weight_sums(torch.ones(2, 3, dtype=torch.int8))
        tensor([3, 3], dtype=torch.int32)
    """
    if w.dtype != torch.int8 or w.dim() != 2:
        raise TypeError(f"w: expected an int8 tensor [N, K], got {w.dtype} {list(w.shape)}")
    sums: Tensor = w.sum(1, dtype=torch.int32)
    return sums


def i8i32_matmul(x: Tensor, w: Tensor, *, engine: str = "auto", out: Tensor | None = None) -> Tensor:
    """x @ w^T as int32 `[..., N]`, exact, for x int8 `[..., K]` and w int8 `[N, K]`, K at most 131071.

    engine and out: as in `i8f16_linear`. Raises TypeError or ValueError naming the argument.

    Examples:
        >>> octofuse.i8i32_matmul(torch.full((1, 3), -128, dtype=torch.int8), torch.full((1, 3), -128, dtype=torch.int8))
        tensor([[49152]], dtype=torch.int32)
    """
    if goes_direct(x, w, out):
        return _matmul(x, w, engine, out)
    return _dispatch("i8i32_matmul", (x, w, engine), out)


def i8i8_matmul(x: Tensor, w: Tensor, alpha: float, *, engine: str = "auto", out: Tensor | None = None) -> Tensor:
    """clamp(rne(float(x @ w^T) * alpha), -128, 127) as int8 [..., N]: cuBLASLt's own requantisation.

    x int8 `[..., K]`, w int8 `[N, K]`; alpha is one float above 0 for the whole product; there is no bias and no
    activation, and the range includes -128 (`i8i8_linear` clamps at -127). engine and out: as in `i8f16_linear`. Raises
    TypeError or ValueError naming the argument. Source: cuBLAS manual, cublasLtMatmul with CUDA_R_8I output.

    Examples:
        >>> x = torch.full((1, 4), 5, dtype=torch.int8)
        >>> octofuse.i8i8_matmul(x, x, 0.5)
        tensor([[50]], dtype=torch.int8)
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


# What both the direct path and the dispatcher run. `_C` checks everything and returns None where torch is to compute.


def linear(call: LinearCall, out: Tensor | None = None) -> Tensor:
    """Both linears: `out_scale` makes the output int8, else it is `out_dtype`."""
    if out is not None and call.residual is not None:
        call = _apart(call, out)
    result = _C.linear(call, out)
    if result is not None:
        return result
    x, w = call.x, call.w
    if w.dtype != torch.int8:
        raise ValueError(f"engine: expected 'auto' or 'cpu' for float8 on a CPU, got {call.engine!r}")
    flat = x.reshape(-1, x.shape[-1])
    # oneDNN's products are rounded to fp32: nothing could be subtracted from them exactly.
    symmetric = call.x_zero_point is None or call.w_sum is None
    engine = cpu.select(call.engine, flat.numel() * w.shape[0]) if symmetric else cpu.select_raw(call.engine)
    if engine == "cpu":
        return linear(call._replace(engine=engine), out)
    acc = cpu.accumulate(flat, w, engine)
    if call.x_zero_point is not None and call.w_sum is not None:
        acc = reference.subtract_zero_point(acc, call.x_zero_point, call.w_sum)
    residual = None if call.residual is None else call.residual.reshape(acc.shape)
    scales = (call.x_scale, call.w_scale)
    t = reference.finish(acc, *scales, call.bias, call.activation, residual, call.out_dtype, call.out_scale)
    return _deliver(t, x, w, out)


def _apart(call: LinearCall, out: Tensor) -> LinearCall:
    """The residual in memory of its own, where an fp32 output that it shares may hold float8's sums meanwhile."""
    tensors: tuple[Any, ...] = (call.w, call.residual, out)
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        return call  # `_C` says what is wrong
    w, residual, _ = tensors
    shared = w.dtype != torch.int8 and out.dtype == torch.float32 and residual.data_ptr() == out.data_ptr()
    return call._replace(residual=residual.clone()) if shared else call


def _matmul(x: Tensor, w: Tensor, engine: str, out: Tensor | None = None) -> Tensor:
    result = _C.matmul(x, w, None, engine, out)
    if result is not None:
        return result
    if cpu.select_raw(engine) == "cpu":
        return _matmul(x, w, "cpu", out)
    return _deliver(reference.accumulate(x.reshape(-1, x.shape[-1]), w), x, w, out)


def _matmul_i8(x: Tensor, w: Tensor, alpha: float, engine: str, out: Tensor | None = None) -> Tensor:
    result = _C.matmul(x, w, alpha, engine, out)
    if result is not None:
        return result
    flat = x.reshape(-1, x.shape[-1])
    if (chosen := cpu.select(engine, flat.numel() * w.shape[0])) == "cpu":
        return _matmul_i8(x, w, alpha, chosen, out)
    t = cpu.accumulate(flat, w, chosen).float() * torch.tensor(alpha, dtype=torch.float32)
    return _deliver(reference.requantize(t, 1.0, low=-128), x, w, out)


def _deliver(flat: Tensor, x: Tensor, w: Tensor, out: Tensor | None) -> Tensor:
    result = flat.reshape(*x.shape[:-1], w.shape[0])
    return result if out is None else out.copy_(result)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "i8i32_matmul": _matmul,
    "i8i8_matmul": _matmul_i8,
}
