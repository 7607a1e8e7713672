"""Uniform grids of 1 to 8 bits for weights: w = scale * (code - zero), a scale for each row or group of its columns.

A zero is each group's own, or one for all: 2^(bits - 1), which has one level more below it than above, or the grid's
middle: 128 for 8 bits (which leaves int8 values from -127 on), and between two codes for fewer bits, so that as many levels
lie on either side: at 2 bits -1.5, -0.5, 0.5 and 1.5 steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CLIPS = tuple(i / 32 for i in range(10, 33))  # of a group's range, what the search for the least error tries
ROUNDS = 3  # in which codes and scales then follow each other


@dataclass(frozen=True)
class Quantised:
    """codes uint8 [N, K]; scale [N, G] in the weight's dtype; zero uint8 [N, G], one for all, or None: the middle."""

    codes: Tensor
    scale: Tensor
    zero: Tensor | int | None
    bits: int
    group: int | None

    def dequantized(self) -> Tensor:
        """[N, K] in the scale's dtype, each value rounded once."""
        return dequantize(self.codes, self.scale, self.zero, self.bits, self.group)


def middle(bits: int) -> float:
    return 128.0 if bits == 8 else ((1 << bits) - 1) / 2


def groups_of(columns: int, group: int | None) -> int:
    return 1 if group is None else -(-columns // group)


def dequantize(codes: Tensor, scale: Tensor, zero: Tensor | int | None, bits: int, group: int | None) -> Tensor:
    """codes [N, K], scale and zero [N, G], or one zero for all -> [N, K] in the scale's dtype."""
    columns = codes.shape[1]
    of_all = middle(bits) if zero is None else zero
    offset = spread(of_all, group, columns) if isinstance(of_all, Tensor) else of_all
    return ((codes.float() - offset) * spread(scale, group, columns)).to(scale.dtype)


def spread(of_groups: Tensor, group: int | None, columns: int) -> Tensor:
    """[N, G] -> fp32 [N, columns]: each group's value for all of its columns."""
    return of_groups.float().repeat_interleave(columns if group is None else group, 1)[:, :columns]


@torch.no_grad()
def quantize_rows(
    w: Tensor, bits: int, group: int | None, *, zero_points: bool = False, zero: int | None = None, search: bool = False
) -> Quantised:
    """w [N, K], floating point, to the nearest levels.

    A group's range is that of its values; with `search` the part of it that loses least in the squared error, codes and
    scale then following each other. zero: of all groups, in place of the middle. One bit has one magnitude: their mean.
    Raises ValueError for NaN or Inf.
    """
    check_finite(w)
    columns = w.shape[1]
    width = columns if group is None else group
    whole = columns // width * width
    parts = []  # whole groups, and what is left
    for part in (w[:, :whole].float().view(w.shape[0], -1, width), w[:, whole:].float().unsqueeze(1)):
        if part.numel():
            scale, own = fit(part, bits, zero_points, w.dtype, zero=zero, search=search)
            parts.append((encode(part, scale, own, bits).flatten(1), scale, own))
    codes, scales, zeros = zip(*parts, strict=True)
    return Quantised(torch.cat(codes, 1), torch.cat(scales, 1), joined_zeros(zeros), bits, group)


def joined_zeros(zeros: Sequence[Tensor | int | None], dim: int = 1) -> Tensor | int | None:
    """Those of parts of the columns (of the rows, with dim 0): [N, G] as uint8, or the one that all have."""
    tensors = [zero for zero in zeros if isinstance(zero, Tensor)]
    return torch.cat(tensors, dim).to(torch.uint8) if tensors else zeros[0]


def fit(
    w: Tensor, bits: int, zero_points: bool, dtype: torch.dtype, *, zero: int | None = None, search: bool = False
) -> tuple[Tensor, Tensor | int | None]:
    """w [N, G, C] -> scale [N, G] in `dtype` and, with zero points, zero fp32 [N, G], else the one given."""
    best = _range(w, bits, zero_points, dtype, 1.0, zero)
    if not search:
        return best
    least = _loss(w, *best, bits)
    for clip in CLIPS[:-1]:
        best, least = _better(w, bits, best, least, _range(w, bits, zero_points, dtype, clip, zero))
    for _ in range(ROUNDS):
        levels = encode(w, *best, bits).float() - _zero_of(best[1], bits)
        scale = (w * levels).sum(-1) / levels.square().sum(-1).clamp(min=1e-20)
        best, least = _better(w, bits, best, least, (positive(scale, dtype), best[1]))
    return best


def encode(w: Tensor, scale: Tensor, zero: Tensor | int | None, bits: int) -> Tensor:
    """w [N, G, C] -> the nearest codes, uint8."""
    codes = (w / scale.float().unsqueeze(-1) + _zero_of(zero, bits)).round_()
    lowest = 1 if bits == 8 and zero is None else 0
    return codes.clamp_(lowest, (1 << bits) - 1).to(torch.uint8)


def check_finite(w: Tensor) -> None:
    if not torch.isfinite(w).all():
        raise ValueError("weight: expected finite values, got NaN or Inf")


def _range(
    w: Tensor, bits: int, zero_points: bool, dtype: torch.dtype, clip: float, zero: int | None
) -> tuple[Tensor, Tensor | int | None]:
    levels = (1 << bits) - 1
    if zero_points:
        low, high = w.amin(-1).clamp(max=0.0) * clip, w.amax(-1).clamp(min=0.0) * clip
        scale = positive((high - low) / levels, dtype)
        return scale, (-low / scale.float()).round().clamp(0, levels)
    reach = w.abs().mean(-1) if bits == 1 else w.abs().amax(-1)
    steps = 127.0 if bits == 8 else levels / 2
    return positive(reach * clip / steps, dtype), zero


def positive(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """In `dtype`; 1 where that is nothing, so that nobody divides by zero."""
    rounded = scale.to(dtype)
    return torch.where(rounded > 0, rounded, torch.ones_like(rounded))


def _zero_of(zero: Tensor | int | None, bits: int) -> Tensor | float:
    return zero.unsqueeze(-1) if isinstance(zero, Tensor) else middle(bits) if zero is None else float(zero)


def _loss(w: Tensor, scale: Tensor, zero: Tensor | int | None, bits: int) -> Tensor:
    values = (encode(w, scale, zero, bits).float() - _zero_of(zero, bits)) * scale.float().unsqueeze(-1)
    return (values - w).square_().sum(-1)


def _better(
    w: Tensor,
    bits: int,
    best: tuple[Tensor, Tensor | int | None],
    least: Tensor,
    other: tuple[Tensor, Tensor | int | None],
) -> tuple[tuple[Tensor, Tensor | int | None], Tensor]:
    """Of each group the one with the lower loss."""
    loss = _loss(w, *other, bits)
    wins = loss < least
    zero = other[1]
    if isinstance(zero, Tensor):
        zero = torch.where(wins, zero, best[1])  # type: ignore[arg-type]
    return (torch.where(wins, other[0], best[0]), zero), torch.where(wins, loss, least)
