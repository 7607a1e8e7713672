"""The embedded GPT-2 before and after: perplexity, bytes, and tokens/s and latencies of an eager transformers loop."""

from __future__ import annotations

import random
from statistics import median
from typing import Any

import torch

from octofuse.cli.common import calibration_batches, encode, evaluation_tokens, load_float, measure_perplexity
from octofuse.cli.demo import PROMPT
from octofuse.models import measure_generation, quantize_, weight_bytes
from octofuse.quant import scheme_named

SCHEMES = (None, "w8a8-static-tensor", "w8a8-static", "w8a8-dynamic")
ROUNDS = 5


def run(smoke: bool) -> dict[str, Any]:
    """Speeds are medians of rounds in changing order: what is timed last in a process differs by as much as schemes do."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    models: dict[str, torch.nn.Module] = {}
    for scheme in SCHEMES:
        model, tokenizer = load_float("embedded", device)
        if scheme is not None:
            batches = calibration_batches(tokenizer, model) if scheme_named(scheme).needs_calibration else None
            quantize_(model, scheme, batches, progress=False)
        models[scheme or str(model.dtype).removeprefix("torch.")] = model
    prompt = encode(tokenizer, PROMPT).unsqueeze(0).to(device)
    speeds: dict[str, list[Any]] = {name: [] for name in models}
    order = random.Random(0)
    for _ in range(1 if smoke else ROUNDS):
        for name in order.sample(list(models), len(models)):
            speeds[name].append(measure_generation(models[name], prompt, 32))
    tokens = evaluation_tokens(tokenizer)[: 2048 if smoke else None]
    rows = [
        {
            "scheme": name,
            "perplexity": measure_perplexity(model, tokens, name),
            "MB": weight_bytes(model) / 1e6,
            "tokens/s": median(speed.tokens_per_second for speed in speeds[name]),
            "first token ms": median(speed.first_token for speed in speeds[name]) * 1e3,
            "inter-token ms": median(speed.inter_token for speed in speeds[name]) * 1e3,
        }
        for name, model in models.items()
    ]
    return {"rows": rows, "evaluation_tokens": tokens.numel()}
