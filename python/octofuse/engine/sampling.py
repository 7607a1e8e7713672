"""How a next token is chosen from logits: the likeliest, or drawn by temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """temperature 0 takes the likeliest token; top_k and top_p narrow what a higher one draws from."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected a finite number of at least 0, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k: expected at least 1, got {self.top_k}")
        if self.top_p is not None and not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: expected a number above 0 and at most 1, got {self.top_p}")

    @property
    def narrows(self) -> tuple[int | None, bool] | None:
        """What of it a graph depends on: None for the likeliest token, else top_k and whether there is a top_p.

        Temperature and top_p themselves are numbers on the device, which a graph reads.
        """
        return None if self.temperature == 0 else (self.top_k, self.top_p is not None and self.top_p < 1.0)

    def numbers(self) -> Tensor:
        """fp32 [2]: temperature and top_p."""
        return torch.tensor([self.temperature, 1.0 if self.top_p is None else self.top_p])

    def choose(self, logits: Tensor, noise: Tensor | None, numbers: Tensor | None = None) -> Tensor:
        """logits [B, V] and, beyond temperature 0, exponential noise of that shape -> tokens, int64 [B].

        numbers: those of a Sampling that narrows alike, on the device; None: its own.
        """
        if noise is None:
            return logits.argmax(-1)
        temperature, top_p = self.numbers().to(logits.device) if numbers is None else numbers
        logits = logits.float() / temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(self.top_k).values[:, -1:], float("-inf"))
        if self.top_p is not None and self.top_p < 1.0:  # which of them: `top_p`
            ordered = logits.sort(descending=True)
            shares = ordered.values.softmax(-1)
            before = shares.cumsum(-1) - shares  # the likeliest stays, whatever its share
            drop = torch.zeros_like(before, dtype=torch.bool).scatter_(1, ordered.indices, before >= top_p)
            logits = logits.masked_fill(drop, float("-inf"))
        return (logits.softmax(-1) / noise).argmax(-1)


class Draws:
    """Exponential noise for sampling, one stream for each sequence."""

    def __init__(self, noise: Tensor | None, seed: int) -> None:
        self.noise = noise
        self.generators = []
        if noise is not None:
            self.generators = [torch.Generator(noise.device).manual_seed(seed + i) for i in range(noise.shape[0])]

    def refill(self) -> None:
        if self.noise is not None:
            for row, generator in zip(self.noise, self.generators, strict=True):
                row.exponential_(generator=generator)
