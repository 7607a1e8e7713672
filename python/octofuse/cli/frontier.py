"""`octofuse frontier`: which mixtures of schemes are worth their bytes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from octofuse.cli.common import (
    calibration_batches,
    evaluation_tokens,
    load_float,
    pick_device,
    picture,
    progress,
    window_of,
)
from octofuse.cli.files import expect_picture, expect_text
from octofuse.models import Mixture, frontier
from octofuse.models.frontier import FLOAT
from octofuse.quant import scheme_named


def run_frontier(
    console: Console,
    model: str,
    schemes: str,
    text: Path | None,
    calibration: Path | None,
    max_tokens: int,
    stride: int | None,
    plot: Path | None,
    device: str,
) -> None:
    names = [name.strip() for name in schemes.split(",")]
    calibrates = any(scheme_named(name).needs_calibration for name in names if name != FLOAT)
    expect_picture(plot)
    expect_text("text", text)
    expect_text("calibration", calibration)
    loaded, tokenizer = load_float(model, pick_device(device))
    tokens = evaluation_tokens(tokenizer, text)[:max_tokens]
    batches = calibration_batches(tokenizer, loaded, calibration) if calibrates else None
    window = window_of(loaded)
    stride = window // 2 if stride is None else stride
    with progress("evaluating mixtures") as on_mixture:
        found = frontier(
            loaded, tokens, names, context=window, stride=stride, calibration=batches, on_mixture=on_mixture
        )
    table = Table(
        *found[0].schemes, "MB", "perplexity", "", title=f"{tokens.numel()} tokens, stride {stride}", box=None
    )
    for one in found:
        mark = "frontier" if one.on_frontier else ""
        table.add_row(*one.schemes.values(), f"{one.bytes / 1e6:.2f}", f"{one.perplexity:.4f}", mark)
    console.print(table)
    if plot is not None:
        draw(found, plot)
        console.print(f"{plot}: {len(found)} mixtures", highlight=False, markup=False, soft_wrap=True)


def draw(found: list[Mixture], path: Path) -> None:
    """Perplexity against size."""
    best = [one for one in found if one.on_frontier]
    with picture(path, (9, 5.5)) as axes:
        axes.plot([one.bytes / 1e6 for one in found], [one.perplexity for one in found], ".", color="grey")
        axes.plot([one.bytes / 1e6 for one in best], [one.perplexity for one in best], "o-")
        for one in best:
            axes.annotate(one.name, (one.bytes / 1e6, one.perplexity), fontsize=6, rotation=20)
        axes.set(xlabel="checkpoint, MB", ylabel="perplexity", yscale="log")
        axes.grid(alpha=0.3)
