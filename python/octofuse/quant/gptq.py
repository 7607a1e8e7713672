"""GPTQ: columns quantised one after the other, each error made up for by the columns that still follow.

After Frantar et al. 2022 (arXiv:2210.17323): the second moments of the layer's input say how columns can stand in for each
other; here in the order of their indices, with the scales of a group found when its first column is reached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octofuse.quant.grid import Quantised, check_finite, encode, fit, joined_zeros, middle

BLOCK = 128  # columns whose errors are passed on together
DAMPING = 0.01  # of the mean second moment: what no sample excites would be divided by nothing


@torch.no_grad()
def gptq(
    w: Tensor, moments: Tensor, bits: int, group: int | None, *, zero_points: bool = False, zero: int | None = None
) -> Quantised:
    """w [N, K], floating point; moments [K, K], the sum of x x^T over samples of the layer's input. zero: of all groups.

    Raises ValueError for NaN or Inf, and for moments of another shape.
    """
    check_finite(w)
    columns = w.shape[1]
    if moments.shape != (columns, columns) or not torch.isfinite(moments).all():
        raise ValueError(f"moments: expected finite [{columns}, {columns}], got shape {list(moments.shape)}")
    left = w.float().clone()
    spread = _spread(moments.to(w.device))
    codes = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    width = columns if group is None else group
    scales: list[Tensor] = []
    zeros: list[Tensor | int | None] = []
    for start in range(0, columns, BLOCK):
        end = min(start + BLOCK, columns)
        # A group may reach behind the block: its scale shall see the errors, so they are passed on to its end at once.
        reach = end if group is None else max(end, min(columns, -(-end // width) * width))
        errors = torch.empty(w.shape[0], end - start, device=w.device)
        for column in range(start, end):
            if column % width == 0:
                of_group = left[:, column : column + width].unsqueeze(1)
                scale, own = fit(of_group, bits, zero_points, w.dtype, zero=zero, search=True)
                scales.append(scale)
                zeros.append(own)
            offset = middle(bits) if zeros[-1] is None else zeros[-1]
            chosen = encode(left[:, column].view(-1, 1, 1), scales[-1], zeros[-1], bits).view(-1, 1)
            codes[:, column] = chosen[:, 0]
            value = ((chosen.float() - offset) * scales[-1].float())[:, 0]
            error = (left[:, column] - value) / spread[column, column]
            errors[:, column - start] = error
            left[:, column + 1 : reach] -= torch.outer(error, spread[column, column + 1 : reach])
        left[:, reach:] -= errors @ spread[start:end, reach:]
    return Quantised(codes, torch.cat(scales, 1), joined_zeros(zeros), bits, group)


def _spread(moments: Tensor) -> Tensor:
    """The upper Cholesky factor of the inverse moments, fp32 [K, K]: row i is what column i's error does to later ones."""
    moments = moments.double()
    diagonal = moments.diagonal()
    damping = DAMPING * diagonal.mean()
    if damping == 0:
        return torch.eye(moments.shape[0], device=moments.device)
    damped = moments + torch.diag(damping + (diagonal == 0) * damping)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
