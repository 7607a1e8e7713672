"""Device and host times, and the record of what produced them."""

from __future__ import annotations

import contextlib
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
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
    they do in a model. A graph holds at least 48 calls, so that its own launch weighs little.
    """

    def __init__(self, calls: Sequence[Callable[[], Any]]) -> None:
        self.calls = calls = list(calls) * -(-48 // len(calls))  # kept: they own what the graph reads
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


def device_time(calls: Sequence[Callable[[], Any]], *, repeats: int = 25) -> float:
    """Median microseconds of one call, from replays of one CUDA graph that runs them all, again and again."""
    return device_times({"": Captured(calls)}, repeats=repeats)[""]


def device_times(graphs: Mapping[str, Captured], *, repeats: int = 25) -> dict[str, float]:
    """Median microseconds of one call of each.

    Replays take turns in changing order, so that a drifting clock drifts for all alike, and each that counts follows one
    of its own: under a power limit a kernel runs faster behind one that spares the card. With either alone the same kernel
    differed by 4 to 15 % in two columns.
    """
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order = random.Random(0)
    names = list(graphs)
    for _ in range(repeats):
        order.shuffle(names)
        for name in names:
            graphs[name].graph.replay()
            times[name].append(graphs[name].replay())
    return {name: statistics.median(values) for name, values in times.items()}


def host_time(call: Callable[[], Any], *, calls: int = 500, repeats: int = 9) -> float:
    """Median microseconds that one eager call keeps the host busy, output allocated, the device never waited for."""
    for _ in range(50):
        call()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) * 1e6 / calls)
    torch.cuda.synchronize()
    return statistics.median(times)


def environment(command: str) -> dict[str, Any]:
    """Machine, versions, the command and the hash of cpp/ behind a measurement."""
    import octofuse

    record: dict[str, Any] = {
        "command": command,
        "octofuse": octofuse.__version__,
        "cpp": source_hash(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "build": _C.build_info(),
        "cublaslt": _C.cublaslt_info()["version"],
    }
    if torch.cuda.is_available():
        record["device"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        run = subprocess.run(query, capture_output=True, text=True, check=False)
        record["driver"] = run.stdout.strip() or None
    return record


def source_hash() -> str | None:
    """OCTOFUSE_CPP_HASH, for a copy of a working tree; else `git rev-parse HEAD:cpp` of the checkout that this runs in."""
    given = os.environ.get("OCTOFUSE_CPP_HASH")
    if given:
        return given
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(["git", "rev-parse", "HEAD:cpp"], cwd=root, capture_output=True, text=True, check=False)
    return run.stdout.strip() or None


def energy(call: Callable[[], Any], device: torch.device, seconds: float = 1.5) -> tuple[float | None, float | None]:
    """Joules of one call and the mean power in watts, from the card's counter; None without nvidia-ml-py or a GPU."""
    try:
        import pynvml
    except ImportError:
        return None, None
    if device.type != "cuda":
        return None, None
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device())
    torch.cuda.synchronize(device)
    before, began, calls = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        call()
        torch.cuda.synchronize(device)
        calls += 1
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3
    return joules / calls, joules / (time.perf_counter() - began)
