"""Codebooks: w = scale * level[code], codes of 4 or 8 bits, a scale for each row or group of its columns.

"nf4" is the 4-bit NormalFloat of Dettmers et al., "QLoRA", 2023: 16 quantiles of a normal distribution, one of them 0,
scaled to -1 to 1. "fp4" has a sign, two bits of exponent and one of mantissa. Both have the levels and the order of
bitsandbytes' files, whose groups are 64 columns. "e4m3" is the 8-bit floating point of torch.float8_e4m3fn (Micikevicius et
al., "FP8 Formats for Deep Learning", 2022), whose bytes are its codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from octofuse.quant.grid import check_finite, positive, spread
from octofuse.quant.packing import pack

BITS = 4  # of a code in LEVELS
GROUP = 64  # columns that share a scale where nothing else is said
E4M3 = "e4m3"
LARGEST_E4M3 = 448.0
SCALES_BELOW = 256.0  # beside e4m3: kernels keep part of its exponent in the scale, in 16 bits

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
    levels: str | Sequence[float]
    group: int | None

    def dequantized(self) -> Tensor:
        return dequantize(self.codes, self.scale, self.levels, self.group)


def levels_named(levels: str | Sequence[float]) -> tuple[float, ...]:
    """Those of a name, or the 16 that are given. ValueError for another name or number of them."""
    if isinstance(levels, str):
        if levels == E4M3:
            return _e4m3()
        if levels not in LEVELS:
            raise ValueError(f"levels: expected {', '.join(map(repr, (*LEVELS, E4M3)))} or 16 numbers, got {levels!r}")
        return LEVELS[levels]
    if not isinstance(levels, Sequence) or not all(isinstance(level, int | float) for level in levels):
        raise TypeError(f"levels: expected a name or 16 numbers, got {type(levels).__name__}")
    if len(levels) != 1 << BITS:
        raise ValueError(f"levels: expected 16 numbers, got {len(levels)}")
    return tuple(map(float, levels))


@cache
def _e4m3() -> tuple[float, ...]:
    return tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())


def stored_as(levels: str | Sequence[float]) -> tuple[str, int, list[float] | None]:
    """What kernels call such codes, their bits, and the levels that these are told."""
    if isinstance(levels, str) and levels == E4M3:
        return "float8", 8, None
    return "codebook", BITS, list(levels_named(levels))


def packed(codes: Tensor, levels: str | Sequence[float]) -> Tensor:
    """codes [N, K] as `octofuse.codebook_linear` takes them."""
    kind, bits, _ = stored_as(levels)
    return pack(codes, bits, codebook=kind == "codebook")


def dequantize(codes: Tensor, scale: Tensor, levels: str | Sequence[float], group: int | None) -> Tensor:
    """codes [N, K], scale [N, G] -> [N, K] in the scale's dtype: a level in that dtype times its scale, rounded."""
    table = torch.tensor(levels_named(levels), dtype=scale.dtype, device=codes.device).float()
    return (table[codes.int()] * spread(scale, group, codes.shape[1])).to(scale.dtype)


@torch.no_grad()
def encode(w: Tensor, levels: str | Sequence[float], group: int | None) -> Coded:
    """w [N, K], floating point, to the nearest levels; a group's largest magnitude becomes that of the levels.

    ValueError for NaN or Inf, for levels that are all 0, and for scales that e4m3 cannot have.
    """
    check_finite(w)
    of_codes = levels_named(levels)
    rows, columns = w.shape
    width = columns if group is None else group
    is_e4m3 = isinstance(levels, str) and levels == E4M3
    largest = LARGEST_E4M3 if is_e4m3 else max(abs(level) for level in of_codes)
    if largest == 0:
        raise ValueError("levels: expected one that is not 0, got none")
    reach = pad(w.float(), (0, -columns % width)).view(rows, -1, width).abs().amax(-1)
    scale = positive(reach / largest, w.dtype)
    shares = w.float() / spread(scale, group, columns)
    if is_e4m3:
        check_scales("scale", scale)
        codes = shares.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
        return Coded(codes, scale, levels, group)
    table, order = torch.tensor(of_codes, dtype=torch.float32, device=w.device).sort()
    middles = (table[1:] + table[:-1]) / 2
    nearest = torch.bucketize(shares, middles)
    return Coded(order[nearest].to(torch.uint8), scale, levels, group)


def check_scales(name: str, scale: Tensor) -> None:
    """ValueError for those that e4m3 cannot have."""
    if bool((scale.abs() >= SCALES_BELOW).any()):
        raise ValueError(f"{name}: expected less than {SCALES_BELOW:g} beside e4m3, got {float(scale.abs().max()):g}")
