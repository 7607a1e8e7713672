"""The kernels for weights of 1 to 8 bits: every width, group and ragged shape against fp64, and bits that stay."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu, linear

import octofuse
from helpers import Weight, check_captured
from octofuse import _C
from octofuse.ops.dequantized import dequantize_lowbit

pytestmark = pytest.mark.gpu

SHAPES = ((48, 128), (33, 100), (1, 300), (130, 1600), (16, 4097))
TOKENS = (1, 2, 3, 4, 5, 8, 9, 16, 33, 64, 65, 200, 300)


KINDS = [("uniform", bits, zeros) for bits in range(1, 9) for zeros in (False, True)]
KINDS += [("planes", bits, False) for bits in range(1, 9)] + [("sparse12", 7, False)]
KINDS += [("codebook", 4, False), ("float8", 8, False)]


@pytest.mark.parametrize(("kind", "bits", "zeros"), KINDS)
@pytest.mark.parametrize("group", [None, 32, 64, 128, 256])
def test_products(kind: str, bits: int, zeros: bool, group: int | None) -> None:
    for n, k in (*SHAPES, (3216, 256)):
        weight = Weight(kind, bits, group, n, k, zeros, torch.float16)
        assert torch.equal(weight.dequantized(), weight.rounded)
        for m in TOKENS if (n, k) == (130, 1600) else (1, 6, 40):
            weight.check(weight.tokens(m))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_one_zero_for_all(bits: int, dtype: torch.dtype) -> None:
    """By every kernel, with the bits of a tensor that is full of it."""
    for zero, (n, k), group in itertools.product(
        (0, 1 << bits - 1, (1 << bits) - 1), ((48, 300), (208, 1600)), (None, 32, 128)
    ):
        weight = Weight("uniform", bits, group, n, k, zero, dtype)
        assert torch.equal(
            dequantize_lowbit(weight.packed, weight.scale, zero, None, "uniform", bits, group, k), weight.rounded
        )
        full = torch.full(weight.scale.shape, zero, dtype=torch.uint8, device="cuda")
        for m in (1, 3, 24, 100):
            x = weight.tokens(m)
            weight.check(x)
            want = octofuse.woq_linear(x, weight.packed, weight.scale, full, weight.bias, bits=bits, group=group)
            assert torch.equal(weight.multiply(x), want)


@pytest.mark.parametrize(
    ("kind", "bits"), [("uniform", 4), ("uniform", 8), ("planes", 3), ("sparse12", 7), ("codebook", 4), ("float8", 8)]
)
def test_bfloat16_and_long_rows(kind: str, bits: int) -> None:
    for dtype, (n, k) in itertools.product((torch.bfloat16, torch.float16), ((200, 768), (64, 16384), (40, 49152))):
        weight = Weight(kind, bits, 128, n, k, False, dtype)
        for m in (1, 4, 8, 24):
            weight.check(weight.tokens(m))


SOME = [("uniform", 4), ("uniform", 3), ("uniform", 6), ("planes", 2), ("sparse12", 7), ("codebook", 4)]
SOME += [("float8", 8), ("uniform", 8), ("uniform", 2), ("uniform", 5)]
# Each way to cut N and K into blocks.
BLOCKS = [(200, 104), (200, 1600), (200, 12288), (4096, 1040), (4352, 1600), (6144, 512), (10240, 256), (13312, 256)]


@pytest.mark.parametrize(("kind", "bits"), SOME)
@pytest.mark.parametrize(("n", "k"), BLOCKS)
def test_every_block(kind: str, bits: int, n: int, k: int) -> None:
    weight = Weight(kind, bits, 64, n, k, kind == "uniform" and n % 16 == 0, torch.bfloat16)
    for m in (24, 50, 120, 250):
        weight.check(weight.tokens(m), engine="gemm")


@pytest.mark.parametrize(("n", "k"), [(4096, 2304), (1920, 4096)])
def test_most_scales(n: int, k: int) -> None:
    """8 planes in groups of 32, whose scales are half as many bytes as their codes: rings have room for two stages."""
    weight = Weight("planes", 8, 32, n, k, False, torch.float16)
    for m in (24, 40, 64, 100):
        weight.check(weight.tokens(m), engine="gemm")


HALVES = [("uniform", bits, zeros) for bits in (2, 3, 4, 5, 8) for zeros in (True, 1)]  # 1: the zero of all
HALVES += [("sparse12", 7, False), ("codebook", 4, False), ("float8", 8, False)]


@pytest.mark.parametrize(("kind", "bits", "zeros"), HALVES)
@pytest.mark.parametrize("group", [32, 64, 128])
def test_stages_of_half_a_k_block(kind: str, bits: int, zeros: bool | int, group: int) -> None:
    """Tiles of 64 channels by 64 and 128 tokens, with scales and zero points for either half, and stages of the ring that
    are filled again and again."""
    for k in (8192, 16512):
        weight = Weight(kind, bits, group, 1024, k, zeros, torch.float16)
        x = weight.tokens(128)
        want = weight.multiply(x, engine="gemm")
        weight.check(x, engine="gemm")
        weight.check(x[:50], engine="gemm")
        for m in (33, 50, 64, 100):
            assert torch.equal(weight.multiply(x[:m], engine="gemm"), want[:m]), m


@pytest.mark.parametrize(("kind", "bits"), SOME)
@pytest.mark.parametrize(("n", "k"), BLOCKS)
def test_a_token_keeps_its_bits(kind: str, bits: int, n: int, k: int) -> None:
    """Whatever stands beside it, and again: up to 4 tokens, and beyond by "gemm"."""
    most = 256
    weight = Weight(kind, bits, 128 if k > 128 else None, n, k, False, torch.float16)
    x = weight.tokens(most)
    alone = torch.cat([weight.multiply(x[i : i + 1]) for i in range(8)])
    for m in (2, 3, 4):
        assert torch.equal(weight.multiply(x[:m]), alone[:m]), m
        assert torch.equal(weight.multiply(x[8 - m : 8]), alone[8 - m :]), m
    together = weight.multiply(x, engine="gemm")
    for m in (5, 8, 9, 16, 31, 32, 33, 64, 65, 100, most // 2 + 2, most - 1):
        engine = "auto" if 8 < m <= 64 else "gemm"
        assert torch.equal(weight.multiply(x[:m], engine=engine), together[:m]), m
        assert torch.equal(weight.multiply(x[most - m :], engine=engine), together[most - m :]), m
    assert torch.equal(weight.multiply(x[:64].view(4, -1, k)).view(64, -1), together[:64])


@pytest.mark.parametrize(("kind", "bits"), [("uniform", 4), ("uniform", 2), ("uniform", 8), ("planes", 3), *SOME[4:7]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_in_front(kind: str, bits: int, dtype: torch.dtype) -> None:
    """The bits of the norm as an op of its own, in the kernel (up to 4 tokens) or in front of it; views, ragged K."""
    for n, k, group in (
        (48, 128, None),
        (2304, 768, 64),
        (200, 1600, 128),
        (130, 4104, 128),
        (48, 12288, 128),
        (33, 100, 32),
    ):
        weight = Weight(kind, bits, group, n, k, False, dtype)
        more = {"generator": torch.Generator("cuda").manual_seed(k), "device": "cuda"}
        gain, shift = torch.randn(k, **more), torch.randn(k, **more)
        for m in (1, 2, 3, 4, 7):
            x = torch.randn(m, k + 16, **more).to(dtype)[:, 8 : 8 + k] * 3 + 1
            for affine in (dtype, torch.float32):
                w, b = gain.to(affine), shift.to(affine)
                want = weight.multiply(octofuse.layer_norm(x, w, b, 1e-3))
                assert torch.equal(weight.multiply(x, norm="layer_norm", norm_weight=w, norm_bias=b, eps=1e-3), want)
                want = weight.multiply(octofuse.rms_norm(x, w, 1e-3))
                assert torch.equal(weight.multiply(x, norm="rms_norm", norm_weight=w, eps=1e-3), want)
            want = weight.multiply(octofuse.layer_norm(x))
            assert torch.equal(weight.multiply(x, norm="layer_norm"), want)


@pytest.mark.parametrize("kind", ["uniform", "planes"])
@pytest.mark.parametrize("m", [1, 3, 9])
def test_a_chain_with_norms_keeps_its_bits(kind: str, m: int) -> None:
    """Captured, each kernel let in before the last has finished, and its norm's weights read before that."""
    weights = [Weight(kind, 3, 128, 1600, 1600, False, torch.float16) for _ in range(4)]
    gain = [torch.randn(1600, device="cuda").half() for _ in weights]

    def chain(x: Tensor) -> Tensor:
        for weight, w in zip(weights * 4, gain * 4, strict=True):
            norm = {"norm": "layer_norm", "norm_weight": w, "norm_bias": w}
            x = weight.multiply(x, **norm, activation="gelu_tanh", residual=x, constant_weight=True)
        return x

    check_captured(chain, weights[0].tokens(m))


