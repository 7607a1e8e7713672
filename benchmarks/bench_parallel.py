"""Decoders of real shapes on one GPU and on all of this machine's together, random weights, one sequence.

A rank is a process with a GPU. The floor is the bytes that a rank reads in a step over its bandwidth for copies. The
prediction is one GPU's time by the number of ranks and the gathers of a step, as these ranks measured them, also where it
is for more ranks. OCTOFUSE_PARALLEL_MODELS chooses models, "model:scheme", comma-separated.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from bench_decode import INT8_HEAD, NEW_TOKENS, PROMPT, bandwidth, step_bytes, timed_row
from models import build
from octofuse.generate import Generator
from octofuse.parallel import Group

MODELS = ("Llama-3.1-8B:w8a8-dynamic", "Llama-3.1-8B:w4a16-g128", "OPT-30B:fp16", "OPT-30B:w8a8-dynamic",
          "OPT-66B:w8a8-dynamic", "Llama-3.1-70B:w8a8-dynamic", "Llama-3.1-70B:w4a16-g128")  # fmt: skip
FLOAT = "fp16"
GATHERED = (2**10, 2**12, 2**14, 2**16, 2**18, 2**20, 2**22, 2**24)  # bytes of all ranks
IN_A_GRAPH = 40


def gather_us(group: Group, size: int, device: torch.device) -> float:
    """Microseconds of a gather of so many bytes in all, in a captured row of them."""
    own = torch.zeros(1, max(1, size // group.ranks // 2), dtype=torch.float16, device=device)
    sizes = (own.shape[1],) * group.ranks
    if device.type != "cuda":
        group.gather(own, sizes)
        return 0.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            group.gather(own, sizes)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            group.gather(own, sizes)
    found = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / IN_A_GRAPH)
    return statistics.median(found[2:])


def latency(curve: dict[int, float], size: int) -> float:
    """Between the sizes that were measured."""
    sizes = sorted(curve)
    for small, large in pairwise(sizes):
        if size <= large:
            share = max(0.0, (size - small) / (large - small))
            return curve[small] + share * (curve[large] - curve[small])
    return curve[sizes[-1]] * size / sizes[-1]


def gathers_of(decoder: Any) -> list[int]:
    """Bytes of each gather in a step of one sequence: attention's result, its projection, the feed-forward's middle and
    result, and the logits."""
    width, hidden = decoder.width, decoder.blocks[0].down.around.layer.in_features
    of_block = [decoder.architecture.heads[0].width, width, hidden, width]
    return [2 * n for n in of_block * len(decoder.blocks)] + [2 * decoder.vocabulary]


def timed(
    model: str, scheme: str, generator: Generator, device: torch.device
) -> tuple[dict[str, Any], list[list[int]]]:
    row = timed_row(model, scheme, lambda count: generator([PROMPT], count), device)
    return row, generator([PROMPT], NEW_TOKENS)


def row_of(model: str, scheme: str, mesh: Any, device: torch.device, curve: dict[int, float]) -> dict[str, Any]:
    built = build(model, scheme, INT8_HEAD, device) if scheme != FLOAT else build(model, None, None, device)
    one, want = timed(model, scheme, Generator(built), device)
    gc.collect()
    generator = Generator(built, mesh=mesh)
    many, got = timed(model, scheme, generator, device)
    decoder = generator.decoder
    own = step_bytes(decoder, 1, len(PROMPT) + NEW_TOKENS // 2)
    floor = own / bandwidth(device) * 1e3
    gathers = sum(latency(curve, size) for size in gathers_of(decoder)) / 1e3
    row = {
        "model": model, "scheme": scheme, "same tokens": got == want,
        "ms a token, one GPU": one["ms a token"], "ms a token": many["ms a token"],
        "over one GPU": one["ms a token"] / many["ms a token"], "GB of a rank": own / 1e9, "floor ms": floor,
        "gathers ms": gathers, "of the floor": floor / many["ms a token"],
    }  # fmt: skip
    for ranks in sorted({mesh.size(), 4, 8}):
        row[f"predicted ms, {ranks}"] = one["ms a token"] / ranks + gathers
    del generator, decoder, built
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return row


def rank_main(rank: int, ranks: int, folder: str, kind: str, models: tuple[str, ...]) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh(kind, (ranks,))
    group = Group(mesh)
    curve = {size: gather_us(group, size, device) for size in GATHERED}
    rows = [row_of(*name.split(":"), mesh, device, curve) for name in models]
    if rank == 0:
        gathers = [{"bytes": size, "us": us} for size, us in curve.items()]
        Path(folder, "result.json").write_text(json.dumps({"ranks": ranks, "decode": rows, "gathers": gathers}))
    dist.destroy_process_group()


def run(smoke: bool) -> dict[str, Any]:
    ranks = torch.cuda.device_count()
    kind = "cuda" if ranks > 1 else "cpu"
    models = ("tiny:w8a8-dynamic",) if smoke else tuple(os.environ.get("OCTOFUSE_PARALLEL_MODELS", "").split(","))
    with tempfile.TemporaryDirectory() as folder:
        arguments = (max(ranks, 2), folder, kind, models if models != ("",) else MODELS)
        mp.start_processes(rank_main, arguments, max(ranks, 2), start_method="spawn")
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    return found
