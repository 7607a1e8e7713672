"""Decoders of real shapes on one GPU and on several of this machine together, random weights: a token and its energy, 32
sequences, a prompt; exact and with FastSums. And what ranks exchange: times over sizes, by one kernel and by NCCL.

A rank is a process with a GPU. On a machine of four GPUs two pairs run at the same time, one of them with fast sums. The
floor is the bytes that a rank reads in a step over its bandwidth for copies. The prediction, also for more ranks than there
are, is a rank's floor, what one GPU takes beyond its own floor, and the exchanges of a step as the curve has them.
OCTOFUSE_PARALLEL_MODELS chooses models, "model:scheme", comma-separated; OCTOFUSE_PARALLEL_INTO names a file of an earlier
run with the same cpp/, whose rows of other models are kept.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from bench_decode import INT8_HEAD, PROMPT, bandwidth, step_bytes
from bench_gpt2 import median_seconds
from models import build
from octofuse.generate import Generator
from octofuse.parallel import FastSums, Group
from octofuse.testing.timing import energy, source_hash

FLOAT = "fp16"
ONE, PAIR = "one GPU", "one GPU and two"  # of a plan: the others run on every number of GPUs
MODELS = {
    "Llama-3.1-8B:w8a8-dynamic": "", "Llama-3.1-70B:w8a8-dynamic": "", "OPT-66B:w8a8-dynamic": "", "OPT-30B:fp16": PAIR,
    "OPT-30B:w8a8-dynamic": PAIR, "OPT-30B:w4a16-g128": ONE, "OPT-30B:bcq-q3-g128": ONE, "Llama-3.1-8B:w4a16-g128": "",
    "Llama-3.1-70B:w4a16-g128": "", "OPT-66B:w4a16-g128": "",
}  # fmt: skip
NEW_TOKENS = 64
SEQUENCES, PROMPT_TOKENS = 32, 2048
EXCHANGED = (2**10, 2**12, 2**14, 2**16, 2**17, 2**18, 2**19, 2**20, 2**22, 2**24)  # bytes of all ranks; of a sum
IN_A_GRAPH = 40
SLOWEST = 1.3  # times as long as the fastest GPU


def exchange_us(call: Any, device: torch.device) -> float:
    """Microseconds of one exchange in a captured row of them."""
    if device.type != "cuda":
        call()
        return 0.0
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            call()
    found = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end) * 1e3 / IN_A_GRAPH)
    return statistics.median(found[2:])


def curve_row(group: Group, by_nccl: Group, size: int, device: torch.device) -> dict[str, Any]:
    part = torch.zeros(1, max(1, size // group.ranks // 2), dtype=torch.float16, device=device)
    sizes = (part.shape[1],) * group.ranks
    whole = torch.zeros(1, size // 2, dtype=torch.float16, device=device)
    return {
        "ranks": group.ranks, "bytes": size,
        "gather us": exchange_us(lambda: group.gather(part, sizes), device),
        "gather by NCCL us": exchange_us(lambda: by_nccl.gather(part, sizes), device),
        "sum us": exchange_us(lambda: group.add(whole), device),
        "sum by NCCL us": exchange_us(lambda: by_nccl.add(whole), device),
    }  # fmt: skip


def by_nccl_alone(mesh: Any) -> Group:
    group = Group(mesh)
    group._asked = True  # of shared memory, and there is none
    return group


def latency(curve: dict[int, float], size: int) -> float:
    """Between the sizes that were measured."""
    sizes = sorted(curve)
    for small, large in pairwise(sizes):
        if size <= large:
            share = max(0.0, (size - small) / (large - small))
            return curve[small] + share * (curve[large] - curve[small])
    return curve[sizes[-1]] * size / sizes[-1]


class Exchanges(NamedTuple):
    """What ranks exchange in a step of one sequence, in elements: of each block attention's result, its projection, the
    feed-forward's middle and result; and the logits."""

    heads: int
    width: int
    hidden: int
    blocks: int
    vocabulary: int

    @classmethod
    def of(cls, decoder: Any, config: Any) -> Exchanges:
        hidden = next(
            size for name in ("intermediate_size", "ffn_dim", "n_inner") if (size := getattr(config, name, 0))
        )
        return cls(decoder.heads[0].width, decoder.width, hidden, len(decoder.blocks), decoder.vocabulary)

    def milliseconds(self, curve: list[dict[str, Any]], *, fast: bool) -> float:
        """Gathers of all, or sums of two of them."""
        gathers, sums = ({row["bytes"]: row[name] for row in curve} for name in ("gather us", "sum us"))
        of_block = [self.width] * 2 if fast else [self.heads, self.width, self.hidden, self.width]
        in_blocks = self.blocks * sum(latency(sums if fast else gathers, 2 * size) for size in of_block)
        return (in_blocks + latency(gathers, 2 * self.vocabulary)) / 1e3