@pytest.mark.parametrize("m", [1, 4, 20])
def test_int8_outputs(m: int) -> None:
    """Rounded once, from fp32: at most the rounding of fp16 away from what is quantised behind it."""
    for kind, bits in (("uniform", 4), ("uniform", 2), ("planes", 2)):
        weight = Weight(kind, bits, 64, 130 if m < 5 else 136, 320, False, torch.float16)
        x = weight.tokens(m)
        plain = weight.multiply(x, activation="relu")
        scale = float(plain.float().amax()) / 100
        got = weight.multiply(x, activation="relu", out_scale=scale)
        want = octofuse.quantize_per_tensor(plain, scale)
        assert got.dtype == torch.int8
        assert (got.int() - want.int()).abs().max() <= 1
        assert (got != want).float().mean() < 0.02


@pytest.mark.parametrize("group", [None, 64, 32])
def test_without_a_table_of_levels(group: int | None) -> None:
    """Where a codebook's does not fit beside long tokens, or into a smaller GPU's shared memory: the same bits."""
    device = torch.cuda.current_device()
    for n, k in ((272, 2048), (33, 1000)):
        weight = Weight("codebook", 4, group, n, k, False, torch.float16)
        for m in (1, 2, 4):
            x = weight.tokens(m)
            want = weight.multiply(x, engine="gemv_int8")
            room = (163 if group == 32 else 99) << 10  # groups of 32 take two row tiles
            before = _C.limit_shared_memory(device, room)
            try:
                got = weight.multiply(x, engine="gemv_int8")
            finally:
                _C.limit_shared_memory(device, before)
            assert torch.equal(got, want), (n, k, m)
    long = Weight("codebook", 4, 64, 48, 14336, False, torch.float16)
    x = long.tokens(4)
    alone = torch.cat([long.multiply(x[i : i + 1]) for i in range(4)])
    assert torch.equal(long.multiply(x, engine="gemv_int8"), alone)


