"""`octofuse eval`: perplexity, and beside a floating-point model what quantisation costs and where."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.table import Table

from octofuse.cli.common import (
    evaluation_tokens,
    load_any,
    load_float,
    measure_perplexity,
    pick_device,
    picture,
    progress,
    window_of,
)
from octofuse.cli.files import expect_picture, expect_text
from octofuse.models import Comparison, compare

BAD = 6.0  # dB below its neighbours: a layer to look at


def run_evaluate(
    console: Console,
    model: str,
    against: str | None,
    text: Path | None,
    max_tokens: int,
    stride: int | None,
    plot: Path | None,
    device: str,
) -> None:
    if plot is not None and against is None:
        raise ValueError("plot: expected --against a floating-point model beside it; there is nothing else to draw")
    expect_picture(plot)
    expect_text("text", text)
    where = pick_device(device)
    loaded, tokenizer = load_any(model, where)
    tokens = evaluation_tokens(tokenizer, text)[:max_tokens]
    stride = window_of(loaded) // 2 if stride is None else stride
    if against is None:
        value = measure_perplexity(loaded, tokens, "evaluating", stride)
        console.print(f"perplexity {value:.4f} over {tokens.numel()} tokens (stride {stride})")
        return
    reference, _ = load_float(against, where)
    with progress("comparing") as on_window:
        found = compare(loaded, reference, tokens, context=window_of(loaded), stride=stride, on_window=on_window)
    print_comparison(console, found, tokens.numel(), stride)
    if plot is not None:
        draw(found, plot)
        console.print(f"{plot}: SQNR of {len(found.sqnr)} layers", highlight=False, markup=False, soft_wrap=True)


def print_comparison(console: Console, found: Comparison, tokens: int, stride: int) -> None:
    console.print(
        f"perplexity {found.perplexity:.4f} against {found.reference_perplexity:.4f} ({found.cost:+.2%}) over {tokens} "
        f"tokens (stride {stride}); same top token {found.top1:.2%}; KL {found.kl:.3g} nats",
        soft_wrap=True,
    )
    table = Table(
        "layer", "SQNR, dB", "", title="output of each quantised layer, beside the floating-point model", box=None
    )
    low = below_their_kind(found.sqnr)
    for name, value in found.sqnr.items():
        table.add_row(name, f"{value:.1f}", "low" if name in low else "")
    console.print(table)


def below_their_kind(sqnr: dict[str, float]) -> set[str]:
    """Layers whose SQNR lies 6 dB below the mean of their neighbours of the same kind, one block before and one behind.

    Neighbours, not all: noise adds up from block to block.
    """
    kinds: dict[str, list[str]] = {}
    for name, value in sqnr.items():
        if math.isfinite(value):
            kinds.setdefault(_kind(name), []).append(name)
    low = set()
    for names in kinds.values():
        for place, name in enumerate(names):
            beside = [sqnr[other] for other in (*names[max(0, place - 1) : place], *names[place + 1 : place + 2])]
            if beside and sqnr[name] < sum(beside) / len(beside) - BAD:
                low.add(name)
    return low


def _kind(name: str) -> str:
    """h.3.mlp.c_fc -> mlp.c_fc."""
    return ".".join(part for part in name.split(".")[-2:] if not part.isdigit())


def draw(found: Comparison, path: Path) -> None:
    """A bar for each layer."""
    finite = {name: value for name, value in found.sqnr.items() if math.isfinite(value)}
    low = below_their_kind(found.sqnr)
    colors = ["tab:red" if name in low else "tab:blue" for name in finite]
    with picture(path, (8, 0.22 * len(finite) + 1.5)) as axes:
        axes.barh(range(len(finite)), list(finite.values()), color=colors)
        axes.set_yticks(range(len(finite)), list(finite), fontsize=7)
        axes.invert_yaxis()
        axes.set(xlabel="SQNR of the layer's output, dB", title=f"perplexity {found.cost:+.2%}, KL {found.kl:.3g} nats")
