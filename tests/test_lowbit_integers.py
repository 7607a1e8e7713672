"""int8 tokens beside weights that are integers: every engine, width and tile gives the int8 linear's bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import octofuse
from helpers import IntegerWeight, check_captured
from octofuse import _C
from octofuse.ops._calls import LowbitCall

KINDS = [("uniform", bits, None) for bits in range(2, 9)]
KINDS += [("two_level", 4, group) for group in (None, 32, 64, 128, 256)]
ENGINES = ("auto", "gemv_int8", "gemm", "gemm_many", "dequantized")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def weight_of(
    kind: str, bits: int, group: int | None, n: int, k: int, dtype: torch.dtype, device: str
) -> IntegerWeight:
    return IntegerWeight(bits, group, n, k, dtype, levels=kind == "two_level", device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "bits", "group"), KINDS)
def test_the_bits_of_the_int8_linear(kind: str, bits: int, group: int | None, device: str) -> None:
    for n, k in ((48, 128), (40, 100), (8, 300), (136, 1600)):
        weight = weight_of(kind, bits, group, n, k, torch.float16, device)
        for m in (0, 1, 3, 6, 70):
            x, x_scale = weight.tokens(m)
            want = weight.by_int8(x, x_scale)
            assert want.dtype == torch.float16
            assert torch.equal(weight.multiply(x, x_scale), want), (n, k, m)
            assert torch.equal(weight.multiply(x.view(1, m, k), 0.25), weight.by_int8(x, 0.25).unsqueeze(0))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "bits", "group"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_engine(kind: str, bits: int, group: int | None, dtype: torch.dtype) -> None:
    for n, k in ((48, 128), (40, 100), (1, 300), (136, 1600), (16, 4097), (3216, 256)):
        if n == 1 and group is not None and group < k:
            continue  # their rows of scales could not be copied
        weight = weight_of(kind, bits, group, n, k, dtype, "cuda")
        for m in (1, 2, 3, 4, 5, 16, 33, 64, 65, 200, 300):
            x, x_scale = weight.tokens(m)
            want = weight.by_int8(x, x_scale)
            for engine in ENGINES[: 1 if m > 200 else None]:
                if engine != "gemv_int8" or m <= 4:
                    assert torch.equal(weight.multiply(x, x_scale, engine=engine), want), (n, k, m, engine)


def tiles() -> dict[tuple[str, ...], tuple[int, int, int]]:
    """Of every kernel that "auto" takes for some shape of 4 bits: the smallest M, N and K found for it."""
    found: dict[tuple[str, ...], tuple[int, int, int]] = {}
    sizes = (64, 192, 768, 1536, 3072, 4096, 4608, 6144, 9216, 12288, 20480, 28672, 34048)
    tokens = (5, 12, 24, 40, 64, 100, 128, 200, 256, 384, 512, 800, 2048)
    shapes = itertools.product(tokens, sizes, (256, 1152, 4096, 12288))
    for m, n, k in sorted(shapes, key=lambda shape: shape[0] * shape[1] + shape[1] * shape[2]):
        given = ("two_level", 4, m, n, k, 128, False, "auto", 90, 132, 232448, True)
        chosen = _C.lowbit_select(*given)
        shared = ["shared"] if chosen.get("shares") else []
        found.setdefault((chosen["chosen"], *map(str, chosen.get("tile", ())), *shared), (m, n, k))
    return found


BUILT = str(_C.build_info()["architectures"]).split(",")
needs_90a = pytest.mark.skipif("90a" not in BUILT, reason="needs a build for 90a")
TILES = tiles() if "90a" in BUILT else {}


@needs_90a
def test_every_tile_is_chosen_somewhere() -> None:
    assert len(TILES) >= 28, TILES.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES, ids="-".join)
@pytest.mark.parametrize("kind", ["uniform", "two_level"])
def test_epilogues_of_every_tile(tile: tuple[str, ...], kind: str) -> None:
    m, n, k = TILES[tile]
    group = 128 if kind == "two_level" else None
    weight = weight_of(kind, 4, group, n, k, torch.bfloat16, "cuda")
    residual = torch.randn(m + 3, n + 16, device="cuda").bfloat16()[:, 3 : 3 + n]
    engine = tile[0]
    for tokens in (m, m + 3, max(1, m - 3)):
        x, x_scale = weight.tokens(tokens)
        assert torch.equal(weight.multiply(x, x_scale, engine=engine), weight.by_int8(x, x_scale))
        added = residual[:tokens]
        for activation, bias in itertools.product((None, "relu", "silu"), (None, weight.bias)):
            more = {"activation": activation, "bias": bias, "residual": added}
            assert torch.equal(weight.multiply(x, x_scale, engine=engine, **more), weight.by_int8(x, x_scale, **more))
        more = {"activation": "gelu_tanh", "out_scale": 0.1}
        assert torch.equal(weight.multiply(x, x_scale, engine=engine, **more), weight.by_int8(x, x_scale, **more))
        gated = weight.multiply(x, x_scale, engine=engine, activation="silu", gated=True)
        assert torch.equal(gated, octofuse.gated_activation(weight.by_int8(x, x_scale), "silu"))
    if kind == "uniform":  # any N
        odd = weight_of(kind, 4, None, n - 5, k, torch.float16, "cuda")
        x, x_scale = odd.tokens(m)
        assert torch.equal(odd.multiply(x, x_scale, engine=engine), odd.by_int8(x, x_scale))


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "tokens"), [(640, 6144, 160), (1568, 3584, 224), (1792, 3584, 256)])
def test_blocks_that_exchange_sums_for_several_tiles(m: int, n: int, tokens: int) -> None:
    k = 8192
    chosen = _C.lowbit_select("two_level", 4, m, n, k, 128, False, "gemm_many", 90, 132, 232448, True)
    assert chosen["tile"] == (tokens, 128, 2)
    assert m // tokens * (n // 128) > 2 * 66
    weight = weight_of("two_level", 4, 128, n, k, torch.float16, "cuda")
    x, x_scale = weight.tokens(m)
    want = weight.by_int8(x, x_scale)
    for _ in range(20):
        assert torch.equal(weight.multiply(x, x_scale, engine="gemm_many"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "two_level"])
@pytest.mark.parametrize("k", [2048, 2176, 4096])  # an odd number of k-blocks too
def test_few_tokens_whose_tiles_blocks_share(kind: str, k: int) -> None:
    """Each with a part of K that another cluster has begun."""
    group = 128 if kind == "two_level" else 0
    found = {}
    for m, n in itertools.product((12, 24, 40, 64), range(18432, 61440, 1024)):
        chosen = _C.lowbit_select(kind, 4, m, n, k, group, False, "gemm_many", 90, 132, 232448, True)
        if chosen["shares"]:
            found.setdefault(tuple(chosen["tile"]), (m, n))
    few = {(32, 256, 1)}
    if kind == "two_level" and k == 4096:
        few |= {(32, 128, 1), (64, 128, 1), (64, 256, 1)}
    assert few <= set(found), "they are shared no longer"
    for m, n in found.values():
        weight = weight_of(kind, 4, group or None, n, k, torch.float16, "cuda")
        x, x_scale = weight.tokens(m)
        want = weight.by_int8(x, x_scale)
        for _ in range(5):
            assert torch.equal(weight.multiply(x, x_scale, engine="gemm_many"), want)


def shares(kind: str, m: int, n: int, k: int, bits: int = 4) -> bool:
    group = 128 if kind == "two_level" else 0
    return bool(_C.lowbit_select(kind, bits, m, n, k, group, False, "gemm", 90, 132, 232448, True)["shares"])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "two_level"])
@pytest.mark.parametrize(("n", "k"), [(17024, 1152), (28672, 768), (33792, 384), (17040, 4224), (18848, 4096)])
def test_few_tokens_whose_k_blocks_all_blocks_share(kind: str, n: int, k: int) -> None:
    """gemm_stream.cuh's, with cuts within tiles and between them, a ragged last tile, more k-blocks than a ring has."""
    weight = weight_of(kind, 4, 128 if kind == "two_level" else None, n, k, torch.float16, "cuda")
    for m in (5, 9, 16):
        assert shares(kind, m, n, k), "they have tiles of their own"
        x, x_scale = weight.tokens(m)
        want = weight.by_int8(x, x_scale)
        for constant in (False, True):
            more = {"engine": "gemm", "constant_weight": constant}
            got = check_captured(lambda x, s=x_scale, more=more: weight.multiply(x, s, **more), x)
            assert torch.equal(got, want), m


