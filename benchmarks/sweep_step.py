"""What a decoder's step takes with each kernel for one token, for fit_select.py: into sweep_step.json.

A product alone, or in a chain of itself, does not show what it leaves to the kernels around it. So a few blocks of each
model run whole steps, one of their products by a named kernel, the others as select() has them.
`python benchmarks/sweep_step.py --out FOLDER`
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from bench_gpt2 import step_time
from models import SHAPES, build
from octofuse.engine import Sampling
from octofuse.generate import Generator, Session
from octofuse.ops import tuning
from octofuse.testing.timing import environment

KERNELS = ("1x8_dp4a", "1x4_dp4a", "2x8_dp4a", "8x8x256", "16x16x128")
CONTEXTS = (40, 100)
VOCABULARY = 32000  # the head is not what is looked for
# Of each model blocks, and (N, K) of its products.
MODELS = {
    "Llama-3.1-8B": (8, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),
    "Qwen3-4B": (8, ((6144, 2560), (2560, 4096), (19456, 2560), (2560, 9728))),
    "Llama-3.2-1B": (16, ((3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192))),
    "OPT-30B": (4, ((21504, 7168), (7168, 7168), (28672, 7168), (7168, 28672))),
}


def step(generator: Generator) -> float:
    session = Session(generator.decoder, 1, 136, Sampling())
    return statistics.mean(step_time(session, context) for context in CONTEXTS for _ in range(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    device = torch.device("cuda", 0)
    found: dict[str, dict[str, float]] = {}
    for name, (blocks, products) in MODELS.items():
        kind, sizes = SHAPES[name]
        SHAPES["shortened"] = (kind, sizes | {"num_hidden_layers": blocks, "vocab_size": VOCABULARY})
        generator = Generator(build("shortened", "w8a8-dynamic", "w8a8-dynamic", device))
        step(generator)  # and a tuning of the user's own has been read
        for n, k in products:
            row = found[f"1,{n},{k}"] = {}
            for kernel in KERNELS:
                tuning._tell(0, {f"1,{n},{k},float16": f"skinny/{kernel}"})
                row[f"skinny/{kernel}"] = round(step(generator) / blocks, 3)
            tuning._tell(0, {})
            print(n, k, row, flush=True)
        del generator
        torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    record = {**environment("python benchmarks/sweep_step.py"), "us a block": found}
    (args.out / "sweep_step.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
