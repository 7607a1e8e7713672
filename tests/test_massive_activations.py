"""One channel a thousand times the others, as inputs of a Llama's down projection have it: no scheme may lose more than its
own rounding says, neither in the output nor in what the other channels contribute to it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from octofuse.nn import Int8Linear, quantised_layer
from octofuse.quant import scheme_named

SCHEMES = (
    "w8a8-dynamic", "w8a8-static", "w8a16", "w4a16-g128", "w4a16-g32-zp", "w3a16-g128", "w2a16-g64", "w1a16",
    "bcq-q3-g128", "bcq-q2-g128", "sparse12-w7", "nf4", "w8a16-fp8",
)  # fmt: skip
K, N, CHANNEL = 1024, 320, 37
TOKENS = (1, 3, 40)  # each another kernel


def weights() -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(K, N)
    with torch.no_grad():
        layer.weight[: N // 2, CHANNEL] = 0  # these outputs do not see the channel
    return layer


def fake_quantised(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the layer reads and what it multiplies by, in double precision."""
    if not isinstance(layer, Int8Linear):
        return x.double(), layer.dequantized().double()  # type: ignore[operator]
    amax = x.float().abs().amax(-1, keepdim=True)
    scale = (amax / 127) if layer.input_scale is None else layer.input_scale
    codes = (x.float() / scale).round().clamp(-127, 127)
    return codes.double() * scale.double(), layer.weight.double() * layer.weight_scale.double().view(-1, 1)


def check(scheme: str, device: str, dtype: torch.dtype) -> None:
    made = weights()
    x = torch.randn(max(TOKENS), K, generator=torch.Generator().manual_seed(1))
    x[:, CHANNEL] = 1000 * x[:, CHANNEL].sign()
    x = x.to(dtype)
    amax = torch.tensor(1000.0) if scheme == "w8a8-static" else None
    layer = quantised_layer(made.to(dtype), scheme_named(scheme), amax=amax).to(device)
    for tokens in TOKENS:
        some = x[:tokens].to(device)
        got = layer(some).double()
        seen, weight = fake_quantised(layer, some)
        want = linear(seen, weight, layer.bias.double())
        ulp = 2.0**-10 if dtype == torch.float16 else 2.0**-23
        assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).max() < 2 * ulp + 1e-5
        # Beside the massive channel an integer of 16 bits stands for an activation: 2^-15 of the largest of its 128.
        block = slice(CHANNEL // 128 * 128, CHANNEL // 128 * 128 + 128)
        rounding = 1000 * 2.0**-15 * weight[: N // 2, block].norm(dim=1)
        blind = (got - want)[:, : N // 2].abs()
        assert (blind <= 4 * rounding + 4 * ulp * want[:, : N // 2].abs() + 4 * ulp).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_cpu(scheme: str) -> None:
    check(scheme, "cpu", torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", SCHEMES)
def test_on_a_gpu(scheme: str) -> None:
    check(scheme, "cuda", torch.float16)
