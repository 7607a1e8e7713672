"""`octofuse explain`: what a model's layers really do, in one prompt and one step."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from octofuse.cli.common import context_of, pick_device, picture, quiet_transformers
from octofuse.cli.files import expect_model, expect_picture
from octofuse.files import from_pretrained
from octofuse.files.headers import method_of
from octofuse.files.loading import FORMATS
from octofuse.files.own import METHOD
from octofuse.models import LayerProfile, Profile, profile
from octofuse.models.advise import expect_causal
from octofuse.models.profiling import claim_of
from octofuse.models.watch import PHASES

_COLOURS = {"int8": "tab:green", "float8": "tab:blue", "16 bits": "tab:orange", "1 bit": "tab:purple", "": "tab:gray"}


def run_explain(
    console: Console, model: str, tokens: int | None, stock: bool, as_json: bool, plot: Path | None, device: str
) -> None:
    expect_picture(plot)
    where = pick_device(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler's own remarks
    quiet_transformers()
    loaded = load(model, where, stock)
    vocabulary, room = int(loaded.config.vocab_size), context_of(loaded) - 1
    tokens = min(512, room) if tokens is None else tokens
    if tokens > room:
        raise ValueError(f"tokens: expected at most {room}, one less than the model's context, got {tokens}")
    ids = torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
    found = profile(loaded, ids)
    if plot is not None:
        draw(found, plot)
    if as_json:
        print(json.dumps(as_dict(found), indent=1))
        return
    show(console, found, tokens)
    if plot is not None:
        console.print(f"{plot}: time by layers", highlight=False, markup=False, soft_wrap=True)


def load(model: str, device: torch.device, stock: bool) -> Any:
    """octofuse's layers for the formats that it reads, else transformers' own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name = expect_model(model)
    config = AutoConfig.from_pretrained(name)
    method = method_of(Path(name)) if Path(name).is_dir() else claim_of(config) or None
    if not stock and method in FORMATS:
        return from_pretrained(name, device)
    if method == METHOD:
        raise ValueError(f"stock: {name} is in this library's own format, for which transformers has no layers")
    expect_causal("model", config)
    dtype = "auto" if device.type == "cuda" else torch.float32
    options: dict[str, Any] = {} if method is None else {"device_map": str(device)}
    loaded = AutoModelForCausalLM.from_pretrained(name, dtype="auto" if method else dtype, **options)
    return (loaded if method else loaded.to(device)).eval().requires_grad_(False)


def alike(layers: Sequence[LayerProfile]) -> dict[tuple[str, str, str], list[LayerProfile]]:
    """Layers of the blocks side by side that do the same: by phase, name with * for numbers, and verdict."""
    groups: dict[tuple[str, str, str], list[LayerProfile]] = {}
    for layer in layers:
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", layer.name)
        groups.setdefault((layer.phase, pattern, layer.verdict), []).append(layer)
    return groups


def show(console: Console, found: Profile, tokens: int) -> None:
    groups = alike(found.layers)
    on_gpu = found.bandwidth is not None
    for phase in PHASES:
        heading = f"a prompt of {tokens} tokens" if phase == "prompt" else "one step"
        own = 0.0
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for head in ("layers", "weight, and in fact", "us", "MB", *(("instruction", "roofline") if on_gpu else ())):
            table.add_column(head, justify="right" if head in ("us", "MB", "roofline") else "left", overflow="fold")
        for (of_phase, pattern, verdict), layers in groups.items():
            if of_phase != phase:
                continue
            microseconds = sum(layer.microseconds for layer in layers)
            own += microseconds
            moved = sum(layer.moved_bytes for layer in layers) / 1e6
            name = ".".join(pattern.split(".")[-2:]).removeprefix("*.")
            row = [f"{len(layers)} x {name}", verdict, f"{microseconds:,.0f}", f"{moved:,.1f}"]
            table.add_row(*row, *((_code(layers[0]), _share(layers)) if on_gpu else ()))
        total = found.totals.get(phase, 0.0)
        console.print(
            f"{heading}, {found.device}: linears {own:,.0f} us of {total:,.0f}", highlight=False, soft_wrap=True
        )
        console.print(table)
    for line in found.findings or ("Nothing is widened or copied in secret.",):
        console.print(line, highlight=False, markup=False, soft_wrap=True, style="bold")
    console.print("MB: what a call has to move, and twice what it writes wider.", highlight=False, soft_wrap=True)
    if found.bandwidth is not None:
        speed = f"{found.bandwidth / 1e12:.2f} TB/s"
        for note in (
            f"roofline: share of what a copy's {speed} here and the tensor cores' data sheet allow.",
            "instruction: from the kernel's machine code (SASS), or by its name.",
        ):
            console.print(note, highlight=False, markup=False, soft_wrap=True)


def _code(layer: LayerProfile) -> str:
    code = layer.instruction
    return f"{code.name} ({code.source})" if code.name else "no tensor cores"


def _share(layers: list[LayerProfile]) -> str:
    floors = [layer.floor for layer in layers if layer.floor is not None]
    microseconds = sum(layer.microseconds for layer in layers)
    return f"{sum(floors) * 1e6 / microseconds:.0%}" if floors and microseconds else ""


def as_dict(found: Profile) -> dict[str, Any]:
    """Every layer and kernel."""
    layers = []
    for layer in found.layers:
        more = {"share": layer.share, "verdict": layer.verdict, "instruction": layer.instruction.name}
        layers.append(asdict(layer) | more)
    return asdict(found) | {"layers": layers, "findings": found.findings}


def draw(found: Profile, path: Path) -> None:
    """Each phase as a bar of its layers, as long as their time, in the colour of what multiplies; the rest is white."""
    with picture(path, (11.0, 3.2)) as axes:
        for row, phase in enumerate(PHASES):
            total = found.totals.get(phase) or sum(x.microseconds for x in found.layers if x.phase == phase) or 1.0
            left = 0.0
            for layer in found.layers:
                if layer.phase != phase:
                    continue
                width = layer.microseconds / total
                colour = (
                    "tab:red"
                    if "in name only" in layer.verdict
                    else _COLOURS.get(layer.instruction.operands, "tab:gray")
                )
                axes.barh(row, width, left=left, color=colour, edgecolor="white", linewidth=0.3)
                left += width
            axes.barh(row, max(0.0, 1.0 - left), left=left, color="white", edgecolor="lightgray")
        axes.set_yticks(range(len(PHASES)), PHASES)
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the time; red: a weight that is written wider first; white: what is no linear")
        shown = {name or "no tensor cores": colour for name, colour in _COLOURS.items()} | {"widened": "tab:red"}
        handles = [axes.barh(0, 0, color=colour, label=name) for name, colour in shown.items()]
        axes.legend(handles=handles, loc="upper center", ncols=len(handles), bbox_to_anchor=(0.5, 1.25), frameon=False)
