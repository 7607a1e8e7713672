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
from octofuse.models.descent import descend
from octofuse.models.distill import Training, kept_back, training_bytes
from octofuse.models.trained import TrainedLinear, TrainedPlanes
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


@pytest.mark.parametrize("name", ["bcq-q1-g32", "bcq-q2-g32", "bcq-q3", "bcq-q4-g64"])
@pytest.mark.parametrize(("n", "k"), [(48, 128), (33, 100)])
def test_trained_planes_start_where_they_were(name: str, n: int, k: int) -> None:
    layer, plain = layer_of(name, n, k, torch.float32, "cpu")
    trained = TrainedLinear(layer, plain.weight)
    assert isinstance(trained.codes, TrainedPlanes)
    assert torch.allclose(trained.weight(), layer.dequantized(), rtol=1e-5, atol=1e-6)
    assert torch.equal(trained.trained()["packed"], layer.packed)
    with torch.no_grad():  # far outside: all planes have the number's sign
        trained.codes.numbers.copy_(torch.where(trained.codes.numbers > 0, 1e4, -1e4))
    found = unpack(trained.trained()["packed"], layer.scheme.bits, n, k, planes=True)
    assert set(found.unique().tolist()) == {0, (1 << layer.scheme.bits) - 1}


def test_planes_become_the_nearest_sum() -> None:
    """Whatever alphas have become: of all 16, and not by one plane after the other."""
    layer, plain = layer_of("bcq-q4-g32", 6, 64, torch.float32, "cpu")
    trained = TrainedLinear(layer, plain.weight)
    assert isinstance(trained.codes, TrainedPlanes)
    with torch.no_grad():
        trained.factor.uniform_(0.5, 1.5)
        trained.codes.numbers.add_(torch.randn_like(trained.codes.numbers))
    alphas = trained.first * trained.factor
    signs = torch.tensor([[1.0 if code >> i & 1 else -1.0 for i in range(4)] for code in range(16)])
    sums = torch.einsum("cq,qng->ngc", signs, alphas).unsqueeze(-2)
    wanted = (trained.codes.numbers * trained.codes.unit).unsqueeze(-1)
    nearest = (sums - wanted).abs().min(-1).values.flatten(1)
    assert torch.allclose((trained.weight() - wanted.flatten(1)).abs(), nearest, atol=1e-6)
    trained.weight().sum().backward()
    assert trained.codes.numbers.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["w4a16-g32-zp", "w2a16-g64", "w4a8-g32", "bcq-q2-g32"])
def test_codes_learn_too(name: str, tmp_path) -> None:
    """More than scales alone do, on the text that they learnt from; what is saved is what was learnt."""
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), name, progress=False)
    scales_alone = copy.deepcopy(model)
    codes = {key: layer.packed.clone() for key, layer in packed_layers(model).items()}
    before, alone = distill_(scales_alone, teacher, [ids(4, 32)], steps=60, lr=2e-3, progress=False)
    again, after = distill_(model, teacher, [ids(4, 32)], steps=60, lr=2e-3, codes=True, progress=False)
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


@pytest.mark.parametrize("wrong", ["lr", "teacher", "interrupt", "judge"])
def test_what_does_not_help_leaves_the_model_as_it_was(wrong: str, monkeypatch) -> None:
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
    elif wrong == "judge":  # what was learnt is in the layers already
        calls = []
        divergence = Training.divergence

        def interrupted(training: Training) -> float:
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return divergence(training)

        monkeypatch.setattr(Training, "divergence", interrupted)
        with pytest.raises(KeyboardInterrupt):
            distill_(model, teacher, [ids()], steps=20, progress=False)
    else:
        model.transformer.ln_f.register_forward_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            distill_(model, teacher, [ids()], steps=3, progress=False)
        model.transformer.ln_f._forward_hooks.clear()
    assert torch.equal(model(ids()).logits, want)
    assert len(packed_layers(model)) == 8