def measured(generator: Generator, device: torch.device, group: Any) -> dict[str, Any]:
    """The same calls on all ranks of the group, None of one GPU alone."""
    decoder = generator.decoder
    call = lambda count: generator([PROMPT], count)  # noqa: E731
    for count in (NEW_TOKENS, 1):
        call(count)
    total = median_seconds(lambda: call(NEW_TOKENS), device, 3)
    first = median_seconds(lambda: call(1), device, 3)
    calls = torch.tensor([max(1, round(1.5 / total))], device=device)
    if group is not None:
        dist.broadcast(calls, dist.get_global_rank(group, 0), group=group)
    joules, watts = energy(lambda: call(NEW_TOKENS), device, count=int(calls))
    many = [PROMPT] * SEQUENCES
    generator(many, NEW_TOKENS)
    batch = SEQUENCES * NEW_TOKENS / median_seconds(lambda: generator(many, NEW_TOKENS), device, 2)
    generator.sessions.clear()
    row = {"ms a token": (total - first) / (NEW_TOKENS - 1) * 1e3, "tokens/s, 32 sequences": batch,
           "J a token": None if joules is None else joules / NEW_TOKENS, "watts of a GPU": watts}  # fmt: skip
    if device.type == "cuda":
        ids = torch.randint(0, decoder.vocabulary, (1, PROMPT_TOKENS), device=device)
        if group is not None:
            dist.broadcast(ids, dist.get_global_rank(group, 0), group=group)
        lengths = torch.full((1,), PROMPT_TOKENS, device=device)
        cache = decoder.new_cache(1, PROMPT_TOKENS)
        decoder.prefill(ids, lengths, cache)
        row["prompt ms"] = median_seconds(lambda: decoder.prefill(ids, lengths, cache), device, 3) * 1e3
    return row


