"""Where a block's share of a step goes, kernel by kernel in their order: `python benchmarks/step_blocks.py MODEL SCHEME`.

MODEL is one of models.SHAPES, cut to --blocks blocks, or a folder with a config.json; weights are random. Every kernel
counts from the end of the one before it to its own end, averaged over the blocks; "start" is when it began, from the same
moment: below zero is what it had time for before its wait. The profiler adds about a tenth to a step.
"""

from __future__ import annotations

import argparse
import re
import statistics

import torch

from bench_gpt2 import kernels_of_a_step, session_of, step_time
from models import SHAPES, build
from octofuse.generate import Generator

CONTEXT = 136
OUTSIDE = 3  # kernels at least: embedding or a norm, the head, the choice of a token


def plain(name: str) -> str:
    return re.sub(r"octofuse::|\(anonymous namespace\)::|^void ", "", name)[:60]


def of_a_block(kernels: list[tuple[str, float, float]], blocks: int) -> list[tuple[str, float, float]]:
    """(name, microseconds, start) of each kernel of a block, averaged over all but the first and the last block."""
    count = (len(kernels) - OUTSIDE) // blocks
    names = [plain(name) for name, _, _ in kernels]
    inner = range(1, blocks - 1)
    first = next(i for i in range(count) if all(names[i + count * j] == names[i + count] for j in inner))
    found = []
    for i in range(first, first + count):
        pairs = [(kernels[i + count * j], kernels[i + count * j - 1][2]) for j in inner]
        spent = statistics.mean(kernel[2] - before for kernel, before in pairs)
        found.append((names[i + count], spent, statistics.mean(kernel[1] - before for kernel, before in pairs)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("scheme")
    parser.add_argument("--blocks", type=int, default=8)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("step_blocks: expected a GPU, found none")
    if args.model in SHAPES:
        kind, sizes = SHAPES[args.model]
        layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
        SHAPES["shortened"] = (kind, sizes | {layers: args.blocks})
        args.model = "shortened"
    generator = Generator(build(args.model, args.scheme, "w8a8-dynamic", torch.device("cuda", 0)))
    blocks = len(generator.decoder.blocks)
    session = session_of(generator, 1, CONTEXT)
    print(f"a step: {step_time(session, CONTEXT - 36):.1f} us")
    for name, spent, start in of_a_block(kernels_of_a_step(session, CONTEXT), blocks):
        print(f"{spent:7.2f} us  start {start:7.2f}  {name}")


if __name__ == "__main__":
    main()