def test_batches_kept_back_decide() -> None:
    """Of 8 and more one in eight, from everywhere, and none of them is learnt from."""
    few = [ids(1, 9 + i) for i in range(7)]
    assert kept_back(few) == (few, few)
    for count, judged in ((8, 1), (20, 2), (400, 16)):
        some = [torch.tensor([[i]]) for i in range(count)]
        learnt_from, decide = kept_back(some)
        assert len(decide) == judged
        assert sorted(int(b) for b in learnt_from + decide) == list(range(count))
        assert max(int(b) for b in decide) >= count * (judged - 1) // judged
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    seen: list[int] = []
    model.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].shape[1]) if torch.is_grad_enabled() else None
    )
    distill_(model, teacher, [ids(1, 9 + i) for i in range(8)], steps=14, progress=False)
    assert seen == [10, 11, 12, 13, 14, 15, 16] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("waits", [None, "item", "synchronize"])
def test_steps_on_a_gpu(waits: str | None) -> None:
    """As CUDA graphs, of batches of two shapes; a model that looks at a tensor's values, or waits for the device, goes on
    without."""
    teacher = small_gpt2().eval().half().cuda()
    model = quantize_(copy.deepcopy(teacher), "w2a16-g32", progress=False)
    if waits == "item":
        model.transformer.ln_f.register_forward_hook(lambda _, __, y: y if y.abs().amax().item() > 0 else -y)
    elif waits == "synchronize":
        model.transformer.ln_f.register_forward_hook(lambda *_: torch.cuda.synchronize())
    batches = [ids(4, 32).cuda(), ids(3, 20).cuda()]
    calls = []
    hook = model.transformer.h[0].register_forward_hook(lambda *_: calls.append(1) if torch.is_grad_enabled() else None)
    before, after = distill_(model, teacher, batches, steps=60, codes=True, progress=False)
    hook.remove()
    assert 0 < after < 0.8 * before
    # Of each second batch two steps, and one that is captured; of the others every one.
    assert 60 <= len(calls) <= 61 if waits else len(calls) == 33
    assert len({float(torch.rand((), device="cuda")) for _ in range(9)}) > 1  # torch's generator is as it was
    again, _ = distill_(model, teacher, batches, steps=1, lr=1e-9, progress=False)
    assert again == pytest.approx(after, rel=1e-2)


def test_a_step_moves_numbers_half_as_far_as_scales() -> None:
    """Adam's first step is as long as its rate, whatever the gradient"""
    layer, plain = layer_of("w4a16-g32", 32, 64, torch.float32, "cpu")
    trained = TrainedLinear(layer, plain.weight)
    start = trained.codes.numbers.detach().clone()
    x = torch.randn(8, 64)
    descend([trained], [x], lambda x: trained(x).sum(), steps=1, lr=0.01, description="", progress=False)
    assert (trained.factor.detach() - 1).abs().max() == pytest.approx(0.01, rel=1e-3)
    assert (trained.codes.numbers.detach() - start).abs().max() == pytest.approx(0.005, rel=1e-3)


def test_a_loss_that_is_not_finite_ends_it() -> None:
    """What was learnt before it stays."""
    layer, plain = layer_of("w2a16-g32", 32, 64, torch.float32, "cpu")
    trained = TrainedLinear(layer, plain.weight)
    x, seen = torch.randn(8, 64), []

    def loss(x: torch.Tensor) -> torch.Tensor:
        seen.append(trained.factor.detach().clone())
        return trained(x).square().sum()

    descend([trained], [x, x * torch.nan, x], loss, steps=9, lr=0.01, description="", progress=False)
    assert len(seen) == 2
    assert torch.equal(trained.factor, seen[1])
    assert not torch.equal(seen[0], seen[1])


def test_what_training_takes() -> None:
    """Levels in fp32 and the weight in fp16; with codes numbers, their gradients and two means besides."""
    teacher = small_gpt2().eval()
    model = quantize_(copy.deepcopy(teacher), "w4a16-g32", progress=False)
    binary = quantize_(copy.deepcopy(teacher), "bcq-q3-g32", progress=False)
    weights = sum(layer.in_features * layer.out_features for layer in packed_layers(model).values())
    assert training_bytes(model, codes=False) == 6 * weights
    assert training_bytes(model, codes=True) == 22 * weights
    assert training_bytes(binary, codes=False) == 14 * weights
    assert training_bytes(binary, codes=True) == 30 * weights


