"""The one formula, in plain torch: every engine, tile and device of this library is checked against this file.

    acc = sum_k x[m, k] * w[n, k]                               exact (int32)
    acc = acc - x_zero[m] * w_sum[n]                            exact; only with a zero point
    t = float(acc); t = t * w_scale[n]; t = t * x_scale[m]
    t = t + bias[n]; t = act(t); t = t + residual[m, n]
    y = t rounded to fp16, bf16 or fp32, or clamp(rne(t * r), low, 127) with r = 1 / out_scale for int8

Each step is one IEEE fp32 operation, rounded once. `act` is the exact function of t rounded once to fp32 (evaluated in
double here); engines may differ from it by 1 ulp of the output type.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

# Evaluated in double; tests compare the names with those of the kernels (cpp/include/octofuse/activations.def).
_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": lambda d: torch.where(d < 0, torch.zeros_like(d), d),  # keeps NaN
    "gelu": lambda d: 0.5 * d * torch.special.erfc(d * -math.sqrt(0.5)),
    "gelu_tanh": lambda d: d / (1 + torch.exp(-2 * math.sqrt(2 / math.pi) * (d + 0.044715 * d**3))),
    "silu": lambda d: d / (1 + torch.exp(-d)),
}
ACTIVATIONS = (None, *_FUNCTIONS)


def accumulate(x: Tensor, w: Tensor) -> Tensor:
    """x [M, K] int8, w [N, K] int8 -> [M, N] int32, exact.

    Through double: at most 2^17 products of at most 2^14 stay far below 2^53, so every partial sum is exact.
    """
    product: Tensor = x.double() @ w.double().t()
    return product.to(torch.int32)


def subtract_zero_point(acc: Tensor, x_zero_point: Tensor | int, w_sum: Tensor) -> Tensor:
    """acc [M, N] int32, zero point (one or [M]) and w_sum [N] int32 -> sum_k (x - x_zero_point) * w, exact."""
    zero = torch.as_tensor(x_zero_point, dtype=torch.int32, device=acc.device).reshape(-1, 1)
    return acc - zero * w_sum.reshape(1, -1)


def activate(t: Tensor, activation: str | None) -> Tensor:
    """fp32 -> fp32; gelu is the erf form, gelu_tanh GPT-2's (Hendrycks and Gimpel, 2016), silu = t * sigmoid(t)."""
    if activation is None:
        return t
    if activation not in _FUNCTIONS:
        raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {activation!r}")
    if activation == "relu":  # exact in every type
        return _FUNCTIONS[activation](t)
    return _FUNCTIONS[activation](t.double()).float()


def requantize(t: Tensor, out_scale: Tensor | float, low: int = -127) -> Tensor:
    """clamp(rne(t * r), low, 127) as int8 with r = 1 / out_scale rounded to fp32; NaN becomes 0."""
    scale = torch.as_tensor(out_scale, dtype=torch.float32, device=t.device)
    return (
        (t * (torch.ones_like(scale) / scale)).round_().nan_to_num_(0.0, 127.0, -128.0).clamp_(low, 127).to(torch.int8)
    )


def finish(
    acc: Tensor,
    x_scale: Tensor | float,
    w_scale: Tensor | float,
    bias: Tensor | None = None,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    out_scale: Tensor | float | None = None,
) -> Tensor:
    """The formula behind the accumulators: acc [M, N] int32 or its exact fp32 rounding, residual [M, N] -> [M, N]."""
    t = dequantize(acc, w_scale, x_scale)
    if bias is not None:
        t += bias.float()
    t = activate(t, activation)
    if residual is not None:
        t = t + residual.float()
    return t.to(out_dtype) if out_scale is None else requantize(t, out_scale)


def dequantize(acc: Tensor, w_scale: Tensor | float, x_scale: Tensor | float) -> Tensor:
    """float(acc) * w_scale[n] * x_scale[m] in that order; a new fp32 tensor [M, N]."""
    t = acc.float() * _as_vector(w_scale, acc).reshape(1, -1)
    return t.mul_(_as_vector(x_scale, acc).reshape(-1, 1))


