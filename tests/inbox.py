"""A rank of a parallel model on one GPU, with what the others would have sent already in its inbox."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octofuse.ops._calls import RowsCall
from octofuse.ops.peers import COUNTERS, SPAN, Inboxes, inbox_bytes

CAPACITY = 1 << 20
BULK = 40 * SPAN


def signed(number: int) -> int:
    """A call's 32 bits, as int32 has them."""
    return (number + 2**31) % 2**32 - 2**31


class Alone:
    """Rank `rank` of `ranks`, which has made `number` calls. expect() says what the others send in its next one; inside
    late() that comes only while the kernel waits."""

    def __init__(self, rank: int, ranks: int, number: int = 0) -> None:
        self.ranks, self.number = ranks, number
        self.delayed: list[tuple[Tensor, Tensor]] | None = None
        self.arrivals: list[tuple[Tensor, Tensor]] = []
        # From the host: initcheck does not see what torch's own kernels write.
        size = inbox_bytes(CAPACITY, BULK, ranks) // 4
        self.memories = [torch.zeros(size, dtype=torch.int32).cuda() for _ in range(ranks)]
        calls = torch.full((COUNTERS,), signed(number), dtype=torch.int32).cuda()
        addresses = tuple(memory.data_ptr() for memory in self.memories)
        self.inboxes = Inboxes(rank, addresses, self.memories[rank], calls, CAPACITY, BULK, 5.0)

    def put(self, to: Tensor, what: Tensor) -> None:
        if self.delayed is None:
            to.copy_(what.cuda())
        else:
            self.delayed.append((to, what.cuda()))

    @contextmanager
    def late(self) -> Iterator[None]:
        """What is expected inside comes by another stream, some milliseconds behind what is launched here."""
        self.delayed = []
        other = torch.cuda.Stream()
        try:
            yield
        finally:
            torch.cuda.synchronize()
            self.arrivals, self.delayed = self.delayed, None  # which stay until they have arrived
            with torch.cuda.stream(other):
                torch.cuda._sleep(20_000_000)
                for to, what in self.arrivals:
                    to.copy_(what)

    def lines(self, memory: Tensor, sender: int) -> Tensor:
        """int32 `[units, 4]`: where the sender's part of the next call lies."""
        lines = memory[: self.ranks * CAPACITY].view(2, self.ranks, -1, 4)
        return lines[self.number % 2, sender]

    def expect(self, parts: list[Tensor]) -> None:
        """Of every rank, on the host; this one's is not sent."""
        self.number += 1
        for sender, part in enumerate(parts):
            if sender == self.inboxes.rank:
                continue
            words = part.contiguous().view(torch.int32).reshape(-1, 2)
            number = torch.full((len(words),), signed(self.number), dtype=torch.int32)
            sent = torch.stack([words[:, 0], number, words[:, 1], number], 1)
            self.put(self.lines(self.inboxes.memory, sender)[: len(words)], sent)

    def bulk(self, memory: Tensor, sender: int) -> tuple[Tensor, Tensor]:
        """int32: what the sender sends in bulk in the next call, and its flags."""
        behind = memory[self.ranks * CAPACITY :]
        data = behind[: self.ranks * BULK // 2].view(2, self.ranks, -1)[self.number % 2, sender]
        return data, behind[self.ranks * BULK // 2 :].view(self.ranks, -1)[sender]

    def expect_bulk(self, parts: list[Tensor]) -> list[list[Tensor]]:
        """The same in bulk, in at most two pieces, which are returned."""
        at_once = BULK // max(part.shape[1] * part.element_size() for part in parts)
        pieces = list(zip(*(part.split(at_once) for part in parts), strict=True))
        assert len(pieces) <= 2
        for piece in pieces:
            self.number += 1
            for sender, part in enumerate(piece):
                if sender != self.inboxes.rank:
                    data, flags = self.bulk(self.inboxes.memory, sender)
                    words = part.contiguous().view(torch.int32).flatten()
                    self.put(data[: words.numel()], words)
                    raised = flags[: -(-part.numel() * part.element_size() // SPAN)]
                    self.put(raised, torch.full_like(raised, signed(self.number), device="cpu"))
        return [list(piece) for piece in pieces]

    def sent(self, part: Tensor) -> list[Tensor]:
        """What every other rank has got of this one's part, which was shaped like `part`."""
        count = part.numel() * part.element_size() // 8
        found = []
        for rank, memory in enumerate(self.memories):
            if rank == self.inboxes.rank:
                continue
            lines = self.lines(memory, self.inboxes.rank)[:count].cpu()
            assert bool((lines[:, 1::2] == signed(self.number)).all())
            found.append(lines[:, ::2].contiguous().view(part.dtype).view(part.shape))
        return found


def rows_call(x: Tensor, op: str, **options: Any) -> RowsCall:
    usual: dict[str, Any] = {"residual": None, "weight": None, "bias": None, "eps": 1e-5, "activation": None,
                             "quantize": False, "scale": None, "constants": True}  # fmt: skip
    return RowsCall(x, op, **(usual | options))


def on_gpu(call: RowsCall) -> RowsCall:
    return call._replace(**{name: one.cuda() for name, one in call._asdict().items() if isinstance(one, Tensor)})
