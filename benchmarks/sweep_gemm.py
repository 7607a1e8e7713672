"""Times every kernel that could win on many shapes, for fit_select.py: `python benchmarks/sweep_gemm.py --out FOLDER`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

import octofuse
from bench_gemm import operand_sets
from octofuse import _C
from octofuse.ops.measure import device_time, overlap
from octofuse.testing.timing import environment

WEIGHTS = ((768, 768), (2304, 768), (3072, 768), (768, 3072), (1920, 1920), (4800, 1600), (1600, 6400), (1024, 4096),
           (4096, 4096), (6144, 4096), (4096, 14336), (14336, 4096), (8192, 8192), (12288, 12288),
           (50257, 768))  # fmt: skip
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 768, 1024, 2048, 4096,
        8192)  # fmt: skip
LARGEST = 1.3e11  # M * N * K
FEW = 64  # tokens
NO_ESTIMATE = 1e16  # candidates.h


def worth_timing(m: int, n: int, k: int) -> list[str]:
    """The kernels that candidates.cpp would estimate at this shape, without those it reckons instead of measuring."""
    found = _C.estimates(m, n, k, "float16", False, 0)
    return [name for name, us in found if us < NO_ESTIMATE and not name.startswith("cutlass_sm80")]


def time_of(name: str, sets: list[tuple[torch.Tensor, ...]], m: int) -> float:
    """Microseconds alone; for few tokens, the mean of that and of its share of a captured chain, as in decoding."""

    def call(s: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return octofuse.i8f16_linear(*s, engine=name, constant_weight=True)

    calls = [lambda s=s: call(s) for s in sets]
    with overlap(False):
        alone = device_time(calls, repeats=4)
    return alone if m > FEW else (alone + device_time(calls, repeats=4)) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    times: dict[str, dict[str, float]] = {}
    for n, k in WEIGHTS:
        for m in ROWS:
            if m * n * k > LARGEST or (n == 50257 and m > 64):
                continue
            sets = operand_sets(m, n, k)
            row = times[f"{m},{n},{k}"] = {}
            for name in worth_timing(m, n, k):
                try:
                    row[name] = round(time_of(name, sets, m), 3)
                except ValueError:  # declines, with its reason
                    continue
        print(n, k, flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    record = {**environment("python benchmarks/sweep_gemm.py"), "us": times}
    (args.out / "sweep.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
