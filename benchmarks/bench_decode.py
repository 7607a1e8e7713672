"""Decoders of real shapes, random weights: tokens/s of one sequence, of batches, long prompts and contexts.

The floor is the bytes that a step has to read, weights and cache, over this card's bandwidth for copies. Engines:
transformers with its growing cache, and with a static cache and torch.compile, in fp16; the latter with torchao's
weight-only int8 (fp16) and int4 (groups of 128, bf16), where torchao is installed; octofuse.Generator in fp16 (the same
graphs and attention, torch's linears), and with every scheme. What is measured may be chosen: OCTOFUSE_DECODE_MODELS (of
SHAPES, or folders), OCTOFUSE_DECODE_PARTS, both comma-separated, and OCTOFUSE_DECODE_ENGINES, by semicolons.
"""

from __future__ import annotations

import copy
import gc
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch

from bench_gpt2 import budget, median_seconds, step_time, transformers_call
from models import build
from octofuse.engine import Decoder, Sampling
from octofuse.generate import Generator, Session

PROMPT = list(range(11, 19))
NEW_TOKENS = 128
BANDWIDTH = {"H200": 4.28e12, "H100": 3.0e12}  # copies, bytes a second
PARTS = ("one", "batch", "prefill", "context", "budget")
INT8_HEAD = "w8a8-dynamic"

# Scheme, head, cache.
ENGINES: dict[str, tuple[str | None, str | None, str | None]] = {
    "octofuse fp16": (None, None, None),
    "octofuse w8a8-dynamic": ("w8a8-dynamic", INT8_HEAD, None),
    "octofuse w8a8-static": ("w8a8-static", INT8_HEAD, None),
    "octofuse w4a16-g128": ("w4a16-g128", INT8_HEAD, None),
    "octofuse w4a8-g128": ("w4a8-g128", INT8_HEAD, None),
    "octofuse w8a8-dynamic, int8 cache": ("w8a8-dynamic", INT8_HEAD, "int8"),
    "octofuse bcq-q3-g128": ("bcq-q3-g128", INT8_HEAD, None),
    "octofuse bcq-q2-g128": ("bcq-q2-g128", INT8_HEAD, None),
}
OTHERS = ("transformers eager", "transformers compiled", "torchao int8 compiled", "torchao int4 compiled")
USUAL = ("octofuse fp16", "octofuse w8a8-dynamic", "octofuse w4a16-g128")
# What is measured of each model by default.
PLAN: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "Llama-3.1-8B": ((*OTHERS, *USUAL, "octofuse w4a8-g128"), PARTS),
    "Llama-3.2-1B": (USUAL, ("one", "budget")),
    "Qwen3-4B": (USUAL, ("one",)),
    "OPT-30B": (
        ("octofuse w8a8-dynamic", "octofuse w4a16-g128", "octofuse bcq-q3-g128", "octofuse bcq-q2-g128"),
        ("one",),
    ),
    "GPT-2 124M": (("octofuse w8a8-static", "octofuse w4a16-g128"), ("one",)),
    "GPT-2 XL": (("octofuse w8a8-static", "octofuse w4a16-g128"), ("one",)),
}


def step_bytes(decoder: Decoder, batch: int, context: int) -> int:
    """What a step reads: every linear, and the cache of all sequences."""
    layers = [layer for parts in decoder.blocks for layer in parts.linears]
    total = 0
    for layer in (*layers, decoder.head):
        tensors = layer.state_dict().values() if hasattr(layer, "state_dict") else (layer.weight,)
        total += sum(tensor.nbytes for tensor in tensors)
    return total + decoder.bytes_of_token() * context * batch


def bandwidth(device: torch.device) -> float:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((rate for card, rate in BANDWIDTH.items() if card in name), 3e12)


