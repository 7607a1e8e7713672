"""Host times and energy, and the record of what produced a measurement; device times: octofuse.ops.measure."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octofuse import _C


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
        record["driver"] = next(iter(run.stdout.split()), None)  # a line for each GPU
    return record


def source_hash() -> str | None:
    """OCTOFUSE_CPP_HASH, for a copy of a working tree; else `git rev-parse HEAD:cpp` of the checkout that this runs in."""
    given = os.environ.get("OCTOFUSE_CPP_HASH")
    if given:
        return given
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(["git", "rev-parse", "HEAD:cpp"], cwd=root, capture_output=True, text=True, check=False)
    return run.stdout.strip() or None


def energy(
    call: Callable[[], Any], device: torch.device, seconds: float = 1.5, *, count: int | None = None
) -> tuple[float | None, float | None]:
    """Joules of one call and the mean power in watts, from the card's counter; None without nvidia-ml-py or a GPU.

    count: of calls, where several processes have to make as many; else they take `seconds`.
    """
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
    while time.perf_counter() - began < seconds if count is None else calls < count:
        call()
        torch.cuda.synchronize(device)
        calls += 1
    joules = (pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / 1e3
    return joules / calls, joules / (time.perf_counter() - began)
