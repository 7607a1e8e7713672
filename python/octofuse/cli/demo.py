"""The demonstration's table, and doctor's report for people."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
    generate_text,
    load_float,
    load_tokenizer,
    measure_perplexity,
    pick_device,
    picture,
    warn_of_fallbacks,
)
from octofuse.cli.files import expect_picture
from octofuse.generate import Generator
from octofuse.models import fuse_, measure_generation, quantize_, weight_bytes
from octofuse.models.architecture import architecture_of
from octofuse.nn import QUANTISED, linear_layers
from octofuse.ops import cpu
from octofuse.quant import scheme_named

PROMPT = "def read_config(path):\n    "
COLUMNS = {  # and their heads: all of them fit 80 characters
    "perplexity": "per-\nplexity",
    "weights, MB": "all,\nMB",
    "linears, MB": "lin.,\nMB",
    "tokens/s": "tokens\n/s",
    "spread": "+-\n%",
    "first token, ms": "first,\nms",
    "inter-token, ms": "next,\nms",
    "tokens/s, transformers": "transf.\ntokens/s",
}
# The recipe of the first published int8 GPT-2, the two that this library recommends, and two with fewer bits.
SCHEMES = ("w8a8-static-tensor", "w8a8-static-mse-smooth", "w8a8-dynamic", "w4a16-g128-zp-gptq", "bcq-q3-g128")
QUICK = ("w8a8-dynamic", "w4a16-g128")
QUICK_TOKENS = 4096  # of perplexity

ROUNDS = 7  # of all models in turn
SECONDS = 15.0  # after which no round begins
SLOW = 5.0  # times the float model's time, with which a scheme leaves after two rounds
BUSY = 0.25  # spread of the float model's speed: another program had the machine
LITTLE = 0.01  # of perplexity: what the last sentence takes for almost nothing


@dataclass
class Shown:
    """One model of the demonstration."""

    name: str
    model: Any
    generator: Generator
    perplexity: float
    text: str
    first: list[float] = field(default_factory=list)  # seconds, of each round
    total: list[float] = field(default_factory=list)
    eager: list[float] = field(default_factory=list)

    @property
    def spread(self) -> float:
        """From the middle time to the farther of the quarters around it, as a part of it."""
        times = sorted(self.total)
        middle = median(times)
        return max(middle - times[len(times) // 4], times[-1 - len(times) // 4] - middle) / middle

    @property
    def linear_bytes(self) -> int:
        plain = linear_layers(self.model).values()
        quantised = [module for module in self.model.modules() if isinstance(module, QUANTISED)]
        return sum(weight_bytes(linear) for linear in (*plain, *quantised))

    def row(self, new_tokens: int) -> dict[str, str]:
        first, total = median(self.first), median(self.total)
        return {
            "name": self.name,
            "perplexity": f"{self.perplexity:.3f}",
            "weights, MB": f"{weight_bytes(self.model) / 1e6:.2f}",
            "linears, MB": f"{self.linear_bytes / 1e6:.2f}",
            "tokens/s": _rate(new_tokens / total),
            "spread": f"{self.spread * 100:.0f}",
            "first token, ms": f"{first * 1e3:.2f}",
            "inter-token, ms": f"{(total - first) / (new_tokens - 1) * 1e3:.2f}",
            "tokens/s, transformers": _rate(new_tokens / median(self.eager)),
        }


def run_demo(
    console: Console,
    model: str,
    device_name: str,
    new_tokens: int,
    max_tokens: int,
    schemes: str | None,
    plot: Path | None,
    quick: bool,
) -> None:
    began = time.perf_counter()
    names = (QUICK if quick else SCHEMES) if schemes is None else tuple(name.strip() for name in schemes.split(","))
    for name in names:
        scheme_named(name)
    expect_picture(plot)
    device = pick_device(device_name)
    if not _C.build_info()["cuda"]:
        console.print("octofuse was built for the CPU only: no NVIDIA driver was found when it was installed.")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    with cpu.Threads(device) as threads:
        limit = min(max_tokens, QUICK_TOKENS) if quick else max_tokens
        shown, tokens = _make(model, device, threads, names, limit, new_tokens)
        _take_turns(model, shown, threads, new_tokens, 3 if quick else ROUNDS)
    parameters = sum(p.numel() for p in shown[0].model.parameters())

    title = (
        f"{'embedded GPT-2' if model == 'embedded' else model} ({parameters / 1e6:.1f}M parameters) on {where}, batch 1"
    )
    table = Table(title=title, box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    for head in COLUMNS.values():
        table.add_column(head, justify="right")
    rows = [one.row(new_tokens) for one in shown]
    for row in rows:
        table.add_row(row["name"], *(row[column] for column in COLUMNS))
    console.print(table)
    if threads.crowded or shown[0].spread > BUSY:
        console.print("The machine was busy: an idle one is faster, and small differences mean nothing here.")
    console.print(_conclusion(shown), highlight=False)
    warn_of_fallbacks(shown[-1].model)
    for one in shown if not quick else ():
        console.print(f"\n[bold]{one.name}[/bold]\n{escape(one.text)}", highlight=False)
    if plot is not None:
        draw(rows, plot)
        console.print(f"{plot}: {len(rows)} schemes", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{time.perf_counter() - began:.0f} s in all; perplexity over {tokens} held-out tokens")


def _make(
    source: str, device: torch.device, threads: cpu.Threads, names: Sequence[str], max_tokens: int, new_tokens: int
) -> tuple[list[Shown], int]:
    """The float model and one of each scheme, each with a line on stderr as it begins; and the tokens evaluated."""
    plain, tokenizer = load_float(source, device)
    architecture_of(plain)  # refuses what Generator would, before any work
    tokens = evaluation_tokens(tokenizer)[:max_tokens]
    calibrated = any(scheme_named(name).needs_calibration for name in names)
    batches = calibration_batches(tokenizer, plain) if calibrated else None
    shown = []
    for at, name in enumerate((str(plain.dtype).removeprefix("torch."), *names)):
        print(f"{at + 1}/{len(names) + 1} {name}", file=sys.stderr, flush=True)
        threads.adjust()
        model = plain
        if at > 0:
            model = fuse_(quantize_(copy.deepcopy(plain), name, batches))  # for transformers' own loop
        value = measure_perplexity(model, tokens, f"perplexity of {name}")
        text = generate_text(model, tokenizer, PROMPT, new_tokens, 0.0, 0)
        shown.append(Shown(name, model, Generator(model), value, text))
    return shown, tokens.numel()


def _take_turns(source: str, shown: list[Shown], threads: cpu.Threads, new_tokens: int, rounds: int) -> None:
    """Times of every model: octofuse.generate to the first token and for all, and transformers token by token.

    All models take turns, so that a busy machine meets them alike.
    """
    prompt = encode(load_tokenizer(source), PROMPT).unsqueeze(0).to(shown[0].generator.decoder.device)
    print("measuring speeds", file=sys.stderr, flush=True)
    for one in shown:  # graphs, caches, threads
        one.generator(prompt, new_tokens)
    began = time.perf_counter()
    for at in range(rounds):
        if at >= 2 and time.perf_counter() - began > SECONDS:
            break
        for one in shown:
            if at >= 2 and min(one.total) > SLOW * min(shown[0].total):
                continue
            threads.adjust()
            for count, times in ((1, one.first), (new_tokens, one.total)):
                start = time.perf_counter()
                one.generator(prompt, count)
                times.append(time.perf_counter() - start)
            eager = measure_generation(one.model, prompt, new_tokens, repeats=1, warm_up=at == 0)
            one.eager.append(new_tokens / eager.tokens_per_second)


def _conclusion(shown: list[Shown]) -> str:
    """What the table shows, in a sentence."""
    plain, *others = shown
    usable = [one for one in others if one.perplexity < plain.perplexity * (1 + LITTLE)] or others
    best = min(usable, key=lambda one: median(one.total))
    speed, size = median(plain.total) / median(best.total), best.linear_bytes / plain.linear_bytes
    cost = best.perplexity / plain.perplexity - 1
    return (
        f"{best.name} makes {speed:.1f}x the tokens/s of {plain.name}, with {size:.2f}x the bytes in its linears, and its "
        f"perplexity is {cost:+.1%} of the float model's."
    )


def draw(rows: list[dict[str, str]], path: Path) -> None:
    """Perplexity against the linears' size, and what octofuse.generate makes of it."""
    with picture(path, (8, 5)) as axes:
        for one in rows:
            label = f"{one['name']}: {one['tokens/s']} tokens/s"
            axes.plot(float(one["linears, MB"]), float(one["perplexity"]), "o", label=label)
        axes.set(xlabel="linears, MB", ylabel="perplexity")
        axes.legend()
        axes.grid(alpha=0.3)


def _rate(tokens_per_second: float) -> str:
    return f"{tokens_per_second:.0f}" if tokens_per_second >= 10 else f"{tokens_per_second:.2g}"


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
        if "isa" in device:
            console.print(f"CPU kernels in use: {device['isa']}, up to {device['threads']} threads", highlight=False)
        failures = device["self_test_failures"]
        outcome = "all exact" if not failures else f"{len(failures)} wrong: {', '.join(failures[:5])}"
        console.print(f"self-test: {device['self_test_cases']} cases, {outcome}")
