"""Streaming histograms of |x|, and the ranges that percentiles and entropy choose from them."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 2048
LEVELS = 128  # magnitudes of a symmetric int8 range, 0 included


class Histogram:
    """Counts of |x| in `bins` equal bins from 0 to `top`, which doubles whenever something larger comes.

    channels None: one histogram of all values; else one for each element of the last dimension, with one `top`.
    """

    def __init__(self, bins: int = BINS, channels: int | None = None) -> None:
        if bins < 2 * LEVELS or bins % 2:
            raise ValueError(f"bins: expected an even number of at least {2 * LEVELS}, got {bins}")
        self.bins, self.channels = bins, channels
        self.top = 0.0
        self.counts: Tensor | None = None  # float64 [channels or 1, bins]

    @torch.no_grad()
    def add(self, x: Tensor) -> None:
        """Counts a tensor's values. ValueError if it holds NaN or Inf."""
        if x.numel() == 0:
            return
        magnitudes = x.detach().float().abs().reshape(-1, self.channels or 1)
        largest = float(magnitudes.amax())
        if not largest < float("inf"):
            raise ValueError("x: expected finite values, got NaN or Inf")
        if self.counts is None:
            self.counts = torch.zeros(self.channels or 1, self.bins, dtype=torch.float64, device=x.device)
        if self.top == 0.0:
            self.top = largest
        while largest > self.top:
            self._double()
        bins_of = torch.zeros_like(magnitudes, dtype=torch.int64)
        if self.top > 0.0:
            bins_of = (magnitudes * (self.bins / self.top)).long().clamp_(max=self.bins - 1)
        rows = torch.arange(bins_of.shape[1], device=x.device) * self.bins
        new = torch.bincount((bins_of + rows).flatten(), minlength=self.counts.numel())
        self.counts += new.view_as(self.counts).to(self.counts)

    def _double(self) -> None:
        assert self.counts is not None
        pairs = self.counts.view(self.counts.shape[0], -1, 2).sum(-1)
        self.counts = torch.cat([pairs, torch.zeros_like(pairs)], dim=1)
        self.top *= 2

    def percentile(self, share: float) -> Tensor:
        """fp32 [] (or [channels]): the lowest bin edge that `share` of the values, above 0 and at most 1, do not exceed."""
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share: expected a number above 0 and at most 1, got {share}")
        counts = self._filled()
        reached = counts.cumsum(1) >= share * counts.sum(1, keepdim=True)
        bins = reached.long().argmax(1) + 1
        return self._shaped(bins)

    def entropy(self) -> Tensor:
        """fp32 [] (or [channels]): the range that keeps most of the distribution's information in 128 levels.

        For each candidate the values inside are rounded to its levels, those beyond saturate, and the Kullback-Leibler
        divergence from the histogram is taken (Migacz, 2017). Made for convolutions: it clips the rare large values that
        transformers live on, and costs the embedded GPT-2 7.6 % of perplexity where the maximum costs 1.0 %.
        """
        return self._shaped(torch.tensor([_least_divergence(row) for row in self._filled().cpu()]))

    def _filled(self) -> Tensor:
        if self.counts is None:
            raise ValueError("histogram: expected values, got none")
        return self.counts

    def _shaped(self, bins: Tensor) -> Tensor:
        edges = (bins.double() * (self.top / self.bins)).float().to(self._filled().device)
        return edges.reshape(()) if self.channels is None else edges


def _least_divergence(counts: Tensor) -> int:
    """counts float64 [bins] -> how many of the first bins the best range has."""
    bins = counts.numel()
    used = int((counts > 0).nonzero().max()) + 1 if bool((counts > 0).any()) else bins
    if used <= LEVELS:
        return used
    step = max(1, bins // 256)
    candidates = sorted({*range(LEVELS, used, step), used})
    best: int = min(candidates, key=lambda kept: _divergence(counts, kept))
    return best


def _divergence(counts: Tensor, kept: int) -> float:
    clipped = counts[:kept].clone()
    clipped[-1] += counts[kept:].sum()
    # Each level spreads what fell into it over those of its bins that had something.
    level = torch.arange(kept) * LEVELS // kept
    filled = (counts[:kept] > 0).double()
    mass = torch.zeros(LEVELS, dtype=torch.float64).index_add_(0, level, counts[:kept])
    spread = torch.zeros(LEVELS, dtype=torch.float64).index_add_(0, level, filled)
    rounded = filled * (mass / spread.clamp(min=1))[level]
    p, q = clipped / clipped.sum(), rounded / rounded.sum().clamp(min=1e-300)
    here = p > 0
    return float((p[here] * (p[here] / q[here].clamp(min=1e-12)).log()).sum())
