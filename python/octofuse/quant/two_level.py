"""Weights of two levels: w = scale * group's scale * (code - group's zero), codes of 4 bits, a scale for each row.

What a row's scale multiplies is an integer of 8 bits. So a product with int8 activations adds up integers alone, as if the
weight had 8 bits, and 128 columns still have a scale and a zero of their own. After Lin et al., "QServe: W4A8KV4
Quantization and System Co-design for Efficient LLM Serving", 2024.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octofuse.quant.grid import check_finite, groups_of, positive, spread
from octofuse.quant.packing import unpack

BITS = 4
LEVELS = 1 << BITS
REACH = 119  # of a row's largest magnitude, in its scale: what is left to 127 is for groups' ranges in whole steps
RANGES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)  # parts of a group's range that the search tries
MOST_STEP = 16  # of a group: of 17 either end would leave int8


@dataclass(frozen=True)
class TwoLevel:
    """codes uint8 [N, K]; scale [N, 1] in the weight's dtype; group_scale int16 [N, G], a scale and 256 times a zero."""

    codes: Tensor
    scale: Tensor
    group_scale: Tensor
    group: int | None

    def integers(self) -> Tensor:
        """int8 [N, K]: what a row's scale multiplies."""
        return integers(self.codes, self.group_scale, self.group)

    def dequantized(self) -> Tensor:
        """[N, K] in the scale's dtype, each value rounded once."""
        return (self.integers().float() * self.scale.float()).to(self.scale.dtype)


def integers(codes: Tensor, group_scale: Tensor, group: int | None) -> Tensor:
    """codes [N, K], group_scale int16 [N, G] -> int8 [N, K]."""
    scale, zero = (spread(part, group, codes.shape[1]) for part in (group_scale & 0xFF, group_scale >> 8))
    return ((codes.float() - zero) * scale).to(torch.int8)


@torch.no_grad()
def two_level(w: Tensor, group: int | None, *, search: bool = False) -> TwoLevel:
    """w [N, K], floating point, to the nearest levels.

    A group's range is that of its values, widened to 0 and to whole steps of the row's scale; with `search` the part of it
    that loses least in the squared error. Raises ValueError for NaN or Inf.
    """
    check_finite(w)
    n, columns = w.shape
    width = columns if group is None else group
    scale = positive(w.float().abs().amax(1, keepdim=True) / REACH, w.dtype)
    filled = groups_of(columns, group) * width
    values = torch.nn.functional.pad(w.float() / scale.float(), (0, filled - columns)).view(n, -1, width)
    codes, step, zero = _encode(values, 1.0)
    for part in RANGES[1:] if search else ():
        other = _encode(values, part)
        wins = _loss(values, *other) < _loss(values, codes, step, zero)
        codes = torch.where(wins, other[0], codes)
        step, zero = torch.where(wins, other[1], step), torch.where(wins, other[2], zero)
    group_scale = (step + 256 * zero).to(torch.int16).squeeze(-1)
    return TwoLevel(codes.flatten(1)[:, :columns].to(torch.uint8).contiguous(), scale, group_scale, group)


def _encode(values: Tensor, part: float) -> tuple[Tensor, Tensor, Tensor]:
    """values [N, G, C] in steps of the row's scale -> codes, and of each group [N, G, 1] scale and zero, all in fp32."""
    low = (values.amin(-1, keepdim=True) * part).clamp_(max=0)
    high = (values.amax(-1, keepdim=True) * part).clamp_(min=0)
    step = ((high - low) / (LEVELS - 1)).round_().clamp_(1, MOST_STEP)
    zero = (-low / step).round_()
    # Every level has to be an integer of 8 bits.
    zero = torch.minimum(torch.maximum(zero, LEVELS - 1 - (127 / step).floor_()), (128 / step).floor_())
    zero = zero.clamp_(0, LEVELS - 1)
    return (values / step + zero).round_().clamp_(0, LEVELS - 1), step, zero


def _loss(values: Tensor, codes: Tensor, step: Tensor, zero: Tensor) -> Tensor:
    return ((codes - zero) * step - values).square_().sum(-1, keepdim=True)


def packed_integers(packed: Tensor, group_scale: Tensor, rows: int, columns: int, group: int | None) -> Tensor:
    """int8 [N, K] of packed codes and group_scale [G, N], as ops have them."""
    return integers(unpack(packed, BITS, rows, columns), group_scale.t(), group)


def check_levels(group_scale: Tensor) -> None:
    """Raises ValueError where a level would not be an integer of 8 bits."""
    scale, zero = group_scale.int() & 0xFF, group_scale.int() >> 8
    outside = ((LEVELS - 1 - zero) * scale > 127) | (zero * scale > 128) | (zero >= LEVELS) | (zero < 0)
    if bool(outside.any()):
        at = tuple(outside.nonzero()[0].tolist())
        got = f"scale {int(scale[at])} and zero {int(zero[at])}"
        raise ValueError(f"group_scale: expected levels from -128 to 127, got {got} at {list(at)}")
