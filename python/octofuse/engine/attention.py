"""Attention over a cache: by this library's kernels where `ops.decode.serves` says so, else step by step in torch.

Both take a token's queries, keys and values `[M, heads, head size]`, normalise and rotate them, append keys and values to
the cache, quantised where it is, and attend: in a prompt to the tokens themselves, later to what the cache holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octofuse.engine.cache import Pairs
from octofuse.models.architecture import Heads
from octofuse.models.parts import Parts
from octofuse.ops import decode
from octofuse.ops._calls import AttendCall
from octofuse.ops.cache import decoded, encoded, masked_attention

SCORES_AT_ONCE = 1 << 25  # elements, where torch has no kernel that keeps them to itself


class Given(NamedTuple):
    """Queries, keys and values `[M, heads, head size]`, the block's part of the cache, what its attention is like, and the
    static scale of the layer that reads the result, or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    pairs: Pairs
    heads: Heads
    parts: Parts
    scale: Tensor | None


def rotary_table(inverse_frequencies: Tensor, scaling: float, capacity: int, device: torch.device) -> Tensor:
    """fp32 [capacity, 2 * angles]: cosines of a position's angles, then sines."""
    positions = torch.arange(capacity, dtype=torch.float32, device=device)
    angles = positions.unsqueeze(1) * inverse_frequencies.to(device)
    return torch.cat([angles.cos(), angles.sin()], -1) * scaling


def rotated(x: Tensor, table: Tensor) -> Tensor:
    """x [M, heads, size] by its positions' rows of the table [M, channels]; further channels stay."""
    cos, sin = table.unsqueeze(1).chunk(2, -1)
    channels, half = table.shape[-1], table.shape[-1] // 2
    first, second = x[..., :half].float(), x[..., half:channels].float()
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
    return torch.cat([turned, x[..., channels:]], -1)


def _halves(pairs: Pairs, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor | None, float | None, Tensor]]:
    """Codes, their scales, the scale that new ones get, and what is new: of keys, then of values."""
    key, value = (None, None) if pairs.fixed is None else pairs.fixed
    yield pairs.keys, pairs.key_scales, key, k
    yield pairs.values, pairs.value_scales, value, v


class TorchAttention:
    """The steps, one by one."""

    def __init__(self, rotary: Tensor | None) -> None:
        self.rotary = rotary

    def prepared(self, q: Tensor, k: Tensor, positions: Tensor, heads: Heads, parts: Parts) -> tuple[Tensor, Tensor]:
        """Normalised and rotated by positions [M]."""
        if parts.query_norm is not None:
            q = parts.query_norm(q.contiguous())
        if parts.key_norm is not None:
            k = parts.key_norm(k.contiguous())
        if heads.rotates:
            assert self.rotary is not None
            table = self.rotary[positions]
            q, k = rotated(q, table), rotated(k, table)
        return q, k

    def prefill(self, given: Given, batch: int) -> Tensor:
        """`batch` prompts of one length, one after the other -> [M, width]."""
        q, k, v, pairs, heads, parts, _ = given
        length = q.shape[0] // batch
        positions = torch.arange(length, device=q.device).repeat(batch)
        q, k = self.prepared(q, k, positions, heads, parts)
        q, k, v = (t.view(batch, length, -1, heads.size).transpose(1, 2) for t in (q, k, v))
        for codes, scales, fixed, new in _halves(pairs, k, v):
            if scales is not None:
                new, scales[:, :, :length] = encoded(new, codes.dtype, fixed)
            codes[:, :, :length] = new
        return _joined(causal(q, k, v, heads), heads)

    def step(self, given: Given, positions: Tensor) -> Tensor:
        """A token of each sequence at positions [B] -> [B, width]; every position of the cache is read."""
        q, k, v, pairs, heads, parts, _ = given
        q, k = self.prepared(q, k, positions, heads, parts)
        rows = torch.arange(q.shape[0], device=q.device)
        for codes, scales, fixed, new in _halves(pairs, k, v):
            if scales is not None:
                new, new_scales = encoded(new, codes.dtype, fixed)
                scales[rows, :, positions] = new_scales
            codes[rows, :, positions] = new
        at = torch.arange(pairs.keys.shape[2], device=q.device)
        seen = at <= positions.unsqueeze(1)
        if heads.window is not None:
            seen &= at > positions.unsqueeze(1) - heads.window
        keys = decoded(pairs.keys, pairs.key_scales, q.dtype)
        values = decoded(pairs.values, pairs.value_scales, q.dtype)
        return _joined(
            masked_attention(q.unsqueeze(2), keys, values, seen[:, None, None, :], heads.scaling, heads.softcap), heads
        )


class KernelAttention:
    """In one kernel for a token of each sequence; for prompts in one that prepares and appends, and FlashAttention."""

    def __init__(self, rotary: Tensor | None, scratch: tuple[Tensor, Tensor]) -> None:
        self.rotary, self.scratch = rotary, scratch

    def _call(self, given: Given, positions: Tensor | None) -> AttendCall:
        q, k, v, pairs, heads, parts, scale = given
        rotary = self.rotary if heads.rotates else None
        norm, other = parts.query_norm, parts.key_norm
        return AttendCall(
            q, k, v, pairs.keys, pairs.values, pairs.key_scales, pairs.value_scales, pairs.fixed, rotary,
            None if norm is None else norm.weight, None if other is None else other.weight,
            0.0 if norm is None else norm.eps, heads.scaling, heads.window or 0, heads.softcap or 0.0, positions,
            None, self.scratch[0], self.scratch[1], scale,
        )  # fmt: skip

    def prefill(self, given: Given, batch: int) -> Tensor:
        q, k, v, _, heads, _, _ = given
        decode.append(self._call(given, None))
        length = q.shape[0] // batch
        if heads.softcap is not None:
            q, k, v = (t.unflatten(0, (batch, length)).transpose(1, 2) for t in (q, k, v))
            return _joined(causal(q, k, v, heads), heads)
        starts = torch.arange(0, q.shape[0] + 1, length, dtype=torch.int32, device=q.device)
        # FlashAttention for sequences of any lengths: unlike the one for batches it never splits them by how busy the GPU
        # is, so a sequence's bits do not depend on the others.
        window = -1 if heads.window is None else heads.window - 1
        out: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, starts, starts, length, length, 0.0, True, False, scale=heads.scaling, window_size_left=window
        )[0]
        return out.reshape(out.shape[0], -1)

    def step(self, given: Given, positions: Tensor) -> Tensor:
        return decode.attend(self._call(given, positions))


def causal(q: Tensor, k: Tensor, v: Tensor, heads: Heads) -> Tensor:
    """Causal attention of whole sequences, [B, heads, T, size] -> like q."""
    length = q.shape[2]
    if heads.softcap is None and (heads.window is None or heads.window >= length):
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=heads.scaling, enable_gqa=True)
    rows = torch.arange(length, device=q.device)
    step = max(1, SCORES_AT_ONCE // (q.shape[0] * q.shape[1] * length))
    found = []
    for some in rows.split(step):
        seen = rows <= some.unsqueeze(1)
        if heads.window is not None:
            seen &= rows > some.unsqueeze(1) - heads.window
        found.append(masked_attention(q[:, :, some], k, v, seen, heads.scaling, heads.softcap))
    return torch.cat(found, 2)


def _joined(attended: Tensor, heads: Heads) -> Tensor:
    """[B, heads, T, size] -> [B * T, width]."""
    return attended.transpose(1, 2).reshape(-1, heads.width)
