"""From benchmarks/results/<gpu> to python/octofuse/assets/speed.json: what `octofuse advise` estimates speeds by.

    python benchmarks/fit_speed.py          # write it
    python benchmarks/fit_speed.py --check  # exit 1 if it is not what the results say (a test runs this)

Of every kind of weights on every GPU (models.speed has the formulas): how many times the bytes' time a step of one sequence
takes, and microseconds a block besides; microseconds of a further sequence for 10^9 weights; multiplications and additions
a second of a prompt; how many times the bytes' time a long cache takes. `error`: of steps, each model left out of the fit
in turn, the geometric mean and the largest.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from bench_decode import BANDWIDTH
from models import config_of

RESULTS = Path(__file__).resolve().parent / "results"
ASSET = Path(__file__).resolve().parents[1] / "python/octofuse/assets/speed.json"
# Gigabytes that a model may take, what a driver and torch keep left out.
MEMORY = {"H200": 135, "H100": 76}
KINDS = {  # of engines in results/<gpu>/decode.json
    "float": ("octofuse fp16",),
    "int8": ("octofuse w8a8-dynamic", "octofuse w8a8-static"),
    "w4": ("octofuse w4a16-g128",),
    "q3": ("octofuse bcq-q3-g128",),
    "q2": ("octofuse bcq-q2-g128",),
}
LIKE = {  # kinds that no decoder was timed with, and the column of results/<gpu>/lowbit.json that says how far from w4
    "w8": "w8a16", "w6": "w6a16", "w5": "w5a16", "w3": "w3a16", "w2": "w2a16", "w1": "w1a16",
    "q4": "bcq-q4", "q3": "bcq-q3", "q2": "bcq-q2", "q1": "bcq-q1", "sparse12": "sparse12",
}  # fmt: skip
MODEL, SIZE = "Llama-3.1-8B", 8192
# No decoder was timed with 4 bits beside int8 tokens. Single linears of these layers were, on one H200 (peers.json), and so
# were those of int8 weights: chained, with what quantises the tokens; one token, those of a batch and those of a prompt.
INTEGER_LAYERS = ((4096, 4096), (6144, 4096), (28672, 4096))
INTEGER_COLUMN = "octofuse quantised, chained"
# Of other kinds single linears were timed beside those of a kind above, in one run on one H200: results/h200/<topic>.json,
# its columns, and how many tokens stand for a prompt. Not by layer, but the geometric mean over all.
BESIDE = {
    "codebook": ("codebook", "nf4", "w4a16-g64", 512),
    "e4m3": ("codebook", "w8a16-fp8", "w8a16", 512),
    "float8": ("float8", "exact sums", "int8", 4096),
    "float8 blocks": ("float8", "blocks", "int8", 4096),
    "outliers": ("outliers", "llm-int8", "w8a8-dynamic", 4096),
}
BATCH, BATCH_CONTEXT = 32, 8 + 256 // 2
PROMPT_TOKENS, PROMPT_LENGTH = 8 * 2048, 2048


def blocks(model: str) -> int:
    count: int = config_of(model).num_hidden_layers
    return count


def block_weights(model: str) -> float:
    """Of its linears but the head's, of a model with grouped heads and a gated feed-forward."""
    config = config_of(model)
    width, size = config.hidden_size, config.hidden_size // config.num_attention_heads
    attention = width * size * 2 * (config.num_attention_heads + config.num_key_value_heads)
    return float(config.num_hidden_layers * (attention + 3 * width * config.intermediate_size))


def cache_bytes(model: str, tokens: int) -> float:
    config = config_of(model)
    size = config.hidden_size // config.num_attention_heads
    return float(config.num_hidden_layers * 2 * config.num_key_value_heads * size * 2 * tokens)


def attention_of_prompts(model: str) -> float:
    """Multiplications and additions: of each token with half of the others, for scores and for values."""
    config = config_of(model)
    return float(2 * config.num_hidden_layers * config.hidden_size * PROMPT_TOKENS * PROMPT_LENGTH)


