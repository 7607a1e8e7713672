"""A cache of keys and values in 8 bits, a scale for each token and head: its codes, and attention of one token over them.

`torch.ops.octofuse.cache_append` and `cache_attend` are for `models.QuantizedStaticCache`: on a GPU that
`decode.serves` names one kernel each, elsewhere steps of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octofuse import _C
from octofuse.ops import decode
from octofuse.ops._calls import AttendCall
from octofuse.ops.quantize import quantize_per_token

FP8_MOST = 448.0  # of float8_e4m3fn
CACHE_KINDS = ("int8", "fp8")
FIXED = "fp8-static"  # fp8 with scales that the model has


def new_codes(shape: tuple[int, ...], kind: str | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes and their scales, zero; kind: one of CACHE_KINDS, FIXED, or None for the dtype of `like`."""
    if kind is None:
        return like.new_zeros(shape), None
    dtype = torch.int8 if kind == "int8" else torch.uint8
    return like.new_zeros(shape, dtype=dtype), like.new_zeros(shape[:-1], dtype=torch.float32)


def encoded(x: Tensor, dtype: torch.dtype, fixed: float | None = None) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> codes of dtype int8 or uint8 (e4m3), and fp32 scales `[...]`: largest magnitude / 127, or / 448.

    fixed: of e4m3, the scale of all; what lies beyond 448 of it is cut off.
    """
    if dtype == torch.int8:
        codes, scales = quantize_per_token(x.contiguous())
        return codes, scales.view(x.shape[:-1])
    amax = x.abs().amax(-1).float()
    if fixed is None:
        scales = torch.where(amax == 0, torch.ones_like(amax), amax / FP8_MOST)
    else:
        scales = torch.full_like(amax, fixed)
    codes = (x.float() * (1 / scales).unsqueeze(-1)).clamp(-FP8_MOST, FP8_MOST)
    return codes.to(torch.float8_e4m3fn).view(torch.uint8), scales


def decoded(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a cache stands for, in `dtype`."""
    if scales is None:
        return codes
    values = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    return (values.float() * scales.unsqueeze(-1)).to(dtype)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """q `[B, H, T, D]`, k and v `[B, P, S, D]` -> like q: attention where `seen`, which broadcasts to `[B, H, T, S]`."""
    if softcap is None:
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=True)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = softcap * torch.tanh((q @ k.transpose(-1, -2)).float() * (scaling / softcap))
    lowest = torch.finfo(torch.float32).min  # not -inf: a row of padding sees nothing, and has to stay finite
    return scores.masked_fill(~seen, lowest).softmax(-1).to(q.dtype) @ v


def _serves(x: Tensor) -> bool:
    return decode.serves(x.device, x.dtype, x.shape[-1], 8, eight_bits=True)


def _call(**fields: Any) -> AttendCall:
    """Nothing is normalised, rotated or split further."""
    usual: dict[str, Any] = dict.fromkeys(AttendCall._fields) | {"eps": 0.0, "window": 0}
    return AttendCall(**usual | fields)


def _cache_append(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor, value_scales: Tensor, first: Tensor
) -> None:
    batch, _, length, _ = k.shape
    if _serves(k):
        k, v = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (k, v))
        positions = first.reshape(1).expand(batch).contiguous()
        _C.append(
            _call(q=k, k=k, v=v, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales,
                  positions=positions)
        )  # fmt: skip
        return
    positions = first + torch.arange(length, device=k.device)
    for new, codes, scales in ((k, keys, key_scales), (v, values, value_scales)):
        of_tokens, scales_of_tokens = encoded(new, codes.dtype)
        codes.index_copy_(2, positions, of_tokens)
        scales.index_copy_(2, positions, scales_of_tokens)


def _cache_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    key_scales: Tensor,
    value_scales: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None,
) -> Tensor:
    batch, heads, _, size = q.shape
    if _serves(q):
        # In a captured graph attention reads the cache before earlier kernels have finished. The zeros of this scratch are
        # written by torch in between, which nothing overtakes: what cache_append has written is there.
        partials, arrivals = decode.attend_scratch(batch, heads, keys.shape[1], size, keys.shape[2], q.device)
        call = _call(
            q=q.reshape(batch, heads, size), keys=keys, values=values, key_scales=key_scales, value_scales=value_scales,
            scaling=scaling, softcap=softcap or 0.0, starts=seen[0], positions=seen[1], partials=partials,
            arrivals=arrivals,
        )  # fmt: skip
        return decode.attend(call).view(batch, 1, heads, size)
    at = torch.arange(keys.shape[2], device=q.device)
    visible = (at >= seen[0].unsqueeze(1)) & (at <= seen[1].unsqueeze(1))
    k, v = (decoded(codes, scales, q.dtype) for codes, scales in ((keys, key_scales), (values, value_scales)))
    return masked_attention(q, k, v, visible[:, None, None, :], scaling, softcap).transpose(1, 2).contiguous()


IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"cache_append": _cache_append, "cache_attend": _cache_attend}
