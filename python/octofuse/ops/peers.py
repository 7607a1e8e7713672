"""A gather over memory that several GPUs can write to, one process each, in one kernel; there is no CPU version."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from octofuse import _C

UNIT: int = _C.GATHER_UNIT  # bytes that a row of any rank is a multiple of
MOST_RANKS: int = _C.MAX_RANKS
COUNTERS: int = _C.GATHER_BLOCKS


def inbox_bytes(capacity: int, ranks: int) -> int:
    """Of each rank, for `capacity` bytes of every other one."""
    return _C.gather_inbox_bytes(capacity, ranks)


@dataclass(frozen=True)
class Inboxes:
    """Memory of every rank that all can write to, by address, as this process sees it; zero at first.

    memory: this rank's own. calls: int32 `[COUNTERS]`, zero at first. limit: seconds that a rank may let the others wait.
    """

    rank: int
    addresses: tuple[int, ...]
    memory: Tensor
    calls: Tensor
    capacity: int
    limit: float

    def takes(self, x: Tensor, sizes: tuple[int, ...]) -> bool:
        """Whether `gather` serves such a call, which is the same on all ranks."""
        rows = x.numel() // x.shape[-1]
        widths = [size * x.element_size() for size in sizes]
        return all(width % UNIT == 0 and width * rows <= self.capacity for width in widths)

    def gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """x `[..., sizes[rank]]` of each rank -> `[..., sum(sizes)]`. All ranks make the same calls in the same order."""
        x = x.contiguous()
        if x.data_ptr() % UNIT != 0:
            x = x.clone()
        return _C.gather(x, list(sizes), self.rank, list(self.addresses), self.calls, self.capacity, self.limit)
