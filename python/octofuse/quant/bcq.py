"""Binary-coding quantisation: w = sum of alpha[i] * (+1 or -1), i < q, with alphas for each row or group of its columns.

A greedy start (the mean magnitude and the signs of what is left, q times) and the best uniform grid as another, then
alternating: least squares for the alphas, exact search for the codes (the nearest of all 2^q sums), as in Xu et al. 2018
(arXiv:1802.00150). Of each group the better end is kept. Deterministic, on whatever device the weight lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from octofuse.quant.grid import Quantised, check_finite, fit, middle, spread

ROUNDS = 12
AT_ONCE = 1 << 22  # weights that are worked on together: the search sorts no more than these


@dataclass(frozen=True)
class Coded:
    """codes uint8 [N, K], bit i set for +alpha[i]; alpha [N, G, q] in the weight's dtype; offset [N, G] or None."""

    codes: Tensor
    alpha: Tensor
    offset: Tensor | None
    group: int | None

    @property
    def bits(self) -> int:
        return self.alpha.shape[2]

    def dequantized(self) -> Tensor:
        """[N, K] in the alphas' dtype, summed in fp32 and rounded once."""
        return dequantize(self.codes, self.alpha, self.offset, self.group)


def dequantize(codes: Tensor, alpha: Tensor, offset: Tensor | None, group: int | None) -> Tensor:
    """codes [N, K], alpha [N, G, q], offset [N, G] -> [N, K] in alpha's dtype."""
    columns = codes.shape[1]
    sums = torch.zeros(codes.shape, device=codes.device)
    for i in range(alpha.shape[2]):
        of_columns = spread(alpha[:, :, i], group, columns)
        sums += torch.where((codes >> i & 1).bool(), of_columns, -of_columns)
    if offset is not None:
        sums += spread(offset, group, columns)
    return sums.to(alpha.dtype)


