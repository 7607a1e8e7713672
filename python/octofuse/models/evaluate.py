"""Perplexity and generation speed of a causal language model."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


@torch.no_grad()
def perplexity(
    model: nn.Module,
    tokens: Tensor,
    *,
    context: int,
    batch: int = 4,
    on_window: Callable[[int, int], None] | None = None,
) -> float:
    """exp(mean negative log likelihood) over consecutive windows of `context` tokens, predicted within each window.

    tokens: int64 [T], T >= 2. A last window shorter than `context` counts too. on_window(done, all) reports progress.
    """
    if tokens.dim() != 1 or tokens.numel() < 2:
        raise ValueError(f"tokens: expected one dimension with at least 2 tokens, got shape {list(tokens.shape)}")
    device = next(iter(model.buffers()), next(iter(model.parameters()))).device
    whole = tokens.numel() // context * context
    chunks = list(tokens[:whole].view(-1, context).split(batch))
    if tokens.numel() - whole >= 2:
        chunks.append(tokens[whole:].unsqueeze(0))
    total, count = 0.0, 0
    for index, chunk in enumerate(chunks):
        ids = chunk.to(device)
        logits = model(ids).logits[:, :-1].float()
        total += cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum").item()
        count += ids[:, 1:].numel()
        if on_window is not None:
            on_window(index + 1, len(chunks))
    return math.exp(total / count)


@dataclass(frozen=True)
class GenerationSpeed:
    """Greedy generation with a KV cache: seconds to the first token, median seconds between tokens, tokens per second."""

    first_token: float
    inter_token: float
    tokens_per_second: float
    tokens: tuple[int, ...]


@torch.no_grad()
def measure_generation(model: nn.Module, prompt: Tensor, new_tokens: int, *, repeats: int = 3) -> GenerationSpeed:
    """prompt int64 [1, T] on the model's device. The fastest of `repeats` runs after one to warm up; wall clock."""
    runs = [_timed_generation(model, prompt, new_tokens) for _ in range(repeats + 1)][1:]
    return min(runs, key=lambda run: -run.tokens_per_second)


def _timed_generation(model: nn.Module, prompt: Tensor, new_tokens: int) -> GenerationSpeed:
    def now() -> float:
        if prompt.is_cuda:
            torch.cuda.synchronize(prompt.device)
        return time.perf_counter()

    stamps = [now()]
    ids, cache, tokens = prompt, None, []
    for _ in range(new_tokens):
        output = model(ids, past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        ids = output.logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
        stamps.append(now())
    steps = sorted(b - a for a, b in itertools.pairwise(stamps[1:]))
    inter_token = steps[len(steps) // 2] if steps else math.nan
    return GenerationSpeed(stamps[1] - stamps[0], inter_token, new_tokens / (stamps[-1] - stamps[0]), tuple(tokens))
