"""1:2 sparsity: of every two neighbouring columns the one with the larger magnitude, in a byte: 7 bits of value, and where.

A code's low 7 bits are the value, -63 to 63 in two's complement, and its high bit is set where the second of the two
columns is kept. Codes lie as `packing.pack_pairs` has them: four in a 32-bit word.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from octofuse.quant.grid import check_finite, spread

MOST = 63.0  # the largest value


@dataclass(frozen=True)
class Sparse:
    """codes uint8 [N, ceil(K / 2)]; scale [N, G] in the weight's dtype, for each group of columns (None: a row)."""

    codes: Tensor
    scale: Tensor
    columns: int
    group: int | None

    @property
    def mask(self) -> Tensor:
        """bool [N, K]: the columns that are kept."""
        second = self.codes >= 128
        return torch.stack([~second, second], -1).flatten(1)[:, : self.columns]

    def dequantized(self) -> Tensor:
        return dequantize(self.codes, self.scale, self.columns, self.group)


def dequantize(codes: Tensor, scale: Tensor, columns: int, group: int | None) -> Tensor:
    """codes [N, ceil(K / 2)], scale [N, G] -> [N, K] in the scale's dtype, zero where nothing is kept."""
    low = (codes & 127).to(torch.int16)
    values = torch.where(low >= 64, low - 128, low).float()
    second = codes >= 128
    pairs = torch.stack([values * ~second, values * second], -1).flatten(1)[:, :columns]
    return (pairs * spread(scale, group, columns)).to(scale.dtype)


@torch.no_grad()
def sparse12(w: Tensor, group: int | None) -> Sparse:
    """w [N, K], floating point; the first of equals is kept. Raises ValueError for NaN or Inf."""
    check_finite(w)
    rows, columns = w.shape
    width = columns if group is None else group
    filled = pad(w.float(), (0, -columns % width))
    reach = filled.view(rows, -1, width).abs().amax(-1)  # the largest of a group is the larger of its two
    scale = (reach / MOST).to(w.dtype)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    levels = (w.float() / spread(scale, group, columns)).round().clamp(-MOST, MOST)
    pairs = pad(levels, (0, columns % 2)).view(rows, -1, 2)
    sizes = pad(w.float().abs(), (0, columns % 2)).view(rows, -1, 2)
    second = sizes[..., 1] > sizes[..., 0]
    kept = torch.where(second, pairs[..., 1], pairs[..., 0]).to(torch.int16)
    return Sparse(((kept & 127) | second.to(torch.int16) << 7).to(torch.uint8), scale, columns, group)
