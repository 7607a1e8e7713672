"""A rank of a parallel model on one GPU, with what the others would have sent already in its inbox."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octofuse.ops._calls import RowsCall
from octofuse.ops.peers import COUNTERS, SPAN, Inboxes, inbox_bytes

CAPACITY = 1 << 20
BULK = 40 * SPAN


class Alone:
    """Rank `rank` of `ranks`. expect() says what the others send in its next call."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.ranks, self.number = ranks, 0
        # From the host: initcheck does not see what torch's own kernels write.
        size = inbox_bytes(CAPACITY, BULK, ranks) // 4
        self.memories = [torch.zeros(size, dtype=torch.int32).cuda() for _ in range(ranks)]
        calls = torch.zeros(COUNTERS, dtype=torch.int32).cuda()
        addresses = tuple(memory.data_ptr() for memory in self.memories)
        self.inboxes = Inboxes(rank, addresses, self.memories[rank], calls, CAPACITY, BULK, 5.0)

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
            number = torch.full((len(words),), self.number, dtype=torch.int32)
            sent = torch.stack([words[:, 0], number, words[:, 1], number], 1)
            self.lines(self.inboxes.memory, sender)[: len(words)] = sent.cuda()

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
                    data[: words.numel()] = words.cuda()
                    flags[: -(-part.numel() * part.element_size() // SPAN)] = self.number
        return [list(piece) for piece in pieces]

    def sent(self, part: Tensor) -> list[Tensor]:
        """What every other rank has got of this one's part, which was shaped like `part`."""
        count = part.numel() * part.element_size() // 8
        found = []
        for rank, memory in enumerate(self.memories):
            if rank == self.inboxes.rank:
                continue
            lines = self.lines(memory, self.inboxes.rank)[:count].cpu()
            assert bool((lines[:, 1::2] == self.number).all())
            found.append(lines[:, ::2].contiguous().view(part.dtype).view(part.shape))
        return found


def rows_call(x: Tensor, op: str, **options: Any) -> RowsCall:
    usual: dict[str, Any] = {"residual": None, "weight": None, "bias": None, "eps": 1e-5, "activation": None,
                             "quantize": False, "scale": None, "constants": True}  # fmt: skip
    return RowsCall(x, op, **(usual | options))


def on_gpu(call: RowsCall) -> RowsCall:
    return call._replace(**{name: one.cuda() for name, one in call._asdict().items() if isinstance(one, Tensor)})