def fitted(rows: list[dict[str, Any]], bandwidth: float, of_blocks: float | None = None) -> tuple[float, float]:
    """(times the bytes' time, microseconds a block), with the least squares of relative errors. of_blocks: known."""
    taken = np.array([row["ms a token"] * 1e3 for row in rows])
    features = np.array([[row["GB a step"] * 1e15 / bandwidth, blocks(row["model"])] for row in rows])
    if of_blocks is not None:
        return float(np.mean((taken - of_blocks * features[:, 1]) / features[:, 0])), of_blocks
    (of_bytes, found), *_ = np.linalg.lstsq(features / taken[:, None], np.ones(len(rows)), rcond=None)
    return float(of_bytes), float(found)


def errors_of(rows: list[dict[str, Any]], bandwidth: float) -> list[float]:
    """|log(estimated / measured)| of each model, fitted without it."""
    found = []
    for left_out in rows if len(rows) > 2 else ():
        of_bytes, of_blocks = fitted([row for row in rows if row is not left_out], bandwidth)
        estimate = of_bytes * left_out["GB a step"] * 1e15 / bandwidth + of_blocks * blocks(left_out["model"])
        found.append(abs(math.log(estimate / (left_out["ms a token"] * 1e3))))
    return found


def row_of(rows: list[dict[str, Any]], engines: tuple[str, ...]) -> dict[str, Any] | None:
    return next((row for row in rows if row["model"] == MODEL and row["engine"] in engines), None)


def kind_of(decode: dict[str, Any], name: str, bandwidth: float) -> dict[str, Any] | None:
    engines = KINDS[name]
    rows = [row for row in decode["one"] if row["engine"] in engines]
    if not rows:
        return None
    # One model does not tell bytes from blocks: the latency of blocks is taken to be that of other weights of few bits.
    known = None if len(rows) > 1 else fitted([r for r in decode["one"] if r["engine"] in KINDS["w4"]], bandwidth)[1]
    of_bytes, of_blocks = fitted(rows, bandwidth, known)
    kind = {"bytes": of_bytes, "block us": of_blocks, "models": len(rows), "errors": errors_of(rows, bandwidth)}
    batch, prompt = row_of(decode["batch"], engines), row_of(decode["prefill"], engines)
    if batch is not None:
        one = row_of(decode["one"], engines)
        assert one is not None
        step = BATCH / batch["tokens/s"] * 1e6 - cache_bytes(MODEL, BATCH * BATCH_CONTEXT) / bandwidth * 1e6
        more = (step - one["ms a token"] * 1e3) / (BATCH - 1)
        kind["sequence us"] = more / (block_weights(MODEL) / 1e9)
    if prompt is not None:  # attention runs at the rate of floating-point linears
        plain = row_of(decode["prefill"], KINDS["float"])
        assert plain is not None
        products, attention = 2 * block_weights(MODEL) * PROMPT_TOKENS, attention_of_prompts(MODEL)
        at_rate = attention / ((products + attention) / (plain["ms"] / 1e3))
        kind["prompt rate"] = products / (prompt["ms"] / 1e3 - at_rate)
    return kind


def of_integers(int8: dict[str, float]) -> dict[str, float]:
    """w4a8 by what its linears take more or less than those of w8a8: both quantise the same tokens."""
    rows = json.loads((RESULTS / "h200/peers.json").read_text())["rows"]
    times = {
        (row["family"], row["M"], row["N"], row["K"]): row["us"][INTEGER_COLUMN]
        for row in rows if INTEGER_COLUMN in row["us"]
    }  # fmt: skip

    def of_layers(family: str, tokens: int) -> float:
        return float(sum(times[family, tokens, n, k] for n, k in INTEGER_LAYERS))

    def of_sequence(family: str) -> float:
        more = (of_layers(family, BATCH) - of_layers(family, 1)) / (BATCH - 1)
        return more / (sum(n * k for n, k in INTEGER_LAYERS) / 1e9)

    faster = of_layers("w8a8", PROMPT_LENGTH) / of_layers("w4a8-g128", PROMPT_LENGTH)
    return {
        "sequence us": int8["sequence us"] + of_sequence("w4a8-g128") - of_sequence("w8a8"),
        "prompt rate": int8["prompt rate"] * faster,
    }


