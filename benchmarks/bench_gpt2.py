"""GPT-2 end to end: first token, tokens/s, energy, against batch and context, and where a decoding step's time goes.

Random weights of the real shapes (speed does not depend on their values) and the prompt of the published int8 study,
"Hello, I'm a language model,". Engines: transformers with its growing cache, and with a static cache and torch.compile,
both in fp16; octofuse.Generator in fp16 (the same graphs and attention, torch's linears), in int8, and with 4-bit
weights.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octofuse.generate import Generator, Sampling, Session
from octofuse.models import quantize_, weight_bytes
from octofuse.testing.timing import energy

PROMPT = [15496, 11, 314, 1101, 257, 3303, 2746, 11]
NEW_TOKENS = 30
BATCH, BATCH_TOKENS = 32, 128
PREFILL = (8, 1024)
SIZES = {
    "124M": {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "XL": {"n_embd": 1600, "n_layer": 48, "n_head": 25},
    "tiny": {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 50257},
}
LINEARS = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
HEAD = {"lm_head": "w8a8-dynamic"}
ENGINES: dict[str, tuple[str | None, dict[str, str] | None]] = {
    "octofuse fp16": (None, None),
    "octofuse int8 dynamic": ("w8a8-dynamic", None),
    "octofuse int8 static": ("w8a8-static", None),
    "octofuse int8 static + head": ("w8a8-static", HEAD),
    "octofuse w4a16-g128": ("w4a16-g128", None),
}


def build(size: str, engine: str, device: torch.device) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    with device:
        model = GPT2LMHeadModel(GPT2Config(**SIZES[size]))
    model = model.to(torch.float16 if device.type == "cuda" else torch.float32).eval().requires_grad_(False)
    scheme, exceptions = ENGINES.get(engine, (None, None))
    if scheme is not None:
        batches = [torch.randint(0, 50257, (2, 64), device=device) for _ in range(2)]
        quantize_(model, scheme, batches, exceptions=exceptions, progress=False)
    return model


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def median_seconds(call: Callable[[], Any], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def transformers_call(
    model: nn.Module, device: torch.device, compiled: bool, batch: int = 1, prompt: list[int] = PROMPT
) -> Callable[[int], Any]:
    ids = torch.tensor([prompt] * batch, device=device)
    mask = torch.ones_like(ids)
    options: dict[str, Any] = {"cache_implementation": "static"} if compiled else {}

    def call(count: int) -> Any:
        return model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0,
            **options,
        )  # fmt: skip

    return call


def study_row(size: str, engine: str, call: Callable[[int], Any], device: torch.device) -> dict[str, Any]:
    """The columns of the published study, and energy over a second and a half of generation."""
    for count in (NEW_TOKENS, 1, NEW_TOKENS, 1):
        call(count)
    repeats = 7
    total = median_seconds(lambda: call(NEW_TOKENS), device, repeats)
    first = median_seconds(lambda: call(1), device, repeats)
    joules, watts = energy(lambda: call(NEW_TOKENS), device)
    return {
        "model": size,
        "engine": engine,
        "tokens/s": NEW_TOKENS / total,
        "first token ms": first * 1e3,
        "total ms": total * 1e3,
        "inter-token ms": (total - first) / (NEW_TOKENS - 1) * 1e3,
        "mJ/token": None if joules is None else joules / NEW_TOKENS * 1e3,
        "W": watts,
    }


def session_of(generator: Generator, batch: int, context: int) -> Session:
    capacity = min(-(-(context + 64) // 64) * 64, generator.decoder.positions)
    return Session(generator.decoder, batch, capacity, Sampling())


def step_time(session: Session, context: int, steps: int = 16) -> float:
    """Median microseconds of a step behind about `context` positions; every replay stands alone."""
    times = []
    for _ in range(5):
        session.positions.fill_(context - steps)
        session.counts.zero_()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        session.step()
        begin.record()
        for _ in range(steps - 1):
            session.step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (steps - 1))
    return statistics.median(times)


def sweep(generators: dict[str, Generator], size: str, points: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """A step of every engine at (batch, context)."""
    rows = []
    for batch, context in points:
        row: dict[str, Any] = {"model": size, "batch": batch, "context": context}
        for name, generator in generators.items():
            microseconds = step_time(session_of(generator, batch, context), context)
            row[f"{name} us"] = microseconds
            row[f"{name} tokens/s"] = batch * 1e6 / microseconds
        rows.append(row)
    return rows


def batch_row(generators: dict[str, Generator], size: str) -> dict[str, Any]:
    """tokens/s of a whole call: BATCH prompts, BATCH_TOKENS new ones each."""
    row: dict[str, Any] = {"model": size, "batch": BATCH, "new tokens": BATCH_TOKENS}
    for name, generator in generators.items():
        call = lambda g=generator: g([PROMPT] * BATCH, BATCH_TOKENS)  # noqa: E731
        row[name] = batch_speed(call, generator.decoder.device)
    return row


def batch_speed(call: Callable[[], Any], device: torch.device) -> float:
    call()
    return BATCH * BATCH_TOKENS / median_seconds(call, device, 3)


def prefill_row(generators: dict[str, Generator], size: str) -> dict[str, Any]:
    """Milliseconds for PREFILL = prompts, tokens of each."""
    batch, length = PREFILL
    row: dict[str, Any] = {"model": size, "batch": batch, "tokens": length}
    for name, generator in generators.items():
        decoder = generator.decoder
        ids = torch.randint(0, decoder.vocabulary, (batch, length), device=decoder.device)
        lengths = torch.full((batch,), length, device=decoder.device)
        cache = decoder.new_cache(batch, length)
        decoder.prefill(ids, lengths, cache)
        call = lambda d=decoder, i=ids, n=lengths, c=cache: d.prefill(i, n, c)  # noqa: E731
        row[f"{name} ms"] = median_seconds(call, decoder.device, 5) * 1e3
    return row


def transformers_columns(model: nn.Module, device: torch.device, compiled: bool) -> dict[str, dict[str, Any]]:
    """What transformers adds to the rows of batches and prompts. Its compiled mode leaves a prompt as it is."""
    modes = {"transformers eager": False} | ({"transformers compiled": True} if compiled else {})
    batches = {}
    for name, mode in modes.items():
        call = transformers_call(model, device, mode, BATCH)
        batches[name] = batch_speed(lambda c=call: c(BATCH_TOKENS), device)
    ids = torch.randint(0, model.config.vocab_size, PREFILL, device=device)  # type: ignore[union-attr,arg-type]
    prefill = lambda: model(ids, use_cache=True, logits_to_keep=1)  # noqa: E731
    prefill()
    return {"batches": batches, "prefill": {"transformers eager ms": median_seconds(prefill, device, 5) * 1e3}}


def kernels_of_a_step(session: Session, context: int) -> list[tuple[str, float, float]]:
    """Name, start and end in microseconds of each, by their ends."""
    from torch.profiler import ProfilerActivity, profile

    session.positions.fill_(context - 8)
    for _ in range(3):
        session.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        session.step()
        torch.cuda.synchronize()
    events: list[Any] = [e for e in trace.events() if e.device_type.name == "CUDA" and e.time_range.elapsed_us() > 0]
    return sorted(((e.name, e.time_range.start, e.time_range.end) for e in events), key=lambda kernel: kernel[2])


def budget(generator: Generator, size: str, engine: str, context: int = 38) -> list[dict[str, Any]]:
    """Where a step of one sequence goes: a kernel counts from the end of the one before to its own."""
    kernels = kernels_of_a_step(session_of(generator, 1, context), context)
    spent: dict[str, list[float]] = defaultdict(list)
    last = kernels[0][1]
    for name, _, end in kernels:
        spent[name[:80]].append(max(0.0, end - last))
        last = max(last, end)
    rows = [
        {"model": size, "engine": engine, "kernel": name, "calls": len(times), "us": sum(times)}
        for name, times in sorted(spent.items(), key=lambda item: -sum(item[1]))
    ]
    rows.append(
        {"model": size, "engine": engine, "kernel": "all", "calls": len(kernels), "us": sum(r["us"] for r in rows)}
    )
    return rows


def linear_bytes(model: nn.Module) -> int:
    """Bytes of the blocks' linears: weights, scales and biases."""
    return sum(weight_bytes(layer) for name, layer in model.named_modules() if name.endswith(LINEARS))


