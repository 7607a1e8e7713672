"""2 to 8 tokens by the gemv kernels: each has the bits that it has alone, however the work is cut."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import octofuse
from helpers import Weight, check_captured
from octofuse import _C
from octofuse.quant.packing import unpack

pytestmark = pytest.mark.gpu

# Blocks that have all K slices, and pairs that divide them; ragged slices, several units of a block, one k-block.
SHAPES = ((48, 96), (272, 104), (4112, 1352), (784, 2944), (9040, 3072), (16, 12288))
TOKENS = (3, 4, 5, 7, 8)


def one_by_one(weight: Weight, x: Tensor, **more) -> Tensor:
    residual = more.pop("residual", None)
    return torch.cat(
        [
            weight.multiply(x[i : i + 1], **more, **({} if residual is None else {"residual": residual[i : i + 1]}))
            for i in range(len(x))
        ]
    )


def check(weight: Weight, x: Tensor, **more) -> None:
    got = weight.multiply(x, engine="gemv_int8", **more)
    assert torch.equal(got.nan_to_num(7), one_by_one(weight, x, **more).nan_to_num(7)), (weight.n, weight.k, len(x))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("zeros", [False, True])
def test_bits_of_a_token_alone(bits: int, zeros: bool) -> None:
    for (n, k), dtype in itertools.product(SHAPES, (torch.float16, torch.bfloat16)):
        weight = Weight("uniform", bits, 128 if k > 128 else None, n, k, zeros, dtype)
        weight.check(weight.tokens(8), engine="gemv_int8")
        for m in TOKENS:
            check(weight, weight.tokens(m, seed=m))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [None, 32, 64, 256])
def test_groups(bits: int, group: int | None) -> None:
    for n, k in SHAPES[2:]:
        weight = Weight("uniform", bits, group, n, k, True, torch.float16)
        for m in TOKENS:
            check(weight, weight.tokens(m, seed=m))


LEVELS = {
    "one sign": tuple(0.1 + i for i in range(16)),
    "the other": tuple(-0.1 - i * i for i in range(16)),
    "in turn": tuple((-1.0) ** i * (1 + i / 7) for i in range(16)),
    "halves apart": tuple((1.0 if i < 8 else -1.0) / (1 + i) for i in range(16)),
    "one": (0.0,) * 15 + (3.0,),
    "none": (0.0,) * 16,
}


@pytest.mark.parametrize("group", [None, 32, 64, 128, 256])
def test_codebooks(group: int | None) -> None:
    """2 to 4 tokens beside nf4: bytes of levels by prmt have the bits of those from a table."""
    for (n, k), dtype in itertools.product(
        ((272, 104), (4112, 3208), (784, 5120), (9040, 3072), (16, 12288), (144, 14400), (48, 20000)),
        (torch.float16, torch.bfloat16),
    ):
        weight = Weight("codebook", 4, group, n, k, False, dtype)
        weight.check(weight.tokens(4), engine="gemv_int8")
        for m in (2, 3, 4):
            check(weight, weight.tokens(m, seed=m))
            if dtype == torch.float16 and m < 4:
                check(
                    weight,
                    weight.tokens(m, seed=m),
                    residual=torch.randn(m, n, device="cuda").half(),
                    activation="gelu",
                )


@pytest.mark.parametrize("name", LEVELS)
def test_levels(name: str) -> None:
    """Any 16 levels, by a table (one token) and by prmt."""
    weight = Weight("codebook", 4, 64, 784, 3200, False, torch.float16)
    levels = torch.tensor(LEVELS[name]).double()
    w = levels[unpack(weight.packed.cpu(), 4, 784, 3200, codebook=True).long()]
    w *= weight.scale.double().t().repeat_interleave(64, 1).cpu()
    x = weight.tokens(4)
    got = octofuse.codebook_linear(x, weight.packed, weight.scale, LEVELS[name], group=64, engine="gemv_int8")
    want = x.double().cpu() @ w.t()
    assert (got.double().cpu() - want).abs().max() <= 1e-3 * want.abs().max()
    for i in range(4):
        alone = octofuse.codebook_linear(x[i : i + 1], weight.packed, weight.scale, LEVELS[name], group=64)
        assert torch.equal(alone, got[i : i + 1]), i


def test_epilogues_and_views() -> None:
    for n, k in ((4112, 1352), (784, 2944), (784, 2941)):
        weight = Weight("uniform", 4, 128, n, k, False, torch.float16)
        wide = torch.randn(8, k + 5, device="cuda").half()
        residual = torch.randn(8, n, device="cuda").half()
        for m in (4, 7):
            for x in (wide[:m, :k], wide[:m, 5:], wide[:m, :k].contiguous()):
                check(weight, x, activation="gelu", residual=residual[:m])
            check(weight, weight.tokens(m), out_scale=0.02, activation="relu")


def test_tokens_in_int8() -> None:
    for kind, m, n, k in (("uniform", 8, 784, 2944), ("uniform", 8, 272, 104), ("codebook", 4, 784, 3208)):
        weight = Weight(kind, 4, 128 if k > 128 else None, n, k, False, torch.float16)
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8, device="cuda")
        scale = torch.rand(m, 1, device="cuda") / 100
        got = weight.multiply(x, x_scale=scale, engine="gemv_int8")
        want = torch.cat([weight.multiply(x[i : i + 1], x_scale=scale[i : i + 1]) for i in range(m)])
        assert torch.equal(got, want)


def test_what_is_not_finite_stays_in_its_row() -> None:
    weight = Weight("uniform", 4, 128, 784, 2944, False, torch.float16)
    x = weight.tokens(7)
    clean = weight.multiply(x, engine="gemv_int8")
    x[1] *= 3e4
    x[3, 5], x[5, 2000] = float("inf"), float("nan")
    check(weight, x)
    got = weight.multiply(x, engine="gemv_int8")
    assert torch.equal(got[[0, 2, 4, 6]], clean[[0, 2, 4, 6]])
    assert got[[3, 5]].isnan().all()


def test_less_shared_memory() -> None:
    """One row tile a warp in the place of two, and then nothing."""
    device = torch.cuda.current_device()
    weight = Weight("uniform", 4, 128, 784, 8192, False, torch.float16)
    x = weight.tokens(8)
    want = one_by_one(weight, x)
    for room in (170 << 10, 140 << 10):
        before = _C.limit_shared_memory(device, room)
        try:
            assert torch.equal(weight.multiply(x, engine="gemv_int8"), want)
            with pytest.raises(ValueError, match="do not fit into a block's shared memory"):
                Weight("uniform", 4, 128, 16, 32768, False, torch.float16).multiply(x.repeat(1, 4), engine="gemv_int8")
        finally:
            _C.limit_shared_memory(device, before)


@pytest.mark.parametrize("m", [4, 8])
def test_in_a_chain(m: int) -> None:
    """Captured, with norms of their own in front, and again."""
    first = Weight("uniform", 4, 128, 3072, 3072, False, torch.float16)
    second = Weight("uniform", 3, 128, 3072, 3072, False, torch.float16)

    def step(x: Tensor) -> Tensor:
        for _ in range(3):
            more = {"engine": "gemv_int8", "constant_weight": True}
            x = second.multiply(first.multiply(octofuse.rms_norm(x), **more), residual=x, **more)
        return x

    check_captured(step, first.tokens(m))
    assert torch.equal(step(first.tokens(m))[1:2], step(first.tokens(m)[1:2]))
