"""`octofuse tune`: which shapes to measure, and the table of what changed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

from octofuse.cli.common import load_any, pick_device
from octofuse.nn import Float8Linear, Int8Linear
from octofuse.ops.tuning import Tuned, cache_path, check_kind
from octofuse.ops.tuning import tune as measure

OUTPUTS = {
    str(t).removeprefix("torch."): t
    for t in (torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int32, torch.float8_e4m3fn)
}
DTYPES = ("int8", "float8")


class Weight(NamedTuple):
    """fast_accumulate: as the layer has it."""

    n: int
    k: int
    dtype: torch.dtype
    fast_accumulate: bool


def run_tune(
    console: Console, model: str | None, given: list[str], tokens: str, out: str, dtype: str, device_name: str
) -> None:
    """Raises ValueError for arguments that name nothing to tune."""
    if out not in OUTPUTS:
        raise ValueError(f"out: expected one of {', '.join(OUTPUTS)}, got {out!r}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected {' or '.join(DTYPES)}, got {dtype!r}")
    rows = _integers("tokens", tokens)
    floating = (torch.int8, False) if dtype == "int8" else (torch.float8_e4m3fn, True)
    weights = [Weight(*_pair(text), *floating) for text in given]
    device = pick_device(device_name)
    if device.type != "cuda":
        raise ValueError("device: expected a CUDA device that octofuse can use: the CPU has nothing to tune")
    if model is not None:
        weights += weights_of(load_any(model, torch.device("cpu"))[0], *floating)
    if not weights:
        raise ValueError("model: expected a model with linears in floating point, int8 or float8, or --shape N,K")
    kinds: dict[tuple[torch.dtype, bool], list[tuple[int, int, int]]] = {}
    for weight in dict.fromkeys(weights):
        of_kind = kinds.setdefault((weight.dtype, weight.fast_accumulate), [])
        of_kind.extend((m, weight.n, weight.k) for m in rows)
    for kind in kinds:
        check_kind(*kind, output_of(out, kind[0]))
    count = sum(map(len, kinds.values()))
    table = Table("M", "N", "K", "before", "us", "now", "us", "faster")
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=count)

        def report(t: Tuned) -> None:
            table.add_row(*_cells(t))
            progress.advance(task)

        results = [
            result
            for (operands, fast), shapes in kinds.items()
            for result in measure(shapes, device=device, out_dtype=output_of(out, operands), dtype=operands,
                                  fast_accumulate=fast, on_shape=report)
        ]  # fmt: skip
    console.print(table)
    gain = math.exp(sum(math.log(t.before_us / t.us) for t in results) / len(results))
    console.print(f"{len(results)} shapes, {gain:.3f}x on geometric mean; remembered in {cache_path()}")


def output_of(out: str, operands: torch.dtype) -> torch.dtype:
    """Eight bits are those of the operands."""
    return operands if OUTPUTS[out].itemsize == 1 else OUTPUTS[out]


def _cells(t: Tuned) -> list[str]:
    changed = "" if t.kernel == t.before else t.kernel
    return [*map(str, t.shape), t.before, f"{t.before_us:.2f}", changed, f"{t.us:.2f}", f"{t.before_us / t.us:.2f}x"]


def weights_of(model: nn.Module, dtype: torch.dtype, fast: bool) -> list[Weight]:
    """Of every layer that has 8-bit operands, and, in the given dtype, of those that octofuse quantises."""
    found = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if name.endswith("lm_head") or weight is None or weight.dim() != 2:
            continue
        n, k = map(int, weight.shape)
        if isinstance(module, Int8Linear | Float8Linear):
            if module.scheme.weights != "block":
                found.append(Weight(n, k, module.values, module.fast_accumulate))
        elif isinstance(module, nn.Linear):
            found.append(Weight(n, k, dtype, fast))
        elif type(module).__name__ == "Conv1D":  # transformers': [K, N]
            found.append(Weight(k, n, dtype, fast))
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
