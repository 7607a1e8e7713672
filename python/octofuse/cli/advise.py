"""`octofuse advise`: which scheme for a model, by size, speed and loss."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from octofuse.cli.common import (
    calibration_batches,
    evaluation_tokens,
    load_float,
    measure_perplexity,
    pick_device,
    picture,
    quiet_transformers,
)
from octofuse.cli.files import expect_picture, expect_text, folder_of
from octofuse.generate import Generator
from octofuse.models import quantize_
from octofuse.models.advise import SCHEMES, Advice, Timed, advise, recommended
from octofuse.models.frontier import FLOAT
from octofuse.models.profiling import claim_of
from octofuse.models.speed import measured_gpus
from octofuse.quant import scheme_named

NEW_TOKENS = 16  # that are timed behind a prompt
FEW_TOKENS = 512  # of a text: fewer say little of losses


def run_advise(
    console: Console,
    model: str,
    gpu: str,
    budget_gb: float | None,
    batch: int,
    context: int | None,
    max_loss: float,
    schemes: str | None,
    text: Path | None,
    max_tokens: int,
    measure: bool,
    plot: Path | None,
    device: str,
) -> None:
    names = list(SCHEMES) if schemes is None else list(dict.fromkeys(name.strip() for name in schemes.split(",")))
    for name in names:
        if name != FLOAT:
            scheme_named(name)
    expect_picture(plot)
    expect_text("text", text)
    if not max_loss >= 0:  # nor NaN
        raise ValueError(f"max-loss: expected at least 0, got {max_loss}")
    if budget_gb is not None and not budget_gb > 0:
        raise ValueError(f"budget-gb: expected more than 0, got {budget_gb}")
    where = pick_device(device)
    card, config = gpu_named(gpu), config_of(model)
    if (method := claim_of(config)) and text is None and not measure:
        console.print(
            f"{model} is quantised already ({method}): this is of the floating-point model it was made from.",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    most = int(getattr(config, "max_position_embeddings", None) or 1024)
    length = min(2048, most) if context is None else context
    budget = None if budget_gb is None else budget_gb * 1e9
    found = advise(config, gpu=card, schemes=names, budget=budget, batch=batch, context=length)
    if text is not None or measure:
        if measure and length <= NEW_TOKENS:
            raise ValueError(f"context: expected more than {NEW_TOKENS} with --measure, got {length}")
        timed, notes = measured(model, names, text, max_tokens, (batch, length) if measure else None, where)
        kept = [name for name in names if name in timed]
        found = advise(config, gpu=card, schemes=kept, budget=budget, batch=batch, context=length, timed=timed)
        for note in notes:
            console.print(note, highlight=False, markup=False, soft_wrap=True)
    source = f"measured on {where}" if measure else f"estimated for one {card}"
    show(console, found, f"{batch} x {length} tokens, {source}")
    for line in explanations(found, card):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    best, why = recommended(found, max_loss)
    console.print(
        f"Take {best.scheme}: {why}." if best else f"No recommendation: {why}.", highlight=False, markup=False,
        soft_wrap=True, style="bold",
    )  # fmt: skip
    if plot is not None:
        draw(found, best, plot)
        console.print(f"{plot}: {len(found)} schemes", highlight=False, markup=False, soft_wrap=True)


def gpu_named(name: str) -> str:
    """auto: this machine's, where it was measured, else the first that was."""
    known = {card.lower(): card for card in measured_gpus()}
    if name.lower() != "auto":
        if name.lower() not in known:
            raise ValueError(f"gpu: expected auto, {', '.join(known)}, got {name!r}")
        return known[name.lower()]
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    same = (card for card, found in measured_gpus().items() if found["measured on"] == here)  # MIG, PCIe are others
    return next(same, next(iter(known.values())))


def config_of(model: str) -> Any:
    """Of a folder, a config.json itself, or a hub name. Raises FileNotFoundError or ValueError that names the file."""
    quiet_transformers()
    from transformers import AutoConfig

    name = folder_of(model)
    path = Path(name).expanduser()
    folder = path.parent if path.name == "config.json" else path
    is_local = folder.is_dir() or path.suffix == ".json" or name.startswith((".", "/", "~")) or name.endswith("/")
    if is_local and not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'}: not found; expected a folder with a model's config.json")
    try:
        return AutoConfig.from_pretrained(folder if is_local else name, trust_remote_code=False)
    except Exception as error:  # of many kinds, by what is wrong in the file
        first = str(error).strip().split("\n")[0]
        raise ValueError(
            f"{folder / 'config.json' if is_local else name}: not a config that is known: {first}"
        ) from error


