"""Device times of calls, from captured graphs: what `octofuse tune` and the benchmarks measure with."""

from __future__ import annotations

import contextlib
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from octofuse import _C


@contextlib.contextmanager
def overlap(allowed: bool) -> Iterator[None]:
    """Whether kernels captured inside may overlap their predecessors (programmatic dependent launch; on by default)."""
    before = _C.allow_overlap(allowed)
    try:
        yield
    finally:
        _C.allow_overlap(before)


class Captured:
    """Calls recorded in one CUDA graph, to be replayed.

    Give one call per set of operands, enough sets that together they exceed the L2 cache: weights then come from HBM, as
    they do in a model. A graph holds at least `least` calls, so that its own launch weighs little.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]], *, least: int = 48) -> None:
        self.calls = calls = list(calls) * -(-least // len(calls))  # kept: they own what the graph reads
        self.count = len(calls)
        for call in calls[:3]:
            call()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for call in calls:
                call()
        self.graph.replay()

    def replay(self) -> float:
        """Microseconds of one call, from one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / self.count


def device_time(calls: Sequence[Callable[[], Any]], *, repeats: int = 25, settle: float = 0.0) -> float:
    """Median microseconds of one call, from replays of one CUDA graph that runs them all, again and again."""
    return device_times({"": Captured(calls)}, repeats=repeats, settle=settle)[""]


ORDER = random.Random(0)  # for all calls: with one for each, a column of a table always followed the same other one
POWER_LIMITED = 5e-5  # seconds: calls that take longer make the card lower its clock
SETTLE = 0.3  # seconds in which it does that


def settling(seconds: float) -> float:
    """What `device_times` is to be given for calls that take so many seconds."""
    return SETTLE if seconds > POWER_LIMITED else 0.0


def device_times(graphs: Mapping[str, Captured], *, repeats: int = 25, settle: float = 0.0) -> dict[str, float]:
    """Median microseconds of one call of each.

    Replays take turns in changing order, so that a drifting clock drifts for all alike, and each that counts follows one
    of its own, or as many as fill `settle` seconds: under a power limit a kernel runs faster behind one that spares the
    card. With either alone the same kernel differed by 4 to 15 % in two columns. Where the limit decides it takes the card
    a while to find the clock. On an H200 a float8 product began 14 % faster behind idle time than it went on, and was 7 %
    slower for some 0.1 s behind a kernel that spares the card; after 0.3 s these were within 2 % (docs/measured.md).
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    names = list(graphs)
    for _ in range(repeats):
        ORDER.shuffle(names)
        for name in names:
            once = graphs[name].replay() * graphs[name].count * 1e-6
            for _ in range(int(settle / once)):
                graphs[name].graph.replay()
            times[name].append(graphs[name].replay())
    return {name: statistics.median(values) for name, values in times.items()}
