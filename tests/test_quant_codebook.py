"""Codebooks: their levels, the nearest code of a value, how codes are packed, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import linear

import octofuse
from octofuse.quant import codebook
from octofuse.quant.packing import pack, unpack


def test_levels_of_nf4_are_quantiles() -> None:
    """Those that the paper makes them of: 8 from 0 to 1, 7 from -1 to 0, each set evenly spaced in probability."""
    offset = 0.9677083
    right = torch.special.ndtri(torch.linspace(offset, 0.5, 9, dtype=torch.float64))
    left = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64))
    levels = torch.cat([left[:-1], right]).sort().values
    torch.testing.assert_close(
        torch.tensor(codebook.LEVELS["nf4"]).double(), levels / levels.abs().max(), rtol=0, atol=2e-7
    )


@pytest.mark.parametrize("name", ["nf4", "fp4"])
@pytest.mark.parametrize("group", [None, 32, 64])
def test_nearest(name: str, group: int | None) -> None:
    w = torch.randn(40, 200, generator=torch.Generator().manual_seed(1))
    found = codebook.encode(w, name, group)
    spread = found.scale.repeat_interleave(200 if group is None else group, 1)[:, :200]
    table = torch.tensor(codebook.LEVELS[name])
    errors = (table * spread.unsqueeze(-1) - w.unsqueeze(-1)).abs()
    own = (found.dequantized() - w).abs()
    assert torch.allclose(own, errors.amin(-1), rtol=0, atol=1e-6)
    assert torch.equal(w.abs().amax(), found.dequantized().abs().amax())  # a group's largest is a level


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("group", [None, 32])
def test_nearest_of_e4m3(group: int | None, dtype: torch.dtype) -> None:
    w = torch.randn(40, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    found = codebook.encode(w, "e4m3", group)
    assert found.codes.dtype == torch.uint8
    assert not bool((found.codes & 0x7F == 0x7F).any()), "no NaN"
    spread = found.scale.float().repeat_interleave(200 if group is None else group, 1)[:, :200]
    table = torch.tensor(codebook.levels_named("e4m3")).nan_to_num(torch.inf)
    best = (table * spread.unsqueeze(-1) - w.float().unsqueeze(-1)).abs().amin(-1)
    own = (table[found.codes.int()] * spread - w.float()).abs()
    torch.testing.assert_close(own, best, rtol=1e-5, atol=1e-7)
    assert bool((found.codes & 0x7F == 0x7E).sum(-1).ge(1).all()), "a row's largest is 448 times its scale"


def test_e4m3_is_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(16, 1)
    want = codes.view(torch.float8_e4m3fn).float() / 64
    got = codebook.dequantize(codes, torch.full((16, 1), 1 / 64), "e4m3", None)
    assert torch.equal(got.nan_to_num(), want.nan_to_num())
    real = codes[:, codes[0] & 0x7F != 0x7F]
    packed = codebook.packed(real, "e4m3")
    one_hot = torch.eye(real.shape[1])
    y = octofuse.codebook_linear(one_hot, packed, torch.full((1, 16), 1 / 64), "e4m3", group=None)
    assert torch.equal(y.t(), real.view(torch.float8_e4m3fn).float() / 64)


def test_scales_that_e4m3_cannot_have() -> None:
    big = torch.full((16, 64), 3e5)
    with pytest.raises(ValueError, match="scale: expected less than 256 beside e4m3, got 669"):
        codebook.encode(big, "e4m3", None)
    codebook.check_scales("scale", torch.tensor([-255.9, 255.9]))
    with pytest.raises(ValueError, match="scale: expected less than 256 beside e4m3, got 300"):
        codebook.check_scales("scale", torch.tensor([-300.0, 1.0]))


def test_nothing_but_zeros_and_no_numbers() -> None:
    assert torch.equal(codebook.encode(torch.zeros(2, 64), "nf4", 64).dequantized(), torch.zeros(2, 64))
    with pytest.raises(ValueError, match="weight: expected finite values, got NaN or Inf"):
        codebook.encode(torch.full((2, 64), float("nan")), "nf4", 64)


def test_packing_is_undone() -> None:
    for rows, columns in ((16, 128), (33, 100), (1, 300)):
        codes = torch.randint(0, 16, (rows, columns), generator=torch.Generator().manual_seed(rows))
        assert torch.equal(
            unpack(pack(codes, 4, codebook=True), 4, rows, columns, codebook=True), codes.to(torch.uint8)
        )
    word = pack(torch.arange(16).repeat(16, 8), 4, codebook=True)[0, 0].item()
    # Columns 0, 1, 8 and 9 of rows 0 and 8: a byte has neighbours.
    assert [word >> shift & 15 for shift in range(0, 32, 4)] == [0, 1, 8, 9, 0, 1, 8, 9]


@pytest.mark.parametrize("levels", ["nf4", "fp4", [float(i * i - 40) for i in range(16)]])
def test_any_levels(levels: Any) -> None:
    codes = torch.randint(0, 16, (24, 96), generator=torch.Generator().manual_seed(3))
    scale = torch.rand(3, 24) + 0.1
    packed = pack(codes, 4, codebook=True)
    x = torch.randn(5, 96)
    want = linear(x.double(), codebook.dequantize(codes, scale.t(), levels, 32).double())
    got = octofuse.codebook_linear(x, packed, scale, levels, group=32)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    assert octofuse.explain(octofuse.codebook_linear, x, packed, scale, levels, group=32).chosen == "cpu"
    compiled = torch.compile(
        lambda y: octofuse.codebook_linear(y, packed, scale, levels, group=32), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), got)


@pytest.mark.parametrize(
    ("levels", "error", "message"),
    [
        ("nf5", ValueError, "levels: expected 'nf4', 'fp4', 'e4m3' or 16 numbers, got 'nf5'"),
        ([1.0] * 15, ValueError, "levels: expected 16 numbers, got 15"),
        ([1.0] * 15 + [float("nan")], ValueError, "levels: expected numbers from -65504 to 65504, got nan"),
        ([1.0] * 15 + [1e6], ValueError, "levels: expected numbers from -65504 to 65504, got 1000000"),
        (torch.ones(16), TypeError, "levels: expected a name or 16 numbers, got Tensor"),
    ],
)
def test_wrong_levels(levels: Any, error: type[Exception], message: str) -> None:
    packed = pack(torch.zeros(16, 64, dtype=torch.int32), 4, codebook=True)
    with pytest.raises(error, match=message):
        octofuse.codebook_linear(torch.ones(1, 64), packed, torch.ones(1, 16), levels)
