"""What a decoding step calls: linears that quantise their own input, and kernels for embedding, attention and choice.

`quantized_linear` is public. The others serve `models.decoder` on a GPU that `serves()` and `takes_logits()`
name; there is no CPU version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import gemm, rows
from octofuse.ops._guard import as_tensor, dtype_name, goes_direct, refuse_gradients
from octofuse.ops.quantize import _per_tensor, _per_token

Scale = Tensor | float


def quantized_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Scale,
    bias: Tensor | None = None,
    *,
    x_scale: Scale | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Scale | None = None,
    constant_weight: bool = False,
) -> Tensor:
    """act(quantise(norm(x)) @ w^T * scales + bias) + residual: an int8 linear on activations in floating point.

    The bits are those of the parts, whatever M is: `layer_norm` or `rms_norm`, then `quantize_per_token` (with x_scale
    `quantize_per_tensor`), then `i8f16_linear` (with out_scale `i8i8_linear`). On compute capability 9.0 one token and a
    small weight take one kernel, which quantises while its weights are on their way; others take two.

    Args:
        x: fp16, bf16 or fp32 `[..., K]`, dense in K; or int8, quantised already, with x_scale as in `i8f16_linear`.
        w, w_scale, bias, activation, residual, constant_weight: as in `i8f16_linear`; constant_weight covers x_scale and
            the norm's weight and bias too.
        x_scale: fp32, one element, or a float: static activations. None: every token gets its own scale.
        norm: None, "layer_norm" or "rms_norm"; norm_weight and norm_bias (layer norm alone) are `[K]` in fp32 or x's
            dtype.
        out_dtype: torch.float16, torch.bfloat16 or torch.float32; None: x's, fp16 for int8.
        out_scale: fp32, one element, or a float: int8 output.

    Returns:
        `[..., N]`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    if norm not in (None, "layer_norm", "rms_norm"):
        raise ValueError(f"norm: expected None, 'layer_norm' or 'rms_norm', got {norm!r}")
    if norm != "layer_norm" and norm_bias is not None:
        raise ValueError(f"norm_bias: expected None with norm={norm!r}, got a tensor")
    if norm is None and norm_weight is not None:
        raise ValueError("norm_weight: expected None without a norm, got a tensor")
    if out_dtype is None:
        out_dtype = torch.float16 if x.dtype == torch.int8 else x.dtype
    scales = (x_scale, norm, norm_weight, norm_bias, eps, activation, residual, out_dtype, out_scale, constant_weight)
    if goes_direct(x, w, w_scale, bias, x_scale, norm_weight, norm_bias, residual, out_scale):
        return _quantized_linear(x, w, w_scale, bias, *scales)
    refuse_gradients(
        "quantized_linear", x=x, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias, residual=residual
    )
    result: Tensor = torch.ops.octofuse.quantized_linear(
        x, w, as_tensor("w_scale", w_scale, x), bias, as_tensor("x_scale", x_scale, x), *scales[1:-2],
        as_tensor("out_scale", out_scale, x), constant_weight,
    )  # fmt: skip
    return result


def _quantized_linear(
    x: Tensor,
    w: Tensor,
    w_scale: Scale,
    bias: Tensor | None,
    x_scale: Scale | None,
    norm: str | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str | None,
    residual: Tensor | None,
    out_dtype: torch.dtype,
    out_scale: Scale | None,
    constant_weight: bool,
) -> Tensor:
    if torch.is_grad_enabled():
        refuse_gradients(
            "quantized_linear", x=x, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias, residual=residual
        )
    result = _C.quantized_linear(
        x, w, w_scale, bias, x_scale, norm, norm_weight, norm_bias, eps, activation, residual, dtype_name(out_dtype),
        out_scale, constant_weight,
    )  # fmt: skip
    if result is not None:
        return result
    if norm is not None:
        x = rows._rows(x, norm, None, norm_weight, norm_bias, eps, None, False, None)[0]
    if x_scale is None:
        q, x_scale = _per_token(x)
    else:
        q = x if x.dtype == torch.int8 else _per_tensor(x, x_scale)
    arguments = (q, w, x_scale, w_scale, bias, activation, residual)
    if out_scale is None:
        return gemm._linear(*arguments, out_dtype, "auto")
    return gemm._linear_i8(*arguments, out_scale, "auto")


def serves(device: torch.device, dtype: torch.dtype, head_size: int, width: int) -> bool:
    """Whether `attend`, `embed` and `choose` take such a model."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or width % 8 != 0:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_size % 8 == 0 and head_size <= 128


def attend_scratch(
    batch: int, heads: int, head_size: int, capacity: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """The last two arguments of `attend`, for every call on such a cache; calls that share them must not overlap."""
    parts = torch.empty(_C.attend_parts(batch, heads, head_size, capacity), device=device)
    return parts, torch.zeros(batch * heads, dtype=torch.int32, device=device)


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    parts: Tensor,
    arrivals: Tensor,
    scale: Scale | None = None,
) -> Tensor:
    """One new token of each sequence: its key and value go into the cache, and it attends to all up to itself.

    qkv fp16 or bf16 `[B, 3 * H * D]`, keys and values `[B, H, C, D]` in its dtype, places int64 `[B]`, each below C ->
    `[B, H * D]` in qkv's dtype, or with `scale` int8: quantised as `quantize_per_tensor` does. Sequences are split every
    128 positions and put together in order, so neither B nor C changes a bit. In a captured graph the cache and `places`
    are read before earlier kernels have finished: what writes them must come before an `embed` or a kernel of another
    library, which nothing overtakes.
    """
    return _C.attend(qkv, keys, values, places, parts, arrivals, scale)


def embed(ids: Tensor, places: Tensor, tokens: Tensor, positions: Tensor) -> Tensor:
    """ids, places int64 `[B]` -> tokens[ids] + positions[places], `[B, width]`, fp16 or bf16."""
    return _C.embed(ids, places, tokens, positions)


def takes_logits(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether `logits` takes such rows."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16):
        return False
    return _C.takes_logits(width, torch.cuda.current_device() if device.index is None else device.index)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x `[M, K]`, weight `[V, K]`, fp16 or bf16 -> x @ weight^T, `[M, V]`, summed in fp32.

    An output head: weights are read once for 64 tokens, and no row's bits depend on the others. In a captured graph they
    are read before earlier kernels have finished: nothing in flight may write them.
    """
    return _C.logits(x, weight)[:, : weight.shape[0]]


def choose(logits: Tensor, ids: Tensor, history: Tensor, counts: Tensor, places: Tensor, advance: bool) -> None:
    """The likeliest token of each row of logits, fp16 or bf16 `[B, V]`, the first of equals; NaN is above all.

    It goes into ids `[B]` and history `[B, C]` at counts `[B]`, which grows by one, as places `[B]` does if `advance`.
    """
    _C.choose(logits, ids, history, counts, places, advance)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"quantized_linear": _quantized_linear}
