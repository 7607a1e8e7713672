"""gemm_many, the kernel for many tokens beside weights of few bits, and gemm_split, whose blocks divide K: every kind and
tile beside fp64, bits that stay."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from helpers import Weight, check_captured, check_epilogues, many_tiles
from octofuse import _C

pytestmark = pytest.mark.gpu

KINDS = [("uniform", bits, zeros) for bits in range(1, 9) for zeros in (False, True)]
KINDS += [("planes", bits, False) for bits in (1, 3, 8)]
KINDS += [("sparse12", 7, False), ("codebook", 4, False), ("float8", 8, False)]
# Each tile, one round of them and more, and less than a tile.
MANY = [(208, 104), (1600, 2176), (4352, 1600), (10240, 256), (3584, 320), (8704, 1024), (12800, 192)]
# Of 1,111 tokens, with tiles that are not full.
PARTS = [(0, 1111), (0, 1), (5, 101), (0, 112), (0, 128), (2, 131), (8, 168), (100, 292), (9, 209), (3, 211), (7, 231),
         (1, 257), (200, 584), (300, 600), (3, 643)]  # fmt: skip


ENGINES = ("gemm_many", "gemm_split")
BUILT = "90a" in str(_C.build_info()["architectures"]).split(",")
TILES = {engine: many_tiles(engine) if BUILT else {} for engine in ENGINES}


@pytest.mark.parametrize(("kind", "bits", "zeros"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_tokens(kind: str, bits: int, zeros: bool, dtype: torch.dtype, engine: str) -> None:
    """At most twice torch's error; and a token's bits whatever stands beside it."""
    for (n, k), group in zip(MANY, (None, 32, 64, 128, 64, 256, 64), strict=True):
        if engine == "gemm_split" and k <= 128:
            continue
        weight = Weight(kind, bits, group, n, k, zeros, dtype)
        x = weight.tokens(1111)
        want = linear(x.double(), weight.exact, weight.bias.double())
        own = (linear(x, weight.rounded, weight.bias).double() - want).abs().max()
        together = weight.multiply(x, engine=engine)
        assert (together.double() - want).abs().max() <= 2 * own
        for first, end in PARTS:
            assert torch.equal(weight.multiply(x[first:end], engine=engine), together[first:end]), (n, first, end)


# M, N and K: every tile, and several for each block.
EPILOGUES = [(engine, *shape) for engine in ENGINES for shape in TILES[engine].values()]
EPILOGUES += [(engine, *shape) for engine in ENGINES for shape in (
    (777, 208, 320), (200, 8704, 320), (777, 3584, 320), (300, 8704, 1024), (640, 16896, 192),
    (1111, 3584, 320))]  # fmt: skip


def tile_of(engine: str, m: int, n: int, k: int) -> dict[str, Any]:
    return dict(_C.lowbit_select("uniform", 4, m, n, k, 64, False, engine, 90, 132, 232448))


@pytest.mark.parametrize(("engine", "m", "n", "k"), EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_many_tokens_epilogues(engine: str, m: int, n: int, k: int, dtype: torch.dtype) -> None:
    assert [len(tiles) for tiles in TILES.values()] == [16, 14]
    check_epilogues(m, n, k, dtype, engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_tile_of_8_bits(engine: str, dtype: torch.dtype) -> None:
    """They have 4 bits' tiles; groups of 32 with zero points leave their rings the fewest stages."""
    for tile, (m, n, k) in TILES[engine].items():
        chosen = _C.lowbit_select("uniform", 8, m, n, k, 32, True, engine, 90, 132, 232448)
        assert tuple(chosen["tile"]) == tile
        weight = Weight("uniform", 8, 32, n, k, True, dtype)
        weight.check(weight.tokens(m), engine=engine)


@pytest.mark.parametrize("k", [2560, 10368])
def test_more_tokens_than_a_band(k: int) -> None:
    """Tiles are walked through in bands of 10 MB of tokens, at least one tile: 2,048 tokens and, of tiles of 256, 256."""
    weight = Weight("uniform", 4, 128, 400, k, False, torch.float16)
    x = weight.tokens(4500)
    weight.check(x, engine="gemm_many")
    together = weight.multiply(x, engine="gemm_many")
    for first in (0, 1900, 2048, 4096, 4372):
        assert torch.equal(weight.multiply(x[first : first + 128], engine="gemm_many"), together[first : first + 128])


