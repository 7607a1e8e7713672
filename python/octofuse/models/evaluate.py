"""Perplexity and generation speed of a causal language model."""

from __future__ import annotations

import inspect
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from octofuse.ops import cpu


def scored_windows(tokens: Tensor, context: int, stride: int | None = None, batch: int = 4) -> list[tuple[Tensor, int]]:
    """Batches of windows, int64 [B, T], and the first position that counts in each: every token is scored once.

    tokens: int64 [T], T >= 2. stride: tokens from one window to the next; what a window shares with the one before is
    context alone. None: windows follow each other, and the first token of each is not scored. The last may be shorter.
    """
    if tokens.dim() != 1 or tokens.numel() < 2:
        raise ValueError(f"tokens: expected one dimension with at least 2 tokens, got shape {list(tokens.shape)}")
    if stride is not None and not 1 <= stride <= context:
        raise ValueError(f"stride: expected 1 to the context of {context}, got {stride}")
    found: list[tuple[Tensor, int]] = []
    end = 0
    for begin in range(0, tokens.numel(), stride or context):
        window = tokens[begin : begin + context]
        first = max(1, end - begin)
        end = begin + window.numel()
        if window.numel() > first:
            found.append((window, first))
        if end == tokens.numel():
            break
    batches: list[tuple[Tensor, int]] = []
    for (_, first), group in itertools.groupby(found, key=lambda pair: (pair[0].numel(), pair[1])):
        alike = torch.stack([window for window, _ in group])
        batches += [(part, first) for part in alike.split(batch)]
    return batches


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: Tensor,
    *,
    context: int,
    stride: int | None = None,
    batch: int = 4,
    on_window: Callable[[int, int], None] | None = None,
) -> float:
    """exp(mean negative log likelihood) of tokens, int64 [T], T >= 2, over `scored_windows`.

    on_window(done, all) reports progress.
    """
    device = next(model.parameters()).device
    batches = scored_windows(tokens, context, stride, batch)
    total, count = 0.0, 0
    with cpu.Threads(device) as threads:
        for index, (window, first) in enumerate(batches):
            threads.adjust()
            ids = window.to(device)
            logits = model(ids).logits[:, first - 1 : -1].float()
            total += cross_entropy(logits.flatten(0, 1), ids[:, first:].flatten(), reduction="sum").item()
            count += ids[:, first:].numel()
            if on_window is not None:
                on_window(index + 1, len(batches))
    return math.exp(total / count)


@dataclass(frozen=True)
class GenerationSpeed:
    """Greedy generation with a KV cache: seconds to the first token, median seconds between tokens, tokens per second."""

    first_token: float
    inter_token: float
    tokens_per_second: float
    tokens: tuple[int, ...]


@torch.no_grad()
def measure_generation(
    model: nn.Module, prompt: Tensor, new_tokens: int, *, repeats: int = 3, warm_up: bool = True
) -> GenerationSpeed:
    """prompt int64 [1, T] on the model's device. The fastest of `repeats` runs, after one to warm up; wall clock."""
    if warm_up:
        _timed_generation(model, prompt, new_tokens)
    runs = [_timed_generation(model, prompt, new_tokens) for _ in range(repeats)]
    return min(runs, key=lambda run: -run.tokens_per_second)


def _timed_generation(model: nn.Module, prompt: Tensor, new_tokens: int) -> GenerationSpeed:
    def now() -> float:
        if prompt.is_cuda:
            torch.cuda.synchronize(prompt.device)
        return time.perf_counter()

    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # since transformers 5.24, and before it
    stamps = [now()]
    ids, cache, tokens = prompt, None, []
    for _ in range(new_tokens):
        output = model(ids, use_cache=True, **{name: cache})
        cache = getattr(output, name)
        ids = output.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
        stamps.append(now())
    steps = sorted(b - a for a, b in itertools.pairwise(stamps[1:]))
    inter_token = steps[len(steps) // 2] if steps else math.nan
    return GenerationSpeed(stamps[1] - stamps[0], inter_token, new_tokens / (stamps[-1] - stamps[0]), tuple(tokens))