def _as_vector(scale: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(scale, dtype=torch.float32, device=like.device)


def linear(
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | float,
    w_scale: Tensor | float,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype = torch.float16,
    out_scale: Tensor | float | None = None,
    x_zero_point: Tensor | int | None = None,
) -> Tensor:
    """What `octofuse.i8f16_linear` (or, with out_scale, `i8i8_linear`) must return, for x [..., K]."""
    acc = accumulate(x.reshape(-1, x.shape[-1]), w)
    if x_zero_point is not None:
        acc = subtract_zero_point(acc, x_zero_point, w.sum(1, dtype=torch.int32))
    flat_residual = None if residual is None else residual.reshape(acc.shape)
    out = finish(acc, x_scale, w_scale, bias, activation, flat_residual, out_dtype, out_scale)
    return out.reshape(*x.shape[:-1], w.shape[0])


def row_sum(v: Tensor) -> Tensor:
    """v fp32 [rows, K] -> [rows, 1], added in the one order that every device uses.

    8 consecutive elements as a tree, 32 such packs as a tree (a group), lane l of 32 adds groups l, l + 32, ... in order,
    and the lanes as a tree. Zeros fill the last group: they change no sum.
    """
    rows, length = v.shape
    padded = -(-length // 8192) * 8192
    packs = torch.nn.functional.pad(v, (0, padded - length)).reshape(rows, padded // 8192, 32, 32, 8)
    for _ in range(3):
        packs = packs[..., 0::2] + packs[..., 1::2]
    groups = _halve(packs.squeeze(-1))  # [rows, rounds, 32 lanes]
    lanes = torch.zeros_like(groups[:, 0])
    for i in range(groups.shape[1]):
        lanes = lanes + groups[:, i]
    return _halve(lanes).unsqueeze(-1)


def _halve(v: Tensor) -> Tensor:
    """[..., 32] -> [...]: element i plus element i + 16, then + 8, 4, 2 and 1."""
    for half in (16, 8, 4, 2, 1):
        v = v[..., :half] + v[..., half:]
    return v.squeeze(-1)


def norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, center: bool) -> Tensor:
    """Layer norm (`center`) or RMS norm of x [..., K], every step one fp32 operation -> x's dtype."""
    v = x.reshape(-1, x.shape[-1]).float()
    length = torch.full((1, 1), float(v.shape[1]), device=v.device)
    if center:
        v = v - row_sum(v) / length
    variance = row_sum(v * v) / length + torch.tensor(eps, dtype=torch.float32, device=v.device)
    # Through double: torch's fp32 square root on a CPU may be off by an ulp, and this one rounds to the exact one.
    root = torch.sqrt(variance.double()).float()
    t = v * (torch.ones_like(root) / root)
    if weight is not None:
        t = t * weight.float()
    if bias is not None:
        t = t + bias.float()
    return t.to(x.dtype).reshape(x.shape)


LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def quantize(x: Tensor, scale: Tensor | float, dtype: torch.dtype = torch.int8) -> Tensor:
    """q = clamp(rne(float(x) * r), -127, 127) with r = 1 / scale; scale broadcasts against x. float8: at most LARGEST."""
    if dtype == torch.int8:
        return requantize(x.float(), scale)
    scale = torch.as_tensor(scale, dtype=torch.float32, device=x.device)
    t = x.float() * (torch.ones_like(scale) / scale)
    return t.clamp_(-LARGEST[dtype], LARGEST[dtype]).to(dtype)


def scales_of(amax: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """amax fp32 -> s = amax / LARGEST, and 1 for zeros."""
    # A tensor divisor: torch multiplies by the inverse of a Python number on CUDA, which rounds twice.
    return torch.where(amax == 0, torch.ones_like(amax), amax / torch.full_like(amax, LARGEST[dtype]))


def token_scales(x: Tensor, dtype: torch.dtype = torch.int8) -> Tensor:
    """x [..., K] -> [rows, 1] fp32: s = amax / 127 (float8: LARGEST), and 1 for a row of zeros."""
    return scales_of(x.reshape(-1, x.shape[-1]).float().abs().amax(dim=-1, keepdim=True), dtype)


def block_scales(w: Tensor, rows: int, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """w [N, K] -> fp32 [ceil(N / rows), ceil(K / 128)], one scale for each block of rows x 128."""
    n, k = w.shape
    padded = torch.nn.functional.pad(w.float().abs(), (0, -k % 128, 0, -n % rows))
    return scales_of(padded.view(-(-n // rows), rows, -(-k // 128), 128).amax((1, 3)), dtype)


def expanded(scales: Tensor, n: int, k: int, rows: int) -> Tensor:
    """Scales of blocks of rows x 128 -> [n, k], each at its elements."""
    return scales.repeat_interleave(rows, 0)[:n].repeat_interleave(128, 1)[:, :k]


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] -> int8 of the same shape and its [rows, 1] scales."""
    scales = token_scales(x)
    return quantize(x.reshape(-1, x.shape[-1]), scales).reshape(x.shape), scales
