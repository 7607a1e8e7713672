"""Gradients with respect to the input of frozen layers, and training beside them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from helpers import DEVICES, layer_of
from octofuse.models import quantize_
from octofuse.nn import Int8Linear, WeightOnlyLinear, linear_layers, quantised_layer, replace_module
from octofuse.quant import scheme_named
from test_models_families import small

SCHEMES = ("w8a16", "w4a16-g32-zp", "w4a16-g32", "w3a16-g64-half", "bcq-q3-g32", "sparse12-w7", "nf4", "w8a16-fp8")


def gradient(layer: nn.Module, x: Tensor, dy: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    layer(x).backward(dy)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scheme", [*SCHEMES, "w4a8-g32", "w4a8"])
def test_of_weights_of_few_bits(scheme: str, device: str) -> None:
    """The product with the weight that the layer stands for."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    layer, _ = layer_of(scheme, 48, 128, dtype, device)
    x, dy = torch.randn(2, 3, 128, device=device, dtype=dtype), torch.randn(2, 3, 48, device=device, dtype=dtype)
    assert torch.equal(gradient(layer, x, dy), dy @ layer.dequantized())
    assert torch.equal(layer(x.requires_grad_()), layer(x.detach())), "the same bits with a gradient"
    assert not any(tensor.requires_grad for tensor in layer.state_dict(keep_vars=True).values())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_beside_finite_differences(scheme: str) -> None:
    layer, _ = layer_of(scheme, 24, 64, torch.float32, "cpu")
    x, dy, step = torch.randn(64), torch.randn(24), 0.25
    found = gradient(layer, x[None], dy[None])[0]
    ahead, behind = (layer(x + sign * step * torch.eye(64)) @ dy for sign in (1, -1))
    torch.testing.assert_close(found, (ahead - behind) / (2 * step), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["w8a8-dynamic", "w8a8-static", "w8a8-static-tensor"])
def test_of_int8(name: str, device: str) -> None:
    """Rounding counts as the identity: the gradient is that of the dequantised weight."""
    dtype = torch.float16 if device == "cuda" else torch.float32
    plain = nn.Linear(128, 48).to(device, dtype).requires_grad_(False)
    layer = quantised_layer(plain, scheme_named(name), amax=torch.tensor(3.0, device=device))
    assert isinstance(layer, Int8Linear)
    x, dy = torch.randn(5, 128, device=device, dtype=dtype), torch.randn(5, 48, device=device, dtype=dtype)
    want = dy.double() @ (layer.weight.double() * layer.weight_scale.double().view(-1, 1))
    error = (gradient(layer, x, dy).double() - want).norm() / want.norm()
    assert float(error) < (1e-3 if device == "cuda" else 1e-6)
    layer.activation = "relu"
    with pytest.raises(ValueError, match="x: expected a tensor that needs no gradient beside activation 'relu'"):
        layer(x.requires_grad_())


class Adapted(nn.Module):
    """A frozen layer and a product of low rank beside it."""

    def __init__(self, base: nn.Module, n: int, k: int) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(k, 4, bias=False), nn.Linear(4, n, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16-g32-zp"])
def test_adapters_learn_beside_a_quantised_model(scheme: str) -> None:
    torch.manual_seed(0)
    model = quantize_(small("llama"), scheme, progress=False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sizes = {name: tuple(m.weight.shape) for name, m in linear_layers(small("llama")).items()}
    for name, (n, k) in sizes.items():
        replace_module(model, name, Adapted(model.get_submodule(name), n, k))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 2 * len(sizes)
    optimizer = torch.optim.Adam(trained, lr=3e-2)
    tokens = torch.randint(1, 97, (4, 12))
    losses = []
    for _ in range(25):
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.92 * losses[0]
    after = {name.replace(".base.", "."): tensor for name, tensor in model.state_dict().items()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("scheme", ["w8a8-dynamic", "w4a16-g32"])
@pytest.mark.filterwarnings("ignore:Unsupported layer type", "ignore::FutureWarning:transformers.*")
def test_adapters_of_peft(scheme: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from peft.tuners.lora.layer import Linear

    torch.manual_seed(0)
    model = quantize_(small("llama"), scheme, progress=False)
    tokens = torch.randint(1, 97, (4, 12))
    before = model(tokens).logits
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    config._register_custom_module({Int8Linear: Linear, WeightOnlyLinear: Linear})
    adapted = peft.get_peft_model(model, config)
    assert torch.equal(adapted(tokens).logits, before)
    optimizer = torch.optim.Adam([p for p in adapted.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(10):
        loss = adapted(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    adapted.save_pretrained(tmp_path)
    assert not any("base_layer" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
