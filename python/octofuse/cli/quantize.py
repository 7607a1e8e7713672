"""`octofuse quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from octofuse.cli.common import calibration_batches, exceptions_of, load_float, pick_device, warn_of_fallbacks
from octofuse.cli.files import expect_new_folder, expect_text, expect_tokenizer, folder_of
from octofuse.engine import calibrate_cache_
from octofuse.files import save_pretrained
from octofuse.files.compressed_tensors_writing import check_scheme
from octofuse.files.writing import FORMATS_WRITTEN
from octofuse.generate import own_text
from octofuse.models import distill_, distill_blocks_, quantize_, weight_bytes
from octofuse.models.blockwise import check_blocks
from octofuse.models.distill import training_bytes
from octofuse.models.trained import has_trainable_codes
from octofuse.quant import AnyScheme, WeightOnly, scheme_named

OWN_TEXT = 2048  # batches that the float model writes at most
OWN_TEXT_OF_BLOCKS = 128  # the same: their hidden states stay in memory
LEAST_STEPS = 100  # of a block
SHARE_OF_SCALES = 4  # a quarter as many steps train the scales of all blocks together afterwards
SHARE = 0.7  # of the free memory: the rest is for activations
MEMORY = Path("/proc/meminfo")  # Linux's: what is free, and what programs would get


def run_quantize(
    console: Console,
    model: str,
    output: Path,
    scheme: str,
    exceptions: list[str],
    calibration: Path | None,
    distill: int,
    codes: bool,
    by_blocks: bool,
    cache_scales: bool,
    with_tokenizer: bool,
    form: str,
    device: str,
) -> None:
    chosen = scheme_named(scheme)
    others = exceptions_of(exceptions)
    needed = [chosen, *(scheme_named(other) for other in others.values() if other is not None)]
    _check_training(needed, scheme, distill, codes, by_blocks)
    if form not in FORMATS_WRITTEN:
        raise ValueError(f"format: expected one of {', '.join(FORMATS_WRITTEN)}, got {form!r}")
    if form == "compressed-tensors":
        for one in needed:
            check_scheme("scheme", one)
    where = pick_device(device)
    expect_new_folder(output)
    expect_text("calibration", calibration)
    calibrates = distill > 0 or any(one.needs_calibration for one in needed)
    if (calibrates or cache_scales) and not with_tokenizer:
        got = scheme if calibrates else "--cache-scales"
        raise ValueError(f"no-tokenizer: expected a scheme that needs no calibration text, got {got}")
    if with_tokenizer:
        expect_tokenizer(folder_of(model), "; --no-tokenizer goes without")
    loaded, tokenizer = load_float(model, where, with_tokenizer=with_tokenizer)
    before = weight_bytes(loaded)
    batches = calibration_batches(tokenizer, loaded, calibration) if calibrates or cache_scales else []
    quantize_(loaded, chosen, batches if calibrates else None, exceptions=others)
    if distill > 0:
        teacher = load_float(model, where)[0]
        if not by_blocks and not _fits(loaded, codes):
            by_blocks = True
            console.print("note: too little memory to train all blocks at once: one after the other")
        divergence = _distill(loaded, teacher, batches, distill, codes, by_blocks)
        console.print("KL divergence from the float model: {:.4f} -> {:.4f} nats a token".format(*divergence))
    if cache_scales:  # last: smoothing may have changed what keys and values are
        calibrate_cache_(loaded, batches)
    save_pretrained(loaded, output, tokenizer, format=form)
    warn_of_fallbacks(loaded)
    console.print(f"{output}: {scheme}, {before / 1e6:.1f} MB -> {weight_bytes(loaded) / 1e6:.1f} MB of weights")


def _check_training(schemes: list[AnyScheme], name: str, distill: int, codes: bool, by_blocks: bool) -> None:
    others = [one.name for one in schemes if not isinstance(one, WeightOnly)]
    if distill > 0 and others:
        raise ValueError(f"distill: expected schemes such as w3a16-g128 or bcq-q2-g128, got {others[0]}")
    for option, given in (("codes", codes), ("by-blocks", by_blocks)):
        if given and distill == 0:
            raise ValueError(f"{option}: expected --distill of at least 1, got 0")
    if codes and not any(isinstance(one, WeightOnly) and has_trainable_codes(one) for one in schemes):
        raise ValueError(
            f"codes: expected a scheme such as w4a16-g128 (not awq) or bcq-q2-g128 (up to 4 planes), got {name}"
        )


def _fits(model: Any, codes: bool) -> bool:
    """Also where nobody says how much memory there is."""
    free = _free_memory(next(model.parameters()).device)
    return free is None or training_bytes(model, codes=codes) <= SHARE * free


def _free_memory(device: torch.device) -> int | None:
    """Bytes."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    if not MEMORY.is_file():
        return None
    found = dict(line.split(":") for line in MEMORY.read_text().splitlines() if ":" in line)
    return int(found["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in found else None


def _distill(
    model: Any, teacher: Any, text: list[Tensor], steps: int, codes: bool, by_blocks: bool
) -> tuple[float, float]:
    if by_blocks:
        of_each = max(LEAST_STEPS, steps // check_blocks(model, text[0]))  # refused before the text is written
    if codes:  # there are as many as weights: they would learn a short text by heart
        text = text + own_text(teacher, text, min(1 + steps // 2, OWN_TEXT_OF_BLOCKS if by_blocks else OWN_TEXT))
    if not by_blocks:
        return distill_(model, teacher, text, steps=steps, codes=codes)
    before, after = distill_blocks_(model, teacher, text, steps=of_each, codes=codes)
    if _fits(model, codes=False):  # scales then learn what no block by itself knows
        after = distill_(model, teacher, text, steps=-(-steps // SHARE_OF_SCALES))[1]
    return before, after
