"""Passes over rows that ranks have parts of: the bits of a gather and the pass that one GPU runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from inbox import BULK, CAPACITY, Alone, on_gpu, rows_call
from octofuse import _C
from octofuse.ops._calls import RowsCall
from octofuse.ops.peers import MOST_ROWS, NORM_COLUMNS, WIDE_NORM_ROWS

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
# What is done to a row, and to what it is quantised.
PASSES: dict[str, dict[str, Any]] = {
    "copy": {},
    "int8": {"quantize": True},
    "int8, given": {"quantize": True, "scale": 0.03},
    "e4m3": {"quantize": True, "q_dtype": E4M3},
}
OPS = ("copy", "rms_norm", "layer_norm", "gated_activation")
SIZES = ((8,), (40, 8, 264), (384, 384), (2048, 2048), (3072, 2048, 3072), (8192, 8192), (14336, 14336), (24576, 24576))


def parts_of(rows: int, sizes: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    made = torch.Generator().manual_seed(rows + 7 * sum(sizes))
    return [torch.randn(rows, size, generator=made).to(dtype) * (1 + r) for r, size in enumerate(sizes)]


def weights(op: str, cols: int, dtype: torch.dtype) -> dict[str, Any]:
    if op == "gated_activation":
        return {"activation": "silu"}
    if not op.endswith("norm"):
        return {}
    weight = (torch.arange(cols) % 17 / 8 - 1).to(dtype)
    return {"weight": weight, "bias": weight.flip(0) if op == "layer_norm" else None}


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    def bits(tensor: Tensor) -> Tensor:
        return tensor.view(torch.uint8).cpu() if tensor.element_size() == 1 else tensor.cpu()

    return len(got) == len(want) and all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def fits(op: str, sizes: tuple[int, ...], rows: int) -> bool:
    return max(sizes) * rows * 2 <= CAPACITY and (sum(sizes) <= 16384 or not op.endswith("norm"))


CASES = [(op, sizes, rows) for op in OPS for sizes in SIZES for rows in (1, 3, 33, MOST_ROWS) if fits(op, sizes, rows)]


@pytest.mark.parametrize(("op", "sizes", "rows"), CASES)
def test_rows_are_gathered(op: str, sizes: tuple[int, ...], rows: int) -> None:
    rank = len(sizes) // 2
    alone = Alone(rank, len(sizes))
    clusters = torch.cuda.get_device_capability() == (9, 0)
    for dtype in (torch.float16, torch.bfloat16):
        for name, options in PASSES.items():
            affine = weights(op, sum(sizes), torch.float32 if name == "e4m3" else dtype)
            gates = parts_of(rows, sizes, dtype) if op == "gated_activation" else None
            for call_number in range(2):
                parts = [part + call_number for part in parts_of(rows, sizes, dtype)]
                whole, own = torch.cat(parts, 1), parts[rank]
                if gates is not None:  # every rank multiplies by its own gates before it sends
                    whole = torch.cat([*gates, whole], 1)
                    own = torch.cat([gates[rank], own], 1)
                    pairs = [torch.cat(pair, 1).cuda() for pair in zip(gates, parts, strict=True)]
                    parts = [_C.rows(rows_call(pair, op, **affine))[0].cpu() for pair in pairs]
                want = _C.rows(on_gpu(rows_call(whole, op, **affine, **options)))
                call = on_gpu(rows_call(own, op, **affine, **options))
                alone.expect(parts)
                pays = "norm" not in op or sum(sizes) <= NORM_COLUMNS or (clusters and rows <= WIDE_NORM_ROWS)
                assert alone.inboxes.takes_rows(call, sizes) == pays
                # Clusters may share a row, as on compute capability 9.0, or a block has it for itself.
                got = alone.inboxes.rows(call, sizes, clusters=call_number == 0)
                assert equal(got, want), (dtype, name, call_number)
                assert all(torch.equal(one, parts[rank]) for one in alone.sent(parts[rank]))
    assert bool((alone.inboxes.calls == 2 * 2 * len(PASSES)).all())


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("cols", [8, 768, 4096, 8192, 16384])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_are_added(ranks: int, cols: int, rows: int) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        alone = Alone(ranks - 1, ranks)
        sizes = (cols,) * ranks
        for options in PASSES.values():
            parts = parts_of(rows, sizes, dtype)
            total = torch.zeros(rows, cols)
            for part in parts:
                total += part.float()
            want = [*_C.rows(on_gpu(rows_call(total.to(dtype), "layer_norm", **options))), total.to(dtype)]
            call = on_gpu(rows_call(parts[-1], "layer_norm", **options))
            for clusters in (True, False):
                alone.expect(parts)
                assert equal(alone.inboxes.rows(call, sizes, adds=True, clusters=clusters), want)
            alone.expect(parts)
            alone_call = on_gpu(rows_call(parts[-1], "copy"))
            assert equal(alone.inboxes.rows(alone_call, sizes, adds=True), [total.to(dtype)])


@pytest.mark.parametrize("number", [0, 2**31 + 5, 2**32 - 3])
@pytest.mark.parametrize("what", ["rows", "sum", "gather", "bulk"])
def test_it_waits(what: str, number: int) -> None:
    """For what comes while it runs, and around the end of the call numbers."""
    alone, sizes = Alone(1, 2, number), (2048, 2048)
    for _ in range(4):
        parts = parts_of(320 if what == "bulk" else 2, sizes, torch.float16)
        parts = [part + torch.randn(()) for part in parts]
        own, whole = parts[1].cuda(), torch.cat(parts, 1)
        with alone.late():
            alone.expect_bulk(parts) if what == "bulk" else alone.expect(parts)
        if what == "rows":
            got, want = (
                alone.inboxes.rows(rows_call(own, "rms_norm"), sizes)[0],
                _C.rows(rows_call(whole, "rms_norm"))[0],
            )
        elif what == "sum":
            got = alone.inboxes.rows(rows_call(own, "copy"), sizes, adds=True)[0]
            want = (parts[0].float() + parts[1].float()).half()
        else:
            got, want = alone.inboxes.gather(own, sizes), whole
        assert torch.equal(got.cpu(), want)


def test_weights_in_the_middle_of_a_tensor() -> None:
    """At addresses that a kernel could not read in vectors."""
    alone, x = Alone(0, 1), torch.randn(2, 64).half()
    flat = torch.rand(2, 67).half().cuda()
    views = {"weight": flat[0, 3:], "bias": flat[1, 1:65]}
    got = alone.inboxes.rows(on_gpu(rows_call(x, "layer_norm"))._replace(**views), (64,))
    want = _C.rows(rows_call(x, "layer_norm", **{name: view.cpu().clone() for name, view in views.items()}))
    assert equal(got, want)


@pytest.mark.parametrize("cols", [2048, 4096, 8192])
def test_a_captured_row_of_calls(cols: int) -> None:
    """Each reads what the one before has written, and counts on: rank 0 of 1 alone, whose parts are whole rows."""
    alone = Alone(0, 1)
    x = torch.randn(2, cols, dtype=torch.float16).cuda()
    weight = torch.rand(cols).cuda()

    def chain(x: Tensor) -> Tensor:
        for _ in range(5):
            x = alone.inboxes.rows(rows_call(x, "rms_norm", weight=weight), (cols,))[0]
            x = alone.inboxes.gather(x, (cols,))
        return alone.inboxes.rows(rows_call(x, "copy", quantize=True), (cols,))[0]

    want = chain(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x)
    for _ in range(3):
        graph.replay()
    assert torch.equal(got, want)
    assert bool((alone.inboxes.calls == 4 * 11).all())


@pytest.mark.parametrize("size", [2, 20, 4096, 1 << 17])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_gather(rows: int, size: int) -> None:
    sizes = (size, 2 * size, size)
    alone = Alone(2, 3)
    fits = 2 * size * rows * 4 <= CAPACITY
    assert alone.inboxes.takes(torch.empty(rows, size), sizes) == (fits or 2 * size * 4 <= BULK)
    for number in range(3 if fits else 0):
        parts = [part + number for part in parts_of(rows, sizes, torch.float32)]
        alone.expect(parts)
        got = alone.inboxes.gather(parts[2].cuda(), sizes)
        assert torch.equal(got.cpu(), torch.cat(parts, 1))
        assert all(torch.equal(one, parts[2]) for one in alone.sent(parts[2]))
    assert bool((alone.inboxes.calls == alone.number).all())


@pytest.mark.parametrize("rows", [300, 320, 600])
@pytest.mark.parametrize("rank", range(3))
def test_a_gather_in_bulk(rank: int, rows: int) -> None:
    """Of more than travels with its numbers; 600 rows in two pieces."""
    sizes = (2048, 1032, 2040)
    alone = Alone(rank, 3)
    for number in range(3):
        parts = [part + number for part in parts_of(rows, sizes, torch.float16)]
        pieces = alone.expect_bulk(parts)
        assert len(pieces) == (2 if rows > 320 else 1)
        assert alone.inboxes.takes(parts[rank], sizes)
        got = alone.inboxes.gather(parts[rank].cuda(), sizes)
        assert torch.equal(got.cpu(), torch.cat(parts, 1))
        for other, memory in enumerate(alone.memories):
            if other != rank:
                data, flags = alone.bulk(memory, rank)
                last = pieces[-1][rank].contiguous().view(torch.int32).flatten()
                assert torch.equal(data[: last.numel()].cpu(), last)
                assert int(flags[0]) == alone.number
    assert bool((alone.inboxes.calls == alone.number).all())


def test_a_scale_of_parts() -> None:
    """Rows of zeros find scale 0; given scales, one for each row."""
    x = torch.randn(40, 128, dtype=torch.float16)
    x[3] = 0
    call = rows_call(x, "copy", quantize=True)
    whole, part = _C.rows(call), _C.rows(call._replace(of_part=True))
    assert float(whole[1][3]) == 1
    assert float(part[1][3]) == 0
    assert torch.equal(part[1][torch.arange(40) != 3], whole[1][torch.arange(40) != 3])
    given = call._replace(scale=whole[1], of_part=True)
    assert equal(_C.rows(given), whole[:1])
    assert equal(_C.rows(on_gpu(call._replace(of_part=True))), part)
    assert equal(_C.rows(on_gpu(given)), whole[:1])
    with pytest.raises(ValueError, match="scale: expected one element, got shape"):
        _C.rows(given._replace(of_part=False))


def refused(call: RowsCall, sizes: tuple[int, ...], adds: bool = False) -> str:
    with pytest.raises((TypeError, ValueError)) as found:
        Alone(0, len(sizes)).inboxes.rows(call, sizes, adds=adds)
    return str(found.value)


def test_refusals() -> None:
    x = torch.randn(2, 64, dtype=torch.float16).cuda()
    assert "x: expected dtype" in refused(rows_call(x.float(), "copy"), (64, 64))
    assert "x: expected 32 columns, got 64" in refused(rows_call(x, "copy"), (32, 64))
    assert "x: expected 64 columns, got 32" in refused(rows_call(x, "gated_activation", activation="silu"), (64, 64))
    assert "sizes: expected rows of multiples of 16 bytes" in refused(rows_call(x, "copy"), (64, 12))
    assert "residual: expected None, got a tensor" in refused(rows_call(x, "rms_norm", residual=x), (64, 64))
    assert "a copy of at most 256 rows" in refused(rows_call(x, "activation", activation="silu"), (64, 64))
    assert "a copy of at most 256 rows" in refused(rows_call(x.new_zeros(257, 64), "copy"), (64, 64))
    assert "and 16384 columns" in refused(rows_call(x.new_zeros(1, 16384), "rms_norm"), (16384, 8))
    blocks = rows_call(x, "copy", quantize=True, q_dtype=E4M3, q_block=True)
    inboxes = Alone(0, 2).inboxes
    assert inboxes.takes_rows(rows_call(x, "copy"), (64, 64))
    for other in (blocks, rows_call(x, "activation", activation="silu"), rows_call(x, "copy", constants=False),
                  rows_call(x, "copy", quantize=True, of_part=True)):  # fmt: skip
        assert not inboxes.takes_rows(other, (64, 64))
    assert not inboxes.takes_rows(rows_call(x, "gated_activation", activation="silu"), (64, 64), adds=True)
    assert "a copy of at most 256 rows" in refused(blocks, (64, 64))
    assert "weight: expected a contiguous tensor of shape [128]" in refused(
        rows_call(x, "rms_norm", weight=torch.ones(64).cuda()), (64, 64)
    )
