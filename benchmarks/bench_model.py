"""The embedded GPT-2 before and after, as `octofuse demo` measures it: perplexity, bytes, tokens/s, latencies."""

from __future__ import annotations

from typing import Any

import torch

from octofuse.cli.common import calibration_batches, encode, evaluation_tokens, load_float, measure_perplexity
from octofuse.cli.demo import PROMPT
from octofuse.models import measure_generation, quantize_, weight_bytes
from octofuse.quant import scheme_named

SCHEMES = (None, "w8a8-static-tensor", "w8a8-static", "w8a8-dynamic")


def run(smoke: bool) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for scheme in SCHEMES:
        model, tokenizer = load_float("embedded", device)
        name = str(model.dtype).removeprefix("torch.")
        if scheme is not None:
            batches = calibration_batches(tokenizer, model) if scheme_named(scheme).needs_calibration else None
            quantize_(model, scheme, batches, progress=False)
            name = scheme
        tokens = evaluation_tokens(tokenizer)[: 2048 if smoke else None]
        speed = measure_generation(model, encode(tokenizer, PROMPT).unsqueeze(0).to(device), 32)
        rows.append(
            {
                "scheme": name,
                "perplexity": measure_perplexity(model, tokens, name),
                "MB": weight_bytes(model) / 1e6,
                "tokens/s": speed.tokens_per_second,
                "first token ms": speed.first_token * 1e3,
                "inter-token ms": speed.inter_token * 1e3,
            }
        )
    return {"rows": rows, "evaluation_tokens": tokens.numel()}
