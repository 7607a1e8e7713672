"""The verb `fused` of every layer: the same arguments, the same errors, and the result of the parts one by one."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import gelu

import octofuse
from helpers import DEVICES
from octofuse.nn import FloatingLinear, Norm, fused_layer, quantised_layer
from octofuse.quant import scheme_named

SCHEMES = ("w8a8-dynamic", "w4a16-g128", "w3a16-g64-zp", "bcq-q3-g128", "sparse12-w7-g128", "nf4", "w8a16-fp8",
           "w4a8-g64", "w4a8", None)  # fmt: skip
K, N = 192, 48


def layers(scheme: str | None, device: str, dtype: torch.dtype):
    """A layer with the verb, and the float layer that it stands for: one with its own, rounded weight."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(K, N)).to(device, dtype).requires_grad_(False)
    if scheme is None:
        return FloatingLinear(model[0]), model[0]
    plain = copy.deepcopy(model[0])
    layer = quantised_layer(model[0], scheme_named(scheme))
    if scheme == "w8a8-dynamic":
        plain.weight.copy_(layer.weight * layer.weight_scale[:, None])
    else:
        plain.weight.copy_(layer.dequantized())
    return layer, plain


def norms(device: str, dtype: torch.dtype) -> list[Norm]:
    g = torch.Generator().manual_seed(1)
    weight, bias = (torch.randn(2, K, generator=g) / 4 + 1).to(device, dtype)
    return [
        Norm("layer_norm", weight, bias, 1e-5),
        Norm("layer_norm", weight, None, 1e-3),
        Norm("rms_norm", weight, None, 1e-6),
    ]


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """By the definition, in double precision."""
    x = x.double()
    if norm.kind == "layer_norm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    return y if norm.bias is None else y + norm.bias.double()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("rows", [1, 7])
def test_parts(device: str, scheme: str | None, rows: int) -> None:
    dtype = torch.float16 if device == "cuda" else torch.float32
    layer, plain = layers(scheme, device, dtype)
    x = torch.randn(2, rows, K, device=device, dtype=dtype)
    residual = torch.randn(2, rows, N, device=device, dtype=dtype)
    for norm in norms(device, dtype):
        got = layer.fused(x, norm=norm, activation="gelu_tanh", residual=residual)
        assert got.shape == residual.shape
        assert got.dtype == dtype
        product = normed(x, norm) @ plain.weight.double().T + plain.bias.double()
        want = gelu(product, approximate="tanh") + residual.double()
        # int8 activations are 127 steps of a row's largest value; the norm's kind alone would make a larger difference.
        bound = 0.03 if scheme == "w8a8-dynamic" else 0.004
        assert (got.double() - want).norm() < bound * want.norm(), (norm.kind, norm.eps)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_types(device: str, scheme: str | None) -> None:
    """A residual of another dtype does not change the output's; with out_scale it is int8."""
    layer, _ = layers(scheme, device, torch.float16)
    x, scale = torch.randn(3, K, device=device).half(), torch.tensor(0.02, device=device)
    residual = torch.randn(3, N, device=device)
    assert layer.fused(x, residual=residual).dtype == torch.float16
    assert layer.fused(x).shape == (3, N)
    q = layer.fused(x, activation="relu", out_scale=scale)
    assert q.dtype == torch.int8
    apart = octofuse.quantize_per_tensor(layer.fused(x, activation="relu"), scale)
    assert (q.int() - apart.int()).abs().max() <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_wrong_arguments(device: str, scheme: str | None) -> None:
    layer, _ = layers(scheme, device, torch.float16)
    x = torch.randn(3, K, device=device).half()
    norm = norms(device, torch.float16)[0]
    for given, error, text in (
        ({"activation": "swish"}, ValueError, "activation: expected .* got 'swish'"),
        ({"residual": x[:, : N - 1]}, ValueError, r"residual: expected .*shape"),
        ({"norm": "layer_norm"}, TypeError, "norm: expected octofuse.nn.Norm or None, got str"),
        ({"norm": nn.LayerNorm(K)}, TypeError, "norm: expected octofuse.nn.Norm or None, got LayerNorm"),
        ({"norm": norm._replace(kind="group_norm")}, ValueError, "norm: expected"),
        ({"norm": norm._replace(bias=norm.bias[1:])}, ValueError, "(norm|norm_bias|bias): expected"),
    ):
        with pytest.raises(error, match=text):
            layer.fused(x, **given)
    if scheme is not None:
        with pytest.raises(ValueError, match="expected shape"):
            layer.fused(x[:, : K - 1])


def test_norms_of_modules() -> None:
    x = torch.randn(3, K)
    for module in (
        nn.LayerNorm(K), nn.LayerNorm(K, bias=False), nn.LayerNorm(K, elementwise_affine=False, eps=1e-3),
        nn.RMSNorm(K), nn.RMSNorm(K, eps=1e-3), nn.RMSNorm(K, elementwise_affine=False),
    ):  # fmt: skip
        torch.testing.assert_close(Norm.of(module)(x), module(x).detach(), rtol=1e-5, atol=1e-6)
    for other in (nn.Linear(3, 3), nn.LayerNorm((2, K))):
        with pytest.raises(TypeError, match=r"module: expected nn\.LayerNorm or an RMSNorm"):
            Norm.of(other)


def test_layers_that_have_the_verb_stay() -> None:
    layer, _ = layers("w4a16-g128", "cpu", torch.float32)
    assert fused_layer(layer) is layer
    assert isinstance(fused_layer(nn.Linear(3, 3)), FloatingLinear)