@needs_90a
def test_where_blocks_share_k_blocks() -> None:
    assert not shares("uniform", 16, 16896, 4096)
    assert not shares("uniform", 17, 28672, 4096)
    assert not shares("uniform", 16, 28672, 4096, bits=3), "4 bits have such kernels, and two levels"


@pytest.mark.gpu
def test_gates_of_few_tokens() -> None:
    for kind, group in (("uniform", None), ("two_level", 128), ("two_level", 32)):
        weight = weight_of(kind, 4, group, 256, 512, torch.float16, "cuda")
        for m in (1, 4):
            x, x_scale = weight.tokens(m)
            gated = weight.multiply(x, x_scale, activation="gelu", gated=True)
            assert torch.equal(gated, octofuse.gated_activation(weight.by_int8(x, x_scale), "gelu"))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2, 4, 7, 8])
def test_the_largest_sums(bits: int) -> None:
    """K at its limit, everything at -128 or 127, or at the ends of the codes."""
    k = 131071
    weight = weight_of("uniform", bits, None, 32, k, torch.float16, "cuda")
    for code in (0, (1 << bits) - 1):
        weight.codes.fill_(code)
        weight.packed = octofuse.quant.packing.pack(weight.codes, bits)
        weight.integers.fill_(code - (1 << bits - 1))
        for value, m in itertools.product((-128, 127), (1, 8, 150)):
            x = torch.full((m, k), value, dtype=torch.int8, device="cuda")
            want = weight.by_int8(x, 1e-5)
            for engine in ("auto", "gemm", "gemm_many", "dequantized"):
                assert torch.equal(weight.multiply(x, 1e-5, engine=engine), want)