def octofuse_rows(
    size: str, device: torch.device, others: dict[str, dict[str, Any]] | None, result: dict[str, Any]
) -> None:
    """others: columns that belong into the rows of batches and prompts; None: no such rows."""
    generators: dict[str, Generator] = {}
    for engine in ENGINES:
        model = build(size, engine, device)
        result["weights"].append({"model": size, "engine": engine, "MB of linears": linear_bytes(model) / 1e6})
        generators[engine] = Generator(model)
        call = lambda count, g=generators[engine]: g([PROMPT], count)  # noqa: E731
        result["study"].append(study_row(size, engine, call, device))
    if others is None:
        return
    sweeps = {name.removeprefix("octofuse "): g for name, g in generators.items() if "head" not in name}
    batches = [(batch, 128) for batch in (1, 2, 4, 8, 16, 32, 64)]
    contexts = [(1, context) for context in (32, 64, 256, 512, 1024)]
    result["steps"] += sweep(sweeps, size, batches + contexts)
    result["batches"].append(batch_row(sweeps, size) | others["batches"])
    result["prefill"].append(prefill_row(sweeps, size) | others["prefill"])
    for engine in ("octofuse fp16", "octofuse int8 static", "octofuse w4a16-g128"):
        result["budget"] += budget(generators[engine], size, engine)


def run(smoke: bool) -> dict[str, Any]:
    """OCTOFUSE_GPT2_SIZES and OCTOFUSE_GPT2_COMPILE (models, comma-separated) narrow what is measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sizes = ["tiny"] if smoke else os.environ.get("OCTOFUSE_GPT2_SIZES", "124M,XL").split(",")
    compiled = [] if smoke else os.environ.get("OCTOFUSE_GPT2_COMPILE", "124M,XL").split(",")
    result: dict[str, Any] = {
        key: [] for key in ("study", "weights", "batches", "prefill", "steps", "budget")
    }  # in the order in which they are shown
    for size in sizes:
        model = build(size, "", device)
        call = transformers_call(model, device, compiled=False)
        result["study"].append(study_row(size, "transformers eager", call, device))
        if size in compiled and device.type == "cuda":
            call = transformers_call(model, device, compiled=True)
            result["study"].append(study_row(size, "transformers compiled", call, device))
        swept = device.type == "cuda" and not smoke
        others = transformers_columns(model, device, size in compiled) if swept else None
        del model, call
        octofuse_rows(size, device, others, result)
    return result
