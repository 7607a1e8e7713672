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
        ("nf5", ValueError, "levels: expected 'nf4', 'fp4' or 16 numbers, got 'nf5'"),
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
