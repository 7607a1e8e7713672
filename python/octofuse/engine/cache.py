"""The cache of keys and values: in the model's dtype, or in 8 bits with a scale for each token and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octofuse.ops import quantize_per_token

FP8_MOST = 448.0  # of float8_e4m3fn
CACHE_KINDS = ("int8", "fp8")


class Pairs(NamedTuple):
    """Keys and values of one block, each `[batch, heads, capacity, head size]`, and their scales, fp32 `[batch, heads,
    capacity]`, where they have 8 bits: int8, or float8_e4m3fn as uint8."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


@dataclass
class Cache:
    """All blocks' pairs; what lies behind a sequence is never read.

    codes `[blocks, 2, batch, heads, capacity, head size]`; scales like it without the last dimension, or None. rotary:
    cosines and sines of every position, fp32 `[capacity, rotated channels]`, or None.
    """

    codes: Tensor
    scales: Tensor | None
    rotary: Tensor | None
    scratch: tuple[Tensor, Tensor] | None  # of decode.attend
    head_rows: Tensor | None  # HEAD_ROWS rows for an output head in cuBLAS, zero

    @property
    def capacity(self) -> int:
        return self.codes.shape[4]

    @property
    def bytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def of_block(self, index: int) -> Pairs:
        keys, values = self.codes[index]
        return Pairs(keys, values, *((None, None) if self.scales is None else self.scales[index]))


def new_codes(shape: tuple[int, ...], kind: str | None, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """codes and scales of a Cache, zero; kind: one of CACHE_KINDS, or None for the dtype of `like`."""
    if kind is None:
        return like.new_zeros(shape), None
    dtype = torch.int8 if kind == "int8" else torch.uint8
    return like.new_zeros(shape, dtype=dtype), like.new_zeros(shape[:-1], dtype=torch.float32)


def encoded(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[..., D]` -> codes of dtype int8 or uint8 (e4m3), and fp32 scales `[...]`: largest magnitude / 127, or / 448."""
    if dtype == torch.int8:
        codes, scales = quantize_per_token(x.contiguous())
        return codes, scales.view(x.shape[:-1])
    amax = x.abs().amax(-1).float()
    scales = torch.where(amax == 0, torch.ones_like(amax), amax / FP8_MOST)
    return (x.float() * (1 / scales).unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8), scales


def decoded(codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What a cache stands for, in `dtype`."""
    if scales is None:
        return codes
    values = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    return (values.float() * scales.unsqueeze(-1)).to(dtype)