@pytest.mark.parametrize(("name", "rate"), [("w2a16-g32", 2e-3), ("w4a16-g32", 5e-4), ("bcq-q2-g32", 6e-3)])
def test_rates(name: str, rate: float) -> None:
    """By the number of bits, up to twice as long where steps are few; scales alone have one of their own."""
    layer, plain = layer_of(name, 32, 64, torch.float32, "cpu")
    trained = TrainedLinear(layer, plain.weight)
    assert [trained.rate(steps) for steps in (100_000, 2000, 500, 1)] == pytest.approx([rate, rate, 2 * rate, 2 * rate])
    assert TrainedLinear(layer).rate(1) == TrainedLinear(layer).rate(2000) == 2e-3


def other_gpt2(**settings: int) -> nn.Module:
    config = copy.deepcopy(small_gpt2().config)
    for name, value in settings.items():
        setattr(config, name, value)
    return type(small_gpt2())(config).eval()


def test_refusals() -> None:
    teacher = small_gpt2().eval()
    packed = quantize_(copy.deepcopy(teacher), "w4a16-g32", progress=False)
    binary = quantize_(copy.deepcopy(teacher), "bcq-q5-g32", progress=False)
    mixed = quantize_(copy.deepcopy(teacher), "w4a16-g32", exceptions={"c_fc": "w8a8-dynamic"}, progress=False)
    for message, arguments, more in (
        ("model: expected packed layers and no other quantised ones, got none", (teacher, teacher, [ids()]), {}),
        ("model: expected packed layers .* got Int8Linear", (mixed, teacher, [ids()]), {}),
        ("teacher: expected the float model", (packed, packed, [ids()]), {}),
        ("batches: expected at least one, got none", (packed, teacher, []), {}),
        ("batches: expected tensors, got list", (packed, teacher, [[1, 2]]), {}),
        (r"batches: expected int64 \[B, T\] .* got torch.float32 \[2, 9\]", (packed, teacher, [ids().float()]), {}),
        (r"batches: expected .* on cpu, got torch.int64 \[2, 9\] on meta", (packed, teacher, [ids().to("meta")]), {}),
        (r"batches: expected int64 \[B, T\] .* got torch.int64 \[9\]", (packed, teacher, [ids()[0]]), {}),
        (r"batches: expected int64 .* got torch.int64 \[0, 9\]", (packed, teacher, [ids()[:0]]), {}),
        ("batches: expected tokens from 0 to 96, got .* to 1000", (packed, teacher, [ids(), ids() * 0 + 1000]), {}),
        ("batches: expected tokens from 0 to 96, got -1 to", (packed, teacher, [ids() * 0 - 1]), {}),
        ("steps: expected at least 1, got 0", (packed, teacher, [ids()]), {"steps": 0}),
        ("steps: expected at least 1, got 2.5", (packed, teacher, [ids()]), {"steps": 2.5}),
        ("lr: expected None or a finite number above 0, got nan", (packed, teacher, [ids()]), {"lr": float("nan")}),
        ("lr: expected None or a finite number above 0, got -1", (packed, teacher, [ids()]), {"lr": -1}),
        (
            "teacher: expected the model's device, cpu, got meta",
            (packed, copy.deepcopy(teacher).to("meta"), [ids()]),
            {},
        ),
        ("teacher: expected the model's vocabulary, 97, got 20", (packed, other_gpt2(vocab_size=20), [ids()]), {}),
        (
            "teacher: expected transformer.h.1.attn.c_attn with a weight of .* got none",
            (packed, other_gpt2(n_layer=1), [ids()]),
            {"codes": True},
        ),
        ("codes: expected a layer with a uniform grid .* got bcq-q5-g32", (binary, teacher, [ids()]), {"codes": True}),
    ):
        with pytest.raises(ValueError, match=message):
            distill_(*arguments, progress=False, **more)
