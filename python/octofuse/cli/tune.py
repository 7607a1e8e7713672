"""`octofuse tune`: which shapes to measure, and the table of what changed."""

from __future__ import annotations

import math

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from octofuse.cli.common import load_any, pick_device
from octofuse.nn import Int8Linear
from octofuse.ops.tuning import Tuned, cache_path
from octofuse.ops.tuning import tune as measure

DTYPES = {
    str(t).removeprefix("torch."): t for t in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32)
}


def run_tune(console: Console, model: str | None, given: list[str], tokens: str, out: str, device_name: str) -> None:
    """Raises ValueError for arguments that name nothing to tune."""
    if out not in DTYPES:
        raise ValueError(f"out: expected one of {', '.join(DTYPES)}, got {out!r}")
    rows = _integers("tokens", tokens)
    weights = [_pair(text) for text in given]
    device = pick_device(device_name)
    if device.type != "cuda":
        raise ValueError("device: expected a CUDA device that octofuse can use: the CPU has nothing to tune")
    if model is not None:
        weights += weights_of(load_any(model, torch.device("cpu"))[0])
    if not weights:
        raise ValueError("model: expected a model, or --shape N,K")
    shapes = [(m, n, k) for n, k in dict.fromkeys(weights) for m in rows]
    table = Table("M", "N", "K", "before", "us", "now", "us", "faster")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=len(shapes))

        def report(t: Tuned) -> None:
            table.add_row(*_cells(t))
            progress.advance(task)

        results = measure(shapes, device=device, out_dtype=DTYPES[out], on_shape=report)
    console.print(table)
    gain = math.exp(sum(math.log(t.before_us / t.us) for t in results) / len(results))
    console.print(f"{len(results)} shapes, {gain:.3f}x on geometric mean; remembered in {cache_path()}")


def _cells(t: Tuned) -> list[str]:
    changed = "" if t.kernel == t.before else t.kernel
    return [*map(str, t.shape), t.before, f"{t.before_us:.2f}", changed, f"{t.us:.2f}", f"{t.before_us / t.us:.2f}x"]


def weights_of(model: nn.Module) -> list[tuple[int, int]]:
    """(N, K) of every layer that octofuse quantises or has quantised."""
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith("lm_head") or weight is None or weight.dim() != 2:
            continue
        if isinstance(module, Int8Linear | nn.Linear):
            found.append((int(weight.shape[0]), int(weight.shape[1])))
        elif type(module).__name__ == "Conv1D":  # transformers': [K, N]
            found.append((int(weight.shape[1]), int(weight.shape[0])))
    return found


def _integers(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise ValueError(f"{name}: expected integers with commas between, got {text!r}") from error
    if not values or min(values) < 1:
        raise ValueError(f"{name}: expected integers of at least 1, got {text!r}")
    return values


def _pair(text: str) -> tuple[int, int]:
    values = _integers("shape", text)
    if len(values) != 2:
        raise ValueError(f"shape: expected N,K, got {text!r}")
    return values[0], values[1]
