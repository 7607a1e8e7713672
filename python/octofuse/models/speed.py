"""How long a decoder's steps and prompts take on a GPU that was measured: estimates from assets/speed.json.

benchmarks/fit_speed.py writes that file from this library's own benchmarks. A step of B sequences behind C tokens takes

    weights' bytes / bandwidth * f  +  blocks * u  +  (B - 1) * block weights * s  +  cache's bytes / bandwidth * g

and a prompt the longer of such a step of one sequence and of its multiplications. f, u, s, g and the rate of
multiplications are those of a kind of weights; codebooks, float8 and LLM.int8() take as many times as long as another kind
as single linears do. `error` says how far steps of models were off that the fit had not seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from octofuse.quant import AnyScheme, Scheme, WeightOnly


@dataclass(frozen=True)
class Shape:
    """What of a decoder decides its speed.

    step_bytes: weights that a step reads, the output head's too. block_weights: their number, without the head's.
    head_bytes: the head's of step_bytes, in floating point.
    cache_bytes: of a token. score_width: heads * head size, for attention within a prompt.
    """

    blocks: int
    step_bytes: int
    block_weights: int
    cache_bytes: int
    score_width: int
    head_bytes: int


@cache
def measured_gpus() -> dict[str, Any]:
    """By name; the fields are those of benchmarks/fit_speed.py."""
    found: dict[str, Any] = json.loads(files("octofuse.assets").joinpath("speed.json").read_text())
    return found


def kind_of(scheme: AnyScheme | None) -> str:
    """The kind of weights that a scheme's speed is that of; None: floating point."""
    if scheme is None:
        return "float"
    if isinstance(scheme, Scheme):
        return "int8"
    if scheme.code == "sparse12":
        return "sparse12"
    if scheme.code == "bcq":
        return f"q{min(scheme.bits, 4)}"
    return f"w{8 if scheme.bits == 7 else scheme.bits}"  # whose kernels are as fast as those of 8 bits


def _other(scheme: AnyScheme | None) -> str | None:
    """What of benchmarks/fit_speed.py's BESIDE a scheme is, beside its kind."""
    if isinstance(scheme, Scheme):
        if scheme.values == "float8":
            return "float8 blocks" if scheme.weights == "block" else "float8"
        return None if scheme.outliers is None else "outliers"
    if isinstance(scheme, WeightOnly) and scheme.is_codebook:
        return "e4m3" if scheme.code == "e4m3" else "codebook"
    return None


def _times_as_long(found: dict[str, Any], scheme: AnyScheme | None, what: str) -> float:
    other = _other(scheme)
    return 1.0 if other is None else float(found["others"][other][what])


def _costs(found: dict[str, Any], scheme: AnyScheme | None) -> dict[str, float]:
    costs: dict[str, float] = found["kinds"][kind_of(scheme)]
    if isinstance(scheme, WeightOnly) and scheme.has_int8_tokens:  # a step of one token reads the same bytes
        costs = costs | found["int8 tokens"]
    return costs


def was_timed(gpu: str, scheme: AnyScheme | None) -> bool:
    """Whether decoders of this kind were timed there; else it is put between others by the times of single linears."""
    if _other(scheme) is not None or (isinstance(scheme, WeightOnly) and scheme.has_int8_tokens):
        return False
    return bool(measured_gpus()[gpu]["kinds"][kind_of(scheme)]["models"])


def step_seconds(gpu: str, scheme: AnyScheme | None, shape: Shape, batch: int, context: int) -> float:
    """Of one token for each of `batch` sequences, each behind `context` tokens, with a cache in fp16."""
    found = measured_gpus()[gpu]
    kind, bandwidth = _costs(found, scheme), found["bandwidth"]
    cache_bytes = shape.cache_bytes * batch * context
    times = _times_as_long(found, scheme, "step")
    of_blocks = shape.step_bytes - shape.head_bytes
    microseconds = (
        kind["bytes"] * (times * of_blocks + shape.head_bytes) / bandwidth * 1e6
        + kind["block us"] * times * shape.blocks
        + kind["sequence us"] * (batch - 1) * shape.block_weights / 1e9
        + found["caches"]["float16"] * cache_bytes / bandwidth * 1e6
    )
    return float(microseconds) / 1e6


def prompt_seconds(gpu: str, scheme: AnyScheme | None, shape: Shape, batch: int, context: int) -> float:
    """Of `batch` prompts of `context` tokens each, until their first tokens."""
    found = measured_gpus()[gpu]
    kind = _costs(found, scheme)
    products = 2.0 * shape.block_weights * batch * context
    attention = 2.0 * shape.blocks * shape.score_width * batch * context**2  # causal: half of 4
    least = step_seconds(gpu, scheme, shape, 1, 0)
    products *= _times_as_long(found, scheme, "prompt")
    return max(least, float(products / kind["prompt rate"] + attention / found["kinds"]["float"]["prompt rate"]))
