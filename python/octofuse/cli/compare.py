"""`octofuse compare`: two models, of any formats, side by side."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from octofuse.cli.common import context_of, evaluation_tokens, load_any, pick_device, progress, window_of
from octofuse.cli.files import expect_text
from octofuse.generate import Generator
from octofuse.models import compare, measure_generation, weight_bytes
from octofuse.models.architecture import decodes

PROMPT = 8  # tokens of the text that generation begins with
RUNS = 3


def run_compare(
    console: Console,
    first: str,
    second: str,
    text: Path | None,
    max_tokens: int,
    stride: int | None,
    new_tokens: int,
    device: str,
) -> None:
    expect_text("text", text)
    where = pick_device(device)
    (one, tokenizer), (other, other_tokenizer) = load_any(first, where), load_any(second, where)
    tokens = evaluation_tokens(tokenizer, text)[:max_tokens]
    if not torch.equal(tokens, evaluation_tokens(other_tokenizer, text)[:max_tokens]):
        raise ValueError(f"second: expected the tokenizer of {first}, got another in {second}")
    sizes = [model.get_output_embeddings().out_features for model in (one, other)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"second: expected a vocabulary of {sizes[0]} as in {first}, got {sizes[1]} in {second}")
    context = min(window_of(one), window_of(other))
    if PROMPT + new_tokens > min(context_of(one), context_of(other)):
        raise ValueError(f"new-tokens: expected at most {min(context_of(one), context_of(other)) - PROMPT}, what the "
                         f"context leaves, got {new_tokens}")  # fmt: skip
    stride = context // 2 if stride is None else stride
    with progress("comparing") as on_window:
        found = compare(one, other, tokens, context=context, stride=stride, layers=False, on_window=on_window)
    rates = rates_of([one, other], tokens[:PROMPT], new_tokens)
    for place, name in (("first", first), ("second", second)):
        console.print(f"{place}: {name}", highlight=False, markup=False, soft_wrap=True)
    table = Table("", "first", "second", "second / first", box=None)
    pairs = {
        "perplexity": (found.perplexity, found.reference_perplexity),
        "weights, MB": tuple(weight_bytes(model) / 1e6 for model in (one, other)),
        f"tokens/s, one sequence, {where.type}": tuple(rates),
    }
    for what, (mine, theirs) in pairs.items():
        table.add_row(what, f"{mine:,.4g}", f"{theirs:,.4g}", f"{theirs / mine:.3f}x")
    console.print(table)
    console.print(
        f"over {tokens.numel()} tokens (stride {stride}): same top token {found.top1:.2%}; "
        f"KL of the first from the second {found.kl:.3g} nats",
        soft_wrap=True,
    )  # fmt: skip


def rates_of(models: list[Any], prompt: Tensor, new_tokens: int) -> list[float]:
    """Tokens a second, greedy, in turns: by this library's generator where it knows the family, else a plain loop."""
    generators = [Generator(model) if decodes(model) else None for model in models]
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(RUNS + 1):
        for place, (model, generator) in enumerate(zip(models, generators, strict=True)):
            began = time.perf_counter()
            if generator is None:
                ids = prompt.unsqueeze(0).to(next(model.parameters()).device)
                measure_generation(model, ids, new_tokens, repeats=1, warm_up=False)
            else:
                generator([prompt.tolist()], new_tokens)
            if turn > 0:
                seconds[place].append(time.perf_counter() - began)
    return [new_tokens / statistics.median(times) for times in seconds]