@pytest.mark.gpu
@pytest.mark.parametrize("constant_weight", [True, False])
@pytest.mark.parametrize("m", [1, 24, 300])
def test_in_a_chain(m: int, constant_weight: bool) -> None:
    """Captured, each kernel let in before the last has finished; what one writes the next one reads."""
    weights = [weight_of("two_level", 4, 128, 1536, 1536, torch.float16, "cuda") for _ in range(2)]
    weights.append(weight_of("uniform", 4, None, 1536, 1536, torch.float16, "cuda"))
    for weight in weights:
        weight.scale *= 0.08  # so that values stay as large as they are

    def chain(x: Tensor) -> Tensor:
        for weight in weights * 3:
            q, scale = octofuse.quantize_per_token(x)
            x = weight.multiply(q, scale, constant_weight=constant_weight)
        return x

    check_captured(chain, torch.randn(m, 1536, device="cuda", dtype=torch.float16))


@pytest.mark.gpu
def test_tokens_anywhere() -> None:
    """Rows that lie apart, and that start anywhere."""
    weight = weight_of("two_level", 4, 128, 208, 800, torch.float16, "cuda")
    for m, offset in itertools.product((1, 3, 40, 300), (0, 1, 16)):
        numbers = torch.randint(-128, 128, (m, 1000), dtype=torch.int8, device="cuda")[:, offset : offset + 800]
        assert torch.equal(weight.multiply(numbers, 0.01), weight.by_int8(numbers.contiguous(), 0.01))


