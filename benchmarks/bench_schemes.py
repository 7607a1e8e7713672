"""What each scheme costs and gains: the table of `octofuse schemes`, written to python/octofuse/assets/schemes.json.

Perplexity and tokens/s of the embedded GPT-2 are measured on this machine's CPU; one token through a layer on a GPU is
read from benchmarks/results/h200.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from octofuse import _C, Generator, assets
from octofuse.cli.common import calibration_batches, evaluation_tokens, load_float
from octofuse.cli.schemes import WHAT
from octofuse.models import perplexity, quantize_, weight_bytes
from octofuse.nn import linear_layers
from octofuse.nn.make import QUANTISED
from octofuse.ops import cpu

RESULTS = Path(__file__).parent / "results" / "h200"
SIZE = 8192  # N = K of the GPU's layer
NEW = 32
# Whose perplexity alone is measured, for docs/quantising.md.
MORE = (
    "w8a8-static-tensor", "w8a8-static-mse", "w8a8-static-percentile", "w8a8-static-entropy", "w8a8-static-smooth",
    "w6a16-g128", "w5a16-g128", "w4a16-g128-gptq", "w4a16-g32-gptq", "w3a16-g128", "w2a16-g128", "bcq-q1-g128",
    "fp8-dynamic", "fp8-static", "fp8-block128", "nf4", "fp4", "llm-int8", "w8a16-fp8", "w4a8-g128",
    "w4a8-g128-mse", "w4a8-g32", "w4a8-mse", "w4a8-gptq",
)  # fmt: skip


def on_a_gpu() -> dict[str, float]:
    """fp16's time over that of the first token, by the beginning of a scheme's name."""
    lowbit = json.loads((RESULTS / "lowbit.json").read_text())["one token"]
    row = next(row for row in lowbit if row["N = K"] == SIZE)
    plain = row["fp16 F.linear"]
    names = ("w8a16", "w4a16", "w3a16", "w2a16", "bcq-q4", "bcq-q3", "bcq-q2", "sparse12")
    found = {name: plain / row[name] for name in names}
    gemm = json.loads((RESULTS / "gemm.json").read_text())["rows"]
    found["w8a8"] = next(row["over fp16"] for row in gemm if (row["M"], row["N"], row["K"]) == (1, SIZE, SIZE))
    return found


@torch.no_grad()
def run(smoke: bool) -> dict[str, Any]:
    plain, tokenizer = load_float("embedded", torch.device("cpu"))
    tokens = evaluation_tokens(tokenizer)[: 1024 if smoke else 24576]
    batches = calibration_batches(tokenizer, plain)
    gains = on_a_gpu()
    weights = sum(layer.weight.numel() for layer in linear_layers(plain).values())
    base = perplexity(plain, tokens, context=512)
    models = {"float32": plain}
    found: dict[str, dict[str, Any]] = {}
    for name in list(WHAT)[:2] if smoke else WHAT:
        model = models[name] = quantize_(copy.deepcopy(plain), name, batches, progress=False)
        layers = [module for module in model.modules() if isinstance(module, QUANTISED)]
        biases = sum(layer.bias.numel() * layer.bias.element_size() for layer in layers if layer.bias is not None)
        size = sum(weight_bytes(layer) for layer in layers) - biases
        found[name] = {
            "bits": round(8 * size / weights, 2),
            "cost": round(perplexity(model, tokens, context=512) / base - 1, 4),
            "gpu": next((round(gain, 2) for start, gain in gains.items() if name.startswith(start)), None),
        }
    more = {}
    for name in () if smoke else MORE:
        model = quantize_(copy.deepcopy(plain), name, batches, progress=False)
        more[name] = round(perplexity(model, tokens, context=512) / base - 1, 4)
    generators = {name: Generator(model) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(3 if smoke else 9):
        for name, generator in generators.items():
            began = time.perf_counter()
            generator([[1, 2, 3, 4]], NEW)
            times[name].append(time.perf_counter() - began)
    for name, row in found.items():
        row["cpu"] = round(statistics.median(times["float32"][1:]) / statistics.median(times[name][1:]), 2)
    isa = _C.cpu_info()["isa"]
    record = {
        "cpu": f"{cpu.name()}, {torch.get_num_threads()} threads ({isa})",
        "gpu": "H200",
        "gpu_shape": f"{SIZE} x {SIZE}",
        "perplexity": round(base, 3),
        "tokens": tokens.numel(),
        "schemes": found,
        "more costs": more,
    }
    if not smoke:
        Path(assets.__file__).with_name("schemes.json").write_text(json.dumps(record, indent=1) + "\n")
    return {"rows": [{"scheme": name, **row} for name, row in found.items()]}
