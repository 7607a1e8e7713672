"""SmoothQuant: the scales, the folding that changes no function, and planted outliers that break everything else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import octofuse
from helpers import ids, small_gpt2
from octofuse.cli.common import calibration_batches, evaluation_tokens, load_float
from octofuse.models import perplexity, quantize_
from octofuse.models.blocks import normed, valued
from octofuse.models.smooth import fold, scales_of
from octofuse.nn import Int8Linear, linear_layers
from octofuse.nn.linear import weight_of
from octofuse.quant import Scheme, clipped_amax, observe, scheme_named, search_alpha, smoothing_scales

CPU = torch.device("cpu")


def plant_outliers(model: nn.Module, channels: int = 6, factor: float = 60.0) -> nn.Module:
    """The same function with outlier channels behind each norm, as large models have them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for source in normed(model):
            (gain, shift), (name,) = source.tensors, source.linears
            chosen = torch.randperm(gain.numel(), generator=generator)[:channels]
            gain[chosen] *= factor
            shift[chosen] *= factor
            model.get_submodule(name).weight[chosen] /= factor
    return model


def test_the_scales_are_the_papers() -> None:
    act, w = torch.tensor([4.0, 0.0, 9.0, 1e-30]), torch.tensor([1.0, 2.0, 0.0, 1.0])
    got = smoothing_scales(act, w, 0.5)
    assert torch.allclose(got[:1], torch.tensor([2.0]))
    assert got[1:3].tolist() == [1.0, 1.0], "a dead channel stays as it is"
    assert torch.isfinite(got).all()
    assert torch.equal(smoothing_scales(act, torch.ones(4), 0.0)[:1], torch.ones(1))
    for arguments, message in (
        ((act, w, 1.5), r"alpha: expected a number in \[0, 1\], got 1.5"),
        ((act, w[:2], 0.5), r"w_amax: expected shape \[4\] like act_amax, got \[2\]"),
        ((torch.tensor([float("nan")]), torch.ones(1), 0.5), "act_amax: expected finite maxima"),
        ((torch.ones(1), torch.tensor([-1.0]), 0.5), "w_amax: expected finite maxima"),
    ):
        with pytest.raises(ValueError, match=message):
            smoothing_scales(*arguments)


def test_a_search_takes_what_loses_least() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(200, 64, generator=generator), torch.randn(48, 64, generator=generator)
    x[:, 5] *= 80
    from octofuse.quant.smooth import ALPHAS, quantisation_error

    act_amax, w_amax = x.abs().amax(0), w.abs().amax(0)
    errors = {a: quantisation_error(x, w, act_amax, smoothing_scales(act_amax, w_amax, a)) for a in ALPHAS}
    assert search_alpha(x, w, act_amax) == min(errors, key=errors.__getitem__)
    assert min(errors.values()) < 0.5 * quantisation_error(x, w, act_amax, torch.ones(64))


@pytest.mark.parametrize("alpha", [0.5, "search"])
def test_folding_keeps_the_function(alpha) -> None:
    model = plant_outliers(small_gpt2())
    want = model(ids()).logits
    sources, layers = normed(model) + valued(model), linear_layers(model)
    names = [source.linears[0] for source in sources]
    assert {name.split(".", 3)[3] for name in names} == {"attn.c_attn", "attn.c_proj", "mlp.c_fc"}
    observers = observe(layers, [ids()], model, per_channel=True, samples=8)
    fold(model, sources, [scales_of(weight_of(layers[name]), observers[name], alpha) for name in names])
    assert torch.allclose(model(ids()).logits, want, rtol=1e-4, atol=1e-5)
    after = observe(layers, [ids()], model, per_channel=True)
    for name in names:  # the planted channels, before the norms' linears, no longer stand out
        spread, before = after[name].result(), observers[name].result()
        most = 1.0 if name.endswith("c_proj") else 0.5
        assert spread.max() / spread.median() < most * before.max() / before.median()


def test_a_clipped_range_loses_less() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(300, 32, generator=generator), torch.randn(24, 32, generator=generator)
    x[0, 3] = 90.0
    w[:, 3] *= 1e-3  # an outlier that nobody reads
    amax = x.abs().amax()
    assert clipped_amax(x, w, amax) < 0.3 * amax
    w[:, 3] *= 1e5  # and one that matters
    assert clipped_amax(x, w, amax) > 0.9 * amax
    assert clipped_amax(torch.zeros(4, 32), w, torch.zeros(())) == 0


