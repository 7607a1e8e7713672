"""Quantisation to float8, bit by bit, alone and behind norms and activations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import octofuse
from helpers import DEVICES, FLOATS
from octofuse import reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def bits(t: Tensor) -> Tensor:
    return t.cpu().view(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_values_and_their_rounding(dtype: torch.dtype, device: str) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype)
    wide = octofuse.dequantize(every.view(1, -1).to(device), 1.0, out_dtype=torch.float32)[0].cpu()
    assert torch.equal(wide.nan_to_num(7e7), every.float().nan_to_num(7e7))
    g = torch.Generator().manual_seed(0)
    ties = (every.float()[1:] + every.float()[:-1]) / 2
    random = torch.randn(20000, generator=g) * 10 ** torch.empty(20000).uniform_(-6, 3, generator=g)
    ties = ties[~ties.isnan()]
    values = torch.cat([random, ties, torch.tensor([0.0, -0.0, 448.0, 464.0, 465.0, 1e30, -1e30, float("inf")])])
    largest = reference.LARGEST[dtype]
    expected = values.clamp(-largest, largest).to(dtype)
    assert torch.equal(bits(octofuse.quantize_per_tensor(values.to(device), 1.0, dtype)), bits(expected))
    assert octofuse.quantize_per_tensor(torch.tensor([float("nan")], device=device), 1.0, dtype).float().isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("shape", [(1, 8), (3, 7), (2, 5, 768), (33, 1000), (4, 4104), (2, 20000)])
def test_quantisation_is_the_reference(shape: tuple[int, ...], source: torch.dtype, device: str) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(source)
    x[..., 0] *= 1000
    x.view(-1, shape[-1])[0] = 0
    flat = x.view(-1, shape[-1]).float()
    for dtype in (E4M3, E5M2):
        q, scales = octofuse.quantize_per_token(x.to(device), dtype)
        expected = reference.token_scales(x, dtype)
        assert torch.equal(scales.cpu(), expected)
        assert torch.equal(bits(q).view(flat.shape), bits(reference.quantize(flat, expected, dtype)))
    q, scales = octofuse.quantize_per_block(x.to(device))
    expected = reference.block_scales(flat, 1)
    assert torch.equal(scales.cpu(), expected)
    codes = reference.quantize(flat, reference.expanded(expected, *flat.shape, 1), E4M3)
    assert torch.equal(bits(q).view(flat.shape), bits(codes))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("block", [False, True])
def test_norms_and_activations_quantise_in_the_same_pass(block: bool, source: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(3)
    for m, k in ((1, 768), (5, 1000), (40, 4096)):
        x, other = (torch.randn(m, k, generator=g).to(source).to(device) for _ in range(2))
        weight = torch.randn(k, generator=g).to(device)
        more: dict[str, Any] = {"dtype": E4M3, "block": block}
        parts = octofuse.quantize_per_block if block else lambda t: octofuse.quantize_per_token(t, E4M3)
        pairs = [
            (octofuse.rms_norm_quantize(x, weight, **more), octofuse.rms_norm(x, weight)),
            (octofuse.layer_norm_quantize(x, weight, **more), octofuse.layer_norm(x, weight)),
            (octofuse.add_rms_norm_quantize(x, other, weight, **more)[:2], octofuse.add_rms_norm(x, other, weight)[0]),
            (octofuse.activate_quantize(x, "gelu", **more), octofuse.activate(x, "gelu")),
            (octofuse.gated_activation_quantize(torch.cat([x, other], -1), **more),
             octofuse.gated_activation(torch.cat([x, other], -1))),
        ]  # fmt: skip
        for (q, scales), plain in pairs:
            expected, expected_scales = parts(plain)
            assert torch.equal(bits(q), bits(expected))
            assert torch.equal(scales, expected_scales)
