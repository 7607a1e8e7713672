"""Memory that the GPUs of a group can write to, from torch's symmetric memory."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from octofuse.ops.peers import COUNTERS, SPAN, Inboxes, inbox_bytes

CAPACITY = 1 << 19  # bytes of a rank's part that travel with a number each; larger ones go in bulk
BULK = 1 << 25  # bytes of all ranks' parts in bulk at a time

_log = logging.getLogger(__name__)


def make_inboxes(group: Any, rank: int, ranks: int, device: torch.device, limit: float) -> Inboxes | None:
    """On every rank of the group at once; None on all of them, with a warning that says why, where one has none.

    limit: seconds that a rank may let the others wait.
    """
    found, reason = None, ""
    try:
        found = _made(group, rank, ranks, device, limit)
    except Exception as error:  # of torch's own memory: it must not keep a model from running
        reason = f"{type(error).__name__}: {error}"
    reasons: list[Any] = [None] * ranks
    dist.all_gather_object(reasons, reason, group=group)
    if any(reasons):
        failed = next(other for other, text in enumerate(reasons) if text)
        if rank == 0:
            _log.warning("rank %d shares no memory with the others (%s); gathers go by NCCL", failed, reasons[failed])
        return None
    return found


def _made(group: Any, rank: int, ranks: int, device: torch.device, limit: float) -> Inboxes:
    import torch.distributed._symmetric_memory as symmetric

    with torch.cuda.device(device):
        bulk = BULK // ranks // SPAN * SPAN
        memory = symmetric.empty(inbox_bytes(CAPACITY, bulk, ranks), dtype=torch.uint8, device=device)
        memory.zero_()
        calls = torch.zeros(COUNTERS, dtype=torch.int32, device=device)
        torch.cuda.synchronize(device)  # what is zeroed now must not be written to before
        handle = symmetric.rendezvous(memory, group)
        addresses = tuple(int(address) for address in handle.buffer_ptrs)
    return Inboxes(rank, addresses, memory, calls, CAPACITY, bulk, limit)
