"""Weights of 4 bits in two levels: the quantiser, the op beside the formula, layers, schemes and files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import octofuse
from helpers import DEVICES, IntegerWeight, small_gpt2
from octofuse import reference
from octofuse.nn import Norm, TwoLevelLinear, WeightOnlyLinear, joined, quantised_layer, rows_of
from octofuse.quant import WeightOnly, scheme_named
from octofuse.quant.two_level import check_levels, integers, two_level


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("k", [128, 200])
def test_the_quantiser(group: int | None, k: int) -> None:
    w = torch.randn(24, k) * torch.rand(24, 1)
    w[3] = 0
    w[4] = w[4].abs()
    w[5, 0] = 50.0
    nearest, searched = two_level(w, group), two_level(w, group, search=True)
    for found in (nearest, searched):
        check_levels(found.group_scale)
        assert found.codes.dtype == torch.uint8
        assert int(found.codes.max()) < 16
        assert torch.equal(found.integers(), integers(found.codes, found.group_scale, group))
        assert torch.equal(found.integers()[3], torch.zeros(k, dtype=torch.int8))
    lost = [(found.dequantized() - w).square().sum() for found in (nearest, searched)]
    assert lost[1] <= lost[0]
    ordinary = torch.arange(6, 24)
    spread = w[ordinary].amax() - w[ordinary].amin()
    assert (nearest.dequantized() - w)[ordinary].abs().max() < spread / 12


def test_groups_lose_less_than_a_row() -> None:
    w = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0))
    lost = [(two_level(w, group).dequantized() - w).square().mean() for group in (32, 128, None)]
    assert lost[0] < lost[1] < lost[2]


def test_levels_are_checked() -> None:
    good = torch.tensor([[16 + 256 * 8, 1, 17 * 0 + 5 + 256 * 3]], dtype=torch.int16)
    check_levels(good)
    for scale, zero in ((16, 7), (17, 8), (1, 16), (9, 0)):
        with pytest.raises(ValueError, match=f"group_scale: expected levels from -128 to 127, got scale {scale}"):
            check_levels(torch.tensor([[scale + 256 * zero]], dtype=torch.int16))


@pytest.mark.parametrize("device", DEVICES)
def test_the_op_is_the_formula(device: str) -> None:
    weight = IntegerWeight(4, 128, 40, 300, torch.float16, levels=True, device=device)
    x, x_scale = weight.tokens(9)
    residual = torch.randn(9, 40, device=device).half()
    got = weight.multiply(x, x_scale, activation="relu", residual=residual)
    acc = (x.double() @ weight.integers.double().t()).int()
    scales = (x_scale, weight.scale.float().view(-1))
    want = reference.finish(acc, *scales, weight.bias, "relu", residual, torch.float16, None)
    assert torch.equal(got, want)
    floats = torch.randn(3, 300, device=device).half()
    exact = floats.double() @ (weight.integers.double() * weight.scale.double().view(-1, 1)).t() + weight.bias.double()
    assert (weight.multiply(floats, None).double() - exact).abs().max() <= 4e-3 * exact.abs().max()


def test_bad_arguments() -> None:
    weight = IntegerWeight(4, 128, 40, 300, torch.float16, levels=True, device="cpu")
    x, x_scale = weight.tokens(2)
    op, stored = octofuse.two_level_linear, (weight.packed, weight.scale)
    with pytest.raises(ValueError, match=r"group_scale: expected a contiguous tensor of shape \[3, 40\]"):
        op(x, *stored, weight.group_scale[:2].contiguous(), x_scale=x_scale)
    with pytest.raises(TypeError, match="group_scale: expected dtype int16"):
        op(x, *stored, weight.group_scale.int(), x_scale=x_scale)
    with pytest.raises(ValueError, match=r"scale: expected a contiguous tensor of shape \[1, 40\]"):
        op(x, weight.packed, weight.scale.expand(3, 40).contiguous(), weight.group_scale, x_scale=x_scale)
    with pytest.raises(ValueError, match="x_scale: expected one for int8 x"):
        op(x, *stored, weight.group_scale)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["w4a8", "w4a8-mse", "w3a8", "w4a8-g128", "w4a8-g32-mse"])
def test_layers(name: str, device: str) -> None:
    """Quantised by the token, then multiplied exactly: as the same steps one by one."""
    plain = nn.Linear(256, 96).to(device, torch.float16).requires_grad_(False)
    scheme = scheme_named(name)
    assert scheme.name == name
    layer = quantised_layer(plain, scheme)
    assert isinstance(layer, TwoLevelLinear if "-g" in name else WeightOnlyLinear)
    x = torch.randn(2, 5, 256, device=device).half()
    q, scale = octofuse.quantize_per_token(x)
    whole = (layer.dequantized().double() / layer.scale.double().view(-1, 1)).round()
    acc = (q.double() @ whole.t()).int()
    want = reference.finish(
        acc.view(10, -1), scale, layer.scale.float().view(-1), layer.bias, None, None, x.dtype, None
    )
    assert torch.equal(layer(x).view(10, -1), want)
    error = (layer(x) - plain(x)).float().norm() / plain(x).float().norm()
    assert error < (0.35 if "w3" in name else 0.2)
    norm = Norm.of(nn.LayerNorm(256).to(device, torch.float16))
    assert torch.equal(layer.fused(x, norm=norm), layer.fused(norm(x)))
    both = torch.randn(2, 5, 512, device=device).half()
    assert torch.equal(layer.fused(both, gate="silu"), layer.fused(octofuse.gated_activation(both, "silu")))
    parts = rows_of(layer, [range(16, 40), range(7)])
    assert torch.equal(parts(x), torch.cat([layer(x)[..., 16:40], layer(x)[..., :7]], -1))
    one = joined([quantised_layer(plain, scheme), quantised_layer(plain, scheme)])
    assert torch.equal(one(x), torch.cat([layer(x)] * 2, -1))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32"])
def test_inputs_of_another_dtype(name: str, device: str) -> None:
    """Nothing passes through the scales' dtype on its way to the output's."""
    plain = nn.Linear(128, 48).to(device, torch.float16).requires_grad_(False)
    plain.weight *= 1000
    layer = quantised_layer(plain, scheme_named(name))
    x = 300 * torch.randn(4, 128, device=device)
    residual = torch.randn(4, 48, device=device) * 1e6
    y = layer.fused(x, residual=residual)
    assert y.dtype == torch.float32
    assert float(layer(x).abs().max()) > 65504
    want = x @ layer.dequantized().float().t() + layer.bias.float() + residual
    assert (y - want).abs().max() < 0.02 * want.abs().max()
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_training_sees_int8_tokens() -> None:
    model, teacher = small_gpt2(), small_gpt2()
    octofuse.models.quantize_(model, "w4a8-g32", progress=False)
    ids = [torch.randint(0, 97, (2, 16)) for _ in range(2)]
    before, after = octofuse.models.distill_(model, teacher, ids, steps=4, progress=False)
    assert 0 < after <= before
    with torch.no_grad():
        logits = [one(ids[0]).logits.log_softmax(-1) for one in (teacher, model)]
    own = torch.nn.functional.kl_div(logits[1], logits[0], log_target=True, reduction="none").sum(-1).mean()
    assert abs(float(own) - after) < 0.5 * after


def test_gradients_pass_through() -> None:
    layer = quantised_layer(nn.Linear(128, 32), scheme_named("w4a8-g32"))
    x = torch.randn(3, 128, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.dequantized().sum(0).expand(3, -1))


def test_schemes() -> None:
    assert scheme_named("w4a8") == WeightOnly(4, None, activations="int8")
    assert scheme_named("w4a8-g128") == WeightOnly(4, 128, "two_level", activations="int8")
    assert scheme_named("w4a8-gptq").needs_calibration
    for given, words in (
        ({"bits": 4, "group": 128, "activations": "int8"}, "activations: expected 'float' but for two levels"),
        ({"bits": 4, "group": None, "zero_points": True, "activations": "int8"}, "no zero points, got 'int8'"),
        ({"bits": 3, "group": 128, "code": "two_level", "activations": "int8"}, "expected 4, a group and 'int8'"),
        ({"bits": 4, "group": 128, "code": "two_level"}, "expected 4, a group and 'int8'"),
        ({"bits": 8, "group": None, "activations": "int8"}, "a grid of 2 to 7 bits"),
        ({"bits": 4, "group": 128, "activations": "int4"}, "activations: expected 'float' or 'int8', got 'int4'"),
    ):
        with pytest.raises(ValueError, match=words):
            WeightOnly(**given)
    with pytest.raises(ValueError, match="scheme: expected a name"):
        scheme_named("w4a8-g128-gptq")


@pytest.mark.parametrize("name", ["w4a8", "w4a8-g32"])
def test_models_and_files(name: str, tmp_path: Path) -> None:
    model = small_gpt2()
    octofuse.models.quantize_(model, name)
    ids = torch.randint(0, 97, (2, 9))
    want = model(ids).logits
    octofuse.save_pretrained(model, tmp_path / "own")
    again = octofuse.from_pretrained(tmp_path / "own", dtype=torch.float32)
    assert torch.equal(again(ids).logits, want)