def one_row(model: str, engine: str, generator: Generator) -> dict[str, Any]:
    decoder = generator.decoder
    row = timed_row(model, engine, lambda count: generator([PROMPT], count), decoder.device)
    step = step_bytes(decoder, 1, len(PROMPT) + NEW_TOKENS // 2)
    row["GB a step"], row["floor tokens/s"] = step / 1e9, bandwidth(decoder.device) / step
    row["of the floor"] = row["tokens/s"] / row["floor tokens/s"]
    return row


def timed_row(model: str, engine: str, call: Callable[[int], Any], device: torch.device) -> dict[str, Any]:
    for count in (NEW_TOKENS, 1, NEW_TOKENS):
        call(count)
    total = median_seconds(lambda: call(NEW_TOKENS), device, 3)
    first = median_seconds(lambda: call(1), device, 3)
    between = (total - first) / (NEW_TOKENS - 1) * 1e3
    return {
        "model": model, "engine": engine, "tokens/s": NEW_TOKENS / total, "first token ms": first * 1e3,
        "ms a token": between,
    }  # fmt: skip


def batch_row(model: str, engine: str, generator: Generator) -> dict[str, Any]:
    """32 sequences, 256 new tokens."""
    call = lambda: generator([PROMPT] * 32, 256)  # noqa: E731
    call()
    return {"model": model, "engine": engine, "tokens/s": 32 * 256 / median_seconds(call, generator.decoder.device, 2)}


def prefill_row(model: str, engine: str, generator: Generator) -> dict[str, Any]:
    """8 prompts of 2,048 tokens."""
    decoder = generator.decoder
    ids = torch.randint(0, decoder.vocabulary, (8, 2048), device=decoder.device)
    lengths = torch.full((8,), 2048, device=decoder.device)
    cache = decoder.new_cache(8, 2048)
    call = lambda: decoder.prefill(ids, lengths, cache)  # noqa: E731
    call()
    return {"model": model, "engine": engine, "ms": median_seconds(call, decoder.device, 3) * 1e3}


def context_row(model: str, engine: str, generator: Generator, kind: str | None) -> dict[str, Any]:
    """A step of 8 sequences behind 32,768 tokens each; nothing depends on what these were."""
    decoder = copy.copy(generator.decoder)
    decoder.cache_kind = kind
    microseconds = step_time(Session(decoder, 8, 32768 + 64, Sampling()), 32768)
    floor = step_bytes(decoder, 8, 32768) / bandwidth(decoder.device) * 1e6
    cache = kind or str(decoder.dtype).removeprefix("torch.")
    return {"model": model, "engine": engine, "cache": cache, "us": microseconds, "floor us": floor}


def measure(model: str, engine: str, parts: tuple[str, ...], device: torch.device, result: dict[str, Any]) -> None:
    scheme, head, cache = ENGINES[engine]
    generator = Generator(build(model, scheme, head, device), cache=cache)
    result["one"].append(one_row(model, engine, generator))
    on_gpu = device.type == "cuda"
    if "batch" in parts and on_gpu:
        result["batch"].append(batch_row(model, engine, generator))
    if "prefill" in parts and on_gpu:
        result["prefill"].append(prefill_row(model, engine, generator))
    generator.sessions.clear()
    if "context" in parts and on_gpu and scheme != "w4a16-g128":
        result["context"] += [context_row(model, engine, generator, kind) for kind in (None, "int8", "fp8")]
    if "budget" in parts and on_gpu:
        result["budget"] += budget(generator, model, engine, context=72)


def other_row(model: str, engine: str, device: torch.device) -> dict[str, Any]:
    """By transformers' own generate."""
    torch.compiler.reset()  # else what it remembers of other models may keep it from compiling this one
    built = build(model, None, None, device)
    if engine.startswith("torchao"):
        built = with_torchao(built, engine)
    call = transformers_call(built, device, compiled=engine.endswith("compiled"), prompt=PROMPT)
    return timed_row(model, engine, call, device)


def with_torchao(model: Any, engine: str) -> Any:
    """Its linears and its head, by torchao's weight-only quantisation; int4 has kernels for bf16 alone."""
    from torchao.quantization import Int4WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    int8 = "int8" in engine
    model = model if int8 else model.bfloat16()
    tiled = Int4WeightOnlyConfig(group_size=128, int4_packing_format="tile_packed_to_4d")
    quantize_(model, Int8WeightOnlyConfig() if int8 else tiled)
    return model


def run(smoke: bool) -> dict[str, Any]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = {"tiny": (("octofuse fp16", "octofuse w8a8-dynamic"), ("one",))} if smoke else PLAN
    if chosen := os.environ.get("OCTOFUSE_DECODE_MODELS"):
        plan = {name: PLAN.get(name, (USUAL, ("one",))) for name in chosen.split(",")}
    engines, parts = (os.environ.get(f"OCTOFUSE_DECODE_{what}") for what in ("ENGINES", "PARTS"))
    result: dict[str, Any] = {part: [] for part in PARTS}
    for model, (usual_engines, usual_parts) in plan.items():
        for engine in engines.split(";") if engines else usual_engines:
            if engine.startswith("torchao") and importlib.util.find_spec("torchao") is None:
                continue
            if engine in OTHERS:
                result["one"].append(other_row(model, engine, device))
            else:
                measure(model, engine, tuple(parts.split(",")) if parts else usual_parts, device, result)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    return result
