"""gemm's blocks that share the k-blocks of all tiles (gemm_stream.cuh): 5 to 64 tokens beside more than 16,896 channels."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from helpers import Weight, check_epilogues
from octofuse import _C

KINDS = [("uniform", bits, zeros) for bits in range(1, 9) for zeros in (False, True, 1)]
KINDS += [("planes", bits, False) for bits in (1, 3, 7, 8)]
KINDS += [("sparse12", 7, False), ("codebook", 4, False), ("float8", 8, False)]
# Of 132 SMs: 133 tiles, slices of 5 and 4 k-blocks, most cuts within tiles; 148, the last one ragged; 224; two whole
# tiles for each block; 134, with more k-blocks than a ring has stages.
SHAPES = [(17024, 1152, None), (18864, 544, 32), (28672, 768, 128), (33792, 384, 64), (17040, 4224, 128)]


def shares(m: int, n: int, k: int, bits: int = 4) -> bool:
    return bool(_C.lowbit_select("uniform", bits, m, n, k, 128, False, "gemm", 90, 132, 232448)["shares"])


@pytest.mark.skipif("90a" not in str(_C.build_info()["architectures"]).split(","), reason="no sm_90a kernels")
def test_where_blocks_share_tiles() -> None:
    assert all(shares(m, n, k) for m, n, k in ((5, 16904, 256), (32, 28672, 4096), (64, 151936, 4096)))
    assert not any(shares(m, n, k) for m, n, k in ((64, 16896, 4096), (65, 28672, 4096), (16, 28672, 128)))
    assert shares(32, 28672, 4096, 8)
    assert not shares(33, 28672, 4096, 8)
    assert all(shares(64, n, k, bits) for n, k, _ in SHAPES for bits in (1, 7))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "bits", "zeros"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shared_k_blocks(kind: str, bits: int, zeros: bool | int, dtype: torch.dtype) -> None:
    """At most twice torch's error, and the bits that blocks with tiles of their own give 65 tokens and more."""
    for n, k, group in SHAPES:
        weight = Weight(kind, bits, group, n, k, zeros, dtype)
        x = weight.tokens(100)
        want = linear(x.double(), weight.exact, weight.bias.double())
        own = (linear(x, weight.rounded, weight.bias).double() - want).abs().max()
        together = weight.multiply(x, engine="gemm")
        assert (together.double() - want).abs().max() <= 2 * own
        for first, end in ((0, 5), (1, 17), (30, 62), (60, 93), (0, 47), (36, 100)):
            got = weight.multiply(x[first:end], engine="gemm")
            assert torch.equal(got, together[first:end]), (n, first, end)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [13, 50])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_shared_k_blocks_epilogues(m: int, dtype: torch.dtype) -> None:
    assert shares(m, 18848, 1152)
    check_epilogues(m, 18848, 1152, dtype, "gemm")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_epilogues_on_a_cpu(dtype: torch.dtype) -> None:
    check_epilogues(13, 208, 640, dtype, "auto", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [16, 40])
def test_calls_that_share_k_blocks_meet(m: int) -> None:
    """In a graph that is run again and again, in a chain of kernels, and on two streams at once, nobody takes another
    call's sums."""
    weights = [Weight("uniform", 4, 128, 21504, 3072, 8, torch.float16) for _ in range(2)]
    tokens = [weight.tokens(m, seed=i) for i, weight in enumerate(weights)]
    want = [weight.multiply(x, engine="gemm") for weight, x in zip(weights, tokens, strict=True)]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    got: list[list[torch.Tensor]] = [[], []]
    others = [weight.multiply(x * 2, engine="gemm") for weight, x in zip(weights, tokens, strict=True)]
    for turn in range(20):  # other tokens in each turn, so that another call's sums are not right by chance
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                x = tokens[i] * (turn % 2 + 1)
                got[i].append(weights[i].multiply(x, engine="gemm", constant_weight=True))
    torch.cuda.synchronize()
    assert all(torch.equal(y, (want, others)[turn % 2][i]) for i in range(2) for turn, y in enumerate(got[i]))
    graph = torch.cuda.CUDAGraph()
    x = tokens[0].clone()
    with torch.cuda.graph(graph):
        outs = [weights[0].multiply(x, engine="gemm", constant_weight=True) for _ in range(3)]
        x.mul_(-1)
        outs.append(weights[0].multiply(x, engine="gemm", constant_weight=True))
    for scale in (1, -1) * 10:
        x.copy_(tokens[0] * scale)
        graph.replay()
        expected = weights[0].multiply(tokens[0] * scale, engine="gemm")
        assert all(torch.equal(y, expected) for y in outs[:3])
        assert torch.equal(outs[3], weights[0].multiply(tokens[0] * -scale, engine="gemm"))
