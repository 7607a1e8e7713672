"""Quantisation against its formula, on both devices."""

from __future__ import annotations

import pytest
import torch

import octofuse
from helpers import DEVICES, FLOATS
from octofuse import reference

SHAPES = [(1, 1), (3, 7), (5, 100), (17, 768), (64, 1001), (2, 3, 255), (129, 3420), (4, 8192), (1, 131072)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_per_token(device: str, shape, dtype, generator: torch.Generator) -> None:
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    want_q, want_scale = reference.quantize_per_token(x)
    q, scale = octofuse.quantize_per_token(x.to(device))
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(q.cpu(), want_q)
    assert q.shape == x.shape
    assert scale.shape == (x.numel() // shape[-1], 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("number", [False, True])
def test_per_tensor(device: str, shape, dtype, number: bool, generator: torch.Generator) -> None:
    x = (torch.randn(shape, generator=generator) * 3).to(dtype)
    scale = torch.tensor(0.0173)
    got = octofuse.quantize_per_tensor(x.to(device), 0.0173 if number else scale.to(device))
    assert torch.equal(got.cpu(), reference.quantize(x, scale))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", FLOATS)
@pytest.mark.parametrize("q_dtype", [torch.int8, torch.int32])
@pytest.mark.parametrize("per_row", [False, True])
def test_dequantize(device: str, out_dtype, q_dtype, per_row: bool, generator: torch.Generator) -> None:
    high = 128 if q_dtype == torch.int8 else 2**31 - 1
    q = torch.randint(-high, high, (37, 101), dtype=q_dtype, generator=generator)
    scale = torch.rand(37, 1, generator=generator) * 1e-6 if per_row else torch.tensor(3e-6)
    got = octofuse.dequantize(q.to(device), scale.to(device), out_dtype=out_dtype)
    assert torch.equal(got.cpu(), (q.float() * scale).to(out_dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_zero_rows_are_exact_and_finite(device: str, dtype) -> None:
    x = torch.zeros(4, 50, dtype=dtype, device=device)
    x[2, 3] = 1.5
    q, scale = octofuse.quantize_per_token(x)
    assert torch.isfinite(scale).all()
    back = octofuse.dequantize(q, scale, out_dtype=dtype)
    assert (back[[0, 1, 3]] == 0).all()
    assert back[2, 3] == 1.5
    w = torch.ones(8, 50, dtype=torch.int8, device=device)
    y = octofuse.i8f16_linear(q, w, scale, 1.0)
    assert (y[[0, 1, 3]] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_nan_and_inf_stay_in_their_row(device: str, bad: float, dtype, generator: torch.Generator) -> None:
    x = torch.randn(40, 96, generator=generator).to(dtype).to(device)
    clean_q, clean_scale = octofuse.quantize_per_token(x)
    x[17, 5] = bad
    q, scale = octofuse.quantize_per_token(x)
    others = [row for row in range(40) if row != 17]
    assert torch.equal(q[others], clean_q[others])
    assert torch.equal(scale[others], clean_scale[others])
    assert not torch.isfinite(scale[17])
    w = torch.randint(-128, 128, (24, 96), dtype=torch.int8, generator=generator).to(device)
    y = octofuse.i8f16_linear(q, w, scale, 0.001)
    assert torch.isnan(y[17]).all()
    assert torch.equal(y[others], octofuse.i8f16_linear(clean_q, w, clean_scale, 0.001)[others])


@pytest.mark.parametrize("device", DEVICES)
def test_per_tensor_saturates_and_zeroes_nan(device: str) -> None:
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.5, 1.5, -0.5], device=device)
    assert octofuse.quantize_per_tensor(x, 1.0).tolist() == [0, 127, -127, 127, -127, 0, 2, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_tiny_and_huge_scales(device: str) -> None:
    x = torch.tensor([[1e-44, 0.0, -1e-44], [3e38, -3e38, 1e37], [1.2e-38, 0, 6e-39]], device=device)
    q, scale = octofuse.quantize_per_token(x)
    want_q, want_scale = reference.quantize_per_token(x.cpu())
    assert torch.equal(q.cpu(), want_q)
    assert torch.equal(scale.cpu(), want_scale)


@pytest.mark.parametrize("device", DEVICES)
def test_views(device: str, generator: torch.Generator) -> None:
    base = torch.randn(40, 130, generator=generator).to(device)
    x = base[::2, 3:103]
    q, scale = octofuse.quantize_per_token(x)
    want_q, want_scale = reference.quantize_per_token(x.cpu())
    assert torch.equal(q.cpu(), want_q)
    assert torch.equal(scale.cpu(), want_scale)
    assert torch.equal(octofuse.quantize_per_tensor(x, 0.1).cpu(), reference.quantize(x.cpu(), 0.1))
    with pytest.raises(ValueError, match="x: expected a dense last dimension"):
        octofuse.quantize_per_token(base.t())


@pytest.mark.parametrize("device", DEVICES)
def test_no_rows(device: str) -> None:
    q, scale = octofuse.quantize_per_token(torch.zeros(0, 8, device=device))
    assert q.shape == (0, 8)
    assert scale.shape == (0, 1)
    assert octofuse.quantize_per_tensor(torch.zeros(3, 0, 8, device=device), 1.0).shape == (3, 0, 8)


@pytest.mark.gpu
def test_reciprocal_is_correctly_rounded() -> None:
    """An inverse that is off by one ulp moves values across rounding boundaries: compare with the CPU."""
    scales = torch.rand(4096, 1) * torch.logspace(-30, 30, 4096).unsqueeze(1)
    x = torch.randn(4096, 64) * scales * 127
    q, got = octofuse.quantize_per_token(x.cuda())
    want_q, want = reference.quantize_per_token(x)
    assert torch.equal(got.cpu(), want)
    assert torch.equal(q.cpu(), want_q)
