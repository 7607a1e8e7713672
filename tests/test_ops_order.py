"""Columns that leave a norm or an activation in another order: the bits of the op, and of a gather behind it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import octofuse
from helpers import DEVICES, FLOATS

# In registers (a chain's, then a block's), ragged, beyond registers, and beyond a block's shared memory.
SHAPES = [(1, 8), (3, 7), (2, 2, 768), (33, 1024), (1, 4096), (40, 4104), (5, 8192), (2, 20000), (2, 20480), (3, 32768)]


def made(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(shape[-1])
    x, other = (torch.randn(shape, generator=g).to(dtype).to(device) for _ in range(2))
    weight, bias = (torch.randn(shape[-1], generator=g).to(dtype).to(device) for _ in range(2))
    order = torch.randperm(shape[-1], generator=g).int().to(device)
    return x, torch.cat([x, other], -1), weight, bias, order


def calls(inputs: tuple[Tensor, ...], constants: bool) -> list[tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    x, gates, weight, bias, _ = inputs
    return [
        (lambda *a, **o: octofuse.layer_norm(*a, constants=constants, **o), (x, weight, bias)),
        (lambda *a, **o: octofuse.rms_norm(*a, constants=constants, **o), (x, weight.float())),
        (lambda *a, **o: octofuse.gated_activation(*a, "gelu_tanh", constants=constants, **o), (gates,)),
        (lambda a, order=None: a if order is None else octofuse.reorder(a, order, constants=constants), (x,)),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_a_gather(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    inputs = made(shape, dtype, device)
    order = inputs[-1]
    for call, arguments in calls(inputs, False):
        assert torch.equal(call(*arguments, order=order), call(*arguments)[..., order.long()])


@pytest.mark.parametrize("device", DEVICES)
def test_views_and_empty(device: str) -> None:
    x, *_ = made((6, 140), torch.float16, device)
    order = torch.arange(99, -1, -1, dtype=torch.int32, device=device)
    unaligned = torch.cat([order[:1], order])[1:]
    view = x[::2, 3:103]
    want = view.flip(-1)
    assert torch.equal(octofuse.reorder(view, order), want)
    assert torch.equal(octofuse.reorder(view, unaligned), want)
    assert torch.equal(octofuse.rms_norm(view, order=unaligned), octofuse.rms_norm(view).flip(-1))
    assert octofuse.rms_norm(view[:0], order=order).shape == (0, 100)
    row = x[0, :100]
    assert torch.equal(octofuse.reorder(row, order), row.flip(-1))
    repeated = torch.zeros(100, dtype=torch.int32, device=device)
    assert torch.equal(octofuse.reorder(view, repeated), view[:, :1].expand(3, 100))
    for outside in (-1, 100, 2**31 - 1, -(2**31)):
        assert torch.equal(octofuse.reorder(view, repeated + outside), view[:, 99:].expand(3, 100))


BAD = {
    "another length": (lambda x, o: octofuse.reorder(x, o[:7]),
        ValueError, r"order: expected a contiguous tensor of shape \[16\], got \[7\]"),
    "int64": (lambda x, o: octofuse.rms_norm(x, order=o.long()), TypeError, r"order: expected dtype int32, got int64"),
    "apart": (lambda x, o: octofuse.layer_norm(x, order=torch.stack([o, o], 1)[:, 0]),
        ValueError, r"order: expected a contiguous tensor of shape \[16\]"),
    "none": (lambda x, o: octofuse.reorder(x, None), TypeError, r"order: expected an int32 tensor, got None"),
    "of gates": (lambda x, o: octofuse.gated_activation(x, order=o),
        ValueError, r"order: expected a contiguous tensor of shape \[8\], got \[16\]"),
    "int8 x": (lambda x, o: octofuse.reorder(x.to(torch.int8), o), TypeError, r"x: expected dtype float16"),
}  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", BAD)
def test_refusals(case: str, device: str) -> None:
    call, error, message = BAD[case]
    x, *_, order = made((4, 16), torch.float16, device)
    with pytest.raises(error, match=message):
        call(x, order)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_whole(device: str) -> None:
    inputs = made((3, 256), torch.float16, device)
    torch._dynamo.reset()
    for call, arguments in calls(inputs, False):
        compiled = torch.compile(lambda *a, call=call: call(*a[:-1], order=a[-1]), fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(*arguments, inputs[-1]), call(*arguments, order=inputs[-1]))


@pytest.mark.gpu
@pytest.mark.parametrize("constants", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 64), (1, 4096), (4, 2560), (32, 1032), (33, 4096), (2, 8192), (3, 32768)])
def test_a_captured_chain(shape: tuple[int, ...], dtype: torch.dtype, constants: bool) -> None:
    """Each op reads what the one before it has just written."""
    inputs = made(shape, dtype, "cuda")
    x, _, weight, bias, order = inputs

    def run() -> list[Tensor]:
        found = [octofuse.layer_norm(x, weight, bias, constants=constants, order=order)]
        for _ in range(6):
            found.append(octofuse.reorder(found[-1], order, constants=constants))
            found.append(octofuse.rms_norm(found[-1], weight, constants=constants, order=order))
            halves = torch.cat([found[-1].clamp(-3, 3)] * 2, -1)  # squared again and again they would overflow
            found.append(octofuse.gated_activation(halves, constants=constants, order=order))
        return found

    want = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        for tensor in got:
            tensor.fill_(7)
        graph.replay()
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