@pytest.mark.parametrize("constant_weight", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_tokens_in_a_chain(constant_weight: bool, engine: str) -> None:
    """Captured, each kernel let in before the last has finished; what one writes the next one reads."""
    weights = [Weight("uniform", bits, 128, 1536, 1536, False, torch.float16) for bits in (4, 8, 3)]
    for weight in weights:
        weight.scale *= 0.1  # so that values stay as large as they were

    def chain(x: Tensor) -> Tensor:
        for weight in weights * 3:
            x = weight.multiply(x, constant_weight=constant_weight, engine=engine)
            x = weight.multiply(x, residual=x, bias=None, constant_weight=constant_weight, engine=engine)
        return x

    assert torch.isfinite(check_captured(chain, weights[0].tokens(700) * 0.1)).all()


def shared() -> dict[tuple[str, ...], tuple[int, int, int]]:
    """Engines and tiles that clusters share: the smallest M, N and K for each where 64 tokens have whole tiles."""
    found: dict[tuple[str, ...], tuple[int, int, int]] = {}
    shapes = list(
        itertools.product(
            (112, 128, 150, 200, 250, 288, 300, 333, 400, 520, 777),
            (1792, 6912, 8576, 8704, 8832, 9216, 12800, 17024, 17152),
            (1152, 2176, 3072, 4224),
        )
    )
    for engine in ENGINES:
        for m, n, k in sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2]):
            chosen = tile_of(engine, m, n, k)
            if chosen["shares"] and not tile_of(engine, 64, n, k)["shares"]:
                found.setdefault((engine, *map(str, chosen["tile"])), (m, n, k))
    return found


SHARED = shared() if BUILT else {}


@pytest.mark.parametrize("tile", SHARED, ids="-".join)
@pytest.mark.parametrize(("kind", "bits"), [("uniform", 4), ("uniform", 3), ("codebook", 4), ("planes", 3)])
def test_tiles_that_blocks_share(tile: tuple[str, ...], kind: str, bits: int) -> None:
    """A part of K that another cluster has begun: the bits of tokens whose tiles are whole, in every call."""
    engine, (m, n, k) = tile[0], SHARED[tile]
    weight = Weight(kind, bits, 128, n, k, False, torch.float16)
    x = weight.tokens(m)
    want = linear(x.double(), weight.exact, weight.bias.double())
    own = (linear(x, weight.rounded, weight.bias).double() - want).abs().max()
    together = weight.multiply(x, engine=engine)
    assert (together.double() - want).abs().max() <= 2 * own
    for first in (0, 40, m - 64):
        assert torch.equal(weight.multiply(x[first : first + 64], engine=engine), together[first : first + 64]), first
    for _ in range(10):
        assert torch.equal(weight.multiply(x, engine=engine), together)


def test_calls_that_share_tiles_meet() -> None:
    """In a graph that is run again and again, and on two streams at once, nobody takes another call's sums."""
    assert len(SHARED) >= 14, "most tiles are shared somewhere"
    assert {engine for engine, _, channels, _ in SHARED if channels == "192"} == set(ENGINES)
    for engine in ENGINES:
        m, n, k = next(shape for tile, shape in SHARED.items() if tile[0] == engine)
        weights = [Weight("uniform", 4, 128, n, k, False, torch.float16) for _ in range(2)]
        tokens = [weight.tokens(m) for weight in weights]
        want = [weight.multiply(x, engine=engine) for weight, x in zip(weights, tokens, strict=True)]
        streams = [torch.cuda.Stream() for _ in weights]
        torch.cuda.synchronize()
        got: list[list[Tensor]] = [[], []]
        for _ in range(20):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    got[i].append(weights[i].multiply(tokens[i], engine=engine))
        torch.cuda.synchronize()
        assert all(torch.equal(y, want[i]) for i in range(2) for y in got[i])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = weights[0].multiply(tokens[0], engine=engine)
        x, first = tokens[0].clone(), want[0]
        for scale in (1, -1) * 10:  # in turn, so that another run's sums are not right by chance
            tokens[0].copy_(x * scale)
            graph.replay()
            assert torch.equal(y, weights[0].multiply(x * scale, engine=engine))
        assert torch.equal(weights[0].multiply(x, engine=engine), first)
