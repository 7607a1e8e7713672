"""Codebooks: w = scale * level[code], codes of 4 bits, a scale for each row or group of its columns.

"nf4" is the 4-bit NormalFloat of Dettmers et al., "QLoRA", 2023: 16 quantiles of a normal distribution, one of them 0,
scaled to -1 to 1. "fp4" has a sign, two bits of exponent and one of mantissa. Both have the levels and the order of
bitsandbytes' files, whose groups are 64 columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from octofuse.quant.grid import check_finite, positive, spread

BITS = 4
GROUP = 64  # columns that share a scale where nothing else is said

LEVELS: dict[str, tuple[float, ...]] = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(sign * level / 12 for sign in (1, -1) for level in (0, 0.0625, 8, 12, 4, 6, 2, 3)),
}  # fmt: skip


@dataclass(frozen=True)
class Coded:
    """codes uint8 [N, K]; scale [N, G] in the weight's dtype, for each group of columns (None: a row)."""

    codes: Tensor
    scale: Tensor
    levels: tuple[float, ...]
    group: int | None

    def dequantized(self) -> Tensor:
        return dequantize(self.codes, self.scale, self.levels, self.group)


def levels_named(levels: str | Sequence[float]) -> tuple[float, ...]:
    """Those of a name, or the 16 that are given. ValueError for another name or number of them."""
    if isinstance(levels, str):
        if levels not in LEVELS:
            raise ValueError(f"levels: expected {', '.join(map(repr, LEVELS))} or 16 numbers, got {levels!r}")
        return LEVELS[levels]
    if not isinstance(levels, Sequence) or not all(isinstance(level, int | float) for level in levels):
        raise TypeError(f"levels: expected a name or 16 numbers, got {type(levels).__name__}")
    if len(levels) != 1 << BITS:
        raise ValueError(f"levels: expected 16 numbers, got {len(levels)}")
    return tuple(map(float, levels))


def dequantize(codes: Tensor, scale: Tensor, levels: str | Sequence[float], group: int | None) -> Tensor:
    """codes [N, K], scale [N, G] -> [N, K] in the scale's dtype: a level in that dtype times its scale, rounded."""
    table = torch.tensor(levels_named(levels), dtype=scale.dtype, device=codes.device).float()
    return (table[codes.int()] * spread(scale, group, codes.shape[1])).to(scale.dtype)


@torch.no_grad()
def encode(w: Tensor, levels: str | Sequence[float], group: int | None) -> Coded:
    """w [N, K], floating point, to the nearest levels; a group's largest magnitude becomes that of the levels.

    ValueError for NaN or Inf, and for levels that are all 0.
    """
    check_finite(w)
    of_codes = levels_named(levels)
    rows, columns = w.shape
    width = columns if group is None else group
    largest = max(abs(level) for level in of_codes)
    if largest == 0:
        raise ValueError("levels: expected one that is not 0, got none")
    reach = pad(w.float(), (0, -columns % width)).view(rows, -1, width).abs().amax(-1)
    scale = positive(reach / largest, w.dtype)
    table, order = torch.tensor(of_codes, dtype=torch.float32, device=w.device).sort()
    middles = (table[1:] + table[:-1]) / 2
    nearest = torch.bucketize(w.float() / spread(scale, group, columns), middles)
    return Coded(order[nearest].to(torch.uint8), scale, of_codes, group)
