"""What a decoding step calls: linears that quantise their own input, and kernels for embedding, attention and argmax.

`quantized_linear` is public. The others serve `octofuse.engine` on a GPU that `serves()` and `takes_logits()`
name; there is no CPU version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops import gemm, rows
from octofuse.ops._calls import AttendCall, LinearCall, RowLinearCall, Scale, run
from octofuse.ops.activations import Activation
from octofuse.ops.linear import check_output


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
    activation: Activation | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out_scale: Scale | None = None,
    constant_weight: bool = False,
    fast_accumulate: bool = False,
) -> Tensor:
    """act(quantise(norm(x)) @ w^T * scales + bias) + residual: an 8-bit linear on activations in floating point.

    The bits are those of the parts, whatever M is: `layer_norm` or `rms_norm`, then `quantize_per_token` (with x_scale
    `quantize_per_tensor`), then `i8f16_linear` (with out_scale `i8i8_linear`). For a weight in float8_e4m3fn x is quantised
    to that, with a w_scale of blocks by `quantize_per_block`, and `linear` follows. On compute capability 9.0 one token and
    a small int8 weight take one kernel, which quantises while its weights are on their way; others take two.

    Args:
        x: fp16, bf16 or fp32 `[..., K]`, dense in K; or quantised already, with x_scale as `linear` takes it.
        w, w_scale, bias, activation, residual, constant_weight, fast_accumulate: as in `linear`; constant_weight covers
            x_scale and the norm's weight and bias too.
        x_scale: fp32, one element, or a float: static activations. None: every token gets its own scale.
        norm: None, "layer_norm" or "rms_norm"; norm_weight and norm_bias (layer norm alone) are `[K]` in fp32 or x's
            dtype.
        out_dtype: torch.float16, torch.bfloat16 or torch.float32; None: x's, fp16 for 8 bits. With
            out_scale and a float8 weight torch.int8 or torch.float8_e4m3fn, which is what None means there.
        out_scale: fp32, one element, or a float: int8 output, or what out_dtype says.

    Returns:
        `[..., N]`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    rows.check_norm(norm, norm_weight, norm_bias)
    if out_dtype is None:
        out_dtype = torch.float16 if x.dtype.itemsize == 1 else x.dtype
        if out_scale is not None and isinstance(w, Tensor) and w.dtype.itemsize == 1:
            out_dtype = w.dtype
    elif out_dtype == torch.float8_e4m3fn:
        check_output(w, out_dtype, out_scale)
    call = RowLinearCall(
        x, w, x_scale, w_scale, norm, norm_weight, norm_bias, eps, bias, activation, residual, out_dtype, out_scale,
        constant_weight, fast_accumulate,
    )  # fmt: skip
    result: Tensor = run("quantized_linear", "quantized_linear", call, _quantized_linear)
    return result


def _quantized_linear(call: RowLinearCall) -> Tensor:
    result = _C.quantized_linear(call)
    return _by_parts(call) if result is None else result


def _by_parts(call: RowLinearCall) -> Tensor:
    """On a CPU where oneDNN multiplies faster than `_C` does."""
    x: Tensor = call.x
    scale: Any = call.x_scale
    if call.norm is not None:
        x = rows.normed(call)
    if x.dtype != torch.int8:
        x, scale = _C.quantize_per_token(x) if scale is None else (_C.quantize_per_tensor(x, scale), scale)
    epilogue = (call.bias, call.activation, call.residual, call.out_dtype, call.out_scale)
    return gemm.linear(LinearCall(x, call.w, scale, call.w_scale, *epilogue, "auto", None, None, call.constant_weight))


def serves(device: torch.device, dtype: torch.dtype, head_size: int, width: int, eight_bits: bool = False) -> bool:
    """Whether `attend`, `append`, `embed` and `argmax` take such a model; eight_bits: of the cache."""
    if eight_bits and head_size % 16 != 0:
        return False
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or width % 8 != 0:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0) and head_size % 8 == 0 and head_size <= 256


def attend_scratch(
    batch: int, queries: int, pairs: int, head_size: int, capacity: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """partials and arrivals of an AttendCall, for every call on such a cache; calls that share them must not overlap."""
    floats, counters = _C.attend_scratch(batch, queries, pairs, head_size, capacity)
    return torch.empty(floats, device=device), torch.zeros(counters, dtype=torch.int32, device=device)


def append(call: AttendCall) -> None:
    """Prompts: keys and values of B sequences of T tokens each go into the cache at positions 0 to T - 1.

    Queries and keys `[B * T, heads, D]` are normalised and rotated in their place; the cache gets the result. Fields, here
    and in `attend`, fp16 or bf16 where nothing else is said:

    q `[M, H, D]`, k and v `[M, P, D]`, H a multiple of P: views into one tensor are fine, dense in D.
    positions: None, or int64 `[B]`: where each sequence's first token stands.
    keys, values `[B, P, C, D]`: like q, or int8 or uint8 (float8_e4m3fn) with key_scales and value_scales, fp32
        `[B, P, C]`: then a token's D values share a scale, their largest magnitude / 127 or / 448; D: a multiple of 16.
    fixed_scales: None, or beside float8 the scale of all new keys and that of all new values, which go into key_scales and
        value_scales; what lies beyond 448 of them is cut off.
    rotary: fp32 `[at least C, R]`: cosines and sines of each position's R / 2 angles; channel i < R / 2 turns with
        channel i + R / 2. None: nothing is rotated. query_norm, key_norm: fp32, or like q, `[D]`: weights of RMS norms
        with eps in front of that.
    scaling: of scores; window: positions that a token sees, its own included, 0: all; softcap: c of c * tanh(s / c),
        0: none.
    """
    _C.append(call)


def attend(call: AttendCall) -> Tensor:
    """One new token of each sequence: its key and value go into the cache, and it attends to all that it sees.

    Fields as in `append`, and positions int64 `[B]`, each below C -> `[B, H * D]` like q, or with out_scale int8: quantised
    as `quantize_per_tensor` does. k and v None: the cache has the token already. starts: None, or int64 `[B]`, the first
    position that each sequence sees. A long sequence is split by its own length and put together in order, so neither B nor
    C changes a bit. In a captured graph the cache, positions, rotary, norms and out_scale are read before earlier kernels
    have finished: what writes them must come before an `embed` or a kernel of another library, which nothing overtakes.
    """
    return _C.attend(call)


def embed(
    ids: Tensor,
    positions: Tensor,
    token_embeddings: Tensor,
    position_embeddings: Tensor | None,
    multiplier: float = 1.0,
) -> Tensor:
    """ids, positions int64 `[B]` -> multiplier * token_embeddings[ids] + position_embeddings[positions] (None: without),
    `[B, width]`, fp16 or bf16, rounded once."""
    return _C.embed(ids, positions, token_embeddings, position_embeddings, multiplier)


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


def argmax(logits: Tensor, ids: Tensor, history: Tensor, counts: Tensor, positions: Tensor, advance: bool) -> None:
    """The likeliest token of each row of logits, fp16 or bf16 `[B, V]`, the first of equals; NaN is above all.

    It goes into ids `[B]` and history `[B, C]` at counts `[B]`, which grows by one, as positions `[B]` does if `advance`.
    """
    _C.argmax(logits, ids, history, counts, positions, advance)


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"quantized_linear": _quantized_linear}
