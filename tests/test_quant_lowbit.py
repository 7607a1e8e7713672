"""Weights of 1 to 8 bits: packing, grids, GPTQ and binary codes, against what they say of themselves."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from octofuse.quant import WeightOnly, awq_scales, gptq, scheme_named
from octofuse.quant.bcq import Coded, bcq, from_grid
from octofuse.quant.grid import Quantised, middle, quantize_rows
from octofuse.quant.packing import pack, pack_pairs, packed_rows, packed_words, unpack, unpack_pairs
from octofuse.quant.sparse import sparse12

WIDTHS = range(1, 9)


def weight(rows: int = 24, columns: int = 200, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * (torch.rand(columns, generator=g) + 0.1)


def error(found: Quantised | Coded, w: Tensor) -> float:
    return float((found.dequantized().float() - w).square().sum())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("planes", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (16, 128), (17, 129), (5, 1600)])
def test_packing_is_exact(bits: int, planes: bool, shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = pack(codes, bits, planes=planes)
    assert packed.shape == (packed_rows(shape[0]), packed_words(bits, shape[1]))
    assert packed.dtype == torch.int32
    assert packed.numel() * 32 == -(-shape[0] // 16) * 16 * -(-shape[1] // 128) * 128 * bits
    assert torch.equal(unpack(packed, bits, *shape, planes=planes), codes)


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (16, 128), (17, 129), (5, 300)])
def test_packing_of_pairs_is_exact(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 256, (shape[0], -(-shape[1] // 2)), generator=torch.Generator().manual_seed(0))
    packed = pack_pairs(codes)
    assert packed.shape == (packed_rows(shape[0]), packed_words(4, shape[1]))
    assert torch.equal(unpack_pairs(packed, *shape).long(), codes)


def word(packed: Tensor, tile: int, words_of_tile: int, at: int) -> int:
    return int(packed.flatten()[tile * words_of_tile + at]) & 0xFFFFFFFF


@pytest.mark.parametrize("planes", [False, True])
def test_packing_lies_as_it_says(planes: bool) -> None:
    """Code by code, from the description alone: 20 x 200 codes of 7 bits, 4 + 2 + 1 or 7 planes."""
    rows, columns, bits = 20, 200, 7
    codes = torch.randint(0, 128, (rows, columns), generator=torch.Generator().manual_seed(1))
    packed = pack(codes, bits, planes=planes)
    for n, k in itertools.product(range(0, rows, 3), range(0, columns, 7)):
        tile = n // 16 * 2 + k // 128
        step, t, byte = k % 128 // 32, k % 8 // 2, k % 2 * 2 + k % 16 // 8
        lane, half, row = n % 8 * 4 + t, k % 32 // 16, n % 16 // 8
        registers = {4: step * 4 + half * 2 + row, 2: row * 8 + half * 4 + step, 1: row * 8 + step * 2 + half}
        code = first = low = 0
        for width in (1,) * 7 if planes else (4, 2, 1):
            register = registers[width]
            of_lane = register // (8 // width)
            side_by_side = 2 if width == 1 else 4
            at = first + of_lane // side_by_side * 32 * side_by_side + lane * side_by_side + of_lane % side_by_side
            bit = register % (8 // width) * width + byte * 8
            code |= (word(packed, tile, bits * 64, at) >> bit & (1 << width) - 1) << low
            first, low = first + 64 * width, low + width
        assert code == codes[n, k], (n, k)


def test_pairs_lie_as_they_say() -> None:
    codes = torch.randint(0, 256, (20, 100), generator=torch.Generator().manual_seed(1))  # 200 columns
    packed = pack_pairs(codes)
    for n, pair in itertools.product(range(0, 20, 3), range(0, 100, 7)):
        k = pair * 2
        tile = n // 16 * 2 + k // 128
        step, t, byte = k % 128 // 32, k % 8 // 2, k % 32 // 8
        lane, of_lane = n % 8 * 4 + t, step * 2 + n % 16 // 8
        at = of_lane // 4 * 128 + lane * 4 + of_lane % 4
        assert word(packed, tile, 256, at) >> (byte * 8) & 255 == codes[n, pair]


def test_packing_refuses() -> None:
    with pytest.raises(ValueError, match="codes: expected 0 to 7, got 0 to 8"):
        pack(torch.tensor([[0, 8]]), 3)
    with pytest.raises(ValueError, match="codes: expected 0 to 7, got -1"):
        pack(torch.tensor([[-1, 2]]), 3)
    with pytest.raises(ValueError, match="codes: expected integers"):
        pack(torch.zeros(2, 2), 3)
    with pytest.raises(ValueError, match="bits: expected 1 to 8, got 9"):
        pack(torch.zeros(2, 2, dtype=torch.int32), 9)
    with pytest.raises(ValueError, match=r"packed: expected int32 of shape \[16, 16\] for 2 x 100 codes of 4 bits"):
        unpack(torch.zeros(2, 16, dtype=torch.int32), 4, 2, 100)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_grids_round_to_the_nearest_level(bits: int, group: int | None, zero_points: bool, dtype: torch.dtype) -> None:
    if zero_points and bits == 1:
        return
    w = weight().to(dtype)
    found = quantize_rows(w, bits, group, zero_points=zero_points)
    width = group or w.shape[1]
    assert found.scale.shape == (24, -(-200 // width))
    assert found.scale.dtype == dtype
    spread = found.scale.double().repeat_interleave(width, 1)[:, :200]
    zero = torch.full_like(spread, middle(bits))
    if found.zero is not None:
        zero = found.zero.double().repeat_interleave(width, 1)[:, :200]
    levels = (torch.arange(1 << bits).double() - zero.unsqueeze(-1)) * spread.unsqueeze(-1)
    if bits == 8 and not zero_points:
        levels = levels[..., 1:]  # int8 from -127 on
    nearest = (levels - w.double().unsqueeze(-1)).abs().amin(-1)
    exact = (found.codes.double() - zero) * spread
    assert ((exact - w.double()).abs() <= nearest + 1e-5 * spread).all()
    assert torch.equal(found.dequantized(), exact.to(dtype)) or dtype == torch.float16
    if bits > 1:  # nothing of the range is cut off, but for the rounding of the scale
        assert ((exact - w.double()).abs() <= spread * 0.51 + 1e-3 * w.abs().max()).all()


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_search_for_a_range_never_loses(bits: int) -> None:
    w = weight(columns=300)
    w[:, 7] *= 8
    plain, found = (quantize_rows(w, bits, 128, search=search) for search in (False, True))
    assert error(found, w) <= error(plain, w)
    if 2 <= bits <= 4:
        assert error(found, w) < 0.9 * error(plain, w)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("search", [False, True])
def test_one_integer_zero(bits: int, search: bool) -> None:
    """Every value at its nearest level, -zero to 2^bits - 1 - zero steps; a search never loses more."""
    w = torch.randn(20, 192, generator=torch.Generator().manual_seed(bits))
    zero = 1 << bits - 1
    found = quantize_rows(w, bits, 64, zero=zero, search=search)
    assert found.zero == zero
    steps = w / found.scale.repeat_interleave(64, 1)
    want = steps.round().clamp(-zero, (1 << bits) - 1 - zero)
    assert torch.equal(found.codes.float() - zero, want)
    assert torch.equal(found.dequantized(), want * found.scale.repeat_interleave(64, 1))
    plain = quantize_rows(w, bits, 64, zero=zero)
    assert (found.dequantized() - w).norm() <= (plain.dequantized() - w).norm()


def test_grids_take_zeros_and_refuse_nan() -> None:
    w = weight()
    w[3] = 0
    for bits, zero_points in itertools.product((2, 4, 8), (False, True)):
        found = quantize_rows(w, bits, 32, zero_points=zero_points, search=True)
        assert torch.isfinite(found.dequantized()).all()
        if zero_points or bits == 8:
            assert (found.dequantized()[3] == 0).all()
    w[0, 0] = float("nan")
    for call in (lambda: quantize_rows(w, 4, None), lambda: bcq(w, 2, None), lambda: gptq(w, torch.eye(200), 4, None)):
        with pytest.raises(ValueError, match="weight: expected finite values, got NaN or Inf"):
            call()


@pytest.mark.parametrize("group", [None, 32, 64, 256])
@pytest.mark.parametrize("zero_points", [False, True])
def test_gptq_loses_less_in_the_output(group: int | None, zero_points: bool) -> None:
    g = torch.Generator().manual_seed(3)
    w = weight(40, 300)
    x = torch.randn(600, 300, generator=g) @ torch.randn(300, 300, generator=g) / 17 + torch.randn(600, 1, generator=g)
    for bits in (2, 3, 4):
        nearest = quantize_rows(w, bits, group, zero_points=zero_points, search=True)
        found = gptq(w, x.t() @ x, bits, group, zero_points=zero_points)
        assert found.scale.shape == nearest.scale.shape
        assert (found.zero is None) == (nearest.zero is None)
        losses = [float(((one.dequantized() - w) @ x.t()).square().sum()) for one in (nearest, found)]
        assert losses[1] < 0.7 * losses[0], (bits, losses)


def test_gptq_without_samples_rounds() -> None:
    """Moments that say nothing of how columns go together leave nothing to make up for."""
    w = weight()
    plain = quantize_rows(w, 4, 64, search=True)
    for moments in (torch.eye(200), torch.zeros(200, 200)):
        assert torch.equal(gptq(w, moments, 4, 64).codes, plain.codes)
    with pytest.raises(ValueError, match=r"moments: expected finite \[200, 200\], got shape \[3, 3\]"):
        gptq(w, torch.eye(3), 4, None)


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("zero_points", [False, True])
def test_awq_looks_after_large_channels(group: int | None, zero_points: bool) -> None:
    g = torch.Generator().manual_seed(5)
    w, x = torch.randn(48, 256, generator=g), torch.randn(300, 256, generator=g)

    def loss(x: Tensor, scales: Tensor) -> float:
        found = quantize_rows(w * scales, 3, group, zero_points=zero_points, search=True)
        return float((x @ (found.dequantized() / scales - w).t()).square().mean())

    ones = torch.ones(256)
    assert loss(x, awq_scales(x, w, 3, group, zero_points=zero_points)) <= loss(x, ones)
    x[:, ::32] *= 30
    scales = awq_scales(x, w, 3, group, zero_points=zero_points)
    assert loss(x, scales) <= loss(x, ones)
    if group == 32:  # in longer groups the others lose about as much as these gain
        assert loss(x, scales) < 0.8 * loss(x, ones)
        assert scales[::32].min() > scales.median()
    with pytest.raises(ValueError, match=r"x: expected finite \[M, 256\], got shape \[3, 255\]"):
        awq_scales(x[:3, 1:], w, 3, group)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [None, 32, 128])
def test_binary_codes(bits: int, group: int | None) -> None:
    w = weight(6, 150)
    found = bcq(w, bits, group)
    assert found.bits == bits
    assert found.alpha.shape == (6, 1 if group is None else -(-150 // group), bits)
    width = group or 150
    alpha = found.alpha.double().repeat_interleave(width, 1)[:, :150]
    signs = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=bits)), dtype=torch.float64)
    nearest = (alpha @ signs.t() - w.double().unsqueeze(-1)).abs().amin(-1)
    of_code = (found.codes.unsqueeze(-1) >> torch.arange(bits) & 1).double() * 2 - 1
    exact = (alpha * of_code).sum(-1)
    assert ((exact - w).abs() <= nearest + 1e-6).all(), "every code is the nearest"
    assert torch.allclose(found.dequantized().double(), exact, atol=1e-6)
    again = bcq(w, bits, group)
    assert torch.equal(again.codes, found.codes)
    assert torch.equal(again.alpha, found.alpha)
    assert error(found, w) <= error(quantize_rows(w, bits, group, search=True), w) * (1 + 1e-6)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("zero_points", [False, True])
def test_uniform_grids_are_binary_codes(bits: int, zero_points: bool) -> None:
    if zero_points and bits == 1:
        return
    found = quantize_rows(weight(), bits, 64, zero_points=zero_points)
    coded = from_grid(found)
    assert (coded.offset is None) == (not zero_points and bits < 8)
    rounding = float(found.scale.max()) * 2**bits * (bits + 1) * 2.0**-24  # of a sum of so many terms
    assert torch.allclose(coded.dequantized(), found.dequantized(), rtol=0, atol=rounding)


@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize("columns", [1, 99, 200])
def test_one_of_two_columns(group: int | None, columns: int) -> None:
    w = weight(9, columns)
    w[0, : columns // 2] = 0
    found = sparse12(w, group)
    kept = found.mask
    assert kept.shape == w.shape
    assert found.codes.shape == (9, -(-columns // 2))
    for first in range(0, columns - 1, 2):
        pair = w[:, first : first + 2].abs()
        assert torch.equal(kept[:, first + 1], pair[:, 1] > pair[:, 0])
        assert torch.equal(kept[:, first], ~kept[:, first + 1])
    values = found.dequantized()
    assert (values[~kept] == 0).all()
    spread = found.scale.repeat_interleave(group or columns, 1)[:, :columns]
    assert ((values - w).abs() <= 0.501 * spread)[kept].all()
    assert torch.equal(unpack_pairs(pack_pairs(found.codes), 9, columns), found.codes)


@pytest.mark.parametrize(
    "name",
    [
        "w8a16",
        "w4a16-g128",
        "w3a16-g64-gptq",
        "w4a16-g128-zp-awq",
        "w5a16-g32-zp-mse",
        "w2a16-zp",
        "w4a16-g128-half",
        "w8a16-gptq",
        "bcq-q3-g128",
        "bcq-q1",
        "sparse12-w7",
        "sparse12-w7-g32",
        "nf4",
        "nf4-g128",
        "fp4",
        "w8a16-fp8",
        "w8a16-fp8-g128",
    ],
)
def test_names(name: str) -> None:
    scheme = scheme_named(name)
    assert isinstance(scheme, WeightOnly)
    assert scheme.name == name
    assert scheme.needs_calibration == name.endswith(("gptq", "awq"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("w4a16-g100", "group: expected None or one of 32, 64, 128, 256, got 100"),
        ("w1a16-zp", "zero_points: expected False at 1 bit"),
        ("w1a16-half", "half_zero: expected False at 1 bits, got True"),
        ("w8a16-half", "half_zero: expected False at 8 bits, got True"),
        ("w9a16", "scheme: expected a name such as"),
        ("bcq-q0", "scheme: expected a name such as"),
        ("sparse12-w6", "scheme: expected a name such as"),
        ("nf4-g100", "group: expected None or one of 32, 64, 128, 256, got 100"),
        ("w8a16-fp8-g100", "group: expected None or one of 32, 64, 128, 256, got 100"),
        ("w4a16-fp8", "scheme: expected a name such as"),
        ("w8a16-fp8-gptq", "scheme: expected a name such as"),
        ("w4a16-awk", "scheme: expected a name such as"),
    ],
)
def test_wrong_names(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scheme_named(name)
    with pytest.raises(ValueError, match=r"code: expected 'grid' with zero_points, .*, got 'bcq'"):
        WeightOnly(3, 64, "bcq", method="mse")
    with pytest.raises(ValueError, match=r"bits: expected 1 to 8, got 4\.0"):
        WeightOnly(4.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scheme: expected a name, Scheme or WeightOnly, got int"):
        scheme_named(8)  # type: ignore[arg-type]