@pytest.mark.gpu
@pytest.mark.parametrize("group", [None, 32, 128])
def test_the_weight_by_a_kernel(group: int | None) -> None:
    """In floating point, as the engine "dequantized" and gradients take it."""
    for dtype, (n, k) in itertools.product((torch.float16, torch.bfloat16), ((48, 128), (33, 300))):
        weight = weight_of("two_level", 4, group, n, k, dtype, "cuda")
        got = _C.lowbit_dequantize(
            weight.packed, weight.scale, None, None, "two_level", 4, group, None, weight.group_scale, k
        )
        assert torch.equal(got, (weight.integers.float() * weight.scale.float().view(-1, 1)).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_an_integer(device: str) -> None:
    """Uniform codes with one scale a row and their middle as its zero, of 2 bits and more; without a zero those of 8."""
    packed = torch.zeros(16, 8 * 4, dtype=torch.int32, device=device)
    for bits, zero, group, dtype in itertools.product(
        range(1, 9), (None, 0, 1, 2, 4, 7, 8, 64, 128), (None, 64, 128, 200), (torch.int8, torch.float16)
    ):
        if zero is not None and zero >= 1 << bits:
            continue
        x = torch.ones(1, 128, dtype=dtype, device=device)
        scale = torch.ones(2 if group == 64 else 1, 16, dtype=torch.float16, device=device)
        call = LowbitCall(
            x, 1.0 if dtype == torch.int8 else None, packed[:, : bits * 4].contiguous(), scale, None, None, "uniform", bits,
            group, None, None, None, 0.0, None, None, None, None, "auto", False, False, zero,
        )  # fmt: skip
        middle = {2: (2,), 3: (4,), 4: (8,), 7: (64,), 8: (128, None)}.get(bits, ())
        want = dtype == torch.int8 and group != 64 and zero in middle
        assert _C.lowbit_explain(call)["is_integer"] == want, (bits, zero, group, dtype)


def test_a_cpu_has_products_of_integers() -> None:
    weight = weight_of("two_level", 4, 64, 100, 300, torch.float16, "cpu")
    x, x_scale = weight.tokens(7)
    for dtype in (torch.float16, torch.float32):
        weight.scale = weight.scale.to(dtype)
        residual = torch.randn(7, 100)
        more = {"engine": "cpu", "activation": "relu", "residual": residual}
        want = weight.by_int8(x, x_scale, activation="relu", residual=residual)
        assert torch.equal(weight.multiply(x, x_scale, **more), want)
        assert torch.equal(weight.multiply(x, 0.5, engine="cpu", out_scale=3.0), weight.by_int8(x, 0.5, out_scale=3.0))
    with pytest.raises(ValueError, match="it takes int8 x beside two levels"):
        weight.multiply(x.float(), None, engine="cpu")


@needs_90a
def test_selection() -> None:
    """One token goes to the gemv kernel, others to the tile with the least time; older GPUs make the weight int8."""
    given = ("two_level", 4, 1, 4096, 4096, 128, False, "auto")
    assert _C.lowbit_select(*given, 90, 132, 232448, True)["chosen"] == "gemv_int8"
    assert (
        _C.lowbit_select("uniform", 2, 1, 4096, 4096, 0, False, "auto", 90, 132, 232448, True)["chosen"] == "gemv_int8"
    )
    for m, sm90 in ((8, "gemm"), (2048, "gemm_many")):
        given = ("two_level", 4, m, 4096, 4096, 128, False, "auto")
        assert _C.lowbit_select(*given, 90, 132, 232448, True)["chosen"] == sm90
        assert _C.lowbit_select(*given, 89, 128, 101376, True)["chosen"] == "dequantized"
    for n, k in ((1, 1), (64, 131071), (1 << 20, 128)):
        found = _C.lowbit_select("uniform", 4, 77, n, k, 0, False, "auto", 90, 132, 232448, True)
        assert found["chosen"] in ("gemm", "gemm_many")
        assert min(found["tile"]) > 0