def test_engines_by_name() -> None:
    weight = Weight("uniform", 2, 128, 256, 512, False, torch.float16)
    one, two, many = (weight.tokens(m) for m in (1, 2, 20))
    assert torch.equal(weight.multiply(one, engine="gemv_binary"), weight.multiply(one, engine="gemv_int8"))
    for x in (one, two, many):
        own = weight.multiply(x).double()
        for engine in ("gemm", "gemm_many", "dequantized"):
            assert torch.allclose(weight.multiply(x, engine=engine).double(), own, rtol=4e-3, atol=4e-3)
    with pytest.raises(ValueError, match=r"engine: expected one that can serve .* gemv_binary: it takes one token"):
        weight.multiply(two, engine="gemv_binary")
    with pytest.raises(ValueError, match="engine: expected one of 'auto', 'cpu', 'gemv_binary'"):
        weight.multiply(two, engine="marlin")


@pytest.mark.parametrize("m", [1, 7, 20, 100])
def test_epilogues(m: int) -> None:
    weight = Weight("uniform", 4, 64, 130, 320, True, torch.float16)
    x = weight.tokens(m)
    residual = torch.randn(m, 130, device="cuda").half()
    plain = weight.multiply(x).double()
    for activation, function in ((None, lambda y: y), ("relu", torch.relu), ("gelu", gelu),
                                 ("gelu_tanh", lambda y: gelu(y, approximate="tanh")),
                                 ("silu", torch.nn.functional.silu)):  # fmt: skip
        got = weight.multiply(x, activation=activation, residual=residual)
        assert torch.allclose(got.double(), function(plain) + residual.double(), rtol=2e-3, atol=2e-3), activation
    wide = torch.randn(m, 200, device="cuda").half()
    strided = weight.multiply(x, residual=wide[:, 3:133], bias=None)
    assert torch.equal(strided, weight.multiply(x, residual=wide[:, 3:133].contiguous(), bias=None))