def measured(
    model: str,
    names: list[str],
    text: Path | None,
    max_tokens: int,
    sizes: tuple[int, int] | None,
    where: torch.device,
) -> tuple[dict[str, Timed], list[str]]:
    """Loss (with a text) and speed (with sizes: batch and context) of each scheme; and notes: why some are missing."""
    path = Path(model).expanduser()
    loaded, tokenizer = load_float(str(path.parent) if path.name == "config.json" else model, where)
    tokens = evaluation_tokens(tokenizer, text)[:max_tokens]
    calibrates = any(name != FLOAT and scheme_named(name).needs_calibration for name in names)
    batches = calibration_batches(tokenizer, loaded) if calibrates else None
    base = None if text is None else measure_perplexity(loaded, tokens, "float")
    found, notes = {}, []
    if text is not None and tokens.numel() < FEW_TOKENS:
        notes.append(f"text: of {tokens.numel()} tokens losses say little; give some thousand")
    for name in names:
        built = loaded if name == FLOAT else copy.deepcopy(loaded)
        try:
            if name != FLOAT:
                quantize_(built, name, batches, progress=False)
        except ValueError as error:
            notes.append(f"left out: {name}: {error}")
            continue
        loss = None
        if base is not None:
            loss = 0.0 if name == FLOAT else measure_perplexity(built, tokens, name) / base - 1
        rate, prompt = (None, None) if sizes is None else times_of(built, tokens, *sizes)
        found[name] = Timed(rate, prompt, loss)
        del built
    return found, notes


def times_of(model: Any, tokens: Tensor, batch: int, context: int) -> tuple[float, float]:
    """Tokens a second of all sequences behind a prompt that leaves NEW_TOKENS of the context, and the prompts' seconds."""
    generator = Generator(model)
    length = context - NEW_TOKENS
    ids = tokens.repeat(-(-length // tokens.numel()))[:length].tolist()

    def seconds(count: int) -> float:
        began = time.perf_counter()
        generator([ids] * batch, count)
        return time.perf_counter() - began

    for count in (NEW_TOKENS, 1):
        seconds(count)
    first = min(seconds(1) for _ in range(3))
    whole = min(seconds(NEW_TOKENS) for _ in range(3))
    if whole <= first:  # on a busy machine: then the prompt's time is counted as well
        return batch * NEW_TOKENS / whole, first
    return batch * (NEW_TOKENS - 1) / (whole - first), first


def show(console: Console, found: list[Advice], title: str) -> None:
    table = Table(title=title, box=None, title_justify="left", pad_edge=False, padding=(0, 2, 0, 0))
    for head in ("scheme", "weights", "cache", "fits", "tokens/s", "prompt", "loss"):
        table.add_column(head, justify="left" if head == "scheme" else "right", no_wrap=True)
    for one in found:
        loss = "?" if one.loss is None else f"{one.loss:+.1%}" if one.loss < 1 else f"{1 + one.loss:.1f}x"
        table.add_row(
            one.scheme, size_of(one.weights), size_of(one.cache), "yes" if one.fits else "no",
            ("~" if one.speed_from == "linears" else "") + f"{one.tokens_per_second:,.0f}",
            milliseconds(one.prompt_seconds),
            loss + ("*" if one.loss_from == "embedded" and one.loss is not None else ""),
        )  # fmt: skip
    console.print(table)


def size_of(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def milliseconds(seconds: float) -> str:
    digits = 0 if seconds >= 0.1 else 1 if seconds >= 1e-3 else 3
    return f"{seconds * 1e3:,.{digits}f} ms"


def explanations(found: list[Advice], card: str) -> list[str]:
    lines = []
    if any(one.loss is None for one in found):
        lines.append("? what this scheme loses was not measured. --text FILE measures it.")
    if any(one.loss_from == "embedded" and one.loss is not None for one in found):
        lines.append(
            "* of perplexity, on the embedded GPT-2, which is small: larger models lose less. --text FILE measures yours."
        )
    if any(one.speed_from == "linears" for one in found):
        lines.append("~ by the times of single linears of this kind: no decoder was timed with it.")
    if any(one.speed_from != "timed" for one in found):
        measured_on = measured_gpus()[card]
        error, least = measured_on["error"], measured_on["smallest GB"]
        lines.append(
            f"Speeds: estimated from this library's measurements on one {card}, with a cache and an output head in fp16. "
            f"Of models that the estimate had not seen, steps of one sequence were off by {error['mean']:.0%} in the mean, "
            f"{error['largest']:.0%} at most; batches and prompts are by those of one 8B model, and too fast for models "
            "much smaller than that. --measure times yours here."
        )
        if min(one.weights for one in found) / 1e9 < least:
            lines.append(
                f"This model is smaller than those that were timed ({least:.2g} GB a step and more): take care."
            )
    return lines


def draw(found: list[Advice], best: Advice | None, path: Path) -> None:
    """A bar for each scheme: its speed, with size and loss beside it."""
    with picture(path, (9, 0.8 + 0.4 * len(found))) as axes:
        for place, one in enumerate(reversed(found)):
            color = "tab:green" if one is best else "tab:blue" if one.fits else "lightgrey"
            axes.barh(place, one.tokens_per_second, color=color)
            loss = "" if one.loss is None else f", {one.loss:+.1%}"
            unfit = "" if one.fits else ", does not fit"
            axes.text(one.tokens_per_second, place, f" {one.bytes / 1e9:.3g} GB{loss}{unfit}", va="center", fontsize=8)
        axes.set_yticks(range(len(found)), [one.scheme for one in reversed(found)], fontsize=8)
        axes.set(xlabel="tokens/s", xlim=(0, 1.3 * max(one.tokens_per_second for one in found)))
        axes.grid(alpha=0.3, axis="x")
