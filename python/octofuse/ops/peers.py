"""What ranks gather over memory that several GPUs can write to, a process each, in one kernel; there is no CPU version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from octofuse import _C
from octofuse.ops._calls import PeerCall, RowsCall

UNIT: int = _C.GATHER_UNIT  # bytes that a row of any rank is a multiple of
PACK: int = _C.BULK_UNIT  # the same, of many bytes and of rows that a pass goes over
SPAN: int = _C.BULK_SPAN  # bytes that the most in bulk is a multiple of
MOST_RANKS: int = _C.MAX_RANKS
COUNTERS: int = _C.CALL_COUNTERS
MOST_ROWS: int = _C.MOST_GATHERED_ROWS
# A norm of more columns is shared by blocks of a cluster, which have to agree on its sums: of more rows than these, a
# gather and the norm's own kernel are faster, and so they are where there are no clusters.
NORM_COLUMNS, WIDE_NORM_ROWS = 4096, 4


def inbox_bytes(capacity: int, bulk: int, ranks: int) -> int:
    """Of each rank, for parts of up to `capacity` bytes of every other one, or `bulk` bytes at a time."""
    return _C.gather_inbox_bytes(capacity, bulk, ranks)


@dataclass(frozen=True)
class Inboxes:
    """Memory of every rank that all can write to, by address, as this process sees it; zero at first.

    memory: this rank's own. calls: int32 `[COUNTERS]`, zero at first. capacity, bulk: bytes of a rank's part that travel
    with a number each, and at a time in bulk. limit: seconds that a rank may let the others wait. All ranks make the same
    calls in the same order.
    """

    rank: int
    addresses: tuple[int, ...]
    memory: Tensor
    calls: Tensor
    capacity: int
    bulk: int
    limit: float

    def takes(self, x: Tensor, sizes: tuple[int, ...]) -> bool:
        """Whether `gather` serves such a call, which is the same on all ranks."""
        if self._fits(x, sizes, UNIT):
            return True
        widths = [size * x.element_size() for size in sizes]
        return all(width % PACK == 0 and width <= self.bulk for width in widths)

    def gather(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """x `[..., sizes[rank]]` of each rank -> `[..., sum(sizes)]`."""
        return _C.gather(_aligned(x, PACK), self._call(sizes))

    def takes_rows(self, call: RowsCall, sizes: tuple[int, ...], *, adds: bool = False) -> bool:
        """Whether it pays to let `rows` serve such a call, and it does; the same on all ranks."""
        x = call.x
        if x.dtype not in (torch.float16, torch.bfloat16) or call.q_block or call.order is not None:
            return False
        if not call.constants or call.of_part or call.op == "activation" or (adds and call.op == "gated_activation"):
            return False
        count = x.numel() // x.shape[-1]
        columns = sizes[self.rank] if adds else sum(sizes)
        norm = call.op.endswith("norm")
        if norm and columns > NORM_COLUMNS and (count > WIDE_NORM_ROWS or not _has_clusters(x.device)):
            return False
        most = _C.most_gathered_columns(norm, True, x.device.index)
        return count <= MOST_ROWS and columns <= most and self._fits(x, sizes, PACK)

    def rows(
        self, call: RowsCall, sizes: tuple[int, ...], *, adds: bool = False, clusters: bool = True
    ) -> list[Tensor]:
        """`ops.rows` of a copy, a gated activation or a norm, whose x, `[..., sizes[rank]]`, gated twice as wide, is a
        part of every rank's: gathered, or with `adds`, all sizes alike, added in fp32 in the ranks' order. clusters: may
        share a row where the device has them."""
        weight, bias = (None if one is None else _aligned_pack(one) for one in (call.weight, call.bias))
        call = call._replace(x=_aligned(call.x, PACK), weight=weight, bias=bias)
        return _C.gather_rows(call, adds, self._call(sizes), clusters)

    def _fits(self, x: Tensor, sizes: tuple[int, ...], unit: int) -> bool:
        count = x.numel() // x.shape[-1]
        widths = [size * x.element_size() for size in sizes]
        return all(width % unit == 0 and width * count <= self.capacity for width in widths)

    def _call(self, sizes: tuple[int, ...]) -> PeerCall:
        return PeerCall(sizes, self.rank, self.addresses, self.calls, self.capacity, self.bulk, self.limit)


@cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0)


def _aligned_pack(x: Tensor) -> Tensor:
    """A thread reads 8 elements at once, which may be fp32."""
    return _aligned(x, 8 * x.element_size())


def _aligned(x: Tensor, unit: int) -> Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % unit == 0 else x.clone()