@pytest.mark.parametrize(
    ("scheme", "most"),
    [("w8a8-static-smooth", 1.02), ("w8a8-static-mse-smooth", 1.004), ("w8a8-static-smooth0.7", 1.02),
     ("w8a8-dynamic-smooth", 1.004)],
)  # fmt: skip
def test_planted_outliers(scheme: str, most: float) -> None:
    """On the embedded model they ruin what is not smoothed; smoothed, the loss is that of a model without outliers."""
    model, tokenizer = load_float("embedded", CPU)
    tokens = evaluation_tokens(tokenizer)[:4096]
    base = perplexity(model, tokens, context=256)
    assert perplexity(plant_outliers(model), tokens, context=256) == pytest.approx(base, rel=1e-5)
    batches = calibration_batches(tokenizer, model)
    quantize_(model, scheme, iter(batches), progress=False)  # read once: a generator will do
    assert perplexity(model, tokens, context=256) < most * base
    plain = plant_outliers(load_float("embedded", CPU)[0])
    quantize_(plain, scheme.partition("-smooth")[0], batches, progress=False)
    assert perplexity(plain, tokens, context=256) > 1.1 * base  # clipping alone helps, and is not enough


def test_planted_outliers_in_floating_point() -> None:
    """LLM.int8() loses what int8 weights alone lose: those beside the outliers are a 60th of others, of few levels."""
    tokenizer = load_float("embedded", CPU)[1]
    tokens = evaluation_tokens(tokenizer)[:4096]
    found = {}
    for scheme in ("llm-int8", "w8a16", "w8a8-dynamic"):
        model = plant_outliers(load_float("embedded", CPU)[0])
        base = perplexity(model, tokens, context=256)
        found[scheme] = perplexity(quantize_(model, scheme, progress=False), tokens, context=256) / base
    assert found["llm-int8"] == pytest.approx(found["w8a16"], abs=3e-3)
    assert found["w8a8-dynamic"] > 1.1 * found["llm-int8"]


def test_names_of_schemes() -> None:
    for name in (
        "w8a8-static-mse",
        "w8a8-static-mse-smooth",
        "w8a8-dynamic-smooth0.7",
        "w8a8-static-tensor-smooth-search",
        "w8a8-static-mse-smooth-values",
        "w8a8-dynamic-smooth0.7-values",
        "w8a8-static-smooth-search-values",
    ):
        assert scheme_named(name).name == name
    assert scheme_named("w8a8-static-smooth") == Scheme("channel", "tensor", 0.5)
    for arguments, message in (
        ({"clipping": "mse"}, "clipping: expected one of max beside dynamic activations, got 'mse'"),
        ({"weights": "row"}, "weights: expected one of channel, tensor, got 'row'"),
        ({"smooth_values": True}, "smooth_values: expected False without smoothing, got True"),
        ({"smoothing": 1.5}, r"smoothing: expected None, 'search' or a number in \[0, 1\], got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            Scheme(**arguments)
    assert Scheme("tensor", "tensor", "search", "mse").name == "w8a8-static-mse-tensor-smooth-search"
    for wrong in ("w8a8-static-smooth2", "w8a8-static-smoothly", "smooth", "w8a8-smooth"):
        with pytest.raises(ValueError, match="scheme: expected a name such as"):
            scheme_named(wrong)


def test_smoothed_values_change_what_reads_attention() -> None:
    plain = quantize_(small_gpt2(), "w8a8-static-smooth", [ids()], progress=False)
    values = quantize_(small_gpt2(), "w8a8-static-smooth-values", [ids()], progress=False)
    for block, other in zip(plain.transformer.h, values.transformer.h, strict=True):
        assert not torch.equal(block.attn.c_proj.weight, other.attn.c_proj.weight)
        assert torch.equal(block.mlp.c_fc.weight, other.mlp.c_fc.weight)
    assert torch.allclose(plain(ids()).logits, values(ids()).logits, atol=0.05)


def test_a_smoothed_checkpoint_comes_back(tmp_path) -> None:
    model = quantize_(small_gpt2(), "w8a8-static-smooth0.7", [ids()], progress=False)
    octofuse.save_pretrained(model, tmp_path / "q")
    again = octofuse.from_pretrained(tmp_path / "q")
    assert torch.equal(again(ids()).logits, model(ids()).logits)
    assert next(m for m in again.modules() if isinstance(m, Int8Linear)).scheme.smoothing == 0.7


def test_a_failure_leaves_the_model_whole() -> None:
    for scheme in ("w8a8-static-smooth", "w8a8-dynamic-smooth"):
        with pytest.raises(ValueError, match="calibration: expected batches for the scheme"):
            quantize_(small_gpt2(), scheme, progress=False)
    with pytest.raises(ValueError, match="smoothing folds into what stands before a linear, which is known for gpt2, "):
        quantize_(nn.Sequential(nn.Linear(4, 4)), "w8a8-static-smooth", [torch.ones(1, 4)], progress=False)
    model = small_gpt2()
    with torch.no_grad():
        model.transformer.h[1].mlp.c_proj.weight[0, 0] = float("inf")  # found after the folding
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match="weight: expected finite values"):
        quantize_(model, "w8a8-static-smooth", [ids()], progress=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(len(m._forward_pre_hooks) for m in model.modules())
