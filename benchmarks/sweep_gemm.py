"""Times every kernel that could win on many shapes, for fit_select.py: `python benchmarks/sweep_gemm.py --out FOLDER`.

--large: the weights of larger models and their output heads, up to 256 tokens, into sweep_large.json.
--one: all of these weights for one token, by the skinny kernels, as decoding has it: in captured chains alone, into
sweep_one.json.
--float8: kernels of e4m3 with both ways to add up, into sweep_float8.json.
--small: up to 128 tokens of both lists of weights, in the place of their rows, into sweep_tokens.json (--weights: of
those alone; --tokens: for other numbers of tokens).
--huge: 1,024 tokens and more of larger models, where power is the limit, by the kernels for many tokens, int8 and e4m3,
into sweep_huge.json.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch

import octofuse
from bench_float8 import operands as float8_operands
from bench_gemm import operand_sets
from bench_peers import parsed_shape
from octofuse import _C
from octofuse.ops.measure import Captured, device_time, device_times, overlap
from octofuse.testing.timing import environment
from sweep_more import call_of

WEIGHTS = ((768, 768), (2304, 768), (3072, 768), (768, 3072), (1920, 1920), (4800, 1600), (1600, 6400), (1024, 4096),
           (4096, 4096), (6144, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (12288, 12288),
           (50257, 768))  # fmt: skip
# Llama 8B and 1B, Qwen3 4B, OPT 30B, Llama 70B: linears and heads.
LARGE_WEIGHTS = ((28672, 4096), (128256, 4096), (3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192), (128256, 2048),
                 (6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728), (151936, 2560), (21504, 7168), (7168, 7168),
                 (28672, 7168), (7168, 28672), (50272, 7168), (10240, 8192), (57344, 8192), (8192, 28672))  # fmt: skip
LARGE_ROWS = (2, 4, 8, 16, 32, 64, 128, 256)
ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024, 2048, 4096,
        8192)  # fmt: skip
SMALL_ROWS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
FLOAT8_WEIGHTS = ((768, 768), (2304, 768), (2048, 2048), (3072, 2048), (2048, 8192), (4096, 4096), (6144, 4096),
                  (28672, 4096), (4096, 14336), (10240, 8192), (57344, 8192), (8192, 28672), (21504, 7168),
                  (28672, 7168), (7168, 28672))  # fmt: skip
FLOAT8_ROWS = (1, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096)
FLOAT8 = {"float8": False, "float8_fast": True}  # fast_accumulate
HUGE_WEIGHTS = ((28672, 4096), (4096, 14336), (8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672), (21504, 7168),
                (28672, 7168), (7168, 28672), (5120, 5120), (5120, 13824), (12288, 12288))  # fmt: skip
HUGE_ROWS = (1024, 2048, 4096, 8192)
FOR_MANY_TOKENS = ("pingpong", "cooperative", "128x128", "128x192", "128x256")  # in the names
LARGEST = 1.3e11  # M * N * K
LARGEST_HUGE = 2e12
FEW = 64  # tokens
REPEATS = 3
NO_ESTIMATE = 1e9  # candidates.h
WORTH = 1.4  # times the lowest estimate: of 516 shapes swept whole on an H200 that leaves out the fastest kernel in 3


def worth_timing(m: int, n: int, k: int, also: str) -> list[str]:
    """The kernels that candidates.cpp would estimate at this shape, without those it reckons instead of measuring, and
    without those that its models, of the most similar device, put far behind, but for those that `also` matches."""
    found = {
        name: us
        for name, us in _C.estimates(m, n, k, "float16", False, 0)
        if us < NO_ESTIMATE and not name.startswith("cutlass_sm80")
    }
    if m == 1:
        return [name for name in found if name.startswith("skinny/")]
    limit = WORTH * min(found.values())
    return [name for name, us in found.items() if us <= limit or re.search(also, name)]


def is_plausible(name: str, m: int) -> bool:
    """Whether a float8 kernel's tile suits so many tokens: most of it full, and not read again and again."""
    tile = name.split("/")[1].split("_")[0]
    tokens, channels = map(int, tile.split("x"))
    if "swapped" in name:
        return m <= 384 and m <= 6 * tokens and tokens < 2 * m + 16
    if channels < 64:
        return m <= tokens
    return m >= 48 if channels > 64 else m <= 384


def float8_row(m: int, n: int, k: int) -> dict[str, float]:
    """Microseconds alone, in turn, by kernel."""
    sets = float8_operands(m, n, k)
    names = [
        (name, fast)
        for name in octofuse.engines()
        for engine, fast in FLOAT8.items()
        if name.startswith(f"wgmma_{engine}/") and is_plausible(name, m)
    ]
    with overlap(False):
        graphs = {name: Captured([lambda s=s, e=name, f=fast: octofuse.linear(
            s["f"], s["wf"], s["fs"], s["wfs"], s["bias"], engine=e, fast_accumulate=f) for s in sets])
            for name, fast in names}  # fmt: skip
    return {name: round(us, 3) for name, us in device_times(graphs, repeats=REPEATS).items()}


