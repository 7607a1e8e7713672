"""The cache of keys and values: in the model's dtype, or in 8 bits with a scale for each token and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Pairs(NamedTuple):
    """Keys and values of one block, each `[batch, heads, capacity, head size]`, and their scales, fp32 `[batch, heads,
    capacity]`, where they have 8 bits: int8, or float8_e4m3fn as uint8. fixed: the scales that new keys and new values
    get, or None: measured."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    fixed: tuple[float, float] | None


@dataclass
class Cache:
    """All blocks' pairs; what lies behind a sequence is never read.

    codes `[blocks, 2, batch, heads, capacity, head size]`; scales like it without the last dimension, or None. rotary:
    cosines and sines of every position, fp32 `[capacity, rotated channels]`, or None.
    """

    codes: Tensor
    scales: Tensor | None
    fixed: list[tuple[float, float]] | None  # of each block
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
        key_scales, value_scales = (None, None) if self.scales is None else self.scales[index]
        return Pairs(keys, values, key_scales, value_scales, None if self.fixed is None else self.fixed[index])