@pytest.mark.parametrize(("kind", "bits", "zeros"), [*KINDS[2:8:2], KINDS[9], KINDS[14], *KINDS[-9:-6], *KINDS[-2:]])
@pytest.mark.parametrize("group", [None, 64, 128])
def test_int8_tokens(kind: str, bits: int, zeros: bool, group: int | None) -> None:
    """Up to 4 exact but for sums and rounding, alone or not; more as fp16 numbers."""
    for n, k in ((33, 100), (130, 1600), (4352, 256)):
        weight = Weight(kind, bits, group, n, k, zeros, torch.float16)
        wide = torch.randint(-128, 128, (20, k + 48), device="cuda", dtype=torch.int8)
        scale = torch.rand(20, device="cuda") * 0.01 + 0.001
        for x in (wide[:, :k], wide[:, 16 : 16 + k], wide[:, 3 : 3 + k]):
            want = linear(x.double() * scale.double().unsqueeze(1), weight.exact, weight.bias.double())
            alone = torch.cat([weight.multiply(x[i : i + 1], x_scale=scale[i : i + 1]) for i in range(4)])
            assert ((alone.double() - want[:4]).abs() <= 2.0**-10 * want[:4].abs() + 2.0**-10).all()
            for m in (2, 3, 4):
                assert torch.equal(weight.multiply(x[:m], x_scale=scale[:m]), alone[:m]), m
            many = weight.multiply(x, x_scale=scale)
            assert (many.double() - want).abs().max() <= 2.0**-9 * want.abs().max()


@pytest.mark.parametrize("m", [1, 8, 30])
def test_views_of_tokens(m: int) -> None:
    """Rows that start anywhere, further apart than they are long."""
    weight = Weight("uniform", 4, 128, 48, 256, False, torch.float16)
    for pitch, first in itertools.product((304, 301), (0, 1, 8)):
        view = torch.randn(m, pitch, device="cuda").half()[:, first : first + 256]
        weight.check(view)
        assert torch.equal(weight.multiply(view), weight.multiply(view.contiguous()))
    ragged = Weight("uniform", 4, 128, 48, 100, False, torch.float16)  # K that leaves no row but the first aligned
    x = ragged.tokens(m)
    ragged.check(x)
    aligned = torch.zeros(m, 104, device="cuda").half()[:, :100]
    assert torch.equal(ragged.multiply(x), ragged.multiply(aligned.copy_(x)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extreme_tokens(dtype: torch.dtype) -> None:
    weight = Weight("uniform", 4, 128, 48, 512, False, dtype)
    for factor in (1e-7, 1e-4, 100.0, 3e4) if dtype == torch.float16 else (1e-35, 1e-20, 1e10):
        x = (weight.tokens(4).float().clamp(-2, 2) * factor).to(dtype)
        want = linear(x.double(), weight.rounded.double(), None)
        got = weight.multiply(x, bias=None).double()
        limit = torch.finfo(dtype).max
        inside = want.abs() < limit
        error = (got - want)[inside].abs().max()
        assert error <= 2.0**-8 * want.abs().clamp(max=limit).max() + torch.finfo(dtype).tiny, factor
    for wrong in (float("nan"), float("inf")):
        x = weight.tokens(6)
        x[2, 300] = wrong
        got = weight.multiply(x)
        assert not torch.isfinite(got[2]).any()
        assert torch.equal(got[[0, 1, 3, 4, 5]], weight.multiply(x[[0, 1, 3, 4, 5]]))


def test_outliers_do_not_drown_what_stands_beside_them() -> None:
    weight = Weight("uniform", 4, 128, 256, 4096, False, torch.float16)
    x = weight.tokens(8)
    x[:, ::128] *= 60
    weight.check(x)


def test_in_a_graph() -> None:
    """A chain of layers, captured: what one writes the next one reads."""
    weights = [Weight("uniform", bits, 128, 512, 512, False, torch.float16) for bits in (4, 3, 8, 2)]

    def chain(y: Tensor) -> Tensor:
        for weight in weights * 3:
            y = weight.multiply(y, constant_weight=True).clamp(-4, 4) if weight.bits == 2 else weight.multiply(y) * 0.1
        return y

    check_captured(chain, weights[0].tokens(2))


def test_compiles() -> None:
    weight = Weight("uniform", 4, 128, 96, 256, False, torch.float16)
    x = weight.tokens(3)
    compiled = torch.compile(lambda y: weight.multiply(y).relu(), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), weight.multiply(x).relu())


def test_no_tokens() -> None:
    weight = Weight("uniform", 4, 128, 96, 256, False, torch.float16)
    assert weight.multiply(torch.empty(0, 256, device="cuda", dtype=torch.float16)).shape == (0, 96)