def huge_row(m: int, n: int, k: int) -> dict[str, float]:
    """Microseconds alone, in turns, by kernel: of int8, and of float8 with fast sums."""
    names = [n for n in octofuse.engines() if any(kind in n for kind in FOR_MANY_TOKENS) and "swapped" not in n]
    row = {}
    for engine in ("wgmma", "wgmma_float8_fast"):
        calls = {name: call_of(name) for name in names if name.split("/")[0] == engine}
        sets = (operand_sets if engine == "wgmma" else float8_operands)(m, n, k)[:3]  # what they read is far from all
        with overlap(False):
            graphs = {name: Captured([lambda s=s, f=f: f(s) for s in sets]) for name, f in calls.items()}
        row |= {name: round(us, 3) for name, us in device_times(graphs, repeats=REPEATS).items()}
    return row


def time_of(name: str, sets: list[tuple[torch.Tensor, ...]], m: int, chained: bool) -> float:
    """Microseconds alone; for few tokens, the mean of that and of its share of a captured chain, or that share alone."""

    def call(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return octofuse.i8f16_linear(*s, engine=name, constant_weight=True)

    calls = [lambda s=s: call(s) for s in sets]
    if chained:
        return device_time(calls, repeats=REPEATS)
    with overlap(False):
        alone = device_time(calls, repeats=REPEATS)
    return alone if m > FEW else (alone + device_time(calls, repeats=REPEATS)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--large", action="store_true")
    kind.add_argument("--one", action="store_true")
    kind.add_argument("--float8", action="store_true")
    kind.add_argument("--huge", action="store_true")
    kind.add_argument("--small", action="store_true")
    parser.add_argument(
        "--weights", nargs="+", type=parsed_shape, metavar="NxK", help="these alone, into the file that is there"
    )
    parser.add_argument("--tokens", nargs="+", type=int, help="instead of the list's")
    parser.add_argument("--also", default="$^", help="regular expression: kernels that no sweep has timed yet")
    args = parser.parse_args()
    weights = WEIGHTS + LARGE_WEIGHTS if args.one else LARGE_WEIGHTS if args.large else WEIGHTS
    tokens = (1,) if args.one else LARGE_ROWS if args.large else ROWS
    name_of_sweep = "sweep_one" if args.one else "sweep_large" if args.large else "sweep"
    command = "python benchmarks/sweep_gemm.py" + " --large" * args.large + " --one" * args.one
    if args.float8:
        weights, tokens, name_of_sweep, command = FLOAT8_WEIGHTS, FLOAT8_ROWS, "sweep_float8", command + " --float8"
    if args.huge:
        weights, tokens, name_of_sweep, command = HUGE_WEIGHTS, HUGE_ROWS, "sweep_huge", command + " --huge"
    if args.small:
        weights, tokens, name_of_sweep = WEIGHTS + LARGE_WEIGHTS, SMALL_ROWS, "sweep_tokens"
        command = f"python benchmarks/sweep_gemm.py --small --also '{args.also}'"
    if args.tokens:
        tokens, command = tuple(args.tokens), f"{command} --tokens {' '.join(map(str, args.tokens))}"
    largest = LARGEST_HUGE if args.huge else LARGEST
    times: dict[str, dict[str, float]] = {}
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{name_of_sweep}.json"
    if args.weights:
        if not path.is_file():
            parser.error(f"--weights: expected a file to add rows to, got none at {path}")
        weights, before = tuple(args.weights), json.loads(path.read_text())
        shapes = " ".join(f"{n}x{k}" for n, k in weights)
        times, command = before["us"], f"{before['command']}; {command} --weights {shapes}"
    record = {**environment(command), "us": times}
    for n, k in weights:
        for m in tokens:
            if m * n * k > largest or (n > 100_000 and m > FEW and not args.huge):
                continue
            if args.huge:
                times[f"{m},{n},{k}"] = huge_row(m, n, k)
                continue
            if args.float8:
                times[f"{m},{n},{k}"] = float8_row(m, n, k)
                continue
            sets = operand_sets(m, n, k)
            row = times[f"{m},{n},{k}"] = {}
            for name in worth_timing(m, n, k, args.also):
                try:
                    row[name] = round(time_of(name, sets, m, args.one), 3)
                except ValueError:  # declines, with its reason
                    continue
        print(n, k, flush=True)
        path.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
