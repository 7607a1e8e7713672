"""Attention of so many sequences that a block takes several splits of a head in turn."""

from __future__ import annotations

import pytest
import torch

from helpers import attend_call
from octofuse.ops import decode
from octofuse.ops.cache import encoded, new_codes


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, "int8", "fp8"])
@pytest.mark.parametrize("heads", [(8, 8, 64), (16, 8, 128), (8, 4, 256)])
def test_many_sequences(heads: tuple[int, int, int], kind: str | None) -> None:
    """Each has the bits that it has alone, where every split has a block of its own."""
    queries, pairs, size = heads
    batch, capacity = 64, 2304
    g = torch.Generator("cuda").manual_seed(size)
    like = torch.zeros(1, dtype=torch.float16, device="cuda")
    codes, scales = new_codes((2, batch, pairs, capacity, size), kind, like)
    for i in range(2):
        values = torch.randn(codes[i].shape, generator=g, device="cuda").half()
        if scales is None:
            codes[i] = values
        else:
            codes[i], scales[i] = encoded(values, codes.dtype)
    cache = (*codes, *(() if scales is None else scales))
    qkv = torch.randn(batch, (queries + 2 * pairs) * size, generator=g, device="cuda").half()
    positions = torch.randint(0, capacity, (batch,), generator=g, device="cuda")
    positions[:4] = torch.tensor([capacity - 1, 255, 256, 2048])
    scratch = decode.attend_scratch(batch, *heads, capacity, codes.device)
    few = decode.attend_scratch(1, *heads, capacity, codes.device)
    starts = (positions - torch.randint(1, 900, (batch,), generator=g, device="cuda")).clamp(min=0)
    for given in ({}, {"window": 700}, {"starts": starts}):
        window = {"window": given.get("window", 0)}
        call = attend_call(qkv, queries, cache, positions, scratch, **window)._replace(starts=given.get("starts"))
        got = decode.attend(call)
        assert not scratch[1].any(), "ready for the next call"
        for i in range(0, batch, 5):
            one = tuple(t[i : i + 1] for t in cache)
            alone = attend_call(qkv[i : i + 1], queries, one, positions[i : i + 1], few, **window)
            if "starts" in given:
                alone = alone._replace(starts=starts[i : i + 1])
            assert torch.equal(decode.attend(alone)[0], got[i]), (given, i)
