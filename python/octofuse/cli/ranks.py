"""A command whose processes are ranks, as torchrun starts them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from octofuse.cli.common import pick_device
from octofuse.parallel import FastSums

LIMIT = timedelta(seconds=600)  # that ranks wait for each other


@contextmanager
def ranked(device: str, *, fast_sums: bool = False) -> Iterator[tuple[torch.device, Any]]:
    """This process's device, and the mesh of all, None of one alone. fast_sums: with FastSums around it.

    ValueError where there is no GPU for every rank of this machine, or one is named, and for fast sums of one rank.
    """
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1:
        if fast_sums:
            raise ValueError("--fast-sums: expected several ranks, as torchrun starts them, got one")
        yield pick_device(device), None
        return
    found = pick_device(device)
    if found.type == "cuda":
        local, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if found.index is not None:
            raise ValueError(f"device: expected auto, cpu or cuda beside {ranks} ranks, got {device!r}")
        if local >= gpus:
            raise ValueError(f"device: expected a GPU for each rank, got {gpus} for rank {local} of this machine")
        found = torch.device("cuda", local)
        torch.cuda.set_device(found)
    dist.init_process_group("nccl" if found.type == "cuda" else "gloo", timeout=LIMIT)
    mesh = init_device_mesh(found.type, (ranks,))
    try:
        yield found, FastSums(mesh) if fast_sums else mesh
    except RuntimeError:  # of an exchange, perhaps: then nobody is left to take leave of
        raise
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get("RANK", "0") == "0"
