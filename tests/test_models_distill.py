"""distill_: scales that learn from the float model, and models that stay as they were where nothing is to be learnt."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import octofuse
from helpers import ids, layer_of, small_gpt2
from octofuse.generate import own_text
from octofuse.models import distill_, quantize_, weight_bytes
from octofuse.models.distill import TrainedLinear
from octofuse.nn import PackedLinear
from octofuse.quant.packing import unpack


def packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


@pytest.mark.parametrize(
    "name", ["w4a16", "w3a16-g32", "w2a16-g64-zp", "w1a16-g32", "bcq-q3-g32", "sparse12-w7-g64", "nf4", "w8a16-fp8"]
)
@pytest.mark.parametrize(("n", "k"), [(48, 128), (33, 100)])
def test_a_trained_layer_starts_as_what_it_replaces(name: str, n: int, k: int) -> None:
    layer, _ = layer_of(name, n, k, torch.float32, "cpu")
    trained = TrainedLinear(layer)
    x = torch.randn(5, k)
    assert torch.allclose(trained(x), layer(x), rtol=1e-5, atol=1e-5)
    for key, value in trained.trained().items():
        assert torch.equal(value, getattr(layer, key))


@pytest.mark.parametrize("name", ["w3a16-g32", "w2a16-g64-zp", "bcq-q2-g32", "sparse12-w7-g64"])
def test_divergence_falls_and_codes_stay(name: str, tmp_path) -> None:
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), name, progress=False)
    model.lm_head.weight.requires_grad_(False)
    flags = {key: p.requires_grad for key, p in model.named_parameters()}
    codes = {key: layer.packed.clone() for key, layer in packed_layers(model).items()}
    size = weight_bytes(model)
    before, after = distill_(model, teacher, [ids(4, 32)], steps=30, progress=False)
    assert 0 < after < 0.95 * before
    assert {key: p.requires_grad for key, p in model.named_parameters()} == flags
    assert all(torch.equal(layer.packed, codes[key]) for key, layer in packed_layers(model).items())
    assert weight_bytes(model) == size
    again, _ = distill_(model, teacher, [ids(4, 32)], steps=1, lr=1e-9, progress=False)
    assert again == pytest.approx(after, rel=1e-4)
    octofuse.save_pretrained(model, tmp_path / "q")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "q")(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("name", ["w4a16-g32", "w3a16-g32-zp", "w2a16", "w8a16-g64", "w4a8", "w4a8-g32"])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (33, 100)])
def test_trained_codes_start_where_they_were(name: str, n: int, k: int) -> None:
    layer, plain = layer_of(name, n, k, torch.float32, "cpu")
    trained = TrainedLinear(layer, plain.weight)
    assert trained.codes is not None
    x = torch.randn(5, k)
    assert torch.allclose(trained(x), layer(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(trained.trained()["packed"], layer.packed)
    with torch.no_grad():  # far outside: the grid's ends
        trained.codes.numbers.copy_(torch.where(trained.codes.numbers > 1, 1e4, -1e4))
    found = unpack(trained.trained()["packed"], layer.scheme.bits, n, k)
    assert set(found.unique().tolist()) == {0, (1 << layer.scheme.bits) - 1}


@pytest.mark.parametrize("name", ["w4a16-g32-zp", "w2a16-g64", "w4a8-g32"])
def test_codes_learn_too(name: str, tmp_path) -> None:
    """More than scales alone do, on the text that they learnt from; what is saved is what was learnt."""
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), name, progress=False)
    scales_alone = copy.deepcopy(model)
    codes = {key: layer.packed.clone() for key, layer in packed_layers(model).items()}
    before, alone = distill_(scales_alone, teacher, [ids(4, 32)], steps=60, progress=False)
    again, after = distill_(model, teacher, [ids(4, 32)], steps=60, codes=True, progress=False)
    assert again == before
    assert after < 0.9 * alone
    assert any(not torch.equal(layer.packed, codes[key]) for key, layer in packed_layers(model).items())
    octofuse.save_pretrained(model, tmp_path / "q")
    assert torch.equal(octofuse.from_pretrained(tmp_path / "q")(ids()).logits, model(ids()).logits)


def test_own_text() -> None:
    teacher = small_gpt2().eval()
    given = [ids(3, 20), ids(2, 20)]
    found = own_text(teacher, given, 2, seed=4)
    assert [batch.shape for batch in found] == [(3, 20), (3, 20)]
    source = torch.cat([batch.flatten() for batch in given]).tolist()
    pieces = {tuple(source[i : i + 8]) for i in range(len(source) - 8)}
    assert all(tuple(row[:8]) in pieces for batch in found for row in batch.tolist())
    assert all(torch.equal(a, b) for a, b in zip(found, own_text(teacher, given, 2, seed=4), strict=True))
    assert not torch.equal(found[0], own_text(teacher, given, 1, seed=5)[0])
    with pytest.raises(
        ValueError, match=r"batches, count: expected \[B, T\] with T > 8 and at least 1, got \[1, 8\] and 1"
    ):
        own_text(teacher, [ids(1, 8)], 1)


@pytest.mark.parametrize("wrong", ["lr", "teacher", "interrupt"])
def test_what_does_not_help_leaves_the_model_as_it_was(wrong: str) -> None:
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w4a16-g32", progress=False)
    want = model(ids()).logits
    if wrong == "lr":  # scales leap, and the model gets worse
        before, after = distill_(model, teacher, [ids()], steps=3, lr=30.0, progress=False)
        assert before == after
    elif wrong == "teacher":
        with torch.no_grad():
            teacher.transformer.ln_f.weight.fill_(float("nan"))
        distill_(model, teacher, [ids()], steps=3, progress=False)
    else:
        model.transformer.ln_f.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            distill_(model, teacher, [ids()], steps=3, progress=False)
        model.transformer.ln_f._forward_hooks.clear()
    assert torch.equal(model(ids()).logits, want)
    assert len(packed_layers(model)) == 8


def test_refusals() -> None:
    teacher = small_gpt2().eval()
    packed = quantize_(copy.deepcopy(teacher), "w4a16-g32", progress=False)
    binary = quantize_(copy.deepcopy(teacher), "bcq-q2-g32", progress=False)
    mixed = quantize_(copy.deepcopy(teacher), "w4a16-g32", exceptions={"c_fc": "w8a8-dynamic"}, progress=False)
    for message, arguments, more in (
        ("model: expected packed layers and no other quantised ones, got none", (teacher, teacher, [ids()]), {}),
        ("model: expected packed layers .* got Int8Linear", (mixed, teacher, [ids()]), {}),
        ("teacher: expected the float model", (packed, packed, [ids()]), {}),
        ("batches: expected at least one, got none", (packed, teacher, []), {}),
        ("steps, lr: expected at least 1", (packed, teacher, [ids()]), {"steps": 0}),
        ("codes: expected a layer with a uniform grid .* got bcq-q2-g32", (binary, teacher, [ids()]), {"codes": True}),
    ):
        with pytest.raises(ValueError, match=message):
            distill_(*arguments, progress=False, **more)
