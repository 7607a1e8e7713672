"""Kernels that overlap their predecessors inside a captured graph give the bits of the same calls, one after another."""

from __future__ import annotations

import itertools

import pytest
import torch

import octofuse
from helpers import int8, operands
from octofuse.ops.measure import overlap

pytestmark = pytest.mark.gpu
LENGTH = 24


def layers(m: int, width: int, seed: int) -> tuple[torch.Tensor, list[tuple[torch.Tensor, ...]]]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, width, generator=g).half().cuda()
    made = []
    for _ in range(LENGTH):
        w = int8((width, width), g).cuda()
        w_scale = ((torch.rand(width, generator=g) + 0.5) / (74 * width**0.5)).cuda()
        made.append((w, w_scale, torch.randn(width, generator=g).half().cuda() * 0.1))
    return x, made


def chain(x: torch.Tensor, made: list[tuple[torch.Tensor, ...]], engine: str, constant: bool) -> list[torch.Tensor]:
    outputs = []
    for w, w_scale, bias in made:
        q, scale = octofuse.quantize_per_token(x)
        x = octofuse.i8f16_linear(q, w, scale, w_scale, bias, residual=x, engine=engine, constant_weight=constant)
        outputs.append(x)
    return outputs


CASES = list(
    itertools.product(
        (1, 3, 8, 16, 33, 64, 100, 256), (256, 768, 2048), ("auto", "wgmma", "skinny", "cutlass_sm80"), (False, True)
    )
)


@pytest.mark.parametrize(("m", "width", "engine", "constant"), CASES)
def test_a_long_chain_keeps_its_bits(m: int, width: int, engine: str, constant: bool) -> None:
    if engine == "skinny" and m > 32:
        pytest.skip("larger than its tiles")
    x, made = layers(m, width, m + width)
    want = [out.clone() for out in chain(x, made, engine, constant)]
    for allowed in (True, False):
        graph = torch.cuda.CUDAGraph()
        with overlap(allowed), torch.cuda.graph(graph):
            got = chain(x, made, engine, constant)
        for _ in range(5):
            for out in got:
                out.fill_(7)
            graph.replay()
            torch.cuda.synchronize()
            for one, other in zip(got, want, strict=True):
                assert torch.equal(one, other)


FEW, SHORT = (8, 37888, 3584), (2048, 8192, 128)


@pytest.mark.parametrize(
    ("tile", "shape"),
    [
        ("16x64_swapped_x2", FEW),
        ("32x64_swapped_x2", FEW),
        ("16x64_swapped_split2_x2", FEW),
        ("128x128_pingpong", SHORT),
        ("128x192_pingpong_2x1", SHORT),
    ],
)
def test_one_call_in_many_thousands(tile: str, shape: tuple[int, int, int]) -> None:
    """K slices take turns with a ring that goes round: while two shared its stages, one call in some 80,000 failed. And
    warpgroups that take turns with tiles of a K so short that one has hardly begun when it hands over."""
    p = operands(*shape, "cuda")
    want = octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, engine="naive")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [
            octofuse.i8f16_linear(p.x, p.w, p.x_scale, p.w_scale, p.bias, engine=f"wgmma/{tile}", constant_weight=True)
            for _ in range(20)
        ]
    for _ in range(100):
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()
        for out in got:
            assert torch.equal(out, want)


def test_inputs_may_change_between_replays() -> None:
    x, made = layers(5, 768, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(x, made, "auto", True)
    for seed in range(8):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).half())
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got[-1], chain(x, made, "auto", False)[-1])


@pytest.mark.parametrize("m", [1, 7, 40, 130])
def test_a_weight_that_the_graph_writes(m: int) -> None:
    """Without the promise of a constant weight nothing is read early: the weight may come from the kernel before."""
    p = operands(m, 512, 768, "cuda")
    source, target = p.w.clone(), torch.zeros_like(p.w)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source)
        got = octofuse.i8f16_linear(p.x, target, p.x_scale, p.w_scale, p.bias)
    for seed in range(6):
        source.copy_(int8(tuple(source.shape), torch.Generator().manual_seed(seed)))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, octofuse.i8f16_linear(p.x, source, p.x_scale, p.w_scale, p.bias))