@torch.no_grad()
def bcq(w: Tensor, bits: int, group: int | None, *, rounds: int = ROUNDS) -> Coded:
    """w [N, K], floating point -> q = `bits` binary codes, 1 to 8. Raises ValueError for NaN or Inf."""
    if not 1 <= bits <= 8:
        raise ValueError(f"bits: expected 1 to 8, got {bits}")
    check_finite(w)
    columns = w.shape[1]
    width = columns if group is None else group
    grouped = pad(w.float(), (0, -columns % width)).view(w.shape[0], -1, width)
    counts = torch.ones(1, columns, device=w.device)
    inside = pad(counts, (0, -columns % width)).view(1, -1, width)  # what fills the last group up counts for nothing
    rows = max(1, AT_ONCE // grouped[0].numel())
    parts = [_solve(part, inside, bits, rounds, w.dtype) for part in grouped.split(rows)]
    codes = torch.cat([codes.flatten(1)[:, :columns] for codes, _ in parts])
    return Coded(codes, torch.cat([alpha for _, alpha in parts]), None, group)


def from_grid(quantised: Quantised) -> Coded:
    """A uniform grid's levels as binary codes: the same values, but for the rounding of their sum."""
    powers = _powers(quantised.bits, quantised.scale.device).to(quantised.scale.dtype)
    alpha = quantised.scale.unsqueeze(-1) * powers
    centre = ((1 << quantised.bits) - 1) / 2
    zero = middle(quantised.bits) if quantised.zero is None else quantised.zero
    offset = (quantised.scale.float() * (centre - zero)).float()
    return Coded(quantised.codes, alpha, offset if bool((offset != 0).any()) else None, quantised.group)


def _solve(w: Tensor, inside: Tensor, bits: int, rounds: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """w [N, G, C], inside [1, G, C] -> codes uint8 [N, G, C], alpha [N, G, q]."""
    starts = [_greedy(w, inside, bits)]
    if bits > 1:  # from five bits on, what is left after four greedy codes is no good guide
        scale, _ = fit(w, bits, False, torch.float32, search=True)
        starts.append(scale.unsqueeze(-1) * _powers(bits, w.device).flip(0))
    found = [_alternate(w, inside, alpha, rounds if bits > 1 else 0) for alpha in starts]
    alpha, least = found[0]
    for other, loss in found[1:]:
        alpha = torch.where((loss < least).unsqueeze(-1), other, alpha)
    # The alphas as they are kept: the nearest sums are found once more for these.
    kept = alpha.to(dtype)
    return _nearest(w, kept.float()), kept


def _alternate(w: Tensor, inside: Tensor, alpha: Tensor, rounds: int) -> tuple[Tensor, Tensor]:
    """The best alphas on the way from these, and their loss, [N, G]."""
    best, codes = alpha, _nearest(w, alpha)
    least = _loss(w, codes, alpha, inside)
    for _ in range(rounds):
        alpha = _least_squares(w, codes, inside, alpha.shape[-1])
        codes = _nearest(w, alpha)
        loss = _loss(w, codes, alpha, inside)
        wins = loss < least
        if not bool(wins.any()):
            break
        least = torch.where(wins, loss, least)
        best = torch.where(wins.unsqueeze(-1), alpha, best)
    return best, least


def _powers(bits: int, device: torch.device) -> Tensor:
    """Half of 1, 2, 4, ...: the alphas of a uniform grid with a step of 1."""
    return torch.exp2(torch.arange(bits, device=device).float()) / 2


def _greedy(w: Tensor, inside: Tensor, bits: int) -> Tensor:
    left = w.clone()
    count = inside.sum(-1)
    alphas = []
    for _ in range(bits):
        alpha = (left.abs() * inside).sum(-1) / count
        left -= torch.where(left >= 0, alpha.unsqueeze(-1), -alpha.unsqueeze(-1))
        alphas.append(alpha)
    return torch.stack(alphas, -1)


def sums_of(alpha: Tensor) -> Tensor:
    """alpha [N, G, q] -> the sum of each of the 2^q codes, [N, G, 2^q]."""
    bits = alpha.shape[-1]
    code = torch.arange(1 << bits, device=alpha.device)
    signs = (code.unsqueeze(-1) >> torch.arange(bits, device=alpha.device) & 1) * 2.0 - 1.0
    return alpha @ signs.t()


def _nearest(w: Tensor, alpha: Tensor) -> Tensor:
    """The code of the nearest sum, exactly: a search among the middles of neighbours."""
    levels, order = sums_of(alpha).sort(dim=-1, stable=True)
    middles = ((levels[..., 1:] + levels[..., :-1]) / 2).contiguous()
    return order.gather(-1, torch.searchsorted(middles, w.contiguous())).to(torch.uint8)


def _signs(codes: Tensor, bits: int) -> Tensor:
    return (codes.unsqueeze(-1) >> torch.arange(bits, device=codes.device) & 1) * 2.0 - 1.0


def _least_squares(w: Tensor, codes: Tensor, inside: Tensor, bits: int) -> Tensor:
    """alpha that makes w of these codes best. Signs that depend on each other share: a little is added to the diagonal."""
    signs = _signs(codes, bits)
    weighted = signs * inside.unsqueeze(-1)
    products = weighted.transpose(-1, -2) @ signs
    products += torch.eye(bits, device=w.device) * 1e-4 * inside.sum(-1).view(1, -1, 1, 1)
    found = _solved(products, (weighted.transpose(-1, -2) @ w.unsqueeze(-1)).squeeze(-1))
    return found.abs().sort(-1, descending=True).values  # a code with the other sign is as good


def _solved(matrices: Tensor, right: Tensor) -> Tensor:
    """x of matrices [..., q, q] @ x = right [..., q], positive definite: all systems a step at a time, since LAPACK
    takes each of these small ones by itself."""
    a = torch.cat([matrices, right.unsqueeze(-1)], -1)
    size = right.shape[-1]
    for i in range(size):
        row = a[..., i, i:] / a[..., i, i, None]
        a[..., i, i:] = row
        below = a[..., i + 1 :, i, None]
        a[..., i + 1 :, i:] -= below * row.unsqueeze(-2)
    x = torch.empty_like(right)
    for i in reversed(range(size)):
        x[..., i] = a[..., i, size] - (a[..., i, i + 1 : size] * x[..., i + 1 :]).sum(-1)
    return x


def _loss(w: Tensor, codes: Tensor, alpha: Tensor, inside: Tensor) -> Tensor:
    values = sums_of(alpha).gather(-1, codes.long())
    return ((values - w).square_() * inside).sum(-1)
