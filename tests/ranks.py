"""Processes that are the ranks of a parallel model, on the CPU by gloo, or with a GPU each by NCCL."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

LIMIT = 300  # seconds until a test gives its ranks up


def _rank(
    rank: int, ranks: int, folder: str, device: str, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = f"file://{folder}/store"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", init_method=store, rank=rank, world_size=ranks)
    result: dict[str, Any] = {}
    try:
        result["found"] = work(init_device_mesh(device, (ranks,)), *arguments)
    except Exception:
        result["error"] = traceback.format_exc()
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def on_ranks(ranks: int, folder: Path, work: Callable[..., Any], *arguments: Any, device: str = "cpu") -> list[Any]:
    """What work(mesh, *arguments) gives on every rank, which JSON must be able to say."""
    folder.mkdir(parents=True, exist_ok=True)
    context = mp.start_processes(
        _rank, (ranks, str(folder), device, work, arguments), ranks, join=False, start_method="spawn"
    )
    while not context.join(timeout=LIMIT):
        pass
    results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    errors = [result["error"] for result in results if "error" in result]
    assert not errors, errors[0]
    return [result["found"] for result in results]


__all__ = ["DeviceMesh", "on_ranks"]
