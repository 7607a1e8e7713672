"""`octofuse quantize`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from octofuse.cli.common import calibration_batches, exceptions_of, load_float, pick_device, warn_of_fallbacks
from octofuse.cli.files import expect_new_folder, expect_text
from octofuse.engine import calibrate_cache_
from octofuse.files import save_pretrained
from octofuse.files.compressed_tensors_writing import check_scheme
from octofuse.files.writing import FORMATS_WRITTEN
from octofuse.generate import own_text
from octofuse.models import distill_, quantize_, weight_bytes
from octofuse.models.distill import has_trainable_codes
from octofuse.quant import AnyScheme, WeightOnly, scheme_named

OWN_TEXT = 768  # batches that the float model writes at most


def run_quantize(
    console: Console,
    model: str,
    output: Path,
    scheme: str,
    exceptions: list[str],
    calibration: Path | None,
    distill: int,
    codes: bool,
    cache_scales: bool,
    with_tokenizer: bool,
    form: str,
    device: str,
) -> None:
    chosen = scheme_named(scheme)
    others = exceptions_of(exceptions)
    needed = [chosen, *(scheme_named(other) for other in others.values() if other is not None)]
    _check_training(needed, scheme, distill, codes)
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
    loaded, tokenizer = load_float(model, where, with_tokenizer=with_tokenizer)
    before = weight_bytes(loaded)
    batches = calibration_batches(tokenizer, loaded, calibration) if calibrates or cache_scales else []
    quantize_(loaded, chosen, batches if calibrates else None, exceptions=others)
    if distill > 0:
        divergence = _distill(loaded, load_float(model, where)[0], batches, distill, codes)
        console.print("KL divergence from the float model: {:.4f} -> {:.4f} nats a token".format(*divergence))
    if cache_scales:  # last: smoothing may have changed what keys and values are
        calibrate_cache_(loaded, batches)
    save_pretrained(loaded, output, tokenizer, format=form)
    warn_of_fallbacks(loaded)
    console.print(f"{output}: {scheme}, {before / 1e6:.1f} MB -> {weight_bytes(loaded) / 1e6:.1f} MB of weights")


def _check_training(schemes: list[AnyScheme], name: str, distill: int, codes: bool) -> None:
    if distill > 0 and not all(isinstance(one, WeightOnly) for one in schemes):
        raise ValueError("distill: expected weight-only schemes, such as bcq-q2-g128; int8 has no gradient")
    if codes and distill == 0:
        raise ValueError("codes: expected --distill of at least 1, got 0")
    if codes and not any(isinstance(one, WeightOnly) and has_trainable_codes(one) for one in schemes):
        raise ValueError(f"codes: expected a uniform scheme, such as w4a16-g128 (not awq), got {name}")


def _distill(model: Any, teacher: Any, text: list[Tensor], steps: int, codes: bool) -> tuple[float, float]:
    if codes:
        text = text + own_text(teacher, text, min(1 + steps // 3, OWN_TEXT))
    # Codes want smaller steps, the more so the more there are (w4a16-g128-zp-gptq, 400 and 1,000 of them).
    lr = 2e-3 if not codes else 1e-3 if steps < 1000 else 5e-4
    return distill_(model, teacher, text, steps=steps, lr=lr, codes=codes)
