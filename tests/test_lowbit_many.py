"""gemm_many, the kernel for many tokens beside weights of few bits, and gemm_split, whose blocks divide K: every kind and
tile beside fp64, bits that stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

import octofuse
from helpers import Weight, check_captured

pytestmark = pytest.mark.gpu

KINDS = [("uniform", bits, zeros) for bits in range(1, 9) for zeros in (False, True)]
KINDS += [("planes", bits, False) for bits in (1, 3, 8)]
KINDS += [("sparse12", 7, False), ("codebook", 4, False), ("float8", 8, False)]
# Each tile of gemm_many, one round of them and more, and less than a tile.
MANY = [(208, 104), (1600, 2176), (4352, 1600), (10240, 256), (3584, 320), (16896, 256)]
# Of 1,111 tokens, with tiles that are not full.
PARTS = [(0, 1111), (0, 1), (5, 105), (0, 128), (2, 131), (100, 292), (9, 209), (1, 257), (200, 584), (3, 643)]


ENGINES = ("gemm_many", "gemm_split")


@pytest.mark.parametrize(("kind", "bits", "zeros"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_tokens(kind: str, bits: int, zeros: bool, dtype: torch.dtype, engine: str) -> None:
    """At most twice torch's error; and a token's bits whatever stands beside it."""
    for (n, k), group in zip(MANY, (None, 32, 64, 128, 64, 256), strict=True):
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


# Tiles of 128 x 128, 128 x 192, 192 x 128, 256 x 128 and 128 x 256 (tokens, channels); the third, fifth and last more
# than once a block.
EPILOGUES = [(208, 777), (10240, 256), (10240, 777), (16896, 192), (16896, 640), (3584, 1111), (28672, 333)]


@pytest.mark.parametrize(("n", "m"), EPILOGUES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("engine", ENGINES)
def test_many_tokens_epilogues(n: int, m: int, dtype: torch.dtype, engine: str) -> None:
    weight = Weight("uniform", 4, 64, n, 320, False, dtype)
    x, residual = weight.tokens(m), torch.randn(m, n + 16, device="cuda").to(dtype)[:, 3 : 3 + n]
    exact = x.double() @ weight.exact.t()
    step = torch.finfo(dtype).eps
    scale = torch.rand(m, device="cuda") + 0.5
    for activation, function in ((None, lambda y: y), ("relu", torch.relu), ("gelu", gelu),
                                 ("silu", torch.nn.functional.silu)):  # fmt: skip
        for bias in (None, weight.bias):
            for added in (None, residual):
                got = weight.multiply(x, activation=activation, bias=bias, residual=added, engine=engine).double()
                want = function(exact + (0 if bias is None else bias.double()))
                want += 0 if added is None else added.double()
                assert ((got - want).abs() <= 4 * step * (want.abs() + exact.abs().amax() / 8)).all(), (
                    activation,
                    bias,
                )
    numbers = torch.randint(-128, 128, (m, 320), device="cuda", dtype=torch.int8)
    got = weight.multiply(numbers, x_scale=scale, engine=engine).double()
    want = linear(numbers.double() * scale.double().unsqueeze(1), weight.exact, weight.bias.double())
    assert (got - want).abs().max() <= 4 * step * want.abs().max()
    plain = weight.multiply(x, activation="relu", engine=engine)
    out_scale = float(plain.float().amax()) / 100
    got = weight.multiply(x, activation="relu", out_scale=out_scale, engine=engine)
    assert got.dtype == torch.int8
    assert (got.int() - octofuse.quantize_per_tensor(plain, out_scale).int()).abs().max() <= 1
    gated = weight.multiply(x, activation="silu", gated=True, engine=engine)
    both = weight.multiply(x, engine=engine)
    assert torch.equal(gated, octofuse.gated_activation(both, "silu"))
    odd = Weight("uniform", 4, None, n - 5, 320, False, dtype)
    x = odd.tokens(m)
    want = linear(x.double(), odd.exact, odd.bias.double())
    assert (odd.multiply(x, engine=engine).double() - want).abs().max() <= 4 * step * want.abs().max()


def test_more_tokens_than_a_band() -> None:
    """Tiles are walked through in bands of 2,048 tokens."""
    weight = Weight("uniform", 4, 128, 400, 256, False, torch.float16)
    x = weight.tokens(4500)
    weight.check(x)
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