class Bench:
    """Of one rank: all ranks do the same, in one order."""

    def __init__(self, kind: str, ranks: int) -> None:
        self.kind, self.ranks, self.rank = kind, ranks, dist.get_rank()
        self.device = torch.device(kind, self.rank) if kind == "cuda" else torch.device(kind)
        counts = [count for count in (2, 4, 8) if count <= ranks and ranks % count == 0]
        self.meshes = {count: self._mesh(count) for count in counts}
        self.curve = [row for count in counts for row in self._curve(count)]

    def _mesh(self, count: int) -> Any:
        if count == self.ranks:
            return init_device_mesh(self.kind, (self.ranks,))
        return init_device_mesh(self.kind, (self.ranks // count, count), mesh_dim_names=("groups", "own"))["own"]

    def _curve(self, count: int) -> list[dict[str, Any]]:
        mesh = self.meshes[count]
        group, by_nccl = Group(mesh), by_nccl_alone(mesh)
        return [curve_row(group, by_nccl, size, self.device) for size in EXCHANGED]

    def rows(self, model: str, scheme: str, plan: str) -> list[dict[str, Any]]:
        """Rank 0's of one GPU, and the first ranks' of each group."""
        built = self._built(model, scheme)
        generator = Generator(built)
        one = measured(generator, self.device, None)
        self._check_alike(one["ms a token"])
        want, floor = generator([PROMPT], 32), self._floor(generator)
        sizes = Exchanges.of(generator.decoder, built.config)
        rows = [{"ranks": 1, "sums": "whole", **one, "floor ms": floor, "of the floor": floor / one["ms a token"]}]
        beyond = one["ms a token"] - floor
        for count in (2, 4, 8):  # with exact sums; a rank's floor is about an even part of one GPU's
            rows[0][f"predicted ms, {count}"] = floor / count + beyond + self._exchanges(sizes, count, fast=False)
        for count, mesh in {} if plan == ONE else self.meshes.items():
            if plan == PAIR and count > 2:
                continue
            # Of several groups the second has fast sums meanwhile; one alone has them afterwards.
            for fast in [self.rank // count % 2 == 1] if count < self.ranks else [False, True]:
                del generator
                if built is None:
                    built = self._built(model, scheme)
                generator = Generator(built, mesh=FastSums(mesh) if fast else mesh)
                built = None
                self._clean()
                found = measured(generator, self.device, mesh.get_group())
                own, got = self._floor(generator), generator([PROMPT], 32)
                rows.append({"ranks": count, "sums": "fast" if fast else "exact", **found, "floor ms": own,
                             "of the floor": own / found["ms a token"], "same tokens": got == want,
                             "exchanges ms": (between := self._exchanges(sizes, count, fast=fast)),
                             "predicted ms": own + beyond + between})  # fmt: skip
                if joules := self._summed(mesh, found["J a token"]):
                    rows[-1]["J a token"] = joules
        del generator, built
        self._clean()
        return [{"model": model, "scheme": scheme, **row} for row in rows]

    def _check_alike(self, own: float) -> None:
        """A GPU whose clock was lowered makes every number of its group wrong."""
        of_each: list[Any] = [None] * self.ranks
        dist.all_gather_object(of_each, own)
        if max(of_each) > SLOWEST * min(of_each) and self.kind == "cuda":
            raise RuntimeError(f"GPUs: expected all about as fast, got {of_each} ms a token alone")

    def _built(self, model: str, scheme: str) -> Any:
        self._clean()
        return (
            build(model, None, None, self.device) if scheme == FLOAT else build(model, scheme, INT8_HEAD, self.device)
        )

    def _clean(self) -> None:
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def _floor(self, generator: Generator) -> float:
        read = step_bytes(generator.decoder, 1, len(PROMPT) + NEW_TOKENS // 2)
        return read / bandwidth(self.device) * 1e3

    def _exchanges(self, sizes: Exchanges, count: int, *, fast: bool) -> float:
        """For more ranks than there are by the curve of the most that were measured."""
        most = max(row["ranks"] for row in self.curve if row["ranks"] <= max(count, 2))
        return sizes.milliseconds([row for row in self.curve if row["ranks"] == most], fast=fast)

    def _summed(self, mesh: Any, joules: float | None) -> float | None:
        """Of all ranks of a group."""
        found: list[Any] = [None] * mesh.size()
        dist.all_gather_object(found, joules, group=mesh.get_group())
        return None if None in found else sum(found)


def rank_main(rank: int, ranks: int, folder: str, kind: str, models: dict[str, str]) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    bench = Bench(kind, ranks)
    rows: list[dict[str, Any]] = []
    for name, plan in models.items():
        found: list[Any] = [None] * ranks
        dist.all_gather_object(found, bench.rows(*name.split(":"), plan))
        # A group's rows are its first rank's.
        rows += [row for first, of_rank in enumerate(found) for row in of_rank if first % row["ranks"] == 0
                 and (first == 0 or row["ranks"] > 1)]  # fmt: skip
        if rank == 0:
            written = {"ranks": ranks, "decode": rows, "exchanges": bench.curve}
            Path(folder, "result.json").write_text(json.dumps(written))
            print(name, [(row["ranks"], row["sums"], round(row["ms a token"], 3)) for row in rows[-6:]], flush=True)
    dist.destroy_process_group()


def with_earlier(found: dict[str, Any], path: str) -> dict[str, Any]:
    """And the rows of other models, of a file with the same cpp/ and as many ranks."""
    before = json.loads(Path(path).read_text())
    if (before["cpp"], before["ranks"]) != (source_hash(), found["ranks"]):
        raise SystemExit(f"{path}: expected cpp {source_hash()} and {found['ranks']} ranks, got {before['cpp']} and "
                         f"{before['ranks']}")  # fmt: skip
    new = {(row["model"], row["scheme"]) for row in found["decode"]}
    kept = [row for row in before["decode"] if (row["model"], row["scheme"]) not in new]
    return {**found, "decode": kept + found["decode"]}


def run(smoke: bool) -> dict[str, Any]:
    ranks = torch.cuda.device_count()
    kind = "cuda" if ranks > 1 else "cpu"
    chosen = [name for name in os.environ.get("OCTOFUSE_PARALLEL_MODELS", "").split(",") if name]
    models = {"tiny:w8a8-dynamic": ""} if smoke else {name: MODELS.get(name, "") for name in chosen or MODELS}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (max(ranks, 2), folder, kind, models)
        mp.start_processes(rank_main, arguments, max(ranks, 2), start_method="spawn")
        found: dict[str, Any] = json.loads(Path(folder, "result.json").read_text())
    earlier = os.environ.get("OCTOFUSE_PARALLEL_INTO")
    return with_earlier(found, earlier) if earlier else found
