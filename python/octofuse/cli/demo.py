"""The demonstration's table, and doctor's report for people."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from octofuse import _C
from octofuse.cli.common import (
    calibration_batches,
    encode,
    evaluation_tokens,
    expect_picture,
    generate_text,
    load_float,
    measure_perplexity,
    pick_device,
    picture,
)
from octofuse.generate import Generator
from octofuse.models import measure_generation, quantize_, weight_bytes
from octofuse.nn import Int8Linear, PackedLinear
from octofuse.quant import scheme_named

PROMPT = "def read_config(path):\n    "
COLUMNS = {  # and their heads: all of them fit 80 characters
    "perplexity": "per-\nplexity",
    "weights, MB": "all,\nMB",
    "linears, MB": "linears,\nMB",
    "tokens/s": "tokens\n/s",
    "first token, ms": "first,\nms",
    "inter-token, ms": "inter-\ntoken, ms",
    "tokens/s, transformers": "transf.\ntokens/s",
}
# The recipe of the first published int8 GPT-2, the two that this library recommends, and two with fewer bits.
SCHEMES = ("w8a8-static-tensor", "w8a8-static-mse-smooth", "w8a8-dynamic", "w4a16-g128-zp-gptq", "bcq-q3-g128")


def run_demo(
    console: Console, device_name: str, new_tokens: int, max_tokens: int, schemes: str | None, plot: Path | None
) -> None:
    began = time.perf_counter()
    names = SCHEMES if schemes is None else tuple(name.strip() for name in schemes.split(","))
    calibrated = {name: scheme_named(name).needs_calibration for name in names}
    expect_picture(plot)
    device = pick_device(device_name)
    if not _C.build_info()["cuda"]:
        console.print("octofuse was built for the CPU only: no NVIDIA driver was found when it was installed.")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    model, tokenizer = load_float("embedded", device)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = evaluation_tokens(tokenizer)[:max_tokens]
    found = [_measure(str(model.dtype).removeprefix("torch."), model, tokenizer, tokens, new_tokens)]
    for name in names:
        model, _ = load_float("embedded", device)
        quantize_(model, name, calibration_batches(tokenizer, model) if calibrated[name] else None)
        found.append(_measure(name, model, tokenizer, tokens, new_tokens))

    title = f"embedded GPT-2 ({parameters / 1e6:.1f}M parameters) on {where}, batch 1"
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for head in COLUMNS.values():
        table.add_column(head, justify="right")
    for one in found:
        table.add_row(one["name"], *(one[column] for column in COLUMNS))
    console.print(table)
    for one in found:
        console.print(f"[bold]{one['name']}[/bold]\n{escape(one['text'])}\n", highlight=False)
    if plot is not None:
        draw(found, plot)
        console.print(f"{plot}: {len(found)} schemes", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{time.perf_counter() - began:.0f} s in all; perplexity over {tokens.numel()} held-out tokens")


def draw(found: list[dict[str, str]], path: Path) -> None:
    """Perplexity against the linears' size, and what octofuse.generate makes of it."""
    with picture(path, (8, 5)) as axes:
        for one in found:
            label = f"{one['name']}: {one['tokens/s']} tokens/s"
            axes.plot(float(one["linears, MB"]), float(one["perplexity"]), "o", label=label)
        axes.set(xlabel="linears, MB", ylabel="perplexity")
        axes.legend()
        axes.grid(alpha=0.3)


def _measure(name: str, model: Any, tokenizer: Any, tokens: torch.Tensor, new_tokens: int) -> dict[str, str]:
    prompt = encode(tokenizer, PROMPT).unsqueeze(0).to(next(model.parameters()).device)
    eager = measure_generation(model, prompt, new_tokens)
    generator = Generator(model)
    first, total, inter_token = _seconds(generator, prompt, new_tokens)
    kinds = (Int8Linear, PackedLinear)
    linears = [m for m in model.modules() if isinstance(m, kinds) or type(m).__name__ == "Conv1D"]
    return {
        "name": name,
        "perplexity": f"{measure_perplexity(model, tokens, f'perplexity of {name}'):.3f}",
        "weights, MB": f"{weight_bytes(model) / 1e6:.2f}",
        "linears, MB": f"{sum(weight_bytes(linear) for linear in linears) / 1e6:.2f}",
        "tokens/s": _rate(new_tokens / total),
        "first token, ms": f"{first * 1e3:.2f}",
        "inter-token, ms": f"{inter_token * 1e3:.2f}",
        "tokens/s, transformers": _rate(eager.tokens_per_second),
        "text": generate_text(model, tokenizer, PROMPT, new_tokens, 0.0, 0),
    }


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"


def _seconds(generator: Generator, prompt: torch.Tensor, new_tokens: int) -> tuple[float, float, float]:
    """octofuse.generate, greedy: to the first token, for all, and between two of them.

    The fastest of five calls after one that captures its graphs. Those for one token and for all take turns, so that a
    busy machine meets both alike; the tokens behind the first take the median of the differences.
    """

    def seconds(count: int) -> float:
        began = time.perf_counter()
        generator(prompt, count)
        return time.perf_counter() - began

    pairs = [(seconds(1), seconds(new_tokens)) for _ in range(6)][1:]
    first, total = (min(times) for times in zip(*pairs, strict=True))
    return first, total, median(every - one for one, every in pairs) / (new_tokens - 1)


def print_report(console: Console, report: dict[str, Any]) -> None:
    build, cublaslt = report["build"], report["cublaslt"]
    console.print(f"octofuse {report['octofuse']}, Python {report['python']}, torch {report['torch']}", highlight=False)
    if build["cuda"]:
        version = f"{build['cuda_version'] // 1000}.{build['cuda_version'] % 1000 // 10}"
        console.print(f"kernels for {build['architectures']} (CUDA {version}, CUTLASS {build['cutlass_version']})")
        loaded = f"{cublaslt['version']} from {cublaslt['path']}" if cublaslt["loaded"] else cublaslt["why_not"]
        console.print(f"cuBLASLt: {loaded}", highlight=False)
    else:
        console.print("CPU-only build")
    console.print(f"NVIDIA driver: {report['driver'] or 'none'}")
    if "note" in report:
        console.print(f"[yellow]{report['note']}[/yellow]")
    for device in report["devices"]:
        table = Table(title=f"{device['device']}: {device['name']}", title_justify="left")
        table.add_column("engine")
        table.add_column("can serve")
        for engine, reason in device["engines"].items():
            table.add_row(engine, "yes" if not reason else f"no: {escape(reason)}")
        console.print(table)
        failures = device["self_test_failures"]
        outcome = "all exact" if not failures else f"{len(failures)} wrong: {', '.join(failures[:5])}"
        console.print(f"self-test: {device['self_test_cases']} cases, {outcome}")
