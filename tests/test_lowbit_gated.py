"""Gates and values as one low-bit product: the bits of `gated_activation` behind the linear, whatever takes the call."""

from __future__ import annotations

import pytest
import torch

import octofuse
from helpers import DEVICES, Weight
from octofuse import _C

KINDS = [("uniform", bits) for bits in range(1, 9)] + [("planes", bits) for bits in (1, 2, 3, 4, 6)]
KINDS += [("sparse12", 7), ("codebook", 4), ("float8", 8)]
# One unit of row tiles; a half that is no row tile; more units than an H200 has SMs, and fewer; long rows.
SHAPES = ((32, 128), (48, 256), (4544, 256), (1600, 640), (64, 12288))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "bits"), KINDS)
@pytest.mark.parametrize("group", [None, 32, 64, 128])
def test_bits_of_two_ops(kind: str, bits: int, group: int | None, device: str) -> None:
    for i, (n, k) in enumerate(SHAPES if device == "cuda" else SHAPES[:2]):
        dtype = (torch.float16, torch.bfloat16)[i % 2]
        weight = Weight(kind, bits, group, n, k, kind == "uniform" and i % 2 == 0, dtype, device)
        gain = torch.rand(k, device=device).to(dtype)
        for m, activation in ((1, "silu"), (2, "gelu_tanh"), (3, "relu"), (4, "gelu"), (6, "silu")):
            x = weight.tokens(m)
            want = octofuse.gated_activation(weight.multiply(x), activation)
            got = weight.multiply(x, activation=activation, gated=True)
            assert got.shape == (m, n // 2)
            assert torch.equal(got, want), (n, k, m)
            quantized, scale = octofuse.gated_activation_quantize(weight.multiply(x), activation, scale=0.05)
            assert torch.equal(weight.multiply(x, activation=activation, gated=True, out_scale=scale), quantized)
            with_norm = {"norm": "rms_norm", "norm_weight": gain, "bias": None}
            want = octofuse.gated_activation(weight.multiply(x, **with_norm), activation)
            assert torch.equal(weight.multiply(x, activation=activation, gated=True, **with_norm), want)


@pytest.mark.parametrize("device", DEVICES)
def test_int8_tokens_and_engines(device: str) -> None:
    weight = Weight("uniform", 4, 128, 320, 256, False, torch.float16, device)
    for m in (1, 4, 9):
        q, scales = octofuse.quantize_per_token(weight.tokens(m))
        want = octofuse.gated_activation(weight.multiply(q, x_scale=scales), "silu")
        assert torch.equal(weight.multiply(q, x_scale=scales, activation="silu", gated=True), want)
        x = weight.tokens(m)
        want = octofuse.gated_activation(weight.multiply(x, engine="dequantized"), "silu")
        assert torch.equal(weight.multiply(x, engine="dequantized", activation="silu", gated=True), want)


@pytest.mark.gpu
def test_less_shared_memory() -> None:
    """Where two row tiles do not fit, or only with shorter rings: the same bits (compute capability 8.6 and 8.0)."""
    device = torch.cuda.current_device()
    for kind, bits, k in (
        ("uniform", 4, 8192),
        ("uniform", 8, 14336),
        ("planes", 3, 4096),
        ("uniform", 2, 28672),
        ("codebook", 4, 4096),
        ("float8", 8, 4096),
    ):
        weight = Weight(kind, bits, 128, 320, k, False, torch.float16)
        for m in (1, 4):
            x = weight.tokens(m)
            for room in (163 << 10, 99 << 10):
                before = _C.limit_shared_memory(device, room)
                try:
                    got = weight.multiply(x, activation="silu", gated=True)
                    parts = octofuse.gated_activation(weight.multiply(x), "silu")
                finally:
                    _C.limit_shared_memory(device, before)
                assert torch.equal(got, parts), (kind, bits, k, m, room)


@pytest.mark.parametrize("device", DEVICES)
def test_refusals(device: str) -> None:
    weight = Weight("uniform", 4, None, 32, 128, False, torch.float16, device)
    odd = Weight("uniform", 4, None, 33, 128, False, torch.float16, device)
    x = weight.tokens(1)
    with pytest.raises(ValueError, match="activation: expected one beside gated, got None"):
        weight.multiply(x, gated=True)
    with pytest.raises(ValueError, match="residual: expected None beside gated"):
        weight.multiply(x, gated=True, activation="silu", residual=x[:, :16])
    with pytest.raises(ValueError, match="gated: expected False for an odd N"):
        odd.multiply(x, gated=True, activation="silu")
    with pytest.raises(TypeError, match="gated: expected bool"):
        weight.multiply(x, gated=1, activation="silu")


@pytest.mark.parametrize("device", DEVICES)
def test_compiles(device: str) -> None:
    weight = Weight("uniform", 4, 128, 64, 256, False, torch.float16, device)
    x = weight.tokens(2)
    compiled = torch.compile(
        lambda t: weight.multiply(t, activation="silu", gated=True), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(x), weight.multiply(x, activation="silu", gated=True))