def of_others() -> dict[str, dict[str, float]]:
    """How many times as long a linear takes with one token, chained where that was timed, and with a prompt's."""

    def of_row(row: dict[str, Any], column: str) -> float:
        time: float = row.get(f"{column}, chained", row[column])
        return time

    found = {}
    for name, (topic, kind, other, many) in BESIDE.items():
        rows = json.loads((RESULTS / f"h200/{topic}.json").read_text())["rows"]
        ratios = {m: [of_row(row, kind) / of_row(row, other) for row in rows if row["M"] == m] for m in (1, many)}
        step, prompt = (math.exp(float(np.mean(np.log(ratios[m])))) for m in (1, many))
        found[name] = {"step": step, "prompt": prompt}
    return found


def of_gpu(gpu: str) -> dict[str, Any]:
    folder, bandwidth = RESULTS / gpu.lower(), BANDWIDTH[gpu]
    decode, lowbit = (json.loads((folder / f"{topic}.json").read_text()) for topic in ("decode", "lowbit"))
    kinds: dict[str, Any] = {}
    for name in KINDS:
        if (kind := kind_of(decode, name, bandwidth)) is not None:
            kinds[name] = kind
    one = next(row for row in lowbit["one token"] if row["N = K"] == SIZE)
    per_byte = lambda column: one.get(f"{column}, chained", one[column]) / one["MB"][column]  # noqa: E731
    for name, column in LIKE.items():
        if name not in kinds:
            slower = per_byte(column) / per_byte("w4a16")
            # Not faster than copies, unless 4 bits are.
            of_bytes = max(kinds["w4"]["bytes"] * slower, min(1.0, kinds["w4"]["bytes"]))
            kinds[name] = {"bytes": of_bytes, "block us": kinds["w4"]["block us"], "models": 0}
        for rate in ("sequence us", "prompt rate"):  # of many tokens weights become floating point in all of these
            kinds[name].setdefault(rate, kinds["w4"][rate])
    caches = {}
    for row in decode["context"]:
        if row["engine"] == "octofuse w8a8-dynamic":
            weights = next(one["GB a step"] for one in decode["one"] if one["engine"] == row["engine"]) * 1e9
            read = row["floor us"] - weights / bandwidth * 1e6
            step = kinds["int8"]["bytes"] * weights / bandwidth * 1e6 + kinds["int8"]["block us"] * blocks(MODEL)
            step += 7 * kinds["int8"]["sequence us"] * block_weights(MODEL) / 1e9
            caches[row["cache"]] = (row["us"] - step) / read
    errors = [error for kind in kinds.values() for error in kind.pop("errors", ())]
    error = {"mean": math.exp(np.mean(errors)) - 1, "largest": math.exp(max(errors)) - 1}
    return {
        "measured on": decode["device"], "cpp": decode["cpp"], "bandwidth": bandwidth, "memory GB": MEMORY[gpu],
        "smallest GB": min(row["GB a step"] for row in decode["one"] if "GB a step" in row),
        "kinds": kinds, "int8 tokens": of_integers(kinds["int8"]), "others": of_others(), "caches": caches, "error": error,
    }  # fmt: skip


def rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = json.dumps({gpu: rounded(of_gpu(gpu)) for gpu in BANDWIDTH}, indent=1) + "\n"
    if check:
        raise SystemExit(0 if ASSET.read_text() == text else f"{ASSET.name}: not what benchmarks/results say")
    ASSET.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
