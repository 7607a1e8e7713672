"""Decoding and prompts on this machine's CPU: octofuse beside fp32 and torch's own dynamic int8.

All models of a size take turns, so that a busy machine meets them alike; each number is a median. The embedded GPT-2 and
one of GPT-2's own size with random weights, batch 1. llama.cpp: bench_llama_cpp.py.

As on a CPU with AVX2 alone: OCTOFUSE_CPU_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
ONEDNN_MAX_CPU_ISA=AVX2 python benchmarks/run.py cpu
"""

from __future__ import annotations

import copy
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import octofuse
from octofuse import _C
from octofuse.assets import EMBEDDED
from octofuse.models import fuse_, quantize_
from octofuse.nn.linear import is_conv1d, weight_of
from octofuse.ops import cpu

SCHEMES = ("w8a8-static", "w8a8-dynamic", "w4a16-g128", "bcq-q3-g128")
PROMPT, NEW, LONG = 8, 32, 128  # tokens
ROUNDS = 9


def gpt2(size: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()) if size == "124M" else GPT2LMHeadModel.from_pretrained(EMBEDDED).float()
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval().requires_grad_(False)


def torch_int8(model: nn.Module) -> nn.Module:
    """torch.ao's dynamic int8 of every linear in the blocks; Conv1D becomes nn.Linear first, as it knows no other."""
    for name, module in list(model.named_modules()):
        if is_conv1d(module):
            plain = nn.Linear(*reversed(weight_of(module).shape))
            plain.weight, plain.bias = nn.Parameter(weight_of(module)), module.bias
            above, _, own = name.rpartition(".")
            setattr(model.get_submodule(above), own, plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = torch.ao.quantization.quantize_dynamic(model.transformer.h, {nn.Linear}, dtype=torch.qint8)
    model.transformer.h = blocks
    return model


def engines_of(model: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    """By name: calls that make NEW tokens, and that read a prompt of LONG tokens and choose one."""
    vocabulary = model.config.vocab_size
    torch.manual_seed(1)
    short, long = torch.randint(0, vocabulary, (1, PROMPT)), torch.randint(0, vocabulary, (1, LONG))
    batches = [torch.randint(0, vocabulary, (2, 64)) for _ in range(2)]
    found: dict[str, dict[str, Callable[[], Any]]] = {}

    def add(name: str, one: Any, generates: bool = True) -> None:
        calls: dict[str, Callable[[], Any]] = {
            "transformers": lambda: one.generate(short, max_new_tokens=NEW, do_sample=False),
            "transformers, prompt": lambda: one.generate(long, max_new_tokens=1, do_sample=False),
        }
        if generates:
            generator = octofuse.Generator(one)
            calls["octofuse"] = lambda: generator(short, NEW)
            calls["octofuse, prompt"] = lambda: generator(long, 1)
        found[name] = calls

    add("fp32", model)
    add("torch.ao dynamic int8", torch_int8(copy.deepcopy(model)), generates=False)
    for scheme in SCHEMES:
        add(scheme, fuse_(quantize_(copy.deepcopy(model), scheme, batches, progress=False)))
    return found


def turns(engines: dict[str, dict[str, Callable[[], Any]]], rounds: int) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, list[float]]] = {name: {call: [] for call in calls} for name, calls in engines.items()}
    for at in range(rounds + 1):
        for name, calls in engines.items():
            for call, run in calls.items():
                began = time.perf_counter()
                run()
                if at > 0:
                    times[name][call].append(time.perf_counter() - began)
    return {name: {call: statistics.median(t) for call, t in calls.items()} for name, calls in times.items()}


def busy_ratio(neighbours: int, seconds: float) -> dict[str, float]:
    """Time of a call beside processes that never sleep, over its idle time: the median of seven means.

    seconds: of each mean; many time slices.
    """
    x, weight = torch.randn(8, 768), torch.randint(-127, 128, (3072, 768), dtype=torch.int8)
    scale, plain = torch.rand(3072), nn.Linear(768, 3072)
    calls = {"octofuse": lambda: octofuse.quantized_linear(x, weight, scale), "fp32": lambda: plain(x)}

    def medians() -> dict[str, float]:
        found = {}
        for name, call in calls.items():
            means = []
            for _ in range(7):
                began, count = time.perf_counter(), 0
                while time.perf_counter() - began < seconds:
                    call()
                    count += 1
                means.append((time.perf_counter() - began) / count)
            found[name] = statistics.median(means)
        return found

    idle = medians()
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(neighbours)]
    try:
        time.sleep(0.5)
        busy = medians()
    finally:
        for hog in hogs:
            hog.kill()
    return {name: busy[name] / idle[name] for name in idle}


@torch.no_grad()
def run(smoke: bool) -> dict[str, Any]:
    rows = []
    for size in ("embedded",) if smoke else ("embedded", "124M"):
        found = turns(engines_of(gpt2(size)), 1 if smoke else ROUNDS)
        for name, times in found.items():
            row: dict[str, Any] = {"model": size, "engine": name}
            for way in ("octofuse", "transformers"):
                if way not in times:
                    continue
                row[f"{way}, tokens/s"] = NEW / times[way]
                row[f"{way}, over fp32"] = found["fp32"][way] / times[way]
                row[f"{way}, prompt ms"] = times[f"{way}, prompt"] * 1e3
                row[f"{way}, prompt over fp32"] = found["fp32"][f"{way}, prompt"] / times[f"{way}, prompt"]
            rows.append(row)
    return {
        "cpu": cpu.name(),
        "threads": torch.get_num_threads(),
        "isa": _C.cpu_info()["isa"],
        "torch capability": torch.backends.cpu.get_cpu_capability(),
        "beside two busy processes": busy_ratio(2, 0.01 if smoke else 0.2),
        "rows": rows,
    }
